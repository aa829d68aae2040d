"""Read and write safetensors files, which contain no pickles, and compute digests of tensors."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from attn_only_lens.errors import CheckpointError
from attn_only_lens.storage.atomic import AnyPath, as_path
from attn_only_lens.storage.documents import Document, format_of, parse

_KEY = "attn_only_lens"


def tensor_digest(named: Iterable[tuple[str, Tensor]], fields: Any = None) -> str:
    """Return a SHA-256 digest of `fields` and of the tensors' names, shapes, dtypes and bytes."""
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name, tensor in named:
        digest.update(f"\n{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], document: Document | None = None, **body: Any
) -> None:
    """Write a safetensors file; no other process may read `path` yet."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = None
    if document is not None:
        metadata = {_KEY: document.text(**body, tensors=tensor_digest(sorted(whole.items())))}
    path.touch()
    mode = path.stat().st_mode  # keep the mode: safetensors lets only the owner read its files
    save_file(whole, path, metadata)
    path.chmod(mode)


def read_tensors(
    path: AnyPath, document: Document | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the document of a safetensors file."""
    path = as_path(path)
    with _opened(path) as file:
        text = (file.metadata() or {}).get(_KEY)
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if document is None:
        return tensors, {}
    if text is None:
        raise CheckpointError(f"{path} has no document of format {document.format!r}")
    fields = document.parse(text, path)
    if fields["tensors"] != tensor_digest(sorted(tensors.items())):
        raise CheckpointError(f"{path} was changed after it was written: its tensors differ")
    return tensors, fields


def tensors_format(path: Path) -> Any:
    """Return the name of the format of a safetensors file's document, or None if it has none."""
    with _opened(path) as file:
        text = (file.metadata() or {}).get(_KEY)
    return text and format_of(parse(text, path))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except Exception as error:  # safetensors, torch and the file system raise different errors
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
