"""Check models, tokens and options before anything runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.axes import Tokens
from attn_only_lens.engine.attached_hooks import hook_reasons, modules_of
from attn_only_lens.engine.input_warnings import shortened
from attn_only_lens.engine.unknown_words import warn_of_unknown_words
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads import has_neuron_heads, host_of
from attn_only_lens.tl import HookedTransformer


def checked_tokens(
    model: HookedTransformer | TransformerBridge, tokens: object, *, warn: bool = True
) -> Tokens:
    """Return tokens that the model can run on, on its device, from tokens or a text."""
    cfg = model.cfg
    if cfg.d_vocab < 1:
        raise UnsupportedCallError(
            f"{cfg.model_name} has no vocabulary (it takes pictures?); expected a model of tokens"
        )
    if isinstance(tokens, str):
        if warn:
            warn_of_unknown_words(model.tokenizer, {shortened(tokens): tokens})
        tokens = tokens_of_text(model, tokens)
    tokens = array_as_tensor(tokens)
    expected = f"expected integers [batch, pos] from 0 to {cfg.d_vocab - 1}, pos up to {cfg.n_ctx}"
    if not isinstance(tokens, Tensor):
        raise UnsupportedCallError(f"tokens: got a {type(tokens).__name__}; {expected}")
    dtype = str(tokens.dtype).removeprefix("torch.")
    if not dtype.startswith(("int", "uint")) or tokens.ndim != 2 or not tokens.numel():
        raise UnsupportedCallError(f"tokens: got {dtype} {list(tokens.shape)}; {expected}")
    if dtype.startswith("uint"):
        tokens = tokens.long()  # torch has no minimum of most unsigned integers
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= cfg.d_vocab or tokens.shape[1] > cfg.n_ctx:
        raise UnsupportedCallError(
            f"tokens: got values from {low} to {high}, pos {tokens.shape[1]}; {expected}"
        )
    device = next(model.parameters()).device
    return tokens.to(device)


def array_as_tensor(value: Any) -> Any:
    """Return a NumPy array of numbers as a tensor, integers as int64; other values as they are."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iubf":
        return value
    return torch.tensor(value.astype(np.int64) if value.dtype.kind in "iu" else value, device="cpu")


def tokens_of_text(model: Any, text: str) -> Tensor:
    """Return the tokens of a text as `model.to_tokens` does, but never a second BOS before one."""
    if model.tokenizer is None:
        raise UnsupportedCallError("got a text, and the model has no tokenizer; give tokens")
    bos = model.tokenizer.bos_token
    has_bos = bool(bos) and text.startswith(bos)
    tokens: Tensor = model.to_tokens(text, truncate=False, prepend_bos=False if has_bos else None)
    return tokens


def option_reasons(option: str, got: object, expected: Sequence[str]) -> list[str]:
    """Return the reason to refuse an option's value, if there is one."""
    if got in expected:
        return []
    return [f"got {option}={got!r}; expected one of {', '.join(expected)}"]


def reasons_not_to_run(model: Any) -> list[str]:
    """Return why runs of a model would not be comparable, if it has neuron-heads."""
    if not has_neuron_heads(model):
        return []
    reasons = hook_reasons(model, "would run on batches of variants, or be left out of them")
    return host_of(model).reasons() + reasons + dropout_reasons(model)


def dropout_reasons(model: Any) -> list[str]:
    """Return why two runs of a model would differ, if its dropout is active."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for _, m in modules_of(model)):
        return ["dropout is active; call model.eval() first"]
    return []


def d_vocab_out(model: Any) -> int:
    """Return the size of the output vocabulary: d_vocab if the configuration has no other."""
    out = getattr(model.cfg, "d_vocab_out", None)
    return int(out) if out is not None and out > 0 else int(model.cfg.d_vocab)
