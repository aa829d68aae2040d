"""Transcoders: attach their features to a model as neuron-heads."""

from attn_only_lens.heads.transcoder import Transcoder
from attn_only_lens.transcoders._attach import AttachedTranscoders, attach

__all__ = ["AttachedTranscoders", "Transcoder", "attach"]
