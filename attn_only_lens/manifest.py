"""The JSON beside a saved model: what it is, and fingerprints by which damage is noticed."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_only_lens.errors import CheckpointError
from attn_only_lens.heads import EXACT
from attn_only_lens.source_folder import TOKENIZER, WEIGHTS
from attn_only_lens.tl import HookedTransformerConfig
from attn_only_lens.two_blocks import AttentionOnlyTransformer

__all__ = ["MANIFEST", "check_files", "describe", "plain_config", "read_manifest", "ties"]

MANIFEST = "attn_only_lens.json"
FORMAT = "attn_only_lens"
FORMAT_VERSION = 2  # 1 had "exact" for a gate, and no other
GATES = ("exact", "bilinear")
_NEEDED = ("source_name", "config", "tied", "frozen", "training", "padding_side", "files")


def ties(model: nn.Module) -> dict[str, str]:
    """For every further name of a tied parameter, its first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }


def describe(
    model: AttentionOnlyTransformer, source_name: str | None, folder: Path
) -> dict[str, Any]:
    """Everything about a model but its numbers; its files are in `folder` already."""
    source = model.source_cfg
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "attn_only_lens": version("attn-only-lens"),
        "transformer_lens": version("transformer-lens"),
        "source_name": source.model_name if source_name is None else source_name,
        "gate": model.cfg.gating.to_json(),
        "config": plain_config(source),
        "tied": ties(model),
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "training": model.training,
        "padding_side": None if model.tokenizer is None else model.tokenizer.padding_side,
        "files": {
            path.relative_to(folder).as_posix(): _fingerprint(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }
    return manifest | {"sha256": _seal(manifest)}


def plain_config(cfg: HookedTransformerConfig) -> dict[str, Any]:
    """A configuration as JSON holds it, without the device, which `load` chooses."""
    return {key: _plain(value) for key, value in vars(cfg).items() if key != "device"}


def _plain(value: Any) -> Any:
    """A value of the configuration as JSON holds it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a numpy number
        return value.item()
    return value


def _seal(manifest: dict[str, Any]) -> str:
    text = json.dumps({k: v for k, v in manifest.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `describe` said of a saved model.

    Raises:
        CheckpointError: it is missing, unreadable, changed, or newer than this package.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"no saved model in {folder}: {MANIFEST} is missing; expected a folder that "
            "attn_only_lens.save wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); save the model again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a manifest of attn_only_lens.save")
    found = manifest.get("format_version")
    if not isinstance(found, int) or found > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {found}, written by attn-only-lens "
            f"{manifest.get('attn_only_lens')}; this one reads up to {FORMAT_VERSION}: upgrade "
            "attn-only-lens"
        )
    if manifest.get("sha256") != _seal(manifest):
        raise CheckpointError(f"{path} was changed after it was saved; save the model again")
    if manifest.get("gate") == "exact":
        manifest = manifest | {"gate": EXACT.to_json()}
    gating = manifest.get("gate")
    if not isinstance(gating, dict) or gating.get("kind") not in GATES:
        raise CheckpointError(
            f"{path} holds a model with gate {gating!r}; this version knows "
            f"{' and '.join(GATES)} gates: upgrade attn-only-lens"
        )
    missing = [key for key in _NEEDED if key not in manifest]
    missing += [f"config.{key}" for key in ("dtype",) if key not in manifest.get("config", {})]
    missing += [f"files.{name}" for name in (WEIGHTS,) if name not in manifest.get("files", {})]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}; save the model again")
    return manifest


def check_files(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Hold every file of a saved model against its fingerprint.

    Raises:
        CheckpointError: with everything that is missing, truncated or changed.
    """
    wrong = []
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            wrong.append(f"{name} has {path.stat().st_size} bytes; expected {expected['bytes']}")
        elif _fingerprint(path) != expected:
            wrong.append(f"{name} was changed after it was saved")
    # A tokenizer reads what lies in its folder, said or not.
    present = (path for path in (folder / TOKENIZER).rglob("*") if path.is_file())
    unsaid = sorted({path.relative_to(folder).as_posix() for path in present} - files.keys())
    wrong += [f"{name} was added after it was saved" for name in unsaid]
    if wrong:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(wrong)}. Save the model again")
