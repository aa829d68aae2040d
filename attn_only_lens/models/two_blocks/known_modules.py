"""Check that all modules and options of a HookedTransformer can be converted exactly."""

from typing import Any

import torch
from torch import nn

from attn_only_lens.arguments import a_type
from attn_only_lens.gates import GeneralizedSiLU
from attn_only_lens.gates.exact import GATES
from attn_only_lens.heads.feature_mlp import FeatureMLP
from attn_only_lens.heads.host import exposed_reasons, stock_class
from attn_only_lens.models.norms import STOCK_NORMS
from attn_only_lens.tl import (
    MLP,
    USE_INSTEAD,
    Attention,
    GatedMLP,
    GroupedQueryAttention,
    HookedTransformer,
    TransformerBlock,
)

_NORM_TYPES = ("LN", "LNPre", "RMS", "RMSPre", None)


def reasons_against(
    model: object, *, needs_mlp: bool = True, silu: GeneralizedSiLU | None = None
) -> list[str]:
    """Return error messages if a model cannot be converted exactly, without checking hooks.

    `needs_mlp=False` allows models without MLPs. If `silu` is given, it must be the activation of
    every MLP.
    """
    if not isinstance(model, HookedTransformer):
        return [
            f"got {a_type(model, with_module=True)}; expected a "
            f"transformer_lens.HookedTransformer{USE_INSTEAD}"
        ]
    if reasons := exposed_reasons(model):
        return reasons
    cfg: Any = model.cfg
    if cfg.attn_only and needs_mlp:
        return ["it is already attention-only: it has no MLP to convert"]
    obstacles = {
        f"it is {a_type(model)}, a subclass whose forward pass may differ; load its "
        "weights into a HookedTransformer": (type(model) is not HookedTransformer),
        f"its act_fn is {cfg.act_fn!r}, which is not q times a function of q with values in "
        f"[0, 1]; expected one of {', '.join(sorted(GATES))}": (
            not cfg.attn_only and silu is None and cfg.act_fn not in GATES
        ),
        f"it is a mixture of {cfg.num_experts} experts: a router chooses the MLPs that run": (
            cfg.num_experts
        ),
        "its weights are quantized; load it in float32, bfloat16 or float16": (
            cfg.load_in_4bit or cfg.quantization_method is not None
        ),
        f"it is spread over {cfg.n_devices} devices; load it on one device (n_devices=1), convert "
        "it, then move it": cfg.n_devices > 1,
        f"its normalization_type is {cfg.normalization_type!r}; expected one of {_NORM_TYPES}": (
            cfg.normalization_type not in _NORM_TYPES
        ),
    }
    reasons = [reason for reason, applies in obstacles.items() if applies]
    reasons = reasons or structure_reasons(model)
    if not reasons and not cfg.attn_only:
        for layer, block in enumerate(model.blocks):
            if isinstance(block.mlp, FeatureMLP):
                continue
            why = _activation_reasons(block.mlp.act_fn, cfg.act_fn, silu)
            reasons += [f"layer {layer}: {reason}" for reason in why]
    return reasons


def structure_reasons(model: HookedTransformer) -> list[str]:
    """Return error messages for modules of unknown classes, without checking the activation."""
    reasons = module_reasons(model)
    for layer, block in enumerate([] if reasons else model.blocks):
        reasons += [f"layer {layer}: {reason}" for reason in _block_reasons(block, model.cfg)]
    return reasons


def module_reasons(model: HookedTransformer) -> list[str]:
    """Return error messages for replaced forward methods, inference tensors or a wrong n_layers."""
    reasons = []
    if len(model.blocks) != model.cfg.n_layers:
        reasons.append(
            f"it has {len(model.blocks)} blocks, but cfg.n_layers is {model.cfg.n_layers}; set "
            "cfg.n_layers"
        )
    replaced = [
        name or "the model"
        for name, module in model.named_modules()
        if "forward" in vars(module) or "__call__" in vars(module)
    ]
    if replaced:
        names = ", ".join(replaced[:3]) + (", …" if len(replaced) > 3 else "")
        reasons.append(f"forward was replaced on {names}, so what it computes is unknown")
    if any(parameter.is_inference() for parameter in model.parameters()):
        reasons.append("its weights are inference tensors; build it outside torch.inference_mode()")
    return reasons


def _block_reasons(block: Any, cfg: Any) -> list[str]:
    if type(block) is not TransformerBlock:
        return [f"its block is {a_type(block)}; expected a TransformerBlock"]
    reasons = []
    if type(block.attn) not in (Attention, GroupedQueryAttention):
        reasons.append(f"its attention is {a_type(block.attn)}, an unknown class")
    for name in ("ln1", "ln2", "ln1_post", "ln2_post"):
        norm = getattr(block, name, None)
        if norm is not None and type(norm) not in (*STOCK_NORMS, nn.Identity):
            reasons.append(f"its {name} is {a_type(norm)}, an unknown class")
    if cfg.attn_only or isinstance(block.mlp, FeatureMLP):
        return reasons
    mlp, known = block.mlp, GatedMLP if cfg.gated_mlp else MLP
    if stock_class(mlp) is not known:
        return [*reasons, f"its mlp is {a_type(mlp)}; expected a {known.__name__}"]
    into, out = (cfg.d_model, cfg.d_mlp), (cfg.d_mlp, cfg.d_model)
    shapes = {"W_in": into, "b_in": out[:1], "W_out": out, "b_out": into[:1]}
    if cfg.gated_mlp:
        shapes["W_gate"] = into
    for name, shape in shapes.items():
        weight = getattr(mlp, name)
        if tuple(weight.shape) != shape:
            reasons.append(f"its {name} has shape {tuple(weight.shape)}; expected {shape}")
        elif not weight.is_floating_point():
            reasons.append(f"its {name} is {weight.dtype}; expected a floating-point type")
    return reasons


def _activation_reasons(act_fn: Any, name: str, silu: GeneralizedSiLU | None) -> list[str]:
    """Return an error message if `act_fn` differs from the expected activation in float64."""
    gate = GATES[name] if silu is None else silu.gate
    q = torch.linspace(-12.0, 12.0, 193, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad():
            computed, expected = act_fn(q), gate.activation(q)
    except Exception as error:  # custom code may raise any exception
        return [
            f"its act_fn, {act_fn!r:.80}, raised an error for an input of {len(q)} numbers "
            f"({error}); expected {name}, elementwise"
        ]
    same_shape = computed.shape == q.shape
    if same_shape and torch.allclose(computed, expected, rtol=1e-12, atol=1e-14):
        return []
    worst = (computed - expected).abs().max().item() if same_shape else float("nan")
    if silu is not None:
        return [
            f"its act_fn is not {gate.name}, the gate that you passed: they differ by {worst:.2g}"
        ]
    return [
        f"its act_fn is not {name}, the name in cfg.act_fn: they differ by {worst:.2g}; if it "
        "is a_1 SiLU(a_2 x), pass gate=GeneralizedSiLU(a_1, a_2)"
    ]
