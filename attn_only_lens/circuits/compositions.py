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
"""

from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from attn_only_lens.circuits.blocks import Largest, pieces, scores
from attn_only_lens.circuits.ends import (
    NO_KEYS,
    NO_PAIR,
    PROBLEM,
    read_at,
    readers_of,
    resolved,
    writers_of,
)
from attn_only_lens.circuits.weights import Kind, Weights
from attn_only_lens.errors import CircuitError
from attn_only_lens.patching.sites import LayerSites, Sites, all_heads
from attn_only_lens.plain import is_count

__all__ = ["composition", "top_compositions"]

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
