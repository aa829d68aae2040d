"""Copy a model that its neuron-heads are exposed in: a TransformerBridge or a HookedTransformer.

A bridge is a graph of modules of two trees, its own and the wrapped model's, which share parts.
`deepcopy` with its memo filled in beforehand takes that graph apart nowhere: every tensor in it is
given its counterpart first, so that parts, ties and views come out as they were. Counterparts are
aliases, or views of storages copied once each: joint attention has q, k and v as views of one
weight, and copying tensor by tensor would part them.

What `deepcopy` cannot see into are closures. TransformerBridge attaches some to its own modules, to
capture what enters a norm or an MLP, each bound to its block: left in a copy they would write into
the original. They are taken off the copy, whose blocks attach their own as they run. Those of
transformers, which collect outputs for whoever asks, are bound to no module. Closures of anybody
else could be bound to anything: a bridge with such hooks is refused (`hooks.py` tells them apart).
"""

import copy as _copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.runs.attached_hooks import attached, hook_reasons, modules_of
from attn_only_lens.tl import HookedTransformer

__all__ = ["copy_model", "reasons_against_copying", "tensors_of"]


def reasons_against_copying(model: Any) -> list[str]:
    """Return why a model cannot be copied; nothing if it can. Changes nothing."""
    if type(model) not in (TransformerBridge, HookedTransformer):
        return [
            f"it is a {type(model).__qualname__}; expected a TransformerBridge or a "
            "HookedTransformer. Neuron-heads that are exposed in place have to be undone first: "
            "undo()"
        ]
    reasons = hook_reasons(model)
    if own := attached(model).own:
        reasons.append(
            f"TransformerLens has hooks of its own on it ({own[0]}), as on BERT in 4.3, and a "
            "copy's would act on the original; use the model itself: "
            "attn_only_lens.expose_neuron_heads(model)"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        reasons.append("its weights are inference tensors; build it outside torch.inference_mode()")
    return reasons


def copy_model(model: Any, *, copy_weights: bool) -> Any:
    """Return the copy of a model that nothing speaks against copying."""
    memo: dict[int, Any] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_of(model):
        alias = _counterpart(tensor, storages) if copy_weights else tensor.detach()
        memo[id(tensor)] = (
            nn.Parameter(alias, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else alias
        )
    for name in ("tokenizer", "processor", "dataset"):
        memo[id(getattr(model, name, None))] = getattr(model, name, None)
    twin = _copy.deepcopy(model, memo)
    if not isinstance(model, TransformerBridge):
        return twin
    for block in getattr(twin, "blocks", ()):
        block._teardown_capture_hooks()
    for module in [each for each in memo.values() if isinstance(each, nn.Module)]:
        # Joint attention shares it with its copies, bound to an adapter that knows every module.
        split: Any = vars(module).get("split_qkv_matrix")
        if getattr(split, "__self__", None) is model.adapter:
            vars(module)["split_qkv_matrix"] = getattr(twin.adapter, split.__name__)
    return twin


def tensors_of(model: Any) -> Iterator[Tensor]:
    """Every tensor that the modules of a bridge hold, as parameter, buffer or otherwise."""
    for _, module in modules_of(model):
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _counterpart(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """The same view of a copy of what it views."""
    whole = tensor.untyped_storage()
    if whole._cdata not in storages:
        storages[whole._cdata] = whole.clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(
        storages[whole._cdata], tensor.storage_offset(), tensor.shape, tensor.stride()
    )
