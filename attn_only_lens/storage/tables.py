"""Frames in files, with what they are of: parquet with its schema's metadata, CSV with a JSON.

What is said of a frame holds a digest: of the bytes of a CSV, and of what parquet holds, whose
bytes are not known before that is written into them.
"""

import hashlib
import json
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypedDict

import pandas as pd

from attn_only_lens.errors import PatchingError
from attn_only_lens.storage import Document, written_whole

__all__ = ["parquet_metadata", "read_table", "write_table"]

_KEY = b"attn_only_lens"
_NUMBERS = ("int64", "float64")


class _Said(TypedDict):
    content: str
    numbers: dict[str, Literal["int64", "float64"]]
    metadata: dict[str, Any]


def _no_frame(reason: str) -> PatchingError:
    return PatchingError(
        [f"{reason}; expected a file written by attn_only_lens.patching, whole and unchanged"],
        "these results cannot be read",
    )


_DOCUMENT = Document("attn_only_lens.table", 1, _Said, _no_frame)


def write_table(path: Path, frame: pd.DataFrame, metadata: dict[str, Any]) -> None:
    """Write a frame and its metadata, by the ending of the path: .parquet or .csv.

    Raises:
        PatchingError: another ending, or parquet without pyarrow.
    """
    numbers = {column: str(kind) for column, kind in frame.dtypes.items() if kind in _NUMBERS}
    said: dict[str, Any] = {"numbers": numbers, "metadata": metadata}
    if _ending(path) == ".parquet":
        pa, pq = _pyarrow()
        table = pa.Table.from_pandas(frame, preserve_index=False)
        text = _DOCUMENT.text(content=_content(table), **said)
        with written_whole(path) as new:
            table = table.replace_schema_metadata({_KEY: text})
            pq.write_table(table, new, write_page_checksum=True)
        return
    with written_whole(path) as new:
        frame.to_csv(new, index=False)
        digest = hashlib.sha256(new.read_bytes()).hexdigest()
    _DOCUMENT.write(_beside(path), content=digest, **said)


def read_table(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A frame that `write_table` wrote, and its metadata.

    Raises:
        PatchingError: missing, damaged, written by something else, or parquet without pyarrow.
    """
    if _ending(path) == ".parquet":
        pa, pq = _pyarrow()
        said = _parquet_says(path)
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            if _content(table) != said["content"]:
                raise ValueError("it was changed after it was written")
            return table.to_pandas(), said["metadata"]
        except (OSError, pa.ArrowException, ValueError, LookupError) as error:
            raise _unreadable(path, error) from error
    said = _DOCUMENT.read(_beside(path))
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != said["content"]:
            raise ValueError(f"it is not the file that {_beside(path).name} is about")
        # Text first: pandas' own parser of numbers may be a rounding off, and takes "NA" for none.
        frame = pd.read_csv(BytesIO(content), dtype=str, keep_default_na=False)
        missing = {name: "nan" for name, kind in said["numbers"].items() if kind == "float64"}
        frame = frame.replace({name: {"": nan} for name, nan in missing.items()})
        return frame.astype(said["numbers"]), said["metadata"]
    except (OSError, ValueError, LookupError) as error:
        raise _unreadable(path, error) from error


def parquet_metadata(path: Path) -> dict[str, Any]:
    """What `write_table` said of a parquet file; its rows are not read.

    Raises:
        PatchingError: as `read_table` does.
    """
    return dict(_parquet_says(path)["metadata"])


def _parquet_says(path: Path) -> dict[str, Any]:
    pa, pq = _pyarrow()
    try:
        text = (pq.read_schema(path).metadata or {}).get(_KEY)
        if text is not None:
            return _DOCUMENT.parse(text.decode("utf-8"), path)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    raise _unreadable(path, "something else wrote it")


def _content(table: Any) -> str:
    """A digest of the columns of an Arrow table, however they lie in memory."""
    digest = hashlib.sha256()
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = str(getattr(column.type, "value_type", column.type)).removeprefix("large_")
        ordered = getattr(column.type, "ordered", False)
        digest.update(f"\n{name} {kind} {ordered}\n".encode())
        if column.null_count or kind not in ("int64", "double"):
            digest.update(json.dumps(column.to_pylist(), default=str).encode())
        else:
            digest.update(column.to_numpy().tobytes())
    return digest.hexdigest()


def _ending(path: Path) -> str:
    if path.suffix not in (".parquet", ".csv"):
        raise PatchingError(
            [f"got {str(path)!r}; expected a name that ends in .parquet or .csv"],
            "this file is of no known kind",
        )
    return path.suffix


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _unreadable(path: Path, why: object) -> PatchingError:
    return _no_frame(f"{path}: {why}")


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise PatchingError(
            ["pyarrow is not installed: pip install 'attn-only-lens[parquet]', or save a .csv"],
            "parquet files need another package",
        ) from error
    return pa, pq
