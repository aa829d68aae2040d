"""A TransformerBridge with random weights, built from JSON as the one was that it stands for."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.model_bridge.sources.native import NativeModel
from transformers import PretrainedConfig, PreTrainedModel

from attn_only_lens.errors import CheckpointError
from attn_only_lens.numerics import same_randomness
from attn_only_lens.source_folder import dtype_named
from attn_only_lens.storage import out_of_range

__all__ = ["native", "skeleton"]

_NATIVE = "TransformerLensNative"
_FEW = 1000
_SLACK = 2  # numbers of the model, for each that is saved: those that share memory are saved once


def native(config: dict[str, Any]) -> bool:
    """Whether the wrapped model is TransformerLens' own."""
    return bool(config["architecture"] == _NATIVE)


def skeleton(
    config: dict[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> TransformerBridge:
    """The bridge, not exposed; the caller's random state stays as it was.

    Args:
        config: what `save` wrote of it.
        tensors: what there is to fill it with; a model that takes far more is refused before time
            and memory are taken for it.

    Raises:
        CheckpointError: this version of transformers or of TransformerLens cannot build it, or it
            has numbers that no model can have.
    """
    if wrong := list(out_of_range(config, "config")):
        raise CheckpointError(f"this is no configuration: {'; '.join(wrong[:5])}")
    try:
        with same_randomness(torch.device("cpu")), torch.device("cpu"):
            if tensors is not None:
                _require_modest(config, tensors)
            bridge = (_native if native(config) else _bridged)(config)
            if config["compatible"]:
                bridge.enable_compatibility_mode(
                    disable_warnings=config["quiet"], no_processing=not config["processed"]
                )
            elif config["processed"]:
                bridge.process_weights()
    except (
        AttributeError,
        AssertionError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            "the bridge cannot be built by these versions of transformers and TransformerLens: "
            f"{error}"
        ) from error
    return bridge


def _require_modest(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a configuration of far more than is saved.

    Raises:
        ValueError: it is.
    """
    hf_config = config.get("hf_config", {})
    many = [
        key
        for key, value in hf_config.items()
        if "layer" in key and isinstance(value, int) and value > _FEW + len(tensors)
    ]
    if many:  # configurations make lists of such lengths
        raise ValueError(f"its {many[0]} is {hf_config[many[0]]}, and {len(tensors)} tensors")
    with torch.device("meta"):
        trial = (_native_module if native(config) else _wrapped)(config)
    takes = sum(each.numel() for each in [*trial.parameters(), *trial.buffers()])
    most = sum(each.numel() for each in tensors.values())
    if takes > _SLACK * most:
        raise ValueError(f"it takes {takes} numbers, and {most} are saved")


def _native(config: dict[str, Any]) -> TransformerBridge:
    cfg = _native_config(config)
    return TransformerBridge.boot_native(cfg, dtype=cfg.dtype, model_name=cfg.model_name)


def _native_module(config: dict[str, Any]) -> nn.Module:
    return NativeModel(_native_config(config))


def _native_config(config: dict[str, Any]) -> TransformerBridgeConfig:
    chosen = {"dtype": dtype_named(config["dtype"]), "device": "cpu", "n_devices": 1, "seed": None}
    return TransformerBridgeConfig.from_dict(config["cfg"] | chosen)


def _bridged(config: dict[str, Any]) -> TransformerBridge:
    model = _wrapped(config)
    return build_bridge_from_module(
        model.eval(),
        config["architecture"],
        hf_config=model.config,
        model_name=config["cfg"]["model_name"],
    )


def _wrapped(config: dict[str, Any]) -> PreTrainedModel:
    hub = [each for each in _implementations(config) if "/" in each or ":" in each]
    if hub:
        raise ValueError(f"it runs code from a hub: {', '.join(hub)}")
    kind = _of_transformers(config["config_class"], PretrainedConfig)
    return _of_transformers(config["class"], PreTrainedModel)._from_config(
        kind.from_dict(config["hf_config"]),
        attn_implementation=config["attention"],
        dtype=dtype_named(config["dtype"]),
    )


def _implementations(value: Any, chosen: bool = False) -> Iterator[str]:
    """Every text that says what computes attention, or the like: transformers loads such names."""
    if isinstance(value, dict):
        for key, each in value.items():
            here = str(key) == "attention" or str(key).endswith(("implementation", "_internal"))
            yield from _implementations(each, chosen or here)
    elif isinstance(value, list):
        for each in value:
            yield from _implementations(each, chosen)
    elif chosen and isinstance(value, str):
        yield value


def _of_transformers(name: str, kind: type) -> Any:
    """Look up a class of models or configurations in transformers, and nothing else there."""
    found = getattr(transformers, name, None)
    if not isinstance(found, type) or not issubclass(found, kind):
        raise ValueError(f"transformers has no {kind.__name__} named {name!r}")
    return found
