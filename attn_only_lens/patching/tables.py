"""Frames in files, with what they are of: parquet with its schema's metadata, CSV with a JSON.

Damage is noticed: parquet pages and metadata carry checksums, and the JSON beside a CSV that of
the CSV.
"""

import hashlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from attn_only_lens.errors import PatchingError
from attn_only_lens.files import write_text, written_whole

__all__ = ["parquet_metadata", "read_table", "write_table"]

_KEY = b"attn_only_lens"
_NUMBERS = ("int64", "float64")


def write_table(path: Path, frame: pd.DataFrame, metadata: dict[str, Any]) -> None:
    """Write a frame and its metadata, by the ending of the path: .parquet or .csv.

    Raises:
        PatchingError: another ending, or parquet without pyarrow.
    """
    text = json.dumps(metadata, sort_keys=True)
    if _ending(path) == ".parquet":
        pa, pq = _pyarrow()
        table = pa.Table.from_pandas(frame, preserve_index=False)
        table = table.replace_schema_metadata({_KEY: f"{_digest(text.encode())} {text}"})
        with written_whole(path) as partial:
            pq.write_table(table, partial, write_page_checksum=True)
        return
    with written_whole(path) as partial:
        frame.to_csv(partial, index=False)
        digest = _digest(partial.read_bytes())
    numbers = {column: str(kind) for column, kind in frame.dtypes.items() if kind in _NUMBERS}
    said = {"sha256": digest, "numbers": numbers, "metadata": metadata}
    write_text(_beside(path), json.dumps(said, indent=2))


def read_table(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A frame that `write_table` wrote, and its metadata.

    Raises:
        PatchingError: missing, damaged, written by something else, or parquet without pyarrow.
    """
    if _ending(path) == ".parquet":
        metadata = parquet_metadata(path)
        pa, pq = _pyarrow()
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            return table.to_pandas(), metadata
        except (OSError, pa.ArrowException, ValueError, LookupError) as error:
            raise _unreadable(path, error) from error
    try:
        content = path.read_bytes()
        beside = json.loads(_beside(path).read_text(encoding="utf-8"))
        digest, numbers, metadata = (beside[key] for key in ("sha256", "numbers", "metadata"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error
    if _digest(content) != digest:
        raise _unreadable(path, f"it is not the file that {_beside(path).name} is about")
    # As text first: pandas' own parser of numbers may be a rounding off, and takes "NA" for none.
    return pd.read_csv(path, dtype=str, keep_default_na=False).astype(numbers), metadata


def parquet_metadata(path: Path) -> dict[str, Any]:
    """What `write_table` said of a parquet file; its rows are not read.

    Raises:
        PatchingError: as `read_table` does.
    """
    pa, pq = _pyarrow()
    try:
        said = (pq.read_schema(path).metadata or {}).get(_KEY)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise _unreadable(path, error) from error
    if said is None:
        raise _unreadable(path, "something else wrote it")
    digest, _, text = said.partition(b" ")
    if _digest(text).encode() != digest:
        raise _unreadable(path, "what it says of itself was changed")
    return dict(json.loads(text))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
    return PatchingError(
        [f"{path}: {why}; expected a file written by attn_only_lens.patching, whole and unchanged"],
        "these results cannot be read",
    )


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
