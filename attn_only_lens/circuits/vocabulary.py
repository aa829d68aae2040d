"""Nodes of a graph in tokens: which ones they raise, by W_U, and which ones a neuron reads, by W_E.

    raises   z W_O N W_U     z of the node at its position in one run, N the final norm
    reads    W_E N W_in      W_gate of a gated MLP, which sets the neuron's pattern; N its norm

One number for each token of the vocabulary, the direct path alone. Scales of norms are left out: a
positive factor orders tokens no other way. So an amount is told as (x - mean) / deviation over the
vocabulary, which no factor changes, nor what raises all tokens alike.

The first is the logit lens on a component: nostalgebraist, "interpreting GPT: the logit lens"
(2020); Geva et al., "Transformer Feed-Forward Layers Build Predictions by Promoting Concepts in the
Vocabulary Space" (2022).
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.head_weights import Weights
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.runs.sites import WHOLE, LayerSites

__all__ = ["TopTokens", "Vocabulary"]

_PIECE = 64  # rows of d_vocab numbers at once
TopTokens: TypeAlias = list[tuple[int, float]]
"""Tokens and amounts, the largest first."""


class Vocabulary:
    """What the heads of a model say of tokens."""

    def __init__(self, model: Any) -> None:
        """Look at the norms and the matrices.

        Args:
            model: converted, or with exposed neuron-heads.

        Raises:
            CircuitError: a bridge's norms or matrices are not known.
        """
        self._model = model
        self._weights = Weights.of(model, fold_norms=True)
        self._final = host_of(model).final_norm()

    @torch.no_grad()
    def raised(
        self, z: dict[str, Tensor], nodes: Sequence[tuple[str, int]], k: int, *, prompt: int = 0
    ) -> list[TopTokens]:
        """The tokens that each node raises most at its own position.

        Args:
            z: what heads put out, by hook name: [batch, pos, head_index, d_head].
            nodes: names of heads or neurons, and positions.
            k: tokens of each.
            prompt: of the batch.

        Returns:
            For each node its tokens; none where it writes nothing.
        """
        found: dict[int, TopTokens] = {}
        for places, sites in _by_layer([HeadName.parse(name) for name, _ in nodes]):
            name = host_of(self._model).hook_name(sites.layer, sites.kind, "z")
            out, positions = z[name][prompt], [nodes[place][1] for place in places]
            if sites.kind == "neuron":
                out = (
                    host_of(self._model).neurons[sites.layer].neurons(out.squeeze(-1)).unsqueeze(-1)
                )
            rows = self._weights.rows(sites, out[positions, sites.index.to(out.device)])
            found |= zip(places, self._through(self._final.written(rows), k), strict=True)
        return [found[place] for place in range(len(nodes))]

    @torch.no_grad()
    def read(self, neurons: Sequence[str], k: int) -> list[TopTokens]:
        """The tokens whose embeddings raise the query of each neuron most.

        Args:
            neurons: names.
            k: tokens of each.

        Raises:
            CircuitError: the embedding is not what enters the stream.
        """
        W_E = self._weights.embedding()
        found: dict[int, TopTokens] = {}
        for places, sites in _by_layer([HeadName.parse(name) for name in neurons]):
            columns = self._weights.reads(sites, "q").A[:, :, 0]
            tops = [top for some in columns.split(_PIECE) for top in _largest(some @ W_E.T, k)]
            found |= zip(places, tops, strict=True)
        return [found[place] for place in range(len(neurons))]

    def _through(self, rows: Float[Tensor, "row d_model"], k: int) -> Iterator[TopTokens]:
        """By the unembedding as the model applies it; its bias is no one's."""
        unembed, dtype = self._model.unembed, next(self._model.unembed.parameters()).dtype
        nothing = unembed(rows.new_zeros(1, 1, rows.shape[1], dtype=dtype))
        for some in rows.to(dtype).split(_PIECE):
            yield from _largest((unembed(some[None]) - nothing)[0], k)


def _by_layer(heads: list[HeadName]) -> Iterator[tuple[list[int], LayerSites]]:
    """Heads of one kind and layer together, and where they stood."""
    groups: dict[tuple[int, Any], list[int]] = {}
    for place, head in enumerate(heads):
        groups.setdefault((head.layer, head.kind), []).append(place)
    for (layer, kind), places in groups.items():
        index = torch.tensor([heads[place].index for place in places], device="cpu")
        names = tuple(str(heads[place]) for place in places)
        yield places, LayerSites(layer, kind, names, index, torch.full_like(index, WHOLE))


def _largest(scores: Float[Tensor, "row d_vocab"], k: int) -> list[TopTokens]:
    scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    apart = scores - scores.mean(-1, keepdim=True)
    deviation = apart.std(-1, correction=0, keepdim=True)
    values, tokens = (apart / deviation).topk(min(k, scores.shape[-1]))
    return [
        list(zip(row.tolist(), amounts.tolist(), strict=True)) if says else []
        for row, amounts, says in zip(tokens, values, (deviation[:, 0] > 0).tolist(), strict=True)
    ]
