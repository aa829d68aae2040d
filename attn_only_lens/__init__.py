"""MLP neurons as attention heads: convert a HookedTransformer, then analyse every head alike."""

from attn_only_lens import pretrained
from attn_only_lens.checkpoint import load, save
from attn_only_lens.convert import convert
from attn_only_lens.errors import (
    AttnOnlyLensError,
    CheckpointError,
    UnknownHeadError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from attn_only_lens.gates import GATES, Gate
from attn_only_lens.heads import (
    AttentionOnlyCache,
    AttentionOnlyTransformer,
    HeadName,
    HeadStack,
    dense_pattern,
    neuron_pattern,
)
from attn_only_lens.verify import Verification, verify

__all__ = [
    "GATES",
    "AttentionOnlyCache",
    "AttentionOnlyTransformer",
    "AttnOnlyLensError",
    "CheckpointError",
    "Gate",
    "HeadName",
    "HeadStack",
    "UnknownHeadError",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "Verification",
    "convert",
    "dense_pattern",
    "load",
    "neuron_pattern",
    "pretrained",
    "save",
    "verify",
]
