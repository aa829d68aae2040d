"""A limit to the size of the model that a configuration leads to."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from attn_only_lens.errors import CheckpointError

_MODULES = 50  # for each tensor: blocks have hook points, and modules that only hold others
_FEW = 300
_FEW_LAYERS = 1000


@contextmanager
def limit_size(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Stop building a model as soon as it is larger than these tensors can fill.

    A configuration of a million layers, or of layers a million wide, would take hours or all of the
    memory before anything could be compared.
    """
    thread, made = threading.get_ident(), 0
    elements = sum(tensor.numel() for tensor in tensors.values())

    def count(module: Any, name: str, child: Any) -> None:
        nonlocal made
        made += threading.get_ident() == thread
        if made > _FEW + _MODULES * len(tensors):
            raise CheckpointError(
                f"the configuration leads to more modules than {len(tensors)} tensors belong to"
            )

    def measure(module: Any, name: str, parameter: Any) -> None:
        if threading.get_ident() == thread and parameter.numel() > elements:
            raise CheckpointError(
                f"the configuration leads to a parameter {name} of shape {list(parameter.shape)}, "
                f"and all tensors together have {elements} entries"
            )

    hooks = [
        register_module_module_registration_hook(count),
        register_module_parameter_registration_hook(measure),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def require_few_layers(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a configuration of far more layers than tensors are saved.

    Configurations of transformers make lists of such lengths, before any module is made.
    """
    for key, value in config.items():
        if "layer" in key and isinstance(value, int) and value > _FEW_LAYERS + len(tensors):
            raise ValueError(f"its {key} is {value}, and {len(tensors)} tensors are saved")
