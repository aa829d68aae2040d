"""`attn-only-lens picture` and `pattern`: draw saved results and attention as pages."""

from pathlib import Path
from typing import Annotated

import typer

from attn_only_lens.cli import options
from attn_only_lens.cli.common import (
    clear_errors,
    command,
    load_with_neuron_heads,
    require_writable,
    say_page,
)
from attn_only_lens.cli.options import as_chat, parse_names, parse_prompts
from attn_only_lens.errors import AttnOnlyLensError

_PAGE = (".html",)


_Source = Annotated[
    Path, typer.Argument(help="a file that `patch` (.parquet, .csv) or `circuit` (.json) wrote")
]
_Bars = Annotated[
    int | None,
    typer.Option(help="for a sweep: draw this many ranked bars instead of a heatmap"),
]


@command("Find what matters", "attn-only-lens picture sweep.parquet --out sweep.html --bars 20")
def picture(
    source: _Source,
    out: options.OutPage,
    bars: _Bars = None,
) -> None:
    """Draw the results of `patch` as a heatmap or bars, or the graph of `circuit` as a page."""
    from attn_only_lens.circuits import from_json
    from attn_only_lens.patching import Sweep
    from attn_only_lens.viz import circuit_view, sweep_bars, sweep_heatmap, write_html

    with clear_errors():
        require_writable(out, _PAGE)
        if source.suffix == ".json":
            if bars is not None:
                raise AttnOnlyLensError(f"got --bars with a graph, {source}; expected a sweep")
            write_html(circuit_view(from_json(source)), out)
        else:
            sweep = Sweep.load(source)
            write_html(sweep_heatmap(sweep) if bars is None else sweep_bars(sweep, k=bars), out)
        say_page(out)


_Prompt = Annotated[str, typer.Option(help="the text to draw")]
_Names = Annotated[str | None, typer.Option(help="up to 24 heads and neurons: L5N1234,L2H3")]
_Layer = Annotated[
    int | None, typer.Option(help="a source layer, instead of names: show its attention heads")
]
_Tokens = Annotated[bool, typer.Option("--tokens", help="the prompt is token numbers: 3,4,113")]


@command(
    "Look at a model",
    'attn-only-lens pattern small-english --prompt "The keys near the cabinet are"',
    "--names L0N259,L3H3 --out patterns.html",
)
def pattern(
    model: options.Model,
    prompt: _Prompt,
    out: options.OutPage,
    names: _Names = None,
    layer: _Layer = None,
    tokens: _Tokens = False,
    chat: options.Chat = False,
    hooked: options.Hooked = False,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
) -> None:
    """Draw the attention patterns of heads and neuron-heads on a text."""
    from attn_only_lens.engine.prompts import single_prompts
    from attn_only_lens.engine.sites import Sites
    from attn_only_lens.patching import heads
    from attn_only_lens.viz import attention_view, write_html

    with clear_errors():
        require_writable(out, _PAGE)
        if (names is None) == (layer is None):
            raise AttnOnlyLensError("give either --names or --layer")
        prompts = parse_prompts([prompt], "--prompt", tokens)
        loaded = load_with_neuron_heads(model, dtype, device, hooked)
        ids = single_prompts(loaded, as_chat(loaded, prompts, chat)).clean
        sites: Sites = heads(layer) if names is None else parse_names(names)
        write_html(attention_view(loaded, sites, ids), out)
        say_page(out)
