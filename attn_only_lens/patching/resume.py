"""The parts of a long sweep, written as they come, so that it goes on where it stopped.

    folder/settings.json          what is swept: model, prompts, metric, sites, …
    folder/part-<id>.parquet      the results of one part, marked with the settings' fingerprint

Every file is whole or absent: written under a hidden name, then moved. Several processes may write
different parts of one folder.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

import pandas as pd

from attn_only_lens.errors import PatchingError
from attn_only_lens.storage import Document, inside, opened_folder
from attn_only_lens.storage.tables import parquet_metadata, read_table, write_table

__all__ = ["PartStore", "unusable"]

SETTINGS = "settings.json"
_ID = re.compile(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*")
_MISSING = "<missing>"


class _Settings(TypedDict):
    settings: dict[str, Any]


def unusable(reason: str) -> PatchingError:
    """The error that says why a folder cannot hold the parts of a sweep."""
    return PatchingError([reason], "no sweep can be kept here")


_DOCUMENT = Document("attn_only_lens.PartStore", 3, _Settings, unusable, indent=2)


class PartStore:
    """A folder of parts, of one sweep and no other.

    Args:
        folder: where to write; it is made, or holds parts of the same sweep.
        settings: everything that the results depend on, as JSON holds it.

    Raises:
        PatchingError: the folder holds another sweep (it says which settings differ), or files
            that are not of a sweep; the settings are no JSON.

    Example:
        >>> import tempfile
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = p.PartStore(folder, {"metric": "kl"})
        ...     store.write("0001", pd.DataFrame({"value": [2.0, 3.0]}))
        ...     store.has("0001"), store.has("0002"), len(store.read_all())
        (True, False, 2)
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any]) -> None:
        self.folder = opened_folder(folder, unusable)
        text = _DOCUMENT.text(settings=settings)
        self.settings: dict[str, Any] = json.loads(text)["settings"]
        sorted_text = json.dumps(self.settings, sort_keys=True)
        self.fingerprint = hashlib.sha256(sorted_text.encode()).hexdigest()
        path = self.folder / SETTINGS
        if not path.exists():
            self._require_empty()
            _DOCUMENT.write(path, settings=self.settings)
        # Read back even if just written: another process may have been there first.
        self._require_same(path)

    def has(self, part_id: str) -> bool:
        """Whether this part is written.

        Raises:
            PatchingError: its file is damaged, or of another sweep; not a name for a part.
        """
        path = self._path(part_id)
        if not path.exists():
            return False
        self._require_own(path, parquet_metadata(path))
        return True

    def write(self, part_id: str, frame: pd.DataFrame) -> None:
        """Write a part, in place of what was written for it before.

        Raises:
            PatchingError: not a name for a part; pyarrow is not installed.
        """
        path = self._path(part_id)
        write_table(path, frame, {**self._mark(path), "n_rows": len(frame)})

    def read_all(self, expected: Iterable[str] = ()) -> pd.DataFrame:
        """All parts, one below another in the order of their ids; categories as plain text.

        Args:
            expected: ids of parts that must be there.

        Raises:
            PatchingError: with every part that is missing, damaged, of another sweep, or of other
                columns; there are none.
        """
        frames: list[pd.DataFrame] = []
        missing = [part_id for part_id in expected if not self._path(part_id).exists()]
        if missing:
            raise PatchingError(
                [
                    f"{self.folder} lacks {len(missing)} parts, such as {missing[0]}: they were "
                    "deleted, or other processes wrote them to a folder of the same name elsewhere"
                ],
                "this sweep is not whole; sweep again, in a folder that every process sees",
            )
        reasons: list[str] = []
        for path in sorted(self.folder.glob("part-*.parquet")):
            try:
                frame, said = read_table(inside(self.folder, path.name, unusable))
                self._require_own(path, said, len(frame))
            except PatchingError as error:
                reasons += error.reasons
                continue
            for column in frame.select_dtypes("category"):
                frame[column] = frame[column].astype(str)
            if frames and not frame.dtypes.equals(frames[0].dtypes):
                reasons.append(
                    f"{path.name} has columns {dict(frame.dtypes.astype(str))}; the first part has "
                    f"{dict(frames[0].dtypes.astype(str))}"
                )
            frames.append(frame)
        if not frames and not reasons:
            reasons.append(f"{self.folder} holds no part yet")
        if reasons:
            raise PatchingError(
                reasons, "these parts cannot be joined; delete them and sweep again"
            )
        return pd.concat(frames, ignore_index=True)

    def _path(self, part_id: str) -> Path:
        if not isinstance(part_id, str) or not _ID.fullmatch(part_id):
            raise PatchingError(
                [f"got {part_id!r}; expected letters, digits, _ and -, such as '0001'"],
                "this is no name for a part",
            )
        return inside(self.folder, f"part-{part_id}.parquet", unusable)

    def _mark(self, path: Path) -> dict[str, Any]:
        return {"file": path.name, "settings": self.fingerprint}

    def _require_own(self, path: Path, said: dict[str, Any], n_rows: int | None = None) -> None:
        expected = self._mark(path) | ({} if n_rows is None else {"n_rows": n_rows})
        wrong = [key for key, value in expected.items() if said.get(key) != value]
        if wrong:
            raise PatchingError(
                [f"{path} is not a part of this sweep: its {' and '.join(wrong)} differ"],
                "this part cannot be used; delete it",
            )

    def _require_empty(self) -> None:
        found = sorted(p.name for p in self.folder.glob("*") if not p.name.startswith("."))
        if found and SETTINGS not in found:  # unless another process has just begun this sweep
            raise PatchingError(
                [f"{self.folder} holds {found[:5]} and no {SETTINGS}; expected a new folder"],
                "no sweep can be kept here",
            )

    def _require_same(self, path: Path) -> None:
        found = _DOCUMENT.read(path)["settings"]
        differ = [
            f"{key}: got {_short(self.settings.get(key, _MISSING))}; the folder has "
            f"{_short(found.get(key, _MISSING))}"
            for key in sorted(self.settings.keys() | found.keys())
            if self.settings.get(key, _MISSING) != found.get(key, _MISSING)
        ]
        if differ:
            raise PatchingError(
                differ, f"{self.folder} holds another sweep; take a new folder, or what it was of"
            )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
