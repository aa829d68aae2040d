"""Random and trained transformers for the post's construction, and their direct evaluation."""

import math
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from analyses.post import PlainLayer, PlainTransformer

Init: TypeAlias = Literal["scaled", "growing", "unit"]


def random_transformer(
    n_layers: int,
    d_model: int,
    *,
    init: Init,
    seed: int,
    causal: bool = False,
    device: str = "cpu",
) -> PlainTransformer:
    """Return a model with normal weights that float32 stores exactly, and d_mlp = 4 d_model.

    Args:
        n_layers: the number of layers.
        d_model: the width of the stream.
        init: "scaled" has variance 1 / fan-in, and output weights times 1 / √(2 n_layers), as in
            GPT-2; "growing" has no such factor; "unit" has variance 1 and one head of width
            d_model, as in the post's demonstration.
        seed: the seed of the weights.
        causal: whether the attention heads are masked.
        device: the device of the model.
    """
    generator = torch.Generator().manual_seed(seed)
    n_heads = 1 if init == "unit" else 4
    d_head, d_mlp = d_model // n_heads, 4 * d_model
    damping = 1 / math.sqrt(2 * n_layers) if init == "scaled" else 1.0

    def normal(*shape: int, fan_in: int) -> Tensor:
        scale = 1.0 if init == "unit" else 1 / math.sqrt(fan_in)
        return scale * torch.randn(shape, generator=generator).to(device)

    layers = [
        PlainLayer(
            W_Q=normal(n_heads, d_model, d_head, fan_in=d_model),
            W_K=normal(n_heads, d_model, d_head, fan_in=d_model),
            W_V=normal(n_heads, d_model, d_head, fan_in=d_model),
            W_O=damping * normal(n_heads, d_head, d_model, fan_in=n_heads * d_head),
            b_Q=torch.zeros(n_heads, d_head, device=device),
            b_K=torch.zeros(n_heads, d_head, device=device),
            b_V=torch.zeros(n_heads, d_head, device=device),
            b_O=torch.zeros(d_model, device=device),
            W_1=normal(d_model, d_mlp, fan_in=d_model),
            b_1=normal(d_mlp, fan_in=d_model),
            W_2=damping * normal(d_mlp, d_model, fan_in=d_mlp),
            b_2=damping * normal(d_model, fan_in=d_model),
        )
        for _ in range(n_layers)
    ]
    return PlainTransformer(tuple(layers), causal)


def plain_of(state: Mapping[str, Tensor]) -> PlainTransformer:
    """Return the layers in a HookedTransformer's state dict: causal, plain MLPs, no norm."""
    n_layers = sum(name.endswith("mlp.W_in") for name in state)
    names = {f"{kind}_{of}": f"attn.{kind}_{of}" for kind in "Wb" for of in "QKVO"}
    names |= {"W_1": "mlp.W_in", "b_1": "mlp.b_in", "W_2": "mlp.W_out", "b_2": "mlp.b_out"}
    layers = [
        PlainLayer(**{ours: state[f"blocks.{i}.{name}"].clone() for ours, name in names.items()})
        for i in range(n_layers)
    ]
    return PlainTransformer(tuple(layers), causal=True)


def direct(
    plain: PlainTransformer, x: Tensor, activation: Callable[[Tensor], Tensor] = F.silu
) -> tuple[Tensor, list[float]]:
    """Return the stream after each layer, [n_layers, …], and the largest |score| of each layer."""
    streams, largest = [], []
    for layer in plain.layers:
        w = layer.to(x.dtype)
        queries = torch.einsum("...td,hde->...hte", x, w.W_Q) + w.b_Q[:, None]
        keys = torch.einsum("...td,hde->...hte", x, w.W_K) + w.b_K[:, None]
        values = torch.einsum("...td,hde->...hte", x, w.W_V) + w.b_V[:, None]
        scores = queries @ keys.mT / math.sqrt(w.W_Q.shape[-1])
        largest.append(scores.abs().max().item())
        if plain.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        x = x + torch.einsum("...hte,hed->...td", scores.softmax(-1) @ values, w.W_O) + w.b_O
        x = x + activation(x @ w.W_1 + w.b_1) @ w.W_2 + w.b_2
        streams.append(x)
    return torch.stack(streams), largest
