"""Grow models and their optimizers, and compare what has grown with the original.

`expansion/` has the six function-preserving expansions of weights, `models/` applies them to models
of all kinds, and `comparison/` compares heads, neurons and circuits.

Source: Gesmundo and Maile, "Composable Function-preserving Expansions for Transformer
Architectures" (the growth paper), theorems 3.1 to 3.6.
"""

from attn_only_lens.growth.comparison._compare import compare as compare
from attn_only_lens.growth.comparison.options import ComparisonSizes
from attn_only_lens.growth.comparison.results import COMPARISON as COMPARISON
from attn_only_lens.growth.comparison.results import Comparison as Comparison
from attn_only_lens.growth.comparison.results import read_comparison as read_comparison
from attn_only_lens.growth.expansion import initialise as init
from attn_only_lens.growth.expansion.heads import AddHeads
from attn_only_lens.growth.expansion.layers import InsertLayer
from attn_only_lens.growth.expansion.neurons import AddNeurons
from attn_only_lens.growth.expansion.queries import WidenQueriesAndKeys
from attn_only_lens.growth.expansion.stream import WidenStream
from attn_only_lens.growth.expansion.values import WidenValues
from attn_only_lens.growth.expansion.weights import Axis as Axis
from attn_only_lens.growth.models._grow import grow as grow
from attn_only_lens.growth.models.grown_folder import read_provenance as read_provenance

# The names that are imported "as" themselves are for other folders of the package.
__all__ = [
    "AddHeads",
    "AddNeurons",
    "ComparisonSizes",
    "InsertLayer",
    "WidenQueriesAndKeys",
    "WidenStream",
    "WidenValues",
    "init",
]
