"""Tests of a sweep's memory estimate against allocations, under TransformerLens 3.9 and 4."""

import pytest
import torch
import transformers
from allocations import Allocated
from bridges import bridged

from attn_only_lens import Contrast, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.patching.run_patches import Batching

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
POS, D_MODEL, D_MLP, HEADS, D_VOCAB = 101, 78, 311, 6, 41
SITES = [f"L0N{i}" for i in range(7)]
ATTENTION = [f"L0H{i}" for i in range(HEADS)]


def bridge(config):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return expose_neuron_heads(bridged(model.eval())).model


MODELS = {
    "gpt2": lambda: bridge(
        transformers.GPT2Config(
            **{"vocab_size": D_VOCAB, "n_positions": POS, "n_layer": 2, "n_head": HEADS},
            **{"n_embd": D_MODEL, "n_inner": D_MLP},
        ),
    ),
    "grouped": lambda: bridge(
        transformers.LlamaConfig(
            **{"vocab_size": D_VOCAB, "hidden_size": D_MODEL, "num_hidden_layers": 2},
            **{"num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 14},
            **{"intermediate_size": D_MLP, "max_position_embeddings": POS},
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_variants_hold_at_once_is_about_what_is_estimated(name, monkeypatch):
    """Cover whole prompts, one token with all earlier keys and values, and all logits."""
    model, shares = MODELS[name](), []
    fill = Batching.fill

    def filling(self, values, alive, numbers_each, run):
        def counted(chosen):
            with Allocated() as allocated:
                result = run(chosen)
            shares.append(4 * numbers_each * len(chosen) / allocated.most)
            return result

        return fill(self, values, alive, numbers_each, counted)

    monkeypatch.setattr(Batching, "fill", filling)
    clean = torch.arange(POS)[None] % D_VOCAB
    corrupted = (clean + 1) % D_VOCAB
    for sites in (SITES, ATTENTION):
        for position in (0, POS // 2, POS - 1):
            for metric in (p.logit_diff(7, 8), p.loss())[: 2 - (position != 0)]:
                contrast = Contrast(clean, corrupted, metric)
                p.activation_patch(model, contrast, sites=p.Sites(sites, position))
    assert len(shares) == 8
    assert min(shares) > 0.75
    assert max(shares) < 1.7
