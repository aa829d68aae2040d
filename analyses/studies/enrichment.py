"""Enrichment and depletion: neurons that write more of what they read, or remove it.

    python -m analyses.studies.enrichment        a table of the neurons of Small English

A neuron reads q = x · r and, in a gated MLP, u = x · s as well (W_gate and W_in), and writes w:

    plain    x + act(x · r) w           cos(r, w) > 0: the component along r grows; < 0: it shrinks
    gated    x + act(x · r) (x · s) w   while the gate is open, cos(s, w) > 0: the component along
                                        s grows, whatever its sign; < 0: it shrinks

Source of the two terms: Gerstner and Schütze 2025, "Understanding Gated Neurons in Transformers
from Their Input-Output Functionality" (arXiv:2505.17936). Their classes of gated neurons also use
cos(r, w) and cos(r, s). The signs of these two depend on the sign of u: (r, s, w) and (r, -s, -w)
are the same neuron.

1/√d_model is the root mean square cosine of random vectors.
"""

from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens import expose_neuron_heads, pretrained
from attn_only_lens.circuits.weights.head_matrices import HeadMatrices
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.sites import neuron_heads, resolve_sites


@torch.no_grad()
def enrichment(
    model: Any, layers: int | list[int] | None = None, *, fold_norms: bool = True
) -> pd.DataFrame:
    """Return the cosine between the direction that each neuron reads and the one that it writes.

    Args:
        model: a model with neuron-heads.
        layers: source layers; None for all.
        fold_norms: fold norms into the weights; False uses the weights alone.

    Returns:
        A frame with one row per neuron: `name`, `layer`, `neuron`; `cos` of W_in and W_out;
        `ratio_to_baseline`, |cos| · √d_model; `gate_cos` of W_gate and W_out, and `gate_value_cos`
        of W_gate and W_in (in plain MLPs `cos` and 1). Cosines are NaN if a vector is zero.
    """
    groups = resolve_sites(model, neuron_heads(layers))
    matrices = HeadMatrices.of(model, fold_norms=fold_norms)
    frames = []
    for sites in groups:
        gate, value = (matrices.read_matrices(sites, kind).A.squeeze(-1) for kind in ("q", "v"))
        written = matrices.write_matrices(sites).B.squeeze(-2)
        cos = _cos(value, written)
        columns = {
            "name": sites.names,
            "layer": sites.layer,
            "neuron": sites.index.numpy(),
            "cos": cos,
            "ratio_to_baseline": abs(cos) * model.cfg.d_model**0.5,
            "gate_cos": _cos(gate, written),
            "gate_value_cos": _cos(gate, value),
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def _cos(first: Float[Tensor, "neuron d_model"], second: Float[Tensor, "neuron d_model"]) -> Any:
    first, second = (to_float64_device(vectors).double() for vectors in (first, second))
    product = (first * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))
    return product.clamp(-1, 1).cpu().numpy()


if __name__ == "__main__":
    frame = enrichment(expose_neuron_heads(pretrained.small_english()).model)
    print(frame.sort_values("cos").round(3).to_string(index=False))
