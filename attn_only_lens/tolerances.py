"""Bounds, for each dtype, on how much rounding may change the result of a computation.

If hooks are attached, a converted model computes an activation as attention pattern times value,
p(q) · q; the original computes act(q). The results differ only by rounding errors, which later
layers amplify. Compared with the same model in float64, both models have errors of similar size:
over the model families in the tests, the ratio of the two errors is at most 2.7, and its median is
1.0 in every dtype. The bounds below therefore hold for both kinds of model. In half precision, the
bounds are too wide to detect small errors, so verify a conversion in float32 or float64.

The table shows the largest measured max |Δ logit| / max |logit| over all model families in the
tests (with random weights at two scales) and over trained models:

    dtype      3 layers   12 layers   trained   bound
    float64    6.8e-15    1.4e-14     2.2e-15   1e-12
    float32    1.7e-06    3.2e-06     1.1e-06   2e-05
    bfloat16   7.8e-02    2.3e-01     2.7e-02   3e-01
    float16    8.6e-03    3.5e-02     6.1e-03   5e-02
"""

import torch
from torch import Tensor

LOGIT_TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 3e-1,
    torch.float16: 5e-2,
}
"""Largest allowed max |Δ logit| / max |logit| with every hook live."""


def rounding(dtype: torch.dtype) -> float:
    """Return an upper bound on the relative error that rounding in this dtype may cause.

    The bound is 16 machine epsilons of the dtype, but at most one epsilon of bfloat16, because 16
    epsilons of bfloat16 would be 12 %.
    """
    return min(16 * torch.finfo(dtype).eps, torch.finfo(torch.bfloat16).eps)


def disagreement(
    computed: Tensor,
    expected: Tensor,
    tolerance: float,
    *,
    size: Tensor | float | None = None,
    mask: Tensor | None = None,
) -> str:
    """Return an error message if two results differ by more than rounding, otherwise "".

    Args:
        computed: one result.
        expected: the other result, with the same shape.
        tolerance: the largest allowed max |Δ|, relative to `size`.
        size: the largest absolute value of the summed terms; by default max |expected|.
        mask: 1 for tokens to compare, 0 for padding.

    Example:
        >>> disagreement(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), 1e-5)
        'they differ by 0.5, and rounding allows 2e-05'
    """
    if mask is not None:
        computed, expected = (x[mask.bool().to(x.device)] for x in (computed, expected))
    if not expected.numel():
        return ""
    error = (computed - expected).abs().max()
    largest = expected.abs().max() if size is None else torch.as_tensor(size, device=error.device)
    difference, scale = torch.stack([error, largest.to(error)]).tolist()  # one transfer
    return beyond_rounding(difference, tolerance * scale)


def beyond_rounding(difference: float, allowed: float) -> str:
    """Return an error message if a difference exceeds what rounding allows, otherwise ""."""
    if difference <= allowed:
        return ""
    return f"they differ by {difference:.2g}, and rounding allows {allowed:.2g}"
