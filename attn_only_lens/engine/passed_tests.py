"""Remember which tests a model has passed, until the model changes.

Each test compares two computations of the same values, such as a replay and a full run. A passed
test is valid for all prompts that have no padding and are not longer than the tested prompts. A
model is tested again after any change of its state (`model_state.py`) or of its hooks. A change
through `.data` in a matrix is not detected, which is harmless: a matrix's entries do not affect how
a model combines its components.
"""

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from attn_only_lens.engine.model_state import snapshot
from attn_only_lens.engine.recording import Recording, run
from attn_only_lens.heads import host_of, logit_tolerance

_N_TESTED = 8  # tokens in the test of padding; half of them are padding


class PassedTests:
    """Tests that a model has passed since it last changed, with the tested prompts' lengths."""

    def __init__(self) -> None:
        self._lengths: dict[Hashable, int] = {}  # the length of the longest tested prompts, by test
        self.ignores_padding: bool | None = None  # None if not tested yet

    def covers(self, test: Hashable, recording: Recording) -> bool:
        """Return whether the model has passed this test on prompts that are at least as long."""
        batch, n_pos = recording.tokens.shape
        return recording.mask is None and self._lengths.get((test, batch > 1), 0) >= n_pos

    def add(self, test: Hashable, recording: Recording) -> None:
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


def ignores_padding(model: Any) -> bool:
    """Test whether padding after a prompt leaves the prompt's logits unchanged.

    Models whose attention is not causal may attend to padding, whatever `cfg.attention_dir` says.
    """
    tested = passed_tests(model)
    if tested.ignores_padding is None:
        tested.ignores_padding = _test_padding(model)
    return tested.ignores_padding


@torch.no_grad()
def _test_padding(model: Any) -> bool:
    n_pos = min(_N_TESTED, model.cfg.n_ctx)
    tokens = torch.arange(1, n_pos + 1, device=next(model.parameters()).device)[None]
    tokens, n = tokens % model.cfg.d_vocab, (n_pos + 1) // 2
    mask = torch.ones_like(tokens)
    mask[:, n:] = 0
    alone = run(model, tokens[:, :n], None, [])
    try:
        padded = run(model, tokens, mask, [])[:, :n]
    except (TypeError, ValueError, RuntimeError):  # the model may refuse a mask
        return False
    allowed = logit_tolerance(host_of(model).neurons, alone.dtype) * alone.abs().max()
    return bool(((padded - alone).abs() <= allowed).all())
