"""Tests of growing BERT and RoBERTa, whose norms stand on the stream: x becomes norm(x + f(x)).

Neurons, heads, values, queries and keys grow exactly. New layers and a wider stream are refused
(test_refused.py): no weights keep the function there. The oracle is an explicit forward pass with a
transformers state dict.
"""

import math

import pytest
import torch
import transformers
from bridges import D_VOCAB, NO_DROPOUT, SIZES, bridged, original, randomise
from common import relative
from tiny_tokenizer import tiny_tokenizer
from torch.nn import functional

from attn_only_lens import grow, growth, load
from attn_only_lens.growth import read_provenance
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = pytest.mark.numeric

EXACT, FLOAT32 = LOGIT_TOLERANCE[torch.float64], LOGIT_TOLERANCE[torch.float32]
EPS = 1e-12
STEPS = {
    "neurons of one layer": growth.AddNeurons(4, layers=[1]),
    "all four": growth.compose(
        growth.AddHeads(3),
        growth.WidenValues(6),
        growth.WidenQueriesAndKeys(6),
        growth.AddNeurons(4),
    ),
}


def model_of(name, dtype=torch.float64):
    """Return a small transformers model."""
    if name == "bert":
        return original("bert", dtype)
    config = transformers.RobertaConfig(**SIZES | NO_DROPOUT | {"max_position_embeddings": 19})
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
    return randomise(model.to(dtype).eval())


NAMES = ["bert"] if HAS_HOOKED_TRANSFORMER else ["bert", "roberta"]  # 3.9 does not support RoBERTa


def prompts():
    return torch.randint(3, D_VOCAB, (2, 11), generator=torch.Generator().manual_seed(5))


def state_of(model):
    """Return a state dict by transformers' names, without the prefixes of bridge and base model."""
    values = {}
    for key, value in model.named_parameters(remove_duplicate=False):
        plain = key.replace("_original_component.", "").split(".", 1)[1]
        values[plain] = value.detach()
    return values


def by_hand(state, n_heads, tokens, is_roberta):
    """Return the logits of a masked language model with these weights and norms on the stream."""

    def linear(name, x):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name, x):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        return x * state[f"{name}.weight"] + state[f"{name}.bias"]

    first = 2 if is_roberta else 0  # RoBERTa's positions begin after its padding index
    places = torch.arange(tokens.shape[1]) + first
    x = state["embeddings.word_embeddings.weight"][tokens]
    x = x + state["embeddings.position_embeddings.weight"][places]
    x = norm("embeddings.LayerNorm", x + state["embeddings.token_type_embeddings.weight"][0])
    layer = 0
    while f"encoder.layer.{layer}.output.dense.weight" in state:
        block = f"encoder.layer.{layer}"
        q, k, v = (
            linear(f"{block}.attention.self.{part}", x).unflatten(-1, (n_heads, -1))
            for part in ("query", "key", "value")
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        z = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        x = norm(
            f"{block}.attention.output.LayerNorm", x + linear(f"{block}.attention.output.dense", z)
        )
        hidden = functional.gelu(linear(f"{block}.intermediate.dense", x))
        x = norm(f"{block}.output.LayerNorm", x + linear(f"{block}.output.dense", hidden))
        layer += 1
    if is_roberta:
        head = norm("layer_norm", functional.gelu(linear("dense", x)))
    else:
        head = functional.gelu(linear("predictions.transform.dense", x))
        head = norm("predictions.transform.LayerNorm", head)
    bias = state["bias" if is_roberta else "predictions.bias"]
    return head @ state["embeddings.word_embeddings.weight"].T + bias


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "step"),
    [*(("bert", step) for step in STEPS), *((name, "all four") for name in NAMES[1:])],
)
def test_the_four_are_exact(name, step):
    model, tokens = model_of(name), prompts()
    logits = model(tokens).logits
    assert relative(by_hand(state_of(model), 2, tokens, name == "roberta"), logits) < EXACT
    bridge = bridged(model)
    before = {key: value.clone() for key, value in bridge.state_dict().items()}
    grown = grow(bridge, STEPS[step], init=growth.init.normal(0.3), seed=3)
    assert relative(grown.model(tokens), logits) < EXACT
    n_heads = grown.model.cfg.n_heads
    state = state_of(grown.model.original_model)
    assert relative(by_hand(state, n_heads, tokens, name == "roberta"), logits) < EXACT
    for tensor in ("intermediate.dense.weight", "attention.self.query.weight"):
        assert (state[f"encoder.layer.1.{tensor}"] != 0).all()  # free entries are not zero
    assert all(torch.equal(before[key], value) for key, value in bridge.state_dict().items())
    assert torch.equal(grown.shrink()(tokens), logits)


@torch.no_grad()
def test_zeros_that_are_broken_change_the_function():
    model, tokens = model_of("bert"), prompts()
    grown = grow(bridged(model), STEPS["all four"], init=growth.init.normal(0.3), seed=3)
    state = {key: value.clone() for key, value in state_of(grown.model.original_model).items()}
    broken = state["encoder.layer.0.output.dense.weight"]
    assert (broken == 0).any()
    broken[broken == 0] = torch.randn_like(broken)[broken == 0]  # norms remove a constant
    logits = by_hand(state, grown.model.cfg.n_heads, tokens, is_roberta=False)
    assert relative(logits, model(tokens).logits) > 1e-2
    assert "blocks.0.mlp.W_out" in {zero.name for zero in grown.provenance.zeros}


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
