"""The kinds of models that are saved: for each, the layout, the class, the way there and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.heads import layout_of
from attn_only_lens.heads.layout import Layout
from attn_only_lens.saved.bridge import bridge_parts, rebuilt_bridge
from attn_only_lens.saved.hooked import (
    in_place_parts,
    rebuilt_in_place,
    rebuilt_two_blocks,
    two_blocks_parts,
)
from attn_only_lens.saved.parts import Parts

__all__ = ["FORMS", "Form", "form_named", "form_of"]


@dataclass(frozen=True)
class Form:
    """A kind of model that can be saved.

    Attributes:
        layout: where its neuron-heads are.
        model: the TransformerLens class that it is made of.
        parts: takes a model apart; raises CheckpointError where it could not be put together.
        rebuilt: puts it together from a manifest and tensors.
    """

    layout: Layout
    model: str
    parts: Callable[[Any], Parts]
    rebuilt: Callable[[dict[str, Any], dict[str, Tensor]], Any]


FORMS = (
    Form("two blocks a layer", "HookedTransformer", two_blocks_parts, rebuilt_two_blocks),
    Form("in place", "HookedTransformer", in_place_parts, rebuilt_in_place),
    Form("in place", "TransformerBridge", bridge_parts, rebuilt_bridge),
)


def form_of(model: object) -> Form | None:
    """The form of a model with neuron-heads; none for any other object."""
    kind = "TransformerBridge" if isinstance(model, TransformerBridge) else "HookedTransformer"
    return form_named(layout_of(model), kind)


def form_named(layout: str | None, model: str) -> Form | None:
    """The form of these names, if there is one."""
    return next((form for form in FORMS if (form.layout, form.model) == (layout, model)), None)
