"""Compare the components and the circuits of a model and its grown model."""

from attn_only_lens.comparison._compare import compare
from attn_only_lens.comparison.results import Comparison

__all__ = ["Comparison", "compare"]
