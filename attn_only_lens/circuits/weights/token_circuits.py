"""Token-to-token circuits of attention heads and MLP neurons, computed from weights alone.

    attention head   QK  W_E W_Q W_Kᵀ W_Eᵀ      query token, key token
                     OV  W_E W_V W_O W_U C      token attended to, token whose logit is raised
    neuron-head      QK  W_E W_in[:, i]         query token (W_gate in a gated MLP). The only key is
                                                the bias token's, so this is a vector over tokens
                     OV  W_E W_in[:, i] ⊗ W_out[i] W_U C    rank one

The definitions are from Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
The QK circuit of a neuron-head shows which tokens open its gate. The OV circuit shows which logits
the neuron-head raises for each token. The circuits omit norm scales (gains are folded in), biases,
constant factors of embeddings and logits (Gemma, Granite, Cohere), positions (rotary embeddings are
taken at distance 0), 1/√d_head, and the outputs of earlier heads. W_U C is W_U minus its mean over
the vocabulary.

A head copies if its OV circuit M raises the logit of the token that it reads:

    copying = Σ λ / Σ |λ|               λ: eigenvalues of M; on average 0 for random heads
    cosine  = Σ λ / ‖M‖_F               the cosine between M and the identity, times √d_vocab

A neuron-head's M has rank one, so its only nonzero eigenvalue is (W_out W_U C) · (W_E W_in), and
copying is 1 or -1. M is not computed: for an attention head, the d_head × d_head matrix W_O W_U C
W_E W_V has the nonzero eigenvalues of M, and ‖M‖² = tr((W_Vᵀ W_Eᵀ W_E W_V)(W_O W_U C W_Uᵀ W_Oᵀ)).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import pandas as pd
import torch
from jaxtyping import Complex, Float
from torch import Tensor
from transformer_lens import FactoredMatrix

from attn_only_lens.arguments import POSITIVE, one_of
from attn_only_lens.circuits.weights.head_matrices import heads_with_matrices
from attn_only_lens.circuits.weights.vocabulary import InputVocabulary, VocabularyMatrices
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.engine.sites import LayerSites, SomeSites
from attn_only_lens.engine.tokens import token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName
from attn_only_lens.heads.host import NEURON_KINDS
from attn_only_lens.precision import full_precision

CircuitKind: TypeAlias = Literal["qk", "ov"]
_BIAS = -1  # the token ID that stands for the bias token
_ROWS = 1024  # the number of tokens processed at once
_PROBLEM = "this part of a circuit cannot be shown"
_NO_SCORES = "these heads have no copying scores"


@dataclass(frozen=True, eq=False)
class TokenCircuit:
    """The token-to-token matrix of a head, computed from its weights.

    Attributes:
        name: the head's name.
        kind: "qk" or "ov".
        matrix: a TransformerLens `FactoredMatrix`. Rows are query tokens (QK) or read tokens (OV);
            columns are key tokens (QK) or written tokens (OV). The QK matrix of a neuron has one
            column, for the bias token.
        row_tokens: the tokens of the rows; None for the whole input vocabulary.
        column_tokens: the tokens of the columns; None for the whole vocabulary.
    """

    name: str
    kind: CircuitKind
    matrix: FactoredMatrix
    row_tokens: tuple[int, ...] | None
    column_tokens: tuple[int, ...] | None
    _model: Any = field(repr=False)

    @property
    def columns(self) -> tuple[str, str]:
        """What rows and columns stand for: ("query", "key") or ("read", "written") tokens."""
        return ("query", "key") if self.kind == "qk" else ("read", "written")

    @torch.no_grad()
    @full_precision()
    def top(self, k: int = 20, *, lowest: bool = False, block: int = 1024) -> pd.DataFrame:
        """Return the token pairs with the largest scores.

        Args:
            k: the largest number of pairs to return.
            lowest: return the most negative scores instead of the largest.
            block: how many rows and columns to compute at once.

        Returns:
            A frame sorted by decreasing score (increasing for `lowest`). Columns: the texts `query`
            and `key`, or `read` and `written`; their token IDs, `query_token` etc. (-1 for the bias
            token); and `score`.

        Raises:
            InputError: k or block is not positive.
        """
        InputError.raise_if(POSITIVE.reasons(k=k, block=block), _PROBLEM)
        largest, sign = LargestScores(k), -1.0 if lowest else 1.0
        left, right = self.matrix.A, self.matrix.B.T
        largest.add_products(left, sign * right, (0, 0), block=block)
        ends = dict(zip(self.columns, largest.pairs.T.tolist(), strict=True))
        texts = {name: self._texts(name, places) for name, places in ends.items()}
        tokens = {f"{name}_token": self._ids(name, places) for name, places in ends.items()}
        score = sign * largest.values.cpu().double().numpy()
        return pd.DataFrame({**texts, **tokens, "score": score})

    @property
    def eigenvalues(self) -> Complex[Tensor, "d_head"]:
        """The d_head eigenvalues of B A, where A B is `matrix`; the others of A B are 0.

        Raises:
            InputError: the matrix is not square.
        """
        if (shape := list(self.matrix.shape)) != shape[::-1]:
            reason = f"got a matrix of shape {shape}; expected a square matrix"
            raise InputError([reason], "this circuit has no eigenvalues")
        return torch.linalg.eigvals(to_float64_device(self.matrix.BA).double())

    def _ids(self, name: str, places: list[int]) -> list[int]:
        if name == "key" and self.matrix.shape[1] == 1:
            return [_BIAS] * len(places)
        tokens = self.row_tokens if name == self.columns[0] else self.column_tokens
        return places if tokens is None else [tokens[place] for place in places]

    def _texts(self, name: str, places: list[int]) -> list[str]:
        ids = self._ids(name, places)
        return ["bias token" if id_ == _BIAS else token_text(self._model, id_) for id_ in ids]


@torch.no_grad()
@full_precision()
def token_circuit(
    model: Any,
    name: str | HeadName,
    kind: CircuitKind,
    *,
    tokens: Sequence[int] | None = None,
    fold_norms: bool = True,
) -> TokenCircuit:
    """Return the QK or the OV circuit of a head, a matrix over tokens.

    The QK circuit says which tokens a head attends to, or which tokens open a neuron's gate. The OV
    circuit says which logits a head raises for each token that it attends to.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads.
        name: `L5H3`, or a neuron such as `L5N1234`.
        kind: "qk" or "ov".
        tokens: the tokens of the vocabulary to use; None for all. Untrained tokens may have extreme
            scores, and would then fill every table. If input and output vocabularies differ, rows
            of an OV circuit are the tokens in the input vocabulary, and columns the tokens in the
            output vocabulary.
        fold_norms: fold the gains of norms into the weights.

    Returns:
        The circuit. Its matrix, in two factors, is W_E W_Q W_Kᵀ W_Eᵀ ([d_vocab, 1] for a neuron),
        or W_E W_V W_O W_U C, where C centres logits over the columns.

    Raises:
        InputError: an unknown kind; a model without neuron-heads, or without this head; unsupported
            weights, norms, embeddings or, for "ov", unembedding; tokens that are repeated or not in
            the vocabulary; for "ov", none of the tokens is in the input vocabulary, or none in the
            output vocabulary.

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, load
        >>> model = expose_neuron_heads(load("small-english")).model
        >>> circuits.token_circuit(model, "L0H1", "qk").matrix
        FactoredMatrix: Shape(torch.Size([456, 456])), Hidden Dim(32)
        >>> circuits.token_circuit(model, "L0N5", "qk").top(3)["key"].tolist()
        ['bias token', 'bias token', 'bias token']
        >>> ov = circuits.token_circuit(model, "L1H0", "ov")
        >>> bool(ov.top(5)["score"].is_monotonic_decreasing), len(ov.eigenvalues)
        (True, 32)
    """
    InputError.raise_if(one_of(*get_args(CircuitKind)).reasons(kind=kind), _PROBLEM)
    sites = _resolve_one(model, name)
    if kind == "qk":
        inputs = InputVocabulary.of(model, tokens, fold_norms=fold_norms)
        read = inputs.heads.read_matrices(sites, "q")
        left = inputs.reads(read.A[0])
        right = read.B[0] if sites.kind in NEURON_KINDS else inputs.reads(read.B[0].T).T
        both = FactoredMatrix(left, right.to(left))
        ends = inputs.read_tokens, inputs.read_tokens
    else:
        matrices = VocabularyMatrices.of(model, tokens, fold_norms=fold_norms)
        written = matrices.heads.write_matrices(sites)
        left = written.A[0]
        if sites.kind in NEURON_KINDS:
            left = matrices.heads.read_matrices(sites, "v").A[0] * left
        right = matrices.writes(written.B[0])
        both = FactoredMatrix(matrices.reads(left).to(right), right)
        ends = matrices.read_tokens, matrices.written_tokens
    return TokenCircuit(sites.names[0], kind, both, *ends, model)


def _resolve_one(model: Any, name: str | HeadName) -> LayerSites:
    if not isinstance(name, str | HeadName):
        raise InputError([f"got {name!r}; expected one name, such as 'L5H3'"], _PROBLEM)
    (sites,) = heads_with_matrices(model, [name], _PROBLEM)
    return sites


@torch.no_grad()
@full_precision()
def copying_scores(
    model: Any,
    sites: SomeSites = "all",
    *,
    tokens: Sequence[int] | None = None,
    fold_norms: bool = True,
) -> pd.DataFrame:
    """Return copying scores of attention heads and MLP neurons, from eigenvalues of OV circuits.

    The score is from Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

    Args:
        model: a model from `convert`, or one with exposed neuron-heads.
        sites: the heads, without positions; see `Sites`.
        tokens: as in `token_circuit`; they must be in both vocabularies. Eigenvalues are then
            computed for the circuit between these tokens.
        fold_norms: fold the gains of norms into the weights.

    Returns:
        A frame with one row per head, ordered by layer. Columns: `name`, `layer`, `kind`
        ("attention", "neuron" or "feature"), `eigenvalue_sum` (for a neuron, its only eigenvalue),
        `copying`, `cosine`. The last two are missing if a head reads or writes nothing.

    Raises:
        InputError: as in `token_circuit`; vocabularies of different sizes, without `tokens` that
            are in both; weights that are not finite.

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, load
        >>> model = expose_neuron_heads(load("small-english")).model
        >>> frame = circuits.copying_scores(model, "heads")
        >>> frame.columns.tolist()
        ['name', 'layer', 'kind', 'eigenvalue_sum', 'copying', 'cosine']
        >>> bool(frame["copying"].between(-1, 1).all())
        True
    """
    chosen = heads_with_matrices(model, sites, _NO_SCORES)
    matrices = VocabularyMatrices.of(model, tokens, fold_norms=fold_norms)
    d_vocab, d_out = len(matrices.W_E), matrices.W_U.shape[1]
    if d_vocab != d_out:
        reason = (
            f"got {d_vocab} input tokens and {d_out} output tokens; expected the same tokens: pass "
            "`tokens` that are in both vocabularies"
        )
        raise InputError([reason], _NO_SCORES)
    products = _products(matrices)
    frames = []
    for layer in chosen:
        sums = _of_attention if layer.kind == "attention" else _of_neurons
        total, size, norm = (x.cpu().double().numpy() for x in sums(matrices, layer, *products))
        frame = pd.DataFrame({"name": layer.names, "layer": layer.layer, "kind": layer.kind})
        frame["eigenvalue_sum"] = total
        for name, scale in (("copying", size), ("cosine", norm)):
            frame[name] = frame["eigenvalue_sum"] / pd.Series(scale).where(lambda x: x > 0)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _products(matrices: VocabularyMatrices) -> tuple[Tensor, Tensor, Tensor]:
    """Return W_U C W_E, W_Eᵀ W_E and W_U C W_Uᵀ, with the final norm folded into W_U."""
    d_model = matrices.W_E.shape[1]
    precise = to_float64_device(matrices.W_E)
    sums = torch.zeros(3, d_model, d_model, dtype=torch.float64, device=precise.device)
    mean = matrices.mean.to(precise.device).double()
    for first in range(0, len(precise), _ROWS):
        some = slice(first, first + _ROWS)
        E = precise[some].double()
        U = matrices.W_U[:, some].T.to(precise.device).double() - mean
        for product, left, right in zip(sums, (U, E, U), (E, E, U), strict=True):
            product.addmm_(left.T, right)
    across, read, written = sums.to(matrices.W_E)
    norm = matrices.final
    return norm.before(across), read, norm.before(norm.before(written).T)


_Sums = tuple[Float[Tensor, "site"], Float[Tensor, "site"], Float[Tensor, "site"]]
"""Σ λ, Σ |λ| and ‖M‖ for each head."""


def _of_attention(
    matrices: VocabularyMatrices, sites: LayerSites, across: Tensor, read: Tensor, written: Tensor
) -> _Sums:
    factors = matrices.heads.write_matrices(sites)
    W_V, W_O = factors.A.to(across), factors.B.to(across)
    inner = (W_V.transpose(-2, -1) @ read @ W_V) * (W_O @ written @ W_O.transpose(-2, -1))
    if not inner.isfinite().all():
        raise InputError([f"{sites.names[0]}: weights that are not finite"], _NO_SCORES)
    eigenvalues = torch.linalg.eigvals(to_float64_device(W_O @ across @ W_V).double())
    norm = inner.sum((-2, -1)).clamp(min=0).sqrt()
    return eigenvalues.sum(-1).real, eigenvalues.abs().sum(-1), norm


def _of_neurons(
    matrices: VocabularyMatrices, sites: LayerSites, across: Tensor, read: Tensor, written: Tensor
) -> _Sums:
    factors = matrices.heads.write_matrices(sites)
    column = matrices.heads.read_matrices(sites, "v").A[:, :, 0].to(across)
    row = (factors.A * factors.B)[:, 0].to(across)
    value = ((row @ across) * column).sum(-1)
    if not value.isfinite().all():
        wrong = sites.names[int((~value.isfinite()).nonzero()[0])]
        raise InputError([f"{wrong}: weights that are not finite"], _NO_SCORES)
    sizes = [((x @ of) * x).sum(-1) for x, of in ((column, read), (row, written))]
    return value, value.abs(), (sizes[0] * sizes[1]).clamp(min=0).sqrt()
