"""Virtual weights: the matrix that joins what one head takes in to what another makes of it."""

from typing import Any

import torch
from transformer_lens import FactoredMatrix

from attn_only_lens.circuits._composition import (
    NO_KEYS,
    NO_PAIR,
    PROBLEM,
    read_at,
    resolved,
    written_at,
)
from attn_only_lens.circuits.head_weights import Kind, Weights
from attn_only_lens.errors import CircuitError
from attn_only_lens.heads import HeadName

__all__ = ["virtual_weights"]


@torch.no_grad()
def virtual_weights(
    model: Any,
    writer: str | HeadName,
    reader: str | HeadName,
    kind: Kind,
    *,
    fold_norms: bool = True,
) -> FactoredMatrix:
    """The matrix W R that joins what one head takes in to what another makes of it.

    Rows are what the writer takes in: the stream at the token it attends to (d_model); for a
    neuron, its activation (1); for "embed", the token (d_vocab). Columns are what the reader makes
    of it: for an attention head the stream on the other side of its scores, by q and k, or what it
    writes, by v (d_model); for a neuron its query or value (1), so that between two neurons the one
    entry is the dot product of what one writes and the other reads, norms' scales left out.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

    Args:
        model: as in `composition`.
        writer: a name, or "embed".
        reader: a name.
        kind: as in `composition`.
        fold_norms: as in `composition`.

    Returns:
        A TransformerLens `FactoredMatrix`, its inner dimension d_head at most (1 for a neuron).

    Raises:
        CircuitError: an unknown kind, a reader that reads before the writer has written, the key of
            a neuron-head, weights that are not known.
        PatchingError: as in `composition`.

    Example:
        >>> from attn_only_lens import circuits, convert, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> circuits.virtual_weights(model, "L0H2", "L0N5", "q")
        FactoredMatrix: Shape(torch.Size([128, 1])), Hidden Dim(1)
    """
    into, onto = resolved(model, [writer], [reader], kind)
    weights = Weights.of(model, fold_norms=fold_norms)
    (source,), (target,) = into, onto
    if kind == "k" and target.kind == "neuron":
        raise CircuitError([f"{reader}: its K-composition is {NO_KEYS}"], PROBLEM)
    if not written_at(weights, source) <= read_at(target):
        raise CircuitError([f"got writer {writer} and reader {reader}; {NO_PAIR}"], PROBLEM)
    right = weights.reads(target, kind)[0]
    if source is None:
        return FactoredMatrix(weights.embedding(), right.A) @ right.B
    return weights.writes(source)[0] @ right
