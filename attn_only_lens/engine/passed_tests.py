"""Remember which tests a model has passed, until it changes.

The tests compare two ways to compute the same thing, such as a replay and a whole run. They depend
on what the model is, not on its prompts: a test that was passed holds for all prompts without
padding that are no longer. A model is tested again when a parameter or buffer was replaced or
written to, a hook or module was added or removed, a forward pass was replaced, or an option of its
configuration, its dtype, device, mode or autocast has changed. One change is not noticed: that of
weights through `.data`, which torch does not count. It changes what a model computes, and not how.
"""

from collections.abc import Hashable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attn_only_lens.engine.model_checks import modules_of, state_of_hooks
from attn_only_lens.engine.recording import Recording

_State = tuple[Hashable, ...]


class PassedTests:
    """The tests that a model has passed in its present state."""

    def __init__(self) -> None:
        self._lengths: dict[Hashable, int] = {}  # the longest prompts of each test

    def covers(self, test: Hashable, recording: Recording) -> bool:
        """Return whether a test need not be repeated on these prompts."""
        batch, n_pos = recording.tokens.shape
        return recording.mask is None and self._lengths.get((test, batch > 1), 0) >= n_pos

    def add(self, test: Hashable, recording: Recording) -> None:
        """Remember that the model passed a test on these prompts."""
        batch, n_pos = recording.tokens.shape
        if recording.mask is None:
            key = test, batch > 1
            self._lengths[key] = max(n_pos, self._lengths.get(key, 0))


_PASSED: "WeakKeyDictionary[nn.Module, tuple[_State, PassedTests]]" = WeakKeyDictionary()


def passed_tests(model: Any) -> PassedTests:
    """Return the tests that a model has passed since it last changed."""
    state = tuple(_state(model))
    known = _PASSED.get(model)
    if known is None or known[0] != state:
        known = _PASSED[model] = state, PassedTests()
    return known[1]


def _state(model: Any) -> Iterator[Hashable]:
    yield from state_of_hooks(model)
    device = next(model.parameters()).device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        yield torch.get_autocast_dtype(device)
    for _, module in modules_of(model):
        attributes = vars(module)
        forward = attributes.get("forward")
        yield id(module), type(module), module.training, id(forward) if forward else None
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            for tensor in tensors.values():
                if tensor is not None:
                    yield _tensor_state(tensor)
    for config in (model.cfg, getattr(getattr(model, "original_model", None), "config", None)):
        for name, option in vars(config).items() if config is not None else ():
            if isinstance(option, bool | int | float | str):
                yield name, option


def _tensor_state(tensor: Tensor) -> Hashable:
    # Tensors of inference mode do not count changes: a new object is unlike any other.
    version = object() if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.dtype, str(tensor.device)
