"""Copy a TransformerBridge or HookedTransformer before its neurons are exposed as heads.

The `memo` argument of `deepcopy` maps every tensor to its counterpart in the copy, so that tied
tensors stay tied and views stay views. The counterpart is an alias of the tensor or, if weights are
copied, a view of the copied storage. (In joint attention, q, k and v are views of one weight.)
`deepcopy` cannot copy closures. The hooks with which TransformerLens captures the inputs of norms
and MLPs are therefore removed from the copy, whose blocks attach new hooks when they run. In
transformer-lens 4, placeholder hooks stand for the missing modules of BERT's MLPs; the copy gets
new placeholder hooks. Bridges with other closures cannot be copied.
"""

import copy
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.arguments import a_type
from attn_only_lens.engine.model_checks import find_hooks, hook_reasons, is_placeholder, modules_of
from attn_only_lens.heads.host import exposed_reasons
from attn_only_lens.tl import HookedTransformer


def reasons_against_copying(model: Any) -> list[str]:
    """Return error messages if a model cannot be copied."""
    if type(model) not in (TransformerBridge, HookedTransformer):
        expected = "expected a TransformerBridge or a HookedTransformer"
        return exposed_reasons(model) or [f"it is {a_type(model)}; {expected}"]
    reasons = hook_reasons(model)
    if internal := find_hooks(model).internal:
        reasons.append(
            f"TransformerLens has attached hooks ({internal[0]}) whose copies would act on the "
            "original model; expose that model itself: attn_only_lens.expose_neuron_heads(model)"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        reasons.append("its weights are inference tensors; build it outside torch.inference_mode()")
    return reasons


def copy_model(model: Any, *, copy_weights: bool) -> Any:
    """Copy a model for which `reasons_against_copying` returns no reasons."""
    shared = [getattr(model, name, None) for name in ("tokenizer", "processor", "dataset")]
    memo: dict[int, Any] = {id(attribute): attribute for attribute in shared}
    storages: dict[int, torch.UntypedStorage] = {}
    for _, module in modules_of(model):
        for attributes in (module._parameters, module._buffers, vars(module)):
            for tensor in attributes.values():
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
    for module in [copy_ for copy_ in memo.values() if isinstance(copy_, nn.Module)]:
        # In joint attention, split_qkv_matrix is bound to the original model's adapter.
        split: Any = vars(module).get("split_qkv_matrix")
        if getattr(split, "__self__", None) is model.adapter:
            vars(module)["split_qkv_matrix"] = getattr(copied.adapter, split.__name__)
        if isinstance(module, HookPoint):
            _bind_placeholders(module, memo)
    return copied


def _bind_placeholders(point: HookPoint, memo: dict[int, Any]) -> None:
    """Make the placeholder hooks of a copied hook point act on the copied modules."""
    for handle in list(filter(is_placeholder, point.fwd_hooks)):
        handle.hook.remove()
        point.fwd_hooks.remove(handle)
        hook: Any = handle.user_hook
        bound = [cell.cell_contents for cell in hook.__closure__]
        cells = tuple(CellType(memo.get(id(value), value)) for value in bound)
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
