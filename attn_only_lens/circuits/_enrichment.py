"""Enrichment and depletion: neurons that write more of what they read, or remove it.

A neuron reads q = x · r and, in a gated MLP, u = x · s as well (W_gate and W_in), and writes w:

    plain    x + act(x · r) w           cos(r, w) > 0: the component along r grows; < 0: it shrinks
    gated    x + act(x · r) (x · s) w   while the gate is open, cos(s, w) > 0: the component along
                                        s grows, whatever its sign; < 0: it shrinks

The two terms are those of Gerstner and Schütze 2025, "Understanding Gated Neurons in
Transformers from Their Input-Output Functionality" (arXiv:2505.17936). Their classes of gated
neurons also ask for cos(r, w) and cos(r, s). The signs of both belong to u: (r, s, w) and
(r, -s, -w) are the same neuron.

1/√d_model is the root mean square cosine of random vectors.
"""

from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.weights.head_matrices import HeadMatrices
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.sites import neuron_heads, resolve_sites


@torch.no_grad()
def enrichment(
    model: Any, layers: int | list[int] | None = None, *, fold_norms: bool = True
) -> pd.DataFrame:
    """Return the cosine between the direction that each neuron reads and the one that it writes.

    Args:
        model: converted, or with exposed neuron-heads.
        layers: source layers; None for all.
        fold_norms: whether to fold norms into the weights; False takes weights as they stand.

    Returns:
        A row for each neuron: `name`, `layer`, `neuron`; `cos`, of the value's vector (W_in) and
        W_out; `ratio_to_baseline`, |cos| · √d_model; `gate_cos`, of W_gate and W_out, and
        `gate_value_cos`, of W_gate and W_in, in plain MLPs the same as `cos` and 1. NaN where a
        vector is zero.

    Raises:
        InputError: norms or matrices of a bridge are unknown.
        InputError: the model has no neuron-heads, or not those layers.

    Example:
        >>> from attn_only_lens import circuits, convert, pretrained
        >>> frame = circuits.enrichment(convert(pretrained.modular_addition()))
        >>> len(frame), bool(frame.cos.between(-1, 1).all())
        (512, True)
    """
    groups = resolve_sites(model, neuron_heads(layers))
    matrices = HeadMatrices.of(model, fold_norms=fold_norms)
    frames = []
    for sites in groups:
        gate, value = (matrices.read_matrices(sites, kind).A.squeeze(-1) for kind in ("q", "v"))
        out = matrices.write_matrices(sites).B.squeeze(-2)
        cos = _cos(value, out)
        columns = {
            "name": sites.names,
            "layer": sites.layer,
            "neuron": sites.index.numpy(),
            "cos": cos,
            "ratio_to_baseline": abs(cos) * model.cfg.d_model**0.5,
            "gate_cos": _cos(gate, out),
            "gate_value_cos": _cos(gate, value),
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def _cos(one: Float[Tensor, "neuron d_model"], other: Float[Tensor, "neuron d_model"]) -> Any:
    one, other = (to_float64_device(each).double() for each in (one, other))
    product = (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1))
    return product.clamp(-1, 1).cpu().numpy()
