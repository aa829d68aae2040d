"""Group attribution-graph nodes that have similar weights and edges into "supernodes".

Only nodes of the same kind at the same position can form a group. The similarity of two nodes is
the mean of three values:

    cos(edges out), cos(edges in)    edges by neighbour and kind; a missing edge is 0
    max(cos(write), cos(read))       write: what the difference of z between the runs adds to the
                                     residual stream; read: the input direction of the gate, only
                                     for neurons and features

Groups are found by average-linkage clustering. To test a group, the output z of each member is
replaced by corrupted z + t · (clean z - corrupted z), where clean z and corrupted z are the
member's outputs in the two runs. All members of a group share one value of t per prompt. A
least-squares fit finds the t that best reproduces the members' outputs to the residual stream when
all sites outside the graph are ablated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from attn_only_lens.arguments import Allowed, a_type, is_number
from attn_only_lens.circuits.ablated_model import AblatedModel, Ablation
from attn_only_lens.circuits.ablated_points import AblatedPoints, Rows
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.linear_graph import Places
from attn_only_lens.circuits.own_run import graph_runs, reasons_of_another_run
from attn_only_lens.circuits.weights.head_matrices import HeadMatrices
from attn_only_lens.circuits.weights.vocabulary import DirectEffects
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import as_metric
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import missing_role_reasons
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.replay import Variants
from attn_only_lens.engine.sites import LayerSites, Sites
from attn_only_lens.engine.tokens import all_token_texts, token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import HEAD_PLURALS, NEURON_KINDS
from attn_only_lens.patching.columns import site_ids
from attn_only_lens.patching.site_groups import site_groups, site_rows
from attn_only_lens.precision import full_precision

_ABLATION: Ablation = "resample"
_PROBLEM = "these nodes cannot be grouped"
_STEP = 0.05  # the step by which the similarity threshold is raised
_LONGEST = 12  # the maximum length of a token in a group's name


@dataclass(frozen=True, eq=False, repr=False)
class NodeGroups:
    """Groups of graph nodes that have similar weights and edges. Made by `group_nodes`.

    Attributes:
        frame: one row per group, the largest effect first. Columns: `name`; `members` (ids);
            `effect`, the decrease of the metric if all members are patched together from the
            corrupted run; `sum_of_effects`, the sum over members of the effects of patching each
            one alone; and `attribution`, the sum of the members' attributions.
        nodes: one row per head, neuron, feature and error node of the graph. Columns: `id`;
            `group` (the group's row in `frame`, or -1 for none); and `effect`, the decrease of the
            metric if the node is patched alone.
        faithfulness: the faithfulness of the graph's nodes, with all other heads and neurons
            ablated.
        group_faithfulness: the faithfulness if each group is also replaced by one number for each
            prompt.
        similarity: the smallest average similarity within a group.
        why_none: why there are no groups, and what to change; "" if there are groups.
    """

    frame: pd.DataFrame
    nodes: pd.DataFrame
    faithfulness: float
    group_faithfulness: float
    similarity: float
    why_none: str = ""

    def __len__(self) -> int:
        return len(self.frame)

    def __repr__(self) -> str:
        if self.why_none:
            return f"no groups among {len(self.nodes)} nodes: {self.why_none}"
        inside = int((self.nodes["group"] >= 0).sum())
        return (
            f"{len(self)} groups of {inside} of {len(self.nodes)} nodes; faithfulness "
            f"{self.faithfulness:.2f} of the nodes, {self.group_faithfulness:.2f} with each group "
            "replaced by one number"
        )


@one_thread_per_model
@warned_once()
@full_precision()
def group_nodes(
    graph: CircuitGraph,
    model: Any,
    contrast: Contrast,
    *,
    similarity: float = 0.6,
    tolerance: float = 0.05,
    examples: pd.DataFrame | None = None,
) -> NodeGroups:
    """Group nodes with similar weights and edges, and compute each group's effect by patching.

    Each group is named after the tokens that its members together promote most.

    Args:
        graph: an attribution graph of the difference between the two prompts, from
            `attribution_graph`.
        model: the graph's model.
        contrast: the graph's contrast.
        similarity: from 0 to 1: the smallest average similarity within a group. It is raised in
            steps of 0.05, which makes groups smaller, until the change in faithfulness is within
            `tolerance`.
        tolerance: how much the faithfulness may change if each group is replaced by one number.
        examples: top examples of neurons, from `neurons.top_examples`; groups are then also named
            after the token at which most of their neurons have their largest output.

    Raises:
        InputError: with every reason: a graph of one run; a similarity outside [0, 1]; a model or
            a contrast other than the graph's.

    Example:
        >>> from attn_only_lens import Contrast, circuits, expose_neuron_heads
        >>> from attn_only_lens import load, patching as p
        >>> model = expose_neuron_heads(load("small-english"), copy=True).model
        >>> keys = Contrast("The keys near the cabinet", "The key near the cabinet",
        ...                 p.logit_diff(" are", " is"))
        >>> graph = circuits.attribution_graph(model, keys, top=40)
        >>> groups = circuits.group_nodes(graph, model, keys)
        >>> len(groups) > 2, abs(groups.faithfulness - groups.group_faithfulness) < 0.05
        (True, True)
    """
    reasons = _reasons(graph, similarity, tolerance, examples) + contrast_reasons(contrast)
    InputError.raise_if(reasons, _PROBLEM)
    pair, positions = contrast.pair(model), graph.roles or "each"
    _require_same_contrast(graph, model, pair, contrast, positions)
    candidates, ablation = Sites(positions=positions), _ABLATION
    if graph.circuit is not None:  # all other sites stay as they are
        candidates, ablation = graph.circuit.candidates, graph.circuit.ablation
    sites = site_rows(site_groups(model, pair, candidates, "z"))
    heads = graph.heads.reset_index(drop=True)
    rows = pd.Index(site_ids(sites)).get_indexer(pd.Index(heads["id"]))
    unknown = heads["id"][rows < 0]
    InputError.raise_if(
        [
            f"got node {x}, a router, which cannot be in a group; expected heads and neurons"
            if HeadName.parse(x.partition("@")[0]).kind == "router"
            else f"got node {x}; the model has no such head or position"
            for x in unknown[:5]
        ],
        _PROBLEM,
    )
    grouped = _GroupedModel(model, pair, contrast.metric, sites, ablation=ablation)
    grouped.require_same_runs(graph, model, pair, Places.of(pair, positions))
    of_nodes = grouped.written(rows)
    distance = _distances(graph, heads, _similar_weights(model, heads, of_nodes))
    faithfulness, members, changed = float(grouped.faithfulness([rows])[0]), list[Rows](), np.inf
    rejected: tuple[float, int, float] | None = None
    # The last threshold is above 1, so no nodes are grouped if all other thresholds fail.
    for least in np.append(np.arange(similarity, 1, _STEP), 1 + _STEP):
        members = _clusters(heads, distance, least)
        changed = grouped.as_one(rows, [rows[group] for group in members])
        if abs(changed - faithfulness) <= tolerance:
            break
        if members:
            rejected = float(least), len(members), changed
    every = np.arange(len(sites))
    patched = [[row] for row in rows] + [rows[group] for group in members]
    left = grouped.faithfulness([np.delete(every, some) for some in patched])
    effects = (1 - left) * grouped.span
    single, joint = effects[: len(rows)], effects[len(rows) :]
    frame = pd.DataFrame(
        {
            "name": _names(model, heads, of_nodes, members, peak_tokens(examples)),
            "members": [tuple(heads["id"][group]) for group in members],
            "effect": joint,
            "sum_of_effects": [single[group].sum() for group in members],
            "attribution": [heads["attribution"][group].sum() for group in members],
        }
    )
    order = frame["effect"].abs().argsort(kind="stable")[::-1].to_numpy()
    number = np.full(len(heads), -1)
    for new, previous in enumerate(order):
        number[members[previous]] = new
    return NodeGroups(
        frame.iloc[order].reset_index(drop=True),
        pd.DataFrame({"id": heads["id"], "group": number, "effect": single}),
        faithfulness=faithfulness,
        group_faithfulness=changed,
        similarity=round(float(least), 2),
        why_none="" if members else _why_none(heads, distance, similarity, tolerance, rejected),
    )


def _reasons(graph: object, similarity: object, tolerance: object, examples: Any) -> list[str]:
    """Return error messages for invalid arguments of `group_nodes`."""
    reasons = []
    if not isinstance(graph, CircuitGraph):
        reasons.append(f"got {a_type(graph)}; expected a graph from attribution_graph")
    elif not graph.corrupted:
        reasons.append("got a graph of one run; expected one of a contrast with corrupted prompts")
    elif graph.heads.empty:
        reasons.append("got a graph without heads and neurons")
    from_0_to_1 = Allowed("a number from 0 to 1", lambda share: is_number(share, 0, 1))
    reasons += from_0_to_1.reasons(similarity=similarity, tolerance=tolerance)
    columns = {"name", "rank", "value", "tokens", "position"}
    if examples is not None and not columns <= set(getattr(examples, "columns", ())):
        reasons.append("got invalid examples; expected the result of neurons.top_examples")
    return reasons


def _require_same_contrast(
    graph: CircuitGraph,
    model: Any,
    pair: PromptPair,
    contrast: Contrast,
    positions: str | tuple[str, ...],
) -> None:
    """Raise an error unless the graph was computed with this contrast."""
    reasons = []
    if positions == "each":
        here = [all_token_texts(model, tokens) for tokens in (pair.clean, pair.corrupted)]
        if here != [graph.tokens, graph.corrupted]:
            reasons.append("got prompts other than the graph's")
    else:
        reasons += missing_role_reasons(contrast.roles, positions, "graph")
    if (name := as_metric(contrast.metric).name) != graph.metric:
        reasons.append(f"got the metric {name}; expected the graph's metric, {graph.metric}")
    InputError.raise_if(reasons, _PROBLEM)


def _cosines(vectors: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n n"]:
    """Return the cosine similarity of each pair of rows (0 if either row is zero)."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return np.asarray(units @ units.T)


def _similar_weights(
    model: Any, heads: pd.DataFrame, written: Float[Tensor, "node d_model"]
) -> Float[np.ndarray, "node node"]:
    """Return, for each pair, the larger cosine similarity: of outputs or of gate directions."""
    write = written.cpu().double()
    read = torch.zeros_like(write)
    matrices = HeadMatrices.of(model, fold_norms=True)
    for _, some in heads[heads["kind"].isin(NEURON_KINDS)].groupby("layer", observed=True):
        sites = LayerSites.of(model, map(HeadName.parse, some["name"]))
        directions = matrices.outputs(sites, sites.index.new_ones(len(some), 1).float()).cpu()
        # If a neuron's output is smaller in the clean run, `write` points against the neuron's
        # output direction, so the sign of `read` is flipped too.
        rows = torch.from_numpy(some.index.to_numpy(copy=True))
        signs = (write[rows] * directions).sum(1, keepdim=True).sign()
        read[rows] = matrices.read_matrices(sites, "q").A[:, :, 0].cpu().double() * signs
    return np.maximum(_cosines(write.numpy()), _cosines(read.numpy()))


def _distances(
    graph: CircuitGraph, heads: pd.DataFrame, weights: Float[np.ndarray, "node node"]
) -> Float[np.ndarray, "node node"]:
    """Return 1 minus the similarity of each pair of nodes; see the module docstring."""
    similar = [weights]
    for end, opposite in (("source", "target"), ("target", "source")):
        edges = graph.edges[graph.edges[end].isin(heads["id"])]
        table = edges.pivot_table("weight", end, [opposite, "kind"], fill_value=0.0, observed=True)
        similar.append(_cosines(table.reindex(heads["id"], fill_value=0.0).to_numpy(dtype=float)))
    return np.clip(1 - np.mean(similar, axis=0), 0, None)


def _clusters(
    heads: pd.DataFrame, distance: Float[np.ndarray, "node node"], similarity: float
) -> list[Rows]:
    """Cluster similar nodes; return each cluster of two or more nodes as row indices of `heads`."""
    groups = list[Rows]()
    for some in heads.groupby(["kind", "position"], observed=True).indices.values():
        rows = np.asarray(some, dtype=np.int64)
        if len(rows) < 2:
            continue
        apart = distance[np.ix_(rows, rows)]
        tree = linkage(squareform(apart, checks=False), "average")
        of_each = fcluster(tree, 1 - similarity, "distance")
        clusters = [rows[of_each == label] for label in np.unique(of_each)]
        groups += [cluster for cluster in clusters if len(cluster) > 1]
    return groups


def _why_none(
    heads: pd.DataFrame,
    distance: Float[np.ndarray, "node node"],
    similarity: float,
    tolerance: float,
    rejected: tuple[float, int, float] | None,
) -> str:
    """Say why no nodes were grouped; `rejected` are the last groups that changed the metric."""
    if rejected is not None:
        least, n, changed = rejected
        return (
            f"{n} groups with a similarity of at least {least:.2f} changed the faithfulness to "
            f"{changed:.2f} when one number replaced each of them, which is more than "
            f"tolerance={tolerance:g} allows; pass a larger tolerance="
        )
    places = heads.groupby(["kind", "position"], observed=True).ngroup().to_numpy()
    pairs = np.triu(places[:, None] == places, 1)
    if not pairs.any():
        return "no two of them have the same kind and the same position"
    most = 1 - distance[pairs].min()
    return (
        f"the two most similar ones of the same kind at the same position have a similarity of "
        f"{most:.2f}; pass similarity={np.floor(20 * most) / 20:g} to group them"
    )


def _names(
    model: Any,
    heads: pd.DataFrame,
    written: Float[Tensor, "node d_model"],
    members: Sequence[Rows],
    peaks: Mapping[str, str],
) -> list[str]:
    """Name each group after the tokens it promotes and its neurons' most common peak token."""
    if not members:
        return []
    sums = torch.stack([written[group].sum(0) for group in members])
    names = []
    for group, top in zip(members, DirectEffects(model).tokens_of(sums, 2), strict=True):
        kind = HEAD_PLURALS[heads["kind"][group[0]]]
        tokens = [_short(token_text(model, token)) for token, amount in top if amount > 0]
        name = f"{len(group)} {kind} → {', '.join(tokens)}" if tokens else f"{len(group)} {kind}"
        if at_peaks := [_short(peaks[x]) for x in set(heads["name"][group]) if x in peaks]:
            most_common = pd.Series(at_peaks).mode().iloc[0]
            name = name.replace(kind, f"{kind} at “{most_common}”", 1)
        names.append(name)
    return names


def peak_tokens(examples: pd.DataFrame | None) -> dict[str, str]:
    """Return a dict from neuron names to the token at which the neuron's |output| is largest."""
    if examples is None:
        return {}
    first = examples[examples["rank"] == 1]
    first = first.loc[first["value"].abs().groupby(first["name"], observed=True).idxmax()]
    columns = [first[column].tolist() for column in ("name", "tokens", "position")]
    return {name: texts[position] for name, texts, position in zip(*columns, strict=True)}


def _short(token: str) -> str:
    return token.strip()[:_LONGEST] or repr(token)


class _GroupedModel(AblatedModel):
    """An ablated model that tests the nodes and groups of a graph."""

    def __init__(self, model: Any, *runs_and_sites: Any, ablation: Ablation) -> None:
        super().__init__(model, *runs_and_sites, ablation=ablation)
        self._matrices = HeadMatrices.of(model, fold_norms=True)
        self._whole = self._changes(np.arange(self.n_sites))

    def require_same_runs(
        self, graph: CircuitGraph, model: Any, pair: PromptPair, places: Places
    ) -> None:
        """Raise an error if the runs do not give the graph's node values and change of metric."""
        heads = {(x.layer, x.kind) for x in map(HeadName.parse, graph.heads["name"])}
        names = [host_of(model).hook_name(layer, kind, "z") for layer, kind in heads]
        runs = graph_runs(graph, model, pair, names)
        reasons = reasons_of_another_run(graph, model, runs[0].hooked, places)
        first, second = (self._replay.metric.of(run.logits) for run in runs)
        change = first - second
        if abs(change - graph.value) > 1e-2 * max(abs(change), abs(graph.value)):
            reasons.append(
                f"got a metric that changes by {change:.4g} between the prompts, but in the "
                f"graph it changes by {graph.value:.4g}: the graph has another metric, other "
                "answers or other corrupted prompts"
            )
        InputError.raise_if(reasons, _PROBLEM)

    @torch.no_grad()
    def _run(self, hooks: Any) -> Float[Tensor, "1 prompt"]:
        stream = self._replay.recorded_stream(0, self._first, 1)
        return self._replay.values(Variants(0, self._first, stream, hooks))

    def _changes(self, kept: Rows) -> dict[str, Tensor]:
        """Return z minus corrupted z at each hook point, with all sites except `kept` ablated."""
        z = dict[str, Tensor]()
        self._run(self._points.hooks([kept], self._first, z))
        first = self._first
        return {x.name: z[x.name] - x.replacement[:, first:].to(z[x.name]) for x in self._points}

    def _place(self, row: int) -> tuple[str, int, Tensor]:
        """Return a site's hook point, its head, and a position mask [batch or 1, pos]."""
        (point,) = [x for x in self._points if row in x.rows]
        ((index, place),) = np.stack([point.index, point.place], 1)[point.rows == row]
        return point.name, int(index), torch.from_numpy(point.place_of[:, self._first :] == place)

    def _writes(self, row: int, changes: Mapping[str, Tensor]) -> Float[Tensor, "prompt d_model"]:
        """Return what the changes in a site's z add to the residual stream in each prompt."""
        name, head, here = self._place(row)
        change = changes[name][:, :, head]
        z = (change * here.to(change)[..., None]).sum(dim=1)
        site = HeadName.parse(str(self.sites["name"][row]))
        return self._matrices.outputs(
            LayerSites.of(self._matrices.model, [site] * len(z)), z
        ).double()

    def written(self, rows: Rows) -> Float[Tensor, "node d_model"]:
        """Return each site's mean output to the residual stream, clean minus corrupted run."""
        return torch.stack([self._writes(row, self._whole).mean(0) for row in rows.tolist()])

    def as_one(self, circuit: Rows, groups: Sequence[Rows]) -> float:
        """Return the faithfulness of a circuit in which one number per prompt scales each group."""
        whole, here = self._whole, self._changes(circuit)
        new = {point.name: point.replacement.clone() for point in self._points}
        for group in groups:
            pairs = [(self._writes(r, whole), self._writes(r, here)) for r in group.tolist()]
            size = torch.stack([(a * a).sum(1) for a, _ in pairs]).sum(0)
            both = torch.stack([(a * b).sum(1) for a, b in pairs]).sum(0)
            t = torch.where(size > 0, both / size.clamp(min=1e-30), 1.0)
            for row in group.tolist():
                name, head, place = self._place(row)
                share = t[:, None, None].to(whole[name]) * place[..., None]
                new[name][:, self._first :, head] += share * whole[name][:, :, head]
        alone = np.setdiff1d(circuit, np.concatenate(groups)) if groups else circuit
        points = (replace(point, replacement=new[point.name]) for point in self._points)
        values = self._run(AblatedPoints(points).hooks([alone], self._first))
        mean = float(self._mean(values.cpu().double().numpy())[0])
        return (mean - self.nothing) / self.span
