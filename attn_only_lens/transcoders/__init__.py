"""Transcoders: sparse MLPs whose features are neuron-heads."""

from attn_only_lens.heads.transcoder import Transcoder
from attn_only_lens.transcoders._load import load
from attn_only_lens.transcoders._save import save

__all__ = ["Transcoder", "load", "save"]
