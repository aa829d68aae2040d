"""Tests that an interrupted search goes on where it stopped, and finds the same circuit."""

import pandas as pd
import pytest

from attn_only_lens import Contrast, Work, explain
from attn_only_lens import patching as p
from attn_only_lens.circuits import Search, discover
from attn_only_lens.circuits.ablated_model import AblatedModel
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.numeric


@pytest.fixture
def runs(monkeypatch):
    """The batches of circuits and the gradients that are computed, and how many may be."""
    computed, computed_at_most = [], [None]

    def counted(name, compute):
        def run(self, some):
            if len(computed) == computed_at_most[0]:
                raise KeyboardInterrupt
            computed.append(name)
            return compute(self, some)

        return run

    for name in ("_by_prompt", "_worth"):
        monkeypatch.setattr(AblatedModel, name, counted(name, getattr(AblatedModel, name)))
    return computed, computed_at_most


def found(model, task, folder, **options):
    how = {"sites": p.Sites(positions="roles"), "search": Search(resamples=2)} | options
    return discover(model, task, work=Work(resume=folder, progress=False), **how)


def same(one, other):
    assert {*one.sites} == {*other.sites}
    assert (one.faithfulness, one.random) == (other.faithfulness, other.random)
    pd.testing.assert_frame_equal(one.tried, other.tried)
    pd.testing.assert_frame_equal(one.stability.sites, other.stability.sites)


def test_an_interrupted_search_computes_nothing_twice(model, task, runs, tmp_path):
    computed, at_most = runs
    alone, n = found(model, task, None), len(computed)
    for stop in (3, n - 1):
        at_most[0] = stop
        computed.clear()
        folder = tmp_path / f"{stop}"
        with pytest.raises(KeyboardInterrupt):
            found(model, task, folder)
        at_most[0] = None
        same(found(model, task, folder), alone)
        assert len(computed) == n
        same(found(model, task, folder), alone)
        assert len(computed) == n


def test_a_search_in_chunks_of_prompts_resumes(model, task, runs, tmp_path):
    computed, _ = runs
    work = Work(prompts_at_once=3, progress=False, resume=tmp_path / "parts")
    how = {"sites": p.Sites(positions="roles"), "search": Search(resamples=2), "work": work}
    first = discover(model, task, **how)
    computed.clear()
    same(discover(model, task, **how), first)
    assert "_worth" not in computed


def test_a_folder_of_another_search_is_refused(model, task, tmp_path):
    found(model, task[:4], tmp_path, search=Search())
    found(model, task[:4], tmp_path, search=Search(n_random=5), faithfulness=0.8)  # shares circuits
    resampled = found(model, task[:4], tmp_path)
    same(resampled, found(model, task[:4], None))
    for other, options, says in (
        (task[1:5], {}, "clean: got"),
        (task[:4], {"search": Search(ablation="mean")}, "ablation: got"),
        (task[:4], {"sites": p.Sites("neurons", "roles")}, "sites: got"),
    ):
        with pytest.raises(InputError, match=says):
            found(model, other, tmp_path, **{"search": Search()} | options)


def test_an_explanation_resumes_its_search(model, runs, tmp_path):
    computed, at_most = runs
    pair = Contrast(
        "The keys near the cabinet", "The key near the cabinet", p.logit_diff(" are", " is")
    )
    alone = explain(model, pair, work=Work(progress=False))
    computed.clear()
    explain(model, pair, work=Work(resume=tmp_path / "whole", progress=False))
    n = len(computed)
    computed.clear()
    at_most[0], work = n // 2, Work(resume=tmp_path / "half", progress=False)
    with pytest.raises(KeyboardInterrupt):
        explain(model, pair, work=work)
    at_most[0] = None
    again = explain(model, pair, work=work)
    assert len(computed) == n
    pd.testing.assert_frame_equal(again.table(), alone.table())
