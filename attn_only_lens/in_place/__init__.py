"""Neuron-heads beside the MLPs of a model that stays what it is."""

from attn_only_lens.in_place.beside import HOOKS, BilinearInPlace, InPlace
from attn_only_lens.in_place.exposed import exposed_heads, hide, show
from attn_only_lens.in_place.recognise import (
    KnownMLP,
    UnknownMLPError,
    random,
    recognise,
    run_alone,
)

__all__ = [
    "HOOKS",
    "BilinearInPlace",
    "InPlace",
    "KnownMLP",
    "UnknownMLPError",
    "exposed_heads",
    "hide",
    "random",
    "recognise",
    "run_alone",
    "show",
]
