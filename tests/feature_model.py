"""Small English with transcoders in two of its four layers: features, a skip node, error nodes."""

import torch

from attn_only_lens import load, transcoders

PAIR = "The keys near the cabinet", "The key near the cabinet"
DEAD = 5
"""The index of a feature of layer 3 that is never active."""


def of_mlp(model, layer, **options):
    """Return a transcoder with an MLP's weights but other gates, so it has an error.

    It has one additional feature, which is dead.
    """
    mlp = model.blocks[layer].mlp
    W_enc, W_dec = mlp.W_gate.detach().clone(), mlp.W_out.detach().clone()
    b_enc, b_dec = W_enc.new_zeros(W_enc.shape[1]), W_enc.new_zeros(len(W_enc))
    b_enc[DEAD] = -1e6
    if options.get("activation") == "jumprelu":
        options["threshold"] = torch.full_like(b_enc, 0.3)
    if options.pop("skip", False):
        generator = torch.Generator().manual_seed(layer)
        noise = torch.randn(len(W_enc), len(W_enc), generator=generator)
        options["W_skip"] = 0.1 * noise.to(W_enc) / len(W_enc) ** 0.5
    return transcoders.Transcoder(W_enc, W_dec, b_enc, b_dec, **options)


def with_features():
    """Return the model: relu features and a skip node in layer 1, jumprelu features in layer 3."""
    model = load("small-english")
    chosen = {1: of_mlp(model, 1, skip=True), 3: of_mlp(model, 3, activation="jumprelu")}
    return transcoders.attach(model, chosen).model
