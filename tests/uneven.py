"""Converted models whose layers differ in size, and uniform models that compute the same.

In place of the heads and neurons that a smaller layer lacks, a uniform model has some that write
nothing: their rows of W_O and W_out are zero. It is made by `convert` alone; its small twin has
slices of its weights, so no code that grows or shrinks models is used.
"""

import torch
from models import FAMILIES, build

from attn_only_lens import Bilinear, convert
from attn_only_lens.heads import HeadName
from attn_only_lens.models.two_blocks import LayerSizes, rebuild

# Layer 0, whose sizes are those in the configuration, is never the largest.
NEURONS = (29, 37, 31)
GROUPS = (2, 3, 1)  # groups of heads that share keys and values; or heads
WIDTHS = (11, 13, 7)  # widths of queries and keys
VALUES = (7, 11, 13)


def uneven(name, *, widths=False, gate=None, tokens=None, **changes):
    """Return a converted model with layers of three sizes, and the equal uniform one.

    Args:
        name: the family.
        widths: whether head widths differ too, and value widths from query widths.
        gate: the number of heads of bilinear gates; None for exact gates.
        tokens: for calibrating gated MLPs.
        **changes: changes of the configuration.
    """
    if widths:
        changes = {"d_head": max(*WIDTHS, *VALUES)} | changes
    grouped = FAMILIES[name].get("n_key_value_heads")
    per_group = 3 if grouped else 1
    n_heads = max(GROUPS) * per_group
    sizes = {"n_heads": n_heads, "n_key_value_heads": max(GROUPS) if grouped else None}
    source = build(name, **sizes | changes)
    for layer, block in enumerate(source.blocks):
        with torch.no_grad():
            block.attn.W_O[GROUPS[layer] * per_group :] = 0.0
            block.mlp.W_out[NEURONS[layer] :] = 0.0
            if widths:  # the missing coordinates are multiplied by zeros, in scores and in values
                block.attn.W_O[:, VALUES[layer] :] = 0.0
                block.attn.W_Q[..., WIDTHS[layer] :] = 0.0
                block.attn.b_Q[..., WIDTHS[layer] :] = 0.0
    option = Bilinear(gate) if gate else "exact"
    if gate and source.cfg.gated_mlp:
        option = Bilinear.calibrated(source, tokens, gate)
    uniform = convert(source, gate=option)
    sizes = [
        LayerSizes(
            GROUPS[layer] * per_group,
            GROUPS[layer] if grouped else None,
            *((WIDTHS[layer], VALUES[layer]) if widths else (source.cfg.d_head,) * 2),
            NEURONS[layer],
            sizes.attn_scale,
        )
        for layer, sizes in enumerate(uniform.cfg.layer_sizes)
    ]
    tensors = {
        key: cut(key, tensor, sizes, widths).clone() for key, tensor in uniform.state_dict().items()
    }
    return rebuild(uniform, tensors, sizes), uniform


def cut(name, tensor, sizes, widths):
    """Slice a tensor to a smaller layer's sizes."""
    if not name.startswith("blocks."):
        return tensor
    _, block, _, leaf = (*name.split("."), "")[:4]
    size = sizes[int(block) // 2]
    if int(block) % 2:
        axes = {"W_in": (1, "d_mlp"), "W_gate": (1, "d_mlp"), "b_in": (0, "d_mlp")}
        axes["W_out"] = (0, "d_mlp")
        along = [axes[leaf]] if leaf in axes else []
    else:
        heads = "n_key_value_heads" if leaf.startswith("_") else "n_heads"
        per_head = {"W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "sinks"}
        along = [(0, heads)] if leaf.removeprefix("_") in per_head else []
        if widths and leaf.removeprefix("_") in per_head - {"sinks"}:
            of_values = leaf.removeprefix("_") in {"W_V", "b_V", "W_O"}
            width = "d_value" if of_values else "d_head"
            along.append((1 if leaf == "W_O" else tensor.ndim - 1, width))
    for dim, which in along:
        tensor = tensor.narrow(dim, 0, getattr(size, which))
    return tensor


def has(model, name):
    """Return whether the uneven model has this head or neuron of the uniform model."""
    head = HeadName.parse(name)
    sizes = model.cfg.layer_sizes[head.layer]
    return head.index < (sizes.n_heads if head.kind == "attention" else sizes.d_mlp)
