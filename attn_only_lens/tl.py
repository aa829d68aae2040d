"""What transformer-lens 3.9 has and 4 has not, for either to be installed.

Under 4 these names are classes without instances: `isinstance` says no, and to make one raises an
error that says what to use instead. So the package needs one import for each name, and no branch.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

from attn_only_lens.errors import UnsupportedCallError

__all__ = [
    "HAS_HOOKED_TRANSFORMER",
    "MLP",
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
]

_VERSION = version("transformer-lens")
_NEEDED = (
    f"this needs HookedTransformer, which transformer-lens {_VERSION} has not: "
    "pip install 'attn-only-lens[hooked]' for 3.9; or build a TransformerBridge, and use "
    "attn_only_lens.expose_neuron_heads or attn_only_lens.convert on that"
)
HAS_HOOKED_TRANSFORMER = int(_VERSION.split(".")[0]) < 4

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
else:

    class _Absent:
        """A class of transformer-lens 3.9."""

        def __init__(self, *args: object, **kwargs: object) -> NoReturn:
            raise UnsupportedCallError(_NEEDED)

        @classmethod
        def from_pretrained(cls, *args: object, **kwargs: object) -> NoReturn:
            """Refuse, as the class does."""
            raise UnsupportedCallError(_NEEDED)

    for _name in __all__[1:]:
        globals()[_name] = type(_name, (_Absent,), {})
