r"""Edges of a model by two factors: one forward pass a node instead of one an edge.

To cut an edge from a writer w to a reader R changes first what R writes, then all that follows. The
first is known in closed form for every writer at once; the second is the same for all edges into R,
up to direction and size, so that one forward pass a node tells it:

    L(w → R)  = Σ_ref mean ‖change of what R writes, when it reads ref in place of what w wrote‖
    N(R)      = Σ_ref mean max |change of the logits, when R puts out ref in place of its z|
    score     = L(w → R) · N(R) / max ‖what R writes‖
    exact     = Σ_ref mean max |change of the logits, when R reads ref in place of what w wrote|

Means and the maximum of sizes are over all tokens of all prompts, the first one included; ref is 0,
and the mean of z over them ("zero", "mean"). A writer is replaced in one input of the reader alone:
queries, keys or values of an attention head ("q", "k", "value"); all that a neuron-head, or the
unembedding, reads ("in"). Norm scales are held at those of the run where R reads, and where w
writes through a norm after its sublayer. Into the logits, "output", both factors are one: local,
score and exact are Σ_ref mean max |change of the logits|.

The exact cut passes the very change of what R writes on to the logits: two forward passes an edge,
for as many of the highest scores as are asked for. The score keeps its size and forgets its
direction.

Cost: 1 forward pass for what parts write; for each attention layer with readers, kind and reference
its block with a row for each writer; for neurons a product of matrices; and 2 forward passes a node
(one a reference). Prompts of one length run together, so that nothing is padded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import is_count
from attn_only_lens.axes import Residual, Tokens
from attn_only_lens.engine.edit_checks import require_edits_read
from attn_only_lens.engine.edits import neuron_changes
from attn_only_lens.engine.gradients import Tape, start_graph
from attn_only_lens.engine.in_float32 import in_float32
from attn_only_lens.engine.inputs import reasons_not_to_run
from attn_only_lens.engine.metrics import (
    AnyMetric,
    BoundMetric,
    bind,
    no_gradient_reasons,
    one_run_reasons,
    require_differentiable,
)
from attn_only_lens.engine.prompts import PromptPair, Prompts, single_prompts
from attn_only_lens.engine.readers import Readers, input_hooks
from attn_only_lens.engine.recording import run
from attn_only_lens.engine.replay import Variants, make_replay
from attn_only_lens.engine.sites import LayerSites, Sites, all_heads, resolve_sites
from attn_only_lens.engine.writes import Decomposition, SublayerWrites, decompose
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.run_patches import Batching
from attn_only_lens.precision import full_precision

_REFERENCES = ("zero", "mean")
_KINDS: dict[HeadKind, tuple[str, ...]] = {"attention": ("q", "k", "value"), "neuron": ("in",)}
_NUMBERS = 2**24  # at once: 128 MiB in float64
_COLUMNS = ["writer", "reader", "kind", "score", "local", "node", "exact"]
_PROBLEM = "these edges cannot be scored"


@in_float32
@full_precision()
def score_edges(
    model: Any,
    prompts: Prompts,
    nodes: Sites | None = None,
    *,
    metric: AnyMetric | None = None,
    top: int = 300,
    to: Sequence[str] = _REFERENCES,
    exact: int = 0,
    mask: Tensor | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Score every edge between some nodes, the embedding and the logits.

    An edge is a writer, a reader after it, and what the reader does with what it reads. Writers and
    readers are heads at all positions together.

    Args:
        model: converted, or with exposed neuron-heads; without hooks of its own. A model in half
            precision is run in float32 during the call, with the same weights.
        prompts: a text, texts, tokens [batch, pos], or a list of rows of tokens; of any lengths.
        nodes: `neuron_heads()`, `heads()`, `all_heads()`, or names: whole neurons. By default all,
            if there are no more than `top`; otherwise those of largest attribution.
        metric: for that attribution, Σ |gradient · z| over tokens; not otherwise used.
        top: how many nodes there are by default, at most.
        to: what replaces writes and outputs: "zero", "mean", or both, which are added up.
        exact: how many of the edges of highest score to cut exactly, too.
        mask: 1 for real tokens, 0 for padding, if prompts are tokens.
        progress: whether to show a bar over forward passes of nodes and cuts.

    Returns:
        A row for each edge, the highest score first: `writer` ("embed" or a name), `reader` (a name
        or "output"), `kind` ("q", "k", "value", "in"), `score`, `local` (L), `node` (N; missing for
        "output"), and `exact`, missing where it was not asked for.

    Raises:
        InputError: with every reason: prompts or nodes that do not fit, single heads of a neuron, a
            model with too many heads without nodes or a metric.
        InputError: norms or matrices of a bridge are unknown.
        UnsupportedModelError: what parts write does not add up to the stream, or heads do not read
            or write where they are hooked.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> model, prompts = convert(pretrained.modular_addition()), torch.tensor([[3, 4, 113]])
        >>> edges = circuits.score_edges(
        ...     model, prompts, ["L0H0", "L0H1", "L0N7"], exact=5, progress=False)
        >>> edges.query("reader == 'L0N7'")["writer"].sort_values().tolist()
        ['L0H0', 'L0H1', 'embed']
        >>> int(edges["exact"].notna().sum())
        5
    """
    _check(model, nodes, metric, top, to, exact)
    pair = single_prompts(model, prompts, mask)
    sites = _default_nodes(model, pair, metric, top) if nodes is None else nodes
    chosen = resolve_sites(model, sites)
    single = [name for each in chosen for name in each.names if "." in name]
    InputError.raise_if(
        [f"got {name}, one head of a neuron; expected whole neurons" for name in single[:1]],
        _PROBLEM,
    )
    batches = _by_length(pair)
    n_nodes = sum(len(each.names) for each in chosen)
    with tqdm(total=len(batches) * len(to) * n_nodes, unit="pass", disable=not progress) as bar:
        scoring = _Scoring(model, batches, chosen, tuple(to), bar.update)
        local, node = scoring.local(), scoring.node()
        edges = pd.DataFrame(list(local), columns=_COLUMNS[:3]).assign(local=list(local.values()))
        size = edges["reader"].map(scoring.sizes()).fillna(1.0)
        edges["node"] = edges["reader"].map(node)
        share = edges["node"].fillna(1.0) / size.where(size > 0, 1.0)
        edges["score"] = edges["local"] * share
        edges = edges.sort_values("score", ascending=False, kind="stable", ignore_index=True)
        wanted = [tuple(row) for row in edges[_COLUMNS[:3]].head(exact).to_numpy()]
        # What is cut from the logits takes no forward pass.
        n_cuts = sum(reader != "output" for _, reader, _ in wanted)
        bar.total = bar.n + len(batches) * len(to) * n_cuts
        found = scoring.exact(wanted)
        edges["exact"] = [found.get(tuple(row), np.nan) for row in edges[_COLUMNS[:3]].to_numpy()]
    return edges[_COLUMNS]


def _check(
    model: Any,
    nodes: object,
    metric: AnyMetric | None,
    top: object,
    to: Sequence[str],
    exact: object,
) -> None:
    reasons = reasons_not_to_run(model)
    listed = list(to) if isinstance(to, list | tuple) else []
    if not listed or any(each not in _REFERENCES or listed.count(each) > 1 for each in listed):
        reasons.append(f"got to={to!r}; expected one or both of {list(_REFERENCES)}, each once")
    if not is_count(exact):
        reasons.append(f"got exact={exact!r}; expected a number of edges, 0 or more")
    if not is_count(top, 1):
        reasons.append(f"got top={top!r}; expected 1 or more")
    if nodes is not None and metric is not None:
        reasons.append("got nodes and a metric, which chooses nodes; expected one of the two")
    if metric is not None:
        reasons += one_run_reasons(metric) + no_gradient_reasons()
    InputError.raise_if(reasons, _PROBLEM)


def _by_length(pair: PromptPair) -> list[Tokens]:
    """Return prompts of one length together, without padding; the shortest first."""
    rows: dict[int, list[Tensor]] = {}
    for row, real in zip(pair.clean, pair.real, strict=True):
        rows.setdefault(int(real.sum()), []).append(row[real])
    return [torch.stack(rows[length]) for length in sorted(rows)]


def _default_nodes(model: Any, pair: PromptPair, metric: AnyMetric | None, top: int) -> list[str]:
    """Return all heads of a small model; of any other, those of largest Σ |gradient · z|."""
    every = resolve_sites(model, all_heads())
    names = [name for each in every for name in each.names]
    if len(names) <= top:
        return names
    if metric is None:
        raise InputError(
            [
                f"the model has {len(names):,} heads and neurons; expected nodes, or a metric, of "
                f"whose attribution the largest {top} are taken"
            ],
            _PROBLEM,
        )
    host = host_of(model)
    at = [host.hook_name(each.layer, each.kind, "z") for each in every]
    tape = Tape(at)
    with torch.enable_grad(), start_graph(model):
        logits = run(model, pair.clean, pair.mask, tape.hooks)
        bound = bind(metric, model, pair, logits.detach())
        require_differentiable(bound, logits.detach())
        nodes = dict(tape.nodes)
        gradients = tape.gradients(bound.of_logits(logits))
    sizes = []
    for name, each in zip(at, every, strict=True):
        of_heads = (gradients[name] * nodes[name].detach()).sum(-1)
        of_nodes = of_heads.unflatten(-1, (len(each.names), -1)).sum(-1)
        sizes.append(of_nodes.abs().sum((0, 1)).cpu().double())
    largest = torch.cat(sizes).argsort(descending=True, stable=True)[:top]
    return [names[i] for i in largest.tolist()]


@dataclass(eq=False)
class _Run:
    """Prompts of one length, taken apart."""

    parts: Decomposition
    readers: Readers
    batching: Batching

    @property
    def n_tokens(self) -> int:
        return self.parts.recording.tokens.numel()


_Edge = tuple[str, str, str]


class _Scoring:
    """Both factors, and exact cuts, over all prompts.

    Args:
        model: to be scored.
        batches: of prompts.
        chosen: the nodes.
        references: what replaces writes.
        on_done: called with the number of forward passes that are done.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[Tokens],
        chosen: Sequence[LayerSites],
        references: tuple[str, ...],
        on_done: Callable[[int], Any],
    ) -> None:
        self._chosen = {(each.layer, each.kind): each for each in chosen}
        self._references, self._host = references, host_of(model)
        layers = [each.layer for each in chosen if each.kind == "attention"]
        names = tuple(name for layer in layers for name in input_hooks(self._host, layer))
        self._runs: list[_Run] = []
        for tokens in batches:
            parts = decompose(model, tokens, None, names=names)
            replay = make_replay(model, parts.recording, _largest_change(parts))
            batching = Batching(model, None, on_done, replay.numbers_per_token)
            self._runs.append(_Run(parts, Readers(replay, parts), batching))
        for kind in _KINDS:
            of_kind = [each.layer for each in chosen if each.kind == kind]
            if of_kind:
                recording = self._runs[0].parts.recording
                require_edits_read(model, recording, kind, of_kind, "z")
        self._n_tokens = sum(each.n_tokens for each in self._runs)
        self._means = {
            key: self._mean([each.parts.of(*key).z for each in self._runs]) for key in self._chosen
        }
        self._embedding = self._mean([each.parts.embedding for each in self._runs])

    def _mean(self, activations: Sequence[Tensor]) -> Tensor:
        """The mean over all tokens."""
        return torch.stack([x.sum((0, 1)) for x in activations]).sum(0) / self._n_tokens

    def sizes(self) -> dict[str, float]:
        """Return the largest size of what each node writes."""
        found: dict[str, float] = {}
        for sites in self._chosen.values():
            written = [r.parts.of(sites.layer, sites.kind).written(sites) for r in self._runs]
            sizes = torch.stack([x.norm(dim=-1).amax((1, 2)) for x in written]).amax(0)
            found |= dict(zip(sites.names, sizes.tolist(), strict=True))
        return found

    @torch.no_grad()
    def local(self) -> dict[_Edge, float]:
        """Return L of every edge."""
        found: dict[_Edge, float] = {}
        for one in self._runs:
            for to in self._references:
                for key, sites in self._chosen.items():
                    own = one.parts.of(*key)
                    for kind in _KINDS[sites.kind]:
                        for writers, z in self._read(one, to, sites, kind):
                            sizes = _sizes(own, sites, z - _of_nodes(own, sites))
                            self._add(found, writers, sites.names, kind, sizes)
                for writer, value in self._to_logits(one, to):
                    edge = writer, "output", "in"
                    found[edge] = found.get(edge, 0.0) + value * one.n_tokens / self._n_tokens
        return found

    def _add(
        self,
        found: dict[_Edge, float],
        writers: Sequence[str],
        names: Sequence[str],
        kind: str,
        sizes: Float[Tensor, "writer node"],
    ) -> None:
        rows = (sizes.cpu().double() / self._n_tokens).tolist()
        for writer, row in zip(writers, rows, strict=True):
            for name, value in zip(names, row, strict=True):
                found[writer, name, kind] = found.get((writer, name, kind), 0.0) + value

    @torch.no_grad()
    def node(self) -> dict[str, float]:
        """Return N of every node."""
        found: dict[str, float] = {}
        for one in self._runs:
            for to in self._references:
                for key, sites in self._chosen.items():
                    z = _of_nodes(self._put(one.parts.of(*key), to), sites)
                    every = torch.arange(len(sites.names), device=z.device)
                    values = self._values(one, sites, every, z[0].movedim(2, 0))
                    for name, value in zip(sites.names, values.tolist(), strict=True):
                        found[name] = found.get(name, 0.0) + value * one.n_tokens / self._n_tokens
        return found

    @torch.no_grad()
    def exact(self, edges: Sequence[_Edge]) -> dict[_Edge, float]:
        """Return the change of the logits by each cut."""
        found = dict.fromkeys(edges, 0.0)
        into: dict[tuple[str, str], set[str]] = {}
        for writer, reader, kind in edges:
            into.setdefault((reader, kind), set()).add(writer)
        for one in self._runs:
            share = one.n_tokens / self._n_tokens
            for to in self._references:
                for sites in self._chosen.values():
                    for kind in _KINDS[sites.kind]:
                        wanted = [into.get((name, kind), set()) for name in sites.names]
                        some = set().union(*wanted)
                        if not some:
                            continue
                        for writers, z in self._read(one, to, sites, kind, some):
                            at = [
                                (i, j)
                                for j, each in enumerate(wanted)
                                for i, writer in enumerate(writers)
                                if writer in each
                            ]
                            row, node = torch.tensor(at, device=z.device).reshape(-1, 2).T
                            new = z[row, :, :, node]
                            for (i, j), value in zip(
                                at, self._values(one, sites, node, new).tolist(), strict=True
                            ):
                                found[writers[i], sites.names[j], kind] += value * share
                if some := into.get(("output", "in"), set()):
                    for writer, value in self._to_logits(one, to, some):
                        found[writer, "output", "in"] += value * share
        return found

    def _put(self, own: SublayerWrites, to: str) -> SublayerWrites:
        """Return a sublayer with the reference in place of every z."""
        z = torch.zeros_like(own.z)
        return replace(own, z=z if to == "zero" else z + self._means[own.layer, own.kind])

    def _removed(
        self,
        one: _Run,
        to: str,
        before: Sequence[SublayerWrites],
        only: set[str] | None = None,
    ) -> tuple[list[str], Float[Tensor, "writer batch pos d_model"]]:
        """Return writers, and the reference less what each of them wrote."""
        x = one.parts.embedding
        names, changes = ["embed"], [((0 if to == "zero" else self._embedding) - x)[None]]
        for own in before:
            if sites := self._chosen.get((own.layer, own.kind)):
                names += sites.names
                change = self._put(own, to).written(sites) - own.written(sites)
                changes.append(change.to(x.device))
        change = torch.cat(changes)
        if only is None:
            return names, change
        kept = [i for i, name in enumerate(names) if name in only]
        return [names[i] for i in kept], change[kept]

    def _read(
        self, one: _Run, to: str, sites: LayerSites, kind: str, only: set[str] | None = None
    ) -> Iterator[tuple[list[str], Float[Tensor, "writer batch pos node head d_head"]]]:
        """Yield writers, and z of the nodes of a layer when each of these is replaced."""
        own = one.parts.of(sites.layer, sites.kind)
        names, change = self._removed(one, to, one.parts.before(sites.layer, sites.kind), only)
        width = max(own.z[0, 0].numel(), len(sites.names) * change.shape[-1])
        size = max(1, _NUMBERS // (one.n_tokens * width))
        for first in range(0, len(names), size):
            entering = own.reads.change(change[first : first + size])
            some = names[first : first + size]
            if sites.kind == "attention":
                z = one.readers.attention_z(sites.layer, entering, kind)
                yield some, z[:, :, :, sites.index.to(z.device)].unsqueeze(4)
            else:
                dz = one.readers.neuron_change(sites, entering, "z").unsqueeze(-1)
                moved = dz.unflatten(3, (len(sites.names), -1))
                yield some, _of_nodes(own, sites) + moved

    def _to_logits(
        self, one: _Run, to: str, only: set[str] | None = None
    ) -> list[tuple[str, float]]:
        """Return writers, and the change of the logits when they read each replaced."""
        writers, change = self._removed(one, to, one.parts.sublayers, only)
        size = max(1, _NUMBERS // one.parts.recording.logits.numel())
        values = [one.readers.values_at_end(x, 0, "held").mean(-1) for x in change.split(size)]
        return list(zip(writers, torch.cat(values).tolist(), strict=True))

    def _values(
        self,
        one: _Run,
        sites: LayerSites,
        node: Int[Tensor, "variant"],
        z: Float[Tensor, "variant batch pos head d_head"],
    ) -> Float[Tensor, "variant"]:
        """Return the change of the logits when a node of each variant puts out another z."""
        replay = one.readers.replay
        block = self._host.block(sites.layer, sites.kind)
        name = self._host.hook_name(sites.layer, sites.kind, "z")
        width = z.shape[3]
        members = torch.arange(width, device=z.device)
        heads = sites.index.to(z.device)[node][:, None] * width + members
        values = torch.zeros(len(z), dtype=torch.float64, device="cpu")

        def run_some(some: Tensor) -> Tensor:
            some = some.to(z.device)

            def put(value: Tensor, hook: Any) -> Tensor:
                by_variant = value.clone().unflatten(0, (len(some), -1))
                row = torch.arange(len(some), device=value.device)[:, None]
                by_variant[row, :, :, heads[some]] = z[some].permute(0, 3, 1, 2, 4).to(value)
                return by_variant.flatten(0, 1)

            stream = replay.recorded_stream(block, 0, len(some))
            return replay.values(Variants(block, 0, stream, [(name, put)])).mean(-1)

        every = torch.arange(len(z), device="cpu")
        one.batching.fill(values, every, replay.numbers_per_variant(0), run_some)
        return values


def _largest_change(parts: Decomposition) -> BoundMetric:
    """The largest |change| of a logit, the mean over the tokens of each prompt."""
    recorded = parts.recording.logits

    def compute(logits: Float[Tensor, "site batch pos d_vocab"]) -> Float[Tensor, "site batch"]:
        return (logits - recorded).abs().amax(-1).mean(-1)

    batch, n_pos, d_vocab = recorded.shape
    return BoundMetric("largest change of a logit", None, None, (batch, n_pos, d_vocab), compute)


def _of_nodes(
    own: SublayerWrites, sites: LayerSites
) -> Float[Tensor, "writer=1 batch pos node head d_head"]:
    """z of each node."""
    shared = 1 if own.neurons is None else own.neurons.heads_per_neuron
    return own.z.unflatten(2, (-1, shared))[None, :, :, sites.index.to(own.z.device)]


def _sizes(
    own: SublayerWrites,
    sites: LayerSites,
    dz: Float[Tensor, "writer batch pos node head d_head"],
) -> Float[Tensor, "writer node"]:
    """The size of what each node then writes, summed over tokens."""
    index = sites.index.to(dz.device)
    if own.neurons is None:
        write = torch.einsum("nbphd,hdm->nhbpm", dz.squeeze(4), own.matrix[index])
        return own.writes.change(write).norm(dim=-1).sum((2, 3))
    local = replace(sites, index=torch.arange(len(index), device="cpu"))
    moved = neuron_changes(own.neurons, local, dz.flatten(0, 1).flatten(2))
    moved = moved.unflatten(1, (len(dz), -1)).abs() / own.writes.scale.squeeze(-1)
    rows: Residual = own.writes.norm.after(own.matrix[index, 0])
    return moved.sum((2, 3)).T * rows.norm(dim=-1)
