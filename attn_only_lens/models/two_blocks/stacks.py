"""The weights of all heads of one kind, stacked over source layers."""

from dataclasses import dataclass
from typing import Any

import torch
from transformer_lens import FactoredMatrix

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.heads.names import head_labels
from attn_only_lens.models.two_blocks.config import by_layer


class StackedWeight:
    """A weight of the heads of every source layer, in one tensor; None where they have none.

    Raises:
        UnsupportedCallError: source layers differ in size.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        stack = owner if isinstance(owner, HeadStack) else owner.neuron_heads
        found = [getattr(attn, self.name) for attn in stack.attns]
        if found[0] is None:
            return None
        shapes = [tuple(each.shape) for each in found]
        if len(set(shapes)) > 1:
            block = "2 * l" if stack.kind == "attention" else "2 * l + 1"
            raise UnsupportedCallError(
                f"{self.name} of all layers of a converted model whose layers differ in size: "
                f"{by_layer(shapes)}, which no one tensor holds. Use "
                f"model.blocks[{block}].attn.{self.name} for source layer l"
            )
        return torch.stack(found)


class QKAndOV:
    """QK and OV of heads that have W_Q, W_K, W_V and W_O."""

    W_Q: Any
    W_K: Any
    W_V: Any
    W_O: Any

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q @ W_K^T of every head; zero for neuron-heads."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V @ W_O of every head."""
        return FactoredMatrix(self.W_V, self.W_O)


@dataclass(frozen=True)
class HeadStack(QKAndOV):
    """Every attention head, or every neuron-head, of a converted model.

    In place of `model.W_Q` and its like, which have no one shape for heads of two kinds. Stacks
    are built when asked for, from the parameters as they are then. The first axis is the source
    layer; grouped keys and values are repeated for each query head, as in TransformerLens. Values
    have a width of their own, d_value, which is d_head unless growth widened one alone. Where
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

    W_Q = StackedWeight()
    """Query weights [layer, head_index, d_model, d_head]."""
    W_K = StackedWeight()
    """Key weights [layer, head_index, d_model, d_head]; zero for neuron-heads."""
    W_V = StackedWeight()
    """Value weights [layer, head_index, d_model, d_value]; neuron-heads of gated MLPs have none,
    and raise."""
    W_O = StackedWeight()
    """Output weights [layer, head_index, d_value, d_model]."""
    b_Q = StackedWeight()
    """Query biases [layer, head_index, d_head]."""
    b_K = StackedWeight()
    """Key biases [layer, head_index, d_head]; zero for neuron-heads."""
    b_V = StackedWeight()
    """Value biases [layer, head_index, d_value]; neuron-heads of gated MLPs raise, as for W_V."""

    @property
    def labels(self) -> list[str]:
        """The name of every head, layer by layer."""
        labels: list[str] = []
        for layer, attn in enumerate(self.attns):
            shared = getattr(attn, "heads_per_neuron", 1)
            labels += head_labels(layer, self.kind, attn.cfg.n_heads, shared)
        return labels
