"""Compute what heads read from token embeddings, and what they add to the logits.

    reads    W_E N W         N: the gain of the norm before the head
    writes   W N W_U C       N: the gain of the final norm; C removes the mean over the vocabulary

Softmax does not depend on the mean of the logits, so C removes this mean. The option
`center_unembed` of TransformerLens therefore does not change the matrices.

`DirectEffects` scores tokens by the direct path between one node and each token:

    promotes z W_O N W_U     z: the node's output at its position in one run; N: the final norm
    reads    W_E N W_in      W_gate in a gated MLP; N: the norm before the neuron

Because norm scales are left out, scores are standardized over the vocabulary (mean 0, variance 1).
The formula for "promotes" is the logit lens of one component (nostalgebraist, "interpreting GPT:
the logit lens", 2020), as in Geva et al., "Transformer Feed-Forward Layers Build Predictions by
Promoting Concepts in the Vocabulary Space" (2022).
"""

import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.circuits.weights.head_matrices import HeadMatrices
from attn_only_lens.devices import float32_if_half, normal_numbers
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.engine.writes import norms_of
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.models.norms import NO_NORM, Norm
from attn_only_lens.tolerances import rounding

_PROBLEM = "the heads of this model cannot be written as matrices over its vocabulary"
_ROWS = 64  # the number of rows processed at once, each with d_vocab values
TokenScores: TypeAlias = list[tuple[int, float]]
"""Pairs (token, score): first the largest scores, then the smallest."""


@dataclass(frozen=True, eq=False)
class InputVocabulary:
    """The matrices of a model's heads, and the embeddings of `read_tokens` (None: all tokens)."""

    heads: HeadMatrices
    W_E: Float[Tensor, "d_vocab d_model"]
    read_tokens: tuple[int, ...] | None

    @classmethod
    def of(cls, model: Any, tokens: Sequence[int] | None, *, fold_norms: bool) -> "InputVocabulary":
        """Return a model's head matrices, and the embeddings of the given tokens."""
        heads = HeadMatrices.of(model, fold_norms=fold_norms)
        W_E = _finite(heads.embedding(), "embedding")
        chosen = _checked(tokens, len(W_E))
        return cls(heads, W_E if chosen is None else W_E[list(chosen)], chosen)

    def reads(self, columns: Float[Tensor, "d_model n"]) -> Float[Tensor, "d_vocab n"]:
        """Return the dot products of token embeddings with the heads' read directions."""
        return self.W_E @ columns.to(self.W_E)


@dataclass(frozen=True, eq=False)
class VocabularyMatrices(InputVocabulary):
    """An `InputVocabulary` with the final norm and with unembedding columns of output tokens.

    `written_tokens` lists these output tokens; None means all tokens.
    """

    W_U: Float[Tensor, "d_model d_vocab_out"]
    written_tokens: tuple[int, ...] | None
    final: Norm
    mean: Float[Tensor, "d_model"]

    @classmethod
    def of(
        cls, model: Any, tokens: Sequence[int] | None, *, fold_norms: bool
    ) -> "VocabularyMatrices":
        """Return a model's head matrices, and the given tokens' embeddings and unembeddings."""
        both = InputVocabulary.of(model, None, fold_norms=fold_norms)
        W_E, W_U = both.W_E, _finite(_unembedding(model), "unembedding")
        sizes = {"input": len(W_E), "output": W_U.shape[1]}
        read = written = None
        if (chosen := _checked(tokens, max(sizes.values()))) is not None:
            read, written = (tuple(x for x in chosen if x < size) for size in sizes.values())
            InputError.raise_if(
                [
                    f"got tokens={reprlib.repr(tokens)}, none of them in the {name} vocabulary; "
                    f"expected at least one from 0 to {size - 1}"
                    for (name, size), some in zip(sizes.items(), (read, written), strict=True)
                    if not some
                ],
                _PROBLEM,
            )
            W_E, W_U = W_E[list(read)], W_U[:, list(written)]
        final = norms_of(model)[1] if fold_norms else NO_NORM
        return cls(both.heads, W_E, read, W_U, written, final, W_U.mean(dim=1))

    def writes(self, rows: Float[Tensor, "n d_model"]) -> Float[Tensor, "n d_vocab_out"]:
        """Return what each row of the residual stream adds to each logit, minus their mean."""
        normed = self.final.after(rows).to(self.W_U)
        return (normed @ self.W_U).sub_((normed @ self.mean)[:, None])


def _finite(matrix: Tensor, name: str) -> Tensor:
    if not matrix.isfinite().all():
        raise InputError([f"the {name} has weights that are not finite"], _PROBLEM)
    return matrix


def _checked(tokens: object, n: int) -> tuple[int, ...] | None:
    if tokens is None:
        return None
    listed = as_plain(tokens)
    ids = list(listed) if isinstance(listed, Sequence) else []
    if not ids or not all(is_count(token, 0, n - 1) for token in ids) or len({*ids}) < len(ids):
        reason = f"got tokens={reprlib.repr(tokens)}; expected different tokens from 0 to {n - 1}"
        raise InputError([reason], _PROBLEM)
    return tuple(ids)


def _unembedding(model: Any) -> Float[Tensor, "d_model d_vocab_out"]:
    """Return W_U; raise an error unless the unembedding multiplies by W_U and adds a bias."""
    unembed = model.unembed
    W_U = getattr(unembed, "W_U", None)
    if W_U is not None:
        x = normal_numbers((1, 3, W_U.shape[0])).to(W_U)
        logits = unembed(x) - unembed(torch.zeros_like(x))
        expected = x @ W_U
        allowed = 10 * rounding(W_U.dtype) * expected.norm()
        if logits.shape == expected.shape and (logits - expected).norm() <= allowed:
            return float32_if_half(W_U.detach())
    raise InputError(["the unembedding does not multiply by one matrix W_U"], _PROBLEM)


class DirectEffects:
    """Finds the tokens that each node promotes or responds to most, through direct paths only."""

    def __init__(self, model: Any) -> None:
        self._unembed, self._host = model.unembed, host_of(model)
        self._matrices = HeadMatrices.of(model, fold_norms=True)
        self._final = norms_of(model)[1]

    @torch.no_grad()
    def promoted_tokens(
        self, z: dict[str, Tensor], nodes: Sequence[tuple[str, int, int]], k: int
    ) -> list[TokenScores]:
        """Return the tokens whose logits each node (head, prompt, position) raises or lowers most.

        `z` is a dict from hook names to the outputs of heads, [batch, pos, head_index, d_head].
        """

        def tops(sites: LayerSites, rows: list[int]) -> list[TokenScores]:
            outputs = z[self._host.hook_name(sites.layer, sites.kind, "z")]
            prompts, positions = zip(*(nodes[row][1:] for row in rows), strict=True)
            chosen = outputs[list(prompts), list(positions), sites.index.to(outputs.device)]
            return self.tokens_of(self._matrices.outputs(sites, chosen), k)

        return _by_layer(self._host.model, (name for name, *_ in nodes), tops)

    @torch.no_grad()
    def written_tokens(self, neurons: Sequence[str], k: int) -> list[TokenScores]:
        """Return the tokens whose logits each neuron raises and lowers most when z is positive."""

        def tops(sites: LayerSites, rows: list[int]) -> list[TokenScores]:
            ones = sites.index.new_ones(len(rows), 1).float()
            return self.tokens_of(self._matrices.outputs(sites, ones), k)

        return _by_layer(self._host.model, neurons, tops)

    @torch.no_grad()
    def read_tokens(
        self, neurons: Sequence[str], k: int, kind: Literal["q", "v"] = "q"
    ) -> list[TokenScores]:
        """Return the tokens whose embeddings raise and lower each neuron's query or value most."""
        W_E = self._matrices.embedding()

        def tops(sites: LayerSites, rows: list[int]) -> list[TokenScores]:
            columns = self._matrices.read_matrices(sites, kind).A[:, :, 0].to(W_E.device)
            return [top for some in columns.split(_ROWS) for top in _extremes(some @ W_E.T, k)]

        return _by_layer(self._host.model, neurons, tops)

    @torch.no_grad()
    def tokens_of(self, written: Float[Tensor, "row d_model"], k: int) -> list[TokenScores]:
        """Return the tokens whose logits each row of `written` raises and lowers most."""
        dtype = next(self._unembed.parameters()).dtype
        rows = self._final.after(written).to(dtype)
        bias = self._unembed(torch.zeros_like(rows[None, :1]))
        return [
            top
            for some in rows.split(_ROWS)
            for top in _extremes((self._unembed(some[None]) - bias)[0], k)
        ]


def _by_layer(
    model: Any,
    names: Iterable[str],
    tops: Callable[[LayerSites, list[int]], list[TokenScores]],
) -> list[TokenScores]:
    """Call `tops` once per sublayer, and return each head's tokens in the order of `names`."""
    heads = [HeadName.parse(name) for name in names]
    groups: dict[tuple[int, Any], list[int]] = {}
    for row, head in enumerate(heads):
        groups.setdefault((head.layer, head.kind), []).append(row)
    tokens: dict[int, TokenScores] = {}
    for rows in groups.values():
        sites = LayerSites.of(model, (heads[row] for row in rows))
        tokens |= zip(rows, tops(sites, rows), strict=True)
    return [tokens[row] for row in range(len(heads))]


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
