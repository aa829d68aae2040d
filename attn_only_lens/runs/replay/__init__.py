"""The rest of a forward pass, from a stream in the middle of it, for many variants at once."""

from typing import Any

import torch

from attn_only_lens.heads import host_of
from attn_only_lens.numerics import full_precision
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import Recording, again
from attn_only_lens.runs.replay.replay import Replay, Variants

__all__ = ["Replay", "Variants", "replay_of"]


def replay_of(model: Any, recording: Recording, metric: BoundMetric) -> Replay:
    """The replay for a model, checked."""
    replay = host_of(model).replay
    with torch.no_grad():  # keys and values on record would hold their graphs as long as it lives
        with full_precision() as raised:
            judge = replay(again(model, recording) if raised else recording, metric)
            judge.check()
        return replay(recording, metric, judge) if raised else judge
