"""`Growable`: the interface that growth uses to read and write models."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from attn_only_lens.arguments import a_type
from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.expansion import ExpansionSequence
from attn_only_lens.growth.expansion.weights import Weights

PROBLEM = "this model cannot be saved in a folder"
_FIELDS = {"head": "n_heads", "d_query": "d_head", "d_mlp": "d_mlp", "kv_head": "n_key_value_heads"}


@dataclass(frozen=True)
class Parameter:
    """The layout of a parameter: the tensor of `Weights` that it stores, and the order of its axes.

    The einops pattern turns the parameter into the tensor. The pattern is None if their shapes are
    equal. `sizes` gives the sizes of axes that the pattern splits.
    """

    name: str
    pattern: str | None = None
    sizes: tuple[tuple[str, int], ...] = ()

    def to_weights(self, value: Tensor) -> Tensor:
        """Rearrange a parameter, or a tensor of the same shape, to the axes of `Weights`."""
        return value if self.pattern is None else rearrange(value, self.pattern, **dict(self.sizes))

    def from_weights(self, tensor: Tensor) -> Tensor:
        """Rearrange a tensor of `Weights` to the axes of the parameter."""
        if self.pattern is None:
            return tensor
        left, right = self.pattern.split("->")
        return rearrange(tensor, f"{right} -> {left}").contiguous()


class Growable(ABC):
    """Base class for reading and writing a model's weights; each kind of model has a subclass."""

    may_differ_by_layer: frozenset[str] = frozenset()
    """Labels of axes whose sizes need not be the same in all layers."""
    padded_because: str = ""
    """Why smaller layers get units of zeros, if one configuration describes all layers."""
    _instead = ""

    def __init__(self, model: Any) -> None:
        self.model = model

    @staticmethod
    @abstractmethod
    def is_kind(model: Any) -> bool:
        """Return True if this subclass handles the model."""

    def reasons_against_padding(self, padding: ExpansionSequence) -> list[str]:
        """Return why units of zeros in smaller layers would not stay zero in training."""
        return []

    @abstractmethod
    def reasons_against(self) -> list[str]:
        """Return every reason why the model cannot be grown."""

    @abstractmethod
    def read(self) -> Weights:
        """Return the model's weights as detached tensors, without copying them."""

    @abstractmethod
    def parameters(self) -> Mapping[str, Parameter]:
        """Return the layout of each parameter in `named_parameters`."""

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that the model computes with, by name.

        If a parameter stores two tensors of `Weights` (a tied embedding), it has two names.
        """
        return dict(self.model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of `Weights`, as detached views of the model's parameters."""
        named = self.named_parameters()
        return {
            layout.name: layout.to_weights(named[name].detach())
            for name, layout in self.parameters().items()
        }

    def frozen(self) -> set[str]:
        """Return the names of tensors whose parameters have `requires_grad=False`."""
        named, layouts = self.named_parameters(), self.parameters()
        return {layout.name for name, layout in layouts.items() if not named[name].requires_grad}

    def reasons_against_weights(self, weights: Weights) -> list[str]:
        """Return every reason why a model of this kind cannot have these weights.

        By default, as in TransformerLens, all layers need the same sizes, and values need the same
        width (d_head) as queries and keys.
        """
        sizes = defaultdict(set)
        for axis, size in weights.sizes.items():
            if axis.layer is not None and axis.label not in self.may_differ_by_layer:
                sizes[axis.label].add(size)
        reasons = [
            f"layers would differ in {_FIELDS.get(label, label)} ({sorted(values)}), but the "
            f"layers of {a_type(self.model)} must have equal sizes; grow all of them"
            f"{self._instead}"
            for label, values in sizes.items()
            if len(values) > 1
        ]
        (query, *_), (value, *_) = sizes["d_query"], sizes["d_value"]
        if not reasons and query != value:
            reasons.append(
                f"queries and keys would have width {query}, and values {value}, but a "
                f"{type(self.model).__name__} has one d_head for both; widen both{self._instead}"
            )
        return reasons

    @abstractmethod
    def write(self, weights: Weights, source_of: Callable[[str], str]) -> Any:
        """Return a new model with the given weights. All else is copied from `self.model`."""

    def reasons_against_saving(self) -> list[str]:
        """Return every reason why `save_pretrained` cannot write the model."""
        return [
            f"got {a_type(self.model)}; expected a HookedTransformer, or a bridge around "
            "a transformers model; save other models with neuron-heads by attn_only_lens.save"
        ]

    def save_pretrained(self, folder: Path) -> None:
        """Write the configuration, the weights and the tokenizer to an empty folder."""
        raise InputError(self.reasons_against_saving(), PROBLEM)

    def trial(self, grown: Any) -> list[str]:
        """Return an error message if `grown` does not compute the same function as `self.model`."""
        return []


def shared_parameter_reasons(named: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Return an error message for each pair of names that refer to one parameter."""
    first: dict[int, str] = {}
    pairs = [(first.setdefault(id(parameter), name), name) for name, parameter in named]
    return [
        f"{one} and {item} share one parameter, but growth may change them differently; replace "
        "one of them by a copy"
        for one, item in pairs
        if one != item
    ]
