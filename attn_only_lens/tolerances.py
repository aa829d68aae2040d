"""How far two computations of the same quantity may differ: one table, by dtype.

A converted model with live hooks evaluates p(q) · q where its source evaluates act(q): the same
real number through a few different roundings. The bound on logits, relative to the largest logit,
is ROUNDINGS roundings of the unit roundoff u = eps / 2, amplified by depth; ROUNDINGS was set so
that the worst model of the test-suite (all families, 2 to 5 layers) stays below a third of it.
float64 has the bound that the project promises, 1e-12, far above its roundings.
"""

import torch

__all__ = ["LOGIT_TOLERANCE"]

LOGIT_TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 1e-1,
    torch.float16: 2e-2,
}
"""Largest allowed max |Δ logit| / max |logit| with every hook live."""
