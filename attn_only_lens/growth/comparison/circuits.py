"""Compare two models' circuits at equal faithfulness: kept, lost and gained nodes and edges.

Each model's circuit consists of the nodes with the largest |estimated effect|. `circuits.discover`
finds the smallest number of nodes that reaches the target faithfulness, on the same prompts for all
models (`method="exact_gate"`, `budget=0`, no pruning). A circuit's edges connect its nodes, the
embedding and the metric in the model's attribution graph. For each kind of edge, the circuit has
the smallest number of edges that reaches a given share of Σ |weight|. An edge's weight does not
depend on the other nodes, so edges are computed once, between the nodes of all circuits. Nodes are
indexed by [component of the grown model, position]; values are NaN where a model lacks the node.

    Jaccard            |A ∩ B| / |A ∪ B|; 1 if both are empty
    rank correlation   Spearman's, over the scores in A ∪ B that both models have

Confidence intervals come from the bootstrap (Efron, 1979), which resamples prompts with
replacement. In each resample, a circuit has the same number of nodes as without resampling: those
with the largest |mean score|. A resample has fewer distinct prompts than the sample, so its scores
are noisier, and circuits overlap less in resamples than in the sample. The quantiles are therefore
shifted by the estimate minus the mean over resamples, and clipped to the measure's range. In a
simulation with 10 or 40 prompts, shifted 95 % intervals contained the expected value of the Jaccard
index in 92 to 97 % of cases; quantiles without the shift contained it in 99 to 100 %, and up to 3 %
of them did not contain the estimate.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Bool, Float
from scipy.stats import rankdata

from attn_only_lens.circuits.linear_graph import LinearGraph
from attn_only_lens.engine.linear_map import of_run
from attn_only_lens.engine.model_weights import float32_weights
from attn_only_lens.engine.sites import LayerSites, resolve_sites
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.growth.comparison.alignment import Alignment
from attn_only_lens.growth.comparison.batch_runs import MODELS, BatchRun, pair_for, stage_bar
from attn_only_lens.growth.comparison.batches import Batch
from attn_only_lens.growth.comparison.options import ComparisonSizes, Resampling
from attn_only_lens.heads import HeadName
from attn_only_lens.precision import full_precision

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]
_AT_ONCE = 2**22  # the maximum number of entries in an array of resamples
_LEAST = {"jaccard": 0.0, "rank_correlation": -1.0}
PAIRS = ("original and grown", "grown and null")
"""The pairs of models whose circuits are compared."""


def compare_circuits(
    models: Sequence[Any],
    alignment: Alignment,
    batch: Batch,
    runs: Sequence[BatchRun],
    n_sites: Sequence[int],
    sizes: ComparisonSizes,
    resampling: Resampling,
    progress: bool,
) -> dict[str, pd.DataFrame]:
    """Return the frames `circuits`, `nodes` and `edges` of a `Comparison`.

    `n_sites` contains the number of nodes in each model's circuit.
    """
    old_rows, new_rows = _component_rows(models[1], alignment, batch.pair.clean.shape[1])
    components = [old_rows, *[new_rows] * (len(models) - 1)]
    scores = [rows.scores(run) for rows, run in zip(components, runs, strict=True)]
    n_prompts = len(batch.pair.clean)
    means = [_uniform(n_prompts) @ x.T for x in scores]
    chosen = [largest(mean, size) for mean, size in zip(means, n_sites, strict=True)]
    labels = PAIRS[: len(models) - 1]
    # Choose nodes per pair of models, so that a null model does not change the first pair's row.
    ends = [
        _largest_nodes(means[i : i + 2], chosen[i : i + 2], sizes.n_nodes)
        for i in range(len(labels))
    ]
    nodes = np.flatnonzero(np.any(ends, axis=0))
    edges = _edges_between(models, batch, components, nodes, progress)
    circuits = _Circuits(components, n_sites, scores, ends, *edges, sizes.edge_mass)
    with stage_bar("bootstrap", len(labels) * resampling.n_resamples, "resample", progress) as bar:
        rows = [
            {"pair": label, "what": what, **measures}
            for i, label in enumerate(labels)
            for what, measures in overlap_measures(
                partial(circuits.overlaps_by_kind, i),
                resampling,
                n_prompts,
                circuits.n_rows,
                bar.update,
            ).items()
        ]
    return {"circuits": pd.DataFrame(rows), **circuits.frames(_uniform(n_prompts))}


def _uniform(n_prompts: int) -> Float[np.ndarray, "1 prompt"]:
    """Return equal weights for all prompts, as in the sample before resampling."""
    return np.full((1, n_prompts), 1 / n_prompts)


def _largest_nodes(
    means: Sequence[Float[np.ndarray, "1 node"]],
    chosen: Sequence[Bool[np.ndarray, "1 node"]],
    n_nodes: int,
) -> Bool[np.ndarray, "node"]:
    """Return a mask of the `n_nodes` nodes of two circuits that have the largest |mean score|."""
    nodes = np.flatnonzero(np.concatenate(chosen).any(axis=0))
    effects = np.nanmax(np.abs(np.concatenate(means)[:, nodes]), axis=0)
    mask = np.zeros(means[0].shape[1], dtype=bool)
    mask[nodes[np.argsort(-effects, kind="stable")[:n_nodes]]] = True
    return mask


class Overlap(NamedTuple):
    """For two circuits, a mask of the rows (nodes or edges) in each, and the rows' scores."""

    first: Bool[np.ndarray, "resample row"]
    second: Bool[np.ndarray, "resample row"]
    scores: Float[np.ndarray, "resample row"]
    other_scores: Float[np.ndarray, "resample row"]

    def similarity(self) -> dict[str, Float[np.ndarray, "resample"]]:
        """Return the Jaccard index and the rank correlation of each resample."""
        union = self.first | self.second
        sizes, both = union.sum(axis=1), (self.first & self.second).sum(axis=1)
        of_any = union.any(axis=0)
        arrays = (x[:, of_any] for x in (self.scores, self.other_scores, union))
        return {
            "jaccard": np.where(sizes, both / sizes.clip(min=1), 1.0),
            "rank_correlation": _rank_correlation(*arrays),
        }


def overlap_measures(
    overlaps: Callable[[_Floats], dict[str, Overlap]],
    resampling: Resampling,
    n_prompts: int,
    n_rows: int,
    on_resamples: Callable[[int], object] = lambda n: None,
) -> dict[str, dict[str, float]]:
    """Return counts, Jaccard index and rank correlation of overlaps, with confidence intervals."""
    # With few prompts, many resamples are equal, so each distinct resample is computed once.
    weights, number = np.unique(resampling.weights(n_prompts), axis=0, return_inverse=True)
    resampled: defaultdict[tuple[str, str], list[_Floats]] = defaultdict(list)
    size = max(1, _AT_ONCE // max(1, n_rows))
    for first in range(0, len(weights), size):
        for what, overlap in overlaps(weights[first : first + size]).items():
            for name, values in overlap.similarity().items():
                resampled[what, name].append(values)
        on_resamples(int(((number >= first) & (number < first + size)).sum()))
    columns: dict[str, dict[str, float]] = {}
    for what, overlap in overlaps(_uniform(n_prompts)).items():
        n_first, n_second = int(overlap.first.sum()), int(overlap.second.sum())
        kept = int((overlap.first & overlap.second).sum())
        row: dict[str, float] = {"first": n_first, "second": n_second, "kept": kept}
        row |= {"lost": n_first - kept, "gained": n_second - kept}
        for name, value in overlap.similarity().items():
            samples = np.concatenate([np.empty(0), *resampled[what, name]])
            low, high = resampling.interval(samples[number], float(value[0]), _LEAST[name])
            row |= {name: float(value[0]), f"{name}_low": low, f"{name}_high": high}
        columns[what] = row
    return columns


def _rank_correlation(
    first: Float[np.ndarray, "resample row"],
    second: Float[np.ndarray, "resample row"],
    among: Bool[np.ndarray, "resample row"],
) -> Float[np.ndarray, "resample"]:
    """Return Spearman's correlation over rows that have both scores, or NaN if undefined."""
    among = among & ~np.isnan(first) & ~np.isnan(second)
    middle = (among.sum(axis=1, keepdims=True) + 1) / 2
    # Rows outside `among` are ranked last, and so do not change the ranks of the other rows.
    one, two = (
        np.where(among, rankdata(np.where(among, scores, np.inf), axis=1) - middle, 0.0)
        for scores in (first, second)
    )
    scale = np.sqrt((one**2).sum(axis=1) * (two**2).sum(axis=1))
    return np.where(scale > 0, (one * two).sum(axis=1) / np.where(scale > 0, scale, 1), np.nan)


def largest(
    scores: Float[np.ndarray, "resample row"], size: int
) -> Bool[np.ndarray, "resample row"]:
    """Return a mask of the `size` largest |scores| except NaN; ties go to earlier rows."""
    sizes = np.where(np.isnan(scores), -1.0, np.abs(scores))
    scored = sizes >= 0
    n_rows = sizes.shape[1]
    if not 0 < size < n_rows:
        return scored & (size > 0)
    # A partition is faster than a sort, which matters for millions of rows and many resamples.
    least = np.partition(sizes, n_rows - size, axis=1)[:, n_rows - size, None]
    above, equal = sizes > least, sizes == least
    equal &= equal.cumsum(axis=1) <= size - above.sum(axis=1, keepdims=True)
    return (above | equal) & scored


def select_mass(
    weights: Float[np.ndarray, "resample row"],
    kinds: npt.NDArray[np.object_],
    among: Bool[np.ndarray, "resample row"],
    mass: float,
) -> Bool[np.ndarray, "resample row"]:
    """Return a mask of each kind's largest |weights|, until their share of Σ |weight| is `mass`."""
    ranks = np.zeros_like(among)
    sizes = np.where(among, np.abs(weights), 0.0)
    for kind in pd.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        order = np.argsort(-sizes[:, rows], axis=1, kind="stable")
        ordered = np.take_along_axis(sizes[:, rows], order, axis=1)
        reached = np.cumsum(np.pad(ordered, ((0, 0), (1, 0))), axis=1)
        # The selection needs a row if the rows before it do not reach the share.
        needed = ((reached[:, :-1] < mass * reached[:, -1:]) | (mass == 1)) & (ordered > 0)
        chosen = np.zeros_like(needed)
        np.put_along_axis(chosen, order, needed, axis=1)
        ranks[:, rows] = chosen
    return ranks


@dataclass(frozen=True, eq=False)
class _ComponentRows:
    """A model's components, with their row numbers in the list of the grown model's components.

    `groups` contains the components and row numbers of each layer and kind. `names` contains the
    grown model's name for each row.
    """

    groups: tuple[tuple[LayerSites, _Ints], ...]
    names: npt.NDArray[np.object_]
    n_pos: int

    @property
    def grown_names(self) -> dict[str, str]:
        """A dict from this model's component names to the grown model's names."""
        return {
            name: str(self.names[row])
            for sites, rows in self.groups
            for name, row in zip(sites.names, rows, strict=True)
        }

    def ids(self, nodes: _Ints) -> list[str]:
        """Return the nodes' ids in the grown model, for example `L5N1234@7`."""
        return [f"{self.names[node // self.n_pos]}@{node % self.n_pos}" for node in nodes.tolist()]

    def within(self, nodes: _Ints) -> list[list[tuple[int, int]]]:
        """Return (position, index) of the nodes that this model has, by layer and kind."""
        nodes_by_group = []
        for sites, rows in self.groups:
            index = dict(zip(rows.tolist(), sites.index.tolist(), strict=True))
            places = [(n % self.n_pos, index.get(n // self.n_pos)) for n in nodes.tolist()]
            nodes_by_group.append(sorted((pos, i) for pos, i in places if i is not None))
        return nodes_by_group

    def scores(self, run: BatchRun) -> Float[np.ndarray, "node batch"]:
        """Return the effect of every node on the metric of each prompt."""
        scores = np.full((len(self.names), self.n_pos, len(run.real)), np.nan)
        effects = [run.effects_of(sites) for sites, _ in self.groups]
        read = torch.cat(
            [x.to(effects[0]) for x in effects]
        ).mT.cpu()  # one transfer from the device is faster than many
        scores[np.concatenate([rows for _, rows in self.groups])] = read.double().numpy()
        return scores.reshape(-1, len(run.real))


def _component_rows(
    grown: Any, alignment: Alignment, n_pos: int
) -> tuple[_ComponentRows, _ComponentRows]:
    """Return the `_ComponentRows` of the original model and of the grown model."""
    all_sites = resolve_sites(grown, "all")
    names = np.array([name for sites in all_sites for name in sites.names], dtype=object)
    rows = pd.Index(names).get_indexer
    old_sites = tuple((pair.first, rows(pair.second.names)) for pair in alignment.shared)
    grown_sites = tuple((sites, rows(sites.names)) for sites in all_sites)
    return _ComponentRows(old_sites, names, n_pos), _ComponentRows(grown_sites, names, n_pos)


def _edges_between(
    models: Sequence[Any],
    batch: Batch,
    components: Sequence[_ComponentRows],
    nodes: _Ints,
    progress: bool,
) -> tuple[pd.DataFrame, _Ints, list[Float[np.ndarray, "edge batch"]]]:
    """Return a frame of all models' edges, their end nodes, and their weights in each model."""
    if not len(nodes):
        frame = pd.DataFrame(columns=["source", "target", "kind"], dtype=object)
        empty = np.empty((0, len(batch.pair.clean)))
        return frame, np.empty((0, 2), dtype=np.int64), [empty] * len(models)
    selections = [
        _edges(model, batch, component, nodes, label, progress)
        for model, component, label in zip(models, components, MODELS, strict=False)
    ]
    edges = pd.concat([frame for frame, _ in selections]).drop_duplicates(ignore_index=True)
    node = dict(zip(components[0].ids(nodes), nodes.tolist(), strict=True))
    ends = edges[["source", "target"]].map(lambda name: node.get(name, -1)).to_numpy(np.int64)
    index = pd.MultiIndex.from_frame(edges)
    weights = []
    for (frame, by_prompt), selection in zip(selections, components, strict=True):
        # If a model has both ends but not the edge, the edge's weight is 0.
        rows = np.concatenate([[-1], *(rows for _, rows in selection.groups)])
        has_both = np.isin(ends // selection.n_pos, rows).all(axis=1)
        full = np.where(has_both, 0.0, np.nan)[:, None].repeat(by_prompt.shape[1], axis=1)
        full[index.get_indexer(pd.MultiIndex.from_frame(frame))] = by_prompt
        weights.append(full)
    return edges, ends, weights


@full_precision()
def _edges(
    model: Any, batch: Batch, components: _ComponentRows, nodes: _Ints, label: str, progress: bool
) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
    """Return one model's edges, with the grown model's names, and the weights for each prompt."""
    pair = pair_for(model, batch.pair)
    with float32_weights(model):
        try:
            linear = of_run(model, pair, batch.metric)
        except UnsupportedModelError as error:
            more = "n_nodes=0 compares only the nodes of circuits, without edges"
            raise UnsupportedModelError([*error.reasons, more], error.problem) from error
        chosen = components.within(nodes)
        n_nodes = sum(map(len, chosen))
        with stage_bar(f"edges in {label}", n_nodes, "node", progress) as bar:
            frame, by_prompt = LinearGraph(linear, pair, chosen).edges(bar.update)
    inside = ~frame["source"].isin(["rest", "bias"]).to_numpy()
    frame = frame.loc[inside, ["source", "target", "kind"]]
    grown = components.grown_names

    def rename(node: str) -> str:
        name, mark, position = node.partition("@")
        return f"{grown.get(name, name)}{mark}{position}"

    frame = frame.assign(source=frame["source"].map(rename), target=frame["target"].map(rename))
    # The metric is a mean over prompts, so weights are multiplied by the number of prompts.
    return frame, by_prompt[inside] * len(pair.clean)


@dataclass(frozen=True, eq=False)
class _Circuits:
    """The circuits of several models. Edges use the grown model's component names."""

    components: Sequence[_ComponentRows]
    sizes: Sequence[int]  # the number of nodes in each circuit
    scores: Sequence[Float[np.ndarray, "node batch"]]
    nodes: Sequence[Bool[np.ndarray, "node"]]  # for each pair of models, the nodes that have edges
    edges: pd.DataFrame  # `source`, `target`, `kind`
    ends: _Ints  # [edge, 2]: source and target nodes; -1 for an end that is not a component
    edge_weights: Sequence[Float[np.ndarray, "edge batch"]]  # NaN if a model lacks one of the nodes
    edge_mass: float

    @property
    def n_rows(self) -> int:
        """The total number of nodes and edges in the models."""
        return len(self.scores[0]) + len(self.edges)

    def overlaps(
        self, i: int, weights: Float[np.ndarray, "resample batch"]
    ) -> tuple[Overlap, Overlap]:
        """Return, for each resample, how circuits i and i + 1 overlap in nodes and in edges."""
        kinds, of_pair = self.edges["kind"].to_numpy(dtype=object), self._edges_of(i)
        nodes, chosen, scores, edge_weights = [], [], [], []
        for model in (i, i + 1):
            scores.append(weights @ self.scores[model].T)
            nodes.append(largest(scores[-1], self.sizes[model]))
            # Edges in the circuit connect its nodes, the embedding and the metric.
            inside = np.asarray((nodes[-1][:, self.ends] | (self.ends < 0)).all(axis=2)) & of_pair
            edge_weights.append(weights @ self.edge_weights[model].T)
            chosen.append(select_mass(edge_weights[-1], kinds, inside, self.edge_mass))
        return Overlap(*nodes, *scores), Overlap(*chosen, *edge_weights)

    def _edges_of(self, i: int) -> Bool[np.ndarray, "edge"]:
        """Return a mask of the edges between nodes of pair i, the embedding and the metric."""
        return np.asarray((self.nodes[i][self.ends] | (self.ends < 0)).all(axis=1))

    def overlaps_by_kind(self, i: int, weights: _Floats) -> dict[str, Overlap]:
        """Return the overlap of nodes, and the overlap of each kind of edges."""
        nodes, edges = self.overlaps(i, weights)
        overlaps = {"nodes": nodes}
        for kind in self.edges["kind"][self._edges_of(i)].unique():
            of_kind = self.edges["kind"].to_numpy() == kind
            overlaps[f"{kind} edges"] = edges._replace(
                first=edges.first & of_kind, second=edges.second & of_kind
            )
        return overlaps

    def frames(self, weights: _Floats) -> dict[str, pd.DataFrame]:
        """Return the frames `nodes` and `edges` of the original's and the grown model's circuit."""
        old_names = {new: old for old, new in self.components[0].grown_names.items()}
        components = self.components[1]
        nodes, edges = self.overlaps(0, weights)
        rows = np.flatnonzero(nodes.first[0] | nodes.second[0])
        names = components.names[rows // components.n_pos]
        parsed = [HeadName.parse(name) for name in names]
        columns = {
            "id": components.ids(rows),
            "kind": [name.kind for name in parsed],
            "layer": [name.layer for name in parsed],
            "name": names,
            "position": rows % components.n_pos,
            "original_name": [old_names.get(name) for name in names],
            "status": _status(nodes, rows),
            "effect": nodes.scores[0, rows],
            "grown_effect": nodes.other_scores[0, rows],
        }
        rows = np.flatnonzero(edges.first[0] | edges.second[0])
        frame = self.edges.iloc[rows].reset_index(drop=True)
        frame = frame.assign(
            status=_status(edges, rows),
            weight=edges.scores[0, rows],
            grown_weight=edges.other_scores[0, rows],
        )
        return {"nodes": pd.DataFrame(columns), "edges": frame}


def _status(overlap: Overlap, rows: _Ints) -> npt.NDArray[np.object_]:
    """Return "kept", "lost" or "gained" for each row."""
    before, after = overlap.first[0, rows], overlap.second[0, rows]
    status = np.where(before & after, "kept", np.where(before, "lost", "gained"))
    return status.astype(object)
