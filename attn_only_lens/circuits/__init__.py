"""Circuits over attention heads and neuron-heads: who passes what on to whom, and what it does."""

from attn_only_lens.circuits.attribution_graph import attribution_graph
from attn_only_lens.circuits.discovery import Circuit, discover
from attn_only_lens.circuits.faithfulness import SHARES, Faithfulness, faithfulness
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.graph_json import from_json, to_json
from attn_only_lens.circuits.neuronpedia import to_neuronpedia

__all__ = [
    "SHARES",
    "Circuit",
    "CircuitGraph",
    "Faithfulness",
    "attribution_graph",
    "discover",
    "faithfulness",
    "from_json",
    "to_json",
    "to_neuronpedia",
]
