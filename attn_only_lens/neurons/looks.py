"""Where attention heads look: sums over the patterns of one batch after another.

The attention of a token is split three ways: on BOS; on the token itself; on other tokens. Sums are
in the dtype of the model, or in float32 if that is narrower.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.neurons.accumulate import State
from attn_only_lens.neurons.corpus import Batch

MOST_TOKENS = 20
"""Tokens in the lists of a head."""
SIDES = ("attended", "attending")


def no_looks(n: int, context: int, d_vocab: int, like: Tensor) -> State:
    """Return the state of `add_looks` before the first batch."""
    tokens = {side: like.new_zeros(n, d_vocab) for side in SIDES}
    return {"bos": like.new_zeros(n), "offsets": like.new_zeros(n, 2 * context - 1), **tokens}


def add_looks(state: State, pattern: Float[Tensor, "head batch query pos"], batch: Batch) -> None:
    """Add the patterns of a batch, of all queries except BOS and padding.

    Offsets are positions of the query minus positions of the key, from the most negative.
    """
    n_batch, n_pos = batch.tokens.shape
    counted = torch.zeros(n_batch * n_pos, dtype=pattern.dtype, device=pattern.device)
    counted[batch.counted] = 1
    counted = counted.view(n_batch, n_pos)
    queries = pattern * counted[..., None]
    # The first token of a row is BOS if it is not counted.
    state["bos"] += (queries[..., 0] * (1 - counted[:, :1])).sum((1, 2))
    queries *= counted[:, None]
    positions = torch.arange(n_pos, device=pattern.device)
    offsets = positions[:, None] - positions + state["offsets"].shape[1] // 2
    state["offsets"].index_add_(1, offsets.flatten(), queries.sum(1).flatten(1))
    queries.diagonal(dim1=2, dim2=3).zero_()
    for side, axis in zip(SIDES, (2, 3), strict=True):
        state[side].index_add_(1, batch.tokens.flatten(), queries.sum(axis).flatten(1))


def shares(state: State, occurrences: Tensor) -> State:
    """Return shares of a head's attention, with its `MOST_TOKENS` first tokens on each side.

    `attended` and `attending` are shares of the attention to other tokens; `.mean` divides the sum
    of a token by its occurrences: the attention that it receives or gives, from 0.
    """
    n_tokens = occurrences.sum()
    result = {name: state[name].double() / n_tokens for name in ("bos", "offsets")}
    for side in SIDES:
        sums = state[side].double()
        top = sums.topk(min(MOST_TOKENS, sums.shape[1]), dim=1)
        result[side] = top.values / sums.sum(1, keepdim=True).clamp(min=1e-30)
        result[f"{side}.mean"] = top.values / occurrences[top.indices].clamp(min=1)
        result[f"{side}.tokens"] = torch.where(top.values > 0, top.indices, -1)
    return result
