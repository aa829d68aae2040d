"""Neuron-heads beside the MLPs of a model that stays what it is."""

from attn_only_lens.in_place.alone import random, run_alone, undisturbed
from attn_only_lens.in_place.beside import HOOKS, BilinearInPlace, InPlace
from attn_only_lens.in_place.exposed import exposed_heads, hide, show
from attn_only_lens.in_place.recognise import KnownMLP, recognise
from attn_only_lens.in_place.sockets import UnknownMLPError

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
    "undisturbed",
]
