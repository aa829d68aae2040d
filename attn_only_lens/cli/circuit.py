"""`attn-only-lens circuit`: an attribution graph as a file or a page, and a minimal circuit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_only_lens.cli import options
from attn_only_lens.cli.common import (
    clear_errors,
    command,
    load_with_neuron_heads,
    print_table,
    require_writable,
    say_page,
    working,
)
from attn_only_lens.cli.options import as_chat, parse_metric, parse_prompts

if TYPE_CHECKING:
    from attn_only_lens.circuits import Circuit, CircuitGraph

_Out = Annotated[Path, typer.Option(help="output file: .html for a page, .json for the graph")]
_Corrupted = Annotated[
    list[str] | None,
    typer.Option(help="a corrupted prompt for each prompt: also search for a minimal circuit"),
]
_Nodes = Annotated[
    int | None,
    typer.Option(help="number of heads and neurons in the graph: by default 300, or the circuit's"),
]
_Faithfulness = Annotated[
    float,
    typer.Option(help="with --corrupted: the share of the effect that the circuit must keep"),
]


@command(
    "Find what matters",
    "attn-only-lens circuit small-english",
    '--clean "The keys near the cabinet"',
    '--corrupted "The key near the cabinet"',
    '--answer " are" --wrong " is" --out circuit.html',
)
def circuit(
    model: options.Model,
    clean: options.Clean,
    out: _Out,
    corrupted: _Corrupted = None,
    answer: options.Answer = None,
    wrong: options.Wrong = None,
    metric: options.Metric = "logit_diff",
    tokens: options.TokenNumbers = False,
    nodes: _Nodes = None,
    faithfulness: _Faithfulness = 0.9,
    top: options.Top = 20,
    chat: options.Chat = False,
    hooked: options.Hooked = False,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
) -> None:
    """Draw the circuit behind an answer: which heads and neurons write what others read.

    With --corrupted, search for a minimal circuit, the smallest set found that reaches
    --faithfulness when everything else is patched from the corrupted prompts, and draw what makes
    the difference between the two prompts. Without it, the graph describes the clean prompts alone,
    and is exact while attention patterns and norm scales keep their values on these prompts.
    """
    from attn_only_lens import circuits
    from attn_only_lens.viz import circuit_view, write_html

    with clear_errors():
        require_writable(out, (".html", ".json"), top)
        measure = parse_metric(metric, answer, wrong, tokens)
        prompts = parse_prompts(clean, "--clean", tokens)
        other_prompts = parse_prompts(corrupted, "--corrupted", tokens) if corrupted else None
        loaded = load_with_neuron_heads(model, dtype, device, hooked)
        prompts, circuit = as_chat(loaded, prompts, chat), None
        if other_prompts is not None:
            other_prompts = as_chat(loaded, other_prompts, chat)
            with working("searching for a minimal circuit"):
                circuit = circuits.discover(
                    loaded, prompts, other_prompts, measure, faithfulness=faithfulness
                )
        with working("attributing the metric"):
            sites = circuit if nodes is None else None
            graph = circuits.attribution_graph(
                loaded, prompts, measure, corrupted=other_prompts, sites=sites, top=nodes
            )
        if out.suffix == ".json":
            circuits.to_json(graph, out)
        else:
            write_html(circuit_view(graph, loaded, prompts), out)
        _print_attributions(graph, top)
        if circuit is not None:
            _print_circuit(circuit, top)
        if out.suffix == ".json":
            typer.echo(
                f"{out}: {graph!r}\nDraw it: attn-only-lens picture {out} --out circuit.html"
            )
        else:
            say_page(out, repr(graph))


def _print_attributions(graph: "CircuitGraph", top: int) -> None:
    heads = graph.heads
    strongest = heads.loc[heads["attribution"].abs().nlargest(top).index]
    columns = ["name", "position", "value", "attribution"]
    change = "change of " * bool(graph.corrupted)
    title = f"{change}{graph.metric} = {graph.value:.4g}: the largest attributions"
    print_table(title, columns, strongest[columns].to_numpy().tolist())


def _print_circuit(circuit: "Circuit", top: int) -> None:
    columns = ["name", "position", "effect"]
    random = ", ".join(f"{value:.1%}" for value in circuit.random)
    title = (
        f"A circuit of {len(circuit)} of {circuit.n_sites} sites keeps {circuit.faithfulness:.1%} "
        f"of the effect; everything else keeps {circuit.completeness:.1%}"
    )
    if random:
        title += f"; random circuits of that size keep {random}"
    print_table(title, columns, circuit.frame[columns].head(top).to_numpy().tolist())
