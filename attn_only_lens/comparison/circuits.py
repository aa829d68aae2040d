"""The circuits of two models at equal faithfulness: nodes and edges that are kept, lost, gained.

Each model's circuit is the shortest prefix by |estimated effect| that `circuits.discover` finds for
the same faithfulness on the same prompts, `order="magnitude"` and `budget=0`, without pruning:
heads and neurons at positions. Its edges are those of its attribution graph between its nodes, from
the embedding and into the metric, and of each kind as few as have a share of Σ |weight|: with
patterns frozen nearly every pair of nodes has some edge. An edge's weight does not depend on which
other nodes are chosen, so the edges of both models are computed between the nodes of both circuits.

A node is a row of one array for all models, [component of the grown model, position]; if a model
has no such component its scores are NaN.

Overlap of two circuits A and B:

    Jaccard            |A ∩ B| / |A ∪ B|; 1 if both are empty
    rank correlation   Spearman's, of the scores of A ∪ B that both models have

Confidence intervals come from resampling prompts with replacement (the bootstrap: Efron, 1979). In
each resample scores are means over its prompts; a circuit keeps its number of nodes, now those of
largest |score|, and its edges are again as few as have the share of Σ |weight|. Sizes stay fixed,
since finding them anew would take a search for each resample. An estimate may lie outside its
interval, as every resample has fewer distinct prompts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
from jaxtyping import Float

from attn_only_lens.circuits._attribution_graph import LinearGraph
from attn_only_lens.circuits.graph import select_largest
from attn_only_lens.circuits.linear_model import linearize
from attn_only_lens.comparison.alignment import Alignment
from attn_only_lens.comparison.batch_runs import BatchRun, on_device_of
from attn_only_lens.comparison.batches import Batch
from attn_only_lens.comparison.progress import MODELS, stage_bar
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import HeadName
from attn_only_lens.numerics import full_precision, spearman
from attn_only_lens.runs.metrics import bind
from attn_only_lens.runs.recording import record
from attn_only_lens.runs.sites import LayerSites, all_heads, resolve_sites

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]


class CircuitFrames(NamedTuple):
    """The frames `circuits`, `nodes` and `edges` of a `Comparison`."""

    circuits: pd.DataFrame
    nodes: pd.DataFrame
    edges: pd.DataFrame


def compare_circuits(
    models: Sequence[Any],
    alignment: Alignment,
    batch: Batch,
    runs: Sequence[BatchRun],
    sizes: Sequence[int],
    resampling: "Resampling",
    *,
    n_nodes: int,
    edge_mass: float,
    progress: bool = False,
) -> CircuitFrames:
    """Compare the circuit of a model with that of the grown one, and that with the null's.

    Args:
        models: the original, the grown one and, if there is one, the null.
        alignment: of the first two.
        batch: the prompts and the metric.
        runs: of the batch, by model.
        sizes: of each model's circuit, in nodes.
        resampling: of the prompts.
        n_nodes: how many nodes to compute edges between; 0 for no edges.
        edge_mass: the share of Σ |weight| that edges of each kind must have.
        progress: whether to show bars over nodes whose edges are found, and over resamples.

    Raises:
        UnsupportedModelError: a model is not linear when frozen.
    """
    own, grown = _component_rows(models[1], alignment, batch.pair.clean.shape[1])
    components = [own, *[grown] * (len(models) - 1)]
    circuits = [
        _ScoredCircuit(rows, size, rows.scores(run))
        for rows, size, run in zip(components, sizes, runs, strict=True)
    ]
    uniform = resampling.uniform
    nodes = np.unique(np.concatenate([each.nodes(uniform) for each in circuits]))
    effects = np.nanmax([np.abs(each.scores[nodes] @ uniform) for each in circuits], axis=0)
    nodes = nodes[np.sort(np.argsort(-effects, kind="stable")[:n_nodes])]
    edges = _edges_between(models, batch, components, nodes, progress)
    overlays = [
        _Overlay(circuits[i], circuits[i + 1], edges, (i, i + 1), edge_mass)
        for i in range(len(models) - 1)
    ]
    n_resamples = len(overlays) * resampling.n_resamples
    with stage_bar("bootstrap", n_resamples, "resample", progress) as bar:
        rows = [
            {"pair": label, "what": what, **measures}
            for label, overlay in zip(("grown", "null model"), overlays, strict=False)
            for what, measures in overlap_measures(overlay.overlaps, resampling, bar.update).items()
        ]
    return CircuitFrames(pd.DataFrame(rows), overlays[0].nodes(uniform), overlays[0].edges(uniform))


@dataclass(frozen=True)
class Resampling:
    """Settings of the bootstrap.

    Attributes:
        n_prompts: how many there are.
        n_resamples: how many to draw.
        confidence: of the intervals.
        seed: of the draws.
    """

    n_prompts: int
    n_resamples: int
    confidence: float
    seed: int

    @property
    def uniform(self) -> _Floats:
        """The weight of each prompt in the sample itself."""
        return np.full(self.n_prompts, 1 / self.n_prompts)

    def weights(self) -> Iterator[_Floats]:
        """Yield the weight of each prompt in each resample."""
        generator = np.random.default_rng(self.seed)
        for _ in range(self.n_resamples):
            yield generator.multinomial(self.n_prompts, self.uniform) / self.n_prompts

    def interval(self, values: _Floats) -> tuple[float, float]:
        """Return quantiles of the values that are not NaN; NaN if there are none."""
        values = values[~np.isnan(values)]
        if not len(values):
            return float("nan"), float("nan")
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(values, [tail, 1 - tail])
        return float(low), float(high)


class Overlap(NamedTuple):
    """Rows (nodes or edges) of two circuits, and the scores of all rows in both models."""

    first: _Ints
    second: _Ints
    scores: _Floats
    other_scores: _Floats

    @property
    def union(self) -> _Ints:
        """Rows of either circuit."""
        return np.union1d(self.first, self.second).astype(np.int64)

    def status(self) -> npt.NDArray[np.object_]:
        """Of each row of the union: "kept", "lost" or "gained"."""
        before, after = (np.isin(self.union, rows) for rows in (self.first, self.second))
        found = np.where(before & after, "kept", np.where(before, "lost", "gained"))
        return found.astype(object)

    def similarity(self) -> dict[str, float]:
        """Jaccard index and rank correlation."""
        union = self.union
        jaccard = len(np.intersect1d(self.first, self.second)) / len(union) if len(union) else 1.0
        first, second = (each[union] for each in (self.scores, self.other_scores))
        both = ~np.isnan(first) & ~np.isnan(second)
        return {"jaccard": jaccard, "rank_correlation": spearman(first[both], second[both])}


def overlap_measures(
    overlaps: Callable[[_Floats], dict[str, Overlap]],
    resampling: Resampling,
    on_resample: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, float]]:
    """Return counts, Jaccard index and rank correlation, with intervals.

    Args:
        overlaps: from the weight of each prompt to nodes, and each kind of edges, of two circuits.
        resampling: of the prompts.
        on_resample: called after each resample.
    """
    resampled = []
    for weights in resampling.weights():
        resampled.append({what: each.similarity() for what, each in overlaps(weights).items()})
        on_resample()
    found: dict[str, dict[str, float]] = {}
    for what, overlap in overlaps(resampling.uniform).items():
        n_first, n_second = len(overlap.first), len(overlap.second)
        kept = len(np.intersect1d(overlap.first, overlap.second))
        row: dict[str, float] = {"original": n_first, "grown": n_second, "kept": kept}
        row |= {"lost": n_first - kept, "gained": n_second - kept}
        for name, value in overlap.similarity().items():
            values = np.array([each[what][name] for each in resampled], dtype=float)
            low, high = resampling.interval(values)
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
        found[what] = row
    return found


def largest(scores: _Floats, size: int) -> _Ints:
    """Return the rows of the largest |score|, of equals the first; never rows without a score."""
    sizes = np.where(np.isnan(scores), -1.0, np.abs(scores))
    if not 0 < size < len(sizes):
        return np.flatnonzero(sizes >= 0)[: max(size, 0)]
    # A partition, not a sort: there may be millions of rows, and hundreds of resamples.
    least = np.partition(sizes, len(sizes) - size)[len(sizes) - size]
    above, equal = np.flatnonzero(sizes > least), np.flatnonzero(sizes == least)
    return np.sort(np.concatenate([above, equal[: size - len(above)]]))


def select_mass(
    weights: _Floats, kinds: npt.NDArray[np.object_], among: _Ints, mass: float
) -> _Ints:
    """Return as few of some rows as have a share of their Σ |weight|, for each kind separately."""
    found = [among[:0]]
    for kind in pd.unique(kinds[among]):
        rows = among[(kinds[among] == kind) & (weights[among] != 0)]
        found.append(rows[select_largest(np.abs(weights[rows]), mass=mass)])
    return np.sort(np.concatenate(found))


@dataclass(frozen=True, eq=False)
class _ComponentRows:
    """The components of a model, as rows of the list of all components of the grown model.

    Attributes:
        groups: by layer and kind, components of this model and their rows.
        names: of all rows, in the grown model.
        n_pos: positions of the prompts.
    """

    groups: tuple[tuple[LayerSites, _Ints], ...]
    names: npt.NDArray[np.object_]
    n_pos: int

    @property
    def grown_names(self) -> dict[str, str]:
        """Names in the grown model, by names in this one."""
        return {
            name: str(self.names[row])
            for sites, rows in self.groups
            for name, row in zip(sites.names, rows, strict=True)
        }

    def ids(self, nodes: _Ints) -> list[str]:
        """`L5N1234@7`, in the grown model."""
        return [f"{self.names[node // self.n_pos]}@{node % self.n_pos}" for node in nodes.tolist()]

    def within(self, nodes: _Ints) -> list[list[tuple[int, int]]]:
        """(position, index in this model) of its nodes among these, by layer and kind."""
        found = []
        for sites, rows in self.groups:
            index = dict(zip(rows.tolist(), sites.index.tolist(), strict=True))
            here = nodes[np.isin(nodes // self.n_pos, rows)].tolist()
            found.append(sorted((n % self.n_pos, index[n // self.n_pos]) for n in here))
        return found

    def scores(self, run: BatchRun) -> Float[np.ndarray, "node batch"]:
        """The effect of every node on the metric of each prompt."""
        batch = len(run.real)
        found = np.full((len(self.names), self.n_pos, batch), np.nan)
        for sites, rows in self.groups:
            effects = run.effects_of(sites).permute(0, 2, 1)
            found[rows] = effects.cpu().double().numpy()
        return found.reshape(-1, batch)


def _component_rows(
    grown: Any, alignment: Alignment, n_pos: int
) -> tuple[_ComponentRows, _ComponentRows]:
    """Those of the original, and those of the grown model (and of a null, which has its shape)."""
    every = resolve_sites(grown, all_heads())
    names = np.array([name for sites in every for name in sites.names], dtype=object)
    row = {name: i for i, name in enumerate(names)}

    def rows(called: Sequence[str]) -> _Ints:
        return np.array([row[name] for name in called], dtype=np.int64)

    own = tuple((pair.first, rows(pair.second.names)) for pair in alignment.shared)
    theirs = tuple((sites, rows(sites.names)) for sites in every)
    return _ComponentRows(own, names, n_pos), _ComponentRows(theirs, names, n_pos)


@dataclass(frozen=True, eq=False)
class _ScoredCircuit:
    """A circuit of `size` nodes, and the scores of every node for each prompt."""

    components: _ComponentRows
    size: int
    scores: Float[np.ndarray, "node batch"]

    def nodes(self, weights: _Floats) -> _Ints:
        """The nodes of largest score, with these weights of prompts."""
        return largest(self.scores @ weights, self.size)


@dataclass(frozen=True, eq=False)
class _Edges:
    """Edges of several models, by the names of their nodes in the grown one.

    Attributes:
        frame: `source`, `target`, `kind` of each.
        ends: source and target of each as nodes; -1 for an end that is no component.
        weights: for each model, of each prompt; NaN if the model lacks an end.
    """

    frame: pd.DataFrame
    ends: _Ints
    weights: tuple[Float[np.ndarray, "edge batch"], ...]

    def within(self, nodes: _Ints) -> _Ints:
        """Edges between these nodes, the embedding and the metric."""
        return np.flatnonzero((np.isin(self.ends, nodes) | (self.ends < 0)).all(axis=1))


def _edges_between(
    models: Sequence[Any],
    batch: Batch,
    components: Sequence[_ComponentRows],
    nodes: _Ints,
    progress: bool,
) -> _Edges:
    if not len(nodes):
        frame = pd.DataFrame(columns=["source", "target", "kind"], dtype=object)
        empty = np.empty((0, len(batch.pair.clean)))
        return _Edges(frame, np.empty((0, 2), dtype=np.int64), (empty,) * len(models))
    found = [
        _edges(model, batch, own, nodes, label, progress)
        for model, own, label in zip(models, components, MODELS, strict=False)
    ]
    every = pd.concat([frame for frame, _ in found]).drop_duplicates(ignore_index=True)
    node = dict(zip(components[0].ids(nodes), nodes.tolist(), strict=True))
    columns = [every[end].map(node).fillna(-1).to_numpy(np.int64) for end in ("source", "target")]
    ends = np.stack(columns, axis=1)
    index = pd.MultiIndex.from_frame(every)
    weights = []
    for (frame, by_prompt), own in zip(found, components, strict=True):
        # A model that has both ends and no such edge has one of weight 0.
        rows = np.concatenate([[-1], *(rows for _, rows in own.groups)])
        has_both = np.isin(ends // own.n_pos, rows).all(axis=1)
        full = np.where(has_both, 0.0, np.nan)[:, None].repeat(by_prompt.shape[1], axis=1)
        full[index.get_indexer(pd.MultiIndex.from_frame(frame))] = by_prompt
        weights.append(full)
    return _Edges(every, ends, tuple(weights))


@full_precision()
def _edges(
    model: Any, batch: Batch, components: _ComponentRows, nodes: _Ints, label: str, progress: bool
) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
    """One model's edges, by names in the grown one, and their weights for each prompt."""
    pair = on_device_of(model, batch.pair)
    run = record(model, pair.clean, pair.mask)
    try:
        linear = linearize(model, run, bind(batch.metric, model, pair))
    except UnsupportedModelError as error:
        more = "n_nodes=0 compares the nodes of circuits, and no edges"
        raise UnsupportedModelError([*error.reasons, more], error.problem) from error
    chosen = components.within(nodes)
    n_nodes = sum(map(len, chosen))
    with stage_bar(f"edges in {label}", n_nodes, "node", progress) as bar:
        frame, by_prompt = LinearGraph(linear, pair, chosen).edges(True, bar.update)
    inside = ~frame["source"].isin(["rest", "bias"]).to_numpy()
    frame = frame.loc[inside, ["source", "target", "kind"]]
    grown = components.grown_names

    def rename(node: str) -> str:
        name, mark, position = node.partition("@")
        return f"{grown.get(name, name)}{mark}{position}"

    frame = frame.assign(source=frame["source"].map(rename), target=frame["target"].map(rename))
    # The metric is a mean over prompts.
    return frame, by_prompt[inside] * len(pair.clean)


@dataclass(frozen=True, eq=False)
class _Overlay:
    """One circuit laid over another.

    Attributes:
        first: one circuit.
        second: the other.
        all_edges: of all models.
        models: the numbers of the two.
        edge_mass: the share of Σ |weight| that edges of each kind must have.
    """

    first: _ScoredCircuit
    second: _ScoredCircuit
    all_edges: _Edges
    models: tuple[int, int]
    edge_mass: float

    def overlaps(self, weights: _Floats) -> dict[str, Overlap]:
        """Return the overlap of nodes, and of edges by kind, with these weights of prompts."""
        first, second = self.first, self.second
        nodes = first.nodes(weights), second.nodes(weights)
        found = {"nodes": Overlap(*nodes, first.scores @ weights, second.scores @ weights)}
        kinds = self.all_edges.frame["kind"].to_numpy(dtype=object)
        edge_weights = self._edge_weights(weights)
        chosen = [
            select_mass(each, kinds, self.all_edges.within(ends), self.edge_mass)
            for each, ends in zip(edge_weights, nodes, strict=True)
        ]
        for kind in pd.unique(kinds):
            one, other = (rows[kinds[rows] == kind] for rows in chosen)
            found[f"{kind} edges"] = Overlap(one, other, *edge_weights)
        return found

    def _edge_weights(self, weights: _Floats) -> tuple[_Floats, _Floats]:
        one, other = self.models
        return self.all_edges.weights[one] @ weights, self.all_edges.weights[other] @ weights

    def nodes(self, weights: _Floats) -> pd.DataFrame:
        """Return a row for each node of either circuit."""
        overlap = self.overlaps(weights)["nodes"]
        union, components = overlap.union, self.second.components
        old_names = {new: old for old, new in self.first.components.grown_names.items()}
        names = components.names[union // components.n_pos]
        parsed = [HeadName.parse(name) for name in names]
        return pd.DataFrame(
            {
                "id": components.ids(union),
                "kind": [name.kind for name in parsed],
                "layer": [name.layer for name in parsed],
                "name": names,
                "position": union % components.n_pos,
                "original_name": [old_names.get(name) for name in names],
                "status": overlap.status(),
                "effect": overlap.scores[union],
                "grown_effect": overlap.other_scores[union],
            }
        )

    def edges(self, weights: _Floats) -> pd.DataFrame:
        """Return a row for each edge of either circuit."""
        by_kind = [each for what, each in self.overlaps(weights).items() if what != "nodes"]
        first, second = (
            np.concatenate([np.empty(0, np.int64), *rows])
            for rows in ([each.first for each in by_kind], [each.second for each in by_kind])
        )
        overlap = Overlap(
            first, second, *(self.all_edges.weights[i] @ weights for i in self.models)
        )
        union = overlap.union
        return (
            self.all_edges.frame.iloc[union]
            .assign(
                status=overlap.status(),
                weight=overlap.scores[union],
                grown_weight=overlap.other_scores[union],
            )
            .reset_index(drop=True)
        )
