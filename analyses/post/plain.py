"""The original transformer: attention and MLP sublayers, skip connections, no norm.

For a stream X of N vectors, layer by layer:

    X ← X + Σ_h softmax((X W_Q^h + b_Q^h)(X W_K^h + b_K^h)ᵀ / √d_head)(X W_V^h + b_V^h) W_O^h + b_O
    X ← X + α(X W_1 + b_1) W_2 + b_2

This file holds only weights. Tests evaluate the function with independent code.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

_SHAPES = {
    "W_Q": ("n_heads", "d_model", "d_head"),
    "W_K": ("n_heads", "d_model", "d_head"),
    "W_V": ("n_heads", "d_model", "d_head"),
    "W_O": ("n_heads", "d_head", "d_model"),
    "b_Q": ("n_heads", "d_head"),
    "b_K": ("n_heads", "d_head"),
    "b_V": ("n_heads", "d_head"),
    "b_O": ("d_model",),
    "W_1": ("d_model", "d_mlp"),
    "b_1": ("d_mlp",),
    "W_2": ("d_mlp", "d_model"),
    "b_2": ("d_model",),
}


@dataclass(frozen=True)
class PlainLayer:
    """The weights of one layer; missing biases are zeros.

    Raises:
        ValueError: shapes do not fit, or dtypes differ; the message lists all of them.

    Example:
        >>> shapes = {"W_Q": (1, 2, 3), "W_K": (1, 2, 3), "W_V": (1, 2, 3), "W_O": (1, 3, 2)}
        >>> shapes |= {"b_Q": (1, 3), "b_K": (1, 3), "b_V": (1, 3), "b_O": (2,)}
        >>> shapes |= {"W_1": (2, 8), "b_1": (8,), "W_2": (8, 2), "b_2": (2,)}
        >>> layer = PlainLayer(**{name: torch.randn(shape) for name, shape in shapes.items()})
        >>> layer.sizes["d_mlp"]
        8
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

    def __post_init__(self) -> None:
        reasons: list[str] = []
        sizes: dict[str, int] = {}
        for name, axes in _SHAPES.items():
            tensor: Tensor = getattr(self, name)
            if tensor.ndim == len(axes):
                for axis, size in zip(axes, tensor.shape, strict=True):
                    sizes.setdefault(axis, size)
            expected = tuple(sizes.get(axis) for axis in axes)
            if tuple(tensor.shape) != expected:
                reasons.append(
                    f"{name}: got shape {tuple(tensor.shape)}; expected [{', '.join(axes)}] = "
                    f"{expected}"
                )
            if tensor.dtype != self.W_Q.dtype or not tensor.is_floating_point():
                reasons.append(
                    f"{name}: got {tensor.dtype}; expected one floating dtype for all weights, "
                    f"and W_Q has {self.W_Q.dtype}"
                )
        if reasons:
            raise ValueError("this layer does not fit together:\n  - " + "\n  - ".join(reasons))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes n_heads, d_model, d_head and d_mlp."""
        n_heads, d_model, d_head = self.W_Q.shape
        return {"n_heads": n_heads, "d_model": d_model, "d_head": d_head, "d_mlp": len(self.b_1)}

    def to(self, dtype: torch.dtype) -> "PlainLayer":
        """Return the same layer in another dtype."""
        return PlainLayer(**{f.name: getattr(self, f.name).to(dtype) for f in fields(self)})


@dataclass(frozen=True)
class PlainTransformer:
    """Layers that share d_model and d_mlp.

    Attributes:
        layers: at least one layer.
        causal: whether attention heads see only the past and present.

    Raises:
        ValueError: there are no layers, or they differ in d_model, d_mlp or dtype.
    """

    layers: tuple[PlainLayer, ...]
    causal: bool = False

    def __post_init__(self) -> None:
        kinds = {(x.sizes["d_model"], x.sizes["d_mlp"], x.W_Q.dtype) for x in self.layers}
        if len(kinds) != 1:
            raise ValueError(
                f"got layers of (d_model, d_mlp, dtype) {sorted(map(str, kinds))}; expected at "
                "least one layer, and the same for all: they share one stream"
            )
