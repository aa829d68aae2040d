"""A shipped model as a TransformerBridge, for transformer-lens 4, which has no HookedTransformer.

TransformerLens converts the state dict. Its native model passes over most fields of a
HookedTransformerConfig without a word, so this is for the models that ship here, whose logits the
tests hold against their weights, and not for any folder.
"""

from pathlib import Path

import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.errors import CheckpointError
from attn_only_lens.source_folder import device_named, dtype_named, read_folder
from attn_only_lens.tl import convert_tl_checkpoint

__all__ = ["load_bridge"]


def load_bridge(
    folder: Path, *, dtype: str | torch.dtype, device: str | torch.device
) -> TransformerBridge:
    """Read a shipped model from its folder.

    Raises:
        CheckpointError: a file is missing or damaged, or the two do not belong together.
    """
    config, state = read_folder(folder)
    to_dtype, to_device = dtype_named(dtype), device_named(device)
    try:
        cfg = TransformerBridgeConfig(**config | {"init_weights": False})
        bridge = TransformerBridge.boot_native(
            cfg, dtype=to_dtype, device=to_device, model_name=config["model_name"]
        )
        bridge.load_state_dict(convert_tl_checkpoint(state, cfg), strict=True)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} does not hold one model: {error}") from error
    return bridge.eval()
