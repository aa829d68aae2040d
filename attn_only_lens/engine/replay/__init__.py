"""Run only a model's last blocks, for many patched copies of a run (variants) at once."""

from typing import Any

import torch

from attn_only_lens.engine.metrics import BoundMetric
from attn_only_lens.engine.recording import Recording, record_again
from attn_only_lens.engine.replay.base import Replay, Variants
from attn_only_lens.heads import host_of
from attn_only_lens.precision import full_precision

__all__ = ["Replay", "Variants", "make_replay"]


def make_replay(model: Any, recording: Recording, metric: BoundMetric) -> Replay:
    """Return a replay of a run, after testing that it reproduces the recorded logits."""
    replay = host_of(model).replay
    with torch.no_grad():  # without no_grad, keys and values would keep autograd graphs in memory
        with full_precision() as raised:
            precise = replay(record_again(model, recording) if raised else recording, metric)
            precise.check()
        checked: Replay = replay(recording, metric, precise) if raised else precise
        return checked
