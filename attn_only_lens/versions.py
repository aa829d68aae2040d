"""Know the version of transformer-lens without importing it, which takes seconds."""

from importlib.metadata import version

from attn_only_lens.errors import UnsupportedCallError

VERSION = version("transformer-lens")
_NEEDED = (
    f"needs HookedTransformer, which transformer-lens {VERSION} does not have: "
    "pip install 'transformer-lens<4' for 3.9; or build a TransformerBridge, and use "
    "attn_only_lens.expose_neuron_heads on the bridge"
)
HAS_HOOKED_TRANSFORMER = int(VERSION.split(".")[0]) < 4
USE_INSTEAD = "" if HAS_HOOKED_TRANSFORMER else f"; this {_NEEDED}"
"""The end of an error message about a model that is not a HookedTransformer; empty under 3.9."""


def hooked_transformer_reasons(what: str = "this") -> list[str]:
    """Return a message under transformer-lens 4, which has no HookedTransformer, otherwise []."""
    return [] if HAS_HOOKED_TRANSFORMER else [f"{what} {_NEEDED}"]


def require_hooked_transformer(what: str = "this") -> None:
    """Raise an error under transformer-lens 4, which has no HookedTransformer."""
    if reasons := hooked_transformer_reasons(what):
        raise UnsupportedCallError(*reasons)
