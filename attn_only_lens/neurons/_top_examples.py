"""Compute top examples and statistics of neurons and heads in one pass over a corpus.

Without attributions, only the activations of one layer for one batch are in memory; with
attributions, the backward pass keeps the activations of all layers in memory. If a window has w
tokens, the k examples with the largest (or smallest) values of a neuron take k (4 + w) integers and
k (1 + 2 w) floats. The histograms of one neuron take 1,024 + 3 · 128 + 4 integers. The sums of an
attention head take two floats for each token of the vocabulary.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from tqdm.auto import tqdm

from attn_only_lens.arguments import COUNT, POSITIVE, is_count, one_of
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import AnyMetric, as_metric, no_gradient_reasons, one_run_reasons
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.model_state import saved_state
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.sites import (
    LayerSites,
    Selection,
    Sites,
    resolve_sites,
    wide_reasons,
    without_wide,
)
from attn_only_lens.engine.tokens import length_dependent_ropes
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS, HeadKind
from attn_only_lens.neurons.corpus import Texts, batches, corpus_rows, n_texts
from attn_only_lens.neurons.statistics import CorpusStatistics, NeuronStatistics
from attn_only_lens.neurons.summary import ENDS_OF_OPTION, Options, Resumed, Summary
from attn_only_lens.precision import full_precision

By = Literal["z", "gate", "attribution"]
Ends = Literal["both", "largest", "smallest"]
_PROBLEM = "these neurons and heads cannot be looked up in a corpus"


def top_examples(
    model: Any,
    names: Sites | None,
    texts: Texts,
    k: int = 20,
    by: By = "z",
    metric: AnyMetric | None = None,
    *,
    ends: Ends = "both",
    before: int = 12,
    after: int = 6,
    context: int | None = None,
    batch_size: int = 32,
    resume: str | Path | None = None,
    progress: bool | str = True,
) -> pd.DataFrame:
    """Return the tokens of a corpus at which neurons have their largest and smallest values.

    The corpus is read once, text by text. BOS tokens are never examples, because a neuron has the
    same value at BOS in every text. For a transcoder feature, tokens at which it is inactive are
    not examples either, so a feature that is never active has no examples.

    Args:
        model: converted, or with exposed neuron-heads.
        names: neurons and transcoder features, such as "L3N7" and "L3F7", or
            `patching.neuron_heads(layers)`; None for all.
        texts: a list or any iterable (also of `datasets`) of texts, of dictionaries with a "text",
            or of the tokens of one text [pos]; or the path of a UTF-8 file with one text per
            line or, if its name ends in .jsonl, one dictionary per line.
        k: number of examples for each neuron and end; fewer if the corpus has fewer tokens, or if a
            feature is active at fewer tokens.
        by: "z", gate × value, the output of a neuron; "gate", the token's attention to itself; or
            "attribution", z times the gradient of a metric on the text, which estimates how much
            the metric would decrease if z were 0 at the token.
        metric: for attributions: `patching.loss()`, or another metric with one value per text.
        ends: "largest", "smallest", or "both"; in a gated MLP, z can have either sign.
        before: number of tokens in a window before the example's token.
        after: number of tokens in a window after the example's token.
        context: maximum number of tokens per piece; longer texts are split into pieces, which begin
            with BOS if texts do. None means 128, or the model's context length if it is shorter.
        batch_size: number of pieces in one forward pass; it affects only rounding errors.
        resume: a folder for intermediate results. An interrupted call, or a call with a longer
            corpus that begins with the same texts, continues from there.
        progress: whether to show a progress bar, or the label of the progress bar.

    Returns:
        A frame with one row per neuron, end and rank: `name`, `end`, `rank` from 1, `value` (the
        quantity of the ranking), `text` (index in the corpus), `at` (position in that text); and
        for the window, the lists `tokens`, `values` (z) and `gates`, and `position` (the example's
        index in the window). `examples_of` makes an `Example` from each row. If values are equal,
        earlier texts and positions come first.

    Raises:
        InputError: a name is not the name of a whole neuron, an option is out of range, the corpus
            has no tokens, the metric does not fit, or the folder has another call's results; the
            error lists every reason.
        CheckpointError: files in the folder `resume` are damaged.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, neurons, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> texts = [[3, 4, 113], [5, 7, 113], [3, 4, 113]]
        >>> frame = neurons.top_examples(model, ["L0N7"], texts, k=2, ends="largest",
        ...                              progress=False)
        >>> frame[["name", "rank", "text", "at"]].to_numpy().tolist()
        [['L0N7', 1, 0, 2], ['L0N7', 2, 2, 2]]
    """
    statistics = _look_up(NEURON_KINDS, **locals(), histograms=False)
    assert statistics.neurons is not None
    return statistics.neurons.frame()


def neuron_statistics(
    model: Any,
    names: Sites | None,
    texts: Texts,
    k: int = 20,
    by: By = "z",
    metric: AnyMetric | None = None,
    *,
    ends: Ends = "both",
    before: int = 12,
    after: int = 6,
    context: int | None = None,
    batch_size: int = 32,
    resume: str | Path | None = None,
    progress: bool | str = True,
) -> NeuronStatistics:
    """Return top examples of neurons, and histograms of each neuron's z, gate and value.

    Arguments and errors are the same as for `top_examples`.

    Returns:
        The statistics, which can be saved with `save` and drawn with `viz.neuron_page`.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, neurons, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> texts = [[3, 4, 113], [5, 7, 113]]
        >>> statistics = neurons.neuron_statistics(model, ["L0N7"], texts, k=2, progress=False)
        >>> counts, edges = statistics.histogram("L0N7", "gate")
        >>> int(counts.sum()), statistics.n_tokens
        (6, 6)
    """
    statistics = _look_up(NEURON_KINDS, **locals())
    assert statistics.neurons is not None
    return statistics.neurons


def corpus_statistics(
    model: Any,
    names: Sites | None,
    texts: Texts,
    k: int = 20,
    by: By = "z",
    metric: AnyMetric | None = None,
    *,
    ends: Ends = "both",
    before: int = 12,
    after: int = 6,
    context: int | None = None,
    batch_size: int = 32,
    resume: str | Path | None = None,
    progress: bool | str = True,
) -> CorpusStatistics:
    """Return the statistics of neurons and of attention heads, from one pass over the corpus.

    For attention heads, these are the tokens that they attend to, and the tokens where their output
    z W_O has the largest norm. Arguments and errors are the same as for `top_examples`, except:

    Args:
        names: neurons, features and attention heads, such as "L5H3" or `patching.heads(layers)`;
            None for all. A transcoder's skip and error nodes have no statistics, so selections such
            as `patching.all_heads()` leave them out.
        by: "z" or "gate" ranks the examples of neurons; the examples of heads are ranked by the
            norm of the output, and only the largest are returned. "attribution" ranks both.
        before: for a head, a window has 4 times this number of tokens before the example, because
            keys can be distant.

    Returns:
        The statistics of `neurons` and of `heads`, None for a kind without names. They can be saved
        with `save` and drawn with `viz.neuron_page`.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, neurons, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> names, texts = ["L0N7", "L0H2"], [[3, 4, 113], [5, 7, 113]]
        >>> both = neurons.corpus_statistics(model, names, texts, k=2, progress=False)
        >>> both.neurons.names, both.heads.names
        (('L0N7',), ('L0H2',))
        >>> both.heads.tokens("L0H2").columns.tolist(), len(both.heads.frame())
        (['token', 'share', 'mean'], 2)
    """
    return _look_up(("attention", *NEURON_KINDS), **locals())


@one_thread_per_model
@warned_once()
@full_precision()
def _look_up(
    kinds: tuple[HeadKind, ...],
    model: Any,
    names: Sites | None,
    texts: Texts,
    metric: AnyMetric | None,
    resume: str | Path | None,
    progress: bool | str,
    context: int | None,
    **others: Any,
) -> CorpusStatistics:
    # Check
    sites = resolve_sites(model, Selection(kinds) if names is None else without_wide(names))
    context = min(128, model.cfg.n_ctx) if context is None else context
    options = Options(context=context, **others)
    reasons = _site_reasons(sites, kinds) + reasons_not_to_run(model)
    reasons += _option_reasons(options, metric)
    endless = "dynamic" in length_dependent_ropes(model)
    if not is_count(context, 2, math.inf if endless else model.cfg.n_ctx):
        most = " or more" if endless else f" to {model.cfg.n_ctx}, the context length"
        reasons.append(f"got {context=}; expected 2{most}")
    InputError.raise_if(reasons, _PROBLEM)
    # Plan
    metric = None if metric is None else as_metric(metric)
    summary = Summary(model, sites, options)
    rows, resumed = corpus_rows(model, texts, context), None
    if resume is not None:
        of_summary = summary.names("attention", *NEURON_KINDS)
        settings = asdict(options) | {"n_names": len(of_summary)}
        del settings["batch_size"]
        settings["names"] = hashlib.sha256(" ".join(of_summary).encode()).hexdigest()
        settings |= saved_state(model)
        settings["metric"] = None if metric is None else metric.identity()
        resumed = Resumed(resume, settings, summary)
        rows = resumed.skip_seen(rows)
    # Run
    label = progress if isinstance(progress, str) else None
    with tqdm(total=n_texts(texts), unit="text", desc=label, disable=not progress) as bar:
        bar.update(summary.n_texts)
        for batch, batch_rows in batches(model, rows, options.batch_size):
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


def _option_reasons(options: Options, metric: AnyMetric | None) -> list[str]:
    by = options.by
    reasons = one_of(*get_args(By)).reasons(by=by)
    reasons += one_of(*tuple(ENDS_OF_OPTION)).reasons(ends=options.ends)
    reasons += POSITIVE.reasons(k=options.k, batch_size=options.batch_size)
    reasons += COUNT.reasons(before=options.before, after=options.after)
    if (metric is None) == (by == "attribution"):
        expected = "a metric" if by == "attribution" else "none"
        reasons.append(f"got by={by!r} and metric={metric!r}; expected {expected}")
    if metric is not None:
        reasons += one_run_reasons(metric) + no_gradient_reasons()
    return reasons


def _site_reasons(sites: Sequence[LayerSites], kinds: tuple[HeadKind, ...]) -> list[str]:
    reasons = wide_reasons(sites)
    for site in sites:
        if site.kind in WIDE_KINDS:
            continue
        if site.kind not in kinds:
            expected = "expected neurons: `corpus_statistics` takes attention heads"
            reasons.append(f"got {site.names[0]}, an attention head; {expected}")
            continue
    return reasons[:2]
