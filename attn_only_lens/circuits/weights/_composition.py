"""Compute composition scores: how strongly a head or neuron reads the output of an earlier one.

A writer W and a reader R are matrices (`head_matrices.py`) that multiply the residual stream, a row
vector, from the right. Their score is

    ‖W R‖_F / (‖W‖_F ‖R‖_F)                 in [0, 1]

This score is from Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits". R is the
reader's query (q), key (k) or value (v) matrix. Between two neurons, the score is |cos| of the
writer's output direction and the reader's input direction.

For a random rotation U, the mean of ‖W U R‖² is ‖W‖² ‖R‖² / d_model. The root mean square score of
unrelated heads is therefore 1/√d_model, and `ratio_to_baseline` is the score divided by 1/√d_model.

A pair gets a score if the writer's sublayer comes before the reader's sublayer. In one layer, an
attention head comes before a neuron, unless attention and MLP run in parallel. TransformerLens
omits pairs within one layer. A neuron-head (a neuron viewed as an attention head) has a constant
key, so K-composition into it is zero.

Norms are folded into the weights by default (`models/norms.py`). As in TransformerLens, W_Q W_Kᵀ
excludes rotary embeddings, and "embed" excludes positional embeddings.

Each writer or reader is represented by a *factor*, a matrix [rank, d_model] with norm 1. For a QR
decomposition A = Q T, ‖A B‖ = ‖T B‖ for every matrix B. One product of stacked factors therefore
gives the scores of many (writer, reader) pairs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import FactoredMatrix

from attn_only_lens.arguments import POSITIVE, is_count, one_of
from attn_only_lens.circuits.weights.head_matrices import (
    KINDS,
    HeadMatrices,
    Kind,
    heads_with_matrices,
)
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.engine.sites import LayerSites, Sites, SomeSites
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS

_ROWS = 1024  # the number of rows of W_E that are converted to float64 at once
_BLOCK = 1024  # the number of factor rows processed at once
_MOST_PAIRS = 4_000_000
_EMBED = "embed"
_PROBLEM = "these heads do not compose"
_NOT_FINITE = "no composition scores can be computed"
_NO_KEYS = "zero by construction: a neuron-head's keys do not depend on the token"
_NO_PAIR = (
    "expected a reader after the writer: a reader in a later layer, or an attention head as writer "
    "and a neuron of the same layer as reader (unless attention and MLP run in parallel)"
)


@dataclass(frozen=True, eq=False)
class Compositions:
    """Composition scores of writers (source heads) and later readers (target heads).

    Attributes:
        frame: one row per pair. Columns: `writer`, `reader`, `kind`, `score`, `ratio_to_baseline`
            (score · √d_model), `note`.
        n_pairs: the number of compared pairs.

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, load
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> compositions = circuits.composition(model, "L0H2", ["L0N5", "L0N7"], "q")
        >>> compositions.frame[["writer", "reader"]].to_numpy().tolist()
        [['L0H2', 'L0N5'], ['L0H2', 'L0N7']]
        >>> compositions.virtual_weights(row=1)
        FactoredMatrix: Shape(torch.Size([128, 1])), Hidden Dim(1)
    """

    frame: pd.DataFrame
    n_pairs: int
    _matrices: HeadMatrices = field(repr=False)

    @torch.no_grad()
    def virtual_weights(self, row: int = 0) -> FactoredMatrix:
        """Return the matrix W R of the pair in a row of `frame`; W R maps W's input to R's output.

        Rows stand for the writer's input: the residual stream (d_model rows) for an attention head,
        the activation (1 row) for a neuron, the token (d_vocab rows) for "embed". Columns stand for
        the reader's output. If the reader is an attention head, they stand for the residual stream
        at the key for kind "q", the residual stream at the query for "k", and the vector that the
        head adds to the residual stream for "v". If the reader is a neuron, columns stand for its
        query or value.

        Returns:
            A TransformerLens `FactoredMatrix` with an inner dimension of at most d_head.

        Raises:
            InputError: there is no such row, or it is about the key of a neuron-head.
        """
        if not is_count(row, 0, len(self.frame) - 1):
            reason = f"got row={row!r}; expected 0 to {len(self.frame) - 1}"
            raise InputError([reason], _PROBLEM)
        pair: Any = self.frame.loc[row]
        writer, reader, kind = pair["writer"], pair["reader"], pair["kind"]
        matrices = self._matrices
        (source,), (target,) = _resolve_pairs(matrices.model, [writer], [reader], kind)
        if kind == "k" and target.kind in NEURON_KINDS:
            raise InputError([f"{reader}: its K-composition is {_NO_KEYS}"], _PROBLEM)
        right = matrices.read_matrices(target, kind)[0]
        if source is None:
            left = matrices.embedding()
            return FactoredMatrix(left, right.A.to(left)) @ right.B.to(left)
        written = matrices.write_matrices(source)[0]
        return written @ FactoredMatrix(right.A.to(written.A), right.B.to(written.A))


@torch.no_grad()
def composition(
    model: Any,
    writers: SomeSites = "all",
    readers: SomeSites = "all",
    kind: Kind = "v",
    *,
    top: int | None = None,
    block: int = _BLOCK,
    fold_norms: bool = True,
) -> Compositions:
    """Return the composition scores of writers (source heads) and later readers (target heads).

    With `top`, scores are computed in blocks of writers and readers, and only the largest are kept.
    Let b be the larger of `block` and the largest rank of a head. In float32, the additional memory
    is then at most

        8 d_model Σ d_head + 4 d_model² + b (16 d_model + 8 b + 64 min(top, b))    bytes

    Args:
        model: a model from `convert`, or one with exposed neuron-heads.
        writers: the heads, without positions; see `Sites`. "embed" is the embedding, which may also
            be among several words or names; "all" includes it.
        readers: as `writers`, without the embedding.
        kind: the reader's input: "q", "k" or "v". In a plain MLP, a neuron-head reads through the
            same vector for "q" and "v". In a gated MLP, it reads "q" through W_gate and "v" through
            W_in.
        top: return only this many pairs with the largest scores, sorted; ties are broken
            arbitrarily. By default all pairs, in the order of writers and then readers.
        block: with `top`, the number of factor rows on each side of a block; an attention head has
            d_head rows, and a neuron has one.
        fold_norms: fold norms into the weights; False uses the weights without norms.

    Returns:
        The scores. For the key of a neuron-head, they are 0, with a note; `top` leaves them out.

    Raises:
        InputError: with every reason: an unknown kind, no pair with a later reader, more than
            4,000,000 pairs without `top`, `top` or `block` not positive, unknown heads, weights
            that are unknown or not finite.

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, load
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> largest = circuits.composition(model, "heads", kind="q", top=3)
        >>> len(largest.frame), largest.n_pairs, bool(largest.frame.score.is_monotonic_decreasing)
        (3, 2048, True)
    """
    counts = {"block": block} if top is None else {"top": top, "block": block}
    InputError.raise_if(POSITIVE.reasons(**counts), _PROBLEM)
    writing, reading = _resolve_pairs(model, writers, readers, kind)
    matrices = HeadMatrices.of(model, fold_norms=fold_norms)
    if top is None:
        frame = _every_pair(matrices, writing, reading, kind)
        return Compositions(frame, len(frame), matrices)
    return Compositions(*_largest(matrices, writing, reading, kind, top, block), matrices)


def _every_pair(
    matrices: HeadMatrices,
    writing: list[LayerSites | None],
    reading: list[LayerSites],
    kind: Kind,
) -> pd.DataFrame:
    n_writers = sum(len(sites.names) if sites else 1 for sites in writing)
    n_pairs = n_writers * sum(len(sites.names) for sites in reading)
    if n_pairs > _MOST_PAIRS:
        reason = f"got {n_pairs:,} pairs; expected at most {_MOST_PAIRS:,}: pass top="
        raise InputError([reason], "these scores need too large a table")
    sources = [_head_writers(matrices, sites) for sites in writing]
    frames = []
    for source in sources:
        written = source.factors(slice(None))
        for sites in reading:
            if source.stage > _read_stage(sites):
                continue
            if kind == "k" and sites.kind in NEURON_KINDS:
                values, note = written.new_zeros(len(written), len(sites.names)), _NO_KEYS
            else:
                values = scores(written, _head_readers(matrices, sites, kind).factors(slice(None)))
                note = ""
            pairs = pd.MultiIndex.from_product([source.names, sites.names]).to_frame().to_numpy()
            frames.append(_frame(matrices.model, pairs, values.flatten(), kind, note))
    if not frames:
        raise InputError([_NO_PAIR], _PROBLEM)
    frame = pd.concat(frames, ignore_index=True)
    order = pd.Categorical(frame["writer"], [name for source in sources for name in source.names])
    return frame.iloc[order.codes.argsort(kind="stable")].reset_index(drop=True)


def _largest(
    matrices: HeadMatrices,
    writing: list[LayerSites | None],
    reading: list[LayerSites],
    kind: Kind,
    top: int,
    block: int,
) -> tuple[pd.DataFrame, int]:
    """Return the pairs with the largest scores, and the number of compared pairs."""
    if kind == "k":
        reading = [sites for sites in reading if sites.kind not in NEURON_KINDS]
        if not reading:
            raise InputError([f"K-composition into neuron-heads is {_NO_KEYS}"], _PROBLEM)
    sources = [_head_writers(matrices, sites) for sites in writing]
    targets = [_head_readers(matrices, sites, kind) for sites in reading]
    largest, first_writer = LargestScores(top), 0
    for source in sources:
        first_reader = 0
        for target in targets:
            for columns in target.slices(block) if source.stage <= target.stage else ():
                read = target.factors(columns)
                for rows in source.slices(block):
                    first = first_writer + rows.start, first_reader + columns.start
                    largest.add(scores(source.factors(rows), read), first)
            first_reader += len(target.names)
        first_writer += len(source.names)
    if not largest.seen:
        raise InputError([_NO_PAIR], _PROBLEM)
    write_names, read_names = (
        [name for group in groups for name in group.names] for groups in (sources, targets)
    )
    pairs = [(write_names[i], read_names[j]) for i, j in largest.pairs.tolist()]
    return _frame(matrices.model, pairs, largest.values, kind, ""), largest.seen


def _resolve_pairs(
    model: Any, writers: SomeSites, readers: SomeSites, kind: str
) -> tuple[list[LayerSites | None], list[LayerSites]]:
    """Return writers and readers by layer; None among the writers stands for the embedding."""
    InputError.raise_if(one_of(*KINDS).reasons(kind=kind), _PROBLEM)
    reading = list(heads_with_matrices(model, readers, _PROBLEM))
    writers = Sites.of(writers)
    names = writers.heads if isinstance(writers.heads, tuple) else ()
    embedding = [None] * (_EMBED in names or writers == Sites())
    if _EMBED in names:
        writers = replace(writers, heads=[name for name in names if name != _EMBED])
    if names == (_EMBED,):
        return [None], reading
    return [*embedding, *heads_with_matrices(model, writers, _PROBLEM)], reading


def _read_stage(sites: LayerSites) -> int:
    """Return the number of sublayers (attention, MLP, attention, …) before the given heads."""
    return 2 * sites.layer + (sites.kind in NEURON_KINDS)


def _write_stage(matrices: HeadMatrices, sites: LayerSites | None) -> int:
    """Return the number of sublayers after which the residual stream holds these heads' outputs."""
    if sites is None:
        return 0
    first = sites.kind == "attention" and not matrices.is_parallel(sites.layer)
    return 2 * sites.layer + (1 if first else 2)


@dataclass(frozen=True, eq=False)
class _HeadFactors:
    """The factors of all heads of one kind in one layer, either as writers or as readers."""

    names: tuple[str, ...]
    stage: int
    rank: int
    factors: Callable[[slice], Float[Tensor, "head rank d_model"]]

    def slices(self, block: int) -> Iterator[slice]:
        """Yield slices of one or more heads, with at most `block` factor rows if possible."""
        step = max(1, block // self.rank)
        for start in range(0, len(self.names), step):
            yield slice(start, min(start + step, len(self.names)))


def _head_writers(matrices: HeadMatrices, sites: LayerSites | None) -> _HeadFactors:
    """Return the factors of a layer's heads as writers; None stands for the embedding."""
    if sites is None:
        return _kept((_EMBED,), 0, _embedding_factor(matrices.embedding()))
    return _head_factors(sites, _write_stage(matrices, sites), matrices.write_matrices)


def _head_readers(matrices: HeadMatrices, sites: LayerSites, kind: Kind) -> _HeadFactors:
    return _head_factors(sites, _read_stage(sites), lambda s: matrices.read_matrices(s, kind).T)


def _head_factors(
    sites: LayerSites, stage: int, matrix: Callable[[LayerSites], FactoredMatrix]
) -> _HeadFactors:
    """Return the factors of heads; to save memory, neurons' factors are computed when needed."""
    if sites.kind == "attention":
        return _kept(sites.names, stage, writer_factors(matrix(sites), sites.names))

    def factors(some: slice) -> Tensor:
        columns = sites.names[some], sites.index[some]
        return writer_factors(matrix(LayerSites(sites.layer, sites.kind, *columns)), columns[0])

    return _HeadFactors(sites.names, stage, 1, factors)


def _kept(names: tuple[str, ...], stage: int, factors: Tensor) -> _HeadFactors:
    return _HeadFactors(names, stage, factors.shape[1], lambda some: factors[some])


def writer_factors(matrix: FactoredMatrix, names: tuple[str, ...]) -> Tensor:
    """Return the factors of writers; for the factors of readers, pass the transposed matrix."""
    # For a neuron, A is 1 × 1, and the factor must keep its sign.
    A = matrix.A
    return _normalize((A if A.shape[-2:] == (1, 1) else torch.linalg.qr(A).R) @ matrix.B, names)


def _embedding_factor(W_E: Float[Tensor, "d_vocab d_model"]) -> Float[Tensor, "1 d_model d_model"]:
    d_model, precise = W_E.shape[1], to_float64_device(W_E)
    gram = torch.zeros(d_model, d_model, dtype=torch.float64, device=precise.device)
    for rows in precise.split(_ROWS):
        gram.addmm_(rows.double().T, rows.double())
    if not gram.isfinite().all():
        raise InputError(["the embedding has weights that are not finite"], _NOT_FINITE)
    values, vectors = torch.linalg.eigh(gram)
    factor = values.clamp(min=0).sqrt()[:, None] * vectors.T
    return _normalize(factor.to(W_E)[None], (_EMBED,))


def _normalize(factors: Tensor, names: tuple[str, ...]) -> Tensor:
    """Divide each factor by its norm, in place; zero factors stay zero."""
    # Divide by the largest entry first, because squares of weights may overflow or underflow.
    largest = torch.linalg.vector_norm(factors, ord=torch.inf, dim=(-2, -1), keepdim=True)
    finite = largest.flatten().isfinite().tolist()
    if bad := [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]:
        reason = f"{len(bad)} heads, such as {bad[0]}, have weights that are not finite"
        raise InputError([reason], _NOT_FINITE)
    factors /= torch.where(largest == 0, 1.0, largest)
    norm = torch.linalg.vector_norm(factors, dim=(-2, -1), keepdim=True)
    factors /= torch.where(norm == 0, 1.0, norm)
    return factors


def scores(
    writers: Float[Tensor, "writer rank d_model"],
    readers: Float[Tensor, "reader rank_2 d_model"],
    *,
    signed: bool = False,
) -> Float[Tensor, "writer reader"]:
    """Return the composition score of every pair; if `signed`, scores of two neurons have signs."""
    product = writers.flatten(0, 1) @ readers.to(writers.device).flatten(0, 1).T
    if writers.shape[1] == readers.shape[1] == 1:
        return product if signed else product.abs_()
    shape = len(writers), writers.shape[1], len(readers), readers.shape[1]
    return product.square_().view(shape).sum(dim=(1, 3)).sqrt_()


def _frame(model: Any, pairs: Any, values: Tensor, kind: str, note: str) -> pd.DataFrame:
    frame = pd.DataFrame(pairs, columns=["writer", "reader"])
    score = values.cpu().double().numpy()
    ratio = score * model.cfg.d_model**0.5
    return frame.assign(kind=kind, score=score, ratio_to_baseline=ratio, note=note)


class Partner(NamedTuple):
    """A head whose composition score with a neuron is high; scores of two neurons are signed."""

    side: Literal["writes", "reads"]
    kind: Kind  # the reader's input; a plain MLP has only "v", because "q" is equal to "v"
    name: str
    score: float


@torch.no_grad()
def strongest_partners(model: Any, neurons: SomeSites, k: int) -> dict[str, list[Partner]]:
    """Return, for each neuron, the k heads with the largest |score| on each side, by `kind`."""
    matrices = HeadMatrices.of(model, fold_norms=True)
    layers = heads_with_matrices(model, "all", _PROBLEM)
    partners: dict[str, list[Partner]] = {}
    for sites in heads_with_matrices(model, neurons, _PROBLEM):
        partners |= {name: [] for name in sites.names}
        for kind in _kinds(model, sites):
            reader = _head_readers(matrices, sites, kind)
            writers = (_head_writers(matrices, layer) for layer in layers)
            earlier = [writer for writer in writers if writer.stage <= reader.stage]
            for name, top in _strongest(reader, earlier, k):
                partners[name] += [Partner("writes", kind, *pair) for pair in top]
        writer = _head_writers(matrices, sites)
        for kind in ("v", "q", "k"):
            of_kind = [layer for layer in layers if kind in _kinds(model, layer)]
            readers = (_head_readers(matrices, layer, kind) for layer in of_kind)
            later = [reader for reader in readers if writer.stage <= reader.stage]
            for name, top in _strongest(writer, later, k):
                partners[name] += [Partner("reads", kind, *pair) for pair in top]
    for of_neuron in partners.values():
        of_neuron.sort(key=lambda partner: (partner.side == "reads", -abs(partner.score)))
    return partners


def _kinds(model: Any, reader: LayerSites) -> tuple[Kind, ...]:
    if reader.kind == "attention":
        return "v", "q", "k"
    return ("v", "q") if is_gated(model, reader.layer) else ("v",)


def is_gated(model: Any, layer: int) -> bool:
    """Return whether the original MLP of a layer has a gate matrix, W_gate."""
    return host_of(model).is_gated(layer)


def _strongest(
    neurons: _HeadFactors, others: list[_HeadFactors], k: int
) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Yield each neuron's name, and the names and scores of its k strongest heads in `others`."""
    for some in neurons.slices(_BLOCK):
        factors = neurons.factors(some)
        tops: list[list[tuple[str, float]]] = [[] for _ in factors]
        for group in others:
            for rows in group.slices(_BLOCK):
                new = scores(group.factors(rows).to(factors), factors, signed=True).T
                kept = new.abs().topk(min(k, new.shape[1]), dim=1).indices
                names = np.array(group.names[rows])[kept.cpu().numpy()].tolist()
                for top, *columns in zip(tops, names, new.gather(1, kept).tolist(), strict=True):
                    top += zip(*columns, strict=True)
        for name, top in zip(neurons.names[some], tops, strict=True):
            yield name, sorted(top, key=lambda pair: -abs(pair[1]))[:k]
