"""Store the results of a long job in chunks, so that an interrupted job can resume.

    folder/settings.json              what the results depend on: model, prompts, metric, sites
    folder/KEY.safetensors            the arrays of one chunk, with a digest of the settings

Each chunk is written completely or not at all, so a killed process loses only the chunk that it was
computing. A digest in each chunk reveals whether the file was changed later.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from typing_extensions import TypedDict

from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.storage.atomic import atomic_write, open_folder
from attn_only_lens.storage.documents import Document, path_inside
from attn_only_lens.storage.tensors import read_tensors, write_tensors

Arrays: TypeAlias = Mapping[str, np.ndarray]
_SETTINGS = "settings.json"
_MISSING = "<missing>"


class _Settings(TypedDict):
    settings: dict[str, Any]


class _Chunk(TypedDict):
    settings: str
    key: str
    tensors: str


_SETTINGS_DOCUMENT = Document("attn_only_lens.JobSettings", 1, _Settings)
_CHUNK_DOCUMENT = Document("attn_only_lens.Chunk", 1, _Chunk)


class ChunkStore:
    """A folder that stores the chunks of one job."""

    def __init__(self, folder: str | Path, settings: dict[str, Any]) -> None:
        self.folder = open_folder(folder)
        text = _SETTINGS_DOCUMENT.text(settings=settings)
        self._settings: dict[str, Any] = json.loads(text)["settings"]
        sorted_text = json.dumps(self._settings, sort_keys=True)
        self._digest = hashlib.sha256(sorted_text.encode()).hexdigest()
        path = self.folder / _SETTINGS
        if not path.exists():
            files = sorted(p.name for p in self.folder.glob("*") if not p.name.startswith("."))
            if files and _SETTINGS not in files:  # otherwise, another process just began this job
                reason = (
                    f"{self.folder} holds {files[:5]}, but no {_SETTINGS}; expected a new folder"
                )
                raise InputError([reason], "results cannot be stored in this folder")
            _SETTINGS_DOCUMENT.write(path, settings=self._settings)
        # Read the settings back, because another process may have written the file first.
        stored = _SETTINGS_DOCUMENT.read(path)["settings"]
        differ = differences(self._settings, stored, "the folder has")
        InputError.raise_if(differ, f"{self.folder} belongs to another job; use a new folder")

    def keys(self) -> set[str]:
        """Return the keys of all stored chunks."""
        return {path.stem for path in self.folder.glob("*.safetensors")}

    def put(self, key: str, arrays: Arrays) -> None:
        """Write a chunk's file, and replace any earlier file with the same key."""
        tensors = {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}
        with atomic_write(self.path(key)) as partial:
            write_tensors(partial, tensors, _CHUNK_DOCUMENT, settings=self._digest, key=key)

    def get(self, key: str) -> dict[str, np.ndarray] | None:
        """Read a chunk; return None if it is missing, or raise an error if another job wrote it."""
        path = self.path(key)
        if not path.exists():
            return None
        tensors, document = read_tensors(path, _CHUNK_DOCUMENT)
        expected = {"settings": self._digest, "key": key}
        if wrong := [name for name, value in expected.items() if document[name] != value]:
            raise CheckpointError(
                f"{path} is from another job: other {' and '.join(wrong)}; delete it"
            )
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    @staticmethod
    def settings_of(folder: str | Path) -> dict[str, Any]:
        """Return the settings of the job in a folder, or an empty dict if no job has begun."""
        path = open_folder(folder) / _SETTINGS
        return dict(_SETTINGS_DOCUMENT.read(path)["settings"]) if path.exists() else {}

    def path(self, key: str) -> Path:
        """Return the path of a chunk's file."""
        return path_inside(self.folder, f"{key}.safetensors")


def differences(settings: dict[str, Any], others: dict[str, Any], who_has: str) -> list[str]:
    """Return an error message for each setting that has another value in `others`."""
    keys = sorted(settings.keys() | others.keys())
    both = [[values.get(key, _MISSING) for values in (settings, others)] for key in keys]
    return [
        f"{key}: got {_short(value)}; {who_has} {_short(other)}"
        for key, (value, other) in zip(keys, both, strict=True)
        if value != other
    ]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
