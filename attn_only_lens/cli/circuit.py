"""The commands `attn-only-lens explain` and `attn-only-lens circuit`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_only_lens.cli.common import (
    OUTPUT,
    PROMPTS,
    command,
    option,
    print_frame,
    require_writable,
    say_page,
    working,
)
from attn_only_lens.cli.options import (
    Corrupted,
    Faithfulness,
    ModelOptions,
    OutPage,
    PromptOptions,
    Top,
    as_chat,
)

if TYPE_CHECKING:
    from attn_only_lens.circuits import CircuitGraph


@command(
    "Start here",
    'attn-only-lens explain small-english --clean "The keys near the cabinet" '
    '--corrupted "The key near the cabinet" --answer " are" --wrong " is" --out explanation.html',
    'attn-only-lens explain gpt2 --clean "When Mary and John went out, John gave a drink to" '
    '--corrupted "When Mary and John went out, Mary gave a drink to" '
    '--answer " Mary" --wrong " John" --faithfulness 0.8 --out ioi.html',
    'attn-only-lens explain small-english --clean "The keys near the cabinet" '
    '--corrupted "The key near the cabinet" --answer " are" --wrong " is" '
    "--texts corpus.txt --out with_examples.html",
)
def explain(
    prompts: PromptOptions,
    corrupted: Annotated[
        list[str],
        option(
            "the prompt to compare with; same number of tokens; repeat for more prompts", PROMPTS
        ),
    ],
    out: OutPage,
    model: ModelOptions,
    faithfulness: Faithfulness = 0.9,
    resamples: Annotated[
        int,
        option(
            "number of random halves of the prompts, e.g. 20, for which to repeat the search; the "
            "page shows the sites that are in nearly all of these circuits (needs 4 prompts)"
        ),
    ] = 0,
    texts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="a corpus, one text per line; the page shows where each neuron's output is "
            "largest, and labels the neuron with these tokens",
        ),
    ] = None,
    top: Top = 20,
) -> None:
    """Explain which heads and neurons make a model answer two prompts differently.

    The command searches for a small circuit; it prints the model's answers, and how much each head
    and neuron of the circuit contributes to the difference between them. The page shows the circuit
    as a graph, with edges from each head and neuron to those that it affects.
    """
    from attn_only_lens import circuits
    from attn_only_lens.neurons import top_examples

    require_writable(out, (".html",), top)
    metric, clean, other = prompts.parse(corrupted)
    loaded = model.with_neuron_heads()
    clean, other = (as_chat(loaded, texts_, prompts.chat) for texts_ in (clean, other))
    with working("explaining the difference"):
        why = circuits.explain(
            *(loaded, clean, other, metric),
            faithfulness=faithfulness,
            n_patched=top,
            resamples=resamples,
        )
    typer.echo(why.text(top))
    examples = None
    if texts is not None:
        examples = top_examples(loaded, why.neurons, texts, k=5, progress="examples")
    say_page(why.page(out, examples=examples))


@command(
    "Find what matters",
    'attn-only-lens circuit small-english --clean "The keys near the cabinet" '
    '--corrupted "The key near the cabinet" --answer " are" --wrong " is" --out circuit.html',
    'attn-only-lens circuit gpt2 --clean "The keys near the cabinet" --answer " are" '
    "--metric log_probability --nodes 100 --out one_prompt.html",
    'attn-only-lens circuit small-english --clean "The keys near the cabinet" '
    '--answer " are" --wrong " is" --out circuit.json',
)
def circuit(
    prompts: PromptOptions,
    out: Annotated[Path, option("output file: .html for a page, .json for the graph", OUTPUT)],
    model: ModelOptions,
    corrupted: Corrupted = None,
    nodes: Annotated[
        int | None,
        option("number of heads and neurons in the graph: by default 300, or the circuit's"),
    ] = None,
    faithfulness: Faithfulness = 0.9,
    top: Top = 20,
) -> None:
    """Draw the circuit behind an answer as a graph of heads and neurons.

    With --corrupted, search for a minimal circuit that explains why the metric differs between the
    clean and the corrupted prompts. This is the smallest set of sites found that preserves a
    fraction --faithfulness of the difference when all other sites are patched from the corrupted
    prompts. Without --corrupted, the graph shows which heads and neurons contribute to the metric
    on the clean prompts. Edge weights are exact as long as attention patterns and the scales of the
    normalization layers are held fixed.
    """
    from attn_only_lens import circuits
    from attn_only_lens.circuits.circuit import MISSING
    from attn_only_lens.viz import circuit_view, write_html

    require_writable(out, (".html", ".json"), top)
    metric, clean, other = prompts.parse(corrupted)
    loaded, minimal = model.with_neuron_heads(), None
    clean, other = (as_chat(loaded, texts, prompts.chat) for texts in (clean, other))
    if other is not None:
        with working("searching for a minimal circuit"):
            minimal = circuits.discover(loaded, clean, other, metric, faithfulness=faithfulness)
    with working("attributing the metric"):
        sites = minimal if nodes is None else None
        graph = circuits.attribution_graph(
            loaded, clean, metric, corrupted=other, sites=sites, top=nodes
        )
    is_json = out.suffix == ".json"
    if is_json:
        circuits.to_json(graph, out)
    else:
        write_html(circuit_view(graph, loaded, clean, corrupted=other), out)
    _print_attributions(graph, top)
    if minimal is not None:
        columns = ["name", "position", "effect"]
        print_frame(repr(minimal).partition("\n")[0], minimal.frame[columns].head(top))
        typer.echo(MISSING)
    if is_json:
        typer.echo(f"{out}: {graph!r}\nDraw it: attn-only-lens picture {out} --out circuit.html")
    else:
        say_page(out, repr(graph))


def _print_attributions(graph: "CircuitGraph", top: int) -> None:
    heads = graph.heads
    strongest = heads.loc[heads["attribution"].abs().nlargest(top).index]
    columns = ["name", "position", "value", "attribution"]
    change = "change of " * bool(graph.corrupted)
    title = f"{change}{graph.metric} = {graph.value:.4g}: the largest attributions"
    print_frame(title, strongest[columns])
