"""Validate values from files: JSON types, configuration numbers, and model sizes."""

import json
import re
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, get_type_hints, is_typeddict

import pydantic
import torch
import typing_extensions
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from attn_only_lens.errors import CheckpointError

_LARGEST = 2**63 - 1
"""The largest whole number that torch can hold."""
_NAMES = {"int_type": "int", "int_from_float": "int", "string_type": "str", "list_type": "list"}
_NAMES |= {"json_invalid": "valid Unicode, without half of a surrogate pair"}
_NAMES |= {"dict_type": "dict", "bool_type": "bool", "float_type": "float", "none_required": "None"}
# Patterns of configuration names in TransformerLens and transformers, with valid ranges.
_RANGES: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    (
        r"rotary_base(_local)?|\w*_theta|(\w*_)?factor|yarn_\w+|NTK_\w+|clip_qkv|window_size|"
        r"n_devices|n_ctx|n_positions|max_position_embeddings|query_pre_attn_scalar|"
        r"n_(head|layer|embd)|num_(attention_heads|key_value_heads|hidden_layers)|"
        r"hidden_size|vocab_size|head_dim",
        "more than 0",
        lambda value: value > 0,
    ),
    (r"(\w*_)?eps(ilon)?|rotary_dim", "0 or more", lambda value: value >= 0),
    (r"attn_scale", "more than 0, or -1 for √d_head", lambda x: x > 0 or x == -1),
    (r"(\w*_)?(p?drop|dropout(_prob)?)", "from 0 to 1", lambda value: 0 <= value <= 1),
)
_MODULES = 50  # modules allowed per tensor, since blocks also have hook points and containers
_FEW = 300
_FEW_LAYERS = 1000


def type_mismatches(value: Any, expected: Any, name: str) -> Iterator[str]:
    """Yield an error message for each part of a JSON value that has an unexpected type.

    TypedDicts and dataclasses are checked field by field, without creating instances.
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
        if _has_too_large(value):
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


def _has_too_large(value: Any) -> bool:
    """Return whether a JSON value contains a whole number that torch cannot hold."""
    if isinstance(value, Mapping):
        return any(map(_has_too_large, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_too_large, value))
    return isinstance(value, int) and not -_LARGEST - 1 <= value <= _LARGEST


@lru_cache
def _adapter(expected: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(expected)


def out_of_range(config: Any, name: str) -> Iterator[str]:
    """Yield an error message for each number in a configuration that no model can have."""
    inner = config.items() if isinstance(config, dict) else ()
    for key, value in inner:
        yield from out_of_range(value, f"{name}.{key}")
        if type(value) in (int, float):
            for pattern, expected, fits in _RANGES:
                if re.fullmatch(pattern, key) and not fits(value):
                    yield f"{name}.{key}: got {value}; expected {expected}"


@contextmanager
def limit_size(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise CheckpointError when a model built in the `with` block is too large for saved tensors.

    Without this limit, a damaged configuration with a million layers, or with a width of a million,
    would take hours or all memory before it could be compared with the tensors.
    """
    thread, made = threading.get_ident(), 0
    elements = sum(tensor.numel() for tensor in tensors.values())

    def count(module: Any, name: str, child: Any) -> None:
        nonlocal made
        made += threading.get_ident() == thread
        if made > _FEW + _MODULES * len(tensors):
            raise CheckpointError(
                f"the configuration describes a model with too many modules for {len(tensors)} "
                "tensors"
            )

    def measure(module: Any, name: str, parameter: Any) -> None:
        if threading.get_ident() == thread and parameter.numel() > elements:
            raise CheckpointError(
                f"the configuration describes a parameter {name} of shape {list(parameter.shape)}, "
                f"but all tensors together have only {elements} entries"
            )

    hooks = [
        register_module_module_registration_hook(count),
        register_module_parameter_registration_hook(measure),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def require_few_layers(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a configuration has many more layers than there are saved tensors.

    Call this before transformers creates a configuration object, which builds a list with one entry
    per layer.
    """
    for key, value in config.items():
        if "layer" in key and isinstance(value, int) and value > _FEW_LAYERS + len(tensors):
            raise ValueError(f"{key} is {value}, but only {len(tensors)} tensors are saved")
