"""GradMax: new neurons whose output weights start with the largest gradient (Evci et al. 2022)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from attn_only_lens.axes import Tokens
from attn_only_lens.growth.expansion.initialise import New, own
from attn_only_lens.growth.expansion.weights import in_layer, tail

_SAME = 0.999  # larger cosines mean equal directions


def gradient_products(model: Any, tokens: Tokens) -> dict[int, Float[Tensor, "d_model d_model"]]:
    """Return Σ_t x_t g_tᵀ for each layer: the MLP's input times the loss's gradient by its output.

    `GradMax` uses this product to choose the inputs of new neurons.

    Source: Evci et al., "GradMax" (2022), section 3, for a layer that the new neurons write to.

    Args:
        model: a model whose MLPs are not gated; it does not change.
        tokens: the prompts; the loss is the mean cross-entropy of the next token.
    """
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def see(mlp: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs.append(arguments[0].detach())
        outputs.append(torch.zeros_like(output, requires_grad=True))
        return output + outputs[-1]

    handles = [block.mlp.register_forward_hook(see) for block in model.blocks]
    try:
        logits = model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    following = tokens[:, 1:].flatten().to(logits.device)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), following)
    pairs = zip(inputs, torch.autograd.grad(loss, outputs), strict=True)
    return {
        layer: torch.einsum("bpd,bpe->de", x.double(), g.double())
        for layer, (x, g) in enumerate(pairs)
    }


@dataclass(frozen=True)
class GradMax:
    """Choose new neurons whose output weights start with the largest gradient, to first order.

    Let a_i(t) be the activation of new neuron i at token t, and g_t the gradient of the loss by the
    MLP's output. Then ∂L/∂W_out[i] = Σ_t a_i(t) g_tᵀ. If a_i(t) is proportional to x_t · w_i, as to
    first order, this is proportional to w_iᵀ M with M = Σ_t x_t g_tᵀ. The orthogonal w_i of a given
    norm that maximise Σ_i ‖w_iᵀ M‖² are M's first left singular vectors.

    Source: Evci, van Merriënboer, Unterthiner, Vladymyrov, Pedregosa, "GradMax: Growing Neural
    Networks using Gradient Information" (2022), equation 11, with the roles exchanged: they zero
    the inputs and choose the outputs; the growth paper's theorem 3.1 zeroes the outputs.

    Attributes:
        products: M by layer of the grown model, from `gradient_products`. Neurons beyond d_model,
            and all other entries, are drawn by `own`. Directions that a neuron already has are left
            out: equal neurons stay equal.
    """

    products: Mapping[int, Float[Tensor, "d_model d_model"]]

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        """Return the new entries of a weight."""
        noise = own()(new, seed)
        layer = in_layer(new.name)
        if layer is None or tail(new.name) != "mlp.W_in" or new.dim != 1:
            return noise
        old = functional.normalize(new.old.detach().cpu().double(), dim=0)
        basis = torch.linalg.svd(self.products[layer].cpu()).U
        taken = (basis.T @ old).abs().amax(dim=1) > _SAME
        directions = basis[:, ~taken][:, : new.shape[1]]
        noise[:, : directions.shape[1]] = directions * noise.norm(dim=0).mean()
        return noise
