"""What every head reads and writes, as matrices that act on rows of the residual stream.

    attention head   writes  W_V W_O        reads  q: W_Q W_Kᵀ    k: W_K W_Qᵀ    v: W_V W_O
    neuron-head      writes  W_out[i]       reads  q: W_in[:, i], or W_gate[:, i] of a gated MLP
                                                   v: W_in[:, i]
                                                   k: nothing, its keys do not depend on the token
    the embedding    writes  W_E

A neuron-head's own W_V is left out of what it writes: it is a factor of rank one, cancels in every
score, and a gated MLP has none. Head j of several that share a neuron writes w_j W_out[i], with a
query b_j W_in[:, i]; where b_j is 0, it reads nothing by its query.

Norms are folded, or left out (`wiring.py`). Half precision is computed in float32.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import FactoredMatrix

from attn_only_lens.errors import CircuitError
from attn_only_lens.heads import host_of
from attn_only_lens.models.norms import Norm, Wiring
from attn_only_lens.runs.sites import WHOLE, LayerSites

__all__ = ["KINDS", "Kind", "Weights"]

Kind = Literal["q", "k", "v"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a model with neuron-heads, with its norms folded in or not.

    Attributes:
        model: the model.
        wiring: of each layer; None where weights are taken as they stand.
    """

    model: Any
    wiring: tuple[Wiring, ...] | None

    @classmethod
    def of(cls, model: Any, *, fold_norms: bool) -> "Weights":
        """The weights of a model.

        Raises:
            CircuitError: with every reason, where a bridge's norms or matrices are not known.
        """
        host = host_of(model)
        host.require_weights()
        return cls(model, tuple(host.norms()) if fold_norms else None)

    def parallel(self, layer: int) -> bool:
        """Whether attention and MLP of a layer run side by side."""
        if self.wiring is not None:
            return self.wiring[layer].parallel
        return bool(self.model.cfg.parallel_attn_mlp)

    def _attn(self, layer: int) -> Any:
        return host_of(self.model).attention(layer)

    def _norms(self, layer: int, kind: str) -> tuple[Norm, Norm]:
        if self.wiring is None:
            return _NO_NORM, _NO_NORM
        return self.wiring[layer].attention if kind == "attention" else self.wiring[layer].neuron

    def _head(self, name: str, sites: LayerSites) -> Tensor:
        """One matrix of some attention heads; grouped keys and values, for each query head."""
        return self._of_heads(_working(getattr(self._attn(sites.layer), name)), sites)

    def _of_heads(self, each: Tensor, sites: LayerSites) -> Tensor:
        """The entries of some heads, of as many as there are queries or grouped keys."""
        n_heads = self._attn(sites.layer).W_Q.shape[0]
        return each[sites.index.to(each.device) * len(each) // n_heads]

    def _scored(self, name: Literal["W_Q", "W_K"], sites: LayerSites) -> Tensor:
        """W_Q or W_K with the norm that comes after it."""
        weight = self._head(name, sites)
        if self.wiring is None:
            return weight
        wiring, d_head = self.wiring[sites.layer], weight.shape[-1]
        norm = wiring.query if name == "W_Q" else wiring.key
        if norm.weight is None or len(norm.weight) == d_head:
            return norm.written(weight)
        # One norm over the heads of a token side by side, as in OLMo 2.
        if norm.centres:
            raise CircuitError(
                [f"layer {sites.layer}: a LayerNorm mixes its heads; pass fold_norms=False"],
                "the queries and keys of this model are not those of one head",
            )
        beside = self._of_heads(norm.weight.view(-1, d_head), sites)
        return weight * beside.to(weight.dtype)[:, None]

    def _members(self, sites: LayerSites, of: str, like: Tensor) -> Tensor:
        """The number of each site's gate by that name; 1 for a whole neuron."""
        gate: Any = host_of(self.model).neurons[sites.layer].gate
        numbers = [
            1.0 if member in (WHOLE, None) else getattr(gate, of)[member]
            for member in sites.member.tolist()
        ]
        return like.new_tensor(numbers)

    def writes(self, sites: LayerSites) -> FactoredMatrix:
        """What heads write: [site, d_model, d_model], or [site, 1, d_model] for neurons."""
        _, norm = self._norms(sites.layer, sites.kind)
        if sites.kind == "attention":
            read, _ = self._norms(sites.layer, "attention")
            W_V = read.read(self._head("W_V", sites))
            return FactoredMatrix(W_V, norm.written(self._head("W_O", sites)))
        W_out = host_of(self.model).neurons[sites.layer].directions
        rows = norm.written(_working(W_out[sites.index.to(W_out.device)]))
        share = self._members(sites, "weights", rows)
        return FactoredMatrix(share[:, None, None], rows[:, None, :])

    def rows(
        self, sites: LayerSites, z: Float[Tensor, "site d_head"]
    ) -> Float[Tensor, "site d_model"]:
        """What heads that put out z, or neurons that do, add to the stream, up to a norm's scale.

        Args:
            sites: some may be there more than once.
            z: of each.
        """
        _, norm = self._norms(sites.layer, sites.kind)
        if sites.kind == "attention":
            return norm.written((_working(z)[:, None] @ self._head("W_O", sites))[:, 0])
        W_out = host_of(self.model).neurons[sites.layer].directions
        return norm.written(_working(z) * _working(W_out[sites.index.to(W_out.device)]))

    def reads(self, sites: LayerSites, kind: Kind) -> FactoredMatrix:
        """What heads read: [site, d_model, d_model], or [site, d_model, 1] for neurons."""
        norm, _ = self._norms(sites.layer, sites.kind)
        if sites.kind == "attention":
            if kind == "v":
                return self.writes(sites)
            q, k = (norm.read(self._scored(name, sites)) for name in ("W_Q", "W_K"))
            left, right = (q, k) if kind == "q" else (k, q)
            return FactoredMatrix(left, right.transpose(-2, -1))
        assert kind != "k"
        mlp: Any = host_of(self.model).neurons[sites.layer].runs_in
        gate = getattr(mlp, "W_gate", None)
        W = mlp.W_in if kind == "v" or gate is None else gate
        columns = norm.read(_working(W[:, sites.index.to(W.device)])).T
        slope = self._members(sites, "slopes", columns) if kind == "q" else columns.new_ones(1)
        return FactoredMatrix(columns[:, :, None], slope.expand(len(columns))[:, None, None])

    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """W_E.

        Raises:
            CircuitError: it is not what enters the stream.
        """
        W_E: Tensor = self.model.W_E
        cfg = self.model.cfg
        if W_E.shape[-1] != cfg.d_model or getattr(cfg, "post_embedding_ln", False):
            raise CircuitError(
                [
                    f"its embedding, {list(W_E.shape)}, is normed or projected before it enters "
                    f"the stream of width {cfg.d_model}; name writers without 'embed'"
                ],
                "this embedding cannot be composed with",
            )
        return _working(W_E)


_NO_NORM = Norm(None, centres=False)


def _working(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
