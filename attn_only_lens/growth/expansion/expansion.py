"""Define expansions and their plans, and apply a plan to a model's weights.

If an axis grows, every tensor with that axis gets new entries. A plan says which axes grow, which
old entries are scaled, and which constants change. A plan also lists the tensors whose new entries
must be zero by the expansion's theorem. The new entries of other tensors can have any values. If an
expansion inserts layers, the plan lists which tensors of a new layer are zero.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.devices import free_bytes
from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.initialise import (
    Initialiser,
    Made,
    New,
    Units,
    WithoutZeros,
    drawn,
    own,
    zeros,
)
from attn_only_lens.growth.expansion.provenance import (
    IndexMap,
    Provenance,
    Shares,
    TiedEntries,
    ZeroEntries,
)
from attn_only_lens.growth.expansion.weights import (
    NOT_GROWN,
    Axis,
    Stack,
    Weights,
    axes_of,
    block_name,
    in_layer,
    tail,
)


@dataclass(frozen=True)
class Plan:
    """A description of the changes that an expansion would make to a model's weights.

    Attributes:
        axes: new indices of the axes that grow (at most one axis per tensor), by name in the old
            model.
        zero: the tensors whose new entries are zero.
        only: for tensors whose new entries are free in some heads only, the indices of these heads.
        cancel: tensors in `zero`, or tails in `zero_in_new`, whose new units may cancel in pairs
            instead.
        share: tensors in `zero` whose new units may take over shares of old units' entries instead.
        runs: `Units.runs` and `Units.block` for the head axes.
        scales: factors that multiply old entries, by tensor.
        activation_scales: the resulting factors of activations, by hook point.
        constants: the constants that change, with their new values.
        layers: the new index of each old layer; None if no layer is inserted.
        like: for each new layer, an old layer with the same shapes.
        zero_in_new: the tails of tensors that are zero in new layers.
        copied: if new layers are copies of the layers in `like`, the factors of tensors, by tail;
            else None.
    """

    axes: Mapping[Axis, IndexMap] = field(default_factory=dict)
    zero: frozenset[str] = frozenset()
    only: Mapping[str, frozenset[int]] = field(default_factory=dict)
    cancel: frozenset[str] = frozenset()
    share: frozenset[str] = frozenset()
    runs: Mapping[Axis, tuple[int, int]] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    activation_scales: Mapping[str, float] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    layers: IndexMap | None = None
    like: Mapping[int, int] = field(default_factory=dict)
    zero_in_new: frozenset[str] = frozenset()
    copied: Mapping[str, float] | None = None


class Expansion(ABC):
    """Base class of function-preserving expansions."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, as_plain(value))

    @abstractmethod
    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why the given weights cannot be expanded."""

    def plan(self, weights: Weights) -> Plan:
        """Return the plan for expanding the given weights, once `reasons_against` returns []."""
        return Plan()

    def __call__(
        self, weights: Weights, init: Initialiser | None = None, seed: int = 0
    ) -> tuple[Weights, Provenance]:
        """Return the expanded weights, and their provenance."""
        InputError.raise_if(self.reasons_against(weights), NOT_GROWN)
        return self.expand(weights, init or own(), seed)

    def expand(self, weights: Weights, init: Initialiser, seed: int) -> tuple[Weights, Provenance]:
        """Expand the given weights, once `reasons_against` returns []."""
        return apply_plan(weights, self.plan(weights), init, seed)


def reasons_against_bytes(needed: int) -> list[str]:
    """Return a list with an error message if no device has `needed` bytes of free memory."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    free = [free_bytes(device) for device in (torch.device("cpu"), *gpus)]
    if needed <= max(free):
        return []
    return [
        f"the grown model takes {needed:,} bytes, but only {max(free):,} bytes of memory are free; "
        "choose smaller sizes"
    ]


def _bytes(weights: Weights, plan: Plan) -> int:
    """Return how many bytes a plan's new tensors need. Meta tensors count as new."""
    total = 0
    for name, old in weights.tensors.items():
        axes = axes_of(name, weights.constants)
        sizes = [
            plan.axes[axis].size if axis in plan.axes else size
            for axis, size in zip(axes, old.shape, strict=True)
        ]
        made = old.is_meta or sizes != list(old.shape)
        copies = made + sum(like == in_layer(name) for like in plan.like.values())
        tied = weights.constants.tied and name == "unembed.W_U"  # shares the embedding's memory
        total += 0 if tied else copies * math.prod(sizes) * old.element_size()
    return total


def apply_plan(
    weights: Weights, plan: Plan, init: Initialiser, seed: int
) -> tuple[Weights, Provenance]:
    """Return the expanded weights and their provenance. Unchanged tensors are not copied."""
    InputError.raise_if(reasons_against_bytes(_bytes(weights, plan)), NOT_GROWN)
    provenance = Provenance(
        layers=plan.layers or IndexMap.identity(weights.constants.n_layers),
        axes={
            axis: plan.axes.get(axis, IndexMap.identity(size))
            for axis, size in weights.sizes.items()
        },
        sizes={},
        constants=weights.constants,
        like=plan.like,
        scales=plan.scales,
        activation_scales=plan.activation_scales,
    )
    drawing = _Drawing(weights, plan, init, seed)
    grown = dict(drawing.expanded(name, provenance) for name in weights.tensors)
    for layer, like in plan.like.items():
        for name in [name for name in weights.tensors if in_layer(name) == like]:
            new_name = block_name(layer, tail(name))
            grown[new_name] = drawing.of_new_layer(new_name, name, like)
    result = Weights(grown, replace(weights.constants, **plan.constants))
    n_shares = len(drawing.shares)
    return result, replace(
        provenance,
        sizes=result.sizes,
        zeros=tuple(replace(zero, since=n_shares) for zero in drawing.zeros),
        ties=tuple(replace(tie, since=n_shares) for tie in drawing.ties),
        shares=tuple(drawing.shares.values()),
    )


class _Drawing:
    """A builder of the grown model's tensors; it records which entries must stay zero or tied.

    Attributes:
        zeros, ties: the conditions, as in `Provenance`.
        shares: as in `Provenance`, in a dictionary by axis.
    """

    def __init__(self, weights: Weights, plan: Plan, init: Initialiser, seed: int) -> None:
        self._weights, self._plan, self._init, self._seed = weights, plan, init, seed
        self._constants = replace(weights.constants, **plan.constants)
        self._without_zeros: frozenset[str] = (
            getattr(plan, init.may) if isinstance(init, WithoutZeros) else frozenset()
        )
        self.zeros: list[ZeroEntries] = []
        self.ties: list[TiedEntries] = []
        self.shares: dict[Axis, Shares] = {}

    def expanded(self, name: str, provenance: Provenance) -> tuple[str, Tensor]:
        """Return an old tensor's new name, and the tensor extended by its new entries."""
        plan, tensor_map = self._plan, provenance.tensor_map(name)
        tensor = tensor_map.scaled(self._weights.tensors[name])
        growing = [dim for dim, axis in enumerate(tensor_map.axes) if axis.added]
        if not growing:
            return tensor_map.name, tensor
        (dim,) = growing
        indices = tensor_map.axes[dim]
        shape = (*tensor.shape[:dim], len(indices.added), *tensor.shape[dim + 1 :])
        axis = axes_of(name, self._weights.constants)[dim]
        new = New(tensor_map.name, axis, dim, shape, tensor, self._constants)
        if axis.layer in map(in_layer, self._without_zeros):
            units = Units(dim, indices.new_of, indices.added, *plan.runs.get(axis, ()))
            new = replace(new, units=units)
        if name in plan.zero and (new.units is None or name not in self._without_zeros):
            entries = tensor.new_zeros(shape)
            self.zeros.append(ZeroEntries(new.name, _grid(shape, dim, indices.added)))
        else:
            made = drawn(self._init, new, self._seed, writes=name in plan.zero)
            entries = made.entries
            if name in plan.only:
                others = sorted(set(range(shape[0])) - plan.only[name])
                entries[others] = 0.0
                if made.old is not None:
                    made.old[others] = tensor[others]
            tensor = tensor if made.old is None else made.old
            self._note(new, made, writes=name in plan.zero)
        return tensor_map.name, indices.combine(tensor, entries, dim)

    def of_new_layer(self, new_name: str, name: str, like: int) -> Tensor:
        """Return the tensor `new_name` of a new layer, shaped like the old tensor `name`."""
        plan, old = self._plan, self._weights.tensors[name]
        new = New(new_name, None, None, tuple(old.shape), old, self._constants)
        if self._without_zeros:
            new = replace(new, units=_units_of_layer(new, self._weights, like))
        is_zero = tail(name) in plan.zero_in_new
        if is_zero and tail(name) not in self._without_zeros:
            self.zeros.append(ZeroEntries(new_name, _grid(new.shape)))
            return torch.zeros_like(old)
        if plan.copied is not None:
            return old * plan.copied.get(tail(name), 1.0)
        made = drawn(self._init, new, self._seed, writes=is_zero)
        self._note(new, made, writes=is_zero)
        return made.entries

    def _note(self, new: New, made: Made, *, writes: bool) -> None:
        """Record which entries of new heads or neurons must stay zero, tied or shared."""
        if new.units is None:
            return
        dim, shape = new.units.dim, new.whole
        if made.zero:
            self.zeros.append(ZeroEntries(new.name, _grid(shape, dim, made.zero)))
        if made.tied:
            indices, of = zip(*made.tied, strict=True)
            grid = _grid(shape, dim, indices)
            self.ties.append(TiedEntries(new.name, grid, dim, of, made.factor))
        if made.shares and new.axis is not None:
            before = self.shares.get(new.axis)
            written = before.written if before else frozenset[str]()
            written |= {new.name} if writes else set()
            indices, of, share = zip(*made.shares, strict=True)
            self.shares[new.axis] = Shares(new.axis, indices, of, share, written)


def _units_of_layer(new: New, weights: Weights, like: int) -> Units | None:
    """Return the heads or neurons of a new layer's tensor, or None if it has no such axis."""
    sizes = weights.sizes
    for dim, axis in enumerate(axes_of(new.name, new.constants)):
        if axis.label in ("head", "kv_head", "d_mlp"):
            together = sizes[Axis("head", like)] // sizes[Axis("kv_head", like)]
            block = together if axis.label == "head" else 1
            return Units(dim, (), tuple(range(new.shape[dim])), block=block)
    return None


def _grid(
    shape: tuple[int, ...], dim: int | None = None, indices: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return one index per dimension, as np.ix_ takes: `indices` for `dim`, otherwise all."""
    return tuple(indices if axis == dim else tuple(range(size)) for axis, size in enumerate(shape))


@dataclass(frozen=True)
class ExpansionSequence(Expansion):
    """An expansion that applies several expansions one after the other."""

    steps: tuple[Expansion, ...]

    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why a step is impossible. The steps are tried on meta tensors."""
        sketch, reasons = weights.sketch(), []
        for step in self.steps:
            against = step.reasons_against(sketch)
            if not against:
                try:
                    sketch, _ = step(sketch)
                except InputError as error:  # the grown model would not fit into memory
                    against = list(error.reasons)
            reasons += [f"{type(step).__name__}: {reason}" for reason in against]
        return reasons

    def expand(self, weights: Weights, init: Initialiser, seed: int) -> tuple[Weights, Provenance]:
        """Apply the steps one after the other."""
        grown, provenance = super().expand(weights, init, seed)
        for step in self.steps:
            grown, more = step.expand(grown, init, seed)
            provenance = provenance.then(more)
        return grown, provenance


@dataclass(frozen=True)
class PaddedExpansion(Expansion):
    """An expansion of some layers, followed by an expansion that gives other layers equal sizes.

    All weights of the units that `padding` adds are zero, so the units compute nothing. Their
    gradients are zero, too: the gradient of an input weight is a sum of products with the unit's
    output weights, and the gradient of an output weight is one with the unit's activation, which is
    act(0) = 0 for ReLU, GELU and SiLU. Queries and keys are in each other's gradients. Gradient
    descent, also with momentum or weight decay, therefore leaves these units at zero: the padded
    model learns as a model in which only some layers have grown.
    """

    expansion: Expansion
    padding: "ExpansionSequence"

    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why the expansion is impossible."""
        return self.expansion.reasons_against(weights)

    def expand(self, weights: Weights, init: Initialiser, seed: int) -> tuple[Weights, Provenance]:
        """Apply the expansion, then the padding."""
        grown, provenance = self.expansion.expand(weights, init, seed)
        grown, more = self.padding.expand(grown, zeros(), seed)
        return grown, provenance.then(more)


def compose(*expansions: Expansion) -> ExpansionSequence:
    """Return one expansion that applies several expansions in the given order.

    The order affects the values of new entries, but not the function that the grown model computes.
    """
    steps = (
        expansion.steps if isinstance(expansion, ExpansionSequence) else (expansion,)
        for expansion in expansions
    )
    return ExpansionSequence(tuple(chain.from_iterable(steps)))


def is_index(number: object, size: int) -> bool:
    """Return True if `number` is an int from 0 to size - 1. A float such as 1.0 is not an index."""
    return is_count(number, 0, size - 1)


def layers_of(
    layers: Sequence[int] | None, weights: Weights, stack: Stack | None = None
) -> list[int]:
    """Return the given layers of a stack as layers of the model; all if `layers` is None."""
    of_stack = weights.constants.layers_in(stack)
    return list(of_stack) if layers is None else [of_stack[layer] for layer in layers]


def reasons_against_stack(stack: object, weights: Weights, *, needed: bool) -> list[str]:
    """Return the reason why the model has no such stack, or why a stack is needed."""
    names = [name for name in weights.constants.stacks if name is not None]
    if stack is None and not (needed and names):
        return []
    if stack is None:
        return ['the model has two stacks; pass stack="encoder" or stack="decoder" with the layer']
    if stack in names:
        return []
    expected = '"encoder", "decoder" or None' if names else "None, because the model has one stack"
    return [f"got stack={stack!r}; expected {expected}"]


def reasons_against_count(
    n: int, layers: Sequence[int] | None, weights: Weights, stack: Stack | None = None
) -> list[str]:
    """Return every reason why `n` units (such as heads) cannot be added to the given layers."""
    reasons = []
    if not is_count(n, 1):
        reasons.append(f"got n={n!r}; expected 1 or more (growth cannot remove units)")
    if against := reasons_against_stack(stack, weights, needed=layers is not None):
        return reasons + against
    n_layers = len(weights.constants.layers_in(stack))
    unknown = not all(is_index(layer, n_layers) for layer in layers or ())
    if unknown or (layers is not None and not layers):
        reasons.append(f"got layers {list(layers or ())}; expected layers 0 … {n_layers - 1}")
    if layers is not None and len(set(layers)) != len(layers):
        reasons.append(f"got layers {list(layers)}; expected each layer once")
    return reasons


def reasons_against_heads(
    heads: Sequence[int] | None,
    layers: Sequence[int] | None,
    weights: Weights,
    stack: Stack | None = None,
) -> list[str]:
    """Return every reason why the given heads cannot be widened without the other heads."""
    if heads is None:
        return []
    reasons = []
    for layer in layers_of(layers, weights, stack):
        n_heads, groups = (weights.sizes[Axis(label, layer)] for label in ("head", "kv_head"))
        if not heads or not all(is_index(head, n_heads) for head in heads):
            reasons.append(
                f"got heads {list(heads)}; expected heads 0 … {n_heads - 1} (layer {layer})"
            )
            continue
        whole = {head * groups // n_heads for head in heads}
        if len(set(heads)) * groups != len(whole) * n_heads:
            reasons.append(
                f"got heads {list(heads)}; in layer {layer}, every {n_heads // groups} heads share "
                "a key and a value; pass whole groups, with all heads that share a key"
            )
    return reasons


def only_for(
    heads: Sequence[int] | None, layers: Sequence[int], tails: Sequence[str], weights: Weights
) -> dict[str, frozenset[int]]:
    """Return `Plan.only` for the given heads: their indices on the first axis of each tensor."""
    if heads is None:
        return {}
    only = {}
    for layer in layers:
        for name in (block_name(layer, of) for of in tails):
            if name not in weights.tensors:
                continue
            n_heads = weights.sizes[Axis("head", layer)]
            shared = n_heads // weights.tensors[name].shape[0]
            only[name] = frozenset(head // shared for head in heads)
    return only
