"""Direct effects of heads on tokens: those that a node promotes, and those that a neuron reads.

    promotes z W_O N W_U     z of the node at its position in one run, N the final norm
    reads    W_E N W_in      W_gate of a gated MLP, which sets the neuron's pattern; N its norm

One number for each token of the vocabulary, for the direct path alone. Scales of norms are left
out: a positive factor does not change the order of tokens. So scores are standardized over the
vocabulary, (x - mean) / deviation, which no factor changes, nor what promotes all tokens alike.

The first is the logit lens on a component: nostalgebraist, "interpreting GPT: the logit lens"
(2020); Geva et al., "Transformer Feed-Forward Layers Build Predictions by Promoting Concepts in the
Vocabulary Space" (2022).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.weights.head_matrices import HeadMatrices
from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.heads import HeadName, host_of

_ROWS = 64  # of d_vocab numbers at once
TokenScores: TypeAlias = list[tuple[int, float]]
"""Tokens of the largest scores and, after them, those of the smallest; each with its score."""


class DirectEffects:
    """Projections of a model's heads onto its vocabulary.

    Args:
        model: converted, or with exposed neuron-heads.

    Raises:
        InputError: norms or matrices of a bridge are unknown.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._host = model, host_of(model)
        self._matrices = HeadMatrices.of(model, fold_norms=True)
        self._final = self._host.final_norm()

    @torch.no_grad()
    def promoted_tokens(
        self, z: dict[str, Tensor], nodes: Sequence[tuple[str, int]], k: int, *, prompt: int = 0
    ) -> list[TokenScores]:
        """Return the tokens that each node raises most at its own position, and lowers most.

        Args:
            z: outputs of heads, by hook name: [batch, pos, head_index, d_head].
            nodes: names of heads or neurons, and positions.
            k: tokens of each end; the whole vocabulary where it has no more than both.
            prompt: of the batch.

        Returns:
            The tokens of each node; none if it writes nothing.
        """
        found: dict[int, TokenScores] = {}
        for rows, sites in _by_layer([HeadName.parse(name) for name, _ in nodes]):
            name = self._host.hook_name(sites.layer, sites.kind, "z")
            out, positions = z[name][prompt], [nodes[row][1] for row in rows]
            if sites.kind == "neuron":
                out = self._host.neurons[sites.layer].neuron_outputs(out.squeeze(-1)).unsqueeze(-1)
            outputs = self._matrices.outputs(sites, out[positions, sites.index.to(out.device)])
            found |= zip(rows, self._unembed(self._final.after(outputs), k), strict=True)
        return [found[row] for row in range(len(nodes))]

    @torch.no_grad()
    def written_tokens(self, neurons: Sequence[str], k: int) -> list[TokenScores]:
        """Return the tokens that each neuron raises most where its z is positive, and lowers most.

        Args:
            neurons: names.
            k: tokens of each end.
        """
        found: dict[int, TokenScores] = {}
        for rows, sites in _by_layer([HeadName.parse(name) for name in neurons]):
            one = self._matrices.outputs(sites, sites.index.new_ones(len(rows), 1).float())
            found |= zip(rows, self._unembed(self._final.after(one), k), strict=True)
        return [found[row] for row in range(len(neurons))]

    @torch.no_grad()
    def read_tokens(
        self, neurons: Sequence[str], k: int, kind: Literal["q", "v"] = "q"
    ) -> list[TokenScores]:
        """Return the tokens whose embeddings raise the query of each neuron most, and lower it.

        Args:
            neurons: names.
            k: tokens of each end.
            kind: "v" for the value instead, which a gated MLP reads by other weights.

        Raises:
            InputError: the embedding is normed or projected before it enters the stream.
        """
        W_E = self._matrices.embedding()
        found: dict[int, TokenScores] = {}
        for rows, sites in _by_layer([HeadName.parse(name) for name in neurons]):
            columns = self._matrices.read_matrices(sites, kind).A[:, :, 0].to(W_E.device)
            tops = [top for some in columns.split(_ROWS) for top in _extremes(some @ W_E.T, k)]
            found |= zip(rows, tops, strict=True)
        return [found[row] for row in range(len(neurons))]

    def _unembed(self, outputs: Float[Tensor, "row d_model"], k: int) -> Iterator[TokenScores]:
        """Tokens by the unembedding as the model applies it, without its bias."""
        unembed, dtype = self._model.unembed, next(self._model.unembed.parameters()).dtype
        bias = unembed(outputs.new_zeros(1, 1, outputs.shape[1], dtype=dtype))
        for some in outputs.to(dtype).split(_ROWS):
            yield from _extremes((unembed(some[None]) - bias)[0], k)


def _by_layer(heads: list[HeadName]) -> Iterator[tuple[list[int], LayerSites]]:
    """Heads of one kind and layer together, with their rows in the list."""
    groups: dict[tuple[int, Any], list[int]] = {}
    for row, head in enumerate(heads):
        groups.setdefault((head.layer, head.kind), []).append(row)
    for rows in groups.values():
        yield rows, LayerSites.of(heads[row] for row in rows)


def _extremes(scores: Float[Tensor, "row d_vocab"], k: int) -> list[TokenScores]:
    centred = float32_if_half(scores)
    centred = centred - centred.mean(-1, keepdim=True)
    deviation = centred.std(-1, correction=0, keepdim=True)
    standard, n = centred / deviation, scores.shape[-1]
    values, tokens = standard.topk(min(k, (n + 1) // 2))
    low, lowest = standard.topk(min(k, n // 2), largest=False)
    values, tokens = torch.cat([values, low.flip(-1)], -1), torch.cat([tokens, lowest.flip(-1)], -1)
    return [
        list(zip(row.tolist(), amounts.tolist(), strict=True)) if spread > 0 else []
        for row, amounts, spread in zip(tokens, values, deviation[:, 0].tolist(), strict=True)
    ]
