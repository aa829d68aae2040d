"""Random transcoders, and their outputs computed from the definition and by plain hooks.

The class `Transcoder`, which holds the weights, is all that is used from attn_only_lens.
"""

from dataclasses import replace

import bridges
import torch
import transformers

from attn_only_lens.transcoders import Transcoder

FEATURES = 53
K = 7
ACTIVATIONS = ("relu", "jumprelu", "topk")


def drawn(d_model, seed=0, activation="jumprelu", n_features=FEATURES, skip=False, **options):
    """Return a transcoder with random weights; about a third of its features are active."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {
        "W_enc": normal(d_model, n_features) / d_model**0.5,
        "W_dec": normal(n_features, d_model) / n_features**0.5,
        "b_enc": normal(n_features) * 0.1,
        "b_dec": normal(d_model) * 0.1,
    }
    if activation == "jumprelu":
        weights["threshold"] = torch.rand(n_features, generator=generator, dtype=torch.float64)
    if activation == "topk":
        options["k"] = K
    if skip:
        weights["W_skip"] = normal(d_model, d_model) / d_model**0.5
    dtype = options.pop("dtype", torch.float64)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    return Transcoder(**weights, activation=activation, **options)


def active(q, transcoder):
    """Return which features are active, decided one number at a time."""
    rows = q.reshape(-1, q.shape[-1])
    result = torch.zeros_like(rows, dtype=torch.bool)
    for i, row in enumerate(rows.tolist()):
        if transcoder.activation == "topk":
            order = sorted(range(len(row)), key=lambda j: (-row[j], j))[: transcoder.k]
            chosen = [j for j in order if row[j] > 0]
        elif transcoder.activation == "jumprelu":
            theta = transcoder.threshold.tolist()
            chosen = [j for j, number in enumerate(row) if number > theta[j]]
        else:
            chosen = [j for j, number in enumerate(row) if number > 0]
        result[i, chosen] = True
    return result.view(q.shape)


def imitated(x, transcoder):
    """Return the output of a transcoder by its definition, and its activations."""
    q = x @ transcoder.W_enc.to(x) + transcoder.b_enc.to(x)
    z = torch.where(active(q, transcoder), q, torch.zeros_like(q))
    y = z @ transcoder.W_dec.to(x) + transcoder.b_dec.to(x)
    if transcoder.W_skip is not None:
        y = y + x @ transcoder.W_skip.to(x)
    return y, z


def bridge(name, dtype=torch.float64):
    """Return a bridge of a family without processed weights."""
    return bridges.boot(name, dtype)


def three_layers():
    """Return a bridge around GPT-2 with three layers: errors must pass gradients on."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**bridges.GPT | {"n_layer": 3})
    source = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager")
    return bridges.bridged(bridges.randomise(source.double().eval()))


def hooked(name, dtype=torch.float64, **changes):
    """Return a HookedTransformer of a family."""
    from models import build

    return build(name, dtype, **changes)


def layers_of(model, layers=None, **options):
    """Return a transcoder for each layer, or for the given layers."""
    chosen = range(len(model.blocks)) if layers is None else layers
    return {layer: drawn(model.cfg.d_model, seed=layer + 1, **options) for layer in chosen}


def cross_layer(n_layers, d_model, scale=1.0, **options):
    """Return a cross-layer transcoder with random weights: {layer: transcoder}."""
    result = {}
    for layer in range(n_layers):
        transcoder = drawn(d_model, seed=layer + 1, **options)
        generator = torch.Generator().manual_seed(100 + layer)
        shape = n_layers - 1 - layer, transcoder.d_features, d_model
        later = torch.randn(*shape, generator=generator, dtype=torch.float64)
        later = scale * later / transcoder.d_features**0.5
        result[layer] = replace(transcoder, W_later=later.to(transcoder.W_dec.dtype))
    return result


def cross_layer_of(model, **options):
    """Return a cross-layer transcoder that fits a model."""
    return cross_layer(len(model.blocks), model.cfg.d_model, **options)
