"""Neuron-heads beside the MLPs of a model that stays what it is."""

from attn_only_lens.models.in_place.copy_bridge import copy_model, reasons_against_copying
from attn_only_lens.models.in_place.exposed import exposed_heads, hidden, hide, show
from attn_only_lens.models.in_place.heads import BilinearInPlace, InPlace
from attn_only_lens.models.in_place.mlps import (
    KnownMLP,
    UnknownMLPError,
    recognise,
    run_alone,
    sockets_of,
    undisturbed,
)

__all__ = [
    "BilinearInPlace",
    "InPlace",
    "KnownMLP",
    "UnknownMLPError",
    "copy_model",
    "exposed_heads",
    "hidden",
    "hide",
    "reasons_against_copying",
    "recognise",
    "run_alone",
    "show",
    "sockets_of",
    "undisturbed",
]
