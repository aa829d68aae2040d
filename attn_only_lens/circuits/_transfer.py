"""Evaluate several circuits on several contrasts."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from attn_only_lens.arguments import a_type
from attn_only_lens.circuits._evaluate import evaluate, no_circuit_reasons
from attn_only_lens.circuits.circuit import Circuit
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.errors import InputError

_PROBLEM = "these circuits cannot be evaluated on these contrasts"


def transfer(
    model: Any, circuits: Mapping[str, Circuit], contrasts: Mapping[str, Contrast]
) -> pd.DataFrame:
    """Compute the faithfulness of every circuit on the prompts of every contrast.

    Args:
        model: the circuits' model.
        circuits: a dict from names to circuits from `discover`.
        contrasts: a dict from names to contrasts, such as those of `tasks`. A contrast may have
            more roles than a circuit. A circuit without roles needs prompts of the length on which
            it was found.

    Returns:
        A frame of faithfulness values with one row per circuit and one column per contrast.
        `viz.heatmap` draws it.

    Raises:
        InputError: a contrast lacks one of a circuit's roles, or an argument of `evaluate` is
            invalid.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, circuits, convert, load, patching as p
        >>> model = convert(load("modular-addition"))
        >>> sums = {f"{a} + 4": Contrast(torch.tensor([a, 4, 113]), torch.tensor([a, 5, 113]),
        ...                              p.logit_diff(a + 4, a + 5)) for a in (3, 9)}
        >>> some = {"3 + 4": circuits.discover(model, sums["3 + 4"])}
        >>> bool(circuits.transfer(model, some, sums).loc["3 + 4", "3 + 4"] >= 0.85)
        True
    """
    reasons = [
        f"{name}: got {a_type(value)}; expected a non-empty dict: {{'a name': …}}"
        for name, value in (("circuits", circuits), ("contrasts", contrasts))
        if not isinstance(value, Mapping) or not value
    ]
    InputError.raise_if(reasons, _PROBLEM)
    for name, circuit in circuits.items():
        reasons += [f"circuit {name!r}: {reason}" for reason in no_circuit_reasons(circuit)]
    for name, contrast in contrasts.items():
        reasons += [f"contrast {name!r}: {reason}" for reason in contrast_reasons(contrast)]
    InputError.raise_if(reasons, _PROBLEM)
    rows = {
        circuit_name: {
            contrast_name: evaluate(model, circuit, contrast).faithfulness
            for contrast_name, contrast in contrasts.items()
        }
        for circuit_name, circuit in circuits.items()
    }
    return pd.DataFrame(rows).T
