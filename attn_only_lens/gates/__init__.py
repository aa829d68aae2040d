"""Activation functions as attention patterns."""

from attn_only_lens.gates.exact import GATES, Gate

__all__ = ["GATES", "Gate"]
