"""Copy the model whose neuron-heads are to be exposed: TransformerBridge or HookedTransformer.

A bridge is a graph of modules of two trees, its own and the wrapped model's, which share parts.
`deepcopy` keeps that graph whole if its memo holds the counterpart of every tensor beforehand, so
that parts, ties and views come out as they were. Counterparts are aliases, or views of storages
copied once each: joint attention has q, k and v as views of one weight, and copying tensor by
tensor would separate them.

`deepcopy` cannot see into closures. TransformerBridge attaches some to its own modules, to capture
what enters a norm or an MLP, each bound to its block: a copy of them would write into the original.
They are taken off the copy, whose blocks attach their own as they run. Those by which
transformer-lens 4 shows BERT's MLPs are made again, bound to the copy. Those of transformers, which
collect outputs on request, are bound to no module. Anybody else's closures could be bound to
anything, so a bridge with such hooks is refused (`engine/attached_hooks.py` tells them apart).
"""

import copy
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.engine.attached_hooks import (
    find_hooks,
    hook_reasons,
    is_placeholder,
    modules_of,
)
from attn_only_lens.tl import HookedTransformer


def reasons_against_copying(model: Any) -> list[str]:
    """List why a model cannot be copied; empty if it can. Changes nothing."""
    if type(model) not in (TransformerBridge, HookedTransformer):
        return [
            f"it is a {type(model).__qualname__}; expected a TransformerBridge or a "
            "HookedTransformer. Neuron-heads that are exposed in place have to be undone first: "
            "undo()"
        ]
    reasons = hook_reasons(model)
    if own := find_hooks(model).own:
        reasons.append(
            f"TransformerLens has hooks of its own on it ({own[0]}), and a copy's would act on the "
            "original; use the model itself: "
            "attn_only_lens.expose_neuron_heads(model)"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        reasons.append("its weights are inference tensors; build it outside torch.inference_mode()")
    return reasons


def copy_model(model: Any, *, copy_weights: bool) -> Any:
    """Copy a model against which `reasons_against_copying` finds nothing."""
    shared = [getattr(model, name, None) for name in ("tokenizer", "processor", "dataset")]
    memo: dict[int, Any] = {id(each): each for each in shared}
    storages: dict[int, torch.UntypedStorage] = {}
    for _, module in modules_of(model):
        for held in (module._parameters, module._buffers, vars(module)):
            for tensor in held.values():
                if not isinstance(tensor, Tensor) or id(tensor) in memo:
                    continue
                twin = _same_view_of_a_copy(tensor, storages) if copy_weights else tensor.detach()
                if isinstance(tensor, nn.Parameter):
                    twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = twin
    copied = copy.deepcopy(model, memo)
    if not isinstance(model, TransformerBridge):
        return copied
    for block in getattr(copied, "blocks", ()):
        block._teardown_capture_hooks()
    for module in [each for each in memo.values() if isinstance(each, nn.Module)]:
        # Joint attention shares it with its copies, bound to an adapter that knows every module.
        split: Any = vars(module).get("split_qkv_matrix")
        if getattr(split, "__self__", None) is model.adapter:
            vars(module)["split_qkv_matrix"] = getattr(copied.adapter, split.__name__)
        if isinstance(module, HookPoint):
            _bind_placeholders(module, memo)
    return copied


def _bind_placeholders(point: HookPoint, memo: dict[int, Any]) -> None:
    """Make each placeholder's hook on a copied hook point again, bound to the copies in `memo`."""
    for handle in [each for each in point.fwd_hooks if is_placeholder(each)]:
        handle.hook.remove()
        point.fwd_hooks.remove(handle)
        hook: Any = handle.user_hook
        bound = [each.cell_contents for each in hook.__closure__]
        cells = tuple(CellType(memo.get(id(each), each)) for each in bound)
        twin: Any = FunctionType(hook.__code__, hook.__globals__, hook.__name__, None, cells)
        point.add_hook(twin, is_permanent=True)


def _same_view_of_a_copy(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    whole = tensor.untyped_storage()
    if whole._cdata not in storages:
        storages[whole._cdata] = whole.clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(
        storages[whole._cdata], tensor.storage_offset(), tensor.shape, tensor.stride()
    )
