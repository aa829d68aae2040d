"""A run as linear maps between heads: patterns and norm scales frozen, every head's output cut.

With every pattern and norm scale held at its value in one run (`runs/frozen_pass.py`), the output
of a head t is an affine map of what is written before it,

    z_t = Σ_s W_ts z_s + W_te x_0 + b_t

with s every attention head and neuron-head before it, x_0 the embedding, and b_t the contribution
of biases: each term passes through norms and projections, and through no other head. The same holds
for the logits.

To read off the W_ts, one forward pass cuts each z_s: what follows sees a leaf with the same
numbers, so that the gradient of z_t by that leaf is W_ts, without paths through a third head. The
b_t are measured in a second forward pass, in which the embedding and all heads put out 0; so Σ_s
W_ts z_s + W_te x_0 + b_t equals z_t only if the model is indeed linear.

Edges. The attribution of a target t is A_t = c_t · z_t, with c_t the gradient of the metric there.
As z_t is a sum over what is written before it, so is A_t, and its terms are the edges:

    value   w(s → t) = c_t · W_ts z_s          Σ_s w(s → t) + c_t · b_t = A_t
                                               Σ_t w(s → t) = A_s, over all targets t

Both sums hold for every node, so a graph of all nodes is a flow, from the embedding and the biases
to the metric.

Frozen patterns do not move, so what sets them is another kind of edge, to first order. With P the
pattern's row of t and p the gradient of the metric there, P' the derivative of that row by the
query q, and q_s the part of q that is s (a linear map of it, as norm scales are constant),

    q       w(s → t) = p · P' q_s              k       the same with keys for queries

Those add up to p · P' q, which is no share of A_t: it is the effect on the metric of scaling the
query by 1 + ε, over ε. A neuron-head's keys are constant, so it has no edges of kind "k"; if its
gate is a step (relu), none of kind "q".

Each target takes one backward pass, done for a block of targets at once. No head reads another
prompt, so the contributions of each prompt separate at no cost.
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
from attn_only_lens.runs.frozen_pass import FrozenPass, frozen_gradients, uncapped_logits
from attn_only_lens.runs.gradients import Tape, as_leaf, edit_input, start_graph
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import Hooks, Recording, run


@dataclass(frozen=True, eq=False)
class Sublayer:
    """The attention heads, or the neurons, of one source layer, in the linear model of a run.

    Attributes:
        layer: the source layer.
        kind: "attention" or "neuron".
        n_nodes: heads, or neurons.
        z: output of its heads, with the graph that leads to it from what is written before.
        cut: the same numbers, from which the graph goes on.
        gradient: of the metric by z, along every path.
        constant: z of the linear model if embedding and all heads put out 0.
        pattern: before it was frozen, with its graph.
        pattern_gradient: of the metric by the pattern.
        queries: the inputs of the pattern: "q", and of attention heads "k"; with their graph.
        query_constants: those if embedding and all heads put out 0.
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
        """Number of heads of a node."""
        return self.z.shape[2] // self.n_nodes

    def name(self, node: int) -> str:
        """`L5H3` or `L5N1234`."""
        return str(HeadName(self.layer, self.kind, node))

    def heads(self, node: int) -> slice:
        """The heads of a node."""
        return slice(node * self.width, (node + 1) * self.width)

    def sum_by_node(self, x: Float[Tensor, "*any pos head_index d_head"]) -> Tensor:
        """Sum over d_head and the heads of each node: [..., pos, node]."""
        return x.sum(-1).unflatten(-1, (self.n_nodes, self.width)).sum(-1)

    def attributions(self) -> Float[Tensor, "pos node"]:
        """The attribution of each node, summed over prompts."""
        return self.sum_by_node((self.gradient * self.cut.detach()).sum(0))


@dataclass(frozen=True, eq=False)
class LinearModel:
    """The linear model of a run.

    Attributes:
        sublayers: in the order of computation.
        embedding: the stream that enters the first block, the root of the graph.
        embedding_gradient: of the metric, along every path.
        logits: before any soft cap, with their graph.
        weights: gradient of the metric by the logits.
        logits_constant: logits of the linear model if embedding and all heads put out 0.
        offset: the metric less weights · logits: 0 for a metric that is linear in the logits.
    """

    sublayers: tuple[Sublayer, ...]
    embedding: Residual
    embedding_gradient: Residual
    logits: Float[Tensor, "batch pos d_vocab"]
    weights: Float[Tensor, "batch pos d_vocab"]
    logits_constant: Float[Tensor, "batch pos d_vocab"]
    offset: float


def linearize(model: Any, target: Recording, metric: BoundMetric) -> LinearModel:
    """Return the linear model of a run, ready for gradients between any two heads.

    Args:
        model: converted, or with exposed neuron-heads.
        target: the run.
        metric: whose shares attributions are.

    Raises:
        UnsupportedModelError: it is not linear when its patterns and norm scales are frozen.
    """
    points = _hook_points(model)
    tape = Tape(point[at] for point in points for at in ("z", "pattern"))
    with torch.enable_grad():
        gradients = frozen_gradients(model, target, metric, tape)
    frozen = FrozenPass(model)
    whole: dict[str, Tensor] = {}
    cut: dict[str, Tensor] = {}

    # By the name that is asked for: bridges have hook points of several names.
    def keep(name: str) -> tuple[str, Callable[..., None]]:
        def hook(value: Tensor, hook: Any) -> None:
            whole[name] = value

        return name, hook

    def sever(name: str) -> tuple[str, Callable[..., Tensor]]:
        def hook(value: Tensor, hook: Any) -> Tensor:
            whole[name], cut[name] = value, as_leaf(value)
            return cut[name]

        return name, hook

    queries = Tape(name for point in points for at, name in point.items() if at in ("q", "k"))
    hooks: Hooks = [
        *queries.hooks,
        *(keep(point["pattern"]) for point in points),
        *frozen.record_hooks,
        *(sever(point["z"]) for point in points),
    ]
    with (
        torch.enable_grad(),
        start_graph(model) as roots,
        uncapped_logits(model) as before,
    ):
        seen = run(model, target.tokens, target.mask, hooks)
        value, logits, x = metric.of_logits(seen), before[-1], roots[-1]
        (weights,) = torch.autograd.grad(value, logits, retain_graph=True)
        names = [point["z"] for point in points]
        # The chain rule, summed over the heads that read the embedding.
        (embedding_gradient,) = torch.autograd.grad(
            [logits, *(whole[name] for name in names)],
            [x],
            [weights, *(gradients[name] for name in names)],
            retain_graph=True,
        )
    constants = _constants(model, target, frozen, cut, x.detach(), list(queries.nodes))
    return LinearModel(
        tuple(
            Sublayer(
                layer=index // 2,
                kind="neuron" if index % 2 else "attention",
                n_nodes=_n_nodes(model, index, cut[point["z"]]),
                z=whole[point["z"]],
                cut=cut[point["z"]],
                gradient=gradients[point["z"]],
                constant=constants[point["z"]],
                pattern=whole[point["pattern"]],
                pattern_gradient=gradients[point["pattern"]],
                queries={at: queries.nodes[point[at]] for at in ("q", "k") if at in point},
                query_constants={at: constants[point[at]] for at in ("q", "k") if at in point},
            )
            for index, point in enumerate(points)
        ),
        embedding=x,
        embedding_gradient=embedding_gradient,
        logits=logits,
        weights=weights,
        logits_constant=constants["logits"],
        offset=float(value.detach() - (weights * logits.detach()).sum().to(value.device)),
    )


def _hook_points(model: Any) -> list[dict[str, str]]:
    """Hook points of each sublayer, in the order of computation: attention, then neurons."""
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
    frozen: FrozenPass,
    cut: dict[str, Tensor],
    embedding: Residual,
    queries: list[str],
) -> dict[str, Tensor]:
    """z, queries and logits of the linear model if the embedding and all heads put out 0.

    `FrozenPass.linear_hooks` is for pairs x + δ, x - δ: here δ = -x, and so 0 and 2x.
    """
    kept: dict[str, Tensor] = {}

    def zero_and_twice(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), 2 * x])

    def keep(name: str) -> tuple[str, Callable[..., Tensor | None]]:
        def hook(value: Tensor, hook: Any) -> Tensor | None:
            kept[name] = value.chunk(2)[0].clone()
            return zero_and_twice(cut[name].detach()) if name in cut else None

        return name, hook

    mask = None if target.mask is None else target.mask.repeat(2, 1)
    hooks: Hooks = [*map(keep, queries), *frozen.linear_hooks, *map(keep, cut)]
    both = zero_and_twice(embedding)
    with edit_input(model, lambda _: both), uncapped_logits(model) as before:
        run(model, target.tokens.repeat(2, 1), mask, hooks)
    return {**kept, "logits": before[-1].chunk(2)[0]}


_BLOCK = 2**24  # numbers: 64 MiB in float32
Target = tuple[int, int]
"""Position and index in the sublayer."""


@dataclass(frozen=True, eq=False)
class Inflow:
    """Contributions of all sources to some targets.

    Attributes:
        targets: in the order of the rows.
        embedding: of the embedding at each position.
        sublayers: of each node at each position, for every sublayer of the model.
        constant: of biases.
    """

    targets: tuple[Target, ...]
    embedding: Float[Tensor, "batch target pos"]
    sublayers: tuple[Float[Tensor, "batch target pos node"], ...]
    constant: Float[Tensor, "batch target"]


def inflows(
    linear: LinearModel, at: Sublayer, kind: str, targets: Sequence[Target]
) -> Iterator[Inflow]:
    """Yield edges into nodes of a sublayer, a block of targets at a time.

    Args:
        linear: the linear model.
        at: the sublayer.
        kind: "value", or "q" or "k": no edges if the pattern does not depend on them.
        targets: nodes of the sublayer.
    """
    if kind == "value":
        start, gradient, of, constant = at.z, at.gradient, at.z, at.constant
    elif kind in at.queries and at.pattern.requires_grad:
        start, gradient = at.pattern, at.pattern_gradient
        of, constant = at.queries[kind], at.query_constants[kind]
    else:
        return
    numbers = linear.embedding.numel() + sum(each.cut.numel() for each in linear.sublayers)
    size = max(1, _BLOCK // numbers)
    for first in range(0, len(targets), size):
        some = targets[first : first + size]
        rows = start.new_zeros((len(some), *start.shape))
        for row, (pos, node) in enumerate(some):
            heads = at.heads(node)
            entry = (slice(None), *((pos, heads) if kind == "value" else (heads, pos)))
            rows[row][entry] = gradient[entry]
        if of is not start:
            (of_queries,) = _batched_gradients(start, [of], rows)
            if of_queries is None:
                return
            rows = of_queries
        yield _inflow(linear, some, of, rows, (rows * constant).flatten(2).sum(-1).T)


def metric_inflow(linear: LinearModel) -> Inflow:
    """Return the edges into the metric."""
    constant = (linear.weights * linear.logits_constant).flatten(1).sum(-1, keepdim=True)
    return _inflow(linear, [(0, 0)], linear.logits, linear.weights[None], constant)


def _inflow(
    linear: LinearModel, targets: Sequence[Target], of: Tensor, rows: Tensor, constant: Tensor
) -> Inflow:
    """Gradients of `of`, weighted by each row, times the output of each source."""
    sources = [linear.embedding, *(at.cut for at in linear.sublayers)]
    embedding_gradient, *gradients = _batched_gradients(of, sources, rows)
    batch, n_pos = linear.embedding.shape[:2]

    def contributions(gradient: Tensor | None, at: Sublayer) -> Tensor:
        if gradient is None:  # it does not come before the targets
            return rows.new_zeros(()).expand(batch, len(rows), n_pos, at.n_nodes)
        return at.sum_by_node(gradient * at.cut.detach()).transpose(0, 1).to(rows.device)

    assert embedding_gradient is not None
    embedding = embedding_gradient * linear.embedding.detach()
    return Inflow(
        tuple(targets),
        embedding.sum(dim=-1).transpose(0, 1).to(rows.device),
        tuple(map(contributions, gradients, linear.sublayers)),
        constant.detach(),
    )


def _batched_gradients(
    of: Tensor, sources: Sequence[Tensor], rows: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradient at every source, for each row in place of the gradient of `of`."""
    return torch.autograd.grad(
        of, sources, rows, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
