"""Tests of results: scores, the order of `top`, saved files, and the agreement of two sweeps."""

import sys

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from random_sweeps import POSITIONS, RUN, SITES, TEXTS, TOKENS, sweep, values
from sealed_files import rewrite

from attn_only_lens import load
from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.patching.prompt_tokens import PromptTokens
from attn_only_lens.patching.results import Sweep

COLUMNS = ["layer", "kind", "index", "name", "position", "part", "value", "score"]


def test_columns_and_scores():
    frame = sweep().to_frame()
    assert list(frame.columns) == COLUMNS
    assert len(frame) == SITES * POSITIONS
    assert set(frame["part"]) == {"z"}
    for got, value in zip(frame["score"], values()["value"], strict=True):
        assert got == pytest.approx((value + 1.3) / 5.0, rel=1e-14)
    assert frame["name"].tolist() == values()["name"].tolist()
    assert [str(frame[c].dtype) for c in ("kind", "name", "part")] == ["category"] * 3
    assert "z, denoise, 65 rows, 7 prompts" in repr(sweep())
    frame["score"] = 0.0  # to_frame returns a copy
    assert sweep().frame["score"].abs().min() > 0


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_the_scale_is_the_same_in_both_directions(direction):
    ends = values().iloc[:2].assign(value=[RUN["corrupted_value"], RUN["clean_value"]])
    result = sweep(frame=ends, direction=direction)
    assert result.frame["score"].tolist() == [0.0, 1.0]
    # Sites without effect come last.
    with pytest.raises(InputError, match="expected a whole number, 1 or more"):
        result.top(0)
    moved = 1 if direction == "denoise" else 0
    assert result.top(1)["score"].tolist() == [float(moved)]
    assert result.effect.tolist() == ([0.0, 1.0] if moved else [-1.0, 0.0])


def test_top_shows_tokens_and_fits_into_80_columns(tmp_path):
    """A position's token is shown if it is the same in all prompts, or that of a row's prompt."""
    frame = values().replace({"name": {f"L{i % 2}N{i}": f"L{i % 2}N1234{i}" for i in range(SITES)}})
    errors = dict.fromkeys(("value_standard_error", "score_standard_error"), 0.1234567)
    sweep(frame=frame.assign(**errors, exact=True), tokens=TOKENS).save(tmp_path / "sweep.parquet")
    top = load(tmp_path / "sweep.parquet").top(9)
    assert list(top)[:5] == ["name", "position", "token", "part", "score"]
    assert top["token"].tolist() == [TEXTS[position] for position in top["position"]]
    assert max(map(len, str(top).splitlines())) <= 80
    clean = [[*TEXTS[:3], token, TEXTS[4]] for token in "abcdefg"]
    for more, token in (({}, ""), ({"prompt": 6, "unpatched": 0.1}, "g")):
        top = Sweep(frame.assign(**more), **RUN, tokens=PromptTokens(clean, [], {})).top(65)
        assert set(top["token"][top["position"] == 3]) == {token}
        assert set(top["token"][top["position"] == 2]) == {" the"}
    role = sweep(frame=values(positions=["subject"]), tokens=TOKENS).top(3)
    assert set(zip(role["position"], role["token"], strict=True)) == {("subject", " the")}
    assert "token" not in sweep().top(3)


def test_query_keeps_what_was_run():
    rows = sweep(direction="noise").query("layer == 1 and position == 3")
    assert (rows.direction, rows.metric) == ("noise", RUN["metric"])
    assert set(rows.frame["layer"]) == {1}
    assert rows.frame["name"].cat.categories.tolist() == rows.frame["name"].tolist()
    names = rows.frame["name"].tolist()[:3]
    assert len(rows.query("name in @names")) == len(names)
    for condition in ("layer", "layer + 1", "nothing == 1", "layer ==", "position < 'a'"):
        with pytest.raises(InputError, match="no rows can be selected"):
            rows.query(condition)


OPTIONAL = {
    "none": {},
    "each prompt": {"prompt": 3, "unpatched": 0.3},
    "means": {"value_standard_error": 0.1, "score_standard_error": np.nan, "exact": [True, False]},
}


@pytest.mark.parametrize("ending", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("positions", "columns"),
    [(range(POSITIONS), "means"), (["all"], "none"), (["subject", "end"], "each prompt")],
)
def test_saved_and_loaded(ending, positions, columns, tmp_path):
    path = tmp_path / "deep" / f"sweep.{ending}"
    frame = values(positions=positions)
    optional = {
        name: np.resize(np.array(values), len(frame)) for name, values in OPTIONAL[columns].items()
    }
    saved = sweep(frame=frame.assign(**optional), tokens=TOKENS)
    saved.save(path)
    saved.save(path)  # replaces the file
    loaded = load(path)
    pd.testing.assert_frame_equal(loaded.frame, saved.frame, check_exact=True)
    assert {key: getattr(loaded, key) for key in RUN} == RUN
    assert loaded.tokens == saved.tokens == saved.query("layer == 0").tokens
    left = {entry.name for entry in path.parent.iterdir()}
    assert left == {path.name} | ({f"{path.name}.json"} if ending == "csv" else set())


def test_files_that_are_no_sweep(tmp_path):
    values().to_parquet(tmp_path / "plain.parquet")
    values().to_csv(tmp_path / "plain.csv")
    for name, reason in {
        "plain.parquet": "attn-only-lens did not write it",
        "plain.csv": "plain.csv.json is missing",
        "sweep.txt": "there is no folder",
    }.items():
        with pytest.raises(CheckpointError, match=reason):
            load(tmp_path / name)
    sweep().save(tmp_path / "new.csv")
    rewrite(tmp_path / "new.csv.json", format_version=6)
    with pytest.raises(CheckpointError, match="format version 6"):
        load(tmp_path / "new.csv")


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    sweep().save(tmp_path / "sweep.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # pandas itself may use pyarrow
    with pytest.raises(CheckpointError, match="pip install pyarrow"):
        sweep().save(tmp_path / "other.parquet")
    with pytest.raises(CheckpointError, match="pip install pyarrow"):
        load(tmp_path / "sweep.parquet")
    sweep().save(tmp_path / "sweep.csv")
    assert len(load(tmp_path / "sweep.csv").frame) == SITES * POSITIONS


BAD = {
    "columns": ({}, lambda f: f.drop(columns="name"), "got columns"),
    "flags": ({}, lambda f: f.assign(exact=1), "got exact=1; expected True or False"),
    "nan": ({}, lambda f: f.assign(value=np.nan), "65 of 65 values are not finite"),
    "twice": ({}, lambda f: pd.concat([f, f[:2]]), "2 rows repeat a site, such as L0H0"),
    "positions": ({}, lambda f: f.assign(position=["all"] + [3] * 64), "only numbers, or only"),
    "direction": ({"direction": "up"}, lambda f: f, "got direction='up'"),
    "constant": ({"clean_value": -1.3}, lambda f: f, "two finite numbers that differ"),
    "two heads": ({}, lambda f: f.assign(layer=range(65)), "rows for L0H0 have different layer"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    changes, change, reason = BAD[case]
    with pytest.raises(ValueError, match=reason):  # an InputError is one
        Sweep(change(values()), **RUN | changes)


# Agreement


EXACT = 1e-12  # rounding of means over 65 numbers


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_agreement_against_scipy(direction):
    exact = sweep(0, direction=direction)
    noisy = values(0).assign(value=(values(0)["value"] + 0.7 * values(1)["value"]).round(1))
    approx = sweep(frame=noisy.sample(frac=1.0, random_state=3), direction=direction)
    (row,) = exact.agreement(approx, k=11).to_dict("records")
    first, second = exact.frame["value"], sweep(frame=noisy).frame["value"]
    assert second.duplicated().any()  # ties get their mean rank
    assert row["pearson"] == pytest.approx(scipy.stats.pearsonr(first, second)[0], abs=EXACT)
    assert row["spearman"] == pytest.approx(scipy.stats.spearmanr(first, second)[0], abs=EXACT)
    # The effect is the distance from the value of the patched run, not from 0.
    base = {"denoise": -1.3, "noise": 3.7}[direction]
    tops = [
        set(np.argsort(-np.abs(values - base), kind="stable")[:11]) for values in (first, second)
    ]
    assert row["top_k"] == len(tops[0] & tops[1]) / 11
    assert 0 < row["top_k"] < 1
    assert (row["k"], row["n"]) == (11, 65)
    # Control: rows compared by number instead of by site give another correlation.
    misaligned = np.corrcoef(first, approx.frame["value"])[0, 1]
    assert abs(misaligned - row["pearson"]) > 0.1


def test_sweeps_that_cannot_be_compared():
    flat = sweep(frame=values().assign(value=1.0), part="q")
    for other, options, reasons in (
        (sweep(frame=values().iloc[3:].replace("L1N4", "L1N5000")), {}, ["8 of 65 rows"]),
        (sweep(frame=values(positions=["all"])), {}, ["13 of 13 only in the other"]),
        (sweep(clean_value=3.5), {}, ["clean_value is 3.7 in this sweep and 3.5"]),
        (
            flat,
            {"k": 66},
            ["has part 'z', the other 'q'", "all scores of the other", "k"],
        ),
    ):
        with pytest.raises(InputError) as caught:
            sweep().agreement(other, **options)
        for got, reason in zip(caught.value.reasons, reasons, strict=True):
            assert reason in got


def test_rows_of_each_prompt_are_held_against_the_same():
    first, second = (
        sweep(
            frame=pd.concat(
                values(seed + prompt).assign(prompt=prompt, unpatched=0.1) for prompt in range(2)
            )
        )
        for seed in (0, 2)
    )
    row = first.agreement(second, k=9).iloc[0]
    expected = np.corrcoef(first.frame["value"], second.frame["value"])[0, 1]
    assert (row["n"], row["pearson"]) == (130, pytest.approx(expected, abs=EXACT))
    with pytest.raises(InputError, match="the same `per_prompt`"):
        first.agreement(sweep())
