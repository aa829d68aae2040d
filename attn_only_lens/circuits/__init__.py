"""Analyze circuits of attention heads and neuron-heads (MLP neurons written as attention heads)."""

from attn_only_lens.circuits._attribution_graph import attribution_graph
from attn_only_lens.circuits._discover import discover
from attn_only_lens.circuits._evaluate import evaluate
from attn_only_lens.circuits._faithfulness import faithfulness
from attn_only_lens.circuits._group_nodes import group_nodes
from attn_only_lens.circuits._path_expansion import path_expansion
from attn_only_lens.circuits._score_sources import score_sources
from attn_only_lens.circuits._transfer import transfer
from attn_only_lens.circuits.search import Search
from attn_only_lens.circuits.weights._composition import composition
from attn_only_lens.circuits.weights.token_circuits import copying_scores, token_circuit

__all__ = [
    "Search",
    "attribution_graph",
    "composition",
    "copying_scores",
    "discover",
    "evaluate",
    "faithfulness",
    "group_nodes",
    "path_expansion",
    "score_sources",
    "token_circuit",
    "transfer",
]
