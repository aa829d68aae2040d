"""Compare a model whose neurons are heads with its source on real input: logits, and the stream."""

from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.axes import Tokens
from attn_only_lens.errors import UnsupportedCallError, UnsupportedModelError
from attn_only_lens.heads import layout_of, logit_tolerance, neuron_heads
from attn_only_lens.heads.bilinear import BilinearHeads
from attn_only_lens.heads.blocks import heads_block, neurons_block
from attn_only_lens.in_place import InPlace, hidden
from attn_only_lens.inputs import checked_tokens
from attn_only_lens.numerics import full_precision, where_float64_is
from attn_only_lens.tl import HookedTransformer
from attn_only_lens.two_blocks import AttentionOnlyTransformer
from attn_only_lens.verify.approximated import activation_errors, approximated_logits
from attn_only_lens.verify.report import Verification

__all__ = ["verify"]

_SIZES = ("n_layers", "d_model", "d_mlp", "d_vocab", "d_vocab_out", "gated_mlp")


@full_precision()
@torch.no_grad()
def verify(
    source: HookedTransformer | TransformerBridge,
    converted: AttentionOnlyTransformer | HookedTransformer | TransformerBridge,
    tokens: Tokens | str,
) -> Verification:
    """Run both models on the same input and compare them, without hooks and with every hook.

    Where the converted model has bilinear gates, each layer's activations are also held against
    their certified bound.

    A model whose neuron-heads are exposed in place is its own source: give it for both. Then it is
    first run as it is without them, and has them back afterwards.

    Args:
        source: the model before conversion; or, of a model exposed in place, an equal one that is
            not, or the model itself.
        converted: `convert(source)`, a loaded copy of it, or a model with `expose_neuron_heads`.
        tokens: tokens [batch, pos], or a text where the models have a tokenizer.

    Returns:
        The comparison; `print` it, or ask `.ok`.

    Raises:
        UnsupportedModelError: the two cannot be compared: other shapes, dtypes, or kinds of model.
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
    reasons = _mismatches(source, converted)
    if reasons:
        raise UnsupportedModelError(reasons, "these models cannot be compared")
    tokens = checked_tokens(source, tokens)
    layers = neuron_heads(converted)
    exact = not isinstance(layers[0], BilinearHeads)
    points = _points(source, converted)
    with hidden(source):
        expected = source(tokens)
        _, stream = source.run_with_cache(tokens, names_filter=[hook for _, hook, _ in points])
        gates = [heads.gate for heads in layers]
        approximated = expected if exact else approximated_logits(source, gates, tokens)
    silent = converted(tokens)
    live, seen = converted.run_with_cache(tokens)
    assert isinstance(live, Tensor)  # and not the tuple of another return_type

    outputs = [live] if exact else [silent, live]
    kl = _kl(expected, live)
    logits = _row("logits", expected, live)
    act_fns = [h.act_fn if isinstance(h, InPlace) else source.cfg.act_fn for h in layers]
    return Verification(
        bitwise=torch.equal(expected, silent),
        rounding=_largest([float(_row("logits", approximated, x)["relative"]) for x in outputs]),
        max_abs_logit=float(logits["max_abs"]),
        relative=float(logits["relative"]),
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
        top1_agreement=(expected.argmax(-1) == live.argmax(-1)).cpu().double().mean().item(),
        by_layer=pd.DataFrame(
            [
                _row(point, stream[theirs], seen[mine])
                for point, theirs, mine in points
                if theirs in stream.cache_dict  # OpenAI GPT's bridge has a hook_resid_post, silent
            ]
        ),
        n_tokens=kl.numel(),
        dtype=expected.dtype,
        tolerance=logit_tolerance(layers, expected.dtype),
        activations=activation_errors(converted, act_fns, tokens),
    )


def _points(source: Any, converted: Any) -> list[tuple[str, str, str]]:
    """Points of the stream: what each is called, and its hooks in the two models."""
    points = []
    for layer in range(source.cfg.n_layers):
        pairs = ("pre", heads_block(layer)), ("mid", neurons_block(layer))
        for point, block in pairs:
            hook = f"blocks.{layer}.hook_resid_{point}"
            mine = hook if layout_of(converted) == "in place" else f"blocks.{block}.hook_resid_pre"
            if hook in source.hook_dict:  # parallel blocks have no middle
                points.append((f"{layer}_{point}", hook, mine))
    last = source.cfg.n_layers - 1
    end = last if layout_of(converted) == "in place" else neurons_block(last)
    post = "blocks.{}.hook_resid_post"
    return [*points, ("final_post", post.format(last), post.format(end))]


def _mismatches(source: Any, converted: Any) -> list[str]:
    """Why two models cannot be compared."""
    layout = layout_of(converted)
    if layout is None:
        reasons = [
            f"converted: got {type(converted).__name__}; expected what attn_only_lens.convert or "
            "attn_only_lens.load returns, or a model with attn_only_lens.expose_neuron_heads"
        ]
    elif source is converted and layout == "in place":
        return []
    else:
        reasons = []
    expected = TransformerBridge if isinstance(converted, TransformerBridge) else HookedTransformer
    if not isinstance(source, expected) or layout_of(source) is not None:
        reasons.insert(
            0,
            f"source: got {type(source).__name__}; expected the model before conversion, "
            f"a {expected.__name__}",
        )
    if reasons:
        return reasons
    mine = source.cfg
    try:
        theirs = converted.cfg if layout == "in place" else converted.source_cfg
    except UnsupportedCallError as error:
        return [str(error)]
    for name in (*_SIZES, "dtype", "device"):
        if getattr(mine, name, None) != getattr(theirs, name, None):
            reasons.append(
                f"{name}: got {getattr(mine, name, None)} in the source and "
                f"{getattr(theirs, name, None)} in the converted model; expected the same"
            )
    return reasons


def _row(point: str, expected: Tensor, got: Tensor) -> dict[str, str | float]:
    expected, got = (where_float64_is(each).double() for each in (expected, got))
    error = (got - expected).abs().max()
    relative = error / expected.abs().max() if error != 0 else error  # all may be zero
    return {"point": point, "max_abs": error.item(), "relative": relative.item()}


def _largest(errors: list[float]) -> float:
    """The largest; nan where any is, of which `max` would make what comes first."""
    return torch.tensor(errors, dtype=torch.float64, device="cpu").max().item()


def _kl(expected: Tensor, got: Tensor) -> Tensor:
    log_p, log_q = (where_float64_is(each).double().log_softmax(-1) for each in (expected, got))
    # Σ p (e^d - 1 - d), the same sum since Σ p e^d = 1: every term is positive, so that the tiny
    # differences of a good conversion do not drown in rounding.
    difference = log_q - log_p
    return (log_p.exp() * (difference.expm1() - difference)).sum(-1)
