"""Several processes on one sweep, as `accelerate launch` starts them.

    accelerate launch --multi_gpu --num_processes 2 script.py

works on CPUs too: without a GPU, accelerate starts several processes for `--multi_gpu`, but only
one for `--cpu`, unless there is MPI. With GPUs, the script puts its model on
`accelerate.PartialState().device`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from attn_only_lens.errors import InputError

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which torchrun, accelerate and MPI's launchers give the number of processes."""


T = TypeVar("T")


class Processes:
    """This process and the others that run the same sweep; there may be none.

    Raises:
        InputError: there are several, and no folder for them to meet in.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._state: Any = None
        self.index, self.count = 0, 1
        count = n_launched()
        if count == 1:
            return
        if folder is None:
            raise InputError(
                [
                    f"{count} processes were launched; expected a folder for "
                    "them to write to: resume='sweep.parts'"
                ],
                "these processes cannot share the work",
            )
        self._state = _state()
        self.index, self.count = self._state.process_index, self._state.num_processes
        if self.count != count:
            raise InputError(
                [
                    f"{count} processes were launched, and accelerate counts {self.count}: make "
                    "no Accelerator or PartialState before the sweep, or on CPUs with cpu=True"
                ],
                "these processes cannot share the work",
            )

    @property
    def first(self) -> bool:
        """True in the process that reports."""
        return self.index == 0

    @property
    def name(self) -> str | None:
        """The label of this process's progress bar; None if it is the only process."""
        return None if self.count == 1 else f"process {self.index + 1} of {self.count}"

    def share(self, work: Sequence[T]) -> list[T]:
        """Return this process's share, dealt out in turn: late layers cost less than early ones."""
        return list(work[self.index :: self.count])

    def wait(self) -> None:
        """Wait for all other processes."""
        if self._state is not None:
            self._state.wait_for_everyone()


def is_first() -> bool:
    """Return whether this is the only process, or the one of those launched that reports."""
    return n_launched() == 1 or bool(_state().is_main_process)


def n_launched() -> int:
    """Return the number of processes that were launched together."""
    return next((int(os.environ[name]) for name in _SIZES if name in os.environ), 1)


def _state() -> Any:
    """Return accelerate's state of the processes."""
    from accelerate import PartialState  # slow to import, and needed by launched runs alone
    from accelerate.utils import parse_flag_from_env

    # Unless it is told to use CPUs, accelerate without a GPU takes every process for the only one.
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    return PartialState(cpu=cpu)
