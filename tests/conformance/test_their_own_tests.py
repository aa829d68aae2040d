"""Tests of `make conformance`, with a made-up test module instead of TransformerLens' tests."""

import sys
from collections import Counter
from datetime import date

import pytest
import torch
from common import needs_hooked_transformer, tokens

from analyses.tools import conformance
from analyses.tools.conformance import Broken, Run, finished, judge, one_pass, page, unneeded
from analyses.tools.conformance_plugin import become
from analyses.tools.conformance_reasons import Inherent
from attn_only_lens import convert

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


@pytest.fixture(scope="module")
def logits(bridge):
    return run(bridge)


def test_of_what_a_fixture_ran(logits):
    assert logits.isfinite().all()


def test_runs_a_part(bridge):
    assert bridge.blocks[1].mlp(torch.zeros(1, 5, 6)).shape == (1, 5, 6)


@pytest.mark.parametrize("case", [0, 1])
def test_class(bridge, case):
    assert type(bridge) is TransformerBridge


def test_refused(bridge):
    if type(bridge) is not TransformerBridge:
        try:
            raise UnsupportedCallError("call another")
        except UnsupportedCallError as error:
            raise ValueError("failed") from error


def test_of_another_kind():
    run(TransformerBridge.boot_native(CFG | {"act_fn": "silu", "seed": 0, "n_layers": 1}))


def test_none_of_ours():
    run(TransformerBridge.boot_native(CFG | {"act_fn": "gelu", "seed": 0, "attn_only": True}))


def test_no_model():
    pass


def test_seed():
    assert torch.rand(()) == SEEN


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
    seen = torch.rand((), generator=torch.Generator().manual_seed(0)).item()
    # Like this repository's conftest.py, which is above the folder of `make conformance`.
    (folder.parent / "conftest.py").write_text("raise ImportError('of another folder')")
    path = folder / "tests" / "unit" / "test_made_up.py"
    path.write_text(TESTS.replace("SEEN", repr(seen)))
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
        "test_of_what_a_fixture_ran": "passed",
        "test_runs_a_part": "passed",
        "test_class[0]": "inherent",
        "test_class[1]": "inherent",
        "test_refused": "refused",
        "test_of_another_kind": "passed",
        "test_none_of_ours": "stock",
        "test_no_model": "stock",
        "test_seed": "stock",
        "test_network": "stock",
        "test_expected_to_fail": "failed",
    }
    assert judge(outcomes["test_refused"], "exposed", INHERENT).why == "call another"
    why = judge(outcomes["test_none_of_ours"], "exposed", INHERENT).why
    assert why == "layer …: it has no MLP"
    # A layer has 7 hook points, and one or two layers ran; without a known reason, a test fails.
    counts = {
        name: tuple(outcomes[name][count] for count in ("ran", "fired", "fired_in_body"))
        for name in outcomes
    }
    assert counts["test_names"] == counts["test_none_of_ours"] == (0, 0, 0)
    assert counts["test_runs"] == (1, 14, 14)
    assert counts["test_runs_a_part"] == (0, 7, 7)
    # The fixture counts for the first test that uses it, and for the fixture.
    assert counts["test_of_what_a_fixture_ran"] == (2, 28, 0)
    assert outcomes["test_of_another_kind"]["fired"] == 7
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
    # Five made one of our models and passed; one of these (`test_names`) did not use the model.
    assert "| 4.3.0 | exposed | 8 | 3 | 4 | 5 | 4 | 1 | 2 |" in text
    assert "fired in 4 of 8 tests: in 3 tests in the test itself" in text
    assert "replaced" not in text.split("# Exposed")[1]  # "replaced" is about conversions only
    assert "Measured on 2026-11-23. Of 13 tests, 13 pass on stock models" in text
    assert "and 9 of these make" in text
    assert "| the class differs | `unit/test_made_up.py::test_class` (2 cases) |" in text
    assert "| call another | `unit/test_made_up.py::test_refused` |" in text


def test_a_version_that_is_not_run_stays_as_it_was(outcomes):
    verdicts = {"exposed": [judge(outcome, "exposed", INHERENT) for outcome in outcomes.values()]}
    both = [Run(version, [], verdicts, date(2026, 11, 23)) for version in ("4.3.0", "3.9.0")]
    before = page(both)
    assert page(both[::-1]) == before
    again = Run("3.9.0", [], {"converted": verdicts["exposed"]}, date(2026, 11, 24))
    after = page([again], kept=before)
    assert after == page([both[0], again])
    assert after != before


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


CONVERTED = """
import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

CFG = {"n_layers": 1, "d_model": 6, "n_heads": 2, "d_head": 3, "d_mlp": 7, "n_ctx": 5}
CFG |= {"d_vocab": 11, "act_fn": "gelu"}


def test_initial_weights():
    model = HookedTransformer(HookedTransformerConfig(**CFG))
    model.init_weights()
    assert model.W_U.shape == (6, 11)


def test_runs():
    assert HookedTransformer(HookedTransformerConfig(**CFG))(torch.arange(5)[None]).isfinite().all()
"""


@needs_hooked_transformer
def test_what_is_replaced_is_counted(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_made_up.py").write_text(CONVERTED)
    names = [f"tests/test_made_up.py::{name}" for name in ("test_initial_weights", "test_runs")]
    one_pass(sys.executable, tmp_path, tmp_path / "converted.jsonl", "converted", names)
    outcomes = finished(tmp_path / "converted.jsonl")
    assert [outcome["replaced"] for outcome in outcomes] == [["init_weights"], []]
    assert [outcome["ran"] for outcome in outcomes] == [0, 1]
    verdicts = [judge(outcome, "converted") for outcome in outcomes]
    text = page([Run("3.9.0", outcomes, {"converted": verdicts})])
    assert "| 3.9.0 | converted | 2 | 1 | 1 | 2 | 1 | 0 | 0 |" in text
    assert "1 of the tests called a replaced method, and 1 of these passed" in text


@needs_hooked_transformer
def test_a_model_becomes_another():
    from models import build

    model, twin = build("gelu"), build("gelu")
    expected = model(tokens())
    become(twin, convert(twin))
    assert len(twin.blocks) == 2 * len(model.blocks)
    torch.testing.assert_close(twin(tokens()), expected, rtol=0, atol=0)
    assert list(twin.hook_dict) == list(convert(model).hook_dict)
