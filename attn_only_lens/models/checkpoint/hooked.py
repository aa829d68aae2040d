"""HookedTransformers, converted to two blocks a layer or with neuron-heads in place.

Both are built from the configuration of the source, and then given their tensors
(`models/two_blocks/build.py`). What does not fit the skeleton is refused, when it is saved as when
it is loaded. Layers of a converted model may differ in size: the configuration is that of layer 0,
and the sizes of all stand beside it.
"""

from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from attn_only_lens.errors import CheckpointError, UnsupportedModelError
from attn_only_lens.heads import Gating
from attn_only_lens.models.checkpoint.entries import Parts, plain_config
from attn_only_lens.models.expose import expose_as
from attn_only_lens.models.in_place import exposed_heads, hidden
from attn_only_lens.models.in_place.known_mlps import known_mlps
from attn_only_lens.models.source_folder import dtype_named, reasons_against_config
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer, LayerSizes
from attn_only_lens.models.two_blocks.build import converted_skeleton, fill, misfits, stock_skeleton
from attn_only_lens.models.two_blocks.config import by_layer, sizes_of
from attn_only_lens.models.two_blocks.convertible import reasons_against
from attn_only_lens.tl import HookedTransformer, require_hooked_transformer

__all__ = ["in_place_parts", "rebuilt_in_place", "rebuilt_two_blocks", "two_blocks_parts"]

_MORE = "this model is more than its configuration leads to, and could not be loaded"


def two_blocks_parts(model: AttentionOnlyTransformer) -> Parts:
    """A converted model as parts.

    Raises:
        CheckpointError: `rebuilt_two_blocks` would not build it.
    """
    config, gate = plain_config(model.cfg.layer_cfg(0)), model.cfg.gating.to_json()
    layers = [asdict(each) for each in model.cfg.layer_sizes]
    return _parts(model, _converted(config, gate, layers), config, gate, {"layers": layers})


def in_place_parts(model: HookedTransformer) -> Parts:
    """A HookedTransformer with neuron-heads in place as parts.

    Raises:
        CheckpointError: `rebuilt_in_place` would not build it.
    """
    config, gate = plain_config(model.cfg), exposed_heads(model)[0].gating.to_json()
    with hidden(model):
        reasons = reasons_against(model)  # hooks are not saved, as in a state dict
    if reasons:
        raise CheckpointError(f"{_MORE}: {'; '.join(reasons)}")
    return _parts(model, _stock(config), config, gate, {})


def rebuilt_two_blocks(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The converted model of a manifest.

    Raises:
        CheckpointError: the configuration cannot be built, or the tensors do not fit it.
    """
    model = _converted(manifest["config"], manifest["gate"], manifest["layers"])
    _fill(model, tensors, manifest)
    return model.train(manifest["training"])


def rebuilt_in_place(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The HookedTransformer of a manifest, with neuron-heads in place.

    Raises:
        CheckpointError: the configuration cannot be built, or the tensors do not fit it.
    """
    model = _stock(manifest["config"])
    _fill(model, tensors, manifest)
    try:
        known = known_mlps(model, "its neuron-heads cannot be exposed again")
        expose_as(model, known, Gating.from_json(manifest["gate"]))
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"its neuron-heads cannot be exposed again: {error}") from error
    return model.train(manifest["training"])


def _parts(
    model: HookedTransformer,
    skeleton: nn.Module,
    config: dict[str, Any],
    gate: dict[str, Any],
    more: dict[str, Any],
) -> Parts:
    # Parameters and buffers by name, what is tied under its first name only.
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = {name: tensor.detach() for name, tensor in named}
    tied = _ties(model)
    wrong = misfits(skeleton, tensors, tied)
    if wrong:
        raise CheckpointError(f"{_MORE}: {'; '.join(wrong)}")
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    more = {**more, "tied": tied, "frozen": frozen}
    return Parts(config, gate, tensors, config["model_name"], more)


def _ties(model: nn.Module) -> dict[str, str]:
    """For every further name of a tied parameter, its first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }


def _converted(
    config: dict[str, Any], gate: dict[str, Any], layers: list[dict[str, Any]]
) -> AttentionOnlyTransformer:
    """The converted model without numbers."""
    source = _stock(config)
    try:
        sizes = [LayerSizes(**each) for each in layers]
        if (len(sizes), *sizes[:1]) != (source.cfg.n_layers, sizes_of(source.cfg)):
            raise ValueError(
                f"its layers are {by_layer(sizes)}; expected {source.cfg.n_layers} layers, the "
                f"first {sizes_of(source.cfg)}"
            )
        return converted_skeleton(source, Gating.from_json(gate), sizes)
    except (LookupError, TypeError, ValueError) as error:
        raise _unbuildable(error) from error


def _stock(config: dict[str, Any]) -> HookedTransformer:
    """Its source without numbers."""
    require_hooked_transformer()
    dtype = dtype_named(str(config.get("dtype")))
    if wrong := reasons_against_config(config, "config"):
        raise CheckpointError(f"this is no configuration: {'; '.join(wrong[:5])}")
    # Code from a hub is not run whatever a file says, and a file need not say otherwise.
    fields = {"device": "cpu", **config, "dtype": dtype, "trust_remote_code": False}
    try:
        source = stock_skeleton(fields)
        reasons = reasons_against(source)
        if reasons:
            raise UnsupportedModelError(reasons)
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise _unbuildable(error) from error
    return source


def _unbuildable(error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the configuration cannot be built by this version of TransformerLens: {error}"
    )


def _fill(model: nn.Module, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
    """Give the skeleton its numbers."""
    tied, frozen = manifest["tied"], manifest["frozen"]
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wrong = misfits(model, tensors, tied)
    wrong += [f"{name} is no parameter" for name in {*tied, *tied.values(), *frozen} - names]
    wrong += [f"{name} is tied in a ring" for name in tied.keys() & tied.values()]
    if wrong:
        raise CheckpointError(f"the weights do not fit their manifest: {'; '.join(wrong[:5])}")
    fill(model, tensors, tied, set(frozen))
