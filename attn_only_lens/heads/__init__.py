"""Neuron-heads (attention heads that compute MLP neurons): computation, names and patterns."""

from attn_only_lens.heads.computation import logit_tolerance
from attn_only_lens.heads.host import has_neuron_heads, host_of, reasons_without_heads
from attn_only_lens.heads.names import HeadName
from attn_only_lens.heads.patterns import neuron_pattern

__all__ = [
    "HeadName",
    "has_neuron_heads",
    "host_of",
    "logit_tolerance",
    "neuron_pattern",
    "reasons_without_heads",
]
