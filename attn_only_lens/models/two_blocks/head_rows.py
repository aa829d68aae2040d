"""Stacks with a row for each head that raise where they are split by the wrong number of layers."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_only_lens.errors import UnsupportedCallError

_RESHAPES = ("reshape", "reshape_as", "unflatten", "view", "view_as")


class HeadRows(Tensor):
    """A tensor whose first axis is the heads of a converted model, layer by layer of the source.

    Notebooks for stock models split this axis by the model's number of layers:

        einops.rearrange(stack, "(layer head) ... -> layer head ...", layer=model.cfg.n_layers)

    A converted model counts blocks, two for each layer, so each row would silently hold half the
    heads of a layer. Here that raises. Split by `cfg.n_layers // 2`.

    It is a plain tensor otherwise. The result of an operation is a `HeadRows` too if its first
    axis is as long (a norm, a projection), and a plain tensor if not.

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
        """Return a view of a stack with a row for each head of a model of so many blocks."""
        rows = stack.as_subclass(cls)
        rows.n_blocks = n_blocks
        return rows

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved, it is a plain tensor, which torch.load takes without more."""
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
            # What an operation in place returns is the tensor itself: it stays a leaf.
            if rows is None or not kept or result is rows or func is Tensor.as_subclass:
                return result
            split = rows.n_blocks, len(rows) // rows.n_blocks, *rows.shape[1:]
            if func.__name__ in _RESHAPES and result.shape == split:
                layers = rows.n_blocks // 2
                raise UnsupportedCallError(
                    f"a stack of {len(rows)} heads, split into cfg.n_layers = {rows.n_blocks} "
                    "rows: a converted model has two blocks for each layer of its source, so a row "
                    f"would hold half the heads of a layer. Split it into its {layers} layers: "
                    "layer=model.cfg.n_layers // 2"
                )
            return cls.of(result, rows.n_blocks) if len(result) == len(rows) else result
