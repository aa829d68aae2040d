"""Check that the model which a bridge wraps runs the parts of the bridge, and nothing around them.

A bridge replaces modules of the wrapped model by parts of its own: `block.mlp.out` of the bridge is
in the place of the model's `layer.mlp.down_proj`. A user may put another module in that place
later, such as an adapter around the part. This module runs outside the part's hook points: it reads
activations before they are edited, and no weight of the bridge shows it. (Joint attention leaves
the model's own module in its place; that is allowed.)

An adapter of peft on a bridge replaces the module inside a part. It runs between the hook points,
and other checks look at its weights: `known_mlps` at W_out, `require_bridge_weights` at all
matrices.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.engine.attached_hooks import has_user_forward_hooks

_WRAPPED = "_original_component"


def part_reasons(model: Any) -> list[str]:
    """Return the reasons why a bridge's parts are not what its wrapped model runs."""
    blocks = set(model._modules["blocks"])
    return [
        f"{name}: got a {_kind(placed)} as {path} of the model that the bridge wraps; expected "
        "this part of the bridge: put the part back, or build the bridge again from a model "
        "without adapters (call peft's merge_and_unload() before, as it takes a bridge apart)"
        for name, part, owner, path in _parts(model)
        if (placed := _module_at(owner, path)) is not None
        and placed is not part
        and (placed is not part._modules.get(_WRAPPED) or part in blocks)
    ]


def unseen_edit_reasons(model: Any, point: HookPoint) -> list[str]:
    """Return the reasons why an edit of a part's input would miss part of what reads that input.

    A torch hook on a part receives the part's input as it was before the edit. Nothing shows
    whether the hook reads this input, or saves it for another hook.

    Args:
        model: an exposed bridge.
        point: the hook point at the entrance of the part.
    """
    return [
        f"{name} has a hook, attached by torch's register_forward_hook or "
        "register_forward_pre_hook, that receives the input of this part as it was before the "
        "edit; remove it (handle.remove()), or attach it to "
        f"{name}.original_component, whose input is edited"
        for name, part, _, _ in _parts(model)
        if any(module is point for module in part._modules.values())
        and has_user_forward_hooks(part)
    ]


def _parts(model: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the parts of a bridge: name, module, the module that runs it, and its path in that."""
    for name, part in model._modules.items():
        if name == "blocks":
            for layer, block in enumerate(part):
                yield from _with_parts(f"blocks.{layer}", block, model.original_model)
        elif name != "original_model":
            yield from _with_parts(name, part, model.original_model)


def _with_parts(name: str, part: Any, owner: Any) -> Iterator[tuple[str, Any, Any, str]]:
    path = getattr(part, "name", None)
    if isinstance(part, HookPoint) or _WRAPPED not in part._modules:
        return
    if path:
        yield name, part, owner, path
    for child_name, child in part._modules.items():
        if child is not None and child_name != _WRAPPED:
            yield from _with_parts(f"{name}.{child_name}", child, part._modules[_WRAPPED])


def _module_at(owner: Any, path: str) -> nn.Module | None:
    module: nn.Module | None = owner
    for step in path.split("."):
        module = None if module is None else module._modules.get(step)
    return module


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
