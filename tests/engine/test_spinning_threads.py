"""Tests of the warning that torch's threads spend their time waiting for each other."""

import warnings

import pytest
import torch
from bridges import boot, exposed_copy
from common import changed, tokens

from attn_only_lens import Contrast
from attn_only_lens import patching as p
from attn_only_lens.engine import spinning_threads
from attn_only_lens.errors import InputWarning

_TEXT = "57 times as long with torch's 2 threads"


@pytest.fixture
def measured(monkeypatch):
    """A machine on which two threads take 57 times as long as one; a list of measurements."""
    calls = []

    def slow(n_threads):
        calls.append(n_threads)
        return 57.0

    monkeypatch.setattr(spinning_threads, "slowdown", slow)
    monkeypatch.setattr(spinning_threads, "_last", -float("inf"))
    monkeypatch.setattr(spinning_threads, "_warned", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    return calls


@pytest.fixture(scope="module")
def patch():
    model = exposed_copy(boot("gpt2"))
    clean = tokens()
    contrast = Contrast(clean, changed(clean, 1), p.logit_diff(7, 11))
    return lambda: p.activation_patch(model, contrast, sites=["L0N3"])


def messages(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [(str(x.message), x.filename) for x in caught if x.category is InputWarning]


def test_spinning_threads_are_measured_and_warned_about_once(measured, patch):
    ((text, file),) = messages(patch)
    assert _TEXT in text
    assert file == __file__
    assert messages(patch) == []
    assert measured == [2]


@pytest.mark.parametrize("ready", ["passive", "one thread", "just measured", "not slow"])
def test_there_is_no_warning_where_threads_do_not_spin(measured, patch, ready, monkeypatch):
    if ready == "passive":
        monkeypatch.setenv("OMP_WAIT_POLICY", "Passive")
    elif ready == "one thread":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    elif ready == "just measured":
        monkeypatch.setattr(spinning_threads, "_last", float("inf"))
    else:
        monkeypatch.setattr(spinning_threads, "slowdown", lambda n: 1.5)
    assert messages(patch) == []


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    assert spinning_threads.slowdown(before) > 0
    assert torch.get_num_threads() == before
