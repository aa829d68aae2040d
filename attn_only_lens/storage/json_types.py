"""Compare values read from JSON with TypedDicts, dataclasses and the types of `typing`.

Nothing is built from a value before it has been compared.
"""

import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import torch

_LARGEST = 2**63  # of whole numbers that torch takes
# What configurations, of TransformerLens and of transformers, call numbers of one range.
_RANGES: tuple[tuple[re.Pattern[str], str, Callable[[float], bool]], ...] = (
    (
        re.compile(
            r"rotary_base(_local)?|\w*_theta|(\w*_)?factor|yarn_\w+|NTK_\w+|clip_qkv|window_size|"
            r"n_devices|n_ctx|n_positions|max_position_embeddings|query_pre_attn_scalar|"
            r"n_(head|layer|embd)|num_(attention_heads|key_value_heads|hidden_layers)|"
            r"hidden_size|vocab_size|head_dim"
        ),
        "more than 0",
        lambda value: value > 0,
    ),
    (re.compile(r"(\w*_)?eps(ilon)?|rotary_dim"), "0 or more", lambda value: value >= 0),
    (
        re.compile(r"attn_scale"),
        "more than 0, or -1 for the root of d_head",
        lambda value: value > 0 or value == -1,
    ),
    (
        re.compile(r"(\w*_)?(p?drop|dropout(_prob)?)"),
        "from 0 to 1",
        lambda value: 0 <= value <= 1,
    ),
)


def type_mismatches(value: Any, expected: Any, where: str) -> Iterator[str]:
    """Yield every place at which a value from JSON is not of the expected type.

    Example:
        >>> from attn_only_lens.heads import Gating
        >>> from attn_only_lens.storage import type_mismatches
        >>> list(type_mismatches({"kind": "exact", "heads_per_neuron": "1"}, Gating, "gate"))
        ["gate.heads_per_neuron: got '1'; expected int"]
    """
    origin, args = get_origin(expected), get_args(expected)
    if is_typeddict(expected) or is_dataclass(expected):
        if isinstance(value, dict):
            yield from _fields(value, expected, where)
            return
        fits = False
    elif origin in (Union, UnionType):
        fits = any(next(type_mismatches(value, arg, where), None) is None for arg in args)
    elif origin is Literal:
        fits = any(value == arg and type(value) is type(arg) for arg in args)
    elif (origin or expected) in (list, tuple):
        inner = (args or (Any,))[0]
        if isinstance(value, list) and (Ellipsis in args or origin is not tuple):
            for i, item in enumerate(value):
                yield from type_mismatches(item, inner, f"{where}[{i}]")
            return
        fits = isinstance(value, list) and len(value) == len(args)
        if fits:
            for i, (item, kind) in enumerate(zip(value, args, strict=True)):
                yield from type_mismatches(item, kind, f"{where}[{i}]")
            return
    elif (origin or expected) is dict:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from type_mismatches(item, (args or (str, Any))[1], f"{where}.{key}")
            return
        fits = False
    else:
        fits = _is(value, expected)
    if not fits:
        name = expected.__name__ if isinstance(expected, type) and not args else str(expected)
        yield f"{where}: got {reprlib.repr(value)}; expected {name.replace('typing.', '')}"


def out_of_range(config: Any, where: str) -> Iterator[str]:
    """Yield every number of a configuration, at any depth, that no model can have.

    Example:
        >>> list(out_of_range({"eps": -1e-5, "rotary_base": 10000}, "config"))
        ['config.eps: got -1e-05; expected 0 or more']
    """
    inner = config.items() if isinstance(config, dict) else ()
    for key, value in inner:
        yield from out_of_range(value, f"{where}.{key}")
        if type(value) in (int, float):
            for pattern, expected, fits in _RANGES:
                if pattern.fullmatch(key) and not fits(value):
                    yield f"{where}.{key}: got {value}; expected {expected}"


def _fields(value: dict[str, Any], expected: Any, where: str) -> Iterator[str]:
    hints = get_type_hints(expected)
    if is_typeddict(expected):
        needed = expected.__required_keys__
    else:
        optional = [f for f in fields(expected) if f.init]
        needed = {f.name for f in optional if f.default is f.default_factory is MISSING}
        unknown = [key for key in value if key not in {f.name for f in optional}]
        yield from (f"{where}.{key} is not known" for key in unknown)
    yield from (f"{where}.{key} is missing" for key in sorted(needed - value.keys()))
    for key in value.keys() & hints.keys():
        yield from type_mismatches(value[key], hints[key], f"{where}.{key}")


def _is(value: Any, expected: Any) -> bool:
    if expected is Any:
        return True
    if expected is type(None):
        return value is None
    if expected is torch.dtype:
        return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
    if expected is int:
        return type(value) is int and abs(value) < _LARGEST
    if expected is float:
        return _is(value, int) or (type(value) is float and isfinite(value))
    return type(value) is expected
