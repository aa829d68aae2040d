"""Average gradients over runs with interpolated embeddings (EAP-IG)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.axes import Residual
from attn_only_lens.engine.gradients import (
    Tape,
    edit_input,
    start_graph,
)
from attn_only_lens.engine.metrics import BoundMetric
from attn_only_lens.engine.recording import Recording, run
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of, logit_tolerance
from attn_only_lens.tolerances import disagreement


def integrated_gradients(
    model: Any,
    target: Recording,
    source: Recording,
    metric: BoundMetric,
    tape: Tape,
    steps: int,
    progress: bool,
) -> dict[str, Tensor]:
    """Return the gradients at hook points, averaged over runs with interpolated embeddings."""
    x, end = target.streams[0], source.streams[0]
    _require_whole(model, target, source)
    total = dict[str, Tensor]()
    for step in tqdm(range(steps), unit="step", disable=not progress):
        tape, point = tape.anew(), torch.lerp(x, end, (step + 0.5) / steps)
        # Hooks run in order: the first replaces the residual stream, the second starts the graph.
        start = partial(_replace_stream, point)
        with torch.enable_grad(), edit_input(model, start), start_graph(model):
            logits = run(model, target.tokens, target.mask, tape.hooks)
            gradients = tape.gradients(metric.of_logits(logits))
        total = {
            name: total.get(name, 0.0) + gradient / steps for name, gradient in gradients.items()
        }
    return total


def _replace_stream(stream: Residual, _: Residual) -> Residual:
    return stream


@torch.no_grad()
def _require_whole(model: Any, target: Recording, source: Recording) -> None:
    """Raise an error if anything in the model except the embedding reads the input tokens."""
    with edit_input(model, lambda _: source.streams[0]):
        logits = run(model, target.tokens, target.mask)
    tolerance = logit_tolerance(host_of(model).neurons, logits.dtype)
    if off := disagreement(logits, source.logits, tolerance):
        reason = (
            "given the other run's embeddings as input of the first block, the model does not "
            f"compute that run's logits ({off}), so the model reads tokens elsewhere too; use "
            "method='gradient'"
        )
        raise UnsupportedModelError([reason], "gradients cannot be integrated between these runs")
