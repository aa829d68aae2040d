"""A second TransformerBridge around the parameters of a first.

A bridge is a graph of modules of two trees, its own and the wrapped model's, which share parts.
`deepcopy` with its memo filled in beforehand takes that graph apart nowhere: every tensor in it is
given its counterpart first, so that parts, ties and views come out as they were. Counterparts are
aliases, or views of storages copied once each: joint attention has q, k and v as views of one
weight, and copying tensor by tensor would part them.

What `deepcopy` cannot see into are closures. TransformerBridge attaches some to its own modules, to
capture what enters a norm or an MLP, each bound to its block: left in a copy they would write into
the original. They are taken off the copy, whose blocks attach their own as they run. Those of
transformers, which collect outputs for whoever asks, are bound to no module. Closures of anybody
else could be bound to anything: a bridge with such hooks is refused.
"""

import copy as _copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

__all__ = ["copied_bridge", "foreign_hooks", "reasons_against_copying", "tensors_of"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def reasons_against_copying(model: object) -> list[str]:
    """Why a bridge cannot be copied; empty where it can. Changes nothing."""
    if type(model) is not TransformerBridge:
        return [
            f"it is a {type(model).__qualname__}; expected a TransformerBridge. Neuron-heads that "
            "are exposed in place have to be undone first: undo()"
        ]
    reasons = []
    hooked = foreign_hooks(model)
    if hooked:
        reasons.append(
            f"hooks are attached to it ({', '.join(hooked[:3])}{', …' if len(hooked) > 3 else ''}) "
            "and would not come along; remove them first: "
            "model.reset_hooks(including_permanent=True); or, where they are of TransformerLens "
            "(BERT in 4.3), use the model itself: attn_only_lens.expose_neuron_heads(model)"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        reasons.append("its weights are inference tensors; build it outside torch.inference_mode()")
    return reasons


def foreign_hooks(model: Any) -> list[str]:
    """The modules of a bridge with hooks on them that are not its own, nor of transformers."""
    own = {
        (id(handle.hooks_dict_ref()), handle.id)
        for block in getattr(model, "blocks", ())
        for handle in getattr(block, "_capture_hook_handles", ())
    }
    found = {
        id(module): name or "the model itself"
        for name, module in _modules(model)
        for kind in _HOOKS
        for key, hook in getattr(module, kind).items()
        if (id(getattr(module, kind)), key) not in own and not _of_transformers(hook)
    }
    return list(found.values())


def _of_transformers(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def copied_bridge(model: TransformerBridge, *, copy_weights: bool) -> TransformerBridge:
    """The copy of a bridge that nothing speaks against copying."""
    memo: dict[int, Any] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_of(model):
        alias = _counterpart(tensor, storages) if copy_weights else tensor.detach()
        memo[id(tensor)] = (
            nn.Parameter(alias, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else alias
        )
    for shared in (model.tokenizer, getattr(model, "processor", None)):
        memo[id(shared)] = shared
    twin: TransformerBridge = _copy.deepcopy(model, memo)
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
    for _, module in _modules(model):
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the bridge and of the model that it wraps, which it does not own."""
    yield from model.named_modules()
    yield from model.original_model.named_modules(prefix="original_model")


def _counterpart(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """The same view of a copy of what it views."""
    whole = tensor.untyped_storage()
    if whole._cdata not in storages:
        storages[whole._cdata] = whole.clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(
        storages[whole._cdata], tensor.storage_offset(), tensor.shape, tensor.stride()
    )
