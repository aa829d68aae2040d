"""Patches of attention queries in closed form: each row of a pattern, computed anew from q'.

A query moves one row of one head's pattern, and so that head's z at that token and nothing else of
its layer:  z' = softmax(q' · K) V  with keys and values as they are. So one forward pass in which
all queries are replaced at once shows every z', so long as z itself is put back before anyone reads
it: the model's own code computes the rows, whatever its masks, rotations and caps.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.patching.attention import hook_name
from attn_only_lens.patching.record import Recording, run
from attn_only_lens.tolerances import LOGIT_TOLERANCE

__all__ = ["answered"]


@torch.no_grad()
def answered(
    model: Any, target: Recording, source: Recording, layers: Iterable[int]
) -> dict[str, Float[Tensor, "batch pos head_index d_head"]]:
    """z of every attention head with the source run's queries, by hook name: two forwards.

    Args:
        model: converted, or with exposed neuron-heads.
        target: the run patched into; its queries and z are on record.
        source: the other run, with its queries.
        layers: source layers.

    Raises:
        UnsupportedModelError: a head's query moves other heads.
    """
    names = {hook_name(model, layer, "q"): hook_name(model, layer, "z") for layer in layers}

    def asked(n_heads: int | None) -> dict[str, Tensor]:
        """With the queries of the first heads replaced, or of all."""
        found: dict[str, Tensor] = {}

        def ask(value: Tensor, hook: Any, q: str) -> Tensor:
            own = source.hooked[q][:, :, :n_heads]
            return torch.cat([own, value[:, :, own.shape[2] :]], dim=2)

        def answer(value: Tensor, hook: Any, z: str) -> Tensor:
            found[z] = value.clone()
            return target.hooked[z]

        hooks = [(q, partial(ask, q=q)) for q in names]
        hooks += [(z, partial(answer, z=z)) for z in names.values()]
        run(model, target.tokens, target.mask, hooks)
        return found

    moved = [
        z
        for z, of_others in asked(1).items()
        if not _same(of_others[:, :, 1:], target.hooked[z][:, :, 1:])
    ]
    if moved:
        raise UnsupportedModelError(
            [
                f"to patch the query of one head moves the z of others ({', '.join(moved)}): its "
                "queries are normed all together. Take method='gradient', or patch the pattern"
            ],
            "its queries cannot be patched in closed form",
        )
    return asked(None)


def _same(one: Tensor, other: Tensor) -> bool:
    if not one.numel():
        return True
    return float((one - other).abs().max()) <= LOGIT_TOLERANCE[one.dtype] * float(other.abs().max())
