"""Transcoders: load and save them, and attach their features to a model as neuron-heads."""

from attn_only_lens.heads.transcoder import Transcoder
from attn_only_lens.models.attach import attach, detach
from attn_only_lens.transcoders._fidelity import fidelity
from attn_only_lens.transcoders._load import load
from attn_only_lens.transcoders._save import save

__all__ = [
    "Transcoder",
    "attach",
    "detach",
    "fidelity",
    "load",
    "save",
]
