"""Models that share weights: detect that the norms of one were folded into the weights of all.

`convert` and `expose_neuron_heads(copy=True)` share the weights of their source, so training
changes all of these models in the same way. TransformerLens' weight processing preserves the
function of all of them except for one step: fold_ln multiplies the gains of the norms into the next
weights, and replaces the norms of one model only. The other models keep their norms, and the gains
act twice. (Bridges are not affected: their weights are not processed in place.)

So a model is refused if another model of its group has new norms, and its own weights differ from a
sample that was taken when it joined the group. The function of a model is unchanged if only the
norms were replaced, or if its weights were moved or cast before folding and so are no longer
shared. The weights are compared only if norms are new, so a forward pass costs one comparison for
each norm.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_SAMPLED = 64  # entries of each parameter
_CLOSE = 1e-2  # for entries that were cast to half precision and back
_NORMS = ("ln1", "ln2", "ln1_post", "ln2_post")


# The models that share weights, each with its norms when it joined.
_Group = weakref.WeakKeyDictionary[nn.Module, list[nn.Module | None]]
# The group of each model, and a sample of its weights when it joined.
_groups = weakref.WeakKeyDictionary[nn.Module, tuple[_Group, list[Tensor]]]()


def share_weights(source: nn.Module, model: nn.Module) -> None:
    """Remember that two models share their weights."""
    group = _groups[source][0] if source in _groups else _Group()
    for member in (source, model):
        if member not in group:
            group[member] = list(_norms(member))
            _groups[member] = group, _sample(member)


def parted_reasons(model: nn.Module) -> list[str]:
    """Return why a model no longer computes the same as before; empty if it does."""
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
    """Return why the norms of a model must not be folded; empty if it shares no weights."""
    if model not in _groups or all(member is model for member in _groups[model][0]):
        return []
    return [
        "another model shares its weights, and would compute different logits afterwards; "
        "make one of the two with copy_weights=True, or pass fold_ln=False"
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
