"""`attn-only-lens compare`: compare a model with a model grown from it."""

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_only_lens.arguments import COUNT, DEVICE, RESAMPLES
from attn_only_lens.cli.common import (
    MODEL,
    OUTPUT,
    PROBLEM,
    PROMPTS,
    command,
    option,
    output_folder,
    print_frame,
    say_page,
)
from attn_only_lens.cli.convert import read_tokens
from attn_only_lens.cli.options import (
    Chat,
    Dtype,
    Faithfulness,
    MetricOptions,
    Model,
    as_chat,
    load_model,
    parse_prompts,
)
from attn_only_lens.errors import AttnOnlyLensError, ComparisonError, InputError
from attn_only_lens.models.names import model_reasons

if TYPE_CHECKING:
    from attn_only_lens.growth import Comparison

_NUMBERS = re.compile(r"\d+(,\d+)*")
_MEANINGS = (
    "drop: how much the metric falls with outputs on the corrupted prompt. divergence: how much "
    "attention patterns changed, from 0 to 1 bit. norm_ratio: length of the outputs in the grown "
    "model, divided by their length in the original. silent: neurons without output in both "
    "models, which are left out. rank: rank correlation of shares. null: a model that grew in the "
    "same way and was trained with another seed (--null)."
)
_PROMPT_FILE = "a .safetensors file with `tokens`, or a text file: one prompt or 3,4,113 per line"


@command(
    "Make models, and compare",
    "attn-only-lens compare gpt2 grown/ --clean prompts.txt --metric loss --out report/",
    "attn-only-lens compare gpt2 trained/ --provenance grown/ --clean prompts.txt "
    "--metric loss --out report/",
    "attn-only-lens compare gpt2 grown/ --null grown_seed_1/ --clean clean.txt "
    '--corrupted corrupted.txt --answer " are" --wrong " is" --out report/',
    renamed={"n_nodes": "nodes", "n_patched": "patched"},
)
def compare(
    model: Model,
    grown: Annotated[
        Path, typer.Argument(help="a model that `grow` wrote, perhaps trained afterwards")
    ],
    clean: Annotated[Path, option(_PROMPT_FILE, PROMPTS)],
    metric: MetricOptions,
    out: Annotated[Path, option("output folder for tables and pages", OUTPUT), output_folder],
    corrupted: Annotated[
        Path | None,
        option("a file with a corrupted prompt for each prompt; default: the next text", PROMPTS),
    ] = None,
    chat: Chat = False,
    provenance: Annotated[
        Path | None,
        option("the folder that `grow` wrote, if GROWN was trained and saved elsewhere", MODEL),
    ] = None,
    null: Annotated[
        Path | None,
        option("a model that grew in the same way and was trained with another seed", MODEL),
    ] = None,
    faithfulness: Faithfulness = 0.9,
    batch_size: Annotated[int, option("maximum number of prompts in one forward pass")] = 32,
    patched: Annotated[int, option("number of components to patch"), COUNT] = 200,
    nodes: Annotated[int, option("number of sites of a circuit that get edges"), COUNT] = 60,
    resamples: Annotated[
        int, option("number of searches on random halves of the prompts, for intervals"), RESAMPLES
    ] = 0,
    seed: Annotated[int, option("seed of random circuits and halves"), COUNT] = 0,
    dtype: Dtype = None,
    device: Annotated[
        str | None, option("cpu, cuda or mps; default: cuda if available", MODEL), DEVICE
    ] = None,
) -> None:
    """Compare a model with a model that was grown from it; write tables and two HTML pages."""
    _require_other_folder(out, [model, grown, null, provenance])
    sources = [source for source in (model, grown, null, provenance) if source is not None]
    InputError.raise_if([x for source in sources for x in model_reasons(source)], PROBLEM)
    both = [
        None if path is None else _read_prompts(path, option)
        for path, option in ((clean, "--clean"), (corrupted, "--corrupted"))
    ]
    import torch

    from attn_only_lens import compare as compare_models
    from attn_only_lens import viz
    from attn_only_lens._load_model import is_hooked
    from attn_only_lens.engine.contrast import Contrast
    from attn_only_lens.growth import Comparison, ComparisonSizes, read_provenance
    from attn_only_lens.models.source_folder import PROVENANCE
    from attn_only_lens.viz.page import import_extra

    Comparison.check_folder(out)
    import_extra("plotly")
    measure = metric.build_metric(isinstance(both[0], torch.Tensor))
    became = read_provenance(Path(provenance or grown) / PROVENANCE)
    target_device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    folders = [model, str(grown)] + ([] if null is None else [str(null)])
    hooked = is_hooked(grown)
    models = [load_model(folder, dtype, target_device, hooked) for folder in folders]
    clean_texts, corrupted_texts = (as_chat(models[0], prompts, chat) for prompts in both)
    contrast = Contrast(clean_texts, corrupted_texts, measure)
    try:
        comparison = compare_models(
            *(models[0], models[1], contrast),
            provenance=became,
            null=models[2] if null is not None else None,
            sizes=ComparisonSizes(
                batch_size, faithfulness, patched, nodes, resamples=resamples, seed=seed
            ),
        )
    except ComparisonError as error:
        if error.so_far is not None:
            error.so_far.save(out)
        raise
    comparison.save(out)
    viz.write(viz.comparison_report(comparison), out / "report.html")
    viz.write(viz.circuit_view(comparison), out / "circuit.html")
    _print_summary(comparison)
    say_page(out / "report.html", "tables and figures")
    say_page(out / "circuit.html", "nodes and edges that were kept, lost and gained")


def _require_other_folder(out: Path, folders: Sequence[str | Path | None]) -> None:
    for folder in folders:
        if folder is not None and out.exists() and Path(folder).resolve() == out.resolve():
            raise AttnOnlyLensError(
                f"got --out {out}, the folder of one of the models; expected another folder"
            )


def _read_prompts(path: Path, option: str) -> Any:
    if path.suffix == ".safetensors":
        return read_tokens(path)
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise AttnOnlyLensError(f"{option}: {path} cannot be read: {error}") from error
    if not lines:
        raise AttnOnlyLensError(f"{option}: {path} has no prompts; expected one prompt per line")
    return parse_prompts(lines, option, all(map(_NUMBERS.fullmatch, lines)))


def _print_summary(comparison: "Comparison") -> None:
    """Print what became of the circuit, and two tables without columns that are empty."""
    typer.echo(f"{comparison.title}.")
    for title, frame in (
        ("What became of the circuit", comparison.parts),
        ("By layer: means over components", comparison.summary()),
        ("The circuits", comparison.circuits.dropna(axis=1, how="all")),
    ):
        print_frame(
            title, frame.rename(columns=lambda name: str(name).removesuffix("_correlation"))
        )
    typer.echo(fill(_MEANINGS, 80))
