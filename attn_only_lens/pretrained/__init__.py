"""Small trained models that are part of the package and need no download."""

from attn_only_lens.pretrained.modular_addition import modular_addition, modular_addition_tokens
from attn_only_lens.pretrained.small_english import (
    small_english,
    small_english_texts,
    small_english_transcoders,
)

__all__ = [
    "modular_addition",
    "modular_addition_tokens",
    "small_english",
    "small_english_texts",
    "small_english_transcoders",
]
