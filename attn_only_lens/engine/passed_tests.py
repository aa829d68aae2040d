"""Remember which tests a model has passed, until the model changes.

Each test compares two computations of the same values, such as a replay and a full run. A passed
test is valid for all prompts that have no padding and are not longer than the tested prompts. A
model is tested again after any change of its state (`model_state.py`) or of its hooks. A change
through `.data` in a matrix is not detected, which is harmless: a matrix's entries do not affect how
a model combines its components.
"""

from collections.abc import Hashable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attn_only_lens.axes import Tokens
from attn_only_lens.engine.model_checks import hook_reasons, mode_reasons
from attn_only_lens.engine.model_state import snapshot
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.tokens import length_dependent_ropes
from attn_only_lens.heads import has_neuron_heads, host_of, logit_tolerance
from attn_only_lens.tolerances import rounding

_N_TESTED = 8  # tokens in the test of padding; half of them are padding
_ALIKE = rounding(torch.bfloat16)


class TestedRun(Protocol):
    """The prompts of a run, such as a `Recording`."""

    @property
    def tokens(self) -> Tokens:
        """The tokens, including padding."""

    @property
    def mask(self) -> Tensor | None:
        """1 for tokens and 0 for padding; None if there is no padding."""


class PassedTests:
    """Tests that a model has passed since it last changed, with the tested prompts' lengths."""

    def __init__(self) -> None:
        self._lengths: dict[Hashable, int] = {}  # the length of the longest tested prompts, by test
        self.ignores_padding: dict[str, bool | None] = {}  # by the side of the padding

    def covers(self, test: Hashable, recording: TestedRun) -> bool:
        """Return whether the model has passed this test on prompts that are at least as long."""
        batch, n_pos = recording.tokens.shape
        return recording.mask is None and self._lengths.get((test, batch > 1), 0) >= n_pos

    def add(self, test: Hashable, recording: TestedRun) -> None:
        """Remember that the model passed this test on these prompts, unless they have padding."""
        batch, n_pos = recording.tokens.shape
        if recording.mask is None:
            key = test, batch > 1
            self._lengths[key] = max(n_pos, self._lengths.get(key, 0))


_PASSED: "WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], PassedTests]]" = (
    WeakKeyDictionary()
)


def passed_tests(model: Any) -> PassedTests:
    """Return the tests that a model has passed since the model's last change."""
    state = snapshot(model)
    known = _PASSED.get(model)
    if known is None or known[0] != state:
        known = _PASSED[model] = state, PassedTests()
    return known[1]


@one_thread_per_model
def ignores_padding(model: Any, side: str = "right") -> bool | None:
    """Test whether padding on one side of a prompt leaves the prompt's logits unchanged.

    A model may attend to padding, whatever `cfg.attention_dir` says. The result is None if the test
    shows nothing: runs are changed by hooks or random, or the padded run fails or is not finite.
    """
    if hook_reasons(model) or mode_reasons(model):
        return None
    known = passed_tests(model).ignores_padding
    if side not in known:
        known[side] = _test_padding(model, side)
    return known[side]


@torch.no_grad()
def _test_padding(model: Any, side: str) -> bool | None:
    # Beyond these lengths, the angles of rotary positions depend on the length, padding included.
    n_pos = min(_N_TESTED, model.cfg.n_ctx, *length_dependent_ropes(model).values())
    n = (n_pos + 1) // 2
    real = slice(n) if side == "right" else slice(n_pos - n, None)
    tokens = torch.arange(1, n_pos + 1, device=next(model.parameters()).device) % model.cfg.d_vocab
    other = (tokens + 1) % model.cfg.d_vocab
    other[real] = tokens[real]
    both, mask = torch.stack([tokens, other]), torch.zeros_like(tokens)
    mask[real] = 1
    alone = model(tokens[None, real], return_type="logits")
    try:
        padded = model(both, attention_mask=mask.repeat(2, 1), return_type="logits")[:, real]
    except (TypeError, ValueError, RuntimeError):  # the model may refuse a mask
        return None
    if not padded.isfinite().all():
        return None
    heads = host_of(model).neurons if has_neuron_heads(model) else ()
    # Some float64 models compute attention in float32.
    allowed = max(logit_tolerance(heads, dtype) for dtype in (alone.dtype, torch.float32))
    size = alone.abs().max()
    if (padded - alone).abs().max() > allowed * size:
        return False
    # Rows that differ only in masked tokens round alike, so half precision needs no wide bound.
    return bool((padded[0] - padded[1]).abs().max() <= min(allowed, _ALIKE) * size)
