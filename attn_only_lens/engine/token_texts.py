"""Tokens as texts, for pages, tables and exports, whatever the tokenizer.

`tokenizer.decode([id])` is the text of a token at the start of a text: a SentencePiece tokenizer
drops the space before a word there, a WordPiece one puts none. Elsewhere, the text of a token is
`decode([id, id])` less `decode([id])`. Where a vocabulary marks the
end of a word instead (`the</w>`, OpenAI GPT), the space after it is the token's. Bytes that are no
character by themselves are written `<0xE2>`, as SentencePiece names them; `join_tokens` puts
them together again.
"""

import re
import reprlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.axes import Tokens
from attn_only_lens.engine.inputs import checked_tokens
from attn_only_lens.errors import UnsupportedCallError

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""The bytes that characters of a byte-level vocabulary stand for: GPT-2's table."""
_BROKEN = "\ufffd"
_END_OF_WORD = "</w>"
_RUN = re.compile("(?:<0x[89A-F][0-9A-F]>)+")


def token_texts(model: Any, tokens: str | Tensor | Iterable[int]) -> list[str]:
    """Return the tokens of a text as texts, with the space before a word.

    `join_tokens` joins them to the original text, as far as the tokenizer can restore it. If
    SentencePiece adds a space before the text as a separate token, the space is shown.

    Args:
        model: a model with a tokenizer; without one, tokens are shown as numbers.
        tokens: of one prompt [pos]; or a text.

    Returns:
        One text per token; bytes that are not a complete character appear as `<0xE2>`.

    Raises:
        UnsupportedCallError: a text that the model cannot take, or no tokens of one prompt.

    Example:
        >>> from attn_only_lens import pretrained, token_texts
        >>> token_texts(pretrained.modular_addition(), [3, 4, 113])  # it has no tokenizer
        ['3', '4', '113']
    """
    if isinstance(tokens, str):
        tokens = checked_tokens(model, tokens)[0]
    ids = as_plain(tokens)
    ids = list(map(as_plain, ids)) if isinstance(ids, Iterable) else [None]
    if not all(map(is_count, ids)):
        raise UnsupportedCallError(
            f"tokens: got {reprlib.repr(tokens)}; expected a text, or tokens of one prompt [pos]"
        )
    return _texts(model, ids, {token: token_text(model, token) for token in {*ids}})


def token_texts_of_prompts(
    model: Any, tokens: Tokens, real: Bool[Tensor, "batch pos"]
) -> list[list[str | None]]:
    """Return the texts of the tokens of every prompt; None where a token is padding.

    Each token of the vocabulary is decoded once, however many prompts there are.
    """
    rows_of_texts = list[list[str | None]]()
    rows = torch.where(real, tokens, -1).tolist()
    known = {token: token_text(model, token) for token in {*chain(*rows)} - {-1}}
    for row in rows:
        texts = iter(_texts(model, [token for token in row if token >= 0], known))
        rows_of_texts.append([next(texts) if token >= 0 else None for token in row])
    return rows_of_texts


def _texts(model: Any, ids: list[int], known: Mapping[int, str]) -> list[str]:
    """Return the tokens of a prompt as texts, given what each is within a text."""
    texts = [known[token] for token in ids]
    if texts and getattr(model, "tokenizer", None) is not None:
        first = _decode(model.tokenizer, ids[:1])
        if first and texts[0] == f" {first}":
            texts[0] = first
        if str(model.tokenizer.convert_ids_to_tokens(ids[-1])).endswith(_END_OF_WORD):
            texts[-1] = texts[-1].removesuffix(" ")
    return texts


def token_text(model: Any, token: int) -> str:
    """Return the text of a token of the vocabulary, as within a text."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return str(token)
    piece = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    if piece is None:  # vocabularies of models are rounded up
        return f"<{token}>"
    if piece.endswith(_END_OF_WORD):
        return f"{_decode(tokenizer, [token])} "
    once, twice = (_decode(tokenizer, [token] * n) for n in (1, 2))
    text = twice.removeprefix(once) if twice.startswith(once) else once
    if _BROKEN in text:
        text = _with_bytes(piece, text)
    return text or piece


def join_tokens(texts: Iterable[str]) -> str:
    """Join the texts of tokens, and decode bytes that together are characters.

    Example:
        >>> from attn_only_lens.engine.token_texts import join_tokens
        >>> join_tokens(["caf", "<0xC3>", "<0xA9>", " <0xFF>"])
        'café <0xFF>'
    """
    return _RUN.sub(_decode_bytes, "".join(texts))


def _decode_bytes(run: re.Match[str]) -> str:
    raw = bytes.fromhex(run[0].replace("<0x", "").replace(">", ""))
    return _escape(raw)


def _with_bytes(piece: str, text: str) -> str:
    """Return the text of a vocabulary piece that contains incomplete characters."""
    if _RUN.fullmatch(piece):
        return piece
    if all(character in _BYTES for character in piece):
        return _escape(bytes(_BYTES[character] for character in piece))
    return text


def _escape(raw: bytes) -> str:
    """Decode bytes; write bytes that are not a complete character as `<0xE2>`."""
    codes = map(ord, raw.decode("utf-8", "surrogateescape"))
    return "".join(f"<0x{c - 0xDC00:02X}>" if 0xDC80 <= c <= 0xDCFF else chr(c) for c in codes)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    # Clean-up would remove every space before a comma.
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
