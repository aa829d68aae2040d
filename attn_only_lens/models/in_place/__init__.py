"""Expose MLP neurons as attention heads (neuron-heads) in place, without replacing the MLPs."""

from attn_only_lens.models.in_place.exposed import (
    exposed_heads,
    hidden,
    hide,
    require_no_transcoders,
    show,
)
from attn_only_lens.models.in_place.mlp_hooks import BilinearInPlace, InPlace
from attn_only_lens.models.in_place.model_copy import copy_model, reasons_against_copying

__all__ = [
    "BilinearInPlace",
    "InPlace",
    "copy_model",
    "exposed_heads",
    "hidden",
    "hide",
    "reasons_against_copying",
    "require_no_transcoders",
    "show",
]
