"""Load transcoders from files that other packages, or `save`, wrote."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import yaml
from safetensors import safe_open

from attn_only_lens.arguments import as_plain, is_count, one_of
from attn_only_lens.errors import AttnOnlyLensError, CheckpointError, InputError
from attn_only_lens.heads.transcoder import Reads, Transcoder, cross_layer_reasons
from attn_only_lens.models.checkpoint.transcoders import DOCUMENT, read_transcoder
from attn_only_lens.models.source_folder import (
    checkpoint_errors,
    parse_device,
    parse_dtype,
    refuse,
)
from attn_only_lens.storage import read_json, read_tensors
from attn_only_lens.storage.atomic import as_path
from attn_only_lens.transcoders.cross_layer import (
    join_halves,
    layer_of_half,
    n_layers_in,
    read_layer,
    split_decoder,
)
from attn_only_lens.transcoders.formats import (
    CIRCUIT_TRACER,
    CROSSLAYER_TRANSCODER,
    GEMMA_SCOPE_2,
    PROBLEM,
    SAELENS,
    Config,
    Tensors,
    fold_saelens,
    identify,
    rename,
    require_gate,
)

# Hook points in TransformerLens; the last name of each table is a module of Gemma 3.
_INPUTS = {
    "hook_resid_mid": "stream",
    "hook_mlp_in": "stream",
    "ln2.hook_normalized": "normalized",
    "mlp.hook_in": "input",
    "pre_feedforward_layernorm.output": "input",
}
_AFTER_NORM = {
    "hook_mlp_out": True,
    "mlp.hook_out": False,
    "post_feedforward_layernorm.output": True,
}
SHIPPED = MappingProxyType(
    {"small-english": "transcoders", "small-english-cross-layer": "cross_layer"}
)
"""The names of the transcoders that ship with Small English, with their folders."""
_SHIPPED_FOLDER = ("pretrained", "data", "small_english")
_WEIGHTS = (".safetensors", ".npz")
_NOT_WEIGHTS = ("sparsity.safetensors", "activations_store_state.safetensors")  # from SAELens
_LAYER = re.compile(r"layers?[_.](\d+)")
_HUB = re.compile(r"^hf://[^/]+/[^/]+/|\?.*")
_EXPECTED = (
    "expected safetensors or npz files; convert pickles (.pt, .bin, .pkl) with the package that "
    "wrote them, because reading a pickle can execute arbitrary code"
)


@dataclass(frozen=True)
class _File:
    """A transcoder's file, with its config and (if known) its layer; tensors are not read yet.

    For a cross-layer transcoder, the file may hold other layers too, or may have a second half.
    """

    path: Path
    name: str
    config: Config
    layer: int | None
    holds_all_layers: bool = False
    second_half: Path | None = None


@torch.inference_mode(False)  # weights created in inference mode cannot be trained
def load(
    path: str | os.PathLike[str],
    *,
    layers: int | Iterable[int] | None = None,
    reads: Reads | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = torch.float32,
) -> dict[int, Transcoder]:
    """Load transcoders from one file, or from a folder with one file per layer.

    "small-english" loads the transcoders that ship with this model: JumpReLU transcoders of each
    MLP's input (the output of the norm, including its gain), stored in float16. For the same model,
    "small-english-cross-layer" loads a cross-layer transcoder.

    The keys, the config and the shapes in a file identify its format. Pickles are never read. These
    formats are supported:

        circuit-tracer  layer_3.safetensors and config.yaml; if config.yaml lists files on the
                        Hugging Face hub, the folder must contain them under the same paths
        Gemma Scope     params.npz, with circuit-tracer's config.yaml or reads="normalized"
        Gemma Scope 2   params.safetensors and config.json
        SAELens         sae_weights.safetensors and cfg.json; the architectures are transcoder,
                        skip_transcoder, jumprelu_transcoder, jumprelu_skip_transcoder and topk
        attn-only-lens  the files that `save` writes

    These formats of cross-layer transcoders are supported, and are always loaded whole:

        circuit-tracer         W_enc_3.safetensors and W_dec_3.safetensors for each layer
        Gemma Scope 2          params_layer_3.safetensors for each layer, with config.json; or one
                               file, in which each tensor has a first axis of layers
        crosslayer-transcoder  one file with encoder.W and decoder.W_3 (ReLU or JumpReLU)

    Where a format computes relu(q) 1[q > θ], as all but circuit-tracer do, a negative threshold θ
    is the same as 0, and is set to 0. In circuit-tracer's formats, it is an error: a feature with
    θ < q < 0 would be active there.

    The config names the hook point that a transcoder reads: hook_resid_mid and hook_mlp_in are the
    residual stream before the norm ("stream"), ln2.hook_normalized is the norm's output before its
    gain ("normalized"), and mlp.hook_in is the MLP's input ("input"). If the config does not name
    the hook point that the transcoder imitates, it is hook_mlp_out.

    Args:
        path: a file or a folder, "small-english" or "small-english-cross-layer".
        layers: the layers to load; None for all. If neither the config nor the file's name (for a
            folder, its name and the names inside) has the layer, pass it here, such as [3].
        reads: "stream", "normalized" or "input", if the settings do not name the input.
        device: the device of the transcoders.
        dtype: the dtype of the weights; None for the dtype in the file.

    Returns:
        {layer: transcoder}, sorted by layer.

    Raises:
        CheckpointError: with every reason: no file, a pickle, a damaged file, unknown settings,
            keys, shapes or values, an unknown input or layer, two transcoders for one layer,
            different values of d_model, or a part of a cross-layer transcoder.
        InputError: `layers` is not valid.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> from attn_only_lens import transcoders as t
        >>> weights = {"W_enc": torch.ones(3, 2), "W_dec": torch.ones(3, 2),
        ...     "b_enc": torch.zeros(3), "b_dec": torch.zeros(2)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file(weights, f"{folder}/layer_5.safetensors")
        ...     t.load(folder, reads="stream")
        {5: <Transcoder layer_5.safetensors: of 3 features (relu), reads stream>}
    """
    plain = as_plain(layers)
    wanted = None if layers is None else [*plain] if isinstance(plain, Iterable) else [plain]
    if wanted is not None and not (wanted and all(map(is_count, wanted))):
        reason = f"got layers={layers!r}; expected layer numbers, such as [3]"
        raise InputError([reason], "these transcoders cannot be loaded")
    device, dtype = parse_device(device), None if dtype is None else parse_dtype(dtype)
    if isinstance(path, str) and path in SHIPPED and not os.path.lexists(path):
        inside = *_SHIPPED_FOLDER, SHIPPED[path], "weights"
        shipped = resources.files("attn_only_lens").joinpath(*inside)
        with resources.as_file(shipped) as folder:
            return load(folder, layers=layers, reads=reads, device=device, dtype=dtype)
    path = as_path(path)
    files = list(_files(path))
    only = wanted[0] if wanted and len(wanted) == len(files) == 1 else None
    loaded: dict[int, Transcoder] = {}
    sources: dict[int, str] = {}
    reasons = []
    for file in files:
        layer = only if file.layer is None else file.layer
        if layer in sources:
            reasons.append(f"got layer {layer} in two files: {sources[layer]} and {file.name}")
        if layer in sources or (wanted is not None and layer not in wanted):
            continue
        try:
            transcoder = _read(file, reads, device, dtype)
            if layer is None:
                reason = "it does not say its layer; load it alone, with layers=[3] for layer 3"
                raise InputError([reason], PROBLEM)
            loaded[layer] = transcoder
        except InputError as error:
            reasons += [f"{file.name}: {reason}" for reason in error.reasons]
        except AttnOnlyLensError as error:
            reasons.append(str(error))
        if layer is not None:
            sources[layer] = file.name
    missing = sorted(set(wanted or ()) - sources.keys())
    reasons += [f"got no transcoder for layer {layer}" for layer in missing]
    widths = {transcoder.d_model for transcoder in loaded.values()}
    reasons += [f"got different values of d_model: {sorted(widths)}"] * (len(widths) > 1)
    reasons += [] if reasons else cross_layer_reasons(loaded)
    refuse([*dict.fromkeys(reasons)], f"{path} does not hold the transcoders of one model")
    return dict(sorted(loaded.items()))


def _files(path: Path) -> Iterator[_File]:
    """Yield the transcoders' files, with their configs and layers."""
    root = path if path.is_dir() else path.parent
    refuse([] if path.exists() else [_EXPECTED], f"{path} is missing")
    if (path / "gate.json").is_file():
        raise CheckpointError(
            f"{path} is a saved model: attn_only_lens.load opens it with its transcoders, if it "
            f"has any; expected the folder of the transcoders alone, {path / 'transcoders'}"
        )
    inside = [x for x in sorted(path.rglob("*")) if x.is_file()] if path.is_dir() else [path]
    weights = [x for x in inside if x.suffix in _WEIGHTS and x.name not in _NOT_WEIGHTS]
    if not weights:
        names = ", ".join(file.name for file in inside[:3]) or "no file"
        raise CheckpointError(f"{path} holds no transcoders: got {names}; {_EXPECTED}")
    files = {file.relative_to(root).as_posix(): file for file in weights}
    above = _config(root)
    listed = above.get("transcoders", [])
    places = {name: place for place, name in enumerate(listed)}
    order = [(places.get(name), name) for name in files]
    if listed and path.is_dir():
        missing = [f"got no {name}" for name in listed if name not in files]
        refuse(missing, f"{path} lacks files that config.yaml lists: download them")
        order = list(enumerate(listed))
    # A link's target may have another layer in its name; "." and ".." have no name of their own.
    named = path.resolve() if path.name in ("", "..") else path
    given = f"{named.name}/" if path.is_dir() else ""
    for place, name in order:
        in_names = [int(layer) for layer in _LAYER.findall(given + name)[-1:]]
        layers = in_names if place is None else [place]
        path, config = files[name], _config(files[name].parent) or above
        half, n_layers = layer_of_half(path), n_layers_in(path) if path.suffix != ".npz" else None
        if half:
            layer, second = half
            if path.name.startswith("W_enc") or not second.exists() or len(files) == 1:
                yield _File(path, name, config, layer, second_half=second)
        elif n_layers is None:
            yield _file(path, name, config, layers)
        else:
            for x in range(n_layers):
                yield _File(path, name, config, x, holds_all_layers=True)


def _file(path: Path, name: str, config: Config, outside: Sequence[int]) -> _File:
    """Return a file with its layer, which is in its config or is the one in `outside`."""
    if path.suffix == ".safetensors":
        with (
            checkpoint_errors(f"{path} is not a readable safetensors file"),
            safe_open(path, "pt") as opened,
        ):
            text = (opened.metadata() or {}).get("attn_only_lens")
        if text is not None:
            config = DOCUMENT.parse(text, path)
            return _File(path, name, config, config["layer"])
    in_config = (_hook(config, "in", _INPUTS)[0], _hook(config, "out", _AFTER_NORM)[0])
    layers = {x for x in in_config if x is not None} | {*outside}
    if len(layers) > 1:
        raise CheckpointError(f"{path} and its settings name different layers: {sorted(layers)}")
    return _File(path, name, config, next(iter(layers), None))


def _config(folder: Path) -> Config:
    """Read the config file in a folder; return {} if there is none."""
    names = [x for x in ("cfg.json", "config.json", "config.yaml") if (folder / x).is_file()]
    if not names:
        return {}
    path = folder / names[0]
    with checkpoint_errors(f"{path} cannot be used"):
        is_yaml = path.suffix == ".yaml"
        config = yaml.safe_load(path.read_text("utf-8")) if is_yaml else read_json(path)
        if not isinstance(config, dict):
            raise ValueError(f"got {config!r:.40}; expected names of settings, with a value each")
        # Names on the Hugging Face hub look like hf://owner/repository/folder/file?revision=…
        uris = config.get("transcoders", [])
        if not isinstance(uris, list) or not all(isinstance(uri, str) for uri in uris):
            raise ValueError(f"got transcoders={uris!r:.40}; expected a list of names of files")
        listed = [_HUB.sub("", uri) for uri in uris]
        return {**config, **config.get("metadata", {}), "transcoders": listed}


def _hook(config: Config, end: str, known: Iterable[str]) -> tuple[int | None, str | None]:
    """Return the layer (None if unknown) and the name of the input's or output's hook point."""
    # For Gemma Scope 2, SAELens names hook_mlp_in, which in TransformerLens is the stream before
    # the norm. This is wrong, but the name in transformers is right, so it is tried first.
    suffix = "" if end == "in" else "_out"
    keys = (f"feature_{end}put_hook", f"hf_hook_point_{end}", f"hf_hook_name{suffix}")
    hooks = []
    for key in (*keys, f"hook_name{suffix}"):
        value = config.get(key)
        names = value if isinstance(value, list) else [value] if value else []
        for *layer, name in (re.split(r"(?<=\.)(\d+)\.", str(x), maxsplit=1)[-2:] for x in names):
            # A list has the hook points of all layers of a cross-layer transcoder.
            hooks.append((int(layer[0]) if layer and len(names) == 1 else None, name))
    return next((hook for hook in hooks if hook[1] in known), (hooks or [(None, None)])[0])


def _read(
    file: _File, reads: str | None, device: torch.device, dtype: torch.dtype | None
) -> Transcoder:
    if file.config.get("format") == DOCUMENT.format:
        transcoder = read_transcoder(file.path)[1]
    else:
        transcoder = _foreign(file, reads, dtype)
    if reads not in (None, transcoder.reads):
        reason = f"got reads={reads!r}, but its settings say {transcoder.reads!r}"
        raise InputError([reason], PROBLEM)
    tensors: dict[str, Any] = {
        name: tensor.to(device=device, dtype=dtype) for name, tensor in transcoder.tensors().items()
    }
    return replace(transcoder, **tensors)


def _foreign(file: _File, reads: str | None, dtype: torch.dtype | None) -> Transcoder:
    """Read a file that another package wrote."""
    is_npz = file.path.suffix == ".npz"
    if file.holds_all_layers:
        assert file.layer is not None
        tensors = read_layer(file.path, file.layer, dtype)
    else:
        tensors = _read_npz(file.path) if is_npz else read_tensors(file.path)[0]
    if file.second_half is not None:
        if not file.second_half.is_file():
            raise InputError([f"got no {file.second_half.name} next to it"], PROBLEM)
        tensors = join_halves(tensors, read_tensors(file.second_half)[0], file.layer)
    layout = identify(tensors, file.config, is_npz)
    if file.holds_all_layers and layout != GEMMA_SCOPE_2:
        layout = CROSSLAYER_TRANSCODER
    tensors = rename(tensors, layout)
    if tensors["W_dec"].ndim > 2:
        if file.layer is None:
            reason = "it is a layer of a cross-layer transcoder, and does not say which"
            raise InputError([reason], PROBLEM)
        tensors = split_decoder(tensors, layout, file.layer)
    if layout != CIRCUIT_TRACER and "threshold" in tensors:
        # These formats compute relu(q) 1[q > θ], so a negative θ is the same as 0.
        tensors["threshold"] = tensors["threshold"].clamp(min=0)
    options = _ends(file.config, reads)
    options["activation"] = "jumprelu" if "threshold" in tensors else "relu"
    if layout == CIRCUIT_TRACER:
        require_gate(file.config, options["activation"])
    scan = file.config.get("scan")
    options["name"] = scan if isinstance(scan, str) else file.name
    if layout == SAELENS:
        dtype = dtype or tensors["W_enc"].dtype
        tensors, folded = fold_saelens(tensors, file.config)
        options |= folded
    options |= {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return Transcoder(**options)


def _ends(config: Config, reads: str | None) -> dict[str, Any]:
    """Return what a transcoder reads, and whether it imitates the output after a norm."""
    read = _hook(config, "in", _INPUTS)[1]
    written = _hook(config, "out", _AFTER_NORM)[1] or "hook_mlp_out"
    reasons = one_of(*tuple(_AFTER_NORM)).reasons(**{"output hook": written})
    if read is not None:
        reasons += one_of(*tuple(_INPUTS)).reasons(**{"input hook": read})
    elif reads is None:
        reasons.append(
            "it does not say what it reads; expected reads='stream' (before the norm), "
            "'normalized' (after the norm, before its gain) or 'input' (the MLP's input). Gemma "
            "Scope's transcoders read 'normalized'; its sparse autoencoders have the same keys, "
            "but are not transcoders"
        )
    InputError.raise_if(reasons, PROBLEM)
    return {"reads": reads if read is None else _INPUTS[read], "after_norm": _AFTER_NORM[written]}


def _read_npz(path: Path) -> Tensors:
    with checkpoint_errors(f"{path} is not a readable npz file"), path.open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        return {key: torch.from_numpy(np.ascontiguousarray(arrays[key])) for key in arrays.files}
