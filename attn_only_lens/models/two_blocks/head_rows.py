"""Stacks of head outputs that refuse to be split into `cfg.n_layers` layers."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_only_lens.errors import UnsupportedCallError

_RESHAPES = ("reshape", "reshape_as", "unflatten", "view", "view_as")


class HeadRows(Tensor):
    """A tensor with one row per head of a converted model, ordered as in the original model.

    Code for stock models splits head rows into `cfg.n_layers` layers. In a converted model, which
    has two blocks per layer, each part would hold only half the heads of a layer. Splitting the
    rows into `cfg.n_layers` parts therefore raises UnsupportedCallError; use `cfg.n_layers // 2`
    parts instead. Operations that change the length of the first axis return plain tensors.

    Example:
        >>> from attn_only_lens import convert, load, pretrained
        >>> model = convert(load("modular-addition"))
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
        """Convert a stack of head outputs to `HeadRows`, for a model with `n_blocks` blocks."""
        rows = stack.as_subclass(cls)
        rows.n_blocks = n_blocks
        return rows

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the rows as a plain tensor, which torch.load accepts."""
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
        """Run a torch operation; raise an error if it splits the rows into `cfg.n_layers` parts."""
        values = (*args, *(kwargs or {}).values())
        rows = next((value for value in values if isinstance(value, HeadRows)), None)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            kept = isinstance(result, Tensor) and result.ndim and rows is not None and rows.ndim
            # An in-place operation returns `rows` itself, which must remain an autograd leaf.
            if rows is None or not kept or result is rows or func is Tensor.as_subclass:
                return result
            split = rows.n_blocks, len(rows) // rows.n_blocks, *rows.shape[1:]
            if func.__name__ in _RESHAPES and result.shape == split:
                raise UnsupportedCallError(
                    f"a stack of {len(rows)} heads was split into cfg.n_layers = {rows.n_blocks} "
                    "rows: a converted model has two blocks for each source layer, so a row would "
                    f"hold half the heads of a layer. Split it into {rows.n_blocks // 2} "
                    "layers: layer=model.cfg.n_layers // 2"
                )
            return cls.of(result, rows.n_blocks) if len(result) == len(rows) else result
