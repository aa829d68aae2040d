"""Save a model with neuron-heads to a folder, and load it: safetensors and JSON, no pickle, no hub.

    model.safetensors     its tensors; those that are tied or share memory once
    attn_only_lens.json   a manifest: kind of model, configuration, gate, digest of every file
    tokenizer/            the tokenizer's own files, where the model has one

A folder is written next to its destination, and moved there when it is complete.
"""

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from typing_extensions import TypedDict

from attn_only_lens.errors import CheckpointError
from attn_only_lens.gates import Gating
from attn_only_lens.heads import has_neuron_heads, host_of
from attn_only_lens.models.checkpoint.bridge import BridgeFields, describe_bridge, rebuild_bridge
from attn_only_lens.models.checkpoint.hooked import HookedFields, describe_hooked, rebuild_hooked
from attn_only_lens.models.source_folder import (
    TOKENIZER,
    WEIGHTS,
    checkpoint_errors,
    load_tokenizer,
    refuse,
)
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer
from attn_only_lens.storage import (
    Document,
    FileDigest,
    atomic_folder,
    check_files,
    file_digests,
    limit_size,
    listed_files,
    open_folder,
    read_tensors,
    type_mismatches,
    write_tensors,
)
from attn_only_lens.tl import HookedTransformer

MANIFEST = "attn_only_lens.json"
_UNBUILDABLE = "cannot be built by these versions of transformers and TransformerLens"


class _Manifest(TypedDict):
    attn_only_lens: str
    transformer_lens: str
    model: Literal["HookedTransformer", "TransformerBridge"]
    source_name: str | None
    gate: Gating
    config: dict[str, Any]
    training: bool
    padding_side: Literal["left", "right"] | None
    frozen: list[str]
    files: dict[str, FileDigest]


class _Kind(NamedTuple):
    """A kind of model: its entries of the manifest, and how to save and load it."""

    fields: Any
    describe: Callable[[Any], tuple[dict[str, Any], dict[str, Tensor]]]
    rebuild: Callable[[dict[str, Any], dict[str, Tensor]], Any]


_DOCUMENT = Document("attn_only_lens", 7, _Manifest)
_KINDS = {
    "HookedTransformer": _Kind(HookedFields, describe_hooked, rebuild_hooked),
    "TransformerBridge": _Kind(BridgeFields, describe_bridge, rebuild_bridge),
}
_Model: TypeAlias = AttentionOnlyTransformer | HookedTransformer | TransformerBridge


@torch.inference_mode(False)  # as in `load`
def save(model: _Model, folder: str | os.PathLike[str], *, source_name: str | None = None) -> Path:
    """Write a model with neuron-heads to a folder, completely or not at all.

    A `TransformerBridge` is written with its present weights, processed by
    `enable_compatibility_mode` or not. Before anything is written, it is built again and compared,
    which takes the memory of a second model for a moment.

    Args:
        model: a model that `convert` or `load` returned, or a model with `expose_neuron_heads`, in
            its present state. Hooks are not saved.
        folder: the destination; an earlier save there is replaced, anything else is refused.
        source_name: the name of the source; by default `cfg.model_name`.

    Returns:
        The folder.

    Raises:
        CheckpointError: the model has no neuron-heads; or it could not be loaded again, because
            its configuration does not lead to its parameters, activation, code, hooks or processing
            options, or its tokenizer needs its own code; or the folder holds something else.

    Example:
        >>> import tempfile, torch
        >>> from attn_only_lens import convert, load, pretrained, save
        >>> model = convert(pretrained.modular_addition())
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     same = load(save(model, f"{parent}/added"))
        >>> tokens = pretrained.modular_addition_tokens()[:13]
        >>> torch.equal(model(tokens), same(tokens))
        True
    """
    folder = open_folder(folder)
    if not has_neuron_heads(model):
        raise CheckpointError(
            f"got a {type(model).__name__}; expected what attn_only_lens.convert or load returns, "
            "or a model with attn_only_lens.expose_neuron_heads"
        )
    if reasons := host_of(model).reasons():
        raise CheckpointError("; ".join(reasons))
    kind = "TransformerBridge" if isinstance(model, TransformerBridge) else "HookedTransformer"
    with checkpoint_errors(f"it {_UNBUILDABLE}"):
        entries, tensors = _KINDS[kind].describe(model)
    entries |= {
        "model": kind,
        "source_name": model.cfg.model_name if source_name is None else source_name,
        "training": model.training,
        "padding_side": None if model.tokenizer is None else model.tokenizer.padding_side,
    }
    with atomic_folder(folder, (MANIFEST, WEIGHTS, TOKENIZER), MANIFEST, listed_files) as new:
        write_tensors(new / WEIGHTS, tensors)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(new / TOKENIZER)
            load_tokenizer(new)
        write_manifest(new, entries)
    return folder


def load_saved(folder: Path, *, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Read a saved model: no pickle, no network, no code, no other folder."""
    manifest = read_manifest(folder)
    check_files(folder, manifest["files"], closed=TOKENIZER)
    tensors, _ = read_tensors(folder / WEIGHTS)
    with limit_size(tensors), checkpoint_errors(f"{folder} {_UNBUILDABLE}"):
        model = _KINDS[manifest["model"]].rebuild(manifest, tensors)
    if manifest["padding_side"] is not None:
        model.tokenizer = load_tokenizer(folder)
        model.tokenizer.padding_side = manifest["padding_side"]
    if dtype is not None:
        model.to(dtype, print_details=False)
    # By name: of a torch.device, a HookedTransformer keeps only the type, without the index.
    return model.to(str(device), print_details=False)


def is_saved(folder: str | os.PathLike[str]) -> bool:
    """Return True for a folder that `save` wrote."""
    try:
        return (open_folder(folder) / MANIFEST).is_file()
    except (CheckpointError, OSError):
        return False


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """Write the manifest of a model whose files are in a folder already."""
    names = ("attn_only_lens", "transformer_lens")
    versions = {name: version(name.replace("_", "-")) for name in names}
    _DOCUMENT.write(folder / MANIFEST, **versions, **entries, files=file_digests(folder))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check a manifest, but not the files that it names (see `check_files`)."""
    path = folder / MANIFEST
    if not path.exists():
        raise CheckpointError(
            f"no saved model in {folder}: {MANIFEST} is missing; expected a folder that "
            "attn_only_lens.save wrote"
        )
    manifest = _DOCUMENT.read(path)
    fields = _KINDS[manifest["model"]].fields
    wrong = [reason.removeprefix(".") for reason in type_mismatches(manifest, fields, "")]
    names = manifest["files"]
    wrong += [f"files.{WEIGHTS} is missing"] * (WEIGHTS not in names)
    wrong += [
        f"{name!r} is no file of a saved model"
        for name in names
        if name != WEIGHTS and not name.startswith(f"{TOKENIZER}/")
    ]
    refuse(wrong, f"{path} cannot be used")
    return manifest
