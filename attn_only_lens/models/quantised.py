"""Quantised weights, which are not served: a head's matrices are read, cut, scaled and compared.

A packed or scaled integer is none of these, and what a library would make of it depends on the
device. So such models are refused, whichever way they come; their dequantised weights are served.
"""

from typing import Any

from torch import nn

DEQUANTISE = (
    "quantised weights are not served; expected float32, float64, bfloat16 or float16: take the "
    "model that was quantised or, in transformers, model.dequantize() where it can; then "
    "del model.config.quantization_config, and save_pretrained to another folder"
)

_MAKERS = ("torchao", "bitsandbytes", "quanto", "hqq")


def config_reasons(config: dict[str, Any], where: str) -> list[str]:
    """Return why a model of transformers with this configuration is refused, if it is quantised."""
    for part in (config, *(each for each in config.values() if isinstance(each, dict))):
        if said := part.get("quantization_config"):
            method = said.get("quant_method", "?") if isinstance(said, dict) else said
            kind = getattr(method, "value", method)  # of an enumeration, once it is loaded
            return [f"{where} has a quantization_config ({kind}): {DEQUANTISE}"]
    return []


def weight_reasons(model: nn.Module) -> list[str]:
    """Return why a model is refused, if modules or weights of it are quantised."""
    config = getattr(model, "config", None)
    said = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    if reasons := config_reasons(said, "its config"):
        return reasons
    for name, module in model.named_modules():
        if "quantized" in type(module).__module__.split("."):
            return [f"its {_plain(name)} is a {type(module).__qualname__}: {DEQUANTISE}"]
    for name, parameter in model.named_parameters():
        maker = type(parameter).__module__.partition(".")[0]  # of tensors that claim to be floats
        if maker in _MAKERS or not parameter.is_floating_point():
            kind = f"{type(parameter).__name__} of {str(parameter.dtype).removeprefix('torch.')}"
            return [f"its {_plain(name)} is a {kind}: {DEQUANTISE}"]
    return []


def _plain(name: str) -> str:
    return name.replace("._original_component", "")
