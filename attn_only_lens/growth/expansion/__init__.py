"""Six ways to enlarge a transformer without changing the function that it computes.

Source: Gesmundo and Maile, "Composable Function-preserving Expansions for Transformer
Architectures" (the growth paper), theorems 3.1 to 3.6. `attn_only_lens.grow` applies these
expansions to models.
"""

from attn_only_lens.growth.expansion import initialise as init
from attn_only_lens.growth.expansion.activations import activation_map
from attn_only_lens.growth.expansion.expansion import compose
from attn_only_lens.growth.expansion.heads import AddHeads
from attn_only_lens.growth.expansion.layers import InsertLayer
from attn_only_lens.growth.expansion.neurons import AddNeurons
from attn_only_lens.growth.expansion.provenance import Provenance
from attn_only_lens.growth.expansion.queries import WidenQueriesAndKeys
from attn_only_lens.growth.expansion.stream import WidenStream
from attn_only_lens.growth.expansion.values import WidenValues
from attn_only_lens.growth.expansion.weights import Axis, Weights

__all__ = [
    "AddHeads",
    "AddNeurons",
    "Axis",
    "InsertLayer",
    "Provenance",
    "Weights",
    "WidenQueriesAndKeys",
    "WidenStream",
    "WidenValues",
    "activation_map",
    "compose",
    "init",
]
