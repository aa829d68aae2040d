"""Detect whether one model's norms were folded into weights that it shares with other models.

Models made by `convert` or `expose_neuron_heads(copy=True)` share the weights of their source, so
training changes all of these models in the same way. TransformerLens' weight processing preserves
the outputs of all these models, except for one step: fold_ln multiplies norms' gains into the
shared weights, but removes the gains from only one model. In the other models, the gains then act
twice. (Bridges are not affected, because their weights are not processed in place.)

An error is therefore raised for a model if (1) the norm modules of another model that shares its
weights were replaced, and (2) its own weights no longer match the values that were sampled when
sharing began. (A model whose weights were moved or cast no longer shares them.) Weights are
compared only if norm modules were replaced, so a forward pass usually costs only one identity check
(`is`) per norm module.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_SAMPLED = 64  # the approximate number of sampled entries per parameter
_CLOSE = 1e-2  # a relative tolerance, which allows a cast to half precision and back
_NORMS = ("ln1", "ln2", "ln1_post", "ln2_post")


# Models that share weights, each mapped to the norm modules it had when sharing began.
_Group = weakref.WeakKeyDictionary[nn.Module, list[nn.Module | None]]
# For each model: its group, and the weight entries that were sampled when sharing began.
_groups = weakref.WeakKeyDictionary[nn.Module, tuple[_Group, list[Tensor]]]()


def share_weights(source: nn.Module, model: nn.Module) -> None:
    """Record that two models share weights, with their norm modules and a few weight entries."""
    group = _groups[source][0] if source in _groups else _Group()
    for member in (source, model):
        if member not in group:
            group[member] = list(_norms(member))
            _groups[member] = group, _sample(member)


def parted_reasons(model: nn.Module) -> list[str]:
    """Return an error message if another model's norms were folded into the weights of `model`."""
    if model not in _groups:
        return []
    group, before = _groups[model]
    others = [(member, norms) for member, norms in list(group.items()) if member is not model]
    folded = any(
        norm is not old_norm
        for member, old_norms in others
        for norm, old_norm in zip(_norms(member), old_norms, strict=True)
    )
    if not folded or _alike(_sample(model), before):
        return []
    return [
        "another model shares its weights, and the norms of that model were folded into them "
        "(fold_ln, by process_weights_ or load_and_process_state_dict). This model still applies "
        "its norms, so their gains act twice; convert or expose the processed model again, or "
        "pass copy_weights=True the first time"
    ]


def sharing_reasons(model: nn.Module) -> list[str]:
    """Return an error message if folding the norms of `model` would change another model."""
    if model not in _groups or all(member is model for member in _groups[model][0]):
        return []
    return [
        "another model shares its weights, and folding the norms of one model would change the "
        "logits of the other; make one of the two with copy_weights=True, or pass fold_ln=False"
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
        new.shape == old.shape
        and torch.allclose(new.cpu().double(), old.cpu().double(), rtol=_CLOSE, atol=0.0)
        for new, old in zip(now, before, strict=True)
    )
