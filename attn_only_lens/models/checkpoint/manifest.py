"""The manifest of a saved model: what it is, what to build it from, and a digest of every file."""

from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypedDict

from attn_only_lens.errors import CheckpointError
from attn_only_lens.heads import Gating
from attn_only_lens.models.source_folder import TOKENIZER, WEIGHTS
from attn_only_lens.models.two_blocks import LayerSizes
from attn_only_lens.storage import Document, FileDigest, file_digests, open_folder, type_mismatches

__all__ = ["MANIFEST", "is_saved", "read_manifest", "write_manifest"]

MANIFEST = "attn_only_lens.json"


class _Manifest(TypedDict):
    attn_only_lens: str
    transformer_lens: str
    layout: Literal["two blocks a layer", "in place"]
    model: Literal["HookedTransformer", "TransformerBridge"]
    source_name: str | None
    gate: Gating
    config: dict[str, Any]
    training: bool
    padding_side: Literal["left", "right"] | None
    frozen: list[str]
    files: dict[str, FileDigest]


class _Hooked(_Manifest):
    tied: dict[str, str]


class _TwoBlocks(_Hooked):
    layers: list[LayerSizes]


class _BridgeConfig(TypedDict):
    dtype: str
    architecture: str
    compatible: bool
    processed: bool
    quiet: bool
    cfg: dict[str, Any]


class _Bridge(_Manifest):
    config: _BridgeConfig  # type: ignore[misc]
    results: bool
    views: dict[str, tuple[str, int, list[int], list[int], str]]
    other_mode: list[str]


_FIELDS = {
    ("two blocks a layer", "HookedTransformer"): _TwoBlocks,
    ("in place", "HookedTransformer"): _Hooked,
    ("in place", "TransformerBridge"): _Bridge,
}
_DOCUMENT = Document("attn_only_lens", 5, _Manifest)


def is_saved(folder: str | Path) -> bool:
    """Whether `save` wrote a folder."""
    try:
        return (open_folder(folder) / MANIFEST).is_file()
    except (CheckpointError, OSError):
        return False


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """Write the manifest of a model whose files are in a folder already."""
    wrote = {
        "attn_only_lens": version("attn-only-lens"),
        "transformer_lens": version("transformer-lens"),
    }
    _DOCUMENT.write(folder / MANIFEST, **wrote, **entries, files=file_digests(folder))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read what `write_manifest` wrote; the files that it names are `check_files`' to check.

    Raises:
        CheckpointError: it is missing, unreadable or changed, of another version, or describes no
            model that `save` writes.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise CheckpointError(
            f"no saved model in {folder}: {MANIFEST} is missing; expected a folder that "
            "attn_only_lens.save wrote"
        )
    manifest = _DOCUMENT.read(path)
    fields = _FIELDS.get((manifest["layout"], manifest["model"]))
    if fields is None:
        raise CheckpointError(f"{path} holds no model that attn_only_lens.save writes")
    wrong = [reason.removeprefix(".") for reason in type_mismatches(manifest, fields, "")]
    names = manifest["files"]
    wrong += [f"files.{WEIGHTS} is missing"] * (WEIGHTS not in names)
    wrong += [
        f"{name!r} is no file of a saved model"
        for name in names
        if name != WEIGHTS and not name.startswith(f"{TOKENIZER}/")
    ]
    if wrong:
        raise CheckpointError(f"{path} cannot be used: {'; '.join(wrong[:5])}")
    return manifest
