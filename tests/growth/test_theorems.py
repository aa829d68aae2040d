"""Tests of Theorems 3.1 to 3.6 against oracles that share no code with the growth.

The growth paper's transformer, equations 1 to 5, is written out from the paper (with ε in the norm,
and the heads' outputs in one W_O). It evaluates the weights of a grown model. Each definition,
applied to the raw state dict, gives the same weights. Every constraint has a control: without it,
the function differs.
"""

import math
import re

import pytest
import torch
from common import D_MLP, N_LAYERS, relative, tokens
from models import build

from attn_only_lens import AttentionOnlyTransformer, convert, grow
from attn_only_lens import expansion as ex

EXACT = 1e-13  # rounding; the issue requires 1e-10
CLEARLY = 1e-3  # the least effect of a violated constraint, relative to the largest logit


def source(**changes):
    """Return the paper's architecture: RMSNorm, ReLU, learned positions, an untied unembedding."""
    return build("rms", act_fn="relu", **changes)


def start(theorem, name=""):
    """Return the model to grow, converted if values and keys shall differ in width."""
    # b_K adds the same number to all scores of a query, which softmax alone ignores.
    model = source(**({"attn_scores_soft_cap": 2.0} if name.endswith("b_K") else {}))
    return convert(model) if theorem in APART else model


def state_of(model):
    """Return the state dict of a model; a converted model's has the names of its source."""
    state = model.state_dict()
    if not isinstance(model, AttentionOnlyTransformer):
        return state

    def named(block):
        part = {"attn": "mlp", "ln1": "ln2"}[block[2]] if int(block[1]) % 2 else block[2]
        return f"blocks.{int(block[1]) // 2}.{part}"

    return {re.sub(r"blocks\.(\d+)\.(\w+)", named, name): x for name, x in state.items()}


def paper(state, eps, scale=None):
    """Evaluate equations 1 to 5 on a TransformerLens state dict, with its biases."""
    tok = tokens()
    x = state["embed.W_E"][tok] + state["pos_embed.W_pos"][: tok.shape[1]]
    causal = torch.ones(tok.shape[1], tok.shape[1]).tril().bool()

    def norm(x, gain):
        return x * gain / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    layer = 0
    while f"blocks.{layer}.ln1.w" in state:
        w = {k.split(".", 2)[2]: v for k, v in state.items() if k.startswith(f"blocks.{layer}.")}
        read = norm(x, w["ln1.w"])
        heads = []
        for e in range(w["attn.W_Q"].shape[0]):
            q, k, v = (read @ w[f"attn.W_{c}"][e] + w[f"attn.b_{c}"][e] for c in "QKV")
            scores = q @ k.mT / (scale or math.sqrt(q.shape[-1]))
            heads.append(scores.masked_fill(~causal, -math.inf).softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ torch.cat(list(w["attn.W_O"])) + w["attn.b_O"]
        hidden = (norm(x, w["ln2.w"]) @ w["mlp.W_in"] + w["mlp.b_in"]).relu()
        x = x + hidden @ w["mlp.W_out"] + w["mlp.b_out"]
        layer += 1
    return norm(x, state["ln_final.w"]) @ state["unembed.W_U"] + state["unembed.b_U"]


STEPS = {
    "3.1": ex.AddNeurons(5),
    "3.2": ex.AddHeads(1),
    "3.3 and 3.4": ex.compose(ex.WidenValues(3), ex.WidenQueriesAndKeys(3)),
    "3.5": ex.WidenStream(11),
    "3.6": ex.InsertLayer(1),
}
STEPS["all"] = ex.compose(*STEPS.values())
APART = {"3.3": ex.WidenValues(3), "3.4": ex.WidenQueriesAndKeys(3)}
STEPS |= APART


@pytest.mark.parametrize("theorem", STEPS)
def test_the_papers_transformer_agrees(theorem):
    model = start(theorem)
    expected = paper(state_of(model), model.cfg.eps)
    assert relative(model(tokens()), expected) < EXACT  # the oracle agrees with TransformerLens
    grown = grow(model, STEPS[theorem], init=ex.init.normal(0.7)).model
    assert relative(paper(state_of(grown), grown.cfg.eps), expected) < EXACT
    assert relative(grown(tokens()), expected) < EXACT


def zeros_beside(tensor, n, dim):
    shape = list(tensor.shape)
    shape[dim] = n
    return torch.cat([tensor, torch.zeros(shape, dtype=tensor.dtype)], dim)


def by_hand(theorem, old, free):
    """Apply the paper's definition to a state dict; `free` holds values for the free entries."""
    new, h, k = dict(old), 26, 13
    for layer in range(N_LAYERS):

        def change(of, function, block=f"blocks.{layer}."):
            new[block + of] = function(old[block + of], free[block + of])

        def keep_free(dim, size):
            return lambda a, f: torch.cat([a, f.narrow(dim, size, f.shape[dim] - size)], dim)

        if theorem == "3.1":
            change("mlp.W_in", keep_free(1, D_MLP))
            change("mlp.b_in", keep_free(0, D_MLP))
            change("mlp.W_out", lambda a, f: zeros_beside(a, 5, 0))
        if theorem == "3.2":
            for of in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V"):
                change(f"attn.{of}", keep_free(0, 2))
            change("attn.W_O", lambda a, f: zeros_beside(a, 1, 0))
        if "3.3" in theorem:
            change("attn.W_V", keep_free(2, k))
            change("attn.b_V", keep_free(1, k))
            change("attn.W_O", lambda a, f: zeros_beside(a, 3, 1))
        if "3.4" in theorem:
            change("attn.W_Q", keep_free(2, k))
            change("attn.b_Q", keep_free(1, k))
            change("attn.W_K", lambda a, f: zeros_beside(a * math.sqrt(16 / 13), 3, 2))
            change("attn.b_K", lambda a, f: zeros_beside(a * math.sqrt(16 / 13), 3, 1))
        if theorem == "3.5":
            for of in ("attn.W_O", "attn.b_O", "mlp.W_out", "mlp.b_out"):
                change(of, lambda a, f: zeros_beside(a, 11, a.ndim - 1))
            for of in ("attn.W_Q", "attn.W_K", "attn.W_V"):
                change(of, keep_free(1, h))
            change("mlp.W_in", keep_free(0, h))
            for of in ("ln1.w", "ln2.w"):
                change(of, lambda a, f: torch.cat([a * math.sqrt(26 / 37), f[26:]]))
    if theorem == "3.5":
        for name in ("embed.W_E", "pos_embed.W_pos"):
            new[name] = zeros_beside(old[name], 11, 1)
        gain, unembed = free["ln_final.w"], free["unembed.W_U"]
        new["ln_final.w"] = torch.cat([old["ln_final.w"] * math.sqrt(26 / 37), gain[26:]])
        new["unembed.W_U"] = torch.cat([old["unembed.W_U"], unembed[26:]])
    if theorem == "3.6":
        for name in [name for name in old if name.startswith("blocks.1.")]:
            del new[name]
        for name, tensor in old.items():
            for layer in (1, 2):
                if name.startswith(f"blocks.{layer}."):
                    new[name.replace(f"blocks.{layer}.", f"blocks.{layer + 1}.")] = tensor
        for name, tensor in free.items():
            if name.startswith("blocks.1."):
                writes = name.endswith(("W_O", "b_O", "W_out", "b_out"))
                new[name] = torch.zeros_like(tensor) if writes else tensor
    return new


@pytest.mark.parametrize("theorem", [name for name in STEPS if name != "all"])
def test_the_definition_done_by_hand(theorem):
    model = start(theorem)
    got = state_of(grow(model, STEPS[theorem], init=ex.init.normal(0.7)).model)
    expected = by_hand(theorem, state_of(model), got)
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    assert any((got[name] != 0).any() for name in got)


# Theorem, tensor, slices of its entries, and a change of them that must change the function.
NEW = {"d_mlp": slice(D_MLP, None), "head": slice(2, None), "d_head": slice(13, None)}
NEW["d_model"] = slice(26, None)
VIOLATED = [
    ("3.1", "blocks.0.mlp.W_out", (NEW["d_mlp"],), 0.3),
    ("3.2", "blocks.0.attn.W_O", (NEW["head"],), 0.3),
    *(
        (theorem, f"blocks.0.attn.{of}", entries, 0.3)
        for of, entries, theorems in (
            ("W_O", (slice(None), NEW["d_head"]), ("3.3 and 3.4", "3.3")),
            ("W_K", (..., NEW["d_head"]), ("3.3 and 3.4", "3.4")),
            ("b_K", (..., NEW["d_head"]), ("3.3 and 3.4", "3.4")),
        )
        for theorem in theorems
    ),
    *(
        ("3.5", name, (..., NEW["d_model"]), 0.3)
        for name in (
            *("embed.W_E", "pos_embed.W_pos", "blocks.0.attn.W_O", "blocks.0.attn.b_O"),
            *("blocks.0.mlp.W_out", "blocks.0.mlp.b_out"),
        )
    ),
    *(
        ("3.6", f"blocks.1.{of}", (...,), 0.3)
        for of in ("attn.W_O", "attn.b_O", "mlp.W_out", "mlp.b_out")
    ),
]


@pytest.mark.parametrize(("theorem", "name", "entries", "size"), VIOLATED)
def test_a_zero_that_is_not_zero_changes_the_function(theorem, name, entries, size):
    model = start(theorem, name)
    grown = grow(model, STEPS[theorem], init=ex.init.normal(0.7)).model
    assert relative(grown(tokens()), model(tokens())) < EXACT
    with torch.no_grad():
        part = grown.get_parameter(name)[entries]
        assert part.numel()
        assert (part == 0).all()
        part += size
    assert relative(grown(tokens()), model(tokens())) > CLEARLY


@pytest.mark.parametrize(
    ("theorem", "name", "factor"),
    [
        *(
            (theorem, f"blocks.0.attn.{of}", math.sqrt(16 / 13))
            for theorem in ("3.3 and 3.4", "3.4")
            for of in ("W_K", "b_K")
        ),
        *(("3.5", name, math.sqrt(26 / 37)) for name in ("blocks.0.ln1.w", "blocks.2.ln2.w")),
        ("3.5", "ln_final.w", math.sqrt(26 / 37)),
    ],
)
def test_an_entry_that_is_not_scaled_changes_the_function(theorem, name, factor):
    model = start(theorem, name)
    grown = grow(model, STEPS[theorem]).model
    with torch.no_grad():
        grown.get_parameter(name).div_(factor)
    assert relative(grown(tokens()), model(tokens())) > CLEARLY
