"""Convert a model to attention only: every MLP neuron becomes an attention head of width 1.

Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", Theorem 6.
"""

import torch
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.axes import Tokens
from attn_only_lens.engine.model_checks import hook_reasons
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.gates import GeneralizedSiLU
from attn_only_lens.gates.gating import EXACT
from attn_only_lens.models.gate_option import GateOption, gating_for
from attn_only_lens.models.in_place.known_mlps import non_finite_weights
from attn_only_lens.models.shared_weights import share_weights
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer, convert_as
from attn_only_lens.models.two_blocks.known_modules import reasons_against
from attn_only_lens.models.verify import checked, tokens_to_check
from attn_only_lens.tl import HookedTransformer


@torch.inference_mode(False)  # weights created in inference mode cannot be trained
def convert(
    model: HookedTransformer,
    *,
    gate: GateOption = "exact",
    copy_weights: bool = False,
    check: bool | str | Tokens = False,
) -> AttentionOnlyTransformer:
    """Return an attention-only model with the same logits as `model`.

    The returned model has two blocks per layer of `model`. Block 2l holds the attention heads of
    layer l. Block 2l + 1 holds the layer's d_mlp neurons, as heads of width 1 in the block's
    `attn`. In a neuron-head, each token attends to itself with weight p(q) and to a constant bias
    token with weight 1 - p(q), where q is the neuron's pre-activation and act(q) = q · p(q). The
    logits are bitwise equal to those of `model` or, with hooks on neuron blocks, equal up to
    rounding. Name filters such as `name.endswith("hook_z")` select the hook points of both
    attention heads and neuron-heads.

    With `gate=Bilinear(...)`, the model has one or more neurons for each neuron of the original,
    whose sum approximates the activation function, and it uses this approximation even without
    hooks.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", Theorems 2 and
    4, with p(q) in place of the paper's sigmoid for activations other than SiLU. The paper does not
    cover gated MLPs, where a head's value is the product q · u of two linear maps of the input.

    Args:
        model: a `HookedTransformer` with MLPs. It is not changed. For a `TransformerBridge`, see
            `expose_neuron_heads`.
        gate: "exact" for heads with the activation's own pattern;
            `GeneralizedSiLU(a_1, a_2)` for an exact gate of the activation a_1 SiLU(a_2 x); or
            `Bilinear(...)`.
        copy_weights: copy the weights. By default both models share them, so that conversion costs
            no memory; then training either model trains both. If fold_ln is later applied to the
            source, a converted model that shares its weights raises an error wherever it is used.
        check: a text or tokens [batch, pos], on which the logits and the residual streams of both
            models are compared, or True for random tokens. The result has the report as
            `verification` (see `models.Verification`). By default nothing is compared.

    Returns:
        The converted model, with the device and dtype of `model`.

    Raises:
        UnsupportedModelError: the model cannot be converted exactly. The error lists all reasons,
            such as attached hooks, which the new model would not have. Or differences that `check`
            measured are larger than their bounds; the error has the report.
        UnsupportedCallError: `check` is no input of the model.

    Example:
        >>> import torch
        >>> from attn_only_lens import Bilinear, convert, load, pretrained
        >>> model = load("modular-addition")
        >>> tokens = pretrained.modular_addition_tokens()[:11]
        >>> attn_only = convert(model, check=tokens)
        >>> attn_only.verification.max_abs_logit < 1e-4
        True
        >>> torch.equal(attn_only(tokens), model(tokens))
        True
        >>> convert(model, gate=Bilinear()).all_head_labels(neurons=True)[-1]  # one head for silu
        'L0N511'
    """
    if isinstance(model, TransformerBridge):
        reason = (
            "it is a TransformerBridge, which runs the blocks of the model that it wraps: use "
            "expose_neuron_heads(bridge, copy=True).model, a copy with its neurons as heads in "
            "place"
        )
        raise UnsupportedModelError([reason])
    silu = gate if isinstance(gate, GeneralizedSiLU) else None
    reasons, gating = reasons_against(model, silu=silu), EXACT
    if isinstance(model, HookedTransformer):
        cfg = model.cfg
        gating, unknown = gating_for(gate, cfg.act_fn, cfg.gated_mlp, cfg.dtype, cfg.n_layers)
        reasons += [*hook_reasons(model), *non_finite_weights(model), *unknown]
    UnsupportedModelError.raise_if(reasons)
    tokens = tokens_to_check(model, check)
    converted = convert_as(model, gating, copy_weights=copy_weights)
    if not copy_weights:
        share_weights(model, converted)
    if tokens is not None:
        converted.verification = checked(model, converted, tokens)
    return converted
