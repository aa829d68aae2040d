r"""Choose a circuit by its error on prompts that were not used to find it.

The smallest circuit for a few prompts also depends on details of these prompts. With the
objective "held_out", random halves of the prompts therefore propose circuits of many sizes, and
every proposal is evaluated on the prompts that its half leaves out:

    search      the smallest sufficient circuit (`search.py`), if a short prefix suffices
    magnitude   prefixes of the sites, ranked by the mean over prompts of |effect|
    signed      prefixes of the sites, ranked by the mean effect; sites that help come first
    tilted      prefixes of the sites, ranked by the first score plus half of the second
    worth       prefixes of the sites, ranked by the mean of what they add to up to four circuits of
                different sizes (`AblatedModel.worth`)

The mean of |effect| counts effects that cancel over these prompts: on other prompts, they may not
cancel. The longest prefix contains all sites, and has no error. The chosen proposal is the smallest
one that is sufficient both on the prompts of its half and on those that the half leaves out: its
error and |1 - f| are at most 1 - wanted. (A short prefix of the signed ranking, for instance, may
have too high a metric on the prompts that ranked it.) Of several such proposals of this size, it is
the one with the least error. The circuit is then made in the same way from all prompts. On new
prompts, its error is a little larger than the chosen proposal's error, which is the best of many.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float

from attn_only_lens.circuits.ablated_model import AblatedModel
from attn_only_lens.circuits.ablated_points import Floats, Rows
from attn_only_lens.circuits.search import Step
from attn_only_lens.circuits.stability import Half, share_of_sums

_PER_DOUBLING = 2  # the number of prefix sizes from k to 2k
_SMALLEST = 8
_TILT = 0.5
_STARTS = 0, 64, 512, 4096  # sizes of the circuits to which a site's worth is measured
Proposal: TypeAlias = tuple[Step, int]
"""A way to rank sites, and the size of the prefix; 0 for `SEARCH`."""
SEARCH: Proposal = "search", 0


def prefixes(
    ablated: AblatedModel, effects: Float[np.ndarray, "site prompt"], slopes: bool
) -> dict[Proposal, Rows]:
    """Return prefixes of the rankings "magnitude", "tilted", "signed" and, with slopes, "worth".

    Args:
        ablated: the model with the prompts that propose circuits.
        effects: how much each site helps on each of these prompts; negative if it harms.
        slopes: whether sites may be ranked by first-order effects.
    """
    size, mean = abs(effects) @ ablated.weights, effects @ ablated.weights
    scores: dict[Step, Floats] = {"magnitude": size, "tilted": size + _TILT * mean, "signed": mean}
    if slopes:
        order = np.argsort(-size, kind="stable")
        starts = (order[:number] for number in _STARTS if number < len(order))
        scores["worth"] = np.mean([ablated.worth(circuit) for circuit in starts], axis=0)
    orders = {step: np.argsort(-score, kind="stable") for step, score in scores.items()}
    n_sites = ablated.n_sites
    exponents = np.arange(np.log2(_SMALLEST), np.log2(max(n_sites, _SMALLEST)), 1 / _PER_DOUBLING)
    sizes = np.unique([*(2**exponents).round().astype(int).clip(max=n_sites), n_sites]).tolist()
    return {(name, size): order[:size] for name, order in orders.items() for size in sizes}


def choose(
    propose: Callable[[Half, AblatedModel], Mapping[Proposal, Rows]],
    ablate: Callable[[Half], AblatedModel],
    halves: Sequence[tuple[Half, Half]],
    weights: Float[np.ndarray, "prompt"],
    wanted: float,
) -> tuple[Proposal, list[Rows], pd.DataFrame]:
    """Choose a proposal by its errors on the prompts of halves, and on held-out prompts.

    Args:
        propose: returns the circuits that a half proposes.
        ablate: returns the ablated model with some prompts.
        halves: the halves, each paired with the prompts that it leaves out.
        weights: the weight of each prompt.
        wanted: the wanted faithfulness.

    Returns:
        The proposal, its circuit for each half, and the table `Stability.by_size`.
    """
    proposals = list[Mapping[Proposal, Rows]]()
    inside, outside = list[pd.DataFrame](), list[pd.DataFrame]()
    for half, others in halves:
        ablated = ablate(half)
        proposed = propose(half, ablated)
        proposals.append(proposed)
        inside.append(_evaluated(proposed, ablated, half))
        outside.append(_evaluated(proposed, ablate(others), others))
    in_all = [name for name in proposals[0] if all(name in proposed for proposed in proposals)]
    # Means over the halves that have a prompt, or leave it out.
    by_prompt: list[Any] = [
        pd.concat(frames).groupby(level=["order", "size", "prompt"]).mean()
        for frames in (inside, outside)
    ]
    rows = list[dict[str, Any]]()
    for name in in_all:
        (own_f, own_error, _), (f, error, standard_error) = (
            _measures(frame.loc[name], weights) for frame in by_prompt
        )
        row = {
            "order": name[0],
            "n_sites": float(np.mean([len(proposed[name]) for proposed in proposals])),
            "faithfulness": f,
            "error": error,
            "standard_error": standard_error,
            "own_faithfulness": own_f,
            "own_error": own_error,
        }
        rows.append(row)
    by_size = pd.DataFrame(rows)
    misses = abs(1 - by_size[["faithfulness", "own_faithfulness"]])
    worst = pd.concat([misses, by_size[["error", "own_error"]]], axis=1).max(axis=1)
    every = by_size["n_sites"] == by_size["n_sites"].max()  # has no error, up to rounding
    enough = by_size.assign(worst=worst)[(worst <= 1 - wanted) | every]
    name = in_all[int(enough.sort_values(["n_sites", "worst"], kind="stable").index[0])]
    return name, [proposed[name] for proposed in proposals], by_size


def _measures(
    frame: pd.DataFrame, weights: Float[np.ndarray, "prompt"]
) -> tuple[float, float, float]:
    """Return the faithfulness, the error and its standard error of what a circuit keeps."""
    here = weights[frame.index]
    faithfulness, _ = share_of_sums(frame["kept"], frame["span"], here)
    return faithfulness, *share_of_sums(frame["miss"], abs(frame["span"]), here)


def _evaluated(
    proposed: Mapping[Proposal, Rows], ablated: AblatedModel, prompts: Half
) -> pd.DataFrame:
    """Return one row per proposal and prompt: what the circuit keeps, and what all sites keep."""
    kept = ablated.by_prompt([*proposed.values()]) - ablated.nothing_by_prompt
    span = np.broadcast_to(ablated.whole_by_prompt - ablated.nothing_by_prompt, kept.shape)
    index = pd.MultiIndex.from_tuples(
        [(*name, prompt) for name in proposed for prompt in prompts],
        names=["order", "size", "prompt"],
    )
    columns = {"kept": kept, "span": span, "miss": abs(kept - span)}
    return pd.DataFrame({key: value.ravel() for key, value in columns.items()}, index=index)
