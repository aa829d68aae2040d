"""The MLPs of a model that stays what it is, or the reasons why they are unknown."""

from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.models.in_place import (
    KnownMLP,
    UnknownMLPError,
    exposed_heads,
    recognise,
    undisturbed,
)
from attn_only_lens.models.two_blocks.convertible import reasons_against
from attn_only_lens.tl import HookedTransformer

__all__ = ["known_mlps", "not_finite"]

_SHOWN = 5
_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def known_mlps(model: Any, problem: str) -> list[KnownMLP]:
    """The MLP of every layer of a HookedTransformer or TransformerBridge, exposed or not.

    Raises:
        UnsupportedModelError: there is one that is not known, or the model is not; `problem` says
            what cannot be done about it.
    """
    standing = exposed_heads(model)
    if standing:
        return [KnownMLP(heads.mlp, heads.sockets, heads.act_fn) for heads in standing]
    blocks: list[Any] = []
    if type(model) is TransformerBridge:
        blocks = list(getattr(model, "blocks", ()))
        reasons = [] if blocks else ["it has no blocks (an encoder-decoder?)"]
    elif isinstance(model, TransformerBridge) or not isinstance(model, HookedTransformer):
        kind = type(model)
        reasons = [
            f"got a {kind.__module__}.{kind.__qualname__}; expected a HookedTransformer (of "
            "transformer-lens 3.9) or a TransformerBridge"
        ]
    else:
        reasons = reasons_against(model)  # hooks may stay where they are
        blocks = [] if reasons else list(model.blocks)
    known: list[KnownMLP] = []
    with undisturbed(getattr(block, "mlp", None) for block in blocks):
        for layer, block in enumerate(blocks):
            try:
                mlp = getattr(block, "mlp", None)
                if any(mlp is each.mlp for each in known):
                    raise UnknownMLPError("it shares its MLP with a layer before it")
                known.append(recognise(mlp, model.cfg))
            except UnknownMLPError as error:
                reasons.append(f"layer {layer}: {error}")
    names = {each.act_fn for each in known}
    if len(names) > 1:
        reasons.append(f"its layers differ in their activation: {', '.join(sorted(names))}")
    if reasons:
        raise UnsupportedModelError(reasons, problem)
    return known


def not_finite(model: Any) -> list[str]:
    """Which parameters hold NaN or infinity, as reasons against a model: the first few."""
    reasons = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta or parameter.dtype not in _NUMBERS or not parameter.numel():
            continue
        extremes = torch.stack(parameter.detach().aminmax())  # NaN, if there is one
        if not extremes.isfinite().all():
            count = int((~parameter.detach().isfinite()).sum())
            plain = name.replace("._original_component", "")
            reasons.append(f"its {plain} has {count} entries that are NaN or infinite")
    more = len(reasons) - _SHOWN
    return [*reasons[:_SHOWN], *[f"and {more} more of its parameters have"] * (more > 0)]
