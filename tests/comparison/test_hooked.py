"""Tests of `compare` on converted models, whose neurons are in blocks of their own."""

import numpy as np
import pandas as pd
import torch
from common import tokens
from models import build

from attn_only_lens import Contrast, compare, convert, grow, growth
from attn_only_lens import patching as p
from attn_only_lens.growth.expansion.expansion import compose

FAST = {"sizes": growth.ComparisonSizes(faithfulness=0.5, n_patched=3, n_nodes=7)}


def components(comparison):
    return pd.concat([comparison.heads, comparison.neurons], ignore_index=True)


def test_converted_models_are_compared_alike():
    model = build("gelu", n_layers=2, d_vocab_out=41)
    grown = grow(model, [growth.AddNeurons(5), growth.InsertLayer(at=1), growth.WidenStream(6)])
    with torch.no_grad():
        for parameter in grown.model.parameters():
            parameter.mul_(1.05)
    contrast = Contrast(tokens(), None, p.loss())
    expected = compare(model, grown, contrast, **FAST)
    pair = convert(model), convert(grown.model)
    comparison = compare(*pair, contrast, provenance=grown.provenance, **FAST)
    rows, expected_rows = components(comparison), components(expected)
    numbers = [name for name in rows if rows[name].dtype == float]
    np.testing.assert_allclose(rows[numbers], expected_rows[numbers], rtol=1e-7, atol=1e-11)
    assert rows["divergence"].max() > 1e-4
    assert comparison.nodes["id"].tolist() == expected.nodes["id"].tolist()


def test_values_and_keys_of_a_converted_model_grown_apart():
    model = convert(build("llama", n_layers=2, d_vocab_out=41))
    apart = compose(growth.WidenValues(3), growth.WidenQueriesAndKeys(5, layers=[0]))
    contrast = Contrast(tokens(batch=3), None, p.loss())
    comparison = compare(model, grow(model, apart), contrast, **FAST)
    every = components(comparison)
    assert every["drop"].abs().max() > 1e-2
    assert every["divergence"].max() < 1e-11
    assert (every["cosine"] - 1).abs().max() < 1e-11
    assert every["drop_change"].abs().max() < 1e-11 * every["drop"].abs().max()
    assert not len(comparison.new)
