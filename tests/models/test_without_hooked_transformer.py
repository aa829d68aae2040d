"""Tests under transformer-lens 4, without HookedTransformer: what works, what raises an error."""

import pytest
from common import needs_transformer_lens_4
from test_pretrained import DATA
from typer.testing import CliRunner

from attn_only_lens import load, tl, to_stock
from attn_only_lens.cli import app
from attn_only_lens.errors import AttnOnlyLensError
from attn_only_lens.models.source_folder import load_source

pytestmark = needs_transformer_lens_4

USE_INSTEAD = (
    "pip install 'transformer-lens<4'",
    "build a TransformerBridge",
    "expose_neuron_heads",
)


REFUSED = {
    "HookedTransformer": lambda model, folder: tl.HookedTransformer(model.cfg),
    "from_pretrained": lambda model, folder: tl.HookedTransformer.from_pretrained("gpt2"),
    "to_stock": lambda model, folder: to_stock(model),
    "load_source": lambda model, folder: load_source(DATA),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_to_use_instead(name, tmp_path):
    with pytest.raises(AttnOnlyLensError) as caught:
        REFUSED[name](load("modular-addition"), tmp_path)
    for words in USE_INSTEAD:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "command", [["convert", "gpt2", "out"], ["grow", "gpt2", "out", "--d-mlp", "600", "--hooked"]]
)
def test_the_command_line_says_so_too(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert "needs HookedTransformer" in result.output
    assert not list(tmp_path.iterdir())
