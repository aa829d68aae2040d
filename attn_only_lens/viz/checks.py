"""Checks of the arguments that several pictures take."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from attn_only_lens.errors import InputError


def import_extra(name: str) -> Any:
    """Import a module of the extra [viz]."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ImportError(f"this picture needs {package}: pip install {package}") from error


def refuse(*reasons: str) -> None:
    """Raise InputError with these reasons, if there are any."""
    if reasons:
        raise InputError(reasons, "this picture cannot be drawn")


def token_reasons(tokens: Any, n_tokens: int | None = None) -> list[str]:
    """Return why these are not the texts of one prompt's tokens, `n_tokens` of them."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        return [f"got a {type(tokens).__name__} for tokens; expected a list of their texts"]
    odd = [token for token in tokens if not isinstance(token, str)]
    if odd:
        return [f"got {odd[0]!r} among the tokens; expected their texts, by token_texts"]
    if n_tokens is not None and len(tokens) != n_tokens:
        return [f"got {len(tokens)} tokens; expected {n_tokens}, as in the cache"]
    return []
