"""Compare a converted or exposed model's logits and residual stream with the original's."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.arguments import with_article
from attn_only_lens.axes import Tokens
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.tokens import checked_tokens
from attn_only_lens.errors import UnsupportedCallError, UnsupportedModelError
from attn_only_lens.gates import GATES
from attn_only_lens.gates.gating import AnyGate
from attn_only_lens.heads import has_neuron_heads, host_of, logit_tolerance
from attn_only_lens.heads.host import Host
from attn_only_lens.models.in_place import hidden
from attn_only_lens.models.in_place.mlp_hooks import find_hook_points
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer
from attn_only_lens.precision import full_precision
from attn_only_lens.tl import GatedMLP, HookedTransformer

_PROBLEM = "these models cannot be compared"
_ROUNDING = 1e-14  # a tolerance on top of an activation's certified error bound


@dataclass(frozen=True)
class Verification:
    """The differences that `verify` measured between a converted model and its source.

    The converted model is run with hooks on all hook points of its neurons' heads, except that
    `bitwise` is measured without hooks and, for bilinear gates, `rounding` with and without hooks.

    Attributes:
        bitwise: True if the logits without hooks equal the logits of the source bit for bit.
        rounding: for bilinear gates, the largest |Δ logit| if the source is run with the same
            approximated activations, divided by that run's largest |logit|; for exact gates,
            `relative`.
        max_abs_logit: the largest |Δ logit| between the converted model and the source.
        relative: `max_abs_logit` divided by the largest |logit| of the source.
        mean_kl: KL(source ‖ converted) in nats, the mean over tokens.
        max_kl: the largest KL(source ‖ converted) at any token.
        top1_agreement: the fraction of tokens at which both models predict the same next token.
        by_layer: a frame with one row for each point of the stream (`0_mid`: before the neurons of
            layer 0, `1_pre`: after them, …). `max_abs` is the largest |Δ|; `relative` is `max_abs`
            divided by the largest |entry| of the original's stream at that point.
        n_tokens: the number of tokens compared.
        dtype: the dtype of both models.
        tolerance: the bound on `rounding` for that dtype (`attn_only_lens.tolerances`); for
            bilinear gates of gated MLPs, it is multiplied by the gates' amplification of rounding
            errors.
        activations: for bilinear gates, a frame with one row for each original layer: `bound`, the
            certified largest error of the activation; `measured`, its largest error on this input;
            `largest`, the largest |pre-activation|; `range`, the largest |pre-activation| for which
            the bound holds (∞ for plain MLPs). For exact gates, the frame is empty.

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
        """True if all tested differences are within their bounds.

        With exact gates, the logits must equal the original's: bitwise without hooks, and within
        the tolerance with hooks on all neuron-heads. With bilinear gates, the logits must equal, up
        to rounding, those of the source with approximated activations, and the error of each
        activation must be within the certified bound. The effect of the approximation on the logits
        is reported, but has no bound.
        """
        if self.activations.empty:
            return self.bitwise and self.relative <= self.tolerance
        within = (self.activations["measured"] <= self.activations["bound"] + _ROUNDING).all()
        return bool(within) and self.rounding <= self.tolerance

    def __str__(self) -> str:
        name, exact = str(self.dtype).removeprefix("torch."), self.activations.empty
        lines = [f"{'ok' if self.ok else 'DIFFERENT'}: {self.n_tokens} tokens in {name}"]
        if exact:
            lines.append(f"no hooks:   logits {'' if self.bitwise else 'NOT '}bitwise equal")
        else:
            lines += [
                f"the source with approximated activations: logits within {self.rounding:.2g} of "
                f"the largest (bound {self.tolerance:.0e})",
                "activations, bilinear against exact:",
                _text(self.activations),
            ]
        bound = f"; bound {self.tolerance:.0e}" if exact else ""
        lines.append(
            f"all hooks:  max |Δ logit| {self.max_abs_logit:.3g} ({self.relative:.2g} of the "
            f"largest logit{bound}), KL mean {self.mean_kl:.2g} max "
            f"{self.max_kl:.2g} nats, same top token {self.top1_agreement:.2%}"
        )
        return "\n".join([*lines, _text(self.by_layer)])


def _text(table: pd.DataFrame) -> str:
    return table.to_string(index=False, float_format=lambda x: f"{x:.2e}")


def _approximated_logits(source: Any, gates: list[AnyGate], tokens: Tensor) -> Tensor:
    """Return the original's logits, computed with bilinear gates as activation functions."""
    with ExitStack() as stack:
        for block, gate in zip(source.blocks, gates, strict=True):
            points, read = find_hook_points(block.mlp), dict[str, Tensor]()
            hooks = {points.pre: _keep(read, "q"), points.post: _replace(read, gate, block.mlp)}
            if points.pre_linear is not None:
                hooks[points.pre_linear] = _keep(read, "u")
            for point, hook in hooks.items():
                stack.callback(point.register_forward_hook(hook).remove)
        return source(tokens)


def _keep(read: dict[str, Tensor], name: str) -> Callable[..., None]:
    return lambda module, inputs, x: read.update({name: x})


def _replace(read: dict[str, Tensor], gate: Any, mlp: Any) -> Callable[..., Tensor]:
    def hook(module: Any, inputs: Any, post: Tensor) -> Tensor:
        out = gate.mixture(read["q"]) * read.get("u", read["q"])
        return (out + mlp.b_in if isinstance(mlp, GatedMLP) else out).to(post.dtype)

    return hook


def _activation_errors(host: Host, act_fn: str, tokens: Tensor) -> list[dict[str, float]]:
    """Measure the error of each layer's bilinear activation against the exact activation."""
    layers = host.neurons
    act_fns = [gate.get("act_fn", act_fn) for gate in host.gates()]
    rows: list[dict[str, float]] = [{} for _ in layers]

    def measure(layer: int, q: Tensor) -> None:
        q, gate = to_float64_device(q).double(), layers[layer].bilinear_gate
        error = gate.activation(q) - GATES[act_fns[layer]].activation(q)
        rows[layer] = {
            "layer": layer,
            "bound": gate.bound,
            "measured": error.abs().max().item(),
            "largest": q.abs().max().item(),
            "range": gate.limit,
        }

    with ExitStack() as stack:
        for layer, heads in enumerate(layers):
            if host.in_place:
                handle = heads.mlp_points.pre.register_forward_hook(
                    lambda _, x, q, layer=layer: measure(layer, q)
                )
            else:
                handle = heads.register_forward_pre_hook(
                    lambda heads, x, layer=layer: measure(layer, heads.projections(x[0])[0])
                )
            stack.callback(handle.remove)
        host.model(tokens)
    return rows


@one_thread_per_model
@full_precision()
@torch.no_grad()
def verify(
    source: HookedTransformer | TransformerBridge,
    converted: AttentionOnlyTransformer | HookedTransformer | TransformerBridge,
    tokens: Tokens | str,
) -> Verification:
    """Compare both models on the same input, without hooks and with hooks on all neuron-heads.

    For bilinear gates, the largest error of each layer's activations is also measured, and compared
    with the certified bound.

    A model with neurons exposed in place is its own source, so pass it twice. The neuron-heads are
    removed while the model runs as the source.

    Args:
        source: the model before conversion; for a model exposed in place, also the model itself.
        converted: `convert(source)`, a loaded copy of it, or a model with `expose_neuron_heads`.
        tokens: tokens [batch, pos], or a string if the models have a tokenizer.

    Returns:
        A printable report of the differences; `.ok` is True if all are within their bounds.

    Raises:
        UnsupportedModelError: the two models differ in shapes, dtypes or kind.
        UnsupportedCallError: the tokens are not integers [batch, pos] of the models' vocabulary,
            or too long for their context.

    Example:
        >>> from attn_only_lens import convert, expose_neuron_heads, pretrained, verify
        >>> model, tokens = pretrained.modular_addition(), pretrained.modular_addition_tokens()[:53]
        >>> verify(model, convert(model), tokens).top1_agreement
        1.0
        >>> with expose_neuron_heads(model):
        ...     verify(model, model, tokens).ok
        True
    """
    UnsupportedModelError.raise_if(_mismatches(source, converted), _PROBLEM)
    tokens = checked_tokens(source, tokens)
    host = host_of(converted)
    layers = host.neurons
    exact = host.gates()[0]["kind"] == "exact"
    points = _points(source, converted)
    with hidden(source):
        expected = source(tokens)
        _, stream = source.run_with_cache(tokens, names_filter=[hook for _, hook, _ in points])
        gates = [heads.gate for heads in layers]
        approximated = expected if exact else _approximated_logits(source, gates, tokens)
    silent = converted(tokens)
    live, cache = converted.run_with_cache(tokens)
    assert isinstance(live, Tensor)  # the default return_type gives logits, not a tuple

    outputs = [live] if exact else [silent, live]
    kl = _kl(expected, live)
    logits = _row("logits", expected, live)
    by_layer = [
        _row(point, stream[source_hook], cache[hook])
        for point, source_hook, hook in points
        if source_hook in stream.cache_dict  # the last hook never fires in OpenAI GPT's bridge
    ]
    activations = [] if exact else _activation_errors(host, source.cfg.act_fn, tokens)
    return Verification(
        bitwise=torch.equal(expected, silent),
        rounding=float(np.max([_row("", approximated, x)["relative"] for x in outputs])),
        max_abs_logit=float(logits["max_abs"]),
        relative=float(logits["relative"]),
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
        top1_agreement=(expected.argmax(-1) == live.argmax(-1)).cpu().double().mean().item(),
        by_layer=pd.DataFrame(by_layer),
        n_tokens=kl.numel(),
        dtype=expected.dtype,
        tolerance=logit_tolerance(layers, expected.dtype),
        activations=pd.DataFrame(activations),
    )


def _points(source: Any, converted: Any) -> list[tuple[str, str, str]]:
    """Return each point of the residual stream: its label, and its hook names in both models."""
    points, host = [], host_of(converted)
    for layer in range(source.cfg.n_layers):
        for point in ("pre", "mid"):
            hook = f"blocks.{layer}.hook_resid_{point}"
            if hook in source.hook_dict:  # "mid" is missing if attention and MLP run in parallel
                points.append((f"{layer}_{point}", hook, host.stream_hook(layer, point)))
    last = source.cfg.n_layers - 1
    end = f"blocks.{last}.hook_resid_post", host.stream_hook(last, "post")
    return [*points, ("final_post", *end)]


def _mismatches(source: Any, converted: Any) -> list[str]:
    """Return error messages if `verify` cannot compare the two models."""
    in_place = has_neuron_heads(converted) and host_of(converted).in_place
    if not has_neuron_heads(converted):
        reasons = [
            f"converted: got {type(converted).__name__}; expected a model from "
            "attn_only_lens.convert or load, or one exposed by attn_only_lens.expose_neuron_heads"
        ]
    else:
        reasons = host_of(converted).reasons()
        if source is converted and in_place:
            return reasons
    expected = TransformerBridge if isinstance(converted, TransformerBridge) else HookedTransformer
    if not isinstance(source, expected) or has_neuron_heads(source):
        name = type(source).__name__
        wanted = f"expected the model before conversion, {with_article(expected.__name__)}"
        reasons = [f"source: got {name}; {wanted}", *reasons]
    if reasons:
        return reasons
    try:
        converted_cfg = converted.cfg if in_place else converted.source_cfg
    except UnsupportedCallError as error:
        return [str(error)]
    sizes = ("n_layers", "d_model", "d_mlp", "d_vocab", "d_vocab_out", "gated_mlp")
    for name in (*sizes, "dtype", "device"):
        before, after = (getattr(cfg, name, None) for cfg in (source.cfg, converted_cfg))
        if before != after:
            values = f"got {before} in the source and {after} in the converted model"
            reasons.append(f"{name}: {values}; expected the same")
    return reasons


def _row(point: str, expected: Tensor, computed: Tensor) -> dict[str, str | float]:
    expected, computed = (to_float64_device(x).double() for x in (expected, computed))
    error = (computed - expected).abs().max()
    relative = error / expected.abs().max() if error != 0 else error  # `expected` may be zero
    return {"point": point, "max_abs": error.item(), "relative": relative.item()}


def _kl(expected: Tensor, computed: Tensor) -> Tensor:
    log_p, log_q = (to_float64_device(x).double().log_softmax(-1) for x in (expected, computed))
    # KL = Σ p (e^d - 1 - d) with d = log q - log p, because Σ p e^d = 1. No term is negative, so
    # rounding does not hide tiny differences.
    difference = log_q - log_p
    return (log_p.exp() * (difference.expm1() - difference)).sum(-1)
