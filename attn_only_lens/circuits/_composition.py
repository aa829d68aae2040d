"""Composition of attention heads and neuron-heads: how much of what one writes another reads.

A writer W and a reader R act on rows of the residual stream (`weights.py` says what they are for
each kind of head). Their composition score is

    ‖W R‖_F / (‖W‖_F ‖R‖_F)                 in [0, 1]

(Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"), by the reader's query
(q), key (k) or value (v). Between two neurons, W and R have rank one, and it is the |cos| of the
vector that one writes and the vector that the other reads.

Baseline. With R turned by a random rotation U, E ‖W U R‖² = ‖W‖² ‖R‖² / d_model, since E U R Rᵀ Uᵀ
= tr(R Rᵀ) I / d_model. So 1/√d_model is the root mean square score of heads that have nothing to
do with each other, exactly and at any rank; `ratio_to_baseline` is the score over that.

Order. A pair counts if the writer has written before the reader reads: an attention head and a
neuron of the same layer do (not where attention and MLP run in parallel), a neuron and an
attention head of the same layer do not. TransformerLens compares layers, and drops the first.
Pairs in the wrong order are left out of frames; `virtual_weights` refuses them.

K-composition into a neuron-head is zero by construction: its own token has key 0 and the bias token
a constant one. `composition` says 0 with a note, `top_compositions` leaves those pairs out,
`virtual_weights` (`virtual.py`) refuses them.

Norms are folded into the weights by default (`wiring.py`), so that a model that was loaded without
processing has the scores of its processed twin. Rotary positions are left out of W_Q W_Kᵀ, as in
TransformerLens: the score is that at distance 0. Positional embeddings are no part of "embed". A
head that writes or reads nothing (all weights zero) has score 0.

Composition scores of many heads at once, in blocks, and the largest of them.

Every head is a *factor*: a matrix [rank, d_model] of Frobenius norm 1 that stands for all of what
it writes, or reads. A score depends on W_OV through its products alone, and for any A with
A = Q T, Q's columns orthonormal, ‖A B‖ = ‖T B‖. So

    of a writer  A B   T B         A = Q T
    of a reader  A B   (A Tᵀ)ᵀ     Bᵀ = Q T

of rank d_head for an attention head, 1 for a neuron, d_model for the embedding (where T Tᵀ comes
from W_Eᵀ W_E, summed over the vocabulary piece by piece): no d_model × d_model product for a pair.
The scores of some writers and some readers are one matrix product of their factors, squared and
summed over both ranks.

Memory, in numbers of the weights' dtype (float32 for shorter ones: 4 bytes), beyond the model:

    2 d_model Σ d_head                  once: the factors of all attention heads
    d_model²                            once: that of the embedding (four times that in float64,
                                        and a piece of W_E, while it is made)
    4 b d_model + 2 b² + 16 b min(k, b) a block of at most b rows of factors a side (one head, where
                                        it has more): factors, scores, the k largest of each row

Heads as writers and readers: which are meant, in what order they act, and their factors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens import FactoredMatrix

from attn_only_lens.circuits.head_weights import KINDS, Kind, Weights
from attn_only_lens.errors import CircuitError
from attn_only_lens.numerics import is_count, where_float64_is
from attn_only_lens.runs.sites import LayerSites, Selection, Sites, all_heads, resolve_sites

__all__ = [
    "NO_KEYS",
    "NO_PAIR",
    "PROBLEM",
    "Group",
    "Largest",
    "composition",
    "embedding_factor",
    "pieces",
    "read_at",
    "reader_factor",
    "readers_of",
    "resolved",
    "scores",
    "top_compositions",
    "writer_factor",
    "writers_of",
    "written_at",
]

_PIECE = 1024


@dataclass(frozen=True, eq=False)
class Group:
    """Heads of one kind in one layer, as writers or as readers.

    Attributes:
        names: of each head.
        stage: how many sublayers have written before these read; or, of writers, once they have.
        rank: of each factor.
        take: the factors of a slice of the heads, [head, rank, d_model].
    """

    names: tuple[str, ...]
    stage: int
    rank: int
    take: Callable[[slice], Float[Tensor, "head rank d_model"]]


def writer_factor(matrix: FactoredMatrix, names: tuple[str, ...]) -> Tensor:
    """The factors of writers, from what they write."""
    return _unit(torch.linalg.qr(matrix.A).R @ matrix.B, names)


def reader_factor(matrix: FactoredMatrix, names: tuple[str, ...]) -> Tensor:
    """The factors of readers, from what they read."""
    return writer_factor(matrix.T, names)


def embedding_factor(W_E: Float[Tensor, "d_vocab d_model"]) -> Float[Tensor, "1 d_model d_model"]:
    """The factor of the embedding, by its Gram matrix in float64."""
    d_model = W_E.shape[1]
    fine = where_float64_is(W_E)
    gram = torch.zeros(d_model, d_model, dtype=torch.float64, device=fine.device)
    for rows in fine.split(_PIECE):
        rows = rows.double()
        gram.addmm_(rows.T, rows)
    if not gram.isfinite().all():
        raise CircuitError(["the embedding has weights that are not finite"], _PROBLEM)
    values, vectors = torch.linalg.eigh(gram)
    factor = values.clamp(min=0).sqrt()[:, None] * vectors.T
    return _unit(factor.to(W_E)[None], ("embed",))


_PROBLEM = "no composition scores can be computed"


def _unit(factors: Tensor, names: tuple[str, ...]) -> Tensor:
    """Set to norm 1, in place; what writes or reads nothing stays zero, and composes with nothing.

    Raises:
        CircuitError: weights are not finite.
    """
    # At their largest entry first: squares of large or small weights leave their type's range.
    largest = torch.linalg.vector_norm(factors, ord=torch.inf, dim=(-2, -1), keepdim=True)
    bad = [
        name
        for name, fine in zip(names, largest.flatten().isfinite().tolist(), strict=True)
        if not fine
    ]
    if bad:
        raise CircuitError(
            [f"{len(bad)} heads, such as {bad[0]}, have weights that are not finite"], _PROBLEM
        )
    factors /= torch.where(largest == 0, 1.0, largest)
    norm = torch.linalg.vector_norm(factors, dim=(-2, -1), keepdim=True)
    factors /= torch.where(norm == 0, 1.0, norm)
    return factors


def pieces(group: Group, block: int) -> Iterator[slice]:
    """Slices of a group's heads with at most `block` rows of factors, or one head."""
    step = max(1, block // group.rank)
    for start in range(0, len(group.names), step):
        yield slice(start, min(start + step, len(group.names)))


def scores(
    writers: Float[Tensor, "writer rank d_model"], readers: Float[Tensor, "reader rank_2 d_model"]
) -> Float[Tensor, "writer reader"]:
    """The composition score of every pair."""
    product = writers.flatten(0, 1) @ readers.flatten(0, 1).T
    if writers.shape[1] == readers.shape[1] == 1:
        return product.abs_()
    shape = len(writers), writers.shape[1], len(readers), readers.shape[1]
    return product.square_().view(shape).sum(dim=(1, 3)).sqrt_()


class Largest:
    """The k largest scores so far."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.values = torch.empty(0, device="cpu")
        self.pairs: Int[Tensor, "pair 2"] = torch.empty(0, 2, dtype=torch.long, device="cpu")
        self.seen = 0

    def add(self, found: Float[Tensor, "writer reader"], first: tuple[int, int]) -> None:
        """Look at the scores of a block whose first writer and reader have these numbers."""
        self.seen += found.numel()
        least = self.values[-1].item() if len(self.values) == self.k else -1.0
        rows = (found.amax(dim=1) > least).nonzero().squeeze(1)
        if not len(rows):
            return
        values, columns = found[rows].topk(min(self.k, found.shape[1]), dim=1)
        pairs = torch.stack([rows[:, None].expand_as(columns) + first[0], columns + first[1]], -1)
        values = torch.cat([self.values.to(values), values.flatten()])
        self.pairs = torch.cat([self.pairs.to(pairs.device), pairs.flatten(0, 1)])
        self.values, order = values.topk(min(self.k, len(values)))
        self.pairs = self.pairs[order]


EMBED = "embed"
PROBLEM = "these heads do not compose"
NO_KEYS = "zero by construction: a neuron-head's keys do not depend on the token"
NO_PAIR = (
    "expected a reader that reads after the writer has written: a later layer, or an attention "
    "head and a neuron of the same layer (not where attention and MLP run in parallel)"
)


def resolved(
    model: Any, writers: Any, readers: Any, kind: str
) -> tuple[list[LayerSites | None], list[LayerSites]]:
    """Writers, None for the embedding first; and readers.

    Raises:
        CircuitError: the kind is not known.
        PatchingError: as `resolve` does.
    """
    if kind not in KINDS:
        raise CircuitError([f"got kind={kind!r}; expected one of {KINDS}"], PROBLEM)
    onto = list(resolve_sites(model, readers))
    if isinstance(writers, Selection) or not isinstance(writers, str | Sequence):
        return list(resolve_sites(model, writers)), onto
    listed = [writers] if isinstance(writers, str) else list(writers)
    heads = [name for name in listed if name != EMBED]
    found = [None] * (EMBED in listed)
    return [*found, *(resolve_sites(model, heads) if heads or not found else ())], onto


def read_at(sites: LayerSites) -> int:
    """How many sublayers, attention and MLP by turns, have run before these heads."""
    return 2 * sites.layer + (sites.kind == "neuron")


def written_at(weights: Weights, sites: LayerSites | None) -> int:
    """The stage from which on what these heads write is in the stream."""
    if sites is None:
        return 0
    return 2 * sites.layer + (
        1 if sites.kind == "attention" and not weights.parallel(sites.layer) else 2
    )


def writers_of(weights: Weights, sites: LayerSites | None) -> Group:
    """Writers, by their factors; None is the embedding."""
    if sites is None:
        factor = embedding_factor(weights.embedding())
        return Group((EMBED,), 0, factor.shape[1], lambda part: factor[part])
    return _group(
        sites, written_at(weights, sites), lambda s: writer_factor(weights.writes(s), s.names)
    )


def readers_of(weights: Weights, sites: LayerSites, kind: Kind) -> Group:
    """Readers, by their factors."""
    return _group(sites, read_at(sites), lambda s: reader_factor(weights.reads(s, kind), s.names))


def _group(sites: LayerSites, stage: int, factors: Callable[[LayerSites], Tensor]) -> Group:
    """Attention heads are factored once; neurons whenever they are taken, since they are many."""
    if sites.kind == "attention":
        kept = factors(sites)
        return Group(sites.names, stage, kept.shape[1], lambda part: kept[part])

    def take(part: slice) -> Tensor:
        some = sites.names[part], sites.index[part], sites.member[part]
        return factors(LayerSites(sites.layer, sites.kind, *some))

    return Group(sites.names, stage, 1, take)


_LARGEST_GRID = 4_000_000


@torch.no_grad()
def composition(
    model: Any,
    writers: Sites | Literal["embed"],
    readers: Sites,
    kind: Kind = "v",
    *,
    fold_norms: bool = True,
) -> pd.DataFrame:
    """The composition score of every writer with every reader that reads after it.

    Args:
        model: converted, or with exposed neuron-heads.
        writers: `patching.heads()`, `patching.neuron_heads()`, names; "embed" is the embedding.
        readers: the same, without "embed".
        kind: "q", "k" or "v": by what of the reader. A neuron-head reads its pre-activation by "q"
            and its value by "v": the same vector in a plain MLP, W_gate and W_in in a gated one.
        fold_norms: whether to fold norms into the weights; False takes weights as they stand.

    Returns:
        A row for each pair, by writer and then reader: `writer`, `reader`, `kind`, `score`,
        `ratio_to_baseline` (score · √d_model), `note`.

    Raises:
        CircuitError: with every reason: an unknown kind, no pair in order, more than 4,000,000
            pairs, weights that are not finite or not known.
        PatchingError: the model has no neuron-heads, or not those heads.

    Example:
        >>> from attn_only_lens import circuits, convert, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> frame = circuits.composition(model, "L0H2", ["L0N5", "L0N7"], kind="q")
        >>> frame[["writer", "reader"]].to_numpy().tolist()
        [['L0H2', 'L0N5'], ['L0H2', 'L0N7']]
        >>> bool(frame.score.between(0, 1).all())
        True
    """
    into, onto = resolved(model, writers, readers, kind)
    weights = Weights.of(model, fold_norms=fold_norms)
    size = _size(into) * sum(len(sites.names) for sites in onto)
    if size > _LARGEST_GRID:
        raise CircuitError(
            [f"got {size:,} pairs; expected at most {_LARGEST_GRID:,}: use top_compositions"],
            "these scores would not fit a table",
        )
    sources = [writers_of(weights, sites) for sites in into]
    frames = []
    for source in sources:
        written = source.take(slice(None))
        for sites in onto:
            if not source.stage <= read_at(sites):
                continue
            if kind == "k" and sites.kind == "neuron":
                found, note = written.new_zeros(len(written), len(sites.names)), NO_KEYS
            else:
                found = scores(written, readers_of(weights, sites, kind).take(slice(None)))
                note = ""
            pairs = pd.MultiIndex.from_product([source.names, sites.names])
            frames.append(_frame(model, pairs.to_frame().to_numpy(), found.flatten(), kind, note))
    if not frames:
        raise CircuitError([NO_PAIR], PROBLEM)
    frame = pd.concat(frames, ignore_index=True)
    order = {name: place for place, name in enumerate(n for s in sources for n in s.names)}
    return frame.sort_values(
        "writer", key=lambda names: names.map(order), kind="stable"
    ).reset_index(drop=True)


@torch.no_grad()
def top_compositions(
    model: Any,
    k: int = 100,
    kind: Kind = "v",
    writers: Sites | Literal["embed"] | None = None,
    readers: Sites | None = None,
    *,
    block: int = 1024,
    fold_norms: bool = True,
) -> pd.DataFrame:
    """The pairs of largest composition score, of all pairs of a model if need be.

    Scores are computed block by block, and only the k largest kept. Beyond the model's, that takes
    in float32 at most, with b the block or the largest rank of a head, whichever is more,

        8 d_model Σ d_head + 4 d_model² + b (16 d_model + 8 b + 64 min(k, b))    bytes

    of which `blocks.py` is the account: for GPT-2 small's 37,009 writers and k = 100 that is 82.5
    MiB, and 52.8 were measured (`analyses/bench_composition.py`), where all scores take 5.1 GiB.

    Args:
        model: converted, or with exposed neuron-heads.
        k: how many pairs; all there are, where they are fewer. Of equal scores, any.
        kind: as in `composition`.
        writers: as in `composition`; None for all attention heads, all neurons and the embedding.
        readers: as in `composition`; None for all heads. Neurons are left out of "k".
        block: rows of factors a side of a block, for a head d_head of them and for a neuron one.
        fold_norms: as in `composition`.

    Returns:
        Rows by falling score: `writer`, `reader`, `kind`, `score`, `ratio_to_baseline`; and in
        `attrs["pairs"]` how many pairs were compared.

    Raises:
        CircuitError: with every reason: an unknown kind, k or block not positive, no pair in
            order, weights that are not finite or not known.
        PatchingError: the model has no neuron-heads, or not those heads.

    Example:
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> frame = circuits.top_compositions(model, k=3, writers=p.heads(), kind="q")
        >>> len(frame), frame.attrs["pairs"], bool(frame.score.is_monotonic_decreasing)
        (3, 2048, True)
    """
    reasons = [
        f"got {name}={value!r}; expected a positive integer"
        for name, value in (("k", k), ("block", block))
        if not is_count(value, 1)
    ]
    if reasons:
        raise CircuitError(reasons, PROBLEM)
    every = all_heads()
    into, onto = resolved(
        model, every if writers is None else writers, every if readers is None else readers, kind
    )
    if writers is None:
        into = [None, *into]
    if kind == "k":
        onto = [sites for sites in onto if sites.kind != "neuron"]
        if not onto:
            raise CircuitError([f"K-composition into neuron-heads is {NO_KEYS}"], PROBLEM)
    weights = Weights.of(model, fold_norms=fold_norms)
    sources = [writers_of(weights, sites) for sites in into]
    targets = [readers_of(weights, sites, kind) for sites in onto]
    largest = Largest(k)
    at_source = 0
    for source in sources:
        at_target = 0
        for target in targets:
            if source.stage <= target.stage:
                for some in pieces(target, block):
                    read = target.take(some)
                    for part in pieces(source, block):
                        first = at_source + part.start, at_target + some.start
                        largest.add(scores(source.take(part), read), first)
            at_target += len(target.names)
        at_source += len(source.names)
    if not largest.seen:
        raise CircuitError([NO_PAIR], PROBLEM)
    names = [[name for group in groups for name in group.names] for groups in (sources, targets)]
    pairs = [(names[0][writer], names[1][reader]) for writer, reader in largest.pairs.tolist()]
    frame = _frame(model, pairs, largest.values, kind, "").drop(columns="note")
    frame.attrs["pairs"] = largest.seen
    return frame


def _size(into: list[LayerSites | None]) -> int:
    return sum(1 if sites is None else len(sites.names) for sites in into)


def _frame(model: Any, pairs: Any, found: Tensor, kind: str, note: str) -> pd.DataFrame:
    frame = pd.DataFrame(pairs, columns=["writer", "reader"])
    score = found.cpu().double().numpy()
    ratio = score * model.cfg.d_model**0.5
    return frame.assign(kind=kind, score=score, ratio_to_baseline=ratio, note=note)
