"""The weights of one stock attention layer: neurons, or the attention heads of the source.

A stock head with a sink of logit s attends with softmax([scores, s]) and drops the sink's share.
In a local layer of window 1 a token sees itself alone, so head (i, j) of a neuron i with gate
p(q) = Σ_j w_j σ(b_j q + c_j) computes

    W_Q = W_V = W_in[:, i]    query and value q = x · W_in[:, i] + b_in[i]
    W_K = 0, b_K = b_j        score of the token itself b_j q
    sink = -c_j               pattern over (self, sink) = softmax([b_j q + c_j, 0]), shifted by c_j
    W_O = w_j W_out[i]        output w_j σ(b_j q + c_j) q W_out[i]

(in a gated MLP W_Q = W_gate[:, i], and the sum is a mixture times the value, `gates/gated.py`)
whose sum over j is q p(q) W_out[i]: Theorem 2 of "Attention-Only Transformers and Implementing
MLPs with Attention Heads", with the sink in the place of the bias token. Heads are in the order of
the neurons, the m heads of a neuron side by side: head i m + j.

An attention head of the source has no sink where a neuron has one. Its own gets the lowest number
of the dtype: exp of it, less any score, is exactly 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.gates import Gate
from attn_only_lens.gates.exact import QUICK_GELU_SLOPE
from attn_only_lens.heads.gating import AnyGate
from attn_only_lens.tl import Attention, GroupedQueryAttention

__all__ = [
    "PROBLEM",
    "Mixture",
    "StockHeads",
    "attention_heads",
    "mixture",
    "neuron_heads",
]

PROBLEM = "this model cannot be made of TransformerLens' own parts"
_SLOPES = {"silu": 1.0, "quick_gelu": QUICK_GELU_SLOPE}


class Mixture(NamedTuple):
    """p(q) = Σ_j w_j σ(b_j q + c_j); with c_j = ∞, a head that sees itself alone."""

    w: tuple[float, ...]
    b: tuple[float, ...]
    c: tuple[float, ...]


def mixture(gate: AnyGate) -> Mixture:
    """The gate as a mixture of sigmoids of affine maps, one for each head of a neuron.

    Raises:
        UnsupportedModelError: the gate is exact, and of another activation than silu or quick_gelu.

    Example:
        >>> from attn_only_lens import GATES
        >>> from attn_only_lens.stock.heads import mixture
        >>> mixture(GATES["quick_gelu"])
        Mixture(w=(1.0,), b=(1.702,), c=(0.0,))
    """
    if not isinstance(gate, Gate):
        return Mixture(gate.weights, gate.slopes, gate.offsets)
    if gate.name in _SLOPES:
        return Mixture((1.0,), (_SLOPES[gate.name],), (0.0,))
    raise UnsupportedModelError(
        [
            f"its gate is that of {gate.name}, exactly: a score that is not linear in the "
            'pre-activation, which no stock head has. Convert the source with gate="bilinear" '
            "first (silu and quick_gelu are linear as they are)"
        ],
        problem=PROBLEM,
    )


@dataclass(frozen=True)
class StockHeads:
    """The parameters of a stock `Attention`, under its names, with as many heads as are needed."""

    W_Q: Float[Tensor, "head_index d_model d_head"]
    W_K: Float[Tensor, "head_index d_model d_head"]
    W_V: Float[Tensor, "head_index d_model d_head"]
    W_O: Float[Tensor, "head_index d_head d_model"]
    b_Q: Float[Tensor, "head_index d_head"]
    b_K: Float[Tensor, "head_index d_head"]
    b_V: Float[Tensor, "head_index d_head"]
    b_O: Float[Tensor, "d_model"]
    sinks: Float[Tensor, "head_index"]

    def pad_into(self, attn: Attention, at: int) -> None:
        """Write the heads into the first heads of `attn`, coordinates from `at`; zero the rest."""
        for parameter in attn.parameters():
            parameter.zero_()
        n_heads, width = self.b_Q.shape
        heads, coordinates = slice(n_heads), slice(at, at + width)
        for name in ("W_Q", "W_K", "W_V"):
            getattr(attn, name)[heads, :, coordinates] = getattr(self, name)
        for name in ("b_Q", "b_K", "b_V", "W_O"):
            getattr(attn, name)[heads, coordinates] = getattr(self, name)
        attn.sinks[heads] = self.sinks
        attn.b_O.copy_(self.b_O)


def neuron_heads(
    W_in: Float[Tensor, "d_model d_mlp"],
    b_in: Float[Tensor, "d_mlp"],
    W_out: Float[Tensor, "d_mlp d_model"],
    b_out: Float[Tensor, "d_model"],
    w: tuple[float, ...],
    b: tuple[float, ...],
    c: tuple[float, ...],
    W_gate: Float[Tensor, "d_model d_mlp"] | None = None,
) -> StockHeads:
    """The neurons of one MLP as d_mlp · m heads of width 1; see the module.

    Args:
        W_in, b_in, W_out, b_out: the MLP's weights, as TransformerLens keeps them.
        w, b, c: the gate, m numbers each.
        W_gate: of a gated MLP: the queries' weights, while the values keep W_in.

    Returns:
        Heads for a local layer of window 1, with no scale of scores.
    """
    m, d_mlp = len(w), len(b_in)
    weights, slopes, offsets = (W_in.new_tensor(numbers) for numbers in (w, b, c))

    def each(of: Tensor) -> Tensor:
        return of.unsqueeze(-1).repeat_interleave(m, dim=0)

    # What TransformerLens adds after a gated MLP's product is no head's: it is a bias.
    bias, b_O = (b_in, b_out) if W_gate is None else (0.0 * b_in, b_in @ W_out + b_out)
    asked = each((W_in if W_gate is None else W_gate).T)
    return StockHeads(
        W_Q=asked,
        W_K=torch.zeros_like(asked),
        W_V=each(W_in.T),
        W_O=(weights[:, None] * W_out[:, None, :]).flatten(0, 1).unsqueeze(1),
        b_Q=each(bias),
        b_K=slopes.repeat(d_mlp).unsqueeze(-1),
        b_V=each(bias),
        b_O=b_O,
        sinks=(-offsets).clamp(min=torch.finfo(W_in.dtype).min).repeat(d_mlp),
    )


def attention_heads(attn: Attention | GroupedQueryAttention) -> StockHeads:
    """The heads of a source layer, keys and values ungrouped, the scale of scores in the queries.

    TransformerLens divides scores by `attn.attn_scale`, which holds √d_head and, in some models,
    the number of the layer: neither would be that of the padded layer.
    """
    lowest = torch.finfo(attn.W_Q.dtype).min
    own_sinks = attn.cfg.use_attention_sinks
    return StockHeads(
        W_Q=attn.W_Q / attn.attn_scale,
        W_K=attn.W_K,
        W_V=attn.W_V,
        W_O=attn.W_O,
        b_Q=attn.b_Q / attn.attn_scale,
        b_K=attn.b_K,
        b_V=attn.b_V,
        b_O=attn.b_O,
        sinks=attn.sinks if own_sinks else attn.W_Q.new_full((len(attn.W_Q),), lowest),
    )
