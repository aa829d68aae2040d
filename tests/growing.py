"""Helpers for tests of growth: expansions by name, and a comparison of all activations."""

import torch
from common import tokens

from attn_only_lens import expansion as ex


def steps(n_new_layer=1, group=1):
    """Return six expansions by name; TransformerLens has one width for queries and values."""
    return {
        "neurons": ex.AddNeurons(5),
        "heads": ex.AddHeads(2 * group),
        "width": ex.compose(ex.WidenValues(3), ex.WidenQueriesAndKeys(3)),
        "stream": ex.WidenStream(11),
        "layer": ex.InsertLayer(n_new_layer),
    }


def group_size(model):
    return model.cfg.n_heads // (model.cfg.n_key_value_heads or model.cfg.n_heads)


def all_steps(model, order=("neurons", "heads", "width", "stream", "layer")):
    by_name = steps(group=group_size(model))
    return ex.compose(*(by_name[name] for name in order))


def cached(model):
    """Return logits and every activation."""
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens())
    return logits, dict(cache)


def worst_activation(provenance, old, new):
    """Return the relative difference of each old activation, and the names without provenance."""
    worst, unknown = {}, []
    for hook, expected in old.items():
        try:
            moved = ex.activation_map(provenance, hook)
        except KeyError:
            unknown.append(hook)
            continue
        got, expected = moved.old_part(new[moved.name]), moved.expected(expected)
        assert got.shape == expected.shape, hook
        masked = expected.isinf()
        assert torch.equal(masked, got.isinf()), hook
        got, expected = got.masked_fill(masked, 0.0), expected.masked_fill(masked, 0.0)
        worst[hook] = ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()
    return worst, unknown


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(first, second):
    """Return whether two models have the same names, shapes, dtypes and bytes."""
    first, second = first.state_dict(), second.state_dict()
    return list(first) == list(second) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(first.values(), second.values(), strict=True)
    )
