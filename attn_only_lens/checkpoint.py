"""Save a converted model to a folder, and load it back: safetensors and JSON, no pickle, no hub.

    model.safetensors     the state dict, tied parameters once each
    attn_only_lens.json   format version, the source's TransformerLens configuration, gate, digest
    tokenizer/            the tokenizer's own files, where the model has one

A folder is written beside its destination and moved there when it is whole.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from attn_only_lens.errors import CheckpointError, UnsupportedModelError
from attn_only_lens.files import flush
from attn_only_lens.heads import Gating
from attn_only_lens.manifest import (
    MANIFEST,
    check_files,
    describe,
    plain_config,
    read_manifest,
    ties,
)
from attn_only_lens.source_folder import TOKENIZER, WEIGHTS, device_named, dtype_named, quiet
from attn_only_lens.tl import USE_INSTEAD, HookedTransformer, HookedTransformerConfig
from attn_only_lens.two_blocks import AttentionOnlyTransformer, convert_as
from attn_only_lens.two_blocks.support import reasons_against

__all__ = ["load", "save"]


def save(
    model: AttentionOnlyTransformer,
    folder: str | os.PathLike[str],
    *,
    source_name: str | None = None,
) -> Path:
    """Write a converted model to a folder, all of it or nothing.

    Args:
        model: what `convert` or `load` returned, as it is now (trained or edited since, perhaps).
        folder: where to; an earlier save there is replaced, anything else is refused.
        source_name: what the source was called; by default `cfg.model_name`.

    Returns:
        The folder.

    Raises:
        CheckpointError: the model is not a converted one, or could not be loaded again (it has
            parameters or an activation that its configuration does not lead to), or the folder
            holds something else.

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
    folder = Path(folder)
    if not isinstance(model, AttentionOnlyTransformer):
        raise CheckpointError(
            f"got a {type(model).__name__}; expected what attn_only_lens.convert or load returns"
            f"{USE_INSTEAD}"
        )
    tensors = _own_tensors(model)
    _require_loadable(model, tensors)
    folder = _destination(folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        (new / WEIGHTS).touch()
        mode = (new / WEIGHTS).stat().st_mode  # safetensors would write for the owner alone
        save_file({name: t.contiguous() for name, t in tensors.items()}, new / WEIGHTS)
        (new / WEIGHTS).chmod(mode)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(new / TOKENIZER)
        manifest = describe(model, source_name, new)
        (new / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for path in new.rglob("*"):
            if path.is_file():
                flush(path)
        if folder.exists():
            # Two renames: what is interrupted between them leaves the old save in the scratch
            # folder, which is then put back.
            old = Path(scratch) / "old"
            os.replace(folder, old)
            try:
                os.replace(new, folder)
            except BaseException:
                os.replace(old, folder)
                raise
        else:
            os.replace(new, folder)
    return folder


def load(
    folder: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> AttentionOnlyTransformer:
    """Read a saved model back, without pickle and without a network.

    Args:
        folder: what `save` wrote.
        device: where to put it; by default the cpu.
        dtype: its floating-point type, as `model.to(dtype)` would make it; by default as saved.

    Returns:
        The model with its tokenizer, flags, tied and frozen parameters as they were.

    Raises:
        CheckpointError: the folder is missing, damaged, tampered with, newer than this package, or
            the device or dtype is unknown.

    Example:
        >>> import tempfile, torch
        >>> from attn_only_lens import convert, load, pretrained, save
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = save(convert(pretrained.modular_addition()), f"{parent}/added")
        ...     load(folder, dtype="float64").W_in.dtype
        torch.float64
    """
    folder = Path(folder)
    to_device = device_named("cpu" if device is None else device)
    to_dtype = None if dtype is None else dtype_named(dtype)
    manifest = read_manifest(folder)
    check_files(folder, manifest["files"])
    model = _skeleton(manifest["config"], manifest["gate"])
    try:
        tensors = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS} is not a safetensors file: {error}") from error
    _fill(model, tensors, manifest, folder)
    model.train(manifest["training"])
    if manifest["padding_side"] is not None:
        model.tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER, local_files_only=True)
        model.tokenizer.padding_side = manifest["padding_side"]
    if to_dtype is not None:
        model.to(to_dtype, print_details=False)
    return model.to(to_device, print_details=False)


def _destination(folder: Path) -> Path:
    """The folder to write, links followed; refused where that would overwrite what is not ours."""
    folder = folder.resolve()
    if folder == Path.cwd():
        raise CheckpointError("got the current folder; expected a folder in it, or elsewhere")
    if folder.is_dir():
        ours = (MANIFEST, WEIGHTS, TOKENIZER)
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in ours)
        if foreign:
            raise CheckpointError(
                f"{folder} is not a saved model alone, it also holds {', '.join(foreign[:5])}"
                f"{', …' if len(foreign) > 5 else ''}: choose another folder, or move them"
            )
    elif folder.exists():
        raise CheckpointError(f"{folder} is a file; expected a folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {folder.parent}: {error}") from error
    return folder


def _require_loadable(model: AttentionOnlyTransformer, tensors: dict[str, Tensor]) -> None:
    """Refuse a model that `load` would not rebuild, while the caller still has it."""
    skeleton = _skeleton(plain_config(model.source_cfg), model.cfg.gating.to_json())
    wrong = _misfits(skeleton, tensors, ties(model))
    if wrong:
        raise CheckpointError(
            f"this model is more than its configuration leads to, and could not be loaded: "
            f"{'; '.join(wrong)}"
        )


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, what is tied under its first name only."""
    return {
        name: tensor.detach()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def _skeleton(config: dict[str, Any], gate: dict[str, Any]) -> AttentionOnlyTransformer:
    """The converted model without numbers: all of its tensors are on the meta device."""
    # Building must not touch the caller's random state (a seed would), nor ask a hub for a
    # tokenizer by its name; both fields are put back afterwards.
    held_back = {"seed": None, "tokenizer_name": None, "init_weights": False}
    dtype = {"dtype": dtype_named(config["dtype"])}
    try:
        cfg = HookedTransformerConfig(**config | dtype | held_back | {"device": "cpu"})
        with quiet(), torch.device("meta"):
            source = HookedTransformer(cfg, move_to_device=False)
        vars(cfg).update(config | dtype)
        reasons = reasons_against(source)
        if reasons:
            raise UnsupportedModelError(reasons)
        return convert_as(source, Gating.from_json(gate))
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the configuration cannot be built by this version of TransformerLens: {error}"
        ) from error


def _fill(
    model: nn.Module, tensors: dict[str, Tensor], manifest: dict[str, Any], folder: Path
) -> None:
    """Give the skeleton its numbers."""
    tied = manifest["tied"]
    wrong = _misfits(model, tensors, tied)
    if wrong:
        raise CheckpointError(f"{folder / WEIGHTS} does not fit its manifest: {'; '.join(wrong)}")
    frozen = set(manifest["frozen"])
    for name in dict(model.named_parameters(remove_duplicate=False)):
        module, leaf = _owner(model, name)
        if name in tied:
            continue
        setattr(module, leaf, nn.Parameter(tensors[name], requires_grad=name not in frozen))
    for name, first in tied.items():
        module, leaf = _owner(model, name)
        setattr(module, leaf, model.get_parameter(first))
    for name in dict(
        model.named_buffers()
    ):  # of any size: rotary tables grow with the longest prompt seen
        module, leaf = _owner(model, name)
        setattr(module, leaf, tensors[name])


def _misfits(skeleton: nn.Module, tensors: dict[str, Tensor], tied: dict[str, str]) -> list[str]:
    """Where tensors do not fit the model that a configuration leads to."""
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    buffers = {name for name, _ in skeleton.named_buffers()}
    expected = {name for name in parameters if name not in tied} | buffers
    wrong = [f"{name} is missing" for name in sorted(expected - set(tensors))]
    wrong += [f"{name} is not known" for name in sorted(set(tensors) - expected)]
    return wrong + [
        f"{name} has shape {tuple(tensors[name].shape)}; expected {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in tensors and tensors[name].shape != parameter.shape
    ]


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
