"""The names of tensor axes in type annotations, which follow TransformerLens.

    batch       one prompt
    pos         a token of the prompt; `query_pos` if it attends, `key` if it is attended to
    d_model     a coordinate of the residual stream
    d_mlp       a neuron of an MLP, and so a neuron-head of the converted model
    head_index  a head of one block: one of `n_heads` attention heads or `d_mlp` neuron-heads
    d_head      a coordinate inside a head; a neuron-head has only one coordinate
    d_vocab     a token of the vocabulary

A neuron-head is an attention head that computes an MLP neuron (or one term of its approximation).
Neuron-heads attend to two keys: the token itself (`SELF`) and a constant bias token (`BIAS`).
"""

from typing import TypeAlias

from jaxtyping import Float, Int
from torch import Tensor

SELF = 0
BIAS = 1

Tokens: TypeAlias = Int[Tensor, "batch pos"]
Logits: TypeAlias = Float[Tensor, "batch pos d_vocab"]
Residual: TypeAlias = Float[Tensor, "batch pos d_model"]
PreActivation: TypeAlias = Float[Tensor, "batch pos d_mlp"]
NeuronPattern: TypeAlias = Float[Tensor, "batch head_index query_pos key=2"]
