r"""Score edges by a product of two factors, with one forward pass per node instead of per edge.

Cutting the edge from a writer w (the source node) to a reader R (the target node) changes R's
output, which later layers read. The change in R's output is computed in closed form for all writers
at once. Its effect on the logits is estimated from one forward pass per node:

    L(w → R)  = Σ_ref mean ‖change in R's output, if R reads ref instead of w's output‖
    N(R)      = Σ_ref mean max |change in the logits, if R's z is replaced by ref|
    score     = L(w → R) · N(R) / max ‖R's output‖
    exact     = Σ_ref mean max |change in the logits, if R reads ref instead of w's output|

A writer's z is replaced by ref, which is 0 or the mean of this z over all tokens; Σ_ref is the sum
over both. Each "mean" and "max ‖…‖" is over all tokens of all prompts, and each "max |…|" is over
the logits at a token. A writer is replaced in only one input of the reader: the queries, keys or
values of an attention head ("q", "k", "value"), or the whole input of a neuron or of the
unembedding ("in"). Norm scales are held fixed. For edges into the logits, L, score and exact are
equal.

One forward pass records the outputs of all nodes. Each node, and each exact cut, needs one more
forward pass per value of ref. Per kind of edge and value of ref, every attention block with target
nodes also runs once, on a batch with one entry per source node. Prompts are batched by length.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attn_only_lens.engine.edit_checks import require_edits_read
from attn_only_lens.engine.metrics import BoundMetric
from attn_only_lens.engine.readers import Readers, input_hooks
from attn_only_lens.engine.replay import Variants, make_replay
from attn_only_lens.engine.sites import LayerSites, resolve_sites
from attn_only_lens.engine.writes import Decomposition, SublayerWrites, decompose
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.run_patches import Batching

_REFERENCES = ("zero", "mean")
_KINDS: dict[HeadKind, tuple[str, ...]] = {"attention": ("q", "k", "value"), "neuron": ("in",)}
_NUMBERS = 2**24  # the maximum number of values in memory at once: 128 MiB in float64
_ROUNDINGS = 32  # rounding errors, in units of the largest write
_EDGE = ["writer", "reader", "kind"]
_Edge = tuple[str, str, str]
_Key = TypeVar("_Key")


def score_edges(
    model: Any, batches: Iterable[Int[Tensor, "batch pos"]], nodes: Sequence[str], exact: int = 0
) -> pd.DataFrame:
    """Score every edge between the given nodes, the embedding and the logits.

    Args:
        model: a model with neuron-heads, in float64.
        batches: prompts, a batch for each length.
        nodes: names of heads and neurons.
        exact: how many of the edges with the highest scores are also cut exactly.

    Returns:
        A frame with one row per edge, the highest score first. Columns: `writer` ("embed" or a
        name), `reader` (a name or "output"), `kind` ("q", "k", "value", "in"), `score`, `local`
        (L), `node` (N; missing for "output"), and `exact` (missing for edges that were not cut).
    """
    scoring = _Scoring(
        model, sorted(batches, key=lambda x: x.shape[1]), resolve_sites(model, list(nodes))
    )
    local = _sum_by_key(scoring.local())
    edges = pd.DataFrame(list(local), columns=_EDGE).assign(local=list(local.values()))
    sizes = scoring.sizes()
    size = edges["reader"].map(sizes).fillna(1.0)
    # A node that writes only rounding errors has no ratio of N to its size.
    least = _ROUNDINGS * torch.finfo(torch.float64).eps * max(sizes.values())
    edges["node"] = edges["reader"].map(_sum_by_key(scoring.node()))
    edges["score"] = edges["local"] * edges["node"].fillna(1.0) / size.where(size > least, 1.0)
    edges = edges.sort_values("score", ascending=False, kind="stable", ignore_index=True)
    wanted = [tuple(row) for row in edges[_EDGE].head(exact).to_numpy()]
    cuts = _sum_by_key(scoring.exact(wanted))
    return edges.assign(exact=[cuts.get(tuple(row), np.nan) for row in edges[_EDGE].to_numpy()])


def _sum_by_key(values: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    sums: dict[_Key, float] = defaultdict(float)
    for key, value in values:
        sums[key] += value
    return dict(sums)


@dataclass(eq=False)
class _Batch:
    """The run on all prompts of one length; `share` is their fraction of all tokens."""

    run: Decomposition
    readers: Readers
    batching: Batching
    share: float

    def writes(self, sites: LayerSites) -> SublayerWrites:
        return self.run.of(sites.layer, sites.kind)


class _Scoring:
    """Compute the two factors of each edge's score, and the effects of exact cuts."""

    def __init__(
        self,
        model: Any,
        batches: Sequence[Tensor],
        chosen: Sequence[LayerSites],
    ) -> None:
        self._chosen = {(sites.layer, sites.kind): sites for sites in chosen}
        self._host = host_of(model)
        layers = [sites.layer for sites in chosen if sites.kind == "attention"]
        names = tuple(name for layer in layers for name in input_hooks(self._host, layer))
        n_tokens = sum(tokens.numel() for tokens in batches)
        self._batches: list[_Batch] = []
        for tokens in batches:
            decomposed = decompose(model, tokens, None, names=names)
            replay = make_replay(model, decomposed.recording, _largest_change(decomposed))
            batching = Batching(model, None, lambda n: None, replay.numbers_per_token)
            readers = Readers(replay, decomposed)
            self._batches.append(_Batch(decomposed, readers, batching, tokens.numel() / n_tokens))

        for kind in _KINDS:
            if of_kind := [sites.layer for sites in chosen if sites.kind == kind]:
                recording, tested = self._batches[0].run.recording, replay.tested
                require_edits_read(model, recording, kind, of_kind, "z", tested)

        def mean(activations: Iterable[Tensor]) -> Tensor:
            return torch.stack([x.sum((0, 1)) for x in activations]).sum(0) / n_tokens

        self._means = {
            key: mean(batch.run.of(*key).z for batch in self._batches) for key in self._chosen
        }
        self._embedding = mean(batch.run.embedding for batch in self._batches)

    def _cases(self) -> Iterator[tuple[_Batch, str, LayerSites]]:
        return product(self._batches, _REFERENCES, self._chosen.values())

    def sizes(self) -> dict[str, float]:
        """Return the largest norm over all tokens of what each node adds to the residual stream."""
        sizes: dict[str, float] = {}
        for sites in self._chosen.values():
            written = [batch.writes(sites).written(sites) for batch in self._batches]
            largest = torch.stack([x.norm(dim=-1).amax((1, 2)) for x in written]).amax(0)
            sizes |= dict(zip(sites.names, largest.tolist(), strict=True))
        return sizes

    @torch.no_grad()
    def local(self) -> Iterator[tuple[_Edge, float]]:
        """Yield (edge, term) pairs; the terms of an edge add up to the factor L of its score."""
        for batch, reference, sites in self._cases():
            writes = batch.writes(sites)
            for kind in _KINDS[sites.kind]:
                for writers, z in self._read(batch, reference, sites, kind):
                    sizes = _sizes(writes, sites, z - _z_of_nodes(writes, sites))
                    for writer, row in zip(writers, sizes.cpu().double().tolist(), strict=True):
                        for reader, size in zip(sites.names, row, strict=True):
                            yield (writer, reader, kind), size * batch.share
        yield from self._into_logits()

    @torch.no_grad()
    def node(self) -> Iterator[tuple[str, float]]:
        """Yield (node, term) pairs; a node's terms add up to the factor N of its edges' scores."""
        for batch, reference, sites in self._cases():
            z = _z_of_nodes(self._replaced(batch.writes(sites), reference), sites)
            nodes = torch.arange(len(sites.names), device=z.device)
            values = self._values(batch, sites, nodes, z[0].movedim(2, 0)).tolist()
            for name, value in zip(sites.names, values, strict=True):
                yield name, value * batch.share

    @torch.no_grad()
    def exact(self, edges: Sequence[_Edge]) -> Iterator[tuple[_Edge, float]]:
        """Cut edges exactly; yield (edge, term) pairs. The terms of an edge add up to `exact`."""
        into: dict[tuple[str, str], set[str]] = defaultdict(set)
        for writer, reader, kind in edges:
            into[reader, kind].add(writer)
        for batch, reference, sites in self._cases():
            for kind in _KINDS[sites.kind]:
                wanted = set().union(*(into[name, kind] for name in sites.names))
                for writers, z in self._read(batch, reference, sites, kind, wanted):
                    is_cut = [[w in into[name, kind] for w in writers] for name in sites.names]
                    node, row = torch.tensor(is_cut, device=z.device).nonzero(as_tuple=True)
                    values = self._values(batch, sites, node, z[row, :, :, node]).tolist()
                    for i, j, value in zip(row.tolist(), node.tolist(), values, strict=True):
                        yield (writers[i], sites.names[j], kind), value * batch.share
        yield from self._into_logits(into["output", "in"])

    def _replaced(self, sublayer: SublayerWrites, reference: str) -> SublayerWrites:
        """Return a sublayer in which every z is replaced by zero or by the mean z."""
        z = torch.zeros_like(sublayer.z)
        if reference == "mean":
            z = z + self._means[sublayer.layer, sublayer.kind]
        return replace(sublayer, z=z)

    def _removed(
        self,
        batch: _Batch,
        reference: str,
        before: Sequence[SublayerWrites],
        only: set[str] | None,
    ) -> tuple[list[str], Float[Tensor, "writer batch pos d_model"]]:
        """Return source nodes, and the change in the residual stream if each one is replaced."""
        x = batch.run.embedding
        names = ["embed"]
        changes = [((0 if reference == "zero" else self._embedding) - x)[None]]
        for sublayer in before:
            if sites := self._chosen.get((sublayer.layer, sublayer.kind)):
                names += sites.names
                written = self._replaced(sublayer, reference).written(sites)
                changes.append((written - sublayer.written(sites)).to(x.device))
        change = torch.cat(changes)
        if only is None:
            return names, change
        kept = [i for i, name in enumerate(names) if name in only]
        return [names[i] for i in kept], change[kept]

    def _read(
        self,
        batch: _Batch,
        reference: str,
        sites: LayerSites,
        kind: str,
        only: set[str] | None = None,
    ) -> Iterator[tuple[list[str], Float[Tensor, "writer batch pos node d_head"]]]:
        """Yield chunks of source nodes, and the z of target nodes after each source is replaced."""
        writes = batch.writes(sites)
        before = batch.run.before(sites.layer, sites.kind)
        names, change = self._removed(batch, reference, before, only)
        width = max(writes.z[0, 0].numel(), len(sites.names) * change.shape[-1])
        size = max(1, _NUMBERS // (batch.run.recording.tokens.numel() * width))
        for first in range(0, len(names), size):
            entering = writes.reads.change(change[first : first + size])
            if sites.kind == "attention":
                z = batch.readers.attention_z(sites.layer, entering, kind)
                z = z[:, :, :, sites.index.to(z.device)]
            else:
                dz = batch.readers.neuron_change(sites, entering, "z")
                z = _z_of_nodes(writes, sites) + dz[..., None]
            yield names[first : first + size], z

    def _into_logits(self, only: set[str] | None = None) -> Iterator[tuple[_Edge, float]]:
        """Yield (edge, term) pairs for edges into the logits, cut in the final residual stream."""
        for batch in self._batches if only is None or only else ():
            size = max(1, _NUMBERS // batch.run.recording.logits.numel())
            for reference in _REFERENCES:
                writers, change = self._removed(batch, reference, batch.run.sublayers, only)
                for first in range(0, len(writers), size):
                    some = change[first : first + size]
                    values = batch.readers.values_at_end(some, 0, "held").mean(-1).tolist()
                    for writer, value in zip(writers[first : first + size], values, strict=True):
                        yield (writer, "output", "in"), value * batch.share

    def _values(
        self,
        batch: _Batch,
        sites: LayerSites,
        node: Int[Tensor, "variant"],
        z: Float[Tensor, "variant batch pos d_head"],
    ) -> Float[Tensor, "variant"]:
        """Return how much the logits change in each run; each run replaces the z of one node."""
        replay = batch.readers.replay
        block = self._host.block(sites.layer, sites.kind)
        name = self._host.hook_name(sites.layer, sites.kind, "z")
        heads = sites.index.to(z.device)[node]

        def run_some(some: Tensor) -> Tensor:
            some = some.to(z.device)

            def put(value: Tensor, hook: Any) -> Tensor:
                by_variant = value.clone().unflatten(0, (len(some), -1))
                by_variant[torch.arange(len(some)), :, :, heads[some]] = z[some]
                return by_variant.flatten(0, 1)

            stream = replay.recorded_stream(block, 0, len(some))
            return replay.values(Variants(block, 0, stream, [(name, put)])).mean(-1)

        values = torch.zeros(len(z), dtype=torch.float64, device="cpu")
        variants = torch.arange(len(z), device="cpu")
        batch.batching.fill(values, variants, replay.numbers_per_variant(0), run_some)
        return values


def _largest_change(decomposed: Decomposition) -> BoundMetric:
    """Return a metric: the largest |change in a logit| at each token, averaged over tokens."""
    recorded = decomposed.recording.logits

    def compute(logits: Float[Tensor, "site batch pos d_vocab"]) -> Float[Tensor, "site batch"]:
        return (logits - recorded).abs().amax(-1).mean(-1)

    batch, n_pos, d_vocab = recorded.shape
    return BoundMetric("largest change of a logit", None, None, (batch, n_pos, d_vocab), compute)


def _z_of_nodes(
    writes: SublayerWrites, sites: LayerSites
) -> Float[Tensor, "writer=1 batch pos node d_head"]:
    return writes.z[None, :, :, sites.index.to(writes.z.device)]


def _sizes(
    writes: SublayerWrites, sites: LayerSites, dz: Float[Tensor, "writer batch pos node d_head"]
) -> Float[Tensor, "writer node"]:
    """Return the mean norm of each node's output change, given the change `dz` of its z."""
    written = torch.einsum("nbphd,hdm->nhbpm", dz, writes.matrix[sites.index.to(dz.device)])
    return writes.writes.change(written).norm(dim=-1).mean((2, 3))
