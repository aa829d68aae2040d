"""The formats of transcoder files in other packages: keys, layouts and config entries.

In `Transcoder`, W_enc is [d_model, d_features], W_dec is [d_features, d_model], and W_skip maps x
to x W_skip. In the tables below, W_enc.T and W_skip.T are the transposes of these tensors. W_dec is
[d_features, d_model] in all formats, or [d_features, layers, d_model] in a cross-layer transcoder.

Sources: circuit_tracer 0.5.0, `transcoder/single_layer_transcoder.py`; sae_lens 6.54,
`saes/transcoder.py`, `saes/topk_sae.py` and `loading/pretrained_sae_loaders.py`; the README of
google/gemma-scope-2b-pt-transcoders; `config.json` of the transcoders in google/gemma-scope-2-*.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attn_only_lens.errors import InputError
from attn_only_lens.models.source_folder import DTYPES

Tensors = dict[str, Tensor]
Config = Mapping[str, Any]
PROBLEM = "this transcoder cannot be loaded"
CIRCUIT_TRACER, SAELENS = "circuit-tracer", "SAELens"
GEMMA_SCOPE, GEMMA_SCOPE_2 = "Gemma Scope", "Gemma Scope 2"
CROSSLAYER_TRANSCODER = "crosslayer-transcoder"
_BIASES = {"b_enc": "b_enc", "b_dec": "b_dec"}
_PLAIN = {"W_enc": "W_enc", "W_dec": "W_dec", "threshold": "threshold", **_BIASES}
# For each format, a table from its keys to the names in `Transcoder`.
_KEYS = {
    CIRCUIT_TRACER: {
        "W_enc": "W_enc.T",
        "W_dec": "W_dec",
        "activation_function.threshold": "threshold",
        "W_skip": "W_skip.T",
        **_BIASES,
    },
    GEMMA_SCOPE: _PLAIN,
    GEMMA_SCOPE_2: {
        "w_enc": "W_enc",
        "w_dec": "W_dec",
        "threshold": "threshold",
        "affine_skip_connection": "W_skip",
        **_BIASES,
    },
    SAELENS: _PLAIN | {"W_skip": "W_skip.T"},
    CROSSLAYER_TRANSCODER: _PLAIN,
}
_REQUIRED = ("W_enc", "W_dec", "b_enc", "b_dec")
_ACTIVATIONS = {  # the activation of each of SAELens' architectures
    "transcoder": "relu",
    "skip_transcoder": "relu",
    "jumprelu_transcoder": "jumprelu",
    "jumprelu_skip_transcoder": "jumprelu",
    "topk": "topk",
}


def identify(tensors: Tensors, config: Config, is_npz: bool) -> str:
    """Return the format of a file, from its keys, then its settings, then its shapes."""
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    kinds = (config.get("model_kind"), config.get("type"))
    decoder = shapes.get("W_dec", shapes.get("w_dec", []))
    if len(decoder) < 3 and ("cross_layer_transcoder" in kinds or "clt" in kinds):
        reason = (
            f"its settings say that it is a cross-layer transcoder, but its decoder has shape "
            f"{decoder}; expected [d_features, layers, d_model]"
        )
        raise InputError([reason], PROBLEM)
    if "w_enc" in shapes:
        return GEMMA_SCOPE_2
    if is_npz:
        return GEMMA_SCOPE
    if "activation_function.threshold" in shapes:
        return CIRCUIT_TRACER
    if "threshold" in shapes or "architecture" in config:
        return SAELENS
    if "feature_input_hook" in config or len(decoder) > 2:
        return CIRCUIT_TRACER
    if "W_enc" not in shapes:
        got = ", ".join(sorted(shapes)[:5]) or "no tensor"
        raise InputError([f"got {got}; expected W_enc, W_dec, b_enc and b_dec"], PROBLEM)
    sizes = [*shapes.get("b_dec", [None]), *shapes.get("b_enc", [None])]
    if sizes == sizes[::-1]:
        got = f"got W_enc of shape {shapes['W_enc']}, whose axes could be in either order"
        files = "config.yaml (circuit-tracer) or cfg.json (SAELens)"
        raise InputError([f"{got}; expected {files} next to it"], PROBLEM)
    return SAELENS if shapes["W_enc"] == sizes else CIRCUIT_TRACER


def rename(tensors: Tensors, layout: str) -> Tensors:
    """Return the tensors with the names and shapes of `Transcoder`; refuse unknown keys."""
    keys = _KEYS[layout]
    needed = {key for key, name in keys.items() if name.removesuffix(".T") in _REQUIRED}
    reasons = [f"got no {key}, which {layout} has" for key in sorted(needed - tensors.keys())]
    reasons += [f"got {key}, which {layout} does not have" for key in sorted(tensors.keys() - keys)]
    reasons += [
        f"got {key} in {tensor.dtype}; expected {', '.join(DTYPES)}"
        for key, tensor in tensors.items()
        if tensor.dtype not in DTYPES.values()
    ]
    if not needed - tensors.keys():
        d_model, d_features = tensors["b_dec"].numel(), tensors["b_enc"].numel()
        axes = {"W_enc": [d_model, d_features], "W_skip": [d_model, d_model], "b_dec": [d_model]}
        axes |= {"W_enc.T": [d_features, d_model], "W_skip.T": [d_model, d_model]}
        axes |= {"W_dec": [d_features, d_model], "b_enc": [d_features], "threshold": [d_features]}
        (decoder,) = (tensors[key] for key, name in keys.items() if name == "W_dec")
        if decoder.ndim == 3 and layout not in (GEMMA_SCOPE, SAELENS):
            axes["W_dec"].insert(1, decoder.shape[1])
        reasons += [
            f"got {key} of shape {list(tensors[key].shape)}; {layout} has {axes[name]}, because "
            f"b_dec has {d_model} entries and b_enc has {d_features}"
            for key, name in keys.items()
            if key in tensors and list(tensors[key].shape) != axes[name]
        ]
    InputError.raise_if(reasons, PROBLEM)
    return {
        keys[key].removesuffix(".T"): tensor.T.contiguous() if keys[key].endswith(".T") else tensor
        for key, tensor in tensors.items()
    }


def require_gate(config: Config, activation: str) -> None:
    """Raise an error if circuit-tracer's config names another activation than the tensors."""
    # Versions after 0.5 write these config entries. Their topk keeps negative pre-activations.
    got = config.get("activation")
    if got is None or str(got).lower().replace("_", "") == activation:
        return
    reason = (
        f"got activation={got!r} in config.yaml, but its tensors are those of {activation}; "
        "expected no activation, or the same"
    )
    if str(got).lower() == "topk":
        reason += ". For topk, build a Transcoder(…, activation='topk', k=…) of the tensors"
    raise InputError([reason], PROBLEM)


def fold_saelens(tensors: Tensors, config: Config) -> tuple[Tensors, dict[str, Any]]:
    """Fold SAELens' config entries into the weights, in float64; also return the activation and k.

    With apply_b_dec_to_input, the encoder reads x - b_dec. With rescale_acts_by_decoder_norm, topk
    ranks features by q times the norm of the feature's row of W_dec.
    """
    architecture = str(config.get("architecture"))
    activation = _ACTIVATIONS.get(architecture)
    is_sae = activation == "topk"
    allowed = {
        "architecture": tuple(_ACTIVATIONS),
        "normalize_activations": (None, False, "none"),
        "reshape_activations": (None, "none"),
        "finetuning_scaling_factor": (None, False),
        "activation_fn": tuple(dict.fromkeys((None, activation, "relu"))),
        "apply_b_dec_to_input": (None, False, True) if is_sae else (None, False),
        "rescale_acts_by_decoder_norm": (None, False, True) if is_sae else (None, False),
    }
    reasons = [
        f"got {key}={config.get(key)!r} in cfg.json, which is not supported; expected one of "
        f"{', '.join(map(str, values))}. If SAELens can fold this setting into the weights, fold "
        "it, and save the transcoder again"
        for key, values in allowed.items()
        if config.get(key) not in values
    ]
    if is_sae and not config.get("hook_name_out"):
        reasons.append(
            "got no hook_name_out in cfg.json: it is a sparse autoencoder; expected a transcoder"
        )
    for part, name in (("jumprelu", "threshold"), ("skip", "W_skip")):
        if activation and (part in architecture) != (name in tensors):
            verb = "lacks" if part in architecture else "has"
            reasons.append(f"it {verb} {name}, which does not fit architecture={architecture!r}")
    InputError.raise_if(reasons, PROBLEM)
    if not is_sae:
        return tensors, {"activation": activation}
    W_enc, W_dec, b_enc, b_dec = (tensors[name].double() for name in _REQUIRED)
    if config.get("apply_b_dec_to_input", True):  # SAELens' default
        b_enc = b_enc - b_dec @ W_enc
    if config.get("rescale_acts_by_decoder_norm"):
        norms = W_dec.norm(dim=-1).clamp(min=1e-8)  # the same bound as in SAELens
        W_enc, W_dec, b_enc = W_enc * norms, W_dec / norms[:, None], b_enc * norms
    folded = {"W_enc": W_enc, "W_dec": W_dec, "b_enc": b_enc, "b_dec": b_dec}
    return folded, {"activation": activation, "k": config.get("k")}
