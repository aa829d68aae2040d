"""Read one layer of a cross-layer transcoder, from files that hold several layers or half a layer.

In these files, l is the layer whose input a feature reads:

    circuit-tracer           W_enc_{l}.safetensors   W_enc_{l}, b_enc_{l}, b_dec_{l}, threshold_{l}
                             W_dec_{l}.safetensors   W_dec_{l} [d_features, n_layers - l, d_model]
    Gemma Scope 2            params_layer_{l}.safetensors   w_dec [d_features, n_layers, d_model]
                             or one file, in which each tensor has a first axis of layers
    crosslayer-transcoder    one file: encoder.W [n_layers, d_model, d_features], and for each
                             layer t that is written to, decoder.W_{t} [t + 1, d_features, d_model]

`formats.py` handles what is the same as in files of transcoders for one layer.

Sources: circuit_tracer, `transcoder/cross_layer_transcoder.py`; crosslayer-transcoder,
`model/clt.py`, `model/jumprelu.py` and `model/standardize.py`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from attn_only_lens.errors import InputError
from attn_only_lens.models.source_folder import checkpoint_errors
from attn_only_lens.transcoders.formats import GEMMA_SCOPE_2, PROBLEM, Tensors

_HALF = re.compile(r"W_(enc|dec)_(\d+)\.safetensors")
_PREFIX = "model."  # in files of a module that trains the transcoder
_STATISTICS = tuple(f"{x}_standardizer.{y}" for x in ("input", "output") for y in ("mean", "std"))
_OPTIONAL = (*_STATISTICS, "nonlinearity.theta", "nonlinearity.bandwidth")


def layer_of_half(path: Path) -> tuple[int, Path] | None:
    """Return the layer and the second file, if this is one of circuit-tracer's two files."""
    match = _HALF.fullmatch(path.name)
    if match is None:
        return None
    half, layer = match.groups()
    return int(layer), path.with_name(f"W_{'dec' if half == 'enc' else 'enc'}_{layer}.safetensors")


def n_layers_in(path: Path) -> int | None:
    """Return the number of layers of a file of all layers; None for a file of one layer."""
    with (
        checkpoint_errors(f"{path} is not a readable safetensors file"),
        safe_open(path, "pt") as opened,
    ):
        for key in opened.keys():  # noqa: SIM118
            shape = opened.get_slice(key).get_shape()
            if key.removeprefix(_PREFIX) in ("encoder.W", "w_enc") and len(shape) == 3:
                return int(shape[0])
    return None


def join_halves(
    encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor], layer: int | None
) -> Tensors:
    """Return the tensors of circuit-tracer's two files, with the keys of its files of one layer."""
    wrong = [key for key in {**encoder, **decoder} if not key.endswith(f"_{layer}")]
    reasons = [f"got {key} in the files of layer {layer}; expected W_enc_{layer}" for key in wrong]
    InputError.raise_if(reasons, PROBLEM)
    tensors = {re.sub(r"_\d+$", "", key): x for key, x in {**encoder, **decoder}.items()}
    if "threshold" in tensors:
        tensors["activation_function.threshold"] = tensors.pop("threshold")
    return tensors


def read_layer(path: Path, layer: int, dtype: torch.dtype | None) -> Tensors:
    """Return one layer's tensors from a file of all layers; do not read the other layers.

    Weights that are folded are converted to `dtype`; None for the dtype in the file.
    """
    with checkpoint_errors(f"{path} cannot be used"), safe_open(path, "pt") as opened:
        keys = {key.removeprefix(_PREFIX): key for key in opened.keys()}  # noqa: SIM118
        parts = {name: opened.get_slice(key) for name, key in keys.items()}
        if "encoder.W" in keys:
            return _folded(parts, layer, dtype)
        n_layers = parts["w_enc"].get_shape()[0]
        reasons = [
            f"got {name} of shape {part.get_shape()}; expected a first axis of {n_layers} layers"
            for name, part in parts.items()
            if part.get_shape()[:1] != [n_layers]
        ]
        InputError.raise_if(reasons, PROBLEM)
        return {name: part[layer] for name, part in parts.items()}


def _folded(parts: Mapping[str, Any], layer: int, dtype: torch.dtype | None) -> Tensors:
    """Fold crosslayer-transcoder's standardizers into a layer's weights, in float64."""
    n_layers = parts["encoder.W"].get_shape()[0]
    decoders = [f"decoder.W_{target}" for target in range(n_layers)]
    needed = {"encoder.W", "encoder.b", "decoder.b", *decoders}
    reasons = [
        f"got no {key}, which crosslayer-transcoder has" for key in sorted(needed - {*parts})
    ]
    reasons += [
        f"got {key}; expected a CrossLayerTranscoder with the activation ReLU or JumpReLU"
        for key in sorted({*parts} - needed - {*_OPTIONAL})
    ]
    InputError.raise_if(reasons or _shape_reasons(parts), PROBLEM)
    shift, scale, mean, std = (_statistics(parts, key, n_layers) for key in _STATISTICS)
    stored = parts["encoder.W"][layer]
    W_enc = stored.double() / scale[layer].unsqueeze(-1)
    written = [parts[key][layer].double() * std[t] for t, key in enumerate(decoders) if t >= layer]
    folded = {
        "W_enc": W_enc,
        "b_enc": parts["encoder.b"][layer].double() - shift[layer].expand(len(W_enc)) @ W_enc,
        "W_dec": torch.stack(written, 1),
        "b_dec": parts["decoder.b"][layer].double() * std[layer] + mean[layer],
    }
    if "nonlinearity.theta" in parts:
        folded["threshold"] = parts["nonlinearity.theta"][:][0, layer].double()
    return {name: tensor.to(dtype or stored.dtype) for name, tensor in folded.items()}


def _shape_reasons(parts: Mapping[str, Any]) -> list[str]:
    """Return every reason why tensors of a crosslayer-transcoder do not fit its encoder."""
    n_layers, d_model, d_features = parts["encoder.W"].get_shape()
    shapes = {f"decoder.W_{t}": [[t + 1, d_features, d_model]] for t in range(n_layers)}
    shapes |= {"encoder.b": [[n_layers, d_features]], "decoder.b": [[n_layers, d_model]]}
    shapes |= {"nonlinearity.theta": [[1, n_layers, d_features]]}
    shapes |= {key: [[n_layers], [n_layers, 1], [n_layers, d_model]] for key in _STATISTICS}
    return [
        f"got {key} of shape {got}; expected {' or '.join(map(str, shapes[key]))}, because "
        f"encoder.W has shape {[n_layers, d_model, d_features]}"
        for key, part in parts.items()
        if key in shapes and (got := part.get_shape()) not in shapes[key]
    ]


def _statistics(parts: Mapping[str, Any], key: str, n_layers: int) -> Tensor:
    """Return a standardizer's means or deviations: one number per layer, or one per entry."""
    if key not in parts:
        number = 1.0 if key.endswith("std") else 0.0
        return torch.full((n_layers, 1), number, dtype=torch.float64, device="cpu")
    numbers: Tensor = parts[key][:].double()
    return numbers.unsqueeze(-1) if numbers.ndim == 1 else numbers


def split_decoder(tensors: Tensors, layout: str, layer: int) -> Tensors:
    """Split W_dec [d_features, layers, d_model] into W_dec and W_later."""
    W_dec = tensors["W_dec"]
    if layout == GEMMA_SCOPE_2:
        if W_dec[:, :layer].any():
            reason = (
                f"its features of layer {layer} write to earlier layers: it is a crosscoder, or "
                "the file of another layer; expected a cross-layer transcoder"
            )
            raise InputError([reason], PROBLEM)
        W_dec = W_dec[:, layer:]
    if not W_dec.shape[1]:
        raise InputError([f"got no decoder to layer {layer}, which the features read"], PROBLEM)
    later = W_dec[:, 1:].transpose(0, 1).contiguous()
    return {**tensors, "W_dec": W_dec[:, 0].contiguous(), "W_later": later}
