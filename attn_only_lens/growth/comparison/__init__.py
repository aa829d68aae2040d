"""Compare a model with the larger model that `grow` made from it: heads, neurons and circuits."""

from attn_only_lens.growth.comparison._compare import compare
from attn_only_lens.growth.comparison.results import Comparison

__all__ = ["Comparison", "compare"]
