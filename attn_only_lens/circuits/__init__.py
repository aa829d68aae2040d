"""Analyze circuits of attention heads and neuron-heads (MLP neurons written as attention heads)."""

from attn_only_lens.circuits._attribution_graph import attribution_graph
from attn_only_lens.circuits._discover import discover
from attn_only_lens.circuits._evaluate import Evaluation, evaluate
from attn_only_lens.circuits._faithfulness import SHARES, Faithfulness, faithfulness
from attn_only_lens.circuits._group_nodes import NodeGroups, group_nodes
from attn_only_lens.circuits._path_expansion import PathExpansion, path_expansion
from attn_only_lens.circuits._score_edges import score_edges
from attn_only_lens.circuits._score_sources import score_sources
from attn_only_lens.circuits._transfer import transfer
from attn_only_lens.circuits.circuit import Circuit
from attn_only_lens.circuits.export import from_json, to_json
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.stability import Stability
from attn_only_lens.circuits.weights._composition import (
    composition,
    top_compositions,
    virtual_weights,
)
from attn_only_lens.circuits.weights.token_circuits import (
    TokenCircuit,
    copying_scores,
    ov_circuit,
    qk_circuit,
    token_paths,
)

__all__ = [
    "SHARES",
    "Circuit",
    "CircuitGraph",
    "Evaluation",
    "Faithfulness",
    "NodeGroups",
    "PathExpansion",
    "Stability",
    "TokenCircuit",
    "attribution_graph",
    "composition",
    "copying_scores",
    "discover",
    "evaluate",
    "faithfulness",
    "from_json",
    "group_nodes",
    "ov_circuit",
    "path_expansion",
    "qk_circuit",
    "score_edges",
    "score_sources",
    "to_json",
    "token_paths",
    "top_compositions",
    "transfer",
    "virtual_weights",
]
