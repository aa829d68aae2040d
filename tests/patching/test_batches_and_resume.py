"""Tests of how sweeps run: batches, memory, clean-up after errors, and resuming."""

from dataclasses import replace
from functools import partial

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from common import changed, interrupted, of_a_library, tokens

from attn_only_lens import Contrast, Work
from attn_only_lens import patching as p
from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.patching import site_groups
from attn_only_lens.storage.chunks import ChunkStore

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
METRIC = p.logit_diff(correct=7, wrong=8)
SITES = ["L0N36", "L0N5", "L1N5", "L1N29", "L0H1", "L1H0"]
SAME = {"check_exact": False, "rtol": 0, "atol": 1e-10}


CLEAN = tokens(1)
PAIR = Contrast(CLEAN, changed(CLEAN, [4, 7]), METRIC)


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
    """Return everything that an analysis may attach to a model while it runs."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = {
        name: (type(m), vars(m).get("forward"), m.training, [dict(getattr(m, k)) for k in kinds])
        for name, m in model.named_modules()
    }
    weights = [(w.requires_grad, w.grad is None, w._version) for w in model.parameters()]
    return modules, weights, torch.is_grad_enabled()


def attributed(model, method):
    return p.attribution(model, PAIR, sites=SITES, method=p.Estimate(method, budget=0)).to_frame()


@pytest.mark.parametrize(
    ("name", "run", "after"),
    [
        ("gpt2", partial(sweep, work=Work(batch_size=3)), 12),
        ("native", sweep, 1),
        ("llama", partial(attributed, method="exact_gate"), 1),
        ("llama", partial(attributed, method="integrated"), 3),
        ("llama", partial(attributed, method="secant"), 1),
    ],
)
def test_an_error_leaves_the_model_as_it_was(name, run, after):
    model, calls = bridges.exposed_copy(bridges.boot(name)), []
    model.train(name == "native")  # others have dropout
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    expected, logits = run(model), model(CLEAN)  # a bridge attaches some hooks in its first run
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
        run(model)
    assert state(model) == before
    assert torch.equal(model(CLEAN), logits)
    with torch.no_grad():
        pd.testing.assert_frame_equal(run(model), expected, **SAME)
    assert state(model) == before


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
    work, mask = Work(resume=tmp_path / "parts"), torch.ones_like(CLEAN)
    sweep(model, work=work)
    mask[:, 0] = 0
    for how, named in (
        ({"part": "pattern"}, "part"),
        ({"sites": p.Sites(SITES, "all")}, "positions"),
        ({"contrast": replace(PAIR, metric=p.logit_diff(correct=7, wrong=9))}, "metric"),
        ({"contrast": replace(PAIR, mask=mask)}, "mask"),
        ({"contrast": replace(PAIR, corrupted=changed(PAIR.corrupted, 2))}, "corrupted"),
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


# Chunks on disk; `tests/storage` tests damaged ones


def test_other_chunks_and_folders_are_refused(tmp_path):
    foreign = ChunkStore(tmp_path / "theirs", {"metric": "loss"})
    store = ChunkStore(tmp_path / "ours", {"metric": "kl"})
    foreign.put("a", {"a": np.zeros(3)})
    store.put("b", {"a": np.zeros(3)})
    for chunk, match in ((foreign.path("a"), "other settings"), (store.path("b"), "other key")):
        store.path("a").write_bytes(chunk.read_bytes())
        with pytest.raises(CheckpointError, match=match):
            store.get("a")
    for value in (torch.zeros(1), float("nan")):
        with pytest.raises(CheckpointError, match="cannot be written as JSON"):
            ChunkStore(tmp_path / "other", {"value": value})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years")
    with pytest.raises(InputError, match=r"holds \['thesis.tex'\]"):
        ChunkStore(tmp_path / "full", {"metric": "kl"})
