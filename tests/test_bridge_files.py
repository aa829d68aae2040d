"""Bridges with neuron-heads come back from files bit for bit, in whatever state they were saved."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_bridges import GATED, NAMES, NEURON, STATES, boot, hook, relative, tokens
from tiny_tokenizer import tiny_tokenizer
from transformer_lens import __version__ as _  # noqa: F401
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import (
    CheckpointError,
    calibrate,
    convert,
    expose_neuron_heads,
    load,
    neuron_pattern,
    save,
)
from attn_only_lens.manifest import MANIFEST, _fingerprint, _seal

pytestmark = pytest.mark.filterwarnings("ignore")  # TransformerLens' and transformers' own


@torch.no_grad()
def same(a, b):
    """One model: every tensor by name, every hook, logits and cache; and an edit of a neuron."""
    assert type(a) is type(b)
    mine, theirs = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (a, b))
    assert list(mine) == list(theirs)
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype, name
        assert torch.equal(mine[name], theirs[name]), name
        assert mine[name].requires_grad == theirs[name].requires_grad, name
    assert set(a.hook_dict) == set(b.hook_dict)
    assert torch.equal(a(tokens()), b(tokens()))
    logits, cache = a.run_with_cache(tokens())
    again, cached = b.run_with_cache(tokens())
    assert torch.equal(logits, again)
    assert set(cache) == set(cached)
    for key, value in cache.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, cached[key]), key
    drop = [(hook("z"), lambda z, hook: z.index_fill(2, torch.tensor(NEURON), 0.0))]
    edited = a.run_with_hooks(tokens(), fwd_hooks=drop)
    assert torch.equal(edited, b.run_with_hooks(tokens(), fwd_hooks=drop))
    assert relative(edited, logits) > 1e-7


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, state, tmp_path):
    model = convert(boot(name, torch.float32, state))
    random = torch.get_rng_state()
    loaded = load(save(model, tmp_path / "saved"))
    assert torch.equal(torch.get_rng_state(), random)
    same(model, loaded)
    assert not loaded.training
