"""Neuron-heads beside the MLPs of a model that stays what it is."""

from attn_only_lens.in_place.alone import run_alone, undisturbed
from attn_only_lens.in_place.beside import BilinearInPlace, InPlace
from attn_only_lens.in_place.copying import copied_bridge, reasons_against_copying
from attn_only_lens.in_place.exposed import exposed_heads, hidden, hide, show
from attn_only_lens.in_place.recognise import KnownMLP, recognise
from attn_only_lens.in_place.sockets import UnknownMLPError, sockets_of

__all__ = [
    "BilinearInPlace",
    "InPlace",
    "KnownMLP",
    "UnknownMLPError",
    "copied_bridge",
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
