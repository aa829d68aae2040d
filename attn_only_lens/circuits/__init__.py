"""Circuits over attention heads and neuron-heads: who passes what on to whom, and what it does."""

from attn_only_lens.circuits.attribution_graph import attribution_graph
from attn_only_lens.circuits.graph import CircuitGraph

__all__ = [
    "CircuitGraph",
    "attribution_graph",
]
