"""Compare a converted model with its source on real input: logits, and the stream by layer."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from attn_only_lens.axes import Tokens
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.gates import BilinearGate, RangeGate
from attn_only_lens.heads.names import heads_block, neurons_block
from attn_only_lens.inputs import checked_tokens
from attn_only_lens.tl import USE_INSTEAD, HookedTransformer
from attn_only_lens.tolerances import LOGIT_TOLERANCE
from attn_only_lens.two_blocks import AttentionOnlyTransformer
from attn_only_lens.two_blocks.bilinear import BilinearAttention

__all__ = ["Verification", "verify"]

_ROUNDING = 1e-14  # of an activation evaluated in float64: silu's bound is 0


@dataclass(frozen=True)
class Verification:
    """What `verify` measured.

    Attributes:
        bitwise: whether the logits are bit for bit the source's when no hook is live.
        rounding: for bilinear gates, largest |Δ logit| from the source with its activations
            replaced by the gates' approximation, over the largest |logit|, without hooks or with
            every hook live; for exact gates the same as `relative`.
        max_abs_logit: largest |Δ logit| with every hook of every neuron-head live.
        relative: the same over the largest |logit| of the source.
        mean_kl: KL(source ‖ converted) in nats, the mean over tokens, hooks live.
        max_kl: its largest value over tokens.
        top1_agreement: fraction of tokens whose most likely next token is the same, hooks live.
        by_layer: a row for each point of the stream (`0_mid`: before the neurons of layer 0,
            `1_pre`: after them, …) with `max_abs` = largest |Δ| and `relative` = that over the
            largest |entry| of the source's stream there, hooks live.
        n_tokens: tokens compared.
        dtype: the dtype both models ran in.
        tolerance: the bound on rounding for that dtype (`attn_only_lens.tolerances`).
        activations: for bilinear gates, a row for each source layer: `bound`, certified largest
            error of the activation; `measured`, its largest error on this input; `largest`, the
            largest |pre-activation|; `range`, what the bound holds for (∞ for plain MLPs). Empty
            for exact gates.

    Example:
        >>> from attn_only_lens import convert, pretrained, verify
        >>> model = pretrained.modular_addition()
        >>> report = verify(model, convert(model), pretrained.modular_addition_tokens()[:101])
        >>> report.bitwise, report.ok
        (True, True)
        >>> list(report.by_layer["point"])
        ['0_pre', '0_mid', 'final_post']
    """

    bitwise: bool
    rounding: float
    max_abs_logit: float
    relative: float
    mean_kl: float
    max_kl: float
    top1_agreement: float
    by_layer: pd.DataFrame
    n_tokens: int
    dtype: torch.dtype
    tolerance: float
    activations: pd.DataFrame

    @property
    def ok(self) -> bool:
        """Whether the conversion is what it promises.

        With exact gates: bitwise without hooks, and within the tolerance with every hook live.
        With bilinear gates: to rounding the source with approximated activations, and each of
        those within its certified bound; what that makes of the logits is reported, not judged.
        """
        if self.activations.empty:
            return self.bitwise and self.relative <= self.tolerance
        within = (self.activations["measured"] <= self.activations["bound"] + _ROUNDING).all()
        return bool(within) and self.rounding <= self.tolerance

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        exact = self.activations.empty
        lines = [f"{'ok' if self.ok else 'DIFFERENT'}: {self.n_tokens} tokens in {name}"]
        if exact:
            equal = "bitwise equal" if self.bitwise else "NOT bitwise equal"
            lines.append(f"no hooks:   logits {equal}")
        else:
            lines.append(
                f"the source with approximated activations: logits within {self.rounding:.2g} of "
                f"the largest (bound {self.tolerance:.0e})"
            )
            lines.append("activations, bilinear against exact:")
            lines.append(_text(self.activations))
        bound = f"; bound {self.tolerance:.0e}" if exact else ""
        lines.append(
            f"all hooks:  max |Δ logit| {self.max_abs_logit:.3g} ({self.relative:.2g} of the "
            f"largest logit{bound}), KL mean {self.mean_kl:.2g} max "
            f"{self.max_kl:.2g} nats, same top token {self.top1_agreement:.2%}"
        )
        return "\n".join([*lines, _text(self.by_layer)])


@torch.no_grad()
def verify(
    source: HookedTransformer, converted: AttentionOnlyTransformer, tokens: Tokens | str
) -> Verification:
    """Run both models on the same input and compare them, without hooks and with every hook.

    Where the converted model has bilinear gates, each layer's activations are also held against
    their certified bound.

    Args:
        source: the model before conversion.
        converted: `convert(source)`, or a loaded copy of it.
        tokens: tokens [batch, pos], or a text where the models have a tokenizer.

    Returns:
        The comparison; `print` it, or ask `.ok`.

    Raises:
        UnsupportedModelError: the two cannot be compared: other shapes, dtypes, or kinds of model.
        UnsupportedCallError: the tokens are not integers [batch, pos] of the models' vocabulary,
            or too long for their context.

    Example:
        >>> from attn_only_lens import convert, pretrained, verify
        >>> model = pretrained.modular_addition()
        >>> verify(model, convert(model), pretrained.modular_addition_tokens()[:53]).top1_agreement
        1.0
    """
    reasons = _mismatches(source, converted)
    if reasons:
        raise UnsupportedModelError(reasons, "these models cannot be compared")
    tokens = checked_tokens(source, tokens)
    expected, silent = source(tokens), converted(tokens)
    n_layers = source.cfg.n_layers
    ends = [f"blocks.{layer}.hook_resid_pre" for layer in range(n_layers)]
    mids = [f"blocks.{layer}.hook_resid_mid" for layer in range(n_layers)]
    last = f"blocks.{n_layers - 1}.hook_resid_post"
    _, stream = source.run_with_cache(tokens, names_filter=[*ends, *mids, last])
    live, seen = converted.run_with_cache(tokens)

    rows = []
    for layer in range(n_layers):
        rows.append(
            _row(f"{layer}_pre", stream[ends[layer]], seen["resid_pre", heads_block(layer)])
        )
        if mids[layer] in stream.cache_dict:  # parallel blocks have no middle
            middle = seen["resid_pre", neurons_block(layer)]
            rows.append(_row(f"{layer}_mid", stream[mids[layer]], middle))
    end = seen["resid_post", neurons_block(n_layers - 1)]
    rows.append(_row("final_post", stream[last], end))

    exact = converted.cfg.gating.kind == "exact"
    approximated = expected if exact else _approximated(source, converted, tokens)
    outputs = [live] if exact else [silent, live]
    kl = _kl(expected, live)
    logits = _row("logits", expected, live)
    return Verification(
        bitwise=torch.equal(expected, silent),
        rounding=max(float(_row("logits", approximated, x)["relative"]) for x in outputs),
        max_abs_logit=float(logits["max_abs"]),
        relative=float(logits["relative"]),
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
        top1_agreement=(expected.argmax(-1) == live.argmax(-1)).double().mean().item(),
        by_layer=pd.DataFrame(rows),
        n_tokens=kl.numel(),
        dtype=expected.dtype,
        tolerance=LOGIT_TOLERANCE[expected.dtype],
        activations=_activations(converted, tokens, source.cfg.act_fn),
    )


def _mismatches(source: object, converted: object) -> list[str]:
    reasons = []
    if not isinstance(source, HookedTransformer) or isinstance(source, AttentionOnlyTransformer):
        reasons.append(
            f"source: got {type(source).__name__}; expected the model before conversion"
            f"{USE_INSTEAD}"
        )
    if not isinstance(converted, AttentionOnlyTransformer):
        reasons.append(
            f"converted: got {type(converted).__name__}; expected what attn_only_lens.convert or "
            "attn_only_lens.load returns"
        )
    if reasons:
        return reasons
    assert isinstance(source, HookedTransformer)
    assert isinstance(converted, AttentionOnlyTransformer)
    mine, theirs = source.cfg, converted.source_cfg
    sizes = ("n_layers", "d_model", "d_mlp", "d_vocab", "d_vocab_out", "gated_mlp")
    for name in (*sizes, "dtype", "device"):
        if getattr(mine, name) != getattr(theirs, name):
            reasons.append(
                f"{name}: got {getattr(mine, name)} in the source and {getattr(theirs, name)} in "
                "the converted model; expected the same"
            )
    return reasons


def _approximated(
    source: HookedTransformer, converted: AttentionOnlyTransformer, tokens: Tokens
) -> Tensor:
    """Logits of the source, each activation replaced by the approximation of its gate."""
    hooks: list[tuple[str | Callable[..., Any], Callable[..., Any]]] = []
    for layer in range(source.cfg.n_layers):
        gate = converted.blocks[neurons_block(layer)].attn.gate
        read: dict[str, Tensor] = {}

        def keep(x: Tensor, hook: HookPoint, read: dict[str, Tensor] = read) -> None:
            read[str(hook.name).rpartition(".")[2]] = x

        def replace(
            post: Tensor,
            hook: HookPoint,
            gate: Any = gate,
            read: dict[str, Tensor] = read,
            mlp: Any = source.blocks[layer].mlp,
        ) -> Tensor:
            q = read["hook_pre"]
            gated = source.cfg.gated_mlp
            out = gate.mixture(q) * (read["hook_pre_linear"] if gated else q)
            return (out + mlp.b_in if gated else out).to(post.dtype)

        name = f"blocks.{layer}.mlp.hook_"
        hooks += [(f"{name}pre", keep), (f"{name}post", replace)]
        if source.cfg.gated_mlp:
            hooks.append((f"{name}pre_linear", keep))
    logits: Tensor = source.run_with_hooks(tokens, fwd_hooks=hooks)
    return logits


def _activations(model: AttentionOnlyTransformer, tokens: Tokens, act_fn: str) -> pd.DataFrame:
    """Certified and measured error of the activation in each layer, for bilinear gates."""
    rows: list[dict[str, float]] = []

    def measure(attn: BilinearAttention, inputs: tuple[Tensor, ...]) -> None:
        gate = attn.gate
        assert isinstance(gate, BilinearGate | RangeGate)
        measured, largest = attn.activation_error(inputs[0], act_fn)
        limit = gate.range if isinstance(gate, RangeGate) else float("inf")
        errors = {"bound": gate.bound, "measured": measured}
        rows.append({"layer": len(rows), **errors, "largest": largest, "range": limit})

    attns = [b.attn for b in model.blocks if isinstance(b.attn, BilinearAttention)]
    with ExitStack() as stack:
        for attn in attns:
            stack.callback(attn.register_forward_pre_hook(measure).remove)
        if attns:
            model(tokens)
    return pd.DataFrame(rows)


def _text(table: pd.DataFrame) -> str:
    return table.to_string(index=False, float_format=lambda x: f"{x:.2e}")


def _row(point: str, expected: Tensor, got: Tensor) -> dict[str, str | float]:
    expected, got = expected.double(), got.double()
    max_abs = (got - expected).abs().max().item()
    return {"point": point, "max_abs": max_abs, "relative": max_abs / expected.abs().max().item()}


def _kl(expected: Tensor, got: Tensor) -> Tensor:
    log_p = expected.double().log_softmax(-1)
    log_q = got.double().log_softmax(-1)
    # Σ p (e^d - 1 - d), the same sum since Σ p e^d = 1: every term is positive, so that the tiny
    # differences of a good conversion do not drown in rounding.
    difference = log_q - log_p
    return (log_p.exp() * (difference.expm1() - difference)).sum(-1)
