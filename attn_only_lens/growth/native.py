"""Growth of a TransformerBridge around TransformerLens' own model (`boot_native`).

Its parameters are those of torch's Linear and Embedding; a table gives the layout of each against a
tensor of `Weights`. Its norms, except LayerNorm with gains, compute in float32 in every dtype, so
growth is exact to float32 with them.
"""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources.native import NativeModel

from attn_only_lens.errors import GrowthError
from attn_only_lens.expansion import Weights
from attn_only_lens.expansion.weights import Constants, Norm, block_name, in_layer, tail
from attn_only_lens.gates import GATES
from attn_only_lens.growth.growable import Growable, Parameter
from attn_only_lens.growth.hooked import config_fields
from attn_only_lens.models.in_place import exposed_heads, reasons_against_copying
from attn_only_lens.numerics import keep_random_state

_WRAPPED = "_original_component."  # of a part of the bridge, the module that it wraps
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# In any case of letters, as the model reads its configuration.
_NORMS: dict[str | None, Norm] = {"LN": "LN", "LNPRE": "LNPre", "RMS": "RMS", "RMSPRE": "RMSPre"}
_PATTERNS = {
    "tok_embed.weight": ("embed.W_E", None),
    "pos.weight": ("pos_embed.W_pos", None),
    "ln_out.weight": ("ln_final.w", None),
    "ln_out.bias": ("ln_final.b", None),
    "head.weight": ("unembed.W_U", "vocab model -> model vocab"),
    "head.bias": ("unembed.b_U", None),
    "ln1.weight": ("ln1.w", None),
    "ln1.bias": ("ln1.b", None),
    "ln2.weight": ("ln2.w", None),
    "ln2.bias": ("ln2.b", None),
    "attn.q.weight": ("attn.W_Q", "(head width) model -> head model width"),
    "attn.q.bias": ("attn.b_Q", "(head width) -> head width"),
    "attn.k.weight": ("attn.W_K", "(kv_head width) model -> kv_head model width"),
    "attn.k.bias": ("attn.b_K", "(kv_head width) -> kv_head width"),
    "attn.v.weight": ("attn.W_V", "(kv_head width) model -> kv_head model width"),
    "attn.v.bias": ("attn.b_V", "(kv_head width) -> kv_head width"),
    "attn.o.weight": ("attn.W_O", "model (head width) -> head width model"),
    "attn.o.bias": ("attn.b_O", None),
    "mlp.fc_in.weight": ("mlp.W_in", "neuron model -> model neuron"),
    "mlp.fc_in.bias": ("mlp.b_in", None),
    "mlp.fc_out.weight": ("mlp.W_out", "model neuron -> neuron model"),
    "mlp.fc_out.bias": ("mlp.b_out", None),
    "mlp.gate.weight": ("mlp.W_gate", "neuron model -> model neuron"),
    "mlp.in.weight": ("mlp.W_in", "neuron model -> model neuron"),
    "mlp.out.weight": ("mlp.W_out", "model neuron -> neuron model"),
}


class NativeBridge(Growable):
    """A TransformerBridge of `boot_native`."""

    @staticmethod
    def is_kind(model: Any) -> bool:
        """Return True for a bridge around TransformerLens' own model."""
        architecture = getattr(getattr(model, "cfg", None), "architecture", None)
        return isinstance(model, TransformerBridge) and architecture == "TransformerLensNative"

    def reasons_against(self) -> list[str]:
        """Return every reason why the model's function is unknown."""
        model = self.model
        if exposed_heads(model):
            return ["its neurons are exposed as heads in place; first `exposed.undo()`"]
        reasons = reasons_against_copying(model)
        if model.compatibility_mode:
            reasons.append(
                "it is in compatibility mode, which may have processed its weights; grow the "
                "bridge as `boot_native` makes it, then enable_compatibility_mode"
            )
        names = [name.replace(_WRAPPED, "") for name, _ in self._named()]
        if odd := [name for name in names if _tensor(name) is None]:
            reasons.append(f"it has parameters unknown to its kind: {', '.join(odd[:5])}")
        first = [name for name in names if name.startswith("layers.0.")]
        layers = range(model.cfg.n_layers)
        expected = {name.replace("layers.0.", f"layers.{at}.") for name in first for at in layers}
        if shared := sorted(expected - set(names)):
            reasons.append(
                f"its {', '.join(shared[:5])} are other parameters, too: give each its own"
            )
        return [*reasons, *_odd_modules(model)]

    def read(self) -> Weights:
        """Return its weights."""
        layouts = self.parameters()
        tensors = {
            layouts[name].name: layouts[name].to_weights(parameter.detach())
            for name, parameter in self._named()
        }
        cfg = self.model.cfg
        norm = _NORMS.get(cfg.normalization_type and cfg.normalization_type.upper())
        final: Any = "RMSPre" if norm == "LNPre" else norm if norm == "RMSPre" else "RMS"
        own_scale = cfg.use_attn_scale and cfg.attn_scale > 0
        constants = Constants(
            n_layers=cfg.n_layers,
            norm=norm,
            final_norm=final if cfg.final_rms else norm,
            eps=cfg.eps,
            scale=cfg.attn_scale if own_scale and cfg.attn_scale != cfg.d_head**0.5 else None,
            positions=cfg.positional_embedding_type.lower(),
            tied=self._is_tied,
            pointwise=None if cfg.attn_only else cfg.act_fn in GATES,
            grouped=cfg.n_key_value_heads is not None,
            init=(cfg.init_mode, float(cfg.initializer_range)),
        )
        return Weights(tensors, constants)

    def parameters(self) -> Mapping[str, Parameter]:
        """Return the layout of every parameter.

        Raises:
            GrowthError: one is unknown.
        """
        cfg = self.model.cfg
        heads = {"head": cfg.n_heads, "kv_head": cfg.n_key_value_heads or cfg.n_heads}
        found = {}
        for name, _ in self._named():
            tensor = _tensor(name)
            if tensor is None:
                raise GrowthError([f"its parameter {name} is unknown"], "this model cannot be read")
            split = tuple(
                (axis, n) for axis, n in heads.items() if f"({axis} " in (tensor[1] or "")
            )
            found[name] = Parameter(tensor[0], tensor[1], split)
        return found

    def write(self, weights: Weights, source_of: Callable[[str], str]) -> Any:
        """Return a new native bridge."""
        template = self.model
        cfg = copy.deepcopy(template.cfg)
        if weights.constants.positions == "rotary" and cfg.rotary_dim is None:
            cfg.rotary_dim = cfg.d_head
        for field, value in config_fields(template.cfg, weights).items():
            setattr(cfg, field, value)
        settings = {"init_weights": cfg.init_weights, "seed": cfg.seed}
        cfg.init_weights, cfg.seed = False, None
        some = next(template.parameters())
        cpu = torch.device("cpu")
        with keep_random_state(cpu), cpu:  # building must not touch the caller's random state
            model = TransformerBridge.boot_native(
                cfg, tokenizer=template.tokenizer, device=some.device, dtype=some.dtype
            )
        vars(model.cfg).update(settings)
        named = dict(self._named())
        flags = {
            layout.name: named[name].requires_grad for name, layout in self.parameters().items()
        }
        new = NativeBridge(model)
        layouts = new.parameters()
        for name, parameter in new._named():
            layout = layouts[name]
            parameter.data = layout.from_weights(weights.tensors[layout.name])
            parameter.requires_grad_(flags[source_of(layout.name)])
        wrapped: Any = model.original_model
        buffers = dict(template.original_model.named_buffers())
        for name, buffer in wrapped.named_buffers():  # rotary tables, rounded as the template's
            buffer.data = buffers[_source_buffer(name, source_of)].clone()
        if weights.constants.tied:
            wrapped.head._original_component.weight = wrapped.tok_embed.weight
        return model.train(template.training)

    @property
    def _is_tied(self) -> bool:
        wrapped = self.model.original_model
        return wrapped.tok_embed.weight is wrapped.head.weight

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters by name in the bridge; that of tied embeddings by both names."""
        weight = self.model.original_model.head.weight
        return [*self.model.named_parameters(), *[("head.weight", weight)] * self._is_tied]


def _odd_modules(model: Any) -> list[str]:
    """List modules that differ from the configuration that the grown model is built from.

    A module's constants are its attributes: eps, scale, soft caps, widths.
    """
    with torch.device("meta"):
        usual = NativeModel(copy.deepcopy(model.cfg))
    modules = {
        name.replace(f".{_WRAPPED[:-1]}", ""): module
        for name, module in model.original_model.named_modules()
    }
    reasons = []
    for name, expected in usual.named_modules():
        if isinstance(expected, nn.ModuleList):  # the bridge has one of its own
            continue
        module, label = modules.get(name), f"its {name or 'model'}"
        if type(module) is not type(expected):
            kinds = type(module).__qualname__, type(expected).__qualname__
            reasons.append(f"{label} is a {kinds[0]}; its configuration says {kinds[1]}")
            continue
        has, says = _attributes(module), _attributes(expected)
        reasons += [
            f"{label}.{key} is {has.get(key)!r}; its configuration says {says.get(key)!r}"
            for key in sorted(has.keys() | says.keys())
            if has.get(key) != says.get(key)
        ]
    return reasons


def _attributes(module: Any) -> dict[str, Any]:
    """The attributes of a module besides parameters, buffers and submodules."""
    left_out = ("cfg", "training")
    return {k: v for k, v in vars(module).items() if k[0] != "_" and k not in left_out}


def _tensor(name: str) -> tuple[str, str | None] | None:
    """The tensor of `Weights` that a parameter stores, and the pattern between them."""
    plain = name.replace(_WRAPPED, "")
    layer = _LAYER.fullmatch(plain)
    found = _PATTERNS.get(layer[2] if layer else plain)
    if found is None or layer is None:
        return found
    return f"blocks.{layer[1]}.{found[0]}", found[1]


def _source_buffer(name: str, source_of: Callable[[str], str]) -> str:
    """The buffer of the template for one of the new model."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name
    source = source_of(block_name(int(layer[1]), layer[2]))
    return f"layers.{in_layer(source)}.{tail(source)}"
