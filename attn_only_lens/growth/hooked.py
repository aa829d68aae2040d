"""A HookedTransformer as weights, and back.

All layers of one have the same sizes, and queries, keys and values the same width.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from attn_only_lens.expansion import Axis, Constants, Weights
from attn_only_lens.gates import GATES
from attn_only_lens.growth.growable import Parameter, Rim
from attn_only_lens.models.in_place import exposed_heads
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer
from attn_only_lens.models.two_blocks.known_modules import reasons_against
from attn_only_lens.runs.attached_hooks import hook_reasons
from attn_only_lens.tl import (
    HookedTransformer,
    HookedTransformerConfig,
    LayerNorm,
    LayerNormPre,
    RMSNorm,
    RMSNormPre,
    quiet,
)

__all__ = [
    "HOOKED",
    "constant_reasons",
    "constants_of",
    "norm_reasons",
    "reasons_against_unequal",
    "settled",
    "shared_reasons",
]

# What TransformerLens reads off the architecture's name, rather than off a flag.
_ALL_HEADS_NORMED = (*POST_NORM_ARCHITECTURES, "OlmoeForCausalLM")
_BLOCK_NORMS = ("ln1", "ln2", "ln1_post", "ln2_post")
_CLASSES = {
    "LN": LayerNorm,
    "LNPre": LayerNormPre,
    "RMS": RMSNorm,
    "RMSPre": RMSNormPre,
    None: nn.Identity,
}
_PART = {"head": "n_heads", "d_query": "d_head", "d_mlp": "d_mlp", "kv_head": "n_key_value_heads"}


def _takes(model: Any) -> bool:
    return isinstance(model, HookedTransformer) and not isinstance(model, AttentionOnlyTransformer)


def _reasons_against(model: Any) -> list[str]:
    if exposed_heads(model):
        return ["its neurons are exposed as heads in place; first `exposed.undo()`"]
    names = [f"blocks.{at}.{norm}" for at in range(model.cfg.n_layers) for norm in _BLOCK_NORMS]
    return reasons_against(model, needs_mlp=False) or [
        *shared_reasons(model),
        *norm_reasons(model, names),
        *constant_reasons(model),
    ]


def shared_reasons(model: Any) -> list[str]:
    """Which parameters of a model are one, and may grow in two ways."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    pairs = [(first.setdefault(id(parameter), name), name) for name, parameter in named]
    return [
        f"its {one} and {other} are one parameter, which may grow in two ways: give each its own"
        for one, other in pairs
        if one != other
    ]


def norm_reasons(model: Any, names: Sequence[str]) -> list[str]:
    """Where a norm is another than the configuration, from which the grown model is built, says.

    Args:
        model: of TransformerLens.
        names: of the norms in its blocks; those that it has not are left out.
    """
    constants = constants_of(model.cfg)
    expected = {**dict.fromkeys(names, constants.norm), "ln_final": constants.final_norm}
    modules = dict(model.named_modules())
    return [
        f"its {name} is a {type(modules[name]).__qualname__}; its configuration says {norm}"
        for name, norm in expected.items()
        if name in modules and type(modules[name]) is not _CLASSES[norm]
    ]


def constant_reasons(model: Any) -> list[str]:
    """Where a module computes with another constant than the configuration that is copied."""
    cfg = model.cfg
    reasons = []
    for name, module in model.named_modules():
        if getattr(module, "eps", cfg.eps) != cfg.eps:
            reasons.append(f"its {name}.eps is {module.eps}; its configuration says {cfg.eps}")
        if (layer := getattr(module, "layer_id", None)) is not None:
            scale = module.cfg.attn_scale if cfg.use_attn_scale else 1.0
            scale *= layer + 1 if cfg.scale_attn_by_inverse_layer_idx else 1
            if module.attn_scale != scale:
                reasons.append(
                    f"its {name}.attn_scale is {module.attn_scale}; its configuration says {scale}"
                )
    return reasons


def constants_of(cfg: Any) -> Constants:
    """What a configuration of TransformerLens says that the function depends on."""
    final = cfg.normalization_type
    if cfg.final_rms and final is not None:
        final = final.replace("LN", "RMS")
    joint = cfg.original_architecture in _ALL_HEADS_NORMED
    after = cfg.original_architecture in POST_NORM_ARCHITECTURES
    both = cfg.use_normalization_before_and_after
    scale = cfg.attn_scale if cfg.use_attn_scale else 1.0
    return Constants(
        n_layers=cfg.n_layers,
        norm=cfg.normalization_type,
        final_norm=final,
        norm_place="both" if both else "after" if after else "before",
        eps=cfg.eps,
        scale=None if scale == cfg.d_head**0.5 and cfg.use_attn_scale else scale,
        scale_by_layer=cfg.scale_attn_by_inverse_layer_idx,
        positions=cfg.positional_embedding_type,
        qk_norm="by head" if cfg.use_qk_norm else "all heads" if joint else None,
        clip_qkv=cfg.clip_qkv,
        attn_types=tuple(cfg.attn_types) if cfg.use_local_attn else None,
        pointwise=None if cfg.attn_only else cfg.act_fn in GATES,
        grouped=cfg.n_key_value_heads is not None,
        grouped_by_head=cfg.ungroup_grouped_query_attention,
        init=(cfg.init_mode, cfg.initializer_range),
    )


def _canonical(name: str) -> str:
    return name.replace("attn._", "attn.")


def _read(model: Any) -> Weights:
    tensors = {_canonical(name): p.detach() for name, p in model.named_parameters()}
    return Weights(tensors, constants_of(model.cfg))


def _parameters(model: Any) -> Mapping[str, Parameter]:
    return {name: Parameter(_canonical(name)) for name, _ in model.named_parameters()}


def reasons_against_unequal(weights: Weights) -> list[str]:
    """Why these weights are no HookedTransformer's, nor a native bridge's."""
    sizes: dict[str, set[int]] = {}
    for axis, size in weights.sizes.items():
        if axis.layer is not None:
            sizes.setdefault(axis.label, set()).add(size)
    reasons = [
        f"its layers would differ in {_PART.get(label, label)} ({sorted(found)}), which a "
        "HookedTransformer's cannot; convert(model) first: converted models may differ by layer"
        for label, found in sizes.items()
        if len(found) > 1
    ]
    if not reasons and sizes["d_query"] != sizes["d_value"]:
        reasons.append(
            f"queries and keys would have width {sizes['d_query']}, values {sizes['d_value']}; a "
            "HookedTransformer has one d_head for both: widen both"
        )
    return reasons


def settled(cfg: Any, weights: Weights) -> dict[str, Any]:
    """The fields of a configuration of TransformerLens' that these weights settle."""
    constants, sizes = weights.constants, weights.sizes
    found: dict[str, Any] = {
        "n_layers": constants.n_layers,
        "d_model": sizes[Axis("d_model")],
        "n_heads": sizes[Axis("head", 0)],
        "d_head": sizes[Axis("d_query", 0)],
        "n_key_value_heads": sizes[Axis("kv_head", 0)] if constants.grouped else None,
        "eps": constants.eps,
    }
    if not cfg.attn_only:
        found["d_mlp"] = sizes[Axis("d_mlp", 0)]
    if constants.scale is None:
        found["attn_scale"] = -1.0  # TransformerLens' word for √d_head
    if constants.attn_types is not None:
        found["attn_types"] = list(constants.attn_types)
    return found


def _write(template: Any, weights: Weights, source_of: Callable[[str], str]) -> Any:
    config = copy.deepcopy(template.cfg.to_dict()) | settled(template.cfg, weights)
    # Building must not touch the caller's random state, nor ask a hub for a tokenizer.
    held_back = {"seed": None, "tokenizer_name": None, "init_weights": False}
    cfg = HookedTransformerConfig(**config | held_back)
    with quiet(), torch.device("meta"):
        model = HookedTransformer(cfg, move_to_device=False)
    vars(cfg).update({name: config[name] for name in held_back})
    plain = {"training", "cfg", "mod_dict", "hook_dict"}
    for name, value in vars(template).items():
        if not name.startswith("_") and name not in plain:
            setattr(model, name, value)
    theirs = dict(template.named_parameters())
    private = {_canonical(name): name for name in theirs}
    for name in dict(model.named_parameters()):
        new, old = weights.tensors[_canonical(name)], private[source_of(_canonical(name))]
        flag = theirs[old].requires_grad
        _set(model, name, nn.Parameter(new, requires_grad=flag))
    buffers = dict(template.named_buffers())
    for name in dict(model.named_buffers()):
        _set(model, name, buffers[source_of(name)].clone())
    for name, module in model.named_modules():
        like = source_of(f"{name}.training").removesuffix(".training")
        module.training = template.get_submodule(like).training
    return model


def _set(model: nn.Module, name: str, value: Any) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)


HOOKED = Rim(
    takes=_takes,
    reasons_against=_reasons_against,
    read=_read,
    parameters=_parameters,
    reasons_against_weights=reasons_against_unequal,
    write=_write,
    attached=hook_reasons,
)
