"""The rest of a forward pass, from a stream in the middle of it, for many variants at once."""

from typing import Any

import torch

from attn_only_lens.numerics import full_precision
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import Recording, again
from attn_only_lens.runs.replay.bridge import BridgeReplay
from attn_only_lens.runs.replay.hooked import HookedReplay
from attn_only_lens.runs.replay.replay import Replay, Variants
from attn_only_lens.tl import HookedTransformer

__all__ = ["Replay", "Variants", "replay_of"]


def replay_of(model: Any, recording: Recording, metric: BoundMetric) -> Replay:
    """The replay for a model, checked."""
    kind = HookedReplay if isinstance(model, HookedTransformer) else BridgeReplay
    with torch.no_grad():  # keys and values on record would hold their graphs as long as it lives
        with full_precision() as raised:
            judge = kind(model, again(model, recording) if raised else recording, metric)
            judge.check()
        return kind(model, recording, metric, judge) if raised else judge
