"""`attn-only-lens patch`: activation patching over heads and neuron-heads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_only_lens.cli import options
from attn_only_lens.cli.common import (
    clear_errors,
    command,
    load_with_neuron_heads,
    print_table,
    require_writable,
)
from attn_only_lens.cli.options import (
    as_chat,
    parse_metric,
    parse_names,
    parse_numbers,
    parse_prompts,
)
from attn_only_lens.errors import AttnOnlyLensError

if TYPE_CHECKING:
    from attn_only_lens.patching import Sweep


_Out = Annotated[Path, typer.Option(help="output file (.parquet or .csv)")]
_Corrupted = Annotated[
    list[str] | None,
    typer.Option(
        help="a corrupted prompt for each prompt, with as many tokens; not needed for ablations"
    ),
]
_Sites = Annotated[
    str | None,
    typer.Option(
        help="neurons, heads, all, or names: L5H3,L5N1234@13; default: all heads with that part"
    ),
]
_Layers = Annotated[str | None, typer.Option(help="source layers: 8,9,10; default: all")]
_Part = Annotated[str, typer.Option(help="z, pattern, value, q, k")]
_Positions = Annotated[str, typer.Option(help="each, all, or numbers: 3,4,-1")]
_Direction = Annotated[
    str, typer.Option(help="denoise, noise; or an ablation: zero, mean, resample, bias")
]
_Resume = Annotated[
    Path | None, typer.Option(help="checkpoint folder: an interrupted run resumes from it")
]
_BatchSize = Annotated[
    int | None,
    typer.Option(help="sites in one forward pass; default: as many as fit in memory"),
]


@command(
    "Find what matters",
    "attn-only-lens patch small-english",
    '--clean "The keys near the cabinet"',
    '--corrupted "The key near the cabinet"',
    '--answer " are" --wrong " is" --out sweep.parquet',
)
def patch(
    model: options.Model,
    clean: options.Clean,
    out: _Out,
    corrupted: _Corrupted = None,
    answer: options.Answer = None,
    wrong: options.Wrong = None,
    metric: options.Metric = "logit_diff",
    tokens: options.TokenNumbers = False,
    sites: _Sites = None,
    layers: _Layers = None,
    part: _Part = "z",
    positions: _Positions = "each",
    direction: _Direction = "denoise",
    resume: _Resume = None,
    batch_size: _BatchSize = None,
    top: options.Top = 20,
    chat: options.Chat = False,
    hooked: options.Hooked = False,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
) -> None:
    """Patch heads and neurons between two prompts, one by one, and rank their effects."""
    from attn_only_lens.patching import activation_patch
    from attn_only_lens.patching.job import is_first

    with clear_errors():
        require_writable(out, (".parquet", ".csv"), top)
        selection = _parse_sites(sites or ("heads" if part == "k" else "all"), layers)
        measure = parse_metric(metric, answer, wrong, tokens)
        places: Any = positions
        if positions not in ("each", "all"):
            places = parse_numbers(positions, "--positions")
        first = parse_prompts(clean, "--clean", tokens)
        other_prompts = parse_prompts(corrupted, "--corrupted", tokens) if corrupted else None
        loaded = load_with_neuron_heads(model, dtype, device, hooked)
        sweep = activation_patch(
            loaded,
            as_chat(loaded, first, chat),
            None if other_prompts is None else as_chat(loaded, other_prompts, chat),
            measure,
            sites=selection,
            part=part,  # type: ignore[arg-type]  # checked there
            positions=places,
            direction=direction,
            resume=resume,
            batch_size=batch_size,
        )
        if is_first():
            sweep.save(out)
            _print_effects(sweep, top)
            typer.echo(
                f"{out}: {len(sweep)} rows\nDraw it: attn-only-lens picture {out} --out sweep.html"
            )


def _parse_sites(sites: str, layers: str | None) -> Any:
    from attn_only_lens import patching

    selections = {
        "neurons": patching.neuron_heads, "heads": patching.heads, "all": patching.all_heads
    }  # fmt: skip
    if sites in selections:
        return selections[sites](None if layers is None else parse_numbers(layers, "--layers"))
    if layers is not None:
        raise AttnOnlyLensError("got --layers beside names in --sites, which say their layers")
    return parse_names(sites)


def _print_effects(sweep: "Sweep", top: int) -> None:
    from attn_only_lens.patching.over_prompts import SPREAD

    title = (
        f"{sweep.metric}: {sweep.clean_value:.4g} clean, {sweep.corrupted_value:.4g} corrupted; "
        f"{sweep.part}, {sweep.direction}"
    )
    shares = ["score", *(name for name in SPREAD[1:] if name in sweep.frame)]
    columns = ["name", "position", "value", *shares]
    frame = sweep.top(top)[columns]
    for name in shares:
        frame[name] = frame[name].map("{:.4f}".format)
    print_table(title, columns, frame.to_numpy(dtype=object).tolist())
