"""Tests of searches that start from another circuit, such as that of another model or prompts."""

import numpy as np
import pytest

from attn_only_lens.circuits import Search, discover
from attn_only_lens.circuits.ablated_model import ablated_model
from attn_only_lens.circuits.own_run import members
from attn_only_lens.errors import InputError
from attn_only_lens.patching import Sites
from attn_only_lens.patching.columns import site_ids

pytestmark = pytest.mark.numeric


def found(model, task, start):
    search = Search(start=start)
    return discover(model, task, sites=Sites(positions="roles"), search=search)


def test_a_circuit_of_other_prompts_is_a_start(model, task):
    """The new circuit suffices, no site of it can go, and it is not larger than without a start."""
    first, other = found(model, task[:3], []), found(model, task[3:], [])
    start = site_ids(first.frame).tolist()
    assert start != site_ids(other.frame).tolist()
    started = found(model, task[3:], start)
    assert started.tried["step"].iloc[0] == "start"
    assert len(started) <= len(other)
    pair = task[3:].pair(model)
    sites, rows = members(model, pair, started, "")
    ablated = ablated_model(model, pair, task[3:].metric, sites, ablation="resample")
    without = [rows, *(np.delete(rows, i) for i in range(len(rows)))]
    _, errors = ablated.faithfulness_and_error(without)
    assert errors[0] <= 0.1 < errors[1:].min()
    again = found(model, task[:3], start)
    assert {*again.sites} == {*first.sites}


def test_a_start_without_worth_is_left(model, task):
    """A search from a few sites of the last layer finds a circuit that suffices."""
    late = [f"L{model.cfg.n_layers - 1}N{i}@{min(task.roles)}" for i in (2, 3, 5)]
    circuit = found(model, task[:3], late)
    assert abs(1 - circuit.faithfulness) <= 0.1
    assert not {*circuit.sites} & {*late}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"start": "L0H1@3"}, "expected a list of sites"),
        ({"start": [3]}, "expected a list of sites"),
        ({"start": ["L0H1@3"], "order": "signed"}, "expected at most one of them"),
    ],
)
def test_other_starts_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        Search(**options)


def test_an_unknown_start_is_refused_before_the_search(model, task):
    with pytest.raises(InputError, match=r"'L0H99@.*expected candidates, such as 'L"):
        found(model, task[:3], ["L0H99@subject"])
