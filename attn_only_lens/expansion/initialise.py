"""Initialization of new entries that the theorems leave free.

They do not affect the function of the grown model, but how it learns. At first only the entries
that must be zero receive gradient from the loss (they see the new units' activations); once they
have moved, the free ones do too. If the free entries are zero as well, neither ever moves: `zeros`
makes dead units.

Numbers depend on the seed and on the tensor's name, axis and size, not on the order in which
tensors are made, nor on the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_only_lens.expansion.new_entries import (
    Initialiser,
    New,
    Own,
    deviation,
    generator,
    normal_numbers,
)
from attn_only_lens.expansion.weights import Axis, in_layer, tail
from attn_only_lens.expansion.without_zeros import cancelling, splits

__all__ = [
    "Initialiser",
    "New",
    "cancelling",
    "copies",
    "grad_max",
    "normal",
    "own",
    "splits",
    "zeros",
]

_SAME = 0.999  # cosine of two directions that are one, in half precision too


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


@dataclass(frozen=True)
class _GradMax:
    products: Mapping[int, Float[Tensor, "d_model d_model"]]
    std: float | None

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        noise = Own()(new, seed)
        layer = in_layer(new.name)
        if (
            layer is None
            or tail(new.name) != "mlp.W_in"
            or new.dim != 1
            or layer not in self.products
        ):
            return noise
        product = self.products[layer].detach().cpu().double()
        d_model = noise.shape[0]
        if product.shape != (d_model, d_model):
            raise ValueError(
                f"got a product of {tuple(product.shape)} for layer {layer}; expected d_model by "
                f"d_model, {d_model} where {new.name} grows"
            )
        old = nn.functional.normalize(new.old.detach().cpu().double(), dim=0)
        basis = torch.linalg.svd(product).U
        taken = (basis.T @ old).abs().amax(dim=1) > _SAME  # by an earlier growth of these products
        directions = basis[:, ~taken][:, : new.shape[1]]
        norm = noise.norm(dim=0).mean() if self.std is None else self.std * noise.shape[0] ** 0.5
        noise[:, : directions.shape[1]] = directions * norm
        return noise


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


def grad_max(
    products: Mapping[int, Float[Tensor, "d_model d_model"]], std: float | None = None
) -> Initialiser:
    """Choose new neurons whose output weights start with the largest gradient, to first order.

    With a_i(t) the activation of new neuron i at token t and g_t the gradient of the loss by what
    the MLP writes there, ∂L/∂W_out[i] = Σ_t a_i(t) g_tᵀ. For a_i(t) ≈ x_t · w_i (a multiple of it:
    the slope of the activation at 0) that is w_iᵀ M with M = Σ_t x_t g_tᵀ, and the orthogonal w_i
    of a given norm that make Σ_i ‖w_iᵀ M‖² largest are M's first left singular vectors.

    Source: Evci, van Merriënboer, Unterthiner, Vladymyrov, Pedregosa, "GradMax: Growing Neural
    Networks using Gradient Information" (2022), equation 11, with the roles exchanged: they zero
    the inputs and choose the outputs; the growth paper's theorem 3.1 zeroes the outputs.

    Args:
        products: M by layer of the grown model, from `attn_only_lens.growth.gradient_products`.
            Neurons of other layers, neurons beyond d_model, and all other entries are drawn by
            `own`. Directions that a neuron already has are left out: equal neurons stay equal.
        std: of the entries of each w_i; by default that of `own`.
    """
    return _GradMax(dict(products), std)
