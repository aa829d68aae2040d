"""The commands `attn-only-lens explain`, `attn-only-lens circuit` and `attn-only-lens evaluate`."""

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from attn_only_lens.arguments import COUNT, RESAMPLES, SHARE, halves_reasons
from attn_only_lens.cli.common import (
    OUTPUT,
    PROBLEM,
    command,
    existing_file,
    option,
    output_file,
    print_frame,
    resumed_folder,
    say_page,
    working,
)
from attn_only_lens.cli.options import (
    Faithfulness,
    HeadOptions,
    Json,
    PairOptions,
    PromptOptions,
    Top,
)
from attn_only_lens.errors import AttnOnlyLensError, InputError

if TYPE_CHECKING:
    from attn_only_lens.circuits.graph import CircuitGraph

OutGraph = Annotated[
    Path,
    option("output file: .html for a page that works offline, .json for the graph", OUTPUT),
    output_file(".html", ".json"),
]
Resume = Annotated[
    Path | None,
    option("checkpoint folder: an interrupted search resumes from it", OUTPUT),
    resumed_folder,
]
SaveCircuit = Annotated[
    Path | None,
    option("also save the circuit (.json), for `evaluate` and for `load` in Python", OUTPUT),
    output_file(".json"),
]


@command(
    "Start here",
    'attn-only-lens explain small-english --clean "The keys near the cabinet" '
    '--corrupted "The key near the cabinet" --answer " are" --wrong " is" --out explanation.html',
    'attn-only-lens explain gpt2 --clean "When Mary and John went out, John gave a drink to" '
    '--corrupted "When Mary and John went out, Mary gave a drink to" '
    '--answer " Mary" --wrong " John" --faithfulness 0.8 --out ioi.html',
    "attn-only-lens explain small-english --pairs pairs.json --held-out 8 --texts corpus.txt "
    "--out with_examples.html",
)
def explain(
    prompts: PairOptions,
    out: OutGraph,
    model: HeadOptions,
    save_circuit: SaveCircuit = None,
    held_out: Annotated[
        int,
        option("the number of pairs, the last ones, that are used only to test the circuit"),
        COUNT,
    ] = 0,
    faithfulness: Faithfulness = 0.9,
    strong: Annotated[
        float,
        option(
            "patch each site alone whose effect may be this share of the difference or more; "
            "strong sites are printed, and drawn in grey, also if they are not in the circuit"
        ),
        SHARE,
    ] = 0.1,
    resamples: Annotated[
        int,
        option(
            "number of random halves of the prompts, e.g. 20, for which to repeat the search; the "
            "page shows the sites that are in nearly all of these circuits (needs 4 prompts)"
        ),
        RESAMPLES,
    ] = 0,
    objective: Annotated[
        Literal["smallest", "held_out"],
        option(
            "smallest: a small circuit for these prompts; held_out: a small circuit that also has "
            "a small error on prompts that were not used to find it (needs --resamples, such as 4)"
        ),
    ] = "smallest",
    resume: Resume = None,
    json: Json = False,
    texts: Annotated[
        Path | None,
        option(
            "a corpus, one text per line; the page shows where each neuron's output is largest, "
            "and labels the neuron with these tokens"
        ),
        existing_file,
    ] = None,
    top: Top = 20,
) -> None:
    """Explain which heads and neurons make a model answer two prompts differently.

    The command searches for a small circuit; it prints the model's answers, and how much each head
    and neuron of the circuit contributes to the difference between them. The page shows the circuit
    as a graph, with edges from each head and neuron to those that it affects.
    """
    n_used = prompts.n_pairs - held_out
    reasons = halves_reasons(n_used) if resamples else []
    if objective == "held_out" and not resamples:
        reasons.append("got --objective held_out without --resamples; expected --resamples 4")
    if n_used < 1:
        expected = f"expected at most {prompts.n_pairs - 1}: the circuit is found on the others"
        reasons.append(f"got --held-out {held_out} for {prompts.n_pairs} pairs; {expected}")
    if texts is not None and out.suffix == ".json":
        reasons.append(f"got --texts for {out}; expected .html: only a page shows examples")
    InputError.raise_if(reasons, PROBLEM)
    loaded, contrast = prompts.run(model)
    from attn_only_lens import explanation
    from attn_only_lens.circuits import Search
    from attn_only_lens.neurons import Corpus, top_examples
    from attn_only_lens.work import Work

    why = explanation.explain(
        *(loaded, contrast[:n_used] if held_out else contrast),
        held_out=contrast[n_used:] if held_out else None,
        faithfulness=faithfulness,
        strong=strong,
        search=Search(objective=objective, resamples=resamples),
        work=Work(resume=resume),
    )
    if not json:
        typer.echo(why.text(top))
    if save_circuit is not None:
        why.circuit.save(save_circuit)
    examples = None
    if texts is not None:
        work = Work(progress="examples")
        examples = top_examples(loaded, why.neurons, Corpus(texts), k=5, work=work)
    if out.suffix == ".json":
        why.graph.save(out)
    else:
        why.page(out, examples=examples)
    if json:
        from attn_only_lens.cli.json_output import explained

        typer.echo(explained(why, (out, save_circuit)).model_dump_json())
    else:
        _say_graph(out, why.graph)


@command(
    "Find what matters",
    'attn-only-lens circuit small-english --clean "The keys near the cabinet" '
    '--corrupted "The key near the cabinet" --answer " are" --wrong " is" --out circuit.html',
    'attn-only-lens circuit gpt2 --clean "The keys near the cabinet" --answer " are" '
    "--metric log_probability --nodes 100 --out one_prompt.html",
    'attn-only-lens circuit small-english --clean "The keys near the cabinet" '
    '--corrupted "The key near the cabinet" --answer " are" --wrong " is" --out graph.json '
    "--save-circuit circuit.json",
    renamed={"top": "nodes"},
)
def circuit(
    prompts: PromptOptions,
    out: OutGraph,
    model: HeadOptions,
    save_circuit: SaveCircuit = None,
    nodes: Annotated[
        int | None,
        option("number of heads and neurons in the graph: by default 300, or the circuit's"),
    ] = None,
    faithfulness: Faithfulness = 0.9,
    resume: Resume = None,
    top: Top = 20,
) -> None:
    """Draw the circuit behind an answer as a graph of heads and neurons.

    With --corrupted, search for a minimal circuit that explains why the metric differs between the
    clean and the corrupted prompts. This is the smallest set of sites found that preserves a
    fraction --faithfulness of the difference when all other sites are patched from the corrupted
    prompts. A site is a head or a neuron at one position. The command prints each site's share, as
    `explain` does. Without --corrupted, the graph shows which heads and neurons contribute to the
    metric on the clean prompts. Edge weights are exact as long as attention patterns and the scales
    of the normalization layers are held fixed.
    """
    if save_circuit is not None and not prompts.has_corrupted:
        raise AttnOnlyLensError("--save-circuit needs --corrupted: only a pair has a circuit")
    if resume is not None and not prompts.has_corrupted:
        raise AttnOnlyLensError("--resume needs --corrupted: only a pair has a search to resume")
    from attn_only_lens import circuits
    from attn_only_lens.circuits.circuit import MISSING
    from attn_only_lens.explanation.labelled_view import labelled_view
    from attn_only_lens.viz import circuit_view, write
    from attn_only_lens.work import Work

    loaded, contrast = prompts.run(model)
    minimal = None
    if contrast.corrupted is not None:
        work = Work(resume=resume)
        minimal = circuits.discover(loaded, contrast, faithfulness=faithfulness, work=work)
        if save_circuit is not None:
            minimal.save(save_circuit)
    with working("attributing the metric"):
        sites = minimal if nodes is None else None
        graph = circuits.attribution_graph(loaded, contrast, sites=sites, top=nodes)
    if out.suffix == ".json":
        graph.save(out)
    elif minimal is None:
        write(circuit_view(graph, loaded, contrast), out)
    else:
        write(labelled_view(graph, loaded, contrast), out)
    if minimal is not None:
        typer.echo(repr(minimal).partition("\n")[0])
    _print_largest(graph, top)
    if minimal is not None:
        typer.echo(fill(f"A site is a head or a neuron at one position. {MISSING}", 80))
    _say_graph(out, graph)


@command(
    "Find what matters",
    'attn-only-lens evaluate small-english circuit.json --clean "The dogs near the house" '
    '--corrupted "The dog near the house" --answer " are" --wrong " is"',
    "attn-only-lens evaluate gpt2 circuit.json --pairs pairs.csv",
    "attn-only-lens evaluate small-english circuit.json --token-ids --clean 0,7,9,11 "
    "--corrupted 0,8,9,11 --answer 17 --wrong 21",
)
def evaluate(
    model: HeadOptions,
    circuit: Annotated[
        Path, typer.Argument(help="a file that --save-circuit wrote"), existing_file
    ],
    prompts: PairOptions,
    top: Top = 20,
    json: Json = False,
) -> None:
    """Measure how much of the difference a saved circuit keeps on other prompts.

    The prompts need the same number of tokens as those for which the circuit was found. All other
    sites (heads and neurons, each at one position) are patched from the corrupted prompts. Even if
    the circuit keeps little, some of its sites may matter on these prompts: the command patches
    each of its first --top sites alone, from the clean into the corrupted prompts.
    """
    from attn_only_lens import circuits
    from attn_only_lens.circuits.circuit import read_circuit
    from attn_only_lens.engine.metrics import as_metric
    from attn_only_lens.patching import Sites, activation_patch
    from attn_only_lens.work import Work

    saved = read_circuit(circuit)
    loaded, contrast = prompts.run(model)
    with working("evaluating the circuit"):
        result = circuits.evaluate(loaded, saved, contrast)
        positions = "all" if saved.candidates.positions == "all" else "each"
        sites = Sites(saved.sites[:top], positions)
        alone = activation_patch(loaded, contrast, sites=sites, work=Work(progress=False))
    if json:
        from attn_only_lens.cli.json_output import evaluated

        typer.echo(evaluated(saved, result, alone).model_dump_json())
        return
    typer.echo(
        f"{len(saved):,} of {saved.n_sites:,} sites, {as_metric(contrast.metric).name}\n{result!r}"
    )
    print_frame("Score of each site alone: 0 corrupted, 1 clean", alone.top(top))


def _say_graph(out: Path, graph: "CircuitGraph") -> None:
    """Print the path of a graph or of its page, and how to open it."""
    if out.suffix == ".json":
        typer.echo(f"{out}: {graph!r}\nDraw it: attn-only-lens picture {out} --out circuit.html")
    else:
        say_page(out, repr(graph))


def _print_largest(graph: "CircuitGraph", top: int) -> None:
    """Print the largest attributions; in a graph of a difference, as shares of the difference."""
    heads, unit = graph.heads, "attribution"
    if graph.corrupted:
        unit = "share"
        heads = heads.assign(share=heads["attribution"] / graph.value).round({unit: 2})
    strongest = heads.loc[heads["attribution"].abs().nlargest(top).index]
    change = "change of " * bool(graph.corrupted)
    title = f"{change}{graph.metric} = {graph.value:.4g}: the largest {unit}s"
    print_frame(title, strongest[["name", "position", "value", unit]])
