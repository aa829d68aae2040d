"""Save TransformerBridges whose MLP neurons are exposed as attention heads (neuron-heads).

A bridge is saved as a Hugging Face folder where possible. A Hugging Face folder holds the wrapped
model's weights under transformers' names, so `from_pretrained` and `boot_transformers` can open it.
A Hugging Face folder cannot hold weights that TransformerLens has processed, models from
`boot_native`, or layer sizes that transformers does not support (`transformers_module.py`). Bridges
that such a folder cannot hold are saved in `bridge.safetensors`, under the bridge's tensor names.
Only `load` reads this file: it builds the model from its configuration, repeats the weight
processing, and then copies the saved tensors into the model.

`save` loads the saved files again, and compares the modules, hook points, tensors and configuration
of the loaded model with the original's. The two models' logits on a few tokens must be bitwise
equal. If anything differs, `save` raises an error.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformer_lens.model_bridge.sources.native import NativeModel
from transformers import PreTrainedModel
from typing_extensions import TypedDict

from attn_only_lens.arguments import with_article
from attn_only_lens.devices import keep_random_state
from attn_only_lens.engine.cached_generation import watch_cache
from attn_only_lens.engine.model_checks import find_hooks
from attn_only_lens.errors import CheckpointError
from attn_only_lens.models.checkpoint.hooked import MISFIT, expose_again
from attn_only_lens.models.hf_folder import no_bars, read_hf_folder
from attn_only_lens.models.in_place import exposed_heads
from attn_only_lens.models.source_folder import (
    CONFIG,
    WEIGHTS,
    checkpoint_errors,
    original_tokenizer,
    parse_dtype,
    plain_config,
    read_tokenizer,
    refuse,
)
from attn_only_lens.models.transformers_module import build_module, config_from
from attn_only_lens.models.two_blocks.build import tensor_misfits
from attn_only_lens.storage import (
    limit_size,
    out_of_range,
    read_json,
    read_tensors,
    require_few_layers,
    write_tensors,
)

BRIDGE_WEIGHTS = "bridge.safetensors"
_LOST = "this bridge could not be loaded again"
_CPU = torch.device("cpu")
_NATIVE = "TransformerLensNative"
_WRAPPED = "._original_component"
_DERIVED = ("device", "n_devices", "dtype", "_bridge_ref", "trust_remote_code")
_POS = 7  # the number of tokens in each of the two prompts whose logits are compared
# Allow only attention that transformers implements: other names could load code from the hub.
_Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]


class BridgeFields(TypedDict):
    """The entries of the manifest (`gate.json`) that only a saved TransformerBridge has.

    `other_mode` lists the modules whose training mode differs from the model's.
    """

    layout: Literal["in place", "plain"]
    weights: Literal["transformers", "bridge"]
    architecture: str
    attention: _Attention | None
    dtype: str
    compatible: bool
    processed: bool
    quiet: bool
    results: bool
    settings: dict[str, bool | str | None]
    other_mode: list[str]


def write_bridge(model: TransformerBridge, folder: Path, common: dict[str, Any]) -> dict[str, Any]:
    """Save a bridge in an empty folder, check the files, and return the manifest entries."""
    entries = common | _describe(model)
    if not (entries["processed"] or entries["architecture"] == _NATIVE):
        try:
            return _write_and_compare(model, folder, entries | {"weights": "transformers"})
        except CheckpointError:  # a Hugging Face folder cannot represent this model
            shutil.rmtree(folder)
            folder.mkdir()
    return _write_and_compare(model, folder, entries | {"weights": "bridge"})


def _write_and_compare(
    model: TransformerBridge, folder: Path, entries: dict[str, Any]
) -> dict[str, Any]:
    write = _write_transformers if entries["weights"] == "transformers" else _write_tensors
    with checkpoint_errors(_LOST), no_bars():
        write(model, folder)
        refuse(_differences(model, read_bridge(folder, entries)), _LOST)
    return entries


def read_bridge(folder: Path, manifest: dict[str, Any]) -> TransformerBridge:
    """Load the bridge that a manifest describes; raise CheckpointError if a file does not match."""
    name = manifest["settings"].get("model_name") or folder.name
    dtype, has_tokenizer = parse_dtype(manifest["dtype"]), manifest["padding_side"] is not None
    with keep_random_state(_CPU), _CPU, no_bars():
        if manifest["weights"] == "transformers":
            model = read_hf_folder(folder, str(name), dtype, _CPU, manifest["attention"])
            process_as_saved(model, manifest)
        else:
            tensors, _ = read_tensors(folder / BRIDGE_WEIGHTS)
            with limit_size(tensors):
                arguments = _from_config(folder, manifest, dtype, tensors)
                model = build_bridge_from_module(**arguments, dtype=dtype, model_name=name)
                watch_cache(model)
                process_as_saved(model, manifest)
            _fill(_named(model), tensors)
            model.tokenizer = read_tokenizer(folder) if has_tokenizer else None
    if has_tokenizer and model.tokenizer is None:
        raise CheckpointError(f"{folder} has no tokenizer, but the model was saved with one")
    _restore(model, manifest)
    return model


def process_as_saved(bridge: TransformerBridge, manifest: dict[str, Any]) -> None:
    """Apply the same TransformerLens weight processing to a loaded bridge as to the saved one."""
    if manifest["compatible"]:
        bridge.enable_compatibility_mode(
            disable_warnings=manifest["quiet"], no_processing=not manifest["processed"]
        )
    elif manifest["processed"]:
        bridge.process_weights()


def _describe(model: TransformerBridge) -> dict[str, Any]:
    """Return a bridge's manifest entries except `weights`; raise an error if it cannot be saved."""
    reasons, wrapped = list[str](), model.original_model
    if model.cfg.d_vocab < 1:
        reasons.append("it has no vocabulary (is its input an image?), but is tested on tokens")
    config, kind, attention = getattr(wrapped, "config", None), type(wrapped).__name__, None
    if model.cfg.architecture != _NATIVE:
        attention = getattr(config, "_attn_implementation", None)
        if getattr(transformers, kind, None) is not type(wrapped):
            reasons.append(f"it wraps {with_article(kind)}, which is not a class of transformers")
        if not isinstance(config, transformers.PretrainedConfig):
            reasons.append(f"the {kind} that it wraps has no transformers configuration")
        elif attention not in get_args(_Attention):
            expected = ", ".join(get_args(_Attention))
            reasons.append(f"it uses {attention!r} attention; expected one of {expected}")
    refuse(reasons, _LOST)
    heads = exposed_heads(model)[0]
    return {
        "layout": "in place",
        "architecture": model.cfg.architecture,
        "attention": attention,
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "compatible": model.compatibility_mode,
        "processed": model._weights_processed,
        "quiet": bool(getattr(model.blocks[0], "disable_warnings", False)),
        "gate": heads.gating.to_json(),
        "results": heads.results,
        "settings": {
            key: value
            for key, value in _settings(model).items()
            if value is None or isinstance(value, bool | str)
        },
        "frozen": [name for name, tensor in _named(model).items() if not tensor.requires_grad],
        "other_mode": [name for name, m in _modules(model) if m.training != model.training],
    }


def _write_transformers(model: TransformerBridge, folder: Path) -> None:
    """Save the wrapped transformers model so that its class can load it with `from_pretrained`."""
    wrapped: Any = model.original_model
    config = copy.deepcopy(wrapped.config)
    config.output_attentions = False  # TransformerLens sets this flag to True
    with torch.device("meta"):
        module = build_module(type(wrapped), config)
    named = {name.replace(_WRAPPED, ""): tensor for name, tensor in wrapped.state_dict().items()}
    module.load_state_dict({name: named[name] for name in module.state_dict()}, assign=True)
    module.tie_weights()
    module.config.dtype = next(model.parameters()).dtype
    if wrapped.can_generate():
        module.generation_config = copy.deepcopy(wrapped.generation_config)
    module.save_pretrained(folder, max_shard_size=2**60)  # one file
    # Copy the mode, since transformers lets only the owner read the weights file.
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)
    if model.tokenizer is not None:
        original_tokenizer(model.tokenizer).save_pretrained(folder)


def _write_tensors(model: TransformerBridge, folder: Path) -> None:
    """Save a bridge's tensors by name, and the configuration with which `load` builds it."""
    wrapped: Any = model.original_model
    config = _settings(model)
    if model.cfg.architecture != _NATIVE:
        config = json.loads(wrapped.config.to_json_string(use_diff=False))
        config["architectures"] = [type(wrapped).__name__]
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # Clone the tensors, since safetensors refuses tensors that share memory.
    tensors = {name: tensor.detach().clone() for name, tensor in _named(model).items()}
    write_tensors(folder / BRIDGE_WEIGHTS, tensors)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)


def _from_config(
    folder: Path, manifest: dict[str, Any], dtype: torch.dtype, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Return arguments for `build_bridge_from_module`, with a model that has no weights yet."""
    config, architecture = read_json(folder / CONFIG), manifest["architecture"]
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{folder / CONFIG} is not a model configuration: got {type(config).__name__}"
        )
    refuse(list(out_of_range(config, CONFIG)), "this is not a valid configuration")
    require_few_layers(config, tensors)
    if architecture == _NATIVE:
        chosen = {"dtype": dtype, "device": "cpu", "n_devices": 1, "seed": None}
        cfg = TransformerBridgeConfig.from_dict(config | chosen)
        model: Any = NativeModel(cfg).to(dtype=dtype)
        # Set the seed after building, because building with a seed resets the random generators.
        cfg.seed = config.get("seed")
        return {"model": model, "architecture": architecture, "tl_config": cfg}
    name = next(iter(config.get("architectures") or ()), None)
    kind: Any = getattr(transformers, str(name), None)
    if not isinstance(kind, type) or not issubclass(kind, PreTrainedModel):
        raise ValueError(f"transformers has no PreTrainedModel named {name!r}")
    config_class: Any = kind.config_class
    hf_config = config_from(config_class, config)
    # Ignore the attention and expert code that config.json names: it could come from the hub.
    hf_config._attn_implementation = manifest["attention"]
    hf_config._experts_implementation = "eager"
    model = build_module(kind, hf_config)
    return {"model": model.to(dtype), "architecture": architecture, "hf_config": model.config}


@torch.no_grad()
def _fill(named: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copy values into tensors, without separating tensors that share memory."""
    refuse(tensor_misfits(named, values), MISFIT)
    for name, tensor in named.items():
        if tensor.dtype == values[name].dtype:
            tensor.copy_(values[name])
    for name, tensor in named.items():
        if tensor.dtype != values[name].dtype or not torch.equal(tensor, values[name]):
            tensor.data = values[name]  # also updates the other modules that share the tensor


def _restore(model: TransformerBridge, manifest: dict[str, Any]) -> None:
    """Restore a saved bridge's options, neuron-heads, frozen parameters and training modes."""
    current = _settings(model)
    for key, value in manifest["settings"].items():
        if current.get(key) != value:
            setattr(model.cfg, key, value)
    if manifest["layout"] == "in place":
        expose_again(model, manifest)
    for heads in exposed_heads(model):
        heads.results = manifest["results"]
    named, modules = _named(model), dict(_modules(model))
    frozen, other_mode = set(manifest["frozen"]), set(manifest["other_mode"])
    unknown = [f"{name} is not known" for name in sorted(frozen - named.keys())]
    unknown += [f"a module {name} does not exist" for name in sorted(other_mode - modules.keys())]
    refuse(unknown, MISFIT)
    for name, tensor in named.items():
        tensor.requires_grad_(name not in frozen)
    for name, module in modules.items():
        module.training = manifest["training"] != (name in other_mode)


def _settings(model: TransformerBridge) -> dict[str, Any]:
    """Return the entries of a bridge's configuration that can be written as JSON."""
    settings = {}
    for key, value in plain_config(model.cfg).items():
        try:
            settings[key] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue  # `load` rebuilds this entry from the wrapped model's configuration
    return {key: value for key, value in settings.items() if key not in _DERIVED}


def _named(model: Any) -> dict[str, Tensor]:
    """Return all modules' parameters, buffers and processed weights by name, without duplicates."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for path, module in _modules(model):
        # transformer-lens 3.9 stores some processed weights as plain attributes.
        processed = {k: x for k, x in vars(module).items() if k.startswith("_processed_")}
        for name, tensor in (module._parameters | module._buffers | processed).items():
            if isinstance(tensor, Tensor):
                tensors.setdefault(id(tensor), (f"{path}.{name}", tensor))
    return dict(tensors.values())


def _modules(model: Any) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of the bridge, then those that only the wrapped model has."""
    modules = dict(model.named_modules())
    known = {id(module) for module in modules.values()}
    wrapped = model.original_model.named_modules(prefix="original_model")
    return [*modules.items(), *((name, m) for name, m in wrapped if id(m) not in known)]


@torch.no_grad()
def _differences(model: Any, twin: Any) -> list[str]:
    """List the differences between a model and `twin`, its copy loaded from the saved files."""
    wrong = []
    for what, read in (
        ("modules", lambda bridge: {name: type(module) for name, module in _modules(bridge)}),
        ("hook points", lambda bridge: dict.fromkeys(bridge.hook_dict, True)),
        ("settings", _settings),
    ):
        values, twin_values = read(model), read(twin)
        keys = sorted(values.keys() | twin_values)
        names = [key for key in keys if values.get(key) != twin_values.get(key)]
        wrong += [f"its {what} {', '.join(names[:5])} would differ"] * bool(names)
    attached, rebuilt = (find_hooks(bridge) for bridge in (model, twin))
    if attached != rebuilt:
        hooks = rebuilt.placeholders + rebuilt.internal
        wrong.append(f"TransformerLens' hooks would be on {hooks}")
    tensors, twin_tensors = _named(model), _named(twin)
    wrong += [f"{name} is not known" for name in sorted(tensors.keys() - twin_tensors)]
    wrong += [f"{name} is missing" for name in sorted(twin_tensors.keys() - tensors)]
    wrong += [
        f"{name} would have other values"
        for name in tensors.keys() & twin_tensors
        if not torch.equal(tensors[name].cpu(), twin_tensors[name])
        or tensors[name].dtype != twin_tensors[name].dtype
    ]
    if _special_tokens(model.tokenizer) != _special_tokens(twin.tokenizer):
        wrong.append("its tokenizer would begin, end or pad texts differently")
    return wrong or _different_logits(model, twin)


def _special_tokens(tokenizer: Any) -> list[Any]:
    if tokenizer is None:
        return []
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return [tokenizer.encode("a"), *(getattr(tokenizer, name) for name in names)]


def _different_logits(model: Any, twin: Any) -> list[str]:
    pos, device = min(_POS, model.cfg.n_ctx), next(model.parameters()).device
    tokens = (torch.arange(2 * pos, device=device) % model.cfg.d_vocab).reshape(2, pos)
    logits = []
    for bridge in (model, twin.to(device, print_details=False)):
        with keep_random_state(device):  # in training mode, dropout draws random numbers
            logits.append(bridge(tokens))
    if torch.equal(*logits):
        return []
    difference = (logits[0] - logits[1]).abs().max().item()
    return [
        "rebuilt from its configuration and the enable_compatibility_mode options, it would give "
        f"logits that differ from the original's by {difference:.2g}"
    ]
