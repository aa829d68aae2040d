"""How far two computations of the same logits may differ, given the neuron-heads on the way.

Heads of a gated MLP with bilinear gates are many times larger than their sum (`gates/gated.py`),
and so is their rounding. `verify` of small gated models in float32, with gates of 4 to 12 heads and
the arithmetic of four processors, measured up to 2.3 times that dtype's tolerance; over the gates'
amplification, up to 0.19 of it.
"""

from collections.abc import Iterable

import torch

from attn_only_lens.heads.computation import NeuronHeads
from attn_only_lens.tolerances import LOGIT_TOLERANCE

__all__ = ["logit_tolerance"]


def logit_tolerance(heads: Iterable[NeuronHeads], dtype: torch.dtype) -> float:
    """Largest allowed max |Δ logit| / max |logit|.

    Args:
        heads: the neuron-heads of each layer.
        dtype: of the logits. Half precision forms the sums over heads in float32.
    """
    sums = dtype if dtype == torch.float64 else torch.float32
    amplification = max((each.amplification for each in heads), default=1.0)
    return max(LOGIT_TOLERANCE[dtype], amplification * LOGIT_TOLERANCE[sums])
