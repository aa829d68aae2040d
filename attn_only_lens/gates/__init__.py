"""Activation functions as attention patterns."""

from attn_only_lens.gates.bilinear import BilinearGate
from attn_only_lens.gates.exact import GATES, Gate
from attn_only_lens.gates.generalized_silu import GeneralizedSiLU
from attn_only_lens.gates.tables import bilinear_gate

__all__ = [
    "GATES",
    "BilinearGate",
    "Gate",
    "GeneralizedSiLU",
    "bilinear_gate",
]
