"""What persistent vectors do in trained models: the measures of `all_attention.py`.

p_n is the weight of persistent vector n of a head at a token; a_n = q·key_n / √d_head is its score.
Averages over tokens leave out padding, and tokens that the loss does not count.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from scipy.stats import spearmanr
from torch import Tensor

from analyses.studies.attention_only_models import AllAttention, Neurons, sublayers_of
from analyses.tools import train_small_english as english

TENTH = 0.1


@contextmanager
def deleted(sublayer: AllAttention, gone: Tensor) -> Iterator[None]:
    """Leave out persistent vectors, so that the other weights of their heads grow.

    Args:
        sublayer: the layer.
        gone: which vectors are left out, [head, vector].
    """
    seen = sublayer.seen

    def without(pos: int, device: torch.device) -> Tensor:
        mask = seen(pos, device).expand(sublayer.n_heads, -1, -1).clone()
        mask[:, :, : gone.shape[1]] &= ~gone[:, None]
        return mask

    sublayer.seen = without  # type: ignore[method-assign]
    try:
        yield
    finally:
        del sublayer.seen


@contextmanager
def zeroed(sublayer: AllAttention | Neurons, gone: Tensor) -> Iterator[None]:
    """Set the values of persistent vectors, or the outputs of neurons, to zero.

    Args:
        sublayer: the layer.
        gone: which vectors [head, vector], or which neurons [neuron].
    """
    weights = sublayer.W_O if isinstance(sublayer, Neurons) else sublayer.scaled_value
    kept = weights.data.clone()
    weights.data[gone] = 0
    try:
        yield
    finally:
        weights.data.copy_(kept)


def losses(model: Any, batches: Sequence[Tensor]) -> Tensor:
    """Return the mean loss of each batch."""
    return torch.stack([english.loss_of(model, batch) for batch in batches])


def usage(model: Any, batches: Sequence[Tensor]) -> pd.DataFrame:
    """Return a row per layer and head with the use of its persistent vectors.

    Columns: `weight`, the mean of Σ p_n; `effective`, the mean over tokens of the exponential of
    the entropy of p_n / Σ p_n; `explained`, the median over vectors of the share of the variance
    of log p_n that is linear in a_n.
    """
    rows = []
    for layer, sublayer in enumerate(sublayers_of(model)):
        assert isinstance(sublayer, AllAttention)
        scores, weights = _at_tokens(model, sublayer, batches)
        total = weights.sum(2)
        share = weights / total[..., None]
        entropy = -(share * share.clamp_min(1e-30).log()).sum(2)
        log = weights.clamp_min(1e-30).log()
        a, b = scores - scores.mean(1, keepdim=True), log - log.mean(1, keepdim=True)
        explained = (a * b).mean(1).square() / (a.square().mean(1) * b.square().mean(1))
        for head in range(sublayer.n_heads):
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "weight": total[head].mean().item(),
                    "effective": entropy[head].exp().mean().item(),
                    "explained": explained[head].median().item(),
                }
            )
    return pd.DataFrame(rows)


def _at_tokens(
    model: Any, sublayer: AllAttention, batches: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return scores a_n and weights p_n of a layer, [head, token, vector], without padding."""
    n_vectors, scores, weights = sublayer.scaled_key.shape[1], [], []

    def read(module: Any, inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        x = inputs[0] if inputs else kwargs["hidden_states"]
        q = sublayer.rows(x)[0]
        a = q @ sublayer.key.transpose(-1, -2) / sublayer.d_head**0.5
        real = batch[:, :-1] != english.vocabulary()[english.EOS]
        for kept, read_now in ((scores, a), (weights, sublayer.pattern(x)[..., :n_vectors])):
            kept.append(read_now.transpose(1, 2)[real])

    hook = sublayer.register_forward_pre_hook(read, with_kwargs=True)
    try:
        for batch in batches:
            model(batch[:, :-1])
    finally:
        hook.remove()
    return torch.cat(scores).transpose(0, 1).double(), torch.cat(weights).transpose(0, 1).double()


def layer_costs(model: Any, batches: Sequence[Tensor]) -> pd.DataFrame:
    """Return how much the loss grows without all persistent vectors of each layer, and of both."""
    whole = losses(model, batches).mean().item()
    layers = list(enumerate(sublayers_of(model)))
    rows = []
    for name, chosen in [
        *((str(layer), [x]) for layer, x in layers),
        ("all", [x for _, x in layers]),
    ]:
        row: dict[str, Any] = {"layer": name, "whole": whole}
        for kind, without in (("deleted", deleted), ("zeroed", zeroed)):
            contexts = [without(x, torch.ones(x.scaled_key.shape[:2]).bool()) for x in chosen]
            row[kind] = _inside(contexts, model, batches) - whole
        rows.append(row)
    return pd.DataFrame(rows)


def _inside(contexts: Sequence[Any], model: Any, batches: Sequence[Tensor]) -> float:
    for context in contexts:
        context.__enter__()
    try:
        return losses(model, batches).mean().item()
    finally:
        for context in contexts:
            context.__exit__(None, None, None)


def single_costs(model: Any, batches: Sequence[Tensor], every: int, few: int) -> pd.DataFrame:
    """Return how much the loss grows without one persistent vector, or one neuron.

    Args:
        model: the model.
        batches: batches of texts, sorted by length.
        few: how many of them are used, from short to long; neighbours are in different halves.
        every: each `every`-th vector of a head, or neuron, is left out alone.

    Returns:
        A frame with `layer`, `head`, `vector` (or neuron), and the growth of the loss on the first
        and on the second half of these batches: `zeroed_a` and `zeroed_b`, `deleted_a` and
        `deleted_b`.
    """
    step = len(batches) // few
    chosen = batches[step // 2 :: step][:few]
    batches = [*chosen[::2], *chosen[1::2]]
    half = len(batches) // 2
    whole = losses(model, batches)

    def growth(name: str, context: Any) -> dict[str, float]:
        with context:
            more = losses(model, batches) - whole
        halves = {"a": more[:half], "b": more[half:]}
        return {f"{name}_{of}": part.mean().item() for of, part in halves.items()}

    rows = []
    for layer, sublayer in enumerate(sublayers_of(model)):
        if isinstance(sublayer, Neurons):
            for neuron in range(0, sublayer.W_O.shape[0], every):
                costs = growth("zeroed", zeroed(sublayer, torch.tensor([neuron])))
                rows.append({"layer": layer, "head": 0, "vector": neuron} | costs)
            continue
        for head in range(sublayer.n_heads):
            for vector in range(head, sublayer.scaled_key.shape[1], every):
                gone = torch.zeros(sublayer.scaled_key.shape[:2], dtype=torch.bool)
                gone[head, vector] = True
                costs = growth("zeroed", zeroed(sublayer, gone))
                costs |= growth("deleted", deleted(sublayer, gone))
                rows.append({"layer": layer, "head": head, "vector": vector} | costs)
    return pd.DataFrame(rows)


def summary_of(costs: pd.DataFrame) -> dict[str, float]:
    """Return what prediction 5, 6 and 8 ask about single costs.

    `median` is the median cost of deleting, `order` is Spearman's ρ between zeroing and deleting,
    and `tenth` is the share of the summed positive costs on the second half of the texts that the
    strongest tenth has, chosen on the first half.
    """
    chosen = costs["zeroed_a"].nlargest(max(1, round(TENTH * len(costs)))).index
    positive = costs["zeroed_b"].clip(lower=0)
    result = {"tenth": positive[chosen].sum() / positive.sum()}
    if "deleted_a" in costs:
        means = {of: (costs[f"{of}_a"] + costs[f"{of}_b"]) / 2 for of in ("zeroed", "deleted")}
        result["median"] = means["deleted"].median()
        result["order"] = spearmanr(means["zeroed"], means["deleted"]).statistic
    return result


def promoted(model: Any, batches: Sequence[Tensor], k: int) -> pd.DataFrame:
    """Return what the vectors with the largest mean weight read and write in the last layer.

    Columns: `head`, `vector`, `weight` (the mean of p_n); `reads`, the tokens at which p_n is
    largest on average (over three occurrences or more); `writes`, the tokens whose logits
    value_n W_O raises most (with the last norm's gain, and its scale held).
    """
    sublayer = sublayers_of(model)[-1]
    assert isinstance(sublayer, AllAttention)
    _, weights = _at_tokens(model, sublayer, batches)
    means = weights.mean(1)
    words = {i: word.strip() for word, i in english.vocabulary().items()}
    tokens = torch.cat([b[:, :-1][b[:, :-1] != english.vocabulary()[english.EOS]] for b in batches])
    counts = torch.bincount(tokens, minlength=len(words))
    W_O = sublayer.c_proj.weight.unflatten(0, (sublayer.n_heads, sublayer.d_head))
    rows = []
    for index in means.flatten().topk(k).indices.tolist():
        head, vector = divmod(index, means.shape[1])
        sums = torch.zeros(len(words), dtype=torch.double).index_add_(
            0, tokens, weights[head, :, vector]
        )
        most_read = (sums / counts).where(counts >= 3, -torch.inf).topk(4).indices.tolist()
        written = sublayer.value[head, vector] @ W_O[head]
        written = (written - written.mean()) * model.transformer.ln_f.weight
        top = (model.lm_head.weight @ written).topk(4).indices.tolist()
        rows.append(
            {
                "head": head,
                "vector": vector,
                "weight": means[head, vector].item(),
                "reads": " ".join(words[i] for i in most_read),
                "writes": " ".join(words[i] for i in top),
            }
        )
    return pd.DataFrame(rows)
