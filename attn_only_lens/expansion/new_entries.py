"""New entries of tensors, and how they are drawn.

Numbers depend on the seed and on the tensor's name, axis and size, not on the order in which
tensors are made, nor on the device.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.expansion.weights import Axis, Constants, is_gain


@dataclass(frozen=True)
class Units:
    """Old and new units of an axis, where new ones may go together instead of writing zeros.

    Attributes:
        dim: the axis, as a dimension of the tensor.
        old: the indices of old units, in the grown model.
        added: those of new ones.
        runs: in how many parts of equal length old and new units lie, each for itself: heads that
            are added to several groups.
        block: how many successive units belong together: heads that share a key and a value.
    """

    dim: int
    old: tuple[int, ...]
    added: tuple[int, ...]
    runs: int = 1
    block: int = 1

    @property
    def old_blocks(self) -> int:
        """How many blocks of old units each run has."""
        return len(self.old) // self.runs // self.block

    def blocks(self, units: Sequence[int]) -> list[list[list[int]]]:
        """Return old or new units, by run, block, and in order."""
        per_run = len(units) // self.runs
        blocks = []
        for run in range(self.runs):
            of_run = list(units[run * per_run : (run + 1) * per_run])
            blocks.append(
                [of_run[start : start + self.block] for start in range(0, per_run, self.block)]
            )
        return blocks


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
        units: the units that they are entries of, if these may go together (`without_zeros.py`).
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


@dataclass(frozen=True)
class Made:
    """Entries of units that go together.

    Attributes:
        entries: the new ones.
        old: the old ones, if they change.
        tied: pairs of indices along the axis, of a new unit, and of the one whose entries it has,
        factor: times this.
        zero: indices of units whose entries must be zero.
        shares: for each new unit that has a share of an old one, their indices and the share.
    """

    entries: Float[Tensor, "..."]
    old: Float[Tensor, "..."] | None = None
    tied: tuple[tuple[int, int], ...] = ()
    factor: float = 1.0
    zero: tuple[int, ...] = ()
    shares: tuple[tuple[int, int, float], ...] = ()


class WithoutZeros(ABC):
    """An initialiser that says what new units write with, where zeros would do.

    A call makes the entries that belong to no such unit.
    """

    may: ClassVar[Literal["cancel", "share"]]
    """Which of the plan's tensors it makes."""

    @abstractmethod
    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        """Return free entries, in float64 on the CPU."""

    @abstractmethod
    def together(self, new: New, units: Units, seed: int, *, writes: bool) -> Made:
        """Return the entries of units in one tensor, in float64 on the CPU."""


def drawn(init: Initialiser, new: New, seed: int, *, writes: bool = False) -> Made:
    """Return the entries in the dtype and on the device of the tensor that grows.

    Initialisers see and make true gains, wherever the model stores gain - 1.
    """
    if new.old.device.type == "meta":  # a sketch has shapes only
        return Made(new.old.new_empty(new.shape))
    offset = new.constants.gain_offset if new.is_gain else 0.0
    seen = replace(new, old=new.old + offset) if offset else new
    if new.units is not None and isinstance(init, WithoutZeros):
        made = init.together(seen, new.units, seed, writes=writes)
    else:
        made = Made(init(seen, seed))
    if tuple(made.entries.shape) != new.shape:
        got = tuple(made.entries.shape)
        raise ValueError(f"{init} made {got} for {new.name}; expected {new.shape}")
    entries, old = (
        None if indices is None else (indices - offset if offset else indices).to(new.old)
        for indices in (made.entries, made.old)
    )
    assert entries is not None
    return replace(made, entries=entries, old=old)


def generator(seed: int, *what: object) -> torch.Generator:
    """A generator for one draw, so that the order of draws does not matter."""
    digest = hashlib.sha256(repr((seed, *what)).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))


def key_of(new: New, seed: int) -> torch.Generator:
    """The generator for new entries of a tensor."""
    # A second growth must not repeat the first: of the same tensor, by its whole shape; of another
    # that has its name since a layer was inserted, by the number of layers.
    return generator(seed, new.name, new.dim, new.whole, new.constants.n_layers)


def normal_numbers(new: New, seed: int) -> Float[Tensor, "..."]:
    """Normal numbers of deviation 1, one for each new entry."""
    return torch.randn(new.shape, generator=key_of(new, seed), dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class Own:
    """What `initialise.own` makes."""

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        """Return new entries."""
        if not new.is_matrix:
            return torch.full(new.shape, float(new.is_gain), dtype=torch.float64, device="cpu")
        std = own_std(new)
        if not new.constants.init[0].endswith("uniform"):
            return std * normal_numbers(new, seed)
        uniform = torch.rand(
            new.shape, generator=key_of(new, seed), dtype=torch.float64, device="cpu"
        )
        return std * math.sqrt(3) * (2 * uniform - 1)


def deviation(old: Tensor) -> float:
    """That of the entries of a tensor; of one number, its size."""
    return float(old.std(correction=0) if old.numel() > 1 else old.abs().max())


def own_std(new: New) -> float:
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
