"""Tests of `make conformance`, with a made-up test module instead of TransformerLens' tests."""

import sys
from collections import Counter
from datetime import date

import pytest

from analyses.tools import conformance
from analyses.tools.conformance import Broken, Run, finished, judge, one_pass, page, unneeded
from analyses.tools.conformance_reasons import Inherent

TESTS = """
import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.errors import UnsupportedCallError

CFG = {"n_layers": 2, "d_model": 6, "n_heads": 2, "d_head": 3, "d_mlp": 7, "n_ctx": 5}
CFG |= {"d_vocab": 11}


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge.boot_native(CFG | {"act_fn": "gelu", "seed": 0})


def run(model):
    return model(torch.arange(5)[None])


def test_names(bridge):
    assert "blocks.1.mlp.hook_post" in bridge.hook_dict


def test_runs(bridge):
    assert run(bridge).shape == (1, 5, 11)


@pytest.mark.parametrize("case", [0, 1])
def test_class(bridge, case):
    assert type(bridge) is TransformerBridge


def test_refused(bridge):
    if type(bridge) is not TransformerBridge:
        try:
            raise UnsupportedCallError("call another")
        except UnsupportedCallError as error:
            raise ValueError("failed") from error


def test_none_of_ours():
    run(TransformerBridge.boot_native(CFG | {"act_fn": "gelu", "seed": 0, "attn_only": True}))


def test_network():
    import socket
    with pytest.raises(OSError, match="no test reaches the network"):
        socket.create_connection(("192.0.2.1", 80))


@pytest.mark.xfail(strict=True)
def test_expected_to_fail():
    pass
"""
INHERENT = (
    Inherent("the class differs", {"exposed": ("tests/unit/test_made_up.py::test_class",)}),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return the outcomes of the made-up tests on exposed models; the last test is deselected."""
    folder = tmp_path_factory.mktemp("them")
    (folder / "tests" / "unit").mkdir(parents=True)
    # Like this repository's conftest.py, which is above the folder of `make conformance`.
    (folder.parent / "conftest.py").write_text("raise ImportError('of another folder')")
    path = folder / "tests" / "unit" / "test_made_up.py"
    path.write_text(TESTS)
    names = [line[4:].split("(")[0] for line in TESTS.splitlines() if line.startswith("def test_")]
    cases = [f"{name}[{case}]" for name in names for case in (0, 1) if name == "test_class"]
    test_ids = [f"tests/unit/test_made_up.py::{name}" for name in [*names, *cases]]
    one_pass(sys.executable, folder, folder / "exposed.jsonl", "exposed", test_ids)
    return {
        outcome["test"].split("::")[1]: outcome for outcome in finished(folder / "exposed.jsonl")
    }


def test_each_test_is_told_from_the_others(outcomes):
    kinds = {name: judge(outcome, "exposed", INHERENT).kind for name, outcome in outcomes.items()}
    assert kinds == {
        "test_names": "passed",
        "test_runs": "passed",
        "test_class[0]": "inherent",
        "test_class[1]": "inherent",
        "test_refused": "refused",
        "test_none_of_ours": "stock",
        "test_network": "stock",
        "test_expected_to_fail": "failed",
    }
    assert judge(outcomes["test_refused"], "exposed", INHERENT).why == "call another"
    why = judge(outcomes["test_none_of_ours"], "exposed", INHERENT).why
    assert why == "layer …: it has no MLP"
    # Two layers with 7 hook points each ran.
    counts = [outcomes["test_runs"][count] for count in ("ran", "fired", "fired_in_body")]
    assert counts == [1, 14, 14]
    assert judge(outcomes["test_class[0]"], "exposed", ()).kind == "failed"
    assert judge(outcomes["test_class[0]"], "converted", INHERENT).kind == "failed"


def test_a_reason_that_nothing_needs(outcomes):
    verdicts = [judge(outcome, "exposed", INHERENT) for outcome in outcomes.values()]
    assert unneeded({"exposed": verdicts}, INHERENT) == []
    passes = Inherent("no more", {"exposed": ("tests/unit/test_made_up.py::test_runs",)})
    assert unneeded({"exposed": verdicts}, (*INHERENT, passes)) == [
        "exposed: tests/unit/test_made_up.py::test_runs"
    ]


def test_the_page_says_what_is_not_passed(outcomes):
    with_models = [outcome for outcome in outcomes.values() if outcome["models"]]
    verdicts = [judge(outcome, "exposed", INHERENT) for outcome in with_models]
    stock = [outcome | {"outcome": "passed"} for outcome in outcomes.values()]
    text = page([Run("4.3.0", stock, {"exposed": verdicts}, date(2026, 11, 23))])
    assert "| the class differs | `unit/test_made_up.py::test_class` (2 cases) |" in text
    assert "| call another | `unit/test_made_up.py::test_refused` |" in text


def test_a_failure_that_nobody_explained_writes_nothing(outcomes, tmp_path, monkeypatch):
    verdicts = [judge(outcome, "exposed", ()) for outcome in outcomes.values()]
    made = Run("4.3.0", list(outcomes.values()), {"exposed": verdicts})
    monkeypatch.setattr(conformance, "run", lambda *args, **how: made)
    with pytest.raises(Broken, match="test_class"):
        conformance.main(tmp_path / "page.md", tmp_path, [tmp_path])
    assert Counter(tmp_path.iterdir()) == {}


def test_a_pass_that_broke_off_is_not_taken_for_a_whole_one(tmp_path):
    (tmp_path / "outcomes").write_text('{"test": "a"}\n')
    assert finished(tmp_path / "outcomes") is None
