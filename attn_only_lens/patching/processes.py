"""Several processes on one sweep, each started by `accelerate launch`, torchrun, MPI or by hand.

    accelerate launch --multi_gpu --num_processes 2 script.py

works on CPUs too: without a GPU, accelerate starts several processes for `--multi_gpu`, but only
one for `--cpu`, unless there is MPI. With GPUs, the script puts its model on
`accelerate.PartialState().device`. They meet in the folder `resume` (`claims.py`) and nowhere else:
none waits for one that has died. A launcher may end all when one dies; started again, they go on.
"""

import os
from pathlib import Path

from attn_only_lens.errors import InputError

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which torchrun, accelerate and MPI's launchers give the number of processes."""
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Those in which they give the number of this one."""


def require_folder(folder: str | Path | None) -> None:
    """Refuse several processes without a folder for them to meet in."""
    if folder is None and n_launched() > 1:
        raise InputError(
            [
                f"{n_launched()} processes were launched; expected a folder for "
                "them to write to: resume='sweep.parts'"
            ],
            "these processes cannot share the work",
        )


def is_first() -> bool:
    """Return whether this is the only process, or the one of those launched that reports."""
    return n_launched() == 1 or _variable(_RANKS, 0) == 0


def n_launched() -> int:
    """Return the number of processes that were launched together."""
    return _variable(_SIZES, 1)


def _variable(names: tuple[str, ...], otherwise: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), otherwise)


def process_index() -> int:
    """Return the number of this process among those launched together."""
    return _variable(_RANKS, 0)
