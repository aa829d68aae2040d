"""Files that are written whole or not at all, for whoever the umask lets read them."""

import os
import secrets
from pathlib import Path

__all__ = ["flush", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write a text under a temporary name, then move it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        partial.write_text(text, encoding="utf-8")
        flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Have the operating system write a file out, so that a move cannot overtake its contents."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
