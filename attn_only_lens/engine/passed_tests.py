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

from torch import nn

from attn_only_lens.engine.model_state import snapshot
from attn_only_lens.engine.recording import Recording


class PassedTests:
    """Tests that a model has passed since it last changed, with the tested prompts' lengths."""

    def __init__(self) -> None:
        self._lengths: dict[Hashable, int] = {}  # the length of the longest tested prompts, by test

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
