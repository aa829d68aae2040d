"""Stacks over the heads of a converted model: weights by source layer, and rows of activations."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformer_lens import FactoredMatrix

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.heads.names import head_labels
from attn_only_lens.models.two_blocks.config import by_layer

_RESHAPES = ("reshape", "reshape_as", "unflatten", "view", "view_as")


class StackedWeight:
    """A weight of the heads of all source layers in one tensor; None if they have no such weight.

    Raises UnsupportedCallError if source layers differ in size.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        stack = owner if isinstance(owner, HeadStack) else owner.neuron_heads
        weights = [getattr(attn, self.name) for attn in stack.attns]
        if weights[0] is None:
            return None
        shapes = [tuple(weight.shape) for weight in weights]
        if len(set(shapes)) > 1:
            block = "2 * l" if stack.kind == "attention" else "2 * l + 1"
            raise UnsupportedCallError(
                f"{self.name} of all layers of a converted model whose layers differ in size: "
                f"{by_layer(shapes)}, so one tensor cannot hold them. Use "
                f"model.blocks[{block}].attn.{self.name} for source layer l"
            )
        return torch.stack(weights)


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
    """The weights of all attention heads, or of all neuron-heads, of a converted model.

    They replace `model.W_Q` and similar stacks, which cannot hold heads of two kinds. A stack is
    computed from the present parameters when it is asked for. The first axis is the source layer;
    grouped keys and values are repeated for each query head, as in TransformerLens. Values have the
    width d_value, which is d_head unless growth widened one of the two. If source layers differ in
    size, asking for a stack raises UnsupportedCallError.

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
    """Value weights [layer, head_index, d_model, d_value]; raises for gated neuron-heads."""
    W_O = StackedWeight()
    """Output weights [layer, head_index, d_value, d_model]."""
    b_Q = StackedWeight()
    """Query biases [layer, head_index, d_head]."""
    b_K = StackedWeight()
    """Key biases [layer, head_index, d_head]; zero for neuron-heads."""
    b_V = StackedWeight()
    """Value biases [layer, head_index, d_value]; raises for gated neuron-heads."""

    @property
    def labels(self) -> list[str]:
        """The name of every head, layer by layer."""
        labels: list[str] = []
        for layer, attn in enumerate(self.attns):
            heads_per_neuron = getattr(attn, "heads_per_neuron", 1)
            labels += head_labels(layer, self.kind, attn.cfg.n_heads, heads_per_neuron)
        return labels


class HeadRows(Tensor):
    """A tensor with a row for each head of a converted model, in the order of the source.

    Notebooks for stock models split these rows by the model's number of layers:

        einops.rearrange(stack, "(layer head) ... -> layer head ...", layer=model.cfg.n_layers)

    A converted model counts blocks, two for each layer, so each result would silently hold half the
    heads of a layer. Here that raises UnsupportedCallError. Split by `cfg.n_layers // 2`.

    In all other ways it is a plain tensor. The result of an operation is again a `HeadRows` if its
    first axis is equally long (a norm, a projection), else a plain tensor.

    Example:
        >>> from attn_only_lens import convert, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> stack, labels = cache.stack_head_results(pos_slice=-1, return_labels=True)
        >>> labels
        ['L0H0', 'L0H1', 'L0H2', 'L0H3']
        >>> stack.unflatten(0, (model.cfg.n_layers // 2, -1)).shape  # source layer, head, ...
        torch.Size([1, 4, 5, 128])
    """

    n_blocks: int

    @classmethod
    def of(cls, stack: Tensor, n_blocks: int) -> "HeadRows":
        """Return a view of a stack with a row for each head of a model with so many blocks."""
        rows = stack.as_subclass(cls)
        rows.n_blocks = n_blocks
        return rows

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save as a plain tensor, which torch.load accepts."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadRows":
        return self.of(copy.deepcopy(self.as_subclass(Tensor), memo), self.n_blocks)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation of torch on the plain tensor; raise if it splits the rows by blocks."""
        values = (*args, *(kwargs or {}).values())
        rows = next((value for value in values if isinstance(value, HeadRows)), None)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            kept = isinstance(result, Tensor) and result.ndim and rows is not None and rows.ndim
            # An operation in place returns the tensor itself, which stays a leaf.
            if rows is None or not kept or result is rows or func is Tensor.as_subclass:
                return result
            split = rows.n_blocks, len(rows) // rows.n_blocks, *rows.shape[1:]
            if func.__name__ in _RESHAPES and result.shape == split:
                raise UnsupportedCallError(
                    f"a stack of {len(rows)} heads, split into cfg.n_layers = {rows.n_blocks} "
                    "rows: a converted model has two blocks for each source layer, so a row would "
                    f"hold half the heads of a layer. Split it into its {rows.n_blocks // 2} "
                    "layers: layer=model.cfg.n_layers // 2"
                )
            return cls.of(result, rows.n_blocks) if len(result) == len(rows) else result
