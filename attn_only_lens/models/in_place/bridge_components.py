"""Check that the transformers model inside a bridge still uses the bridge's components.

A TransformerBridge replaces modules of the model that it wraps by its own components: for example,
`block.mlp.out` replaces `layer.mlp.down_proj`. If a user later replaces a component, for example by
an adapter, the new module reads activations before hooks edit them, and the bridge's weights do not
include the new module's effect. (In joint attention, where q, k and v share one weight, the wrapped
model keeps its own module.) `known_mlps` and `require_bridge_weights` check the modules inside a
component.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.arguments import with_article
from attn_only_lens.engine.model_checks import has_user_forward_hooks

_WRAPPED = "_original_component"


def component_reasons(model: Any) -> list[str]:
    """Return error messages for bridge components that the wrapped model no longer uses."""
    blocks = set(model._modules["blocks"])
    return [
        f"{name}: got {with_article(_kind(placed))} as {path} of the model that the bridge wraps; "
        "expected this component of the bridge: put it back, or build the bridge again from a "
        "model without adapters (call merge_and_unload() of peft before you build a bridge)"
        for name, component, owner, path in _components(model)
        if (placed := _module_at(owner, path)) is not None
        and placed is not component
        and (placed is not component._modules.get(_WRAPPED) or component in blocks)
    ]


def unseen_edit_reasons(model: Any, point: HookPoint) -> list[str]:
    """Return error messages for torch hooks that would miss edits at the hook point `point`."""
    return [
        f"{name} has a hook, attached by torch's register_forward_hook or "
        "register_forward_pre_hook, which receives the component's input before the "
        "edit; remove the hook (handle.remove()), or attach it to "
        f"{name}.original_component, whose input is edited"
        for name, component, _, _ in _components(model)
        if any(module is point for module in component._modules.values())
        and has_user_forward_hooks(component)
    ]


def _components(model: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield each bridge component's name and module, its parent, and its path in the parent."""
    for name, module in model._modules.items():
        if name == "blocks":
            for layer, block in enumerate(module):
                yield from _descend(f"blocks.{layer}", block, model.original_model)
        elif name != "original_model":
            yield from _descend(name, module, model.original_model)


def _descend(name: str, module: Any, owner: Any) -> Iterator[tuple[str, Any, Any, str]]:
    path = getattr(module, "name", None)
    if isinstance(module, HookPoint) or _WRAPPED not in module._modules:
        return
    if path:
        yield name, module, owner, path
    for child_name, child in module._modules.items():
        if child is not None and child_name != _WRAPPED:
            yield from _descend(f"{name}.{child_name}", child, module._modules[_WRAPPED])


def _module_at(owner: Any, path: str) -> nn.Module | None:
    module: nn.Module | None = owner
    for step in path.split("."):
        module = None if module is None else module._modules.get(step)
    return module


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
