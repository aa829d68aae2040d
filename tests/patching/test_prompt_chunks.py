"""Tests of prompts in chunks: equal results, the memory of one chunk, and resuming.

`test_over_prompts.py` tests the results of all prompts at once, and some chunks of prompts, against
prompts run alone.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from allocations import Allocated
from common import changed, interrupted, tokens

from attn_only_lens import Contrast, Work
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
from attn_only_lens.patching import prompt_chunks

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
LENGTHS, SITES = (3, 7, 5, 6, 7, 2, 4), ["L0H1", "L0N29", "L1N3", "L1H0"]
RIGHT, WRONG = [3, 5, 7, 1, 2, 3, 4], [11, 13, 2, 4, 5, 6, 7]
DIFF, EXACT = p.logit_diff(RIGHT, WRONG), 1e-11
CHANCES = p.probability_diff([[answer] for answer in RIGHT], [[answer, 17] for answer in WRONG])
ROLES = {"changed": [1, 1, -4, 1, 1, 1, -3], "end": -1}
NO_REPAIRS = p.Estimate(budget=0)


def prompts(n=7, metric=DIFF, lengths=LENGTHS):
    clean = tokens(5, batch=n, pos=7)
    corrupted = changed(clean, 1)
    mask = (torch.arange(7) < torch.tensor(lengths)[:, None]).long() if lengths else None
    return Contrast(clean, corrupted, metric, mask=mask, roles=ROLES if n == 7 else {})


PADDED, WHOLE = prompts(), prompts(lengths=None)


def at_once(n, **options):
    return {"work": Work(prompts_at_once=n, **options)}


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
    ("metric", "options", "n"),
    [
        (p.loss(), {"per_prompt": True}, 3),
        (p.kl(), {"sites": p.Sites(SITES, "roles"), "part": "q"}, 3),
        (CHANCES, {"direction": "mean"}, 3),
        (DIFF, {"direction": p.Ablation("resample", tokens(8, batch=7, pos=7))}, 3),
    ],
)
def test_chunks_of_prompts_give_what_all_give_at_once(model, metric, options, n):
    contrast, settings = replace(PADDED, metric=metric), {"sites": SITES, **options}
    for run, more in ((p.activation_patch, {}), (p.attribution, {"method": NO_REPAIRS})):
        whole = run(model, contrast, **settings, **more)
        assert_same(whole, run(model, contrast, **settings, **more, **at_once(n)))
    errors = "unpatched" if options.get("per_prompt") else "value_standard_error"
    assert whole.frame[errors].abs().min() > 0  # because prompts differ


def test_prompts_are_resampled_from_those_of_the_next_chunk(model):
    def resampled(contrast=WHOLE, n=2, reference=None):
        direction = p.Ablation("resample", reference)
        return p.activation_patch(model, contrast, sites=SITES, direction=direction, **at_once(n))

    assert_same(resampled(n=None), resampled())
    with pytest.raises(InputError, match="padding of other prompts"):
        resampled(PADDED)
    with pytest.raises(InputError, match=r"got reference prompts \[2, 7\]; expected \[7, 7\]"):
        resampled(reference=tokens(8, batch=2, pos=7))


@pytest.mark.parametrize(
    ("run", "per_prompt"), [(p.activation_patch, True), (p.attribution, False)]
)
def test_an_interrupted_chunk_is_lost_and_no_other(model, run, per_prompt, tmp_path):
    contrast, settings = prompts(metric=p.loss()), {"sites": SITES, "per_prompt": per_prompt}
    whole = run(model, contrast, **settings, **at_once(2))
    with interrupted():
        run(model, contrast, **settings, **at_once(2, resume=tmp_path))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("prompts-*")}
    resumed = Work(resume=tmp_path)
    again = run(model, contrast, **settings, work=resumed)  # uses the stored prompts_at_once
    pd.testing.assert_frame_equal(again.frame, whole.frame, check_exact=True)
    assert (again.expected_pearson, again.forwards) == (whole.expected_pearson, whole.forwards)
    assert len(kept) == 2
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    with pytest.raises(InputError, match="prompts_at_once: got 3; the folder has 2"):
        run(model, contrast, **settings, **at_once(3, resume=tmp_path))
    contrast = replace(contrast, metric=p.custom(lambda logits: logits[:, -1, 3], version="1"))
    with pytest.raises(InputError, match="metric: got"):  # not its need for all prompts
        run(model, contrast, **settings, work=resumed)


def test_memory_is_that_of_a_chunk_of_prompts(model):
    def peak(n, n_at_once):
        contrast = prompts(n, p.logit_diff(3, 5), lengths=None)
        with Allocated() as allocated:
            p.attribution(model, contrast, sites=p.Sites(SITES[1:3], -1), **at_once(n_at_once))
        return allocated.most

    few, many, together = peak(11, 11), peak(33, 11), peak(33, 33)
    assert many < 1.2 * few
    assert together > 2 * few


def test_as_many_prompts_as_fit_are_run_at_once(model, monkeypatch):
    made = []
    of = prompt_chunks.PromptChunks.of

    def counted(self, prompts):
        made.append(len(prompts))
        return of(self, prompts)

    monkeypatch.setattr(prompt_chunks.PromptChunks, "of", counted)
    p.activation_patch(model, PADDED, sites=SITES)
    assert set(made) == {7}
    made.clear()
    monkeypatch.setattr(prompt_chunks, "_numbers_that_fit", lambda model: 20000)
    p.activation_patch(model, PADDED, sites=SITES)
    assert max(made) < 7


def test_refused(model):
    mean = replace(PADDED, metric=lambda logits: logits[:, -1, 3].mean())
    for call in (p.activation_patch, partial(p.path_patch, edges=p.Edges("L0H1", "L1H0"))):
        with pytest.raises(InputError, match="a function of the logits of all 7 prompts"):
            call(model, mean, **at_once(2))
    swapped = Contrast(WHOLE.clean[:2], WHOLE.clean[[1, 0]], p.logit_diff(3, 5))
    for run in (p.activation_patch, p.attribution):  # only the means are equal
        with pytest.raises(InputError, match=r"equal up to rounding in torch\.float64"):
            run(model, swapped, sites=SITES, **at_once(1))
