"""The circuits of two models at equal faithfulness: nodes and edges that are kept, lost, gained.

Each model's circuit is what `circuits.discover` finds for the same wanted faithfulness on the same
prompts: heads and neurons at positions. Its edges are those of its attribution graph that run
between its nodes, from the embedding and into the metric, and of each kind as few as have a share
of Σ |weight|: with patterns frozen nearly every pair of nodes has some edge. An edge's weight does
not depend on which other nodes are drawn, so both graphs are drawn at the nodes of both circuits.

A node is a row of one array for all models, [component of the grown model, position]; where a
model has no such component its scores are NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from jaxtyping import Float

from attn_only_lens.circuits.discovery import Circuit
from attn_only_lens.circuits.drawing import Drawn
from attn_only_lens.circuits.linearised import linearised
from attn_only_lens.comparison.batches import Batch
from attn_only_lens.comparison.measure import Measured, key_of, on
from attn_only_lens.comparison.overlap import Floats, Ints, largest
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.numerics import full_precision
from attn_only_lens.patching.custom_metric import AnyMetric
from attn_only_lens.patching.metrics import bind
from attn_only_lens.patching.prompts import PromptPair
from attn_only_lens.patching.record import record
from attn_only_lens.patching.sites import LayerSites

__all__ = ["Edges", "Found", "Names", "drawn", "scores"]


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
