"""GradMax: new neurons whose output weights start with the largest gradient (Evci et al. 2022)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.axes import Logits, Tokens
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.tokens import checked_tokens
from attn_only_lens.errors import GrowthError
from attn_only_lens.growth.expansion.initialise import Initialiser, New, own
from attn_only_lens.growth.expansion.weights import in_layer, tail
from attn_only_lens.growth.models._grow import growable_of
from attn_only_lens.models.two_blocks import AttentionOnlyTransformer


def gradient_products(
    model: Any,
    tokens: Tokens,
    *,
    loss: Callable[[Logits, Tokens], Float[Tensor, ""]] | None = None,
    batch_size: int = 16,
) -> dict[int, Float[Tensor, "d_model d_model"]]:
    """Return Σ_t x_t g_tᵀ for each layer: the MLP's input times the loss's gradient by its output.

    `grad_max` uses this product to choose the inputs of new neurons.

    Source: Evci et al., "GradMax" (2022), section 3, for a layer that the new neurons write to.

    Args:
        model: a bridge or `HookedTransformer` whose MLPs are not gated. The model and its
            gradients do not change.
        tokens: the tokens for the gradients.
        loss: a function of logits and tokens; by default the next token's cross-entropy. A masked
            language model (BERT) needs a loss.
        batch_size: the number of prompts in a batch; losses of batches are added up.

    Raises:
        GrowthError: its neurons' activations are not, to first order, multiples of x · w_i; the
            model does not predict the next token, and no loss is given; or the batch size is not
            an integer of 1 or more.
        UnsupportedCallError: the tokens are none that the model can run on.

    Example:
        >>> import torch
        >>> from attn_only_lens import grow, growth, pretrained
        >>> from attn_only_lens.growth import gradient_products
        >>> model, tokens = pretrained.modular_addition(), pretrained.modular_addition_tokens()
        >>> def loss(logits, tokens):
        ...     sums = tokens[:, :2].sum(1) % 113
        ...     return torch.nn.functional.cross_entropy(logits[:, -1], sums)
        >>> products = gradient_products(model, tokens[:31], loss=loss)
        >>> grown = grow(model, growth.AddNeurons(4), init=grad_max(products))
    """
    if isinstance(model, AttentionOnlyTransformer):
        reasons = ["its MLPs are heads; take the products of the model that was converted"]
    else:
        growable = growable_of(model)
        reasons = growable.reasons_against()
    if not reasons:
        weights = growable.read()
        is_gated = bool(weights.in_layers("mlp.W_gate"))
        if is_gated or not weights.in_layers("mlp.W_in"):
            has = "gated MLPs, products of two inputs" if is_gated else "no MLPs"
            reasons.append(f"it has {has}; GradMax is about one input to each neuron")
    wrapped = getattr(model, "original_model", None)
    if loss is None and isinstance(wrapped, PreTrainedModel) and not wrapped.can_generate():
        reasons.append(f"a {type(wrapped).__name__} does not predict the next token; pass loss=")
    if not is_count(batch_size, 1):
        reasons.append(f"got batch_size={batch_size!r}; expected 1 or more")
    GrowthError.raise_if(reasons, "there are no gradients to choose neurons by")
    products: dict[int, Tensor] = {}
    for batch in checked_tokens(model, tokens).split(as_plain(batch_size)):
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def see_input(_: Any, args: tuple[Tensor, ...]) -> None:
            inputs.append(args[0].detach())  # noqa: B023 - called within this turn of the loop

        def see_output(_: Any, args: Any, output: Tensor) -> Tensor:
            outputs.append(torch.zeros_like(output, requires_grad=True))  # noqa: B023
            return output + outputs[-1]  # noqa: B023

        handles = []
        for block in model.blocks:
            first, last = _ends(block.mlp)
            handles += [
                first.register_forward_pre_hook(see_input),
                last.register_forward_hook(see_output),
            ]
        try:
            with torch.enable_grad():
                logits = model(batch)
                value = (loss or _next_token_loss)(logits, batch)
                gradients = torch.autograd.grad(value, outputs)
        finally:
            for handle in handles:
                handle.remove()
        for layer, (x, g) in enumerate(zip(inputs, gradients, strict=True)):
            x, g = (to_float64_device(tensor.flatten(0, 1)).double() for tensor in (x, g))
            product = x.T @ g
            products[layer] = products.get(layer, 0) + product
    return products


def _ends(mlp: Any) -> tuple[Any, Any]:
    """Return the module that an MLP's input enters, and the module that its output leaves.

    Both are the MLP itself, but in BERT they are two parts, because no module runs the whole MLP.
    """
    parts = dict(mlp.named_children())
    return (parts["in"], parts["out"]) if getattr(mlp, "name", "") is None else (mlp, mlp)


def _next_token_loss(logits: Logits, tokens: Tokens) -> Float[Tensor, ""]:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


_SAME = 0.999  # larger cosines mean equal directions, also in half precision


@dataclass(frozen=True)
class _GradMax:
    products: Mapping[int, Float[Tensor, "d_model d_model"]]
    std: float | None

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        noise = own()(new, seed)
        layer = in_layer(new.name)
        if (
            layer is None
            or tail(new.name) != "mlp.W_in"
            or new.dim != 1
            or layer not in self.products
        ):
            return noise
        product = self.products[layer].detach().cpu().double()
        d_model = noise.shape[0]
        if product.shape != (d_model, d_model):
            raise ValueError(
                f"got a product of {tuple(product.shape)} for layer {layer}; expected d_model by "
                f"d_model, {d_model} where {new.name} grows"
            )
        old = nn.functional.normalize(new.old.detach().cpu().double(), dim=0)
        basis = torch.linalg.svd(product).U
        taken = (basis.T @ old).abs().amax(dim=1) > _SAME  # already used by earlier growth
        directions = basis[:, ~taken][:, : new.shape[1]]
        norm = noise.norm(dim=0).mean() if self.std is None else self.std * noise.shape[0] ** 0.5
        noise[:, : directions.shape[1]] = directions * norm
        return noise


def grad_max(
    products: Mapping[int, Float[Tensor, "d_model d_model"]], std: float | None = None
) -> Initialiser:
    """Choose new neurons whose output weights start with the largest gradient, to first order.

    Let a_i(t) be the activation of new neuron i at token t, and g_t the gradient of the loss by the
    MLP's output. Then ∂L/∂W_out[i] = Σ_t a_i(t) g_tᵀ. If a_i(t) is proportional to x_t · w_i, as to
    first order, this is proportional to w_iᵀ M with M = Σ_t x_t g_tᵀ. The orthogonal w_i of a given
    norm that maximise Σ_i ‖w_iᵀ M‖² are M's first left singular vectors.

    Source: Evci, van Merriënboer, Unterthiner, Vladymyrov, Pedregosa, "GradMax: Growing Neural
    Networks using Gradient Information" (2022), equation 11, with the roles exchanged: they zero
    the inputs and choose the outputs; the growth paper's theorem 3.1 zeroes the outputs.

    Args:
        products: M by layer of the grown model, from `gradient_products`.
            Neurons of other layers, neurons beyond d_model, and all other entries are drawn by
            `own`. Directions that a neuron already has are left out: equal neurons stay equal.
        std: the standard deviation of each w_i's entries; by default that of `own`.
    """
    return _GradMax(dict(products), std)
