"""Grow a HookedTransformer, whose layers all have the same sizes and one d_head."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from attn_only_lens.arguments import a_type
from attn_only_lens.gates.exact import GATES
from attn_only_lens.growth.expansion.weights import Axis, Constants, Weights, tail
from attn_only_lens.growth.models.growable import Growable, Parameter, shared_parameter_reasons
from attn_only_lens.heads.host import exposed_reasons
from attn_only_lens.models.source_folder import COMPUTED, CONFIG, TOKENIZER, WEIGHTS, plain_config
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer
from attn_only_lens.models.two_blocks.known_modules import reasons_against
from attn_only_lens.storage import write_tensors
from attn_only_lens.tl import (
    HookedTransformer,
    HookedTransformerConfig,
    LayerNorm,
    LayerNormPre,
    RMSNorm,
    RMSNormPre,
    quiet,
)

# In these architectures, one query norm acts on all heads, but the configuration does not say so.
_ALL_HEADS_NORMED = (*POST_NORM_ARCHITECTURES, "OlmoeForCausalLM")
_BLOCK_NORMS = ("ln1", "ln2", "ln1_post", "ln2_post")
_CLASSES = {
    "LN": LayerNorm,
    "LNPre": LayerNormPre,
    "RMS": RMSNorm,
    "RMSPre": RMSNormPre,
    None: nn.Identity,
}


class HookedModel(Growable):
    """A HookedTransformer."""

    _instead = ", or convert(model) first (converted models allow this)"

    @staticmethod
    def is_kind(model: Any) -> bool:
        """Return True for a HookedTransformer that was not converted."""
        converted = isinstance(model, AttentionOnlyTransformer)
        return isinstance(model, HookedTransformer) and not converted

    def reasons_against(self) -> list[str]:
        """Return every reason why the model cannot be grown."""
        model = self.model
        if reasons := exposed_reasons(model):
            return reasons
        return reasons_against(model, needs_mlp=False) or configuration_reasons(model, _BLOCK_NORMS)

    def read(self) -> Weights:
        return Weights(self.tensors(), constants_of(self.model.cfg))

    def parameters(self) -> Mapping[str, Parameter]:
        return {
            # If several heads share a parameter, its name starts with an underscore.
            name: parameter_of(name.replace("attn._", "attn."), self.model.cfg)
            for name, _ in self.model.named_parameters()
        }

    def reasons_against_weights(self, weights: Weights) -> list[str]:
        """Return every reason why a HookedTransformer cannot have the given weights."""
        return super().reasons_against_weights(weights) or joint_norm_reasons(weights)

    def reasons_against_saving(self) -> list[str]:
        """Return an empty list, because every HookedTransformer can be saved."""
        return []

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder that `models/source_folder.py` can read."""
        model = self.model
        # The tokenizer is saved in the folder, so no name is needed to download it.
        config = plain_config(model.cfg) | {"tokenizer_name": None, "init_weights": False}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        state = model.state_dict()
        kept = {name: tensor for name, tensor in state.items() if not name.endswith(COMPUTED)}
        write_tensors(folder / WEIGHTS, kept)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder / TOKENIZER)

    def write(self, weights: Weights, source_of: Callable[[str], str]) -> Any:
        """Return a new HookedTransformer."""
        template = self.model
        config = copy.deepcopy(template.cfg.to_dict()) | config_fields(template.cfg, weights)
        # Building a model must not change the caller's random state or download a tokenizer.
        held_back = {"seed": None, "tokenizer_name": None, "init_weights": False}
        cfg = HookedTransformerConfig(**config | held_back)
        with quiet(), torch.device("meta"):
            model = HookedTransformer(cfg, move_to_device=False)
        vars(cfg).update({name: config[name] for name in held_back})
        built = {"training", "cfg", "mod_dict", "hook_dict"}
        for name, value in vars(template).items():
            if not name.startswith("_") and name not in built:
                setattr(model, name, value)
        frozen = self.frozen()
        for name, layout in self.__class__(model).parameters().items():
            tensor = layout.from_weights(weights.tensors[layout.name])
            is_trained = source_of(layout.name) not in frozen
            _set(model, name, nn.Parameter(tensor, requires_grad=is_trained))
        buffers = dict(template.named_buffers())
        for name in dict(model.named_buffers()):
            _set(model, name, buffers[source_of(name)].clone())
        for name, module in model.named_modules():
            source = source_of(f"{name}.training").removesuffix(".training")
            module.training = template.get_submodule(source).training
        return model


def parameter_of(name: str, cfg: Any) -> Parameter:
    """Return the layout of the TransformerLens parameter that stores a tensor of `Weights`."""
    axis = {"attn.q_norm.w": "head", "attn.k_norm.w": "kv_head"}.get(tail(name))
    if axis is None or constants_of(cfg).qk_norm != "all heads":
        return Parameter(name)
    size = (axis == "kv_head" and cfg.n_key_value_heads) or cfg.n_heads
    return Parameter(name, f"({axis} width) -> {axis} width", ((axis, size),))


def _set(model: nn.Module, name: str, value: Any) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)


def configuration_reasons(model: Any, block_norms: Sequence[str]) -> list[str]:
    """Return every difference between a model's modules and its configuration."""
    cfg, constants = model.cfg, constants_of(model.cfg)
    reasons = shared_parameter_reasons(model.named_parameters(remove_duplicate=False))
    norms = [f"blocks.{layer}.{norm}" for layer in range(cfg.n_layers) for norm in block_norms]
    expected = {**dict.fromkeys(norms, constants.norm), "ln_final": constants.final_norm}
    for name, module in model.named_modules():
        if name in expected and type(module) is not _CLASSES[expected[name]]:
            reasons.append(f"{name} is {a_type(module)}; the configuration says {expected[name]}")
        if getattr(module, "eps", cfg.eps) != cfg.eps:
            reasons.append(f"{name}.eps is {module.eps}; the configuration says {cfg.eps}")
        if (layer := getattr(module, "layer_id", None)) is not None:
            scale = module.cfg.attn_scale if cfg.use_attn_scale else 1.0
            scale *= layer + 1 if cfg.scale_attn_by_inverse_layer_idx else 1
            if module.attn_scale != scale:
                reasons.append(
                    f"{name}.attn_scale is {module.attn_scale}; the configuration says {scale}"
                )
    return reasons


def joint_norm_reasons(weights: Weights) -> list[str]:
    """Return an error message if a norm over all heads' queries would not have width d_model."""
    if weights.constants.qk_norm != "all heads":
        return []
    sizes, d_model = weights.sizes, weights.sizes[Axis("d_model")]
    layers = range(weights.constants.n_layers)
    widths = {sizes[Axis("head", layer)] * sizes[Axis("d_query", layer)] for layer in layers}
    return [
        f"the norm over the queries of all heads has width d_model ({d_model}) in TransformerLens, "
        f"but the queries would have width {width}; grow heads, d_head and d_model together"
        for width in sorted(widths - {d_model})
    ]


def constants_of(cfg: Any) -> Constants:
    """Return the constants of a model from TransformerLens' configuration."""
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


def config_fields(cfg: Any, weights: Weights) -> dict[str, Any]:
    """Return those fields of TransformerLens' configuration that describe the given weights."""
    constants, sizes = weights.constants, weights.sizes
    fields: dict[str, Any] = {
        "n_layers": constants.n_layers,
        "d_model": sizes[Axis("d_model")],
        "n_heads": sizes[Axis("head", 0)],
        "d_head": sizes[Axis("d_query", 0)],
        "n_key_value_heads": sizes[Axis("kv_head", 0)] if constants.grouped else None,
        "eps": constants.eps,
    }
    if not cfg.attn_only:
        fields["d_mlp"] = sizes[Axis("d_mlp", 0)]
    if constants.scale is None:
        fields["attn_scale"] = -1.0  # TransformerLens reads -1 as √d_head
    if constants.attn_types is not None:
        fields["attn_types"] = list(constants.attn_types)
    return fields
