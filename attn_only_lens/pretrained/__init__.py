"""The data of the models that ship with this package, which `attn_only_lens.load` loads by name."""

from attn_only_lens.pretrained.modular_addition import modular_addition_tokens
from attn_only_lens.pretrained.small_english import small_english_texts

__all__ = ["modular_addition_tokens", "small_english_texts"]
