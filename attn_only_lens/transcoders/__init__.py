"""Transcoders: load them, and attach their features to a model as neuron-heads."""

from attn_only_lens.heads.transcoder import Transcoder
from attn_only_lens.transcoders._attach import AttachedTranscoders, attach
from attn_only_lens.transcoders._fidelity import Fidelity, fidelity

__all__ = ["AttachedTranscoders", "Fidelity", "Transcoder", "attach", "fidelity"]
