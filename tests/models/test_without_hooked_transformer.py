"""Tests under transformer-lens 4, without HookedTransformer: what works, what raises an error."""

import pytest
import torch
from common import mlp_hook, needs_transformer_lens_4
from safetensors.torch import save_file
from test_pretrained import DATA, damaged
from transformer_lens.model_bridge import TransformerBridge
from typer.testing import CliRunner

from attn_only_lens import (
    AttnOnlyLensError,
    expose_neuron_heads,
    load,
    pretrained,
    tl,
    to_stock,
)
from attn_only_lens.cli import app
from attn_only_lens.errors import CheckpointError
from attn_only_lens.models.checkpoint import write_manifest
from attn_only_lens.models.source_folder import load_source
from attn_only_lens.pretrained.modular_addition import load_bridge

pytestmark = needs_transformer_lens_4

TOKENS = pretrained.modular_addition_tokens()[:11]
USE_INSTEAD = (
    "pip install 'transformer-lens<4'",
    "build a TransformerBridge",
    "expose_neuron_heads",
)


def saved(folder):
    """Return a folder as `save` writes it with 3.9, with the parts read before a model is built."""
    save_file({"embed.W_E": torch.zeros(2, 3)}, folder / "model.safetensors")
    entries = {"config": {"dtype": "float32"}, "gate": {"kind": "exact"}, "source_name": "added"}
    entries |= {"tied": {}, "frozen": [], "training": False}
    entries |= {"padding_side": None, "transcoders": None}
    entries |= {"layout": "two blocks a layer", "model": "HookedTransformer", "layers": []}
    write_manifest(folder, entries)
    return folder


REFUSED = {
    "HookedTransformer": lambda model, folder: tl.HookedTransformer(model.cfg),
    "from_pretrained": lambda model, folder: tl.HookedTransformer.from_pretrained("gpt2"),
    "load": lambda model, folder: load(saved(folder)),
    "to_stock": lambda model, folder: to_stock(model),
    "load_source": lambda model, folder: load_source(DATA),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_to_use_instead(name, tmp_path):
    with pytest.raises(AttnOnlyLensError) as caught:
        REFUSED[name](pretrained.modular_addition(), tmp_path)
    for words in USE_INSTEAD:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "gpt2", "out"],
        ["grow", "gpt2", "out", "--d-mlp", "600", "--hooked"],
    ],
)
def test_the_command_line_says_so_too(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert "needs HookedTransformer" in result.output
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_the_shipped_model_is_a_bridge_whose_neurons_can_be_exposed():
    bridge = pretrained.modular_addition()
    assert type(bridge) is TransformerBridge
    assert not bridge.training
    expected = bridge(TOKENS)
    with expose_neuron_heads(bridge):
        _, cache = bridge.run_with_cache(TOKENS)
        cut = bridge.run_with_hooks(
            TOKENS, fwd_hooks=[(mlp_hook("z", 0), lambda z, hook: torch.zeros_like(z))]
        )
    assert cache[mlp_hook("pattern", 0)].shape == (11, 512, 3, 2)
    assert torch.equal(bridge(TOKENS), expected)
    assert not torch.allclose(cut, expected)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.safetensors", lambda data: data[:-100], "is not a readable safetensors file"),
        ("config.json", lambda data: data.replace(b"512", b"509"), "does not contain"),
    ],
)
def test_a_damaged_model_is_refused(tmp_path, name, change, message):
    folder = damaged(tmp_path, name, change)
    with pytest.raises(CheckpointError, match=message):
        load_bridge(folder, dtype="float32", device="cpu")
