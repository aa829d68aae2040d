"""Tests of sweep results: the scale of scores, the order of `top`, and saved files."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from random_sweeps import POSITIONS, RUN, SITES, TEXTS, TOKENS, sweep, values
from sealed_files import rewrite

from attn_only_lens import patching as p
from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.patching.prompt_tokens import PromptTokens

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
    assert "<table" in sweep()._repr_html_()
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
    top = p.Sweep.load(tmp_path / "sweep.parquet").top(9)
    assert list(top)[:5] == ["name", "position", "token", "part", "score"]
    assert top["token"].tolist() == [TEXTS[position] for position in top["position"]]
    assert max(map(len, str(top).splitlines())) <= 80
    clean = [[*TEXTS[:3], token, TEXTS[4]] for token in "abcdefg"]
    for more, token in (({}, ""), ({"prompt": 6, "unpatched": 0.1}, "g")):
        top = p.Sweep(frame.assign(**more), **RUN, tokens=PromptTokens(clean, [], {})).top(65)
        assert set(top["token"][top["position"] == 3]) == {token}
        assert set(top["token"][top["position"] == 2]) == {" the"}
    role = sweep(frame=values(positions=["subject"]), tokens=TOKENS).top(3)
    assert set(zip(role["position"], role["token"], strict=True)) == {("subject", " the")}
    assert "token" not in sweep().top(3)


def test_a_change_of_the_frame_that_was_given_reaches_no_result():
    frame = values().assign(prompt=2, unpatched=0.5).astype({"name": "category"})
    got, expected = sweep(frame=frame), sweep(frame=frame.copy())
    frame.loc[0, ["value", "prompt", "unpatched"]] = [99.0, 9, 9.0]
    frame.loc[0, "name"] = frame["name"].iloc[-1]
    pd.testing.assert_frame_equal(got.frame, expected.frame)


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
    loaded = p.Sweep.load(path)
    pd.testing.assert_frame_equal(loaded.frame, saved.frame, check_exact=True)
    assert {key: getattr(loaded, key) for key in RUN} == RUN
    assert loaded.tokens == saved.tokens == saved.query("layer == 0").tokens
    left = {entry.name for entry in path.parent.iterdir()}
    assert left == {path.name} | ({f"{path.name}.json"} if ending == "csv" else set())


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_a_flipped_bit_is_noticed_or_harmless(ending, tmp_path):
    path = tmp_path / f"sweep.{ending}"
    saved = sweep()
    saved.save(path)
    whole = path.read_bytes()
    for index in range(0, len(whole), 37):
        broken = bytearray(whole)
        broken[index] ^= 0x10
        path.write_bytes(broken)
        try:
            loaded = p.Sweep.load(path)
        except CheckpointError:
            continue
        # Some bytes of a parquet footer, such as statistics, affect nothing that is loaded.
        assert ending == "parquet"
        assert {key: getattr(loaded, key) for key in RUN} == RUN
        pd.testing.assert_frame_equal(loaded.frame, saved.frame, check_exact=True)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        p.Sweep.load(path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "sweep.csv"
    sweep(0).save(path)

    def interrupted(self, text, **how):
        self.write_bytes(text[:9].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)  # of the second file
    with pytest.raises(KeyboardInterrupt):
        sweep(1).save(path)
    assert len(list(tmp_path.iterdir())) == 2
    pd.testing.assert_frame_equal(p.Sweep.load(path).frame, sweep(0).frame)


def test_files_that_are_no_sweep(tmp_path):
    values().to_parquet(tmp_path / "plain.parquet")
    values().to_csv(tmp_path / "plain.csv")
    for name, reason in {
        "plain.parquet": "attn-only-lens did not write it",
        "plain.csv": "plain.csv.json is missing",
        "none.parquet": "No such file",
        "sweep.txt": "ends in .parquet or .csv",
    }.items():
        with pytest.raises(CheckpointError, match=reason):
            p.Sweep.load(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"ends in \.parquet"):
        sweep().save(tmp_path / "sweep.pkl")
    sweep().save(tmp_path / "new.csv")
    rewrite(tmp_path / "new.csv.json", format_version=6)
    with pytest.raises(CheckpointError, match="format version 6"):
        p.Sweep.load(tmp_path / "new.csv")


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    sweep().save(tmp_path / "sweep.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # pandas itself may use pyarrow
    with pytest.raises(CheckpointError, match="pip install pyarrow"):
        sweep().save(tmp_path / "other.parquet")
    with pytest.raises(CheckpointError, match="pip install pyarrow"):
        p.Sweep.load(tmp_path / "sweep.parquet")
    sweep().save(tmp_path / "sweep.csv")
    assert len(p.Sweep.load(tmp_path / "sweep.csv").frame) == SITES * POSITIONS


BAD = {
    "columns": ({}, lambda f: f.drop(columns="name"), "got columns"),
    "flags": ({}, lambda f: f.assign(exact=1), "got exact=1; expected True or False"),
    "part": ({}, lambda f: f.assign(part="q"), r"got parts \['q'\]"),
    "no index": ({}, lambda f: f.assign(index=None), "got index nan; expected whole numbers"),
    "complex": ({}, lambda f: f.assign(value=1 + 2j), "complex128"),
    "two columns": ({}, lambda f: pd.concat([f, f[["value"]]], axis=1), "each once"),
    "nan": ({}, lambda f: f.assign(value=np.nan), "65 of 65 values are not finite"),
    "twice": ({}, lambda f: pd.concat([f, f[:2]]), "2 rows repeat a site, such as L0H0"),
    "positions": ({}, lambda f: f.assign(position=["all"] + [3] * 64), "only numbers, or only"),
    "direction": ({"direction": "up"}, lambda f: f, "got direction='up'"),
    "constant": ({"clean_value": -1.3}, lambda f: f, "two finite numbers that differ"),
    "two heads": ({}, lambda f: f.assign(layer=range(65)), "rows for L0H0 have different layer"),
    "half a layer": ({}, lambda f: f.assign(layer=0.5), "got layer 0.5; expected whole numbers"),
    "text": ({}, lambda f: f.assign(value="much"), "value cannot be read"),
    "no frame": ({}, lambda f: ["name"], "expected a pandas DataFrame"),
    "no name": ({}, lambda f: f.assign(name=[None, *f["name"][1:]]), "null"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    changes, change, reason = BAD[case]
    with pytest.raises(ValueError, match=reason):  # an InputError is one
        p.Sweep(change(values()), **RUN | changes)
