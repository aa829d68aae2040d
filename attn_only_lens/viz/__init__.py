"""Render results as self-contained HTML pages that work offline.

plotly and circuitsvis are optional: `pip install plotly circuitsvis`.
"""

from attn_only_lens.viz.attention import attention_view
from attn_only_lens.viz.circuit import circuit_page
from attn_only_lens.viz.circuit_data import NodeDetails
from attn_only_lens.viz.comparison_pages import comparison_circuit, comparison_report
from attn_only_lens.viz.figures import sweep_bars, sweep_heatmap, transfer_heatmap
from attn_only_lens.viz.graph_overlays import Overlays
from attn_only_lens.viz.graph_view import circuit_view
from attn_only_lens.viz.neurons import neuron_page
from attn_only_lens.viz.page import write_html, write_svg

__all__ = [
    "NodeDetails",
    "Overlays",
    "attention_view",
    "circuit_page",
    "circuit_view",
    "comparison_circuit",
    "comparison_report",
    "neuron_page",
    "sweep_bars",
    "sweep_heatmap",
    "transfer_heatmap",
    "write_html",
    "write_svg",
]
