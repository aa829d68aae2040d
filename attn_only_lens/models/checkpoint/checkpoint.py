"""Save a model with neuron-heads to a folder, and load it: safetensors and JSON, no pickle, no hub.

    model.safetensors     its tensors, what is tied or shares memory once each
    attn_only_lens.json   format version, layout, what to build the model from, gate, digest
    tokenizer/            the tokenizer's own files, where the model has one

What a model is taken apart into is said in `saved/`, by layout and class.

A folder is written beside its destination and moved there when it is whole.

The kinds of models that are saved: for each, the layout, the class, the way there and back.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.errors import AttnOnlyLensError, CheckpointError
from attn_only_lens.heads import has_neuron_heads, host_of
from attn_only_lens.models.checkpoint.bridge import bridge_parts, rebuilt_bridge
from attn_only_lens.models.checkpoint.entries import Parts
from attn_only_lens.models.checkpoint.hooked import (
    in_place_parts,
    rebuilt_in_place,
    rebuilt_two_blocks,
    two_blocks_parts,
)
from attn_only_lens.models.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from attn_only_lens.models.source_folder import (
    TOKENIZER,
    WEIGHTS,
    device_named,
    dtype_named,
    load_tokenizer,
)
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer
from attn_only_lens.storage import (
    check_files,
    files_listed,
    opened_folder,
    read_tensors,
    whole_folder,
    write_tensors,
)
from attn_only_lens.storage.size_limit import no_more_than
from attn_only_lens.tl import HookedTransformer

__all__ = ["FORMS", "Form", "form_named", "form_of", "load", "save"]


@dataclass(frozen=True)
class Form:
    """A kind of model that can be saved.

    Attributes:
        layout: where its neuron-heads are.
        model: the TransformerLens class that it is made of.
        parts: takes a model apart; raises CheckpointError where it could not be put together.
        rebuilt: puts it together from a manifest and tensors.
    """

    layout: str
    model: str
    parts: Callable[[Any], Parts]
    rebuilt: Callable[[dict[str, Any], dict[str, Tensor]], Any]


FORMS = (
    Form("two blocks a layer", "HookedTransformer", two_blocks_parts, rebuilt_two_blocks),
    Form("in place", "HookedTransformer", in_place_parts, rebuilt_in_place),
    Form("in place", "TransformerBridge", bridge_parts, rebuilt_bridge),
)


def form_of(model: object) -> Form | None:
    """The form of a model with neuron-heads; none for any other object."""
    kind = "TransformerBridge" if isinstance(model, TransformerBridge) else "HookedTransformer"
    if not has_neuron_heads(model):
        return None
    return form_named("in place" if host_of(model).in_place else "two blocks a layer", kind)


def form_named(layout: str | None, model: str) -> Form | None:
    """The form of these names, if there is one."""
    return next((form for form in FORMS if (form.layout, form.model) == (layout, model)), None)


_Model: TypeAlias = AttentionOnlyTransformer | HookedTransformer | TransformerBridge


@torch.inference_mode(False)  # as `load`, which is what the folder is tried with
def save(
    model: _Model,
    folder: str | os.PathLike[str],
    *,
    source_name: str | None = None,
) -> Path:
    """Write a model with neuron-heads to a folder, all of it or nothing.

    A `TransformerBridge` is written with its weights as they are, processed by
    `enable_compatibility_mode` or not. It is built once more on the spot, and compared, before
    anything is written: that takes the memory of a second model for a moment.

    Args:
        model: what `convert` or `load` returned, or a model with `expose_neuron_heads`, as it is
            now (trained or edited since, perhaps). Hooks are not saved.
        folder: where to; an earlier save there is replaced, anything else is refused.
        source_name: what the source was called; by default `cfg.model_name`.

    Returns:
        The folder.

    Raises:
        CheckpointError: the model has no neuron-heads, or could not be loaded again (it has
            parameters or an activation that its configuration does not lead to, or a tokenizer
            that needs its own code; a bridge: code, hooks or processing options of its own), or the
            folder holds something else.

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
    folder = opened_folder(folder)
    form = form_of(model)
    if form is None:
        raise CheckpointError(
            f"got a {type(model).__name__}; expected what attn_only_lens.convert or load returns, "
            "or a model with attn_only_lens.expose_neuron_heads"
        )
    parts = form.parts(model)
    entries: dict[str, Any] = {
        "layout": form.layout,
        "model": form.model,
        "source_name": parts.source_name if source_name is None else source_name,
        "gate": parts.gate,
        "config": parts.config,
        "training": model.training,
        "padding_side": None if model.tokenizer is None else model.tokenizer.padding_side,
        **parts.more,
    }
    with whole_folder(folder, (MANIFEST, WEIGHTS, TOKENIZER), MANIFEST, files_listed) as new:
        write_tensors(new / WEIGHTS, parts.tensors)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(new / TOKENIZER)
            load_tokenizer(new)
        write_manifest(new, entries)
    return folder


@torch.inference_mode(False)  # weights of inference mode could never be trained
def load(
    folder: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> Any:
    """Read a saved model back: without pickle or a network, no code of its own, no other folder.

    Args:
        folder: what `save` wrote.
        device: where to put it; by default the cpu.
        dtype: its floating-point type, as `model.to(dtype)` would make it; by default as saved.

    Returns:
        The model, of the class and layout that was saved, with its tokenizer, flags, tied and
        frozen parameters as they were.

    Raises:
        UnsupportedCallError: it is a HookedTransformer, and transformer-lens 4 has none.
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
    folder = opened_folder(folder)
    to_device = device_named("cpu" if device is None else device)
    to_dtype = None if dtype is None else dtype_named(dtype)
    manifest = read_manifest(folder)
    check_files(folder, manifest["files"], closed=TOKENIZER)
    form = form_named(manifest["layout"], manifest["model"])
    assert form is not None
    tensors, _ = read_tensors(folder / WEIGHTS)
    try:
        with no_more_than(tensors):
            model = form.rebuilt(manifest, tensors)
    except AttnOnlyLensError:
        raise
    except Exception as error:  # of any constructor that the manifest leads to
        raise CheckpointError(
            f"{folder} cannot be built by these versions of transformers and TransformerLens: "
            f"{type(error).__name__}: {error}"
        ) from error
    if manifest["padding_side"] is not None:
        model.tokenizer = load_tokenizer(folder)
        model.tokenizer.padding_side = manifest["padding_side"]
    if to_dtype is not None:
        model.to(to_dtype, print_details=False)
    # By its name: of a torch.device, a HookedTransformer takes note of the type, and not which.
    return model.to(str(to_device), print_details=False)
