"""Load a HookedTransformer from a folder with `config.json` and `model.safetensors`.

`config.json` holds keyword arguments of `HookedTransformerConfig`. `model.safetensors` holds the
state dict; masks and rotary tables, which TransformerLens computes, may be missing. `tokenizer/` is
optional. If the command `grow` wrote the folder, `provenance.json` holds digests of its other
files.
"""

import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS
from transformers import AutoTokenizer
from typing_extensions import TypedDict

from attn_only_lens.arguments import a_type
from attn_only_lens.devices import free_bytes
from attn_only_lens.errors import AttnOnlyLensError, CheckpointError
from attn_only_lens.models.two_blocks.build import stock_skeleton, tensor_misfits
from attn_only_lens.storage import (
    Document,
    FileDigest,
    check_files,
    limit_size,
    open_folder,
    out_of_range,
    path_inside,
    read_json,
    read_tensors,
    type_mismatches,
)
from attn_only_lens.storage.atomic import disk_is_full
from attn_only_lens.tl import (
    HookedTransformer,
    HookedTransformerConfig,
    quiet,
    require_hooked_transformer,
)

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer"
PROVENANCE = "provenance.json"
COMPUTED = ("attn.mask", "attn.IGNORE", "attn.rotary_sin", "attn.rotary_cos")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


class GrownFields(TypedDict):
    """The fields of `provenance.json` that loading uses: digests of the folder's other files."""

    files: dict[str, FileDigest]


GROWN = Document("attn_only_lens.Grown", 3, GrownFields)
"""The format of `provenance.json`."""


def load_source(
    folder: Path, *, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu"
) -> HookedTransformer:
    """Load a stock model from its folder, without pickles, network access or custom code."""
    folder = open_folder(folder)
    to_device, to_dtype = parse_device(device), parse_dtype(dtype)
    config, state = read_folder(folder)
    require_hooked_transformer()
    # Without a tokenizer name, nothing is loaded from the hub.
    chosen = {"device": str(to_device), "dtype": to_dtype, "init_weights": False}
    chosen |= {"tokenizer_name": None, "trust_remote_code": False}
    checked = {key: value for key, value in config.items() if key not in chosen}
    no_model = f"{folder / CONFIG} is not a model configuration"
    refuse(reasons_against_config(checked, CONFIG), no_model)
    fields = checked | chosen
    with limit_size(state), checkpoint_errors(no_model):
        expected = stock_skeleton(fields).state_dict()
    # The file may lack tensors that TransformerLens computes, such as masks.
    needed = {
        name: x for name, x in expected.items() if name in state or not name.endswith(COMPUTED)
    }
    wrong = tensor_misfits(needed, state)
    wrong += memory_reasons(sum(value.nbytes for value in expected.values()))
    refuse(wrong, f"{folder / WEIGHTS} does not fit {CONFIG}")
    with quiet():
        model = HookedTransformer(HookedTransformerConfig(**fields))
    model.load_state_dict(state, strict=False)
    if (folder / TOKENIZER).is_dir():
        tokenizer = load_tokenizer(folder)
        refuse(tokenizer_reasons(tokenizer, model.cfg.d_vocab), f"{folder} does not hold one model")
        model.set_tokenizer(tokenizer)
    return model


def refuse(reasons: Sequence[str], problem: str) -> None:
    """Raise CheckpointError if `reasons` is not empty; the error lists the first five."""
    if reasons:
        more = [f"and {len(reasons) - 5} more"] * (len(reasons) > 5)
        raise CheckpointError(f"{problem}: {'; '.join([*reasons[:5], *more])}")


@contextmanager
def checkpoint_errors(problem: str) -> Iterator[None]:
    """Context manager that turns other packages' exceptions into CheckpointErrors.

    It leaves a full disk to `atomic_write`, which names the file or folder.
    """
    try:
        yield
    except AttnOnlyLensError:
        raise
    except Exception as error:
        if disk_is_full(error):
            raise
        raise CheckpointError(f"{problem}: {type(error).__name__}: {error}") from error


def reasons_against_config(config: dict[str, Any], name: str) -> list[str]:
    """Return error messages if a configuration is not valid for a HookedTransformer."""
    reasons = [*type_mismatches(config, HookedTransformerConfig, name)]
    reasons += out_of_range(config, name)
    act_fn = config.get("act_fn")
    if isinstance(act_fn, str) and act_fn not in SUPPORTED_ACTIVATIONS:
        known = ", ".join(sorted(SUPPORTED_ACTIVATIONS))
        reasons.append(f"{name}.act_fn: got {act_fn!r}; expected one of {known}")
    if config.get("load_in_4bit"):
        reasons.append(
            f"{name}.load_in_4bit is set, but 4-bit weights cannot be loaded; expected a model in "
            f"{', '.join(DTYPES)}"
        )
    return reasons


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer from `tokenizer/` in a folder; refuse links out of it."""
    tokenizer_folder = folder / TOKENIZER
    if not tokenizer_folder.is_dir():
        raise CheckpointError(
            f"{tokenizer_folder} is missing, but the model was saved with a tokenizer: save the "
            "model again"
        )
    for path in tokenizer_folder.rglob("*"):
        path_inside(folder, path.relative_to(folder).as_posix())
    return read_tokenizer(tokenizer_folder)


def read_tokenizer(tokenizer_folder: Path, **options: Any) -> Any:
    """Load the tokenizer in a folder, without running code from the folder.

    `options` are passed to `AutoTokenizer.from_pretrained`.
    """
    path = tokenizer_folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"{path} holds {a_type(settings)}; expected a JSON object with a tokenizer's settings"
        )
    files = [key for key in settings if str(key).endswith("_file") and settings[key] is not None]
    if any(os.path.exists(str(settings[key])) for key in files):
        raise CheckpointError(f"{path} names files outside its folder: {', '.join(files)}")
    options |= {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, **options)
        tokenizer.encode("")
        return tokenizer
    except Exception as error:  # tokenizers raise many types of errors
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"the tokenizer in {tokenizer_folder} needs its own code, which is never run from "
                "a folder; save the model with a tokenizer class that transformers has, or "
                "without a tokenizer (model.tokenizer = None), and pass tokens instead of texts"
            ) from error
        raise CheckpointError(
            f"the tokenizer in {tokenizer_folder} cannot be loaded: {first_words(error)}"
        ) from error


def original_tokenizer(tokenizer: Any) -> Any:
    """Reload a tokenizer from its original files, unless this fails or changes the vocabulary.

    Reloading undoes TransformerLens' changes, which prepend a BOS token and replace missing special
    tokens by EOS.
    """
    try:
        original = read_tokenizer(Path(tokenizer.name_or_path))
    except CheckpointError:
        return tokenizer
    original.chat_template = tokenizer.chat_template
    return original if original.get_vocab() == tokenizer.get_vocab() else tokenizer


def first_words(error: BaseException) -> str:
    """Return the first 300 characters of an error message, on one line."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" …")


def tokenizer_reasons(tokenizer: Any, d_vocab: int) -> list[str]:
    """Return an error message if a tokenizer has more than d_vocab tokens (without added ones)."""
    if tokenizer is None or tokenizer.vocab_size <= d_vocab:
        return []
    return [
        f"its tokenizer has {tokenizer.vocab_size} tokens, but the model embeds {d_vocab}: "
        "expected the tokenizer that the model was trained with"
    ]


def memory_reasons(n_bytes: int) -> list[str]:
    """Return an error message if `n_bytes` of weights do not fit in the CPU's free memory."""
    free = free_bytes(torch.device("cpu"))
    text = f"the model needs {n_bytes:,} bytes of memory, but only {free:,} are free"
    return [text] if n_bytes > free else []


def check_grown(folder: Path) -> None:
    """Compare the files in a folder that `grow` wrote with the digests in `provenance.json`."""
    if not (folder / PROVENANCE).exists():
        return
    files = GROWN.read(path_inside(folder, PROVENANCE))["files"]
    try:
        check_files(folder, files, closed=[f"{TOKENIZER}/**/*"])
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. If the grown model was trained further, save it to another folder, and "
            "pass the provenance in this folder to `compare` (--provenance)"
        ) from error


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the configuration and the state dict, without checking the configuration's values."""
    check_grown(folder)
    config = read_json(path_inside(folder, CONFIG))
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{folder / CONFIG} is not a model configuration: got {type(config).__name__}"
        )
    return config, read_tensors(path_inside(folder, WEIGHTS))[0]


def plain_config(cfg: Any) -> dict[str, Any]:
    """Return a configuration as JSON data, without the device, which `load` chooses again."""
    return {key: _plain(value) for key, value in vars(cfg).items() if key != "device"}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value  # a numpy scalar


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the floating-point dtype with this name; raise CheckpointError for unknown names."""
    parsed = DTYPES.get(str(dtype).removeprefix("torch."))
    if parsed is None:
        raise CheckpointError(f"got dtype={dtype!r}; expected one of {', '.join(DTYPES)}")
    return parsed


def parse_device(device: str | torch.device) -> torch.device:
    """Return the device with this name; raise CheckpointError if the device is not available."""
    try:
        parsed = torch.device(device)
        torch.zeros(1, device=parsed).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        devices = ["cpu"]
        if torch.accelerator.is_available():
            kind = str(torch.accelerator.current_accelerator())
            devices += [f"{kind}:{i}" for i in range(torch.accelerator.device_count())]
        raise CheckpointError(
            f"got device={str(device)!r}, which is not available ({reason}); this machine has "
            f"{', '.join(devices)}"
        ) from error
    return parsed
