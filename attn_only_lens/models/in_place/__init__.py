"""Neuron-heads of MLPs that stay in place."""

from attn_only_lens.models.in_place.bridge_copy import copy_bridge, reasons_against_copying
from attn_only_lens.models.in_place.exposed import exposed_heads, hidden, hide, show
from attn_only_lens.models.in_place.heads import BilinearInPlace, InPlace

__all__ = [
    "BilinearInPlace",
    "InPlace",
    "copy_bridge",
    "exposed_heads",
    "hidden",
    "hide",
    "reasons_against_copying",
    "show",
]
