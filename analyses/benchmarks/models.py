"""The models that benchmarks measure: GPT-2 small's shape with random weights, or a tiny shape."""

from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig, quiet

GPT2_SMALL = {
    "n_layers": 12,
    "d_model": 768,
    "n_heads": 12,
    "d_head": 64,
    "d_mlp": 3072,
    "d_vocab": 50257,
    "n_ctx": 1024,
}
TINY = {
    "n_layers": 2,
    "d_model": 26,
    "n_heads": 2,
    "d_head": 13,
    "d_mlp": 37,
    "d_vocab": 41,
    "n_ctx": 17,
}


def model_of(device: str, *, smoke: bool = False, **changes: Any) -> HookedTransformer:
    """Return a model with GPT-2 small's shape and random weights, or a tiny model."""
    sizes = (TINY if smoke else GPT2_SMALL) | {"act_fn": "gelu_new", "seed": 0} | changes
    with quiet():
        return HookedTransformer(HookedTransformerConfig(**sizes, device=device)).eval()


def bridge_of(device: str, *, smoke: bool, **changes: int) -> TransformerBridge:
    """Return a model of transformers with the same shape as `model_of`, as a bridge."""
    sizes = (TINY if smoke else GPT2_SMALL) | changes
    names = {"n_layer": "n_layers", "n_embd": "d_model", "n_head": "n_heads", "n_inner": "d_mlp"}
    names |= {"vocab_size": "d_vocab", "n_positions": "n_ctx"}
    config = GPT2Config(
        **{hf_name: sizes[name] for hf_name, name in names.items()},
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval()
    return build_bridge_from_module(model.to(device), "GPT2LMHeadModel", hf_config=config)
