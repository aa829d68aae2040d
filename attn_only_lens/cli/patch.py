"""`attn-only-lens patch`: activation patching over heads and neuron-heads."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from attn_only_lens import patching as p
from attn_only_lens.cli.common import (
    METRICS,
    MODEL,
    app,
    clear_errors,
    given_prompts,
    metric_of,
    numbers,
    patchable,
    require_writable,
)
from attn_only_lens.errors import AttnOnlyLensError
from attn_only_lens.patching.processes import is_first
from attn_only_lens.patching.results import Sweep

__all__ = ["patch"]

_SELECTIONS = {"neurons": p.neuron_heads, "heads": p.heads, "all": p.all_heads}


@app.command()
def patch(
    model: Annotated[str, typer.Argument(help=f"{MODEL}; or a folder that `convert` wrote")],
    clean: Annotated[list[str], typer.Option(help="a prompt; give it again for more")],
    corrupted: Annotated[list[str], typer.Option(help="its pair, token for token")],
    out: Annotated[Path, typer.Option(help="a .parquet or .csv file to write")],
    answer: Annotated[str | None, typer.Option(help="the right answer, one token")] = None,
    wrong: Annotated[str | None, typer.Option(help="the wrong one, for logit_diff")] = None,
    metric: Annotated[str, typer.Option(help=", ".join(METRICS))] = "logit_diff",
    tokens: Annotated[
        bool, typer.Option("--tokens", help="prompts and answers are token numbers: 3,4,113")
    ] = False,
    sites: Annotated[str, typer.Option(help="neurons, heads, all, or names: L5H3,L5N1234")] = "all",
    layers: Annotated[str | None, typer.Option(help="source layers: 8,9,10; default: all")] = None,
    part: Annotated[str, typer.Option(help="z, pattern, value, q")] = "z",
    positions: Annotated[str, typer.Option(help="each, all, or numbers: 3,4,-1")] = "each",
    direction: Annotated[
        str, typer.Option(help="denoise, noise; or an ablation: zero, mean, resample, bias")
    ] = "denoise",
    resume: Annotated[
        Path | None, typer.Option(help="a folder to write to meanwhile, and to go on from")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="sites in one forward pass; default: what memory allows")
    ] = None,
    top: Annotated[int, typer.Option(help="rows to print")] = 20,
    dtype: Annotated[
        str, typer.Option(help="of a model that is not saved by `convert`")
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, mps")] = "cpu",
) -> None:
    """Patch every site in turn between two runs; print the largest effects, write all."""
    with clear_errors():
        require_writable(out, (".parquet", ".csv"), top)
        chosen, measure = _sites(sites, layers), metric_of(metric, answer, wrong, tokens)
        where = positions if positions in ("each", "all") else numbers(positions, "--positions")
        sweep = p.activation_patch(
            patchable(model, dtype, device),
            given_prompts(clean, "--clean", tokens),
            given_prompts(corrupted, "--corrupted", tokens),
            measure,
            sites=chosen,
            part=part,  # type: ignore[arg-type]  # checked there
            positions=where,  # type: ignore[arg-type]
            direction=direction,
            resume=resume,
            batch_size=batch_size,
        )
        if is_first():
            sweep.save(out)
            _show(sweep, top)
            typer.echo(f"{out}: {len(sweep.frame)} rows")


def _sites(sites: str, layers: str | None) -> Any:
    if sites in _SELECTIONS:
        return _SELECTIONS[sites](None if layers is None else numbers(layers, "--layers"))
    if layers is not None:
        raise AttnOnlyLensError("got --layers beside names in --sites, which say their layers")
    return sites.split(",")


def _show(sweep: Sweep, top: int) -> None:
    table = Table(
        title=f"{sweep.metric}: {sweep.clean_value:.4g} clean, {sweep.corrupted_value:.4g} "
        f"corrupted; {sweep.part}, {sweep.direction}"
    )
    for heading in ("name", "position", "value", "score"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for row in sweep.top(top).to_dict("records"):
        table.add_row(
            row["name"], str(row["position"]), f"{row['value']:.4g}", f"{row['score']:.4f}"
        )
    Console().print(table)
