"""Warn if torch's threads spend their time waiting for each other.

By default, OpenMP's threads spin while they wait. If other programs use the same cores, the thread
that the others wait for may not get a core until the system stops one that spins. Small operations
then take many times as long with two threads as with one.
"""

import os
import time
import warnings

import torch
from torch import Tensor, nn

from attn_only_lens.engine.input_warnings import level_of_caller
from attn_only_lens.errors import InputWarning

_SLOWER = (
    20.0  # we warn from this factor; it is about 0.7 on an idle machine, and 400 on a busy one
)
_TRIES, _REPEATS, _SIZE = 10, 40, 1 << 16  # operations of a size that torch divides among threads
_SECONDS = 10.0  # between two measurements
_last = -float("inf")
_warned = False


def warn_of_spinning_threads(model: nn.Module) -> None:
    """Warn, once in a process, if a short test takes much longer with all threads than with one.

    The test takes .03 seconds unless threads spin, and is made at most every ten seconds.
    """
    global _last, _warned
    n_threads, now = torch.get_num_threads(), time.monotonic()
    passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    if _warned or n_threads == 1 or passive or now - _last < _SECONDS:
        return
    _last = now
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return
    # Threads may get their cores by chance, even on a busy machine.
    tries = (slowdown(n_threads) for _ in range(_TRIES))
    factor = next((factor for factor in tries if factor >= _SLOWER), None)
    if factor is None:
        return
    _warned = True
    warnings.warn(
        f"short operations take {factor:.0f} times as long with torch's {n_threads} threads as "
        "with one, because the threads spin while they wait and other programs use the same "
        "cores; call torch.set_num_threads(1), or set the environment variable "
        "OMP_WAIT_POLICY=PASSIVE before torch is imported",
        InputWarning,
        stacklevel=level_of_caller(),
    )


def slowdown(n_threads: int) -> float:
    """Return how many times as long short operations take with `n_threads` as with one thread."""
    x = torch.ones(_SIZE, device="cpu")
    try:
        _seconds(x)  # starts the threads
        several = _seconds(x)
        torch.set_num_threads(1)
        return several / _seconds(x)
    finally:
        torch.set_num_threads(n_threads)


def _seconds(x: Tensor) -> float:
    start = time.perf_counter()
    for _ in range(_REPEATS):
        torch.add(x, x)
    return time.perf_counter() - start
