"""What a model is taken apart into."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Parts", "plain", "plain_config"]


@dataclass(frozen=True)
class Parts:
    """A model as JSON and tensors.

    Attributes:
        config: what it is built from; its key `dtype` is there in every form.
        gate: its `Gating`, as JSON.
        tensors: by name, what is tied once only.
        source_name: what it calls itself.
        more: further entries of the manifest, by which the form builds it again.
    """

    config: dict[str, Any]
    gate: dict[str, Any]
    tensors: dict[str, Tensor]
    source_name: str | None
    more: dict[str, Any] = field(default_factory=dict)


def plain_config(cfg: Any) -> dict[str, Any]:
    """A configuration as JSON holds it, without the device, which `load` chooses."""
    return {key: plain(value) for key, value in vars(cfg).items() if key != "device"}


def plain(value: Any) -> Any:
    """A value of a configuration as JSON holds it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # a numpy number
        return value.item()
    return value
