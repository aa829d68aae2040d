"""By what a model is known again: a digest of its parameters, and of what they are used for.

A digest that identifies a function: by its code, what it has closed over, and what it reads.

A function of the user's own is known by its bytecode and constants, nested functions included;
the values in its closure, its defaults, and the globals that it reads, followed in turn: another
function by its code, a tensor by its bytes, an object by its class and state. What comes with
Python or lies in an installed package is known by its name and the version of that package.

Nothing that depends on this process is in it (no address, no order of a set), so a script that is
run again has the same digests, under the same version of Python. What cannot be identified so (an
open file, a module of the user's that is handed around as a value, …) is refused: a digest without
it would be the same for another function.
"""

import builtins
import dis
import hashlib
import json
import sys
import sysconfig
import types
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cached_property, lru_cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.heads import host_of
from attn_only_lens.runs.attached_hooks import modules_of
from attn_only_lens.storage import digest_of
from attn_only_lens.tl import HookedTransformer

__all__ = ["Unidentified", "fingerprint", "identity"]

_INCIDENTAL = frozenset(
    {
        "device",
        "n_devices",
        "seed",
        "init_weights",
        "init_mode",
        "initializer_range",
        "use_attn_in",
        "use_attn_result",
        "use_hook_mlp_in",
        "use_split_qkv_input",
        "tokenizer_name",
    }
)
"""Of the configuration: where and how a model runs, and not what it computes."""


def fingerprint(model: Any) -> str:
    """SHA-256 of a model's parameters (names, shapes, types, bytes), configuration and gates.

    Buffers are left out: masks and position tables, which follow from the configuration.

    Args:
        model: a HookedTransformer or a TransformerBridge, converted, exposed or neither.

    Returns:
        64 hexadecimal digits, the same on every machine and device.

    Raises:
        TypeError: a parameter is on the meta device, or of a type that has no bytes.

    Example:
        >>> import torch
        >>> from attn_only_lens import patching as p, pretrained
        >>> model = pretrained.modular_addition()
        >>> before = p.fingerprint(model)
        >>> with torch.no_grad():
        ...     model.W_E[0, 0] += 1
        >>> len(before), p.fingerprint(model) == before
        (64, False)
    """
    return digest_of(model.named_parameters(), _described(model))


def _described(model: Any) -> dict[str, Any]:
    """The plain entries of the configuration, the gates of neuron-heads, sizes that differ.

    And the constants of modules, such as the ε of a norm: what is computed with need not be what
    the configuration says.
    """
    plain = {
        key: value if isinstance(value, bool | int | float | list) else str(value)
        for key, value in vars(model.cfg).items()
        if key not in _INCIDENTAL
        and not key.startswith("_")
        and isinstance(value, bool | int | float | str | list | torch.dtype)
    }
    described: dict[str, Any] = {
        "config": plain,
        "gates": host_of(model).gates(),
        "constants": {
            f"{at}.{name}": repr(value)
            for at, module in modules_of(model)
            for name, value in sorted(vars(module).items())
            if isinstance(value, float) and not name.startswith("_")
        },
    }
    sizes = getattr(model.cfg, "layer_sizes", ())
    if len(set(sizes)) > 1:  # else the configuration says them
        described["layers"] = [asdict(each) for each in sizes]
    return described


_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range)
_BY_NAME = (
    types.BuiltinFunctionType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_MAY_READ_ANYTHING = (globals, locals, vars, eval, exec, compile, __import__, open, input)
# In a class: what Python puts there, and what says nothing of what it does.
_OF_NO_ACCOUNT = {f"__{name}__" for name in ("dict", "doc", "module", "qualname", "weakref")}
_OF_NO_ACCOUNT |= {f"__{name}__" for name in ("dataclass_fields", "dataclass_params")}
_OF_NO_ACCOUNT |= {f"__{name}__" for name in ("firstlineno", "static_attributes", "classdictcell")}
_OF_NO_ACCOUNT |= {f"__{name}__" for name in ("annotations", "annotate", "annotate_func")}
_OF_NO_ACCOUNT |= {"__annotations_cache__", "_abc_impl"}


class Unidentified(TypeError):
    """What a function depends on, and cannot be told from another of its kind."""


def identity(value: Any) -> str:
    """Digest of a function, or of anything that a function may depend on.

    Returns:
        64 hexadecimal digits, the same in every process of one version of Python.

    Raises:
        Unidentified: with where and what it is.

    Example:
        >>> def cost(scale):
        ...     return lambda logits: scale * logits.sum()
        >>> identity(cost(2.0)) == identity(cost(2.0)), identity(cost(2.0)) == identity(cost(3.0))
        (True, False)
    """
    text = json.dumps(_Seen().known(value, "it"))
    return hashlib.sha256(text.encode()).hexdigest()


class _Seen:
    """Descriptions of values, with those met before as references: functions may be recursive."""

    def __init__(self) -> None:
        self._order: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no address is used twice

    def known(self, value: Any, where: str) -> Any:
        """Describe a value as JSON holds it."""
        if type(value) in _PLAIN:
            return [type(value).__name__, repr(value)]
        if type(value) in (tuple, CodeType):  # compilers may or may not make two equal ones one
            return [type(value).__name__, self._described(value, where)]
        if id(value) in self._order:
            return ["as before", self._order[id(value)]]
        self._order[id(value)] = len(self._order)
        self._kept.append(value)
        try:
            return [type(value).__qualname__, self._described(value, where)]
        except RecursionError:
            raise Unidentified(f"{where} is nested too deeply") from None

    def _described(self, value: Any, where: str) -> Any:
        if isinstance(value, CodeType):
            return self._code(value, where)
        if isinstance(value, FunctionType):
            return self._function(value, where)
        if isinstance(value, MethodType):
            return [self.known(value.__func__, where), self.known(value.__self__, f"{where}.self")]
        if isinstance(value, ModuleType):
            return self._named(value.__name__, "the whole", where)
        if isinstance(value, type):
            return self._class(value, where)
        if isinstance(value, _BY_NAME):
            return self._built_in(value, where)
        if isinstance(value, (staticmethod, classmethod)):
            return self.known(value.__func__, where)
        if isinstance(value, cached_property):
            return self.known(value.func, where)
        if isinstance(value, property):
            return [self.known(each, where) for each in (value.fget, value.fset, value.fdel)]
        if type(value) in (list, tuple):
            return [self.known(each, f"{where}[{i}]") for i, each in enumerate(value)]
        if type(value) in (set, frozenset):
            return sorted(identity(each) for each in value)
        if type(value) in (dict, MappingProxyType):
            return self._pairs(value, where)
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if type(value) is np.ndarray and value.dtype != object:
            return [str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()]
        if isinstance(value, (torch.dtype, torch.device, np.dtype, Path)):
            return str(value)
        if isinstance(value, (HookedTransformer, TransformerBridge)):
            return fingerprint(value)
        return self._object(value, where)

    def _pairs(self, value: Mapping[Any, Any], where: str) -> list[Any]:
        return [
            [self.known(key, where), self.known(each, f"{where}[{key!r:.40}]")]
            for key, each in value.items()
        ]

    def _tensor(self, value: Tensor, where: str) -> Any:
        try:
            return [digest_of([("", value)]), self.known(dict(vars(value)), where)]
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise Unidentified(f"{where}, a tensor without plain bytes: {error}") from None

    def _code(self, code: CodeType, where: str) -> Any:
        constants = [self.known(each, where) for each in code.co_consts]
        shape = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
        names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
        table = getattr(code, "co_exceptiontable", b"")
        return [code.co_code.hex(), table.hex(), constants, names, shape]

    def _function(self, function: FunctionType, where: str) -> Any:
        where = f"{where} → {function.__qualname__}"
        # Where its globals are: what decorators of a package make has the user's own __module__.
        home = str(function.__globals__.get("__name__"))
        owner = _package(home)
        if owner is not None and _found(home, function.__qualname__) is function:
            return [home, function.__qualname__, owner, self.known(function.__code__, where)]
        names = function.__code__.co_freevars
        closure = dict(zip(names, map(_content, function.__closure__ or ()), strict=True))
        values = closure
        if owner is None:  # what is taken from modules is described below
            values = {k: v for k, v in closure.items() if not isinstance(v, ModuleType)}
        found = [
            self.known(function.__code__, where),
            self._pairs(values, where),
            self.known(function.__defaults__, where),
            self.known(function.__kwdefaults__, where),
            self.known(dict(vars(function)), where),
        ]
        return [*found, owner or list(self._reads(function, closure, where))]

    def _reads(self, function: FunctionType, closure: dict[str, Any], where: str) -> Iterator[Any]:
        """What a function reads by name: whole values, and of its modules what it takes of them."""
        outside = ChainMap(function.__globals__, vars(builtins))
        for how, name, *attributes in sorted(set(_read(function.__code__))):
            if how == "import":
                if _package(name) is None:
                    raise Unidentified(f"{where} imports {name} as it runs: import it before")
                continue
            value = (closure if how == "closure" else outside).get(name)
            if any(value is each for each in _MAY_READ_ANYTHING) or (
                isinstance(value, ModuleType)
                and value.__name__ == "os"
                and attributes[:1] in (["environ"], ["getenv"])
            ):
                raise Unidentified(
                    f"{where} uses {'.'.join([name, *attributes[:1]])}, which may read anything: "
                    "read it before, and close over the value"
                )
            if how == "closure" and not isinstance(value, ModuleType):
                continue  # described with the closure
            path = name
            while isinstance(value, ModuleType) and attributes and _package(value.__name__) is None:
                path = f"{path}.{attributes[0]}"
                value = getattr(value, attributes.pop(0), None)
            yield [path, self.known(value, f"{where} reads {path}")]

    def _class(self, kind: type, where: str) -> Any:
        owner = _package(kind.__module__)
        if owner is not None and "<locals>" not in kind.__qualname__:
            return [kind.__module__, kind.__qualname__, owner]
        own = {k: v for k, v in vars(kind).items() if k not in _OF_NO_ACCOUNT}
        where = f"{where} → class {kind.__qualname__}"
        bases = [self.known(each, where) for each in (*kind.__bases__, type(kind))]
        return [kind.__qualname__, bases, self._pairs(own, where)]

    def _built_in(self, value: Any, where: str) -> Any:
        of = getattr(value, "__self__", None)
        if of is not None and not isinstance(of, ModuleType):
            return [value.__name__, self.known(of, f"{where}.self")]
        home = getattr(value, "__objclass__", None)
        if home is not None:
            return [value.__name__, self.known(home, where)]
        return self._named(value.__module__ or "builtins", value.__qualname__, where)

    def _named(self, module: str, name: str, where: str) -> Any:
        owner = _package(module)
        if owner is None:
            raise Unidentified(f"{where}: {name} of {module}, whose code cannot be read")
        return [module, name, owner]

    def _object(self, value: Any, where: str) -> Any:
        """An object by its class and state, as copying it would need them."""
        inner = getattr(value, "__wrapped__", None)
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:  # of the object's own making
            raise Unidentified(
                f"{where} holds a {type(value).__qualname__}, whose state cannot be read ({error})"
            ) from None
        if isinstance(reduced, str):  # it stands for itself, by name
            if inner is not None:
                return [self.known(type(value), where), self.known(inner, where)]
            home = str(getattr(value, "__module__", None) or type(value).__module__)
            return self._named(home, reduced, where)
        make, arguments, *more = (*reduced, None, None, None)[:5]
        state, items, pairs = more
        where = f"{where}.{type(value).__qualname__}"
        return [
            self.known(type(value), where),
            self.known(make, where),
            self.known(list(arguments), where),
            self.known(state, where),
            [self.known(each, where) for each in items or ()],
            [[self.known(k, where), self.known(v, where)] for k, v in pairs or ()],
        ]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "<empty>"


def _read(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Names that code reads from outside: how, and the attributes taken at once from the value."""
    chain: list[str] = []
    for step in [*dis.get_instructions(code), None]:
        name = "" if step is None else step.opname
        if name in ("LOAD_ATTR", "LOAD_METHOD") and chain and step is not None:
            chain.append(str(step.argval))
            continue
        if name in ("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL"):
            continue
        if chain:
            yield tuple(chain)
            chain = []
        if step is None:
            break
        if name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            chain = ["global", str(step.argval)]
        elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
            chain = ["closure", str(step.argval)]
        elif name == "IMPORT_NAME":
            yield "import", str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read(constant)


def _found(module: str, name: str) -> Any:
    """What is found under a qualified name in a module; None if it is not to be had by a name."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


_distributions = lru_cache(maxsize=1)(packages_distributions)


@lru_cache(maxsize=4096)
def _package(module: str) -> str | None:
    """The package and version that a module belongs to; None for a module of the user's own."""
    top = module.partition(".")[0]
    file = Path(getattr(sys.modules.get(top), "__file__", None) or sysconfig.get_path("stdlib"))
    if top in ("__main__", "__mp_main__"):
        return None  # wherever the program lies that runs it
    if {"site-packages", "dist-packages"} & set(file.parts) or top == "attn_only_lens":
        return " ".join([top, *map(version, _distributions().get(top, []))])
    if top in sys.stdlib_module_names and file.is_relative_to(sysconfig.get_path("stdlib")):
        return f"python {sys.version_info.major}.{sys.version_info.minor}"
    return None
