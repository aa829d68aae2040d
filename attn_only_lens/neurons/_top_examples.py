"""One pass over a corpus: top examples and histograms of neurons, in bounded memory.

A layer's activations are taken in as they are computed, and forgotten: beyond the model and its
pass of one batch, memory is that of what is kept, for each neuron and end

    k (4 + window) integers and k (1 + 2 window) numbers         top examples
    1,024 + 3 · 128 + 4 integers                                 histograms

An attribution is z times the gradient of a metric with respect to z, an estimate of what setting z
to 0 takes from the metric of its text (`patching.attribution`, direction "zero", has the same
numbers with the other sign): a forward and a backward pass, in which every layer is held.

A corpus may be longer than anyone waits. With `resume`, what was found so far is written to a
folder every half minute; the next call skips the texts seen, and checks that they are the same.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from tqdm.auto import tqdm

from attn_only_lens.arguments import is_count, option_reasons
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import AnyMetric, as_metric, no_gradient_reasons, one_run_reasons
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.model_weights import fingerprint
from attn_only_lens.engine.sites import ALL_MEMBERS, LayerSites, Sites, neuron_heads, resolve_sites
from attn_only_lens.errors import InputError
from attn_only_lens.neurons.accumulate import ENDS, End
from attn_only_lens.neurons.corpus import Texts, batches, corpus_rows, n_texts
from attn_only_lens.neurons.statistics import NeuronStatistics
from attn_only_lens.neurons.summary import Resumed, Summary
from attn_only_lens.precision import full_precision

By = Literal["z", "gate", "attribution"]
Ends = Literal["both", "largest", "smallest"]
_BY: tuple[str, ...] = get_args(By)
_ENDS: dict[str, tuple[End, ...]] = {"both": ENDS, "largest": ENDS[:1], "smallest": ENDS[1:]}
_PROBLEM = "these neurons cannot be looked up in a corpus"


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
    """Return the places of a corpus where neurons are largest, and where they are least.

    The corpus is read once, text by text, and never held. A BOS that begins a text, or its tokens,
    is no example: there, neurons are what they are in every text.

    Args:
        model: converted, or with exposed neuron-heads.
        names: neurons, such as "L3N7", or `patching.neuron_heads(layers)`; None for all.
        texts: a list or any iterable (of `datasets` too) of texts, of dictionaries with a "text",
            or of tokens of one text [pos]; or the path of a file with a text a line, or, if its
            name ends in .jsonl, a dictionary a line. Files are UTF-8.
        k: examples of each neuron and end; fewer if the corpus has fewer tokens.
        by: "z", gate × value, what a neuron puts out; "gate", its attention to itself; or
            "attribution", z times the gradient of a metric of that text: an estimate of what
            setting z to 0 there would take from the metric.
        metric: for attributions: `patching.loss()`, or another that has a number for each text.
        ends: "largest", "smallest", or "both". In a gated MLP z has either sign.
        before: tokens of a window before the one that it is of.
        after: and after it.
        context: tokens that are run at once: longer texts are cut, and each piece begins with BOS
            if texts do. None for 128, or as many as the model takes.
        batch_size: pieces that are run at once. It changes roundings, and nothing else.
        resume: a folder to write to as results come; an interrupted call goes on from there, and a
            longer corpus after a shorter one that begins alike.
        progress: whether to show a bar; a text is its label.

    Returns:
        Rows by neuron, end and rank: `name`, `end`, `rank` from 1, `value` (what is ranked), `text`
        (its number), `at` (the position in the text); and of the window `tokens`, `values` (z),
        `gates`, `position` (of the example in it). `examples_of` makes `Example`s of them. Among
        equal values, earlier texts and positions come first.

    Raises:
        InputError: with every reason: names that are not of whole neurons, options out of range, a
            corpus without tokens; a metric that does not fit; a folder of other results.
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
    options: dict[str, Any] = {"ends": ends, "before": before, "after": after, "context": context}
    options |= {"batch_size": batch_size, "resume": resume, "progress": progress}
    return _pass(model, names, texts, k, by, metric, **options, histograms=False).frame()


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
    """Return top examples of neurons, and histograms of z, gate and value, from one pass.

    Arguments and errors are those of `top_examples`.

    Returns:
        The statistics, which `save` and `load` keep, and `viz.neuron_page` draws.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, neurons, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> texts = [[3, 4, 113], [5, 7, 113]]
        >>> found = neurons.neuron_statistics(model, ["L0N7"], texts, k=2, progress=False)
        >>> counts, edges = found.histogram("L0N7", "gate")
        >>> int(counts.sum()), found.n_tokens
        (6, 6)
    """
    options: dict[str, Any] = {"ends": ends, "before": before, "after": after, "context": context}
    options |= {"batch_size": batch_size, "resume": resume, "progress": progress}
    return _pass(model, names, texts, k, by, metric, **options, histograms=True)


@warned_once()
@full_precision()
def _pass(
    model: Any,
    names: Sites | None,
    texts: Texts,
    k: int,
    by: str,
    metric: AnyMetric | None,
    *,
    ends: str,
    before: int,
    after: int,
    context: int | None,
    batch_size: int,
    resume: str | Path | None,
    progress: bool | str,
    histograms: bool,
) -> NeuronStatistics:
    # Check
    sites = resolve_sites(model, neuron_heads() if names is None else names)
    context = min(128, model.cfg.n_ctx) if context is None else context
    settings: dict[str, Any] = {
        "k": k,
        "before": before,
        "after": after,
        "context": context,
        "by": by,
    }
    _check(model, sites, settings | {"ends": ends, "batch_size": batch_size}, metric)
    # Plan
    bound = None if metric is None else as_metric(metric)
    summary = Summary(model, sites, k, by, _ENDS[ends], before, after, histograms)
    rows, resumed = corpus_rows(model, texts, context), None
    if resume is not None:
        settings |= {"ends": ends, "histograms": histograms, "n_neurons": len(summary.names)}
        settings["names"] = hashlib.sha256(" ".join(summary.names).encode()).hexdigest()
        settings["model"] = fingerprint(model)
        settings["metric"] = None if bound is None else bound.identity()
        resumed = Resumed(resume, settings, summary)
        rows = resumed.skip_seen(rows)
    # Run
    label = progress if isinstance(progress, str) else None
    with tqdm(total=n_texts(texts), unit="text", desc=label, disable=not progress) as bar:
        bar.update(summary.n_texts)
        for batch, batch_rows in batches(model, rows, batch_size):
            summary.add(batch, bound)
            bar.update(batch_rows[-1].text + 1 - summary.n_texts)
            summary.n_texts = batch_rows[-1].text + 1
            if resumed is not None:
                resumed.saw(batch_rows)
    # Collect
    if resumed is not None:
        resumed.write()
    if not summary.n_tokens:
        raise InputError(["the corpus holds no tokens but BOS"], _PROBLEM)
    return summary.result("" if bound is None else bound.name)


def _check(
    model: Any, sites: Sequence[LayerSites], options: dict[str, Any], metric: AnyMetric | None
) -> None:
    reasons = _site_reasons(sites) + reasons_not_to_run(model)
    by, n_ctx, context = options["by"], model.cfg.n_ctx, options["context"]
    reasons += option_reasons("by", by, _BY)
    reasons += option_reasons("ends", options["ends"], tuple(_ENDS))
    for name, least in {"k": 1, "batch_size": 1, "before": 0, "after": 0}.items():
        if not is_count(options[name], least):
            got = options[name]
            reasons.append(f"got {name}={got!r}; expected a whole number from {least} on")
    if not is_count(context, 2, n_ctx):
        reasons.append(f"got context={context!r}; expected 2 to {n_ctx}, as the model takes")
    if (metric is None) == (by == "attribution"):
        expected = "a metric" if by == "attribution" else "none"
        reasons.append(f"got by={by!r} and metric={metric!r}; expected {expected}")
    if metric is not None:
        reasons += one_run_reasons(metric) + no_gradient_reasons()
    InputError.raise_if(reasons, _PROBLEM)


def _site_reasons(sites: Sequence[LayerSites]) -> list[str]:
    heads = [name for site in sites if site.kind == "attention" for name in site.names]
    members = [
        name
        for site in sites
        for name, member in zip(site.names, site.member.tolist(), strict=True)
        if member != ALL_MEMBERS
    ]
    more = "one of several heads of a neuron; expected the neuron, without the dot"
    reasons = [f"got {name}, an attention head; expected neurons" for name in heads[:1]]
    return reasons + [f"got {name}, {more}" for name in members[:1]]
