"""The heads that a neuron composes with most: those that write what it reads, and that read it.

Scores are those of `composition`; between two neurons they have the sign of the cosine, since one
neuron excites or inhibits another.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.weights._composition import (
    HeadFactors,
    head_readers,
    head_writers,
    scores,
)
from attn_only_lens.circuits.weights.head_matrices import HeadMatrices, Kind
from attn_only_lens.engine.sites import LayerSites, Sites, all_heads, resolve_sites
from attn_only_lens.heads import host_of

_BLOCK = 1024


class Partner(NamedTuple):
    """A head that a neuron composes with.

    Attributes:
        side: whether it "writes" what the neuron reads, or "reads" what the neuron writes.
        kind: the reader's input; in a plain MLP "v" stands for "q" too.
        name: of the partner.
        score: the composition score; between two neurons, with the sign of the cosine.
    """

    side: Literal["writes", "reads"]
    kind: Kind
    name: str
    score: float


@torch.no_grad()
def strongest_partners(model: Any, neurons: Sites, k: int) -> dict[str, list[Partner]]:
    """Return the k strongest partners of each neuron, side and kind.

    Args:
        model: converted, or with exposed neuron-heads.
        neurons: names, or a selection.
        k: partners of each side and kind.

    Returns:
        By name; those of the largest |score| first, on each side.

    Raises:
        InputError: weights that are unknown or not finite; the model has not those heads.
    """
    matrices = HeadMatrices.of(model, fold_norms=True)
    every = resolve_sites(model, all_heads())
    found: dict[str, list[Partner]] = {}
    for own in resolve_sites(model, neurons):
        found |= {name: [] for name in own.names}
        for kind in _kinds(model, own):
            reader = head_readers(matrices, own, kind)
            writers = (head_writers(matrices, each) for each in every)
            earlier = [each for each in writers if each.stage <= reader.stage]
            for name, top in _strongest(reader, earlier, k):
                found[name] += [Partner("writes", kind, *each) for each in top]
        writer = head_writers(matrices, own)
        for kind in ("v", "q", "k"):
            of_kind = [each for each in every if kind in _kinds(model, each)]
            readers = (head_readers(matrices, each, kind) for each in of_kind)
            later = [each for each in readers if writer.stage <= each.stage]
            for name, top in _strongest(writer, later, k):
                found[name] += [Partner("reads", kind, *each) for each in top]
    for each in found.values():
        each.sort(key=lambda partner: (partner.side == "reads", -abs(partner.score)))
    return found


def _kinds(model: Any, reader: LayerSites) -> tuple[Kind, ...]:
    if reader.kind == "attention":
        return "v", "q", "k"
    return ("v", "q") if is_gated(model, reader.layer) else ("v",)


def is_gated(model: Any, layer: int) -> bool:
    """Return whether the neurons of a source layer read their gate by weights of its own."""
    return getattr(host_of(model).neurons[layer].module, "W_gate", None) is not None


def _strongest(
    own: HeadFactors, others: list[HeadFactors], k: int
) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Yield each neuron, and those of the others with the largest |scores|."""
    names = [name for other in others for name in other.names]
    for some in own.slices(_BLOCK):
        factors = own.factors(some)
        values: Float[Tensor, "neuron kept"] = factors.new_empty(len(factors), 0)
        places, first = values.long(), 0
        for other in others:
            for rows in other.slices(_BLOCK):
                new = scores(other.factors(rows).to(factors), factors, signed=True).T
                at = torch.arange(first + rows.start, first + rows.stop, device=new.device)
                values = torch.cat([values, new], dim=1)
                places = torch.cat([places, at.expand(len(new), -1)], dim=1)
                kept = values.abs().topk(min(k, values.shape[1]), dim=1).indices
                values, places = values.gather(1, kept), places.gather(1, kept)
            first += len(other.names)
        for name, which, amounts in zip(
            own.names[some], places.tolist(), values.tolist(), strict=True
        ):
            yield name, [(names[i], value) for i, value in zip(which, amounts, strict=True)]
