"""Tests of means over prompts, standard errors and rows of prompts, against single-prompt runs."""

import statistics
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from common import tokens
from patched_runs import cached, logit_diff, mask_at, patched_logits

from attn_only_lens import Contrast, Work
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
LENGTHS, SITES = (7, 3, 5), ["L0H1", "L0N29", "L1N3"]
RIGHT, WRONG = [3, 5, 7], [11, 13, 2]
METRIC = p.logit_diff(RIGHT, WRONG)
EXACT = 1e-10


def pair():
    """Return three pairs of different lengths, padded on the right."""
    clean = tokens(5, batch=3, pos=max(LENGTHS))
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 7) % 41
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    roles = {"start": 0, "changed": [1, 1, -4], "end": -1}
    return Contrast(clean, corrupted, METRIC, mask=mask.long(), roles=roles)


PAIR = pair()


def pair_alone(prompt):
    """Return one pair without padding."""
    rows = slice(prompt, prompt + 1), slice(LENGTHS[prompt])
    return Contrast(
        PAIR.clean[rows], PAIR.corrupted[rows], p.logit_diff(RIGHT[prompt], WRONG[prompt])
    )


def alone(model, prompt, name, pos, direction):
    """Return one prompt's logit difference, unpatched and patched by hooks, run alone."""
    contrast = pair_alone(prompt)
    into, source = contrast.clean, contrast.corrupted
    into, source = (into, source) if direction == "noise" else (source, into)
    end = torch.tensor([LENGTHS[prompt] - 1])
    logits = patched = model(into)
    if pos < LENGTHS[prompt]:
        places = mask_at(1, LENGTHS[prompt], pos)
        patched = patched_logits(model, into, cached(model, source), name, "z", places)
    return [logit_diff(values, end, RIGHT[prompt], WRONG[prompt]) for values in (logits, patched)]


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_rows_of_each_prompt_and_means_are_those_of_prompts_run_alone(model, direction, tmp_path):
    """Rows of prompts are at columns; means are by role, and those of roles by numbers alone."""
    settings = {"sites": SITES, "direction": direction}
    resumed = {"per_prompt": True, "work": Work(resume=tmp_path / "rows")}
    p.activation_patch(model, PAIR, **settings, **resumed)
    rows = p.activation_patch(model, PAIR, **settings, **resumed)
    assert len(rows.frame) == 9 * max(LENGTHS)
    some = rows.query("position in [1, 4]").frame  # Prompts differ at 1, and the shortest lacks 4.
    for (name, pos), group in some.groupby(["name", "position"], observed=True):
        ends = [alone(model, prompt, name, pos, direction) for prompt in range(3)]
        unpatched, patched = map(np.array, zip(*ends, strict=True))
        np.testing.assert_allclose(group["unpatched"], unpatched, atol=EXACT)
        np.testing.assert_allclose(group["value"], patched, atol=EXACT)
    work = Work(resume=tmp_path / "means", prompts_at_once=2)
    p.activation_patch(model, PAIR, **settings, work=work)
    p.activation_patch(model, PAIR, **settings, work=work).save(tmp_path / "sweep.parquet")
    whole = p.Sweep.load(tmp_path / "sweep.parquet")
    span = whole.clean_value - whole.corrupted_value
    tokens_of_roles = {"start": [0] * 3, "changed": [1] * 3, "end": [n - 1 for n in LENGTHS]}
    assert len(whole.frame) == len(SITES) * len(tokens_of_roles)
    for mean in whole.frame.itertuples():
        places = enumerate(tokens_of_roles[mean.position])
        ends = [alone(model, prompt, mean.name, pos, direction) for prompt, pos in places]
        unpatched, patched = map(np.array, zip(*ends, strict=True))
        assert mean.value == pytest.approx(patched.mean(), abs=EXACT)
        scores = whole.baseline + (patched - unpatched) / span
        assert mean.score == pytest.approx(scores.mean(), abs=EXACT)
        for got, expected in (
            (mean.value_standard_error, patched),
            (mean.score_standard_error, (patched - unpatched) / span),
        ):
            assert got == pytest.approx(statistics.stdev(expected) / 3**0.5, abs=EXACT)
    # Controls: prompts differ, and a patch without effect has a standard error of 0.
    assert rows.frame["value"].std() > 0.1
    still = whole.frame.query("position == 'start'")
    assert (still["score"] == whole.baseline).all()
    assert (still["score_standard_error"] == 0).all()
    assert (still["value_standard_error"] > 0.01).all()


@pytest.mark.parametrize(
    ("metric", "part"), [(METRIC, "q"), (p.loss(), "z")], ids=["equal weights", "by tokens"]
)
def test_attribution_of_each_prompt_is_that_of_the_prompt_alone(model, metric, part):
    settings = {"sites": SITES, "part": part, "method": p.Estimate(budget=0)}
    contrast = replace(PAIR, metric=metric)
    whole, rows = (
        p.attribution(model, contrast, per_prompt=per_prompt, **settings)
        for per_prompt in (False, True)
    )
    for prompt, length in enumerate(LENGTHS):
        single = pair_alone(prompt)
        single = single if metric is METRIC else replace(single, metric=metric)
        single = p.attribution(model, single, **settings)
        got = rows.frame.query(f"prompt == {prompt} and position < {length}")
        np.testing.assert_allclose(got["value"], single.frame["value"], atol=EXACT)
        np.testing.assert_allclose(got["unpatched"], single.corrupted_value, atol=EXACT)
    weights = np.array([1, 1, 1] if metric is METRIC else [n - 1 for n in LENGTHS])
    weights = weights / weights.sum()
    assert whole.frame["position"].unique().tolist() == list(PAIR.roles)
    by_role = settings | {"sites": p.Sites(SITES, "roles")}
    rows = p.attribution(model, contrast, per_prompt=True, **by_role)
    by_site = rows.frame["value"].to_numpy().reshape(-1, 3)
    np.testing.assert_allclose(whole.frame["value"], by_site @ weights, atol=EXACT)
    # The value is a ratio of two sums, and its error is that of the linear part.
    deviations = weights * (by_site - (by_site @ weights)[:, None])
    expected = np.sqrt((deviations**2).sum(1) * 3 / 2)
    np.testing.assert_allclose(whole.frame["value_standard_error"], expected, atol=EXACT)
    assert by_site.std(axis=1).min() > 0.01


def test_rows_show_the_tokens_and_roles_of_their_prompts(model, tmp_path):
    settings = {"sites": p.Sites(SITES, "roles"), "work": Work(resume=tmp_path / "parts")}
    sweep = p.activation_patch(model, PAIR, per_prompt=True, **settings)
    texts = [
        [str(token) if i < n else None for i, token in enumerate(row)]
        for n, row in zip(LENGTHS, PAIR.clean.tolist(), strict=True)
    ]
    ends = [n - 1 for n in LENGTHS]
    for result in (sweep, sweep.query("prompt == 1")):
        assert result.tokens.clean == texts
        assert result.tokens.corrupted[2][1] == str(PAIR.corrupted[2, 1].item())
        assert result.tokens.roles == {"start": [0, 0, 0], "changed": [1, 1, 1], "end": ends}
    # The same labels at other positions are other settings, so the sweep is not resumed.
    moved = replace(PAIR, roles={**PAIR.roles, "changed": [1, 1, -3]})
    with pytest.raises(InputError, match="where: got"):
        p.activation_patch(model, moved, per_prompt=True, **settings)


def test_a_function_of_all_prompts_has_no_errors_and_one_of_each_has(model, tmp_path):
    sites = p.Sites(SITES, [-1, -2])
    each_prompt = replace(PAIR, metric=lambda logits: logits[:, -1, 3])
    mean = replace(PAIR, metric=lambda logits: logits[:, -1, 3].mean())
    for run in (p.activation_patch, p.attribution):
        rows, blind = run(model, each_prompt, sites=sites), run(model, mean, sites=sites)
        np.testing.assert_allclose(rows.frame["value"], blind.frame["value"], atol=EXACT)
        assert rows.frame["score_standard_error"].max() > 0
        assert blind.frame["score_standard_error"].isna().all()
        assert "without standard errors" in repr(blind)
        with pytest.raises(InputError, match=r"a tensor of shape \[3\]"):
            run(model, mean, sites=sites, per_prompt=True)
        blind.save(tmp_path / "blind.csv")
        pd.testing.assert_frame_equal(p.Sweep.load(tmp_path / "blind.csv").frame, blind.frame)
    one = p.activation_patch(model, replace(pair_alone(0), metric=mean.metric), sites=SITES)
    assert "score_standard_error" not in one.frame
