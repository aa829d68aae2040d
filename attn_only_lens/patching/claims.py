"""Claims on the parts of a sweep, by which processes that share a folder share the work.

    folder/.part-000003.claim-0    made by one process and by no other (O_EXCL); touched by it every
                                   few seconds, and removed once the part is written

A claim is dead if its process no longer runs on this machine, or has not touched it for a minute by
the clock of who waits. Then another process takes the part over: it makes the claim of the next
number, which again one alone can make. So processes may come and go at any time, on machines that
share a file system, and whoever is still there goes on until every part is written.

Nothing hangs on a claim but work: a process that is taken for dead and is not writes the same
values to the same part, once more and in one step.
"""

import os
import platform
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import psutil

from attn_only_lens.errors import CheckpointError

# Seconds. A network file system may show a file as it was some seconds ago.
_BEAT, _PATIENCE, _POLL = 5.0, 60.0, 0.2


class Claims:
    """The claims of this process, and what it has seen of those of others."""

    def __init__(self, folder: Path, is_written: Callable[[int], bool]) -> None:
        self._folder, self._is_written = folder, is_written
        self._seen: dict[Path, tuple[int, float]] = {}  # the last touch, and when it was seen first

    def todo(self, parts: Iterable[int], on_other: Callable[[int], None]) -> Generator[int]:
        """Yield parts to write, each claimed until the next is asked for, until all are written."""
        left = list(parts)
        while left:
            taken = []
            for part in left:
                if not self._is_written(part):
                    claim = self._claim(part)
                    if claim is None:
                        taken.append(part)
                        continue
                    with _kept(claim):
                        if not self._is_written(part):  # by who had the claim before
                            yield part
                            continue
                on_other(part)
            left = taken
            if left:
                time.sleep(_POLL)

    def _claim(self, part: int) -> list[Path] | None:
        """Claim a part; return the claims on it, ours last, or None if it is another's."""
        claims = list[Path]()
        while True:
            claims.append(self._folder / f".part-{part:06d}.claim-{len(claims)}")
            try:
                with claims[-1].open("x") as file:
                    file.write(f"{platform.node()} {os.getpid()}")
            except FileExistsError:
                if not self._is_dead(claims[-1]):
                    return None
            except OSError as error:
                raise CheckpointError(f"{claims[-1]} cannot be written: {error}") from error
            else:
                return claims

    def _is_dead(self, claim: Path) -> bool:
        try:
            with claim.open(errors="replace") as file:
                machine, _, process = file.read().rpartition(" ")
                touched = os.fstat(file.fileno()).st_mtime_ns
        except OSError:  # just removed
            return False
        if machine == platform.node() and process.isdecimal() and not _runs(int(process)):
            return True
        now = time.monotonic()
        if self._seen.get(claim, (None,))[0] != touched:
            self._seen[claim] = touched, now
        return now - self._seen[claim][1] > _PATIENCE


def _runs(process: int) -> bool:
    """Tell whether a process of this machine has not ended."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # it is another user's
        return True


@contextmanager
def _kept(claims: list[Path]) -> Iterator[None]:
    """Touch the last of the claims on a part every few seconds; at the end, remove all."""
    ended = Event()

    def touch() -> None:
        while not ended.wait(_BEAT):
            with suppress(OSError):
                os.utime(claims[-1])

    thread = Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for claim in reversed(claims):
            with suppress(OSError):
                claim.unlink()
