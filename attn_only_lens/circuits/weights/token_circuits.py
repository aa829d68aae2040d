"""QK and OV circuits of heads and neuron-heads, from token to token: weights alone, no prompt.

    attention head   QK  W_E W_Q W_Kᵀ W_Eᵀ      query token, key token
                     OV  W_E W_V W_O W_U C      token attended to, token whose logit is raised
    neuron-head      QK  W_E W_in[:, i]         query token; W_gate of a gated MLP. The one key is
                                                that of the bias token: a vector over tokens
                     OV  W_E W_in[:, i] ⊗ W_out[i] W_U C    rank one

(Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".) A neuron-head attends to
its own token where the score is positive, and otherwise to the bias token, whose value is zero: so
QK says which tokens open its gate, and OV what is then read and written. A gated MLP's value is a
product: OV holds the gate's factor and follows the other, W_in.

What a circuit of weights leaves out: scales of norms (their gains are folded in, as in
composition), biases, positions (rotary: distance 0), 1/√d_head, and all that heads before add to
the embedding.

W_U C is W_U less its mean over the vocabulary (over `tokens`, if given), since softmax ignores a
constant that is added to all logits. Without C, OV is another matrix, unless the unembedding was
centred before: in Small English it differs by up to 63 % of its norm (38 % for the median head),
and copying scores differ by up to .15.

No matrix of the vocabulary by itself is ever held: its two factors are, [d_vocab, d_head] and
[d_head, d_vocab], and blocks of their product. In bytes, with 4 for float32 (8 for float64), beyond
the model (and W_E and W_U in float32, where it is in half precision):

    4 (2 d_vocab d_head + 2 d_model d_head)                       the factors
    4 (2 b d_head + 2 b² + 16 b min(k, b) + 8 d_vocab)            `top`, in blocks of b tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Complex
from torch import Tensor
from transformer_lens import FactoredMatrix

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.circuits.weights.vocabulary_matrices import InputVocabulary, VocabularyMatrices
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.engine.sites import LayerSites, resolve_sites
from attn_only_lens.engine.token_texts import token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName
from attn_only_lens.precision import full_precision

_BIAS = -1  # in the place of a token
_MOST_ENTRIES = 4_000_000
_PROBLEM = "this part of a circuit cannot be shown"


@dataclass(frozen=True, eq=False)
class TokenCircuit:
    """What a head does from token to token, by its weights.

    Attributes:
        name: of the head.
        kind: "qk" or "ov".
        matrix: a row for each query token, or token attended to; a column for each key token, or
            token written. Of a neuron's QK, one column: the bias token. A TransformerLens
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
        """What its rows and its columns are."""
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
            `written`; their tokens, `query_token` and so on (-1 of the bias token); `score`.

        Raises:
            InputError: k or block not positive.
        """
        reasons = [
            f"got {name}={value!r}; expected 1 or more"
            for name, value in (("k", k), ("block", block))
            if not is_count(value, 1)
        ]
        InputError.raise_if(reasons, _PROBLEM)
        largest, sign = LargestScores(k), -1.0 if lowest else 1.0
        left, right = self.matrix.A, self.matrix.B.T
        largest.add_products(left, sign * right, (0, 0), block=block)
        frame = pd.DataFrame()
        ends = dict(zip(self.columns, largest.pairs.T.tolist(), strict=True))
        for name, places in ends.items():
            frame[name] = self._texts(name, places)
        for name, places in ends.items():
            frame[f"{name}_token"] = self._ids(name, places)
        return frame.assign(score=sign * largest.values.cpu().double().numpy())

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
            InputError: tokens that the circuit has not, or more than 4,000,000 entries.
        """
        reasons: list[str] = []
        n_rows, n_columns = self.matrix.shape
        chosen = [
            self._places("rows", rows, n_rows, reasons),
            self._places("columns", columns, n_columns, reasons),
        ]
        if len(chosen[0]) * len(chosen[1]) > _MOST_ENTRIES:
            reasons.append(
                f"got {len(chosen[0]):,} by {len(chosen[1]):,} tokens; expected at most "
                f"{_MOST_ENTRIES:,} entries: take fewer, or `top`"
            )
        InputError.raise_if(reasons, _PROBLEM)
        found = self.matrix.A[chosen[0]] @ self.matrix.B[:, chosen[1]]
        index, header = (
            pd.Index(self._texts(name, places), name=name)
            for name, places in zip(self.columns, chosen, strict=True)
        )
        return pd.DataFrame(found.cpu().double().numpy(), index=index, columns=header)

    @property
    def eigenvalues(self) -> Complex[Tensor, "d_head"]:
        """Those of the matrix that are not zero by its rank: of an OV circuit, how it copies.

        They are those of the d_head × d_head matrix B A of its factors A B.

        Raises:
            InputError: rows and columns are not the same tokens.
        """
        n_rows, n_columns = self.matrix.shape
        if n_rows != n_columns:
            raise InputError(
                [f"got a matrix of {n_rows} by {n_columns}: its rows and columns differ"],
                "this circuit has no eigenvalues",
            )
        return torch.linalg.eigvals(to_float64_device(self.matrix.BA).double())

    def _ids(self, name: str, places: list[int]) -> list[int]:
        if name == "key" and self.matrix.shape[1] == 1:
            return [_BIAS] * len(places)
        tokens = self.row_tokens if name == self.columns[0] else self.column_tokens
        return places if tokens is None else [tokens[place] for place in places]

    def _texts(self, name: str, places: list[int]) -> list[str]:
        ids = self._ids(name, places)
        return ["bias token" if each == _BIAS else token_text(self._model, each) for each in ids]

    def _places(self, side: str, tokens: object, n: int, reasons: list[str]) -> list[int]:
        """The rows or columns of some tokens; of None, all."""
        if tokens is None:
            return list(range(n))
        given = as_plain(tokens)
        ids: list[Any] = list(map(as_plain, given)) if isinstance(given, Sequence) else [None]
        name = self.columns[side == "columns"]
        place = {each: at for at, each in enumerate(self._ids(name, list(range(n))))}
        wrong = [each for each in ids if not is_count(each, _BIAS) or each not in place]
        if wrong:
            reasons.append(f"{side}: got {wrong[0]!r}; expected tokens of this circuit")
        return [] if wrong else [place[each] for each in ids]


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

    Of a neuron-head, which tokens open its gate against the bias token.

    Args:
        model: converted, or with exposed neuron-heads.
        name: `L5H3`, a neuron, or one of several heads of a neuron.
        tokens: those of interest, such as all that occur in a text, of the input vocabulary; None
            for all. Tokens that were never trained may lie far from all others, and fill every
            table.
        fold_norms: whether to fold gains of norms into the weights.

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
    sites = _resolved(model, name)
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
    """Return which logits a head raises when it attends to which token, by its weights.

    Of a neuron-head, rank one: which tokens drive its value, and what it writes for them.

    Args:
        model: as in `qk_circuit`.
        name: as in `qk_circuit`.
        tokens: as in `qk_circuit`. If the input and output vocabularies differ, the rows are those
            of the tokens in the input vocabulary, and the columns those in the output vocabulary.
            Logits are centred over the columns.
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
    sites = _resolved(model, name)
    matrices = VocabularyMatrices.of(model, tokens, fold_norms=fold_norms)
    written = matrices.heads.write_matrices(sites)
    if sites.kind == "neuron":
        left = matrices.heads.read_matrices(sites, "v").A[0] * written.A[0]
    else:
        left = written.A[0]
    right = matrices.writes(written.B[0])
    both = FactoredMatrix(matrices.reads(left).to(right), right)
    ends = matrices.read_tokens, matrices.written_tokens
    return TokenCircuit(sites.names[0], "ov", both, *ends, model)


def _resolved(model: Any, name: str | HeadName) -> LayerSites:
    if not isinstance(name, str | HeadName):
        raise InputError([f"got {name!r}; expected one name, such as 'L5H3'"], _PROBLEM)
    (sites,) = resolve_sites(model, [name])
    return sites
