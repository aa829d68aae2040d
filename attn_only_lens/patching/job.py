"""Jobs compute chunks of work, optionally store the results, and collect them in order.

All long computations are jobs. The work is split into chunks, and a function computes named arrays
for each chunk. A job can store the arrays in a folder, so that it can be resumed after an
interruption. If several processes run (see `processes.py`), they share the chunks. A patching
method only has to define chunks, and a function `compute` that processes one chunk:

    job = Job(resume, settings, progress)
    for chunk, arrays in job.run(chunks, compute, unit="site"):
        ...  # add up, in the order of chunks

n processes work in rounds: each computes one of the next n chunks, and sends the arrays to all.
Only the first process reads and writes the folder, so other machines need not have it. If a process
dies, the chunks of one round are lost. The next run of the job, by any number of processes,
computes only the missing chunks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from tqdm.auto import tqdm

from attn_only_lens.errors import InputError
from attn_only_lens.patching.processes import gathered, rank_and_size
from attn_only_lens.storage.chunks import ChunkStore, differences

Arrays: TypeAlias = dict[str, np.ndarray]


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
        folder: where the first process stores the arrays of chunks; None to store nothing.
        settings: a function that returns everything that the arrays depend on; it is called only
            if there is a folder, or several processes.
        progress: whether to show progress bars; a string is their label.

    Raises:
        InputError: the folder belongs to another job, or the processes have different settings.

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
        self._rank, self._n_processes = rank_and_size()
        self._store: ChunkStore | None = None
        self._label = progress if isinstance(progress, str) else None
        self._hidden = not progress or self._rank > 0
        self._bar: Any = None
        first, *others = gathered(partial(self._open, folder, settings))
        reasons = [
            f"process {rank}: {difference}"
            for rank, other in enumerate(others, 1)
            for difference in differences(other, first, "process 0 has")
        ]
        InputError.raise_if(reasons, "all processes must run the same job")

    def _open(
        self, folder: str | Path | None, settings: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Open the folder in the first process; return the settings if they are needed."""
        if folder is None and self._n_processes == 1:
            return {}
        values = settings()
        if folder is not None and self._rank == 0:
            self._store = ChunkStore(folder, values)
        return values

    def run(
        self, chunks: Sequence[_Chunk], compute: Callable[[_Chunk], Arrays], *, unit: str
    ) -> Iterator[tuple[_Chunk, Arrays]]:
        """Yield each chunk and its arrays, in order; `unit` is what the progress bar counts."""
        total, hidden, n = sum(chunk.size for chunk in chunks), self._hidden, self._n_processes
        stored, *_ = gathered(partial(self._stored, chunks))
        with tqdm(total=total, unit=unit, desc=self._label, disable=hidden) as self._bar:
            done = 0
            for start in range(0, len(chunks), n):
                some = chunks[start : start + n]
                shares = gathered(partial(self._share, some, stored, compute))
                arrays = {key: value for share in shares for key, value in share.items()}
                gathered(partial(self._keep, arrays, stored))
                done += sum(chunk.size for chunk in some)
                self._bar.update(done - self._bar.n)
                for chunk in some:
                    yield chunk, arrays[chunk.key]

    def advance(self, n: int) -> None:
        """Advance the progress bar within a chunk."""
        self._bar.update(n)

    def _stored(self, chunks: Sequence[Chunk]) -> set[str]:
        """Return the keys of the chunks in the folder; the first process decides for all."""
        keys = {chunk.key for chunk in chunks}
        return {key for key in keys if self._store is not None and self._store.path(key).exists()}

    def _share(
        self, chunks: Sequence[_Chunk], stored: set[str], compute: Callable[[_Chunk], Arrays]
    ) -> dict[str, Arrays]:
        """Return the chunk of a round that this process computes, and those that it has stored."""
        share = dict[str, Arrays]()
        for i, chunk in enumerate(chunks):
            if chunk.key not in stored:
                if i == self._rank:
                    share[chunk.key] = compute(chunk)
            elif self._store is not None:
                share[chunk.key] = self._store.get(chunk.key) or compute(chunk)
        return share

    def _keep(self, arrays: dict[str, Arrays], stored: set[str]) -> None:
        """Store the chunks of a round that are new."""
        if self._store is not None:
            for key in [key for key in arrays if key not in stored]:
                self._store.put(key, arrays[key])
