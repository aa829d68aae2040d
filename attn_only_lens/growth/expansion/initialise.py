"""Initialize the free entries of a grown model: the new entries that can have any values.

Free entries affect how the grown model learns, but not what it computes at first. In the first
training step, only the entries that must start at zero have a nonzero gradient. Once these entries
change, the free entries have a nonzero gradient too. If the free entries are zero as well, all
gradients of new entries stay zero: `zeros` makes such dead units.

Random values depend on the seed and on the tensor's name, axis and size, but not on the device or
on the order in which tensors are made.

**Nonzero output weights.** With `cancelling` and `splits`, the output weights of new units are not
zero (section 5 of the growth paper allows this). For the input x, a sublayer's output (or an
attention score) is a sum Σ_i f(r_i; x) w_i over units, such as heads or neurons. Unit i has input
weights r_i and output weights w_i.

Pairs.  New units j, j' have r_j = r_j' and w_j = -w_j', so their sum is 0. Their gradients with
    respect to r are opposite, so the units differ after the first step.
Shares. A new unit j has r_j = r_i of an old unit i; w_i becomes α w_i - n, and w_j is
    (1 - α) w_i + n. (Net2Net: Chen, Goodfellow, Shlens, 2016; with unequal outputs, LEMON: Wang et
    al., 2023.) Without the noise n, Adam's first step would be the same for both units.

    axis                 input weights                             output weights
    neurons (3.1)        W_in, W_gate, b_in, b_gate                W_out
    heads (3.2)          W_Q, W_K, W_V, and biases, sinks, gains   W_O
                         and columns of relative positions
    values (3.3)         W_V, b_V                                  W_O
    queries, keys (3.4)  W_Q, b_Q                                  W_K, b_K
    stream (3.5)         W_Q, W_K, W_V, W_in, W_gate, W_U          W_E, W_pos, W_O, W_out and biases
    a new layer (3.6)    pairs of its heads and of its neurons; b_O and b_out are zero

Heads that share a key and a value are paired or split together. The following new units keep
zero output weights, because neither pairs nor shares would preserve the function:

- the last unit, if an odd number of units is to be paired;
- units that change a norm's mean square: coordinates of the residual stream (unless the model has
  no norm) and of normalized queries and keys;
- coordinates of queries and keys if rotary positions rotate whole heads (if only the first
  coordinates are rotated, new coordinates can be paired but not split);
- heads of a model with ALiBi, because the two heads of a pair have different slopes, and heads of a
  new layer with relative positions, because the two heads have different columns;
- units of a new layer that is a copy, or whose norms after sublayers would divide rounding errors
  by √ε.

Two kinds of units can be paired but not split: coordinates of keys that `clip_qkv` bounds, and
coordinates of keys and values that only some heads get.

In exact arithmetic, pairs and shares preserve the function. In floating point, terms that should
cancel leave rounding errors. Under dropout, the outputs of a pair cancel only on average.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.growth.expansion.weights import Axis, Constants, is_gain

__all__ = ["Initialiser", "New", "cancelling", "copies", "normal", "own", "splits", "zeros"]


@dataclass(frozen=True)
class Units:
    """Indices of old and new units (such as neurons) along one dimension of a grown tensor.

    The units form `runs` contiguous ranges of equal length (one range per group of heads if heads
    are added to existing groups). Every `block` consecutive units share a key and a value.
    """

    dim: int
    old: tuple[int, ...]
    added: tuple[int, ...]
    runs: int = 1
    block: int = 1

    def blocks(self, units: Sequence[int]) -> list[list[list[int]]]:
        """Nest units by run, then by block: [[[0, 1], [2, 3]], [[4, 5], [6, 7]]] for 2 runs."""
        blocks: list[list[list[int]]] = np.reshape(units, (self.runs, -1, self.block)).tolist()
        return blocks


@dataclass(frozen=True)
class New:
    """New entries to initialize.

    Attributes:
        name: the tensor's name in the grown model.
        axis: the axis that grows; None if the whole tensor is new, in a new layer.
        dim: the dimension of this axis.
        shape: the shape of the new entries.
        old: the tensor that grows; for a new layer, the corresponding tensor of an old layer.
        constants: the constants of the grown model.
        units: the old and new units to which these entries belong; None if new units may be neither
            paired nor split.
    """

    name: str
    axis: Axis | None
    dim: int | None
    shape: tuple[int, ...]
    old: Tensor
    constants: Constants
    units: Units | None = None

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
        return is_gain(self.name)

    @property
    def is_matrix(self) -> bool:
        """True for weight matrices; True unless the tensor is a bias, a gain or a sink."""
        return ".W_" in self.name


class Initialiser(Protocol):
    """Makes new entries."""

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        """Return the new entries, with shape `new.shape`, in float64 on the CPU."""
        ...


@dataclass(frozen=True)
class Made:
    """A tensor's new entries, its changed old entries, and which units are tied or zero."""

    entries: Float[Tensor, "..."]
    old: Float[Tensor, "..."] | None = None
    tied: tuple[tuple[int, int], ...] = ()  # pairs (new unit, copied unit)
    factor: float = 1.0  # a copy's entries are this factor times the copied unit's entries
    zero: tuple[int, ...] = ()  # units whose entries must be zero
    shares: tuple[tuple[int, int, float], ...] = ()  # triples (new unit, copied unit, share)


def drawn(init: Initialiser, new: New, seed: int, *, writes: bool = False) -> Made:
    """Return a tensor's new entries, in the dtype and on the device of its old entries.

    If the model stores a norm's gain g as g - 1, the initialiser still receives and returns g.
    """
    if new.old.device.type == "meta":  # meta tensors have no values
        return Made(new.old.new_empty(new.shape))
    offset = new.constants.gain_offset if new.is_gain else 0.0
    seen = replace(new, old=new.old + offset) if offset else new
    if new.units is not None and isinstance(init, WithoutZeros):
        made = init.together(seen, new.units, seed, writes=writes)
    else:
        made = Made(init(seen, seed))
    if tuple(made.entries.shape) != new.shape:
        got = tuple(made.entries.shape)
        raise ValueError(
            f"{init} returned entries of shape {got} for {new.name}; expected shape {new.shape}"
        )

    def stored(entries: Tensor) -> Tensor:
        return (entries - offset if offset else entries).to(new.old)

    old = None if made.old is None else stored(made.old)
    return replace(made, entries=stored(made.entries), old=old)


def _generator(seed: int, *what: object) -> torch.Generator:
    """Return a random generator that depends only on the arguments, not on earlier calls."""
    digest = hashlib.sha256(repr((seed, *what)).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))


def _key_of(new: New, seed: int) -> torch.Generator:
    # A second growth step gets other random values, because shapes or the number of layers differ.
    return _generator(seed, new.name, new.dim, new.whole, new.constants.n_layers)


def _axis_of_units(axis: Axis, constants: Constants) -> Axis:
    """Return one axis for all axes along which the same units must be copied.

    Copies take Q, K and V from the same heads. If layers share a table of relative positions, they
    also take the same heads in all layers.
    """
    label = axis.label.removeprefix("kv_")
    shared = label == "head" and constants.positions == "relative"
    return Axis(label, None if shared else axis.layer)


def _normal_numbers(new: New, seed: int) -> Float[Tensor, "..."]:
    return torch.randn(new.shape, generator=_key_of(new, seed), dtype=torch.float64, device="cpu")


def _deviation(old: Tensor) -> float:
    """Return a tensor's standard deviation; for a single entry, its absolute value."""
    return float(old.std(correction=0) if old.numel() > 1 else old.abs().max())


def _own_std(new: New) -> float:
    """Return the standard deviation that TransformerLens (T5: transformers) uses for this shape."""
    mode, gain = new.constants.init
    whole = new.whole
    heads = whole[0] if len(whole) == 3 else 1
    fan_in, fan_out = whole[-2], heads * whole[-1]
    if mode == "gpt2":
        return gain
    if mode == "T5":
        fans = {"W_E": 1, "W_U": 1, "W_Q": fan_in * whole[-1], "W_O": heads * fan_in}
        return gain / math.sqrt(fans.get(new.name.rpartition(".")[2], fan_in))
    if mode.startswith("xavier"):
        return gain * math.sqrt(2 / (fan_in + fan_out))
    if mode.startswith("kaiming"):
        return gain * math.sqrt(2 / fan_in)
    if mode == "muP":
        return 1.0 if "embed" in new.name else 1 / math.sqrt(fan_in)
    raise ValueError(f"got unknown init_mode {mode!r}; pass init=normal(std)")


@dataclass(frozen=True)
class _Own:
    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        if not new.is_matrix:
            return torch.full(new.shape, float(new.is_gain), dtype=torch.float64, device="cpu")
        std = _own_std(new)
        if not new.constants.init[0].endswith("uniform"):
            return std * _normal_numbers(new, seed)
        key = _key_of(new, seed)
        uniform = torch.rand(new.shape, generator=key, dtype=torch.float64, device="cpu")
        return std * math.sqrt(3) * (2 * uniform - 1)


@dataclass(frozen=True)
class _Normal:
    std: float

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        return float(new.is_gain) + self.std * _normal_numbers(new, seed)


@dataclass(frozen=True)
class _Zeros:
    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        return torch.zeros(new.shape, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class _Copies:
    noise: float

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        made = old = new.old.detach().cpu().double()
        if new.dim is not None and new.axis is not None:
            # Copy the same units in every tensor, so that a copied neuron gets its own gate and
            # bias.
            size, n_new = old.shape[new.dim], new.shape[new.dim]
            axis = _axis_of_units(new.axis, new.constants)
            key = _generator(seed, axis, size, new.constants.n_layers)
            units = torch.randint(size, (n_new,), generator=key, device="cpu")
            made = old.index_select(new.dim, units)
        return made + self.noise * (_deviation(old) or 1.0) * _normal_numbers(new, seed)


class WithoutZeros(ABC):
    """Base class for initialisers that do not set the output weights of new units to zero.

    Attributes:
        free: the initialiser that draws all other entries.
        may: the `Plan` field that lists the tensors whose new output weights may be nonzero.
    """

    free: Initialiser
    may: ClassVar[Literal["cancel", "share"]]

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        """Draw new entries that may have any values, in float64 on the CPU."""
        return self.free(new, seed)

    @abstractmethod
    def together(self, new: New, units: Units, seed: int, *, writes: bool) -> Made:
        """Draw a tensor's entries for all new units at once, in float64 on the CPU."""


@dataclass(frozen=True)
class _Cancelling(WithoutZeros):
    free: Initialiser
    may: ClassVar[Literal["cancel", "share"]] = "cancel"

    def together(self, new: New, units: Units, seed: int, *, writes: bool) -> Made:
        positions = range(len(units.added))
        like, sign = list(positions), [0.0] * len(positions)
        for run in units.blocks(positions):
            for first, second in zip(run[::2], run[1::2], strict=False):
                for one, opposite in zip(first, second, strict=True):
                    like[opposite], sign[one], sign[opposite] = one, 1.0, -1.0
        made = self(new, seed).index_select(units.dim, _index(like))
        if writes:
            made = made * _along(sign, units.dim, made.ndim)
        added = units.added
        return Made(
            made,
            tied=tuple((added[j], added[i]) for j, i in enumerate(like) if i != j),
            factor=-1.0 if writes else 1.0,
            zero=tuple(added[j] for j in positions if sign[j] == 0.0) if writes else (),
        )


@dataclass(frozen=True)
class _Splits(WithoutZeros):
    share: float
    noise: float
    free: Initialiser = _Own()
    may: ClassVar[Literal["cancel", "share"]] = "share"

    def together(self, new: New, units: Units, seed: int, *, writes: bool) -> Made:
        sources = self._sources(new, units, seed)
        old = new.old.detach().cpu().double()
        copies, dim = old.index_select(units.dim, _index(sources)), units.dim
        pairs = [(j, units.old[i]) for j, i in zip(units.added, sources, strict=True)]
        n_copies = [sources.count(i) for i in range(len(units.old))]
        shares = [(1 - self.share) / n_copies[i] for i in sources]
        shared = tuple((*pair, share) for pair, share in zip(pairs, shares, strict=True))
        if not writes:
            return Made(copies, tied=tuple(pairs), shares=shared)
        kept = [self.share if n else 1.0 for n in n_copies]
        std = _deviation(old)
        if std == 0 and new.is_matrix:
            std = _own_std(new)
        noise = self.noise * std * _normal_numbers(new, seed)
        return Made(
            copies * _along(shares, dim, old.ndim) + noise,
            old=(old * _along(kept, dim, old.ndim)).index_add(dim, _index(sources), -noise),
            shares=shared,
        )

    def _sources(self, new: New, units: Units, seed: int) -> list[int]:
        """Return, for each new unit, the position in `units.old` of the old unit to copy."""
        assert new.axis is not None  # None only in new layers, whose units are never split
        olds, news = units.blocks(range(len(units.old))), units.blocks(range(len(units.added)))
        n_blocks = len(olds[0])
        axis = _axis_of_units(new.axis, new.constants)
        key = _generator(seed, "splits", axis, n_blocks, new.constants.n_layers)
        sources = [0] * len(units.added)
        for of_old, of_new in zip(olds, news, strict=True):
            order = torch.randperm(n_blocks, generator=key, device="cpu").tolist()
            for unit, block in enumerate(of_new):
                for j, i in zip(block, of_old[order[unit % n_blocks]], strict=True):
                    sources[j] = i
        return sources


def _index(positions: list[int]) -> Tensor:
    return torch.tensor(positions, dtype=torch.long, device="cpu")


def _along(factors: list[float], dim: int, ndim: int) -> Float[Tensor, "..."]:
    """Return a tensor with factors along `dim` that broadcasts over `ndim` dimensions."""
    shape = [-1 if axis == dim else 1 for axis in range(ndim)]
    return torch.tensor(factors, dtype=torch.float64, device="cpu").reshape(shape)


def own() -> Initialiser:
    """Draw new entries like the model's initial weights (`init_mode`, `initializer_range`).

    As in TransformerLens, biases and sinks start at zero and norms' gains at one.
    """
    return _Own()


def normal(std: float) -> Initialiser:
    """Draw from a normal distribution. Norm gains have mean one, and other entries mean zero.

    Raises:
        ValueError: the standard deviation is not positive.
    """
    if not std > 0:
        raise ValueError(f"got std={std}; expected more than 0; to get dead units, use zeros()")
    return _Normal(std)


def zeros() -> Initialiser:
    """Set new entries to zero, as a control experiment: new units never get a gradient.

    Exception: new coordinates of a residual stream with LayerNorm get gradients, because
    LayerNorm's mean includes these coordinates.
    """
    return _Zeros()


_EXPECTED_NOISE = (
    "expected more than 0: without noise, training would change a unit and its copy in the same way"
)


def copies(noise: float = 0.1) -> Initialiser:
    """Copy randomly chosen old units, and add noise.

    The standard deviation of the noise is `noise` times that of the tensor.

    Raises:
        ValueError: the noise is not positive. Without noise, a unit and its copy would stay equal.
    """
    if not noise > 0:
        raise ValueError(f"got noise={noise}; {_EXPECTED_NOISE}")
    return _Copies(noise)


def cancelling(std: float | None = None) -> Initialiser:
    """Draw new units in pairs with equal input weights and opposite output weights.

    All new entries then have nonzero gradients from the first training step. If the number of new
    units is odd, the last one has zero output weights. Units that cannot form such pairs have zero
    output weights too: for example, coordinates of normalized queries and keys, or of the residual
    stream if the model has norms (`expansion/initialise.py` lists all cases).

    Args:
        std: the standard deviation; by default, entries are drawn as in `own`.

    Raises:
        ValueError: the standard deviation is not positive.

    Example:
        >>> from attn_only_lens import grow, growth, load, pretrained
        >>> model, tokens = load("modular-addition"), pretrained.modular_addition_tokens()[:7]
        >>> grown = grow(model, d_mlp=516, init=growth.init.cancelling(), seed=0)
        >>> W_in, W_out = grown.model.W_in[0], grown.model.W_out[0]
        >>> W_in[:, 512].equal(W_in[:, 513]), W_out[512].equal(-W_out[513])
        (True, True)
        >>> bool((grown.model(tokens) - model(tokens)).abs().max() < 1e-3)
        True
    """
    if std is not None and not 0 < std < math.inf:
        raise ValueError(f"got std={std}; expected a finite number above 0")
    return _Cancelling(_Own() if std is None else _Normal(std))


def splits(share: float = 0.5, noise: float = 0.1) -> Initialiser:
    """Copy random old units, and divide each old unit's output between the unit and its copies.

    Every old unit is copied once before any unit is copied a second time. If a unit's output cannot
    be divided (`expansion/initialise.py` lists these cases), new units are drawn as in `own`, with
    zero output weights.

    Args:
        share: the fraction of the output that the old unit keeps; its copies get equal parts.
        noise: standard deviation of the noise, in units of the tensor's standard deviation. Noise
            is added to copies' output weights, and subtracted from the old unit's.

    Raises:
        ValueError: the share is not between 0 and 1, or the noise is not positive.

    Example:
        >>> from attn_only_lens import grow, growth, load, pretrained
        >>> model, tokens = load("modular-addition"), pretrained.modular_addition_tokens()[:7]
        >>> grown = grow(model, n_heads=8, init=growth.init.splits(), seed=0)
        >>> bool((grown.model(tokens) - model(tokens)).abs().max() < 1e-3)
        True
    """
    if not 0 < share < 1:
        raise ValueError(f"got share={share}; expected a number between 0 and 1")
    if not 0 < noise < math.inf:
        raise ValueError(f"got noise={noise}; {_EXPECTED_NOISE}")
    return _Splits(share, noise)
