"""`attn-only-lens compare`: a model and one grown from it, and a report of what differs."""

import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from attn_only_lens import viz
from attn_only_lens.cli.common import (
    METRICS,
    MODEL,
    app,
    clear_errors,
    given_prompts,
    metric_of,
    source_model,
)
from attn_only_lens.cli.convert import tokens_in
from attn_only_lens.comparison import Comparison
from attn_only_lens.comparison import compare as compare_models
from attn_only_lens.errors import AttnOnlyLensError, ComparisonError
from attn_only_lens.growth import read_provenance
from attn_only_lens.tl import require_hooked_transformer

__all__ = ["compare"]

_NUMBERS = re.compile(r"\d+(,\d+)*")
_PROMPTS = "a .safetensors file with `tokens`, or a text file: a prompt a line, or 3,4,113"


@app.command()
def compare(
    model: Annotated[str, typer.Argument(help=MODEL)],
    grown: Annotated[Path, typer.Argument(help="a folder that `grow` wrote, trained since or not")],
    tokens: Annotated[Path, typer.Option(help=_PROMPTS)],
    out: Annotated[Path, typer.Option(help="folder to write tables and pages to")],
    corrupted: Annotated[
        Path | None, typer.Option(help="what each prompt is held against; default: the next one")
    ] = None,
    null: Annotated[
        Path | None, typer.Option(help="the same growth, trained with another seed")
    ] = None,
    metric: Annotated[str, typer.Option(help=", ".join(METRICS))] = "loss",
    answer: Annotated[str | None, typer.Option(help="the right answer, one token")] = None,
    wrong: Annotated[str | None, typer.Option(help="the wrong one, for logit_diff")] = None,
    faithfulness: Annotated[float, typer.Option(help="that both circuits must have")] = 0.9,
    batch_size: Annotated[int, typer.Option(help="prompts in one forward pass, at most")] = 32,
    patched: Annotated[int, typer.Option(help="how many components to patch")] = 200,
    nodes: Annotated[int, typer.Option(help="nodes to draw edges between")] = 100,
    seed: Annotated[int, typer.Option(help="of the bootstrap")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16")] = "float32",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, mps; default: cuda where there is one")
    ] = None,
) -> None:
    """Compare a model with one grown from it: tables, report.html and circuit.html in a folder."""
    with clear_errors():
        require_hooked_transformer()
        if out.exists() and not out.is_dir():
            raise AttnOnlyLensError(f"--out: {out} is a file; expected a folder, or a new name")
        prompts = _prompts(tokens, "--tokens")
        against = None if corrupted is None else _prompts(corrupted, "--corrupted")
        numbers = isinstance(prompts, torch.Tensor)
        measure = metric_of(metric, answer, wrong, numbers)
        provenance = read_provenance(grown)
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        folders = [model, str(grown)] + ([] if null is None else [str(null)])
        models = [source_model(each, dtype, where) for each in folders]
        try:
            found = compare_models(
                *(models[0], models[1], prompts, measure),
                provenance=provenance,
                corrupted=against,
                null=models[2] if null is not None else None,
                batch_size=batch_size,
                faithfulness=faithfulness,
                n_patched=patched,
                n_nodes=nodes,
                seed=seed,
            )
        except ComparisonError as error:
            if error.so_far is not None:
                error.so_far.save(out)
            raise
        found.save(out)
        viz.write_html(viz.comparison_report(found), out / "report.html")
        viz.write_html(viz.comparison_circuit(found), out / "circuit.html")
        _show(found)
        typer.echo(f"report:  {out / 'report.html'}\ncircuit: {out / 'circuit.html'}")


def _prompts(path: Path, option: str) -> Any:
    if path.suffix == ".safetensors":
        return tokens_in(path)
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise AttnOnlyLensError(f"{option}: {path} cannot be read: {error}") from error
    if not lines:
        raise AttnOnlyLensError(f"{option}: {path} has no prompts; expected one a line")
    return given_prompts(lines, option, all(map(_NUMBERS.fullmatch, lines)))


def _show(found: Comparison) -> None:
    whole = [name for name in found.circuits if not str(name).endswith(("_low", "_high"))]
    for title, frame in (  # intervals, and more, are in the files
        ("By layer: means over components", found.summary()),
        ("Circuits at equal faithfulness", found.circuits[whole]),
    ):
        table = Table(title=title)
        for heading in frame.columns:
            table.add_column(str(heading).removesuffix("_correlation"), justify="right")
        for row in frame.to_numpy(dtype=object):
            table.add_row(
                *(format(each, ".3g") if isinstance(each, float) else str(each) for each in row)
            )
        Console().print(table)
