"""Load a Hugging Face folder as a TransformerBridge, from safetensors and JSON files only.

The result is the same bridge as `TransformerBridge.boot_transformers` builds. Missing weights,
which transformers fills with random numbers, and unexpected weights, which transformers ignores,
are errors here.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
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
from transformers import AutoConfig
from transformers.utils import logging

from attn_only_lens.arguments import with_article
from attn_only_lens.engine.cached_generation import watch_cache
from attn_only_lens.errors import CheckpointError
from attn_only_lens.models.source_folder import (
    CONFIG,
    WEIGHTS,
    check_grown,
    first_words,
    memory_reasons,
    read_tokenizer,
    tokenizer_reasons,
)
from attn_only_lens.models.transformers_module import DEQUANTISE, config_reasons
from attn_only_lens.storage import limit_size, out_of_range, read_json, require_few_layers

FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "model*.safetensors")
"""Patterns of the files that are read from a model's folder, or downloaded from the hub."""
_INDEX = f"{WEIGHTS}.index.json"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.*", "spiece.model", "*.tiktoken")
_OTHER_TASKS = ("Classification", "QuestionAnswering", "MultipleChoice")
_SHOWN = 5


@contextmanager
def no_bars() -> Iterator[None]:
    """Context manager that hides transformers' progress bars."""
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def read_hf_folder(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None = None,
) -> TransformerBridge:
    """Load the bridge from a Hugging Face folder; `name` becomes the bridge's `cfg.model_name`.

    `attention` names one of transformers' attention implementations; by default, it is the one that
    `boot_transformers` chooses.
    """
    try:
        return _bridge(folder, name, dtype, device, attention)
    except Exception as error:  # transformers and TransformerLens raise many types of errors
        reason = str(error)
        if not isinstance(error, CheckpointError):
            code = " The model needs its own code, which is never run." * ("remote_code" in reason)
            kind = "KeyError: " * isinstance(error, KeyError)  # the error's text is only the key
            reason = f"{kind}{first_words(error)}{code}"
        raise CheckpointError(f"{folder} cannot be loaded: {reason}") from error


def _bridge(
    folder: Path, name: str, dtype: torch.dtype, device: torch.device, attention: str | None
) -> TransformerBridge:
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
        model, architecture, info = _build(folder, name, dtype, attention)
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
    if not has_bos:  # otherwise TransformerLens prepends EOS in place of BOS
        bridge.cfg.default_prepend_bos = False
    watch_cache(bridge)
    return bridge


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise CheckpointError("; ".join(reasons[:_SHOWN]))


def _other_task(config: dict[str, Any]) -> list[str]:
    """Return an error message if a model is, for example, a classifier, not a language model."""
    for name in config.get("architectures") or ():
        if str(name).endswith(_OTHER_TASKS):
            return [
                f"it is {with_article(name)}, whose output head is not for language "
                "modelling and would be left out; expected a language model, such as the one that "
                "it was fine-tuned from"
            ]
    return []


def _weight_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the paths of a model's safetensors files, and error messages if they are unusable."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS], []
    if (folder / _INDEX).is_file():
        index = read_json(folder / _INDEX)
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            return [], [f"{_INDEX} has no weight_map that maps weight names to files"]
        names = sorted(set(shards.values()))
        # Check names, not resolved paths, because files in the hub's cache are symbolic links.
        if odd := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
            return [], [f"{_INDEX} names a file {odd[0]!r}, which is outside the folder"]
        missing = [name for name in names if not (folder / name).is_file()]
        return [folder / name for name in names], [f"{name} is missing" for name in missing]
    unread = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_WEIGHTS)
    instead = f"; {', '.join(unread[:_SHOWN])} is not read" if unread else ""
    return [], [
        f"{WEIGHTS} is missing{instead}: {how_to_convert(folder)}expected safetensors, as "
        "transformers' save_pretrained writes them (a pickle, such as a .bin file, can execute "
        "arbitrary code)"
    ]


def how_to_convert(path: Path) -> str:
    """Return how to convert a GGUF file, or a folder's adapter or GGUF file; "" if it has none."""
    if (path / "adapter_config.json").exists():
        return (
            "it holds an adapter without its base model: load both with peft's "
            "AutoPeftModelForCausalLM.from_pretrained(folder), call merge_and_unload(), and "
            "write the result with save_pretrained; "
        )
    if files := [path] if path.is_file() else sorted(path.glob("*.gguf")):
        return (
            "a GGUF file must be converted: load it with AutoModelForCausalLM.from_pretrained("
            f"{str(files[0].parent)!r}, gguf_file={files[0].name!r}), and write the result with "
            "save_pretrained; "
        )
    return ""


def _tensors_in(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return meta tensors, by name, with the shapes and dtypes of the tensors stored in files."""
    tensors = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118
                    stored = file.get_slice(key)
                    shape = stored.get_shape()
                    empty = stored[:0] if shape else file.get_tensor(key)
                    tensors[key] = torch.empty(shape, dtype=empty.dtype, device="meta")
        except Exception as error:  # safetensors, torch and the file system raise different errors
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    return tensors


def _stored_otherwise(tensors: dict[str, Tensor]) -> list[str]:
    """Return error messages for weights that are stored as integers or in fewer than 16 bits."""
    kinds = {
        str(tensor.dtype).removeprefix("torch."): key
        for key, tensor in tensors.items()
        if key.endswith("weight") and (not tensor.is_floating_point() or tensor.itemsize < 2)
    }
    return [f"its {key} is stored as {kind}: {DEQUANTISE}" for kind, key in kinds.items()]


def _build(
    folder: Path, name: str, dtype: torch.dtype, attention: str | None
) -> tuple[Any, str, dict[str, Any]]:
    """Return the transformers model, its architecture, and its missing or unexpected weights."""
    offline: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, **offline)
    architecture = determine_architecture_from_hf_config(config)
    # Like `boot_transformers`, let TransformerLens' adapter set loading options.
    cfg = build_bridge_config_from_hf(config, architecture, name, dtype)
    adapter = ArchitectureAdapterFactory.select_architecture_adapter(cfg)
    options: dict[str, Any] = {"config": config, "dtype": dtype}
    options["attn_implementation"] = getattr(adapter.cfg, "attn_implementation", None) or "eager"
    adapter.prepare_loading(str(folder), options)
    if attention is not None:
        options["attn_implementation"] = attention
    model, info = get_hf_model_class_for_architecture(architecture).from_pretrained(
        folder,
        **options | offline,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # `_misfits` refuses them
        output_loading_info=True,
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # transformers keeps some weights in float32
    return model.eval(), architecture, info


def _misfits(model: nn.Module, info: dict[str, Any]) -> list[str]:
    """Return error messages for missing, unexpected or misshapen weights."""
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
    """Return whether a weight's name belongs to a module of the model or to its list of layers.

    Other unexpected weights are for parts that the model class lacks, such as BERT's pooler.
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
    """Load the tokenizer; return None if the folder has no vocabulary file."""
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        return None  # for some classes, transformers would create an empty tokenizer
    try:
        return read_tokenizer(folder, add_bos_token=True)  # as boot_transformers does
    except CheckpointError as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        return read_tokenizer(folder)  # the tokenizer has no BOS token
