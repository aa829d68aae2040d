"""The public names and where they are defined; they are imported when they are first used."""

from . import circuits, expansion, neurons, patching, pretrained, tasks, viz
from .comparison import Comparison, compare
from .engine.prompts import chat_tokens
from .engine.tokens import token_texts
from .errors import (
    AttnOnlyLensError,
    CheckpointError,
    ComparisonError,
    GrowthError,
    InputError,
    InputWarning,
    UnknownHeadError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from .gates import GATES, BilinearGate, Gate, GeneralizedSiLU, bilinear_gate
from .growth import Grown, grow
from .heads import (
    HeadName,
    dense_pattern,
    neuron_gate,
    neuron_pattern,
)
from .models.checkpoint import save
from .models.convert import convert
from .models.expose import ExposedNeurons, expose_neuron_heads
from .models.gate_option import Bilinear, Calibration, calibrate
from .models.load import load
from .models.to_stock import to_stock
from .models.two_blocks import AttentionOnlyCache, AttentionOnlyTransformer, HeadStack
from .models.verify import Verification, verify

__all__ = [
    "GATES",
    "AttentionOnlyCache",
    "AttentionOnlyTransformer",
    "AttnOnlyLensError",
    "Bilinear",
    "BilinearGate",
    "Calibration",
    "CheckpointError",
    "Comparison",
    "ComparisonError",
    "ExposedNeurons",
    "Gate",
    "GeneralizedSiLU",
    "Grown",
    "GrowthError",
    "HeadName",
    "HeadStack",
    "InputError",
    "InputWarning",
    "UnknownHeadError",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "Verification",
    "bilinear_gate",
    "calibrate",
    "chat_tokens",
    "circuits",
    "compare",
    "convert",
    "dense_pattern",
    "expansion",
    "expose_neuron_heads",
    "grow",
    "load",
    "neuron_gate",
    "neuron_pattern",
    "neurons",
    "patching",
    "pretrained",
    "save",
    "tasks",
    "to_stock",
    "token_texts",
    "verify",
    "viz",
]
