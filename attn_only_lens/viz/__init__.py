"""Render results as self-contained HTML pages that work offline.

plotly and circuitsvis are optional: `pip install plotly circuitsvis`.
"""

from attn_only_lens.viz.attention import attention_view
from attn_only_lens.viz.comparison_pages import comparison_report
from attn_only_lens.viz.figures import bars, heatmap
from attn_only_lens.viz.graph_overlays import Overlays
from attn_only_lens.viz.graph_view import circuit_view
from attn_only_lens.viz.neurons import neuron_page
from attn_only_lens.viz.page import write

__all__ = [
    "Overlays",
    "attention_view",
    "bars",
    "circuit_view",
    "comparison_report",
    "heatmap",
    "neuron_page",
    "write",
]
