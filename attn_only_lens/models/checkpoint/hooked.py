"""Save and load HookedTransformers whose MLP neurons act as attention heads (neuron-heads).

`load` builds a model from the original model's configuration, and then fills in the saved tensors.
`save` and `load` raise an error if the tensors do not fit this configuration. The layers of a
converted model may differ in size: the configuration holds the sizes of layer 0, and the manifest
entry `layers` holds the sizes of every layer.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from typing_extensions import TypedDict

from attn_only_lens.errors import CheckpointError
from attn_only_lens.gates.gating import Gating
from attn_only_lens.heads import host_of
from attn_only_lens.models.expose import expose_as
from attn_only_lens.models.in_place import exposed_heads, hidden
from attn_only_lens.models.in_place.known_mlps import known_mlps
from attn_only_lens.models.source_folder import (
    TOKENIZER,
    WEIGHTS,
    load_tokenizer,
    parse_dtype,
    plain_config,
    reasons_against_config,
    refuse,
)
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer, LayerSizes
from attn_only_lens.models.two_blocks.build import (
    converted_skeleton,
    fill,
    give_activation,
    skeleton_misfits,
    stock_skeleton,
)
from attn_only_lens.models.two_blocks.config import by_layer, sizes_of
from attn_only_lens.models.two_blocks.known_modules import reasons_against
from attn_only_lens.storage import limit_size, read_tensors, write_tensors
from attn_only_lens.tl import HookedTransformer, require_hooked_transformer

MISFIT = "the weights do not fit their manifest"


class HookedFields(TypedDict):
    """The entries of the manifest (`gate.json`) that only a saved HookedTransformer has."""

    layout: Literal["two blocks a layer", "in place", "plain"]
    config: dict[str, Any]
    layers: list[LayerSizes]
    tied: dict[str, str]


def write_hooked(model: HookedTransformer, folder: Path, common: dict[str, Any]) -> dict[str, Any]:
    """Save a model in an empty folder, and return the model's manifest entries."""
    entries, tensors = _describe(model)
    write_tensors(folder / WEIGHTS, tensors)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder / TOKENIZER)
        load_tokenizer(folder)
    return common | entries


def read_hooked(folder: Path, manifest: dict[str, Any]) -> Any:
    """Load the model that a manifest describes; raise CheckpointError if the files do not match."""
    tensors, _ = read_tensors(folder / WEIGHTS)
    with limit_size(tensors):
        model = _rebuilt(manifest, tensors)
    if manifest["padding_side"] is not None:
        model.tokenizer = load_tokenizer(folder)
    return model


def _describe(model: HookedTransformer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a model's manifest entries and its tensors, with one tensor for tied parameters."""
    reasons = []
    if isinstance(model, AttentionOnlyTransformer):
        layout, cfg, gating = "two blocks a layer", model.cfg.layer_cfg(0), model.cfg.gating
        sizes = model.cfg.layer_sizes
    else:
        layout, cfg, gating = "in place", model.cfg, exposed_heads(model)[0].gating
        sizes = (sizes_of(cfg),) * cfg.n_layers
        with hidden(model):
            # Attached hooks are allowed but not saved, just as a state dict does not save hooks.
            reasons = reasons_against(model, silu=gating.silu)
    if gating.silu is not None and any(
        neuron.module.act_fn != gating.silu for neuron in host_of(model).neurons
    ):
        reasons.append(
            f"its activation is custom code, but a loaded model would use {gating.silu!r}: set "
            "act_fn of every MLP of the source to this, and convert or expose the source again"
        )
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    entries: dict[str, Any] = {
        "layout": layout,
        "config": plain_config(cfg),
        "gate": gating.to_json(),
        "layers": [asdict(size) for size in sizes],
        "tied": {
            name: first[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if first[id(parameter)] != name
        },
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
    }
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = {name: tensor.detach() for name, tensor in named}
    reasons = reasons or skeleton_misfits(_skeleton(entries), tensors, entries["tied"])
    refuse(reasons, "this model cannot be rebuilt from its configuration, so it is not saved")
    return entries, tensors


def _rebuilt(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    model = _skeleton(manifest)
    tied, frozen = manifest["tied"], manifest["frozen"]
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wrong = skeleton_misfits(model, tensors, tied)
    wrong += [f"{name} is not a parameter" for name in {*tied, *tied.values(), *frozen} - names]
    wrong += [f"{name} is tied to a tied parameter" for name in tied.keys() & tied.values()]
    refuse(wrong, MISFIT)
    fill(model, tensors, tied, set(frozen))
    if manifest["layout"] == "in place":
        expose_again(model, manifest)
    return model.train(manifest["training"])


def expose_again(model: Any, manifest: dict[str, Any]) -> None:
    """Expose the neurons of a loaded model as heads, with the gates in its manifest."""
    problem = "its neuron-heads cannot be exposed again"
    try:
        gating = Gating.from_json(manifest["gate"])
        expose_as(model, known_mlps(model, problem, gating.silu), gating)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{problem}: {error}") from error


def _skeleton(manifest: dict[str, Any]) -> HookedTransformer:
    """Build the model that a manifest describes, without weights, on the meta device."""
    require_hooked_transformer()
    config = manifest["config"]
    refuse(reasons_against_config(config, "config"), "this is not a valid configuration")
    # Never run code from the hub, even if the manifest asks for it.
    chosen = {"dtype": parse_dtype(str(config.get("dtype"))), "trust_remote_code": False}
    source = stock_skeleton({"device": "cpu", **config, **chosen})
    gating = Gating.from_json(manifest["gate"])
    give_activation(source, gating)
    refuse(reasons_against(source, silu=gating.silu), "its configuration cannot be built")
    source_sizes = sizes_of(source.cfg)
    sizes = [LayerSizes(**layer) for layer in manifest["layers"]]
    first = [size.stock_fields for size in sizes[:1]]
    if (len(sizes), *first) != (source.cfg.n_layers, source_sizes.stock_fields):
        raise CheckpointError(
            f"its layer sizes are {by_layer(sizes)}; expected {source.cfg.n_layers} layers, with "
            f"{source_sizes} in layer 0"
        )
    if manifest["layout"] == "two blocks a layer":
        return converted_skeleton(source, gating, sizes)
    if set(sizes) != {source_sizes}:
        raise CheckpointError(f"its layers are {by_layer(sizes)}; expected {source_sizes} in all")
    return source
