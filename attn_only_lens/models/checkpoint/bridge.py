"""TransformerBridges with neuron-heads in place.

A bridge is built again as before: the wrapped model from its configuration, with random weights;
the bridge around it; `enable_compatibility_mode`, if it was called. Then all tensors get their
values, including processed weights, and the neuron-heads are exposed.

`save` tries this before it writes anything, with the model's tensors. It compares the names and
types of all modules, the names of all hook points, the configuration, and the logits on a few
tokens, which must be bitwise equal. A bridge that differs is refused.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.model_bridge.sources.native import NativeModel
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import TypedDict

from attn_only_lens.devices import keep_random_state
from attn_only_lens.engine.model_checks import find_hooks, hook_reasons
from attn_only_lens.errors import CheckpointError
from attn_only_lens.models.checkpoint.hooked import MISFIT, expose_again
from attn_only_lens.models.in_place import exposed_heads
from attn_only_lens.models.source_folder import parse_dtype, plain_config, refuse
from attn_only_lens.models.transformers_module import build_module, config_from
from attn_only_lens.models.two_blocks.build import tensor_misfits
from attn_only_lens.storage import out_of_range, require_few_layers

_LOST = "this bridge could not be loaded again"
_NATIVE = "TransformerLensNative"
_SLACK = 2  # numbers of the model per saved number: numbers in shared memory are saved once
# Settings of the configuration that are not restored.
_NOT_RESTORED = ("device", "n_devices", "dtype", "_bridge_ref", "trust_remote_code")
_SIZES = ("n_layers", "n_heads", "n_key_value_heads", "d_model", "d_head", "d_mlp", "d_vocab")
_POS = 7  # tokens of the trial


class _BridgeConfig(TypedDict):
    dtype: str
    architecture: str
    compatible: bool
    processed: bool
    quiet: bool
    cfg: dict[str, Any]


Placement = list[Any]  # of a tensor: its flat tensor's name, offset, shape, stride, dtype


class BridgeFields(TypedDict):
    """The entries of a manifest that only a TransformerBridge has."""

    layout: Literal["in place"]
    config: _BridgeConfig
    results: bool
    placements: dict[str, tuple[str, int, list[int], list[int], str]]
    other_mode: list[str]


def describe_bridge(model: TransformerBridge) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the entries of an exposed bridge's manifest, and its tensors, once they are tried."""
    config = _config(model)
    twin = _skeleton(config)
    named, expected = _named(model), _named(twin)
    # Attributes that a forward pass leaves behind are not part of the model.
    kept = {name: tensor for name, tensor in named.items() if name in expected}
    registered = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    unknown = [name for name in sorted(named.keys() - expected) if id(named[name]) in registered]
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - named)]
    refuse([*wrong, *(f"{name} is not known" for name in unknown)], _LOST)
    placements, flat = pack(kept)
    heads = exposed_heads(model)[0]
    entries: dict[str, Any] = {
        "layout": "in place",
        "config": config,
        "gate": heads.gating.to_json(),
        "results": heads.results,
        "placements": placements,
        "frozen": [name for name, tensor in kept.items() if not tensor.requires_grad],
        "other_mode": [name for name, m in _modules(model) if m.training != model.training],
    }
    mode = {"training": model.training}
    device = next(model.parameters()).device  # the first, if the model is on several
    _finish(twin, entries | mode, {name: item.detach().to(device) for name, item in kept.items()})
    refuse(_differences(model, twin), _LOST)
    return entries, flat


def rebuild_bridge(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> TransformerBridge:
    """Build the bridge of a manifest; raise CheckpointError if the tensors do not fit it."""
    model = _skeleton(manifest["config"], tensors)
    _finish(model, manifest, unpack(manifest["placements"], tensors))
    unknown = set(manifest["other_mode"]) - dict(_modules(model)).keys()
    if unknown:
        raise CheckpointError(f"the manifest names modules that do not exist: {sorted(unknown)}")
    return model


def _skeleton(
    config: dict[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> TransformerBridge:
    """Build the bridge of a manifest's configuration, not exposed; keep the random state.

    A configuration of far more numbers than `tensors` is refused before it takes time and memory.
    """
    refuse(list(out_of_range(config, "config")), "this is no configuration")
    with keep_random_state(torch.device("cpu")), torch.device("cpu"):
        if tensors is not None:
            _require_modest(config, tensors)
        bridge = build_bridge_from_module(**_wrapped(config))
        process_as_saved(bridge, config)
    return bridge


def process_as_saved(bridge: TransformerBridge, config: dict[str, Any]) -> None:
    """Process the weights of a bridge as in the saved one; `config` is of its manifest."""
    if config["compatible"]:
        bridge.enable_compatibility_mode(
            disable_warnings=config["quiet"], no_processing=not config["processed"]
        )
    elif config["processed"]:
        bridge.process_weights()


def _require_modest(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a configuration of far more numbers than are saved."""
    require_few_layers(config.get("hf_config", {}), tensors)
    with torch.device("meta"):
        trial = _wrapped(config)["model"]
    takes = sum(tensor.numel() for tensor in [*trial.parameters(), *trial.buffers()])
    most = sum(tensor.numel() for tensor in tensors.values())
    if takes > _SLACK * most:
        raise ValueError(f"it takes {takes} numbers, and {most} are saved")


def _wrapped(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `build_bridge_from_module`."""
    dtype = parse_dtype(config["dtype"])
    options = {"architecture": config["architecture"], "model_name": config["cfg"]["model_name"]}
    if config["architecture"] == _NATIVE:
        chosen = {"dtype": dtype, "device": "cpu", "n_devices": 1, "seed": None}
        cfg = TransformerBridgeConfig.from_dict(config["cfg"] | chosen)
        native = {"model": NativeModel(cfg).to(dtype=dtype), "tl_config": cfg, "dtype": dtype}
        return options | native
    if hub := [name for name in _implementations(config) if "/" in name or ":" in name]:
        raise ValueError(f"it runs code from a hub: {', '.join(hub)}")
    kind = _class_in_transformers(config["config_class"], PretrainedConfig)
    model: Any = build_module(
        _class_in_transformers(config["class"], PreTrainedModel),
        config_from(kind, config["hf_config"]),
    )
    model.set_attn_implementation(config["attention"])
    return options | {"model": model.to(dtype), "hf_config": model.config}


def _implementations(value: Any, chosen: bool = False) -> Iterator[str]:
    """Return the names of implementations of attention and so on, which transformers loads."""
    if isinstance(value, dict):
        for key, item in value.items():
            here = str(key) == "attention" or str(key).endswith(("implementation", "_internal"))
            yield from _implementations(item, chosen or here)
    elif isinstance(value, list):
        for item in value:
            yield from _implementations(item, chosen)
    elif chosen and isinstance(value, str):
        yield value


def _class_in_transformers(name: str, kind: type) -> Any:
    """Look up a class of models or configurations in transformers."""
    cls = getattr(transformers, name, None)
    if not isinstance(cls, type) or not issubclass(cls, kind):
        raise ValueError(f"transformers has no {kind.__name__} named {name!r}")
    return cls


def _config(model: TransformerBridge) -> dict[str, Any]:
    """Return the settings that a skeleton is built from, as JSON."""
    reasons, wrapped = hook_reasons(model, "would not be saved"), model.original_model
    if model.cfg.d_vocab < 1:
        reasons.append("it has no vocabulary (it takes pictures?), and is tried on tokens")
    config: dict[str, Any] = {
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "architecture": model.cfg.architecture,
        "compatible": model.compatibility_mode,
        "processed": model._weights_processed,
        "quiet": bool(getattr(model.blocks[0], "disable_warnings", False)),
        "cfg": _settings(model),
    }
    if model.cfg.architecture != _NATIVE:
        kind = type(wrapped).__name__
        if getattr(transformers, kind, None) is not type(wrapped):
            reasons.append(f"it wraps a {kind}, which transformers does not have")
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
    refuse(reasons, _LOST)
    return json.loads(json.dumps(config))


def _settings(model: TransformerBridge) -> dict[str, Any]:
    """Return the part of the bridge's configuration that JSON can hold."""
    settings = {}
    for key, value in plain_config(model.cfg).items():
        try:
            settings[key] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue  # built from the wrapped model's configuration
    return settings


def _finish(model: Any, manifest: dict[str, Any], values: dict[str, Tensor]) -> None:
    """Give a skeleton its weights, settings, neuron-heads and mode."""
    named = _named(model)
    frozen, other_mode = set(manifest["frozen"]), set(manifest["other_mode"])
    wrong = tensor_misfits(named, values)
    wrong += [f"{name} is not known" for name in sorted(frozen - named.keys())]
    current, saved = _settings(model), manifest["config"]["cfg"]
    wrong += [
        f"cfg.{key} is {current[key]!r}, and {saved.get(key)!r} is saved"
        for key in current
        if (key in _SIZES and saved.get(key) != current[key])
        or (saved.get(key) is not None and _type(current[key]) not in (_type(saved[key]), None))
    ]
    refuse(wrong, MISFIT)
    for name, tensor in named.items():
        tensor.data = values[name]  # also for modules that share the tensor
        tensor.requires_grad_(name not in frozen)
    for key, value in saved.items():
        if key not in _NOT_RESTORED and current.get(key) != value:
            setattr(model.cfg, key, value)
    expose_again(model, manifest)
    for heads in exposed_heads(model):
        heads.results = bool(manifest["results"])
    for name, module in _modules(model):
        module.training = manifest["training"] != (name in other_mode)


def _type(value: Any) -> type | None:
    """Return the type of a setting, one for all numbers; None for a setting that is not set."""
    return None if value is None else float if type(value) is int else type(value)


def _named(model: Any) -> dict[str, Tensor]:
    """Return every tensor that modules hold, once, also those that are no parameters."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for path, module in _modules(model):
        for attributes in (module._parameters, module._buffers, vars(module)):
            for name, tensor in attributes.items():
                if isinstance(tensor, Tensor):
                    tensors.setdefault(id(tensor), (f"{path}.{name}", tensor))
    return dict(tensors.values())


def _modules(model: Any) -> list[tuple[str, nn.Module]]:
    """Return the modules of the bridge, then the others of the wrapped model."""
    modules = dict(model.named_modules())
    known = {id(module) for module in modules.values()}
    wrapped = model.original_model.named_modules(prefix="original_model")
    return [*modules.items(), *((name, m) for name, m in wrapped if id(m) not in known)]


@torch.no_grad()
def _differences(model: Any, twin: Any) -> list[str]:
    """List the differences between a model and its reconstruction."""
    wrong = []
    types, twin_types = ({n: type(m) for n, m in _modules(bridge)} for bridge in (model, twin))
    changed = sorted(n for n in types.keys() | twin_types if types.get(n) is not twin_types.get(n))
    if changed:
        wrong.append(f"modules {', '.join(changed[:5])} would be others")
    hooks = sorted(set(model.hook_dict) ^ set(twin.hook_dict))
    if hooks:
        wrong.append(f"hook points {', '.join(hooks[:5])} would be gone, or new")
    attached, rebuilt = (find_hooks(bridge) for bridge in (model, twin))
    if attached != rebuilt:
        wrong.append(f"TransformerLens' own hooks would be on {rebuilt.placeholders + rebuilt.own}")
    settings, again = (
        {k: v for k, v in _settings(bridge).items() if k not in _NOT_RESTORED}
        for bridge in (model, twin)
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
    for bridge in (model, twin):
        with keep_random_state(device):  # of dropout, in training
            logits.append(bridge(tokens))
    if not torch.equal(*logits):
        difference = (logits[0] - logits[1]).abs().max().item()
        wrong.append(
            f"its logits would differ by {difference:.2g}: it is no longer what its configuration "
            "and enable_compatibility_mode's own options lead to"
        )
    return wrong


def pack(named: dict[str, Tensor]) -> tuple[dict[str, Placement], dict[str, Tensor]]:
    """Return the placement of each tensor, and the flat tensors to write.

    A bridge of a model with joint attention has q, k and v as views of one weight; training one
    trains the others. So each piece of memory is written once, flat, under the name of the first
    tensor in it. Strides and offsets are kept, since the rounding of a matrix product depends on
    the layout of its factors.
    """
    sharing: dict[int, list[str]] = {}
    for name, tensor in named.items():
        sharing.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    placements, flat = {}, {}
    for names in sharing.values():
        first, tensors = names[0], {name: named[name].detach() for name in names}
        if len(names) == 1 and _end(tensors[first]) != tensors[first].numel():  # part of something
            tensors[first] = tensors[first].clone(memory_format=torch.contiguous_format)
        flat[first] = tensors[first].as_strided((max(map(_end, tensors.values())),), (1,), 0)
        for name, tensor in tensors.items():
            if tensor.dtype != flat[first].dtype:
                raise CheckpointError(
                    f"{name} shares memory with {first}, which is of another type: copy one of them"
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            layout = list(tensor.shape), list(tensor.stride())
            placements[name] = [first, int(tensor.storage_offset()), *layout, dtype]
    return {name: placements[name] for name in named}, flat


def _end(tensor: Tensor) -> int:
    """Return the number of entries of a tensor's memory, up to its last entry."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((size - 1) * step for size, step in steps)


def unpack(placements: dict[str, Placement], flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restore the tensors that were packed; raise CheckpointError if the flat ones do not fit."""
    flat = {name: tensor.clone().flatten() for name, tensor in flat.items()}
    firsts = {placement[0] for placement in placements.values()}
    wrong = [f"{name} is missing" for name in sorted(firsts - flat.keys())]
    wrong += [f"{name} is not known" for name in sorted(flat.keys() - firsts)]
    tensors = {}
    for name, (first, offset, shape, stride, dtype) in placements.items():
        if first not in flat:
            continue
        if str(flat[first].dtype) != f"torch.{dtype}":
            wrong.append(f"{first} is {flat[first].dtype}; expected {dtype}")
        reach = 1  # of the entries along the axes before, which no later axis may step within
        for step, size in sorted(zip(stride, shape, strict=False)):
            if size > 1 and step < reach:
                wrong.append(f"entries of {name} would lie in one place")
            reach = max(reach, step * size)
        try:
            tensors[name] = flat[first].as_strided(shape, stride, offset)
        except RuntimeError as error:
            wrong.append(f"{first} does not hold {name}: {error}")
    refuse(wrong, MISFIT)
    return tensors
