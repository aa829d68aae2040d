"""Models that share weights, and what parts their functions.

`convert` and `expose_neuron_heads(copy=True)` share the weights of their source. What changes the
weights in place, such as training, changes all of these models alike. So does TransformerLens'
processing, which keeps the function, but for one step: fold_ln multiplies the gains of the norms
into the weights behind them, and replaces the norms of the model that it is called on. The others
keep their norms: the gains then act twice. A bridge is processed out of place, and is no case here.

So every model of such a group remembers the norms of all, and a sample of its weights: where
another one has new norms, and the weights are no longer those of the sample, it is refused. Norms
replaced by hand harm no other model; weights that were moved or cast before a fold are not shared
by then, and stay as they were. A forward pass asks for the norms alone: one comparison for each.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_SAMPLED = 64  # entries of each parameter
_CLOSE = 1e-2  # of entries that were cast to half precision and back
_NORMS = ("ln1", "ln2", "ln1_post", "ln2_post")


class _Group:
    """Models that share weights, each with its norms when it joined."""

    def __init__(self) -> None:
        self.norms: weakref.WeakKeyDictionary[nn.Module, list[nn.Module | None]] = (
            weakref.WeakKeyDictionary()
        )

    def has_new_norms(self, model: nn.Module) -> bool:
        """Return whether another model of the group has other norms than it had."""
        return any(
            one is not other
            for member, before in list(self.norms.items())
            if member is not model
            for one, other in zip(_norms(member), before, strict=True)
        )


_groups: "weakref.WeakKeyDictionary[nn.Module, tuple[_Group, list[Tensor]]]" = (
    weakref.WeakKeyDictionary()
)


def share_weights(source: nn.Module, model: nn.Module) -> None:
    """Remember that two models share their weights."""
    group = _groups[source][0] if source in _groups else _Group()
    for member in (source, model):
        if member not in group.norms:
            group.norms[member] = list(_norms(member))
            _groups[member] = group, _sample(member)


def parted_reasons(model: nn.Module) -> list[str]:
    """Return the reason why a model has no function of its source any more; empty if it has."""
    if model not in _groups:
        return []
    group, before = _groups[model]
    if not group.has_new_norms(model) or _alike(_sample(model), before):
        return []
    return [
        "the norms of a model that shares its weights were folded into them (fold_ln, by "
        "process_weights_ or load_and_process_state_dict), and this model still has its norms: "
        "it computes neither what it did nor what that model does. Make it anew from the "
        "processed model, or pass copy_weights=True before"
    ]


def sharing_reasons(model: nn.Module) -> list[str]:
    """Return the reason why a model's norms must not be folded; empty if it shares no weights."""
    others = [] if model not in _groups else [m for m in _groups[model][0].norms if m is not model]
    if not others:
        return []
    return [
        "its weights are those of another model too, which would compute something else: pass "
        "copy_weights=True, or fold_ln=False"
    ]


def _norms(model: Any) -> Iterator[nn.Module | None]:
    yield model._modules.get("ln_final")
    for block in model._modules["blocks"]._modules.values():
        for name in _NORMS:
            yield block._modules.get(name)


@torch.no_grad()
def _sample(model: nn.Module) -> list[Tensor]:
    flat = (parameter.detach().flatten() for parameter in model.parameters())
    return [x[:: max(1, len(x) // _SAMPLED)].clone() for x in flat]


def _alike(now: list[Tensor], before: list[Tensor]) -> bool:
    return len(now) == len(before) and all(
        one.shape == other.shape
        and torch.allclose(one.cpu().double(), other.cpu().double(), rtol=_CLOSE, atol=0.0)
        for one, other in zip(now, before, strict=True)
    )
