"""Evaluate several circuits on several tasks."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from attn_only_lens.arguments import a_type
from attn_only_lens.circuits._evaluate import evaluate, no_circuit_reasons
from attn_only_lens.circuits.circuit import Circuit
from attn_only_lens.errors import InputError
from attn_only_lens.tasks import PairedPrompts

_PROBLEM = "these circuits cannot be evaluated on these tasks"


def transfer(model: Any, circuits: Mapping[str, Circuit], tasks: Mapping[str, Any]) -> pd.DataFrame:
    """Compute the faithfulness of every circuit on the prompts of every task.

    Args:
        model: the circuits' model.
        circuits: a dict from names to circuits from `discover`.
        tasks: a dict from names to `PairedPrompts`, or to (clean, corrupted, metric). A task may
            have more roles than a circuit. A circuit without roles needs prompts of the length on
            which it was found.

    Returns:
        A frame of faithfulness values with one row per circuit and one column per task.
        `viz.transfer_heatmap` draws it.

    Raises:
        InputError: a task lacks one of a circuit's roles, or an argument of `evaluate` is invalid.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> tasks = {f"{a} + 4": (torch.tensor([a, 4, 113]), torch.tensor([a, 5, 113]),
        ...                       p.logit_diff(a + 4, a + 5)) for a in (3, 9)}
        >>> some = {"3 + 4": circuits.discover(model, *tasks["3 + 4"])}
        >>> bool(circuits.transfer(model, some, tasks).loc["3 + 4", "3 + 4"] >= 0.85)
        True
    """
    reasons = [
        f"{name}: got {a_type(value)}; expected a non-empty dict: {{'a name': …}}"
        for name, value in (("circuits", circuits), ("tasks", tasks))
        if not isinstance(value, Mapping) or not value
    ]
    InputError.raise_if(reasons, _PROBLEM)
    for name, circuit in circuits.items():
        reasons += [f"circuit {name!r}: {reason}" for reason in no_circuit_reasons(circuit)]
    for name, task in tasks.items():
        if not isinstance(task, PairedPrompts) and not (isinstance(task, tuple) and len(task) == 3):
            expected = "expected PairedPrompts, or a tuple (clean, corrupted, metric)"
            reasons.append(f"task {name!r}: got {a_type(task)}; {expected}")
    InputError.raise_if(reasons, _PROBLEM)
    rows = {}
    for circuit_name, circuit in circuits.items():
        row = rows[circuit_name] = dict[str, float]()
        for task_name, task in tasks.items():
            if isinstance(task, PairedPrompts):
                prompts, roles = (task.clean, task.corrupted, task.metric), task.roles
            else:
                prompts, roles = task, {}
            positions = None
            if isinstance(circuit.positions, Mapping):
                positions = {role: roles[role] for role in roles if role in circuit.positions}
            row[task_name] = evaluate(model, circuit, *prompts, positions=positions).faithfulness
    return pd.DataFrame(rows).T
