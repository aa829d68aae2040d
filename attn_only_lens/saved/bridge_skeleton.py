"""A TransformerBridge with random weights, built from JSON as the one was that it stands for."""

from typing import Any

import torch
import transformers
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from attn_only_lens.errors import CheckpointError
from attn_only_lens.numerics import same_randomness
from attn_only_lens.source_folder import dtype_named

__all__ = ["native", "skeleton"]

_NATIVE = "TransformerLensNative"


def native(config: dict[str, Any]) -> bool:
    """Whether the wrapped model is TransformerLens' own."""
    return bool(config["architecture"] == _NATIVE)


def skeleton(config: dict[str, Any]) -> TransformerBridge:
    """The bridge, not exposed; the caller's random state stays as it was.

    Raises:
        CheckpointError: this version of transformers or of TransformerLens cannot build it.
    """
    try:
        with same_randomness(torch.device("cpu")), torch.device("cpu"):
            bridge = (_native if native(config) else _wrapped)(config)
            if config["compatible"]:
                bridge.enable_compatibility_mode(
                    disable_warnings=config["quiet"], no_processing=not config["processed"]
                )
            elif config["processed"]:
                bridge.process_weights()
    except (AttributeError, AssertionError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            "the bridge cannot be built by these versions of transformers and TransformerLens: "
            f"{error}"
        ) from error
    return bridge


def _native(config: dict[str, Any]) -> TransformerBridge:
    dtype = dtype_named(config["dtype"])
    fields = config["cfg"] | {"dtype": dtype, "device": "cpu", "seed": None}
    cfg = TransformerBridgeConfig.from_dict(fields)
    return TransformerBridge.boot_native(cfg, dtype=dtype, model_name=config["cfg"]["model_name"])


def _wrapped(config: dict[str, Any]) -> TransformerBridge:
    hf_config = getattr(transformers, config["config_class"]).from_dict(config["hf_config"])
    model = getattr(transformers, config["class"])._from_config(
        hf_config,
        attn_implementation=config["attention"],
        dtype=dtype_named(config["dtype"]),
    )
    return build_bridge_from_module(
        model.eval(),
        config["architecture"],
        hf_config=model.config,
        model_name=config["cfg"]["model_name"],
    )
