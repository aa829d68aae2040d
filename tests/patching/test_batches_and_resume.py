"""Tests of how sweeps run: batches, memory, clean-up after errors, and resuming."""

from dataclasses import replace

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from common import interrupted, of_a_library, tokens

from attn_only_lens import Contrast, Work
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
from attn_only_lens.patching import site_groups
from attn_only_lens.work import work_reasons

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
POS = 11
METRIC = p.logit_diff(correct=7, wrong=8)
SITES = ["L0N36", "L0N5", "L1N5", "L1N29", "L0H1", "L1H0"]
SAME = {"check_exact": False, "rtol": 0, "atol": 1e-10}


CLEAN = tokens(1)
CORRUPTED = CLEAN.clone()
CORRUPTED[:, 4], CORRUPTED[:, 7] = (CLEAN[:, 4] + 5) % 41, (CLEAN[:, 7] + 3) % 41
PAIR = Contrast(CLEAN, CORRUPTED, METRIC)


@pytest.fixture
def model():
    return bridges.exposed_copy(bridges.boot("gpt2"))


def sweep(model, contrast=PAIR, sites=SITES, **how):
    return p.activation_patch(model, contrast, sites=sites, **how).to_frame()


def test_batch_sizes_and_the_order_of_rows_change_nothing(model):
    for part, size in (("z", 5), ("pattern", 2)):
        got = sweep(model, part=part, work=Work(batch_size=size))
        pd.testing.assert_frame_equal(got, sweep(model, part=part), **SAME)
    first, second = (
        sweep(model, sites=p.Sites(sites, positions)).set_index(["name", "position"])["value"]
        for sites, positions in ((SITES, [4, 7, 9]), (SITES[::-1], [9, 4, 7]))
    )
    np.testing.assert_allclose(first, second[first.index], rtol=0, atol=1e-10)
    assert first.nunique() > len(first) // 2


@pytest.mark.parametrize(
    ("batch_size", "error"), [(None, torch.OutOfMemoryError), (64, RuntimeError)]
)
def test_out_of_memory(model, batch_size, error):
    expected, sizes = sweep(model), []

    def full(module, args):
        n = args[0].shape[0]
        sizes.append(n)
        if n > 6:
            raise error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")

    with model.blocks[-1].register_forward_pre_hook(of_a_library(full)):
        got = sweep(model, work=Work(batch_size=batch_size))
    pd.testing.assert_frame_equal(got, expected, **SAME)
    assert max(sizes) > 6
    # The batch size is halved once and remembered; the full size is not tried again.
    assert sum(n > 6 for n in sizes) <= 5


def state(model):
    """Return everything that a sweep may attach to a model while it runs."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        name: (type(m), vars(m).get("forward"), m.training, [dict(getattr(m, k)) for k in kinds])
        for name, m in model.named_modules()
    }


@pytest.mark.parametrize(("name", "after"), [("gpt2", 12), ("gemma2", 6), ("native", 1)])
def test_an_error_leaves_the_model_as_it_was(name, after):
    model, calls = bridges.exposed_copy(bridges.boot(name)), []
    model.train(name != "gpt2")  # GPT-2 has dropout
    logits = model(CLEAN)
    block = model.blocks[-1]
    vars(block)["forward"] = block.forward  # accelerate leaves this on models that it places
    block.register_forward_pre_hook(lambda *_: None).remove()
    before = state(model)

    def fail(module, args):
        calls.append(1)
        if len(calls) > after:
            raise ZeroDivisionError

    handle = block.mlp.register_forward_pre_hook(of_a_library(fail))
    with handle, pytest.raises(ZeroDivisionError):
        sweep(model, work=Work(batch_size=3))
    assert state(model) == before
    assert torch.equal(model(CLEAN), logits)
    assert len(sweep(model)) == len(SITES) * POS
    assert state(model) == before
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_interrupted_sweep_goes_on(model, tmp_path, monkeypatch):
    monkeypatch.setattr(site_groups, "_CHUNKS", 5)
    monkeypatch.setattr(site_groups, "_LEAST", 1)
    whole, folder, runs = sweep(model), tmp_path / "deep" / "sweep.chunks", []
    model.blocks[0].register_forward_pre_hook(of_a_library(lambda *_: runs.append(1)))

    def n_runs(folder):
        runs.clear()
        pd.testing.assert_frame_equal(sweep(model, work=Work(resume=folder)), whole, **SAME)
        return len(runs)

    with interrupted():
        sweep(model, work=Work(resume=folder))
    assert len(list(folder.glob("prompts-*"))) == 2
    # A sweep runs all 5 chunks, then the 3 missing ones, and then only the two recorded runs.
    assert n_runs(tmp_path / "another") > n_runs(folder) > n_runs(folder)
    assert len(list(folder.glob("prompts-*"))) == 5


def test_results_of_another_job_are_refused(model, tmp_path):
    work, changed, mask = Work(resume=tmp_path / "parts"), CORRUPTED.clone(), torch.ones_like(CLEAN)
    sweep(model, work=work)
    changed[0, 2], mask[:, 0] = (changed[0, 2] + 1) % 41, 0
    for how, named in (
        ({"part": "pattern"}, "part"),
        ({"direction": "noise"}, "direction"),
        ({"sites": p.Sites(SITES, "all")}, "positions"),
        ({"contrast": replace(PAIR, metric=p.logit_diff(correct=7, wrong=9))}, "metric"),
        ({"contrast": replace(PAIR, mask=mask)}, "mask"),
        ({"contrast": replace(PAIR, corrupted=changed)}, "corrupted"),
    ):
        with pytest.raises(InputError, match=f"(?s)belongs to another job.*{named}: got"):
            sweep(model, work=work, **how)
    work_of_means = Work(resume=tmp_path / "mean")
    sweep(model, direction=p.Ablation("mean", tokens(5)), work=work_of_means)
    with pytest.raises(InputError, match="reference: got"):
        sweep(model, direction=p.Ablation("mean", tokens(6)), work=work_of_means)
    with torch.no_grad():
        model.blocks[1].mlp.out.original_component.weight[3, 2] += 1e-6
    with pytest.raises(InputError, match="model: got"):
        sweep(model, work=work)


def test_a_users_function_needs_a_version_to_be_resumed(model, tmp_path):
    def swept(fn, **version):
        metric = p.custom(fn, name="same", **version)
        return sweep(model, replace(PAIR, metric=metric), work=Work(resume=tmp_path / "parts"))

    def logit(logits):
        return logits[0, -1, 7]

    def another(logits):
        return logits[0, -1, 8]

    words = r"without a version; expected p.custom\(fn, version='1'\)"
    with pytest.raises(InputError, match=words):
        swept(logit)
    assert not (tmp_path / "parts").exists()
    kept = swept(logit, version="1")
    assert swept(logit, version="1").equals(kept)
    for fn, version in ((logit, "2"), (another, "1")):
        with pytest.raises(InputError, match="metric_identity: got"):
            swept(fn, version=version)


def test_the_same_name_with_other_answers_is_another_metric():
    """The metrics share a name, which shows only the first answers, and are still told apart."""
    many = list(range(1, 40))
    one, two = (p.logit_diff([*many, last], [0] * 40) for last in (40, 41))
    assert one.name == two.name
    assert one.identity() != two.identity()


def test_work_is_checked_when_it_is_made():
    with pytest.raises(InputError) as caught:
        Work(batch_size=0, prompts_at_once=2.0)
    assert len(caught.value.reasons) == 2
    (unused,) = work_reasons(Work(resume="here"), "batch_size", "prompts_at_once", "resume")
    assert unused.startswith("got resume='here' in work")
