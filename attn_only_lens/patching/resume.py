"""The parts of a long sweep, written as they come, so that it resumes where it stopped.

    folder/settings.json          model, prompts, metric, sites: whatever values depend on
    folder/part-<i>.parquet       the results of one part, with a digest of the settings

A part of a sweep is one column, the values [row, prompt] of a group of sites, row by row: what the
rows are, the settings say.

Several processes may share a folder: each claims the parts that it writes (`claims.py`).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from typing_extensions import TypedDict

from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.patching.claims import Claims
from attn_only_lens.storage import Document, open_folder, path_inside
from attn_only_lens.storage.tables import TableFields, read_table, read_table_document, write_table

_SETTINGS = "settings.json"
_MISSING = "<missing>"


class _Settings(TypedDict):
    settings: dict[str, Any]


class _Part(TableFields):
    settings: str
    part: int


_SETTINGS_DOCUMENT = Document("attn_only_lens.SweepSettings", 1, _Settings)
_PART_DOCUMENT = Document("attn_only_lens.SweepPart", 1, _Part)


class MemoryParts:
    """The parts of a sweep that is not to be resumed."""

    def __init__(self) -> None:
        self._frames: dict[int, pd.DataFrame] = {}

    @contextmanager
    def todo(
        self, parts: Iterable[int], on_other: Callable[[int], None]
    ) -> Iterator[Iterator[int]]:
        """Yield all of the parts."""
        yield iter(parts)

    def write(self, part: int, frame: pd.DataFrame) -> None:
        """Keep a part."""
        self._frames[part] = frame

    def read(self, part: int) -> pd.DataFrame:
        """Return a part."""
        return self._frames[part]


class PartStore:
    """A folder with the parts of one sweep.

    Example:
        >>> import tempfile
        >>> import pandas as pd
        >>> from attn_only_lens.patching.resume import PartStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = PartStore(folder, {"metric": "kl"}, 2)
        ...     store.write(0, pd.DataFrame({"value": [2.0, 3.0]}))
        ...     store.has(0), store.has(1)
        (True, False)
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any], n_parts: int) -> None:
        self.folder = open_folder(folder)
        self.n_parts = n_parts
        text = _SETTINGS_DOCUMENT.text(settings=settings)
        self._settings: dict[str, Any] = json.loads(text)["settings"]
        sorted_text = json.dumps(self._settings, sort_keys=True)
        self._digest = hashlib.sha256(sorted_text.encode()).hexdigest()
        path = self.folder / _SETTINGS
        if not path.exists():
            self._require_empty()
            _SETTINGS_DOCUMENT.write(path, settings=self._settings)
        # Read back even if just written: another process may have been there first.
        self._require_same(path)

    def has(self, part: int) -> bool:
        """Return whether a part is written."""
        path = self._path(part)
        if not path.exists():
            return False
        self._require_own(part, read_table_document(path, _PART_DOCUMENT))
        return True

    @contextmanager
    def todo(
        self, parts: Iterable[int], on_other: Callable[[int], None]
    ) -> Iterator[Iterator[int]]:
        """Yield the parts that this process is to write, each claimed until the next is asked for.

        They end when all are written, by this process or by others: one that dies leaves its parts
        to those that live.
        """
        parts = list(parts)
        for part in parts:
            self.has(part)
        claims = Claims(self.folder, lambda part: self._path(part).exists())
        with closing(claims.todo(parts, on_other)) as todo:
            yield todo

    def write(self, part: int, frame: pd.DataFrame) -> None:
        """Write a part, in place of an earlier file of it."""
        write_table(self._path(part), frame, _PART_DOCUMENT, settings=self._digest, part=part)

    def read(self, part: int) -> pd.DataFrame:
        """Read a part."""
        frame, said = read_table(self._path(part), _PART_DOCUMENT)
        self._require_own(part, said)
        return frame

    def read_all(self, first: int = 0) -> Iterator[pd.DataFrame]:
        """Read all parts from number `first` on, one after another."""
        missing = [part for part in range(self.n_parts) if not self._path(part).exists()]
        if missing:
            raise InputError(
                [
                    f"{self.folder} lacks {len(missing)} parts, such as {missing[0]}: they were "
                    "deleted, or other processes wrote them to a folder of the same name elsewhere"
                ],
                "this sweep is not whole; sweep again, in a folder that every process sees",
            )
        reasons = list[str]()
        for part in range(first, self.n_parts):
            try:
                frame = self.read(part)
            except CheckpointError as error:
                reasons.append(str(error))
            else:
                yield frame
        InputError.raise_if(reasons, "these parts cannot be joined; delete them and sweep again")

    def _path(self, part: int) -> Path:
        return path_inside(self.folder, f"part-{part:06d}.parquet")

    def _require_own(self, part: int, said: dict[str, Any]) -> None:
        expected = {"settings": self._digest, "part": part}
        wrong = [key for key, value in expected.items() if said[key] != value]
        if wrong:
            raise CheckpointError(
                f"{self._path(part)} is not a part of this sweep: its {' and '.join(wrong)} "
                "differ; delete it"
            )

    def _require_empty(self) -> None:
        files = sorted(p.name for p in self.folder.glob("*") if not p.name.startswith("."))
        if files and _SETTINGS not in files:  # unless another process has just begun this sweep
            raise InputError(
                [f"{self.folder} holds {files[:5]} and no {_SETTINGS}; expected a new folder"],
                "no sweep can be kept here",
            )

    def _require_same(self, path: Path) -> None:
        ours, stored = self._settings, _SETTINGS_DOCUMENT.read(path)["settings"]
        differ = [
            f"{key}: got {_short(ours.get(key, _MISSING))}; the folder has "
            f"{_short(stored.get(key, _MISSING))}"
            for key in sorted(ours.keys() | stored.keys())
            if ours.get(key, _MISSING) != stored.get(key, _MISSING)
        ]
        InputError.raise_if(differ, f"{self.folder} belongs to another sweep; use a new folder")


def kept_settings(folder: str | Path) -> dict[str, Any]:
    """Return the settings of the sweep in a folder; none where none has begun."""
    path = open_folder(folder) / _SETTINGS
    return dict(_SETTINGS_DOCUMENT.read(path)["settings"]) if path.exists() else {}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
