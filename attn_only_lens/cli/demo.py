"""`attn-only-lens demo`."""

from pathlib import Path
from typing import Annotated

import typer

from attn_only_lens.cli.common import command, option, output_folder, say_page

CLEAN, CORRUPTED = "The keys near the cabinet", "The key near the cabinet"
WORDS: dict[str | tuple[str, ...], list[str | tuple[str, ...]]] = {
    ("keys", "key"): [("letters", "letter"), ("boats", "boat"), ("cars", "car"), ("boys", "boy")],
    "cabinet": ["table", "door", "garden", "house"],
}
PAIRS = 8
_SHOWN = 8


@command(
    "Start here",
    "attn-only-lens demo",
    "attn-only-lens demo --out pictures",
    "attn-only-lens demo --out ../demo",
)
def demo(
    out: Annotated[Path, option("output folder for the pages"), output_folder] = Path("out"),
) -> None:
    """Find and draw a circuit in the small language model that ships with the package."""
    from attn_only_lens import (
        Contrast,
        Work,
        explain,
        expose_neuron_heads,
        load,
        pretrained,
        tasks,
        viz,
    )
    from attn_only_lens.neurons import Corpus, corpus_statistics
    from attn_only_lens.patching import logit_diff

    model = expose_neuron_heads(load("small-english"), check=CLEAN).model
    typer.echo("A 4-layer language model. With neurons as heads, its logits are bitwise the same.")
    typer.echo(f"Why does {CLEAN!r} continue with 'are', and not 'is'?")
    typer.echo(f"{PAIRS} such sentences show it, and {PAIRS} others test the answer.\n")
    keys = Contrast(CLEAN, CORRUPTED, logit_diff(" are", " is"))
    pairs = tasks.from_pair(model, 2 * PAIRS, keys, WORDS)
    why = explain(model, pairs[:PAIRS], held_out=pairs[PAIRS:])
    typer.echo(why.text(_SHOWN))
    texts = Corpus(pretrained.small_english_texts())
    seen = corpus_statistics(model, why.neurons, texts, work=Work(progress="texts")).neurons
    assert seen is not None
    page = viz.neuron_page(model, None, seen)
    say_page(why.page(out / "circuit.html", examples=seen.frame()), "the circuit; click a node")
    say_page(viz.write(page, out / "neurons.html"), "the circuit's neurons, over texts")
