"""Gradients averaged along the straight line between the two runs' embeddings.

Hanna, Pezzelle and Belinkov, "Have Faith in Faithfulness: Going Beyond Circuit Overlap When Finding
Model Mechanisms" (2024), EAP-IG. With x and x' what enters the first block in the run patched into
and in the other, and g(x) the gradient of the metric at a head when x enters,

    g = (1/k) Σ_j g(x + α_j (x' - x)),    α_j = (j - 1/2)/k,  j = 1 … k

the midpoint rule for the integral over α, where the paper takes the right ends j/k. As integrated
gradients do (Sundararajan, Taly and Yan 2017), those of x itself are complete: Σ (x' - x) · g tends
to metric(x') - metric(x) as k grows, with an error of order 1/k². At heads, whose activations move
along no straight lines, no such sum is claimed.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.axes import Residual
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import logit_tolerance, neuron_heads
from attn_only_lens.patching.bound import BoundMetric
from attn_only_lens.patching.gradients import Tape, entering, rooted, value_of
from attn_only_lens.patching.record import Recording, run

__all__ = ["integrated_gradients", "points"]


def points(target: Residual, source: Residual, steps: int) -> Iterable[Residual]:
    """The midpoints of equal steps from one stream to the other."""
    for j in range(steps):
        yield torch.lerp(target, source, (j + 0.5) / steps)


def integrated_gradients(
    model: Any,
    target: Recording,
    source: Recording,
    metric: BoundMetric,
    names: Iterable[str],
    steps: int,
    progress: bool,
) -> dict[str, Tensor]:
    """Mean gradients at hook points, on the way from one run to the other: k forwards, k backwards.

    Raises:
        UnsupportedModelError: what enters the first block is not all that tells the runs apart.
    """
    x, other = target.streams[0], source.streams[0]
    _require_whole(model, target, source)
    names, total = list(names), dict[str, Tensor]()
    for point in tqdm(points(x, other, steps), total=steps, unit="step", disable=not progress):
        tape = Tape(names)
        # The later of two hooks sees what the earlier has put there: first the point, then a root.
        with torch.enable_grad(), entering(model, lambda _, at=point: at), rooted(model):  # type: ignore[misc]
            logits = run(model, target.tokens, target.mask, tape.hooks)
            found = tape.gradients(value_of(metric, logits))
        total = {name: total.get(name, 0.0) + each / steps for name, each in found.items()}
    return total


@torch.no_grad()
def _require_whole(model: Any, target: Recording, source: Recording) -> None:
    """Refuse models in which tokens enter elsewhere: their runs have no straight line between."""
    with entering(model, lambda _: source.streams[0]):
        logits = run(model, target.tokens, target.mask)
    error = float((logits - source.logits).abs().max())
    largest = float(source.logits.abs().max())
    if not error <= logit_tolerance(neuron_heads(model), logits.dtype) * largest:
        raise UnsupportedModelError(
            [
                "with the other run's embeddings entering its first block, its logits differ by "
                f"{error:.2g} from those of that run (largest: {largest:.2g}): tokens enter "
                "elsewhere too. Take method='gradient'"
            ],
            "gradients cannot be integrated between these runs",
        )
