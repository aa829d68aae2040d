"""Tests of `plan`: counts, and the estimate from the patches that it times."""

from dataclasses import replace

import bridges
import pytest
from common import tokens

from attn_only_lens import Contrast, Work
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
from attn_only_lens.patching import _plan

pytestmark = pytest.mark.numeric

PAIR = Contrast(tokens(1), tokens(2), p.logit_diff(correct=7, wrong=8))
FIRST, PER_HEAD, PASS = 3.0, 0.25, 0.5  # seconds; the first call takes longer


@pytest.fixture
def model():
    return bridges.exposed("gpt2")


@pytest.fixture
def clock(monkeypatch):
    """Return how many heads are patched in each call, whose time is linear in this number."""
    now, calls = [0.0], []

    def sweep(model, contrast, *, sites, work, **how):
        patched = p.activation_patch(model, contrast, sites=sites, work=work, **how)
        calls.append(patched.frame["name"].nunique())
        now[0] += 1.0 + PER_HEAD * calls[-1]
        now[0] += FIRST if len(calls) == 1 else 0.0

    def run(*args):
        now[0] += PASS

    monkeypatch.setattr(_plan, "activation_patch", sweep)
    monkeypatch.setattr(_plan, "run", run)
    monkeypatch.setattr(_plan.time, "perf_counter", lambda: now[0])
    return calls


def test_the_estimate_is_what_the_whole_sweep_would_take(model, clock, monkeypatch):
    monkeypatch.setattr(_plan, "_SAMPLES", (2, 2, 7))
    cost = p.plan(model, PAIR)
    sweep = p.activation_patch(model, PAIR)
    n_heads = sweep.frame["name"].nunique()
    assert clock == [2, 2, 7]
    assert (cost.n_patches, cost.n_heads) == (len(sweep), n_heads)
    assert cost.n_timed == 7 * len(sweep) // n_heads
    assert cost.seconds == pytest.approx(1.0 + PER_HEAD * n_heads)
    assert cost.passes == pytest.approx(cost.seconds / PASS)
    assert f"{cost.n_patches:,} patches of {n_heads:,} heads" in repr(cost)


def test_a_small_sweep_is_run(model, clock):
    sites = ["L0N3", "L1H1"]
    cost = p.plan(model, PAIR, sites=p.Sites(sites, positions=[-1, 2]), part="z", direction="zero")
    assert clock == [2]
    assert (cost.n_patches, cost.n_heads, cost.n_timed) == (4, 2, 0)
    assert "measured" in repr(cost)


def test_memory_grows_with_prompts_at_once(model):
    one, all_at_once = (
        p.plan(model, PAIR, sites=["L0N3"], work=Work(prompts_at_once=n)) for n in (1, None)
    )
    assert (one.prompts_at_once, all_at_once.prompts_at_once) == (1, len(PAIR))
    assert all_at_once.bytes == len(PAIR) * one.bytes > 0


def test_no_folder_is_written_and_bad_input_is_refused(model, tmp_path):
    folder = tmp_path / "chunks"
    p.plan(model, PAIR, sites=["L0N3"], work=Work(resume=folder))
    assert not folder.exists()
    for contrast, options, reason in (
        (PAIR, {"sites": ["L9N3"]}, "L9N3"),
        (replace(PAIR, corrupted=None), {}, "corrupted"),
        (PAIR, {"work": 3}, "as work"),
    ):
        with pytest.raises(InputError, match=reason):
            p.plan(model, contrast, **options)
