"""The processes that share a computation (`Work(share=True)`), and how they exchange results.

Processes that torchrun or `accelerate launch` started exchange results through torch's process
group. If they have no group yet, they make one; other processes never do. All processes must make
the same calls. An exception while one of them computes its share is raised in all. If a process
dies or does not answer, the others raise an exception when its connection closes, or after the
group's timeout.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from attn_only_lens.errors import InputError

_T = TypeVar("_T")
_PROBLEM = "the processes cannot share this work"


@dataclass(frozen=True)
class Processes:
    """The number of processes that share a computation, and this process's rank."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, share: bool) -> "Processes":
        """Return the processes of torch's group if they share the work; otherwise this one."""
        if not share or n_launched() == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group()  # without a backend, so that objects travel by gloo
        return cls(dist.get_rank(), dist.get_world_size())

    def gathered(self, compute: Callable[[], _T]) -> list[_T]:
        """Return what `compute` returns in each process; raise any process's exception in all."""
        if self.size == 1:
            return [compute()]
        value, error, failure = None, None, None
        try:
            value = compute()
        except Exception as raised:
            error, failure = raised, f"{type(raised).__name__}: {raised}"
        answers: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(answers, (value, failure))
        except RuntimeError as lost:
            reason = f"another process died, or did not answer within the group's timeout: {lost}"
            problem = f"{_PROBLEM}; start it again to resume it"
            raise InputError([reason], problem) from (error or lost)
        if error is not None:
            raise error
        failures = [f"process {i}: {why}" for i, (_, why) in enumerate(answers) if why is not None]
        InputError.raise_if(failures, _PROBLEM)
        return [value for value, _ in answers]


def n_launched() -> int:
    """Return how many processes were started together with this one, in torch's group if any."""
    if not dist.is_available():
        return 1
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
