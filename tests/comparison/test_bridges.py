"""Tests of `compare` on bridges from `boot_native`, under transformer-lens 3.9 and 4."""

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from common import D_MLP, mlp_hook, tokens

from attn_only_lens import compare, grow
from attn_only_lens import patching as p
from attn_only_lens.errors import ComparisonError

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens
]
FEW = {"n_patched": 3, "n_nodes": 0, "n_resamples": 3, "progress": False}


@pytest.mark.parametrize("name", ["native", "native_gated"])
def test_a_native_bridge(name):
    bridge = bridges.boot(name)
    larger = grow(bridge, d_mlp=D_MLP + 4, seed=1)
    grown, provenance = larger.model, larger.provenance
    prompts = tokens(batch=3)
    torch.testing.assert_close(grown(prompts), bridge(prompts), rtol=1e-11, atol=1e-12)
    comparison = compare(bridge, grown, prompts, p.loss(), provenance=provenance, **FEW)
    every = pd.concat([comparison.heads, comparison.neurons])
    largest = every["estimated_drop"].abs().max()
    assert largest > 1e-3
    # Norms compute in float64 here; these are sums of some hundred terms.
    assert every["divergence"].max() < 1e-11
    for column in ("cosine", "norm_ratio"):
        assert (every[column] - 1).abs().max() < 1e-11
    assert every["estimated_drop_change"].abs().max() < 1e-11 * largest
    assert comparison.new["grown_name"].tolist() == [
        f"L{k}N{37 + i}" for k in (0, 1) for i in range(4)
    ]
    assert (comparison.new[["estimated_drop", "share", "norm"]] == 0).all(axis=None)
    patched = every["drop"].abs().max()
    assert (comparison.new["drop"].dropna().abs() < 1e-11 * patched).all()
    assert (comparison.circuits["jaccard"] == 1).all()
    assert comparison.circuits["what"].tolist() == ["nodes"]
    assert mlp_hook("z", 0) not in bridge.hook_dict
    trained = bridges.boot(name)
    with torch.no_grad():
        named = trained.original_model.named_parameters()
        weight = next(w for key, w in named if "layers.1." in key and "mlp" in key)
        weight[3] *= 1.001
    with pytest.raises(ComparisonError, match="is not the model that was grown"):
        compare(trained, grown, prompts, p.loss(), provenance=provenance, **FEW)
    edges = {**FEW, "n_nodes": 5}
    comparison = compare(bridge, grown, prompts, p.loss(), provenance=provenance, **edges)
    assert len(comparison.edges) > 5
    assert (comparison.circuits["jaccard"] == 1).all()
    with torch.no_grad():
        for parameter in grown.original_model.parameters():
            parameter.mul_(1.05)
    comparison = compare(bridge, grown, prompts, p.loss(), provenance=provenance, **FEW)
    every = pd.concat([comparison.heads, comparison.neurons])
    assert np.all(every["divergence"].groupby(every["kind"]).max() > 1e-5)
    assert every["estimated_drop_change"].abs().max() > 1e-3 * largest
