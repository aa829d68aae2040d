"""The study of SmolLM2 grown and trained on a skill: its smoke run, its measures, its page."""

import json
from pathlib import Path
from random import Random

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from common import needs_transformer_lens_4, run_script

from analyses.studies import grow_on_skill as study
from analyses.studies import grow_on_skill_report as report
from analyses.tools.circuit_measures import overlap_by_chance
from attn_only_lens.tasks.words import PEOPLE, THINGS

KEPT = Path(__file__).parents[2] / "analyses" / "results"
PARTS = ("", "heads", "curves", "removed")


def tables(folder):
    files = {part: f"grow_on_skill{'_' * bool(part)}{part}.csv" for part in PARTS}
    return {part: pd.read_csv(folder / file) for part, file in files.items()}


@needs_transformer_lens_4
def test_smoke(tmp_path):
    def smoke(out, runs, *options):
        folders = ["--out", str(tmp_path / out), "--runs", str(tmp_path / runs)]
        result = run_script(study.main, ["--smoke", *folders, *options])
        record = json.loads((tmp_path / out / "grow_on_skill.run.json").read_text("utf-8"))
        page = (tmp_path / out / "grow_on_skill.md").read_text("utf-8")
        assert page.strip() in result.output
        assert report.page(tables(tmp_path / out), record["settings"], " --smoke") == page
        return tables(tmp_path / out), page

    frames, _ = smoke("one", "runs", "--n-seeds", "1")
    circuits, removed = (frames[part].set_index("arm") for part in ("", "removed"))
    assert circuits.loc["before", "largest_difference"] < 1e-6
    assert circuits.loc["free", "skill_parity"] == pytest.approx(5 / 36, abs=1e-4)
    # Frozen entries do not change, so the model without its new neurons is the model before.
    for arm, last in (("frozen", 4), ("frozen, slower", 6)):
        assert removed.loc[arm, "old_change"].max() == 0 < removed.loc["free", "old_change"].min()
        losses = frames["removed"].query("arm == @arm").set_index("what")["skill_loss"]
        curve = frames["curves"].query("arm == @arm").set_index("step")["skill_loss"]
        assert losses["removed"] == curve[0] != curve[last] == losses["only new"]
    # A second run trains nothing, and measures only what is missing.
    (tmp_path / "runs" / "0-free-circuits.json").unlink()
    kept = [*(tmp_path / "runs").glob("0-*/curve.csv"), *(tmp_path / "runs").glob("0-*.json")]
    written = [path.stat().st_mtime_ns for path in kept]
    again, _ = smoke("again", "runs", "--n-seeds", "1")
    assert [path.stat().st_mtime_ns for path in kept] == written
    pd.testing.assert_frame_equal(again["heads"], frames["heads"])
    # Seeds of an earlier run are joined from its tables.
    joined, page = smoke("two", "runs-2", "--earlier", str(tmp_path / "one"), "--n-seeds", "2")
    assert not list((tmp_path / "runs-2").glob("0-*"))
    assert "These come from an earlier run of the same code: 0 (frozen); 0 (free)" in " ".join(
        page.split()
    )
    for part, frame in joined.items():
        first = frame.query("seed == 0").reset_index(drop=True)
        pd.testing.assert_frame_equal(first, frames[part], check_dtype=False)
        assert set(frame["seed"]) == {0, 1}


def test_prompts(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(study.tiny(tmp_path))
    prompts = study.Prompts(study.SMOKE, tokenizer)
    first, others, asked = prompts.held_out
    assert len({*first, *others, *asked}) == 4 + 4 + 8
    trained, unseen = map(set, study.nouns(study.SMOKE))
    assert trained | unseen == {*THINGS, *PEOPLE}
    assert not trained & unseen
    assert {noun for s in first for noun in (s.subject, s.attractor)} <= unseen
    some = study.sentences(sorted(trained), 8, Random(0))
    skill, agreement = prompts.skill(some), prompts.agreement(some)
    for i, sentence in enumerate(some):
        text, other = sentence.text(), sentence.text(flipped=True)
        _, subject, *_, attractor = text.removeprefix("Match: ").split()
        same = subject.endswith("s") == attractor.endswith("s")
        assert tokenizer.decode(skill.right[i]) == ("yes" if same else "no")
        assert tokenizer.decode(agreement.right[i]) == ("are" if subject.endswith("s") else "is")
        assert tokenizer.decode(skill.corrupted[i]) == other
        assert tokenizer.decode(agreement.clean[i]) == text.removeprefix("Match: ")


def test_only_new_entries_get_gradients(tmp_path):
    model = study.transformer(study.tiny(tmp_path))
    study.freeze_old(model, 29)
    model(torch.arange(7)[None]).logits[:, -1].logsumexp(-1).sum().backward()
    mlp = model.model.layers[1].mlp
    for name, old, new in (
        ("gate_proj", slice(29), slice(29, None)),
        ("down_proj", (slice(None), slice(29)), (slice(None), slice(29, None))),
    ):
        gradient = getattr(mlp, name).weight.grad
        assert not gradient[old].any()
        assert gradient[new].all()
    assert model.lm_head.weight.grad is None


def test_chance_is_the_mean_over_permutations_within_layers():
    names = ["L0H0", "L0H1", "L1H0"]
    first, second = np.array([3.0, -1.0, 4.0]), np.array([1.0, 1.0, 2.0])
    a, b = first / 8, second / 4
    swaps = [np.minimum(abs(a), b[order])[a * b > 0].sum() for order in ([0, 1, 2], [1, 0, 2])]
    assert overlap_by_chance(names, first, second) == pytest.approx(np.mean(swaps))


def test_the_page_shows_its_tables():
    settings = json.loads((KEPT / "grow_on_skill.run.json").read_text("utf-8"))["settings"]
    made = report.page(tables(KEPT), settings, "")
    assert (KEPT / "grow_on_skill.md").read_text("utf-8") == made
