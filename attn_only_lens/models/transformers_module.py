"""Build transformers models with sizes that transformers does not allow; reject quantised models.

*Sizes.* In transformers, all layers of a model have the same size, some classes require hidden_size
to be a multiple of the number of heads, and GPT-2, GPT-NeoX and BERT have no `head_dim`. Their
forward passes do not need these restrictions, because they read sizes from matrices or module
attributes. In this package, every class may have `head_dim` and, for layers of different sizes,
`d_mlp_by_layer`. Only this package can load a folder with `d_mlp_by_layer`.

*Quantised weights* are rejected, because analyses slice, scale and compare heads' matrices. Packed
or scaled integers, which each library unpacks in its own way, do not allow these operations.
Dequantised weights are accepted.
"""

import copy
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from attn_only_lens.arguments import a_type, with_article

BY_LAYER = "d_mlp_by_layer"
_WITHOUT_HEAD_DIM = ("gpt2", "gpt_neox", "bert", "roberta")

DEQUANTISE = (
    "quantised weights are not supported; expected float32, float64, bfloat16 or float16: use the "
    "model before quantisation or, if transformers supports it, call model.dequantize(); then "
    "del model.config.quantization_config, and call save_pretrained with another folder"
)
_QUANTISERS = ("torchao", "bitsandbytes", "quanto", "hqq")


def has_head_dim(config: PretrainedConfig) -> bool:
    """Return whether the model class reads d_head from `config.head_dim`."""
    return config.model_type not in _WITHOUT_HEAD_DIM


def intermediate_size(config: PretrainedConfig) -> str:
    """Return the name of the configuration entry that holds d_mlp."""
    return "n_inner" if hasattr(config, "n_inner") else "intermediate_size"


def config_from(kind: type[PretrainedConfig], fields: dict[str, Any]) -> PretrainedConfig:
    """Return a configuration with the given fields, without checking the number of heads."""
    heads = fields.get("num_attention_heads")
    if heads is None or fields.get("head_dim") is None:
        return kind.from_dict(fields)
    config = kind.from_dict(fields | {"num_attention_heads": 1})
    config.num_attention_heads = heads
    return config


def build_module(kind: Any, config: PretrainedConfig) -> PreTrainedModel:
    """Build a model from a copy of a configuration, without initializing the weights."""
    config = copy.deepcopy(config)
    with no_init_weights():
        if has_head_dim(config) or getattr(config, "head_dim", None) is None:
            model: PreTrainedModel = kind(config)
        else:
            model = _with_head_dim(kind, config)
        by_layer = getattr(config, BY_LAYER, None) or []
        for layer, d_mlp in zip(_layers(model) if by_layer else [], by_layer, strict=True):
            if d_mlp != getattr(config, intermediate_size(config)):
                resized = copy.deepcopy(config)
                resized.num_hidden_layers = 1
                setattr(resized, intermediate_size(resized), d_mlp)
                setattr(resized, BY_LAYER, None)
                donor = _layers(build_module(kind, resized))[0]
                for name in ("mlp",) if hasattr(layer, "mlp") else ("intermediate", "output"):
                    setattr(layer, name, getattr(donor, name))
    model.tie_weights()
    return model.eval()


def _layers(model: Any) -> Any:
    base = getattr(model.base_model, "encoder", model.base_model)
    if hasattr(base, "layer"):
        return base.layer
    return base.h if hasattr(base, "h") else base.layers


def _with_head_dim(kind: Any, config: PretrainedConfig) -> PreTrainedModel:
    """Build a model with one head (allowed in every class), then resize the attention modules."""
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
            for name in ("query", "key", "value"):
                setattr(module, name, nn.Linear(d_model, n_heads * width))
        elif hasattr(getattr(module, "self", None), "attention_head_size"):  # BERT's outer module
            module.output.dense = nn.Linear(n_heads * width, d_model)
    config.num_attention_heads = n_heads
    return model


def config_reasons(config: dict[str, Any], name: str) -> list[str]:
    """Return an error message if a configuration is for a quantised model."""
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        if entry := section.get("quantization_config"):
            method = entry.get("quant_method", "?") if isinstance(entry, dict) else entry
            kind = getattr(method, "value", method)  # some methods are enums
            return [f"{name} has a quantization_config ({kind}): {DEQUANTISE}"]
    return []


def weight_reasons(model: nn.Module) -> list[str]:
    """Return an error message if a model has a quantised module or weight."""
    config = getattr(model, "config", None)
    entries = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    if reasons := config_reasons(entries, "its config"):
        return reasons
    for name, module in model.named_modules():
        if "quantized" in type(module).__module__.split("."):
            return [f"its {_plain(name)} is {a_type(module)}: {DEQUANTISE}"]
    for name, parameter in model.named_parameters():
        # Check the tensor class, too: some quantised tensors report a floating-point dtype.
        library = type(parameter).__module__.partition(".")[0]
        if library in _QUANTISERS or not parameter.is_floating_point():
            kind = f"{type(parameter).__name__} of {str(parameter.dtype).removeprefix('torch.')}"
            return [f"its {_plain(name)} is {with_article(kind)}: {DEQUANTISE}"]
    return []


def _plain(name: str) -> str:
    return name.replace("._original_component", "")
