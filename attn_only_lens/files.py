"""Write a file whole or not at all."""

import os
import tempfile
from pathlib import Path

__all__ = ["write_text"]


def write_text(path: Path, text: str) -> None:
    """Write a text under a temporary name, then move it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
