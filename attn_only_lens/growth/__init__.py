"""Grow models and their optimizers, and compare what has grown with the original.

`expansion/` has the six function-preserving expansions of weights, `models/` applies them to models
of all kinds, and `comparison/` compares heads, neurons and circuits.

Source: Gesmundo and Maile, "Composable Function-preserving Expansions for Transformer
Architectures" (the growth paper), theorems 3.1 to 3.6.
"""

from attn_only_lens.growth.comparison import Comparison, compare
from attn_only_lens.growth.expansion import (
    AddHeads,
    AddNeurons,
    Axis,
    InsertLayer,
    Provenance,
    Weights,
    WidenQueriesAndKeys,
    WidenStream,
    WidenValues,
    activation_map,
    compose,
    init,
)
from attn_only_lens.growth.models import Grown, grow, identity, read, read_provenance

__all__ = [
    "AddHeads",
    "AddNeurons",
    "Axis",
    "Comparison",
    "Grown",
    "InsertLayer",
    "Provenance",
    "Weights",
    "WidenQueriesAndKeys",
    "WidenStream",
    "WidenValues",
    "activation_map",
    "compare",
    "compose",
    "grow",
    "identity",
    "init",
    "read",
    "read_provenance",
]
