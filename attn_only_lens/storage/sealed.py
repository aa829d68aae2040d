"""JSON that carries a digest of itself and, where it describes a folder, of every file there.

    {"format": "attn_only_lens…", "format_version": 5, …, "sha256": of all the rest}

Whitespace, the order of keys and how a number is spelled do not count; anything else that changes
is noticed before a value is used. A digest tells of damage and of careless editing, not of malice:
what is read is checked besides, since whoever writes a file can seal it again.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from attn_only_lens.errors import CheckpointError
from attn_only_lens.storage.typed import misfits
from attn_only_lens.storage.writing import write_text

__all__ = [
    "Document",
    "FileDigest",
    "check_files",
    "digests_of",
    "files_listed",
    "inside",
    "read_json",
]

_SHOWN = 5


class FileDigest(TypedDict):
    """What a manifest says of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Document:
    """A kind of sealed JSON.

    Attributes:
        format: its name.
        version: the one version that is written and read.
        fields: a TypedDict of what it holds besides.
        refuse: makes the error from a reason.
        indent: of the text, where people are to read it.
    """

    format: str
    version: int
    fields: Any
    refuse: Callable[[str], Exception] = CheckpointError
    indent: int | None = None

    def text(self, **body: Any) -> str:
        """The document with this body."""
        whole = {"format": self.format, "format_version": self.version, **body}
        try:
            whole = json.loads(json.dumps(whole, allow_nan=False))
            return json.dumps(whole | {"sha256": _seal(whole)}, indent=self.indent) + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise self.refuse(f"this is no JSON: {error}") from error

    def write(self, path: Path, **body: Any) -> None:
        """Write the document to a file, whole or not at all."""
        write_text(path, self.text(**body))

    def read(self, path: Path) -> dict[str, Any]:
        """Read a document from a file."""
        return self._checked(read_json(path, self.refuse), path)

    def parse(self, text: str, path: Path) -> dict[str, Any]:
        """Read a document that is part of another file."""
        return self._checked(_parsed(text, path, self.refuse), path)

    def _checked(self, whole: Any, path: Path) -> dict[str, Any]:
        got = whole.get("format") if isinstance(whole, dict) else type(whole).__name__
        if got != self.format:
            raise self.refuse(f"{path} has format {got!r}; expected {self.format!r}")
        version = whole.get("format_version")
        if version != self.version or type(version) is not int:
            raise self.refuse(
                f"{path} has format version {version!r}, and this attn-only-lens reads "
                f"{self.version}: use the release that wrote it, or write it again"
            )
        try:
            seal = _seal(whole)
        except RecursionError:
            seal = ""
        if whole.get("sha256") != seal:
            raise self.refuse(f"{path} was changed after it was written: write it again")
        wrong = list(misfits(whole, self.fields, ""))
        if wrong:
            reasons = "; ".join(reason.lstrip(".") for reason in wrong[:_SHOWN])
            raise self.refuse(f"{path} cannot be used: {reasons}")
        return dict(whole)


def _seal(whole: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in whole.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path, refuse: Callable[[str], Exception] = CheckpointError) -> Any:
    """What a file of JSON holds.

    Raises:
        CheckpointError: or what `refuse` makes of the reason: it cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise refuse(f"{path} cannot be read: {error}") from error
    if text is None:
        raise refuse(f"{path} {'is not a file' if path.exists() else 'is missing'}")
    return _parsed(text, path, refuse)


def _parsed(text: str, path: Path, refuse: Callable[[str], Exception]) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"{path} is no JSON: {error}") from error


def inside(folder: Path, name: str, refuse: Callable[[str], Exception] = CheckpointError) -> Path:
    """The path of a file in a folder.

    Raises:
        CheckpointError: or what `refuse` makes of the reason: the name or a link leads out of the
            folder.
    """
    try:
        path = (folder / name).resolve()
        stays = path.is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise refuse(f"{folder} names a file {name!r}: {error}") from error
    if not stays:
        raise refuse(f"{folder} names a file {name!r}, which is outside of that folder")
    return path


def digests_of(folder: Path, names: Iterable[str] | None = None) -> dict[str, FileDigest]:
    """By relative name, the size and digest of these files of a folder; by default of all."""
    if names is None:
        files = (path for path in folder.rglob("*") if path.is_file())
        names = (path.relative_to(folder).as_posix() for path in files)
    return {name: _digest(folder / name) for name in sorted(names)}


def files_listed(path: Path) -> set[str]:
    """The files that a manifest says were written beside it; none where it cannot be read."""
    try:
        return set(read_json(path)["files"])
    except (CheckpointError, LookupError, TypeError):
        return set()


def _digest(path: Path) -> FileDigest:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def check_files(folder: Path, files: Mapping[str, FileDigest], closed: str | None = None) -> None:
    """Hold every file of a folder against what its manifest says of it.

    Args:
        folder: the folder.
        files: what the manifest says.
        closed: a folder in it that may hold no other file: what reads it takes what lies there.

    Raises:
        CheckpointError: with everything that is missing, truncated, changed or outside.
    """
    wrong = []
    for name, expected in files.items():
        path = inside(folder, name)
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            wrong.append(f"{name} has {path.stat().st_size} bytes; expected {expected['bytes']}")
        elif _digest(path) != expected:
            wrong.append(f"{name} was changed after it was saved")
    if closed is not None:
        every = (folder / closed).rglob("*")
        present = (path for path in every if path.is_symlink() or not path.is_dir())
        unsaid = sorted({path.relative_to(folder).as_posix() for path in present} - files.keys())
        wrong += [f"{name} was added after it was saved" for name in unsaid]
    if wrong:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(wrong)}. Save the model again")
