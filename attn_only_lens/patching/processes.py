"""Several processes on one sweep, as `accelerate launch` starts them."""

import os
from collections.abc import Sequence
from typing import TypeVar

from attn_only_lens.errors import PatchingError
from attn_only_lens.patching.store import PartStore

__all__ = ["Processes"]

T = TypeVar("T")


class Processes:
    """This process among those that run the same sweep; one alone, where it was not launched so.

    Raises:
        PatchingError: there are several, and no folder for them to meet in.
    """

    def __init__(self, store: PartStore | None) -> None:
        self._state = None
        self.index, self.count = 0, 1
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return
        if store is None:
            raise PatchingError(
                [
                    f"{os.environ['WORLD_SIZE']} processes were launched; expected a folder for "
                    "them to write to: resume='sweep.parts'"
                ],
                "these processes cannot share the work",
            )
        from accelerate import PartialState  # slow to import, and needed by launched runs alone

        self._state = PartialState()
        self.index, self.count = self._state.process_index, self._state.num_processes

    @property
    def first(self) -> bool:
        """Whether this is the process that reports."""
        return self.index == 0

    def share(self, work: Sequence[T]) -> list[T]:
        """What this process is to do. Dealt out in turn: late layers cost less than early ones."""
        return list(work[self.index :: self.count])

    def wait(self) -> None:
        """For all the others."""
        if self._state is not None:
            self._state.wait_for_everyone()
