"""Expose neuron-heads in place: the model stays what it is, and its neurons are seen as heads."""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.devices import normal_numbers
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.gates import GeneralizedSiLU
from attn_only_lens.heads import EXACT, Gating, logit_tolerance
from attn_only_lens.heads.pass_state import PassState
from attn_only_lens.models.gate_option import GateOption, gating_for
from attn_only_lens.models.in_place import (
    BilinearInPlace,
    InPlace,
    copy_model,
    exposed_heads,
    hide,
    reasons_against_copying,
    show,
)
from attn_only_lens.models.in_place.hook_points import UnknownMLPError
from attn_only_lens.models.in_place.known_mlps import (
    KnownMLP,
    evaluation_without_hooks,
    known_mlps,
    non_finite_weights,
    run_mlp,
)
from attn_only_lens.models.quantised import weight_reasons
from attn_only_lens.models.shared_weights import share_weights
from attn_only_lens.precision import full_precision
from attn_only_lens.tl import HookedTransformer

_PROBLEM = "the neuron-heads of this model cannot be exposed"


class ExposedNeurons:
    """A model with its neuron-heads exposed, and the way to undo that.

    As a context manager it gives the model, and at the end undoes what the call has done: nothing,
    if the neuron-heads were exposed before it.

    Attributes:
        model: the model; with `copy=True`, the copy.

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
        """Restore the model: its class, its hook points, its registries.

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
    gate: GateOption = "exact",
    copy: bool = False,
    copy_weights: bool = False,
) -> ExposedNeurons:
    """See the neurons of a model as attention heads, and leave the model as it is.

    While `convert` builds a model with blocks of neuron-heads, this adds hook points to the MLPs of
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
            `enable_compatibility_mode`. It is changed in place, unless copied.
        gate: "exact", `GeneralizedSiLU(...)` or `Bilinear(...)`, as in `convert`. With bilinear
            gates the approximation is the model's function until it is undone, also of an
            activation that is replaced meanwhile.
        copy: expose the neuron-heads of a second model, and leave `model` unchanged. It has
            modules, hook points and settings of its own.
        copy_weights: give that copy weights of its own. By default it shares them with `model`, so
            that it costs no memory; then training either trains both, and a later change of dtype
            or device of one parts them. If fold_ln is applied to `model`, a `HookedTransformer`,
            afterwards, a copy that shares its weights raises an error wherever it is used.

    Returns:
        A context manager, and the way to undo it; its `model` is the exposed model. On a model that
        is exposed like this already nothing changes.

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
        >>> twin = expose_neuron_heads(model, copy=True).model
        >>> "blocks.0.mlp.hook_neuron_act" in model.hook_dict, torch.equal(twin.W_E, model.W_E)
        (False, True)
    """
    silu = gate if isinstance(gate, GeneralizedSiLU) else None
    if copy_weights and not copy:
        raise UnsupportedModelError(["got copy_weights=True; give copy=True with it"], _PROBLEM)
    if isinstance(model, TransformerBridge) and (why := weight_reasons(model.original_model)):
        raise UnsupportedModelError(why, _PROBLEM)
    if isinstance(model, HookedTransformer) and model.cfg.n_devices > 1:
        why = [
            f"it is spread over {model.cfg.n_devices} devices; load it on one (n_devices=1), or as "
            "a TransformerBridge with a device_map"
        ]
        raise UnsupportedModelError(why, _PROBLEM)
    if copy:
        if reasons := reasons_against_copying(model):
            raise UnsupportedModelError([*reasons, *_mlp_reasons(model, silu)], _PROBLEM)
        with torch.inference_mode(False):  # weights of inference mode could never be trained
            source, model = model, copy_model(model, copy_weights=copy_weights)
        if isinstance(model, HookedTransformer) and not copy_weights:
            share_weights(source, model)
    known, gating = known_mlps(model, _PROBLEM, silu), EXACT
    reasons = [] if exposed_heads(model) else non_finite_weights(model)
    W_out: Any = known[0].mlp.W_out
    try:
        gating = gating_for(
            gate,
            act_fn=known[0].act_fn,
            gated=known[0].points.pre_linear is not None,
            dtype=W_out.dtype,
            n_layers=len(known),
        )
    except ValueError as error:
        reasons.append(str(error))
    if reasons:
        raise UnsupportedModelError(reasons, _PROBLEM)
    return expose_as(model, known, gating)


def expose_as(model: Any, known: list[KnownMLP], gating: Gating) -> ExposedNeurons:
    """Expose the neuron-heads of known MLPs with given gates.

    Raises:
        UnsupportedModelError: the gates are not for these MLPs, the heads are exposed already with
            other gates, or an MLP does not compute what it seemed to.
    """
    try:
        gated = known[0].points.pre_linear is not None
        gating.require_fit(known[0].act_fn, gated, len(known))
    except ValueError as error:
        raise UnsupportedModelError([str(error)], _PROBLEM) from error
    if heads := exposed_heads(model):
        if gating != heads[0].gating:
            raise UnsupportedModelError(
                [f"they are exposed already, with {heads[0].gating}: undo() that first"],
                _PROBLEM,
            )
        return ExposedNeurons(model, first=False)
    with evaluation_without_hooks(getattr(block, "mlp", None) for block in model.blocks):
        kind = InPlace if gating.kind == "exact" else BilinearInPlace
        state = PassState()
        _show_checked(
            model,
            [
                kind(each.mlp, each.points, model.cfg, each.act_fn, layer, gating, state)
                for layer, each in enumerate(known)
            ],
        )
    return ExposedNeurons(model, first=True)


def _mlp_reasons(model: Any, silu: GeneralizedSiLU | None) -> tuple[str, ...]:
    try:
        known_mlps(model, _PROBLEM, silu)
    except UnsupportedModelError as error:
        return error.reasons
    return ()


@full_precision()
@torch.no_grad()
def _show_checked(model: Any, heads: list[InPlace]) -> None:
    """Show the heads, and compare every MLP: before, after, and with every hook live.

    Raises:
        UnsupportedModelError: one differs; the neuron-heads are taken away again.
    """
    reasons = []
    try:
        inputs = [normal_numbers((2, 7, each.W_out.shape[1]), 2).to(each.W_out) for each in heads]
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


def _differences(heads: InPlace, x: Tensor, expected: Tensor) -> list[str]:
    """Compare the output of an MLP for x with `expected`, and with the sum of its heads."""
    results: list[Tensor] = []
    silent = run_mlp(heads.mlp, heads.mlp_points, x)
    handles = [p.register_forward_hook(lambda *_: None) for p in heads.points.values()]
    handles.append(heads.hook_result.register_forward_hook(lambda m, i, out: results.append(out)))
    heads.results = True
    live = run_mlp(heads.mlp, heads.mlp_points, x)
    heads.results = False
    for handle in handles:
        handle.remove()
    largest = expected.abs().max().item()
    reasons = []
    if heads.gating.kind == "exact" and not torch.equal(silent, expected):
        reasons.append("its MLP does not compute the same for the same input twice")
    for what, other in (
        ("activations are not those", silent),
        ("output is not the sum", results[0].sum(dim=-2) + heads.b_O),
    ):
        difference = (live - other).abs().max().item()
        if not difference <= logit_tolerance([heads], x.dtype) * largest:
            reasons.append(
                f"its MLP's {what} of its neuron-heads; they differ by {difference:.2g}, and the "
                f"largest entry is {largest:.2g}"
            )
    return reasons
