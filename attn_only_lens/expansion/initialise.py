"""Initialization of new entries that the theorems leave free.

They do not affect the function of the grown model, but how it learns. At first only the entries
that must be zero receive gradient from the loss (they see the new units' activations); once they
have moved, the free ones do too. If the free entries are zero as well, neither ever moves: `zeros`
makes dead units.

Numbers depend on the seed and on the tensor's name, axis and size, not on the order in which
tensors are made, nor on the device.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_only_lens.expansion.weights import Axis, Constants, in_layer, is_gain, tail

__all__ = ["Initialiser", "New", "copies", "drawn", "grad_max", "normal", "own", "zeros"]

_SAME = 0.999  # cosine of two directions that are one, in half precision too


@dataclass(frozen=True)
class New:
    """New entries to initialize.

    Attributes:
        name: the tensor, as it is called in the grown model.
        axis: the axis that grows; None if the whole tensor is new, in a new layer.
        dim: which dimension of the tensor that is.
        shape: of the new entries.
        old: the tensor that grows; for a new layer that of the layer it is like.
        constants: of the grown model.
    """

    name: str
    axis: Axis | None
    dim: int | None
    shape: tuple[int, ...]
    old: Tensor
    constants: Constants

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the grown tensor."""
        if self.dim is None:
            return self.shape
        sizes = list(self.old.shape)
        sizes[self.dim] += self.shape[self.dim]
        return tuple(sizes)

    @property
    def is_gain(self) -> bool:
        """True for gains of norms."""
        return is_gain(self.name)

    @property
    def is_matrix(self) -> bool:
        """True for weight matrices: neither biases nor gains nor sinks."""
        return ".W_" in self.name


class Initialiser(Protocol):
    """Makes new entries."""

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        """Return the new entries, of `new.shape`, in float64 on the CPU."""
        ...


def drawn(init: Initialiser, new: New, seed: int) -> Float[Tensor, "..."]:
    """Return the entries in the dtype and on the device of the tensor that grows.

    Initialisers see and make true gains, wherever the model stores gain - 1.

    Raises:
        ValueError: the initialiser made another shape.
    """
    if new.old.device.type == "meta":  # a sketch has shapes only
        return new.old.new_empty(new.shape)
    offset = new.constants.gain_offset if new.is_gain else 0.0
    made = init(replace(new, old=new.old + offset), seed) - offset if offset else init(new, seed)
    if tuple(made.shape) != new.shape:
        raise ValueError(f"{init} made {tuple(made.shape)} for {new.name}; expected {new.shape}")
    return made.to(device=new.old.device, dtype=new.old.dtype)


def _generator(seed: int, *what: object) -> torch.Generator:
    """A generator for one draw, so that the order of draws does not matter."""
    digest = hashlib.sha256(repr((seed, *what)).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))


def _key(new: New, seed: int) -> torch.Generator:
    # A second growth must not repeat the first: of the same tensor, by its whole shape; of another
    # that has its name since a layer was inserted, by the number of layers.
    return _generator(seed, new.name, new.dim, new.whole, new.constants.n_layers)


def _normal(new: New, seed: int) -> Float[Tensor, "..."]:
    return torch.randn(new.shape, generator=_key(new, seed), dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class _Own:
    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        if not new.is_matrix:
            return torch.full(new.shape, float(new.is_gain), dtype=torch.float64, device="cpu")
        std = _own_std(new)
        if not new.constants.init[0].endswith("uniform"):
            return std * _normal(new, seed)
        uniform = torch.rand(
            new.shape, generator=_key(new, seed), dtype=torch.float64, device="cpu"
        )
        return std * math.sqrt(3) * (2 * uniform - 1)


def _own_std(new: New) -> float:
    """The deviation of `HookedTransformer.init_weights`, for a tensor of the grown shape."""
    mode, gain = new.constants.init
    whole = new.whole
    heads = whole[0] if len(whole) == 3 else 1
    fan_in, fan_out = whole[-2], heads * whole[-1]
    if mode == "gpt2":
        return gain
    if mode.startswith("xavier"):
        return gain * math.sqrt(2 / (fan_in + fan_out))
    if mode.startswith("kaiming"):
        return gain * math.sqrt(2 / fan_in)
    if mode == "muP":
        return 1.0 if "embed" in new.name else 1 / math.sqrt(fan_in)
    raise ValueError(f"got init_mode {mode!r}, which is not known; give init=normal(std)")


@dataclass(frozen=True)
class _Normal:
    std: float

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        return float(new.is_gain) + self.std * _normal(new, seed)


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
            key = _generator(seed, axis, size, new.constants.n_layers)
            made = old.index_select(
                new.dim, torch.randint(size, (n_new,), generator=key, device="cpu")
            )
        scale = old.std(correction=0) if old.numel() > 1 else old.abs().max()
        return made + self.noise * (scale if scale > 0 else 1.0) * _normal(new, seed)


@dataclass(frozen=True)
class _GradMax:
    products: Mapping[int, Float[Tensor, "d_model d_model"]]
    std: float | None

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        other = _Own()(new, seed)
        layer = in_layer(new.name)
        if (
            layer is None
            or tail(new.name) != "mlp.W_in"
            or new.dim != 1
            or layer not in self.products
        ):
            return other
        product = self.products[layer].detach().cpu().double()
        d_model = other.shape[0]
        if product.shape != (d_model, d_model):
            raise ValueError(
                f"got a product of {tuple(product.shape)} for layer {layer}; expected d_model by "
                f"d_model, {d_model} where {new.name} grows"
            )
        old = nn.functional.normalize(new.old.detach().cpu().double(), dim=0)
        found = torch.linalg.svd(product).U
        taken = (found.T @ old).abs().amax(dim=1) > _SAME  # by an earlier growth of these products
        directions = found[:, ~taken][:, : new.shape[1]]
        norm = other.norm(dim=0).mean() if self.std is None else self.std * other.shape[0] ** 0.5
        other[:, : directions.shape[1]] = directions * norm
        return other


def own() -> Initialiser:
    """Draw as the model draws its own weights: by its `init_mode` and `initializer_range`.

    Biases and sinks start at zero and gains of norms at one, as in TransformerLens.
    """
    return _Own()


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
