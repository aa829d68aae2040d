"""Neuron-heads, in whatever layout a model has them: what they compute, names and patterns."""

from attn_only_lens.heads.computation import logit_tolerance
from attn_only_lens.heads.gating import EXACT, Gating
from attn_only_lens.heads.host import attention_heads, block_of, layout_of, neuron_heads, point_name
from attn_only_lens.heads.names import HeadName
from attn_only_lens.heads.patterns import dense_pattern, neuron_gate, neuron_pattern

__all__ = [
    "EXACT",
    "Gating",
    "HeadName",
    "attention_heads",
    "block_of",
    "dense_pattern",
    "layout_of",
    "logit_tolerance",
    "neuron_gate",
    "neuron_heads",
    "neuron_pattern",
    "point_name",
]
