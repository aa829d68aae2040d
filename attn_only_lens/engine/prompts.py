"""Tokenize pairs of clean and corrupted prompts, and format prompts for chat models.

A patch moves an activation from a position in one run to the same position in the other run, so
both prompts of a pair must have the same number of tokens and the same padding.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attn_only_lens.axes import Tokens
from attn_only_lens.engine.input_warnings import shortened
from attn_only_lens.engine.passed_tests import ignores_padding
from attn_only_lens.engine.tokens import (
    array_as_tensor,
    checked_tokens,
    length_dependent_ropes,
    require_model,
    token_texts,
    warn_of_unknown_words,
)
from attn_only_lens.errors import InputError, UnsupportedCallError

_T = TypeVar("_T")
Prompts: TypeAlias = str | Sequence[str] | Sequence[Tensor] | Tensor | np.ndarray
Message: TypeAlias = Mapping[str, str]
Roles: TypeAlias = Mapping[str, int | Sequence[int] | Tensor]
_SHOWN = 5  # the largest number of prompts that an error names
_PROBLEM = "these prompts cannot be patched into each other"
_PROBLEM_OF_SINGLE = "the model cannot run on these prompts"
_PROBLEM_OF_CHAT = "these prompts cannot be used for a chat"


@dataclass(frozen=True, eq=False)
class PromptPair:
    """Clean and corrupted prompts, aligned token by token; `prompt_pair` creates and checks them.

    Attributes:
        clean: the tokens of the clean prompts.
        corrupted: the tokens of the corrupted prompts.
        mask: 1 for tokens and 0 for padding, the same for both prompts; None if there is no
            padding.
        among: if the pair holds a subset of the prompts, their indices and the total number of
            prompts; otherwise None.
        roles: named positions in all prompts of the analysis; see `Contrast`.
    """

    clean: Tokens
    corrupted: Tokens
    mask: Int[Tensor, "batch pos"] | None = None
    among: tuple[Sequence[int], int] | None = None
    roles: Roles = field(default_factory=dict)

    @property
    def real(self) -> Bool[Tensor, "batch pos"]:
        """The mask as booleans; all True if there is no mask."""
        if self.mask is None:
            return torch.ones_like(self.clean, dtype=torch.bool)
        return self.mask.bool()

    @cached_property
    def real_on_cpu(self) -> Bool[Tensor, "batch pos"]:
        """The same on the CPU, where analyses are planned."""
        return self.real.cpu()

    @property
    def indices(self) -> Int[np.ndarray, "batch"]:
        """The prompts' indices among all prompts."""
        return np.arange(len(self.clean)) if self.among is None else np.array(self.among[0])

    @property
    def last(self) -> Int[Tensor, "batch"]:
        """The position of each prompt's last non-padding token, with padding on either side."""
        positions = torch.arange(self.clean.shape[1], device=self.clean.device)
        return (self.real * positions).amax(dim=1)

    @property
    def together(self) -> tuple[Tokens, Int[Tensor, "both pos"] | None]:
        """The tokens and the mask of both runs in one batch, first the clean prompts."""
        mask = None if self.mask is None else self.mask.repeat(2, 1)
        return torch.cat([self.clean, self.corrupted]), mask

    @property
    def n_all(self) -> int:
        """The number of prompts in the whole analysis; this pair may hold only some of them."""
        return len(self.clean) if self.among is None else self.among[1]

    def select(self, of_all: Sequence[_T]) -> Sequence[_T]:
        """Select this pair's items from a sequence with one item per prompt of the analysis."""
        return of_all if self.among is None else [of_all[i] for i in self.among[0]]

    def of_prompts(self, prompts: Sequence[int], *, cut: bool = True) -> "PromptPair":
        """Return a new pair that holds only some of this pair's prompts.

        Args:
            prompts: the indices of these prompts.
            cut: whether to drop the last columns if they hold only padding.
        """
        if list(prompts) == list(range(len(self.clean))):
            return self
        rows = list(prompts)
        n_pos = int(self.last[rows].max()) + 1 if cut else self.clean.shape[1]
        clean = self.clean[rows, :n_pos]
        corrupted = clean if self.corrupted is self.clean else self.corrupted[rows, :n_pos]
        mask = None if self.mask is None else self.mask[rows, :n_pos]
        indices = prompts if self.among is None else [self.among[0][row] for row in rows]
        return PromptPair(clean, corrupted, mask, (indices, self.n_all), self.roles)


def prompt_pair(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    mask: Tensor | None = None,
    *,
    roles: Roles | None = None,
) -> PromptPair:
    """Tokenize and check clean and corrupted prompts; see `Contrast`.

    Some clean prompts, but not all, may be equal to their corrupted prompts.

    Returns:
        The pair of prompts, on the model's device.

    Raises:
        InputError: tokens are invalid, the prompts of a pair have different lengths, all pairs are
            identical, the mask has another shape, it marks a whole prompt as padding, or padding
            changes the model's logits. The error lists every reason.

    Warns:
        InputWarning: the tokenizer does not know a word, symbol or whitespace character. All
            functions that take texts warn about this.
    """
    sides = {"clean": clean, "corrupted": corrupted}
    (clean_tokens, corrupted_tokens), mask = _tokenize(model, sides, mask, _PROBLEM)
    pair = PromptPair(clean_tokens, corrupted_tokens, mask, roles=roles or {})
    if not ((pair.clean != pair.corrupted) & pair.real).any():
        raise InputError(
            ["identical prompts: every real token is the same in both, so no patch has an effect"],
            _PROBLEM,
        )
    return pair


def single_prompts(
    model: Any,
    prompts: Prompts,
    mask: Tensor | None = None,
    *,
    padded: bool = True,
    roles: Roles | None = None,
) -> PromptPair:
    """Return a pair in which each prompt is paired with itself, for analyses of a single run.

    With `padded=False`, the caller must run prompts of different lengths separately.
    """
    (tokens,), mask = _tokenize(model, {"": prompts}, mask, _PROBLEM_OF_SINGLE, run_padded=padded)
    return PromptPair(tokens, tokens, mask, roles=roles or {})


def _tokenize(
    model: Any,
    sides: Mapping[str, Prompts],
    mask: Tensor | None,
    problem: str,
    *,
    run_padded: bool = True,
) -> tuple[list[Tokens], Tensor | None]:
    """Return the clean and corrupted tokens, and the mask of both, which is 0 at padding."""
    require_model(model)
    reasons, texts = list[str](), dict[str, str]()
    rows = [_rows(model, prompts, side, reasons, texts) for side, prompts in sides.items()]
    padded = not any(map(_is_tensor, sides.values()))
    if mask is not None and padded:
        reasons.append("got a mask with texts, which get their own padding and mask; leave it out")
    InputError.raise_if(reasons, problem)
    warn_of_unknown_words(model.tokenizer, texts)
    if len({*map(len, rows)}) > 1:
        counts = f"{len(rows[0])} clean and {len(rows[1])} corrupted"
        raise InputError([f"got {counts} prompts; expected the same number"], problem)
    for i, (clean, *others) in enumerate(zip(*rows, strict=True)):
        for corrupted in (row for row in others if len(row) != len(clean)):
            here, there = (token_texts(model, tokens) for tokens in (clean, corrupted))
            reasons.append(
                f"prompt {i} has {len(clean)} clean tokens {here} and {len(corrupted)} corrupted "
                f"tokens {there}; expected the same number of tokens: use words with the same "
                "number of tokens"
            )
    InputError.raise_if(reasons, problem)
    tokens, paddings = zip(*(_pad(model, side) for side in rows), strict=True)
    prompt_mask = paddings[0] if padded else _check_mask(mask, tokens[0], reasons)
    InputError.raise_if(reasons, problem)
    if run_padded:
        InputError.raise_if(_reasons_of_ropes(model, prompt_mask), problem)
        require_ignored_padding(model, prompt_mask, problem)
    return list(tokens), prompt_mask


def _reasons_of_ropes(model: Any, mask: Tensor | None) -> list[str]:
    """Return why padding would change the rotary positions of prompts."""
    ropes = length_dependent_ropes(model)
    if mask is None or not ropes or mask.all():
        return []
    shortest, longest = int(mask.sum(1).min()), mask.shape[1]
    return [
        f"got prompts of {shortest} to {longest} tokens; rotary positions of type {rope!r} depend "
        f"on the longest prompt of a batch if it has more than {limit} tokens: pass prompts of one "
        "length at a time, without padding"
        for rope, limit in ropes.items()
        if longest > limit
    ]


def require_ignored_padding(model: Any, mask: Tensor | None, problem: str) -> None:
    """Raise InputError if there is padding and a test shows that it changes the model's logits."""
    if mask is None:
        return
    ends = {"left": mask[:, 0], "right": mask[:, -1]}
    sides = [side for side, end in ends.items() if not end.all()]
    reasons = [
        f"padding on the {side} changes this model's logits: its attention does not ignore the "
        "padding; pass prompts of one length at a time, without padding"
        for side in sides
        if ignores_padding(model, side) is False
    ]
    InputError.raise_if(reasons, problem)


def _rows(
    model: Any, prompts: Prompts, side: str, reasons: list[str], texts: dict[str, str]
) -> list[Tensor]:
    """Return each prompt's tokens on the model's device; texts are padded later."""
    prompts, name = array_as_tensor(prompts), side or "prompts"
    items: list[Any] = list(prompts) if are_prompts(prompts) else [prompts]
    reasons += [f"{name}: got no prompts; expected at least one"] * (not items)
    rows, errors = list[Tensor](), dict[str, tuple[str, list[int]]]()
    for number, prompt in enumerate(items):
        if isinstance(prompt, str):
            label = f"{side} prompt".strip() + (f" {number}" if len(items) > 1 else "")
            texts[f"{label} {shortened(prompt)}"] = prompt
        elif _is_tensor(prompt) and prompt.ndim == 1:
            prompt = prompt[None]
        try:
            rows += checked_tokens(model, prompt, warn_unknown=False)
        except UnsupportedCallError as error:
            expected = str(error).partition("; ")[2]
            errors.setdefault(expected, (f"{name}: {error}", []))[1].append(number)
    reasons += [text + _listed(numbers) * (len(items) > 1) for text, numbers in errors.values()]
    return rows


def _listed(numbers: Sequence[int]) -> str:
    """Return the numbers of prompts that an error is about."""
    more = f" and {len(numbers) - _SHOWN} more" * (len(numbers) > _SHOWN)
    listed = ", ".join(map(str, numbers[:_SHOWN]))
    return f" (prompt{'s' * (len(numbers) > 1)} {listed}{more})"


def are_prompts(prompts: object) -> bool:
    """Return whether `prompts` is a list of texts or of token rows [pos]."""
    return isinstance(prompts, list | tuple) and (
        all(isinstance(prompt, str) for prompt in prompts)
        or all(_is_tensor(row) and row.ndim == 1 for row in prompts)
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _pad(model: Any, rows: list[Tensor]) -> tuple[Tokens, Tensor | None]:
    """Return the padded rows as one tensor, and their mask (None without padding)."""
    if len({*map(len, rows)}) == 1:
        return torch.stack(rows), None
    side = getattr(model.tokenizer, "padding_side", "right")
    pad = getattr(model.tokenizer, "pad_token_id", None)
    if (
        pad is None or pad >= model.cfg.d_vocab
    ):  # some tokenizers pad with a token that is not in the model's vocabulary
        pad = 0
    real = [torch.ones_like(row) for row in rows]
    return pad_sequence(rows, True, pad, side), pad_sequence(real, True, 0, side)


def _check_mask(mask: object, tokens: Tokens, reasons: list[str]) -> Tensor | None:
    """Return a mask as integers; if it is invalid, add a message to `reasons` and return None."""
    if mask is None:
        return None
    mask = array_as_tensor(mask)
    expected = f"expected 1 (real) or 0 (padding) for each token, in shape {list(tokens.shape)}"
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
        reasons.append(f"mask: prompts {empty} have no real token; expected at least one")
    # Count groups of consecutive tokens: a group starts in the first column or after padding.
    starts = mask[:, 0] + (mask.diff(dim=1) == 1).sum(dim=1)
    broken = (starts > 1).nonzero().flatten().tolist()
    if broken:
        reasons.append(f"mask: prompts {broken} have padding between real tokens; expected none")
    return mask


# Chat models


def chat_tokens(
    model: Any, prompts: str | Sequence[str] | Sequence[Message] | Sequence[Sequence[Message]]
) -> list[Int[Tensor, "pos"]]:
    """Return the tokens of a chat up to the model's answer, using the tokenizer's chat template.

    Only the template adds special tokens, including BOS. The last position predicts the
    first token of the model's answer.

    Args:
        model: a model with a tokenizer that has a chat template.
        prompts: a user's message as a string, or a list of strings; or the messages of one chat,
            such as `[{"role": "system", "content": "Be brief."}, …]`, or a list of chats.

    Returns:
        The tokens of each prompt on the model's device, which every function that takes texts
        accepts.

    Raises:
        InputError: the model has no tokenizer or no template, or the template does not accept the
            messages or returns no tokens. The error lists every reason.

    Example:
        >>> from attn_only_lens import chat_tokens, load
        >>> from attn_only_lens.errors import InputError
        >>> try:
        ...     chat_tokens(load("modular-addition"), "How much is 3 + 4?")
        ... except InputError as error:
        ...     print(error.reasons[0])
        the model has no tokenizer; expected a chat model's tokenizer, or prompts that are texts
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not getattr(tokenizer, "chat_template", None):
        lacks = "model has no tokenizer" if tokenizer is None else "tokenizer has no chat template"
        reason = f"the {lacks}; expected a chat model's tokenizer, or prompts that are texts"
        raise InputError([reason], _PROBLEM_OF_CHAT)
    reasons, rows, texts = list[str](), list[list[int]](), dict[str, str]()
    for i, messages in enumerate(_chats(prompts)):
        try:
            row, text = (
                tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=tokenize, return_dict=False
                )
                for tokenize in (True, False)
            )
        except Exception as error:  # a template is a program and may raise any error
            reasons.append(f"prompt {i}: the template does not accept this prompt: {error}")
            continue
        rows.append(row)
        texts[f"prompt {i} {shortened(str(messages[-1]['content']))}"] = text
        if not row:
            reasons.append(f"prompt {i}: the template returns no tokens; expected at least one")
    InputError.raise_if(reasons, _PROBLEM_OF_CHAT)
    warn_of_unknown_words(tokenizer, texts)
    device = next(model.parameters()).device
    return [torch.tensor(row, device=device) for row in rows]


def _chats(prompts: Any) -> list[Any]:
    """Return each prompt's list of messages."""
    several = isinstance(prompts, list | tuple) and not _is_chat(prompts)
    chats = [
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for prompt in (prompts if several else [prompts])
    ]
    if not chats or not all(map(_is_chat, chats)):
        reason = (
            f"got {reprlib.repr(prompts)}; expected a text, a list of texts, or messages such as "
            "{'role': 'user', 'content': 'Hello'}"
        )
        raise InputError([reason], _PROBLEM_OF_CHAT)
    return chats


def _is_chat(prompts: Any) -> bool:
    """Return whether `prompts` is a list of messages that form one prompt."""
    return (
        isinstance(prompts, list | tuple)
        and bool(prompts)
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompts)
    )
