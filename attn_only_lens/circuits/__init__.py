"""Circuits of attention heads and neuron-heads: composition, attribution graphs and search."""

from attn_only_lens.circuits._attribution_graph import attribution_graph
from attn_only_lens.circuits._composition import composition, top_compositions, virtual_weights
from attn_only_lens.circuits._enrichment import enrichment
from attn_only_lens.circuits._faithfulness import SHARES, Faithfulness, faithfulness
from attn_only_lens.circuits._score_edges import score_edges
from attn_only_lens.circuits._score_sources import score_sources
from attn_only_lens.circuits._search import Circuit, Evaluation, discover, evaluate
from attn_only_lens.circuits.export import from_json, to_json, to_neuronpedia
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.neuron_like import neuron_like_heads

__all__ = [
    "SHARES",
    "Circuit",
    "CircuitGraph",
    "Evaluation",
    "Faithfulness",
    "attribution_graph",
    "composition",
    "discover",
    "enrichment",
    "evaluate",
    "faithfulness",
    "from_json",
    "neuron_like_heads",
    "score_edges",
    "score_sources",
    "to_json",
    "to_neuronpedia",
    "top_compositions",
    "virtual_weights",
]
