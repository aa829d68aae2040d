"""Gates: attention patterns with which attention heads compute activation functions."""

from attn_only_lens.gates.bilinear import bilinear_gate
from attn_only_lens.gates.gating import GeneralizedSiLU

__all__ = ["GeneralizedSiLU", "bilinear_gate"]
