"""Convert a model: every MLP neuron becomes an attention head of width 1 (Theorem 4)."""

from typing import overload

import torch
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.models.calibrate import Calibration
from attn_only_lens.models.expose import expose_neuron_heads
from attn_only_lens.models.in_place import copy_bridge, reasons_against_copying
from attn_only_lens.models.in_place.known_mlps import known_mlps, non_finite_weights
from attn_only_lens.models.requested_gates import BilinearRequest, choose_gating
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer, convert_as
from attn_only_lens.models.two_blocks.known_modules import reasons_against
from attn_only_lens.runs.attached_hooks import hook_reasons
from attn_only_lens.tl import HookedTransformer

__all__ = ["convert"]


@overload
def convert(
    model: HookedTransformer,
    *,
    copy: bool = False,
    gate: str = "exact",
    heads_per_neuron: int | None = None,
    tolerance: float | None = None,
    calibration: Calibration | None = None,
) -> AttentionOnlyTransformer: ...


@overload
def convert(
    model: TransformerBridge,
    *,
    copy: bool = False,
    gate: str = "exact",
    heads_per_neuron: int | None = None,
    tolerance: float | None = None,
    calibration: Calibration | None = None,
) -> TransformerBridge: ...


@torch.inference_mode(False)  # weights of inference mode could never be trained
def convert(
    model: HookedTransformer | TransformerBridge,
    *,
    copy: bool = False,
    gate: str = "exact",
    heads_per_neuron: int | None = None,
    tolerance: float | None = None,
    calibration: Calibration | None = None,
) -> AttentionOnlyTransformer | TransformerBridge:
    """Make a model whose MLP neurons are attention heads, and that computes what `model` computes.

    From a `HookedTransformer`, an attention-only one with two blocks a layer: source layer l
    becomes block 2l, its attention heads, and block 2l + 1, its d_mlp neurons as heads of width 1
    under `attn`: each token attends to itself with weight p(q) and to a static bias token with
    weight 1 - p(q), where act(q) = q · p(q). With no hook on a neuron block the logits are bitwise
    those of `model`; with hooks they agree to rounding. Neurons being heads, a filter for the hooks
    of heads, `name.endswith("hook_z")`, selects theirs too.

    From a `TransformerBridge`, which has its blocks from the model that it wraps, a second bridge
    with its neurons exposed as heads in place (`expose_neuron_heads`); the same holds of it.

    With `gate="bilinear"`, nothing but softmax over bilinear scores is used, as in the theorem:
    each neuron becomes m heads `L5N1234.0 … .m-1` that write along one vector, and the activation
    is approximated within a certified bound (`gates/bilinear.py`), for every real input; silu
    needs one head, and no approximation. In a gated MLP it holds on a range that `calibrate` takes
    from data (`gates/gated.py`). The approximation is the model's function, with hooks or without.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", Theorems 2
    and 4, with p in place of σ for activations other than SiLU; gated MLPs, whose value g · u is a
    product, are beyond the paper.

    Args:
        model: a `HookedTransformer` with MLPs; or a `TransformerBridge`, before or after
            `enable_compatibility_mode`. It is not changed.
        copy: whether to copy the weights. By default they are shared, so that conversion costs no
            memory; then training either model trains both
            (in place: a later change of dtype or device of one parts them).
        gate: "exact", one head a neuron with the activation's own pattern; or "bilinear".
        heads_per_neuron: m, for bilinear gates; by default the fewest within `tolerance`.
        tolerance: largest error of the activation, for bilinear gates; by default 1e-3.
        calibration: `calibrate(model, tokens)`, for bilinear gates of a gated MLP.

    Returns:
        The converted model, on the device and in the dtype of `model`, without its hooks.

    Raises:
        UnsupportedModelError: with every reason why the model cannot be converted exactly; among
            them hooks that are attached to it, since they would not come along.

    Example:
        >>> import torch
        >>> from attn_only_lens import convert, pretrained
        >>> model = pretrained.modular_addition()
        >>> attn_only = convert(model)
        >>> tokens = pretrained.modular_addition_tokens()[:11]
        >>> torch.equal(attn_only(tokens), model(tokens))
        True
        >>> convert(model, gate="bilinear").heads_per_neuron  # silu is bilinear with one head
        1
    """
    if isinstance(model, TransformerBridge):
        if reasons := reasons_against_copying(model):
            raise UnsupportedModelError([*reasons, *_mlp_reasons(model)])
        exposed = expose_neuron_heads(
            copy_bridge(model, copy_weights=copy),
            gate=gate,
            heads_per_neuron=heads_per_neuron,
            tolerance=tolerance,
            calibration=calibration,
        )
        return exposed.model
    reasons = reasons_against(model)
    if isinstance(model, HookedTransformer):
        reasons += [*hook_reasons(model), *non_finite_weights(model)]
    wanted = BilinearRequest(heads_per_neuron, tolerance, calibration)
    gating, more = choose_gating(model, gate, wanted)
    if reasons or more:
        raise UnsupportedModelError([*reasons, *more])
    assert gating is not None
    return convert_as(model, gating, copy_weights=copy)


def _mlp_reasons(model: TransformerBridge) -> tuple[str, ...]:
    """What speaks against the MLPs of a bridge, to be said with what speaks against copying it."""
    try:
        known_mlps(model, "")
    except UnsupportedModelError as error:
        return error.reasons
    return ()
