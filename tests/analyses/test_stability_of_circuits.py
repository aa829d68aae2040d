"""Tests of the study of circuits' stability: intervals by hand, and no noun in both sets."""

import json

import pandas as pd
import pytest

from analyses.studies import stability_of_circuits as study
from attn_only_lens import load
from attn_only_lens.circuits.stability import inclusion_interval


def test_intervals_and_coverage_by_hand():
    """Two batches and three sites; "c" is in no fresh batch, and "b" in no circuit of batch 1."""
    rows = [(0, "a", 1.0), (0, "b", 0.05), (1, "a", 0.2), (1, "c", 0.4)]
    sites = pd.DataFrame(rows, columns=["batch", "site", "inclusion"])
    counted = study.intervals(sites, pd.Series({"a": 0.95, "b": 0.03}))
    got = {(x.inclusion, x.probability): (x.n, x.low, x.high) for x in counted.itertuples()}
    expected = {(1.0, 0.95): 20, (0.05, 0.03): 1, (0.2, 0.95): 4, (0.4, 0.0): 8, (0.0, 0.03): 0}
    assert got == {key: (1, *inclusion_interval(k, 20)) for key, k in expected.items()}
    shares = study.coverage(counted).set_index("probability of the site")
    # [.61, 1] contains .95 and [.003, .45] contains .03; [.04, .59] and [.13, .75] do not contain
    # .95 and 0; [0, .39] contains .03.
    assert shares.loc["in a union", ["coverage", "intervals"]].tolist() == ["0.500", "4"]
    assert shares.loc["more than 0.02", ["coverage", "intervals"]].tolist() == ["0.750", "4"]
    assert shares.loc["0.9 to 1.0", ["coverage", "intervals"]].tolist() == ["0.500", "2"]


def test_no_noun_is_in_both_sets(tmp_path, monkeypatch):
    tokenizer = load("small-english").tokenizer
    words = {word.strip() for word in tokenizer.get_vocab()}
    nouns = [word for word in sorted(words) if len(word) > 3 and f"{word}s" in words][:11]
    assert len(nouns) > study.HELD_OUT_NOUNS + 1
    rows = [
        {"clean_prefix": f"The {one} near the {other}s", "patch_prefix": f"The {one}s near the "
         f"{other}s", "clean_answer": " is", "patch_answer": " are"}
        for one in nouns for other in nouns if one != other
    ]  # fmt: skip
    lines = [json.dumps(row) + "\n" for row in rows]
    for part, some in (("train", lines[::2]), ("test", lines[1::2])):
        (tmp_path / f"nounpp_{part}.json").write_text("".join(some), "utf-8")
    ids = tokenizer(rows[0]["clean_prefix"], add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(study, "LENGTH", len(ids))
    training, held_out = study.read(tokenizer, tmp_path, (19, 7))
    assert (len(training), len(held_out)) == (19, 7)
    seen, others = ({study.noun(clean) for clean in part.clean} for part in (training, held_out))
    assert not seen & others
    assert len(others) <= study.HELD_OUT_NOUNS
    assert study.noun("The women near") == "woman"
    with pytest.raises(ValueError, match="--smollm2 FOLDER"):
        study.run(study.Setting(tmp_path, tmp_path))
