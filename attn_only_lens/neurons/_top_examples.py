"""Compute top examples and statistics of neurons and heads in one pass over a corpus.

Without attributions, only the activations of one layer for one batch are in memory; with
attributions, the backward pass keeps the activations of all layers in memory. If a window has w
tokens, the k examples with the largest (or smallest) values of a neuron take k (4 + w) integers and
k (1 + 2 w) floats. The histograms of one neuron take 1,024 + 3 · 128 + 4 integers. The sums of an
attention head take two floats for each token of the vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args

import pandas as pd
from tqdm.auto import tqdm

from attn_only_lens.arguments import POSITIVE, one_of
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import AnyMetric, as_metric, no_gradient_reasons, one_run_reasons
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.model_state import saved_state
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.sites import (
    LayerSites,
    Sites,
    SomeSites,
    resolve_sites,
    whole_head_reasons,
    wide_reasons,
)
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS, HeadKind
from attn_only_lens.neurons.corpus import Corpus, batches, context_of, corpus_rows, n_texts
from attn_only_lens.neurons.statistics import CorpusStatistics
from attn_only_lens.neurons.summary import Options, Resumed, Summary
from attn_only_lens.precision import full_precision
from attn_only_lens.work import Work, work_reasons

By = Literal["z", "gate", "attribution"]
_BATCH_SIZE = 32
_PROBLEM = "these neurons and heads cannot be looked up in a corpus"


def top_examples(
    model: Any,
    names: SomeSites | None,
    corpus: Corpus,
    *,
    k: int = 20,
    by: By = "z",
    metric: AnyMetric | None = None,
    work: Work = Work(),
) -> pd.DataFrame:
    """Return the tokens of a corpus at which neurons have their largest and smallest values.

    The corpus is read once, text by text. BOS tokens are never examples, because a neuron has the
    same value at BOS in every text. For a transcoder feature, tokens at which it is inactive are
    not examples either, so a feature that is never active has no examples.

    Args:
        model: converted, or with exposed neuron-heads.
        names: neurons and transcoder features, such as "L3N7" and "L3F7", "neurons", or
            `patching.Sites("neurons", layers=[3])`; None for all neurons and features.
        corpus: the texts, and the length of pieces and windows: `Corpus(texts)`.
        k: number of examples for each neuron and end; fewer if the corpus has fewer tokens, or if a
            feature is active at fewer tokens.
        by: "z", gate × value, the output of a neuron; "gate", the token's attention to itself; or
            "attribution", z times the gradient of a metric on the text, which estimates how much
            the metric would decrease if z were 0 at the token.
        metric: for attributions: `patching.loss()`, or another metric with one value per text.
        work: how the model is run. A batch has 32 pieces of text by default; its size affects only
            rounding errors. With the folder `resume`, an interrupted call, or a call with a longer
            corpus that begins with the same texts, continues from there.

    Returns:
        A frame with one row per neuron, end and rank: `name`, `end`, `rank` from 1, `value` (the
        quantity of the ranking), `text` (index in the corpus), `at` (position in that text); and
        for the window, the lists `tokens`, `values` (z) and `gates`, and `position` (the example's
        index in the window). If values are equal, earlier texts and positions come first.

    Raises:
        InputError: a name is not the name of a whole neuron, an option is out of range, the corpus
            has no tokens, the metric does not fit, or the folder has another call's results; the
            error lists every reason.
        CheckpointError: files in the folder `resume` are damaged.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, load, neurons
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> corpus = neurons.Corpus([[3, 4, 113], [5, 7, 113], [3, 4, 113]], ends="largest")
        >>> frame = neurons.top_examples(model, ["L0N7"], corpus, k=2)
        >>> frame[["name", "rank", "text", "at"]].to_numpy().tolist()
        [['L0N7', 1, 0, 2], ['L0N7', 2, 2, 2]]
    """
    statistics = _look_up(NEURON_KINDS, **locals(), histograms=False)
    assert statistics.neurons is not None
    return statistics.neurons.frame()


def corpus_statistics(
    model: Any,
    names: SomeSites | None,
    corpus: Corpus,
    *,
    k: int = 20,
    by: By = "z",
    metric: AnyMetric | None = None,
    work: Work = Work(),
) -> CorpusStatistics:
    """Return the statistics of neurons and of attention heads, from one pass over the corpus.

    For neurons, these are their top examples, and histograms of z, gate and value. For attention
    heads, these are the tokens that they attend to, and the tokens where their output z W_O has the
    largest norm. Arguments and errors are the same as for `top_examples`, except:

    Args:
        names: neurons, features and attention heads, such as "L5H3" or "neurons"; None for all. A
            transcoder's skip and error nodes have no statistics, so "all" leaves them out.
        by: "z" or "gate" ranks the examples of neurons; the examples of heads are ranked by the
            norm of the output, and only the largest are returned. "attribution" ranks both.

    Returns:
        The statistics of `neurons` and of `heads`, None for a kind without names. They can be saved
        with `save` and drawn with `viz.neuron_page`.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, load, neurons
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> names, corpus = ["L0N7", "L0H2"], neurons.Corpus([[3, 4, 113], [5, 7, 113]])
        >>> both = neurons.corpus_statistics(model, names, corpus, k=2)
        >>> both.neurons.names, both.heads.names
        (('L0N7',), ('L0H2',))
        >>> both.heads.tokens("L0H2").columns.tolist(), len(both.heads.frame())
        (['token', 'share', 'mean'], 2)
        >>> counts, edges = both.neurons.histogram("L0N7", "gate")
        >>> int(counts.sum()), both.neurons.n_tokens
        (6, 6)
    """
    return _look_up(("attention", *NEURON_KINDS), **locals())


@one_thread_per_model
@warned_once()
@full_precision()
def _look_up(
    kinds: tuple[HeadKind, ...],
    model: Any,
    names: SomeSites | None,
    corpus: Corpus,
    k: int,
    by: By,
    metric: AnyMetric | None,
    work: Work,
    *,
    histograms: bool = True,
) -> CorpusStatistics:
    # Check
    selected = Sites.of_kinds(kinds) if names is None else Sites.of(names).without(*WIDE_KINDS)
    sites = resolve_sites(model, selected)
    reasons = [*_site_reasons(sites, kinds), *whole_head_reasons(selected)]
    reasons += reasons_not_to_run(model)
    reasons += one_of(*get_args(By)).reasons(by=by) + POSITIVE.reasons(k=k)
    reasons += work_reasons(work, "prompts_at_once", "share")
    if (metric is None) == (by == "attribution"):
        expected = "a metric" if by == "attribution" else "none"
        reasons.append(f"got by={by!r} and metric={metric!r}; expected {expected}")
    if metric is not None:
        reasons += one_run_reasons(metric) + no_gradient_reasons()
    with InputError.collected(reasons):
        context = context_of(model, corpus)
    InputError.raise_if(reasons, _PROBLEM)
    # Plan
    metric = None if metric is None else as_metric(metric)
    windows = corpus.ends, corpus.before, corpus.after, context
    summary = Summary(model, sites, Options(k, by, *windows, histograms))
    rows, resumed = corpus_rows(model, corpus.texts, context), None
    if work.resume is not None:
        of_summary = summary.names("attention", *NEURON_KINDS)
        settings = asdict(summary.options) | {"n_names": len(of_summary)}
        settings["names"] = hashlib.sha256(" ".join(of_summary).encode()).hexdigest()
        settings |= saved_state(model)
        settings["metric"] = None if metric is None else metric.identity()
        resumed = Resumed(work.resume, settings, summary)
        rows = resumed.skip_seen(rows)
    # Run
    label = work.progress if isinstance(work.progress, str) else None
    total = n_texts(corpus.texts)
    with tqdm(total=total, unit="text", desc=label, disable=not work.progress) as bar:
        bar.update(summary.n_texts)
        for batch, batch_rows in batches(model, rows, work.batch_size or _BATCH_SIZE):
            summary.add(batch, metric)
            bar.update(batch_rows[-1].text + 1 - summary.n_texts)
            summary.n_texts = batch_rows[-1].text + 1
            if resumed is not None:
                resumed.saw(batch_rows)
    # Collect
    if resumed is not None:
        resumed.write()
    if not summary.n_tokens:
        raise InputError(["the corpus has no tokens except BOS"], _PROBLEM)
    return summary.result("" if metric is None else metric.name)


def _site_reasons(sites: Sequence[LayerSites], kinds: tuple[HeadKind, ...]) -> list[str]:
    expected = "expected neurons: `corpus_statistics` takes attention heads"
    others = (site for site in sites if site.kind not in (*kinds, *WIDE_KINDS))
    return [
        *wide_reasons(sites),
        *(f"got {site.names[0]}, an attention head; {expected}" for site in others),
    ][:2]
