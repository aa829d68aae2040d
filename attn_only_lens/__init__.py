"""MLP neurons as attention heads: convert a HookedTransformer, then analyse every head alike."""

from attn_only_lens import circuits, expansion, neurons, patching, pretrained, tasks, viz
from attn_only_lens.comparison import Comparison, compare
from attn_only_lens.engine.prompts import chat_tokens
from attn_only_lens.engine.tokens import token_texts
from attn_only_lens.errors import (
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
from attn_only_lens.gates import GATES, BilinearGate, Gate, GeneralizedSiLU, bilinear_gate
from attn_only_lens.growth import Grown, grow
from attn_only_lens.heads import (
    HeadName,
    dense_pattern,
    neuron_gate,
    neuron_pattern,
)
from attn_only_lens.models.checkpoint import save
from attn_only_lens.models.convert import convert
from attn_only_lens.models.expose import ExposedNeurons, expose_neuron_heads
from attn_only_lens.models.gate_option import Bilinear, Calibration, calibrate
from attn_only_lens.models.load import load
from attn_only_lens.models.to_stock import to_stock
from attn_only_lens.models.two_blocks import AttentionOnlyCache, AttentionOnlyTransformer, HeadStack
from attn_only_lens.models.verify import Verification, verify

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


def __dir__() -> list[str]:
    return __all__
