"""What an expansion is; and what the six share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from attn_only_lens.errors import GrowthError
from attn_only_lens.expansion.initialise import Initialiser, own
from attn_only_lens.expansion.plan import Plan, carry_out
from attn_only_lens.expansion.provenance import Provenance
from attn_only_lens.expansion.weights import Axis, Weights, block_name
from attn_only_lens.numerics import as_plain, is_count

__all__ = [
    "Expansion",
    "Planned",
    "is_index",
    "layers_of",
    "only_for",
    "reasons_against_count",
    "reasons_against_heads",
]


class Expansion(Protocol):
    """A change of weights that keeps their function; its parameters are its attributes."""

    def reasons_against(self, weights: Weights) -> list[str]:
        """Why these weights cannot be expanded so; empty where they can."""
        ...

    def __call__(
        self, weights: Weights, init: Initialiser | None = None, seed: int = 0
    ) -> tuple[Weights, Provenance]:
        """The expanded weights, and where everything went.

        Raises:
            GrowthError: with all `reasons_against` these weights.
        """
        ...


class Planned(ABC):
    """What the six expansions share: from a plan to an `Expansion`."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, as_plain(value))

    @abstractmethod
    def reasons_against(self, weights: Weights) -> list[str]:
        """Why these weights cannot be expanded so; empty where they can."""

    @abstractmethod
    def plan(self, weights: Weights) -> Plan:
        """What is to be done to these weights, which nothing speaks against."""

    def __call__(
        self, weights: Weights, init: Initialiser | None = None, seed: int = 0
    ) -> tuple[Weights, Provenance]:
        """The expanded weights, and where everything went.

        Raises:
            GrowthError: with all `reasons_against` these weights.
        """
        if reasons := self.reasons_against(weights):
            raise GrowthError(reasons)
        return carry_out(weights, self.plan(weights), init or own(), seed)


def is_index(number: object, size: int) -> bool:
    """Whether this is one of 0 … size - 1, as an int: 1.0 would be looked up under another name."""
    return is_count(number, 0, size - 1)


def layers_of(layers: Sequence[int] | None, weights: Weights) -> list[int]:
    """The layers asked for: all where None."""
    return list(range(weights.constants.n_layers) if layers is None else layers)


def reasons_against_count(n: int, layers: Sequence[int] | None, weights: Weights) -> list[str]:
    """Why so many new units in these layers are none that can be made."""
    reasons = []
    if not is_count(n, 1):
        reasons.append(f"got {n!r} to add; expected 1 or more: to make a model smaller, prune it")
    n_layers = weights.constants.n_layers
    unknown = not all(is_index(layer, n_layers) for layer in layers or ())
    if unknown or (layers is not None and not layers):
        reasons.append(f"got layers {list(layers or ())}; expected some of 0 … {n_layers - 1}")
    if layers is not None and len(set(layers)) != len(layers):
        reasons.append(f"got layers {list(layers)}, with one of them twice")
    return reasons


def reasons_against_heads(
    heads: Sequence[int] | None, layers: Sequence[int] | None, weights: Weights
) -> list[str]:
    """Why these heads cannot be treated apart from the others of these layers."""
    if heads is None:
        return []
    reasons = []
    for layer in layers_of(layers, weights):
        n_heads, groups = (weights.sizes[Axis(label, layer)] for label in ("head", "kv_head"))
        if not heads or not all(is_index(head, n_heads) for head in heads):
            reasons.append(
                f"got heads {list(heads)}; expected some of 0 … {n_heads - 1} (layer {layer})"
            )
            continue
        whole = {head * groups // n_heads for head in heads}
        if len(set(heads)) * groups != len(whole) * n_heads:
            reasons.append(
                f"got heads {list(heads)}; in layer {layer} each {n_heads // groups} heads share a "
                "key and a value: give whole groups"
            )
    return reasons


def only_for(
    heads: Sequence[int] | None, layers: Sequence[int], tails: Sequence[str], weights: Weights
) -> dict[str, frozenset[int]]:
    """`Plan.only` for tensors of these heads; their groups where the tensor is by group."""
    if heads is None:
        return {}
    only = {}
    for layer in layers:
        for name in (block_name(layer, of) for of in tails):
            n_heads = weights.sizes[Axis("head", layer)]
            shared = n_heads // weights.tensors[name].shape[0]
            only[name] = frozenset(head // shared for head in heads)
    return only
