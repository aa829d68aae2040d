"""HookedTransformers, converted to two blocks a layer or with neuron-heads in place.

Both are built from the configuration of the source: on the meta device, so that nothing is computed
and no random number is drawn; then the skeleton is given its tensors. What does not fit the
skeleton is refused, when it is saved as when it is loaded.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attn_only_lens.errors import CheckpointError, UnsupportedModelError
from attn_only_lens.expose import expose_as
from attn_only_lens.heads import Gating
from attn_only_lens.in_place import exposed_heads, hidden
from attn_only_lens.mlps import known_mlps
from attn_only_lens.saved.parts import Parts, plain_config
from attn_only_lens.source_folder import dtype_named, quiet
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig
from attn_only_lens.two_blocks import AttentionOnlyTransformer, convert_as
from attn_only_lens.two_blocks.support import hook_reasons, reasons_against

__all__ = ["in_place_parts", "rebuilt_in_place", "rebuilt_two_blocks", "two_blocks_parts"]

_MORE = "this model is more than its configuration leads to, and could not be loaded"


def two_blocks_parts(model: AttentionOnlyTransformer) -> Parts:
    """A converted model as parts.

    Raises:
        CheckpointError: `rebuilt_two_blocks` would not build it.
    """
    config, gate = plain_config(model.source_cfg), model.cfg.gating.to_json()
    return _parts(model, _converted(config, gate), config, gate)


def in_place_parts(model: HookedTransformer) -> Parts:
    """A HookedTransformer with neuron-heads in place as parts.

    Raises:
        CheckpointError: `rebuilt_in_place` would not build it.
    """
    config, gate = plain_config(model.cfg), exposed_heads(model)[0].gating.to_json()
    with hidden(model):
        harmless = hook_reasons(model)  # hooks are not saved, as in a state dict
        reasons = [reason for reason in reasons_against(model) if reason not in harmless]
    if reasons:
        raise CheckpointError(f"{_MORE}: {'; '.join(reasons)}")
    return _parts(model, _stock(config), config, gate)


def rebuilt_two_blocks(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The converted model of a manifest.

    Raises:
        CheckpointError: the configuration cannot be built, or the tensors do not fit it.
    """
    model = _converted(manifest["config"], manifest["gate"])
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
    model: HookedTransformer, skeleton: nn.Module, config: dict[str, Any], gate: dict[str, Any]
) -> Parts:
    # Parameters and buffers by name, what is tied under its first name only.
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = {name: tensor.detach() for name, tensor in named}
    tied = _ties(model)
    wrong = _misfits(skeleton, tensors, tied)
    if wrong:
        raise CheckpointError(f"{_MORE}: {'; '.join(wrong)}")
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    more = {"tied": tied, "frozen": frozen}
    return Parts(config, gate, tensors, config["model_name"], more)


def _ties(model: nn.Module) -> dict[str, str]:
    """For every further name of a tied parameter, its first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }


def _converted(config: dict[str, Any], gate: dict[str, Any]) -> AttentionOnlyTransformer:
    """The converted model without numbers: all of its tensors are on the meta device."""
    source = _stock(config)
    try:
        return convert_as(source, Gating.from_json(gate))
    except (LookupError, TypeError, ValueError) as error:
        raise _unbuildable(error) from error


def _stock(config: dict[str, Any]) -> HookedTransformer:
    """Its source without numbers."""
    # Building must not touch the caller's random state (a seed would), nor ask a hub for a
    # tokenizer by its name; both fields are put back afterwards.
    held_back = {"seed": None, "tokenizer_name": None, "init_weights": False}
    try:
        dtype = {"dtype": dtype_named(config["dtype"])}
        cfg = HookedTransformerConfig(**config | dtype | held_back | {"device": "cpu"})
        with quiet(), torch.device("meta"):
            source = HookedTransformer(cfg, move_to_device=False)
        vars(cfg).update(config | dtype)
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
    tied = manifest["tied"]
    wrong = _misfits(model, tensors, tied)
    if wrong:
        raise CheckpointError(f"the weights do not fit their manifest: {'; '.join(wrong)}")
    frozen = set(manifest["frozen"])
    for name in dict(model.named_parameters(remove_duplicate=False)):
        module, leaf = _owner(model, name)
        if name not in tied:
            setattr(module, leaf, nn.Parameter(tensors[name], requires_grad=name not in frozen))
    for name, first in tied.items():
        module, leaf = _owner(model, name)
        setattr(module, leaf, model.get_parameter(first))
    # Buffers of any size: rotary tables grow with the longest prompt seen.
    for name in dict(model.named_buffers()):
        module, leaf = _owner(model, name)
        setattr(module, leaf, tensors[name])


def _misfits(skeleton: nn.Module, tensors: dict[str, Tensor], tied: dict[str, str]) -> list[str]:
    """Where tensors do not fit the model that a configuration leads to."""
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    buffers = {name for name, _ in skeleton.named_buffers()}
    expected = {name for name in parameters if name not in tied} | buffers
    wrong = [f"{name} is missing" for name in sorted(expected - set(tensors))]
    wrong += [f"{name} is not known" for name in sorted(set(tensors) - expected)]
    return wrong + [
        f"{name} has shape {tuple(tensors[name].shape)}; expected {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in tensors and tensors[name].shape != parameter.shape
    ]


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
