"""Keep both runs of a contrast, so that its next analysis need not repeat them.

Runs are kept by their `PromptPair`, which a contrast keeps for each model, as long as that exists.
They are used again only while everything that the forward pass reads is the same: the model's state
and hooks (`model_state.py`), autocasting, and the precision of matrix products. A snapshot does not
see changes of matrices through `.data`, such as `W_O.data[3] = 0`, so each matrix is also known by
its norm and by entries of every row and column. The runs that are kept for one model use at most a
twentieth of the free memory; the oldest go first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_only_lens.devices import free_bytes
from attn_only_lens.engine.model_state import snapshot
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.heads import host_of
from attn_only_lens.precision import matmul_precision

_SHARE = 0.05  # the largest fraction of free memory that kept runs use


def kept_runs(model: Any, pair: PromptPair) -> Any:
    """Return both runs on these prompts if they are kept and the model is the same, else None."""
    state, runs, _ = host_of(model).passing.kept_runs.get(pair, (None, None, 0))
    return replace(runs, pair=pair) if runs is not None and state == _state(model) else None


def keep_runs(model: Any, pair: PromptPair, runs: Any) -> None:
    """Keep both runs on these prompts, unless they are too large."""
    kept = host_of(model).passing.kept_runs
    kept.pop(pair, None)
    runs = replace(runs, pair=None)  # a weak dictionary's value must not refer to its key
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in _tensors(runs)}
    n_bytes = sum(storage.nbytes() for storage in storages.values())
    most = _SHARE * free_bytes(pair.clean.device)
    if n_bytes > most:
        return
    while sum(size for *_, size in kept.values()) + n_bytes > most:
        del kept[next(iter(kept))]
    kept[pair] = _state(model), runs, n_bytes


def _state(model: Any) -> object:
    """Return a description of all that a forward pass reads; equal descriptions give equal runs."""
    autocast = torch.is_autocast_enabled(next(model.parameters()).device.type)
    return snapshot(model), _matrices(model), matmul_precision(), autocast


@torch.no_grad()
def _matrices(model: Any) -> list[bytes]:
    """Return each parameter matrix's norm, and entries of all of its rows and columns."""
    known = list[bytes]()
    by_device = dict[torch.device, list[Tensor]]()
    for x in model.parameters():
        if x.ndim > 1 and x.numel() and x.is_floating_point() and not x.is_meta:
            *rows, n_columns = x.shape
            n_rows = x.numel() // n_columns
            step = torch.arange(max(n_rows, n_columns), device=x.device)
            entries = x[(*torch.unravel_index(step % n_rows, rows), step % n_columns)]
            norm = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
            by_device.setdefault(x.device, []).extend((norm[None], entries.to(norm.dtype)))
    for tensors in by_device.values():  # one transfer from each device
        known.append(torch.cat(tensors).cpu().numpy().tobytes())
    return known


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a recording's objects, dictionaries, lists and tuples."""
    items: Any = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif type(value).__module__.startswith("attn_only_lens.engine."):  # no module, no head
        items = vars(value).values()
    for item in items:
        yield from _tensors(item)
