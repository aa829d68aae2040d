"""Unpack: send the credit for a logit difference back through heads and MLPs of one run.

Chen, van Stein and Plaat, "Every Component is a Lookup" (arXiv 2605.23393), write attention and
MLPs as φ(S) U, with scores S and values U, and divide a component's credit among the components c
that it reads. These are the rules of `kqv_aligned`, the default of the code that they published:

    metric     c gets d · c; d is the direction of the logit difference, with the last norm's scale
    head       the credit at query q is divided among positions s by α_qs (v_s W_O · d), or, if it
               came from a later component, by α_qs (v_s W_O · o) with the output o of the layer's
               heads. A third each goes through
                   K    by c's part of the key: (k_c · q), minus its mean over positions
                   Q    by c's part of the query: (q_c · k_s), minus its mean over positions
                   V    by c's part of the value: v_c · v_s
    MLP        by LN(c) · Σ_j φ_j / s_j (u_j · d) k_j, with pre-activations s_j, activations φ_j,
               input weights k_j and output weights u_j; later by the MLP's output in place of d

"By x_c" means x_c / max(|Σ x|, β Σ |x|), with the sign of Σ x and β = 0.8. Biases get nothing. The
scales of norms are constants. In place of a list of paths, credit is added up by edges, which gives
the sums over all paths. The model is a HookedTransformer with LayerNorm, without gated MLPs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens import HeadName

BETA = 0.8
_Parts = Float[Tensor, "part pos d_model"]


def shares(x: Tensor, dim: int, beta: float = BETA) -> Tensor:
    """Return x divided by its sum, or by β Σ |x| if this is larger; 0 where all of x is 0."""
    total, size = x.sum(dim, keepdim=True), x.abs().sum(dim, keepdim=True)
    divisor = torch.where(total < 0, -1.0, 1.0) * torch.maximum(total.abs(), beta * size)
    return torch.where(size < 1e-10, 0.0, x / torch.where(size < 1e-10, 1.0, divisor))


@torch.no_grad()
def edge_credit(
    model: Any, tokens: Tensor, weights: Float[Tensor, "d_vocab"], beta: float = BETA
) -> pd.DataFrame:
    """Return the credit of all edges, summed over positions: source, target, kind and weight.

    The metric is Σ weights · logits at the last token. Sources and targets are "embed", heads such
    as "L0H1", and MLPs such as "L0M"; kinds are "k", "q", "value" and, into MLPs, "in". Edges into
    "metric" have the kind "value".
    """
    _, cache = model.run_with_cache(tokens[None], return_cache_object=False)
    cache = {name: x[0] for name, x in cache.items()}
    names, parts = _components(model, cache)
    d = model.ln_final.w / cache["ln_final.hook_scale"][-1] * (model.W_U @ weights)
    run = _Run(model, cache, d, beta)
    direct, later = torch.zeros(2, *parts.shape[:2], dtype=parts.dtype)
    direct[:, -1] = _centred(parts[:, -1]) @ d
    rows = [(name, "metric", "value", x) for name, x in zip(names, direct.sum(1), strict=True)]
    for index in range(len(names) - 1, 0, -1):
        layer, _, head = names[index][1:].partition("H")
        read = _before(names, index)
        given = torch.stack([direct[index], later[index]])
        passed_on = (
            run.through_head(parts[:read], given, int(layer), int(head))
            if head
            else run.through_mlp(parts[:read], given, int(layer.rstrip("M")))
        )
        for kind, some in passed_on:
            later[:read] += some
            rows += [(x, names[index], kind, y) for x, y in zip(names, some.sum(1), strict=False)]
    columns = ["source", "target", "kind", "weight"]
    return pd.DataFrame([(*row, float(x)) for *row, x in rows], columns=columns)


def _components(model: Any, cache: dict[str, Tensor]) -> tuple[list[str], _Parts]:
    """Return names of components, in order, and what they add to the stream, without biases."""
    names, parts = ["embed"], [cache["hook_embed"] + cache["hook_pos_embed"]]
    for layer, block in enumerate(model.blocks):
        for head, W in enumerate(block.attn.W_O):
            names.append(str(HeadName(layer, "attention", head)))
            parts.append(cache[f"blocks.{layer}.attn.hook_z"][:, head] @ W)
        names.append(f"L{layer}M")
        parts.append(cache[f"blocks.{layer}.mlp.hook_post"] @ block.mlp.W_out)
    return names, torch.stack(parts)


def _before(names: list[str], index: int) -> int:
    """Return how many components a component reads."""
    layer, is_mlp = names[index].partition("H")[0].rstrip("M"), names[index].endswith("M")
    return index if is_mlp else next(i for i, x in enumerate(names) if x.startswith(f"{layer}H"))


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


@dataclass(frozen=True)
class _Run:
    """A run whose credit is divided, with the metric's direction d, and β as in `shares`."""

    model: Any
    cache: dict[str, Tensor]
    d: Float[Tensor, "d_model"]
    beta: float

    def through_head(
        self, parts: _Parts, given: Float[Tensor, "depth pos"], layer: int, head: int
    ) -> Iterator[tuple[str, Float[Tensor, "part pos"]]]:
        """Yield the credit that a head passes on through its key, query and value."""
        model, cache, d, beta = self.model, self.cache, self.d, self.beta
        attn, prefix = model.blocks[layer].attn, f"blocks.{layer}."
        q, k, v = (cache[f"{prefix}attn.hook_{x}"][:, head] for x in "qkv")
        pattern = cache[f"{prefix}attn.hook_pattern"]
        every = torch.einsum("shd,hde->hse", cache[f"{prefix}attn.hook_v"], attn.W_O)
        layers_output = torch.einsum("hqs,hse->qe", pattern, every)
        first = pattern[head] * (_centred(every[head]) @ d)
        deep = pattern[head] * (layers_output @ every[head].T)
        by_source = given[0][:, None] * shares(first, 1, beta) + given[1][:, None] * shares(
            deep, 1, beta
        )
        third = by_source / 3
        scale = cache[f"{prefix}ln1.hook_scale"]
        entering = _centred(parts) / scale * model.blocks[layer].ln1.w
        q_c, k_c, v_c = (entering @ W[head] for W in (attn.W_Q, attn.W_K, attn.W_V))
        valid = torch.ones_like(third).tril()

        def logits(x: Float[Tensor, "part q s"]) -> Float[Tensor, "part q s"]:
            return x - (x * valid).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True)

        by_key = shares(logits(torch.einsum("qe,cse->cqs", q, k_c)), 0, beta)
        yield "k", (third * by_key).sum(1)
        by_query = shares(logits(torch.einsum("cqe,se->cqs", q_c, k)), 0, beta)
        yield "q", (third * by_query).sum(2)
        yield "value", third.sum(0) * shares(torch.einsum("cse,se->cs", v_c, v), 0, beta)

    def through_mlp(
        self, parts: _Parts, given: Float[Tensor, "depth pos"], layer: int
    ) -> Iterator[tuple[str, Float[Tensor, "part pos"]]]:
        """Yield the credit that an MLP passes on."""
        model, cache, d, beta = self.model, self.cache, self.d, self.beta
        mlp, prefix = model.blocks[layer].mlp, f"blocks.{layer}."
        post, pre = (cache[f"{prefix}mlp.hook_{x}"] for x in ("post", "pre"))
        output = post @ mlp.W_out
        scale = cache[f"{prefix}ln2.hook_scale"]
        entering = _centred(parts) / scale * model.blocks[layer].ln2.w
        total = torch.zeros(parts.shape[:2], dtype=parts.dtype)
        for credit, aligned in zip(
            given, (_centred(mlp.W_out) @ d, output @ mlp.W_out.T), strict=True
        ):
            direction = (post / pre * aligned) @ mlp.W_in.T
            total += credit * shares((entering * direction).sum(-1), 0, beta)
        yield "in", total
