"""`attn-only-lens atlas`: write pages about every neuron and attention head of a model."""

from collections import defaultdict
from pathlib import Path
from typing import Annotated

from attn_only_lens.cli.common import (
    OUTPUT,
    command,
    existing_file,
    option,
    output_folder,
    say_page,
    working,
)
from attn_only_lens.cli.options import HeadOptions, parse_names, parse_numbers
from attn_only_lens.errors import AttnOnlyLensError

_NEURONS, _CORPUS = "Neurons and heads", "Corpus"


@command(
    "Look at a model",
    "attn-only-lens atlas small-english --texts corpus.txt --out atlas/",
    "attn-only-lens atlas gpt2 --texts corpus.jsonl --layers 0,3 --k 10 --out atlas/",
    "attn-only-lens atlas gpt2 --texts corpus.txt --names L5N1234,L7H2 --out two/",
)
def atlas(
    texts: Annotated[
        Path,
        option("a corpus: one text per line, or a .jsonl file of objects with `text`", _CORPUS),
        existing_file,
    ],
    out: Annotated[
        Path, option("output folder; an interrupted run resumes from it", OUTPUT), output_folder
    ],
    model: HeadOptions,
    layers: Annotated[str | None, option("source layers: 0,3; default: all", _NEURONS)] = None,
    names: Annotated[str | None, option("names, instead of layers: L5N1234,L7H2", _NEURONS)] = None,
    k: Annotated[
        int, option("number of examples at each end; of heads, where they write most", _NEURONS)
    ] = 20,
    context: Annotated[
        int | None,
        option(
            "tokens per piece of text; default: 128, or the model's context length if shorter",
            _CORPUS,
        ),
    ] = None,
    batch_size: Annotated[int, option("pieces in one forward pass", _CORPUS)] = 32,
) -> None:
    """Write pages about neurons and attention heads, each with its top examples from a corpus.

    For a neuron, it also shows histograms of activations, and the tokens and heads to which the
    neuron's weights connect it most. For an attention head, the page also shows which tokens the
    head attends to. If there are more than 3,000 neurons and heads, each layer gets its own page.
    """
    if layers is not None and names is not None:
        raise AttnOnlyLensError("got --layers and --names; expected one of them")
    layer_numbers = None if layers is None else parse_numbers(layers, "--layers", least=0)
    chosen = None if names is None else parse_names(names)
    from attn_only_lens.engine.sites import Sites, resolve_sites
    from attn_only_lens.heads.host import WIDE_KINDS
    from attn_only_lens.neurons import Corpus, corpus_statistics
    from attn_only_lens.viz import write
    from attn_only_lens.viz.neurons import MOST_NEURONS, index_of_layers, page_of_statistics
    from attn_only_lens.work import Work

    loaded = model.with_neuron_heads()
    sites = Sites(chosen) if chosen else Sites(layers=layer_numbers)
    groups = resolve_sites(loaded, sites.without(*WIDE_KINDS))
    of_layers = defaultdict[int, list[str]](list)
    for group in groups:
        of_layers[group.layer] += group.names
    everything = [name for of_layer in of_layers.values() for name in of_layer]
    statistics = corpus_statistics(
        *(loaded, everything, Corpus(texts, context=context)),
        k=k,
        work=Work(batch_size, resume=out / "statistics", progress="texts"),
    )
    index = out / "index.html"
    with working("drawing"):
        if len(everything) <= MOST_NEURONS:
            write(page_of_statistics(loaded, statistics), index)
        else:
            pages = {layer: f"layer-{layer:02d}.html" for layer in of_layers}
            for layer, of_layer in of_layers.items():
                page = page_of_statistics(loaded, statistics.of(of_layer), pages)
                write(page, out / pages[layer])
            write(index_of_layers(statistics, pages), index)
    say_page(index)
