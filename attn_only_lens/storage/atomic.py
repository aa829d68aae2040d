"""Write files and folders completely or not at all, even if the process is killed.

A new file or folder NAME is written to a hidden folder next to its destination:

    .attn_only_lens-<digest of NAME>-<random>/
        lock    locked by the process that writes, until it ends
        new     the new file or folder
        old     the folder that it replaces

A complete file is moved to NAME in one step, which replaces any old file. A folder takes two steps:
the old folder is moved to `old`, and the new folder to NAME. If a process is killed in between, it
leaves the hidden folder behind. The next process that writes or opens NAME then moves `old` back to
NAME if NAME is missing, and removes the hidden folder.
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeAlias

from safetensors import SafetensorError

from attn_only_lens.errors import CheckpointError

try:
    import fcntl
except ImportError:  # on Windows, hidden folders of killed processes are not removed
    fcntl = None  # type: ignore[assignment]


_FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk, or the user's share of it
AnyPath: TypeAlias = str | os.PathLike[str]


def as_path(path: AnyPath) -> Path:
    """Convert a path to a `Path`; raise an error for "", which would mean the current folder."""
    if isinstance(path, str | os.PathLike) and path != "" and "\0" not in str(path):
        return Path(path)
    here = ", '.' for the current folder" if path == "" else ""
    raise CheckpointError(f"got {path!r}; expected a path{here}")


def write_text(path: AnyPath, text: str) -> None:
    """Write a string to a file, completely or not at all."""
    with atomic_write(path) as new:
        new.write_text(text, encoding="utf-8")


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[Path]:
    """Yield a path for a new file or folder, which replaces `path` when the `with` block ends.

    If an error occurs, `path` is unchanged. If `path` is a link, the link itself is replaced.
    """
    path = as_path(path)
    if not path.name:
        raise CheckpointError(f"got {str(path)!r}; expected the name of a file or folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        scratch, lock = _make_scratch(path)
        with lock:
            try:
                new = scratch / "new"
                yield new
                # Flush the contents to disk before the move, or a crash could leave broken files.
                for entry in [new, *new.rglob("*")]:
                    if entry.is_file():
                        with entry.open("rb") as file:
                            os.fsync(file.fileno())
                if new.is_dir() and path.is_dir():  # os.replace fails for a non-empty folder
                    os.replace(path, scratch / "old")  # `_discard` moves it back after an error
                os.replace(new, path)
            finally:
                _discard(scratch, path)
    except Exception as error:
        # A file of a new folder names the hidden folder in its error.
        cause = error.__cause__ if isinstance(error, CheckpointError) else error
        if disk_is_full(cause):
            raise CheckpointError(
                f"{path} cannot be written: {cause}; free some space on this disk, and try again"
            ) from cause
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def disk_is_full(error: BaseException | None) -> bool:
    """Return whether an error says so; safetensors and tokenizers raise no OSErrors."""
    number, text = getattr(error, "errno", None), str(error)
    return any(number == full or f"os error {full}" in text for full in _FULL)


@contextmanager
def atomic_folder(
    folder: AnyPath,
    ours: Sequence[str],
    seal: str,
    listed: Callable[[Path], Container[str]] | None = None,
) -> Iterator[Path]:
    """Yield a new folder to fill, which replaces `folder` when the `with` block ends.

    Raise an error as in `require_replaceable`.
    """
    folder = require_replaceable(folder, ours, seal, listed)
    with atomic_write(folder) as new:
        new.mkdir()
        yield new


def require_replaceable(
    folder: AnyPath,
    ours: Sequence[str],
    seal: str,
    listed: Callable[[Path], Container[str]] | None = None,
) -> Path:
    """Return a folder's resolved path, if replacing the folder deletes nothing else.

    Raise an error if replacing `folder` would delete a top-level entry that is not in `ours`, or a
    nested file that the manifest named `seal` does not list (`listed` returns the listed names).
    """
    folder = open_folder(folder)
    if folder == Path.cwd():
        raise CheckpointError("got the current folder; expected a folder in it, or elsewhere")
    if folder.is_dir():
        names = sorted(path.name for path in folder.iterdir())
        foreign = [name for name in names if seal not in names or name not in ours]
        if listed is not None and not foreign:
            known = listed(folder / seal)
            within = (path for path in folder.glob("*/**/*") if path.is_symlink() or path.is_file())
            names = sorted(path.relative_to(folder).as_posix() for path in within)
            foreign = [name for name in names if name not in known]
        if foreign:
            raise CheckpointError(
                f"{folder} holds more than a saved model; it also holds {', '.join(foreign[:5])}"
                f"{', …' if len(foreign) > 5 else ''}: choose another folder, or move these files"
            )
    return folder


def open_folder(folder: AnyPath) -> Path:
    """Return a folder's resolved path, after restoring a folder that a killed process had moved."""
    path = as_path(folder)
    try:
        target = path.resolve()
        if not os.path.lexists(target):
            _remove_leftovers(target)
        is_folder = target.is_dir() or not os.path.lexists(target)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a symlink loop
        raise CheckpointError(f"got {folder!r}, which is not a usable path: {error}") from error
    if not is_folder:
        raise CheckpointError(f"{folder} is a file; expected a folder")
    return target


def _discard(scratch: Path, path: Path) -> None:
    """Remove a hidden folder, after moving the old contents back if `path` is missing."""
    new, old, lock = (scratch / name for name in ("new", "old", "lock"))
    if old.exists() and not os.path.lexists(path):
        os.replace(old, path)
    for folder in (new, old):
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with suppress(OSError):
                folder.unlink(missing_ok=True)
    # The next process that uses `path` removes files that cannot be removed now.
    with suppress(OSError):
        if not new.exists() and not old.exists():
            lock.unlink(missing_ok=True)
            scratch.rmdir()


def _remove_leftovers(path: Path) -> None:
    """Remove hidden folders that killed processes left next to `path`."""
    for scratch in path.parent.glob(f"{_hidden_prefix(path)}*"):
        try:
            lock = (scratch / "lock").open("r+")
        except OSError:
            with suppress(OSError):
                scratch.rmdir()  # fails if not empty; a process that needs the folder makes it
            continue
        with lock, suppress(OSError):
            if _lock(lock):
                _discard(scratch, path)


def _make_scratch(path: Path) -> tuple[Path, IO[str]]:
    """Make and lock a hidden folder next to `path`."""
    while True:
        scratch = path.with_name(f"{_hidden_prefix(path)}{secrets.token_hex(8)}")
        scratch.mkdir(mode=0o700)
        try:
            lock = (scratch / "lock").open("x")
        except FileNotFoundError:  # another process has removed the hidden folder
            continue
        except OSError:
            scratch.rmdir()
            raise
        try:
            if _lock(lock) is not False and scratch.is_dir():
                return scratch, lock
        except BaseException:
            lock.close()
            raise
        lock.close()


def _hidden_prefix(path: Path) -> str:
    # Use a digest, because a prefix could make a long name too long.
    digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()
    return f".attn_only_lens-{digest[:16]}-"


def _lock(lock: IO[str]) -> bool | None:
    """Lock an open file; return False if another process holds the lock, None if locking fails."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, AttributeError):
        return None
    return True
