"""Judge methods: AUROC against the truth, means and intervals over programs.

AUROC is the probability that a random true part (or edge) has a higher score than a random other
one; ties count half, and .5 is chance. Scores below `LEAK` count as 0: the softmaxes of a compiled
head give about 1e-7 of their weight to tokens that it should not attend to.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from analyses.benchmark.tasks import Problem, Task

LEAK = 1e-6
KEYS = {"nodes": ["name"], "edges": ["writer", "reader", "side"]}
LABELS = {"true": "all true", "changes": "those that change a logit"}
N_RESAMPLES = 10_000


def auroc(scores: Iterable[float], labels: Iterable[bool]) -> float:
    """The probability that a positive has a higher score than a negative; ties count half."""
    ranks = pd.Series(list(scores)).rank()
    positive = np.asarray(list(labels), dtype=bool)
    n, m = positive.sum(), (~positive).sum()
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else float("nan")


def judge(
    method: Callable[[Task], pd.DataFrame], problems: Iterable[Problem], what: str
) -> pd.DataFrame:
    """Return a method's AUROC on each problem, for both sets of labels.

    Args:
        method: a function from a task to a frame with a row for each part (columns `name`, `score`)
            or edge (columns `writer`, `reader`, `side`, `score`) of the task, in any order.
        problems: from `tasks.problems` or `twins.problems`.
        what: "nodes" or "edges".

    Raises:
        ValueError: a part or an edge has no score, two scores, or a score that is not finite.
    """
    rows = []
    for problem in problems:
        judged = compare(problem, method(problem.task), what)
        task = problem.task
        rows.append({"program": task.name, "form": task.form, "seed": task.seed} | judged)
    return pd.DataFrame(rows)


def compare(
    problem: Problem, frame: pd.DataFrame, what: str, leak: float = LEAK
) -> dict[str, float]:
    """Return the AUROC of scores for both sets of labels."""
    truth, keys = getattr(problem.truth, what), KEYS[what]
    joined = truth.merge(frame[[*keys, "score"]], on=keys, how="left")
    scores = joined["score"].to_numpy(dtype=float)
    if len(joined) != len(truth) or not np.isfinite(scores).all():
        raise ValueError(
            f"{problem.task.name}: got {len(frame)} rows, of which {np.isfinite(scores).sum()} "
            f"match; expected one finite score for each of the task's {len(truth)} {what}"
        )
    scores = np.where(scores < leak, 0.0, scores)
    return {label: auroc(scores, joined[label]) for label in LABELS}


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the mean over programs, and a 95 % interval by the bootstrap over programs."""
    x = np.asarray(values, dtype=float)
    x = x[~np.isnan(x)]
    if not len(x):
        return float("nan"), float("nan"), float("nan")
    draw = np.random.default_rng(seed).integers(len(x), size=(N_RESAMPLES, len(x)))
    low, high = np.quantile(x[draw].mean(axis=1), [0.025, 0.975])
    return float(x.mean()), float(low), float(high)
