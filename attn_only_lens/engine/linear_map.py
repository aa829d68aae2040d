"""Express one run, or the difference of two runs, as a linear map whose autograd graph is kept.

A target head t reads the residual stream, a sum of the outputs z_s of earlier sources s:

    z_t = Σ_s W_ts z_s + W_te x_0 + b_t        x_0: the embedding; b_t: the contribution of biases

The matrices W are never computed. Let M_t be the metric's multiplier (its gradient) at z_t. The
vector-Jacobian product of M_t with the map from the stream to z_t is a covector c_t, with which t
reads the stream. The edge s → t is the product of c_t and the vector w_s that s adds to the stream:

    w(s → t) = c_t · w_s        Σ_s w(s → t) + M_t · b_t = M_t · z_t, the attribution of t

In `of_difference`, z, x_0 and w are differences of two runs, and all nonlinear steps are replaced
with secants (`linear_rules.py`). Biases cancel. The edges of all kinds into t add up to the
attribution of t, and the edges out of s to the attribution of s:

    value       through the head's values, at the mean pattern
    q, k, gate  through the head's pattern; keys of neuron-heads are constant
    routing     through the routing weights of a mixture of experts, a factor of its neurons' values

If a token visits other experts in the two runs, the change in its routing weights is not divided
among the sources that the router reads (`routing.py`): the router is a source itself.

In `of_run`, z, x_0 and w are from one run, and patterns and norm scales are held at their values in
this run. The edges of kind "value" add up. This is relevance propagation with frozen attention
patterns and norm scales: Achtibat et al., "AttnLRP" (2024); Rezaei Jafari et al., "RelP" (2025).
Edges of the other kinds tell, to first order, how the pattern would change. In a gated MLP, a value
v = g u is a product; each of its factors is held in one half of the product, as in RelP, or one
factor is held in all of it ("gate" or "up"). A soft cap on the logits counts as part of the metric.

A neuron-head (an MLP neuron viewed as an attention head) reads only its own position. If its gate
is a step function (ReLU), it has edges of kind "gate" only in a difference of two runs, and only if
these are on different sides of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attn_only_lens.axes import Residual
from attn_only_lens.devices import added, on_cpu, to_float64_device
from attn_only_lens.engine.gradients import Tape, gradients
from attn_only_lens.engine.held_run import (
    HeldPass,
    HeldRun,
    node_points,
    reader_of,
    readers_of,
)
from attn_only_lens.engine.linear_rules import SecantSteps, Steps
from attn_only_lens.engine.metrics import AnyMetric, BoundMetric, bind, require_differentiable
from attn_only_lens.engine.multipliers import (
    BothRuns,
    Multipliers,
    run_both,
    secant_multipliers,
)
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.secants import Valve, Weights, mean, norm_change
from attn_only_lens.engine.writes import (
    Decomposition,
    FrozenNorm,
    Positions,
    Scale,
    SublayerWrites,
)
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import NEURON_KINDS, HeadKind
from attn_only_lens.heads.names import place_of
from attn_only_lens.precision import full_precision
from attn_only_lens.tolerances import LOGIT_TOLERANCE, rounding

Outputs: TypeAlias = Float[Tensor, "batch pos head_index d_head"]


class Route(NamedTuple):
    """The way from a head's z back to the residual stream that it reads, for one kind of edges.

    Attributes:
        steps: pairs (output, input) of nodes of the autograd graph; gradients flow through these.
        constant: the part of the activation that does not come from the stream, if there is one.
        activation: the number of steps from z back to this activation.
        normed: the outputs of the norm that reads the stream.
    """

    steps: tuple[tuple[Tensor, Tensor], ...]
    constant: Tensor | None
    activation: int
    normed: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class SecantNorm(FrozenNorm):
    """A norm as a linear map from its input's change between two runs to its output's change.

    Attributes:
        norm: the norm's matrix N and its bias.
        stream: the mean input of the two runs, centred if the norm subtracts the mean.
        scale: the harmonic mean of the scales s of both runs.
        scales: 1 / s in both runs.
    """

    scales: tuple[Float[Tensor, "batch pos 1"], Float[Tensor, "batch pos 1"]]

    @classmethod
    def between(cls, both: FrozenNorm) -> "SecantNorm":
        """Return a norm's linear map, given its scales and inputs in a batch of both runs."""
        clean, corrupted = (1 / both.scale).chunk(2)
        middle = both.norm.centred(mean(both.stream))
        return cls(both.norm, middle, 2 / (clean + corrupted), (clean, corrupted))

    def at(self, positions: Positions) -> "SecantNorm":
        """Return the same norm, restricted to the given positions."""
        clean, corrupted = (scale[:, positions] for scale in self.scales)
        stream, scale = self.stream[:, positions], self.scale[:, positions]
        return SecantNorm(self.norm, stream, scale, (clean, corrupted))

    def change(
        self, change: Float[Tensor, "*any batch pos d_model"], scale: Scale = "held"
    ) -> Float[Tensor, "*any batch pos d_model"]:
        """Return the change in the norm's output that is due to a part of its input's change."""
        change = self.norm.centred(change.to(self.stream.device))
        if self.norm.module is not None:
            change = norm_change(self.stream, *self.scales, change)
        result: Tensor = self.norm.gain(change)
        return result


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A run, or the difference of two runs, as a linear map, with a metric's multipliers.

    Attributes:
        model: the model.
        run: what each sublayer adds to the residual stream in the run, or in the difference.
        metric: the metric's name.
        value: the metric, or its change between the runs.
        offset: the part of the metric that is not linear in the logits.
        multipliers: the metric's multipliers at the z of each sublayer's heads.
        first: the multipliers of the embedding.
        last: the multipliers of the final residual stream.
        logit_bias: the contribution of the last norm's bias and the unembedding's bias.
        bias: the contribution of all biases.
        z: the z of each sublayer's heads in the (clean) run.
        shares: the weight of each prompt in the metric's mean.
        is_difference: whether this is the difference of two runs.
        routers: the contributions of routers that are sources, by layer.
    """

    model: Any
    run: Decomposition
    metric: str
    value: float
    offset: float
    multipliers: list[Outputs]
    first: Residual
    last: Residual
    logit_bias: Float[Tensor, "batch"]
    bias: float
    z: list[Outputs]
    shares: tuple[float, ...]
    is_difference: bool
    routers: dict[int, Float[Tensor, "batch pos"]]
    _routes: list[dict[str, Route]] = field(repr=False)
    _valve: Valve = field(repr=False)

    @property
    def sublayers(self) -> tuple[SublayerWrites, ...]:
        """What each sublayer adds to the residual stream."""
        return self.run.sublayers

    def n_before(self, index: int) -> int:
        """Return the number of sublayers whose outputs the given sublayer reads."""
        writes = self.sublayers[index]
        return len(self.run.before(writes.layer, writes.kind))

    def attributions(self, index: int) -> Float[Tensor, "batch pos node"]:
        """Return the attribution of each node of a sublayer, for each prompt."""
        return (self.multipliers[index] * self.sublayers[index].z).sum(-1)

    def kinds(self, index: int) -> list[str]:
        """Return the kinds of edges into the nodes of a sublayer."""
        return list(self._routes[index])

    def reads_own(self, index: int, kind: str) -> bool:
        """Return whether nodes read only their own position of the residual stream."""
        return self.sublayers[index].kind != "attention" or kind == "q"

    def covectors(
        self, index: int, kind: str, positions: Int[Tensor, "target"], nodes: Int[Tensor, "target"]
    ) -> tuple[Float[Tensor, "batch target *pos d_model"], Float[Tensor, "batch target"]]:
        """Return the vectors with which nodes read the residual stream, and their bias terms.

        The positions and nodes are on the CPU, so that they can be counted without waiting for the
        model's device. The vectors have an axis of positions if nodes read other positions than
        their own.
        """
        rows, row = self._rows(index, kind, positions, nodes)
        covectors, biases = self.back(index, kind, rows)
        if self.reads_own(index, kind):
            row, positions = row.to(rows.device), positions.to(rows.device)
            return covectors[row, :, positions].transpose(0, 1), biases[row, :, positions].T
        return covectors.transpose(0, 1), biases.sum(-1).T

    def _rows(
        self, index: int, kind: str, positions: Tensor, nodes: Tensor
    ) -> tuple[Float[Tensor, "row batch pos head_index d_head"], Int[Tensor, "target"]]:
        """Return rows of multipliers, and the row of each node; no two nodes in a row meet."""
        multipliers, row = self.multipliers[index], torch.arange(len(nodes), device="cpu")
        if self.reads_own(index, kind):  # nodes at different positions can share a row
            row = (positions == positions[:, None]).tril(-1).sum(1)
        rows = multipliers.new_zeros(int(row.max()) + 1, *multipliers.shape)
        at, positions, nodes = (x.to(rows.device) for x in (row, positions, nodes))
        rows[at, :, positions, nodes] = multipliers[:, positions, nodes].transpose(0, 1)
        return rows, row

    def back(
        self, index: int, kind: str, rows: Float[Tensor, "row batch pos head_index d_head"]
    ) -> tuple[Float[Tensor, "row batch pos d_model"], Float[Tensor, "row batch pos"]]:
        """Return each row's vector-Jacobian product with the map from stream to z, and bias terms.

        A bias term is what the activation's constant part contributes at each position.
        """
        route = self._routes[index][kind]

        # With is_grads_batched, autograd would compute some functions, such as softmax, row by row.
        def through(row: Tensor) -> tuple[Tensor, Tensor]:
            constant, bias = route.constant, None
            for number, (output, node) in enumerate(route.steps):
                if constant is not None and number == route.activation:
                    bias = (row * constant).flatten(2).sum(-1)
                (moved,) = torch.autograd.grad(
                    output, node, row, retain_graph=True, allow_unused=True
                )
                row = torch.zeros_like(node) if moved is None else moved
            return row, row.new_zeros(row.shape[:2]) if bias is None else bias

        with self._valve.shut():
            covectors, biases = torch.func.vmap(through)(rows)
        return covectors, biases

    def _inner_size(self, index: int, entered: Residual) -> float:
        """Return Σ |multiplier · input| over the normalised input, given the input's size."""
        size = 0.0
        for route in self._routes[index].values():
            for normed in route.normed:
                row: Tensor | None = self.multipliers[index]
                for output, node in (*route.steps[:-1], (route.steps[-1][0], normed)):
                    with self._valve.shut():
                        (row,) = torch.autograd.grad(
                            output, node, row, retain_graph=True, allow_unused=True
                        )
                    if row is None:
                        break
                else:
                    assert row is not None
                    size += float((row.abs() * entered.to(row)).sum())
        return size


@full_precision()
def of_difference(
    model: Any, pair: PromptPair, metric: AnyMetric, *, runs: BothRuns | None = None
) -> LinearMap:
    """Return the linear map of the difference of two runs, clean minus corrupted.

    Args:
        model: a model with neuron-heads.
        pair: the prompts.
        metric: the metric.
        runs: the two runs with their writes, by default `run_both(model, pair, decomposed=True)`.
            They can be any two runs on these prompts, such as a circuit's own run and the corrupted
            run.

    Raises:
        InputError: a bridge has unknown norms or matrices, or the run is not finite.
        UnsupportedModelError: a step has no secant rule, or edges do not add up to attributions.
    """
    runs = run_both(model, pair, decomposed=True) if runs is None else runs
    both, host = runs.decomposition, host_of(model)
    assert both is not None
    clean, corrupted = runs.logits.chunk(2)
    bound = bind(metric, model, pair, clean)
    require_differentiable(bound, clean)
    points = node_points(host)
    result = secant_multipliers(
        *(model, runs, bound, Tape(points.values())),
        keep_graph=True,
        readers=readers_of(host, both),
    )
    sublayers = tuple(_difference(writes) for writes in both.sublayers)
    change = _minus(both.embedding)
    linear = LinearMap(
        model,
        replace(both, embedding=change, sublayers=sublayers),
        metric=bound.name,
        value=bound.of(clean) - bound.of(corrupted),
        offset=result.remainder,
        multipliers=[result.gradients[points[x.layer, x.kind, "z"]] for x in sublayers],
        first=result.stream,
        last=result.final,
        logit_bias=torch.zeros_like(change[:, 0, 0]),
        bias=0.0,
        z=[writes.z[: len(clean)] for writes in both.sublayers],
        shares=bound.shares(len(clean)),
        is_difference=True,
        routers=_routers(host, result),
        _routes=_routes(host, sublayers, points, result.nodes, result.steps),
        _valve=result.steps.functions.valve,
    )
    entered = [2 * mean(x.entered.abs()) for x in both.sublayers]
    _require_flows(linear, [_minus(x.reads.stream) for x in both.sublayers], entered)
    return linear


@full_precision()
def of_run(model: Any, pair: PromptPair, metric: AnyMetric, *, patterns: bool = True) -> LinearMap:
    """Return the linear map of the clean run, with patterns and norm scales held.

    Args:
        model: a model with neuron-heads.
        pair: the prompts; the corrupted prompts are not used.
        metric: the metric.
        patterns: whether to include edges of kinds "q", "k" and "gate".

    Raises:
        InputError: a bridge has unknown norms or matrices, or the run is not finite.
        UnsupportedModelError: writes do not add up to the stream, or heads are not linear in the
            stream.
    """
    held = HeldRun.record(model, pair.clean, pair.mask)
    logits = held.run.recording.logits
    bound = bind(metric, model, pair, logits)
    require_differentiable(bound, logits)
    return of_held_run(held, bound, patterns=patterns)


@full_precision()
def of_held_run(recorded: HeldRun, metric: BoundMetric, *, patterns: bool = True) -> LinearMap:
    """Return the linear map of a recorded run; see `of_run`."""
    writes, host = recorded.run, host_of(recorded.model)
    points = node_points(host)
    stems = list[Tensor]()

    def start(stream: Residual) -> Residual:
        stems.append(stream.detach().requires_grad_())
        return stems[0]

    with torch.enable_grad():
        held = recorded.forward(start=start)
        value = (held.logits * recorded.logit_gradient(metric)).sum()
    with torch.no_grad():
        empty = recorded.forward(read=torch.zeros_like)
    reads = {f"read {i}": node for i, node in enumerate(held.steps.reads.values())}
    z = {name: held.nodes[name] for (*_, point), name in points.items() if point == "z"}
    ends = {"logits": held.uncapped, "first": stems[0]}
    multipliers = gradients(value, z | reads | ends, keep_graph=True)
    of_reads = dict(zip(held.steps.reads, (multipliers[name] for name in reads), strict=True))
    last = of_reads[writes.final.norm.module or recorded.model.unembed]
    of_logits = multipliers["logits"]
    logit_bias = (of_logits * empty.uncapped).sum((1, 2))
    linear_part = (of_logits / (writes.logit_factor or 1.0) * writes.uncapped).sum()
    offset = metric.of(writes.recording.logits) - float(linear_part)
    # Logits are rounded: a difference of two large logits has few correct digits in float32.
    ended, final = (to_float64_device(x).double() for x in (last, writes.final.stream))
    linear = LinearMap(
        *(recorded.model, writes),
        metric=metric.name,
        value=offset + float((ended * final).sum()) + float(logit_bias.sum()),
        offset=offset,
        multipliers=[multipliers[points[x.layer, x.kind, "z"]] for x in writes.sublayers],
        first=multipliers["first"],
        last=last,
        logit_bias=logit_bias,
        bias=0.0,
        z=[x.z for x in writes.sublayers],
        shares=metric.shares(len(writes.embedding)),
        is_difference=False,
        routers={},
        _routes=_routes(
            *(host, writes.sublayers, points, held.nodes, held.steps), empty, patterns=patterns
        ),
        _valve=held.steps.functions.valve,
    )
    entered = [x.entered.abs() for x in writes.sublayers]
    _require_flows(linear, [x.reads.stream for x in writes.sublayers], entered)
    return replace(linear, bias=_bias(linear, host, of_reads))


@torch.no_grad()
@full_precision()
def direct_logits(
    model: Any, runs: BothRuns, nodes: Sequence[tuple[HeadName, int]], prompts: Sequence[int]
) -> Float[Tensor, "node d_vocab"]:
    """Return what the change of each node's output between two runs adds to the logits directly.

    A node (head, position) adds to the logits at its own position, before any soft cap. Norms are
    replaced by secants. The direct effects of all nodes, and of the embeddings, on a logit
    therefore add up to its change between the runs.

    Args:
        model: a model with neuron-heads.
        runs: the two runs with their writes; see `run_both`.
        nodes: the nodes.
        prompts: the index of each node's pair of prompts.
    """
    both, written, differences = runs.decomposition, list[Tensor](), dict[Any, SublayerWrites]()
    assert both is not None
    places = torch.tensor([position for _, position in nodes], device=runs.logits.device)
    for (head, _), place in zip(nodes, places.split(1), strict=True):
        key = head.layer, head.kind
        if head.kind == "router":  # it writes nothing
            written.append(torch.zeros_like(_minus(both.embedding)[:, :1]).to(runs.logits))
            continue
        if key not in differences:
            differences[key] = _difference(both.of(*key))
        writes, index = differences[key], place.new_tensor([place_of(head, model)])
        vectors = []
        for x in writes.everywhere:
            here, head_index = (number.to(x.z.device) for number in (place, index))
            vectors.append(x.vectors(x.z[:, here, head_index], head_index, here))
        written.append(added(vectors).to(runs.logits))
    if not written:
        return runs.logits.new_zeros(0, runs.logits.shape[-1])
    final, dtype = SecantNorm.between(both.final), next(model.unembed.parameters()).dtype
    normed = final.at(places.to(final.scale.device)).change(torch.cat(written, 1))
    normed = normed[list(prompts), list(range(len(nodes)))].unsqueeze(1).to(dtype)
    bias = model.unembed(torch.zeros_like(normed[:1]))
    return ((both.logit_factor or 1.0) * (model.unembed(normed) - bias))[:, 0]


def _routes(
    host: Any,
    sublayers: Sequence[SublayerWrites],
    points: dict[tuple[int, HeadKind, str], str],
    nodes: dict[str, Tensor],
    steps: Steps,
    empty: HeldPass | None = None,
    *,
    patterns: bool = True,
) -> list[dict[str, Route]]:
    """Return each sublayer's routes by kind of edge; `empty` has the activations of no stream."""
    by_sublayer = list[dict[str, Route]]()
    for writes in sublayers:
        routes: dict[str, Route] = {}
        by_sublayer.append(routes)
        if writes.kind == "error":  # a constant
            continue
        reader = reader_of(host, writes)
        read, normed = steps.reads[reader], steps.normed.get(reader, [])

        def constant(name: str) -> Tensor | None:
            return None if empty is None else empty.nodes[name].detach()

        def through(weights: Weights, node: Tensor, z: Tensor, read: Tensor = read) -> Any:
            return (z, weights.outside), (weights.inside, node), (node, read)

        name = points[writes.layer, writes.kind, "z"]
        z = nodes[name]
        routes["value"] = Route(((z, read),), constant(name), 0, normed)
        if writes.kind == "attention" and patterns:
            for kind in "qk":
                name = points[writes.layer, "attention", kind]
                way = through(steps.functions.weights[writes.layer], nodes[name], z)
                routes[kind] = Route(way, constant(name), 2, normed)
        elif writes.kind in NEURON_KINDS and patterns:
            heads = host.neurons[writes.layer]
            gate = steps.gates[heads]
            assert gate.query is not None
            if gate.inside.requires_grad:
                alone = None if empty is None else empty.steps.gates[heads].query
                routes["gate"] = Route(through(gate, gate.query, z), alone, 2, normed)
            if isinstance(steps, SecantSteps) and heads in steps.routes:
                routing = steps.routes[heads]
                way = (z, routing.outside), (routing.inside, read)
                routes["routing"] = Route(way, routing.whole, 1, normed)
    return by_sublayer


def _routers(host: Any, result: Multipliers) -> dict[int, Float[Tensor, "batch pos"]]:
    """Return the contributions of routers that are sources, by layer."""
    names = {
        layer: host.hook_name(layer, "router", "z")
        for layer in range(host.n_layers)
        if "router" in host.kinds(layer)
    }
    hooked = result.runs.recording.hooked
    return {
        layer: (result.sources[name] * _minus(hooked[name])).sum((-2, -1))
        for layer, name in names.items()
    }


def _difference(both: SublayerWrites) -> SublayerWrites:
    """Return a sublayer's writes to the residual stream, clean minus corrupted run."""
    bias = torch.zeros_like(mean(both.bias))
    own, *later = (
        replace(x, writes=SecantNorm.between(x.writes), bias=bias) for x in both.everywhere
    )
    return replace(own, later=tuple(later)).with_outputs(_minus(both.z))


def _minus(both: Tensor) -> Tensor:
    clean, corrupted = both.chunk(2)
    return clean - corrupted


def _bias(linear: LinearMap, host: Any, of_reads: dict[nn.Module, Tensor]) -> float:
    """Return the contribution of all biases, given the multipliers of the streams that are read."""
    parts: list[Tensor] = [linear.logit_bias.sum()]
    behind, waiting = linear.last, dict(of_reads)
    for index in reversed(range(len(linear.sublayers))):
        writes = linear.sublayers[index]
        for later in range(index + 1, len(linear.sublayers)):
            module = reader_of(host, linear.sublayers[later])
            if linear.n_before(later) > index and module in waiting:
                behind = behind + waiting.pop(module).to(behind)
        parts.append((behind * writes.bias.to(behind)).sum())
        if route := linear._routes[index].get("value"):
            assert route.constant is not None
            parts.append((linear.multipliers[index] * route.constant).sum())
    return sum(map(float, on_cpu(parts)))


def _require_flows(
    linear: LinearMap, streams: Sequence[Residual], entered: Sequence[Residual]
) -> None:
    """Raise an error if edges into a sublayer's nodes do not add up to the nodes' attributions.

    Args:
        linear: the linear map.
        streams: the (change of the) residual stream that each sublayer reads.
        entered: the size of each sublayer's normalised input.
    """
    numbers = list[Tensor]()
    for index, (writes, stream) in enumerate(zip(linear.sublayers, streams, strict=True)):
        along = linear.multipliers[index]
        terms, outputs = [torch.zeros_like(along[:1])], along * writes.z
        for kind in linear.kinds(index):
            if linear.is_difference or kind == "value":
                covectors, biases = linear.back(index, kind, along[None])
                terms += [(covectors[0] * stream.to(covectors)).to(along), biases.to(along)]
        flat = torch.cat([x.flatten() for x in terms])
        size = flat.abs().sum() + outputs.abs().sum()
        numbers += [flat.sum(), outputs.sum() if linear.kinds(index) else flat.sum(), size]
    rows = torch.stack([x.double() for x in on_cpu(numbers)]).view(-1, 3).tolist()
    # Small sums may be only rounding errors, so the tolerance is at least that for `smallest`.
    allowed = LOGIT_TOLERANCE[torch.float32]
    smallest = allowed * max([abs(linear.value), *(row[2] for row in rows)])
    reasons = list[str]()
    for index, (writes, (got, expected, size)) in enumerate(
        zip(linear.sublayers, rows, strict=True)
    ):
        amplification = max(writes.neurons.amplification, 1.0) if writes.neurons else 1.0
        bound = allowed * amplification * max(size, smallest)
        if abs(got - expected) <= bound:
            continue
        # Terms of the normalised input may be much larger than their sum after the norm.
        bound = max(bound, rounding(torch.float32) * linear._inner_size(index, entered[index]))
        if abs(got - expected) <= bound:
            continue
        place, off = f"layer {writes.layer}", abs(got - expected)
        reasons.append(
            f"{place}: edges into its {writes.kind} heads add up to {got:.6g}; expected "
            f"{expected:.6g}, and rounding allows a difference of {bound:.2g}"
            if linear.is_difference
            else f"{place}: the outputs of its {writes.kind} heads are not linear in their values "
            f"(off by {off:.2g}, and rounding allows {bound:.2g})"
        )
    problem = "this run is not linear with constant patterns"
    if linear.is_difference:
        problem = "the graph of this model is unknown"
    UnsupportedModelError.raise_if(reasons, problem)
