"""Tests of learned masks: they beat rankings on other prompts, and no group is in both halves."""

import pytest

from analyses.tools.learn_mask import _split, learn_mask
from attn_only_lens import circuits, expose_neuron_heads, load, tasks
from attn_only_lens import patching as p
from attn_only_lens.circuits.ablated_model import AblatedModel

N_SITES = 45
BY_ROLE = p.Sites(positions="roles")


@pytest.fixture(scope="module")
def english():
    return expose_neuron_heads(load("small-english"), copy=True).model


@pytest.fixture(scope="module")
def prompts(english):
    """Return prompts to learn from, and other prompts."""
    return [tasks.agreement(english.tokenizer, 17, seed, structure="relative") for seed in (0, 1)]


def test_a_learned_circuit_is_more_faithful_to_other_prompts_than_a_ranking(english, prompts):
    task, others = prompts
    learned = learn_mask(english, task, N_SITES, steps=60, sites=BY_ROLE)
    assert len(learned) == N_SITES == learned.tried["n_sites"].iloc[-1]
    assert learned.tried["n_sites"].is_monotonic_decreasing
    assert learned.tried["n_sites"].iloc[0] > N_SITES
    ranking = p.attribution(
        *(english, task),
        sites=BY_ROLE,
        direction="noise",
        method=p.Estimate("secant", budget=0),
    )
    prompts = english, others.pair(english), others.metric
    ablated = AblatedModel(*prompts, ranking.frame, ablation="resample")
    error = circuits.evaluate(english, learned, others).error
    spans = abs(ablated.whole_by_prompt - ablated.nothing_by_prompt)
    (left,) = ablated.by_prompt([ablated.ranked(ranking, "magnitude")[:N_SITES]])
    assert error < 0.9 * (abs(left - ablated.whole_by_prompt) / spans).mean()


def test_no_group_is_in_training_and_in_validation():
    labels = ["boy", "girl", "boy", "dog", "cat", "girl", "sun", "cat", "dog", "boy", "sun"]
    for seed in range(5):
        training, validation = _split(labels, seed)
        assert sorted([*training, *validation]) == list(range(len(labels)))
        assert len(validation) > 0
        assert not {labels[i] for i in training} & {labels[i] for i in validation}
    assert len({tuple(_split(labels, seed)[1]) for seed in range(5)}) > 1
