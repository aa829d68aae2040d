"""The weights of all heads of one kind, stacked over source layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformer_lens import FactoredMatrix

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.heads.names import head_labels
from attn_only_lens.models.two_blocks.config import by_layer

__all__ = ["HeadStack", "stack_weight"]


def stack_weight(name: str, attns: Sequence[Any], kind: HeadKind) -> Tensor:
    """Stack one weight of the heads of every source layer.

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


def _stack(name: str, doc: str) -> property:
    def read(stack: "HeadStack") -> Tensor:
        return stack_weight(name, stack.attns, stack.kind)

    return property(read, doc=doc)


@dataclass(frozen=True)
class HeadStack:
    """Every attention head, or every neuron-head, of a converted model.

    In place of `model.W_Q` and its like, which have no one shape for heads of two kinds. Stacks
    are built when asked for, from the parameters as they are then. The first axis is the source
    layer; grouped keys and values are repeated for each query head, as in TransformerLens. Where
    source layers differ in size there is no stack, and asking for one raises UnsupportedCallError.

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

    W_Q = _stack("W_Q", "Query weights [layer, head_index, d_model, d_head].")
    W_K = _stack("W_K", "Key weights [layer, head_index, d_model, d_head]; zero for neuron-heads.")
    W_V = _stack(
        "W_V",
        "Value weights [layer, head_index, d_model, d_head]; neuron-heads of gated MLPs have none, "
        "and raise.",
    )
    W_O = _stack("W_O", "Output weights [layer, head_index, d_head, d_model].")
    b_Q = _stack("b_Q", "Query biases [layer, head_index, d_head].")
    b_K = _stack("b_K", "Key biases [layer, head_index, d_head]; zero for neuron-heads.")
    b_V = _stack(
        "b_V",
        "Value biases [layer, head_index, d_head]; neuron-heads of gated MLPs have none, and "
        "raise.",
    )

    @property
    def labels(self) -> list[str]:
        """The name of every head, layer by layer."""
        labels: list[str] = []
        for layer, attn in enumerate(self.attns):
            shared = getattr(attn, "heads_per_neuron", 1)
            labels += head_labels(layer, self.kind, attn.cfg.n_heads, shared)
        return labels

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q @ W_K^T of every head; zero for neuron-heads."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V @ W_O of every head."""
        return FactoredMatrix(self.W_V, self.W_O)
