"""A TransformerBridge with random weights, built from JSON as the one was that it stands for.

TransformerBridges with neuron-heads in place.

A bridge is built again the way it was: the wrapped model from its own configuration, with random
weights; the bridge around it; `enable_compatibility_mode`, where that was called. Then every tensor
that there is gets its number, processed weights included, and the neuron-heads are exposed.

That this leads back to the model that is saved is not assumed. It is tried before anything is
written, on the model's own tensors: names and types of all modules, names of all hook points, the
configuration, and the logits on a few tokens, which have to be bitwise equal. So a bridge in any
state that this way does not lead to is refused, whatever the reason.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.model_bridge.sources.native import NativeModel
from transformers import PretrainedConfig, PreTrainedModel

from attn_only_lens.errors import CheckpointError
from attn_only_lens.heads import Gating
from attn_only_lens.models.checkpoint.entries import Parts, plain_config
from attn_only_lens.models.checkpoint.shared_memory import roots_of, viewed, views_of
from attn_only_lens.models.expose import expose_as
from attn_only_lens.models.in_place import exposed_heads
from attn_only_lens.models.in_place.known_mlps import known_mlps
from attn_only_lens.models.source_folder import dtype_named
from attn_only_lens.numerics import same_randomness
from attn_only_lens.runs.attached_hooks import attached, hook_reasons
from attn_only_lens.storage import out_of_range

__all__ = ["bridge_parts", "native", "rebuilt_bridge", "skeleton"]

_NATIVE = "TransformerLensNative"
_FEW = 1000
_SLACK = 2  # numbers of the model, for each that is saved: those that share memory are saved once


def native(config: dict[str, Any]) -> bool:
    """Whether the wrapped model is TransformerLens' own."""
    return bool(config["architecture"] == _NATIVE)


def skeleton(
    config: dict[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> TransformerBridge:
    """The bridge, not exposed; the caller's random state stays as it was.

    Args:
        config: what `save` wrote of it.
        tensors: what there is to fill it with; a model that takes far more is refused before time
            and memory are taken for it.

    Raises:
        CheckpointError: this version of transformers or of TransformerLens cannot build it, or it
            has numbers that no model can have.
    """
    if wrong := list(out_of_range(config, "config")):
        raise CheckpointError(f"this is no configuration: {'; '.join(wrong[:5])}")
    try:
        with same_randomness(torch.device("cpu")), torch.device("cpu"):
            if tensors is not None:
                _require_modest(config, tensors)
            bridge = (_native if native(config) else _bridged)(config)
            if config["compatible"]:
                bridge.enable_compatibility_mode(
                    disable_warnings=config["quiet"], no_processing=not config["processed"]
                )
            elif config["processed"]:
                bridge.process_weights()
    except (
        AttributeError,
        AssertionError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            "the bridge cannot be built by these versions of transformers and TransformerLens: "
            f"{error}"
        ) from error
    return bridge


def _require_modest(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a configuration of far more than is saved.

    Raises:
        ValueError: it is.
    """
    hf_config = config.get("hf_config", {})
    many = [
        key
        for key, value in hf_config.items()
        if "layer" in key and isinstance(value, int) and value > _FEW + len(tensors)
    ]
    if many:  # configurations make lists of such lengths
        raise ValueError(f"its {many[0]} is {hf_config[many[0]]}, and {len(tensors)} tensors")
    with torch.device("meta"):
        trial = (_native_module if native(config) else _wrapped)(config)
    takes = sum(each.numel() for each in [*trial.parameters(), *trial.buffers()])
    most = sum(each.numel() for each in tensors.values())
    if takes > _SLACK * most:
        raise ValueError(f"it takes {takes} numbers, and {most} are saved")


def _native(config: dict[str, Any]) -> TransformerBridge:
    cfg = _native_config(config)
    return TransformerBridge.boot_native(cfg, dtype=cfg.dtype, model_name=cfg.model_name)


def _native_module(config: dict[str, Any]) -> nn.Module:
    return NativeModel(_native_config(config))


def _native_config(config: dict[str, Any]) -> TransformerBridgeConfig:
    chosen = {"dtype": dtype_named(config["dtype"]), "device": "cpu", "n_devices": 1, "seed": None}
    return TransformerBridgeConfig.from_dict(config["cfg"] | chosen)


def _bridged(config: dict[str, Any]) -> TransformerBridge:
    model = _wrapped(config)
    return build_bridge_from_module(
        model.eval(),
        config["architecture"],
        hf_config=model.config,
        model_name=config["cfg"]["model_name"],
    )


def _wrapped(config: dict[str, Any]) -> PreTrainedModel:
    hub = [each for each in _implementations(config) if "/" in each or ":" in each]
    if hub:
        raise ValueError(f"it runs code from a hub: {', '.join(hub)}")
    kind = _of_transformers(config["config_class"], PretrainedConfig)
    return _of_transformers(config["class"], PreTrainedModel)._from_config(
        kind.from_dict(config["hf_config"]),
        attn_implementation=config["attention"],
        dtype=dtype_named(config["dtype"]),
    )


def _implementations(value: Any, chosen: bool = False) -> Iterator[str]:
    """Every text that says what computes attention, or the like: transformers loads such names."""
    if isinstance(value, dict):
        for key, each in value.items():
            here = str(key) == "attention" or str(key).endswith(("implementation", "_internal"))
            yield from _implementations(each, chosen or here)
    elif isinstance(value, list):
        for each in value:
            yield from _implementations(each, chosen)
    elif chosen and isinstance(value, str):
        yield value


def _of_transformers(name: str, kind: type) -> Any:
    """Look up a class of models or configurations in transformers, and nothing else there."""
    found = getattr(transformers, name, None)
    if not isinstance(found, type) or not issubclass(found, kind):
        raise ValueError(f"transformers has no {kind.__name__} named {name!r}")
    return found


# Of the configuration: not to be put back.
_CHOSEN = ("device", "n_devices", "dtype", "_bridge_ref", "trust_remote_code")
_SIZES = ("n_layers", "n_heads", "n_key_value_heads", "d_model", "d_head", "d_mlp", "d_vocab")
_POS = 7  # tokens of the trial


def bridge_parts(model: TransformerBridge) -> Parts:
    """An exposed bridge as parts.

    Raises:
        CheckpointError: `rebuilt_bridge` would not build it.
    """
    config = _config(model)
    twin = skeleton(config)
    named, expected = _named(model), _named(twin)
    # What a forward pass leaves behind in attributes is not part of the model.
    parts = {name: tensor for name, tensor in named.items() if name in expected}
    held = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    lost = {name for name in named.keys() - expected if id(named[name]) in held}
    wrong = [f"{name} is missing" for name in sorted(set(expected) - set(named))]
    wrong += [f"{name} is not known" for name in sorted(lost)]
    if wrong:
        raise _lost(wrong)
    try:
        views = views_of(parts)
    except ValueError as error:
        raise _lost([str(error)]) from error
    manifest: dict[str, Any] = {
        "config": config,
        "gate": exposed_heads(model)[0].gating.to_json(),
        "results": exposed_heads(model)[0].results,
        "training": model.training,
        "views": views,
        "frozen": [name for name, tensor in parts.items() if not tensor.requires_grad],
        "other_mode": [name for name, m in _modules(model) if m.training != model.training],
    }
    _finish(twin, manifest, {name: tensor.detach() for name, tensor in parts.items()})
    wrong = _differences(model, twin)
    if wrong:
        raise _lost(wrong)
    more = {key: manifest[key] for key in ("results", "views", "frozen", "other_mode")}
    name = str(model.cfg.model_name)
    return Parts(config, manifest["gate"], roots_of(parts, views), name, more)


def rebuilt_bridge(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> TransformerBridge:
    """The bridge of a manifest.

    Raises:
        CheckpointError: it cannot be built, or the tensors do not fit it.
    """
    model = skeleton(manifest["config"], tensors)
    try:
        values = viewed(tensors, manifest["views"])
    except ValueError as error:
        raise CheckpointError(f"the weights do not fit their manifest: {error}") from error
    _finish(model, manifest, values)
    unknown = set(manifest["other_mode"]) - dict(_modules(model)).keys()
    if unknown:
        raise CheckpointError(f"the manifest names modules that there are not: {sorted(unknown)}")
    return model


def _config(model: TransformerBridge) -> dict[str, Any]:
    """What a skeleton is built from, as JSON."""
    reasons, wrapped = hook_reasons(model, "would not be saved"), model.original_model
    if own := attached(model).own:
        reasons.append(
            f"TransformerLens has hooks of its own on it ({own[0]}), by which hook points of parts "
            "without a module fire (BERT in 4.3): such a bridge is not saved"
        )
    if model.cfg.d_vocab < 1:
        reasons.append("it has no vocabulary (it takes pictures?), and is tried on tokens")
    kind = type(wrapped).__name__
    config: dict[str, Any] = {
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "architecture": model.cfg.architecture,
        "compatible": model.compatibility_mode,
        "processed": model._weights_processed,
        "quiet": bool(getattr(model.blocks[0], "disable_warnings", False)),
        "cfg": _settings(model),
    }
    if not native(config):
        if getattr(transformers, kind, None) is not type(wrapped):
            reasons.append(f"it wraps a {kind}, which transformers does not have: code of its own")
        hf_config = getattr(wrapped, "config", None)
        if not isinstance(hf_config, transformers.PretrainedConfig):
            reasons.append(f"the {kind} that it wraps has no transformers configuration")
        else:
            config |= {
                "class": kind,
                "config_class": type(hf_config).__name__,
                "hf_config": json.loads(hf_config.to_json_string(use_diff=False)),
                "attention": hf_config._attn_implementation,
            }
    if reasons:
        raise _lost(reasons)
    settled: dict[str, Any] = json.loads(json.dumps(config))
    return settled


def _settings(model: TransformerBridge) -> dict[str, Any]:
    """The bridge's configuration, as far as JSON holds it."""
    settings = {}
    for key, value in plain_config(model.cfg).items():
        try:
            settings[key] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue  # built from the wrapped model's configuration
    return settings


def _finish(model: Any, manifest: dict[str, Any], values: dict[str, Tensor]) -> None:
    """Give a skeleton its numbers, settings, neuron-heads and mode."""
    named = _named(model)
    wrong = [f"{name} is missing" for name in sorted(named.keys() - values)]
    wrong += [f"{name} is not known" for name in sorted(values.keys() - named)]
    wrong += [
        f"{name} has shape {tuple(values[name].shape)}; expected {tuple(tensor.shape)}"
        for name, tensor in named.items()
        if name in values and values[name].shape != tensor.shape
    ]
    frozen, other = set(manifest["frozen"]), set(manifest["other_mode"])
    wrong += [f"{name} is not known" for name in sorted(frozen - named.keys())]
    current, saved = _settings(model), manifest["config"]["cfg"]
    wrong += [
        f"cfg.{key} is {current[key]!r}, and {saved.get(key)!r} is saved"
        for key in current
        if (key in _SIZES and saved.get(key) != current[key])
        or (saved.get(key) is not None and _kind(current[key]) not in (_kind(saved[key]), None))
    ]
    if wrong:
        raise CheckpointError(f"the weights do not fit their manifest: {'; '.join(wrong[:5])}")
    for name, tensor in named.items():
        tensor.data = values[name]  # whatever shares the tensor sees it
        tensor.requires_grad_(name not in frozen)
    for key, value in saved.items():
        if key not in _CHOSEN and current.get(key) != value:
            setattr(model.cfg, key, value)
    problem = "its neuron-heads cannot be exposed again"
    try:
        expose_as(model, known_mlps(model, problem), Gating.from_json(manifest["gate"]))
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{problem}: {error}") from error
    for heads in exposed_heads(model):
        heads.results = bool(manifest["results"])
    for name, module in _modules(model):
        module.training = manifest["training"] != (name in other)


def _kind(value: Any) -> type | None:
    """The type of a setting, one for all numbers; None for a setting that is not set."""
    return None if value is None else float if type(value) is int else type(value)


def _named(model: Any) -> dict[str, Tensor]:
    """Every tensor that the modules hold, once each; those that are no parameters, too."""
    found: dict[str, Tensor] = {}
    seen = set()
    for path, module in _modules(model):
        for held in (module._parameters, module._buffers, vars(module)):
            for name, tensor in held.items():
                if isinstance(tensor, Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{path}.{name}"] = tensor
    return found


def _modules(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules of the bridge, then those of the wrapped model that it does not own."""
    own = dict(model.named_modules())
    mine = {id(module) for module in own.values()}
    wrapped = model.original_model.named_modules(prefix="original_model")
    return [*own.items(), *((name, m) for name, m in wrapped if id(m) not in mine)]


@torch.no_grad()
def _differences(model: Any, twin: Any) -> list[str]:
    """In what a model and its reconstruction differ."""
    wrong = []
    mine, theirs = ({n: type(m) for n, m in _modules(each)} for each in (model, twin))
    changed = sorted(n for n in mine.keys() | theirs if mine.get(n) is not theirs.get(n))
    if changed:
        wrong.append(f"modules {', '.join(changed[:5])} would be others")
    hooks = sorted(set(model.hook_dict) ^ set(twin.hook_dict))
    if hooks:
        wrong.append(f"hook points {', '.join(hooks[:5])} would be there no more, or be new")
    settings, again = (
        {k: v for k, v in _settings(each).items() if k not in _CHOSEN} for each in (model, twin)
    )
    keys = sorted(k for k in settings.keys() | again if settings.get(k) != again.get(k))
    if keys:
        wrong.append(f"cfg.{', cfg.'.join(keys[:5])} would differ")
    if wrong:
        return wrong
    pos = min(_POS, model.cfg.n_ctx)
    device = next(model.parameters()).device
    tokens = (torch.arange(2 * pos, device=device) % model.cfg.d_vocab).reshape(2, pos)
    logits = []
    for each in (model, twin):
        with same_randomness(device):  # of dropout, in training
            logits.append(each(tokens))
    if not torch.equal(*logits):
        moved = (logits[0] - logits[1]).abs().max().item()
        wrong.append(
            f"its logits would differ by {moved:.2g}: it is no longer what its configuration and "
            "enable_compatibility_mode's own options lead to"
        )
    return wrong


def _lost(reasons: list[str]) -> CheckpointError:
    return CheckpointError(f"this bridge could not be loaded again: {'; '.join(reasons)}")
