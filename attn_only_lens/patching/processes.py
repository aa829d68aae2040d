"""The processes that compute a job together, and how they exchange results.

Processes that torchrun or `accelerate launch` started exchange results through torch's process
group. If they have no group yet, they make one; a single process never does. All processes must
make the same calls. An exception in one process is raised in all. If a process dies or does not
answer, the others raise an exception when its connection closes, or after the group's timeout.
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
    if not dist.is_available():
        return 0, 1
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", 1)) < 2:
            return 0, 1
        dist.init_process_group()  # without a backend, so that objects travel by gloo
    return dist.get_rank(), dist.get_world_size()


def gathered(compute: Callable[[], _T]) -> list[_T]:
    """Return what `compute` returns in each process; raise any process's exception in all."""
    if rank_and_size()[1] == 1:
        return [compute()]
    value, error, failure = None, None, None
    try:
        value = compute()
    except Exception as raised:
        error, failure = raised, f"{type(raised).__name__}: {raised}"
    answers: list[Any] = [None] * dist.get_world_size()
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
