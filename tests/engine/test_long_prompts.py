"""Tests of rotary positions that are scaled for prompts longer than the original context."""

from functools import partial

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from common import changed, tokens
from patched_runs import difference, whole_runs

from attn_only_lens import Contrast, Work, circuits, expose_neuron_heads, neurons
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
ORIGINAL, METRIC = 7, p.logit_diff(3, 7)
FACTORS = {"short_factor": [1.0] * 7, "long_factor": [1.0 + i / 5 for i in range(7)]}
ROPES = {"dynamic": {}, "longrope": FACTORS}


def llama(kind):
    """Return a model whose original context has 7 tokens, and an exposed bridge around it."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 3.0, **ROPES[kind]}
    longest = ORIGINAL if kind == "dynamic" else 3 * ORIGINAL
    if kind != "dynamic":
        rope["original_max_position_embeddings"] = ORIGINAL
    sizes = bridges.SIZES | bridges.GROUPED | {"max_position_embeddings": longest}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope)
    torch.manual_seed(0)
    make = transformers.AutoModelForCausalLM.from_config
    plain, wrapped = (
        bridges.randomise(make(config, attn_implementation="eager").double().eval())
        for _ in range(2)
    )
    return plain, expose_neuron_heads(bridges.bridged(wrapped)).model


def prompts(pos):
    clean = tokens(5, 1, pos)
    return Contrast(clean, changed(clean, 2), METRIC)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_patches_equal_hooks_in_full_runs_at_every_length(kind):
    """Lengths go up and down, because transformers' dynamic frequencies depend on earlier runs."""
    _, model = llama(kind)
    frames = {}
    circuits.attribution_graph(model, prompts(11), top=5)
    for pos in (11, 5, 11):
        contrast = prompts(pos)
        fresh, _ = llama(kind)  # a model that has seen no other input
        with torch.no_grad():
            expected = fresh(contrast.clean).logits
        assert (model(contrast.clean) - expected).abs().max() < 1e-6 * expected.abs().max()
        sites = p.Sites(["L0H1", "L1N5", "L1H0"], [2, pos - 1])
        sweep = p.activation_patch(model, contrast, sites=sites).frame
        measure = partial(difference, correct=3, wrong=7)
        expected = whole_runs(model, contrast, sweep, measure=measure)
        np.testing.assert_allclose(sweep["value"], expected, rtol=0, atol=1e-5)
        again = frames.setdefault(pos, sweep)
        pd.testing.assert_frame_equal(again, sweep)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_prompts_of_different_lengths_would_share_angles(kind):
    _, model = llama(kind)
    rows = [[(tokens(5, 1, pos)[0] + n) % bridges.D_VOCAB for pos in (11, 9)] for n in (0, 1)]
    with pytest.raises(InputError, match="one length at a time"):
        p.activation_patch(model, Contrast(*rows, METRIC))
    short = [[row[:pos] for row, pos in zip(side, (7, 5), strict=True)] for side in rows]
    p.activation_patch(model, Contrast(*short, METRIC), sites=p.Sites("L1H0", -1))


def test_top_examples_are_those_of_each_text_alone():
    _, model = llama("dynamic")
    texts = [tokens(seed, 1, pos)[0] for seed, pos in enumerate((5, 17, 3, 11, 17, ORIGINAL))]
    corpus, work = neurons.Corpus(texts, context=17), Work(batch_size=7)
    together = neurons.top_examples(model, ["L1N3"], corpus, k=60, work=work)
    assert len({*together["text"]}) == len(texts)
    for text, rows in together.groupby("text"):
        fresh = llama("dynamic")[1]
        _, cache = fresh.run_with_cache(texts[text][None])
        z = cache["blocks.1.mlp.hook_post"][0, :, 3]
        for row in rows.itertuples():
            assert abs(float(z[row.at]) - row.value) < 1e-5
