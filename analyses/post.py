"""The blog post's construction: an MLP as three attention sublayers, with a large Ω for masks.

Source: "No Really, Attention is ALL You Need - Attention can do feedforward networks"
(Robert_AIZI, 31 January 2023). For N tokens, the widened stream has N + 1 vectors:

            model (D)   hidden (d_mlp)   position (N + 1)
    token j    x_j            0                e_j            j = 0, …, N - 1
    bias        0             0                e_N

The post has d_mlp = 4D. The hidden coordinates hold the MLP's hidden layer between the sublayers
that write and clear it. Positions are one-hot, and no head writes to them. Each head's scores are a
bilinear form of the stream; its position block B gives query j and key k the score B[j, k].

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

Ω and 2Ω. The post requires that softmax([0, …, 0, Ω]) is [0, …, 0, 1] to within the tolerance,
and that Ω exceeds every score of the original model. The matrices hold 2Ω, as the author's
demonstration code does, so that a score below Ω leaves a gap of at least Ω.

*Gauges.* In the post's form the self score 2Ω − h is rounded to the spacing of floats near 2Ω,
so a larger Ω costs digits. Subtracting 2Ω from a whole row does not change a softmax:

       self −h     bias vector 0     other tokens −2Ω − h         ("shifted")

is the same head without that loss, because position blocks are exactly 0 where h is read.

Choices that the post leaves open: a causal mask, which the post does not have; biases of attention
heads read the same 1 from the one-hot positions as the post's other biases; the bias vector reads a
0 there, so it stays (0, 0, e_N). LayerNorm is left out, as in the post.

A statement of the post that cannot hold: "the bias vector strongly avoids attending to the
non-bias vectors, and strongly attends to itself (preventing non-bias vectors from attending to
the bias vector)". Softmax runs over the row of each query, so nothing in the bias vector's row
keeps others from attending to it. The −2Ω must stand in its *column*, as in the author's code.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Gauge: TypeAlias = Literal["post", "shifted"]
SUBLAYERS = ("attention", "into_hidden", "silu", "out_of_hidden")


@dataclass(frozen=True)
class PlainLayer:
    """The weights of one layer of the original transformer, which has no norm.

    X ← X + Σ_h softmax((X W_Q^h + b_Q^h)(X W_K^h + b_K^h)ᵀ / √d_head)(X W_V^h + b_V^h) W_O^h + b_O
    X ← X + α(X W_1 + b_1) W_2 + b_2
    """

    W_Q: Float[Tensor, "n_heads d_model d_head"]
    W_K: Float[Tensor, "n_heads d_model d_head"]
    W_V: Float[Tensor, "n_heads d_model d_head"]
    W_O: Float[Tensor, "n_heads d_head d_model"]
    b_Q: Float[Tensor, "n_heads d_head"]
    b_K: Float[Tensor, "n_heads d_head"]
    b_V: Float[Tensor, "n_heads d_head"]
    b_O: Float[Tensor, "d_model"]
    W_1: Float[Tensor, "d_model d_mlp"]
    b_1: Float[Tensor, "d_mlp"]
    W_2: Float[Tensor, "d_mlp d_model"]
    b_2: Float[Tensor, "d_model"]

    def to(self, dtype: torch.dtype) -> "PlainLayer":
        """Return the same layer in another dtype."""
        return PlainLayer(**{f.name: getattr(self, f.name).to(dtype) for f in fields(self)})


@dataclass(frozen=True)
class PlainTransformer:
    """Layers that share one stream; with `causal`, heads see only the past and present."""

    layers: tuple[PlainLayer, ...]
    causal: bool = False


def plain_of(state: Mapping[str, Tensor]) -> PlainTransformer:
    """Return the layers in a HookedTransformer's state dict: causal, plain MLPs, no norm."""
    n_layers = sum(name.endswith("mlp.W_in") for name in state)
    names = {f"{kind}_{of}": f"attn.{kind}_{of}" for kind in "Wb" for of in "QKVO"}
    names |= {"W_1": "mlp.W_in", "b_1": "mlp.b_in", "W_2": "mlp.W_out", "b_2": "mlp.b_out"}
    layers = [
        PlainLayer(**{ours: state[f"blocks.{i}.{name}"].clone() for ours, name in names.items()})
        for i in range(n_layers)
    ]
    return PlainTransformer(tuple(layers), causal=True)


@dataclass(frozen=True)
class StreamCoordinates:
    """The coordinates of the widened stream: the original stream, the hidden layer, one-hots."""

    n_tokens: int
    d_model: int
    d_mlp: int

    @property
    def n_vectors(self) -> int:
        """The number of vectors, N + 1: the tokens, then the bias vector."""
        return self.n_tokens + 1

    @property
    def width(self) -> int:
        """The number of coordinates, D + d_mlp + (N + 1)."""
        return self.d_model + self.d_mlp + self.n_vectors

    @property
    def model(self) -> slice:
        """The coordinates of the original stream."""
        return slice(0, self.d_model)

    @property
    def hidden(self) -> slice:
        """The coordinates that hold the hidden layer."""
        return slice(self.d_model, self.d_model + self.d_mlp)

    @property
    def position(self) -> slice:
        """The one-hot positions; the last one is the bias vector's."""
        return slice(self.d_model + self.d_mlp, self.width)

    @property
    def tokens(self) -> slice:
        """The one-hot positions of the tokens: their sum is 1 at a token, 0 at the bias vector."""
        return slice(self.d_model + self.d_mlp, self.width - 1)

    def augment(self, x: Float[Tensor, "*batch n_tokens d_model"]) -> Tensor:
        """Widen the stream and append the bias vector: [*batch, n_vectors, width]."""
        expected = (self.n_tokens, self.d_model)
        if tuple(x.shape[-2:]) != expected:
            raise ValueError(f"got {tuple(x.shape)}; expected (n_tokens, d_model) = {expected}")
        stream = x.new_zeros(*x.shape[:-2], self.n_vectors, self.width)
        stream[..., :-1, self.model] = x
        stream[..., self.position] = torch.eye(self.n_vectors, dtype=x.dtype, device=x.device)
        return stream

    def read(self, stream: Float[Tensor, "*batch n_vectors width"]) -> Tensor:
        """Return the original stream, [*batch, n_tokens, d_model], inside a widened one."""
        return stream[..., :-1, self.model]


@dataclass(frozen=True)
class Heads:
    """A sublayer of plain heads: X ← X + Σ_h softmax(X W_Q^h (X W_K^h)ᵀ) X W_V^h W_O^h.

    W_Q includes the scale 1/√d_head, as in the post.
    """

    W_Q: Float[Tensor, "n_heads width d_qk"]
    W_K: Float[Tensor, "n_heads width d_qk"]
    W_V: Float[Tensor, "n_heads width d_ov"]
    W_O: Float[Tensor, "n_heads d_ov width"]

    def pattern(self, stream: Float[Tensor, "*batch n_vectors width"]) -> Tensor:
        """Return attention weights, [*batch, n_heads, query, key]; those of a query sum to 1."""
        # One product for all heads: broadcasting would copy the stream for each head.
        queries = torch.einsum("...nw,hwd->...hnd", stream, self.W_Q)
        keys = torch.einsum("...nw,hwd->...hnd", stream, self.W_K)
        return (queries @ keys.mT).softmax(-1)

    def __call__(self, stream: Float[Tensor, "*batch n_vectors width"]) -> Tensor:
        """Return the stream after the sublayer, including the skip connection."""
        z = self.pattern(stream) @ torch.einsum("...nw,hwd->...hnd", stream, self.W_V)
        return stream + torch.einsum("...hnd,hdw->...nw", z, self.W_O)


@dataclass(frozen=True)
class PostLayer:
    """The four sublayers of one layer, in the order of `SUBLAYERS`."""

    attention: Heads
    into_hidden: Heads
    silu: Heads
    out_of_hidden: Heads

    @property
    def sublayers(self) -> tuple[Heads, Heads, Heads, Heads]:
        """All four sublayers, in order."""
        return self.attention, self.into_hidden, self.silu, self.out_of_hidden


@dataclass(frozen=True)
class PostRun:
    """The widened streams and the output of a run.

    Attributes:
        start: the widened stream before the first sublayer.
        streams: the widened stream after each sublayer of each layer.
        output: the output of the original model.
    """

    start: Float[Tensor, "*batch n_vectors width"]
    streams: Float[Tensor, "n_layers sublayer=4 *batch n_vectors width"]
    output: Float[Tensor, "*batch n_tokens d_model"]


@dataclass(frozen=True)
class PostTransformer:
    """An attention-only transformer on the widened stream."""

    coordinates: StreamCoordinates
    layers: tuple[PostLayer, ...]

    def run(self, x: Float[Tensor, "*batch n_tokens d_model"]) -> PostRun:
        """Run every sublayer on the original stream before the first layer."""
        stream = start = self.coordinates.augment(x)
        streams = []
        for layer in self.layers:
            for heads in layer.sublayers:
                stream = heads(stream)
                streams.append(stream)
        by_layer = torch.stack(streams).unflatten(0, (len(self.layers), len(SUBLAYERS)))
        return PostRun(start, by_layer, self.coordinates.read(stream))


def post_transformer(
    plain: PlainTransformer,
    n_tokens: int,
    *,
    omega: float,
    d_head: int | None = None,
    dtype: torch.dtype | None = None,
    slope: float = 1.0,
    gauge: Gauge = "post",
) -> PostTransformer:
    """Rewrite a transformer with MLPs into one that has attention heads only.

    Args:
        plain: the weights, for the activation SiLU(slope · x) / slope.
        n_tokens: N, the number of tokens of its inputs.
        omega: Ω. The matrices hold 2Ω.
        d_head: the largest value width of the heads of linear sublayers; by default the d_head of
            the first layer.
        dtype: the dtype of the construction; by default the dtype of the weights.
        slope: 1 for SiLU; 1.702 for QuickGELU; a large one approaches ReLU (the post's footnote),
            to within 0.2785 / slope.
        gauge: "post", with scores of +2Ω where a head attends, or "shifted", with −2Ω where it does
            not: the same function, without the loss of digits at large Ω.

    Returns:
        The construction; call its `run`.

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> shapes = {"W_Q": (1, 2, 3), "W_K": (1, 2, 3), "W_V": (1, 2, 3), "W_O": (1, 3, 2)}
        >>> shapes |= {"b_Q": (1, 3), "b_K": (1, 3), "b_V": (1, 3), "b_O": (2,)}
        >>> shapes |= {"W_1": (2, 8), "b_1": (8,), "W_2": (8, 2), "b_2": (2,)}
        >>> weights = {name: torch.zeros(s, dtype=torch.float64) for name, s in shapes.items()}
        >>> weights["b_2"] = torch.tensor([1.0, -1.0], dtype=torch.float64)  # adds b_2, no more
        >>> model = post_transformer(PlainTransformer((PlainLayer(**weights),)), 5, omega=1000.0)
        >>> model.coordinates.width, len(model.layers[0].silu.W_Q)
        (16, 8)
        >>> model.run(torch.zeros(5, 2, dtype=torch.float64)).output[4]
        tensor([ 1., -1.], dtype=torch.float64)
    """
    for name, number in (("omega", omega), ("slope", slope)):
        if not (0.0 < number < math.inf):
            raise ValueError(f"{name}: got {number!r}; expected a positive finite number")
    if gauge not in get_args(Gauge):
        raise ValueError(f"gauge: got {gauge!r}; expected one of {get_args(Gauge)}")
    first = plain.layers[0]
    like = first.W_Q.to(dtype or first.W_Q.dtype)
    at = StreamCoordinates(n_tokens, *first.W_1.shape)
    to_self = 2.0 * omega * torch.eye(at.n_vectors, dtype=like.dtype, device=like.device)
    to_bias = to_self.clone()
    to_bias[:, -1] = 2.0 * omega
    shift = 2.0 * omega if gauge == "shifted" else 0.0
    activation = _silu(at, to_bias - shift)
    layers = []
    for original in plain.layers:
        sloped = {"W_1": slope * original.W_1, "b_1": slope * original.b_1}
        layer = replace(original, **sloped, W_2=original.W_2 / slope).to(like.dtype)
        into = like.new_zeros(at.d_model + 1, at.width)
        into[:-1, at.hidden], into[-1, at.hidden] = layer.W_1, layer.b_1
        out = like.new_zeros(at.d_mlp + 1, at.width)
        out[:-1, at.model], out[-1, at.model] = layer.W_2, layer.b_2
        out[:-1, at.hidden] = -torch.eye(at.d_mlp, device=like.device)
        linear = [
            _linear(at, to_self - shift, part, writes, d_head or first.W_Q.shape[-1])
            for part, writes in ((at.model, into), (at.hidden, out))
        ]
        heads = _attention(layer, at, omega, causal=plain.causal)
        layers.append(PostLayer(heads, linear[0], activation, linear[1]))
    return PostTransformer(at, tuple(layers))


def split(
    reads: Float[Tensor, "width rank"], writes: Float[Tensor, "rank width"], d_head: int
) -> tuple[Tensor, Tensor]:
    """Split the value matrix `reads @ writes` over ⌈rank / d_head⌉ heads of width d_head.

    "If the weight matrix W is too high-rank, it can be split over multiple attention heads with
    equal Q matrices": with equal patterns A, Σ_h A X W_V^h W_O^h = A X (Σ_h W_V^h W_O^h). No
    decomposition is computed, so nothing is rounded; the last head is padded with zeros.

    W_Q W_Kᵀ cannot be split in this way: a softmax of a sum is not a sum of softmaxes. The added
    heads need rank N + 1 there, for any d_head, as the post says.

    Returns:
        W_V [n_heads, width, d_head] and W_O [n_heads, d_head, width].
    """
    width, rank = reads.shape
    missing = -rank % d_head
    reads = torch.cat([reads, reads.new_zeros(width, missing)], dim=1)
    writes = torch.cat([writes, writes.new_zeros(missing, width)], dim=0)
    return reads.unflatten(1, (-1, d_head)).transpose(0, 1), writes.unflatten(0, (-1, d_head))


def _attention(layer: PlainLayer, at: StreamCoordinates, omega: float, *, causal: bool) -> Heads:
    """Return the original heads, changed so that the bias vector attends only to itself.

    Values have d_head + 1 columns: the last one reads the 1 that b_O needs.
    """
    n, (n_heads, _, d_head), zeros = at.n_tokens, layer.W_Q.shape, layer.W_Q.new_zeros
    block = zeros(at.n_vectors, at.n_vectors)
    if causal:
        block[:n, :n] = torch.full_like(block[:n, :n], -3.0 * omega).triu(1)
    block[:n, n] = -2.0 * omega
    block[n, n] = 2.0 * omega

    W_Q = zeros(n_heads, at.width, d_head + at.n_vectors)
    W_K = torch.zeros_like(W_Q)
    scale = math.sqrt(d_head)
    W_Q[:, at.model, :d_head] = layer.W_Q / scale
    W_Q[:, at.tokens, :d_head] = layer.b_Q[:, None] / scale
    W_Q[:, at.position, d_head:] = block
    W_K[:, at.model, :d_head] = layer.W_K
    W_K[:, at.tokens, :d_head] = layer.b_K[:, None]
    W_K[:, at.position, d_head:] = torch.eye(at.n_vectors, device=W_K.device)

    W_V = zeros(n_heads, at.width, d_head + 1)
    W_O = zeros(n_heads, d_head + 1, at.width)
    W_V[:, at.model, :d_head] = layer.W_V
    W_V[:, at.tokens, :d_head] = layer.b_V[:, None]
    W_V[:, at.tokens, d_head] = 1.0
    W_O[:, :d_head, at.model] = layer.W_O
    W_O[0, d_head, at.model] = layer.b_O
    return Heads(W_Q, W_K, W_V, W_O)


def _linear(
    at: StreamCoordinates, block: Tensor, section: slice, writes: Tensor, d_head: int
) -> Heads:
    """Return heads with this position block that read a section, and the 1 of tokens' positions."""
    reads = torch.zeros_like(writes.T)
    reads[section, :-1] = torch.eye(len(writes) - 1, device=reads.device)
    reads[at.tokens, -1] = 1.0
    W_V, W_O = split(reads, writes, d_head)
    W_Q = block.new_zeros(at.width, at.n_vectors)
    W_Q[at.position] = block
    shape = (len(W_V), *W_Q.shape)
    return Heads(W_Q.expand(shape), _position_keys(at, block).expand(shape), W_V, W_O)


def _silu(at: StreamCoordinates, block: Tensor) -> Heads:
    """Return SiLU on the hidden part, one head per neuron; all layers share it."""
    neurons = torch.arange(at.d_mlp, device=block.device)
    columns = at.d_model + neurons
    W_Q = block.new_zeros(at.d_mlp, at.width, at.n_vectors)
    W_Q[:, at.position] = block
    W_Q[neurons, columns, :-1] = -1.0
    W_V = block.new_zeros(at.d_mlp, at.width, 1)
    W_V[neurons, columns] = -1.0
    W_O = block.new_zeros(at.d_mlp, 1, at.width)
    W_O[neurons, 0, columns] = 1.0
    return Heads(W_Q, _position_keys(at, block).expand_as(W_Q), W_V, W_O)


def _position_keys(at: StreamCoordinates, like: Tensor) -> Tensor:
    keys = like.new_zeros(at.width, at.n_vectors)
    keys[at.position] = torch.eye(at.n_vectors, device=like.device)
    return keys
