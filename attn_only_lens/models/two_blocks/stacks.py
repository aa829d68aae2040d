"""The weights of all heads of one kind, stacked over source layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import FactoredMatrix

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.heads.names import head_labels
from attn_only_lens.models.two_blocks.config import by_layer

__all__ = ["HeadStack", "stacked"]


def stacked(name: str, attns: Sequence[Any], kind: HeadKind) -> Tensor:
    """One weight of the heads of every source layer.

    Raises:
        UnsupportedCallError: source layers differ in size.
    """
    found = [getattr(attn, name) for attn in attns]
    shapes = [tuple(each.shape) for each in found]
    if len(set(shapes)) > 1:
        block = "2 * l" if kind == "attention" else "2 * l + 1"
        raise UnsupportedCallError(
            f"{name} of all layers of a converted model whose layers differ in size: "
            f"{by_layer(shapes)}, which no one tensor holds. Use model.blocks[{block}].attn.{name} "
            "for source layer l"
        )
    return torch.stack(found)


@dataclass(frozen=True)
class HeadStack:
    """Every attention head, or every neuron-head, of a converted model.

    In place of `model.W_Q` and its like, which have no one shape for heads of two kinds. Stacks
    are built when asked for, from the parameters as they are then. The first axis is the source
    layer; grouped keys and values are repeated for each query head, as in TransformerLens. Where
    source layers differ in size there is no stack, and to ask for one raises UnsupportedCallError.

    Attributes:
        kind: "attention" or "neuron".
        attns: the attention module of each source layer.

    Example:
        >>> from attn_only_lens import convert, pretrained
        >>> converted = convert(pretrained.modular_addition())
        >>> converted.attention_heads.W_Q.shape
        torch.Size([1, 4, 128, 32])
        >>> converted.neuron_heads.W_O.shape
        torch.Size([1, 512, 1, 128])
        >>> converted.neuron_heads.labels[-1]
        'L0N511'
    """

    kind: HeadKind
    attns: tuple[Any, ...]

    @property
    def labels(self) -> list[str]:
        """The name of every head, layer by layer."""
        labels: list[str] = []
        for layer, attn in enumerate(self.attns):
            shared = getattr(attn, "heads_per_neuron", 1)
            labels += head_labels(layer, self.kind, attn.cfg.n_heads, shared)
        return labels

    def _stack(self, name: str) -> Tensor:
        return stacked(name, self.attns, self.kind)

    @property
    def W_Q(self) -> Float[Tensor, "layer head_index d_model d_head"]:
        """Query weights."""
        return self._stack("W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer head_index d_model d_head"]:
        """Key weights; zero for neuron-heads."""
        return self._stack("W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer head_index d_model d_head"]:
        """Value weights; neuron-heads of gated MLPs have none, and raise."""
        return self._stack("W_V")

    @property
    def W_O(self) -> Float[Tensor, "layer head_index d_head d_model"]:
        """Output weights."""
        return self._stack("W_O")

    @property
    def b_Q(self) -> Float[Tensor, "layer head_index d_head"]:
        """Query biases."""
        return self._stack("b_Q")

    @property
    def b_K(self) -> Float[Tensor, "layer head_index d_head"]:
        """Key biases; zero for neuron-heads."""
        return self._stack("b_K")

    @property
    def b_V(self) -> Float[Tensor, "layer head_index d_head"]:
        """Value biases; neuron-heads of gated MLPs have none, and raise."""
        return self._stack("b_V")

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q @ W_K^T of every head; zero for neuron-heads."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V @ W_O of every head."""
        return FactoredMatrix(self.W_V, self.W_O)
