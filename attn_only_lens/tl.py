"""Provide, under both versions, the names that only transformer-lens 3.9 or only version 4 has.

Under version 4, placeholders replace the classes that only 3.9 has: `isinstance` returns False, and
creating an instance raises an error that says what to use instead. Other modules import these names
from here and need no version checks.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torch import Tensor
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.conversion_utils.conversion_steps import BaseTensorConversion
from transformer_lens.hook_points import HookPoint

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.versions import (
    HAS_HOOKED_TRANSFORMER,
    USE_INSTEAD,
    VERSION,
    require_hooked_transformer,
)

__all__ = [
    "HAS_HOOKED_TRANSFORMER",
    "MLP",
    "USE_INSTEAD",
    "Attention",
    "GatedMLP",
    "GroupedQueryAttention",
    "HookedTransformer",
    "HookedTransformerConfig",
    "LayerNorm",
    "LayerNormPre",
    "RMSNorm",
    "RMSNormPre",
    "TransformerBlock",
    "convert_llama_weights",
    "convert_tl_checkpoint",
    "head_point",
    "no_remote_code",
    "quiet",
    "require_hooked_transformer",
]


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that silences the warning that HookedTransformer is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
        yield


class _Unchanged(BaseTensorConversion):
    """A conversion that tells bridges of 3.9 that a hook point has a head_index axis."""

    splits_attention_heads = True

    def handle_conversion(self, input_value: Tensor, *full_context: object) -> Tensor:
        return input_value


def head_point(pos_dim: Literal[1, 2] = 1) -> HookPoint:
    """Return a hook point for [batch, pos, head_index, d_head], or with `pos_dim=2` for patterns.

    TransformerLens applies `pos_slice` to the axis `pos_dim`; 3.9 would otherwise find this axis by
    the hook point's name.
    """
    point: Any = HookPoint()
    point.pos_dim = pos_dim
    if pos_dim == 1 and HAS_HOOKED_TRANSFORMER:
        point.hook_conversion = _Unchanged()
    hook_point: HookPoint = point
    return hook_point


@contextmanager
def no_remote_code() -> Iterator[None]:
    """Context manager in which TransformerLens 3.9 runs no code from the Hugging Face Hub."""
    if not HAS_HOOKED_TRANSFORMER:
        yield
        return
    from transformer_lens import loading_from_pretrained

    loading: Any = loading_from_pretrained
    listed = loading.NEED_REMOTE_CODE_MODELS
    loading.NEED_REMOTE_CODE_MODELS = ()
    try:
        yield
    finally:
        loading.NEED_REMOTE_CODE_MODELS = listed


if TYPE_CHECKING or HAS_HOOKED_TRANSFORMER:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.components import (
        MLP,
        Attention,
        GatedMLP,
        GroupedQueryAttention,
        LayerNorm,
        LayerNormPre,
        RMSNorm,
        RMSNormPre,
        TransformerBlock,
    )
    from transformer_lens.pretrained.weight_conversions import convert_llama_weights

    def convert_tl_checkpoint(
        state_dict: dict[str, Tensor], cfg: TransformerBridgeConfig
    ) -> dict[str, Tensor]:
        """Raise an error: only transformer-lens 4 can convert state dicts for native bridges."""
        raise UnsupportedCallError(
            f"this needs transformer-lens 4, but {VERSION} is installed: use the HookedTransformer"
        )

else:
    from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

    class _Absent:
        """A placeholder for a class that only transformer-lens 3.9 has."""

        def __init__(self, *args: object, **kwargs: object) -> NoReturn:
            require_hooked_transformer()

        @classmethod
        def from_pretrained(cls, *args: object, **kwargs: object) -> NoReturn:
            """Raise an error, because transformer-lens 4 does not have this class."""
            require_hooked_transformer()

    def convert_llama_weights(*args: object) -> NoReturn:
        """Raise an error, because transformer-lens 4 has no HookedTransformer."""
        require_hooked_transformer()

    for _name in set(__all__) - set(globals()):
        globals()[_name] = type(_name, (_Absent,), {})
