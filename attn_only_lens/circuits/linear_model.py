"""A run as linear maps between heads: patterns and norm scales constant, every head's output cut.

With every pattern and norm scale held at what it was in one run (`runs/frozen.py`), what a
head t puts out is an affine map of what is written before it,

    z_t = Σ_s W_ts z_s + W_te x_0 + b_t

with s every attention head and neuron-head that comes before it, x_0 the embedding, and b_t what
biases between them contribute: each term passes through norms and projections, and through no other
head. The same holds for the logits, at the end.

Reading off the W_ts takes one forward pass in which each z_s is cut: what follows sees a leaf with
the same numbers, so that the gradient of z_t with respect to that leaf is W_ts and no path by way
of a third head. The b_t are not what is left over. They are measured, in a second forward pass of
the linear model, in which the embedding and all heads put out 0: so that Σ_s W_ts z_s + W_te x_0 +
b_t is z_t only if the model is what it is said to be.

Patterns and queries are kept too, as they were before they were held: what moves a pattern, to
first order, is read off the same pass.

Edges of the linear model of a run, in blocks: what every source contributes to some targets.

The attribution of a target t is A_t = c_t · z_t, with c_t the gradient of the metric there. As z_t
is a sum over what is written before it (`linearised.py`), so is A_t, and its terms are the edges:

    value   w(s → t) = c_t · W_ts z_s          Σ_s w(s → t) + c_t · b_t = A_t
                                               Σ_t w(s → t) = A_s, over all targets t

Both sums hold for every node, so a graph of all nodes is a flow, from the embedding and the biases
to the metric.

No frozen pattern moves, so what sets it is another kind of edge, to first order. With P the
pattern's row of t and p the gradient of the metric there, P' the derivative of that row by the
query q, and q_s the part of q that is s, a linear map of it (norm scales being constant),

    q       w(s → t) = p · P' q_s              k       the same with keys for queries

Those add up to p · P' q, no part of the metric and no share of A_t: it is what scaling the query by
1 + ε does to the metric, over ε. A neuron-head has no keys to speak of, and so no edges of kind
"k"; where its gate is a step (relu), none of kind "q".

One backward pass for every target, `_BLOCK` numbers of gradients at once. No head reads another
prompt, so what each prompt contributes comes apart at no cost.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import Residual
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.runs.frozen import Frozen, frozen_gradients, native, unembedded
from attn_only_lens.runs.gradients import Tape, entering, leaf, rooted, value_of
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import Hooks, Recording, run

__all__ = [
    "Inflow",
    "Linearised",
    "Sublayer",
    "linearised",
    "metric_inflow",
    "pattern_inflow",
    "value_inflow",
]


@dataclass(frozen=True, eq=False)
class Sublayer:
    """The attention heads, or the neurons, of one source layer, in the linear model of a run.

    Attributes:
        layer: the source layer.
        kind: "attention" or "neuron".
        n_nodes: heads, or neurons.
        z: what its heads put out, with the graph that leads to it from what is written before.
        cut: the same numbers, from which the graph goes on.
        gradient: of the metric with respect to z, by every path.
        constant: z of the linear model where embedding and all heads put out 0.
        pattern: before it was held, with its graph.
        pattern_gradient: of the metric with respect to the pattern.
        queries: what the pattern is made of: "q", and of attention heads "k"; with their graph.
        query_constants: those where embedding and all heads put out 0.
    """

    layer: int
    kind: HeadKind
    n_nodes: int
    z: Float[Tensor, "batch pos head_index d_head"]
    cut: Float[Tensor, "batch pos head_index d_head"]
    gradient: Float[Tensor, "batch pos head_index d_head"]
    constant: Float[Tensor, "batch pos head_index d_head"]
    pattern: Float[Tensor, "batch head_index query_pos key"]
    pattern_gradient: Float[Tensor, "batch head_index query_pos key"]
    queries: dict[str, Tensor]
    query_constants: dict[str, Tensor]

    @property
    def width(self) -> int:
        """Heads of a neuron; 1 for attention."""
        return self.z.shape[2] // self.n_nodes

    def name(self, node: int) -> str:
        """`L5H3` or `L5N1234`."""
        return str(HeadName(self.layer, self.kind, node))

    def by_node(self, x: Float[Tensor, "*any pos head_index d_head"]) -> Tensor:
        """Summed over what makes up a node: [..., pos, node]."""
        return x.sum(-1).unflatten(-1, (self.n_nodes, self.width)).sum(-1)


@dataclass(frozen=True, eq=False)
class Linearised:
    """The linear model of a run.

    Attributes:
        sublayers: in the order of computation.
        embedding: what enters the first block, the root of the graph.
        embedding_gradient: of the metric, by every path.
        logits: before any soft cap, with their graph.
        weights: of the metric with respect to them.
        logits_constant: logits of the linear model where embedding and all heads put out 0.
        offset: the metric less weights · logits: 0 for a metric that is linear in the logits.
    """

    sublayers: tuple[Sublayer, ...]
    embedding: Residual
    embedding_gradient: Residual
    logits: Float[Tensor, "batch pos d_vocab"]
    weights: Float[Tensor, "batch pos d_vocab"]
    logits_constant: Float[Tensor, "batch pos d_vocab"]
    offset: float


def linearised(model: Any, target: Recording, metric: BoundMetric) -> Linearised:
    """The linear model of a run, ready for gradients between any two heads.

    Args:
        model: converted, or with exposed neuron-heads.
        target: the run.
        metric: what attributions are shares of.

    Raises:
        UnsupportedModelError: it is not linear when its patterns and norm scales are frozen.
    """
    places = _places(model)
    tape = Tape(place[at] for place in places for at in ("z", "pattern"))
    with torch.enable_grad():
        gradients = frozen_gradients(model, target, metric, tape)
    frozen = Frozen(model)
    whole: dict[str, Tensor] = {}
    cut: dict[str, Tensor] = {}

    # By the name that is asked for: bridges have hook points of several names.
    def look(name: str) -> tuple[str, Callable[..., None]]:
        def hook(value: Tensor, hook: Any) -> None:
            whole[name] = value

        return name, hook

    def cutting(name: str) -> tuple[str, Callable[..., Tensor]]:
        def hook(value: Tensor, hook: Any) -> Tensor:
            whole[name], cut[name] = value, leaf(value)
            return cut[name]

        return name, hook

    queries = Tape(name for place in places for at, name in place.items() if at in ("q", "k"))
    hooks: Hooks = [
        *queries.hooks,
        *(look(place["pattern"]) for place in places),
        *frozen.freezing,
        *(cutting(place["z"]) for place in places),
    ]
    with torch.enable_grad(), rooted(model) as roots, unembedded(model) as before, native():
        seen = run(model, target.tokens, target.mask, hooks)
        value, logits, x = value_of(metric, seen), before[-1], roots[-1]
        (weights,) = torch.autograd.grad(value, logits, retain_graph=True)
        found = {place["z"]: whole[place["z"]] for place in places}
        # The chain rule, summed over the heads that read the embedding.
        (of_embedding,) = torch.autograd.grad(
            [logits, *found.values()],
            [x],
            [weights, *(gradients[name] for name in found)],
            retain_graph=True,
        )
    constants = _constants(model, target, frozen, cut, x.detach(), list(queries.nodes))
    return Linearised(
        tuple(
            Sublayer(
                layer=index // 2,
                kind="neuron" if index % 2 else "attention",
                n_nodes=_n_nodes(model, index, cut[place["z"]]),
                z=whole[place["z"]],
                cut=cut[place["z"]],
                gradient=gradients[place["z"]],
                constant=constants[place["z"]],
                pattern=whole[place["pattern"]],
                pattern_gradient=gradients[place["pattern"]],
                queries={at: queries.nodes[place[at]] for at in ("q", "k") if at in place},
                query_constants={at: constants[place[at]] for at in ("q", "k") if at in place},
            )
            for index, place in enumerate(places)
        ),
        embedding=x,
        embedding_gradient=of_embedding,
        logits=logits,
        weights=weights,
        logits_constant=constants["logits"],
        offset=float(value.detach() - (weights * logits.detach()).sum()),
    )


def _places(model: Any) -> list[dict[str, str]]:
    """Hook points of each sublayer, in the order of computation: attention, neurons, and so on."""
    parts: dict[HeadKind, tuple[str, ...]] = {
        "attention": ("z", "pattern", "q", "k"),
        "neuron": ("z", "pattern", "q"),
    }
    return [
        {at: host_of(model).hook_name(layer, kind, at) for at in ats}
        for layer in range(host_of(model).n_layers)
        for kind, ats in parts.items()
    ]


def _n_nodes(model: Any, index: int, z: Tensor) -> int:
    return host_of(model).neurons[index // 2].n_neurons if index % 2 else z.shape[2]


@torch.no_grad()
def _constants(
    model: Any,
    target: Recording,
    frozen: Frozen,
    cut: dict[str, Tensor],
    embedding: Residual,
    queries: list[str],
) -> dict[str, Tensor]:
    """z, queries and logits of the linear model where the embedding and all heads put out 0.

    `Frozen.held` runs the linear model on pairs x + δ, x - δ: here δ = -x, and so 0 and 2x.
    """
    kept: dict[str, Tensor] = {}

    def apart(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), 2 * x])

    def look(name: str) -> tuple[str, Callable[..., Tensor | None]]:
        def hook(value: Tensor, hook: Any) -> Tensor | None:
            kept[name] = value.chunk(2)[0].clone()
            return apart(cut[name].detach()) if name in cut else None

        return name, hook

    mask = None if target.mask is None else target.mask.repeat(2, 1)
    hooks: Hooks = [
        *map(look, queries),
        *frozen.held,
        *map(look, cut),
    ]
    both = apart(embedding)
    with entering(model, lambda _: both), unembedded(model) as before, native():
        run(model, target.tokens.repeat(2, 1), mask, hooks)
    return {**kept, "logits": before[-1].chunk(2)[0]}


_BLOCK = 2**24  # numbers: 64 MiB in float32
Target = tuple[int, int]
"""Position and index in the sublayer."""


@dataclass(frozen=True, eq=False)
class Inflow:
    """What sources contribute to some targets.

    Attributes:
        targets: which, in the rows' order.
        embedding: of the embedding at each position.
        sublayers: of each node at each position, for every sublayer of the model.
        constant: of biases.
    """

    targets: tuple[Target, ...]
    embedding: Float[Tensor, "batch target pos"]
    sublayers: tuple[Float[Tensor, "batch target pos node"], ...]
    constant: Float[Tensor, "batch target"]


def value_inflow(linear: Linearised, at: Sublayer, targets: Sequence[Target]) -> Iterator[Inflow]:
    """Edges of kind "value" into nodes of a sublayer, a block of them at a time."""
    for some in _blocks(linear, targets):
        rows = at.z.new_zeros((len(some), *at.z.shape))
        for i, (pos, node) in enumerate(some):
            heads = slice(node * at.width, (node + 1) * at.width)
            rows[i, :, pos, heads] = at.gradient[:, pos, heads]
        constant = (rows * at.constant).flatten(2).sum(-1).T
        yield _inflow(linear, some, at.z, rows, constant)


def pattern_inflow(
    linear: Linearised, at: Sublayer, kind: str, targets: Sequence[Target]
) -> Iterator[Inflow]:
    """Edges of kind "q" or "k" into nodes of a sublayer; none where its pattern cannot move."""
    if kind not in at.queries or not at.pattern.requires_grad:
        return
    query = at.queries[kind]
    for some in _blocks(linear, targets):
        rows = at.pattern.new_zeros((len(some), *at.pattern.shape))
        for i, (pos, node) in enumerate(some):
            heads = slice(node * at.width, (node + 1) * at.width)
            rows[i, :, heads, pos] = at.pattern_gradient[:, heads, pos]
        (moves,) = _batched(at.pattern, [query], rows)
        if moves is None:
            return
        constant = (moves * at.query_constants[kind]).flatten(2).sum(-1).T
        yield _inflow(linear, some, query, moves, constant)


def metric_inflow(linear: Linearised) -> Inflow:
    """Edges of kind "value" into the metric."""
    constant = (linear.weights * linear.logits_constant).flatten(1).sum(-1, keepdim=True)
    return _inflow(linear, [(0, 0)], linear.logits, linear.weights[None], constant)


def _blocks(linear: Linearised, targets: Sequence[Target]) -> Iterator[Sequence[Target]]:
    each = linear.embedding.numel() + sum(at.cut.numel() for at in linear.sublayers)
    size = max(1, _BLOCK // each)
    for first in range(0, len(targets), size):
        yield targets[first : first + size]


def _inflow(
    linear: Linearised, targets: Sequence[Target], of: Tensor, rows: Tensor, constant: Tensor
) -> Inflow:
    """Gradients of `of`, weighted by each row, times what each source puts out."""
    found = _batched(of, [linear.embedding, *(at.cut for at in linear.sublayers)], rows)
    batch, n_pos = linear.embedding.shape[:2]

    def shares(gradient: Tensor | None, at: Sublayer) -> Tensor:
        if gradient is None:  # it comes after the targets, or beside them
            return rows.new_zeros(()).expand(batch, len(rows), n_pos, at.n_nodes)
        return at.by_node(gradient * at.cut.detach()).transpose(0, 1)

    of_embedding, *of_sublayers = found
    assert of_embedding is not None
    return Inflow(
        tuple(targets),
        (of_embedding * linear.embedding.detach()).sum(dim=-1).transpose(0, 1),
        tuple(shares(g, at) for g, at in zip(of_sublayers, linear.sublayers, strict=True)),
        constant.detach(),
    )


def _batched(of: Tensor, sources: Sequence[Tensor], rows: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient at every source, for each row in place of the gradient of `of`."""
    return torch.autograd.grad(
        of, sources, rows, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
