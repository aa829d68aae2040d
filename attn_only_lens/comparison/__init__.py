"""Comparison of a model with its grown model: every component, and the circuits of both."""

from attn_only_lens.comparison._compare import compare
from attn_only_lens.comparison.results import Comparison

__all__ = ["Comparison", "compare"]
