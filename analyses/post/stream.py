"""The widened stream: N + 1 vectors of D + d_mlp + (N + 1) coordinates.

            model (D)   hidden (d_mlp)   position (N + 1)
    token j    x_j            0                e_j            j = 0, …, N - 1
    bias        0             0                e_N

The post has d_mlp = 4D. The hidden coordinates hold the MLP's hidden layer between the sublayers
that write and clear it; the positions are one-hot, and no head writes to them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class StreamCoordinates:
    """The coordinates of the widened stream: the original stream, the hidden layer, one-hots.

    Attributes:
        n_tokens: N, the fixed number of tokens, because positions are one-hot.
        d_model: D, the width of the original stream.
        d_mlp: the width of the hidden layer, 4D in the post.

    Raises:
        ValueError: a size is not a positive integer.

    Example:
        >>> coordinates = StreamCoordinates(n_tokens=3, d_model=2, d_mlp=8)
        >>> coordinates.n_vectors, coordinates.width
        (4, 14)
        >>> coordinates.augment(torch.ones(3, 2, dtype=torch.float64))[-1]  # the bias vector
        tensor([0., 0., 0., 0., 0., 0., 0., 0., 0., 0., 0., 0., 0., 1.],
               dtype=torch.float64)
    """

    n_tokens: int
    d_model: int
    d_mlp: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: got {size!r}; expected an integer of at least 1")

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
        """Widen the stream and append the bias vector.

        Args:
            x: the original stream, [*batch, n_tokens, d_model].

        Returns:
            The widened stream, [*batch, n_vectors, width].

        Raises:
            ValueError: x has another shape.
        """
        expected = (self.n_tokens, self.d_model)
        if tuple(x.shape[-2:]) != expected:
            raise ValueError(
                f"got a stream of shape {tuple(x.shape)}; expected the last two sizes to be "
                f"(n_tokens, d_model) = {expected}; pad the tokens, or build for this number"
            )
        stream = x.new_zeros(*x.shape[:-2], self.n_vectors, self.width)
        stream[..., :-1, self.model] = x
        stream[..., self.position] = torch.eye(self.n_vectors, dtype=x.dtype, device=x.device)
        return stream

    def read(self, stream: Float[Tensor, "*batch n_vectors width"]) -> Tensor:
        """Return the original stream, [*batch, n_tokens, d_model], inside a widened one."""
        return stream[..., :-1, self.model]
