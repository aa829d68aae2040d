"""Convert strings to tokens and back with any tokenizer, and find words unknown to the tokenizer.

`tokenizer.decode([id])` treats the token as the start of a text, where SentencePiece tokenizers
drop the space before a word. To get the text that a token has after other tokens, with this space,
`decode([id])` is removed from the beginning of `decode([id, id])`. If a vocabulary marks the end of
a word (`the</w>` in OpenAI GPT), the space after the word belongs to the token. Bytes that do not
form a complete character are written like `<0xE2>`.
"""

import re
import reprlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any
from unicodedata import category

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from attn_only_lens.arguments import a_type, as_plain, is_count
from attn_only_lens.axes import Tokens
from attn_only_lens.engine.input_warnings import quoted, shortened, warn
from attn_only_lens.errors import UnsupportedCallError

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""GPT-2's table of the byte that each character in a byte-level vocabulary stands for."""
_BROKEN = "\ufffd"
_END_OF_WORD = "</w>"
_ESCAPED = re.compile("(?:<0x[89A-F][0-9A-F]>)+")
_APOSTROPHES = "'’"  # apostrophes count as parts of a word, as in "don't"


# From strings to tokens


def checked_tokens(model: Any, tokens: object, *, warn_unknown: bool = True) -> Tokens:
    """Convert a string or tokens to a tensor on the model's device, and check the tokens."""
    require_model(model)
    cfg = model.cfg
    if cfg.d_vocab < 1:
        raise UnsupportedCallError(
            f"{cfg.model_name} has no vocabulary (perhaps it takes images?); expected a model "
            "that takes tokens"
        )
    if isinstance(tokens, str):
        if warn_unknown:
            warn_of_unknown_words(model.tokenizer, {shortened(tokens): tokens})
        tokens = tokens_of_text(model, tokens)
    tokens = array_as_tensor(tokens)
    got = type(tokens).__name__
    if isinstance(tokens, Tensor):
        dtype = str(tokens.dtype).removeprefix("torch.")
        got = f"{dtype} {list(tokens.shape)}"
        if dtype.startswith(("int", "uint")) and tokens.ndim == 2 and tokens.numel():
            tokens = tokens.long()
            low, high = torch.stack(tokens.aminmax()).tolist()  # read both numbers at once
            if low >= 0 and high < cfg.d_vocab:
                if tokens.shape[1] <= cfg.n_ctx or "dynamic" in length_dependent_ropes(model):
                    return tokens.to(next(model.parameters()).device)
                raise UnsupportedCallError(
                    f"tokens: got {tokens.shape[1]:,} tokens; the model has {cfg.n_ctx:,} "
                    "positions: expected a shorter prompt"
                )
            got = f"values from {low} to {high} and pos={tokens.shape[1]}"
    raise UnsupportedCallError(
        f"tokens: got {got}; expected a text, or a tensor or array [batch, pos] of integers from 0 "
        f"to {cfg.d_vocab - 1}, with pos up to {cfg.n_ctx}"
    )


def length_dependent_ropes(model: Any) -> dict[str, int]:
    """Return {type: length} of rotary positions whose angles depend on the length of the input.

    The angles change for inputs longer than `length`. Dynamic NTK scaling has no longest input.
    """
    config = getattr(getattr(model, "original_model", None), "config", None)
    options = getattr(config, "rope_parameters", None) or {}
    ropes = [x for x in options.values() if isinstance(x, dict)] or [options]
    return {
        rope["rope_type"]: int(rope.get("original_max_position_embeddings") or model.cfg.n_ctx)
        for rope in ropes
        if rope.get("rope_type") in ("dynamic", "longrope")
    }


def require_model(model: object) -> None:
    """Raise an error for objects, such as a model's name, that are not TransformerLens' models."""
    if not hasattr(model, "cfg"):
        raise UnsupportedCallError(
            f"got {a_type(model)} as the model; expected a TransformerBridge or a "
            "HookedTransformer: attn_only_lens.load returns one for a name or a folder"
        )


def array_as_tensor(value: Any) -> Any:
    """Convert a numeric array to a tensor (integers to int64); return other values unchanged."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iubf":
        return value
    return torch.tensor(value.astype(np.int64) if value.dtype.kind in "iu" else value, device="cpu")


def tokens_of_text(model: Any, text: str) -> Tensor:
    """Tokenize a string like `model.to_tokens`, but never add a second BOS token."""
    if model.tokenizer is None:
        raise UnsupportedCallError("got a text, but the model has no tokenizer; give token IDs")
    bos = model.tokenizer.bos_token
    has_bos = bool(bos) and text.startswith(bos)
    tokens: Tensor = model.to_tokens(text, truncate=False, prepend_bos=False if has_bos else None)
    return tokens


def d_vocab_out(model: Any) -> int:
    """Return the size of the output vocabulary, which is d_vocab by default."""
    out = getattr(model.cfg, "d_vocab_out", None)
    return int(out) if out is not None and out > 0 else int(model.cfg.d_vocab)


# From tokens to strings


def token_texts(model: Any, tokens: str | Tensor | Iterable[int]) -> list[str]:
    """Return the text of each token of a prompt, with the spaces before words.

    The joined texts equal the original text if the tokenizer can restore it.

    Args:
        model: a model; if it has no tokenizer, tokens are shown as numbers.
        tokens: the tokens of one prompt [pos], or a string.

    Returns:
        One text per token; bytes that do not form a complete character appear like `<0xE2>`.

    Raises:
        UnsupportedCallError: the model cannot take a string, or the tokens are not one prompt.

    Example:
        >>> from attn_only_lens import load
        >>> from attn_only_lens.engine.tokens import token_texts
        >>> token_texts(load("modular-addition"), [3, 4, 113])  # it has no tokenizer
        ['3', '4', '113']
    """
    if isinstance(tokens, str):
        tokens = checked_tokens(model, tokens)[0]
    ids = as_plain(tokens)
    ids = list(map(as_plain, ids)) if isinstance(ids, Iterable) else [None]
    if not all(map(is_count, ids)):
        raise UnsupportedCallError(
            f"tokens: got {reprlib.repr(tokens)}; expected a text, or one prompt's tokens [pos]"
        )
    return _texts(model, ids, {token: token_text(model, token) for token in {*ids}})


def joined(texts: Iterable[str | None]) -> str:
    """Join the token texts of one prompt; tokens without spaces, such as numbers, get spaces."""
    real = [text for text in texts if text is not None]
    return ("" if any(" " in text for text in real) else " ").join(real)


def all_token_texts(model: Any, tokens: Tokens) -> tuple[tuple[str, ...], ...]:
    """Return the texts of every prompt's tokens, including padding, as graphs show them."""
    return tuple(tuple(token_texts(model, row)) for row in tokens.tolist())


def token_texts_of_prompts(
    model: Any, tokens: Tokens, real: Bool[Tensor, "batch pos"]
) -> list[list[str | None]]:
    """Return the texts of every prompt's tokens, with None for padding; decode each token once."""
    rows_of_texts = list[list[str | None]]()
    rows = torch.where(real, tokens, -1).tolist()
    known = {token: token_text(model, token) for token in {*chain(*rows)} - {-1}}
    for row in rows:
        texts = iter(_texts(model, [token for token in row if token >= 0], known))
        rows_of_texts.append([next(texts) if token >= 0 else None for token in row])
    return rows_of_texts


def _texts(model: Any, ids: list[int], known: Mapping[int, str]) -> list[str]:
    """Return the texts of a prompt's tokens; `known` has the text of each token after others."""
    texts = [known[token] for token in ids]
    if texts and getattr(model, "tokenizer", None) is not None:
        first = _decode(model.tokenizer, ids[:1])
        if first and texts[0] == f" {first}":
            texts[0] = first
        if str(model.tokenizer.convert_ids_to_tokens(ids[-1])).endswith(_END_OF_WORD):
            texts[-1] = texts[-1].removesuffix(" ")
    return texts


def token_text(model: Any, token: int) -> str:
    """Return a token's text as it appears inside a longer text, with any leading space."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return str(token)
    piece: str | None = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    if piece is None:  # the model's vocabulary is larger than the tokenizer's
        return f"<{token}>"
    if piece.endswith(_END_OF_WORD):
        return f"{_decode(tokenizer, [token])} "
    once, twice = (_decode(tokenizer, [token] * n) for n in (1, 2))
    text = twice.removeprefix(once) if twice.startswith(once) else once
    if _BROKEN in text and _ESCAPED.fullmatch(piece):
        return piece
    if _BROKEN in text and all(character in _BYTES for character in piece):
        return _escape(bytes(_BYTES[character] for character in piece))
    return text or piece


def is_readable(text: str) -> bool:
    """Return whether a token's text has visible characters only, and no incomplete ones."""
    return text.isprintable() and bool(text.strip()) and not _ESCAPED.search(text)


def join_tokens(texts: Iterable[str]) -> str:
    """Join the texts of tokens, and decode bytes that together form a character.

    Example:
        >>> join_tokens(["caf", "<0xC3>", "<0xA9>", " <0xFF>"])
        'café <0xFF>'
    """

    def decode(escaped: re.Match[str]) -> str:
        return _escape(bytes.fromhex(escaped[0].replace("<0x", "").replace(">", "")))

    return _ESCAPED.sub(decode, "".join(texts))


def _escape(raw: bytes) -> str:
    """Decode bytes; write a byte that is not part of a complete character as `<0xE2>`."""
    codes = map(ord, raw.decode("utf-8", "surrogateescape"))
    return "".join(f"<0x{c - 0xDC00:02X}>" if 0xDC80 <= c <= 0xDCFF else chr(c) for c in codes)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    # By default, decoding may remove the spaces before commas.
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


# Words, symbols and whitespace that a tokenizer replaces by <unk> or drops


def token_ids(tokenizer: Any, texts: str | list[str]) -> Any:
    """Return the tokens of a string, or of each of several strings, without special tokens."""
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def one_token(tokenizer: Any, text: str) -> int | None:
    """Return a string's token if the string is a single known token; otherwise return None."""
    tokens = token_ids(tokenizer, text)
    return int(tokens[0]) if len(tokens) == 1 and not unknown_words(tokenizer, text) else None


def unknown_words(tokenizer: Any, text: str) -> list[str]:
    """Return the words, symbols and whitespace that a tokenizer does not know, without repeats.

    A text that contains the unknown token itself, such as "<unk>", is not reported.

    Example:
        >>> from attn_only_lens import load
        >>> unknown_words(load("small-english").tokenizer, "The kezs near the  cabinet!")
        ['kezs', ' ', '!']
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    if not getattr(tokenizer, "is_fast", False):  # slow tokenizers give no offsets: try each word
        return [
            word
            for word in dict.fromkeys(text.split() or [text])
            if unknown is not None
            and unknown in token_ids(tokenizer, word)
            and tokenizer.unk_token not in word
        ]
    # Bytes and special tokens have offsets too, so special tokens in a text count as known, even
    # GPT-2's BOS, which is also its unknown token.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans = encoded["offset_mapping"]
    lost = {
        span
        for token, span in zip(encoded["input_ids"], spans, strict=True)
        if token == unknown and text[slice(*span)].strip() != tokenizer.unk_token
    }
    covered = set(chain(*(range(*span) for span in spans)))
    lost |= {(i, i + 1) for i, x in enumerate(text) if x.isalnum() and i not in covered}
    pieces = [_piece(text, *span) for span in sorted(lost)]
    return list(dict.fromkeys(filter(None, pieces)))


def _piece(text: str, start: int, end: int) -> str:
    """Return the text from `start` to `end`, extended to the whole word if it is part of a word."""
    piece = text[start:end]
    if not any(map(_in_word, piece)):
        return piece.strip() or piece
    start, end = end - len(piece.lstrip()), start + len(piece.rstrip())
    while start and (_in_word(text[start - 1]) or text[start - 1] in _APOSTROPHES):
        start -= 1
    while end < len(text) and (_in_word(text[end]) or text[end] in _APOSTROPHES):
        end += 1
    return text[start:end].strip(_APOSTROPHES)


def _in_word(character: str) -> bool:
    """Return whether a character is a letter, a mark or a digit."""
    return category(character)[0] in "LMN"


def instead_of_unknown(tokenizer: Any) -> str:
    """Return the token that replaces unknown words, or "nothing" if there is no such token."""
    return str(getattr(tokenizer, "unk_token", None) or "nothing")


def warn_of_unknown_words(tokenizer: Any, prompts: Mapping[str, str]) -> bool:
    """Warn about unknown words in `prompts`, {name: text}; return whether there are any."""
    unknown = {text: unknown_words(tokenizer, text) for text in dict.fromkeys(prompts.values())}
    cases = {
        ("unknown words", text): f"{quoted(unknown[text])} in {name}"
        for name, text in prompts.items()
        if unknown[text]
    }
    read = instead_of_unknown(tokenizer)
    warn(
        cases,
        f"the tokenizer does not know these words, so the model reads {read}; choose other words",
    )
    return bool(cases)
