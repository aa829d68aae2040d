"""Neuron-heads in place: the model stays what it is, and its neurons can be seen as heads."""

from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import Gating, logit_tolerance
from attn_only_lens.heads.pass_state import Passing
from attn_only_lens.models.calibrate import Calibration
from attn_only_lens.models.in_place import (
    BilinearInPlace,
    InPlace,
    exposed_heads,
    hide,
    show,
)
from attn_only_lens.models.in_place.known_mlps import (
    KnownMLP,
    UnknownMLPError,
    evaluation_without_hooks,
    known_mlps,
    non_finite_weights,
    run_mlp,
)
from attn_only_lens.models.requested_gates import BilinearRequest, choose_gating
from attn_only_lens.numerics import full_precision, normal_numbers
from attn_only_lens.tl import HookedTransformer

__all__ = ["ExposedNeurons", "expose_as", "expose_neuron_heads"]

_PROBLEM = "the neuron-heads of this model cannot be exposed"


class ExposedNeurons:
    """What `expose_neuron_heads` has done to a model, and the way back.

    As a context manager it gives the model, and at the end undoes what the call has done: nothing,
    where the neuron-heads were exposed before it.

    Attributes:
        model: the model.

    Example:
        >>> from attn_only_lens import ExposedNeurons, expose_neuron_heads, pretrained
        >>> model = pretrained.modular_addition()
        >>> exposed = expose_neuron_heads(model)
        >>> isinstance(exposed, ExposedNeurons), "blocks.0.mlp.hook_neuron_act" in model.hook_dict
        (True, True)
        >>> exposed.undo()
        >>> "blocks.0.mlp.hook_neuron_act" in model.hook_dict
        False
    """

    def __init__(self, model: Any, *, first: bool) -> None:
        self.model = model
        self._first = first

    def undo(self) -> None:
        """Make the model what it was: its class, its hook points, its registries.

        Hooks on the hook points that go, go with them; all others stay. To undo twice is to undo.
        """
        hide(self.model)

    def __enter__(self) -> Any:
        return self.model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._first:
            self.undo()


def expose_neuron_heads(
    model: HookedTransformer | TransformerBridge,
    *,
    gate: str = "exact",
    heads_per_neuron: int | None = None,
    tolerance: float | None = None,
    calibration: Calibration | None = None,
) -> ExposedNeurons:
    """See the neurons of a model as attention heads, and leave the model as it is.

    Where `convert` builds a model with blocks of neuron-heads, this adds hook points to the MLPs of
    the model itself, in the shapes of heads:

        q        blocks.{l}.mlp.hook_neuron_query     attn_scores  blocks.{l}.mlp.hook_neuron_logits
        k        blocks.{l}.mlp.hook_neuron_key       pattern      blocks.{l}.mlp.hook_neuron_probs
        v        blocks.{l}.mlp.hook_neuron_value     z            blocks.{l}.mlp.hook_neuron_act
                                                      result       blocks.{l}.mlp.hook_neuron_write

    `HeadName.hook` gives these names. They are not attention's, so that a filter for attention's
    hooks, `name.endswith("hook_z")`, selects on this model what it selects on any other.

    Every name, weight and tool of the model stays, and every hook that fired fires as before. With
    exact gates and none of the new hook points live, the model's own code runs alone: its logits
    are bitwise what they were. With hooks they agree to rounding.

    An edit at any hook point reaches those that follow: hook_pre, then q, k, v, attn_scores,
    pattern and z of the heads, then hook_post, then their result. As with attention heads, the
    result fires only after `model.set_use_attn_result(True)`.

    Each MLP is run on a small random batch before and after, and compared, so that no MLP is taken
    for what it is not.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", Theorems 2
    and 4; see `convert`.

    Args:
        model: a `HookedTransformer`, or a `TransformerBridge` before or after
            `enable_compatibility_mode`. It is changed in place.
        gate: "exact" or "bilinear", as in `convert`. With bilinear gates the approximation is the
            model's function until it is undone, also of an activation that is replaced meanwhile.
        heads_per_neuron: as in `convert`.
        tolerance: as in `convert`.
        calibration: as in `convert`.

    Returns:
        A context manager, and the way to undo it. On a model that is exposed like this already
        nothing changes.

    Raises:
        UnsupportedModelError: with every reason why not; the model is as it was.

    Example:
        >>> import torch
        >>> from attn_only_lens import expose_neuron_heads, neuron_pattern, pretrained
        >>> model = pretrained.modular_addition()
        >>> tokens = pretrained.modular_addition_tokens()[:11]
        >>> with expose_neuron_heads(model):
        ...     _, cache = model.run_with_cache(tokens)
        ...     neuron_pattern(cache, "L0N7").shape
        torch.Size([11, 3, 2])
    """
    wanted = BilinearRequest(heads_per_neuron, tolerance, calibration)
    known = known_mlps(model, _PROBLEM)
    if not exposed_heads(model) and (reasons := non_finite_weights(model)):
        raise UnsupportedModelError(reasons, _PROBLEM)
    return expose_as(model, known, _gating(known, gate, wanted))


def expose_as(model: Any, known: list[KnownMLP], gating: Gating) -> ExposedNeurons:
    """Expose the neuron-heads of MLPs that are known, with gates that are settled.

    Raises:
        UnsupportedModelError: the gates are not for these MLPs, or they are exposed otherwise
            already, or are not what they seemed.
    """
    ranged = gating.kind == "bilinear" and known[0].points.pre_linear is not None
    if (None if gating.ranges is None else len(gating.ranges)) != (len(known) if ranged else None):
        expected = "a range for each layer" if ranged else "no ranges"
        raise UnsupportedModelError([f"got {gating}; expected {expected}"], _PROBLEM)
    try:
        for layer, each in enumerate(known):
            gating.gate(each.act_fn, layer)
    except ValueError as error:
        raise UnsupportedModelError([str(error)], _PROBLEM) from error
    standing = exposed_heads(model)
    if standing:
        if gating != standing[0].gating:
            raise UnsupportedModelError(
                [f"they are exposed already, with {standing[0].gating}: undo() that first"],
                _PROBLEM,
            )
        return ExposedNeurons(model, first=False)
    with evaluation_without_hooks(getattr(block, "mlp", None) for block in model.blocks):
        kind = InPlace if gating.kind == "exact" else BilinearInPlace
        passing = Passing()
        heads = [
            kind(each.mlp, each.points, model.cfg, each.act_fn, layer, gating, passing)
            for layer, each in enumerate(known)
        ]
        _show_checked(model, heads)
    return ExposedNeurons(model, first=True)


def _gating(known: list[KnownMLP], gate: str, wanted: BilinearRequest) -> Gating:
    cfg = SimpleNamespace(
        act_fn=known[0].act_fn,
        gated_mlp=known[0].points.pre_linear is not None,
        dtype=known[0].mlp.W_out.dtype,
        n_layers=len(known),
    )
    gating, reasons = choose_gating(SimpleNamespace(cfg=cfg), gate, wanted)
    if gating is None:
        raise UnsupportedModelError(reasons, _PROBLEM)
    return gating


@full_precision()
@torch.no_grad()
def _show_checked(model: Any, heads: list[InPlace]) -> None:
    """Show the heads, and hold every MLP against itself: as it was, as it is, with every hook live.

    Raises:
        UnsupportedModelError: one differs; the neuron-heads are taken away again.
    """
    reasons = []
    try:
        inputs = [
            normal_numbers((2, 7, each.mlp.W_out.shape[1]), 2).to(each.mlp.W_out) for each in heads
        ]
        before = [
            run_mlp(each.mlp, each.mlp_points, x) for each, x in zip(heads, inputs, strict=True)
        ]
        show(model, heads)
        for each, x, expected in zip(heads, inputs, before, strict=True):
            try:
                reasons += [f"layer {each.layer}: {why}" for why in _differences(each, x, expected)]
            except UnknownMLPError as error:
                reasons.append(f"layer {each.layer}: {error}")
        if reasons:
            raise UnsupportedModelError(reasons, _PROBLEM)
    except BaseException:  # an interruption, too: no model is left half exposed
        hide(model)
        raise


def _differences(each: InPlace, x: Tensor, expected: Tensor) -> list[str]:
    """Where the output of an MLP for x is not `expected`, nor the sum of what its heads write."""
    results: list[Tensor] = []
    silent = run_mlp(each.mlp, each.mlp_points, x)
    handles = [p.register_forward_hook(lambda *_: None) for p in each.points.values()]
    handles.append(each.hook_result.register_forward_hook(lambda m, i, out: results.append(out)))
    each.results = True
    live = run_mlp(each.mlp, each.mlp_points, x)
    each.results = False
    for handle in handles:
        handle.remove()
    largest = expected.abs().max().item()
    moved = (live - silent).abs().max().item()
    beside = (live - results[0].sum(dim=-2) - each.b_O).abs().max().item()
    reasons = []
    if each.gating.kind == "exact" and not torch.equal(silent, expected):
        reasons.append("its MLP does not compute the same for the same input twice")
    for what, by in (("activations are not those", moved), ("output is not the sum", beside)):
        if not by <= logit_tolerance([each], x.dtype) * largest:
            reasons.append(
                f"its MLP's {what} of its neuron-heads; they differ by {by:.2g} where the largest "
                f"entry is {largest:.2g}"
            )
    return reasons
