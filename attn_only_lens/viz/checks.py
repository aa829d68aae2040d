"""What pictures ask of what they are given, in one voice."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from attn_only_lens.errors import PictureError
from attn_only_lens.plain import is_count

__all__ = ["distinct", "of_prompt", "refuse", "token_reasons"]

_PROBLEM = "this picture cannot be drawn"


def refuse(reasons: Sequence[str]) -> None:
    """Raise PictureError with these reasons, if there are any."""
    if reasons:
        raise PictureError(reasons, _PROBLEM)


def distinct(names: str | Iterable[str]) -> list[str]:
    """One name as a list, or each of several once, in their order (a top list repeats some)."""
    return list(dict.fromkeys([names] if isinstance(names, str) else names))


def token_reasons(tokens: Any, n_tokens: int | None = None) -> list[str]:
    """Why these are not the tokens of one prompt, as texts, of this length."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        return [f"got a {type(tokens).__name__} for tokens; expected a list of their texts"]
    odd = [token for token in tokens if not isinstance(token, str)]
    if odd:
        return [f"got {odd[0]!r} among the tokens; expected their texts, by token_texts"]
    if n_tokens is not None and len(tokens) != n_tokens:
        return [f"got {len(tokens)} tokens; expected {n_tokens}, as in the cache"]
    return []


def of_prompt(values: Tensor, prompt: int, has_batch: bool) -> Float[Tensor, "..."]:
    """The values of one prompt, in float64 on the CPU.

    Raises:
        PictureError: the cache holds no such prompt, or a value that is not finite.
    """
    n_prompts = len(values) if has_batch else 1
    if not is_count(prompt, 0, n_prompts - 1):
        refuse([f"got prompt={prompt!r}; the cache holds prompts 0 to {n_prompts - 1}"])
    one = (values[prompt] if has_batch else values).detach().cpu().double()
    if not bool(one.isfinite().all()):
        refuse(["the cache holds values that are not finite"])
    return one
