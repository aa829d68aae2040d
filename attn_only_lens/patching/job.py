"""A job: chunks of work that are computed, stored if asked, and collected in order.

Every long computation runs in the same way. It is cut into chunks, and a function computes the
named arrays of a chunk. A folder keeps them, so that an interrupted job resumes. The processes of
`accelerate launch` share the chunks: chunk i belongs to process i modulo their number. A method of
patching only says what its chunks are and how one is computed:

    job = Job(resume, settings, progress)
    for chunk, arrays in job.run(chunks, compute, unit="site"):
        ...  # add up, in the order of chunks

If a process dies, its chunks are missing; the next start of the job computes them. Without a GPU,
`accelerate launch --multi_gpu --num_processes 2 script.py` starts two processes on CPUs. With GPUs,
the script puts its model on `accelerate.PartialState().device`.
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
_POLL, _PATIENCE = 0.2, 3600.0  # seconds: how often, and how long, to look for a missing chunk
# Variables in which torchrun, accelerate and MPI give the number of processes, and of this one.
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


class Chunk(Protocol):
    """A share of a job."""

    @property
    def key(self) -> str:
        """A name, unique in the job."""

    @property
    def size(self) -> int:
        """How far the chunk moves the progress bar."""


_Chunk = TypeVar("_Chunk", bound=Chunk)


class Job:
    """Run chunks of work, resume from a folder, and share the work with other processes.

    Args:
        folder: where the arrays of chunks are stored; None to store nothing.
        settings: returns everything that the arrays depend on; called only if there is a folder.
        progress: whether to show bars; a text is their label.

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
        """Yield each chunk with its arrays, in order. `unit` is what the progress bar counts."""
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
        """Move the progress bar within a chunk."""
        self._bar.update(n)

    def _computed(self, chunk: _Chunk, compute: Callable[[_Chunk], Arrays]) -> Arrays:
        end = self._bar.n + chunk.size
        arrays = compute(chunk)
        self._bar.update(end - self._bar.n)
        return arrays

    def _collected(self, chunk: Chunk) -> Arrays:
        """Return the stored arrays of a chunk; wait if another process still computes them."""
        assert self._store is not None
        start = time.monotonic()
        while (arrays := self._store.get(chunk.key)) is None:
            if n_launched() == 1 or time.monotonic() - start > _PATIENCE:
                raise InputError(
                    [
                        f"{self._store.folder} lacks {chunk.key}: it was deleted, or another "
                        "process died or writes to another folder of that name; expected one "
                        "folder that every process sees"
                    ],
                    "this job is not whole; start it again, and it resumes",
                )
            time.sleep(_POLL)
        return arrays


def _share(chunks: Sequence[_Chunk]) -> Sequence[_Chunk]:
    """Return the chunks of this process."""
    n = n_launched()
    return chunks[_from_environment(_RANKS, 0) % n :: n]


def require_folder(folder: str | Path | None) -> None:
    """Refuse several processes without a folder to exchange results in."""
    if folder is None and n_launched() > 1:
        raise InputError(
            [
                f"{n_launched()} processes were launched; expected a folder for "
                "them to write to: resume='sweep.chunks'"
            ],
            "these processes cannot share the work",
        )


def is_first() -> bool:
    """Return whether this is the only process, or the first of those launched together."""
    return n_launched() == 1 or _from_environment(_RANKS, 0) == 0


def n_launched() -> int:
    """Return the number of processes that were launched together."""
    return _from_environment(_SIZES, 1)


def _from_environment(names: tuple[str, ...], default: int) -> int:
    return int(get_int_from_env(names, default))
