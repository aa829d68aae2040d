"""Tests that no tensor of shape [position, feature, d_model] is allocated."""

import pytest
import torch
from drawn_transcoders import bridge, cross_layer_of, layers_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attn_only_lens import Contrast, circuits
from attn_only_lens import patching as p
from attn_only_lens.circuits import linear_graph
from attn_only_lens.transcoders import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens and transformers

N_FEATURES, METRIC = 4099, p.logit_diff(7, 11)
CLEAN = torch.tensor([[3, 17, 5, 29, 13, 2, 8, 31, 19, 23, 37]])
CORRUPTED = CLEAN.clone()
CORRUPTED[0, 1] = 11
CONTRAST = Contrast(CLEAN, CORRUPTED, METRIC)
NAMES = ["L1F3", "L1F29"]  # patches of layer 0 run batches of patched runs through layer 1
CALLS = {
    "patch": lambda m: p.activation_patch(m, CONTRAST, sites=NAMES),
    "secant": lambda m: p.attribution(m, CONTRAST, method=p.Estimate("secant", budget=0)),
    "graph": lambda m: circuits.attribution_graph(m, Contrast(CLEAN, None, METRIC), top=31),
    "difference": lambda m: circuits.attribution_graph(m, CONTRAST, top=31),
    "paths": lambda m: p.path_patch(m, CONTRAST, p.Edges(["L0F3", "L0E"], ["L1F5"])),
}


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return out


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("make", [layers_of, cross_layer_of])
def test_weights_or_patterns_are_the_largest(make, call, monkeypatch):
    monkeypatch.setattr(linear_graph, "_BLOCK", 1)  # edges into one node at a time
    model = bridge("gpt2", torch.float32)
    transcoders = make(model, n_features=N_FEATURES, dtype=torch.float32)
    with attach(model, transcoders), Largest() as largest:
        CALLS[call](model)
    # Patterns of two runs [both, pos, feature, key=2] are larger only for this small d_model.
    patterns = 2 * CLEAN.numel() * N_FEATURES * 2
    assert largest.numbers <= max(transcoders[0].W_enc.numel(), patterns)
    assert CLEAN.numel() * transcoders[0].W_enc.numel() > 6 * largest.numbers  # control
