"""How often tokens visit the experts of a mixture, and which tokens do so more than others."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy.sparse import csr_array
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import POSITIVE
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.recording import run
from attn_only_lens.engine.tokens import token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of, reasons_without_heads
from attn_only_lens.neurons.corpus import Corpus, batches, context_of, corpus_rows, n_texts
from attn_only_lens.precision import full_precision
from attn_only_lens.work import Work, work_reasons

_PROBLEM = "no visits of experts can be counted"
_BATCH_SIZE = 16


@one_thread_per_model
@warned_once()
@full_precision()
@torch.no_grad()
def expert_visits(model: Any, corpus: Corpus, *, k: int = 5, work: Work = Work()) -> pd.DataFrame:
    """Count how often the tokens of a corpus visit each expert of a mixture, and by what tokens.

    Args:
        model: a mixture of experts with exposed neuron-heads.
        corpus: the texts. BOS is not counted.
        k: how many tokens to list for each expert.
        work: the number of texts in a batch, and whether to show progress.

    Returns:
        A frame with one row for each routed expert of each layer. Columns: `layer`, `expert`,
        `visits` (the share of tokens that visit the expert), `weight` (the mean routing weight at
        these tokens; NaN without visits), and two lists of up to k entries: `tokens`, whose visits
        exceed their expected number most, and `shares`, the share of the occurrences of each of
        these tokens at which the expert is visited. The excess is n log(n / e), with n visits,
        where e would be expected if all tokens visited the expert equally often.

    Raises:
        InputError: with every reason: no layer is a mixture; the corpus is none, or has no tokens.

    Example:
        `docs/mixtures.md` has one, with transformer-lens 4.
    """
    reasons = reasons_without_heads(model) + reasons_not_to_run(model) + POSITIVE.reasons(k=k)
    reasons += work_reasons(work, "prompts_at_once", "resume", "share")
    layers: dict[int, int] = {}
    if not reasons:
        host = host_of(model)
        n_experts = [host.experts(layer, "neuron")[0] for layer in range(host.n_layers)]
        layers = {layer: n for layer, n in enumerate(n_experts) if n}
        reasons += ["no layer is a mixture of experts"] * (not layers)
    with InputError.collected(reasons):
        context = context_of(model, corpus)
    InputError.raise_if(reasons, _PROBLEM)

    names = {host.hook_name(layer, "router", "z"): layer for layer in layers}
    weights: dict[int, Tensor] = {}

    def look(value: Tensor, hook: Any) -> None:
        weights[names[hook.name]] = value.flatten(0, -2)

    hooks = [(name, look) for name in names]
    size = model.cfg.d_vocab
    counts = {layer: csr_array((n, size), dtype=np.int64) for layer, n in layers.items()}
    sums = {layer: np.zeros(n) for layer, n in layers.items()}
    occurrences, seen = np.zeros(size, dtype=np.int64), 0
    progress = tqdm(total=n_texts(corpus.texts), unit="text", disable=not work.progress)
    with progress as bar:
        rows = corpus_rows(model, corpus.texts, context)
        for batch, batch_rows in batches(model, rows, work.batch_size or _BATCH_SIZE):
            run(model, batch.tokens, batch.mask, hooks)
            tokens = batch.tokens.flatten()[batch.counted].cpu().numpy()
            occurrences += np.bincount(tokens, minlength=size)
            for layer, n in layers.items():
                of_layer = weights[layer].to(batch.counted.device)[batch.counted, :n]
                r = of_layer.double().cpu().numpy()
                sums[layer] += r.sum(axis=0)
                at, expert = np.nonzero(r)
                ones = np.ones(len(at), dtype=np.int64)
                counts[layer] = counts[layer] + csr_array(
                    (ones, (expert, tokens[at])), shape=(n, size)
                )
            bar.update(batch_rows[-1].text + 1 - seen)
            seen = batch_rows[-1].text + 1
    if not occurrences.sum():
        raise InputError(["the corpus has no tokens except BOS"], _PROBLEM)
    experts = [
        {"layer": layer, "expert": expert}
        | _of_expert(model, counts[layer][[expert]].toarray()[0], total, occurrences, k)
        for layer in layers
        for expert, total in enumerate(sums[layer].tolist())
    ]
    return pd.DataFrame(experts)


def _of_expert(
    model: Any,
    visits: npt.NDArray[np.int64],
    weight: float,
    occurrences: npt.NDArray[np.int64],
    k: int,
) -> dict[str, Any]:
    """Return the columns of one expert, from its visits by each token and its summed weights."""
    n = int(visits.sum())
    some = np.flatnonzero(visits)
    share = n / occurrences.sum()
    excess = visits[some] * np.log(visits[some] / (share * occurrences[some]))
    best = some[np.argsort(-excess, kind="stable")[:k]]
    return {
        "visits": share,
        "weight": weight / n if n else np.nan,
        "tokens": [token_text(model, int(token)) for token in best],
        "shares": (visits[best] / occurrences[best]).tolist(),
    }
