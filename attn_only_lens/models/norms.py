"""What stands between the residual stream and the heads of a layer: norms, and who reads first.

Where a norm is, a head with weights W reads W' = N W of the stream x (a row), up to the norm's
scale, one number a token, and its bias:

    LayerNorm   N = C diag(w)     C = I - 1 1ᵀ / d_model, which takes the mean away
    RMSNorm     N = diag(w)

and where a norm follows (OLMo 2; Gemma 2, before and after), a head that puts o into it writes o N.
Queries and keys that are normed again (Qwen 3, Gemma 3, OLMo 2) are W_Q N and W_K N likewise.
A positive factor cancels in a composition score, so that with scales frozen nothing is
approximated: the scale of a norm that follows is that of the whole sublayer's output.

In a `HookedTransformer` the configuration says where the norms are. A bridge names its norms
differently from version to version, so there two tokens are run once (hooks that are live fire),
and a norm counts as read through if what it returns is what the heads are given, and as written
through if what they return is what it is given. What W stands for is held against the modules.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from attn_only_lens.errors import CircuitError
from attn_only_lens.numerics import normal_numbers
from attn_only_lens.tl import LayerNorm, LayerNormPre, RMSNorm, RMSNormPre

__all__ = [
    "Norm",
    "Wiring",
    "bridge_final_norm",
    "bridge_norms",
    "hooked_final_norm",
    "hooked_norms",
    "require_bridge_weights",
]

_PROBLEM = "the weights of this model are not known to be what its heads read and write"
_UNCHECKED = 1e-2  # of half precision: a transposed or permuted matrix is wrong by about 1
_NORMS = ("ln1", "ln2", "ln1_post", "ln2_post")


@dataclass(frozen=True, eq=False)
class Norm:
    """The linear part of a norm, without its scale.

    Attributes:
        weight: w; None for ones.
        centres: whether it takes the mean away.
    """

    weight: Float[Tensor, "d_model"] | None
    centres: bool

    def read(self, weights: Float[Tensor, "*head d_model n"]) -> Float[Tensor, "*head d_model n"]:
        """N W: what weights behind this norm read of the stream."""
        if self.weight is not None:
            weights = self.weight.to(weights.dtype)[:, None] * weights
        return weights - weights.mean(dim=-2, keepdim=True) if self.centres else weights

    def written(self, rows: Float[Tensor, "*head d_model"]) -> Float[Tensor, "*head d_model"]:
        """o N: what reaches the stream of rows that enter this norm."""
        rows = rows - rows.mean(dim=-1, keepdim=True) if self.centres else rows
        return rows if self.weight is None else rows * self.weight.to(rows.dtype)


_NOTHING = Norm(None, centres=False)


@dataclass(frozen=True, eq=False)
class Wiring:
    """The norms of one source layer.

    Attributes:
        attention: the norms that its attention heads read and write through.
        neuron: those of its neurons.
        query: the norm of the queries of each head, or of all together.
        key: that of the keys.
        parallel: whether its neurons read what its attention heads read.
    """

    attention: tuple[Norm, Norm]
    neuron: tuple[Norm, Norm]
    query: Norm
    key: Norm
    parallel: bool


def hooked_norms(
    cfg: Any, attention: Sequence[Any], modules: Sequence[Sequence[Any]]
) -> list[Wiring]:
    """The norms of each source layer of a HookedTransformer, as its configuration has them.

    Args:
        cfg: of the model.
        attention: the module with the attention heads of each source layer.
        modules: of each layer, the norms before attention and MLP, then those after them; None
            where there is none.
    """
    found = []
    for attn, norms in zip(attention, modules, strict=True):
        ln1, ln2, ln1_post, ln2_post = map(_known, norms)
        if cfg.original_architecture in POST_NORM_ARCHITECTURES:
            ln1, ln2, ln1_post, ln2_post = _NOTHING, _NOTHING, ln1, ln2
        query, key = (_known(getattr(attn, name, None)) for name in ("q_norm", "k_norm"))
        ends = (ln1, ln1_post), (ln2, ln2_post)
        found.append(Wiring(*ends, query, key, cfg.parallel_attn_mlp))
    return found


def hooked_final_norm(model: Any) -> Norm:
    """The norm that the unembedding of a HookedTransformer reads through."""
    return _known(getattr(model, "ln_final", None))


@torch.no_grad()
def bridge_final_norm(model: Any) -> Norm:
    """The norm that the unembedding of a bridge reads through, as two tokens show it.

    Raises:
        CircuitError: it is not known.
    """
    last = getattr(model, "ln_final", None)
    seen: dict[str, Tensor] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            seen[name] = args[0] if args else next(iter(kwargs.values()))
            seen[f"{name} made"] = output

        return hook

    with ExitStack() as stack:
        for name, part in (("unembed", model.unembed), ("norm", last)):
            if part is not None:
                handle = part.register_forward_hook(look(name), with_kwargs=True)
                stack.callback(handle.remove)
        _run_two_tokens(model)
    try:
        if "norm" not in seen or not torch.equal(seen["norm made"], seen["unembed"]):
            raise _UnknownError("the unembedding does not read what ln_final makes of the stream")
        return _fitting(last, "ln_final", seen["norm"], seen["norm made"])
    except _UnknownError as error:
        raise CircuitError([str(error)], _PROBLEM) from error


def _known(norm: Any) -> Norm:
    """A norm of a HookedTransformer; `convert` and `expose_neuron_heads` admit no other classes."""
    weight = norm.w.detach() if isinstance(norm, LayerNorm | RMSNorm) else None
    assert norm is None or isinstance(
        norm, LayerNorm | LayerNormPre | RMSNorm | RMSNormPre | nn.Identity
    )
    return Norm(weight, isinstance(norm, LayerNorm | LayerNormPre))


def bridge_norms(model: Any) -> list[Wiring]:
    """The norms of each layer of a bridge, as two tokens show them.

    Raises:
        CircuitError: with every reason: norms, or an order of attention and MLP, not known.
    """
    seen = [_Seen(block) for block in model.blocks]
    with ExitStack() as stack, torch.no_grad():
        for each in seen:
            each.watch(stack.callback)
        _run_two_tokens(model)
    found, reasons = [], []
    for layer, each in enumerate(seen):
        try:
            found.append(each.wiring())
        except _UnknownError as error:
            reasons.append(f"layer {layer}: {error}; fold_norms=False takes weights as they stand")
    if reasons:
        raise CircuitError(reasons, _PROBLEM)
    return found


def _run_two_tokens(model: Any) -> None:
    first = model.cfg.d_vocab - 1  # one that no tokenizer uses to pad
    model(torch.tensor([[first, 0]], device=next(model.parameters()).device))


class _UnknownError(Exception):
    """A layer of a bridge is not wired in a way that is known; its text says how."""


class _Seen:
    """What went in and out of the parts of one block of a bridge."""

    def __init__(self, block: Any) -> None:
        self.parts: dict[str, Any] = {
            name: part
            for name in (*_NORMS, "attn", "mlp")
            if (part := getattr(block, name, None)) is not None
        }
        for name in ("q_norm", "k_norm"):
            if getattr(block.attn, name, None) is not None:
                self.parts[name] = getattr(block.attn, name)
        self.given: dict[str, Tensor] = {}
        self.returned: dict[str, Tensor] = {}

    def watch(self, callback: Callable[[Callable[[], None]], Any]) -> None:
        for name, part in self.parts.items():

            def look(module: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                self.given[name] = args[0] if args else kwargs["hidden_states"]
                self.returned[name] = output[0] if isinstance(output, tuple | list) else output

            callback(part.register_forward_hook(look, with_kwargs=True).remove)

    def wiring(self) -> Wiring:
        missing = [
            name
            for name in ("attn", "mlp", "q_norm", "k_norm")
            if name not in self.given and (name in self.parts or name in ("attn", "mlp"))
        ]
        if missing:
            raise _UnknownError(f"its {' and '.join(missing)} did not run")
        before = {
            part: self._norm_with(self.returned, self.given[part]) for part in ("attn", "mlp")
        }
        after = {part: self._norm_with(self.given, self.returned[part]) for part in ("attn", "mlp")}
        entered = {part: self.given[name or part] for part, name in before.items()}
        parallel = torch.equal(entered["attn"], entered["mlp"])
        wrote = self.returned[after["attn"] or "attn"]
        if not (parallel or _parallel(entered["mlp"] - entered["attn"], wrote)):
            raise _UnknownError("its MLP reads neither what its attention reads, nor that and more")
        ends = {p: (self._norm(before[p]), self._norm(after[p])) for p in ("attn", "mlp")}
        query, key = (self._norm(n if n in self.parts else None) for n in ("q_norm", "k_norm"))
        return Wiring(ends["attn"], ends["mlp"], query, key, parallel)

    def _norm_with(self, side: dict[str, Tensor], value: Tensor) -> str | None:
        return next((n for n in _NORMS if n in side and torch.equal(side[n], value)), None)

    def _norm(self, name: str | None) -> Norm:
        if name is None:
            return _NOTHING
        return _fitting(self.parts[name], name, self.given[name], self.returned[name])


def _fitting(part: Any, name: str, given: Tensor, returned: Tensor) -> Norm:
    """The norm of a bridge such that it does what it was seen to do.

    Raises:
        _UnknownError: it is neither LayerNorm nor RMSNorm.
    """
    x, y = given.cpu().double(), returned.cpu().double()
    weight = getattr(part.original_component, "weight", None)
    bias = getattr(part.original_component, "bias", None)
    y = y if bias is None else y - bias.detach().cpu().double()
    fits = []
    for centres, offset in product((True, False), (0.0, 1.0)):
        w = None if weight is None else weight.detach() + offset
        centred = x - x.mean(-1, keepdim=True) if centres else x
        scale = centred.square().mean(-1, keepdim=True).sqrt()
        expected = (centred if w is None else centred * w.cpu().double()) / scale
        fits.append(((expected - y).norm().item(), _parallel(expected, y), Norm(w, centres)))
    _, fitting, norm = min(fits, key=lambda fit: fit[0])
    if not fitting:
        raise _UnknownError(f"what its {name} makes of the stream is neither LayerNorm nor RMSNorm")
    return norm


def _parallel(one: Tensor, other: Tensor) -> bool:
    """Whether each row is a positive multiple of the other's: within half precision's rounding."""
    return bool(
        (torch.cosine_similarity(one.cpu().double(), other.cpu().double(), dim=-1) > 1 - 1e-3).all()
    )


@torch.no_grad()
def require_bridge_weights(model: Any) -> None:
    """Hold what a bridge calls W_Q, W_in and so on against the modules that they are of.

    Raises:
        CircuitError: one is another matrix, such as its transpose, or not found.
    """
    reasons = []
    for layer, block in enumerate(model.blocks):
        attn, mlp = block.attn, block.mlp
        gated = getattr(mlp, "W_gate", None) is not None
        matrices = {f"attn.{part}": f"W_{part.upper()}" for part in "qkvo"}
        matrices |= {"mlp.in": "W_in", "mlp.out": "W_out"} | (
            {"mlp.gate": "W_gate"} if gated else {}
        )
        for path, name in matrices.items():
            owner = attn if path.startswith("attn") else mlp
            if not _applies(getattr(owner, name), getattr(owner, path.split(".")[1], None), path):
                reasons.append(f"layer {layer}: {name} is not the matrix that its {path} applies")
    if reasons:
        raise CircuitError(reasons, "the weights of this model are not what they are called")


def _applies(weight: Tensor, part: Any, path: str) -> bool:
    """Whether a part of a bridge applies this matrix, heads side by side."""
    linear = getattr(part, "original_component", None)
    if linear is None:
        return False
    if weight.ndim == 3:  # [head, d_model, d_head], or W_O: [head, d_head, d_model]
        flat = weight.flatten(0, 1) if path == "attn.o" else weight.transpose(0, 1).flatten(1)
    else:
        flat = weight
    x = normal_numbers((3, flat.shape[0])).to(flat)
    got = linear(x) - linear(torch.zeros_like(x))
    expected = x @ flat
    if got.shape != expected.shape:
        return False
    return bool((got - expected).norm() <= _UNCHECKED * expected.norm())
