"""What heads read from the embedding and write to the logits: their matrices in the vocabulary.

    reads    W_E N W         N the gain of the norm that the head reads through
    writes   W N W_U C       N that of the final norm; C removes the mean over the vocabulary

The mean over the vocabulary is left out since softmax does not see it: so a model with a centred
unembedding has the matrices of the same model without.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.circuits.weights.head_matrices import HeadMatrices
from attn_only_lens.devices import float32_if_half, normal_numbers
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.models.norms import NO_NORM, Norm
from attn_only_lens.tolerances import rounding

_PROBLEM = "heads of this model have no matrices in its vocabulary"


@dataclass(frozen=True, eq=False)
class InputVocabulary:
    """The matrices of a model's heads, and its embedding.

    Attributes:
        heads: the matrices of heads.
        W_E: the embedding of `read_tokens`.
        read_tokens: the tokens that were asked for; None for all.
    """

    heads: HeadMatrices
    W_E: Float[Tensor, "d_vocab d_model"]
    read_tokens: tuple[int, ...] | None

    @classmethod
    def of(cls, model: Any, tokens: Sequence[int] | None, *, fold_norms: bool) -> "InputVocabulary":
        """Return the matrices of a model.

        Args:
            model: converted, or with exposed neuron-heads.
            tokens: of the input vocabulary, each once; None for all.
            fold_norms: whether to fold gains of norms into the weights.

        Raises:
            InputError: with every reason: norms or matrices of a bridge are unknown; an embedding
                that does more than multiply by one matrix, or is not finite; tokens that are not
                in the vocabulary, or repeated.
        """
        heads, W_E = _embedding(model, fold_norms)
        chosen = _checked(tokens, len(W_E))
        return cls(heads, W_E if chosen is None else W_E[list(chosen)], chosen)

    def reads(self, columns: Float[Tensor, "d_model n"]) -> Float[Tensor, "d_vocab n"]:
        """Return what is read, through columns, of the embedding of each token."""
        return self.W_E @ columns.to(self.W_E)


@dataclass(frozen=True, eq=False)
class VocabularyMatrices(InputVocabulary):
    """The matrices of a model's heads, its embedding and its unembedding.

    The input and the output vocabulary may differ. Of the tokens that are asked for, heads read
    those of the input vocabulary, and write those of the output vocabulary.

    Attributes:
        heads: the matrices of heads.
        W_E: the embedding of `read_tokens`.
        read_tokens: the tokens that are read; None for all.
        W_U: the unembedding of `written_tokens`.
        written_tokens: the tokens that are written; None for all.
        final: the norm before the unembedding.
        mean: the mean of W_U over `written_tokens`.
    """

    W_U: Float[Tensor, "d_model d_vocab_out"]
    written_tokens: tuple[int, ...] | None
    final: Norm
    mean: Float[Tensor, "d_model"]

    @classmethod
    def of(
        cls, model: Any, tokens: Sequence[int] | None, *, fold_norms: bool
    ) -> "VocabularyMatrices":
        """Return the matrices of a model.

        Args:
            model: converted, or with exposed neuron-heads.
            tokens: of either vocabulary, each once; None for all.
            fold_norms: whether to fold gains of norms into the weights.

        Raises:
            InputError: as for `InputVocabulary`, and the same for the unembedding; none of the
                tokens is in the input vocabulary, or none in the output vocabulary.
        """
        heads, W_E = _embedding(model, fold_norms)
        W_U = _finite(_unembedding(model), "unembedding")
        sizes = len(W_E), W_U.shape[1]
        chosen = _checked(tokens, max(sizes))
        read, written = (
            None if chosen is None else tuple(token for token in chosen if token < size)
            for size in sizes
        )
        for name, part, size in zip(("input", "output"), (read, written), sizes, strict=True):
            if part == ():
                reason = (
                    f"got tokens={reprlib.repr(tokens)}, none of them in the {name} vocabulary; "
                    f"expected at least one from 0 to {size - 1}"
                )
                raise InputError([reason], _PROBLEM)
        W_E = W_E if read is None else W_E[list(read)]
        W_U = W_U if written is None else W_U[:, list(written)]
        final = host_of(model).final_norm() if fold_norms else NO_NORM
        return cls(heads, W_E, read, W_U, written, final, W_U.mean(dim=1))

    def writes(self, rows: Float[Tensor, "n d_model"]) -> Float[Tensor, "n d_vocab_out"]:
        """Return what rows in the stream add to each logit, up to a constant."""
        normed = self.final.after(rows).to(self.W_U)
        return (normed @ self.W_U).sub_((normed @ self.mean)[:, None])


def _embedding(
    model: Any, fold_norms: bool
) -> tuple[HeadMatrices, Float[Tensor, "d_vocab d_model"]]:
    heads = HeadMatrices.of(model, fold_norms=fold_norms)
    return heads, _finite(heads.embedding(), "embedding")


def _finite(matrix: Tensor, name: str) -> Tensor:
    if not matrix.isfinite().all():
        raise InputError([f"its {name} has weights that are not finite"], _PROBLEM)
    return matrix


def _checked(tokens: object, n: int) -> tuple[int, ...] | None:
    if tokens is None:
        return None
    given = as_plain(tokens)
    ids = [as_plain(each) for each in given] if isinstance(given, Sequence) else []
    if not ids or not all(is_count(each, 0, n - 1) for each in ids) or len({*ids}) < len(ids):
        raise InputError(
            [f"got tokens={reprlib.repr(tokens)}; expected tokens from 0 to {n - 1}, each once"],
            _PROBLEM,
        )
    return tuple(ids)


def _unembedding(model: Any) -> Float[Tensor, "d_model d_vocab_out"]:
    """W_U, once it is known that the model applies it."""
    unembed = model.unembed
    W_U = getattr(unembed, "W_U", None)
    if W_U is not None:
        x = normal_numbers((1, 3, W_U.shape[0])).to(W_U)
        made = unembed(x) - unembed(torch.zeros_like(x))
        expected = x @ W_U
        allowed = 10 * rounding(W_U.dtype) * expected.norm()
        if made.shape == expected.shape and (made - expected).norm() <= allowed:
            return float32_if_half(W_U.detach())
    raise InputError(
        ["its unembedding does not multiply by one matrix W_U: nothing follows it"], _PROBLEM
    )
