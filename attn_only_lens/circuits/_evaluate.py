"""Evaluate circuits on prompts that were not used to find them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from attn_only_lens.arguments import a_type
from attn_only_lens.circuits.ablated_model import ablated_model
from attn_only_lens.circuits.circuit import Circuit
from attn_only_lens.circuits.own_run import members
from attn_only_lens.circuits.stability import share_of_sums
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import as_metric
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.errors import InputError
from attn_only_lens.work import Work, work_reasons

_PROBLEM = "this circuit cannot be evaluated on these prompts"


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The faithfulness of a circuit on a set of prompts. Made by `evaluate`.

    Attributes:
        faithfulness: the faithfulness of the circuit.
        completeness: the faithfulness of all sites that are not in the circuit.
        whole: the metric of the whole model.
        nothing: the metric with every site ablated.
        standard_error: the standard error of the faithfulness over prompts; NaN for a metric with
            one value for all prompts, or if fewer than two prompts have m(M) ≠ m(∅).
        error: the sum over prompts of |m(C) - m(M)|, divided by the sum of |m(M) - m(∅)|. A
            faithfulness near 1 can hide prompts that overshoot and prompts that fall short.
        accuracy: with only the circuit left, the share of prompts on which the correct answer beats
            the wrong one; NaN if the metric does not compare two answers.
        whole_accuracy: the accuracy of the whole model.
        nothing_accuracy: the accuracy with every site ablated.
        n_prompts: the number of prompts.
    """

    faithfulness: float
    completeness: float
    whole: float
    nothing: float
    standard_error: float
    error: float
    accuracy: float
    whole_accuracy: float
    nothing_accuracy: float
    n_prompts: int

    def __repr__(self) -> str:
        error = f" ± {self.standard_error:.0%}" * (self.standard_error >= 0)  # it may be NaN
        text = (
            f"The circuit keeps {self.faithfulness:.0%}{error} of the difference, all other sites "
            f"{self.completeness:.0%}.\nThe metric is {self.whole:.4g} with the whole model, "
            f"{self.nothing:.4g} with every site ablated."
        )
        if self.accuracy >= 0:
            text += (
                f"\nThe correct answer beats the wrong one on {self.accuracy:.0%} of the prompts "
                f"with the circuit, {self.whole_accuracy:.0%} with the whole model, "
                f"{self.nothing_accuracy:.0%} with every site ablated."
            )
        return text


@one_thread_per_model
@warned_once()
def evaluate(
    model: Any, circuit: Circuit, contrast: Contrast, *, work: Work = Work()
) -> Evaluation:
    """Evaluate a circuit on new prompts, with the ablation that was used to find the circuit.

    A circuit with a low faithfulness may still have sites that matter on the new prompts:
    `activation_patch(…, sites=circuit.sites)` patches each of them alone.

    Args:
        model: the circuit's model.
        circuit: found by `discover`.
        contrast: the two runs and the metric; see `Contrast`. A circuit by role needs the roles of
            the same names, and prompts of any length. For other circuits, prompts have the same
            length, and positions the same meaning, as in the circuit's contrast.
        work: how many prompts are run at once; see `discover`.

    Raises:
        InputError: prompts of another length or with other padding, unless positions are "all" or
            by role; a contrast that lacks one of the circuit's roles; a circuit with sites that the
            model does not have; an invalid contrast; ablating every site changes nothing.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, circuits, convert, load, patching as p
        >>> model = convert(load("modular-addition"))
        >>> sums = [Contrast(torch.tensor([a, 4, 113]), torch.tensor([a, 5, 113]),
        ...                  p.logit_diff(correct=a + 4, wrong=a + 5)) for a in (3, 9)]
        >>> circuit = circuits.discover(model, sums[0])
        >>> second = circuits.evaluate(model, circuit, sums[1])
        >>> abs(1 - circuit.faithfulness) < abs(1 - second.faithfulness)  # it was found on one sum
        True
    """
    reasons = no_circuit_reasons(circuit) + contrast_reasons(contrast)
    reasons += work_reasons(work, "batch_size", "resume", "share")
    InputError.raise_if(reasons, _PROBLEM)
    pair = contrast.pair(model)
    sites, rows = members(model, pair, circuit, _PROBLEM)
    ablated = ablated_model(
        *(model, pair, contrast.metric, sites), ablation=circuit.ablation, work=work
    )
    measured, complete, _ = ablated.curves([rows])
    (left,) = ablated.by_prompt([rows])
    whole, nothing, weights = ablated.whole_by_prompt, ablated.nothing_by_prompt, ablated.weights
    _, standard_error = share_of_sums(left - nothing, whole - nothing, weights)
    compares_answers = len(as_metric(contrast.metric).answers) == 2  # such metrics are differences
    accuracy, whole_accuracy, nothing_accuracy = (
        float((values > 0).mean()) if compares_answers else math.nan
        for values in (left, whole, nothing)
    )
    # An equal pair has m(M) = m(∅) up to rounding, because its two runs are equal.
    changes = ((pair.clean != pair.corrupted) & pair.real).any(dim=1).cpu().numpy()
    some = (whole != nothing) & (weights > 0)
    if circuit.ablation == "resample" and len(whole) == len(changes):
        some &= changes
    return Evaluation(
        faithfulness=float(measured[0]),
        completeness=float(complete[0]),
        whole=ablated.whole,
        nothing=ablated.nothing,
        standard_error=standard_error if np.count_nonzero(some) > 1 else math.nan,
        error=float(ablated.errors(left[None])[0]),
        accuracy=accuracy,
        whole_accuracy=whole_accuracy,
        nothing_accuracy=nothing_accuracy,
        n_prompts=len(pair.clean),
    )


def no_circuit_reasons(circuit: object) -> list[str]:
    """Return a list with an error message if this is not a circuit, otherwise []."""
    if isinstance(circuit, Circuit):
        return []
    return [f"got {a_type(circuit)}; expected a Circuit from `discover`"]
