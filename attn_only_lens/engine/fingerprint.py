"""A digest that identifies a model: of its parameters and of everything else it computes with."""

from dataclasses import asdict
from typing import Any

import torch

from attn_only_lens.engine.attached_hooks import modules_of
from attn_only_lens.heads import has_neuron_heads, host_of
from attn_only_lens.storage import tensor_digest

_INCIDENTAL = frozenset(
    {
        "device",
        "n_devices",
        "seed",
        "init_weights",
        "init_mode",
        "initializer_range",
        "use_attn_in",
        "use_attn_result",
        "use_hook_mlp_in",
        "use_split_qkv_input",
        "tokenizer_name",
    }
)
"""Entries of the configuration that affect where and how a model runs, not what it computes."""


def fingerprint(model: Any) -> str:
    """Return the SHA-256 of a model's parameters, configuration and gates.

    Parameters count with their names, shapes, types and bytes. Buffers are left out: masks and
    position tables, which follow from the configuration.

    Example:
        >>> import torch
        >>> from attn_only_lens import pretrained
        >>> from attn_only_lens.engine.fingerprint import fingerprint
        >>> model = pretrained.modular_addition()
        >>> before = fingerprint(model)
        >>> with torch.no_grad():
        ...     model.W_E[0, 0] += 1
        >>> len(before), fingerprint(model) == before
        (64, False)
    """
    return tensor_digest(model.named_parameters(), _description(model))


def _description(model: Any) -> dict[str, Any]:
    """Describe the configuration, the gates of neuron-heads, and sizes that differ, as JSON.

    And the constants of modules, such as the ε of a norm, which need not be the configuration's.
    """
    plain = {
        key: value if isinstance(value, bool | int | float | list) else str(value)
        for key, value in vars(model.cfg).items()
        if key not in _INCIDENTAL
        and not key.startswith("_")
        and isinstance(value, bool | int | float | str | list | torch.dtype)
    }
    described: dict[str, Any] = {
        "config": plain,
        "gates": host_of(model).gates() if has_neuron_heads(model) else [],
        "constants": {
            f"{path}.{name}": repr(value)
            for path, module in modules_of(model)
            for name, value in sorted(vars(module).items())
            if isinstance(value, float) and not name.startswith("_")
        },
    }
    if not getattr(model.cfg, "has_stock_sizes", True):  # else the configuration says them
        described["layers"] = [asdict(layer_size) for layer_size in model.cfg.layer_sizes]
    return described
