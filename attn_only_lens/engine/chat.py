"""Prompts of chat models: messages as tokens, by the template that comes with the tokenizer."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.engine.input_warnings import shortened
from attn_only_lens.engine.unknown_words import warn_of_unknown_words
from attn_only_lens.errors import InputError

Message: TypeAlias = Mapping[str, str]
_PROBLEM = "these are no prompts of a chat"


def chat_tokens(
    model: Any, prompts: str | Sequence[str] | Sequence[Message] | Sequence[Sequence[Message]]
) -> list[Int[Tensor, "pos"]]:
    """Return prompts of a chat model as tokens, by its tokenizer's template, up to its answer.

    The template is all there is: it says which special tokens there are, a BOS among them or not,
    and none is added. What it makes of a prompt ends where the model's answer begins, so that the
    last position predicts the first token of the answer.

    Args:
        model: a model with a tokenizer that has a chat template.
        prompts: a text, which is the message of a user; several texts, each a prompt; or the
            messages of a prompt, or of several: `{"role": "system", "content": "Be brief."}`, ….

    Returns:
        The tokens of each prompt, on the model's device: prompts for every function that takes
        texts.

    Raises:
        InputError: with every reason: there is no tokenizer or no template, or the template does
            not take the messages, or makes nothing of them.

    Example:
        >>> from attn_only_lens import InputError, chat_tokens, pretrained
        >>> try:
        ...     chat_tokens(pretrained.modular_addition(), "How much is 3 + 4?")
        ... except InputError as error:
        ...     print(error.reasons[0])
        the model has no tokenizer; expected one with a chat template
    """
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        reason = "the model has no tokenizer; expected one with a chat template"
        raise InputError([reason], _PROBLEM)
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            [
                "the model's tokenizer has no chat template, as those of base models have none; "
                "expected the tokenizer of a chat model. Give the prompts as texts"
            ],
            _PROBLEM,
        )
    reasons, rows, texts = list[str](), list[list[int]](), dict[str, str]()
    for i, messages in enumerate(_chats(prompts)):
        try:
            rows.append(
                tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            )
        except Exception as error:  # of a template, which is a program
            reasons.append(f"prompt {i}: the template does not take it: {error}")
            continue
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        message = str(messages[-1]["content"])
        texts[f"prompt {i} {shortened(message)}"] = text
        if not rows[-1]:
            reasons.append(f"prompt {i}: the template makes no token of it; expected one at least")
    InputError.raise_if(reasons, _PROBLEM)
    warn_of_unknown_words(tokenizer, texts)
    device = next(model.parameters()).device
    return [torch.tensor(row, device=device) for row in rows]


def _chats(prompts: Any) -> list[Any]:
    """Return each prompt as its messages."""
    several = isinstance(prompts, list | tuple) and not _is_chat(prompts)
    chats = [
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for prompt in (prompts if several else [prompts])
    ]
    if not chats or not all(map(_is_chat, chats)):
        raise InputError(
            [
                f"got {reprlib.repr(prompts)}; expected a text, texts, or messages such as "
                "{'role': 'user', 'content': 'Hello'}"
            ],
            _PROBLEM,
        )
    return chats


def _is_chat(prompts: Any) -> bool:
    """True for the messages of one prompt."""
    return (
        isinstance(prompts, list | tuple)
        and bool(prompts)
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompts)
    )
