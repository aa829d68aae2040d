"""Save models, with their neuron-heads, as safetensors and JSON files, and load them.

    gate.json           the manifest: the kind of model, its gates, a digest of every file, …
    model.safetensors   the weights; `bridge.safetensors`, if only `load` can use them
    tokenizer/          the tokenizer's files; a bridge's are in the folder itself
    config.json         the configuration, only for a bridge
    transcoders/        the transcoders, if some are attached, with one file per layer

A bridge is saved as a Hugging Face folder where possible (`bridge.py`). `save` writes a temporary
folder, which replaces the destination only when it is complete.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from transformer_lens.model_bridge import TransformerBridge
from typing_extensions import TypedDict

from attn_only_lens.arguments import a_type
from attn_only_lens.engine.model_checks import hook_reasons, modules_of, quantized_reasons
from attn_only_lens.errors import CheckpointError, InputError, UnsupportedModelError
from attn_only_lens.gates.gating import Gating
from attn_only_lens.heads import has_neuron_heads, host_of
from attn_only_lens.heads.transcoder import Transcoder
from attn_only_lens.models.attach import OnError, attach, without_transcoders
from attn_only_lens.models.checkpoint.bridge import (
    BRIDGE_WEIGHTS,
    BridgeFields,
    read_bridge,
    write_bridge,
)
from attn_only_lens.models.checkpoint.hooked import HookedFields, read_hooked, write_hooked
from attn_only_lens.models.checkpoint.transcoders import read_transcoder, write_transcoders
from attn_only_lens.models.expose import expose_neuron_heads
from attn_only_lens.models.hf_folder import FILES
from attn_only_lens.models.in_place import exposed_heads
from attn_only_lens.models.source_folder import TOKENIZER, WEIGHTS, checkpoint_errors, refuse
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer
from attn_only_lens.storage import (
    Document,
    FileDigest,
    atomic_folder,
    check_files,
    file_digests,
    listed_files,
    open_folder,
    type_mismatches,
)
from attn_only_lens.tl import HookedTransformer

MANIFEST, TRANSCODERS = "gate.json", "transcoders"
_UNBUILDABLE = "cannot be built with the installed versions of transformers and TransformerLens"


class _Manifest(TypedDict):
    attn_only_lens: str
    transformer_lens: str
    model: Literal["HookedTransformer", "TransformerBridge"]
    source_name: str | None
    gate: Gating
    training: bool
    padding_side: Literal["left", "right"] | None
    transcoders: OnError | None
    frozen: list[str]
    files: dict[str, FileDigest]


class _Kind(NamedTuple):
    """A kind of model: its manifest entries, and the functions that save and load its files.

    `closed` holds file patterns; every file that matches one must be listed in the manifest.
    """

    fields: Any
    write: Callable[[Any, Path, dict[str, Any]], dict[str, Any]]
    read: Callable[[Path, dict[str, Any]], Any]
    closed: tuple[str, ...]


_DOCUMENT = Document("attn_only_lens", 9, _Manifest)
_KINDS = {
    "HookedTransformer": _Kind(HookedFields, write_hooked, read_hooked, (f"{TOKENIZER}/**/*",)),
    "TransformerBridge": _Kind(BridgeFields, write_bridge, read_bridge, FILES),
}
_Model: TypeAlias = AttentionOnlyTransformer | HookedTransformer | TransformerBridge


@torch.inference_mode(False)  # as in `load`
def save(model: _Model, folder: str | os.PathLike[str], *, source_name: str | None = None) -> Path:
    """Save a model to a folder, or leave the folder unchanged if an error occurs.

    `load` and the command line can open the folder. A model saved without neuron-heads, such as a
    `HookedTransformer` that you trained, is loaded without neuron-heads. A model with transcoders
    is loaded with the same transcoders, attached with the same option `error`.

    A `TransformerBridge` without processed weights is saved as a Hugging Face folder, which
    `from_pretrained` and `TransformerBridge.boot_transformers` can open; `gate.json` describes the
    neuron-heads. Only `load` can open other bridges: those with weights processed by
    `enable_compatibility_mode`, those from `boot_native`, and grown bridges with sizes that
    transformers does not support. `save` loads each saved bridge again to compare it with the
    model, which briefly needs memory for a second model.

    Args:
        model: a `TransformerBridge` or `HookedTransformer`, with or without neuron-heads, or a
            model that `convert` returned, in its current state. Hooks are not saved.
        folder: the destination. An earlier save there is replaced; other files are refused.
        source_name: the name of the source; by default `cfg.model_name`.

    Returns:
        The folder.

    Raises:
        UnsupportedModelError: `expose_neuron_heads` does not support the model.
        CheckpointError: the model could not be loaded again, because its parameters, activation,
            code, hooks or processing options cannot be rebuilt from its configuration, or its
            tokenizer needs its own code; or the folder holds other files.
        InputError: a transcoder has weights that are NaN or infinite.

    Example:
        >>> import tempfile, torch
        >>> from attn_only_lens import convert, load, pretrained, save
        >>> model = convert(load("modular-addition"))
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     same = load(save(model, f"{parent}/added"))
        >>> tokens = pretrained.modular_addition_tokens()[:13]
        >>> torch.equal(model(tokens), same(tokens))
        True
    """
    folder = open_folder(folder)
    if not isinstance(model, HookedTransformer | TransformerBridge):
        raise CheckpointError(
            f"got {a_type(model)}; expected a TransformerBridge or a HookedTransformer"
        )
    reasons = host_of(model).reasons() if has_neuron_heads(model) else []
    if isinstance(model, TransformerBridge):
        reasons = reasons + hook_reasons(model, "would not be saved")
    reasons = reasons + quantized_reasons(modules_of(model))
    refuse(reasons, "this model cannot be saved")
    with ExitStack() as stack:
        results = any(heads.results for heads in exposed_heads(model))
        transcoders, error = stack.enter_context(without_transcoders(model))
        changed: dict[str, Any] = {"transcoders": error}
        if not has_neuron_heads(model):
            # Expose the model during the save, so that it passes the checks of exposed models.
            stack.enter_context(expose_neuron_heads(model))
            for heads in exposed_heads(model):
                heads.results = results
            changed["layout"] = "plain"
        return _save(model, transcoders, folder, source_name, changed)


def _save(
    model: _Model,
    transcoders: dict[int, Transcoder],
    folder: Path,
    source_name: str | None,
    changed: dict[str, Any],
) -> Path:
    kind = "TransformerBridge" if isinstance(model, TransformerBridge) else "HookedTransformer"
    common = {
        "model": kind,
        "source_name": model.cfg.model_name if source_name is None else source_name,
        "training": model.training,
        "padding_side": None if model.tokenizer is None else model.tokenizer.padding_side,
    }
    names = {MANIFEST, *(Path(name).parts[0] for name in listed_files(folder / MANIFEST))}
    with atomic_folder(folder, sorted(names), MANIFEST, listed_files) as new:
        with checkpoint_errors(f"it {_UNBUILDABLE}"):
            entries = _KINDS[kind].write(model, new, common)
        if transcoders:
            (new / TRANSCODERS).mkdir()
            write_transcoders(new / TRANSCODERS, transcoders)
        write_manifest(new, entries | changed)
    return folder


def load_saved(folder: Path, *, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Load a saved model from its folder, without using pickles, the network or custom code."""
    manifest = read_manifest(folder)
    kind = _KINDS[manifest["model"]]
    closed = (*kind.closed, f"{TRANSCODERS}/*")
    check_files(folder, manifest["files"], closed, seal=MANIFEST)
    with checkpoint_errors(f"{folder} {_UNBUILDABLE}"):
        model = kind.read(folder, manifest)
    if manifest["padding_side"] is not None:
        model.tokenizer.padding_side = manifest["padding_side"]
    if dtype is not None:
        model.to(dtype, print_details=False)
    # Pass a string, since a HookedTransformer ignores the index of a torch.device.
    model.to(str(device), print_details=False)
    if manifest["transcoders"] is not None:
        try:
            files = (folder / TRANSCODERS).glob("*")
            attach(model, dict(map(read_transcoder, files)), error=manifest["transcoders"])
        except (InputError, UnsupportedModelError) as error:
            raise CheckpointError(f"{folder} {_UNBUILDABLE}: {error}") from error
        for heads in exposed_heads(model):
            heads.results = manifest.get("results", False)
    return model


def is_saved(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder was written by `save`."""
    try:
        return (open_folder(folder) / MANIFEST).is_file()
    except (CheckpointError, OSError):
        return False


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    """Add the manifest to a folder that already holds the model's other files."""
    names = ("attn_only_lens", "transformer_lens")
    versions = {name: version(name.replace("_", "-")) for name in names}
    _DOCUMENT.write(folder / MANIFEST, **versions, **entries, files=file_digests(folder))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a folder's manifest and check its entries, but not the files that it lists."""
    path = folder / MANIFEST
    if not path.exists():
        raise CheckpointError(
            f"no saved model in {folder}: {MANIFEST} is missing; expected a folder written by "
            "attn_only_lens.save"
        )
    manifest = _DOCUMENT.read(path)
    fields = _KINDS[manifest["model"]].fields
    wrong = [reason.removeprefix(".") for reason in type_mismatches(manifest, fields, "")]
    weights = BRIDGE_WEIGHTS if manifest.get("weights") == "bridge" else WEIGHTS
    wrong += [f"files.{weights} is missing"] * (weights not in manifest["files"])
    refuse(wrong, f"{path} cannot be used")
    return manifest
