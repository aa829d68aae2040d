"""Expose MLP neurons as attention heads in place, by adding hook points to the existing MLPs."""

import math
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.axes import Tokens
from attn_only_lens.devices import normal_numbers
from attn_only_lens.engine.model_checks import evaluation_without_hooks
from attn_only_lens.engine.model_weights import HALF
from attn_only_lens.errors import UnsupportedCallError, UnsupportedModelError
from attn_only_lens.gates import GeneralizedSiLU
from attn_only_lens.gates.gating import EXACT, Gating
from attn_only_lens.heads import logit_tolerance
from attn_only_lens.heads.feature_mlp import FeatureMLP
from attn_only_lens.heads.host import LATER_WRITES, NEURON_KINDS, PassState
from attn_only_lens.heads.names import count_kinds, head_counts
from attn_only_lens.models.gate_option import Bilinear, GateOption, gating_for
from attn_only_lens.models.in_place import (
    BilinearInPlace,
    InPlace,
    copy_model,
    exposed_heads,
    hide,
    reasons_against_copying,
    require_no_transcoders,
    show,
)
from attn_only_lens.models.in_place.known_mlps import (
    KnownMLP,
    known_mlps,
    non_finite_weights,
    run_mlp,
)
from attn_only_lens.models.in_place.mixtures import MixtureHeads, is_mixture
from attn_only_lens.models.in_place.mlp_hooks import FeatureHeads, UnknownMLPError
from attn_only_lens.models.shared_weights import share_weights
from attn_only_lens.models.transformers_module import weight_reasons
from attn_only_lens.models.verification import Verification
from attn_only_lens.models.verify import checked, tokens_to_check
from attn_only_lens.precision import full_precision
from attn_only_lens.tl import HookedTransformer

_PROBLEM = "the neuron-heads of this model cannot be exposed"


class ExposedNeurons:
    """A model whose neurons are exposed as attention heads (neuron-heads), until `undo` is called.

    Used in a `with` statement, this object returns the model. When the block ends, the neuron-heads
    are removed, unless they were exposed before this object was created.

    Attributes:
        model: the model with exposed neuron-heads; with `copy=True`, this is the copy.
        verification: what `check` measured; None without a check.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, load
        >>> from attn_only_lens.models import ExposedNeurons
        >>> model = load("modular-addition")
        >>> exposed = expose_neuron_heads(model)
        >>> isinstance(exposed, ExposedNeurons), "blocks.0.mlp.hook_neuron_act" in model.hook_dict
        (True, True)
        >>> exposed
        <ExposedNeurons of modular-addition-silu-1l: 512 neurons as heads (layers: 1)>
        >>> exposed.undo()
        >>> "blocks.0.mlp.hook_neuron_act" in model.hook_dict
        False
    """

    def __init__(self, model: Any, *, first: bool) -> None:
        self.model = model
        self.verification: Verification | None = None
        self._first = first

    def __repr__(self) -> str:
        n_layers, heads = len(exposed_heads(self.model)), "hidden"
        if n_layers:
            in_layers = head_counts(self.model)
            totals = {kind: sum(n.get(kind, 0) for n in in_layers) for kind in NEURON_KINDS}
            heads = f"{count_kinds(Counter(totals).elements())} as heads (layers: {n_layers})"
        return f"<ExposedNeurons of {self.model.cfg.model_name}: {heads}>"

    def undo(self) -> None:
        """Remove the neuron-heads, and restore the model's class and hook points.

        Hooks on neuron-heads are removed; all other hooks stay. Calling `undo` again does nothing.

        Raises:
            UnsupportedCallError: the model has transcoders; `transcoders.detach` restores it.
        """
        require_no_transcoders(self.model, "its neuron-heads cannot be hidden")
        hide(self.model)

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *error: object) -> None:
        if self._first:
            self.undo()


def expose_neuron_heads(
    model: HookedTransformer | TransformerBridge,
    *,
    gate: GateOption = "exact",
    copy: bool = False,
    copy_weights: bool = False,
    check: bool | str | Tokens = False,
) -> ExposedNeurons:
    """Expose the MLP neurons of a model as attention heads, without replacing the MLPs.

    Unlike `convert`, which builds a new model, this function adds hook points for the neurons'
    heads (neuron-heads) to the model's own MLPs:

        q        blocks.{l}.mlp.hook_neuron_query     attn_scores  blocks.{l}.mlp.hook_neuron_logits
        k        blocks.{l}.mlp.hook_neuron_key       pattern      blocks.{l}.mlp.hook_neuron_probs
        v        blocks.{l}.mlp.hook_neuron_value     z            blocks.{l}.mlp.hook_neuron_act
                                                      result       blocks.{l}.mlp.hook_neuron_write

    `HeadName.hook` returns these names. Name filters such as `name.endswith("hook_z")` still select
    only attention heads, because the new hook points have different names.

    The model's hook points keep their names, its weights and methods stay the same, and existing
    hooks fire as before. With exact gates, the logits stay bitwise the same, because only the
    model's own code runs. While the new hook points have hooks, the logits may change by rounding
    errors.

    An edit at a hook point affects all later ones. The order is hook_pre; the heads' q, k, v,
    attn_scores, pattern and z; hook_post; the heads' result. As with attention heads, the hook
    point `result` fires only after `model.set_use_attn_result(True)`.

    Each MLP is run on a random batch before and after exposing; the output must not change.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", Theorems 2
    and 4; see `convert`.

    Args:
        model: a `HookedTransformer`, or a `TransformerBridge` before or after
            `enable_compatibility_mode`. It is changed in place, unless copied.
        gate: "exact", `GeneralizedSiLU(...)` or `Bilinear(...)`, as in `convert`. With bilinear
            gates, the model computes the approximation until `undo`, even if the model's activation
            is replaced in the meantime.
        copy: expose the neuron-heads of a copy, with separate modules, hook points and settings,
            and leave `model` unchanged.
        copy_weights: copy the weights too. By default the copy shares them with `model` and costs
            no memory. Then training either model trains both, until the dtype or device of one
            model is changed, which ends the sharing. If fold_ln is later applied to a
            `HookedTransformer`, a copy that shares its weights raises an error wherever it is used.
        check: a text or tokens [batch, pos], on which the logits and the residual streams with and
            without neuron-heads are compared, or True for random tokens. The result has the report
            as `verification` (see `models.Verification`). By default nothing is compared.

    Returns:
        A context manager with `model`, the exposed model, `verification` and `undo`. If the
        neuron-heads are already exposed with the same gates, nothing changes.

    Raises:
        UnsupportedModelError: the neuron-heads cannot be exposed, and the error lists all reasons;
            or differences that `check` measured are larger than their bounds, and the error has the
            report. The model is unchanged.
        UnsupportedCallError: `check` is no input of the model.

    Example:
        >>> import torch
        >>> from attn_only_lens import expose_neuron_heads, load, neuron_pattern, pretrained
        >>> model = load("modular-addition")
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
    UnsupportedModelError.raise_if(_model_reasons(model, copy, copy_weights, silu), _PROBLEM)
    tokens, source = tokens_to_check(model, check), model
    if copy:
        with torch.inference_mode(False):  # weights created in inference mode cannot be trained
            model = copy_model(model, copy_weights=copy_weights)
        if isinstance(model, HookedTransformer) and not copy_weights:
            share_weights(source, model)
    mlps = known_mlps(model, _PROBLEM, silu)
    gating, reasons = EXACT, list[str]()
    if original := _original(mlps):
        first, dtype = original[0], next(original[0].mlp.parameters()).dtype
        gated = first.points.pre_linear is not None
        gating, reasons = gating_for(gate, first.act_fn, gated, dtype, len(mlps))
    if any(is_mixture(mlp.mlp) for mlp in mlps) and isinstance(gate, Bilinear):
        reasons.append("got bilinear gates for a mixture of experts; expected gate='exact'")
    if len(original) < len(mlps) and gate != "exact":
        reasons.append(f"got gate={gate!r} for a model with transcoders; expected 'exact'")
    if not exposed_heads(model):
        reasons = [*non_finite_weights(model), *reasons]
    UnsupportedModelError.raise_if(reasons, _PROBLEM)
    exposed = expose_as(model, mlps, gating)
    if tokens is not None:
        with ExitStack() as stack:
            stack.enter_context(exposed)  # an error undoes it
            exposed.verification = checked(source, model, tokens)
            stack.pop_all()
    return exposed


def _model_reasons(
    model: Any, copy: bool, copy_weights: bool, silu: GeneralizedSiLU | None
) -> list[str]:
    """Return error messages if a model cannot be exposed or copied, without checking its MLPs."""
    if copy_weights and not copy:
        return ["got copy_weights=True without copy=True; pass copy=True, too"]
    if isinstance(model, TransformerBridge) and (reasons := weight_reasons(model.original_model)):
        return reasons
    if isinstance(model, HookedTransformer) and model.cfg.n_devices > 1:
        return [
            f"it is spread over {model.cfg.n_devices} devices; load it on one device "
            "(n_devices=1), or as a TransformerBridge with a device_map"
        ]
    if copy and (reasons := reasons_against_copying(model)):
        with UnsupportedModelError.collected(reasons):
            known_mlps(model, _PROBLEM, silu)
        return reasons
    return []


def expose_as(model: Any, mlps: list[KnownMLP], gating: Gating) -> ExposedNeurons:
    """Expose a model's neurons as heads; raise an error if `gating` does not fit the MLPs."""
    try:
        for mlp in _original(mlps)[:1]:
            gating.require_fit(mlp.act_fn, mlp.points.pre_linear is not None, len(mlps))
    except ValueError as error:
        raise UnsupportedModelError([str(error)], _PROBLEM) from error
    if heads := exposed_heads(model):
        if gating != heads[0].gating:
            raise UnsupportedModelError(
                [f"they are already exposed, with {heads[0].gating}: call undo() first"], _PROBLEM
            )
        return ExposedNeurons(model, first=False)
    with evaluation_without_hooks(getattr(block, "mlp", None) for block in model.blocks):
        state = PassState()
        new_heads = [
            _heads_class(mlp, gating)(
                mlp.mlp, mlp.points, model.cfg, mlp.act_fn, layer, gating, state
            )
            for layer, mlp in enumerate(mlps)
        ]
        _show_checked(model, new_heads)
    return ExposedNeurons(model, first=True)


def _heads_class(mlp: KnownMLP, gating: Gating) -> type[InPlace]:
    if isinstance(mlp.mlp, FeatureMLP):
        return FeatureHeads
    if is_mixture(mlp.mlp):
        return MixtureHeads
    return InPlace if gating.kind == "exact" else BilinearInPlace


def _original(mlps: list[KnownMLP]) -> list[KnownMLP]:
    """Return the MLPs that no transcoder has replaced."""
    return [mlp for mlp in mlps if not isinstance(mlp.mlp, FeatureMLP)]


@full_precision()
@torch.no_grad()
def _show_checked(model: Any, heads: list[InPlace]) -> None:
    """Expose the heads, and check that no MLP's output changes, even if the heads have hooks."""
    try:
        inputs = [
            normal_numbers((2, 7, layer.W_out.shape[1]), 2).to(layer.W_out) for layer in heads
        ]
        runs = list(zip(heads, inputs, strict=True))
        before = [run_mlp(layer.mlp, layer.mlp_points, x) for layer, x in runs]
        show(model, heads)
        reasons, measured = [], []
        # On exit, `new_pass` checks the rounding errors of all layers, after one transfer.
        with heads[0].passing.new_pass({LATER_WRITES: None}):
            for (layer, x), expected in zip(runs, before, strict=True):
                try:
                    measured.append((layer, _differences(layer, x, expected)))
                except UnknownMLPError as error:
                    reasons.append(f"layer {layer.layer}: {error}")
        # Copy the differences of all layers to the CPU at once, since each copy synchronises.
        together = [x.to(before[0].device) for _, x in measured]
        numbers = torch.stack(together).tolist() if together else []
        for (layer, x), row in zip(measured, numbers, strict=True):
            reasons += [
                f"layer {layer.layer}: {reason}" for reason in _reasons(layer, x.dtype, row)
            ]
        UnsupportedModelError.raise_if(reasons, _PROBLEM)
    except BaseException as error:  # even after Ctrl-C, do not leave a model partly changed
        hide(model)
        if isinstance(error, UnsupportedCallError):
            raise UnsupportedModelError([str(error)], _PROBLEM) from error
        raise


def _differences(heads: InPlace, x: Tensor, expected: Tensor) -> Float[Tensor, "4"]:
    """Return the largest differences between three pairs of MLP outputs, and the largest |output|.

    The pairs are: with hooks on the heads, the sum of the heads' outputs and the MLP's output;
    without hooks, the MLP's output before and after exposing; and the MLP's output with and without
    hooks on the heads.
    """
    silent = run_mlp(heads.mlp, heads.mlp_points, x)
    with ExitStack() as stack:
        for point in heads.points.values():
            stack.callback(point.register_forward_hook(lambda *_: None).remove)
        seen: list[Tensor] = []  # the routing weights, in a mixture of experts, and z
        looks = [heads.hook_router] if isinstance(heads, MixtureHeads) else []
        for look in (*looks, heads.hook_z):
            hook = look.register_forward_hook(lambda *a: seen.append(a[-1]))
            stack.callback(hook.remove)
        live = run_mlp(heads.mlp, heads.mlp_points, x)
    differences = torch.stack([silent - expected, live - silent, expected]).abs().flatten(1)
    of_sum = differences.new_zeros(())
    if isinstance(heads, MixtureHeads):
        weights, z = seen[0].squeeze(-2), seen[1].squeeze(-1)
        of_sum = (live - heads.parts.output(z, weights)).abs().max()
    elif not isinstance(heads, FeatureHeads):  # a FeatureMLP's output is this sum by construction
        # Sum over heads for one token only, because this needs d_mlp · d_model numbers per token.
        token = heads.written(seen[-1][:1, :1].squeeze(-1))
        with heads.passing.new_pass({(heads.layer, "written"): token}):
            summed = heads.write(live[:1, :1])
        of_sum = (live[:1, :1] - summed).abs().max()
    return torch.cat([of_sum[None], differences.amax(dim=1)])


def _reasons(heads: InPlace, dtype: torch.dtype, differences: list[float]) -> list[str]:
    """Return an error message for each of the `differences` in MLP outputs that is too large."""
    of_sum, changed, with_hooks, largest = differences
    if not math.isfinite(largest):
        advice = "; load the model in float32" * (dtype in HALF)
        return [f"its MLP computes nan or inf in {dtype} for inputs drawn from N(0, 1){advice}"]
    reasons = []
    if heads.gating.kind == "exact" and changed != 0:
        reasons.append("its MLP gives two different outputs for the same input")
    others = {"activations are not those": with_hooks, "output is not the sum": of_sum}
    for text, difference in others.items():
        if not difference <= logit_tolerance([heads], dtype) * largest:
            reasons.append(
                f"its MLP's {text} of its neuron-heads: outputs differ by up to {difference:.2g}, "
                f"and the largest output entry is {largest:.2g}"
            )
    return reasons
