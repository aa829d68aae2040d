"""Neuron-heads of an MLP that keeps its place: hook points beside it, and taps on its own.

An MLP of TransformerLens computes  q → hook_pre → act → hook_post → W_out,  in a gated one with
u → hook_pre_linear besides. That code runs on, untouched. Its hook points are tapped:

    hook_pre, hook_pre_linear    what leaves them, users' edits included, is q (and u)
    hook_post                    what enters it is replaced by what the heads put out
    what W_out puts out          is replaced by Σ hook_result + bias, where hook_result is live

so the order is hook_pre, then hook_q, hook_k, hook_v, hook_attn_scores, hook_pattern, hook_z, then
hook_post, then hook_result, and an edit at any of them reaches all that follow. (Those are
attributes here; in the MLP, and to users, they have the names in `POINTS`.) The results add up to
the output less its bias: an edit of a neuron at hook_post is shared by its heads in equal parts.

Exact heads replace nothing while none of their hook points is live: the model is the source,
bitwise. Bilinear heads are another function, and always do.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.axes import PreActivation, Residual
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.bilinear import BilinearHeads
from attn_only_lens.heads.computation import NeuronHeads, is_live
from attn_only_lens.heads.gating import AnyGate, Gating
from attn_only_lens.heads.host import POINTS
from attn_only_lens.heads.pass_state import PassState
from attn_only_lens.models.in_place.mlps import Sockets, misfit
from attn_only_lens.numerics import working_precision
from attn_only_lens.tl import GatedMLP

__all__ = ["BilinearInPlace", "InPlace"]


class InPlace(NeuronHeads):
    """Exact neuron-heads of an MLP that stays what it is. Not a module: the MLP owns the hooks."""

    def __init__(
        self,
        mlp: nn.Module,
        sockets: Sockets,
        cfg: Any,
        act_fn: str,
        layer: int,
        gating: Gating,
        passing: PassState,
    ) -> None:
        self.mlp: Any = mlp
        self.sockets = sockets
        self.cfg = cfg  # the model's, for use_attn_result
        self.act_fn = act_fn
        self.layer = layer
        self.gating = gating
        self.results = False  # True: whatever cfg.use_attn_result says
        self.passing = passing  # the model's
        self._add_hook_points()

    @property
    def gate(self) -> AnyGate:
        """The gate of this layer (looked up, so that a saved model holds no code)."""
        return self.gating.gate(self.act_fn, self.layer)

    @property
    def module(self) -> nn.Module:
        """The MLP."""
        module: nn.Module = self.mlp
        return module

    @property
    def output_module(self) -> nn.Module:
        """The hook point that what W_out puts out enters; BERT's layers run no module `mlp`."""
        return self.module if self.sockets.out is None else self.sockets.out

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:  # type: ignore[override]
        """The MLP's."""
        written: Tensor = self.mlp.W_out
        return written

    @property
    def value_is_product(self) -> bool:
        """Whether the MLP is gated."""
        return self.sockets.linear is not None

    @property
    def _b_in(self) -> Float[Tensor, "d_mlp"] | float:
        """What is added to the activations before they enter hook_post, by a GatedMLP alone."""
        return self.mlp.b_in if isinstance(self.mlp, GatedMLP) else 0.0

    @property
    def b_O(self) -> Float[Tensor, "d_model"] | float:
        """The bias of the output: all of it that no head writes."""
        if self.sockets.out is None:
            return self.mlp.b_out + (
                self.mlp.b_in @ self.mlp.W_out if isinstance(self.mlp, GatedMLP) else 0.0
            )
        bias = getattr(self.mlp.out, "bias", None)
        return 0.0 if bias is None else bias

    @property
    def _results(self) -> bool:
        return self.results_on and is_live(self.hook_result)

    @property
    def results_on(self) -> bool:
        """Whether hook_result is to fire."""
        return bool(self.results or self.cfg.use_attn_result)

    @property
    def points(self) -> dict[str, HookPoint]:
        """The hook points of the heads, by the names that they have in the MLP."""
        return {name: getattr(self, f"hook_{point}") for point, name in POINTS.items()}

    # What the taps call, in this order

    def read(self, name: str, x: PreActivation) -> None:
        """Take note of q ("pre") or u ("linear")."""
        self.passing.values[self.layer, name] = x

    def put_out(self, post: PreActivation) -> tuple[PreActivation, PreActivation | None]:
        """What enters hook_post, in place of what the MLP has computed; and z, for the results."""
        left = self.passing.values
        q, up = left.pop((self.layer, "pre")), left.pop((self.layer, "linear"), None)
        left.pop((self.layer, "written"), None)  # of an MLP that was run alone, and broke off
        if self._recomputes:
            self._require_known(q, up, post)
        if not (self._results or any(map(is_live, (*self._before_z, self.hook_z)))):
            return self._unwatched(q, up, post), None
        z = self._z(q, up, post)
        return self._post(z).to(post.dtype), z if self._results else None

    @property
    def _recomputes(self) -> bool:
        """Whether the activations are formed anew, of q and u alone."""
        return any(map(is_live, self._before_z))

    @torch.no_grad()
    def _require_known(
        self, q: PreActivation, up: PreActivation | None, post: PreActivation
    ) -> None:
        if misfit(self.act_fn, post, working_precision(q), up, self._b_in) > 1.0:
            why = "its dropout, in training mode" if self.mlp.training else "changed since?"
            raise UnsupportedCallError(
                f"layer {self.layer}: what its MLP makes of its pre-activations is no longer "
                f"{self.act_fn} ({why}), and its neuron-heads would silently leave that out: call "
                "model.eval(), or undo() and expose_neuron_heads again"
            )

    def edited(self, post: PreActivation, z: PreActivation | None) -> None:
        """Take note of what users made of the activations at hook_post, for the results."""
        if z is not None:
            edit = (post - self._post(z)).repeat_interleave(self.heads_per_neuron, dim=-1)
            written = self.head_outputs(z) + edit / self.heads_per_neuron
            self.passing.values[self.layer, "written"] = written

    def write(self, out: Residual) -> Residual:
        """What W_out puts out, by way of hook_result where it is live."""
        written = self.passing.values.pop((self.layer, "written"), None)
        if written is None:
            return out
        W_out = self.mlp.W_out.repeat_interleave(self.heads_per_neuron, dim=0)
        result: Tensor = self.hook_result(written.unsqueeze(-1) * W_out)
        return (result.sum(dim=-2) + self.b_O).to(out.dtype)

    def _unwatched(
        self, q: PreActivation, up: PreActivation | None, post: PreActivation
    ) -> PreActivation:
        return post

    def _z(self, q: PreActivation, up: PreActivation | None, post: PreActivation) -> PreActivation:
        # A copy: to edit hook_q in place must not reach back to what hook_pre has shown.
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
        """As a new tensor: to edit hook_post in place must not reach back to hook_z."""
        return (self.neuron_outputs(z) + self._b_in).contiguous()  # whose code may flatten it

    # Tapping

    def attach(self) -> None:
        """Give the MLP the hook points, and tap its own."""
        sockets = self.sockets
        self.mlp._neuron_heads = self
        for name, point in self.points.items():
            setattr(self.mlp, name, point.train(self.mlp.training))
        _tap(sockets.pre, _Pre, self)
        _tap(sockets.post, _Post, self)
        if sockets.linear is not None:
            _tap(sockets.linear, _Linear, self)
        if sockets.out is not None:
            _tap(sockets.out, _Out, self)

    def detach(self) -> None:
        """Undo `attach`."""
        for point in self.sockets.points:
            point.__class__ = HookPoint
            del point._neuron_heads
        for name in self.points:
            delattr(self.mlp, name)
        del self.mlp._neuron_heads


class BilinearInPlace(BilinearHeads, InPlace):
    """The same with heads that are bilinear and share their neurons."""

    @property
    def _recomputes(self) -> bool:
        # Always, but to look costs as much as the activation: where nobody watches and there is no
        # dropout, it is not looked at.
        return self.mlp.training or super()._recomputes or is_live(self.hook_z)

    def _unwatched(
        self, q: PreActivation, up: PreActivation | None, post: PreActivation
    ) -> PreActivation:
        return self._without_hooks(q, q if up is None else up) + self._b_in

    def _z(self, q: PreActivation, up: PreActivation | None, post: PreActivation) -> PreActivation:
        value = q if up is None else up
        return self._through_hooks(q, value, lambda: self._attend(q, value))


class _Tap(HookPoint):
    """A hook point of an MLP whose neurons are exposed as heads."""

    _neuron_heads: InPlace


class _Pre(_Tap):
    def __call__(self, x: Tensor) -> Tensor:
        q: Tensor = super().__call__(x)
        self._neuron_heads.read("pre", q)
        return q


class _Linear(_Tap):
    def __call__(self, x: Tensor) -> Tensor:
        up: Tensor = super().__call__(x)
        self._neuron_heads.read("linear", up)
        return up


class _Post(_Tap):
    def __call__(self, x: Tensor) -> Tensor:
        entering, z = self._neuron_heads.put_out(x)
        post: Tensor = super().__call__(entering)
        self._neuron_heads.edited(post, z)
        return post


class _Out(_Tap):
    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = super().__call__(self._neuron_heads.write(x))
        return out


def _tap(point: HookPoint, as_: type[_Tap], heads: InPlace) -> None:
    point.__class__ = as_
    point._neuron_heads = heads  # type: ignore[assignment]
