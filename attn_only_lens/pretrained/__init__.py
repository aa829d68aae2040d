"""Small trained models that ship with the package; nothing is downloaded."""

from attn_only_lens.pretrained.modular_addition import modular_addition, modular_addition_tokens

__all__ = ["modular_addition", "modular_addition_tokens"]
