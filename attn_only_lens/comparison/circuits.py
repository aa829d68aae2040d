"""How much two circuits have in common, and how sure that is.

    Jaccard            |A ∩ B| / |A ∪ B|; 1 of two that are empty
    rank correlation   Spearman's, of the scores of A ∪ B that both models have

Prompts are resampled with replacement (the bootstrap: Efron, 1979): for each resample, scores are
means over its prompts, each circuit is again as many nodes as it has, those of largest |score|, and
its edges again as few as have the wanted share of Σ |weight|. The interval is between quantiles of
what comes out. Sizes are held, since to find them anew would take a search for each resample; an
estimate may lie outside its interval, as every resample has fewer prompts that differ.

The circuits of two models at equal faithfulness: nodes and edges that are kept, lost, gained.

Each model's circuit is what `circuits.discover` finds for the same wanted faithfulness on the same
prompts: heads and neurons at positions. Its edges are those of its attribution graph that run
between its nodes, from the embedding and into the metric, and of each kind as few as have a share
of Σ |weight|: with patterns frozen nearly every pair of nodes has some edge. An edge's weight does
not depend on which other nodes are drawn, so both graphs are drawn at the nodes of both circuits.

A node is a row of one array for all models, [component of the grown model, position]; where a
model has no such component its scores are NaN.

Two circuits laid over each other: every node and edge of either, and what became of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
from jaxtyping import Float

from attn_only_lens.circuits._attribution_graph import Drawn
from attn_only_lens.circuits._discover import Circuit
from attn_only_lens.circuits.graph import chosen
from attn_only_lens.circuits.linear_model import linearised
from attn_only_lens.comparison.batches import Batch
from attn_only_lens.comparison.measure import Measured, key_of, on
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import HeadName
from attn_only_lens.numerics import full_precision, spearman
from attn_only_lens.runs.metrics import AnyMetric, bind
from attn_only_lens.runs.prompts import PromptPair
from attn_only_lens.runs.recording import record
from attn_only_lens.runs.sites import LayerSites

__all__ = [
    "Differences",
    "Edges",
    "Floats",
    "Found",
    "Ints",
    "Names",
    "Parts",
    "Resampling",
    "compared",
    "differences",
    "drawn",
    "largest",
    "mass_of",
    "scores",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Parts: TypeAlias = tuple[Ints, Ints, Floats, Floats]
"""Of two circuits the rows that each has, and the scores of all rows in each."""


@dataclass(frozen=True)
class Resampling:
    """How prompts are resampled.

    Attributes:
        n_prompts: how many there are.
        n_resamples: how often.
        confidence: of the intervals.
        seed: of the draws.
    """

    n_prompts: int
    n_resamples: int
    confidence: float
    seed: int

    @property
    def once(self) -> Floats:
        """The weight of each prompt in the sample itself."""
        return np.full(self.n_prompts, 1 / self.n_prompts)

    def weights(self) -> Iterator[Floats]:
        """The weight of each prompt in each resample."""
        generator = np.random.default_rng(self.seed)
        for _ in range(self.n_resamples):
            yield generator.multinomial(self.n_prompts, self.once) / self.n_prompts

    def interval(self, values: Floats) -> tuple[float, float]:
        """Between quantiles of the values that there are; none where there are none."""
        values = values[~np.isnan(values)]
        if not len(values):
            return float("nan"), float("nan")
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(values, [tail, 1 - tail])
        return float(low), float(high)


def compared(
    choose: Callable[[Floats], dict[str, Parts]], resampling: Resampling
) -> dict[str, dict[str, float]]:
    """Kept, lost and gained, Jaccard and rank correlation, with intervals.

    Args:
        choose: from the weight of each prompt to nodes, and each kind of edges, of two circuits.
        resampling: how prompts are resampled.
    """
    parts = choose(resampling.once)
    again = [
        {what: _alike(*each) for what, each in choose(weights).items()}
        for weights in resampling.weights()
    ]
    found: dict[str, dict[str, float]] = {}
    for what, (one, other, first, second) in parts.items():
        kept = len(np.intersect1d(one, other))
        row: dict[str, float] = {"original": len(one), "grown": len(other), "kept": kept}
        row |= {"lost": len(one) - kept, "gained": len(other) - kept}
        values = np.array([each[what] for each in again], dtype=float).reshape(-1, 2)
        names = ("jaccard", "rank_correlation")
        for i, (name, value) in enumerate(
            zip(names, _alike(one, other, first, second), strict=True)
        ):
            low, high = resampling.interval(values[:, i])
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
        found[what] = row
    return found


def largest(scores: Floats, size: int) -> Ints:
    """Rows of the largest |score|, of equals the first; rows without a score never."""
    sizes = np.where(np.isnan(scores), -1.0, np.abs(scores))
    if not 0 < size < len(sizes):
        return np.flatnonzero(sizes >= 0)[: max(size, 0)]
    # A partition, not a sort: there may be millions of rows, and hundreds of resamples.
    least = np.partition(sizes, len(sizes) - size)[len(sizes) - size]
    above, equal = np.flatnonzero(sizes > least), np.flatnonzero(sizes == least)
    return np.sort(np.concatenate([above, equal[: size - len(above)]]))


def mass_of(weights: Floats, kinds: npt.NDArray[np.object_], among: Ints, mass: float) -> Ints:
    """As few of some rows as have a share of their Σ |weight|, of each kind apart."""
    found = [among[:0]]
    for kind in pd.unique(kinds[among]):
        rows = among[kinds[among] == kind]
        rows = rows[weights[rows] != 0]
        found.append(rows[chosen(np.abs(weights[rows]), mass=mass)])
    return np.sort(np.concatenate(found))


def _alike(one: Ints, other: Ints, first: Floats, second: Floats) -> tuple[float, float]:
    union = np.union1d(one, other)
    both = union[~np.isnan(first[union]) & ~np.isnan(second[union])]
    jaccard = len(np.intersect1d(one, other)) / len(union) if len(union) else 1.0
    return jaccard, spearman(first[both], second[both])


@dataclass(frozen=True, eq=False)
class Names:
    """The components of the grown model, as rows; and which of them another model has.

    Attributes:
        sites: of the model whose components these are, by layer and kind.
        rows: for each of those, the rows of its components.
        names: of all components, in the grown model.
        n_pos: positions of the prompts.
    """

    sites: tuple[LayerSites, ...]
    rows: tuple[Ints, ...]
    names: npt.NDArray[np.object_]
    n_pos: int

    @classmethod
    def of(
        cls,
        sites: Sequence[LayerSites],
        called: Sequence[Sequence[str]],
        names: Sequence[str],
        n_pos: int,
    ) -> "Names":
        """The components of a model, by what each is called in the grown one."""
        row = {name: at for at, name in enumerate(names)}
        rows = [np.array([row[name] for name in each], dtype=np.int64) for each in called]
        return cls(tuple(sites), tuple(rows), np.array(names, dtype=object), n_pos)

    @property
    def own(self) -> dict[str, str]:
        """Names in the grown model, by names in this one."""
        pairs = zip(self.sites, self.rows, strict=True)
        return {
            name: str(self.names[row])
            for sites, rows in pairs
            for name, row in zip(sites.names, rows, strict=True)
        }

    def ids(self, nodes: Ints) -> list[str]:
        """`L5N1234@7`, in the grown model."""
        return [f"{self.names[node // self.n_pos]}@{node % self.n_pos}" for node in nodes.tolist()]

    def picked(self, nodes: Ints) -> list[list[tuple[int, int]]]:
        """(position, index in this model) of those of the nodes that it has, by layer and kind."""
        chosen = []
        for sites, rows in zip(self.sites, self.rows, strict=True):
            index = dict(zip(rows.tolist(), sites.index.tolist(), strict=True))
            here = nodes[np.isin(nodes // self.n_pos, rows)].tolist()
            chosen.append(sorted((n % self.n_pos, index[n // self.n_pos]) for n in here))
        return chosen


@dataclass(frozen=True, eq=False)
class Found:
    """The circuit of one model, and the scores of every node.

    Attributes:
        names: of its components.
        circuit: as `discover` found it.
        scores: what every node does to the metric of each prompt.
    """

    names: Names
    circuit: Circuit
    scores: Float[np.ndarray, "node batch"]

    def nodes(self, weights: Floats) -> Ints:
        """As many as the circuit has, by scores with these weights of prompts."""
        return largest(self.scores @ weights, len(self.circuit))


def scores(run: Measured, names: Names) -> Float[np.ndarray, "node batch"]:
    """What every node of one model does to the metric of each prompt.

    Args:
        run: what the model did.
        names: of its components.
    """
    batch = len(run.real)
    found = np.full((len(names.names), names.n_pos, batch), np.nan)
    for sites, rows in zip(names.sites, names.rows, strict=True):
        effects = run.effects[key_of(sites)][sites.index.to(run.real.device)]
        found[rows] = effects.permute(0, 2, 1).cpu().double().numpy()
    return found.reshape(-1, batch)


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges of several models, by what they are called in the grown one.

    Attributes:
        frame: `source`, `target`, `kind` of each.
        ends: for each, the nodes that it needs: -1 where an end is no component.
        weights: for each model, of each prompt; NaN where the model has not both ends.
    """

    frame: pd.DataFrame
    ends: Ints
    weights: tuple[Float[np.ndarray, "edge batch"], ...]

    @classmethod
    def none(cls, n_models: int, n_prompts: int) -> "Edges":
        """No edges at all."""
        frame = pd.DataFrame(columns=["source", "target", "kind"], dtype=object)
        empty = np.empty((0, n_prompts))
        return cls(frame, np.empty((0, 2), dtype=np.int64), (empty,) * n_models)

    def within(self, nodes: Ints) -> Ints:
        """Those between some nodes, the embedding and the metric."""
        return np.flatnonzero((np.isin(self.ends, nodes) | (self.ends < 0)).all(axis=1))


def drawn(models: Sequence[Any], batch: Batch, names: Sequence[Names], nodes: Ints) -> Edges:
    """The edges of several models between the same nodes.

    Args:
        models: with neuron-heads.
        batch: the prompts and the metric.
        names: of the components of each.
        nodes: those to draw.

    Raises:
        UnsupportedModelError: a model is not linear when frozen.
    """
    frames, weights = [], []
    for model, own in zip(models, names, strict=True):
        frame, by_prompt = _edges(model, on(model, batch.pair), batch.metric, own.picked(nodes))
        inside = ~frame["source"].isin(["rest", "bias"]).to_numpy()
        grown = own.own
        for end in ("source", "target"):
            frame[end] = [_renamed(each, grown) for each in frame[end]]
        frames.append(frame.loc[inside, ["source", "target", "kind"]])
        # The metric is a mean over prompts.
        weights.append(by_prompt[inside] * len(batch.pair.clean))
    every = pd.concat(frames).drop_duplicates(ignore_index=True)
    node = dict(zip(names[0].ids(nodes), nodes.tolist(), strict=True))
    ends = np.stack(
        [every[end].map(node).fillna(-1).to_numpy(dtype=np.int64) for end in ("source", "target")],
        axis=1,
    )
    at = pd.MultiIndex.from_frame(every)
    spread = []
    for frame, by_prompt, own in zip(frames, weights, names, strict=True):
        # A model that has both ends and no such edge has one of weight 0.
        has = np.isin(ends // own.n_pos, [*np.concatenate(own.rows), -1]).all(axis=1)
        full = np.full((len(every), by_prompt.shape[1]), np.nan)
        full[has] = 0.0
        full[at.get_indexer(pd.MultiIndex.from_frame(frame))] = by_prompt
        spread.append(full)
    return Edges(every, ends, tuple(spread))


@full_precision()
def _edges(
    model: Any, pair: PromptPair, metric: AnyMetric, picked: list[list[tuple[int, int]]]
) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
    run = record(model, pair.clean, pair.mask)
    try:
        linear = linearised(model, run, bind(metric, model, pair))
    except UnsupportedModelError as error:
        more = "n_nodes=0 compares the nodes of circuits, and no edges"
        raise UnsupportedModelError([*error.reasons, more], error.problem) from error
    return Drawn(linear, pair, picked).edges(patterns=True)


def _renamed(node: str, grown: dict[str, str]) -> str:
    name, mark, position = node.partition("@")
    return f"{grown.get(name, name)}{mark}{position}"


@dataclass(frozen=True, eq=False)
class Differences:
    """The frames of two circuits; see `Comparison`."""

    circuits: pd.DataFrame
    nodes: pd.DataFrame
    edges: pd.DataFrame


def differences(
    models: Sequence[Any],
    batch: Batch,
    found: Sequence[Found],
    resampling: Resampling,
    *,
    n_nodes: int,
    edge_mass: float,
) -> Differences:
    """Lay the circuit of a model over that of the grown one, and that over the null's.

    Args:
        models: the original, the grown one and, if there is one, the null.
        batch: the prompts and the metric.
        found: the circuit of each model.
        resampling: of the prompts.
        n_nodes: how many nodes to draw edges between; 0 for no edges.
        edge_mass: the share of Σ |weight| that edges of each kind must have.
    """
    once = resampling.once
    nodes = np.unique(np.concatenate([each.nodes(once) for each in found]))
    sizes = np.nanmax([np.abs(each.scores[nodes] @ once) for each in found], axis=0)
    nodes = nodes[np.sort(np.argsort(-sizes, kind="stable")[:n_nodes])]
    edges = Edges.none(len(models), len(batch.pair.clean))
    if len(nodes):
        edges = drawn(models, batch, [each.names for each in found], nodes)
    rows = []
    for label, pair in (("grown", (0, 1)), ("null model", (1, 2)))[: len(models) - 1]:
        over = _Over(found[pair[0]], found[pair[1]], edges, pair, edge_mass)
        rows += [
            {"pair": label, "what": what, **each}
            for what, each in compared(over.parts, resampling).items()
        ]
    grown = _Over(found[0], found[1], edges, (0, 1), edge_mass)
    return Differences(pd.DataFrame(rows), grown.nodes(once), grown.edges(once))


@dataclass(frozen=True, eq=False)
class _Over:
    """One circuit over another."""

    one: Found
    other: Found
    drawn: Edges
    at: tuple[int, int]
    mass: float

    def parts(self, weights: Floats) -> dict[str, Parts]:
        nodes = self.one.nodes(weights), self.other.nodes(weights)
        scores = self.one.scores @ weights, self.other.scores @ weights
        found: dict[str, Parts] = {"nodes": (*nodes, *scores)}
        kinds = self.drawn.frame["kind"].to_numpy(dtype=object)
        of_edges = [self.drawn.weights[i] @ weights for i in self.at]
        chosen = [
            mass_of(each, kinds, self.drawn.within(within), self.mass)
            for each, within in zip(of_edges, nodes, strict=True)
        ]
        for kind in pd.unique(kinds):
            first, second = (rows[kinds[rows] == kind] for rows in chosen)
            found[f"{kind} edges"] = first, second, of_edges[0], of_edges[1]
        return found

    def nodes(self, weights: Floats) -> pd.DataFrame:
        """A row for each node of either."""
        first, second, one, other = self.parts(weights)["nodes"]
        union, status = _status(first, second)
        names, n_pos = self.other.names, self.other.names.n_pos
        was = {new: old for old, new in self.one.names.own.items()}
        called = names.names[union // n_pos]
        parsed = [HeadName.parse(name) for name in called]
        return pd.DataFrame(
            {
                "id": names.ids(union),
                "kind": [name.kind for name in parsed],
                "layer": [name.layer for name in parsed],
                "name": called,
                "position": union % n_pos,
                "original_name": [was.get(name) for name in called],
                "status": status,
                "effect": one[union],
                "grown_effect": other[union],
            }
        )

    def edges(self, weights: Floats) -> pd.DataFrame:
        """A row for each edge of either."""
        parts = self.parts(weights)
        of_edges = [each for what, each in parts.items() if what != "nodes"]
        first, second = (
            np.sort(np.concatenate([np.empty(0, int), *(each[i] for each in of_edges)]))
            for i in (0, 1)
        )
        union, status = _status(first, second)
        one, other = (self.drawn.weights[i] @ weights for i in self.at)
        return (
            self.drawn.frame.iloc[union]
            .assign(status=status, weight=one[union], grown_weight=other[union])
            .reset_index(drop=True)
        )


def _status(first: Ints, second: Ints) -> tuple[Ints, npt.NDArray[np.object_]]:
    """The rows of either, and whether each is in both, in the first or in the second alone."""
    union = np.union1d(first, second).astype(np.int64)
    kept = np.isin(union, first) & np.isin(union, second)
    status = np.where(kept, "kept", np.where(np.isin(union, first), "lost", "gained"))
    return union, status.astype(object)
