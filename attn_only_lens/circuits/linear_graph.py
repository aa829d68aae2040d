"""Compute the nodes and edges of an attribution graph from a linear map (`engine/linear_map.py`).

The weight of an edge is the dot product of the vector that the source adds to the residual stream
and the vector with which the target reads it. All heads that are not nodes are summed into one
source, "rest". A graph with K nodes therefore needs K² dot products, whatever the model's size.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_only_lens.circuits.graph import EDGE_COLUMNS, NODE_COLUMNS
from attn_only_lens.devices import free_bytes, on_cpu
from attn_only_lens.engine.linear_map import LinearMap
from attn_only_lens.engine.positions import Positions, is_by_role, resolve_positions
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.sites import names_of
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS

Node = tuple[int, int]
"""A place (a position or a role), and an index in the sublayer."""
_BLOCK = 2**24  # the maximum number of values in memory at once on the CPU: 64 MiB in float32
_ROUTER = re.compile(r"(L\d+)\w*@")  # the layer of a neuron, in an id
_SHARE = 0.1  # the largest fraction of a device's free memory to use


@dataclass(frozen=True, eq=False)
class Places:
    """The places of nodes: positions, or roles (tokens whose position differs between prompts).

    Attributes:
        names: positions as strings, or roles in the order of their mean positions.
        real: the places that at least one prompt has.
        chosen: whether a role is at a position in a prompt; None if the places are positions.
    """

    names: list[str]
    real: list[int]
    chosen: Bool[Tensor, "role batch pos"] | None = None

    @classmethod
    def of(cls, pair: PromptPair, positions: Positions = "each") -> "Places":
        """Return the places in the prompts."""
        columns = torch.arange(pair.clean.shape[1], device="cpu")
        if not is_by_role(positions):
            real = pair.real.any(dim=0).nonzero().flatten()
            return cls([str(pos) for pos in columns.tolist()], real.tolist())
        ordered, from_end = list[tuple[float, str, Tensor]](), columns - pair.last.cpu()[:, None]
        for role in resolve_positions(pair, positions):
            place = float(from_end[role.chosen].double().mean())
            ordered.append((place, str(role.label), role.chosen))
        ordered.sort(key=lambda role: role[0])
        names = [name for _, name, _ in ordered]
        return cls(names, list(range(len(names))), torch.stack([x for *_, x in ordered]))

    def sums(
        self, by_position: Float[Tensor, "batch pos node"]
    ) -> Float[Tensor, "batch place node"]:
        """Convert values by position to values by place; a role's values are summed over tokens."""
        numbers = by_position.cpu().double()
        if self.chosen is None:
            return numbers
        return torch.einsum("rbp,bpn->brn", self.chosen.double(), numbers)

    def means(self, by_position: Float[Tensor, "batch pos node"]) -> Float[Tensor, "place node"]:
        """Return means over the prompts that have a token at the place."""
        n_prompts = len(by_position) if self.chosen is None else self.chosen.any(2).sum(1)[:, None]
        return self.sums(by_position).sum(0) / n_prompts

    def positions_of(self, nodes: Iterable[Node]) -> list[Node]:
        """Return nodes as (position, index) pairs; a role becomes its positions in all prompts."""
        if self.chosen is None:
            return list(nodes)
        some = self.chosen.any(1)
        return sorted(
            {(pos, i) for role, i in nodes for pos in some[role].nonzero()[:, 0].tolist()}
        )

    def by_role(
        self,
        edges: pd.DataFrame,
        by_prompt: Float[np.ndarray, "edge batch"],
        ids: set[str],
        shares: Sequence[float],
    ) -> pd.DataFrame:
        """Merge edges between positions into edges between roles; other nodes become "rest"."""
        assert self.chosen is not None
        columns = []
        for prompt in range(by_prompt.shape[1]):
            roles_and_positions = self.chosen[:, prompt].nonzero().tolist()
            names = {str(pos): self.names[role] for role, pos in roles_and_positions}
            ends = {}
            for end in ("source", "target"):
                parts = edges[end].str.partition("@")
                renamed = parts[0] + "@" + parts[2].map(names)
                renamed = renamed.where(renamed.isin(ids), "rest")
                ends[end] = renamed.where(parts[1] == "@", edges[end])
            weights = edges[["kind"]].assign(**ends, weight=by_prompt[:, prompt])
            weights = weights[weights["target"] != "rest"]
            columns.append(weights.groupby(["source", "target", "kind"])["weight"].sum())
        wide = pd.concat(columns, axis=1).fillna(0.0)
        frame = wide.sum(axis=1).rename("weight").to_frame()
        frame["error"] = _errors(wide.to_numpy(), shares)
        frame = frame.reset_index()[[*EDGE_COLUMNS, "error"]]
        return frame[frame["weight"] != 0].reset_index(drop=True)


def _errors(
    by_prompt: Float[np.ndarray, "row batch"], shares: Sequence[float]
) -> Float[np.ndarray, "row"]:
    """Return the standard error of each row's sum over prompts (NaN for one prompt).

    A prompt's number is its value times its share, its weight in the mean over prompts.
    """
    n = np.count_nonzero(shares)
    if n < 2:
        return np.full(len(by_prompt), np.nan)
    misses = by_prompt - by_prompt.sum(axis=1, keepdims=True) * np.array(shares)
    return np.asarray(np.sqrt((misses**2).sum(axis=1) * n / (n - 1)))


def node_frame(
    linear: LinearMap,
    places: Places,
    attributions: Sequence[Float[Tensor, "batch place node"]],
    chosen: Sequence[Sequence[Node]],
    rest: float,
) -> pd.DataFrame:
    """Return a frame of nodes: the embedding, heads by layer, "bias", "rest", "offset", "metric".

    Args:
        linear: the linear map of a run or a difference.
        places: the places of nodes.
        attributions: the attributions of all possible nodes in each sublayer.
        chosen: the nodes of the graph in each sublayer.
        rest: the attribution of the heads that are not nodes of the graph.
    """
    rows = list[tuple[Any, ...]]()

    def add(
        kinds: tuple[str, int | None],
        names: Sequence[str],
        some: Sequence[int],
        values: Tensor,
        by_prompt: Float[Tensor, "batch node"],
        slopes: Iterable[float] = repeat(np.nan),
    ) -> None:
        ids = [f"{name}@{places.names[place]}" for name, place in zip(names, some, strict=True)]
        numbers = by_prompt.sum(0).tolist(), _errors(by_prompt.T.numpy(), linear.shares)
        columns = (*map(repeat, kinds), names, some, values.tolist(), slopes, *numbers)
        rows.extend(zip(ids, *columns, strict=False))

    embedding = linear.run.embedding
    along = (linear.first.to(embedding) * embedding).sum(-1, keepdim=True)
    lengths = places.means(embedding.norm(dim=-1, keepdim=True))[:, 0]
    by_place = places.sums(along)[:, places.real, 0]
    names = ["embed"] * len(places.real)
    add(("embed", None), names, places.real, lengths[places.real], by_place)
    filled = [index for index, nodes in enumerate(chosen) if nodes]
    sizes = on_cpu([_sizes(linear, index) for index in filled])
    for index, values in zip(filled, sizes, strict=True):
        multipliers, writes = linear.multipliers[index], linear.sublayers[index]
        nodes, z, has_slope = chosen[index], linear.z[index], writes.kind in NEURON_KINDS
        some, heads = torch.tensor(nodes, dtype=torch.int64, device="cpu").T
        slopes: Iterable[float] = repeat(np.nan)
        # The column `gradient` is defined only for a single prompt.
        if has_slope and len(z) == 1 and places.chosen is None:
            slopes = multipliers[0, ..., 0].cpu()[some, heads].tolist()
        labels = names_of(linear.model, writes.layer, writes.kind)
        names = [labels[head] for head in heads.tolist()]
        by_node = attributions[index][:, some, heads]
        means = places.means(values)[some, heads]
        add((writes.kind, writes.layer), names, some.tolist(), means, by_node, slopes)
    for layer, contributions in linear.routers.items():
        by_place = places.sums(contributions.unsqueeze(-1))[..., 0]
        some = [place for place in places.real if by_place[:, place].any()]
        name = host_of(linear.model).hook_name(layer, "router", "z")
        weights = linear.run.recording.hooked[name][: len(by_place)].flatten(2)
        means = places.means(weights.norm(dim=-1, keepdim=True))[some, 0]
        add(("router", layer), [f"L{layer}R"] * len(some), some, means, by_place[:, some])
        if places.chosen is not None:
            rest += float(contributions.cpu().double().sum() - by_place.sum())
    if places.chosen is not None:  # tokens without a role
        rest += float(along.cpu().double().sum() - by_place.sum())
    ends = {"bias": (0.0, linear.bias), "rest": (0.0, rest)}
    if linear.is_difference:
        del ends["bias"]  # biases cancel in a difference of two runs
    if linear.offset or not linear.is_difference:
        ends["offset"] = (0.0, linear.offset)
    for name, (size, attribution) in (ends | {"metric": (linear.value,) * 2}).items():
        rows.append((name, name, None, name, None, size, np.nan, attribution, np.nan))
    frame = pd.DataFrame(rows, columns=[*NODE_COLUMNS, "error"])
    frame = frame.astype({"layer": "Int64", "position": "Int64"})
    return frame.drop(columns="error") if places.chosen is None else frame


def _sizes(linear: LinearMap, index: int) -> Float[Tensor, "batch pos node"]:
    """Return neurons' outputs, or the norms of attention heads' outputs, in the clean run."""
    writes = linear.sublayers[index]
    z = linear.z[index]
    return z[..., 0] if writes.kind in NEURON_KINDS else z.norm(dim=-1)


class LinearGraph:
    """The edges into the chosen nodes of a linear map; a node is a (position, index) pair."""

    def __init__(
        self, linear: LinearMap, pair: PromptPair, chosen: Sequence[Sequence[Node]]
    ) -> None:
        self._linear, self._chosen = linear, chosen
        self._real = Places.of(pair).real
        self._sources = _Sources(linear, self._real, chosen)

    def _ids(self, index: int, nodes: Sequence[Node]) -> list[str]:
        writes = self._linear.sublayers[index]
        labels = names_of(self._linear.model, writes.layer, writes.kind)
        return [f"{labels[node]}@{pos}" for pos, node in nodes]

    def edges(
        self, on_done: Callable[[int], object] = lambda n: None
    ) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
        """Return a frame of the nonzero edges, and their weights in each prompt.

        `on_done` is called with the number of nodes whose edges were just computed.
        """
        sources = [f"embed@{pos}" for pos in self._real]
        for index, nodes in enumerate(self._chosen):
            sources += self._ids(index, nodes)
        linear, n = self._linear, len(self._linear.sublayers)
        bias, covectors = linear.logit_bias[:, None], linear.last[:, None]
        waiting = [(["metric"], "value", self._sources.products(n, bias, covectors))]
        edges = list[tuple[pd.DataFrame, np.ndarray]]()
        for index, nodes in enumerate(self._chosen):
            for kind in linear.kinds(index) if nodes else ():
                for some, by_prompt in self._into(index, kind, nodes):
                    waiting.append((self._ids(index, some), kind, by_prompt))
                    on_done(len(some) * (kind == "value"))
                    # Transfer many weights at once, since each transfer synchronises the device.
                    if sum(x.numel() for *_, x in waiting) > _BLOCK:
                        edges += _edges_of(sources, waiting)
                        waiting = []
        frames, weights = zip(*edges, *_edges_of(sources, waiting), strict=True)
        return pd.concat(frames, ignore_index=True), np.concatenate(weights)

    def _into(
        self, index: int, kind: str, nodes: Sequence[Node]
    ) -> Iterator[tuple[Sequence[Node], Float[Tensor, "batch target column"]]]:
        """Yield chunks of a sublayer's nodes, and the weights of the edges into each chunk."""
        linear, multipliers = self._linear, self._linear.multipliers[index]
        # A row of the backward pass has several tensors of the sizes of z and of the pattern.
        size = len(self._sources.positions) + 4 * multipliers[0].numel()
        size += 4 * linear.run.embedding[0].numel()
        if linear.sublayers[index].kind == "attention":
            size += 4 * multipliers.shape[2] * multipliers.shape[1] ** 2
        fit = int(_SHARE * free_bytes(multipliers.device) / multipliers.element_size())
        most = min(_BLOCK, fit) if multipliers.device.type == "cpu" else fit
        n_at_once = max(1, most // (len(multipliers) * size))
        for first in range(0, len(nodes), n_at_once):
            some = nodes[first : first + n_at_once]
            places = torch.tensor(some, dtype=torch.int64, device="cpu")
            covectors, bias = linear.covectors(index, kind, *places.T)
            own = places[:, 0].to(covectors.device) if linear.reads_own(index, kind) else None
            yield some, self._sources.products(linear.n_before(index), bias, covectors, own)


def _edges_of(
    sources: list[str], blocks: Sequence[tuple[list[str], str, Tensor]]
) -> Iterator[tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]]:
    """Yield, for each block, a frame of the nonzero edges, and their weights in each prompt.

    A block consists of target ids, an edge kind, and edge weights [batch, target, column].
    """
    read = on_cpu([by_prompt for *_, by_prompt in blocks])
    for (targets, kind, _), by_prompt in zip(blocks, read, strict=True):
        weights = by_prompt.sum(0)
        row, column = (x.numpy() for x in weights.nonzero(as_tuple=True))
        names = [*sources[: weights.shape[1] - 2], "rest", "bias"]
        named = np.array(names, dtype=object)[column]
        if kind == "routing":  # the part that is not read from the stream
            routers = [_ROUTER.sub(r"\1R@", target) for target in targets]
            named = np.where(named == "bias", np.array(routers, dtype=object)[row], named)
        frame = pd.DataFrame(
            {
                "source": named,
                "target": np.array(targets, dtype=object)[row],
                "kind": kind,
                "weight": weights[row, column].double().numpy(),
            }
        )
        yield frame, by_prompt[:, row, column].T.double().numpy()


class _Sources:
    """The vectors that the embedding, each chosen node and "rest" add to the residual stream."""

    def __init__(
        self, linear: LinearMap, real: Sequence[int], chosen: Sequence[Sequence[Node]]
    ) -> None:
        embedding = linear.run.embedding
        vectors, positions = [embedding[:, real]], list(real)
        others = embedding.clone()
        others[:, real] = 0.0
        self._n_columns, self._rest = [len(real)], [others]
        self._bias = [torch.zeros_like(embedding)]
        # Each write has a column. A feature that writes to several layers has several columns.
        nodes_of_columns = [*range(len(real))]
        firsts = np.cumsum([len(real), *map(len, chosen)]).tolist()
        for number, sublayer in enumerate(linear.sublayers):
            rest, bias = self._rest[-1], self._bias[-1] + sublayer.bias.to(embedding)
            for source, writes in ((number, sublayer), *linear.run.arriving(number)):
                nodes, outputs = chosen[source], writes.z
                place = torch.tensor(nodes, dtype=torch.int64, device=outputs.device).reshape(-1, 2)
                node_positions, index = place.T
                written = writes.vectors(outputs[:, node_positions, index], index, node_positions)
                vectors.append(written.to(embedding))
                positions += [position for position, _ in nodes]
                nodes_of_columns += range(firsts[source], firsts[source] + len(nodes))
                others = outputs.clone()
                others[:, node_positions, index] = 0.0
                rest = rest + writes.summed(others).to(embedding)
            self._n_columns.append(len(positions))
            self._rest.append(rest)
            self._bias.append(bias)
        self._n_nodes = firsts
        self._vectors, self.positions = torch.cat(vectors, dim=1), np.array(positions)
        self._nodes = torch.tensor(nodes_of_columns, device=self._vectors.device)
        # the index of each source among the sources at the same position
        self._slots = pd.Series(positions).groupby(positions).cumcount().to_numpy()

    def products(
        self,
        n_before: int,
        bias: Float[Tensor, "batch target"],
        covectors: Float[Tensor, "batch target *pos d_model"],
        target_positions: Tensor | None = None,
    ) -> Float[Tensor, "batch target column"]:
        """Return the dot products of `covectors` with the outputs of sources before a sublayer.

        Each target reads at its position in `target_positions`; if `target_positions` is None, all
        targets read at every position. The last two columns are "rest" and "bias".
        """
        n, covectors = self._n_columns[n_before], covectors.to(self._vectors)
        vectors, streams = self._vectors[:, :n], (self._rest[n_before], self._bias[n_before])
        places = torch.from_numpy(np.stack([self.positions[:n], self._slots[:n]]))
        positions, slots = places.to(vectors.device)
        if target_positions is None:
            width = int(self._slots[:n].max(initial=0)) + 1
            table = vectors.new_zeros(len(vectors), covectors.shape[2], width, vectors.shape[2])
            table[:, positions, slots] = vectors
            sums = torch.einsum("btpm,bpwm->btpw", covectors, table)[:, :, positions, slots]
            ends = [torch.einsum("btpm,bpm->bt", covectors, stream) for stream in streams]
        else:
            here = target_positions.to(vectors.device)
            sums = covectors @ vectors.transpose(1, 2) * (positions == here[:, None])
            ends = [(covectors * stream[:, here]).sum(-1) for stream in streams]
        ends[1] = ends[1] + bias.to(sums)
        if n > self._n_nodes[n_before]:  # add up the writes of each feature
            by_node = sums.new_zeros(*sums.shape[:2], self._n_nodes[n_before])
            sums = by_node.index_add(2, self._nodes[:n], sums)
        return torch.cat([sums, torch.stack(ends, dim=-1)], dim=-1)
