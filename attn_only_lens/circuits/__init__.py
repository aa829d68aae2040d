"""Circuits over attention heads and neuron-heads: how what one writes is read by another."""

from attn_only_lens.circuits.composition import composition, top_compositions
from attn_only_lens.circuits.enrichment import enrichment
from attn_only_lens.circuits.neuron_like import neuron_like_heads
from attn_only_lens.circuits.virtual import virtual_weights

__all__ = [
    "composition",
    "enrichment",
    "neuron_like_heads",
    "top_compositions",
    "virtual_weights",
]
