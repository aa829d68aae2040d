"""Tests of prompts, metrics and sites of TransformerBridges, under TransformerLens 3.9 and 4."""

import pytest
import torch
from tiny_tokenizer import tiny_tokenizer
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.model_state import fingerprint
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.errors import InputError

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens
]
SIZES = {"n_layers": 2, "d_model": 26, "n_heads": 2, "d_head": 13, "d_mlp": 37, "d_vocab": 41}


@pytest.fixture
def bridge(tmp_path):
    cfg = TransformerBridgeConfig(**SIZES, n_ctx=17, act_fn="gelu_new", init_mode="gpt2", seed=0)
    bridge = TransformerBridge.boot_native(cfg, dtype=torch.float64)
    bridge.tokenizer = tiny_tokenizer(41, tmp_path)
    bridge.cfg.tokenizer_prepends_bos = False
    return bridge


def test_a_bridge(bridge):
    with pytest.raises(InputError, match="expose_neuron_heads"):
        resolve_sites(bridge, p.heads())
    pair = p.prompt_pair(bridge, ["w1 w2 w3", "w4 w5"], ["w1 w7 w3", "w4 w6"])
    assert pair.clean.tolist() == [[0, 5, 6, 7], [0, 8, 9, 2]]
    assert pair.last.tolist() == [3, 2]
    metric = bind(p.logit_diff("w3", ["w1", "w2"]), bridge, pair)
    logits = bridge(pair.clean, attention_mask=pair.mask)
    by_hand = logits[0, 3, 7] - logits[0, 3, 5] + logits[1, 2, 7] - logits[1, 2, 6]
    assert metric.of(logits) == pytest.approx(by_hand.item() / 2, rel=1e-12)
    before = fingerprint(bridge)
    assert fingerprint(bridge) == before
    expose_neuron_heads(bridge)
    groups = resolve_sites(bridge, p.all_heads())
    assert [(group.layer, group.kind, len(group.names)) for group in groups] == [
        (0, "attention", 2),
        (0, "neuron", 37),
        (1, "attention", 2),
        (1, "neuron", 37),
    ]
    before = fingerprint(bridge)
    with torch.no_grad():
        next(bridge.parameters())[0, 0] += 1e-9
    assert fingerprint(bridge) != before
