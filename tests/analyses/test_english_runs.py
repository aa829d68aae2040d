"""Tests that runs on Small English resume, start from other runs' checkpoints, and count flops."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from analyses.tools import english_runs as runs
from analyses.tools import small_english as english
from analyses.tools import small_english_grammar as grammar
from attn_only_lens import grow, growth
from attn_only_lens.growth.expansion.expansion import compose
from attn_only_lens.growth.expansion.weights import Axis
from attn_only_lens.growth.models._grow import read

SMALL = runs.Sizes(n_layers=1, d_model=8, n_heads=2, d_mlp=11)
WIDER = compose(growth.AddHeads(1), growth.WidenStream(4))
GROWS = {4: growth.AddNeurons(3), 6: WIDER, 7: growth.InsertLayer(0)}
OFTEN = {"read": 1, "asked": 1, "check_every": 3, "save_every": 3}
PLAN = runs.Plan(SMALL, 9, schedule=GROWS, rows=2, kept=(6,), decay=4, **OFTEN)
# In a wider stream, gains are scaled, and have their own settings.
TRUNK = replace(PLAN, steps=4, schedule={2: WIDER}, kept=(), decay=0, warmup=3)


def parameters(model):
    return dict(model.named_parameters())


def same(first, second):
    actual, reference = parameters(first), parameters(second)
    assert actual.keys() == reference.keys()
    return all(torch.equal(actual[name], reference[name]) for name in actual)


def test_a_run_that_is_broken_off_goes_on(tmp_path):
    whole = runs.run(PLAN, tmp_path / "whole", "cpu")
    ticks = iter(range(9))

    def breaks(_):
        if next(ticks) == 7:  # in step 6, after two growth steps
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(PLAN, tmp_path / "parts", "cpu", breaks)
    parts = runs.run(PLAN, tmp_path / "parts", "cpu")
    assert same(whole.model, parts.model)
    drop = ["cpu_seconds", "wall_seconds"]
    assert whole.curve.drop(columns=drop).equals(parts.curve.drop(columns=drop))
    assert whole.curve["step"].tolist() == [0, 3, 6, 9]
    at_six = runs.model_at(whole, 6, tmp_path / "whole")
    assert read(at_six).sizes[Axis("d_mlp", 0)] == 14
    assert whole.model.cfg.d_model == 12 != at_six.cfg.d_model == 8
    # the loss just before growth equals the loss just after it, up to rounding
    after = whole.curve["loss"][2]
    assert runs.figures(at_six, 1, 0)["loss"] == pytest.approx(after, rel=1e-5)
    with pytest.raises(ValueError, match="choose another --runs"):
        runs.run(replace(PLAN, lr=1e-3), tmp_path / "parts", "cpu")


def test_a_run_begins_where_another_one_stopped(tmp_path):
    trunk = runs.run(TRUNK, tmp_path / "trunk", "cpu")
    before = {name: parameter.clone() for name, parameter in parameters(trunk.model).items()}
    assert len(trunk.training.optimizer.param_groups) == 2
    at_once = runs.run(replace(TRUNK, steps=9), tmp_path / "at once", "cpu")
    plan = replace(TRUNK, steps=9, schedule={})
    for _ in range(2):  # the second reads the first's checkpoint
        gone_on = runs.run(plan, tmp_path / "gone on", "cpu", start=trunk)
        assert same(at_once.model, gone_on.model)
        assert gone_on.curve["step"].tolist() == [4, 6, 9]
        ends = [run.curve.iloc[-1] for run in (at_once, gone_on)]
        assert ends[0][["tokens", "flops", "loss"]].equals(ends[1][["tokens", "flops", "loss"]])
    assert all(
        torch.equal(before[name], parameter) for name, parameter in parameters(trunk.model).items()
    )


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_flops_are_those_that_torch_counts(family):
    plan = replace(PLAN, family=family)
    model = grow(plan.model(), [*GROWS.values()]).model
    model.original_model.set_attn_implementation("eager")
    tokens = runs.batch(plan, 5)
    with FlopCounterMode(display=False) as counter:
        english.loss_of(model.original_model, tokens).backward()
    assert runs.step_flops(read(model), tokens) == counter.get_total_flops() > 0


def test_the_held_out_loss_is_the_mean_over_the_words_of_texts_of_all_lengths():
    """The oracle evaluates each text alone in float64, without batches or padding."""
    n, model = 13, PLAN.model().original_model.double()
    write = grammar.Grammar(english.SEED_OF_HELD_OUT, runs.never())
    texts, losses = english.texts_of(write, n), []
    for text in map(torch.tensor, texts):
        with torch.no_grad():
            logs = model(text[None, :-1]).logits[0].log_softmax(-1)
        for place, word in enumerate(text[1:].tolist()):
            before = text[: place + 1].tolist()
            # in a list, only a word that follows a repeated word counts
            again = word in before and before[-1] in before[:-1]
            if again or text[1].item() not in english.LISTED:
                losses.append(-logs[place, word].item())
    got = runs.figures(PLAN.model().double(), n, 0)["loss"]
    assert got == pytest.approx(sum(losses) / len(losses), rel=1e-7)  # norms compute in float32
    # control: texts of one length have another loss
    longest = english.by_length(texts, 2, 128)[-1]
    assert english.held_out_loss(model, [longest]) != pytest.approx(got, rel=1e-5)
    # texts are chosen before sorting by length: the first of many are those of few
    many = english.held_out_texts(10 * n, runs.never())
    assert sum(map(len, many)) == 10 * n
    assert len({len(text) for text in texts}) > 5
