"""Heads in place: an MLP keeps running, and its neurons get the hook points of attention heads.

A TransformerLens MLP passes its pre-activation q through these steps: hook_pre → act → hook_post →
W_out. A gated MLP also passes a second projection u of its input through hook_pre_linear. The MLP's
own code still runs. The heads of its neurons (neuron-heads) intercept its hook points:

    hook_pre, hook_pre_linear    their outputs, with users' edits, are q (and u)
    hook_post                    its input is replaced by the output of the heads
    the output of W_out          is replaced by Σ hook_result + bias if hook_result is live

An edit at one hook point affects all later hook points, in this order: hook_pre, hook_q, hook_k,
hook_v, hook_attn_scores, hook_pattern, hook_z, hook_post, hook_result. (`POINTS` holds the names of
the heads' hook points in the MLP.) With bilinear gates, m
heads compute one neuron of the MLP, and a change at hook_post is split equally among them, so that
the heads' results still sum to the MLP's output minus the output bias. Exact heads replace the
MLP's activations only if the heads' hook points have hooks. Bilinear heads always replace the
activations.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.axes import PreActivation, Residual
from attn_only_lens.devices import float32_if_half
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.gates.bilinear import BilinearGate
from attn_only_lens.gates.exact import Gate
from attn_only_lens.gates.features import feature_gate
from attn_only_lens.gates.gating import Gating
from attn_only_lens.heads.bilinear import BilinearHeads
from attn_only_lens.heads.computation import NeuronHeads, is_live
from attn_only_lens.heads.host import POINTS, WIDE_KINDS, HeadKind, PassState
from attn_only_lens.tl import GatedMLP

_ROUNDINGS = 16  # allowed relative error of an activation, in machine epsilons


class UnknownMLPError(Exception):
    """Raised if an MLP's neurons cannot be exposed as heads; the message says why."""


@dataclass(frozen=True)
class MLPHookPoints:
    """The MLP's own hook points, which its neuron-heads intercept."""

    pre: HookPoint
    """Outputs the pre-activation q."""
    pre_linear: HookPoint | None
    """Outputs u, in a gated MLP."""
    post: HookPoint
    """Receives the activations that W_out multiplies."""
    out: HookPoint | None
    """Receives the output of W_out; None if the MLP's own class calls `InPlace.write` instead."""
    layer: nn.Module | None = None
    """The module that runs W_out, if it is not the MLP or if the MLP adds more to its output."""

    def __iter__(self) -> Iterator[HookPoint]:
        points = self.pre, self.pre_linear, self.post, self.out
        return (point for point in points if point is not None)


def activation_error(
    gate: Gate, post: Tensor, q: Tensor, u: Tensor | None, b_in: Tensor | float = 0.0
) -> Float[Tensor, ""]:
    """Return the largest |post - (act(q) · u + b_in)|, relative to the allowed rounding error.

    `gate` represents the activation function act exactly, `post` is the input of hook_post, and
    `b_in` is the bias that TransformerLens' GatedMLP adds to its activations.
    """
    u = torch.ones((), dtype=q.dtype, device=q.device) if u is None else u.to(q.dtype)
    expected = gate.activation(q) * u + b_in
    size = (1.0 + gate.values(q).abs()) * (1.0 + u.abs())
    size = size + (b_in.abs() if isinstance(b_in, Tensor) else abs(b_in))
    limits = torch.finfo(post.dtype)
    error = (post.to(q.dtype) - expected).abs() / (_ROUNDINGS * limits.eps * size)
    # Skip values that overflow in half precision, or are NaN after a user's edit.
    finite = expected.abs() <= 0.99 * limits.max
    return torch.where(finite, error.nan_to_num(nan=torch.inf), 0.0).max()


def _every_example(value: Tensor) -> Tensor:
    """Unwrap a tensor inside `torch.func.vmap`, to get the values of all batch examples."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


class InPlace(NeuronHeads):
    """The exact neuron-heads of one MLP, added in place as hook points."""

    def __init__(
        self,
        mlp: nn.Module,
        mlp_points: MLPHookPoints,
        cfg: Any,
        act_fn: str,
        layer: int,
        gating: Gating,
        passing: PassState,
    ) -> None:
        self.mlp: Any = mlp
        self.mlp_points = mlp_points
        self.cfg = cfg  # the model's configuration, which holds use_attn_result
        self.act_fn = act_fn
        self.layer = layer
        self.gating = gating
        self.results = False  # if True, overrides cfg.use_attn_result
        self.passing = passing  # shared by all MLPs of the model
        self._add_hook_points()

    @property
    def activation(self) -> Gate:
        """The gate that represents the MLP's activation function exactly.

        It is looked up by name, so that pickled models hold no code.
        """
        return self.gating.activation(self.act_fn)

    @property
    def gate(self) -> Gate:
        return self.activation

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.mlp
        return module

    @property
    def output_module(self) -> nn.Module:
        """The module whose output is the MLP's output: the hook point after W_out, or the MLP."""
        return self.module if self.mlp_points.out is None else self.mlp_points.out

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:  # type: ignore[override]
        """The output weights of the MLP."""
        written: Tensor = self.mlp.W_out
        return written

    @property
    def value_is_product(self) -> bool:
        return self.mlp_points.pre_linear is not None

    @property
    def _b_in(self) -> Float[Tensor, "d_mlp"] | float:
        """The bias that a GatedMLP adds to the activations before hook_post; 0 for other MLPs."""
        return self.mlp.b_in if isinstance(self.mlp, GatedMLP) else 0.0

    @property
    def b_O(self) -> Float[Tensor, "d_model"] | float:
        """The output bias, which is not part of any head's output."""
        if self.mlp_points.out is None:
            gated = isinstance(self.mlp, GatedMLP)
            return self.mlp.b_out + (self.mlp.b_in @ self.mlp.W_out if gated else 0.0)
        bias = getattr(getattr(self.mlp, "dense_out", None) or self.mlp.out, "bias", None)
        return 0.0 if bias is None else bias

    @property
    def _results(self) -> bool:
        return self.results_on and is_live(self.hook_result)

    @property
    def results_on(self) -> bool:
        """True if the hook point for the heads' results is switched on."""
        return bool(self.results or self.cfg.use_attn_result)

    @property
    def points(self) -> dict[str, HookPoint]:
        """The heads' hook points, keyed by their attribute names in the MLP."""
        return {name: getattr(self, f"hook_{point}") for point, name in POINTS.items()}

    def projections(self, x: Residual) -> tuple[PreActivation, PreActivation | None]:
        """Run the MLP on `x`, and return q and, in a gated MLP, u (see the module docstring)."""
        seen: dict[HookPoint, Tensor] = {}
        pre, pre_linear = self.mlp_points.pre, self.mlp_points.pre_linear

        def look(point: nn.Module, args: Any, output: Tensor) -> None:
            seen[point] = output  # type: ignore[index]

        with self.passing.new_pass(), ExitStack() as stack:
            for point in (pre, pre_linear):
                if point is not None:
                    stack.callback(point.register_forward_hook(look).remove)
            self.mlp(x)
        return seen[pre], None if pre_linear is None else seen[pre_linear]

    def run_alone(self) -> AbstractContextManager[None]:
        """Return a context that isolates stored values, because a hook may run the MLP again."""
        return self.passing.new_pass(self.passing.values)

    # The MLP's hook points call the following methods, in this order.

    def record(self, name: str, x: PreActivation) -> None:
        """Store the output of hook_pre or hook_pre_linear: q (`name` "pre") or u ("pre_linear")."""
        self.passing.values[self.layer, name] = x

    def replace_activations(
        self, post: PreActivation
    ) -> tuple[PreActivation, PreActivation | None]:
        """Return the new input of hook_post, and the heads' z if hook_result has hooks."""
        values = self.passing.values
        q, up = (values.pop((self.layer, name), None) for name in ("pre", "pre_linear"))
        if q is None:
            raise UnsupportedCallError(
                f"layer {self.layer}: the output projection of its MLP ran without the rest of the "
                "MLP, or a copy of the projection ran (peft's modules_to_save); call undo() and "
                "expose_neuron_heads again"
            )
        values.pop((self.layer, "written"), None)  # remains if the MLP's last run failed
        if self._recomputes:
            self._require_known(q, up, post)
        if not (self._results or any(map(is_live, (*self._before_z, self.hook_z)))):
            return self._without_hooks(q, up, post), None
        z = self._z(q, up, post)
        return self._post(z).to(post.dtype), z if self._results else None

    @property
    def _recomputes(self) -> bool:
        """True if the heads compute activations from q and u, instead of the MLP's act_fn."""
        return any(map(is_live, self._before_z))

    @torch.no_grad()
    def _require_known(
        self, q: PreActivation, up: PreActivation | None, post: PreActivation
    ) -> None:
        error = activation_error(self.activation, post, float32_if_half(q), up, self._b_in)
        why = "dropout in training mode" if self.mlp.training else "was it changed after exposing?"
        message = (
            f"layer {self.layer}: the MLP no longer computes {self.act_fn} of its "
            f"pre-activations ({why}), but its neuron-heads still would; call "
            "model.eval(), or undo() and expose_neuron_heads again"
        )
        if torch.compiler.is_compiling():  # check the error when the compiled graph runs
            torch._assert_async(error <= 1.0, message)
        else:
            self.passing.require_small(_every_example(error).max(), message)

    def record_edit(self, post: PreActivation, z: PreActivation | None) -> None:
        """Store the heads' outputs, including any edit at hook_post, until hook_result fires."""
        if z is not None:
            self.passing.values[self.layer, "written"] = self.written(z, post - self._post(z))

    def written(self, z: PreActivation, edit: Tensor | float = 0.0) -> PreActivation:
        """Return what the heads write along their neurons' rows of W_out, after an edit of post."""
        return z + edit

    @property
    def _rows(self) -> Float[Tensor, "head_index d_model"]:
        """For each head, its neuron's row of W_out."""
        return self.W_out

    def write(self, out: Residual) -> Residual:
        """Return W_out's output, or the sum of the heads' results if hook_result has hooks."""
        written = self.passing.values.pop((self.layer, "written"), None)
        if written is None:
            return out
        result: Tensor = self.hook_result(written.unsqueeze(-1) * self._rows)
        return (result.sum(dim=-2) + self.b_O).to(out.dtype)

    def _without_hooks(
        self, q: PreActivation, up: PreActivation | None, post: PreActivation
    ) -> PreActivation:
        return post

    def _z(self, q: PreActivation, up: PreActivation | None, post: PreActivation) -> PreActivation:
        # Copy q, since an in-place edit at hook_q must not change the output of hook_pre.
        q = q.clone() if is_live(self.hook_q) else q
        return self._through_hooks(q, up, lambda: self._plain_z(q, up, post))

    def _plain_z(
        self, q: PreActivation, up: PreActivation | None, post: PreActivation
    ) -> PreActivation:
        if up is None or not isinstance(self.mlp, GatedMLP):
            return post
        activation: Tensor = self.mlp.act_fn(q) * up  # `post` without its b_in
        return activation

    def _post(self, z: PreActivation) -> PreActivation:
        """Return hook_post's input as a new tensor, so that in-place edits do not change z."""
        return (z + self._b_in).contiguous()  # some MLPs flatten this

    @property
    def taps(self) -> dict[type[HookPoint], HookPoint]:
        """The MLP's own hook points that the heads intercept, by their new classes."""
        points = self.mlp_points
        taps = {
            _Pre: points.pre,
            _PreLinear: points.pre_linear,
            _Post: points.post,
            _Out: points.out,
        }
        return {tap: point for tap, point in taps.items() if point is not None}

    def attach(self) -> None:
        """Add the hook points of the heads to the MLP, and intercept the MLP's own hook points."""
        self.mlp._neuron_heads = self
        for name, point in self.points.items():
            setattr(self.mlp, name, point.train(self.mlp.training))
        for tap, point in self.taps.items():
            point.__class__ = tap
            point._neuron_heads = self  # type: ignore[assignment]

    def detach(self) -> None:
        """Undo `attach`."""
        for point in self.taps.values():
            point.__class__ = HookPoint
            del point._neuron_heads
        for name in self.points:
            delattr(self.mlp, name)
        del self.mlp._neuron_heads


class BilinearInPlace(BilinearHeads, InPlace):
    """The bilinear neuron-heads of one MLP, m for each of its neurons, added in place."""

    @property
    def bilinear_gate(self) -> BilinearGate:  # type: ignore[override]
        return self.gating.bilinear(self.act_fn, self.layer)

    @property
    def _recomputes(self) -> bool:
        # Checking the activation costs as much as computing it, so skip the check if there are
        # neither hooks nor dropout. (Bilinear heads always recompute the activation.)
        return self.mlp.training or super()._recomputes or is_live(self.hook_z)

    def _without_hooks(
        self, q: PreActivation, up: PreActivation | None, post: PreActivation
    ) -> PreActivation:
        return self._sum_of_heads(q, q if up is None else up) + self._b_in

    def _z(self, q: PreActivation, up: PreActivation | None, post: PreActivation) -> PreActivation:
        queries = self._of_heads(q, up)
        return self._through_hooks(*queries, lambda: self._attend(*queries))

    def written(self, z: PreActivation, edit: Tensor | float = 0.0) -> PreActivation:
        """Return what the heads write along their neurons' rows of W_out, after an edit of post."""
        m = self.bilinear_gate.heads
        edit = edit.unsqueeze(-1) / m if isinstance(edit, Tensor) else edit
        return (self._weighted(z) + edit).flatten(-2).to(z.dtype)

    @property
    def _rows(self) -> Float[Tensor, "head_index d_model"]:
        return self._shared(self.W_out.T).T

    def _post(self, z: PreActivation) -> PreActivation:
        return super()._post(self._weighted(z).sum(-1).to(z.dtype))


class FeatureHeads(InPlace):
    """The neuron-heads of a layer whose MLP was replaced by a transcoder (`FeatureMLP`)."""

    @property
    def kinds(self) -> tuple[HeadKind, ...]:  # type: ignore[override]
        """The kinds of graph nodes in this layer: "feature" and, if present, "skip" and "error"."""
        wide = {"skip": self.mlp.W_skip is not None, "error": self.mlp.has_error}
        return ("feature", *(kind for kind in WIDE_KINDS if wide.get(kind)))

    @property
    def activation(self) -> Gate:
        return feature_gate(self.mlp.threshold, self.mlp.k)

    @property
    def decoders(self) -> list[Float[Tensor, "feature d_model"]]:
        """The decoders to the MLP output of this layer and, in order, of later layers."""
        later: Tensor | None = self.mlp.W_later
        return [self.W_out, *(() if later is None else later)]

    @property
    def joint_gates(self) -> bool:
        """True for the topk activation, where a feature's gate depends on the other features."""
        return self.mlp.k is not None

    @property
    def b_O(self) -> Float[Tensor, "d_model"]:
        """The bias of the decoder."""
        bias: Tensor = self.mlp.b_out
        return bias

    def projections(self, x: Residual) -> tuple[PreActivation, None]:
        return self.mlp.encode(x), None

    def _self_weight(
        self, query: PreActivation, index: Int[Tensor, "feature"] | None = None
    ) -> Float[Tensor, "*any pos feature"]:
        if index is None or self.mlp.threshold is None:
            return super()._self_weight(query)
        gate = feature_gate(self.mlp.threshold[index])
        return gate.self_weight(float32_if_half(query)).to(query.dtype)


class _Tap(HookPoint):
    """An MLP's own hook point, intercepted by the MLP's neuron-heads."""

    _neuron_heads: InPlace


class _Pre(_Tap):
    key = "pre"

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = super().__call__(x)
        self._neuron_heads.record(self.key, output)
        return output


class _PreLinear(_Pre):
    key = "pre_linear"


class _Post(_Tap):
    def __call__(self, x: Tensor) -> Tensor:
        entering, z = self._neuron_heads.replace_activations(x)
        post: Tensor = super().__call__(entering)
        self._neuron_heads.record_edit(post, z)
        return post


class _Out(_Tap):
    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = super().__call__(self._neuron_heads.write(x))
        return out


TAPS = (_Pre, _PreLinear, _Post, _Out)
"""The classes of hook points that neuron-heads intercept."""
