"""`attn-only-lens explain`: why the answers to two prompts differ, in one call."""

from pathlib import Path
from typing import Annotated

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

_Out = Annotated[Path, typer.Option(help="output page, .html")]
_Corrupted = Annotated[
    list[str],
    typer.Option(help="the prompt to compare with, of the same number of tokens; repeat for more"),
]
_Texts = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="a corpus, one text per line: the page shows where neurons are largest in it, and "
        "names them after these tokens",
    ),
]
_Faithfulness = Annotated[
    float, typer.Option(help="the share of the difference that the circuit must keep")
]
_Resamples = Annotated[
    int,
    typer.Option(
        help="search this many random halves of the prompts again, 20 for instance, and show which "
        "sites are in nearly all of these circuits (four prompts or more)"
    ),
]


@command(
    "Find what matters",
    "attn-only-lens explain small-english",
    '--clean "The keys near the cabinet"',
    '--corrupted "The key near the cabinet"',
    '--answer " are" --wrong " is" --out explanation.html',
)
def explain(
    model: options.Model,
    clean: options.Clean,
    corrupted: _Corrupted,
    out: _Out,
    answer: options.Answer = None,
    wrong: options.Wrong = None,
    metric: options.Metric = "logit_diff",
    tokens: options.TokenNumbers = False,
    faithfulness: _Faithfulness = 0.9,
    top: options.Top = 20,
    resamples: _Resamples = 0,
    texts: _Texts = None,
    chat: options.Chat = False,
    hooked: options.Hooked = False,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
) -> None:
    """Explain why a model answers two prompts differently: which heads and neurons, and how.

    The table divides the difference among the sites of a small circuit, through their patterns and
    their values, and compares the shares with exact patches: "denoise" puts the site's clean output
    into the corrupted run, "noise" the corrupted output into the clean run. The page draws how the
    sites act on each other.
    """
    from attn_only_lens import circuits
    from attn_only_lens.neurons import top_examples

    with clear_errors():
        require_writable(out, (".html",), top)
        measure = parse_metric(metric, answer, wrong, tokens)
        prompts = parse_prompts(clean, "--clean", tokens)
        other_prompts = parse_prompts(corrupted, "--corrupted", tokens)
        loaded = load_with_neuron_heads(model, dtype, device, hooked)
        prompts, other_prompts = (as_chat(loaded, x, chat) for x in (prompts, other_prompts))
        with working("explaining the difference"):
            why = circuits.explain(
                *(loaded, prompts, other_prompts, measure),
                faithfulness=faithfulness,
                n_patched=top,
                resamples=resamples,
            )
        table = why.table().head(top)
        circuit = why.circuit
        title = f"{why.title}; everything else keeps {circuit.completeness:.0%}"
        rows = [["" if x != x else x for x in row] for row in table.itertuples(index=False)]
        print_table(title, ["site", "does", *table.columns[2:]], rows, number=".2f")
        if circuit.stability is not None:
            typer.echo(f"Stability: {circuit.stability!r}")
        examples = None
        if texts is not None:
            examples = top_examples(loaded, why.neurons, texts, k=5, progress="examples")
        say_page(why.page(out, examples=examples))
