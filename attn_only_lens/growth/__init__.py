"""Growth of models: what `expansion` does to weights, done to every kind of model."""

from attn_only_lens.growth._grow import Grown, grow, identity, read
from attn_only_lens.growth.gradmax import gradient_products
from attn_only_lens.growth.grown_folder import read_provenance
from attn_only_lens.growth.training import Training

__all__ = [
    "Grown",
    "Training",
    "gradient_products",
    "grow",
    "identity",
    "read",
    "read_provenance",
]
