"""QK and OV circuits of heads and neuron-heads, from token to token: weights alone, no prompt.

    attention head   QK  W_E W_Q W_Kᵀ W_Eᵀ      query token, key token
                     OV  W_E W_V W_O W_U C      token attended to, token whose logit is raised
    neuron-head      QK  W_E W_in[:, i]         query token; W_gate of a gated MLP. The one key is
                                                that of the bias token: a vector over tokens
                     OV  W_E W_in[:, i] ⊗ W_out[i] W_U C    rank one

(Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".) For a neuron-head QK says
which tokens open its gate, and OV what is then read and written; in a gated MLP OV follows W_in.
Left out: scales of norms (gains are folded in), biases, positions (rotary: distance 0), 1/√d_head,
and everything that earlier heads add. W_U C is W_U less its mean over the vocabulary, since softmax
ignores a constant that is added to all logits.

A head copies where its OV circuit M raises the logit of the token that it reads:

    copying = Σ λ / Σ |λ|               λ: eigenvalues of M; 0 in the mean for unrelated heads
    cosine  = Σ λ / ‖M‖_F               the cosine of M and the identity, times √d_vocab

A neuron-head has one eigenvalue, (W_out W_U C) · (W_E W_in), so its copying score is its sign. The
eigenvalues are those of W_O W_U W_E W_V, d_head × d_head, and ‖M‖² = tr((W_Vᵀ W_Eᵀ W_E W_V)(W_O W_U
W_Uᵀ W_Oᵀ)), so no matrix of the vocabulary by itself is ever held. Memory, in bytes for float32:

    4 (2 d_vocab d_head + 2 d_model d_head)                the factors of a circuit
    4 (2 b d_head + 2 b² + 16 b min(k, b) + 8 d_vocab)     `top`, in blocks of b tokens
    64 d_model² + 32 · 1024 d_model                        copying scores: three matrices, at first
                                                           in float64; a slice of tokens
    4 · 8 d_model max(Σ d_head, d_mlp)                     copying scores: the heads of one layer
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Complex, Float
from torch import Tensor
from transformer_lens import FactoredMatrix

from attn_only_lens.arguments import as_plain, is_count, positive_reasons
from attn_only_lens.circuits.weights.vocabulary import InputVocabulary, VocabularyMatrices
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.engine.sites import LayerSites, Sites, all_heads, resolve_sites
from attn_only_lens.engine.tokens import token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName
from attn_only_lens.precision import full_precision

_BIAS = -1  # in place of a token
_MOST_ENTRIES = 4_000_000
_ROWS = 1024  # of the vocabulary at once
_PROBLEM = "this part of a circuit cannot be shown"
_NO_SCORES = "these heads have no copying scores"


@dataclass(frozen=True, eq=False)
class TokenCircuit:
    """What a head does from token to token, by its weights.

    Attributes:
        name: of the head.
        kind: "qk" or "ov".
        matrix: a row for each query token, or token attended to; a column for each key token, or
            token written. A neuron's QK has one column: the bias token. A TransformerLens
            `FactoredMatrix`: `matrix.AB` would be all of it.
        row_tokens: the tokens of its rows; None for the whole input vocabulary.
        column_tokens: the tokens of its columns; None for the whole vocabulary (of an OV circuit,
            the output vocabulary).
    """

    name: str
    kind: Literal["qk", "ov"]
    matrix: FactoredMatrix
    row_tokens: tuple[int, ...] | None
    column_tokens: tuple[int, ...] | None
    _model: Any = field(repr=False)

    @property
    def columns(self) -> tuple[str, str]:
        """The meanings of rows and columns."""
        return ("query", "key") if self.kind == "qk" else ("read", "written")

    @torch.no_grad()
    @full_precision()
    def top(self, k: int = 20, *, lowest: bool = False, block: int = 1024) -> pd.DataFrame:
        """Return the strongest pairs of tokens.

        Args:
            k: how many pairs; fewer if there are fewer.
            lowest: the most negative scores instead of the largest.
            block: tokens of either side at once.

        Returns:
            Rows by falling score (rising, of the lowest): texts, `query` and `key` or `read` and
            `written`; their tokens, `query_token` and so on (-1 for the bias token); `score`.

        Raises:
            InputError: k or block not positive.
        """
        InputError.raise_if(positive_reasons(k=k, block=block), _PROBLEM)
        largest, sign = LargestScores(k), -1.0 if lowest else 1.0
        left, right = self.matrix.A, self.matrix.B.T
        largest.add_products(left, sign * right, (0, 0), block=block)
        ends = dict(zip(self.columns, largest.pairs.T.tolist(), strict=True))
        texts = {name: self._texts(name, places) for name, places in ends.items()}
        tokens = {f"{name}_token": self._ids(name, places) for name, places in ends.items()}
        score = sign * largest.values.cpu().double().numpy()
        return pd.DataFrame({**texts, **tokens, "score": score})

    @torch.no_grad()
    @full_precision()
    def block(self, rows: Sequence[int], columns: Sequence[int] | None = None) -> pd.DataFrame:
        """Return a block of the matrix.

        Args:
            rows: tokens.
            columns: tokens; None for all.

        Returns:
            Scores, labelled by the texts of tokens.

        Raises:
            InputError: tokens that the circuit does not have, or more than 4,000,000 entries.
        """
        reasons: list[str] = []
        sides = zip(("rows", "columns"), (rows, columns), self.matrix.shape, strict=True)
        chosen = [self._places(side, tokens, n, reasons) for side, tokens, n in sides]
        if len(chosen[0]) * len(chosen[1]) > _MOST_ENTRIES:
            reasons.append(
                f"got {len(chosen[0]):,} by {len(chosen[1]):,} tokens; expected at most "
                f"{_MOST_ENTRIES:,} entries: take fewer, or `top`"
            )
        InputError.raise_if(reasons, _PROBLEM)
        entries = self.matrix.A[chosen[0]] @ self.matrix.B[:, chosen[1]]
        index, header = (
            pd.Index(self._texts(name, places), name=name)
            for name, places in zip(self.columns, chosen, strict=True)
        )
        return pd.DataFrame(entries.cpu().double().numpy(), index=index, columns=header)

    @property
    def eigenvalues(self) -> Complex[Tensor, "d_head"]:
        """The eigenvalues that are not zero by rank: those of B A, d_head × d_head, for A B.

        Raises:
            InputError: rows and columns are not the same tokens.
        """
        n_rows, n_columns = self.matrix.shape
        if n_rows != n_columns:
            reason = f"got a matrix of {n_rows} by {n_columns}: its rows and columns differ"
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

    def _places(self, side: str, tokens: object, n: int, reasons: list[str]) -> list[int]:
        """Return the rows or columns of some tokens; of None, all."""
        if tokens is None:
            return list(range(n))
        listed = as_plain(tokens)
        ids: list[Any] = list(map(as_plain, listed)) if isinstance(listed, Sequence) else [None]
        name = self.columns[side == "columns"]
        places = {token: place for place, token in enumerate(self._ids(name, list(range(n))))}
        if wrong := [id_ for id_ in ids if not is_count(id_, _BIAS) or id_ not in places]:
            reasons.append(f"{side}: got {wrong[0]!r}; expected tokens of this circuit")
        return [] if wrong else [places[id_] for id_ in ids]


@torch.no_grad()
@full_precision()
def qk_circuit(
    model: Any,
    name: str | HeadName,
    *,
    tokens: Sequence[int] | None = None,
    fold_norms: bool = True,
) -> TokenCircuit:
    """Return which tokens a head attends to from which, by its weights.

    For a neuron-head: which tokens open its gate against the bias token.

    Args:
        model: converted, or with exposed neuron-heads.
        name: `L5H3`, a neuron, or one of several heads of a neuron.
        tokens: those of interest, such as all that occur in a text, of the input vocabulary; None
            for all. Tokens that were never trained may lie far from all others, and fill every
            table.
        fold_norms: fold gains of norms into the weights.

    Returns:
        The circuit, W_E W_Q W_Kᵀ W_Eᵀ in two factors; of a neuron [d_vocab, 1].

    Raises:
        InputError: the model has no neuron-heads, or not that head; unknown weights or norms; an
            embedding that does more than multiply by one matrix; tokens that are not in the
            vocabulary, or repeated.

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, pretrained
        >>> model = expose_neuron_heads(pretrained.small_english()).model
        >>> circuits.qk_circuit(model, "L0H1").matrix
        FactoredMatrix: Shape(torch.Size([456, 456])), Hidden Dim(32)
        >>> circuits.qk_circuit(model, "L0N5").top(3)["key"].tolist()
        ['bias token', 'bias token', 'bias token']
    """
    sites = _resolve_one(model, name)
    matrices = InputVocabulary.of(model, tokens, fold_norms=fold_norms)
    read = matrices.heads.read_matrices(sites, "q")
    left = matrices.reads(read.A[0])
    right = read.B[0] if sites.kind == "neuron" else matrices.reads(read.B[0].T).T
    both = FactoredMatrix(left, right.to(left))
    chosen = matrices.read_tokens
    return TokenCircuit(sites.names[0], "qk", both, chosen, chosen, model)


@torch.no_grad()
@full_precision()
def ov_circuit(
    model: Any,
    name: str | HeadName,
    *,
    tokens: Sequence[int] | None = None,
    fold_norms: bool = True,
) -> TokenCircuit:
    """Return which logits a head raises for each token that it attends to, by its weights.

    Args:
        model: converted, or with exposed neuron-heads.
        name: as in `qk_circuit`.
        tokens: as in `qk_circuit`. Where the input and output vocabularies differ, the rows are the
            tokens in the input vocabulary, and the columns those in the output vocabulary. Logits
            are centred over the columns.
        fold_norms: as in `qk_circuit`.

    Returns:
        The circuit, W_E W_V W_O W_U C in two factors, where W_U C is W_U less its mean over the
        vocabulary, or over `tokens`.

    Raises:
        InputError: as in `qk_circuit`, and the same for the unembedding; none of the tokens is in
            the input vocabulary, or none in the output vocabulary.

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, pretrained
        >>> model = expose_neuron_heads(pretrained.small_english()).model
        >>> ov = circuits.ov_circuit(model, "L1H0")
        >>> pairs = ov.top(5)
        >>> bool(pairs["score"].is_monotonic_decreasing), len(ov.eigenvalues)
        (True, 32)
        >>> ov.block([3, 5], [7, 11, 13]).shape
        (2, 3)
    """
    sites = _resolve_one(model, name)
    matrices = VocabularyMatrices.of(model, tokens, fold_norms=fold_norms)
    written = matrices.heads.write_matrices(sites)
    left = written.A[0]
    if sites.kind == "neuron":
        left = matrices.heads.read_matrices(sites, "v").A[0] * left
    right = matrices.writes(written.B[0])
    both = FactoredMatrix(matrices.reads(left).to(right), right)
    ends = matrices.read_tokens, matrices.written_tokens
    return TokenCircuit(sites.names[0], "ov", both, *ends, model)


def _resolve_one(model: Any, name: str | HeadName) -> LayerSites:
    if not isinstance(name, str | HeadName):
        raise InputError([f"got {name!r}; expected one name, such as 'L5H3'"], _PROBLEM)
    (sites,) = resolve_sites(model, [name])
    return sites


@torch.no_grad()
@full_precision()
def copying_scores(
    model: Any,
    sites: Sites | None = None,
    *,
    tokens: Sequence[int] | None = None,
    fold_norms: bool = True,
) -> pd.DataFrame:
    """Return how much each head and neuron-head copies, by the eigenvalues of its OV circuit.

    The circuit has W_U less its mean over the vocabulary, as in `ov_circuit`. Source: Elhage et al.
    2021, "A Mathematical Framework for Transformer Circuits".

    Args:
        model: converted, or with exposed neuron-heads.
        sites: `patching.heads()`, `patching.neuron_heads()`, names; None for all.
        tokens: as in `qk_circuit`; each must be in the output vocabulary, too. Eigenvalues are
            then those of the circuit between these tokens alone.
        fold_norms: fold gains of norms into the weights.

    Returns:
        A row for each head, by layer: `name`, `layer`, `kind` ("attention" or "neuron"),
        `eigenvalue_sum` (of a neuron, its one eigenvalue), `copying`, and `cosine`; the last two
        are missing where a head reads or writes nothing.

    Raises:
        InputError: with every reason: the model has no neuron-heads, or not those heads; unknown
            weights or norms; an output vocabulary of another size, without tokens that are in
            both; weights that are not finite.

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.small_english()).model
        >>> frame = circuits.copying_scores(model, p.heads())
        >>> frame.columns.tolist()
        ['name', 'layer', 'kind', 'eigenvalue_sum', 'copying', 'cosine']
        >>> bool(frame["copying"].between(-1, 1).all())
        True
    """
    chosen = resolve_sites(model, all_heads() if sites is None else sites)
    matrices = VocabularyMatrices.of(model, tokens, fold_norms=fold_norms)
    d_vocab, d_out = len(matrices.W_E), matrices.W_U.shape[1]
    if d_vocab != d_out:
        reason = f"it reads {d_vocab} tokens and writes {d_out}; pass tokens= that are in both"
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
    """W_U C W_E, W_Eᵀ W_E and W_U C W_Uᵀ, with the final norm in W_U: [d_model, d_model] each."""
    d_model = matrices.W_E.shape[1]
    precise = to_float64_device(matrices.W_E)
    across, read, written = (
        torch.zeros(d_model, d_model, dtype=torch.float64, device=precise.device) for _ in range(3)
    )
    mean = matrices.mean.to(precise.device).double()
    for first in range(0, len(precise), _ROWS):
        some = slice(first, first + _ROWS)
        E = precise[some].double()
        U = matrices.W_U[:, some].T.to(precise.device).double() - mean
        across.addmm_(U.T, E)
        read.addmm_(E.T, E)
        written.addmm_(U.T, U)
    across, read, written = (product.to(matrices.W_E) for product in (across, read, written))
    norm = matrices.final
    return norm.before(across), read, norm.before(norm.before(written).T)


_Sums = tuple[Float[Tensor, "site"], Float[Tensor, "site"], Float[Tensor, "site"]]
"""Σ λ, Σ |λ| and ‖M‖ of each head."""


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
