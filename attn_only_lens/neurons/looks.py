"""Sum the attention of heads over batches: to BOS, at each offset, and to and from each token.

Each token's attention is divided into attention to BOS, to the token itself and to other tokens.
Sums have the dtype of the model, or float32 for models in half precision.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.neurons.accumulate import State
from attn_only_lens.neurons.corpus import Batch

MOST_TOKENS = 20
"""The maximum number of tokens in a head's lists."""
SIDES = ("attended", "attending")


def no_looks(n: int, context: int, d_vocab: int, like: Tensor) -> State:
    """Return the initial state of `add_looks`, with all sums zero."""
    tokens = {side: like.new_zeros(n, d_vocab) for side in SIDES}
    return {"bos": like.new_zeros(n), "offsets": like.new_zeros(n, 2 * context - 1), **tokens}


def add_looks(state: State, pattern: Float[Tensor, "head batch query pos"], batch: Batch) -> None:
    """Add a batch's attention patterns to the sums, for all queries except BOS and padding.

    The offset is the query position minus the key position.
    """
    n_batch, n_pos = batch.tokens.shape
    counted = torch.zeros(n_batch * n_pos, dtype=pattern.dtype, device=pattern.device)
    counted[batch.counted] = 1
    counted = counted.view(n_batch, n_pos)
    queries = pattern * counted[..., None]
    # `counted` is 0 for the first token of a row only if this token is BOS.
    state["bos"] += (queries[..., 0] * (1 - counted[:, :1])).sum((1, 2))
    queries *= counted[:, None]
    positions = torch.arange(n_pos, device=pattern.device)
    offsets = positions[:, None] - positions + state["offsets"].shape[1] // 2
    state["offsets"].index_add_(1, offsets.flatten(), queries.sum(1).flatten(1))
    queries.diagonal(dim1=2, dim2=3).zero_()
    for side, axis in zip(SIDES, (2, 3), strict=True):
        state[side].index_add_(1, batch.tokens.flatten(), queries.sum(axis).flatten(1))


def shares(state: State, occurrences: Tensor) -> State:
    """Convert the sums to shares, and select the `MOST_TOKENS` tokens with the largest sums.

    Of all attention between different tokens, `attended` is the share that a token receives, and
    `attending` the share that it pays. `attended.mean` and `attending.mean` are the mean attention
    that one occurrence of the token receives or pays.
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
