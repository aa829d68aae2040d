"""Files that are written whole or not at all, for whoever the umask lets read them."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["flush", "write_text", "written_whole"]


def write_text(path: Path, text: str) -> None:
    """Write a text under a temporary name, then move it into place."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary name to write to, moved into place at the end; gone if anything raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        yield partial
        flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Have the operating system write a file out, so that a move cannot overtake its contents."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
