"""Build an attribution graph of a metric in one run, or of its change between two runs.

The two runs are the clean and the corrupted run, or a circuit's own run and the corrupted run.

The heads and neurons with the largest attributions become the nodes of the graph; `linear_graph.py`
computes the edges between them. For each target node, the edges from all other heads are merged
into one edge from the node "rest". The sum of edge weights into a target node therefore does not
depend on which heads become nodes.

Neurons and queries read the residual stream only at their own position. Keys and values read the
residual stream at every position. A source node therefore has at most one edge of each kind to a
target, and none if the target does not read the source's position. If there could be more than
`max_edges` edges, `attribution_graph` raises an error before it computes any edge.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from attn_only_lens.arguments import POSITIVE, as_plain
from attn_only_lens.circuits.circuit import Circuit
from attn_only_lens.circuits.graph import EDGE_COLUMNS, CircuitGraph, select_largest
from attn_only_lens.circuits.linear_graph import LinearGraph, Node, Places, node_frame
from attn_only_lens.circuits.own_run import own_run
from attn_only_lens.devices import on_cpu
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.linear_map import LinearMap, of_difference, of_run
from attn_only_lens.engine.metrics import no_gradient_reasons, one_run_reasons
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.multipliers import float32_slopes
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import aligned, is_by_role, length_reasons
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import float32_runs
from attn_only_lens.engine.sites import Sites, SomeSites
from attn_only_lens.engine.tokens import all_token_texts
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of, reasons_without_heads
from attn_only_lens.heads.names import place_of
from attn_only_lens.patching.columns import site_ids
from attn_only_lens.patching.site_groups import site_groups, site_rows
from attn_only_lens.precision import full_precision

_TOP = {"run": 300, "difference": 60}
_BYTES = 40  # bytes per edge: 8 each for source, target, kind, weight, and the weight in one prompt
_ROUTERS = " (routers are nodes where tokens visit other experts)"
_PROBLEM = "no attribution graph can be made"


@one_thread_per_model
@warned_once()
@full_precision()
def attribution_graph(
    model: Any,
    contrast: Contrast,
    *,
    sites: Circuit | SomeSites | None = None,
    top: int | None = None,
    mass: float | None = None,
    positions: str | Sequence[str] = "each",
    patterns: bool = True,
    max_edges: int = 10_000_000,
) -> CircuitGraph:
    """Return a graph of how heads and neurons contribute to a metric and to each other.

    With corrupted prompts, the graph explains exactly how the metric differs between the two runs.
    The weights of the edges into a node add up to the node's attribution, and the weights of the
    edges into the metric add up to the difference in the metric. Each nonlinear function is
    replaced by its secant, a linear function with the same change between the two runs
    (`engine/secants.py`). By convention, the change in a product a · b is split into Δa · mean(b)
    and mean(a) · Δb, where the means are over the two runs. A node's attribution can differ from
    the effect of patching it.

    If `sites` is a circuit, the clean run is replaced by the circuit's own run: the clean tokens,
    with all sites outside the circuit ablated. The graph then explains what the circuit keeps, and
    nothing in it comes from the rest of the model. To see where the whole difference flows, pass
    the circuit's names: `sites=circuit.sites`.

    Without corrupted prompts, the graph explains the value of the metric in one run, with patterns
    and norm scales held fixed. The weights of the edges of kind "value" into a node add up to the
    node's attribution. Edges of kinds "q", "k" and "gate" estimate, to first order, how a source
    affects the metric by changing the target's attention pattern or gate.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
            A half-precision model is run in float32; for a difference, a warning says by how much
            this alters the difference of the metric.
        contrast: the two runs and the metric; see `Contrast`. For one run, `corrupted` is None, and
            the metric `kl` raises an error, because its gradient is 0. Attributions at the same
            position are summed over prompts.
        sites: the nodes: a circuit from `discover`, for the graph of the circuit's own run; or
            sites such as "L5N1234@7"; see `Sites`.
        top: how many heads and neurons become nodes; by default 60 for a difference, and 300 for
            one run. Pass at most one of `sites`, `top` and `mass`.
        mass: the share of Σ |attribution| that the nodes must have; 1 for all of it. Features of
            transcoders with an attribution of 0, such as inactive features, become nodes only if
            `sites` names them.
        positions: "each", or "roles" for the contrast's roles, or names of roles. Nodes are then
            heads at roles, with standard errors over prompts, and prompts may differ in length.
            Tokens without a role are summed into "rest". A circuit by role needs no positions.
        patterns: whether to include edges of kinds "q", "k" and "gate" in a graph of one run.
        max_edges: the largest allowed number of edges; an upper bound is counted before edges are
            computed.

    Raises:
        InputError: with every reason: an invalid contrast, sites, top, mass, positions or
            max_edges; unsupported norms or matrices; too many edges (the message says how much
            memory they need, and the largest top that is allowed).
        UnsupportedModelError: the model has an operation without a secant rule, or is not linear
            when patterns are held fixed.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, circuits, convert, load, patching as p
        >>> model = convert(load("modular-addition"))
        >>> sums = Contrast(torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]),
        ...                 p.logit_diff(correct=7, wrong=8))
        >>> graph = circuits.attribution_graph(model, sums, top=20)
        >>> bool(abs(graph.inflow()["metric"] - graph.value) < 1e-4 * abs(graph.value))
        True
        >>> {"value", "k", "gate"} <= set(graph.edges["kind"])  # no "q": the last token is the same
        True
    """
    circuit = sites if isinstance(sites, Circuit) else None
    if circuit is not None and as_plain(positions) == "each":
        of_circuit = circuit.candidates.positions
        positions = cast("tuple[str, ...]", of_circuit) if is_by_role(of_circuit) else positions
    reasons = [*reasons_not_to_run(model), *reasons_without_heads(model)]
    reasons += (no_contrast := contrast_reasons(contrast, both=False))
    reasons += POSITIVE.reasons(max_edges=max_edges)
    if not (by_role := is_by_role(positions)) and as_plain(positions) != "each":
        reasons.append(f"got positions={positions!r}; expected 'each', 'roles' or names of roles")
    if not no_contrast and contrast.corrupted is None:
        reasons += one_run_reasons(contrast.metric)
        reasons += ["got positions by role without corrupted prompts; expected both"] * by_role
        if circuit is not None:
            reasons.append(
                "got a circuit without corrupted prompts; expected both runs, or names of sites"
            )
    if sum(x is not None for x in (sites, top, mass)) > 1:
        given = sites if circuit is None else f"a circuit of {len(circuit)} sites"
        reasons.append(f"got top={top}, mass={mass}, sites={given}; expected at most one of them")
    InputError.raise_if(reasons + no_gradient_reasons(), _PROBLEM)
    one_run, pair, metric = contrast.corrupted is None, contrast.pair(model), contrast.metric
    if not by_role:
        InputError.raise_if(length_reasons(pair, only_columns=True) if one_run else [], _PROBLEM)
        by_role = is_by_role(positions := aligned(pair, positions))
    if top is None and mass is None:
        top = _TOP["run" if one_run else "difference"]
    with float32_runs(model, pair) if one_run else float32_slopes(model, pair, metric):
        if one_run:
            linear = of_run(model, pair, metric, patterns=patterns)
        else:
            runs = own_run(model, pair, circuit) if circuit is not None else None
            linear = of_difference(model, pair, metric, runs=runs)
        places = Places.of(pair, positions)
        by_sublayer = [
            places.sums(numbers)
            for numbers in on_cpu([linear.attributions(i) for i in range(len(linear.z))])
        ]
        attributions = torch.cat([x.flatten(1) for x in by_sublayer], dim=1).numpy().sum(0)
        sizes, n_places = np.abs(attributions), len(places.names)
        if sites is None:
            rows = _candidates(linear, sizes, n_places)
            index = rows[select_largest(sizes[rows], top=top, mass=mass)]
        else:
            nodes_asked = _node_ids(model, pair, sites, positions)
            index = _rows_of(linear, nodes_asked, places.names)
        _require_affordable(linear, sizes, index, max_edges, n_places)
        chosen = _by_sublayer(linear, index, n_places)
        at_positions = [places.positions_of(nodes) for nodes in chosen]
        edges, by_prompt = LinearGraph(linear, pair, at_positions).edges()
        rest = float(np.delete(attributions, index).sum())
        nodes = node_frame(linear, places, by_sublayer, chosen, rest)
    tokens, corrupted_tokens = (all_token_texts(model, x) for x in (pair.clean, pair.corrupted))
    if by_role:
        edges = places.by_role(edges, by_prompt, set(nodes["id"]), linear.shares)
        tokens = corrupted_tokens = (tuple(places.names),)
    elif linear.offset:
        offset = pd.DataFrame([["offset", "metric", "value", linear.offset]], columns=EDGE_COLUMNS)
        edges = pd.concat([edges, offset], ignore_index=True)
    total = sizes.sum()
    return CircuitGraph(
        nodes,
        edges,
        tokens=tokens,
        metric=linear.metric,
        value=linear.value,
        model=str(getattr(model.cfg, "model_name", "")),
        n_layers=host_of(model).n_layers,
        n_heads=len(sizes),
        mass=float(sizes[index].sum() / total) if total else 1.0,
        corrupted=() if one_run else corrupted_tokens,
        circuit=circuit,
    )


def _candidates(
    linear: LinearMap, sizes: npt.NDArray[np.float64], n_places: int
) -> npt.NDArray[np.int64]:
    """Return the row indices of all possible nodes, except features whose attribution is 0."""
    is_feature = [np.full(n_places * x.n_heads, x.kind == "feature") for x in linear.sublayers]
    return np.flatnonzero(~np.concatenate(is_feature) | (sizes > 0))


def _node_ids(
    model: Any, pair: PromptPair, sites: Circuit | SomeSites, positions: str | Sequence[str]
) -> list[str]:
    """Return the ids of the nodes for these sites; sites at "each" position are at each place."""
    sites = Sites.of(sites.sites if isinstance(sites, Circuit) else sites)
    if sites.positions == "each":
        sites = replace(sites, positions=positions)
    reasons = list[str]()
    with InputError.collected(reasons):
        rows = site_rows(site_groups(model, pair, sites, "z"))
    InputError.raise_if(reasons, _PROBLEM)
    return site_ids(rows).tolist()


def _rows_of(linear: LinearMap, wanted: list[str], places: list[str]) -> npt.NDArray[np.int64]:
    """Return the row indices of the nodes with these ids; raise an error for an unknown id."""
    first, firsts = 0, dict[tuple[int, str], tuple[int, int]]()
    for x in linear.sublayers:
        firsts[x.layer, x.kind] = first, x.n_heads
        first += len(places) * x.n_heads

    def row(site: str) -> int:
        name, _, place = site.partition("@")
        try:
            head = HeadName.parse(name)
        except InputError:
            return -1
        start, n_heads = firsts.get((head.layer, head.kind), (0, 0))
        index = place_of(head, linear.model) if n_heads else 0
        if place not in places or index >= n_heads:
            return -1
        known = HeadName.at(linear.model, head.layer, head.kind, index) == head
        return start + places.index(place) * n_heads + index if known else -1

    rows = np.array([row(site) for site in wanted], dtype=np.int64)
    unknown = [site for site, number in zip(wanted, rows, strict=True) if number < 0]
    reasons = [
        f"got the site {site!r}; expected a head or neuron at one of the places {places}, such as "
        f"'L0H0@{places[-1]}'" + _ROUTERS * ("R@" in site)
        for site in unknown[:5]
    ]
    InputError.raise_if(reasons, _PROBLEM)
    return np.sort(rows)


def _by_sublayer(
    linear: LinearMap, index: npt.NDArray[np.int64], n_places: int
) -> list[list[Node]]:
    """Return each sublayer's chosen nodes as pairs (place, index of the head in the sublayer)."""
    chosen, first = [], 0
    for writes in linear.sublayers:
        n_heads = writes.n_heads
        here = index[(index >= first) & (index < first + n_places * n_heads)] - first
        chosen.append([(i // n_heads, i % n_heads) for i in here.tolist()])
        first += n_places * n_heads
    return chosen


def _count_edges(linear: LinearMap, chosen: Sequence[Sequence[Node]]) -> int:
    """Return an upper bound on the number of edges into the chosen nodes and the metric."""
    n_pos = linear.run.embedding.shape[1]
    before, n_edges = np.zeros(n_pos, dtype=np.int64), 0
    for index, nodes in enumerate(chosen):
        here = np.bincount(np.array([pos for pos, _ in nodes], dtype=np.int64), minlength=n_pos)
        for kind in linear.kinds(index):
            # Also count edges from the embedding (one per position), "rest" and "bias".
            sources = before + 3 if linear.reads_own(index, kind) else before.sum() + n_pos + 2
            n_edges += int((here * sources).sum())
        before += here
    return n_edges + int(before.sum()) + n_pos + 2


def _require_affordable(
    linear: LinearMap,
    sizes: npt.NDArray[np.float64],
    index: npt.NDArray[np.int64],
    max_edges: int,
    n_pos: int,
) -> None:
    """Raise an error with advice if the nodes could have more than `max_edges` edges."""
    n_edges = _count_edges(linear, _by_sublayer(linear, index, n_pos))
    if n_edges <= max_edges:
        return

    order = np.argsort(-sizes, kind="stable")

    def too_many(top: int) -> bool:
        return _count_edges(linear, _by_sublayer(linear, order[:top], n_pos)) > max_edges

    few = bisect_left(range(1, len(index)), True, key=too_many)
    n_bytes = n_edges * (_BYTES - 8 + 8 * len(linear.run.embedding))
    share, left = (sizes[rows].sum() / sizes.sum() for rows in (index, order[:few]))
    advice = f"take top={few:,} ({left:.0%} of the mass)" if few else "even top=1 has too many"
    reason = (
        f"{len(index):,} nodes ({share:.0%} of the mass) have up to {n_edges:,} edges, which need "
        f"{n_bytes / 2**30:.1f} GiB; expected at most max_edges={max_edges:,}: {advice}, pass "
        "patterns=False, or raise max_edges"
    )
    raise InputError([reason], "this graph is too large")
