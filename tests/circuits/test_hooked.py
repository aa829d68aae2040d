"""Tests of options that only HookedTransformer has: other scores, and values that are no sums."""

import pytest
from common import tokens
from models import build
from patched_runs import seen

from attn_only_lens import Contrast, circuits, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.errors import UnsupportedModelError

HEAD, NEURON, QUERY, KEY = "L1H1", "L1N5", 4, 2
PROMPT = tokens(3, batch=1, pos=7)
ONE_RUN = Contrast(PROMPT, None, p.logit_diff(7, 11))


@pytest.mark.parametrize("family", ["alibi", "qk_norm", "norms_before_and_after", "no_norm"])
def test_shares_add_up_to_a_score(family):
    source = build(family, scale=0.25)
    score = float(seen(source, PROMPT, "blocks.1.attn.hook_attn_scores")[0, 1, QUERY, KEY])
    pre = float(seen(source, PROMPT, "blocks.1.mlp.hook_pre")[0, QUERY, 5])
    for model in (convert(source), expose_neuron_heads(source, copy=True).model):
        for expected, places in ((score, (HEAD, QUERY, KEY)), (pre, (NEURON, QUERY))):
            shares = circuits.score_sources(model, PROMPT, *places)["share"]
            assert abs(shares.sum() - expected) < 1e-12 * shares.abs().sum()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda model: circuits.score_sources(model, PROMPT, HEAD, QUERY, KEY), "do not add up"),
        (lambda model: circuits.path_expansion(model, ONE_RUN), "not linear in their values"),
        (lambda model: circuits.attribution_graph(model, ONE_RUN), "not linear in their values"),
    ],
)
def test_values_that_are_clipped_are_refused(call, match):
    with pytest.raises(UnsupportedModelError, match=match):
        call(convert(build("clip_qkv")))
