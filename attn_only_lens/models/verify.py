"""Compare a converted or exposed model's logits and residual stream with the original's.

Both models run on the same input; the model with neuron-heads runs without hooks and with hooks on
all neuron-heads. For bilinear gates, the largest error of each layer's activations is also
measured, and compared with the certified bound.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.arguments import with_article
from attn_only_lens.axes import Tokens
from attn_only_lens.devices import normal_numbers, to_float64_device
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.tokens import checked_tokens, require_model
from attn_only_lens.errors import UnsupportedCallError, UnsupportedModelError
from attn_only_lens.gates.bilinear import BilinearGate
from attn_only_lens.gates.exact import GATES
from attn_only_lens.heads import has_neuron_heads, host_of, logit_tolerance
from attn_only_lens.heads.host import Host, later_write_reasons
from attn_only_lens.models.in_place import hidden
from attn_only_lens.models.in_place.hook_points import find_hook_points
from attn_only_lens.models.verification import Verification
from attn_only_lens.precision import full_precision
from attn_only_lens.tl import GatedMLP, HookedTransformer

_PROBLEM = "these models cannot be compared"
_DIFFERENT = "the logits with neuron-heads are not those of the model"
_N_RANDOM = 64  # the number of random tokens that check a model


def _approximated_logits(source: Any, gates: list[BilinearGate], tokens: Tensor) -> Tensor:
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
                    lambda heads, x, layer=layer: measure(layer, heads.mlp_projections(x[0])[0])
                )
            stack.callback(handle.remove)
        host.model(tokens)
    return rows


def tokens_to_check(model: Any, check: bool | str | Tokens) -> Tokens | None:
    """Return the input of a check: None for False, and random tokens for True."""
    if check is False:
        return None
    if check is not True:
        return checked_tokens(model, check)
    require_model(model)
    n_pos = min(_N_RANDOM, model.cfg.n_ctx)
    numbers = normal_numbers((1, n_pos)).mul(model.cfg.d_vocab).long().abs()
    return checked_tokens(model, numbers % max(model.cfg.d_vocab, 1))


def checked(source: Any, model: Any, tokens: Tokens) -> Verification:
    """Return the report on a new model with neuron-heads; raise an error if it is wrong."""
    report = verify(source, model, tokens)
    if not report.ok:
        raise UnsupportedModelError([str(report)], _DIFFERENT)
    return report


@one_thread_per_model
@full_precision()
@torch.no_grad()
def verify(source: Any, converted: Any, tokens: Tokens | str) -> Verification:
    """Compare two models on the same input.

    Args:
        source: the model before conversion; for a model exposed in place, also the model itself,
            whose neuron-heads are then removed while it runs as the source.
        converted: `convert(source)`, a loaded copy of it, or a model with exposed neuron-heads.
        tokens: tokens [batch, pos], or a string if the models have a tokenizer.

    Raises:
        UnsupportedModelError: the two models differ in shapes, dtypes or kind.
        UnsupportedCallError: the tokens are not integers [batch, pos] of the models' vocabulary,
            or too long for their context.
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
        approximated = expected
        if not exact:
            gates = [heads.bilinear_gate for heads in layers]
            approximated = _approximated_logits(source, gates, tokens)
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
        so = "they run only as heads, and cannot be compared with a model without heads"
        reasons += later_write_reasons(converted, so)
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
