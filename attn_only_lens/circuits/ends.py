"""Heads as writers and readers: which are meant, in what order they act, and their factors."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attn_only_lens.circuits.blocks import Group, embedding_factor, reader_factor, writer_factor
from attn_only_lens.circuits.weights import KINDS, Kind, Weights
from attn_only_lens.errors import CircuitError
from attn_only_lens.patching.sites import LayerSites, Selection, resolve

__all__ = [
    "NO_KEYS",
    "NO_PAIR",
    "PROBLEM",
    "read_at",
    "readers_of",
    "resolved",
    "writers_of",
    "written_at",
]

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
    onto = list(resolve(model, readers))
    if isinstance(writers, Selection) or not isinstance(writers, str | Sequence):
        return list(resolve(model, writers)), onto
    listed = [writers] if isinstance(writers, str) else list(writers)
    heads = [name for name in listed if name != EMBED]
    found = [None] * (EMBED in listed)
    return [*found, *(resolve(model, heads) if heads or not found else ())], onto


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
