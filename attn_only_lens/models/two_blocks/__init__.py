"""Attention-only models: `HookedTransformer`s with two blocks per layer of the original model."""

from attn_only_lens.models.two_blocks.build import convert_as, rebuild
from attn_only_lens.models.two_blocks.cache import AttentionOnlyCache
from attn_only_lens.models.two_blocks.config import LayerSizes
from attn_only_lens.models.two_blocks.model import AttentionOnlyTransformer, HeadStack

__all__ = [
    "AttentionOnlyCache",
    "AttentionOnlyTransformer",
    "HeadStack",
    "LayerSizes",
    "convert_as",
    "rebuild",
]
