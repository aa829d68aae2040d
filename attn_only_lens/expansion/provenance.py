"""By what the weights of a model are known again, whatever their dtype, device or layout.

Each tensor has a mark: its entries in order, weighed by numbers that look random, and summed,

    s = Σ_i r(i div n) r(i mod n) w_i        r(i) = 2 ((i + 1) φ mod 1) - 1, φ the golden ratio

and its norm. A change Δ of the weights, wherever it is, moves s by about ‖Δ‖ / 3. So a tensor whose
s moved by no more than roundings of ‖w‖ is the same one, cast or computed on another machine; after
one step of training it is another. (A digest of bytes would tell casts apart.)

Where the parts of a model went when it grew: heads, neurons, layers, coordinates, parameters.

An expansion moves old indices along axes, and layers; everything else follows. A tensor's old
entries stand at the product of its axes' places, times its scale; a head's new name is its layer's
place and its own. Provenances compose as functions do.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch import Tensor

from attn_only_lens.errors import UnknownHeadError
from attn_only_lens.expansion.placement import Moved, Place, Zeros
from attn_only_lens.expansion.weights import Axis, Constants, axes_of, block_name, in_layer, tail
from attn_only_lens.heads.names import HeadName
from attn_only_lens.tolerances import rounding

__all__ = ["Identity", "Provenance", "identity_of"]

_GOLDEN = (math.sqrt(5) + 1) / 2
_ROW = 2**11  # entries that are summed before rows are; as many rows at a time, in float64


@dataclass(frozen=True)
class Identity:
    """Marks of a model's tensors. Made by `growth.identity`.

    Attributes:
        marks: for each tensor its weighed sum and its norm.
        precision: how far roundings may have moved a sum, as a share of the norm.
    """

    marks: Mapping[str, tuple[float, float]] = field(repr=False)
    precision: float

    def differences(self, other: "Identity") -> list[str]:
        """The tensors that are not the same in both, or that one has not."""
        tolerance = max(self.precision, other.precision)
        odd = self.marks.keys() ^ other.marks.keys()
        for name in self.marks.keys() & other.marks.keys():
            (one, size), (two, other_size) = self.marks[name], other.marks[name]
            if not abs(one - two) <= tolerance * max(size, other_size):
                odd.add(name)
        return sorted(odd)


def identity_of(tensors: Mapping[str, Tensor]) -> Identity:
    """The identity of a model, from its tensors by name."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    return Identity(
        {name: _mark(tensor) for name, tensor in tensors.items()},
        max(map(rounding, dtypes), default=0.0),
    )


def _mark(tensor: Tensor) -> tuple[float, float]:
    total = squares = 0.0
    row = _weights(0, _ROW)
    for at, part in enumerate(tensor.detach().cpu().flatten().split(_ROW * _ROW)):
        w = part.double()
        rows, rest = w[: len(w) // _ROW * _ROW].view(-1, _ROW), w[len(w) // _ROW * _ROW :]
        sums = torch.cat([rows @ row, (rest @ row[: len(rest)])[None]])
        total += float(sums @ _weights(at * _ROW, len(sums)))
        squares += float(w @ w)
    return total, math.sqrt(squares)


def _weights(first: int, n: int) -> Tensor:
    turns = torch.arange(first + 1, first + n + 1, dtype=torch.float64, device="cpu") * _GOLDEN
    return turns.frac() * 2 - 1


_LAYER = re.compile(r"L(0|[1-9]\d*)")
_AXIS_OF = {"H": "head", "N": "d_mlp"}
_KINDS = {"H": "head", "N": "neuron", "L": "layer"}


@dataclass(frozen=True)
class Provenance:
    """From the parts of a model to those of the grown one.

    Attributes:
        layers: where layers went.
        axes: where the indices of each axis of the old model went.
        sizes: the length of each axis of the grown model.
        constants: of the old model.
        like: for each new layer, by its index now, an old one that it has the shapes of.
        scales: what old entries of a tensor, by its old name, were multiplied by.
        rescaled: what an old activation, by the old name of its hook point, is multiplied by.
        zeros: what had to be zero.
        centred: whether the residual stream lost its mean over d_model, which LayerNorm ignores.
        source: which model grew, as `growth.identity` tells it; None where weights grew that are
            no model's.

    Example:
        >>> from attn_only_lens import expansion as ex, pretrained
        >>> from attn_only_lens.growth import read
        >>> weights = read(pretrained.modular_addition())
        >>> _, provenance = ex.compose(ex.InsertLayer(at=0), ex.AddNeurons(2, layers=[1]))(weights)
        >>> provenance["L0N17"], provenance["L0H1"], provenance.new_layers
        ('L1N17', 'L1H1', ('L0',))
        >>> provenance.old_of("L1N17"), provenance.old_of("L0N17")
        ('L0N17', None)
    """

    layers: Place
    axes: Mapping[Axis, Place]
    sizes: Mapping[Axis, int]
    constants: Constants
    like: Mapping[int, int] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    rescaled: Mapping[str, float] = field(default_factory=dict)
    zeros: tuple[Zeros, ...] = ()
    centred: bool = False
    source: Identity | None = None

    def then(self, after: "Provenance") -> "Provenance":
        """First this growth, then `after`."""
        grown = {after.layers.where[new]: old for new, old in self.like.items()}
        inserted = {
            new: self.like[old] if old in self.like else self.layers.old[old]
            for new, old in after.like.items()
        }
        return Provenance(
            layers=self.layers.then(after.layers),
            axes={
                axis: place.then(after.axes[self.axis(axis)]) for axis, place in self.axes.items()
            },
            sizes=after.sizes,
            constants=self.constants,
            like=grown | inserted,
            scales=self._times(self.scales, after.scales),
            rescaled=self._times(self.rescaled, after.rescaled),
            zeros=tuple(after._zeros(zeros) for zeros in self.zeros) + after.zeros,
            centred=self.centred or after.centred,
            source=self.source,
        )

    def __getitem__(self, name: str) -> str:
        """The name now of an old head (`L0H1`), neuron (`L0N17`) or layer (`L1`).

        Raises:
            UnknownHeadError: the old model has no such part.
        """
        head, layer = _parsed(name, self.constants.heads_per_neuron)
        if layer >= len(self.layers.where):
            raise UnknownHeadError(f"got {name!r}; the model had {len(self.layers.where)} layers")
        moved = self.layers.where[layer]
        if head is None:
            return f"L{moved}"
        places = self.axes.get(_axis(head), Place((), 0))
        if head.index >= len(places.where):
            kind = "heads" if head.kind == "attention" else "neurons"
            raise UnknownHeadError(
                f"got {name!r}; layer {layer} had {len(places.where)} {kind} before it grew"
            )
        return str(HeadName(moved, head.kind, places.where[head.index], head.member))

    def old_of(self, name: str) -> str | None:
        """What a head, neuron or layer of the grown model was; None where it is new.

        Raises:
            UnknownHeadError: the grown model has no such part.
        """
        head, layer = _parsed(name, self.constants.heads_per_neuron)
        n_now = self.layers.size if head is None else self.sizes.get(_axis(head), 0)
        if layer >= self.layers.size or (head is not None and head.index >= n_now):
            raise UnknownHeadError(f"got {name!r}; the grown model has no such part")
        was = self.layers.old.get(layer)
        if was is None or head is None:
            return None if was is None else f"L{was}"
        index = self.axes[Axis(_axis(head).label, was)].old.get(head.index)
        return None if index is None else str(HeadName(was, head.kind, index, head.member))

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Where each old coordinate of the residual stream is."""
        return self.axes[Axis("d_model")].where

    @property
    def new_layers(self) -> tuple[str, ...]:
        """The layers of the grown model that are new."""
        return tuple(f"L{layer}" for layer in self.layers.new)

    @property
    def new_heads(self) -> tuple[str, ...]:
        """The attention heads of the grown model that are new, those of new layers too."""
        return tuple(name for name in self._names("H") if self.old_of(name) is None)

    @property
    def new_neurons(self) -> tuple[str, ...]:
        """The neurons of the grown model that are new, those of new layers too."""
        return tuple(name for name in self._names("N") if self.old_of(name) is None)

    def to_frame(self) -> pd.DataFrame:
        """One row a layer, head and neuron of the grown model.

        Returns:
            Columns `name`, `kind` ("layer", "head", "neuron"), `old` (its name in the old model;
            missing where it is new), `is_new`.
        """
        names = [(f"L{layer}", "L") for layer in range(self.layers.size)]
        names += [(name, letter) for letter in "HN" for name in self._names(letter)]
        old = [self.old_of(name) for name, _ in names]
        return pd.DataFrame(
            {
                "name": [name for name, _ in names],
                "kind": [_KINDS[letter] for _, letter in names],
                "old": pd.array(old, dtype="string"),
                "is_new": [each is None for each in old],
            }
        )

    def axis(self, old: Axis) -> Axis:
        """The axis now."""
        return old if old.layer is None else Axis(old.label, self.layers.where[old.layer])

    def name(self, old: str) -> str:
        """The name now of an old tensor or hook point."""
        layer = in_layer(old)
        return old if layer is None else block_name(self.layers.where[layer], tail(old))

    def old_name(self, new: str) -> str | None:
        """What a tensor or hook point was called; None where its layer is new."""
        layer = in_layer(new)
        if layer is None:
            return new
        was = self.layers.old.get(layer)
        return None if was is None else block_name(was, tail(new))

    def source_of(self, new: str) -> str:
        """The old tensor that a grown one is or, in a new layer, has its shape from."""
        layer = in_layer(new)
        if layer is not None and layer in self.like:
            return block_name(self.like[layer], tail(new))
        old = self.old_name(new)
        assert old is not None
        return old

    def moved(self, name: str) -> Moved:
        """Where the entries of an old tensor are.

        Raises:
            KeyError: no such tensor is known.
        """
        places = tuple(self.axes[axis] for axis in axes_of(name, self.constants))
        return Moved(self.name(name), places, self.scales.get(name, 1.0))

    def _times(self, ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
        """Factors by old name, of this growth and of one after it."""
        names = {*ours, *(old for new in theirs if (old := self.old_name(new)) is not None)}
        return {
            name: ours.get(name, 1.0) * theirs.get(self.name(name), 1.0) for name in sorted(names)
        }

    def _zeros(self, zeros: Zeros) -> Zeros:
        """The same entries, after this growth."""
        axes = axes_of(zeros.name, self.constants)
        where = (
            tuple(self.axes[axis].where[index] for index in indices)
            for axis, indices in zip(axes, zeros.where, strict=True)
        )
        return Zeros(self.name(zeros.name), tuple(where))

    def _names(self, letter: str) -> list[str]:
        sizes = [self.sizes.get(Axis(_AXIS_OF[letter], at), 0) for at in range(self.layers.size)]
        return [f"L{at}{letter}{i}" for at, size in enumerate(sizes) for i in range(size)]


def _parsed(name: str, heads_per_neuron: int) -> tuple[HeadName | None, int]:
    if isinstance(name, str) and (layer := _LAYER.fullmatch(name)):
        return None, int(layer[1])
    head = HeadName.parse(name)
    head.heads(heads_per_neuron)  # refuses a member that the neuron has not
    return head, head.layer


def _axis(head: HeadName) -> Axis:
    return Axis("head" if head.kind == "attention" else "d_mlp", head.layer)
