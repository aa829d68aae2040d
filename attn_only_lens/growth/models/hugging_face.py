"""Grow TransformerBridges around Hugging Face transformers models.

A table lists what transformers' configurations do not say about a model family, such as the kinds
and places of norms. The transformers package builds the grown model from a larger configuration of
the same class. The tensors of `Weights` become this model's parameters, and a new bridge wraps it.

Transformers rejects the configurations of some grown models (`transformers_module.py`). Such a
model computes the same function as the original, but cannot be saved in transformers' format.
"""

import copy
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import dispatch_model
from einops import rearrange
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import PretrainedConfig, PreTrainedModel

from attn_only_lens.devices import keep_random_state, to_float64_device
from attn_only_lens.engine.cached_generation import watch_cache
from attn_only_lens.engine.model_checks import modules_of
from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.weights import (
    Axis,
    Constants,
    Norm,
    NormPlace,
    Weights,
    block_name,
    in_layer,
)
from attn_only_lens.growth.models.bridge import OF_BLOCK, WRAPPED, BridgeModel, differing_modules
from attn_only_lens.growth.models.growable import PROBLEM
from attn_only_lens.models.in_place import copy_model
from attn_only_lens.models.source_folder import original_tokenizer
from attn_only_lens.models.transformers_module import (
    BY_LAYER,
    build_module,
    has_head_dim,
    intermediate_size,
    weight_reasons,
)


@dataclass(frozen=True)
class Family:
    """Facts about a model family that transformers' configuration does not contain.

    `eps` is the name of the configuration's field for ε. If `partial_rotary` is False, the model
    ignores `partial_rotary_factor`, and rotary positions rotate whole heads.
    """

    norm: Norm = "RMS"
    eps: str = "rms_norm_eps"
    norm_place: NormPlace = "before"
    gain_offset: float = 0.0
    embed_scaled: bool = False
    qk_norm: Literal["by head", "all heads"] | None = None
    positions: str = "rotary"
    partial_rotary: bool = False


FAMILIES = {
    "gpt2": Family("LN", "layer_norm_epsilon", positions="standard"),
    "gpt_neox": Family("LN", "layer_norm_eps", partial_rotary=True),
    "llama": Family(),
    "granite": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(qk_norm="by head"),
    "gemma": Family(gain_offset=1.0, embed_scaled=True),
    "gemma2": Family(gain_offset=1.0, embed_scaled=True, norm_place="both"),
    "gemma3_text": Family(gain_offset=1.0, embed_scaled=True, norm_place="both", qk_norm="by head"),
    "phi": Family("LN", "layer_norm_eps", partial_rotary=True),
    "phi3": Family(partial_rotary=True),
    "olmo2": Family(norm_place="after", qk_norm="all heads"),
    "bert": Family("LN", "layer_norm_eps", norm_place="stream", positions="standard"),
    "roberta": Family("LN", "layer_norm_eps", norm_place="stream", positions="standard"),
}
"""The families that can grow, by `model_type`."""
# Rotary types whose frequencies depend only on a coordinate pair's wavelength or index.
_ROTARY = ("default", "linear", "llama3", "yarn", "longrope")
_RECOMPUTED = ("dynamic", "longrope")  # the model recomputes these for each input length
# The parts of each joint matrix, in order.
_FUSED = {
    "c_attn": ("attn.q", "attn.k", "attn.v"),
    "query_key_value": ("attn.q", "attn.k", "attn.v"),
    "qkv_proj": ("attn.q", "attn.k", "attn.v"),
    "gate_up_proj": ("mlp.gate", "mlp.in"),
}
_POS = 5  # the number of tokens per prompt in `trial`
_DIFFERENCE = 1e-3  # the tolerance relative to the largest logit (rotary angles are in float32)
_ROUNDED = 5e-2  # the tolerance if weights were rounded to half precision


class HuggingFaceBridge(BridgeModel):
    """A TransformerBridge around a causal or masked language model of a known family."""

    may_differ_by_layer = frozenset({"d_mlp"})

    @staticmethod
    def is_kind(model: Any) -> bool:
        """Return True for a bridge around a model from one of the `FAMILIES`."""
        wrapped = getattr(model, "original_model", None)
        kind = getattr(getattr(wrapped, "config", None), "model_type", None)
        return (
            isinstance(model, TransformerBridge)
            and isinstance(wrapped, PreTrainedModel)
            and kind in FAMILIES
            and (wrapped.can_generate() or type(wrapped).__name__.endswith("ForMaskedLM"))
        )

    @property
    def config(self) -> PretrainedConfig:
        """The configuration of the wrapped model."""
        return self.model.original_model.config

    @property
    def family(self) -> Family:
        """Facts about the model's family that transformers' configuration does not contain."""
        return FAMILIES[self.config.model_type]

    def reasons_against(self) -> list[str]:
        """Return every reason why the model cannot be grown."""
        quantised = weight_reasons(self.model.original_model)
        if reasons := quantised or super().reasons_against():
            return reasons
        config = self.config
        if getattr(config, "scale_attn_weights", True) is False:
            reasons.append("config.scale_attn_weights is False, which the bridge ignores")
        if getattr(config, "add_cross_attention", False):
            reasons.append("the model attends to an encoder, whose width would have to grow")
        reasons += differing_modules(self.model.original_model, self._usual)
        if reasons:
            return reasons
        named = self._named_by_transformers()
        unknown = [name for name in named if not self._is_known(name)]
        known = set(map(id, [*named.values(), *self.named_parameters().values()]))
        unknown += [name for name, item in self.model.named_parameters() if id(item) not in known]
        if unknown:
            reasons.append(f"this model family has no parameters named {', '.join(unknown[:5])}")
        fresh = dict(self._usual.named_buffers())
        if any(rope.get("rope_type") in _RECOMPUTED for rope in _ropes(config)):
            fresh = {name: x for name, x in fresh.items() if "original_inv_freq" in name}
        buffers = self.model.original_model.named_buffers()
        return reasons + [
            f"{name} differs from its value in a new model with the same configuration"
            for name, buffer in ((name.replace(WRAPPED, ""), buffer) for name, buffer in buffers)
            if name in fresh and not torch.equal(buffer.cpu(), fresh[name].to(buffer.dtype))
        ]

    def read(self) -> Weights:
        """Return the model's weights."""
        config, family = self.config, self.family
        scalar = getattr(config, "query_pre_attn_scalar", None)
        factor = getattr(config, "attention_multiplier", None)  # Granite
        kinds = getattr(config, "layer_types", None)
        whole = family.positions == "rotary" and not family.partial_rotary
        constants = Constants(
            n_layers=config.num_hidden_layers,
            norm=family.norm,
            final_norm=family.norm,
            norm_place=family.norm_place,
            gain_offset=family.gain_offset,
            eps=getattr(config, family.eps),
            embed_scaled=family.embed_scaled,
            scale=1 / factor if factor else math.sqrt(scalar) if scalar else None,
            scale_by_layer=getattr(config, "scale_attn_by_inverse_layer_idx", False),
            positions=family.positions,
            rotary="whole head" if whole else "fixed",
            qk_norm=family.qk_norm,
            attn_types=None if kinds is None else tuple(kinds),
            tied=self.is_tied,
            grouped=hasattr(config, "num_key_value_heads"),
            init=("gpt2", float(config.initializer_range)),
        )
        return Weights(self.tensors(), constants)

    def reasons_against_weights(self, weights: Weights) -> list[str]:
        """Return every reason why a bridge of this family cannot have the given weights."""
        reasons = super().reasons_against_weights(weights)
        kinds = {str(rope.get("rope_type", "default")) for rope in _ropes(self.config)}
        kinds -= set(_ROTARY)
        sizes, layers = weights.sizes, range(weights.constants.n_layers)
        are_shared = any(sizes[Axis("head", i)] != sizes[Axis("kv_head", i)] for i in layers)
        if are_shared and not hasattr(self.config, "num_key_value_heads"):
            reasons.append(
                "heads would share keys and values, but "
                f"{type(self.model.original_model).__name__} has no grouped heads; add heads with "
                "their own keys (into_groups=False)"
            )
        if kinds and sizes[Axis("d_query", 0)] != self.model.cfg.d_head:
            reasons.append(
                f"the rotary positions have type {', '.join(map(repr, sorted(kinds)))}, whose "
                "angles depend on d_head in a way that a new θ cannot correct"
            )
        return reasons

    def write(self, weights: Weights, source_of: Callable[[str], str]) -> Any:
        """Return a new bridge around a new Hugging Face model."""
        template, some = self.model, next(self.model.parameters())
        module = self._module(self.grown_config(weights), self.state(weights))
        buffers = template.original_model.named_buffers()
        dtypes = {name.replace(WRAPPED, ""): buffer.dtype for name, buffer in buffers}
        for name, buffer in module.named_buffers():
            buffer.data = buffer.to(some.device, dtypes.get(name))
        if len(places := {parameter.device for parameter in module.parameters()}) > 1:
            module = dispatch_model(module, _device_map(module, some.device))  # same places
        model = self._bridge(module)
        model.cfg.n_devices = len(places)
        made, options = vars(model.cfg), vars(template.cfg).items()
        others = {k: x for k, x in options if type(x) in (bool, str) and made.get(k) != x}
        if others:  # the user has changed options, which differ from a new bridge's
            usual = vars(self._bridge(self._module(_one_layer(self.config))).cfg)
            for key, value in others.items():
                if key in usual and usual[key] != value:
                    setattr(model.cfg, key, value)
        frozen, new = self.frozen(), type(self)(model)
        old_modules = dict(template.original_model.named_modules())
        for name, part in model.original_model.named_modules():
            if isinstance(part, nn.Dropout):  # the user may have changed the dropout probability p

                def layer_of(layer: int) -> int:
                    return in_layer(source_of(block_name(layer, "attn"))) or 0

                part.p = old_modules[self._old_path(name, layer_of, new)].p
        named, beside = new.named_parameters(), self._beside()
        for name, layout in new.parameters().items():
            named[name].requires_grad_(source_of(layout.name) not in frozen)
            if layout.name in beside:
                named[name].data = layout.from_weights(weights.tensors[layout.name])
        if any(part.training != template.training for _, part in modules_of(model)):
            model.train(template.training)  # only if needed, because this is slow for a bridge
        return model

    def reasons_against_saving(self) -> list[str]:
        """Return every reason why the model cannot be saved in transformers' format."""
        config, cfg = self.config, self.model.cfg
        trained = [name for name in self._beside() if self.tensors()[name].any()]
        if trained:
            return [
                f"{', '.join(trained)} is not zero, but transformers' "
                f"{type(self.model.original_model).__name__} has no such parameter "
                "(transformer-lens 3.9 adds it); set it to zero, and do not train it"
            ]
        try:
            type(config).from_dict(config.to_dict())
        except (StrictDataclassError, ValueError) as error:
            message = str(error).strip().splitlines()[-1].strip()
            return [f"{type(config).__name__} refuses the sizes ({message}); {_INSTEAD}"]
        if getattr(config, BY_LAYER, None):
            return [
                f"layers differ in d_mlp, but {type(config).__name__} has one d_mlp for all "
                f"layers; grow all layers, or {_SAVE}"
            ]
        if has_head_dim(config) or cfg.n_heads * cfg.d_head == cfg.d_model:
            return []
        return [
            f"{type(config).__name__} has no head_dim: {cfg.n_heads} heads of width {cfg.d_head} "
            f"need hidden_size {cfg.n_heads * cfg.d_head}, but it is {cfg.d_model}; "
            f"{_SAVE if self.family.norm_place == 'stream' else _INSTEAD}"
        ]

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder that can be loaded with `from_pretrained` of the wrapped model's class."""
        module = self._module(self.config, self.state(self.read()))
        module.config.dtype = next(self.model.parameters()).dtype
        module.config.output_attentions = False  # only TransformerLens needs it
        difference = _difference(self._few_logits(self.model), self._few_logits(module))
        if not difference <= _DIFFERENCE:
            reason = (
                f"the model's logits with and without its bridge differ by {difference:.2g} of the "
                "largest logit: transformers and TransformerLens read the configuration differently"
            )
            raise InputError([reason], PROBLEM)
        try:
            module.save_pretrained(folder)
        except ValueError as error:  # saving fails, e.g., if the generation config is invalid
            raise InputError([f"transformers cannot save the model: {error}"], PROBLEM) from error
        umask = os.umask(0)
        os.umask(umask)
        for path in folder.glob("*.safetensors"):  # make the files readable for other users
            path.chmod(0o666 & ~umask)
        if self.model.tokenizer is not None:
            original_tokenizer(self.model.tokenizer).save_pretrained(folder)

    def trial(self, grown: Any) -> list[str]:
        """Return an error message if the logits of the grown model and the original differ."""
        difference = _difference(self._few_logits(self.model), self._few_logits(grown))
        is_half = next(grown.parameters()).dtype not in (torch.float32, torch.float64)
        if difference <= (_ROUNDED if is_half else _DIFFERENCE):
            return []
        return [
            f"the grown model's logits would differ by {difference:.2g} of the largest logit: the "
            "configuration has a setting that `grow` does not support"
        ]

    @torch.no_grad()
    def _few_logits(self, model: Any) -> Tensor:
        """Return the logits for a few tokens. Half-precision models are run in float32."""
        some, cfg = next(model.parameters()), self.model.cfg
        if some.dtype not in (torch.float32, torch.float64):
            is_bridge = isinstance(model, TransformerBridge)
            model = copy_model(model, copy_weights=True) if is_bridge else copy.deepcopy(model)
            nn.Module.to(model, torch.float32)  # TransformerLens' `to` would print
        pos = min(_POS, cfg.n_ctx)
        tokens = torch.arange(2 * pos, device=some.device).reshape(2, pos) % cfg.d_vocab
        in_training = [module for _, module in modules_of(model) if module.training]
        try:
            for module in in_training:
                module.training = False
            logits = self._logits(model, tokens)
        finally:
            for module in in_training:
                module.training = True
        return to_float64_device(logits).double()

    def _logits(self, model: Any, tokens: Tensor) -> Tensor:
        """Run a bridge or a transformers model."""
        logits: Any = model(tokens)
        return getattr(logits, "logits", logits)

    def grown_config(self, weights: Weights) -> PretrainedConfig:
        """Return the configuration of a model with the given weights."""
        config, constants, sizes = copy.deepcopy(self.config), weights.constants, weights.sizes
        width, was = sizes[Axis("d_query", 0)], self.model.cfg.d_head
        n_heads, d_model = sizes[Axis("head", 0)], sizes[Axis("d_model")]
        d_mlp = [sizes[Axis("d_mlp", layer)] for layer in range(constants.n_layers)]
        fields: dict[str, Any] = {
            "hidden_size": d_model,
            "num_hidden_layers": constants.n_layers,
            "num_attention_heads": n_heads,
            self.family.eps: constants.eps,
            "tie_word_embeddings": constants.tied,
            intermediate_size(config): d_mlp[0],
        }
        if constants.grouped:
            fields["num_key_value_heads"] = sizes[Axis("kv_head", 0)]
        if n_heads * width != d_model or (
            has_head_dim(config) and getattr(config, "head_dim", None) is not None
        ):
            fields["head_dim"] = width
        elif hasattr(config, "head_dim"):
            del config.head_dim
        if len(set(d_mlp)) > 1 or hasattr(config, BY_LAYER):
            fields[BY_LAYER] = d_mlp if len(set(d_mlp)) > 1 else None
        if constants.attn_types is not None:
            fields["layer_types"] = list(constants.attn_types)
        for key, value in fields.items():
            setattr(config, key, value)
        if width != was:
            for rope in _ropes(config):
                if constants.rotary != "whole head":
                    rotary_dim = int(was * rope.get("partial_rotary_factor", 1.0))
                    rope["partial_rotary_factor"] = _fraction(rotary_dim, width)
                    continue
                # Round θ, so that a model that grew and shrank has the same θ again.
                rope["rope_theta"] = float(f"{rope['rope_theta'] ** (width / was):.14g}")
                for key in {"short_factor", "long_factor"} & rope.keys():
                    rope[key] = rope[key] and [*rope[key], *[1.0] * ((width - was) // 2)]
        return config

    def state(self, weights: Weights) -> dict[str, Tensor]:
        """Return the state dict of a transformers model with the given weights."""
        layouts = {layout.name: layout for layout in self.parameters().values()}
        made: dict[str, Tensor] = {}
        for rule, tails in self._rules.items():
            in_block = "{}" in rule
            for layer in range(weights.constants.n_layers) if in_block else [0]:
                parts = []
                for of in tails:
                    name, like = (block_name(i, of) if in_block else of for i in (layer, 0))
                    parts.append(layouts[like].from_weights(weights.tensors[name]))
                whole = parts[0] if len(parts) == 1 else _fused(rule, parts, weights)
                made[rule.format(layer)] = whole
        return made

    def _norm_pattern(self, name: str) -> str | None:
        """Return the einops pattern of a query or key norm's gain."""
        if self.family.qk_norm != "all heads":
            return None
        axis = "head" if name == "attn.q_norm" else "kv_head"
        return f"({axis} width) -> {axis} width"

    def _named_by_transformers(self) -> dict[str, nn.Parameter]:
        """Return the wrapped model's parameters, with the names that they have without a bridge."""
        clean = self._usual.state_dict()
        named = self.model.original_model.named_parameters(remove_duplicate=False)
        parameters = ((name.replace(WRAPPED, ""), parameter) for name, parameter in named)
        return {name: parameter for name, parameter in parameters if name in clean}

    def _path(self, part: str) -> str:
        """Return the path of this bridge component in the wrapped model."""
        return str(self.model.adapter.component_mapping[part].name)

    def _with_layer(self, path: str, change: Callable[[int], str]) -> str:
        """Apply `change` to the layer index in a path of the wrapped model."""
        blocks = re.escape(self._path("blocks"))
        return re.sub(rf"^({blocks}\.)(\d+)", lambda m: m[1] + change(int(m[2])), path)

    def _old_path(
        self, path: str, old_layer: Callable[[int], int], grown: "HuggingFaceBridge"
    ) -> str:
        """Return the path, in this model, of the module from which a grown model's one is made."""
        return self._with_layer(path, lambda layer: str(old_layer(layer)))

    def _is_known(self, name: str) -> bool:
        """Return whether growth knows a parameter, by its name in transformers."""
        return self._rule(name) in self._rules

    def _rule(self, name: str) -> str:
        """Return a parameter's name with {} in place of the layer index."""
        return self._with_layer(name, lambda layer: "{}")

    @cached_property
    def _rules(self) -> dict[str, tuple[str, ...]]:
        """A dictionary from rules (see `_rule`) to names of tensors, without block prefix."""
        named, layouts = self.named_parameters(), self.parameters()
        tensors: dict[int, str] = {}
        for name, layout in layouts.items():  # if weights are tied, keep only the embedding
            tensors.setdefault(id(named[name]), layout.name)
        present = {layout.name for layout in layouts.values()}
        names: dict[str, tuple[str, ...]] = {}
        for name, parameter in self._named_by_transformers().items():
            rule, module, kind = self._rule(name), *name.split(".")[-2:]
            if name != rule.format(0):
                continue
            if name == f"{self._path('unembed')}.weight":  # may be tied
                names[rule] = ("unembed.W_U",)
            elif id(parameter) in tensors:
                names[rule] = (tensors[id(parameter)].removeprefix("blocks.0."),)
            elif module in _FUSED:
                tails = tuple(OF_BLOCK[f"{part}.{kind}"][0] for part in _FUSED[module])
                if all(block_name(0, tail) in present for tail in tails):
                    names[rule] = tails
        return names

    def _beside(self) -> set[str]:
        """Return the tensors that the wrapped model does not have, such as an unembedding bias."""
        held = {tail for tails in self._rules.values() for tail in tails}
        return {name for name in self.tensors() if in_layer(name) is None and name not in held}

    @cached_property
    def _usual(self) -> PreTrainedModel:
        """An uninitialised transformers model with this configuration, without a bridge."""
        return self._module(self.config)

    def _module(
        self, config: PretrainedConfig, state: Mapping[str, Tensor] | None = None
    ) -> PreTrainedModel:
        """Build a transformers model from a state dict, or with uninitialised weights."""
        template = self.model.original_model
        cpu = torch.device("cpu")
        with keep_random_state(cpu), cpu:
            model = build_module(type(template), config)
        if state is not None:
            model.load_state_dict(state, assign=True)
            model.tie_weights()
        model.config._attn_implementation = template.config._attn_implementation
        if template.can_generate():
            model.generation_config = copy.deepcopy(template.generation_config)
        return model

    def _bridge(self, model: PreTrainedModel) -> TransformerBridge:
        """Return a new bridge around a transformers model, with the tokenizer of this bridge."""
        template = self.model
        with keep_random_state(next(model.parameters()).device):
            bridge: TransformerBridge = build_bridge_from_module(
                model,
                architecture=template.cfg.architecture,
                hf_config=model.config,
                tokenizer=template.tokenizer,
                model_name=template.cfg.model_name,
            )
        watch_cache(bridge)
        return bridge


def _device_map(module: nn.Module, first: torch.device, name: str = "") -> dict[str, Any]:
    """Return a short device map; modules without parameters are put on the device `first`."""
    places = {parameter.device for parameter in module.parameters()} or {first}
    if len(places) == 1:
        return {name: str(places.pop())}
    changes: dict[str, Any] = {}
    for child, part in module.named_children():
        changes |= _device_map(part, first, f"{name}.{child}".removeprefix("."))
    return changes


def _difference(one: Tensor, second: Tensor) -> float:
    """Return the largest difference of logits, relative to the largest logit. NaN equals NaN."""
    finite = one.isfinite() | second.isfinite()
    difference = (one - second).abs().nan_to_num(torch.inf)[finite]
    largest = one[one.isfinite()].abs()
    return difference.max().item() / (largest.max().item() or 1.0) if largest.numel() else 0.0


def _fused(name: str, parts: list[Tensor], weights: Weights) -> Tensor:
    """Join matrices (or biases) along their first axis, the axis of outputs."""
    if "query_key_value" in name:  # the order is query, key, value of head 0, then of head 1, …
        n_heads = weights.sizes[Axis("head", 0)]
        by_head = [rearrange(x, "(head width) ... -> head width ...", head=n_heads) for x in parts]
        return rearrange(
            torch.stack(by_head, 1), "head three width ... -> (head three width) ..."
        ).contiguous()
    whole = torch.cat(parts)
    return whole.T.contiguous() if "c_attn" in name and whole.ndim == 2 else whole


_SAVE = "save it with neuron-heads: attn_only_lens.save(expose_neuron_heads(model).model, folder)"
_INSTEAD = f"grow d_model or n_heads too, or {_SAVE}"


def _one_layer(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a one-layer model, which is quick to build."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    for name in ("layer_types", BY_LAYER):
        if (by_layer := getattr(config, name, None)) is not None:
            setattr(config, name, by_layer[:1])
    return config


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return all options of rotary positions: one dictionary, or one per kind of layer."""
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)]
    return nested or ([ropes] if ropes else [])


def _fraction(rotary_dim: int, width: int) -> float:
    """Return a fraction for which transformers computes int(width · fraction) = `rotary_dim`."""
    fraction = rotary_dim / width
    while int(width * fraction) < rotary_dim:
        fraction = math.nextafter(fraction, 1.0)
    return fraction
