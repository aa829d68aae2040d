"""Gates: attention patterns with which attention heads compute activation functions."""

from attn_only_lens.gates.bilinear import BilinearGate, bilinear_gate
from attn_only_lens.gates.exact import GATES, Gate
from attn_only_lens.gates.gating import EXACT, Gating, GeneralizedSiLU

__all__ = [
    "EXACT",
    "GATES",
    "BilinearGate",
    "Gate",
    "Gating",
    "GeneralizedSiLU",
    "bilinear_gate",
]
