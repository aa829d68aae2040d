"""Initialization of new entries that the theorems leave free.

They do not affect the function of the grown model, but how it learns. At first only the entries
that must be zero receive gradient from the loss (they see the new units' activations); once they
have moved, the free ones do too. If the free entries are zero as well, neither ever moves: `zeros`
makes dead units.

Numbers depend on the seed and on the tensor's name, axis and size, not on the order in which
tensors are made, nor on the device.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.expansion.new_entries import (
    Initialiser,
    New,
    Own,
    deviation,
    generator,
    normal_numbers,
)
from attn_only_lens.expansion.weights import Axis
from attn_only_lens.expansion.without_zeros import cancelling, splits

__all__ = [
    "Initialiser",
    "New",
    "cancelling",
    "copies",
    "normal",
    "own",
    "splits",
    "zeros",
]


@dataclass(frozen=True)
class _Normal:
    std: float

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        return float(new.is_gain) + self.std * normal_numbers(new, seed)


@dataclass(frozen=True)
class _Zeros:
    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        return torch.zeros(new.shape, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class _Copies:
    noise: float

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        old = new.old.detach().cpu().double()
        if new.dim is None or new.axis is None:
            made = old
        else:
            # The same old unit for every tensor of the axis: a copied neuron has its gate and bias,
            # a copied head its keys (but queries and groups apart, where heads share keys).
            size, n_new = old.shape[new.dim], new.shape[new.dim]
            axis = Axis(new.axis.label.removeprefix("kv_"), new.axis.layer)
            key = generator(seed, axis, size, new.constants.n_layers)
            made = old.index_select(
                new.dim, torch.randint(size, (n_new,), generator=key, device="cpu")
            )
        scale = deviation(old)
        return made + self.noise * (scale if scale > 0 else 1.0) * normal_numbers(new, seed)


def own() -> Initialiser:
    """Draw as the model draws its own weights: by its `init_mode` and `initializer_range`.

    Biases and sinks start at zero and gains of norms at one, as in TransformerLens.
    """
    return Own()


def normal(std: float) -> Initialiser:
    """Draw normal numbers of this standard deviation; gains of norms around one.

    Raises:
        ValueError: the standard deviation is not positive.
    """
    if not std > 0:
        raise ValueError(f"got std={std}; expected more than 0: zeros() makes zeros, dead ones")
    return _Normal(std)


def zeros() -> Initialiser:
    """Start at zero: the new units are dead, and no gradient will ever revive them. For controls.

    New coordinates of the stream under LayerNorm are an exception, since its mean sees them.
    """
    return _Zeros()


def copies(noise: float = 0.1) -> Initialiser:
    """Copy old units drawn at random, with noise in units of the tensor's deviation.

    Raises:
        ValueError: there is no noise, without which equal units stay equal.
    """
    if not noise > 0:
        raise ValueError(f"got noise={noise}; expected more than 0: equal units stay equal")
    return _Copies(noise)
