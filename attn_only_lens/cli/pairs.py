"""`attn-only-lens pairs`: make pairs of prompts for a task."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from attn_only_lens.arguments import COUNT, POSITIVE, one_of
from attn_only_lens.cli.common import OUTPUT, command, option, output_file
from attn_only_lens.cli.options import SourceOptions, load_model

_TASKS = ("number", "gender", "brackets", "greater_than", "induction", "ioi")


@command(
    "Start here",
    "attn-only-lens pairs small-english number --out pairs.json",
    "attn-only-lens pairs small-english gender --n 24 --out gender.json",
    "attn-only-lens pairs gpt2 ioi --n 32 --seed 1 --out ioi.json",
)
def pairs(
    model: SourceOptions,
    task: Annotated[str, typer.Argument(help=f"one of {', '.join(_TASKS)}"), one_of(*_TASKS)],
    out: Annotated[Path, option("output file (.json), for --pairs", OUTPUT), output_file(".json")],
    n: Annotated[int, option("number of pairs to make, before some are dropped"), POSITIVE] = 16,
    seed: Annotated[int, option("decides which pairs are drawn"), COUNT] = 0,
) -> None:
    """Make pairs of prompts for a task, and keep those that the model solves.

    The model solves a pair if it prefers the right answer on both prompts. The tasks "number" and
    "gender" are about agreement. Circuits that are found on many pairs hold on others.
    """
    from attn_only_lens import tasks

    loaded = load_model(model.model, model.dtype, model.device)
    if task in ("number", "gender"):
        feature: Literal["number", "gender"] = "gender" if task == "gender" else "number"
        made = tasks.agreement(loaded.tokenizer, n, seed, feature=feature)
    else:
        made = getattr(tasks, task)(loaded.tokenizer, n, seed)
    made = made.solved_by(loaded)
    made.save(out)
    typer.echo(f"{made!r}\n{out}: {len(made)} pairs, for --pairs")
