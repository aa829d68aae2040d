"""Evaluate circuits on prompts that were not used to find them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from attn_only_lens.arguments import POSITIVE, a_type
from attn_only_lens.circuits.ablated_model import ablated_model
from attn_only_lens.circuits.circuit import SITE_KEY, Circuit
from attn_only_lens.circuits.stability import share_of_sums
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import AnyMetric, as_metric
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import Roles
from attn_only_lens.engine.prompts import Prompts, prompt_pair
from attn_only_lens.errors import InputError
from attn_only_lens.patching.site_groups import site_groups, site_rows

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
        error: the mean over prompts of |m(C) - m(M)| / |m(M) - m(∅)|, without prompts for which
            m(M) = m(∅). A faithfulness near 1 can hide prompts that overshoot and prompts that fall
            short.
        accuracy: with only the circuit left, the share of prompts on which the correct answer beats
            the wrong one; NaN if the metric does not compare two answers.
        whole_accuracy: the accuracy of the whole model.
        nothing_accuracy: the accuracy with every site ablated.
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
    model: Any,
    circuit: Circuit,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    *,
    positions: Roles | None = None,
    mask: Tensor | None = None,
    prompts_at_once: int | None = None,
) -> Evaluation:
    """Evaluate a circuit on new prompts, with the ablation that was used to find the circuit.

    A circuit with a low faithfulness may still have sites that matter on the new prompts:
    `activation_patch(…, sites=circuit.sites)` patches each of them alone.

    Args:
        model: the circuit's model.
        circuit: found by `discover`.
        clean: prompts of the same length, in which positions have the same meaning; for a circuit
            by role, prompts of any length.
        corrupted: the corrupted prompts, aligned with `clean` token by token.
        metric: the metric of these prompts, which may have other answers.
        positions: for a circuit by role, the position of each role in each prompt: `task.roles`.
        mask: the attention mask (0 for padding), if prompts are given as tokens.
        prompts_at_once: how many pairs of prompts are in memory at once; see `discover`.

    Raises:
        InputError: prompts of another length, unless positions are "all" or by role; roles that
            differ from the circuit's roles; a circuit with sites that the model does not have;
            invalid prompts or metric; ablating every site changes nothing.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> circuit = circuits.discover(
        ...     model, torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]), p.logit_diff(7, 8))
        >>> second = circuits.evaluate(
        ...     model, circuit, torch.tensor([9, 4, 113]), torch.tensor([9, 5, 113]),
        ...     p.logit_diff(13, 14))
        >>> abs(1 - circuit.faithfulness) < abs(1 - second.faithfulness)  # it was found on one sum
        True
    """
    reasons = no_circuit_reasons(circuit)
    if positions is not None and not isinstance(positions, Mapping):
        reasons.append(f"got positions={positions!r}; expected a dict from roles to positions")
    reasons += POSITIVE.or_none.reasons(prompts_at_once=prompts_at_once)
    InputError.raise_if(reasons, _PROBLEM)
    pair = prompt_pair(model, clean, corrupted, mask)
    roles = sorted(circuit.positions) if isinstance(circuit.positions, Mapping) else []
    names = sorted(map(str, positions or {}))
    if names != roles:
        expected = f"the circuit has the roles {roles}: pass only these roles from task.roles"
        if not roles:
            expected = "the circuit has no roles: leave positions out"
        reasons.append(f"got positions for the roles {names}; {expected}")
    lengths = sorted(set(pair.real.sum(dim=1).tolist()))
    same = bool((pair.real == pair.real[:1]).all()) and pair.clean.shape[1] == circuit.n_pos
    if not same and not roles and (circuit.frame["position"] != "all").any():
        reasons.append(
            f"got prompts of {' and '.join(map(str, lengths))} tokens; expected {circuit.n_pos} "
            "tokens, as in the prompts used to find the circuit: the sites have fixed positions"
        )
    if circuit.frame.duplicated(SITE_KEY).any():
        reasons.append("some sites are in the circuit twice; expected one row for each site")
    InputError.raise_if(reasons, _PROBLEM)
    here = positions or circuit.positions
    sites = site_rows(site_groups(model, pair, circuit.candidates, here, "z"))
    rows = np.flatnonzero(circuit.contains(sites))
    if missing := len(circuit) - len(rows):
        reason = (
            f"{missing} sites of the circuit do not exist: the model lacks the head, or the "
            "prompts lack the position"
        )
        raise InputError([reason], _PROBLEM)
    ablated = ablated_model(
        *(model, clean, corrupted, metric, sites),
        ablation=circuit.ablation,
        mask=mask,
        positions=here,
        prompts_at_once=prompts_at_once,
    )
    measured, complete, _ = ablated.curves([rows])
    (left,) = ablated.by_prompt([rows])
    whole, nothing, weights = ablated.whole_by_prompt, ablated.nothing_by_prompt, ablated.weights
    _, error = share_of_sums(left - nothing, whole - nothing, weights)
    accuracies = [math.nan] * 3
    if len(as_metric(metric).answers) == 2:  # such metrics are differences
        accuracies = [float((values > 0).mean()) for values in (left, whole, nothing)]
    # An equal pair has m(M) = m(∅) up to rounding, because its two runs are equal.
    changes = ((pair.clean != pair.corrupted) & pair.real).any(dim=1).cpu().numpy()
    some = (whole != nothing) & (weights > 0)
    if circuit.ablation == "resample" and len(whole) == len(changes):
        some &= changes
    error = error if np.count_nonzero(some) > 1 else math.nan
    numbers = float(measured[0]), float(complete[0]), ablated.whole, ablated.nothing, error
    shares = weights[some] / weights[some].sum()
    mean_error = float(abs((left - whole)[some] / (whole - nothing)[some]) @ shares)
    return Evaluation(*numbers, mean_error, *accuracies)


def no_circuit_reasons(circuit: object) -> list[str]:
    """Return a list with an error message if this is not a circuit, otherwise []."""
    if isinstance(circuit, Circuit):
        return []
    return [f"got {a_type(circuit)}; expected a Circuit from `discover`"]
