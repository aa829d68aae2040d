"""The demo finds what it says it finds, and its control does not."""

import re

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from attn_only_lens import pretrained
from attn_only_lens.cli import app
from attn_only_lens.viz import demo


@pytest.fixture(scope="module")
def found():
    return demo.run_demo()


def test_verified_on_every_input(found):
    assert found.verification.ok
    assert found.verification.n_tokens == 3 * 113 * 113


def test_neuron_heads_are_periodic_and_untrained_ones_are_not(found):
    periodic = found.neuron_heads["explained"] > demo.PERIODIC
    assert periodic.mean() > 0.5
    assert 2 <= len(found.key_frequencies) <= 8
    assert found.neuron_heads["frequency"].isin(found.key_frequencies).mean() > 0.9
    assert found.untrained["explained"].max() < demo.PERIODIC


def test_self_weights_are_those_of_the_source(found):
    """σ of the source's pre-activation at '=', by plain hooks."""
    model, tokens = pretrained.modular_addition(), pretrained.modular_addition_tokens()
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter="blocks.0.mlp.hook_pre")
    expected = torch.sigmoid(cache["pre", 0][:, -1, 211])
    torch.testing.assert_close(found.grids[211].flatten(), expected)


def test_periodicity_of_waves_that_are_known():
    a = torch.arange(113.0)[:, None]
    b = torch.arange(113.0)[None, :]
    turn = 2 * torch.pi / 113
    noise = torch.randn(113, 113)
    grids = torch.stack(
        [
            torch.cos(turn * 17 * (a + b)) + 3,
            torch.cos(turn * 5 * a) + 0.5 * torch.sin(turn * 5 * b),
            torch.cos(turn * 5 * a) + torch.cos(turn * 11 * b),
            noise,
            torch.ones(113, 113),
        ]
    )
    table = demo.periodicity(grids)
    assert table["frequency"].tolist()[:2] == [17, 5]
    assert table["explained"].tolist()[:2] == pytest.approx([1, 1])
    assert table["explained"][2] == pytest.approx(0.5)
    assert table["explained"][3] < 0.01
    assert table["explained"][4] == 0
    assert table["period"][0] == pytest.approx(113 / 17)


def test_the_command_writes_a_table_and_an_offline_picture(found, tmp_path, monkeypatch):
    monkeypatch.setattr("attn_only_lens.cli.demo.run_demo", lambda: found)  # which takes a while
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "logits bitwise equal" in result.output
    for k in found.key_frequencies:
        assert f" {k} " in result.output
    table = pd.read_csv(tmp_path / "neuron_heads.csv")
    assert len(table) == 512
    assert table["name"][511] == "L0N511"
    html = (tmp_path / "neuron_heads.html").read_text("utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "neuron_heads.csv",
        "neuron_heads.html",
    ]
    file = tmp_path / "neuron_heads.csv"
    monkeypatch.undo()  # and it is refused before any of that
    monkeypatch.delattr("attn_only_lens.cli.demo.run_demo")
    result = CliRunner().invoke(app, ["demo", "--out", str(file)])
    assert result.exit_code == 2
    assert "is a file; expected a folder" in " ".join(result.output.split())
    # Nothing is fetched: no tag refers to another file.
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", html)
    assert len(html) < 6_000_000
