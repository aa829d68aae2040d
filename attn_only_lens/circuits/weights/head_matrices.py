"""The matrices with which heads and neurons read from and write to the residual stream.

    attention head   writes  W_V W_O        reads  q: W_Q W_Kᵀ    k: W_K W_Qᵀ    v: W_V W_O
    neuron-head      writes  W_O[i]         reads  q: W_in[:, i]; in a gated MLP, W_gate[:, i]
                                                   v: W_in[:, i]
                                                   k: none; keys do not depend on the token
    the embedding    writes  W_E

Neuron-heads are MLP neurons viewed as attention heads. Transcoder features are neuron-heads, with
W_enc as W_in and W_dec as W_out. Transcoders' skip nodes and error nodes are not supported.
Features of cross-layer transcoders write with several rows, so they have no write matrix.

A neuron-head's W_V has rank one, so it cancels in every composition score and is left out. A gated
MLP has no W_V. For the activation a_1 SiLU(a_2 x), the query is multiplied by the sign of a_2, so
that an open gate has a positive query. The value is multiplied by a_1 a_2 (in a gated MLP by a_1
|a_2|, because the sign is in the query).

If `fold_norms` is True, norms are folded into the matrices (`models/norms.py`). Half-precision
matrices are converted to float32.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from jaxtyping import Float
from torch import Tensor
from transformer_lens import FactoredMatrix

from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.model_checks import modules_of, quantized_reasons
from attn_only_lens.engine.sites import (
    LayerSites,
    Sites,
    SomeSites,
    resolve_sites,
    wide_reasons,
)
from attn_only_lens.engine.writes import norms_of
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import WIDE_KINDS, later_write_reasons
from attn_only_lens.models.norms import NO_NORM, LayerNorms, Norm

_NO_MATRIX = "these nodes have no matrices of weights"
Kind = Literal["q", "k", "v"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """The matrices of a model's heads, with `norms` folded in unless `norms` is None."""

    model: Any
    norms: tuple[LayerNorms, ...] | None

    @classmethod
    def of(cls, model: Any, *, fold_norms: bool) -> "HeadMatrices":
        """Return the matrices of all heads; raise an error for a bridge's unsupported modules."""
        host = host_of(model)
        InputError.raise_if(quantized_reasons(modules_of(model)), "these weights cannot be read")
        host.require_weights()
        return cls(model, tuple(norms_of(model)[0]) if fold_norms else None)

    def is_parallel(self, layer: int) -> bool:
        """Return whether the attention and the MLP of a layer run in parallel."""
        if self.norms is not None:
            return self.norms[layer].parallel
        return bool(self.model.cfg.parallel_attn_mlp)

    def _norms_around(self, sites: LayerSites) -> tuple[Norm, Norm]:
        """Return the norm before and the norm after a sublayer."""
        if self.norms is None:
            return NO_NORM, NO_NORM
        norms = self.norms[sites.layer]
        return norms.attention if sites.kind == "attention" else norms.neuron

    def _of_heads(self, weights: Tensor, sites: LayerSites) -> Tensor:
        """Return the weights of query heads; several of them may share one key or value head."""
        n_heads = host_of(self.model).n_heads[sites.layer]
        return weights[sites.index.to(weights.device) * len(weights) // n_heads]

    def _head(self, name: str, sites: LayerSites) -> Tensor:
        weights = getattr(host_of(self.model).attention(sites.layer), name)
        return self._of_heads(float32_if_half(weights.detach()), sites)

    def _with_norm(self, name: Literal["W_Q", "W_K"], sites: LayerSites) -> Tensor:
        """Return W_Q or W_K, with the gain of the query norm or key norm folded in."""
        weight = self._head(name, sites)
        if self.norms is None:
            return weight
        norms, d_head = self.norms[sites.layer], weight.shape[-1]
        norm = norms.query if name == "W_Q" else norms.key
        if norm.weight is None or len(norm.weight) == d_head:
            return norm.after(weight)
        # In some models, such as OLMo 2, one query norm or key norm acts on all heads together.
        if norm.centres:
            raise InputError(
                [f"layer {sites.layer}: one LayerNorm acts on all heads; pass fold_norms=False"],
                "the queries and keys of single heads cannot be separated",
            )
        of_head = self._of_heads(norm.weight.view(-1, d_head), sites)
        return weight * of_head.to(weight.dtype)[:, None]

    def _rows(self, sites: LayerSites) -> Float[Tensor, "site d_model"]:
        """Return the output weights of neurons."""
        W_O = host_of(self.model).neurons[sites.layer].W_O
        return float32_if_half(W_O[sites.index.to(W_O.device), 0].detach())

    def write_matrices(self, sites: LayerSites) -> FactoredMatrix:
        """Return write matrices, [site, d_model, d_model] or (for neurons) [site, 1, d_model]."""
        _require_weights(sites)
        first, last = self._norms_around(sites)
        if sites.kind == "feature":
            so = "they have no single row of output weights; use a graph or patches"
            InputError.raise_if(later_write_reasons(self.model, so), _NO_MATRIX)
        if sites.kind == "attention":
            W_V = first.before(self._head("W_V", sites))
            return FactoredMatrix(W_V, last.after(self._head("W_O", sites)))
        rows = last.after(self._rows(sites))
        return FactoredMatrix(rows.new_ones(len(rows), 1, 1), rows[:, None, :])

    def outputs(
        self, sites: LayerSites, z: Float[Tensor, "site d_head"]
    ) -> Float[Tensor, "site d_model"]:
        """Return what nodes with outputs z add to the residual stream, without norm scales.

        A site may occur more than once in `sites`.
        """
        _, last = self._norms_around(sites)
        z = float32_if_half(z.detach())
        if sites.kind == "error":
            return last.after(z)
        if sites.kind == "skip":
            W_skip: Any = host_of(self.model).neurons[sites.layer].module.W_skip
            return last.after(z @ float32_if_half(W_skip.detach()))
        if sites.kind == "attention":
            return last.after((z[:, None] @ self._head("W_O", sites))[:, 0])
        total: Tensor = last.after(z * self._rows(sites))
        decoders = host_of(self.model).neurons[sites.layer].decoders
        for layer, W in enumerate(decoders[1:], sites.layer + 1):
            rows = float32_if_half(W[sites.index.to(W.device)].detach())
            _, after = self._norms_around(replace(sites, layer=layer))
            total = total + after.after(z.to(rows.device) * rows).to(total.device)
        return total

    def read_matrices(self, sites: LayerSites, kind: Kind) -> FactoredMatrix:
        """Return read matrices, [site, d_model, d_model] or (for neurons) [site, d_model, 1]."""
        _require_weights(sites)
        first, _ = self._norms_around(sites)
        if sites.kind == "attention":
            if kind == "v":
                return self.write_matrices(sites)
            q, k = (first.before(self._with_norm(name, sites)) for name in ("W_Q", "W_K"))
            left, right = (q, k) if kind == "q" else (k, q)
            return FactoredMatrix(left, right.transpose(-2, -1))
        assert kind != "k"
        heads: Any = host_of(self.model).neurons[sites.layer]
        W = heads.read_matrices[0 if kind == "q" else -1]
        columns = first.before(float32_if_half(W[:, sites.index.to(W.device)].detach())).T
        # A generalized SiLU may scale columns or flip their signs.
        if kind == "q":
            columns = columns * heads.gate.side
        elif heads.value_is_product:
            columns = columns * (heads.gate.scale * heads.gate.side)
        else:
            columns = heads.gate.values(columns)
        return FactoredMatrix(columns[:, :, None], columns.new_ones(len(columns), 1, 1))

    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """Return W_E; raise an error if a norm or projection acts on embeddings before block 0."""
        W_E, cfg = self.model.W_E, self.model.cfg
        if W_E.shape[-1] != cfg.d_model or getattr(cfg, "post_embedding_ln", False):
            reason = (
                f"the embedding {list(W_E.shape)} is normalized or projected before it enters the "
                f"residual stream of width {cfg.d_model}; leave 'embed' out of the writers"
            )
            raise InputError([reason], "this embedding cannot be composed with")
        return float32_if_half(W_E.detach())


def heads_with_matrices(model: Any, sites: SomeSites, problem: str) -> tuple[LayerSites, ...]:
    """Return the selected heads without skip and error nodes; raise an error for their names."""
    sites = Sites.of(sites)
    if sites.positions != "each":
        reason = f"got positions={sites.positions!r}; weights have no positions: leave it out"
        raise InputError([reason], problem)
    chosen = resolve_sites(model, sites.without(*WIDE_KINDS))
    InputError.raise_if(wide_reasons(chosen), problem)
    return chosen


def _require_weights(sites: LayerSites) -> None:
    InputError.raise_if(wide_reasons([sites]), _NO_MATRIX)
