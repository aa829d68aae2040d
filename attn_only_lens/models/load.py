"""Load a model by its name or from a folder."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import (
    build_bridge_config_from_hf,
    build_bridge_from_module,
)
from transformer_lens.model_bridge.sources.transformers import (
    determine_architecture_from_hf_config,
    get_hf_model_class_for_architecture,
)
from transformer_lens.supported_models import MODEL_ALIASES
from transformers import AutoConfig

from attn_only_lens.errors import CheckpointError
from attn_only_lens.models.checkpoint import MANIFEST, is_saved, load_saved, read_manifest
from attn_only_lens.models.source_folder import (
    CONFIG,
    WEIGHTS,
    check_grown,
    first_words,
    load_source,
    memory_reasons,
    parse_device,
    parse_dtype,
    read_tokenizer,
    tokenizer_reasons,
)
from attn_only_lens.models.transformers_module import DEQUANTISE, config_reasons
from attn_only_lens.storage import (
    limit_size,
    open_folder,
    out_of_range,
    read_json,
    require_few_layers,
)
from attn_only_lens.tl import HookedTransformer, no_remote_code, quiet, require_hooked_transformer

_EXPECTED = (
    "a Hugging Face name or folder, a folder that `save` or `grow` wrote, or one of a "
    "HookedTransformer (transformer-lens 3.9)"
)
_HUB_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "model*.safetensors")
_INDEX = f"{WEIGHTS}.index.json"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.*", "spiece.model", "*.tiktoken")
_OTHER_TASKS = ("Classification", "QuestionAnswering", "MultipleChoice")
_SHOWN = 5
FolderKind = Literal["saved", "Hugging Face", "HookedTransformer"]


@torch.inference_mode(False)  # weights of inference mode could never be trained
def load(
    model: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    hooked: bool = False,
) -> Any:
    """Load a model by its name or from a folder.

        gpt2, EleutherAI/pythia-70m          from the Hugging Face hub: a TransformerBridge
        a folder of transformers             config.json and safetensors: the same
        a folder that grown.save_pretrained  or the command `grow` wrote: the same, or a
                                             HookedTransformer, as it was saved
        a folder that `save` wrote           the model with its neuron-heads, of its old class
        a folder of a HookedTransformer      config.json with the fields of its configuration, and
                                             model.safetensors (transformer-lens 3.9)

    If a folder has the given name, the folder is loaded. Only safetensors and JSON are read: no
    pickles, and no code that lies next to a model. A folder needs no network; a name does, unless
    the model is in the cache of the hub.

    Texts begin with BOS if TransformerLens adds one for that family (GPT-2, LLaMA, Gemma; not Qwen,
    Phi, GPT-NeoX) and the tokenizer has one.

    A bridge has the original weights, as from `TransformerBridge.boot_transformers`; its
    `enable_compatibility_mode` folds and centres them. A `HookedTransformer` loaded by name has
    folded and centred weights, as from `HookedTransformer.from_pretrained`.

    Args:
        model: a name or a folder.
        device: the device of the model; by default the cpu.
        dtype: the floating-point type; by default as `save` saved it, else float32.
        hooked: load a name as a HookedTransformer, for `convert` (transformer-lens 3.9).

    Returns:
        The model, with its tokenizer if it has one. A model that `save` wrote has neuron-heads,
        and its flags and its tied and frozen parameters are restored.

    Raises:
        UnsupportedCallError: it is a HookedTransformer, which transformer-lens 4 does not have.
        CheckpointError: there is no such model; the folder is damaged, changed or newer than this
            package; its weights are missing, left over or quantised; its tokenizer has more tokens
            than the model; or the device or dtype is unknown.

    Example:
        >>> import tempfile, torch
        >>> from attn_only_lens import expose_neuron_heads, load, pretrained, save
        >>> exposed = expose_neuron_heads(pretrained.modular_addition()).model
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = save(exposed, f"{parent}/added")
        ...     load(folder, dtype="float64").W_in.dtype
        torch.float64
    """
    to_device = parse_device("cpu" if device is None else device)
    to_dtype = None if dtype is None else parse_dtype(dtype)
    if isinstance(model, str) and not _is_path(model):
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
            f"{folder} holds a model of transformers, which is loaded as a TransformerBridge; "
            "expected a TransformerLens name or a folder of a HookedTransformer"
        )
    return _hf_folder(folder, str(model), to_dtype or torch.float32, to_device)


def folder_kind(model: str | os.PathLike[str]) -> FolderKind:
    """Return the kind of a folder; raise CheckpointError if there is no folder or no model."""
    folder = open_folder(model)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {model}; expected {_EXPECTED}")
    if is_saved(folder):
        return "saved"
    if not (folder / CONFIG).exists():
        raise CheckpointError(
            f"no model in {folder}: neither {CONFIG} nor {MANIFEST} is there; expected {_EXPECTED}"
        )
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} is not a model's: got {type(config).__name__}")
    of_transformers = config.keys() & {"model_type", "architectures", "transformers_version"}
    return "Hugging Face" if of_transformers else "HookedTransformer"


def is_hooked(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a HookedTransformer, by its files."""
    kind: str = folder_kind(folder)
    if kind == "saved":
        kind = read_manifest(open_folder(folder))["model"]
    return kind == "HookedTransformer"


def _is_path(model: str) -> bool:
    """Return True for a text that cannot be a name, or is the path of a file."""
    if not model or "\0" in model or Path(model).is_absolute() or model.startswith((".", "~")):
        return True
    return os.path.lexists(model)


def _bridge_by_name(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    official = next((new for new, aliases in MODEL_ALIASES.items() if name in aliases), name)
    try:
        folder = snapshot_download(official, allow_patterns=list(_HUB_FILES))
    except (OSError, ValueError) as error:  # all errors of the hub derive from these
        raise _not_found(name, error) from error
    return _hf_folder(Path(folder), official, dtype, device)


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
        raise _not_found(name, error) from error
    except Exception as error:  # TransformerLens raises all kinds
        raise CheckpointError(
            f"{name!r} cannot be loaded as a HookedTransformer: {type(error).__name__}: "
            f"{first_words(error)}; without hooked=True (--hooked) it is a TransformerBridge"
        ) from error


def _not_found(name: str, error: Exception) -> CheckpointError:
    reason = str(error).strip().partition(" Valid official model names")[0]  # hundreds
    reason = first_words(ValueError(reason.partition("\n")[0] or type(error).__name__))
    if "trust_remote_code" in str(error):
        reason = "it needs its own code, which this package never runs"
    return CheckpointError(
        f"could not load {name!r}: {reason.rstrip('.')}. Expected {_EXPECTED}; without a "
        "network, a folder or a model in the cache of the hub"
    )


def _hf_folder(
    folder: Path, name: str, dtype: torch.dtype, device: torch.device
) -> TransformerBridge:
    """Read the bridge of `boot_transformers` from a folder; `name` is its `cfg.model_name`.

    transformers fills missing weights with random numbers and leaves out unknown ones, with a
    warning; here both are errors.
    """
    try:
        return _bridge(folder, name, dtype, device)
    except Exception as error:  # transformers and TransformerLens raise all kinds
        reason = str(error)
        if not isinstance(error, CheckpointError):
            code = " It needs code of its own, which is never run." * ("remote_code" in reason)
            kind = "KeyError: " * isinstance(error, KeyError)  # whose text is only a key
            reason = f"{kind}{first_words(error)}{code}"
        raise CheckpointError(f"{folder} cannot be loaded: {reason}") from error


def _bridge(folder: Path, name: str, dtype: torch.dtype, device: torch.device) -> TransformerBridge:
    check_grown(folder)
    config = read_json(folder / CONFIG)
    files, reasons = _weight_files(folder)
    reasons += _other_task(config)
    _refuse([*config_reasons(config, f"its {CONFIG}"), *out_of_range(config, CONFIG), *reasons])
    tensors = _tensors_in(files)
    n_bytes = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
    _refuse([*_stored_otherwise(tensors), *memory_reasons(n_bytes)])
    require_few_layers(config, tensors)
    with limit_size(tensors):
        model, architecture, info = _build(folder, name, dtype)
    tokenizer = _tokenizer(folder)
    d_vocab = getattr(model.config.get_text_config(), "vocab_size", 0)
    _refuse([*_misfits(model, info), *tokenizer_reasons(tokenizer, d_vocab)])
    has_bos = tokenizer is None or tokenizer.bos_token is not None
    bridge = build_bridge_from_module(
        model.to(device),
        architecture,
        hf_config=model.config,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        model_name=name,
    )
    if not has_bos:  # TransformerLens has made EOS its BOS, and would begin every text with it
        bridge.cfg.default_prepend_bos = False
    return bridge


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise CheckpointError("; ".join(reasons[:_SHOWN]))


def _other_task(config: dict[str, Any]) -> list[str]:
    """Return why a folder does not hold a language model, though its layers would make one."""
    for name in config.get("architectures") or ():
        if str(name).endswith(_OTHER_TASKS):
            return [
                f"it is a {name}, whose head is not a language model's and would be left out; "
                "expected a language model, such as the one that it was trained from"
            ]
    return []


def _weight_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the safetensors files of the model, and why there are none."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS], []
    if (folder / _INDEX).is_file():
        index = read_json(folder / _INDEX)
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            return [], [f"{_INDEX} has no weight_map of names to files"]
        names = sorted(set(shards.values()))
        # By the name: in the cache of the hub the files themselves are links to elsewhere.
        if odd := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
            return [], [f"{_INDEX} names a file {odd[0]!r}, which is outside of the folder"]
        missing = [name for name in names if not (folder / name).is_file()]
        return [folder / name for name in names], [f"{name} is missing" for name in missing]
    unread = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_WEIGHTS)
    instead = f"; {', '.join(unread[:_SHOWN])} is not read" if unread else ""
    return [], [
        f"{WEIGHTS} is missing{instead}: expected safetensors, which save_pretrained of "
        "transformers writes (a pickle, such as .bin, can run any code)"
    ]


def _tensors_in(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors of safetensors files without their numbers."""
    tensors = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118
                    stored = file.get_slice(key)
                    shape = stored.get_shape()
                    empty = stored[:0] if shape else file.get_tensor(key)
                    tensors[key] = torch.empty(shape, dtype=empty.dtype, device="meta")
        except Exception as error:  # safetensors, torch and the file system raise all kinds
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    return tensors


def _stored_otherwise(tensors: dict[str, Tensor]) -> list[str]:
    """Return which weights are stored as integers, or in so few bits that they need a scale."""
    kinds = {
        str(tensor.dtype).removeprefix("torch."): key
        for key, tensor in tensors.items()
        if key.endswith("weight") and (not tensor.is_floating_point() or tensor.itemsize < 2)
    }
    return [f"its {key} is stored as {kind}: {DEQUANTISE}" for kind, key in kinds.items()]


def _build(folder: Path, name: str, dtype: torch.dtype) -> tuple[Any, str, dict[str, Any]]:
    """Return the model of transformers, its architecture, and what was missing or left over."""
    offline: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, **offline)
    architecture = determine_architecture_from_hf_config(config)
    # The options of the architecture's adapter, as in `boot_transformers`.
    cfg = build_bridge_config_from_hf(config, architecture, name, dtype)
    adapter = ArchitectureAdapterFactory.select_architecture_adapter(cfg)
    options: dict[str, Any] = {"config": config, "dtype": dtype}
    options["attn_implementation"] = getattr(adapter.cfg, "attn_implementation", None) or "eager"
    adapter.prepare_loading(str(folder), options)
    model, info = get_hf_model_class_for_architecture(architecture).from_pretrained(
        folder,
        **options | offline,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # `_misfits` refuses them
        output_loading_info=True,
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # some classes keep parameters in float32
    return model.eval(), architecture, info


def _misfits(model: nn.Module, info: dict[str, Any]) -> list[str]:
    """Return how the weights of a folder are not those of its configuration."""
    kinds = {
        "missing": sorted(info["missing_keys"]),
        "of another shape": sorted(f"{key[0]} {list(key[1])}" for key in info["mismatched_keys"]),
        "not known": [key for key in sorted(info["unexpected_keys"]) if _belongs(model, key)],
    }
    return [
        f"{', '.join(names[:_SHOWN])}{' and others' * (len(names) > _SHOWN)} "
        f"{'is' if len(names) == 1 else 'are'} {kind}"
        for kind, names in kinds.items()
        if names
    ]


def _belongs(model: nn.Module, key: str) -> bool:
    """Return True for a weight of a module, or of a layer, that the model has or should have.

    Other weights are of parts that its class does not have, such as BERT's pooler.
    """
    module: Any = model
    *path, _ = key.split(".")
    for part in path:
        if isinstance(module, nn.ModuleList):
            return True
        module = getattr(module, part, None)
        if module is None:
            return False
    return True


def _tokenizer(folder: Path) -> Any:
    """Read the tokenizer; None where the folder has no vocabulary."""
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        return None  # transformers would make an empty one of some classes
    try:
        return read_tokenizer(folder, add_bos_token=True)  # as boot_transformers does
    except CheckpointError as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        return read_tokenizer(folder)  # one without a BOS
