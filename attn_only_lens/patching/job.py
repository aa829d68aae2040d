"""Jobs compute chunks of work, optionally store the results, and collect them in order.

All long computations are jobs. The work is split into chunks, and a function computes named arrays
for each chunk. A job can store the arrays in a folder, so that it can be resumed after an
interruption. If `accelerate launch` starts n processes, they share the chunks: process i mod n
computes chunk i. A patching method only has to define chunks, and a function `compute` that
processes one chunk:

    job = Job(resume, settings, progress)
    for chunk, arrays in job.run(chunks, compute, unit="site"):
        ...  # add up, in the order of chunks

If a process dies, the next run of the job computes the missing chunks. Without a GPU, `accelerate
launch --multi_gpu --num_processes 2 script.py` starts two processes on CPUs. With GPUs, the script
must put its model on `accelerate.PartialState().device`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from accelerate.utils import get_int_from_env
from tqdm.auto import tqdm

from attn_only_lens.errors import InputError
from attn_only_lens.storage.chunks import ChunkStore

Arrays: TypeAlias = dict[str, np.ndarray]
_POLL, _PATIENCE = 0.2, 3600.0  # seconds between checks for a missing chunk, and until an error
# Environment variables in which torchrun, accelerate and MPI set the number and rank of processes.
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


class Chunk(Protocol):
    """One piece of a job's work."""

    @property
    def key(self) -> str:
        """The chunk's name, which is unique in the job."""

    @property
    def size(self) -> int:
        """The chunk's length on the progress bar."""


_Chunk = TypeVar("_Chunk", bound=Chunk)


class Job:
    """Computes chunks of work; can resume from a folder, and share the work with other processes.

    Args:
        folder: where the arrays of chunks are stored; None to store nothing.
        settings: a function that returns everything that the arrays depend on; it is called only
            if there is a folder.
        progress: whether to show progress bars; a string is their label.

    Example:
        >>> from typing import NamedTuple
        >>> class Number(NamedTuple):
        ...     key: str
        ...     size: int
        >>> job = Job(None, dict, progress=False)
        >>> chunks = [Number("two", 2), Number("three", 3)]
        >>> def squares(chunk):
        ...     return {"square": np.arange(chunk.size) ** 2}
        >>> [int(arrays["square"].sum()) for _, arrays in job.run(chunks, squares, unit="number")]
        [1, 5]
    """

    def __init__(
        self,
        folder: str | Path | None,
        settings: Callable[[], dict[str, Any]],
        progress: bool | str,
    ) -> None:
        require_folder(folder)
        self._store = None if folder is None else ChunkStore(folder, settings())
        self._label = progress if isinstance(progress, str) else None
        self._hidden = not (progress and is_first())
        self._bar: Any = None

    def run(
        self, chunks: Sequence[_Chunk], compute: Callable[[_Chunk], Arrays], *, unit: str
    ) -> Iterator[tuple[_Chunk, Arrays]]:
        """Yield each chunk and its arrays, in order; `unit` is what the progress bar counts."""
        total, hidden = sum(chunk.size for chunk in chunks), self._hidden
        with tqdm(total=total, unit=unit, desc=self._label, disable=hidden) as self._bar:
            if self._store is None:
                for chunk in chunks:
                    yield chunk, self._computed(chunk, compute)
                return
            share = _share(chunks)
            for chunk in share:
                if self._store.get(chunk.key) is None:
                    self._store.put(chunk.key, self._computed(chunk, compute))
                else:
                    self._bar.update(chunk.size)
            for chunk in chunks:
                yield chunk, self._collected(chunk)
                if chunk not in share:
                    self._bar.update(chunk.size)

    def advance(self, n: int) -> None:
        """Advance the progress bar within a chunk."""
        self._bar.update(n)

    def _computed(self, chunk: _Chunk, compute: Callable[[_Chunk], Arrays]) -> Arrays:
        end = self._bar.n + chunk.size
        arrays = compute(chunk)
        self._bar.update(end - self._bar.n)
        return arrays

    def _collected(self, chunk: Chunk) -> Arrays:
        """Return a chunk's stored arrays; wait if another process has not computed them yet."""
        assert self._store is not None
        start = time.monotonic()
        while (arrays := self._store.get(chunk.key)) is None:
            if n_launched() == 1 or time.monotonic() - start > _PATIENCE:
                raise InputError(
                    [
                        f"{self._store.folder} lacks {chunk.key}: the file was deleted, or another "
                        "process died or writes to another folder with that name; expected one "
                        "folder that all processes share"
                    ],
                    "this job is incomplete; start it again to resume it",
                )
            time.sleep(_POLL)
        return arrays


def _share(chunks: Sequence[_Chunk]) -> Sequence[_Chunk]:
    """Return the chunks that this process computes."""
    n = n_launched()
    return chunks[_from_environment(_RANKS, 0) % n :: n]


def require_folder(folder: str | Path | None) -> None:
    """Raise an error if several processes run without a folder to share results."""
    if folder is None and n_launched() > 1:
        raise InputError(
            [
                f"{n_launched()} processes were launched without a shared folder for their "
                "results; pass a folder, such as work=Work(resume='sweep.chunks')"
            ],
            "these processes cannot share the work",
        )


def is_first() -> bool:
    """Return True if this is the only process, or the first of several launched processes."""
    return n_launched() == 1 or _from_environment(_RANKS, 0) == 0


def n_launched() -> int:
    """Return the number of processes that were launched together."""
    return _from_environment(_SIZES, 1)


def _from_environment(names: tuple[str, ...], default: int) -> int:
    return int(get_int_from_env(names, default))
