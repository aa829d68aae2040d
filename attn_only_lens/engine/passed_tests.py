"""Remember which tests a model has passed, until the model changes.

Each test compares two computations of the same values, such as a replay and a full run. A passed
test is valid for all prompts that have no padding and are not longer than the tested prompts. A
model is tested again after any of these changes:

    a parameter or buffer was replaced or written to
    a hook or module was added or removed
    a forward pass was replaced
    a configuration option, a plain module attribute, the dtype, device, mode or autocast changed

torch does not count changes through `.data`, so the entries of vectors are compared, too. A change
through `.data` in a matrix is not detected, which is harmless: a matrix's entries do not affect how
a model combines its components.
"""

from collections.abc import Hashable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from attn_only_lens.engine.model_checks import modules_of, state_of_hooks
from attn_only_lens.engine.recording import Recording

_State = tuple[object, ...]
_OF_ALL_MODULES = frozenset(vars(nn.Module()))


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


_PASSED: "WeakKeyDictionary[nn.Module, tuple[_State, PassedTests]]" = WeakKeyDictionary()


def passed_tests(model: Any) -> PassedTests:
    """Return the tests that a model has passed since the model's last change."""
    state = tuple(_state(model))
    known = _PASSED.get(model)
    if known is None or known[0] != state:
        known = _PASSED[model] = state, PassedTests()
    return known[1]


def _state(model: Any) -> Iterator[object]:
    yield from state_of_hooks(model)
    device = next(model.parameters()).device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        yield torch.get_autocast_dtype(device)
    small, types = list[Tensor](), dict[type, None]()
    for _, module in modules_of(model):
        attributes = vars(module)
        types[type(module)] = None
        yield _reference(module), type(module), module.training
        for name in attributes.keys() - _OF_ALL_MODULES:
            value = attributes[name]
            if isinstance(value, bool | int | float | str):
                yield name, value
            elif callable(value) and not isinstance(value, type):
                yield name, _reference(value)
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            for tensor in tensors.values():
                if tensor is not None:
                    yield _tensor_state(tensor)
                    small += [tensor] * (tensor.ndim <= 1)
    yield from ((kind, _reference(kind.forward)) for kind in types if hasattr(kind, "forward"))
    yield _contents(small)
    for config in (model.cfg, getattr(getattr(model, "original_model", None), "config", None)):
        for name, option in vars(config).items() if config is not None else ():
            if isinstance(option, bool | int | float | str | dict | list | tuple):
                yield name, repr(option)


class _Reference(WeakIdRef):
    """A weak reference that equals only other references to the same live object."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and super().__eq__(other)


def _reference(value: Any) -> Any:
    try:
        return _Reference(value)
    except TypeError:  # objects that allow no weak reference count as changed
        return object()


def _tensor_state(tensor: Tensor) -> object:
    # Inference-mode tensors do not count changes, so they are always treated as changed.
    version = object() if tensor.is_inference() else tensor._version
    return _reference(tensor), version, tensor.dtype, str(tensor.device)


def _contents(tensors: list[Tensor]) -> bytes:
    """Return the bytes of small tensors, such as biases and gains, to detect their changes."""
    known = [x.detach().reshape(-1).view(torch.uint8) for x in tensors if not x.is_meta]
    if not known:
        return b""
    # Read all tensors in one transfer, because each transfer from a GPU synchronises.
    return torch.cat([x.to(known[0].device) for x in known]).cpu().numpy().tobytes()
