"""The paper's constructions as dense float64 matrices, independent of the rest of the package.

The paper is "Attention-Only Transformers and Implementing MLPs with Attention Heads". There is one
file per theorem. The code is slow and only meant for tests, which compare the rest of the package
with it. Theorems are numbered as in the arXiv version, 2309.08593: 3 (an MLP as heads), 6 (a whole
transformer), 7 (linear maps), 8 (activations) and 9 (masks in the weights). The constructions
follow the anonymous draft of the paper, in which Theorems 3, 6, 7 and 8 have the numbers 2, 4, 6
and 7; sections and appendices are cited from the draft too. Heads, MLPs and transformers are
defined in `masked_attention` and `transformer`. `factored_heads` and `bias_trick` implement two
remarks of the paper. A blog post about the paper uses a large constant Ω instead of masks; this
construction is in `analyses/post.py` of the repository.
"""

from attn_only_lens.reference.bias_trick import (
    append_ones,
    constant_head,
    head_with_biases,
    mlp_with_biases,
)
from attn_only_lens.reference.factored_heads import FactoredHead, factored_heads, persistent_vector
from attn_only_lens.reference.masked_attention import Head, msoftmax
from attn_only_lens.reference.matrices import direct_sum
from attn_only_lens.reference.theorem_3 import neuron_heads, neuron_mask
from attn_only_lens.reference.theorem_6 import PassingNorm, attention_only, extended_head
from attn_only_lens.reference.theorem_7 import linear_head
from attn_only_lens.reference.theorem_8 import activation_heads, replacing_heads
from attn_only_lens.reference.theorem_9 import (
    masking_error,
    sufficient_omega,
    unmasked_head,
    with_positions,
)
from attn_only_lens.reference.transformer import (
    MLP,
    GeneralizedSiLU,
    LayerNorm,
    Norm,
    Run,
    Sublayer,
    Transformer,
)

__all__ = [
    "MLP",
    "FactoredHead",
    "GeneralizedSiLU",
    "Head",
    "LayerNorm",
    "Norm",
    "PassingNorm",
    "Run",
    "Sublayer",
    "Transformer",
    "activation_heads",
    "append_ones",
    "attention_only",
    "constant_head",
    "direct_sum",
    "extended_head",
    "factored_heads",
    "head_with_biases",
    "linear_head",
    "masking_error",
    "mlp_with_biases",
    "msoftmax",
    "neuron_heads",
    "neuron_mask",
    "persistent_vector",
    "replacing_heads",
    "sufficient_omega",
    "unmasked_head",
    "with_positions",
]
