"""What heads write, compared without writing it: dot products by way of Gram matrices.

A head h that puts out z, a row, writes z W with W = W_O[h]; a neuron is a head of one coordinate,
whose W is its row of W_out. With J the map that puts a coordinate of the original's stream where it
is in the grown one's, and C the projection that takes the mean away,

    ⟨z W C J, z' W' C⟩ = z (W C J C W'ᵀ) z'ᵀ        ‖z W C‖² = z (W C Wᵀ) zᵀ

so three matrices of d_head × d_head a head, three numbers a neuron, give the dot product and both
norms of any token: nothing of size heads × d_model or neurons × d_model arises per token. C is
there where the norms that read the stream are LayerNorms, which do not see the mean (growth under
LayerNorm takes it out of the weights), and the identity elsewhere. Coordinates that are new count:
what a head writes there is a difference.

Over a set of tokens, outputs are one long vector each, so that

    cosine = Σ ⟨o, o'⟩ / √(Σ ‖o‖² Σ ‖o'‖²)         norm ratio = √(Σ ‖o'‖² / Σ ‖o‖²)

with tokens weighed by how much is written there, and sums are all that is kept.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attn_only_lens.circuits.weights import Weights
from attn_only_lens.circuits.wiring import wirings
from attn_only_lens.comparison.alignment import Aligned
from attn_only_lens.numerics import where_float64_is
from attn_only_lens.patching.sites import LayerSites

__all__ = ["Grams", "Writers", "squares"]


@dataclass(frozen=True, eq=False)
class Writers:
    """What the heads of a model write along, as readers see it.

    Attributes:
        weights: of the model, as they stand.
        centred: whether every norm that reads the stream takes the mean away.
    """

    weights: Weights
    centred: bool

    @classmethod
    def of(cls, model: Any) -> "Writers":
        """The writers of a model.

        Raises:
            CircuitError: norms or matrices of a bridge that are not known.
        """
        norms = [norm for each in wirings(model) for norm in (each.attention[0], each.neuron[0])]
        return cls(Weights.of(model, fold_norms=False), all(norm.centres for norm in norms))

    def rows(self, sites: LayerSites) -> Float[Tensor, "site d_head d_model"]:
        """W C of each site."""
        W: Tensor = self.weights.writes(sites).B
        return W - W.mean(dim=-1, keepdim=True) if self.centred else W


@dataclass(frozen=True, eq=False)
class Grams:
    """The three Gram matrices of heads of one kind in one layer, of two models.

    Attributes:
        cross: W C J C W'ᵀ.
        first: W C Wᵀ.
        second: W' C W'ᵀ.
    """

    cross: Float[Tensor, "site d_head d_head_2"]
    first: Float[Tensor, "site d_head d_head"]
    second: Float[Tensor, "site d_head_2 d_head_2"]

    @classmethod
    def of(
        cls, first: Writers, second: Writers, pair: Aligned, coordinates: Int[Tensor, "d_model"]
    ) -> "Grams":
        """Those of components that two models have.

        Args:
            first: what those of the first model write along.
            second: what those of the second do.
            pair: which.
            coordinates: where those of the first one's stream are in the second one's.
        """
        one, other = first.rows(pair.first), second.rows(pair.second)
        one, shared = one.to(other), other[..., coordinates.to(other.device)]
        return cls(_products(one, shared), _products(one, one), _products(other, other))

    def sums(
        self, z: Float[Tensor, "*token site d_head"], other: Float[Tensor, "*token site d_head_2"]
    ) -> Float[Tensor, "3 site"]:
        """Σ ⟨o, o'⟩, Σ ‖o‖² and Σ ‖o'‖² over tokens, in float64."""
        z, other = (x.flatten(0, -3).to(self.second) for x in (z, other))
        found = [
            _dot(z, self.cross, other),
            _dot(z, self.first, z),
            _dot(other, self.second, other),
        ]
        return torch.stack(found)


def squares(
    rows: Float[Tensor, "site d_head d_model"], z: Float[Tensor, "*token site d_head"]
) -> Float[Tensor, "site"]:
    """Σ ‖o‖² over tokens, in float64."""
    z = z.flatten(0, -3).to(rows)
    return _dot(z, _products(rows, rows), z)


def _products(one: Tensor, other: Tensor) -> Tensor:
    return torch.einsum("sam,sbm->sab", one, other)


def _dot(z: Tensor, gram: Tensor, other: Tensor) -> Float[Tensor, "site"]:
    if gram.shape[1:] == (1, 1):  # neurons: the matrix product would be as many of size 1
        written = where_float64_is((z * other).squeeze(-1)).sum(0, dtype=torch.float64)
        return written * where_float64_is(gram[:, 0, 0]).double()
    moved = torch.einsum("tsa,sab->tsb", z, gram)
    return where_float64_is((moved * other).sum(-1)).sum(0, dtype=torch.float64)
