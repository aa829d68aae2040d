"""The tokens that a metric asks for: given as text, token or one of either for each prompt."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.patching.prompts import PromptPair
from attn_only_lens.plain import as_plain, is_count
from attn_only_lens.texts import token_texts

__all__ = ["Answer", "answer_tokens", "described", "run_shape"]

Answer: TypeAlias = str | int | Sequence[str | int] | Tensor


def answer_tokens(
    model: Any, pair: PromptPair, answer: Answer, what: str, reasons: list[str]
) -> Int[Tensor, "batch"]:
    """The token of each prompt that is meant; reasons are added for all that is none."""
    batch = len(pair.clean)
    each = listed(answer)
    if len(each) not in (1, batch):
        reasons.append(f"{what}: got {len(each)} answers; expected 1, or {batch}, one a prompt")
    found = [_token(model, one, what, reasons) for one in each]
    if len(found) != batch:
        found = found[:1] * batch
    return torch.tensor(found, device=pair.clean.device)


def listed(answer: Answer) -> list[Any]:
    """Answers as a list, of one where there is one for all prompts."""
    given = as_plain(answer)
    if not isinstance(given, list | tuple):
        return [given]
    return [answer] if getattr(answer, "ndim", 1) > 1 else list(given)


def described(answer: Answer) -> str:
    """Answers as a metric's name shows them."""
    each = listed(answer)
    return repr(each[0]) if len(each) == 1 else repr(each)


def run_shape(model: Any, pair: PromptPair) -> tuple[int, int, int]:
    """Batch, pos and vocabulary of the logits of a whole run."""
    batch, pos = pair.clean.shape
    return batch, pos, _d_vocab_out(model)


def _d_vocab_out(model: Any) -> int:
    """How many logits the model puts out; configurations may leave it to d_vocab."""
    out = getattr(model.cfg, "d_vocab_out", None)
    return int(out) if out is not None and out > 0 else int(model.cfg.d_vocab)


def _token(model: Any, one: Any, what: str, reasons: list[str]) -> int:
    """A token; 0 beside a reason why there is none."""
    size = _d_vocab_out(model)
    if isinstance(one, str):
        if getattr(model, "tokenizer", None) is None:
            reasons.append(f"{what}: got {one!r}, and the model has no tokenizer; give its token")
            return 0
        tokens = model.tokenizer(one, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1:
            shown = token_texts(model, tokens)
            reasons.append(
                f"{what}: got {one!r}, which is {len(tokens)} tokens {shown}; expected one: most "
                "words need the space before them, or give a token of the vocabulary"
            )
            return 0
        one = tokens[0]
    if not is_count(one, 0, size - 1):
        reasons.append(f"{what}: got {one!r}; expected a text, or a token from 0 to {size - 1}")
        return 0
    return one
