"""What growth needs to know of a kind of model: four functions, one `Rim` for each kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from einops import rearrange
from torch import Tensor

from attn_only_lens.expansion import Weights

__all__ = ["Parameter", "Rim"]


@dataclass(frozen=True)
class Parameter:
    """How a parameter of a model is laid out, against the tensor of `Weights` that it is.

    Attributes:
        name: the tensor in `Weights`.
        pattern: of einops, from the parameter to the tensor; None where they are alike.
        sizes: of axes that the pattern takes apart.
    """

    name: str
    pattern: str | None = None
    sizes: tuple[tuple[str, int], ...] = ()

    def taken_apart(self, value: Tensor) -> Tensor:
        """The parameter, or anything of its shape, as the tensor of `Weights`."""
        return value if self.pattern is None else rearrange(value, self.pattern, **dict(self.sizes))

    def put_together(self, tensor: Tensor) -> Tensor:
        """The way back."""
        if self.pattern is None:
            return tensor
        left, right = self.pattern.split("->")
        return rearrange(tensor, f"{right} -> {left}", **dict(self.sizes)).contiguous()


@dataclass(frozen=True)
class Rim:
    """One kind of model, for growth.

    Attributes:
        takes: whether a model is of this kind.
        reasons_against: why it is not known what one computes; empty where it is.
        read: its weights (the model's own tensors, detached, not copied). Never called where
            there are reasons.
        parameters: every parameter of a model by its name there.
        reasons_against_weights: why no model of this kind has such weights (partial growth).
        write: `write(template, weights, source_of)`, a new model of these weights, which has
            everything else from the template: `source_of` gives for every tensor of the new one
            the tensor of the template whose flags and buffers it takes. The tensors of the
            weights are the new model's from then on.
        attached: what is attached to one that would not come along (hooks), though it can be read.
    """

    takes: Callable[[Any], bool]
    reasons_against: Callable[[Any], list[str]]
    read: Callable[[Any], Weights]
    parameters: Callable[[Any], Mapping[str, Parameter]]
    reasons_against_weights: Callable[[Weights], list[str]]
    write: Callable[[Any, Weights, Callable[[str], str]], Any]
    attached: Callable[[Any], list[str]] = lambda model: []
