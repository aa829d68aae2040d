"""Tests of prompts in chunks: equal results, the memory of one chunk, and resuming.

`test_over_prompts.py` tests the results of all prompts at once, and some chunks of prompts, against
prompts run alone.
"""

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from allocations import Allocated
from common import interrupted, tokens

from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
from attn_only_lens.patching import prompt_chunks

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
LENGTHS, SITES = (3, 7, 5, 6, 7, 2, 4), ["L0H1", "L0N29", "L1N3", "L1H0"]
RIGHT, WRONG = [3, 5, 7, 1, 2, 3, 4], [11, 13, 2, 4, 5, 6, 7]
DIFF, EXACT = p.logit_diff(RIGHT, WRONG), 1e-11
CHANCES = p.probability_diff([[answer] for answer in RIGHT], [[answer, 17] for answer in WRONG])
ROLES = {"changed": [1, 1, -4, 1, 1, 1, -3], "end": -1}


@pytest.fixture(scope="module")
def model():
    return bridges.exposed_copy(bridges.boot("gpt2"))


def prompts(n=7, pos=7, padded=True):
    clean = tokens(5, batch=n, pos=pos)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 7) % 41
    mask = (torch.arange(pos) < torch.tensor(LENGTHS)[:, None]).long() if padded else None
    return {"clean": clean, "corrupted": corrupted, "mask": mask}


def assert_same(first, second):
    assert list(first.frame) == list(second.frame)
    for name, column in first.frame.items():
        if column.dtype == float:
            np.testing.assert_allclose(second.frame[name], column, atol=EXACT, err_msg=name)
        else:
            assert (second.frame[name] == column).all()
    for name in ("clean_value", "corrupted_value"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), abs=EXACT)


@pytest.mark.parametrize(
    ("metric", "options", "at_once"),
    [
        (DIFF, {}, 1),
        (p.loss(), {"direction": "noise"}, 5),
        (p.loss(), {"per_prompt": True}, 3),
        (p.kl(), {"positions": ROLES, "part": "q"}, 3),
        (CHANCES, {"direction": "mean"}, 3),
        (DIFF, {"direction": "mean", "reference": tokens(8, batch=4, pos=5)}, 5),
        (DIFF, {"direction": "resample", "reference": tokens(8, batch=7, pos=7)}, 3),
    ],
)
def test_chunks_of_prompts_give_what_all_give_at_once(model, metric, options, at_once):
    settings = {"sites": SITES, "progress": False, **prompts(), **options}
    for run, more in ((p.activation_patch, {}), (p.attribution, {"budget": 0})):
        whole = run(model, metric=metric, **settings, **more)
        assert_same(whole, run(model, metric=metric, prompts_at_once=at_once, **settings, **more))
    errors = "unpatched" if options.get("per_prompt") else "value_standard_error"
    assert whole.frame[errors].abs().min() > 0  # because prompts differ


def test_prompts_are_resampled_from_those_of_the_next_chunk(model):
    settings = {"sites": SITES, "progress": False, "direction": "resample", "metric": DIFF}
    settings |= prompts(padded=False)
    assert_same(
        p.activation_patch(model, **settings),
        p.activation_patch(model, prompts_at_once=2, **settings),
    )
    with pytest.raises(InputError, match="padding of other prompts"):
        p.activation_patch(model, **settings | prompts(), prompts_at_once=2)
    reference = {"reference": tokens(8, batch=2, pos=7)}
    with pytest.raises(InputError, match=r"got reference prompts \[2, 7\]; expected \[7, 7\]"):
        p.activation_patch(model, **settings, **reference, prompts_at_once=2)


@pytest.mark.parametrize("run", [p.activation_patch, p.attribution])
def test_chunks_of_pairs_that_are_alike_and_of_prompts_without_a_loss(model, run):
    settings = {"sites": SITES, "progress": False, **prompts(3)}
    settings |= {"mask": (torch.arange(7) < torch.tensor([5, 1, 1])[:, None]).long()}
    alike = settings["clean"][:1].clone(), settings["corrupted"][1:]
    for metric, more in ((p.loss(), {}), (p.logit_diff(3, 5), {"corrupted": torch.cat(alike)})):
        options = settings | more | {"budget": 0} if run is p.attribution else settings | more
        options |= {"mask": None} if more else {}
        assert_same(
            run(model, metric=metric, **options),
            run(model, metric=metric, prompts_at_once=1, **options),
        )


@pytest.mark.parametrize(
    ("run", "per_prompt"), [(p.activation_patch, True), (p.attribution, False)]
)
def test_an_interrupted_chunk_is_lost_and_no_other(model, run, per_prompt, tmp_path):
    settings = {"sites": SITES, "per_prompt": per_prompt, "progress": False, "metric": p.loss()}
    settings |= prompts()
    whole = run(model, prompts_at_once=2, **settings)
    with interrupted():
        run(model, prompts_at_once=2, resume=tmp_path, **settings)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("prompts-*")}
    again = run(model, resume=tmp_path, **settings)  # resuming uses the stored prompts_at_once
    pd.testing.assert_frame_equal(again.frame, whole.frame, check_exact=True)
    assert (again.expected_pearson, again.forwards) == (whole.expected_pearson, whole.forwards)
    assert len(kept) == 2
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    with pytest.raises(InputError, match="prompts_at_once: got 3; the folder has 2"):
        run(model, prompts_at_once=3, resume=tmp_path, **settings)
    metric = p.custom(lambda logits: logits[:, -1, 3], version="1")
    with pytest.raises(InputError, match="metric: got"):  # not its need for all prompts
        run(model, resume=tmp_path, **settings | {"metric": metric})


def test_repairs_of_each_chunk(model):
    settings = {"sites": SITES, "progress": False, "metric": DIFF, **prompts()}
    exact = p.activation_patch(model, **settings)
    every = p.attribution(model, budget=1000, prompts_at_once=3, **settings)
    np.testing.assert_allclose(every.frame["value"], exact.frame["value"], atol=EXACT)
    assert set(every.expected_pearson.values()) == {1}
    some = p.attribution(model, budget=1, prompts_at_once=3, **settings)
    assert 0 < some.forwards <= 1
    assert some.frame["exact"].sum() < every.frame["exact"].sum()
    rows = some.frame["exact"]
    np.testing.assert_allclose(some.frame["value"][rows], exact.frame["value"][rows], atol=EXACT)
    assert set(some.expected_pearson.values()) == {None}  # too few patches for an estimate


@pytest.mark.parametrize("run", [p.activation_patch, p.attribution])
def test_memory_is_that_of_a_chunk_of_prompts(model, run):
    def peak(n, at_once):
        settings = {"metric": p.logit_diff(3, 5), "positions": -1, "prompts_at_once": at_once}
        with Allocated() as allocated:
            run(model, sites=SITES[1:3], progress=False, **settings, **prompts(n, padded=False))
        return allocated.most

    few, many, all_at_once = peak(11, 11), peak(33, 11), peak(33, 33)
    assert many < 1.2 * few
    assert all_at_once > 2 * few


def test_as_many_prompts_as_fit_are_run_at_once(model, monkeypatch):
    made = []
    of = prompt_chunks.PromptChunks.of

    def counted(self, prompts):
        made.append(len(prompts))
        return of(self, prompts)

    monkeypatch.setattr(prompt_chunks.PromptChunks, "of", counted)
    settings = {"sites": SITES, "progress": False, "metric": DIFF, **prompts()}
    p.activation_patch(model, **settings)
    assert set(made) == {7}
    made.clear()
    monkeypatch.setattr(prompt_chunks, "_numbers_that_fit", lambda model: 20000)
    p.activation_patch(model, **settings)
    assert max(made) < 7
    made.clear()
    p.activation_patch(model, **settings | {"metric": lambda logits: logits[:, -1, 3].mean()})
    assert set(made) == {7}


def test_refused(model):
    settings = {"sites": SITES, "progress": False, **prompts()}
    with pytest.raises(InputError, match="a function of the logits of all 7 prompts"):
        p.activation_patch(
            model, metric=lambda logits: logits[:, -1, 3], prompts_at_once=2, **settings
        )
    with pytest.raises(InputError, match="got prompts_at_once=0; expected a whole number"):
        p.attribution(model, metric=DIFF, prompts_at_once=0, **settings)
    with pytest.raises(InputError, match="got 2 answers; expected 1, or one for each of the 7"):
        p.activation_patch(model, metric=p.logit_diff([1, 2], 3), prompts_at_once=2, **settings)
    swapped = {"clean": settings["clean"][:2], "corrupted": settings["clean"][[1, 0]], "mask": None}
    for run in (p.activation_patch, p.attribution):  # only the means are equal
        with pytest.raises(InputError, match=r"equal up to rounding in torch\.float64"):
            run(model, metric=p.logit_diff(3, 5), prompts_at_once=1, **settings | swapped)
    late = p.logit_diff(RIGHT, [*WRONG[:-1], RIGHT[-1]])  # equal in the last prompt
    with pytest.raises(InputError, match=r"same token for prompts \[6\]"):
        p.activation_patch(model, metric=late, prompts_at_once=2, **settings)
