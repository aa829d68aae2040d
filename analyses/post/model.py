"""A whole multi-layer transformer by the post's construction.

Each layer becomes four attention sublayers of plain heads: the original heads, then a linear, a
SiLU and a linear sublayer for its MLP. On the widened stream (`stream.py`) the result follows the
original model sublayer by sublayer, with an error that falls as e^{−2Ω} until rounding takes over.
"""

import math
from dataclasses import dataclass, replace
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.post import sublayers
from analyses.post.heads import Heads
from analyses.post.plain import PlainLayer, PlainTransformer
from analyses.post.stream import StreamCoordinates
from analyses.post.sublayers import Gauge

SUBLAYERS = ("attention", "into_hidden", "silu", "out_of_hidden")


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
    """The streams and the output of a run of the construction.

    Attributes:
        start: the widened stream before the first sublayer, [*batch, n_vectors, width].
        streams: the widened stream after each sublayer,
            [n_layers, 4 (in the order of `SUBLAYERS`), *batch, n_vectors, width].
        output: the output of the original model, [*batch, n_tokens, d_model].
    """

    start: Float[Tensor, "*batch n_vectors width"]
    streams: Float[Tensor, "n_layers sublayer=4 *batch n_vectors width"]
    output: Float[Tensor, "*batch n_tokens d_model"]


@dataclass(frozen=True)
class PostTransformer:
    """An attention-only transformer on the widened stream.

    Attributes:
        coordinates: the coordinates of the widened stream.
        layers: the layers, of four sublayers each.
    """

    coordinates: StreamCoordinates
    layers: tuple[PostLayer, ...]

    def run(self, x: Float[Tensor, "*batch n_tokens d_model"]) -> PostRun:
        """Run every sublayer on a stream of the original model.

        Args:
            x: the original stream before the first layer, [*batch, n_tokens, d_model].

        Returns:
            The widened stream after every sublayer, and the original model's output.

        Raises:
            ValueError: x has another number of tokens, another width, or another dtype.
        """
        dtype = self.layers[0].attention.W_Q.dtype
        if x.dtype != dtype:
            raise ValueError(f"got a stream in {x.dtype}; expected {dtype}, the dtype of the heads")
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

    Source: the post, "Construction Overview" and the three sections after it.

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
    dtype = first.W_Q.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"dtype: got {dtype}; expected a floating one, such as torch.float64")
    d_head = first.sizes["d_head"] if d_head is None else d_head
    coordinates = StreamCoordinates(n_tokens, first.sizes["d_model"], first.sizes["d_mlp"])
    activation = sublayers.silu(coordinates, omega, gauge=gauge, like=first.W_Q.to(dtype))
    layers = []
    for original in plain.layers:
        layer = _with_slope(original, slope).to(dtype)
        layers.append(
            PostLayer(
                sublayers.attention(layer, coordinates, omega, causal=plain.causal),
                sublayers.into_hidden(layer, coordinates, omega, d_head=d_head, gauge=gauge),
                activation,
                sublayers.out_of_hidden(layer, coordinates, omega, d_head=d_head, gauge=gauge),
            )
        )
    return PostTransformer(coordinates, tuple(layers))


def _with_slope(layer: PlainLayer, slope: float) -> PlainLayer:
    """Return the layer with SiLU in place of SiLU(slope · x) / slope, the slope in the weights."""
    return replace(layer, W_1=slope * layer.W_1, b_1=slope * layer.b_1, W_2=layer.W_2 / slope)
