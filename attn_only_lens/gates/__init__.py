"""Activation functions as attention patterns."""

from attn_only_lens.gates.bilinear import BilinearGate, bilinear_gate
from attn_only_lens.gates.certificates import certified_bound
from attn_only_lens.gates.exact import GATES, Gate
from attn_only_lens.gates.gated import RangeGate, range_gate

__all__ = [
    "GATES",
    "BilinearGate",
    "Gate",
    "RangeGate",
    "bilinear_gate",
    "certified_bound",
    "range_gate",
]
