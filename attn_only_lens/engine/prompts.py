"""Pairs of clean and corrupted prompts.

A patch moves an activation from a position of one run to the same position of the other, so the
two prompts of a pair must have the same number of tokens, and the same padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attn_only_lens.axes import Tokens
from attn_only_lens.engine.input_warnings import shortened
from attn_only_lens.engine.inputs import array_as_tensor, checked_tokens
from attn_only_lens.engine.token_texts import token_texts
from attn_only_lens.engine.unknown_words import warn_of_unknown_words
from attn_only_lens.errors import InputError, UnsupportedCallError

_T = TypeVar("_T")
Prompts: TypeAlias = str | Sequence[str] | Sequence[Tensor] | Tensor | np.ndarray
_PROBLEM = "these prompts cannot be patched into each other"
_PROBLEM_OF_SINGLE = "the model cannot run on these prompts"


@dataclass(frozen=True, eq=False)
class PromptPair:
    """Clean and corrupted prompts, aligned token by token. Made and checked by `prompt_pair`.

    Attributes:
        clean: tokens of the clean prompts.
        corrupted: tokens of the corrupted prompts.
        mask: 1 where a token is real and 0 where it is padding, the same for both; None where
            every token is real.
        among: the indices of these prompts, and the total number; None if these are all prompts.
    """

    clean: Tokens
    corrupted: Tokens
    mask: Int[Tensor, "batch pos"] | None = None
    among: tuple[range, int] | None = None

    @property
    def real(self) -> Bool[Tensor, "batch pos"]:
        """The mask as booleans; all True if there is no mask."""
        if self.mask is None:
            return torch.ones_like(self.clean, dtype=torch.bool)
        return self.mask.bool()

    @property
    def last(self) -> Int[Tensor, "batch"]:
        """The position of the last real token of each prompt, whichever side is padded."""
        positions = torch.arange(self.clean.shape[1], device=self.clean.device)
        return (self.real * positions).amax(dim=1)

    @property
    def n_all(self) -> int:
        """The total number of prompts, of which this pair may hold a subset."""
        return len(self.clean) if self.among is None else self.among[1]

    def own(self, of_all: Sequence[_T]) -> Sequence[_T]:
        """Select the items of these prompts from a sequence with one item per prompt."""
        return of_all if self.among is None else of_all[self.among[0].start : self.among[0].stop]

    def of_prompts(self, prompts: range, *, cut: bool = True) -> "PromptPair":
        """Return some consecutive prompts of this pair.

        Args:
            prompts: their indices.
            cut: whether to drop the final columns in which all of them have padding.
        """
        if len(prompts) == len(self.clean):
            return self
        rows = slice(prompts.start, prompts.stop)
        n_pos = int(self.last[rows].max()) + 1 if cut else self.clean.shape[1]
        clean, corrupted, mask = (
            None if tensor is None else tensor[rows, :n_pos]
            for tensor in (self.clean, self.corrupted, self.mask)
        )
        assert clean is not None
        assert corrupted is not None
        if self.corrupted is self.clean:
            corrupted = clean
        return PromptPair(clean, corrupted, mask, (prompts, len(self.clean)))


def prompt_pair(
    model: Any, clean: Prompts, corrupted: Prompts, mask: Tensor | None = None
) -> PromptPair:
    """Tokenize and check clean and corrupted prompts.

    Texts, and rows of tokens, of unequal length within a batch are padded on the side of the
    model's tokenizer, and the mask is made from that. A prompt may be the same on both sides as
    long as not all are.

    Args:
        model: any HookedTransformer or TransformerBridge, with its tokenizer.
        clean: a text, a list of texts, tokens [batch, pos], one row of tokens [pos], or a list of
            rows, as `chat_tokens` makes them; tokens are a tensor or a NumPy array. A text begins
            with BOS where `model.to_tokens` puts one; a text with a BOS of its own gets no second.
        corrupted: the same for the other run, prompt by prompt.
        mask: 1 or True for real tokens and 0 or False for padding, in the shape of the tokens;
            with tokens only.

    Returns:
        The pair, on the model's device.

    Raises:
        InputError: with every reason: not tokens of the model, unequal lengths, identical
            prompts, a mask that does not fit or leaves a prompt empty.

    Warns:
        InputWarning: the tokenizer does not know a word, a sign or whitespace of a text. So do
            all functions that take texts.

    Example:
        >>> import torch
        >>> from attn_only_lens import patching as p, pretrained
        >>> pair = p.prompt_pair(pretrained.modular_addition(), torch.tensor([3, 4, 113]),
        ...                      torch.tensor([3, 5, 113]))
        >>> pair.clean.shape, pair.last.tolist()
        (torch.Size([1, 3]), [2])
    """
    reasons: list[str] = []
    texts: dict[str, str] = {}
    rows = _rows(model, clean, "clean", reasons, texts)
    corrupted_rows = _rows(model, corrupted, "corrupted", reasons, texts)
    InputError.raise_if(reasons, _PROBLEM)
    warn_of_unknown_words(model.tokenizer, texts)
    if len(rows) != len(corrupted_rows):
        raise InputError(
            [
                f"got {len(rows)} clean and {len(corrupted_rows)} corrupted prompts; expected one "
                "of each in a pair"
            ],
            _PROBLEM,
        )
    for i, (row, corrupted_row) in enumerate(zip(rows, corrupted_rows, strict=True)):
        if len(row) != len(corrupted_row):
            here, there = (token_texts(model, tokens) for tokens in (row, corrupted_row))
            reasons.append(
                f"prompt {i} has {len(row)} clean tokens {here} and {len(corrupted_row)} corrupted "
                f"tokens {there}; both prompts must have the same number of tokens: use words that "
                "tokenize to the same length"
            )
    padded = not (_is_tensor(clean) or _is_tensor(corrupted))
    clean_tokens, mask = _stack(model, rows, padded, mask, reasons, _PROBLEM)
    corrupted_tokens, _ = _pad(model, corrupted_rows)
    pair = PromptPair(clean_tokens, corrupted_tokens, mask)
    if not ((pair.clean != pair.corrupted) & pair.real).any():
        raise InputError(
            ["identical prompts: every real token is the same in both, so no patch has an effect"],
            _PROBLEM,
        )
    return pair


def single_prompts(model: Any, prompts: Prompts, mask: Tensor | None = None) -> PromptPair:
    """Pair each prompt with itself, for analyses of a single run."""
    reasons: list[str] = []
    texts: dict[str, str] = {}
    rows = _rows(model, prompts, "", reasons, texts)
    warn_of_unknown_words(model.tokenizer, texts)
    padded = not _is_tensor(prompts)
    tokens, mask = _stack(model, rows, padded, mask, reasons, _PROBLEM_OF_SINGLE)
    return PromptPair(tokens, tokens, mask)


def _stack(
    model: Any,
    rows: list[Tensor],
    padded: bool,
    mask: Tensor | None,
    reasons: list[str],
    problem: str,
) -> tuple[Tokens, Tensor | None]:
    """Return prompts as one tensor, and the mask: the given one, or one for the padding."""
    if mask is not None and padded:
        reasons.append("got a mask beside texts, whose padding is made here; leave it out")
    InputError.raise_if(reasons, problem)
    tokens, padding = _pad(model, rows)
    prompt_mask = padding if padded else _check_mask(mask, tokens, reasons)
    InputError.raise_if(reasons, problem)
    return tokens, prompt_mask


def _rows(
    model: Any, prompts: Prompts, side: str, reasons: list[str], texts: dict[str, str]
) -> list[Tensor]:
    """Return the tokens of each prompt on the model's device, without padding of texts."""
    items: list[Any]
    prompts, name = array_as_tensor(prompts), side or "prompts"
    if isinstance(prompts, Tensor):
        items = [prompts[None] if prompts.ndim == 1 else prompts]
    elif isinstance(prompts, str):
        items = [prompts]
    elif are_prompts(prompts):
        items = list(prompts)
    else:
        reasons.append(
            f"{name}: got {type(prompts).__name__}; expected a text, a list of texts, a tensor or "
            "array of tokens [batch, pos], or a list of rows of tokens [pos]"
        )
        return []
    if not items:
        reasons.append(f"{name}: got no prompts; expected at least one")
    rows: list[Tensor] = []
    for number, prompt in enumerate(items):
        if isinstance(prompt, str):
            label = f"{side} prompt".strip() + (f" {number}" if len(items) > 1 else "")
            texts[f"{label} {shortened(prompt)}"] = prompt
        else:
            prompt = array_as_tensor(prompt)
            prompt = prompt[None] if prompt.ndim == 1 else prompt
        try:
            rows += checked_tokens(model, prompt, warn=False).long()
        except UnsupportedCallError as error:
            reasons.append(f"{name}: {error}")
    return rows


def are_prompts(prompts: object) -> bool:
    """True for a list of texts, or of rows of tokens [pos]."""
    return isinstance(prompts, list | tuple) and (
        all(isinstance(prompt, str) for prompt in prompts)
        or all(_is_tensor(row) and row.ndim == 1 for row in prompts)
    )


def _is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of torch or an array of NumPy."""
    return isinstance(value, Tensor | np.ndarray)


def _pad(model: Any, rows: list[Tensor]) -> tuple[Tokens, Tensor | None]:
    """Return rows as one tensor, and a mask; None where all tokens are real."""
    n_pos = max(map(len, rows))
    if all(len(row) == n_pos for row in rows):
        return torch.stack(rows), None
    left = getattr(model.tokenizer, "padding_side", "right") == "left"
    pad = getattr(model.tokenizer, "pad_token_id", None)
    # Some tokenizers pad with a token that the model's vocabulary has not.
    if pad is None or pad >= model.cfg.d_vocab:
        pad = 0
    tokens = rows[0].new_full((len(rows), n_pos), pad)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        columns = slice(n_pos - len(row), None) if left else slice(len(row))
        tokens[i, columns], mask[i, columns] = row, 1
    return tokens, mask


def _check_mask(mask: object, tokens: Tokens, reasons: list[str]) -> Tensor | None:
    if mask is None:
        return None
    mask = array_as_tensor(mask)
    expected = f"expected 1 (real) and 0 (padding) in the tokens' shape {list(tokens.shape)}"
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        reasons.append(f"mask: got {got}; {expected}")
        return None
    if not ((mask == 0) | (mask == 1)).all():
        reasons.append(f"mask: got values from {mask.min()} to {mask.max()}; {expected}")
        return None
    mask = mask.to(tokens.device).long()
    empty = (mask.sum(dim=1) == 0).nonzero().flatten().tolist()
    if empty:
        reasons.append(f"mask: it leaves no token of prompts {empty}; expected one at least")
    # A run of ones starts once: count the steps up, a first entry of 1 being one.
    starts = mask[:, 0] + (mask.diff(dim=1) == 1).sum(dim=1)
    broken = (starts > 1).nonzero().flatten().tolist()
    if broken:
        reasons.append(f"mask: prompts {broken} have padding between real tokens; expected none")
    return mask
