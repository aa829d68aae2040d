"""Tests of how sweeps run: skipped work, batches, clean-up and resuming."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from common import of_a_library, tokens
from models import build

from attn_only_lens import convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.recording import record_pair
from attn_only_lens.engine.replay import make_replay
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.errors import InputError
from attn_only_lens.patching import site_groups
from attn_only_lens.patching.run_patches import Batching
from attn_only_lens.storage.chunks import ChunkStore

POS = 11
METRIC = p.logit_diff(correct=7, wrong=8)
SITES = ["L0N36", "L0N5", "L1N5", "L1N29", "L2N3", "L0H1", "L2H0"]
LAYOUTS = pytest.mark.parametrize("layout", ["two blocks", "in place"])
SAME = {"check_exact": False, "rtol": 0, "atol": 1e-10}


def pair():
    """Return two prompts that differ at positions 4 and 7."""
    clean = tokens(1)
    corrupted = clean.clone()
    corrupted[:, 4], corrupted[:, 7] = (clean[:, 4] + 5) % 41, (clean[:, 7] + 3) % 41
    return clean, corrupted


def made(layout="two blocks", family="gelu"):
    model = build(family)
    if layout == "two blocks":
        return convert(model)
    expose_neuron_heads(model)
    return model


def sweep(model, sites=SITES, metric=METRIC, **how):
    return p.activation_patch(model, *pair(), metric, sites=sites, **{"progress": False} | how)


class Rows:
    """A record of the batch rows and positions in each call of each block."""

    def __init__(self, model):
        self.calls = []
        for index, block in enumerate(model.blocks):
            block.register_forward_pre_hook(of_a_library(self.look(index)))

    def look(self, index):
        return lambda module, args: self.calls.append((index, *args[0].shape[:2]))


@LAYOUTS
def test_a_patch_that_changes_nothing_costs_nothing(layout):
    model = made(layout)
    rows, sites = Rows(model), ["L0N36", "L0N5", "L0N7"]

    def swept(positions, sites=sites):
        """Return the frame and the variants' calls, which have six rows; other calls have two."""
        rows.calls.clear()
        frame = sweep(model, sites, positions=positions).to_frame()
        return frame, [call for call in rows.calls if call[1] == 2 * len(sites)]

    # Before 4, both runs are equal. The metric reads position 10; later positions do not matter.
    frame, calls = swept([0, 1, 2, 3])
    assert not calls
    assert set(frame["score"]) == {0.0}
    assert frame["value"].nunique() == 1
    assert len(swept([0, 1, 2, 3, 4])[1])
    # The last layer's neurons write to the stream that is unembedded, so only their outputs at the
    # metric's position matter.
    last = ["L2N3", "L2N4", "L2N5"]
    frame, calls = swept([4, 7], last)
    assert not calls
    assert set(frame["score"]) == {0.0}
    frame, calls = swept([10], last)
    assert not calls  # only the final norm and two vocabulary columns run, no block
    assert 0.0 not in set(frame["score"])


@LAYOUTS
def test_blocks_before_a_patch_and_positions_before_it_are_not_run(layout):
    model = made(layout)
    rows = Rows(model)
    sweep(model, ["L1N5", "L1N6", "L1N7"], positions=[7])
    calls = [call for call in rows.calls if call[1] == 3 * 2]
    first = 4 if layout == "two blocks" else 2
    assert calls == [(index, 3 * 2, POS - 7) for index in range(first, len(model.blocks))]


def test_a_bidirectional_model_has_no_before():
    model = made(family="bidirectional")
    frame = sweep(model, ["L0N36", "L1N5"], positions="each").to_frame()
    assert (frame["score"] != 0).all()


@LAYOUTS
@pytest.mark.parametrize("part", ["z", "pattern"])
def test_the_batch_size_changes_nothing(layout, part):
    model = made(layout)
    frames = [sweep(model, part=part, batch_size=size).to_frame() for size in (None, 1, 2, 5, 1000)]
    for frame in frames[1:]:
        pd.testing.assert_frame_equal(frame, frames[0], **SAME)


def test_the_order_of_sites_and_positions_changes_nothing():
    model = made()
    frame = sweep(model, positions=[4, 7, 9]).to_frame()
    reordered = sweep(model, SITES[::-1], positions=[9, 4, 7]).to_frame()
    key = ["name", "position"]
    both = frame.astype({"name": str}).merge(reordered.astype({"name": str}), on=key)
    assert len(both) == len(frame) == len(reordered)
    np.testing.assert_allclose(both["value_x"], both["value_y"], rtol=0, atol=1e-10)
    assert frame["value"].nunique() > len(frame) // 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("batch_size", [None, 64])
@LAYOUTS
def test_out_of_memory(layout, batch_size, error):
    model = made(layout)
    expected = sweep(model).to_frame()
    sizes = []

    def full(module, args):
        n = args[0].shape[0]
        sizes.append(n)
        if n > 6:
            raise error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")

    handle = model.blocks[-1].register_forward_pre_hook(of_a_library(full))
    got = sweep(model, batch_size=batch_size).to_frame()
    handle.remove()
    pd.testing.assert_frame_equal(got, expected, **SAME)
    assert max(sizes) > 6
    # The batch size is halved once and remembered; the full size is not tried again.
    assert sum(n > 6 for n in sizes) <= 5


@pytest.mark.parametrize("processes", [1, 2])
def test_batches_on_a_cpu_are_of_what_free_memory_allows(processes, monkeypatch):
    """Free memory for no variant, for one, for three and for any number of variants."""
    model, numbers, of_token = made(), 7001, 101
    monkeypatch.setenv("WORLD_SIZE", str(processes))

    def largest(variants):
        # Half of the free memory is used, and each number takes 8 bytes.
        free = SimpleNamespace(available=int(2 * processes * variants * 8 * numbers))
        monkeypatch.setattr("psutil.virtual_memory", lambda: free)
        batching = Batching(model, None, lambda n: None, of_token)
        sizes, values = [], torch.zeros(5000)

        def run(chunk):
            sizes.append(len(chunk))
            return chunk.double()

        batching.fill(values, torch.arange(5000), numbers, run)
        assert torch.equal(values, torch.arange(5000.0))
        return sizes[0]

    most = 2048 * of_token // numbers  # the memory of 2048 tokens
    assert [largest(n) for n in (0, 0.9, 1.1, 3.5, 10**6)] == [1, 1, 1, 3, most]


def test_out_of_memory_with_one_site_and_other_errors():
    model = made()
    batching = Batching(model, 8, lambda n: None)
    values, alive = torch.zeros(5), torch.arange(5)
    sizes = []

    def run(error):
        def inner(chunk):
            sizes.append(len(chunk))
            raise error

        return inner

    with pytest.raises(torch.OutOfMemoryError):
        batching.fill(values, alive, 1, run(torch.OutOfMemoryError("full")))
    assert sizes == [5, 2, 1]
    sizes.clear()
    with pytest.raises(RuntimeError, match="shapes"):
        batching.fill(values, alive, 1, run(RuntimeError("shapes do not match")))
    assert sizes == [1]


def state(model):
    """Return everything that a sweep may attach to a model while it runs."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        name: (type(m), "forward" in vars(m), sorted(vars(m)), [dict(getattr(m, k)) for k in kinds])
        for name, m in model.named_modules()
    }


@LAYOUTS
@pytest.mark.parametrize("family", ["gelu", "post_norm"])
@pytest.mark.parametrize("after", [0, 5, 9, 14, 19])
def test_an_error_leaves_the_model_as_it_was(layout, family, after):
    model = made(layout, family)
    expected = sweep(model).to_frame()
    logits = model(pair()[0])
    calls = []

    def fail(module, args):
        calls.append(1)
        if len(calls) > after:
            raise ZeroDivisionError

    handle = model.blocks[-1].register_forward_pre_hook(of_a_library(fail))
    handle.remove()
    before = state(model)
    handle = model.blocks[-1].register_forward_pre_hook(of_a_library(fail))
    with pytest.raises(ZeroDivisionError):
        sweep(model, batch_size=3)
    handle.remove()
    assert state(model) == before
    assert torch.equal(model(pair()[0]), logits)
    pd.testing.assert_frame_equal(sweep(model).to_frame(), expected)


def test_gradients_and_mode_are_as_they_were():
    model = made()
    model.train()
    sweep(model)
    assert model.training
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


class Interrupted(ChunkStore):
    """A folder whose sweep is interrupted after some chunks."""

    left = 4

    def put(self, key, arrays):
        if not type(self).left:
            raise KeyboardInterrupt
        type(self).left -= 1
        super().put(key, arrays)


@LAYOUTS
def test_an_interrupted_sweep_goes_on(layout, tmp_path, monkeypatch):
    monkeypatch.setattr(site_groups, "_CHUNKS", 5)
    monkeypatch.setattr(site_groups, "_LEAST", 1)
    model = made(layout)
    whole = sweep(model).to_frame()
    folder = tmp_path / "sweep.chunks"
    rows = Rows(model)

    def calls(**how):
        rows.calls.clear()
        pd.testing.assert_frame_equal(sweep(model, **how).to_frame(), whole)
        return len(rows.calls)

    with monkeypatch.context() as patch:
        patch.setattr(Interrupted, "left", 2)
        patch.setattr("attn_only_lens.patching.job.ChunkStore", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep(model, resume=folder)
    assert len(list(folder.glob("prompts-*"))) == 2
    # A sweep runs all 5 chunks, then the 3 missing ones, and then only the two recorded runs.
    whole_calls = calls(resume=tmp_path / "another")
    assert whole_calls > calls(resume=folder) > calls(resume=folder)
    assert len(list(folder.glob("prompts-*"))) == 5


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"part": "pattern"}, "part"),
        ({"direction": "noise"}, "direction"),
        ({"positions": "all"}, "positions"),
        ({"sites": SITES[1:]}, "sites"),
        ({"metric": p.kl()}, "metric"),
        ({"metric": p.logit_diff(correct=7, wrong=9)}, "metric"),
    ],
)
def test_another_sweep_is_refused(how, named, tmp_path):
    model = made()
    sweep(model, resume=tmp_path / "parts")
    with pytest.raises(InputError, match=f"{named}: got") as caught:
        sweep(model, resume=tmp_path / "parts", **how)
    assert "belongs to another job" in str(caught.value)


def test_another_model_prompt_or_reference_is_refused(tmp_path):
    model = made()
    folder = tmp_path / "parts"
    sweep(model, resume=folder)
    clean, corrupted = pair()
    changed = corrupted.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 41
    with pytest.raises(InputError, match="corrupted: got"):
        p.activation_patch(
            model, clean, changed, METRIC, sites=SITES, progress=False, resume=folder
        )
    mask = torch.ones_like(clean)
    mask[0, 0] = 0
    with pytest.raises(InputError, match="mask: got"):
        sweep(model, mask=mask, resume=folder)
    how = {"direction": "mean", "resume": tmp_path / "mean"}
    sweep(model, reference=tokens(5), **how)
    with pytest.raises(InputError, match="reference: got"):
        sweep(model, reference=tokens(6), **how)
    with torch.no_grad():
        model.blocks[1].attn.W_out[3, 2] += 1e-6
    with pytest.raises(InputError, match="model: got"):
        sweep(model, resume=folder)


def test_a_bar_of_sites(capsys):
    model = made()
    sweep(model, progress=True)
    shown = capsys.readouterr().err
    assert f"{len(SITES) * POS}/{len(SITES) * POS}" in shown
    assert "site/s" in shown
    sweep(model)
    assert not capsys.readouterr().err


def test_a_users_function_needs_a_version_to_be_resumed(tmp_path):
    model = made()

    def swept(fn, folder=tmp_path / "parts", **version):
        metric = p.custom(fn, name="same", **version)
        return p.activation_patch(
            model, *pair(), metric, sites=SITES, progress=False, resume=folder
        )

    def logit(logits):
        return logits[0, -1, 7]

    def another(logits):
        return logits[0, -1, 8]

    with pytest.raises(
        InputError, match=r"without a version; expected p.custom\(fn, version='1'\)"
    ):
        swept(logit)
    assert not (tmp_path / "parts").exists()
    kept = swept(logit, version="1").frame
    assert swept(logit, version="1").frame.equals(kept)
    for fn, version in ((logit, "2"), (another, "1")):
        with pytest.raises(InputError, match="metric_identity: got"):
            swept(fn, version=version)
    # Control: the other function gives other values.
    assert not swept(another, tmp_path / "others", version="1").frame["value"].equals(kept["value"])


def test_the_same_name_with_other_answers_is_another_metric(tmp_path):
    """The metrics share a name, which shows only the first answers, and are still told apart."""
    many = list(range(1, 40))
    one, two = (p.logit_diff([*many, last], [0] * 40) for last in (40, 41))
    assert one.name == two.name
    assert one.identity() != two.identity()


def test_nothing_on_record_holds_a_graph():
    """Recorded keys and values have no autograd graph, which would keep every activation alive."""
    model = made()
    model.requires_grad_(True)
    runs = record_pair(
        model, p.prompt_pair(model, *pair()), METRIC, resolve_sites(model, SITES), "z"
    )
    replay = make_replay(model, runs.corrupted, runs.metric)
    assert replay._past
    assert not any(value.past_keys.requires_grad for value in replay._past.values())
