"""Tests of attribution graphs of TransformerBridges, under TransformerLens 3.9 and 4."""

import bridges
import pytest
import torch

from attn_only_lens import expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
# LlamaRMSNorm and Gemma2RMSNorm compute in float32 in any dtype.
ROUNDING = {"gpt2": 1e-9, "neox": 1e-9, "llama": 1e-5, "granite": 1e-5, "gemma2": 1e-5}


def bridge_of(name):
    bridge = bridges.boot(name)
    expose_neuron_heads(bridge)
    return bridge


@pytest.mark.parametrize("name", ROUNDING)
def test_sums_hold(name):
    bridge, prompt = bridge_of(name), torch.tensor([[3, 17, 5, 29, 11]])
    for chosen in ({"mass": 1}, {"top": 17}):
        graph = attribution_graph(bridge, prompt, p.logit_diff(7, 11), **chosen)
        expected = graph.nodes.set_index("id")["attribution"]
        into = graph.inflow()
        scale = expected.abs().max()
        assert (into - expected.reindex(into.index)).abs().max() < ROUNDING[name] * scale
        assert into["metric"] == pytest.approx(graph.value, abs=ROUNDING[name] * scale)
        # Control: without the edges from the embedding, the sums do not hold.
        left = graph.edges.query("kind == 'value' and source.str.startswith('embed') == False")
        left = left.groupby("target")["weight"].sum()
        assert (left - expected.reindex(left.index)).abs().max() > 1e-2 * scale
    # Scores are functions of q · k, so the edges into queries and into keys have equal sums.
    q, k = graph.inflow("q"), graph.inflow("k")
    if name != "gemma2":  # Gemma 2's capped scores are not bilinear
        assert len(k)
    assert (q.reindex(k.index) - k).abs().max() < ROUNDING[name] * scale
