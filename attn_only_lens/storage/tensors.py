"""Files of tensors: safetensors, no pickle; and one digest for tensors, wherever they are kept."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from attn_only_lens.errors import CheckpointError
from attn_only_lens.storage.sealed import Document

__all__ = ["digest_of", "read_tensors", "write_tensors"]

_KEY = "attn_only_lens"


def digest_of(named: Iterable[tuple[str, Tensor]], said: Any = None) -> str:
    """SHA-256 of tensors: names, shapes, types and bytes, in the order given.

    Args:
        named: names and tensors, on any device.
        said: what else the digest depends on, as JSON holds it.

    Returns:
        64 hexadecimal digits, the same on every machine and device.

    Raises:
        TypeError: a tensor is on the meta device, or of a type that has no bytes.
    """
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name, tensor in named:
        digest.update(f"\n{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], document: Document | None = None, **body: Any
) -> None:
    """Write a safetensors file, to a path that nobody else reads yet.

    Args:
        path: the file.
        tensors: by name; none may share memory with another.
        document: what the file says of itself, with `body` and a digest of the tensors, where no
            manifest beside it does.
    """
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = None
    if document is not None:
        text = {_KEY: document.text(**body, tensors=digest_of(sorted(whole.items())))}
    path.touch()
    mode = path.stat().st_mode  # as the umask has it; safetensors makes it the owner's alone
    save_file(whole, path, text)
    path.chmod(mode)


def read_tensors(
    path: Path, document: Document | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors of a safetensors file, and what it says of itself.

    Raises:
        CheckpointError: or what `document` refuses with: it cannot be read; where it should say
            something of itself, it does not, or was changed since it was written.
    """
    refuse = CheckpointError if document is None else document.refuse
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except Exception as error:  # of safetensors, of torch, of the file system: whatever it holds
        raise refuse(f"{path} is not a readable safetensors file: {error}") from error
    if document is None:
        return tensors, {}
    if text is None:
        raise refuse(f"{path} does not say that attn-only-lens wrote it: {document.format!r}")
    said = document.parse(text, path)
    if said["tensors"] != digest_of(sorted(tensors.items())):
        raise refuse(f"{path} was changed after it was written: its tensors have another digest")
    return tensors, said
