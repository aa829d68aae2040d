"""Tests of circuits that are alike up to some block, and are run once up to there."""

import bridges
import numpy as np
import pytest
from common import tokens

from attn_only_lens import Contrast
from attn_only_lens import patching as p
from attn_only_lens.circuits.ablated_model import AblatedModel
from attn_only_lens.engine.passed_tests import passed_tests
from attn_only_lens.engine.recording import output_stream
from attn_only_lens.engine.replay.base import Joined
from attn_only_lens.patching.site_groups import site_groups, site_rows
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = pytest.mark.numeric

KINDS = ["gpt2", "llama", "native_gated", "neox"]
if HAS_HOOKED_TRANSFORMER:  # the last one stores values between its blocks
    KINDS += ["converted gelu", "converted parallel"]


def ablated(model):
    clean = tokens(batch=3, pos=5)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 7) % 41
    pair = Contrast(clean, corrupted, p.logit_diff(7, 11)).pair(model)
    sites = site_rows(site_groups(model, pair, p.Sites(positions="each"), "z"))
    return AblatedModel(model, pair, p.logit_diff(7, 11), sites, ablation="resample")


def circuits_of(sites):
    """Return circuits that share what they have in the first layers, in a mixed order."""
    generator, last = np.random.default_rng(0), sites["layer"].max()
    early, late = (np.flatnonzero((sites["layer"] == last) == x) for x in (False, True))
    some = [generator.choice(early, 29, replace=False) for _ in range(2)]
    ends = [generator.choice(late, 17, replace=False) for _ in range(3)]
    every = [np.concatenate([one, end]) for end in ends for one in some]
    return [*every, some[1], np.arange(len(sites)), np.array([], dtype=int), every[4]]


@pytest.mark.parametrize("kind", KINDS)
def test_each_circuit_has_the_value_that_it_has_alone(kind):
    model = ablated(bridges.with_heads(kind))
    assert model._replay.can_branch(model._first)
    some = circuits_of(model.sites)
    rows = list[int]()
    count = lambda block, args, output: rows.append(len(output_stream(output)))  # noqa: E731
    alone = np.concatenate([model.by_prompt([circuit]) for circuit in some])
    handles = [x.register_forward_hook(count) for x in model._replay.model.blocks]
    together = model.by_prompt(some)
    for handle in handles:
        handle.remove()
    np.testing.assert_allclose(together, alone, rtol=1e-11)
    assert len(np.unique(together.round(9), axis=0)) > 3
    # Two sets of early sites, all sites and none: four circuits; one of ten is there twice.
    n_first, n_last = rows[0] // 3, rows[-1] // 3
    assert n_first <= 4
    assert n_last == 9


def test_without_branches_if_rows_of_other_variants_are_read(monkeypatch):
    """As in a model whose blocks keep the rows of an earlier block."""
    exposed = bridges.with_heads("gpt2")
    expected = ablated(exposed).by_prompt(circuits_of(ablated(exposed).sites))
    monkeypatch.setattr(Joined, "parted", lambda self, block, x: x)
    passed_tests(exposed)._lengths.clear()
    model = ablated(exposed)
    assert not model._replay.can_branch(model._first)
    found = model.by_prompt(circuits_of(model.sites))
    np.testing.assert_allclose(found, expected, rtol=1e-11)
