"""The public names and where they are defined; they are imported when they are first used."""

from . import (
    circuits,
    errors,
    growth,
    neurons,
    patching,
    pretrained,
    tasks,
    transcoders,
    viz,
)
from ._load import load
from .engine.contrast import Contrast
from .engine.prompts import chat_tokens
from .explanation import explain
from .gates import GeneralizedSiLU
from .growth import compare, grow
from .heads import HeadName, neuron_pattern
from .models.checkpoint import save
from .models.convert import convert
from .models.expose import expose_neuron_heads
from .models.gate_option import Bilinear
from .models.to_stock import to_stock
from .work import Work

__all__ = [
    "Bilinear",
    "Contrast",
    "GeneralizedSiLU",
    "HeadName",
    "Work",
    "chat_tokens",
    "circuits",
    "compare",
    "convert",
    "errors",
    "explain",
    "expose_neuron_heads",
    "grow",
    "growth",
    "load",
    "neuron_pattern",
    "neurons",
    "patching",
    "pretrained",
    "save",
    "tasks",
    "to_stock",
    "transcoders",
    "viz",
]
