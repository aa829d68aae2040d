"""Keep both runs of a contrast, so that its next analysis need not repeat them.

Runs are kept by their `PromptPair`, which a contrast keeps for each model, as long as that exists.
A circuit's run is kept too, by the heads outside the circuit and the outputs that these have.
They are used again only while everything that the forward pass reads is the same: the model's state
and hooks (`model_state.py`), autocasting, and the precision of matrix products. A snapshot does not
see changes of matrices through `.data`, such as `W_O.data[3] = 0`, so each matrix is also known by
entries of nearly all rows and columns. Reading all entries would cost as much as a short forward
pass, so a single entry that is changed through `.data` is not noticed. The runs that are kept for
one model use at most a twentieth of the free memory; the oldest go first.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_only_lens.devices import free_bytes
from attn_only_lens.engine.model_state import once, snapshot
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.heads import host_of
from attn_only_lens.precision import matmul_precision

_SHARE = 0.05  # the largest fraction of free memory that kept runs use


def kept_runs(model: Any, pair: PromptPair, held: str = "") -> Any:
    """Return both runs on these prompts if they are kept and the model is the same, else None.

    `held` is a digest of the heads that are held in the first run, and of their outputs.
    """
    of_pair = host_of(model).passing.kept_runs.get(pair, {})
    state, runs, _ = of_pair.get(held, (None, None, 0))
    return replace(runs, pair=pair) if runs is not None and state == _state(model) else None


def keep_runs(model: Any, pair: PromptPair, runs: Any, held: str = "") -> None:
    """Keep both runs on these prompts, unless they are too large."""
    kept = host_of(model).passing.kept_runs
    runs = replace(runs, pair=None)  # a weak dictionary's value must not refer to its key
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in _tensors(runs)}
    n_bytes = sum(storage.nbytes() for storage in storages.values())
    most = _SHARE * free_bytes(pair.clean.device)
    if n_bytes > most:
        return
    of_pair = kept.pop(pair, {})
    of_pair.pop(held, None)
    of_pair[held] = _state(model), runs, n_bytes
    kept[pair] = of_pair
    while sum(size for some in kept.values() for *_, size in some.values()) > most:
        oldest = next(iter(kept))
        del kept[oldest][next(iter(kept[oldest]))]
        if not kept[oldest]:
            del kept[oldest]


def _state(model: Any) -> object:
    """Return a description of all that a forward pass reads; equal descriptions give equal runs."""
    autocast = torch.is_autocast_enabled(next(model.parameters()).device.type)
    matrices = once(model, "matrices", lambda: _matrices(model))
    return snapshot(model), matrices, matmul_precision(), autocast


@torch.no_grad()
def _matrices(model: Any) -> list[bytes]:
    """Return entries of nearly all rows and columns of each parameter matrix."""
    by_device = dict[torch.device, list[Tensor]]()
    for x in model.parameters():
        if x.ndim > 1 and x.numel() and not x.is_meta:
            n_columns = x.shape[-1]
            step = min(x.numel() // n_columns, n_columns)
            while math.gcd(step, n_columns) > 1:  # else, all entries would be of few columns
                step += 1
            by_device.setdefault(x.device, []).append(x.flatten()[::step].float())
    # one transfer from each device
    return [torch.cat(some).cpu().numpy().tobytes() for some in by_device.values()]


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
