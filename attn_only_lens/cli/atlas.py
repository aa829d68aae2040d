"""`attn-only-lens atlas`: pages about every neuron of a model, to browse."""

from pathlib import Path
from typing import Annotated

import typer

from attn_only_lens.cli import options
from attn_only_lens.cli.common import (
    clear_errors,
    command,
    load_with_neuron_heads,
    require_folder,
    say_page,
    working,
)
from attn_only_lens.cli.options import parse_names, parse_numbers
from attn_only_lens.errors import AttnOnlyLensError

_Texts = Annotated[
    Path,
    typer.Option(help="a corpus: one text per line, or a .jsonl file of objects with `text`"),
]
_Out = Annotated[Path, typer.Option(help="output folder; an interrupted run resumes from it")]
_Layers = Annotated[str | None, typer.Option(help="source layers: 0,3; default: all")]
_Names = Annotated[
    str | None, typer.Option(help="names of neurons, instead of layers: L5N1234,L7N2")
]
_K = Annotated[
    int, typer.Option(help="number of examples with the largest z, and with the smallest")
]
_Context = Annotated[
    int | None,
    typer.Option(help="tokens in one piece of a text; default: 128, or what the model allows"),
]
_BatchSize = Annotated[int, typer.Option(help="texts in one forward pass")]


@command("Look at a model", "attn-only-lens atlas small-english --texts corpus.txt --out atlas/")
def atlas(
    model: options.Model,
    texts: _Texts,
    out: _Out,
    layers: _Layers = None,
    names: _Names = None,
    k: _K = 20,
    context: _Context = None,
    batch_size: _BatchSize = 32,
    hooked: options.Hooked = False,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
) -> None:
    """Make pages about neurons: top examples in a corpus, densities, tokens and connections.

    Up to 3,000 neurons share one page; for more, there is a page for each layer.
    """
    from attn_only_lens.engine.sites import Sites, neuron_heads, resolve_sites
    from attn_only_lens.neurons import neuron_statistics
    from attn_only_lens.viz import write_html
    from attn_only_lens.viz.neurons import MOST_NEURONS, index_of_layers, page_of_statistics

    with clear_errors():
        require_folder(out)
        if layers is not None and names is not None:
            raise AttnOnlyLensError("got --layers and --names; expected one of them")
        if not texts.is_file():
            raise AttnOnlyLensError(f"--texts: there is no file {texts}")
        loaded = load_with_neuron_heads(model, dtype, device, hooked)
        wanted = None if layers is None else parse_numbers(layers, "--layers")
        sites: Sites = neuron_heads(wanted) if names is None else parse_names(names)
        groups = resolve_sites(loaded, sites)
        every = [name for group in groups for name in group.names]
        statistics = neuron_statistics(
            *(loaded, every, texts, k),
            context=context,
            batch_size=batch_size,
            resume=out / "statistics",
            progress="texts",
        )
        index = out / "index.html"
        with working("drawing"):
            if len(every) <= MOST_NEURONS:
                write_html(page_of_statistics(loaded, statistics), index)
            else:
                pages = {group.layer: f"layer-{group.layer:02d}.html" for group in groups}
                for group in groups:
                    of_layer = statistics.of(list(group.names))
                    page = page_of_statistics(loaded, of_layer, pages)
                    write_html(page, out / pages[group.layer])
                write_html(index_of_layers(statistics, pages), index)
        say_page(index)
