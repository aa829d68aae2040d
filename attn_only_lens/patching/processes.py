"""The processes that compute a job together, and how they exchange results.

Processes are started by torchrun or `accelerate launch`. They exchange results through torch's
process group. If there is no group yet, several launched processes make one; a single process never
does. A call that is shared must be made by all processes.

An exception in one process is raised in all. If a process dies, the others stop as soon as its
connection closes. Otherwise, a process waits for the others at most as long as the group's timeout.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from attn_only_lens.errors import InputError

_T = TypeVar("_T")
_PROBLEM = "the processes cannot share this work"


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank, and the number of processes that share the work."""
    if dist.is_available() and not dist.is_initialized() and _n_launched() > 1:
        dist.init_process_group()  # without a backend: objects travel by gloo, also with GPUs
    joined = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)


def gathered(compute: Callable[[], _T]) -> list[_T]:
    """Return what `compute` returns in each process, by rank; raise any process's exception in all.

    Example:
        >>> gathered(lambda: 5)
        [5]
    """
    n = rank_and_size()[1]
    if n == 1:
        return [compute()]
    value, error = None, None
    try:
        value = compute()
    except Exception as raised:  # the others are told about any exception before it is raised here
        error = raised
    answers: list[Any] = [None] * n
    failure = None if error is None else f"{type(error).__name__}: {error}"
    try:
        dist.all_gather_object(answers, (value, failure))
    except RuntimeError as lost:
        reason = f"another process died, or did not answer within the group's timeout: {lost}"
        raise InputError([reason], f"{_PROBLEM}; start it again to resume it") from (error or lost)
    if error is not None:
        raise error
    failures = [f"process {i}: {why}" for i, (_, why) in enumerate(answers) if why is not None]
    InputError.raise_if(failures, _PROBLEM)
    return [value for value, _ in answers]


def _n_launched() -> int:
    """Return the number of processes that torchrun or `accelerate launch` started together."""
    return int(os.environ.get("WORLD_SIZE", 1))
