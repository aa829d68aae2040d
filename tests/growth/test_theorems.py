"""Tests of Theorems 3.1 to 3.6 against oracles that share no code with the growth.

`growing.evaluate` is the growth paper's transformer, equations 1 to 5, written out from the paper
(with ε in the norm). It evaluates the weights before and after growth. Every constraint has a
control: without it, the function differs.
"""

import math
from dataclasses import replace

import pytest
import torch
from common import relative, tokens
from growing import SIZES, evaluate, native, random_weights
from torch.nn import functional

from attn_only_lens import growth
from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.expansion import compose
from attn_only_lens.growth.models._grow import read

pytestmark = pytest.mark.numeric

EXACT = 1e-13  # rounding
CLEARLY = 1e-3  # the least effect of a violated constraint, relative to the largest logit
LARGE = growth.init.normal(0.7)  # free entries are not zero: required zeros come from the expansion
STEPS = {
    "3.1": growth.AddNeurons(5),
    "3.2": growth.AddHeads(3),
    "3.3": growth.WidenValues(3),
    "3.4": growth.WidenQueriesAndKeys(3),
    "3.5": growth.WidenStream(11),
    "3.6": growth.InsertLayer(1),
}
STEPS["all"] = compose(*STEPS.values())
LN = {"norm": "LN", "final_norm": "LN"}
VARIANTS = {
    "the paper's": {},
    "layer norm": LN,
    "folded": {"norm": "RMSPre", "final_norm": "RMSPre"},
    "no norm": {"norm": None, "final_norm": None},
    "norms after": {"norm_place": "after"},
    "norms before and after": {"norm_place": "both"},
    "Gemma": {"gain_offset": 1.0, "embed_scaled": True, "tied": True, "norm_place": "both"},
    "own scale": {"scale": 3.0},
    "scale by layer": {"scale_by_layer": True},
    "query norm and scale by layer": {"qk_norm": "by head", "scale_by_layer": True},
    "clipped": {"clip_qkv": 0.3},
    "grouped": {"kv_head": 1, "grouped": True},
    "gated": {"gated": True},
}
REFUSED = {("clipped", "3.4"): "bounds keys"}


@pytest.mark.parametrize("theorem", STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_function_stays(variant, theorem):
    weights = random_weights(**VARIANTS[variant])
    if reason := REFUSED.get((variant, theorem if theorem != "all" else "3.4")):
        with pytest.raises(InputError, match=reason):
            STEPS[theorem](weights)
        return
    grown, provenance = STEPS[theorem](weights, LARGE)
    assert relative(evaluate(grown), evaluate(weights)) < EXACT
    for zeros in provenance.zeros:
        entries = zeros.entries(grown.tensors[zeros.name])
        assert entries.numel()
        assert not entries.any()


@pytest.mark.parametrize(
    "name", ["ln", "ln_pre", "rms", "rms_pre", "no_norm", "gated", "grouped", "own_scale"]
)
def test_the_oracle_computes_what_transformerlens_does(name):
    model = native(name)
    act = functional.silu if name == "gated" else lambda x: functional.gelu(x, approximate="tanh")
    # These RMS norms and folded norms compute in float32.
    rounding = 1e-6 if name in ("rms", "rms_pre", "ln_pre") else EXACT
    assert relative(evaluate(read(model), act), model(tokens())) < rounding


# Controls: theorem, tensor, and slices of the entries that must be zero.
WRITES = ("attn.W_O", "attn.b_O", "mlp.W_out", "mlp.b_out")
NEW = {axis: slice(SIZES[axis], None) for axis in ("d_mlp", "head", "d_query", "d_value")}
NEW["d_model"] = slice(SIZES["d_model"], None)
ZERO = [
    ("3.1", "blocks.0.mlp.W_out", (NEW["d_mlp"],)),
    ("3.2", "blocks.0.attn.W_O", (NEW["head"],)),
    ("3.3", "blocks.0.attn.W_O", (slice(None), NEW["d_value"])),
    ("3.4", "blocks.0.attn.W_K", (..., NEW["d_query"])),
    ("3.4", "blocks.0.attn.b_K", (..., NEW["d_query"])),
    *(("3.5", name, (..., NEW["d_model"])) for name in ("embed.W_E", "pos_embed.W_pos")),
    *(("3.5", f"blocks.0.{name}", (..., NEW["d_model"])) for name in WRITES),
    *(("3.6", f"blocks.1.{name}", (...,)) for name in WRITES),
]


def grown_twin(theorem, name, **changes):
    """Return a function that evaluates weights, grown weights with a copied tensor, and the tensor.

    b_K adds the same number to all scores of a query, which a softmax without soft cap ignores.
    """
    weights = random_weights(**changes)
    grown, _ = STEPS[theorem](weights, LARGE)
    tensor = grown.tensors[name].clone()
    grown = replace(grown, tensors={**grown.tensors, name: tensor})
    cap = 2.0 if name.endswith("b_K") else None
    return lambda: relative(evaluate(grown, cap=cap), evaluate(weights, cap=cap)), tensor


@pytest.mark.parametrize(("theorem", "name", "entries"), ZERO)
def test_a_zero_that_is_not_zero_changes_the_function(theorem, name, entries):
    difference, tensor = grown_twin(theorem, name)
    assert difference() < EXACT
    assert tensor[entries].numel()
    assert (tensor[entries] == 0).all()
    tensor[entries] += 0.3
    assert difference() > CLEARLY


@pytest.mark.parametrize(
    ("theorem", "name", "factor"),
    [
        ("3.4", "blocks.0.attn.W_K", math.sqrt(8 / 5)),
        ("3.5", "blocks.0.ln1.w", math.sqrt(23 / 34)),
    ],
)
def test_an_entry_that_is_not_scaled_changes_the_function(theorem, name, factor):
    difference, tensor = grown_twin(theorem, name)
    tensor /= factor
    assert difference() > CLEARLY


# What the paper omits: ε, LayerNorm, folded gains, scales by layer


@pytest.mark.parametrize("eps", [1e-5, 1.0])
def test_the_papers_rule_leaves_epsilon_out(eps):
    """Control: Definition 3.5 with ε unchanged is off by about ε / mean square of the stream."""
    weights = random_weights(eps=eps)
    grown, _ = STEPS["3.5"](weights)
    assert grown.constants.eps == pytest.approx(eps * 23 / 34, rel=1e-15)
    wrong = replace(grown, constants=replace(grown.constants, eps=eps))
    assert 0.1 * eps < relative(evaluate(wrong), evaluate(weights)) < 5 * eps


def test_layer_norm_needs_a_stream_of_mean_zero():
    """Control: growing d_model under LayerNorm fails if a single mean is added back."""
    name = "blocks.1.attn.W_O"
    difference, tensor = grown_twin("3.5", name, **LN)
    assert difference() < EXACT
    tensor[..., :23] += random_weights(**LN).tensors[name].mean(-1, keepdim=True)
    assert difference() > CLEARLY


def test_a_copied_layer():
    weights = random_weights(scale_by_layer=True)
    grown, _ = growth.InsertLayer(at=3, like=0, copy=True)(weights)
    assert relative(evaluate(grown), evaluate(weights)) < EXACT
    new, like = (
        {name: x for name, x in y.tensors.items() if name.startswith(f"blocks.{layer}.")}
        for y, layer in ((grown, 3), (weights, 0))
    )
    for name, tensor in new.items():
        factor = 4.0 if name.endswith(("W_K", "b_K")) else 1.0  # it divides scores by 4, not 1
        zero = name.endswith(("W_O", "b_O", "W_out", "b_out"))
        expected = like[name.replace("blocks.3", "blocks.0")] * (0.0 if zero else factor)
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize(
    ("theorem", "constants", "reason"),
    [
        ("3.1", {"pointwise": False}, "mixes neurons"),
        ("3.5", LN | {"norm_place": "both"}, "a nonzero mean"),
        ("3.5", {"norm": "RMSPre", "final_norm": "RMSPre", "norm_place": "both"}, "have no gain"),
        ("3.5", {"norm": "LN"}, "does not remove the mean"),
        ("3.5", {"norm": "RMS", "qk_norm": "by head", "clip_qkv": 0.3}, "clip_qkv bounds"),
        ("3.6", {"norm_place": "both", "eps": 0.0}, "divide 0 by 0"),
    ],
)
def test_what_a_theorem_does_not_cover_is_refused(theorem, constants, reason):
    with pytest.raises(InputError, match=reason):
        STEPS[theorem](random_weights(**constants))


def test_growth_in_turn_and_at_once():
    """Two growths compose to the same provenance and weights as both at once."""
    weights = random_weights(scale_by_layer=True)
    first = STEPS["all"]
    second = compose(*reversed(list(STEPS.values())[:-1]))
    once, a = first(weights)
    twice, b = second(once)
    both, c = compose(first, second)(weights)
    assert a.then(b) == c
    assert all(torch.equal(twice.tensors[name], both.tensors[name]) for name in both.tensors)
    assert twice.constants == both.constants
    for name, tensor in weights.tensors.items():
        moved = c.tensor_map(name)
        assert moved.shape == tuple(both.tensors[moved.name].shape)
        part = moved.old_part(both.tensors[moved.name])
        assert torch.allclose(part, tensor * moved.scale, rtol=1e-14)
        assert torch.equal(moved.old_part(moved.put(part, torch.zeros(moved.shape).double())), part)
    assert relative(evaluate(both), evaluate(weights)) < EXACT
