"""`attn-only-lens demo`."""

from pathlib import Path
from typing import Annotated

import typer

from attn_only_lens.cli.common import command, option, print_table, require_folder, say_page

CLEAN, CORRUPTED = "The keys near the cabinet", "The key near the cabinet"
_SHOWN = 8


@command(
    "Start here",
    "attn-only-lens demo",
    "attn-only-lens demo --out pictures",
    "attn-only-lens demo --out ../demo",
)
def demo(
    out: Annotated[Path, option("output folder for the pages")] = Path("out"),
) -> None:
    """Find and draw a circuit of heads and neurons in this package's language model."""
    from attn_only_lens import circuits, expose_neuron_heads, patching, pretrained, verify, viz
    from attn_only_lens.neurons import neuron_statistics

    require_folder(out)
    source = pretrained.small_english()
    model = expose_neuron_heads(source, copy=True).model
    same = "bitwise the same" if verify(source, model, CLEAN).bitwise else "NOT THE SAME"
    typer.echo(f"A 4-layer language model. With neurons as heads, its logits are {same}.")
    typer.echo(
        f"Why does {CLEAN!r} continue with 'are', and not 'is'?\n"
        f"The output of each head and neuron is copied into a run on\n{CORRUPTED!r}: "
        "how much of the answer comes back?\n"
    )
    metric = patching.logit_diff(" are", " is")
    sweep = patching.activation_patch(model, CLEAN, CORRUPTED, metric)
    strongest = sweep.top(_SHOWN)
    tokens = [model.to_str_tokens(CLEAN)[position] for position in strongest["position"]]
    print_table(
        "The strongest heads and neurons",
        ("head or neuron", "at the token", "comes back"),
        [
            (row.name, token, f"{row.score:.2f}")
            for row, token in zip(strongest.itertuples(index=False), tokens, strict=True)
        ],
    )
    neurons = sweep.query("kind == 'neuron'").top(4 * _SHOWN)["name"].unique().tolist()
    seen = neuron_statistics(model, neurons, pretrained.small_english_texts(), progress="texts")
    why = circuits.explain(model, CLEAN, CORRUPTED, metric)
    typer.echo(f"\nA circuit: {why.title}.")
    page = viz.neuron_page(model, None, seen)
    say_page(why.page(out / "circuit.html", examples=seen.frame()), "the circuit; click a node")
    say_page(viz.write_html(page, out / "neurons.html"), "the circuit's neurons, over texts")
