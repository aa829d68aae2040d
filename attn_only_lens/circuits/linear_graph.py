"""Nodes and edges of an attributed run (`attributed_run.py`), as frames.

An edge is the product of a covector of the target, what it reads, and a vector of the source, what
it wrote into the stream. Heads that are not nodes of the graph are summed as vectors into "rest",
so a graph of K nodes costs K² products, whatever the size of the model. Sums hold for every node,
and a graph of all nodes is a flow from the embedding, and the biases of a single run, to the
metric.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attn_only_lens.axes import Residual
from attn_only_lens.circuits.attributed_run import AttentionSlope, AttributedRun, NeuronSlope
from attn_only_lens.circuits.graph import NODE_COLUMNS
from attn_only_lens.devices import free_bytes
from attn_only_lens.engine.linear_run import LinearAttention, LinearRun
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.heads import HeadName

Node = tuple[int, int]
"""Position, and index in the sublayer."""


class LinearGraph:
    """Nodes and edges of an attributed run as frames, for chosen nodes of each sublayer."""

    def __init__(
        self, attributed: AttributedRun, pair: PromptPair, chosen: Sequence[Sequence[Node]]
    ) -> None:
        self._attributed, self._linear, self._chosen = attributed, attributed.linear, chosen
        self._real: list[int] = pair.real.any(dim=0).nonzero().flatten().tolist()
        self._sources = _Sources(self._linear, self._real, chosen)

    def _ids(self, index: int, nodes: Sequence[Node]) -> list[str]:
        writes = self._linear.sublayers[index].writes
        return [f"{HeadName(writes.layer, writes.kind, node)}@{pos}" for pos, node in nodes]

    def edges(
        self, on_done: Callable[[int], object] = lambda n: None
    ) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
        """Return edges from chosen nodes, "bias" and "rest" into chosen nodes and the metric.

        Args:
            on_done: called with the number of nodes that are done.

        Returns:
            A row for each edge that is not 0, and the contribution of each prompt to its weight.
        """
        sources = [f"embed@{pos}" for pos in self._real]
        for index, nodes in enumerate(self._chosen):
            sources += self._ids(index, nodes)
        blocks = [_edges_of(sources, ["metric"], "value", self._into_metric())]
        for index, nodes in enumerate(self._chosen):
            for kind in self._attributed.kinds(index) if nodes else ():
                for some, by_prompt in self._into(index, kind, nodes):
                    blocks.append(_edges_of(sources, self._ids(index, some), kind, by_prompt))
                    on_done(len(some) * (kind == "value"))
        frames, weights = zip(*blocks, strict=True)
        return pd.concat(frames, ignore_index=True), np.concatenate(weights)

    def _into_metric(self) -> Float[Tensor, "batch target column"]:
        """Return the contributions to the metric."""
        attributed, n = self._attributed, len(self._linear.sublayers)
        sums = self._sources.contributions(n, 1, attributed.logit_bias[:, None])
        sums.add_all(attributed.last[:, None])
        return sums.columns

    def _into(
        self, index: int, kind: str, nodes: Sequence[Node]
    ) -> Iterator[tuple[Sequence[Node], Float[Tensor, "batch target column"]]]:
        """Yield blocks of nodes of a sublayer, and the contributions to them."""
        gradient = self._attributed.gradients[index]
        slope = self._attributed.slopes[index].get(kind)
        size = len(self._sources.positions) + self._linear.run.embedding[0].numel()
        if isinstance(slope, AttentionSlope):
            size += slope.gradient[0].numel() + slope.inputs[0].numel()
        at_once = max(1, _numbers_at_once(gradient) // (len(gradient) * size))
        for first in range(0, len(nodes), at_once):
            some = nodes[first : first + at_once]
            places = torch.tensor(some, dtype=torch.int64, device=gradient.device)
            yield some, self._contributions(index, slope, *places.T)

    def _contributions(
        self,
        index: int,
        slope: NeuronSlope | AttentionSlope | None,
        positions: Tensor,
        nodes: Tensor,
    ) -> Float[Tensor, "batch target column"]:
        sublayer, gradient = self._linear.sublayers[index], self._attributed.gradients[index]
        of_targets = gradient[:, positions, nodes]
        n_before, n_pos = self._linear.n_before(index), gradient.shape[1]
        if isinstance(slope, AttentionSlope):
            inputs = slope.input_gradients(positions, nodes)
            bias = torch.einsum("tbpgd,bpgd->bt", inputs, slope.constant)
            sums = self._sources.contributions(n_before, len(nodes), bias)
            sums.add_all(slope.covectors(inputs))
        elif isinstance(slope, NeuronSlope):
            covectors, bias = slope.covectors(positions, nodes)
            sums = self._sources.contributions(n_before, len(nodes), bias)
            sums.add(covectors, positions)
        else:
            bias = (of_targets * sublayer.constant[:, positions, nodes]).sum(-1)
            sums = self._sources.contributions(n_before, len(nodes), bias)
            if isinstance(sublayer, LinearAttention):  # a target reads at every position
                keys = torch.arange(n_pos, device=nodes.device).repeat(len(nodes))
                node, node_positions = (x.repeat_interleave(n_pos) for x in (nodes, positions))
                gradients = of_targets.repeat_interleave(n_pos, dim=1)
                covectors = sublayer.covectors(gradients, node, node_positions, keys)
                sums.add_all(covectors.unflatten(1, (-1, n_pos)))
            else:
                sums.add(sublayer.covectors(of_targets, nodes, positions, positions), positions)
        return sums.columns

    def nodes(self, rest: float) -> pd.DataFrame:
        """Return the nodes: the embedding, heads by layer, and "bias", "rest", "offset", "metric".

        Args:
            rest: the attribution of the heads that are no nodes.
        """
        attributed, linear = self._attributed, self._linear
        embedding, gradient = linear.run.embedding, attributed.first
        rows: list[tuple[object, ...]] = [
            (f"embed@{pos}", "embed", None, "embed", pos, length, np.nan, attribution)
            for pos, length, attribution in zip(
                range(embedding.shape[1]),
                embedding.norm(dim=-1).mean(0).tolist(),
                (gradient.to(embedding) * embedding).sum((0, 2)).tolist(),
                strict=True,
            )
            if pos in self._real
        ]
        for index, nodes in enumerate(self._chosen):
            rows += self._rows(index, nodes)
        ends = {"bias": (0.0, attributed.bias), "rest": (0.0, rest)}
        if attributed.is_difference:
            del ends["bias"]  # it drops out
        if attributed.offset or not attributed.is_difference:
            ends["offset"] = (0.0, attributed.offset)
        for name, (size, attribution) in (ends | {"metric": (attributed.value,) * 2}).items():
            rows.append((name, name, None, name, None, size, np.nan, attribution))
        frame = pd.DataFrame(rows, columns=list(NODE_COLUMNS))
        return frame.astype({"layer": "Int64", "position": "Int64"})

    def _rows(self, index: int, nodes: Sequence[Node]) -> list[tuple[object, ...]]:
        """Return rows of the frame of nodes for heads of one sublayer."""
        if not nodes:
            return []
        attributed, writes = self._attributed, self._linear.sublayers[index].writes
        gradients, z = attributed.gradients[index], attributed.z[index]
        n_nodes = gradients.shape[2]
        attributions = attributed.attributions(index).sum(0)
        positions, index_of = torch.tensor(nodes, dtype=torch.int64, device=gradients.device).T
        slopes = torch.full_like(gradients[0, ..., 0], torch.nan)
        if writes.kind == "attention":
            values = z.norm(dim=-1).mean(0)
        else:
            values = z.unflatten(2, (n_nodes, -1)).sum((3, 4)).mean(0)
            if len(gradients) == 1 and z.shape[2] == n_nodes:
                slopes = gradients[0, ..., 0]
        columns = (x[positions, index_of].tolist() for x in (values, slopes, attributions))
        ids = self._ids(index, nodes)
        return [
            (id_, writes.kind, writes.layer, id_.partition("@")[0], pos, *numbers)
            for id_, (pos, _), *numbers in zip(ids, nodes, *columns, strict=True)
        ]


def _edges_of(
    sources: list[str], targets: list[str], kind: str, by_prompt: Tensor
) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
    """Return edges that are not 0 into targets, and the contribution of each prompt."""
    weights = by_prompt.sum(0)
    row, column = (x.numpy() for x in weights.nonzero(as_tuple=True))
    names = [*sources[: weights.shape[1] - 2], "rest", "bias"]
    frame = pd.DataFrame(
        {
            "source": np.array(names, dtype=object)[column],
            "target": np.array(targets, dtype=object)[row],
            "kind": kind,
            "weight": weights[row, column].double().numpy(),
        }
    )
    return frame, by_prompt[:, row, column].T.double().numpy()


class _Sources:
    """What the embedding and chosen nodes wrote, one by one; all others and biases, together."""

    def __init__(
        self, linear: LinearRun, real: Sequence[int], chosen: Sequence[Sequence[Node]]
    ) -> None:
        embedding = linear.run.embedding
        vectors, positions = [embedding[:, real]], list(real)
        others = embedding.clone()
        others[:, real] = 0.0
        self._n_columns, self._rest = [len(real)], [others]
        self._bias = [torch.zeros_like(embedding)]
        for sublayer, nodes in zip(linear.sublayers, chosen, strict=True):
            outputs = sublayer.writes.outputs
            place = torch.tensor(nodes, dtype=torch.int64, device=outputs.device).reshape(-1, 2)
            node_positions, index = place.T
            vectors.append(
                sublayer.write_vectors(outputs[:, node_positions, index], index, node_positions).to(
                    embedding
                )
            )
            positions += node_positions.tolist()
            others = outputs.clone()
            others[:, node_positions, index] = 0.0
            written = sublayer.written(others[None])[0].to(embedding)
            self._n_columns.append(len(positions))
            self._rest.append(self._rest[-1] + written)
            self._bias.append(self._bias[-1] + sublayer.writes.bias.to(embedding))
        self._vectors, self.positions = torch.cat(vectors, dim=1), np.array(positions)
        # The sources of a position, numbered from 0: rows of a table with a place for each.
        self._slots = pd.Series(positions).groupby(positions).cumcount().to_numpy()

    def contributions(
        self, n_before: int, n_targets: int, bias: Float[Tensor, "batch target"]
    ) -> "_Contributions":
        """Return empty sums for targets that read after `n_before` sublayers."""
        n = self._n_columns[n_before]
        columns = self._vectors.new_zeros(len(self._vectors), n_targets, n + 2)
        columns[:, :, -1] = bias.to(columns)
        of_all = self._rest[n_before], self._bias[n_before]
        places = torch.from_numpy(np.stack([self.positions[:n], self._slots[:n]]))
        width = int(self._slots[:n].max(initial=0)) + 1
        vectors = self._vectors[:, :n]
        positions, slots = places.to(columns.device)
        return _Contributions(columns, vectors, positions, slots, width, *of_all)


@dataclass(frozen=True, eq=False)
class _Contributions:
    """Sums over what targets read of each source; the last two columns are "rest" and "bias"."""

    sums: Float[Tensor, "batch target column"]
    vectors: Float[Tensor, "batch column d_model"]
    positions: Int[Tensor, "column"]
    slots: Int[Tensor, "column"]
    width: int
    rest: Residual
    bias: Residual

    def add(
        self, covectors: Float[Tensor, "batch target d_model"], positions: Int[Tensor, "target"]
    ) -> None:
        """Add what each target reads at one position."""
        covectors, positions = covectors.to(self.vectors), positions.to(self.positions.device)
        products = covectors @ self.vectors.transpose(1, 2)
        self.sums[:, :, :-2] += products * (self.positions == positions[:, None])
        for column, stream in ((-2, self.rest), (-1, self.bias)):
            self.sums[:, :, column] += (covectors * stream[:, positions]).sum(-1)

    def add_all(self, covectors: Float[Tensor, "batch target pos d_model"]) -> None:
        """Add what each target reads at every position."""
        covectors = covectors.to(self.vectors)
        batch, _, n_pos, d_model = covectors.shape
        table = self.vectors.new_zeros(batch, n_pos, self.width, d_model)
        table[:, self.positions, self.slots] = self.vectors
        products = torch.einsum("btpm,bpwm->btpw", covectors, table)
        self.sums[:, :, :-2] += products[:, :, self.positions, self.slots]
        for column, stream in ((-2, self.rest), (-1, self.bias)):
            self.sums[:, :, column] += torch.einsum("btpm,bpm->bt", covectors, stream)

    @property
    def columns(self) -> Float[Tensor, "batch target column"]:
        """The sums, on the CPU."""
        return self.sums.cpu()


_BLOCK = 2**24  # on a CPU: 64 MiB in float32
_SHARE = 0.1  # of the free memory of another device


def _numbers_at_once(x: Tensor) -> int:
    """Return how many numbers a block of targets may take."""
    fit = int(_SHARE * free_bytes(x.device) / x.element_size())
    return min(_BLOCK, fit) if x.device.type == "cpu" else fit
