"""What a comparison asks of models and settings, before anything runs."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from attn_only_lens.errors import ComparisonError
from attn_only_lens.expansion import Provenance
from attn_only_lens.expose import expose_neuron_heads
from attn_only_lens.growth import Grown, identity
from attn_only_lens.heads import layout_of, neuron_heads
from attn_only_lens.patching.pairs import reasons_against
from attn_only_lens.patching.sites import all_heads, resolve
from attn_only_lens.plain import is_count

__all__ = ["exposed", "require", "require_source"]

_PROBLEM = "these cannot be compared"
_SAID = ("the original", "the grown model", "the null")


def require(given: Sequence[Any], provenance: object, **settings: Any) -> None:
    """Refuse settings and models that make no sense together.

    Args:
        given: the original, the grown one and, if there is one, the null; as `compare` has them.
        provenance: of the grown one.
        settings: by name.

    Raises:
        ComparisonError: with every reason.
    """
    reasons = []
    if not isinstance(provenance, Provenance):
        reasons.append(
            f"got provenance {type(provenance).__name__}; expected what `grow` returned for grown, "
            "or a model with provenance=grown.provenance"
        )
    for name in ("batch_size", "n_resamples", "n_nodes", "n_patched"):
        value, least = settings[name], 1 if name == "batch_size" else 0
        none = name == "n_patched" and value is None
        if not none and not is_count(value, least):
            reasons.append(f"got {name}={value!r}; expected {least} or more")
    for name in ("edge_mass", "confidence", "faithfulness"):
        value = settings[name]
        if not isinstance(value, int | float) or not 0 < value <= 1:
            reasons.append(f"got {name}={value!r}; expected more than 0, up to 1")
    if len(given) == 3 and isinstance(given[2], Grown) and isinstance(provenance, Provenance):
        other = given[2].provenance
        if (other.layers, other.axes) != (provenance.layers, provenance.axes):
            reasons.append("the null grew otherwise; expected the same growth, trained apart")
        elif other.source and provenance.source and other.source.differences(provenance.source):
            reasons.append("the null grew from another model; expected the same growth")
    models = [each.model if isinstance(each, Grown) else each for each in given]
    for said, model in zip(_SAID, models, strict=False):
        if not hasattr(model, "cfg"):
            reasons.append(f"{said}: got a {type(model).__name__}; expected a model")
    if torch.is_inference_mode_enabled():
        reasons.append("no gradient is taken in torch.inference_mode(); torch.no_grad() will do")
    if reasons:
        raise ComparisonError(reasons, _PROBLEM)
    first = models[0].cfg
    for said, model in zip(_SAID[1:], models[1:], strict=False):
        for size in ("d_vocab", "d_vocab_out"):
            mine, theirs = (getattr(cfg, size, None) for cfg in (first, model.cfg))
            if mine != theirs:
                reasons.append(f"{said} has {size} {theirs}; the original has {mine}")
    if reasons:
        raise ComparisonError(reasons, _PROBLEM)


def require_source(model: Any, provenance: Provenance) -> None:
    """Refuse a model that is not the one that grew, though it has its shape.

    Raises:
        ComparisonError: it is another, or the same after more training; or the provenance does not
            say which model grew.
    """
    here = identity(model)
    if provenance.source is None:
        reasons = ["the provenance is of weights, and does not say which model had them"]
    elif odd := provenance.source.differences(here):
        reasons = [
            f"the original is not the model that grew: {len(odd)} of its {len(here.marks)} tensors "
            f"are others, such as {odd[0]}; give the model as it was when it grew"
        ]
    else:
        return
    reasons.append(
        "to compare with this one all the same (trained on since, say), give provenance="
        "dataclasses.replace(provenance, source=attn_only_lens.growth.identity(model))"
    )
    raise ComparisonError(reasons, _PROBLEM)


def exposed(models: Sequence[Any], stack: ExitStack) -> None:
    """Expose neuron-heads where they are not, until the stack closes.

    Raises:
        ComparisonError: a model has hooks or drops activations; neurons of the models have
            different numbers of heads; the null is not of the grown model's shape.
        UnsupportedModelError: neuron-heads cannot be exposed.
    """
    for model in models:
        if layout_of(model) is None:
            stack.enter_context(expose_neuron_heads(model))
    reasons = [
        f"{said}: {reason}"
        for said, model in zip(_SAID, models, strict=False)
        for reason in reasons_against(model)
    ]
    heads = {each.heads_per_neuron for model in models for each in neuron_heads(model)}
    if len(heads) > 1:
        reasons.append(f"their neurons have {sorted(heads)} heads each; expected one number")
    grown, *null = [(*_sizes(each),) for each in models[1:]]
    if null and null[0] != grown:
        reasons.append(
            f"the null has layers of {null[0]} (kind, count), the grown model of {grown}; expected "
            "one shape"
        )
    if reasons:
        raise ComparisonError(reasons, _PROBLEM)


def _sizes(model: Any) -> list[tuple[str, int]]:
    sites = [(each.kind, len(each.names)) for each in resolve(model, all_heads())]
    return [*sites, ("coordinates", model.cfg.d_model)]
