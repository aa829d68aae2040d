"""JSON documents that contain a digest of themselves and, for a folder, of each of its files.

    {"format": "attn_only_lens…", "format_version": 5, …, "sha256": digest of the rest}

All file formats of the package are `Document`s. `tensors.py` and `tables.py` store this JSON inside
tensor files and parquet files, or next to CSV files. Reading a document detects any change except
to whitespace, the order of keys or the notation of numbers. The digest does not protect against
malicious changes, because anyone can compute a new digest. The types of all values are therefore
checked, too.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from attn_only_lens.arguments import file_reasons
from attn_only_lens.errors import CheckpointError
from attn_only_lens.storage.atomic import AnyPath, as_path, write_text
from attn_only_lens.storage.checks import type_mismatches

_SHOWN = 5
_MADE_BY = {
    "attn_only_lens.Circuit": "Circuit.save writes it, or --save-circuit of explain and circuit",
    "attn_only_lens.CircuitGraph": "CircuitGraph.save writes it, or --out graph.json of explain "
    "and circuit",
    "attn_only_lens.Sweep": "Sweep.save writes it, or --out sweep.parquet of patch",
}
"""What writes the files that a command reads, by format."""


class FileDigest(TypedDict):
    """The size and digest of a file, as listed in a folder's manifest."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Document:
    """A file format: JSON with a digest, a name, a version, and the fields of a TypedDict."""

    format: str
    version: int
    fields: Any

    def text(self, *, indent: int | None = None, **body: Any) -> str:
        """Return the document's JSON text, with the given fields and a digest."""
        whole = {"format": self.format, "format_version": self.version, **body}
        try:
            whole = json.loads(json.dumps(whole, allow_nan=False))
            whole["sha256"] = _seal(whole)
            text = json.dumps(whole, indent=indent) + "\n"
            text.encode()
            wrong = self._wrong(parse(text, Path(self.format)))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"this cannot be written as JSON: {error}") from error
        if wrong:
            raise CheckpointError(f"this cannot be written as {self.format}: {wrong}")
        return text

    def write(self, path: AnyPath, **body: Any) -> None:
        """Write the document to a file, completely or not at all."""
        write_text(path, self.text(indent=2, **body))

    def read(self, path: AnyPath) -> dict[str, Any]:
        path = as_path(path)
        return self._check(read_json(path), path)

    def parse(self, text: str, path: Path) -> dict[str, Any]:
        """Read a document from a string that was stored in the file `path`."""
        return self._check(parse(text, path), path)

    def _check(self, whole: Any, path: Path) -> dict[str, Any]:
        if (got := format_of(whole)) != self.format:
            made = f": {_MADE_BY[self.format]}" if self.format in _MADE_BY else ""
            expected = f"expected {self.format!r}{made}"
            raise CheckpointError(f"{path} has format {got!r}; {expected}")
        version = whole.get("format_version")
        if version != self.version or type(version) is not int:
            raise CheckpointError(
                f"{path} has format version {version!r}, but this attn-only-lens reads version "
                f"{self.version}: use the release that wrote the file, or write the file again"
            )
        try:
            unchanged = whole.get("sha256") == _seal(whole)
        except RecursionError:
            unchanged = False
        if not unchanged:
            raise CheckpointError(f"{path} was changed after it was written: write the file again")
        if wrong := self._wrong(whole):
            raise CheckpointError(f"{path} cannot be used: {wrong}")
        return dict(whole)

    def _wrong(self, whole: Any) -> str:
        """Return the reasons why a document's fields have wrong types, or an empty string."""
        wrong = list(type_mismatches(whole, self.fields, ""))
        return "; ".join(reason.lstrip(".") for reason in wrong[:_SHOWN])


def format_of(whole: Any) -> Any:
    """Return the name of the format of a document, or the type of other JSON values."""
    return whole.get("format") if isinstance(whole, dict) else type(whole).__name__


def _seal(whole: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in whole.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Read a plain JSON file."""
    try:
        text = path.read_bytes().decode("utf-8") if path.is_file() else None
    except UnicodeDecodeError:
        table = "; it is a table, which `attn-only-lens picture` draws" * (
            path.suffix == ".parquet"
        )
        raise CheckpointError(f"{path} is not a JSON file{table}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if text is None:
        raise CheckpointError(*file_reasons(path))
    return parse(text, path)


def parse(text: str, path: Path) -> Any:
    """Return the value of a JSON text from the file `path`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def path_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder; raise an error for paths outside the folder."""
    try:
        path = (folder / name).resolve()
        stays = path.is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder} names a file {name!r}: {error}") from error
    if not stays:
        raise CheckpointError(f"{folder} names a file {name!r}, which is outside of that folder")
    return path


def file_digests(folder: Path, names: Iterable[str] | None = None) -> dict[str, FileDigest]:
    """Return the sizes and digests of the named files in a folder, or of all files by default."""
    if names is None:
        files = (path for path in folder.rglob("*") if path.is_file())
        names = (path.relative_to(folder).as_posix() for path in files)
    return {name: _digest(folder / name) for name in sorted(names)}


def listed_files(path: Path) -> set[str]:
    """Return the file names listed in a manifest, or an empty set for unreadable manifests."""
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


def check_files(
    folder: Path, files: Mapping[str, FileDigest], closed: Iterable[str] = (), *, seal: str = ""
) -> None:
    """Raise CheckpointError if a folder's files differ from the sizes and digests in `files`.

    Files that match a pattern in `closed` must be in `files`, except the manifest named `seal`.
    """
    wrong = []
    for name, expected in files.items():
        path = path_inside(folder, name)
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            wrong.append(f"{name} has {path.stat().st_size} bytes; expected {expected['bytes']}")
        elif _digest(path) != expected:
            wrong.append(f"{name} was changed after it was saved")
    matching = (path for pattern in closed for path in folder.glob(pattern))
    present = (path for path in matching if path.is_symlink() or not path.is_dir())
    names = {path.relative_to(folder).as_posix() for path in present}
    added = sorted(names - files.keys() - {seal})
    wrong += [f"{name} was added after the model was saved" for name in added]
    if wrong:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(wrong)}. Save it again")
