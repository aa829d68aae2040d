"""Grow a TransformerBridge around TransformerLens' own model (`boot_native`).

A native bridge computes RMSNorm, and LayerNorm without gains, in float32, even if its dtype is
float64. Growth of models with these norms is therefore exact only to float32 precision.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources.native import NativeModel

from attn_only_lens.devices import keep_random_state
from attn_only_lens.gates.exact import GATES
from attn_only_lens.growth.expansion.weights import (
    Constants,
    Norm,
    Weights,
    block_name,
    in_layer,
    tail,
)
from attn_only_lens.growth.models.bridge import BridgeModel, differing_modules
from attn_only_lens.growth.models.hooked import config_fields

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# The keys are in upper case, because the native model ignores case.
_NORMS: dict[str | None, Norm] = {"LN": "LN", "LNPRE": "LNPre", "RMS": "RMS", "RMSPRE": "RMSPre"}


class NativeBridge(BridgeModel):
    """A TransformerBridge made by `boot_native`."""

    @staticmethod
    def is_kind(model: Any) -> bool:
        """Return True for a bridge around TransformerLens' own model."""
        architecture = getattr(getattr(model, "cfg", None), "architecture", None)
        return isinstance(model, TransformerBridge) and architecture == "TransformerLensNative"

    def reasons_against(self) -> list[str]:
        """Return every reason why the model cannot be grown."""
        if reasons := super().reasons_against():
            return reasons
        model = self.model
        known = set(map(id, self.named_parameters().values()))
        odd = [name for name, item in model.named_parameters() if id(item) not in known]
        if odd:
            reasons.append(f"native models have no parameters named {', '.join(odd[:5])}")
        with torch.device("meta"):
            usual = NativeModel(copy.deepcopy(model.cfg))
        return [*reasons, *differing_modules(model.original_model, usual)]

    def read(self) -> Weights:
        """Return the model's weights."""
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
            tied=self.is_tied,
            pointwise=None if cfg.attn_only else cfg.act_fn in GATES,
            grouped=cfg.n_key_value_heads is not None,
            init=(cfg.init_mode, float(cfg.initializer_range)),
        )
        return Weights(self.tensors(), constants)

    def write(self, weights: Weights, source_of: Callable[[str], str]) -> Any:
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
        with keep_random_state(cpu), cpu:
            model = TransformerBridge.boot_native(
                cfg, tokenizer=template.tokenizer, device=some.device, dtype=some.dtype
            )
        vars(model.cfg).update(settings)
        frozen, new = self.frozen(), NativeBridge(model)
        named = new.named_parameters()
        for name, layout in new.parameters().items():
            named[name].data = layout.from_weights(weights.tensors[layout.name])
            named[name].requires_grad_(source_of(layout.name) not in frozen)
        wrapped: Any = model.original_model
        buffers = dict(template.original_model.named_buffers())
        for name, buffer in wrapped.named_buffers():  # a new model's buffers may differ
            buffer.data = buffers[_source_buffer(name, source_of)].clone()
        if weights.constants.tied:
            wrapped.head._original_component.weight = wrapped.tok_embed.weight
        return model.train(template.training)


def _source_buffer(name: str, source_of: Callable[[str], str]) -> str:
    """Return the name of the original buffer from which a buffer of the grown model is copied."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name
    source = source_of(block_name(int(layer[1]), layer[2]))
    return f"layers.{in_layer(source)}.{tail(source)}"
