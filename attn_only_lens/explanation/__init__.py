"""Explain in one call why a metric differs between two prompts."""

from attn_only_lens.explanation._explain import explain
from attn_only_lens.explanation.explanation import Explanation

__all__ = ["Explanation", "explain"]
