"""The gates of transcoder features: JumpReLU and TopK; ReLU is in `exact.py`.

    jumprelu      p(q) = 1[q > θ], with a threshold θ for each feature
    topk          p(q) = 1[q > 0 and q is one of the k largest pre-activations of its token]

A feature's topk gate depends on all features' pre-activations at the same token.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_only_lens.gates.exact import GATES, Gate, step_gate


def feature_gate(
    threshold: Float[Tensor, "d_features"] | None = None, k: int | None = None
) -> Gate:
    """Return the jumprelu gate if a threshold is given, topk if k is given, otherwise relu."""
    if threshold is None and k is None:
        return GATES["relu"]
    name = "jumprelu" if k is None else "topk"
    return step_gate(name, lambda q: active_features(q, threshold, k))


@torch.no_grad()
def active_features(
    q: Float[Tensor, "*any d_features"],
    threshold: Float[Tensor, "d_features"] | None = None,
    k: int | None = None,
) -> Bool[Tensor, "*any d_features"]:
    """Return which features are active, given the pre-activations q of all features.

    If topk must choose between equal pre-activations, features with smaller indices come first.
    """
    active = q > (0.0 if threshold is None else threshold.to(q.dtype))
    if k is None:
        return active
    # `topk` is several times faster than a stable sort of all features.
    least = q.topk(k, dim=-1).values[..., -1:]
    above, tied = q > least, q == least
    n_tied = k - above.sum(dim=-1, keepdim=True)  # how many of the tied features are active
    return active & (above | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= n_tied)))
