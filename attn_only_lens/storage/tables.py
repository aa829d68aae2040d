"""Store each data frame with a JSON document: in a parquet file's metadata, or next to a CSV file.

The document holds a digest of the data: of a CSV file's bytes, or of a parquet file's columns (not
its bytes, which include the document itself).
"""

import csv
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pandas as pd
from typing_extensions import TypedDict

from attn_only_lens.arguments import ending_reasons
from attn_only_lens.errors import CheckpointError
from attn_only_lens.storage import Document
from attn_only_lens.storage.atomic import AnyPath, as_path, atomic_write
from attn_only_lens.storage.documents import format_of, parse, read_json

_KEY = b"attn_only_lens"
_NUMBERS = ("int64", "float64")


class TableFields(TypedDict):
    """The document fields of every table: the data frame's digest and its numeric columns."""

    content: str
    numbers: dict[str, Literal["int64", "float64"]]


def write_table(path: AnyPath, frame: pd.DataFrame, document: Document, **body: Any) -> None:
    """Write a data frame and its document; the format is parquet or CSV, depending on `path`."""
    path = as_path(path)
    body["numbers"] = {name: str(kind) for name, kind in frame.dtypes.items() if kind in _NUMBERS}
    if _is_parquet(path):
        pa, pq = _pyarrow()
        table = pa.Table.from_pandas(frame, preserve_index=False)
        text = document.text(content=_digest(table), **body)
        with atomic_write(path) as new:
            table = table.replace_schema_metadata({_KEY: text})
            # `_digest` needs complete, ordered dictionary encodings. Float columns, which rarely
            # repeat values, get none, which halves the reading time.
            repeat = [name for name, kind in frame.dtypes.items() if kind != "float64"]
            pq.write_table(
                table,
                new,
                write_page_checksum=True,
                use_dictionary=repeat,
                dictionary_pagesize_limit=2**30,
                row_group_size=2**24,
            )
        return
    # Python 3.11 quotes a text that contains "\r" only if all texts are quoted.
    rows = frame.to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).encode()
    text = document.text(indent=2, content=hashlib.sha256(rows).hexdigest(), **body)
    # Both files are complete before either replaces an old file, because the disk may get full.
    with atomic_write(path) as new, atomic_write(_sidecar(path)) as described:
        new.write_bytes(rows)
        described.write_text(text, encoding="utf-8")


def read_table(path: AnyPath, document: Document) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read a data frame and its document; raise CheckpointError if the digest does not match."""
    path = as_path(path)
    fields = read_table_document(path, document)
    with _as_checkpoint_error(path):
        if _is_parquet(path):
            _, pq = _pyarrow()
            # Memory mapping without pre-buffering reads ten million rows in a third of the time.
            table = pq.read_table(
                path, page_checksum_verification=True, memory_map=True, pre_buffer=False
            )
            if _digest(table) != fields["content"]:
                raise ValueError("the table was changed after it was written")
            return table.to_pandas(), fields
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != fields["content"]:
            raise ValueError(f"{_sidecar(path).name} describes another file")
        # Read cells as text, because pandas' parser may round numbers, and reads "NA" as missing.
        frame = pd.read_csv(BytesIO(content), dtype=str, keep_default_na=False)
        kinds = fields["numbers"]
        missing = {name: {"": "nan"} for name, kind in kinds.items() if kind == "float64"}
        return frame.replace(missing).astype(kinds), fields


def read_table_document(path: Path, document: Document) -> dict[str, Any]:
    """Read the JSON document of a table, without reading the table's rows."""
    if not _is_parquet(path):
        return document.read(_sidecar(path))
    return document.parse(_parquet_document(path), path)


def table_format(path: Path) -> Any:
    """Return the name of the format of a table's document."""
    if _is_parquet(path):
        return format_of(parse(_parquet_document(path), path))
    if not (sidecar := _sidecar(path)).exists():
        made = "`save` writes it with a table, which cannot be loaded without it"
        raise CheckpointError(f"{sidecar} is missing: {made}")
    return format_of(read_json(sidecar))


def _parquet_document(path: Path) -> str:
    _, pq = _pyarrow()
    with _as_checkpoint_error(path):
        text = (pq.read_schema(path).metadata or {}).get(_KEY)
        if text is None:
            raise CheckpointError(f"{path} cannot be read: attn-only-lens did not write it")
        return str(text.decode("utf-8"))


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    arrow = getattr(sys.modules.get("pyarrow"), "ArrowException", OSError)
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, LookupError, arrow) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _digest(table: Any) -> str:
    """Return a digest of an Arrow table's columns that does not depend on the memory layout."""
    digest = hashlib.sha256()
    for name, column in zip(table.column_names, table.columns, strict=True):
        whole, texts = column.combine_chunks(), ""
        if hasattr(whole, "dictionary"):  # a categorical column: `indices` holds each row's code
            texts = json.dumps(whole.dictionary.to_pylist(), default=str)
            whole = whole.indices.cast("int32")
        kind = str(whole.type).removeprefix("large_")
        ordered = getattr(column.type, "ordered", False)
        digest.update(f"\n{name} {kind} {ordered} {texts}\n".encode())
        if whole.null_count or kind == "string":
            digest.update(json.dumps(whole.to_pylist(), default=str).encode())
        else:
            digest.update(whole.to_numpy(zero_copy_only=False))
    return digest.hexdigest()


def _is_parquet(path: Path) -> bool:
    if reasons := ending_reasons(path, ".parquet", ".csv"):
        raise CheckpointError(*reasons)
    return path.suffix == ".parquet"


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise CheckpointError(
            "parquet files need pyarrow: run `pip install pyarrow`, or save a .csv file"
        ) from error
    return pa, pq
