"""The four attention sublayers that replace one layer, in the post's order.

Each head's scores are a bilinear form of the widened stream. Its position block B, of size
(N + 1) × (N + 1), gives query j and key k the score B[j, k], since positions are one-hot.

1. *The original heads*, W_QK ⊕ B. B's column N is −2Ω for tokens: no token attends to the bias
   vector. B[N, N] = 2Ω: the bias vector attends to itself. A token leaks at most exp(−2Ω − s) of
   its weight to the bias vector, with s its largest score. A causal mask is −3Ω for k > j: with
   scores between −Ω and Ω on both sides, future keys stay at least Ω below the present one.

2. *Linear, into the hidden part*: B = 2Ω·1. Vector j attends to itself with weight
   1 / (1 + N e^{−2Ω}); the value matrix holds W_1, and b_1 at the tokens' positions.

3. *SiLU*, one head per neuron i: B[j, j] = B[j, N] = 2Ω, and −h_ji is added to the score of every
   token k. The scores of query j are

       self 2Ω − h     bias vector 2Ω     other tokens −h

   so the pattern is σ(−h), σ(h), and at most e^{−2Ω} σ(−h) for each other token. The value is −h
   at a token and 0 at the bias vector, hence h − h σ(−h) = h σ(h) = SiLU(h) with the skip
   connection. (The post says "split in proportion to σ(x)": σ(h) goes to the bias vector.)

4. *Linear, out of the hidden part*: B = 2Ω·1 again; the value matrix holds W_2 into the model
   part, −1 onto the hidden part, which clears it for the next layer, and b_2 at the tokens'
   positions. Because of the −1, its rank is d_mlp, so it needs d_mlp / d_head heads.

*Gauges.* In the post's form the self score 2Ω − h is rounded to the spacing of floats near 2Ω,
so a larger Ω costs digits. Subtracting 2Ω from a whole row does not change a softmax:

       self −h     bias vector 0     other tokens −2Ω − h         ("shifted")

is the same head without that loss, because position blocks are exactly 0 where h is read.
"""

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from analyses.post.heads import Heads, split
from analyses.post.plain import PlainLayer
from analyses.post.stream import StreamCoordinates

Gauge: TypeAlias = Literal["post", "shifted"]


def attention(
    layer: PlainLayer, coordinates: StreamCoordinates, omega: float, *, causal: bool
) -> Heads:
    """Return the original heads, changed so that the bias vector attends only to itself.

    Values have d_head + 1 columns: the last one reads the 1 that b_O needs.
    """
    n, zeros = coordinates.n_tokens, layer.W_Q.new_zeros
    n_heads, d_head = layer.sizes["n_heads"], layer.sizes["d_head"]
    block = zeros(coordinates.n_vectors, coordinates.n_vectors)
    if causal:
        block[:n, :n] = torch.full_like(block[:n, :n], -3.0 * omega).triu(1)
    block[:n, n] = -2.0 * omega
    block[n, n] = 2.0 * omega

    W_Q = zeros(n_heads, coordinates.width, d_head + coordinates.n_vectors)
    W_K = torch.zeros_like(W_Q)
    scale = math.sqrt(d_head)
    W_Q[:, coordinates.model, :d_head] = layer.W_Q / scale
    W_Q[:, coordinates.tokens, :d_head] = layer.b_Q[:, None] / scale
    W_Q[:, coordinates.position, d_head:] = block
    W_K[:, coordinates.model, :d_head] = layer.W_K
    W_K[:, coordinates.tokens, :d_head] = layer.b_K[:, None]
    W_K[:, coordinates.position, d_head:] = torch.eye(coordinates.n_vectors, device=W_K.device)

    W_V = zeros(n_heads, coordinates.width, d_head + 1)
    W_O = zeros(n_heads, d_head + 1, coordinates.width)
    W_V[:, coordinates.model, :d_head] = layer.W_V
    W_V[:, coordinates.tokens, :d_head] = layer.b_V[:, None]
    W_V[:, coordinates.tokens, d_head] = 1.0
    W_O[:, :d_head, coordinates.model] = layer.W_O
    W_O[0, d_head, coordinates.model] = layer.b_O
    return Heads(W_Q, W_K, W_V, W_O)


def into_hidden(
    layer: PlainLayer, coordinates: StreamCoordinates, omega: float, *, d_head: int, gauge: Gauge
) -> Heads:
    """Return X W_1 + b_1 from the model part to the hidden part: ⌈(d_model + 1) / d_head⌉ heads."""
    reads = _reads(coordinates, coordinates.model, layer.W_1)
    writes = torch.zeros_like(reads.T)
    writes[:-1, coordinates.hidden] = layer.W_1
    writes[-1, coordinates.hidden] = layer.b_1
    return _self_attending(*split(reads, writes, d_head), coordinates, omega, gauge)


def out_of_hidden(
    layer: PlainLayer, coordinates: StreamCoordinates, omega: float, *, d_head: int, gauge: Gauge
) -> Heads:
    """Return H W_2 + b_2 to the model part and −H to the hidden: ⌈(d_mlp + 1) / d_head⌉ heads."""
    reads = _reads(coordinates, coordinates.hidden, layer.W_2)
    writes = torch.zeros_like(reads.T)
    writes[:-1, coordinates.model] = layer.W_2
    writes[:-1, coordinates.hidden] = -torch.eye(coordinates.d_mlp, device=writes.device)
    writes[-1, coordinates.model] = layer.b_2
    return _self_attending(*split(reads, writes, d_head), coordinates, omega, gauge)


def silu(coordinates: StreamCoordinates, omega: float, *, gauge: Gauge, like: Tensor) -> Heads:
    """Return SiLU on the hidden part, one head per neuron, with the dtype and device of `like`.

    The sublayer has no weights from a layer, so all layers share it.
    """
    block = _to_self(coordinates, omega, like)
    block[:, -1] = 2.0 * omega
    neurons = torch.arange(coordinates.d_mlp, device=like.device)
    columns = coordinates.d_model + neurons

    W_Q = like.new_zeros(coordinates.d_mlp, coordinates.width, coordinates.n_vectors)
    W_Q[:, coordinates.position] = _in_gauge(block, omega, gauge)
    W_Q[neurons, columns, :-1] = -1.0
    W_V = like.new_zeros(coordinates.d_mlp, coordinates.width, 1)
    W_V[neurons, columns] = -1.0
    W_O = like.new_zeros(coordinates.d_mlp, 1, coordinates.width)
    W_O[neurons, 0, columns] = 1.0
    return Heads(W_Q, _position_keys(coordinates, like).expand_as(W_Q), W_V, W_O)


def _reads(coordinates: StreamCoordinates, section: slice, like: Tensor) -> Tensor:
    """Return columns that read each coordinate of a section of the stream and the tokens' 1."""
    rank = section.stop - section.start + 1
    reads = like.new_zeros(coordinates.width, rank)
    reads[section, :-1] = torch.eye(rank - 1, device=like.device)
    reads[coordinates.tokens, -1] = 1.0
    return reads


def _self_attending(
    W_V: Tensor, W_O: Tensor, coordinates: StreamCoordinates, omega: float, gauge: Gauge
) -> Heads:
    """Return heads with these values that share the position block 2Ω·1."""
    W_Q = W_V.new_zeros(coordinates.width, coordinates.n_vectors)
    W_Q[coordinates.position] = _in_gauge(_to_self(coordinates, omega, W_V), omega, gauge)
    shape = (len(W_V), *W_Q.shape)
    return Heads(W_Q.expand(shape), _position_keys(coordinates, W_V).expand(shape), W_V, W_O)


def _to_self(coordinates: StreamCoordinates, omega: float, like: Tensor) -> Tensor:
    return 2.0 * omega * torch.eye(coordinates.n_vectors, dtype=like.dtype, device=like.device)


def _position_keys(coordinates: StreamCoordinates, like: Tensor) -> Tensor:
    keys = like.new_zeros(coordinates.width, coordinates.n_vectors)
    keys[coordinates.position] = torch.eye(coordinates.n_vectors, device=keys.device)
    return keys


def _in_gauge(block: Tensor, omega: float, gauge: Gauge) -> Tensor:
    return block - 2.0 * omega if gauge == "shifted" else block
