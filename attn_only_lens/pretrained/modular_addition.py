"""A one-layer transformer, shipped with the package, that was trained to add modulo 113.

It was trained until it generalised, as in Nanda et al. (2023), "Progress measures for grokking via
mechanistic interpretability". It has d_model 128, 4 heads, d_mlp 512, the activation silu, no
normalisation and no biases. The input is (a, b, '='), and the largest of the 113 logits at the last
position is the answer. The model card is `data/modular_addition/README.md`.

With transformer-lens 4, which has no HookedTransformer, the model is loaded as a TransformerBridge.
TransformerLens' conversion to a bridge silently ignores most HookedTransformerConfig fields.
`load_bridge` must therefore load no other model; for this one, the tests check the logits.
"""

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.errors import CheckpointError
from attn_only_lens.models.source_folder import load_source, parse_device, parse_dtype, read_folder
from attn_only_lens.tl import (
    HAS_HOOKED_TRANSFORMER,
    HookedTransformer,
    convert_tl_checkpoint,
    require_hooked_transformer,
)

MODULUS = 113


def load_bridge(
    folder: Path, *, dtype: str | torch.dtype, device: str | torch.device
) -> TransformerBridge:
    """Load the shipped model as a TransformerBridge; raise CheckpointError if files are damaged."""
    config, state = read_folder(folder)
    to_dtype, to_device = parse_dtype(dtype), parse_device(device)
    try:
        cfg = TransformerBridgeConfig(**config | {"init_weights": False})
        bridge = TransformerBridge.boot_native(
            cfg, dtype=to_dtype, device=to_device, model_name=config["model_name"]
        )
        bridge.load_state_dict(convert_tl_checkpoint(state, cfg), strict=True)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} does not contain the shipped model: {error}") from error
    return bridge.eval()


@torch.inference_mode(False)  # weights created in inference mode cannot be trained
def modular_addition(
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    hooked: bool = False,
) -> HookedTransformer:
    """Return the model, with transformer-lens 3.9 as a HookedTransformer, otherwise as a bridge.

    Raises:
        UnsupportedCallError: `hooked` is True, but transformer-lens 4 has no HookedTransformer.
        CheckpointError: the installed files are damaged.
    """
    if hooked:
        require_hooked_transformer("modular-addition as a HookedTransformer")
    with as_file(files(__package__) / "data" / "modular_addition") as folder:
        if HAS_HOOKED_TRANSFORMER:
            return load_source(folder, dtype=dtype, device=device)
        bridge: Any = load_bridge(folder, dtype=dtype, device=device)
        return bridge


def modular_addition_tokens() -> Int[Tensor, "batch=12769 pos=3"]:
    """Return the tokens (a, b, '=') of all 113 * 113 problems, sorted by a, then b.

    The model gives the answer, (a + b) mod 113, at the last position.

    Example:
        >>> from attn_only_lens import load, pretrained
        >>> tokens = pretrained.modular_addition_tokens()
        >>> tokens[114].tolist()
        [1, 1, 113]
        >>> answers = load("modular-addition")(tokens)[:, -1].argmax(-1)
        >>> bool((answers == (tokens[:, 0] + tokens[:, 1]) % 113).all())
        True
    """
    numbers, equals = torch.arange(MODULUS + 1, device="cpu").split([MODULUS, 1])
    return torch.cartesian_prod(numbers, numbers, equals)
