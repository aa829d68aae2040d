"""Neuron-heads of a mixture of experts, which a bridge runs as one block (`MoEBridge`).

No module of the model computes all neurons of a mixture, so their heads compute them
(`heads/experts.py`), and only if the heads' hook points have hooks. The block's own code always
runs, with all of its hooks. If Δz and Δr are the changes that hooks make to the neurons'
activations and to the routing weights, the heads add Δz W_out (+ Δr b, with output biases b) to its
output at `hook_out`. Without hooks, the output is bitwise that of the block.

    hook_router        the routing weights [batch, pos, 1, weight]; 0 for experts not visited
    the heads' hooks   as in other MLPs (`mlp_hooks.py`)

A token also visits the experts whose routing weights an edit at hook_router makes nonzero, and no
longer those whose weights become 0. If an edit sets z of a neuron at a token that does not visit
its expert, the neuron writes there, too: the edited z counts. At such a token, the heads attend to
nothing: their q, v and z, and both weights of their patterns, are 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import MoEBridge

from attn_only_lens.arguments import a_type
from attn_only_lens.axes import PreActivation, Residual
from attn_only_lens.devices import float32_if_half, normal_numbers
from attn_only_lens.engine.recording import of_this_thread
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.gates.exact import Gate
from attn_only_lens.heads.computation import is_live
from attn_only_lens.heads.experts import Experts, unwrapped
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.models.in_place.mlp_hooks import (
    TAPS,
    InPlace,
    MLPHookPoints,
    UnknownMLPError,
    activation_error,
)
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER, head_point
from attn_only_lens.tolerances import LOGIT_TOLERANCE

_SHARED = "shared_expert", "shared_experts"
_PARTS = {"gate", "router", "experts", "shared_expert_gate", *_SHARED}
_STACKS = ("gate_up_proj", "down_proj")


def is_mixture(mlp: Any) -> bool:
    """Return whether an MLP is a mixture of experts (some layers of such models have none)."""
    return isinstance(mlp, MoEBridge) and not getattr(mlp, "bound_dense", False)


def mixture_points(mlp: Any) -> MLPHookPoints:
    """Return the hook points of a mixture of experts; raise UnknownMLPError for unknown modules."""
    experts_of(mlp)
    return MLPHookPoints(mlp.hook_in, None, mlp.hook_out, mlp.hook_out)


def experts_of(mlp: Any) -> Experts:
    """Return the experts of a mixture; raise UnknownMLPError if its modules are unknown."""
    if HAS_HOOKED_TRANSFORMER:
        raise UnknownMLPError("it is a mixture of experts; expected transformer-lens 4.3 or later")
    block = unwrapped(mlp)
    children = {name for name, module in block.named_children() if module is not None}
    if unknown := sorted(children - _PARTS):
        raise UnknownMLPError(
            f"its mixture of experts, {a_type(block)}, has the modules {', '.join(unknown)}; "
            f"expected only {', '.join(sorted(_PARTS))}"
        )
    stacked = unwrapped(getattr(block, "experts", None))
    stacks = [getattr(stacked, name, None) for name in _STACKS]
    if not all(isinstance(x, nn.Parameter) and x.ndim == 3 for x in stacks):
        raise UnknownMLPError(
            f"the experts of its mixture are {a_type(stacked)}; expected one module with the "
            f"weights of all experts, {' and '.join(_STACKS)} (a list of experts, or quantized "
            "experts, cannot be used)"
        )
    expected = {"has_gate": True, "has_post_expert_norm": False, "_is_expert_parallel": False}
    reasons = [
        f"{name}={getattr(stacked, name, None)!r}"
        for name, value in expected.items()
        if getattr(stacked, name, None) is not value
    ]
    if reasons:
        wanted = ", ".join(f"{name}={value}" for name, value in expected.items())
        raise UnknownMLPError(
            f"its experts, {a_type(stacked)}, have {', '.join(reasons)}; expected {wanted}"
        )
    shared = next((x for name in _SHARED if (x := getattr(block, name, None)) is not None), None)
    weights = [getattr(unwrapped(shared), f"{name}_proj", None) for name in ("gate", "up", "down")]
    if shared is not None and None in weights:
        raise UnknownMLPError("its shared experts are no gated MLP with three projections")
    if getattr(unwrapped(weights[-1]), "bias", None) is not None:
        raise UnknownMLPError("its shared experts have an output bias")
    router = unwrapped(getattr(block, "gate", None) or getattr(block, "router", None))
    gate = getattr(block, "shared_expert_gate", None)
    return Experts(router, stacked, unwrapped(shared), unwrapped(gate))


def expert_activation(mlp: Any, prefers: str, gates: Mapping[str, Gate]) -> str:
    """Return the name of the experts' activation; raise UnknownMLPError if it is unknown."""
    errors = {name: float(_activation_error(experts_of(mlp), gates[name])) for name in gates}
    best = min(errors, key=errors.__getitem__)
    name = prefers if errors.get(prefers, 2.0) <= 1.0 else best
    if not errors[name] <= 1.0:
        raise UnknownMLPError(
            "the activations of its experts are not q times a weight p(q) in [0, 1], times u: "
            f"expected one of {', '.join(sorted(gates))}"
        )
    return name


@torch.no_grad()
def _activation_error(experts: Experts, gate: Gate) -> Float[Tensor, ""]:
    """Return the error of a gate's activation on test inputs, relative to the allowed error."""
    shape = 14, experts.size
    q = torch.linspace(-12, 12, shape[0] * shape[1], dtype=torch.float64, device="cpu")
    q, u = (x.view(shape).to(experts.stacked.down_proj) for x in (q, normal_numbers(shape, 1)))
    both = torch.cat([q, u], dim=-1)
    if not experts.stacked.is_concatenated:
        both = torch.stack([q, u], dim=-1).flatten(-2)
    post = experts.stacked._apply_gate(both)
    q, u = experts.clamped(q, u)
    return activation_error(gate, post, float32_if_half(q), u)


@dataclass(frozen=True, eq=False)
class _Routing:
    """The experts that the tokens of one forward pass visit, and their weights."""

    index: Int[Tensor, "token choice"]
    chosen: Float[Tensor, "token choice"]

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> "_Routing":
        """Find both tensors among the arguments of the experts: (input, index, weights)."""
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        index = next(x for x in tensors if not x.is_floating_point())
        chosen = [x for x in tensors if x.is_floating_point() and x.shape == index.shape]
        return cls(index, chosen[-1])


class MixtureHeads(InPlace):
    """The neuron-heads of a mixture of experts."""

    kinds: tuple[HeadKind, ...] = ("router", "neuron")

    def _add_hook_points(self) -> None:
        super()._add_hook_points()
        self.hook_router = head_point()  # [batch, pos, head_index=1, weight]

    @property
    def parts(self) -> Experts:
        """The modules of the experts."""
        return experts_of(self.mlp)

    @property
    def experts(self) -> tuple[int, int]:  # type: ignore[override]
        """The number of routed experts, and the number of neurons of each."""
        parts = self.parts
        return parts.n, parts.size

    @property
    def points(self) -> dict[str, HookPoint]:
        return {**super().points, "hook_router": self.hook_router}

    @property
    def taps(self) -> dict[type[HookPoint], HookPoint]:
        return {TAPS[0]: self.mlp.hook_in, TAPS[-1]: self.mlp.hook_out}

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:  # type: ignore[override]
        return self.parts.W_out

    @property
    def n_neurons(self) -> int:
        return self.parts.n_neurons

    @property
    def value_is_product(self) -> bool:
        return True

    @property
    def routed_bias(self) -> bool:  # type: ignore[override]
        """True if the experts have output biases, which the routing weights multiply."""
        return self.parts.biases is not None

    @property
    def b_O(self) -> float:
        return 0.0  # biases of experts depend on the routing weights

    @property
    def read_matrices(self) -> list[Float[Tensor, "d_model head_index"]]:
        """The matrices W_gate and W_in of all neurons, without the routing weights."""
        return self.parts.read_matrices

    @property
    def _is_live(self) -> bool:
        points = (*self._before_z, self.hook_z, self.hook_router)
        return self._results or self.passing.gate_rule is not None or any(map(is_live, points))

    @contextmanager
    def run_alone(self) -> Iterator[None]:
        """Isolate stored values, and look at the experts' input if the heads have hooks."""
        values = self.passing.values

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            routing = _Routing.of([*args, *kwargs.values()])
            self.passing.values[self.layer, "routing"] = routing

        stacked: nn.Module = self.parts.stacked
        with self.passing.new_pass(values), ExitStack() as stack:
            # Always look: another thread may add hooks to the heads before `write` runs.
            hook = of_this_thread(look)
            stack.enter_context(stacked.register_forward_pre_hook(hook, with_kwargs=True))
            if self._is_live:
                message = (
                    f"layer {self.layer}: its experts no longer compute {self.act_fn} of their "
                    "pre-activations, but its neuron-heads still would; call undo() and "
                    "expose_neuron_heads again"
                )
                error = _activation_error(self.parts, self.activation)
                self.passing.require_small(error, message)
            yield

    def projections(self, x: Residual) -> tuple[PreActivation, PreActivation]:
        """Run the MLP on `x`, and return q and u with the routing weights (`heads/experts.py`)."""
        seen: list[tuple[Tensor, Tensor | None]] = []

        def look(heads: Any, q: Tensor, up: Tensor | None) -> None:
            seen.append((q, up))

        with self.passing.rules(look, None):
            self.mlp(x)
        q, up = seen[0]
        assert up is not None
        return q, up

    def write(self, out: Residual) -> Residual:
        """Return the block's output, plus what hooks on the heads and on routing weights change."""
        values, parts, passing = self.passing.values, self.parts, self.passing
        x, routing = (values.pop((self.layer, name), None) for name in ("pre", "routing"))
        if not self._is_live:
            return out
        if routing is None:
            raise UnsupportedCallError(
                f"layer {self.layer}: hooks were added to its neuron-heads while its MLP was "
                "running, or its experts did not run; add hooks before the forward pass"
            )
        before = parts.weights(x, routing.index, routing.chosen)
        weights = before if passing.routing_rule is None else passing.routing_rule(self, x, before)
        only_looks = weights is before
        if is_live(self.hook_router):
            weights = self.hook_router(weights.clone().unsqueeze(-2)).squeeze(-2)
        visits = parts.visits(weights)
        pairs = self._pairs(visits, parts.visits(before))
        with nullcontext() if passing.functions is None else passing.functions.resumed():
            q, u = parts.projections(x, pairs)
        up = (u * parts.of_neurons(weights)).to(u.dtype)
        values[self.layer, "visits"] = parts.of_neurons(visits, True)
        activated = self.gate.activation(q)
        z = self._through_hooks(q, up, lambda: activated * up)

        def plain() -> PreActivation:
            factor = up if weights is before else (u * parts.of_neurons(before)).to(u.dtype)
            return activated * factor

        if passing.routing_rule is not None:  # the block's own code does not follow the rules
            if only_looks:
                self._require_sum(out, parts.output(plain(), before))
            return parts.output(z, weights).to(out.dtype)
        change = parts.output(z - plain(), weights - before)
        if self._results:
            W_out = self.W_out
            result: Tensor = self.hook_result(z.unsqueeze(-1) * W_out)
            change = change + result.sum(dim=-2) - z @ W_out
        return out + change.to(out.dtype)

    def _require_sum(self, out: Residual, expected: Residual) -> None:
        """Raise UnsupportedCallError if the block's output is not the sum of its neurons' outputs.

        Graphs are about this sum. The experts' forward pass may have been replaced after exposing.
        """
        allowed = LOGIT_TOLERANCE[out.dtype] * out.abs().max()
        message = (
            f"layer {self.layer}: the output of its mixture is no longer the sum of the outputs of "
            "its neuron-heads; call undo() and expose_neuron_heads again"
        )
        self.passing.require_small((out - expected).abs().max() / allowed, message)

    def _pairs(
        self, visits: Bool[Tensor, "batch pos expert"], before: Bool[Tensor, "batch pos expert"]
    ) -> Bool[Tensor, "batch pos expert"]:
        """Return the experts to compute for each token: with two runs, those of either run.

        Without a rule for gates, they include the experts that it visits before an edit. Gradients
        with respect to routing weights need all experts, because a weight of 0 may change.
        """
        if not self.passing.both_runs:
            if self.passing.gate_rule:
                return visits
            if torch.is_grad_enabled() and is_live(self.hook_router):
                return torch.ones_like(visits)
            return visits | before
        return visits.unflatten(0, (2, -1)).any(0).repeat(2, 1, 1)

    def weights_and_values(
        self,
        q: PreActivation,
        up: PreActivation | None,
        index: Int[Tensor, "neuron"] | None = None,
    ) -> tuple[Float[Tensor, "*any pos head_index"], Float[Tensor, "*any pos head_index"]]:
        assert up is not None
        weight, v = super().weights_and_values(q, up, index)
        return torch.where(up == 0, 0.0, weight), v  # experts that are not visited

    def _scores(self, query: PreActivation) -> Float[Tensor, "batch pos head_index key=2"]:
        visits = self.passing.values[self.layer, "visits"]
        return super()._scores(query).masked_fill(~visits.unsqueeze(-1), -torch.inf)

    def _gate_pattern(self, query: PreActivation) -> Float[Tensor, "batch pos head_index key=2"]:
        visits = self.passing.values[self.layer, "visits"]
        return super()._gate_pattern(query).masked_fill(~visits.unsqueeze(-1), 0.0)
