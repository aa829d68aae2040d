"""Map each part of a model to its place in the grown model.

The parts are heads, neurons, layers, coordinates and tensors. An expansion gives new indices to the
old layers and to the old entries along each axis. In the grown tensor, old entries are at their new
indices, and are multiplied by the tensor's scale. A head's new name therefore consists of its
layer's new index and its own new index. `Provenance.then` combines the maps of two growth steps.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, TypeAlias, TypeVar

import pandas as pd
import torch
from jaxtyping import Int
from pydantic import BeforeValidator, PlainSerializer
from torch import Tensor

from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.weights import (
    Axis,
    Constants,
    Identity,
    axes_of,
    block_name,
    in_layer,
    is_gain,
    tail,
)
from attn_only_lens.heads.names import NO_HEAD, HeadName


def _ranges(indices: tuple[int, ...]) -> list[tuple[int, int]]:
    """Split indices into runs of consecutive indices, each given as a pair (start, stop)."""
    ranges = (list(run) for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]))
    return [(run[0][1], run[-1][1] + 1) for run in ranges]


def _indices(ranges: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(index for start, stop in ranges for index in range(start, stop))


# In `provenance.json`, indices are stored as ranges.
Indices: TypeAlias = Annotated[
    tuple[int, ...],
    PlainSerializer(_ranges, return_type=list[tuple[int, int]]),
    BeforeValidator(_indices),
]
_FROM_PAIRS = BeforeValidator(lambda pairs: {Axis(*axis): value for axis, value in pairs})


@dataclass(frozen=True)
class IndexMap:
    """A map from old to new indices, either of layers or along one axis."""

    new_of: Indices
    size: int

    @classmethod
    def identity(cls, size: int) -> "IndexMap":
        """Return the map for an axis that does not grow."""
        return cls(tuple(range(size)), size)

    @classmethod
    def append(cls, size: int, n: int) -> "IndexMap":
        """Return the map that adds n new indices after the old ones."""
        return cls(tuple(range(size)), size + n)

    def then(self, after: "IndexMap") -> "IndexMap":
        """Return the composition of two maps: first this map, then `after`."""
        if after.is_prefix:
            return IndexMap(self.new_of, after.size)
        return IndexMap(tuple(after.new_of[index] for index in self.new_of), after.size)

    @cached_property
    def is_prefix(self) -> bool:
        """True if old indices do not change, and new indices come after the old indices."""
        return self.new_of == tuple(range(len(self.new_of)))

    @property
    def is_identity(self) -> bool:
        """True if nothing changes."""
        return self.size == len(self.new_of) and self.is_prefix

    @cached_property
    def old_of(self) -> dict[int, int]:
        """A dictionary from new to old indices; it lacks the indices that growth added."""
        return {new: old for old, new in enumerate(self.new_of)}

    @cached_property
    def added(self) -> tuple[int, ...]:
        """The indices that growth added, which have no old index."""
        if self.is_prefix:
            return tuple(range(len(self.new_of), self.size))
        return tuple(index for index in range(self.size) if index not in self.old_of)

    def combine(self, old: Tensor, new: Tensor, dim: int) -> Tensor:
        """Combine old and new entries into one tensor, in the order of their new indices."""
        if old.device.type == "meta":  # meta tensors have no values
            return old.new_empty((*old.shape[:dim], self.size, *old.shape[dim + 1 :]))
        # Keep the memory layout of a transposed matrix, so that its parameter needs no second copy.
        dims = sorted(range(old.ndim), key=old.stride, reverse=True)
        parts = [old.permute(dims), new.permute(dims)]
        both = torch.cat(parts, dims.index(dim)).permute([dims.index(i) for i in range(old.ndim)])
        if self.is_prefix:
            return both
        order = _index((*self.new_of, *self.added), old.device).argsort()
        return both.index_select(dim, order)

    def select_old(self, grown: Tensor, dim: int) -> Tensor:
        """Return the old entries along a dimension, as a view if their indices did not change."""
        if self.is_prefix:
            return grown.narrow(dim, 0, len(self.new_of))
        return grown.index_select(dim, _index(self.new_of, grown.device))


@dataclass(frozen=True)
class TensorMap:
    """A map from an old tensor to the grown one: an entry x becomes (x + offset) · scale - offset.

    The offset is 1 for gains that the model stores as gain - 1, and otherwise 0.
    """

    name: str
    axes: tuple[IndexMap, ...]
    scale: float = 1.0
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    def scaled(self, old: Tensor) -> Tensor:
        """Return an old tensor's entries after scaling, as they are in the grown tensor."""
        if self.scale == 1.0:
            return old
        return (old + self.offset) * self.scale - self.offset if self.offset else old * self.scale

    def unscaled(self, part: Tensor) -> Tensor:
        """Undo the scaling of entries: the inverse of `scaled`."""
        if self.scale == 1.0:
            return part
        return (part + self.offset) / self.scale - self.offset if self.offset else part / self.scale

    def old_part(self, grown: Tensor) -> Tensor:
        """Return the entries of a grown tensor that the old tensor also has; they stay scaled."""
        for dim, axis in enumerate(self.axes):
            grown = axis.select_old(grown, dim)
        return grown

    def put(self, old: Tensor, into: Tensor) -> Tensor:
        """Return a copy of the grown tensor `into` in which `old` replaces the old entries."""
        if all(axis.is_identity for axis in self.axes):
            return old.clone()
        indices = (_index(axis.new_of, into.device) for axis in self.axes)
        return into.index_put(torch.meshgrid(*indices, indexing="ij"), old)


@dataclass(frozen=True)
class ZeroEntries:
    """Entries of a grown tensor that must be zero to preserve the model's function.

    Attributes:
        name: the tensor's name.
        indices: indices along each axis; the entries are their Cartesian product.
        since: how many `Provenance.shares` existed before these entries were added.
    """

    name: str
    indices: tuple[Indices, ...]
    since: int = field(default=0, kw_only=True)

    def off(self, tensor: Tensor) -> Tensor:
        """Return the entries' deviations from zero."""
        return self.entries(tensor)

    def entries(self, tensor: Tensor) -> Tensor:
        """Return the tensor's entries at `indices`."""
        for dim, indices in enumerate(self.indices):
            tensor = tensor.index_select(dim, _index(indices, tensor.device))
        return tensor


@dataclass(frozen=True)
class TiedEntries(ZeroEntries):
    """Entries of a grown tensor that must equal `factor` times other entries of this tensor.

    Attributes:
        dim: the axis along which the other entries lie.
        of: the index of the other entry, for each index in `indices[dim]`.
        factor: 1, or -1 for entries that cancel.
    """

    dim: int
    of: Indices
    factor: float

    def off(self, tensor: Tensor) -> Tensor:
        """Return the entries' deviations from `factor` times the entries to which they are tied."""
        others = (*self.indices[: self.dim], self.of, *self.indices[self.dim + 1 :])
        return self.entries(tensor) - self.factor * ZeroEntries(self.name, others).entries(tensor)


@dataclass(frozen=True)
class Shares:
    """New units (such as neurons) that each took over a share of an old unit's output.

    Attributes:
        new: the indices of the new units.
        of: for each new unit, the index of an old unit.
        share: for each new unit, its fraction of the old unit's output, before noise was added; the
            old unit kept the rest.
        written: the tensors with the shared output weights. In other tensors, new units are copies.
    """

    axis: Axis
    new: Indices
    of: Indices
    share: tuple[float, ...]
    written: Annotated[frozenset[str], PlainSerializer(sorted, return_type=list[str])]

    def kept(self) -> dict[int, float]:
        """Return, for each old unit that was split, the fraction of its output that it kept."""
        rest: dict[int, float] = {}
        for of, share in zip(self.of, self.share, strict=True):
            rest[of] = rest.get(of, 1.0) - share
        return rest


_EntriesT = TypeVar("_EntriesT", bound=ZeroEntries)


def _index(indices: tuple[int, ...], device: torch.device) -> Int[Tensor, " n"]:
    return torch.tensor(indices, dtype=torch.long, device=device)


_LAYER = re.compile(r"L(0|[1-9]\d*)")
_IN_STACK = re.compile(r"([ED])(0|[1-9]\d*)(?:([HCN])(0|[1-9]\d*))?")
_AXIS_OF = {"H": "head", "C": "head", "N": "d_mlp"}
_KINDS = {"H": "head", "C": "cross-attention head", "N": "neuron", "": "layer"}


@dataclass(frozen=True)
class _Part:
    """A layer, or its head (letter H), head of cross-attention (C) or neuron (N)."""

    layer: int
    letter: str = ""
    index: int = 0

    @property
    def axis(self) -> Axis:
        return Axis(_AXIS_OF[self.letter], self.layer)

    @classmethod
    def parse(cls, name: str, n_encoder: int) -> "_Part":
        """Parse a name in a model with `n_encoder` encoder layers (0: with one stack)."""
        if n_encoder:
            match = _IN_STACK.fullmatch(name) if isinstance(name, str) else None
            if match is None or (match[1] == "E" and match[3] == "C"):
                reason = (
                    f"got {name!r}; expected a part of the encoder ('E0H1', 'E0N17', 'E0') or of "
                    "the decoder ('D0H1', 'D0C1' for cross-attention, 'D0N17', 'D0')"
                )
                raise InputError([reason], NO_HEAD)
            layer = int(match[2])
            if match[1] == "E" and layer >= n_encoder:
                raise InputError([f"got {name!r}; the encoder has {n_encoder} layers"], NO_HEAD)
            first = n_encoder if match[1] == "D" else 0
            return cls(first + layer, match[3] or "", int(match[4] or 0))
        if isinstance(name, str) and (match := _LAYER.fullmatch(name)):
            return cls(int(match[1]))
        head = HeadName.parse(name)
        return cls(head.layer, "H" if head.kind == "attention" else "N", head.index)

    def name(self, n_encoder: int) -> str:
        """Return the name that `parse` reads."""
        letter = "L" if not n_encoder else "E" if self.layer < n_encoder else "D"
        layer = self.layer - n_encoder * (letter == "D")
        return f"{letter}{layer}{self.letter}{self.index if self.letter else ''}"


@dataclass(frozen=True)
class Provenance:
    """A map from each part of a model to its place in the grown model.

    Parts of an encoder-decoder model have names such as `E0N17` (encoder), `D0H1` and `D0C1`
    (self-attention and cross-attention of the decoder), and `D0`.

    Attributes:
        layers: new indices of layers.
        axes: new indices along each axis of the old model.
        sizes: the length of each axis of the grown model.
        constants: the constants of the old model.
        like: for each new layer, by its new index, an old layer with the same shapes.
        scales: factors of old tensors, by old name.
        activation_scales: factors of old activations, by the old name of the hook point.
        zeros: entries that had to be zero in the grown model.
        ties: entries that had to equal ±1 times other entries, because their units cancel or are
            copies.
        shares: the new units that share the outputs of old units.
        centred: whether growth subtracted the residual stream's mean over d_model, which LayerNorm
            ignores.
        source: fingerprint of the original model (see `compare`); None if only weights grew.

    Example:
        >>> from attn_only_lens import growth, load
        >>> from attn_only_lens.growth.expansion.expansion import compose
        >>> from attn_only_lens.growth.models._grow import read
        >>> weights = read(load("modular-addition"))
        >>> steps = growth.InsertLayer(at=0), growth.AddNeurons(2, layers=[1])
        >>> _, provenance = compose(*steps)(weights)
        >>> provenance["L0N17"], provenance["L0H1"], provenance.new_layers
        ('L1N17', 'L1H1', ('L0',))
        >>> provenance.old_of("L1N17"), provenance.old_of("L0N17")
        ('L0N17', None)
    """

    layers: IndexMap
    axes: Annotated[
        Mapping[Axis, IndexMap],
        PlainSerializer(lambda x: list(x.items()), return_type=list[tuple[Axis, IndexMap]]),
        _FROM_PAIRS,
    ]
    sizes: Annotated[
        Mapping[Axis, int],
        PlainSerializer(lambda x: list(x.items()), return_type=list[tuple[Axis, int]]),
        _FROM_PAIRS,
    ]
    constants: Constants
    like: Mapping[int, int] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    activation_scales: Mapping[str, float] = field(default_factory=dict)
    zeros: tuple[ZeroEntries, ...] = ()
    ties: tuple[TiedEntries, ...] = ()
    shares: tuple[Shares, ...] = ()
    centred: bool = False
    source: Identity | None = None

    def __repr__(self) -> str:
        added = {
            "layers": self.new_layers,
            "heads": self.new_heads,
            "neurons": self.new_neurons,
        }
        width = len(self.coordinates), self.sizes[Axis("d_model")]
        said = [f"new {what}: {len(names):,}" for what, names in added.items() if names]
        said += [f"d_model: {width[0]:,} → {width[1]:,}"] * (width[0] != width[1])
        return f"<Provenance; {', '.join(said) or 'no new layers, heads or neurons'}>"

    def then(self, after: "Provenance") -> "Provenance":
        """Return the combined provenance of two growth steps: first this one, then `after`."""
        like = {after.layers.new_of[new]: old for new, old in self.like.items()}
        sources = {**self.layers.old_of, **self.like}
        like |= {new: sources[middle] for new, middle in after.like.items()}
        return Provenance(
            layers=self.layers.then(after.layers),
            axes={
                axis: indices.then(after.axes[self.axis(axis)])
                for axis, indices in self.axes.items()
            },
            sizes=after.sizes,
            constants=self.constants,
            like=like,
            scales=self._times(self.scales, after.scales),
            activation_scales=self._times(self.activation_scales, after.activation_scales),
            zeros=tuple(map(after._moved_entries, self.zeros)) + self._later(after.zeros),
            ties=tuple(map(after._moved_entries, self.ties)) + self._later(after.ties),
            shares=tuple(map(after._moved_shares, self.shares)) + after.shares,
            centred=self.centred or after.centred,
            source=self.source,
        )

    def __getitem__(self, name: str) -> str:
        """Return the new name of an old head (`L0H1`), neuron (`L0N17`) or layer (`L1`)."""
        n_encoder, n_layers = self.constants.n_encoder_layers, len(self.layers.new_of)
        part = _Part.parse(name, n_encoder)
        if part.layer >= n_layers:
            had = f"{n_encoder} + {n_layers - n_encoder}" if n_encoder else n_layers
            raise InputError([f"got {name!r}; the model had {had} layers before it grew"], NO_HEAD)
        now = self.layers.new_of[part.layer]
        if not part.letter:
            return _Part(now).name(self.n_encoder_layers)
        new_of = self.axes.get(part.axis, IndexMap((), 0)).new_of
        if part.index >= len(new_of):
            layer = _Part(part.layer).name(n_encoder).removeprefix("L")
            had = f"{len(new_of)} {_KINDS[part.letter]}s"
            raise InputError([f"got {name!r}; layer {layer} had {had} before it grew"], NO_HEAD)
        return _Part(now, part.letter, new_of[part.index]).name(self.n_encoder_layers)

    def old_of(self, name: str) -> str | None:
        """Return the old name of a head, neuron or layer, or None if the part is new.

        Raises:
            InputError: the grown model has no head, neuron or layer with this name.
        """
        part, n_encoder = _Part.parse(name, self.n_encoder_layers), self.constants.n_encoder_layers
        if part.layer >= self.layers.size or (
            part.letter and part.index >= self.sizes.get(part.axis, 0)
        ):
            raise InputError(
                [f"got {name!r}; the grown model has no head, neuron or layer with this name"],
                NO_HEAD,
            )
        was = self.layers.old_of.get(part.layer)
        if was is None or not part.letter:
            return None if was is None else _Part(was).name(n_encoder)
        index = self.axes[Axis(part.axis.label, was)].old_of.get(part.index)
        return None if index is None else _Part(was, part.letter, index).name(n_encoder)

    @cached_property
    def n_encoder_layers(self) -> int:
        """The number of the grown model's encoder layers; new layers are in the stack of `like`."""
        sources = {**self.layers.old_of, **self.like}
        return sum(old < self.constants.n_encoder_layers for old in sources.values())

    @property
    def coordinates(self) -> tuple[int, ...]:
        """The new index of each old coordinate of the residual stream."""
        return self.axes[Axis("d_model")].new_of

    @property
    def new_layers(self) -> tuple[str, ...]:
        """The names of the grown model's new layers."""
        return tuple(_Part(layer).name(self.n_encoder_layers) for layer in self.layers.added)

    @property
    def new_heads(self) -> tuple[str, ...]:
        """The names of the grown model's new attention heads, including those in new layers."""
        return tuple(name for x in "HC" for name in self._names(x) if self.old_of(name) is None)

    @property
    def new_neurons(self) -> tuple[str, ...]:
        """The names of the grown model's new neurons, including those in new layers."""
        return tuple(name for name in self._names("N") if self.old_of(name) is None)

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with one row for each layer, head and neuron of the grown model.

        Returns:
            Columns `name`, `kind` ("layer", "head", "cross-attention head", "neuron"), `old` (the
            part's name in the old model; missing if the part is new), `is_new`.
        """
        names = [
            (_Part(layer).name(self.n_encoder_layers), "") for layer in range(self.layers.size)
        ]
        names += [(name, letter) for letter in "HCN" for name in self._names(letter)]
        old = [self.old_of(name) for name, _ in names]
        return pd.DataFrame(
            {
                "name": [name for name, _ in names],
                "kind": [_KINDS[letter] for _, letter in names],
                "old": pd.array(old, dtype="string"),
                "is_new": [name is None for name in old],
            }
        )

    def axis(self, old: Axis) -> Axis:
        """Return the axis of the grown model that corresponds to an axis of the old model."""
        return old if old.layer is None else Axis(old.label, self.layers.new_of[old.layer])

    def name(self, old: str) -> str:
        """Return the name that a tensor or hook point of the old model has in the grown model."""
        layer = in_layer(old)
        return old if layer is None else block_name(self.layers.new_of[layer], tail(old))

    def old_name(self, new: str) -> str | None:
        """Return the old name of a tensor or hook point, or None if its layer is new."""
        layer = in_layer(new)
        if layer is None:
            return new
        was = self.layers.old_of.get(layer)
        return None if was is None else block_name(was, tail(new))

    def source_of(self, new: str) -> str:
        """Return a tensor's old name; in a new layer, the name of an old tensor of equal shape."""
        layer = in_layer(new)
        if layer is not None and layer in self.like:
            return block_name(self.like[layer], tail(new))
        old = self.old_name(new)
        assert old is not None
        return old

    def tensor_map(self, name: str) -> TensorMap:
        """Return the map from an old tensor to the grown tensor.

        Raises:
            KeyError: the tensor is unknown.
        """
        axes = tuple(self.axes[axis] for axis in axes_of(name, self.constants))
        offset = self.constants.gain_offset if is_gain(name) else 0.0
        return TensorMap(self.name(name), axes, self.scales.get(name, 1.0), offset)

    def _times(self, first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
        """Multiply the factors of two growth steps. The keys are old names."""
        names = {*first, *(old for new in second if (old := self.old_name(new)) is not None)}
        return {
            name: first.get(name, 1.0) * second.get(self.name(name), 1.0) for name in sorted(names)
        }

    def _moved_entries(self, entries: _EntriesT) -> _EntriesT:
        """Return an earlier step's entries with the name and indices that this step gives them."""
        axes = axes_of(entries.name, self.constants)
        changes: dict[str, Any] = {"indices": tuple(map(self._moved, axes, entries.indices))}
        if isinstance(entries, TiedEntries):
            changes["of"] = self._moved(axes[entries.dim], entries.of)
        return replace(entries, name=self.name(entries.name), **changes)

    def _later(self, entries: tuple[_EntriesT, ...]) -> tuple[_EntriesT, ...]:
        """Return a later step's entries, with each `since` counted from this step's first share."""
        return tuple(replace(one, since=one.since + len(self.shares)) for one in entries)

    def _moved_shares(self, shares: Shares) -> Shares:
        return replace(
            shares,
            axis=self.axis(shares.axis),
            new=self._moved(shares.axis, shares.new),
            of=self._moved(shares.axis, shares.of),
            written=frozenset(map(self.name, shares.written)),
        )

    def _moved(self, axis: Axis, indices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.axes[axis].new_of[index] for index in indices)

    def old_part(self, name: str, grown: Mapping[str, Tensor]) -> Tensor:
        """Return an old tensor's entries in a grown model, after adding the copies' shares."""
        tensor_map = self.tensor_map(name)
        return tensor_map.old_part(self._given_back(tensor_map.name, grown[tensor_map.name]))

    def broken(self, grown: Mapping[str, Tensor]) -> dict[str, str]:
        """Return {tensor: violated condition} for all tensors that violate `zeros` or `ties`."""
        names: dict[str, str] = {}
        for entries in (*self.zeros, *self.ties):
            now = grown[entries.name]
            before = self._given_back(entries.name, now, entries.since)
            rounded = 4 * torch.finfo(now.dtype).eps * float(now.abs().max())
            tolerance = 0.0 if before is now else rounded
            if not (entries.off(before).abs() <= tolerance).all():
                is_tied = isinstance(entries, TiedEntries)
                names.setdefault(entries.name, f"were {'equal or opposite' if is_tied else 'zero'}")
        return names

    def _given_back(self, name: str, tensor: Tensor, since: int = 0) -> Tensor:
        """Add the output weights of copies to the output weights of the units that were copied."""
        for shares in reversed(self.shares[since:]):
            if name in shares.written:
                dim = axes_of(name, self.constants).index(shares.axis)
                new, of = (_index(indices, tensor.device) for indices in (shares.new, shares.of))
                tensor = tensor.index_add(dim, of, tensor.index_select(dim, new))
        return tensor

    def _names(self, letter: str) -> list[str]:
        n_encoder = self.n_encoder_layers
        first = 0 if letter != "C" else n_encoder if n_encoder else self.layers.size
        return [
            _Part(layer, letter, index).name(n_encoder)
            for layer in range(first, self.layers.size)
            for index in range(self.sizes.get(Axis(_AXIS_OF[letter], layer), 0))
        ]
