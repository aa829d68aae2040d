"""Tests of growing BERT and RoBERTa, whose norms stand on the stream: x becomes norm(x + f(x)).

Neurons, heads, values, queries and keys grow exactly. New layers and a wider stream are refused
(test_refused.py), because no weights keep the function there. The oracle is the model in
transformers, before and after its growth.
"""

import pytest
import torch
import transformers
from bridges import D_VOCAB, NO_DROPOUT, SIZES, bridged, original, randomise
from common import relative
from growing import state
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens import grow, growth, load
from attn_only_lens.growth import read_provenance
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = pytest.mark.numeric

EXACT, FLOAT32 = LOGIT_TOLERANCE[torch.float64], LOGIT_TOLERANCE[torch.float32]
ALL = growth.compose(
    growth.AddHeads(3),
    growth.WidenValues(6),
    growth.WidenQueriesAndKeys(6),
    growth.AddNeurons(4),
)
NAMES = ("bert", "roberta")


def model_of(name, dtype=torch.float64):
    """Return a small transformers model."""
    if name == "bert":
        return original("bert", dtype)
    config = transformers.RobertaConfig(**SIZES | NO_DROPOUT | {"max_position_embeddings": 19})
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
    return randomise(model.to(dtype).eval())


def prompts():
    return torch.randint(3, D_VOCAB, (2, 11), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_function_stays(name):
    model, tokens = model_of(name), prompts()
    logits = model(tokens).logits
    bridge = bridged(model)
    before = state(bridge)
    grown = grow(bridge, ALL, init=growth.init.normal(0.3), seed=3)
    assert relative(grown.model(tokens), logits) < EXACT
    assert relative(grown.model.original_model(tokens).logits, logits) < EXACT
    assert all(torch.equal(before[key], value) for key, value in bridge.state_dict().items())
    assert torch.equal(grown.shrink()(tokens), logits)


@torch.no_grad()
def test_zeros_that_are_broken_change_the_function():
    model, tokens = model_of("bert"), prompts()
    grown = grow(bridged(model), ALL, init=growth.init.normal(0.3), seed=3)
    named = grown.model.original_model.named_parameters()
    weights = {name.replace("_original_component.", ""): tensor for name, tensor in named}
    for part in ("output.dense", "attention.output.dense", "attention.self.key"):
        tensor = weights[f"bert.encoder.layer.0.{part}.weight"]
        kept, zeros = tensor.clone(), tensor == 0
        assert zeros.any(), part
        tensor[zeros] = torch.randn_like(kept)[zeros]  # norms remove a constant
        assert relative(grown.model(tokens), model(tokens).logits) > 1e-3, part
        tensor.copy_(kept)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_transformers_own(name, tmp_path):
    model, tokens = model_of(name, torch.float32), prompts()
    logits, bridge = model(tokens).logits, bridged(model)
    bridge.tokenizer = tiny_tokenizer(D_VOCAB, tmp_path / "tokenizer")
    grown = grow(bridge, d_mlp=41)
    folder = grown.save_pretrained(tmp_path / "grown")
    alone = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    assert type(alone) is type(bridge.original_model)
    assert relative(alone(tokens).logits, logits) < FLOAT32
    assert read_provenance(folder) == grown.provenance
    again = grow(load(folder), d_mlp=43, n_heads=5)
    assert relative(again.model(tokens), logits) < FLOAT32
