"""Attribution graphs of TransformerBridges, under transformer-lens 3.9 and 4 alike."""

import pytest
import torch
import transformers
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from attn_only_lens import expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph

pytestmark = pytest.mark.filterwarnings("ignore")  # TransformerLens' and transformers' own
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 37}
SIZES |= {"vocab_size": 41, "hidden_size": 26, "max_position_embeddings": 17}
GROUPED = {"num_key_value_heads": 1, "head_dim": 14}
GPT = {"vocab_size": 41, "n_positions": 17, "n_layer": 2, "n_head": 2, "n_inner": 37}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**GPT, n_embd=26),
    "neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "llama": lambda: transformers.LlamaConfig(**SIZES, **GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **GROUPED),
}
# LlamaRMSNorm and Gemma2RMSNorm compute in float32 in any dtype.
ROUNDING = {"gpt2": 1e-9, "neox": 1e-9, "llama": 1e-5, "gemma2": 1e-5}


@torch.no_grad()
def bridge_of(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation="eager"
    )
    model = model.to(torch.float64).eval()
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    expose_neuron_heads(bridge)
    return bridge


@pytest.mark.parametrize("name", CONFIGS)
def test_sums_hold(name):
    bridge, given = bridge_of(name), torch.tensor([[3, 17, 5, 29, 11]])
    for chosen in ({"mass": 1}, {"top": 17}):
        graph = attribution_graph(bridge, given, p.logit_diff(7, 11), **chosen)
        expected = graph.nodes.set_index("id")["attribution"]
        into = graph.inflow()
        scale = expected.abs().max()
        assert (into - expected.reindex(into.index)).abs().max() < ROUNDING[name] * scale
        assert into["metric"] == pytest.approx(graph.value, abs=ROUNDING[name] * scale)
        # control: without the edges from the embedding, they do not
        left = graph.edges.query("kind == 'value' and source.str.startswith('embed') == False")
        left = left.groupby("target")["weight"].sum()
        assert (left - expected.reindex(left.index)).abs().max() > 1e-2 * scale
    # of scores that are bilinear, queries and keys have equal shares in all
    q, k = graph.inflow("q"), graph.inflow("k")
    if name != "gemma2":  # its scores are capped: bilinear no more, and still of q · k
        assert len(k)
    assert (q.reindex(k.index) - k).abs().max() < ROUNDING[name] * scale
