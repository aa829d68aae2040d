"""Check values read from JSON: types by pydantic, and the ranges of numbers in configurations."""

import json
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, get_type_hints, is_typeddict

import pydantic
import torch
import typing_extensions

_TOO_LARGE = re.compile(r"(?<![\w.])\d{19,}(?![\w.])")  # 2^63 has 19 digits
_NAMES = {"int_type": "int", "int_from_float": "int", "string_type": "str", "list_type": "list"}
_NAMES |= {"dict_type": "dict", "bool_type": "bool", "float_type": "float", "none_required": "None"}
# The names that configurations of TransformerLens and transformers give to numbers of a range.
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


def type_mismatches(value: Any, expected: Any, name: str) -> Iterator[str]:
    """Yield every place at which a value from JSON is not of the expected type.

    The fields of TypedDicts and dataclasses are compared; no dataclass is built.
    """
    if not (
        is_typeddict(expected) or typing_extensions.is_typeddict(expected)
    ) and not is_dataclass(expected):
        yield from _mismatches(value, expected, name)
        return
    if not isinstance(value, dict):
        yield f"{name}: got {reprlib.repr(value)}; expected dict"
        return
    hints = get_type_hints(expected)
    if is_dataclass(expected):
        settable = [field for field in fields(expected) if field.init]
        needed = {f.name for f in settable if f.default is f.default_factory is MISSING}
        unknown = [key for key in value if key not in {field.name for field in settable}]
        yield from (f"{name}.{key} is not known" for key in unknown)
    else:
        needed = expected.__required_keys__
    yield from (f"{name}.{key} is missing" for key in sorted(needed - value.keys()))
    for key in value.keys() & hints.keys():
        yield from type_mismatches(value[key], hints[key], f"{name}.{key}")


def _mismatches(value: Any, expected: Any, name: str) -> Iterator[str]:
    if torch.dtype in (expected, *getattr(expected, "__args__", ())):
        named = isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
        if not named and not (value is None and expected is not torch.dtype):
            yield f"{name}: got {reprlib.repr(value)}; expected the name of a torch.dtype"
        return
    try:
        text = json.dumps(value, allow_nan=False)
        if _TOO_LARGE.search(text):
            raise ValueError("a whole number is too large for torch")
        _adapter(expected).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        for problem in error.errors():
            path = "".join(
                f"[{step}]" if isinstance(step, int) else f".{step}" for step in problem["loc"]
            )
            kind = _NAMES.get(problem["type"], problem["msg"])
            if problem["type"] == "missing":
                yield f"{name}{path} is missing"
            else:
                yield f"{name}{path}: got {reprlib.repr(problem['input'])}; expected {kind}"
    except ValueError as error:
        yield f"{name}: got {reprlib.repr(value)}; {error}"


@lru_cache
def _adapter(expected: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(expected)


def out_of_range(config: Any, name: str) -> Iterator[str]:
    """Yield every number of a configuration, at any depth, that no model can have.

    Example:
        >>> list(out_of_range({"eps": -1e-5, "rotary_base": 10000}, "config"))
        ['config.eps: got -1e-05; expected 0 or more']
    """
    inner = config.items() if isinstance(config, dict) else ()
    for key, value in inner:
        yield from out_of_range(value, f"{name}.{key}")
        if type(value) in (int, float):
            for pattern, expected, fits in _RANGES:
                if pattern.fullmatch(key) and not fits(value):
                    yield f"{name}.{key}: got {value}; expected {expected}"
