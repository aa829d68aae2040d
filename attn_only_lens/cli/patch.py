"""`attn-only-lens patch`: activation patching of attention heads and neurons."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from attn_only_lens.cli.common import (
    MODEL,
    OUTPUT,
    PROBLEM,
    command,
    option,
    output_file,
    print_frame,
    resumed_folder,
    working,
)
from attn_only_lens.cli.options import (
    HeadOptions,
    Json,
    PromptOptions,
    Top,
    parse_names,
    parse_numbers,
)
from attn_only_lens.engine.directions import Ablation
from attn_only_lens.errors import InputError

if TYPE_CHECKING:
    from attn_only_lens.engine.sites import Part

_MANY = 50_000  # for more patches than this, the command prints an estimate of the time
_WHAT = "What is patched"
_WORDS = ("neurons", "heads", "features", "routers", "all")


@command(
    "Find what matters",
    'attn-only-lens patch small-english --clean "The keys near the cabinet" '
    '--corrupted "The key near the cabinet" --answer " are" --wrong " is" --out sweep.parquet',
    'attn-only-lens patch gpt2 --clean "The keys near the cabinet" '
    '--corrupted "The key near the cabinet" --answer " are" --wrong " is" '
    "--sites neurons --layers 8,9,10 --positions=-1 --out last_token.csv",
    'attn-only-lens patch small-english --clean "The keys near the cabinet" --answer " are" '
    "--metric probability --direction zero --sites heads --out ablations.csv",
)
def patch(
    *,
    prompts: PromptOptions,
    out: Annotated[
        Path, option("output file (.parquet or .csv)", OUTPUT), output_file(".parquet", ".csv")
    ],
    sites: Annotated[
        str,
        option("neurons, heads, features, routers, all, or names: L5H3,L5N1234@13", _WHAT),
    ] = "all",
    layers: Annotated[str | None, option("source layers: 8,9,10; default: all", _WHAT)] = None,
    part: Annotated[str, option("z, pattern, value, q or k", _WHAT)] = "z",
    positions: Annotated[
        str,
        option(
            "each (one patch per position; per role, if --pairs has roles and prompts differ in "
            "length), all (one patch for all positions), or numbers: 3,4,-1 (-1 is the last token)",
            _WHAT,
        ),
    ] = "each",
    direction: Annotated[
        str,
        option(
            "denoise (clean into corrupted) or noise (corrupted into clean); or an ablation, "
            "which needs no --corrupted: zero, mean, resample, bias",
            _WHAT,
        ),
    ] = "denoise",
    top: Top = 20,
    resume: Annotated[
        Path | None,
        option("checkpoint folder: an interrupted run resumes from it", OUTPUT),
        resumed_folder,
    ] = None,
    batch_size: Annotated[
        int | None, option("patches in one forward pass; default: as many as fit in memory", MODEL)
    ] = None,
    json: Json = False,
    model: HeadOptions,
) -> None:
    """Patch heads and neurons, one at a time, from one prompt into another; rank them by effect.

    On a large model, this takes a long time; `explain` finds the important heads and neurons in a
    few forward and backward passes.
    """
    numbers: Any = positions
    of_layers: Any = None
    heads: Any = sites
    reasons = Ablation.of(direction).reasons(prompts.has_corrupted, part)
    with InputError.collected(reasons):
        if positions not in ("each", "all"):
            numbers = parse_numbers(positions, "--positions", "each, all, or numbers, such as 3,-1")
    with InputError.collected(reasons):
        if layers is not None:
            of_layers = parse_numbers(layers, "--layers", least=0)
    with InputError.collected(reasons):
        if sites not in _WORDS:
            heads = parse_names(sites, "--sites", f"{', '.join(_WORDS)}, or ")
            if layers is not None:
                reasons.append("got --layers and names in --sites; the names contain the layers")
    InputError.raise_if(reasons, PROBLEM)
    from attn_only_lens.patching import Sites, activation_patch, plan
    from attn_only_lens.patching._activation_patch import plan_sweep
    from attn_only_lens.patching.processes import Processes
    from attn_only_lens.work import Work

    selection = Sites(heads, numbers, of_layers)
    loaded, contrast = prompts.run(model)
    options: dict[str, Any] = {"part": part, "direction": direction}
    work = Work(batch_size, resume=resume, share=True)
    is_first = Processes.of(share=True).rank == 0
    sweep_plan = plan_sweep(loaded, contrast, selection, cast("Part", part), direction, False, work)
    if sweep_plan.n_rows > _MANY:
        with working("estimating the time"):  # in all processes, which patch together
            cost = plan(loaded, contrast, sites=selection, work=work, **options)
        if is_first:
            typer.echo(repr(cost), err=True)
    sweep = activation_patch(loaded, contrast, sites=selection, work=work, **options)
    if not is_first:
        return
    sweep.save(out)
    if json:
        from attn_only_lens.cli.json_output import patched

        typer.echo(patched(sweep, top, [out]).model_dump_json())
    else:
        subtitle = f"{sweep.metric}: effects of patching {part} ({direction})"
        print_frame(f"{sweep.clean_and_corrupted}\n{subtitle}", sweep.top(top))
        by_name = " --rows name" * (sweep.frame["name"].nunique() <= 100)
        typer.echo(
            f"{out}: {len(sweep)} rows\n"
            f"Draw it: attn-only-lens picture {out}{by_name} --out sweep.html"
        )
