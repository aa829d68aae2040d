"""The run of a circuit alone, next to the corrupted run: what the circuit keeps, and how.

The circuit's own run has the clean tokens, but every site outside the circuit is ablated, as in the
search that found the circuit. For "resample", such a site has its output in the corrupted run. For
another ablation, it has the same output in both runs. So no site outside the circuit changes
between the two runs, and the circuit's sites and the tokens account for the whole change of the
metric.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.ablated_model import ablated_run, checked_places
from attn_only_lens.circuits.ablated_points import Rows, ablated_points
from attn_only_lens.circuits.circuit import SITE_KEY, Circuit
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.linear_graph import Places
from attn_only_lens.engine.multipliers import BothRuns, Held, run_both
from attn_only_lens.engine.positions import column_reasons, missing_role_reasons
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import Recording, record
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import NEURON_KINDS
from attn_only_lens.heads.names import place_of
from attn_only_lens.patching.site_groups import site_groups, site_rows
from attn_only_lens.tolerances import LOGIT_TOLERANCE


def own_run(model: Any, pair: PromptPair, circuit: Circuit) -> BothRuns:
    """Return the run of a circuit and the corrupted run, with the writes of all sublayers."""
    return run_both(model, pair, decomposed=True, held=held_outside(model, pair, circuit))


def held_outside(model: Any, pair: PromptPair, circuit: Circuit) -> dict[str, Held]:
    """Return the sites outside a circuit on these prompts, by the hook name of z.

    Raises:
        InputError: as in `members`.
    """
    sites, rows = members(model, pair, circuit, "this circuit has no run on these prompts")
    clean, corrupted = run_both(model, pair).recordings()
    roles = checked_places(pair, sites)
    source = ablated_run(clean, corrupted, circuit.ablation, pair, roles)
    points = ablated_points(model, source, sites, roles)
    return {
        point.name: Held(
            point.ablated(kept, 0)[0],
            None if circuit.ablation == "resample" else point.replacement,
        )
        for point, kept in zip(points, points.kept([rows]), strict=True)
    }


def members(
    model: Any, pair: PromptPair, circuit: Circuit, problem: str
) -> tuple[pd.DataFrame, Rows]:
    """Return all candidates of a circuit on these prompts, and which rows belong to the circuit.

    Raises:
        InputError: prompts of another length or with other padding, unless positions are "all" or
            by role; prompts that lack one of the circuit's roles; a circuit with sites that the
            model does not have.
    """
    places, reasons = circuit.frame["position"].unique().tolist(), list[str]()
    if not all(isinstance(place, str) for place in places):
        reasons += column_reasons(pair, range(circuit.start, circuit.start + circuit.n_pos))
    candidates = circuit.candidates.positions
    at_roles = [*(candidates if isinstance(candidates, tuple) else ()), *places]
    at_roles = [x for x in dict.fromkeys(at_roles) if isinstance(x, str) and x != "all"]
    reasons += missing_role_reasons(pair.roles, at_roles, "circuit")
    if circuit.frame.duplicated(SITE_KEY).any():
        reasons.append("some sites are in the circuit twice; expected one row for each site")
    with InputError.collected(reasons):
        sites = site_rows(site_groups(model, pair, circuit.candidates, "z"))
    InputError.raise_if(reasons, problem)
    rows = np.flatnonzero(circuit.contains(sites))
    if missing := len(circuit) - len(rows):
        reason = (
            f"{missing} sites of the circuit do not exist: the model lacks the head, or the "
            "prompts lack the position"
        )
        raise InputError([reason], problem)
    return sites, rows


def graph_runs(
    graph: CircuitGraph, model: Any, pair: PromptPair, names: Sequence[str]
) -> tuple[Recording, Recording]:
    """Record hook points in both runs of a graph: the clean or a circuit's run, and the other."""
    held = {} if graph.circuit is None else held_outside(model, pair, graph.circuit)
    hooks = [(name, heads.hook) for name, heads in held.items()]
    both, n = record(model, *pair.together, names=names, hooks=hooks), len(pair.clean)
    return both[:n], both[n:]


def reasons_of_another_run(
    graph: CircuitGraph,
    model: Any,
    z: Mapping[str, Float[Tensor, "batch pos head d_head"]],
    places: Places,
) -> list[str]:
    """Return a reason if a graph's first run, with outputs z by hook name, lacks its values.

    The run then has other prompts or another model than the graph.
    """
    heads, host, values = graph.heads, host_of(model), list[float]()
    for name, place in zip(heads["name"], heads["id"].str.partition("@")[2], strict=True):
        head = HeadName.parse(name)
        of_head = z[host.hook_name(head.layer, head.kind, "z")][:, :, place_of(head, model)]
        sizes = of_head[..., 0] if head.kind in NEURON_KINDS else of_head.norm(dim=-1)
        index = places.names.index(place)
        values.append(float(places.means(sizes.unsqueeze(-1))[index, 0]))
    expected = heads["value"].to_numpy()
    # Bridges compute many norms in float32, so even a float64 model needs a tolerance of 1e-3.
    dtype = next(model.parameters()).dtype
    allowed = max(1e-3, LOGIT_TOLERANCE[dtype]) * abs(expected).max(initial=0)
    apart = np.flatnonzero(~(abs(expected - values) <= allowed))
    return [
        f"got prompts or a model with which {heads['id'].iloc[row]} is {values[row]:.4g}, but in "
        f"the graph it is {expected[row]:.4g}: the graph is from another model, or from other "
        "prompts"
        for row in apart[:1]
    ]
