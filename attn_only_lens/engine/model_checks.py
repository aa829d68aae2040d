"""Check a model for user-added hooks, active dropout and quantized weights before the model runs.

Libraries attach hooks, too. Hooks from transformers collect outputs. TransformerBridge's hooks read
inputs and, in version 4, expose activations of components that are not modules, such as BERT's
MLPs. Library hooks do not change what a model computes, but any other hook may. A library hook is
recognised by the package that defines the hook.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import nn
from torch.nn.modules import module as torch_module
from transformer_lens.hook_points import HookPoint

from attn_only_lens.heads import has_neuron_heads, host_of

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = ("accelerate", "transformers")
_HARMLESS: list[Callable[..., Any]] = []  # hooks of this package that edit nothing
_PLACEHOLDERS = "transformer_lens.model_bridge.component_setup"
_EVERYWHERE = "every module, by torch.nn.modules.module.register_module_forward_hook or similar"
_WITH_WEIGHTS = re.compile(r"(blocks\.\d+\.(attn|mlp)|(pos_|un)?embed)\b")
_NOISE = "jitter_noise", "router_jitter_noise", "input_jitter_noise"  # in mixtures of experts
_NAMED = 3
_Modules: TypeAlias = list[tuple[str, nn.Module]]
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def edits_nothing(hook: _Hook) -> _Hook:
    """Declare that a hook of this package changes no activation, so that models may have it."""
    _HARMLESS.append(hook)
    return hook


@dataclass(frozen=True)
class AttachedHooks:
    """The names of a model's modules that have hooks, grouped by who attached the hooks.

    Attributes:
        users: modules with user-added hooks.
        placeholders: hook points where transformer-lens 4 shows a component without a module.
        internal: modules with other hooks from TransformerLens, which hold references to modules.
        on_weights: attention, MLPs and embeddings with user-added torch hooks, which may change
            what their weights compute.
        removal: instructions to remove the user-added hooks.
    """

    users: tuple[str, ...]
    placeholders: tuple[str, ...]
    internal: tuple[str, ...]
    on_weights: tuple[str, ...]
    removal: str


def find_hooks(model: Any) -> AttachedHooks:
    """Find the hooks on a HookedTransformer, or on a TransformerBridge and its wrapped model."""
    captures = _captures(model)
    users, placeholders, on_model, on_weights = (dict[str, None]() for _ in range(4))
    added: set[str] = set()  # how users added hooks
    for name, module in modules_of(model):
        if not any(map(module.__dict__.__getitem__, _KINDS)):
            continue
        lens = _lens_handles(module)
        shown = str(getattr(module, "name", None) or name) if lens else name or "the model itself"
        for hooks_id, key, hook in _torch_hooks(module):
            handle, library = lens.get((hooks_id, key)), _library(hook)
            if handle is not None and is_placeholder(handle):
                placeholders[shown] = None
            elif handle is not None:
                users[shown] = None
                added.add("permanent" if handle.is_permanent else "temporary")
            elif library == "transformer_lens":
                if (hooks_id, key) not in captures:
                    on_model[shown] = None
            elif library not in _LIBRARIES and hook not in _HARMLESS:
                users[shown] = None
                added.add("torch")
                internal = library == "attn_only_lens" or isinstance(module, HookPoint)
                if not internal and _WITH_WEIGHTS.match(name):
                    on_weights[shown] = None
    if any(
        _library(hook) not in (*_LIBRARIES, "torch")  # torch itself adds hooks, e.g. to count flops
        for kind in _KINDS
        for hook in getattr(torch_module, f"_global{kind}").values()
    ):
        users[_EVERYWHERE] = None
        added.add("torch")
    removal = _removal(added, bool(placeholders))
    return AttachedHooks(
        tuple(users), tuple(placeholders), tuple(on_model), tuple(on_weights), removal
    )


def state_of_hooks(model: Any, modules: _Modules) -> Iterator[tuple[str, int, int]]:
    """Yield a key for each hook on these modules, except hooks that a bridge attaches in a run."""
    captures = _captures(model)
    for name, module in modules:
        if not any(map(module.__dict__.__getitem__, _KINDS)):
            continue
        for hooks_id, key, _ in _torch_hooks(module):
            if (hooks_id, key) not in captures:
                yield name, hooks_id, key


def _captures(model: Any) -> set[tuple[int, int]]:
    """Return (id of hook dictionary, key) of each hook that a bridge's blocks attach in a run."""
    return {
        (id(handle.hooks_dict_ref()), handle.id)
        for block in getattr(model, "blocks", ())
        for handle in getattr(block, "_capture_hook_handles", ())
    }


def _torch_hooks(module: nn.Module) -> Iterator[tuple[int, int, Any]]:
    """Yield (id of hook dictionary, key, hook) for each torch hook on a module."""
    for kind in _KINDS:
        hooks = vars(module)[kind]
        for key, hook in hooks.items():
            yield id(hooks), key, hook


def hook_reasons(model: Any, so: str = "would be lost") -> list[str]:
    """Return [error message] if users added hooks to a model, otherwise []."""
    hooks = find_hooks(model)
    return _hook_reasons(hooks.users, so, hooks.removal)


def weight_hook_reasons(model: Any) -> list[str]:
    """Return [error message] if user-added hooks may change what weights compute, otherwise []."""
    so = "may change what its weights compute"
    return _hook_reasons(find_hooks(model).on_weights, so, _removal({"torch"}, False))


def _hook_reasons(names: tuple[str, ...], so: str, removal: str) -> list[str]:
    if not names:
        return []
    more = ", …" * (len(names) > _NAMED)
    return [
        f"hooks are attached to the model ({', '.join(names[:_NAMED])}{more}) and {so}; remove "
        f"them first: {removal}"
    ]


def reasons_not_to_run(model: Any) -> list[str]:
    """Return the reasons why two runs of this model cannot be compared ([] if there are none)."""
    if not has_neuron_heads(model):
        return []
    reasons = hook_reasons(model, "would run on batches of patched variants, or not run at all")
    return host_of(model).reasons() + reasons + mode_reasons(model)


def mode_reasons(model: Any) -> list[str]:
    """Return reasons why runs are random, cannot be differentiated or have no plain weights."""
    reasons = dict[str, None]()
    modules = modules_of(model)
    for module in (module for _, module in modules if module.training):
        # Attention of transformers has no dropout module, but passes this rate to a function.
        rate = module.p if isinstance(module, nn.Dropout) else vars(module).get("attention_dropout")
        if isinstance(rate, float) and rate > 0:
            reasons["dropout is active; call model.eval() first"] = None
        if any(vars(module).get(name) for name in _NOISE):
            reasons["noise on the inputs of routers is active; call model.eval() first"] = None
        if vars(module).get("gradient_checkpointing") is True:
            reasons["gradient checkpointing is active; call model.eval() first"] = None
    return [*reasons, *quantized_reasons(modules)]


def quantized_reasons(modules: _Modules) -> list[str]:
    """Return an error message that names the first quantized module, or [] if there is none."""
    for name, module in modules:
        if ".quantized." in f".{type(module).__module__}.":
            return [
                f"{name} is quantized, so its weights have no gradient and cannot be read; use "
                "the model as it was before quantization"
            ]
    return []


def has_user_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module has user-added torch forward hooks or forward pre-hooks."""
    return any(
        _library(hook) not in (*_LIBRARIES, "transformer_lens", "torch", "attn_only_lens")
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


def modules_of(model: Any) -> _Modules:
    """Return each module of a model once, including the modules of a model that a bridge wraps.

    A bridge has several names for a component; the shortest one is returned.
    """
    seen = {id(model)}
    modules: _Modules = [("", model)]
    wrapped = getattr(model, "original_model", None)
    if isinstance(wrapped, nn.Module) and id(wrapped) not in seen:
        seen.add(id(wrapped))
        modules.append(("original_model", wrapped))
    for name, module in modules:  # the loop continues with the modules that it appends
        for key, child in module._modules.items():  # `named_children` takes three times as long
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append((f"{name}.{key}" if name else key, child))
    return modules


@contextmanager
def evaluation_without_hooks(modules: Iterable[object]) -> Iterator[None]:
    """Context manager that puts modules in evaluation mode and turns off their hook points."""
    roots = [(root, root.training) for root in modules if isinstance(root, nn.Module)]
    modes = [(module, module.training) for root, _ in roots for module in root.modules()]
    # Restore the original dictionaries later, because hook handles refer to them.
    hooks = [
        (point, name, getattr(point, name))
        for point, _ in modes
        if isinstance(point, HookPoint)
        for name in _KINDS
    ]
    try:
        for module, _ in modes:
            module.training = False
        for point, name, _ in hooks:
            setattr(point, name, OrderedDict())
        yield
    finally:
        for root, training in roots:
            for module in root.modules():
                if isinstance(module, HookPoint):  # including hooks that were added in this context
                    module.training = training
        for module, training in modes:
            module.training = training
        for point, name, registered in hooks:
            setattr(point, name, registered)


@contextmanager
def without_user_hooks(model: nn.Module) -> Iterator[None]:
    """Context manager that removes torch hooks, except those of libraries that a model may need."""
    # Change the dictionaries in place: hook handles refer to them, and so do those that
    # TransformerLens adds in this context.
    registered = [vars(module)[kind] for module in model.modules() for kind in _KINDS]
    before = [(hooks, {**hooks}) for hooks in registered if hooks]
    kept = (*_LIBRARIES, "transformer_lens", "torch")
    try:
        for hooks, all_hooks in before:
            for key, hook in all_hooks.items():
                if _library(hook) not in kept:
                    del hooks[key]
        yield
    finally:
        for hooks, all_hooks in before:
            now = {**hooks}
            back = {k: x for k, x in all_hooks.items() if k in now or _library(x) not in kept}
            hooks.clear()
            hooks.update(back | now)


def is_placeholder(handle: Any) -> bool:
    """Return whether transformer-lens 4 added this hook for a component that is not a module."""
    hook = getattr(handle, "user_hook", None)
    return handle.is_permanent and getattr(hook, "__module__", None) == _PLACEHOLDERS


def _lens_handles(module: nn.Module) -> dict[tuple[int, int], Any]:
    """Return TransformerLens' handles for the hooks that were added to a hook point."""
    if not isinstance(module, HookPoint):
        return {}
    return {
        (id(handle.hook.hooks_dict_ref()), handle.hook.id): handle
        for handle in [*module.fwd_hooks, *module.bwd_hooks]
    }


def _library(hook: Any) -> str:
    """Return the name of the package that contains a hook's code."""
    return str(getattr(hook, "__module__", "")).split(".")[0]


def _removal(added: set[str], placeholders: bool) -> str:
    ways = []
    if "permanent" in added and placeholders:
        ways.append(
            "build the bridge again (reset_hooks(including_permanent=True) would also remove some "
            "of TransformerLens' own hooks)"
        )
    elif "permanent" in added:
        ways.append("model.reset_hooks(including_permanent=True)")
    elif "temporary" in added:
        ways.append("model.reset_hooks()")
    if "torch" in added:
        ways.append("handle.remove() on the handles that register_forward_hook etc. returned")
    return "; and ".join(ways)
