"""A digest that identifies a function: by its code, its closure, and the globals that it reads.

A user's own function is identified by its bytecode and constants, nested functions included; the
values in its closure, its defaults, and the globals that it reads, followed in turn: another
function by its code, a tensor by its bytes, an object by its class and state. Python's own and
installed packages' functions are identified by name and version.

Nothing that depends on this process is part of it (no address, no order of a set), so a script that
runs again has the same digests, under the same version of Python. A value that cannot be identified
(an open file, a module of the user's that is passed around as a value, …) is refused: a digest
without it would be the same for another function.
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
from functools import cached_property, lru_cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.engine.fingerprint import fingerprint
from attn_only_lens.storage import tensor_digest
from attn_only_lens.tl import HookedTransformer

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range)
_BY_NAME = (
    types.BuiltinFunctionType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_MAY_READ_ANYTHING = (globals, locals, vars, eval, exec, compile, __import__, open, input)
# Entries of a class that say nothing of its behaviour.
_INCIDENTAL = {"__annotations_cache__", "_abc_impl"} | {
    f"__{name}__"
    for name in (
        *("dict", "doc", "module", "qualname", "weakref", "dataclass_fields", "dataclass_params"),
        *("firstlineno", "static_attributes", "classdictcell"),
        *("annotations", "annotate", "annotate_func"),
    )
}


class Unidentified(TypeError):
    """A function depends on a value that cannot be told from another of its kind."""


def identity(value: Any) -> str:
    """Return a digest of a function, or of any value that a function may depend on.

    Example:
        >>> def cost(scale):
        ...     return lambda logits: scale * logits.sum()
        >>> identity(cost(2.0)) == identity(cost(2.0)), identity(cost(2.0)) == identity(cost(3.0))
        (True, False)
    """
    text = json.dumps(_Describer().describe(value, "it"))
    return hashlib.sha256(text.encode()).hexdigest()


class _Describer:
    """Descriptions of values, with those met before as references: functions may be recursive."""

    def __init__(self) -> None:
        self._order: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no address is used twice

    def describe(self, value: Any, where: str) -> Any:
        """Describe a value as JSON holds it."""
        if type(value) in _PLAIN:
            return [type(value).__name__, repr(value)]
        if type(value) in (tuple, CodeType):  # compilers may or may not make two equal ones one
            return [type(value).__name__, self._describe_value(value, where)]
        if id(value) in self._order:
            return ["as before", self._order[id(value)]]
        self._order[id(value)] = len(self._order)
        self._kept.append(value)
        try:
            return [type(value).__qualname__, self._describe_value(value, where)]
        except RecursionError:
            raise Unidentified(f"{where} is nested too deeply") from None

    def _describe_value(self, value: Any, where: str) -> Any:
        if isinstance(value, CodeType):
            return self._code(value, where)
        if isinstance(value, FunctionType):
            return self._function(value, where)
        if isinstance(value, MethodType):
            return [
                self.describe(value.__func__, where),
                self.describe(value.__self__, f"{where}.self"),
            ]
        if isinstance(value, ModuleType):
            return self._named(value.__name__, "the whole", where)
        if isinstance(value, type):
            return self._class(value, where)
        if isinstance(value, _BY_NAME):
            return self._built_in(value, where)
        if isinstance(value, (staticmethod, classmethod)):
            return self.describe(value.__func__, where)
        if isinstance(value, cached_property):
            return self.describe(value.func, where)
        if isinstance(value, property):
            return [
                self.describe(function, where) for function in (value.fget, value.fset, value.fdel)
            ]
        if type(value) in (list, tuple):
            return [self.describe(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
        if type(value) in (set, frozenset):
            return sorted(identity(entry) for entry in value)
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

    def _pairs(self, value: Mapping[Any, Any], entry: str) -> list[Any]:
        return [
            [self.describe(key, entry), self.describe(entry, f"{entry}[{key!r:.40}]")]
            for key, entry in value.items()
        ]

    def _tensor(self, value: Tensor, where: str) -> Any:
        try:
            return [tensor_digest([("", value)]), self.describe(dict(vars(value)), where)]
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise Unidentified(f"{where}, a tensor without plain bytes: {error}") from None

    def _code(self, code: CodeType, where: str) -> Any:
        constants = [self.describe(constant, where) for constant in code.co_consts]
        shape = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
        names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
        table = getattr(code, "co_exceptiontable", b"")
        return [code.co_code.hex(), table.hex(), constants, names, shape]

    def _function(self, function: FunctionType, where: str) -> Any:
        where = f"{where} → {function.__qualname__}"
        # By its globals: functions made by a package's decorators have the user's own __module__.
        home = str(function.__globals__.get("__name__"))
        owner = _package(home)
        if owner is not None and _lookup(home, function.__qualname__) is function:
            return [home, function.__qualname__, owner, self.describe(function.__code__, where)]
        names = function.__code__.co_freevars
        closure = dict(zip(names, map(_cell_content, function.__closure__ or ()), strict=True))
        values = closure
        if owner is None:  # attributes of modules are described below
            values = {k: v for k, v in closure.items() if not isinstance(v, ModuleType)}
        global_names = [
            self.describe(function.__code__, where),
            self._pairs(values, where),
            self.describe(function.__defaults__, where),
            self.describe(function.__kwdefaults__, where),
            self.describe(dict(vars(function)), where),
        ]
        return [*global_names, owner or list(self._reads(function, closure, where))]

    def _reads(self, function: FunctionType, closure: dict[str, Any], where: str) -> Iterator[Any]:
        """Yield the values that a function reads by name; of modules, their attributes."""
        outside = ChainMap(function.__globals__, vars(builtins))
        for how, name, *attributes in sorted(set(_names_read(function.__code__))):
            if how == "import":
                if _package(name) is None:
                    raise Unidentified(f"{where} imports {name} as it runs: import it before")
                continue
            value = (closure if how == "closure" else outside).get(name)
            if any(value is name for name in _MAY_READ_ANYTHING) or (
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
            yield [path, self.describe(value, f"{where} reads {path}")]

    def _class(self, kind: type, where: str) -> Any:
        owner = _package(kind.__module__)
        if owner is not None and "<locals>" not in kind.__qualname__:
            return [kind.__module__, kind.__qualname__, owner]
        members = {k: v for k, v in vars(kind).items() if k not in _INCIDENTAL}
        where = f"{where} → class {kind.__qualname__}"
        bases = [self.describe(base, where) for base in (*kind.__bases__, type(kind))]
        return [kind.__qualname__, bases, self._pairs(members, where)]

    def _built_in(self, value: Any, where: str) -> Any:
        of = getattr(value, "__self__", None)
        if of is not None and not isinstance(of, ModuleType):
            return [value.__name__, self.describe(of, f"{where}.self")]
        home = getattr(value, "__objclass__", None)
        if home is not None:
            return [value.__name__, self.describe(home, where)]
        return self._named(value.__module__ or "builtins", value.__qualname__, where)

    def _named(self, module: str, name: str, where: str) -> Any:
        owner = _package(module)
        if owner is None:
            raise Unidentified(f"{where}: {name} of {module}, whose code cannot be read")
        return [module, name, owner]

    def _object(self, value: Any, where: str) -> Any:
        """Describe an object by its class and state, as for copying it."""
        inner = getattr(value, "__wrapped__", None)
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:  # of the object's own making
            raise Unidentified(
                f"{where} holds a {type(value).__qualname__}, whose state cannot be read ({error})"
            ) from None
        if isinstance(reduced, str):  # it stands for itself, by name
            if inner is not None:
                return [self.describe(type(value), where), self.describe(inner, where)]
            home = str(getattr(value, "__module__", None) or type(value).__module__)
            return self._named(home, reduced, where)
        make, arguments, *more = (*reduced, None, None, None)[:5]
        state, items, pairs = more
        where = f"{where}.{type(value).__qualname__}"
        return [
            self.describe(type(value), where),
            self.describe(make, where),
            self.describe(list(arguments), where),
            self.describe(state, where),
            [self.describe(item, where) for item in items or ()],
            [[self.describe(k, where), self.describe(v, where)] for k, v in pairs or ()],
        ]


def _cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "<empty>"


def _names_read(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Yield names that code reads from outside: how, the name, and attributes taken at once."""
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
            yield from _names_read(constant)


def _lookup(module: str, name: str) -> Any:
    """Return the value of a qualified name in a module; None if there is none."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


_distributions = lru_cache(maxsize=1)(packages_distributions)


@lru_cache(maxsize=4096)
def _package(module: str) -> str | None:
    """Return the package and version of a module; None for a module of the user's own."""
    top = module.partition(".")[0]
    file = Path(getattr(sys.modules.get(top), "__file__", None) or sysconfig.get_path("stdlib"))
    if top in ("__main__", "__mp_main__"):
        return None  # wherever the program lies that runs it
    if {"site-packages", "dist-packages"} & set(file.parts) or top == "attn_only_lens":
        return " ".join([top, *map(version, _distributions().get(top, []))])
    if top in sys.stdlib_module_names and file.is_relative_to(sysconfig.get_path("stdlib")):
        return f"python {sys.version_info.major}.{sys.version_info.minor}"
    return None
