"""Every analysis of a HookedTransformer, exposed and converted, against the bridge of its weights.

The bridge wraps the transformers model from which TransformerLens itself converts the weights. Its
analyses have their own oracles, which run with transformer-lens 4; this file says that the layouts
of transformer-lens 3.9 lead to the same numbers.
"""

import copy
import importlib
from dataclasses import replace
from functools import cache

import bridges
import pandas as pd
import pytest
import torch
from common import tokens

from attn_only_lens import (
    Contrast,
    circuits,
    compare,
    convert,
    explain,
    expose_neuron_heads,
    grow,
    growth,
)
from attn_only_lens import patching as p
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

pytestmark = pytest.mark.hooked
SIZES = {"n_layers": 2, "d_model": 26, "n_ctx": 17, "d_mlp": bridges.D_MLP}
SIZES |= {"d_vocab": bridges.D_VOCAB, "n_heads": 2, "d_head": 13, "dtype": torch.float64}
ROTARY = {"positional_embedding_type": "rotary"}
RMS = {"normalization_type": "RMS", "final_rms": True, "eps": 1e-6, "gated_mlp": True}
GROUPED = ROTARY | {"d_head": 14, "rotary_dim": 14, "n_key_value_heads": 1}
CONFIGS = {
    "gpt2": {"act_fn": "gelu_new"},
    "neox": ROTARY | {"rotary_dim": 6, "act_fn": "gelu", "parallel_attn_mlp": True},
    "llama": RMS | GROUPED | {"act_fn": "silu"},
}
SITES = ["L0H1", "L1H0", "L0N3", "L1N5", "L1N7"]
METRIC = p.logit_diff(correct=7, wrong=8)


PAIR = Contrast(tokens(1), tokens(2), METRIC)
ONE_RUN = Contrast(tokens(1, batch=1), None, METRIC)
ONE_PAIR = Contrast(tokens(1, batch=1), tokens(2, batch=1), METRIC)


def sweep(model, part="z", direction="denoise", positions="each"):
    contrast = PAIR if direction in ("denoise", "noise") else replace(PAIR, corrupted=None)
    sites = p.Sites("all" if part == "k" else SITES, positions=positions)
    return p.activation_patch(model, contrast, sites=sites, part=part, direction=direction).frame


def attributed(model, method="gradient", part="z"):
    return p.attribution(model, PAIR, method=method, part=part).frame


def discovered_and_evaluated(model):
    circuit = circuits.discover(model, PAIR, search=circuits.Search(n_random=2))
    kept = circuits.evaluate(model, circuit, Contrast(tokens(3), tokens(5), METRIC))
    return [circuit.frame, pd.DataFrame([vars(kept)])]


def graph(model, contrast):
    return circuits.attribution_graph(model, contrast, sites=[f"{site}@9" for site in SITES])


ANALYSES = {
    **{f"patch {part}": lambda m, part=part: sweep(m, part) for part in ("z", "pattern", "value")},
    **{f"patch {part}": lambda m, part=part: sweep(m, part, positions=[3]) for part in "qk"},
    **{f"patch {way}": lambda m, way=way: sweep(m, direction=way) for way in ("noise", "mean")},
    "patch to zero": lambda m: sweep(m, direction="zero", positions="all"),
    **{
        f"attribution {method}": lambda m, method=method: attributed(m, method)
        for method in ("gradient", "secant", "integrated")
    },
    "attribution pattern": lambda m: attributed(m, part="pattern"),
    "path_patch": lambda m: (
        p.path_patch(
            m, PAIR, p.Edges(p.Sites(SITES[:3], positions=-1), [*SITES[1:], "logits"])
        ).frame
    ),
    "faithfulness": lambda m: (
        circuits.faithfulness(m, PAIR, p.attribution(m, PAIR), n_random=2).frame
    ),
    "discover and evaluate": discovered_and_evaluated,
    "explain": lambda m: explain(m, ONE_PAIR).table(),
    "graph of a run": lambda m: [graph(m, ONE_RUN).nodes, graph(m, ONE_RUN).edges],
    "graph of a difference": lambda m: [
        getattr(graph(m, ONE_PAIR), name) for name in ("nodes", "edges")
    ],
    "score_sources": lambda m: circuits.score_sources(m, tokens(batch=1), "L1H1", query=-1, key=0),
    "path_expansion": lambda m: circuits.path_expansion(m, Contrast(tokens(), None, METRIC)).paths(
        5
    ),
    "composition": lambda m: circuits.composition(m, "L0N3", "L1H1").frame,
    "copying_scores": circuits.copying_scores,
    "OV circuit": lambda m: circuits.token_circuit(m, "L1N3", "ov").top(5),
    "QK circuit": lambda m: circuits.token_circuit(m, "L1H1", "qk").top(5),
}


HARDEST = "llama"  # gated MLPs, rotary positions, grouped queries; the others run a few analyses
A_FEW = ("patch z", "attribution secant", "path_patch", "graph of a difference", "composition")
CASES = [(name, analysis) for name in CONFIGS for analysis in ANALYSES]
CASES = [case for case in CASES if case[0] == HARDEST or case[1] in A_FEW]


@cache
def sources(name):
    """Return a bridge, and a HookedTransformer with the same weights."""
    original = bridges.original(name)
    model = HookedTransformer(HookedTransformerConfig(**SIZES | CONFIGS[name]))
    weights = importlib.import_module("transformer_lens.pretrained.weight_conversions")
    state = getattr(weights, f"convert_{name}_weights")(original, model.cfg)
    model.load_state_dict(state, strict=False)
    return bridges.bridged(original), model


@cache
def heads_of(name):
    """Return the exposed bridge, the exposed and the converted HookedTransformer."""
    bridge, model = sources(name)
    exposed = [expose_neuron_heads(source, copy=True).model for source in (bridge, model)]
    return *exposed, convert(model)


@pytest.mark.parametrize(("name", "analysis"), CASES)
def test_every_analysis_is_that_of_the_bridge(name, analysis):
    bridge, exposed, converted = heads_of(name)
    expected = ANALYSES[analysis](bridge)
    for model in (exposed, converted):
        require_same(ANALYSES[analysis](model), expected, tolerance(name))


def test_a_comparison_with_a_grown_model_is_that_of_the_bridge():
    sizes = growth.ComparisonSizes(faithfulness=0.5, n_patched=3, n_nodes=5)
    contrast = Contrast(tokens(1), None, p.loss())
    compared = [
        compare(model, grow(model, d_mlp=41, n_heads=4, seed=0), contrast, sizes=sizes)
        for model in sources(HARDEST)
    ]
    # Ranks and choices of edges may turn over by rounding; the circuits' sites do not.
    got, expected = ([result.heads, result.circuits.iloc[:1, :8]] for result in compared)
    require_same(got, expected, tolerance(HARDEST))


def test_another_weight_is_noticed():
    """The control of the tests above."""
    bridge, exposed, _ = heads_of(HARDEST)
    changed = copy.deepcopy(exposed)
    with torch.no_grad():
        changed.blocks[0].mlp.W_in[3, 5] += 1e-3
    with pytest.raises(AssertionError, match="value"):
        require_same(sweep(changed), sweep(bridge), tolerance(HARDEST))


def tolerance(name):
    """Return a relative bound: transformers computes angles of rotary positions in float32."""
    return 1e-9 if name == "gpt2" else 1e-5


def require_same(got, expected, bound):
    """Compare tables in an order that does not depend on rounding."""
    for one, other in zip(*map(_tables, (got, expected)), strict=True):
        pd.testing.assert_frame_equal(one, other, rtol=bound, atol=bound)


def _tables(results):
    tables = results if isinstance(results, list) else [results]
    return [
        table.reset_index(drop=True)
        .sort_values([name for name in table if not pd.api.types.is_float_dtype(table[name])])
        .reset_index(drop=True)
        for table in tables
    ]
