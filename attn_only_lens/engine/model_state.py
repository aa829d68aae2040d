"""Describe the state of a model: everything that its forward pass reads.

    saved_state(model)   what a checkpoint stores: a digest of the state, equal in other processes,
                         folders and devices, and which modules are in training mode
    snapshot(model)      a value that changes whenever the state changes, in this process

Both walk through the same description. It contains the parameters, the buffers, every attribute of
every module (also in lists, dictionaries, configurations and other objects), and the code of the
forward pass. The code is every function that the forward pass mentions, by a global name or as a
method, and the functions that these mention; code of Python, torch and numpy is known by its name.

For a fingerprint, tensors are described by their entries and functions by their bytecode. For a
snapshot, tensors are described by a weak reference and by torch's count of changes. Changes through
`.data` are not counted, so a snapshot also contains the entries of vectors. A change through
`.data` in a matrix changes a fingerprint but no snapshot.

Dictionaries and sets have the same state in any order. `_NOT_STATE` lists the attributes of
TransformerLens, transformers and this package that are left out. The environment is left out, too.
"""

import argparse
import functools
import hashlib
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdRef
from transformer_lens.hook_points import HookPoint
from transformers import GenerationConfig, PreTrainedTokenizerBase

from attn_only_lens.engine.model_checks import modules_of, state_of_hooks
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import PassState

_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_NOT_STATE = frozenset(
    (
        # where the model is and where it comes from
        *("device", "n_devices", "hf_device_map", "name_or_path", "_name_or_path", "model_name"),
        *("_commit_hash", "transformers_version", "architectures", "tokenizer_name"),
        # how weights are drawn, saved and distributed
        *("seed", "init_weights", "init_mode", "initializer_range", "_is_hf_initialized"),
        *("_no_split_modules", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_tp_size"),
        # which hook points run; `state_of_hooks` describes hooks
        *("use_attn_in", "use_attn_result", "use_hook_mlp_in", "use_split_qkv_input"),
        *("fwd_hooks", "bwd_hooks", "ctx", "backward_scale", "hook_dict", "mod_dict"),
        *("_use_hook_mlp_in", "results"),
        *("_hook_registry", "_hook_registry_initialized", "_hook_alias_registry", "_hook_cache"),
        *("_property_alias_registry", "_block_alias_cache", "_capture_hook_handles"),
        *("_capture_hooks_wired", "is_caching", "context_level", "_fired_hook_out"),
        # what a forward pass leaves behind
        *("_captured_pre_ln_residual", "_attn_scores", "_n_params_total", "max_seq_len_cached"),
        *(
            "_output_capturing_hooks_installed",
            "_current_batch_size",
            "_pattern",
            "_conversion_state",
            "_ALIAS_GENERATION",
        ),
        *("_ATTENTION_BRIDGE_REGISTRY", "_torchdynamo_wrapper_id"),
        *("_capture_hf_cache", "_derived_position_ids_ok"),
        # how a model generates and trains; active checkpointing is refused (`model_checks.py`)
        *("use_cache", "gradient_checkpointing", "_gradient_checkpointing_func"),
        *("_require_grads_hook", "_require_grads_hooks"),
        # texts: models read tokens
        *("tokenizer", "_tokenizer", "processor", "dataset", "default_prepend_bos"),
    )
)
"""Attributes that do not affect what a model computes from tokens, in the classes of `_MAKERS`."""
_PRIVATE = frozenset(name for name in _NOT_STATE if name.startswith("_"))
"""Names that libraries also give to attributes of other objects, and to globals."""
_NO_STATE_TYPES = (
    *(PassState, RemovableHandle),  # exist only during a forward pass
    *(torch.device, GenerationConfig, PreTrainedTokenizerBase),
)
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, range, slice, type(...)))
_ATOMS |= {torch.dtype, torch.layout, torch.memory_format}
_LIBRARIES = frozenset(
    (
        *(sys.stdlib_module_names - {"__main__"}),
        *(
            "torch",
            "numpy",
            "einops",
            "jaxtyping",
            "typing_extensions",
            "packaging",
        ),
        *("accelerate", "safetensors", "huggingface_hub", "tqdm", "psutil"),
    )
)
"""Packages whose objects are described by their class."""
_OWN = __name__.split(".")[0]
_NOT_FOLLOWED = _LIBRARIES | {_OWN}
"""Packages whose functions are described without what they mention."""
_NAMESPACES = types.SimpleNamespace, argparse.Namespace
_MAKERS = frozenset((_OWN, "transformer_lens", "transformers"))
_CACHED: Any = functools._lru_cache_wrapper
_CODE = types.FunctionType, types.BuiltinFunctionType, _CACHED
_VALUES = int, float, complex, str, bytes, Fraction, Decimal
_ENTRIES = ("forward", "__call__", "__getattr__", "__getattribute__")


_Kept = tuple[tuple[object, ...], dict[str, Any]]
_UNCHANGED: "weakref.WeakKeyDictionary[nn.Module, _Kept]" = weakref.WeakKeyDictionary()
_T = TypeVar("_T")


def saved_state(model: Any) -> dict[str, Any]:
    """Return the settings that a checkpoint stores for its model."""
    return {"model": fingerprint(model), "training": _modes(model)}


def fingerprint(model: Any) -> str:
    """Return a SHA-256 digest of a model's state, without the mode of its modules.

    Functions that set the mode, such as `HookedTransformer.generate`, do not change the digest, so
    that an error names the mode if it differs.
    """
    walk = _Walk(_entries, _bytecode, _name_of)
    walk.model(model, modules_of(model))
    digest = hashlib.sha256()
    for leaf in walk.leaves:
        digest.update(f"{leaf!r}\n".encode())
    return digest.hexdigest()


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Context manager in which a model is described and checked once, for analyses of many steps.

    Raises:
        InputError: at the end, if the model has changed; analyses do not change it.
    """
    if model in _UNCHANGED:
        yield
        return
    before = snapshot(model)
    _UNCHANGED[model] = before, {}
    try:
        yield
    finally:
        del _UNCHANGED[model]
    if snapshot(model) != before:
        reason = "the model changed during the analysis, by the metric or in another thread"
        raise InputError([f"{reason}; expected a model that stays as it is"], "no result is known")


def snapshot(model: Any) -> tuple[object, ...]:
    """Return a description of a model's state that equals a later one if nothing has changed."""
    known = _UNCHANGED.get(model)
    return _snapshot(model) if known is None else known[0]


def once(model: Any, name: str, compute: Callable[[], _T]) -> _T:
    """Return what a function computes of a model; within `unchanged`, call the function once."""
    known = _UNCHANGED.get(model)
    if known is None:
        return compute()
    if name not in known[1]:
        known[1][name] = compute()
    return cast(_T, known[1][name])


def _snapshot(model: Any) -> tuple[object, ...]:
    vectors = list[Tensor]()

    def of_tensor(tensor: Tensor) -> object:
        if tensor.ndim <= 1:
            vectors.append(tensor)
        # Inference-mode tensors do not count changes, so they are always treated as changed.
        version = object() if tensor.is_inference() else tensor._version
        return _Reference(tensor), version, tensor.dtype, tensor.device

    walk = _Walk(of_tensor, lambda code: code, weakref.ref)
    modules = modules_of(model)
    walk.leaves += (*state_of_hooks(model, modules), *(module.training for _, module in modules))
    walk.model(model, modules)
    return (*walk.leaves, _contents(vectors))


class _Walk:
    """A walk through everything that a forward pass reads; `leaves` lists what it contains."""

    def __init__(
        self,
        of_tensor: Callable[[Tensor], object],
        of_code: Callable[[types.CodeType], object],
        of_class: Callable[[type], object],
    ) -> None:
        self._of_tensor, self._of_code, self._of_class = of_tensor, of_code, of_class
        self.leaves: list[object] = []
        # Objects are described once, by id; keeping them keeps their ids unique.
        self._seen: dict[int, tuple[int, object]] = {}
        self._classes: dict[type, object] = {}
        self._members: set[tuple[type, str]] = set()

    def model(self, model: Any, modules: list[tuple[str, nn.Module]]) -> None:
        """Describe a model, its modules and the code of their forward passes."""
        device = next(model.parameters()).device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self.leaves.append(torch.get_autocast_dtype(device))
        for _, module in modules:
            self._seen[id(module)] = len(self._seen), module
        for path, module in modules:
            self.leaves.append(path)
            self._module(module)

    def add(self, value: Any) -> None:
        """Describe any value; describe an object only once."""
        kind = type(value)
        if kind in _ATOMS:
            self.leaves.append(value)
        elif (earlier := self._seen.get(id(value))) is not None:
            self.leaves.append(earlier[0])
        else:
            self._seen[id(value)] = len(self._seen), value
            _method_for(kind)(self, value)  # type: ignore[arg-type]  # classes are hashable

    def _module(self, module: nn.Module) -> None:
        attributes, kind = vars(module), type(module)
        self._class(kind)
        if kind is HookPoint:  # more than half of all modules
            self.add(attributes.get("hook_conversion"))
            return
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            if tensors:
                self._values(tensors, _in_order(tuple(tensors)))
        left_out = _left_out(kind)  # type: ignore[arg-type]  # classes are hashable
        self._values(attributes, _of_modules(tuple(attributes), left_out))

    def _other_module(self, module: nn.Module) -> None:
        """Describe a module that is not registered, so that `train` does not set its mode."""
        self.leaves.append(module.training)
        self._module(module)

    def _values(self, values: Mapping[Any, Any], names: tuple[Any, ...]) -> None:
        self.leaves.append(names)
        for name in names:
            value = values[name]
            if type(value) in _ATOMS:  # most values; `add` does the same
                self.leaves.append(value)
            else:
                self.add(value)

    def _mapping(self, value: Mapping[Any, Any], left_out: frozenset[str] = _PRIVATE) -> None:
        # Some dictionaries of classes, such as those of activations, make a new object for each
        # access; `dict.items` returns what they hold.
        if type(value) is not dict:
            value = dict(dict.items(value) if isinstance(value, dict) else value.items())
        self._values(value, _in_order(tuple(value), left_out))

    def _collection(self, value: Any) -> None:
        self.leaves += (type(value).__name__, len(value))
        for part in sorted(value, key=_order) if isinstance(value, Set) else value:
            self.add(part)

    def _tensor(self, value: Tensor) -> None:
        self.leaves.append(self._of_tensor(value))
        if names := _in_order(tuple(vars(value)), _PRIVATE):  # such as quantised weights
            self._values(vars(value), names)

    def _array(self, value: np.ndarray | np.generic) -> None:
        self.leaves.append((str(value.dtype), value.shape, value.tobytes()))

    def _method(self, value: types.MethodType) -> None:
        self.add(value.__func__)
        self.add(value.__self__)

    def _partial(self, value: functools.partial[Any]) -> None:
        for part in (value.func, value.args, value.keywords):
            self.add(part)

    def _value(self, value: Any) -> None:
        """Describe a number or text of a subclass, whose own methods may hide its value."""
        base = next(base for base in _VALUES if isinstance(value, base))
        self.leaves.append(base.__repr__(value))
        self._object(value)

    def _object(self, value: Any) -> None:
        """Describe an object by its class and its attributes."""
        kind = type(value)
        self._class(kind)
        if isinstance(value, types.BuiltinFunctionType | types.ModuleType):
            self.leaves.append(value.__name__)
        elif isinstance(value, torch.ScriptObject):  # packed weights
            self.add(value.__getstate__())
        elif kind in _NAMESPACES or _library(kind.__module__) not in _LIBRARIES:
            slots = [x for base in kind.__mro__ for x in getattr(base, "__slots__", ())]
            values = {name: getattr(value, name, None) for name in slots if name != "__weakref__"}
            left_out = _left_out(kind)  # type: ignore[arg-type]
            self._mapping(values | getattr(value, "__dict__", {}), left_out)

    def _class(self, kind: type, names: tuple[str, ...] = _ENTRIES) -> None:
        """Describe a class, and those of its members that have one of the given names."""
        if (known := self._classes.get(kind)) is None:
            known = self._classes[kind] = self._of_class(kind)
        elif names is _ENTRIES:
            names = ()
        self.leaves.append(known)
        for name in names:
            if (kind, name) not in self._members:
                self._members.add((kind, name))
                self._member(kind, name)

    def _member(self, kind: type, name: str) -> None:
        for members in _members(kind):
            if (member := members.get(name)) is None:
                continue
            if isinstance(member, property | functools.cached_property):
                member = member.fget if isinstance(member, property) else member.func
            elif isinstance(member, staticmethod | classmethod):
                member = member.__func__
            if isinstance(member, _CACHED):
                member = member.__wrapped__
            if isinstance(member, types.FunctionType):
                self.leaves.append(name)
                self._of_owner(member, kind)
            elif type(member) in _ATOMS:
                self.leaves += (name, member)

    def _of_owner(self, function: types.FunctionType, owner: type) -> None:
        """Describe a method, and the members of its class that it mentions."""
        self.add(function)
        if _library(function.__module__ or "") not in _NOT_FOLLOWED:
            for name in _mentioned(function.__code__):
                if (owner, name) not in self._members:
                    self._members.add((owner, name))
                    self._member(owner, name)

    def _function(self, function: types.FunctionType) -> None:
        """Describe a function, its defaults and closure, and what it mentions."""
        self.leaves.append(function.__qualname__)
        if _library(function.__module__ or "") == _OWN:  # type checkers may have wrapped it
            return
        code, namespace = function.__code__, function.__globals__
        self.leaves.append(self._of_code(code))
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            self.add(_contents_of(cell))
        self.add(vars(function).get("__wrapped__"))
        if (maker := _library(namespace.get("__name__", ""))) not in _NOT_FOLLOWED:
            self._mapping(vars(function))
            for name in _mentioned(code):
                if name in namespace and name not in _PRIVATE:
                    self._global(name, namespace[name], _mentioned(code), maker)

    def _global(self, name: str, value: Any, names: tuple[str, ...], maker: str) -> None:
        """Describe what a global name of a package stands for.

        `names` are the names in the code that uses it, and `maker` is the package.
        """
        if isinstance(value, types.ModuleType):
            for inner in names:
                if inner not in vars(value) or inner in _PRIVATE or inner.startswith("__"):
                    continue
                member, library = vars(value)[inner], _library(value.__name__) in _NOT_FOLLOWED
                if isinstance(member, _CODE) or type(member) in _ATOMS:
                    self.leaves.append(inner)
                    self.add(member)
                elif member is not value and (not library or isinstance(member, types.ModuleType)):
                    rest = tuple(x for x in names if x != inner)
                    self._global(inner, member, rest, _library(value.__name__))
        elif isinstance(value, type):
            self.leaves.append(name)
            library = _library(value.__module__) in _NOT_FOLLOWED
            self._class(value, () if library else (*_ENTRIES, "__init__", *names))
        elif isinstance(value, Mapping):  # of functions, options or tensors; others are caches
            kept = _is_code if maker in _MAKERS else _is_plain  # libraries keep registries
            known = {k: v for k, v in value.items() if kept(v)}
            if known and value is not os.environ and all(type(key) in _ATOMS for key in known):
                self.leaves.append(name)
                self._mapping(known)
        elif not isinstance(value, Set) or all(type(x) in _ATOMS for x in value):
            self.leaves.append(name)
            if _library(type(value).__module__) not in _NOT_FOLLOWED:
                self._class(type(value), names)
            self.add(value)


_METHODS: tuple[tuple[Any, Callable[[_Walk, Any], None]], ...] = (
    (nn.Module, _Walk._other_module),
    (Tensor, _Walk._tensor),
    (np.ndarray | np.generic, _Walk._array),
    (types.FunctionType, _Walk._function),
    (type, _Walk._class),
    (Enum, lambda walk, value: walk.leaves.append(str(value))),
    (_VALUES, _Walk._value),
    (_CACHED, lambda walk, value: walk.add(value.__wrapped__)),
    (Mapping, _Walk._mapping),
    (list | tuple | deque | Set, _Walk._collection),
    (types.MethodType, _Walk._method),
    (functools.partial, _Walk._partial),
    (weakref.ref, lambda walk, value: walk.add(value())),
)


def _modes(model: Any) -> dict[str, bool]:
    """Return whether the model is in training mode, and the modules whose mode is not that."""
    mode = model.training
    others = {name: not mode for name, module in modules_of(model) if module.training != mode}
    return {"the whole model": mode} | others


class _Reference(WeakIdRef):
    """A weak reference that equals only other references to the same live object."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and super().__eq__(other)


def _contents(tensors: list[Tensor]) -> bytes:
    """Return the bytes of small tensors, such as biases and gains, to detect their changes."""
    known = [x.detach().reshape(-1).view(torch.uint8) for x in tensors if not x.is_meta]
    if not known:
        return b""
    # Read all tensors in one transfer, because each transfer from a GPU synchronises.
    return torch.cat([x.to(known[0].device) for x in known]).cpu().numpy().tobytes()


def _entries(tensor: Tensor) -> object:
    """Return a digest of a tensor's entries, with its shape and dtype."""
    kind = str(tensor.dtype), tuple(tensor.shape)
    if tensor.is_meta:
        return kind
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return *kind, hashlib.sha256(memoryview(flat)).hexdigest()  # type: ignore[arg-type]


@functools.cache
def _bytecode(code: types.CodeType) -> object:
    """Describe compiled code without paths and line numbers."""
    constants = [_bytecode(x) if isinstance(x, types.CodeType) else x for x in code.co_consts]
    constants = [sorted(map(repr, x)) if isinstance(x, Set) else x for x in constants]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, repr(constants), names, code.co_argcount, code.co_flags


@functools.cache
def _mentioned(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in compiled code and the code inside it."""
    inner: Iterator[types.CodeType] = (x for x in code.co_consts if isinstance(x, types.CodeType))
    names = [*code.co_names, *(name for x in inner for name in _mentioned(x))]
    return tuple(dict.fromkeys(names))


@functools.cache
def _method_for(kind: type) -> Callable[[_Walk, Any], None]:
    """Return the method that describes objects of a class."""
    if issubclass(kind, _NO_STATE_TYPES):
        return lambda walk, value: walk.leaves.append(kind.__name__)
    return next((method for kinds, method in _METHODS if issubclass(kind, kinds)), _Walk._object)


@functools.cache
def _members(kind: type) -> tuple[Mapping[str, Any], ...]:
    """Return live views of the members of a class and its bases."""
    return tuple(vars(base) for base in kind.__mro__ if base not in (object, nn.Module, Generic))


@functools.cache
def _left_out(kind: type) -> frozenset[str]:
    """Return the names of a class's attributes that do not belong to its state."""
    makers = {_library(base.__module__) for base in kind.__mro__}
    return _NOT_STATE if makers & _MAKERS else _PRIVATE


@functools.cache
def _of_modules(names: tuple[str, ...], left_out: frozenset[str]) -> tuple[str, ...]:
    """Return the names of a module's attributes that belong to its state."""
    return _in_order(names, left_out | _OF_ALL_MODULES)


@functools.lru_cache(2**12)
def _in_order(names: tuple[Any, ...], left_out: Set[str] = frozenset()) -> tuple[Any, ...]:
    """Return names, without those that do not belong to the state, in a fixed order."""
    return tuple(sorted((name for name in names if name not in left_out), key=_order))


def _is_code(value: Any) -> bool:
    return isinstance(value, _CODE)


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers, texts, tensors and functions only."""
    if isinstance(value, Mapping):
        return all(type(key) in _ATOMS for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | Set):
        return all(map(_is_plain, value))
    return type(value) in _ATOMS or isinstance(value, (*_VALUES, Tensor)) or _is_code(value)


def _contents_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _library(module: str) -> str:
    return module.split(".", 1)[0]


def _order(key: Any) -> str:
    return key if type(key) is str else f"{type(key).__name__} {key!r}"
