"""Tests of rows of prompts, their means, standard errors and p-values.

The oracles are runs of single prompts, numerical integration, and the definition of the rates.
"""

import math
import statistics
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from common import changed, tokens
from patched_runs import cached, logit_diff, mask_at, patched_logits

from attn_only_lens import Contrast, Work, load
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
    corrupted = changed(clean, 1)
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
    whole = load(tmp_path / "sweep.parquet")
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
    ("metric", "part", "method"),
    [(METRIC, "q", "exact_gate"), (p.loss(), "z", "secant")],
    ids=["equal weights", "by tokens"],
)
def test_attribution_of_each_prompt_is_that_of_the_prompt_alone(model, metric, part, method):
    settings = {"sites": SITES, "part": part, "method": p.Estimate(method, budget=0)}
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
    roles = {"start": [0, 0, 0], "changed": [1, 1, 1], "end": [n - 1 for n in LENGTHS]}
    for result in (sweep, sweep.query("prompt == 1")):
        assert (result.tokens.clean, result.tokens.roles) == (texts, roles)
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
        pd.testing.assert_frame_equal(load(tmp_path / "blind.csv").frame, blind.frame)
    one = p.activation_patch(model, replace(pair_alone(0), metric=mean.metric), sites=SITES)
    assert "score_standard_error" not in one.frame


def test_paths(model, tmp_path):
    senders, key = ["L0H1", "L0N3"], ["sender", "receiver", "position"]
    receivers = ["L1H0", "L1N5", "logits"]
    edges = p.Edges(p.Sites(senders, ["changed", "end"]), receivers, "z", "anew")

    def patched(**options):
        return p.path_patch(model, PAIR, edges, top=5, **options)

    def by_path(frame):
        return frame.astype({"sender": str, "receiver": str}).set_index(key)["value"]

    rows = patched(per_prompt=True, work=Work(prompts_at_once=1))
    n = len(rows.frame) // 3
    assert rows.frame["prompt"].tolist() == [0, 1, 2] * n
    for i, length in enumerate(LENGTHS):
        roles = {1: "changed", length - 1: "end"}
        of_one = replace(edges, senders=p.Sites(senders, list(roles)))
        one = p.path_patch(model, pair_alone(i), of_one).frame
        one["position"] = one["position"].map(roles)
        of_prompt = by_path(rows.frame[rows.frame["prompt"] == i])
        np.testing.assert_allclose(of_prompt, by_path(one)[of_prompt.index], atol=EXACT)
    values, unpatched, scores = (
        rows.frame[name].to_numpy().reshape(n, 3) for name in ("value", "unpatched", "score")
    )
    assert np.ptp(values, axis=1).max() > 1e-3  # control: prompts differ
    resumed = Work(prompts_at_once=2, resume=tmp_path / "paths")
    for together in (patched(), patched(work=resumed)):
        frame, span = together.frame, together.clean_value - together.corrupted_value
        assert frame[key].equals(rows.frame[key].iloc[::3].reset_index(drop=True))
        for name, expected in {
            "value": values.mean(axis=1),
            "score": scores.mean(axis=1),
            "value_standard_error": values.std(axis=1, ddof=1) / 3**0.5,
            "score_standard_error": (values - unpatched).std(axis=1, ddof=1) / 3**0.5 / abs(span),
            "estimate": rows.frame["estimate"][::3],
        }.items():
            np.testing.assert_allclose(frame[name], expected, atol=EXACT)
    with pytest.raises(InputError, match="per_prompt: got"):
        patched(work=resumed, per_prompt=True)
    rows.save(tmp_path / "rows.csv")
    assert load(tmp_path / "rows.csv").frame["prompt"].tolist() == [0, 1, 2] * n


# Significance

N, TESTED = 11, ["L0H1", "L0N29", "L1H0", "L1N3"]
MANY = tokens(5, batch=N, pos=5)
MANY = Contrast(MANY, changed(MANY, 1), p.logit_diff(7, 11))


def tail(t, df, steps=200_000):
    """Return the probability of a larger |t|, by Simpson's rule over Student's density."""
    x = np.linspace(0, abs(t), 2 * steps + 1)
    size = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
    y = size * (1 + x**2 / df) ** (-(df + 1) / 2)
    inside = (y[0] + 4 * y[1::2].sum() + 2 * y[2:-1:2].sum() + y[-1]) * (x[1] - x[0]) / 3
    return 1 - 2 * inside


def discovered(p_values, rate):
    """Return which hypotheses Benjamini and Yekutieli (2001, theorem 1.3) reject."""
    m, order = len(p_values), sorted(range(len(p_values)), key=lambda i: p_values[i])
    harmonic = sum(1 / i for i in range(1, m + 1))
    largest = [k for k in range(1, m + 1) if p_values[order[k - 1]] <= k * rate / m / harmonic]
    return set(order[: max(largest, default=0)])


@pytest.mark.parametrize(
    ("run", "direction"), [(p.activation_patch, "noise"), (p.attribution, "denoise")]
)
def test_values_of_single_prompts_have_these_p_values(model, run, direction):
    how = {"sites": p.Sites(TESTED, positions=[0, 1, -1]), "direction": direction}
    if run is p.attribution:
        how["method"] = p.Estimate("exact_gate", budget=0)
    sweep, rows = run(model, MANY, **how), run(model, MANY, **how, per_prompt=True)
    span = sweep.clean_value - sweep.corrupted_value
    effects = rows.frame.assign(effect=(rows.frame["value"] - rows.frame["unpatched"]) / span)
    got = sweep.significance()
    assert len(got) == 3 * len(TESTED)
    some = 0
    for row in got.itertuples():
        here = effects[(effects["name"] == row.name) & (effects["position"] == row.position)]
        values = here["effect"].tolist()
        assert len(values) == N
        mean = sum(values) / N
        error = math.sqrt(sum((x - mean) ** 2 for x in values) / (N - 1) / N)
        assert (row.effect, row.standard_error) == pytest.approx((mean, error), abs=1e-12)
        if abs(mean) < 1e-5:  # before the change, or without a path to the metric
            assert abs(mean) < 1e-12
            assert (row.p, row.q) == (1, 1)
        else:
            assert row.p == pytest.approx(tail(mean / error, N - 1), abs=1e-9)
            some += row.p < 0.5
    assert 0 < some < len(got)
    values, q = got["p"].tolist(), got["q"].to_numpy()
    for rate in np.unique([0.01, 0.3, *(q[q < 1] + 1e-9), *(q[q < 1] - 1e-9)]):
        assert set(np.flatnonzero(q <= rate)) == discovered(values, rate)


def test_sweeps_without_p_values_are_refused(model):
    def patched(contrast):
        return p.activation_patch(model, contrast, sites=p.Sites(TESTED[:1], positions=-1))

    twice = torch.arange(N) % 9
    for contrast, match in (
        (Contrast(MANY.clean[:7], MANY.corrupted[:7], MANY.metric), "got 7 prompts; expected 8 or"),
        (replace(MANY, metric=lambda logits: logits[:, -1, 7].mean()), "without standard errors"),
        (Contrast(MANY.clean[twice], MANY.corrupted[twice], MANY.metric), r"prompts \[9, 10\] twi"),
    ):
        with pytest.raises(InputError, match=match):
            patched(contrast).significance()
    assert patched(MANY).query("layer == 1").significance().empty
