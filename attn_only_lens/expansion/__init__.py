"""Six expansions of a transformer that keep its function, over weights: pure functions.

Source: Gesmundo and Maile, "Composable Function-preserving Expansions for Transformer
Architectures" (the growth paper), theorems 3.1 to 3.6. `attn_only_lens.grow` does them to models.
"""

from attn_only_lens.expansion import initialise as init
from attn_only_lens.expansion.activations import MovedActivation, moved_activation
from attn_only_lens.expansion.centre import CentreStream
from attn_only_lens.expansion.composed import Composed, compose
from attn_only_lens.expansion.expansion import Expansion
from attn_only_lens.expansion.heads import AddHeads
from attn_only_lens.expansion.layers import InsertLayer
from attn_only_lens.expansion.neurons import AddNeurons
from attn_only_lens.expansion.placement import Moved, Place, Zeros
from attn_only_lens.expansion.provenance import Identity, Provenance
from attn_only_lens.expansion.queries import WidenQueriesAndKeys
from attn_only_lens.expansion.stream import WidenStream
from attn_only_lens.expansion.values import WidenValues
from attn_only_lens.expansion.weights import Axis, Constants, Weights

__all__ = [
    "AddHeads",
    "AddNeurons",
    "Axis",
    "CentreStream",
    "Composed",
    "Constants",
    "Expansion",
    "Identity",
    "InsertLayer",
    "Moved",
    "MovedActivation",
    "Place",
    "Provenance",
    "Weights",
    "WidenQueriesAndKeys",
    "WidenStream",
    "WidenValues",
    "Zeros",
    "compose",
    "init",
    "moved_activation",
]
