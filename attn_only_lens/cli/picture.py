"""The commands `attn-only-lens picture` and `attn-only-lens pattern`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from attn_only_lens.arguments import COUNT, ending_reasons, file_reasons
from attn_only_lens.cli.common import (
    PROBLEM,
    PROMPTS,
    command,
    option,
    say_page,
)
from attn_only_lens.cli.options import (
    Chat,
    HeadOptions,
    OutPage,
    TokenIds,
    as_chat,
    parse_names,
    parse_prompts,
    text_reasons,
)
from attn_only_lens.errors import AttnOnlyLensError, InputError


@command(
    "Find what matters",
    "attn-only-lens picture sweep.parquet --rows name --out sweep.html",
    "attn-only-lens picture sweep.parquet --bars 20 --out bars.html",
    "attn-only-lens picture circuit.json --out circuit.html",
)
def picture(
    source: Annotated[
        Path, typer.Argument(help="a file that `patch` (.parquet, .csv) or `circuit` (.json) wrote")
    ],
    out: OutPage,
    bars: Annotated[
        int | None, option("for a sweep: draw this many ranked bars instead of a heatmap")
    ] = None,
    rows: Annotated[
        str, option("of a heatmap: layer, or name for one row per head or neuron (up to 100)")
    ] = "layer",
) -> None:
    """Draw a file from `patch` as a heatmap or a bar chart, or a file from `circuit` as a graph."""
    InputError.raise_if(
        ending_reasons(source, ".parquet", ".csv", ".json") or file_reasons(source), PROBLEM
    )
    if source.suffix == ".json" and bars is not None:
        raise AttnOnlyLensError(f"got --bars for {source}, which contains a graph; omit --bars")
    from attn_only_lens import viz
    from attn_only_lens.circuits.graph import read_graph
    from attn_only_lens.patching.results import Sweep
    from attn_only_lens.viz.figures import MOST_ROWS

    if source.suffix == ".json":
        viz.write(viz.circuit_view(read_graph(source)), out)
    else:
        sweep = Sweep.read(source)
        n_names = sweep.frame["name"].nunique()
        if bars is None and rows == "name" and n_names > MOST_ROWS:
            raise AttnOnlyLensError(
                f"got --rows name for {n_names:,} heads and neurons; expected at most {MOST_ROWS}: "
                f"pass --rows layer, or --bars {MOST_ROWS} for the strongest"
            )
        kind: Any = rows
        figure = viz.heatmap(sweep, kind) if bars is None else viz.bars(sweep, k=bars)
        viz.write(figure, out)
    say_page(out)


@command(
    "Look at a model",
    'attn-only-lens pattern small-english --prompt "The keys near the cabinet are" '
    "--names L0N259,L3H3 --out patterns.html",
    'attn-only-lens pattern gpt2 --prompt "The keys near the cabinet are" --layer 5 --out l5.html',
    "attn-only-lens pattern small-english --prompt 0,7,9 --token-ids --names L0N7 --out l0n7.html",
)
def pattern(
    prompt: Annotated[str, option("the text to draw", PROMPTS)],
    out: OutPage,
    model: HeadOptions,
    names: Annotated[str | None, option("up to 24 heads and neurons: L5N1234,L2H3")] = None,
    layer: Annotated[
        int | None, option("a source layer, instead of names: its attention heads"), COUNT
    ] = None,
    token_ids: TokenIds = False,
    chat: Chat = False,
) -> None:
    """Draw the attention patterns of heads, and the activations of neurons, on one text."""
    if (names is None) == (layer is None):
        raise AttnOnlyLensError("pass either --names or --layer")
    InputError.raise_if(text_reasons([prompt], "--prompt", token_ids), PROBLEM)
    chosen = None if names is None else parse_names(names)
    prompts = parse_prompts([prompt], "--prompt", token_ids)
    from attn_only_lens.engine.prompts import single_prompts
    from attn_only_lens.patching import Sites
    from attn_only_lens.viz import attention_view, write

    loaded = model.with_neuron_heads()
    ids = single_prompts(loaded, as_chat(loaded, prompts, chat)).clean
    sites = Sites(chosen) if chosen else Sites("heads", layers=layer)
    write(attention_view(loaded, sites, ids), out)
    say_page(out)
