"""Jobs compute chunks of work, optionally store the results, and collect them in order.

All long computations are jobs. A function `compute` returns named arrays for each chunk of the
work. A job can store them in a folder, so that it can be resumed after an interruption.

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
from typing import Any, TypeAlias

import numpy as np
from tqdm.auto import tqdm

from attn_only_lens.errors import InputError
from attn_only_lens.patching.processes import Processes
from attn_only_lens.patching.site_groups import Chunk
from attn_only_lens.storage.chunks import ChunkStore, differences

Arrays: TypeAlias = dict[str, np.ndarray]


class Job:
    """Computes chunks of work; can resume from a folder, and share the work with other processes.

    Args:
        folder: where the first process stores the arrays of chunks; None to store nothing.
        settings: a function that returns everything that the arrays depend on; it is called only
            if there is a folder, or several processes.
        progress: whether to show progress bars; a string is their label.
        processes: the processes that share the work.

    Raises:
        InputError: the folder belongs to another job, or the processes have different settings.

    Example:
        >>> job = Job(None, dict, progress=False)
        >>> chunks = [Chunk(range(1), range(2)), Chunk(range(1), range(2, 5))]
        >>> squared = job.run(chunks, lambda c: {"square": np.array(c.rows) ** 2}, unit="row")
        >>> [int(arrays["square"].sum()) for _, arrays in squared]
        [1, 29]
    """

    def __init__(
        self,
        folder: str | Path | None,
        settings: Callable[[], dict[str, Any]],
        progress: bool | str,
        processes: Processes = Processes(),
    ) -> None:
        self._gathered, self._rank = processes.gathered, processes.rank
        self._n_processes = processes.size
        self._label = progress if isinstance(progress, str) else None
        self._hidden = not progress or self._rank > 0
        self._bar: Any = None
        needed = folder is not None or self._n_processes > 1
        first, *others = self._gathered(lambda: settings() if needed else {})
        reasons = [
            f"process {rank}: {difference}"
            for rank, other in enumerate(others, 1)
            for difference in differences(other, first, "process 0 has")
        ]
        InputError.raise_if(reasons, "all processes must run the same job")
        stores = self._gathered(
            lambda: ChunkStore(folder, first) if folder is not None and self._rank == 0 else None
        )
        self._store = stores[self._rank]

    def run(
        self, chunks: Sequence[Chunk], compute: Callable[[Chunk], Arrays], *, unit: str
    ) -> Iterator[tuple[Chunk, Arrays]]:
        """Yield each chunk and its arrays, in order; `unit` is what the progress bar counts."""
        total, hidden, n = sum(chunk.size for chunk in chunks), self._hidden, self._n_processes
        stored, *_ = self._gathered(lambda: self._store.keys() if self._store else set[str]())
        with tqdm(total=total, unit=unit, desc=self._label, disable=hidden) as self._bar:
            done = 0
            for start in range(0, len(chunks), n):
                some = chunks[start : start + n]
                shares = self._gathered(partial(self._share, some, stored, compute))
                arrays = {key: value for share in shares for key, value in share.items()}
                self._gathered(partial(self._keep, arrays, stored))
                done += sum(chunk.size for chunk in some)
                self._bar.update(done - self._bar.n)
                for chunk in some:
                    yield chunk, arrays[chunk.key]

    def advance(self, n: int) -> None:
        """Advance the progress bar within a chunk."""
        self._bar.update(n)

    def _share(
        self, chunks: Sequence[Chunk], stored: set[str], compute: Callable[[Chunk], Arrays]
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
            for key, value in arrays.items():
                if key not in stored:
                    self._store.put(key, value)
