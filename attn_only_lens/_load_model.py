"""Load a model by its name or from a folder."""

import os
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from transformer_lens.supported_models import MODEL_ALIASES

from attn_only_lens.arguments import a_type
from attn_only_lens.errors import CheckpointError
from attn_only_lens.models.checkpoint import MANIFEST, is_saved, load_saved, read_manifest
from attn_only_lens.models.hf_folder import FILES, how_to_convert, read_hf_folder
from attn_only_lens.models.names import EXPECTED, is_path, no_folder
from attn_only_lens.models.source_folder import (
    CONFIG,
    first_words,
    load_source,
    parse_device,
    parse_dtype,
)
from attn_only_lens.pretrained.modular_addition import modular_addition
from attn_only_lens.pretrained.small_english import small_english
from attn_only_lens.storage import open_folder, read_json
from attn_only_lens.tl import HookedTransformer, no_remote_code, quiet, require_hooked_transformer

_SHIPPED = {"small-english": small_english, "modular-addition": modular_addition}
FolderKind = Literal["saved", "Hugging Face", "HookedTransformer"]


@torch.inference_mode(False)  # weights created in inference mode cannot be trained
def load_model(
    model: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    hooked: bool = False,
) -> Any:
    """Load a model by its name or from a folder; `attn_only_lens.load` describes the arguments."""
    if not isinstance(model, str | os.PathLike):
        if not isinstance(model, torch.nn.Module):
            raise CheckpointError(f"got {a_type(model)}; expected a path or a name")
        raise CheckpointError(
            f"got {a_type(model)}; expected a path or a name: write a transformers model to a "
            "folder with model.save_pretrained(folder) and tokenizer.save_pretrained(folder); "
            "analyses take a TransformerBridge or a HookedTransformer without loading it again"
        )
    if (path := Path(model)).suffix == ".gguf" and path.is_file():
        raise CheckpointError(f"no model in {path}: {how_to_convert(path)}expected {EXPECTED}")
    to_device = parse_device("cpu" if device is None else device)
    to_dtype = None if dtype is None else parse_dtype(dtype)
    if isinstance(model, str) and not is_path(model):
        if shipped := _SHIPPED.get(model.replace("_", "-")):
            return shipped(to_device, to_dtype or torch.float32, hooked=hooked)
        by_name = _hooked_by_name if hooked else _bridge_by_name
        return by_name(model, to_device, to_dtype or torch.float32)
    folder, kind = open_folder(model), folder_kind(model)
    if kind == "saved":
        return load_saved(folder, device=to_device, dtype=to_dtype)
    if kind == "HookedTransformer":
        require_hooked_transformer(f"the model in {folder}")
        return load_source(folder, device=to_device, dtype=to_dtype or torch.float32)
    if hooked:
        raise CheckpointError(
            f"{folder} contains a transformers model, which is loaded as a TransformerBridge; "
            "expected a TransformerLens name or the folder of a HookedTransformer. `explain`, "
            "`patch` and attn_only_lens.expose_neuron_heads take such a folder without conversion"
        )
    return read_hf_folder(folder, str(model), to_dtype or torch.float32, to_device)


def folder_kind(model: str | os.PathLike[str]) -> FolderKind:
    """Return which kind of model a folder holds; raise CheckpointError if there is no model."""
    folder = open_folder(model)
    if not folder.is_dir():
        raise no_folder(model)
    if is_saved(folder):
        return "saved"
    if not (folder / CONFIG).exists():
        hidden = ""
        if str(model).replace("_", "-") in _SHIPPED:
            hidden = f"this folder hides the model {str(model)!r} that ships: rename it; or "
        raise CheckpointError(
            f"no model in {folder}: it has neither {CONFIG} nor {MANIFEST}; "
            f"{how_to_convert(folder)}{hidden}expected {EXPECTED}"
        )
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{folder / CONFIG} is not a model configuration: got {type(config).__name__}"
        )
    of_transformers = config.keys() & {"model_type", "architectures", "transformers_version"}
    return "Hugging Face" if of_transformers else "HookedTransformer"


def is_hooked(folder: str | os.PathLike[str]) -> bool:
    """Return whether the model in a folder is a HookedTransformer, without loading it."""
    kind: str = folder_kind(folder)
    if kind == "saved":
        kind = read_manifest(open_folder(folder))["model"]
    return kind == "HookedTransformer"


def _bridge_by_name(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    official = next((new for new, aliases in MODEL_ALIASES.items() if name in aliases), name)
    try:
        folder = snapshot_download(official, allow_patterns=list(FILES))
    except (OSError, ValueError) as error:  # all huggingface_hub errors are subclasses
        raise _not_found(name, error) from None
    return read_hf_folder(Path(folder), official, dtype, device)


def _hooked_by_name(name: str, device: torch.device, dtype: torch.dtype) -> HookedTransformer:
    require_hooked_transformer(f"{name!r} as a HookedTransformer")
    try:
        with quiet(), no_remote_code():
            return HookedTransformer.from_pretrained(
                name,
                dtype=str(dtype).removeprefix("torch."),
                device=str(device),
                trust_remote_code=False,
            )
    except (OSError, ValueError) as error:
        raise _not_found(name, error) from None
    except Exception as error:  # TransformerLens raises many types of errors
        raise CheckpointError(
            f"{name!r} cannot be loaded as a HookedTransformer: {type(error).__name__}: "
            f"{first_words(error)}; without hooked=True (--hooked), it is loaded as a "
            "TransformerBridge"
        ) from error


def _not_found(name: str, error: Exception) -> CheckpointError:
    # Remove the list of hundreds of model names from TransformerLens' message.
    reason = str(error).strip().partition(" Valid official model names")[0]
    reason = first_words(ValueError(reason.partition("\n")[0] or type(error).__name__))
    if "trust_remote_code" in str(error):
        reason = "the model needs its own code, which this package never runs"
    return CheckpointError(
        f"there is no folder {name!r}, and no model of this name could be loaded: "
        f"{reason.rstrip('.')}. Expected {EXPECTED}. Without a "
        "network, only a folder or a model in the hub's cache can be loaded"
    )
