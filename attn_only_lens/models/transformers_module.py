"""Models of transformers from configurations, also of sizes that their classes do not provide for.

A class of transformers has one size for all layers; some want hidden_size to be a multiple of the
number of heads; GPT-2, GPT-NeoX and BERT have no `head_dim`. The code of their layers does not
care: it reads the widths of matrices, or attributes of the module. So here such a configuration is
taken at its word: `head_dim` for every class, `d_mlp_by_layer` for layers that differ. Only this
package reads that entry: a folder for transformers alone must do without.
"""

import copy
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

BY_LAYER = "d_mlp_by_layer"
_WITHOUT_HEAD_DIM = ("gpt2", "gpt_neox", "bert", "roberta")


def has_head_dim(config: PretrainedConfig) -> bool:
    """Return True if the model's class reads the width of heads from its configuration."""
    return config.model_type not in _WITHOUT_HEAD_DIM


def intermediate_size(config: PretrainedConfig) -> str:
    """Return the name of the configuration's entry for d_mlp."""
    return "n_inner" if hasattr(config, "n_inner") else "intermediate_size"


def config_from(kind: type[PretrainedConfig], fields: dict[str, Any]) -> PretrainedConfig:
    """Return a configuration with these entries, whatever its class demands of them together."""
    heads = fields.get("num_attention_heads")
    if heads is None or fields.get("head_dim") is None:
        return kind.from_dict(fields)
    config = kind.from_dict(fields | {"num_attention_heads": 1})
    config.num_attention_heads = heads
    return config


def build_module(kind: Any, config: PretrainedConfig) -> PreTrainedModel:
    """Build a model with a copy of this configuration; its weights are any numbers."""
    config = copy.deepcopy(config)
    with no_init_weights():
        if has_head_dim(config) or getattr(config, "head_dim", None) is None:
            model: PreTrainedModel = kind(config)
        else:
            model = _with_head_dim(kind, config)
        by_layer = getattr(config, BY_LAYER, None) or []
        for layer, d_mlp in zip(_layers(model) if by_layer else [], by_layer, strict=True):
            if d_mlp != getattr(config, intermediate_size(config)):
                like = copy.deepcopy(config)
                like.num_hidden_layers = 1
                setattr(like, intermediate_size(like), d_mlp)
                setattr(like, BY_LAYER, None)
                wanted = _layers(build_module(kind, like))[0]
                for part in ("mlp",) if hasattr(layer, "mlp") else ("intermediate", "output"):
                    setattr(layer, part, getattr(wanted, part))
    model.tie_weights()
    return model.eval()


def _layers(model: Any) -> Any:
    base = getattr(model.base_model, "encoder", model.base_model)
    if hasattr(base, "layer"):
        return base.layer
    return base.h if hasattr(base, "h") else base.layers


def _with_head_dim(kind: Any, config: PretrainedConfig) -> PreTrainedModel:
    """Build a model with one head, which always fits, then set the attention's sizes."""
    n_heads, width, d_model = config.num_attention_heads, config.head_dim, config.hidden_size
    config.num_attention_heads = 1
    model: PreTrainedModel = kind(config)
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "c_attn"):  # GPT-2
            module.num_heads, module.head_dim, module.split_size = n_heads, width, n_heads * width
            module.scaling = width**-0.5
            if config.scale_attn_by_inverse_layer_idx:
                module.scaling /= float(module.layer_idx + 1)
            module.c_attn = Conv1D(3 * n_heads * width, d_model)
            module.c_proj = Conv1D(d_model, n_heads * width)
        elif hasattr(module, "query_key_value"):  # GPT-NeoX
            bias = module.dense.bias is not None
            module.head_size, module.scaling = width, width**-0.5
            module.rotary_ndims = int(width * config.rope_parameters["partial_rotary_factor"])
            module.query_key_value = nn.Linear(d_model, 3 * n_heads * width, bias=bias)
            module.dense = nn.Linear(n_heads * width, d_model, bias=bias)
        elif hasattr(module, "attention_head_size"):  # BERT
            module.num_attention_heads, module.attention_head_size = n_heads, width
            module.all_head_size, module.scaling = n_heads * width, width**-0.5
            for part in ("query", "key", "value"):
                setattr(module, part, nn.Linear(d_model, n_heads * width))
        elif hasattr(getattr(module, "self", None), "attention_head_size"):  # its parent
            module.output.dense = nn.Linear(n_heads * width, d_model)
    config.num_attention_heads = n_heads
    return model
