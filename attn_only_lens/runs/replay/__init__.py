"""The rest of a forward pass, from a stream in the middle of it, for many variants at once."""

from typing import Any

import torch

from attn_only_lens.numerics import full_precision
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import Recording, record_again
from attn_only_lens.runs.replay.base import Replay, Variants
from attn_only_lens.runs.replay.bridge import BridgeReplay
from attn_only_lens.runs.replay.hooked import HookedReplay
from attn_only_lens.tl import HookedTransformer

__all__ = ["Replay", "Variants", "make_replay"]


def make_replay(model: Any, recording: Recording, metric: BoundMetric) -> Replay:
    """Return the replay for a model, checked."""
    kind = HookedReplay if isinstance(model, HookedTransformer) else BridgeReplay
    with torch.no_grad():  # recorded keys and values would hold their graphs as long as they live
        with full_precision() as raised:
            precise = kind(model, record_again(model, recording) if raised else recording, metric)
            precise.check()
        return kind(model, recording, metric, precise) if raised else precise
