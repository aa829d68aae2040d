"""Render statistics and top examples of up to 3,000 neurons and attention heads as a page.

The page contains packed arrays, from which scripts (`assets/neurons.js`, `attention_heads.js`) draw
one neuron or head at a time. An example of 19 tokens takes 114 bytes. The page stores gates and z
(divided by the neuron's largest |z|) in half precision, and computes the value as z / gate. The
joint histogram of gate and value is stored on a logarithmic scale from 0 to 255. `NeuronStatistics`
contains the exact numbers."""

import base64
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.weights._composition import is_gated, strongest_partners
from attn_only_lens.circuits.weights.vocabulary import DirectEffects, TokenScores
from attn_only_lens.engine.metrics import AnyMetric
from attn_only_lens.engine.sites import (
    Sites,
    SomeSites,
    resolve_sites,
    whole_head_reasons,
    wide_reasons,
)
from attn_only_lens.engine.tokens import token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS
from attn_only_lens.heads.names import count_kinds
from attn_only_lens.neurons import Corpus, corpus_statistics
from attn_only_lens.neurons._top_examples import By
from attn_only_lens.neurons.accumulate import BINS, ENDS, JOINT, QUADRANTS, QUANTITIES
from attn_only_lens.neurons.looks import SIDES
from attn_only_lens.neurons.statistics import CorpusStatistics, HeadStatistics, NeuronStatistics
from attn_only_lens.viz.page import (
    Page,
    asset,
    model_title,
    page_of_tokens,
    refuse,
    short_numbers,
    with_space,
)
from attn_only_lens.work import Work

AnyOneKind: TypeAlias = NeuronStatistics | HeadStatistics
AnyStatistics: TypeAlias = AnyOneKind | CorpusStatistics
MOST_NEURONS = 3_000
"""The maximum number on one page; `attn-only-lens atlas` makes a page for each layer."""

_TOP_TOKENS = 8
_PARTNERS = 6
_RANKED_BY = {
    "z": "z of a neuron",
    "gate": "gate of a neuron",
    "norm": "output of a head",
    "attribution": "attribution",
}


def neuron_page(
    model: Any,
    names: SomeSites | None,
    corpus: Corpus | AnyStatistics,
    *,
    k: int = 20,
    by: By = "z",
    metric: AnyMetric | None = None,
    work: Work = Work(),
) -> Page:
    """Render a page of neurons and attention heads, with their top examples from a corpus.

    Args:
        model: converted, or with exposed neuron-heads.
        names: neurons and attention heads, such as ["L3N7", "L2H5"], "all", or
            `patching.Sites("neurons", layers=[3])`; None for all neurons and features, or all names
            of the statistics. Transcoders' skip nodes and error nodes have no pages.
        corpus: the texts, as `neurons.top_examples` takes them; or statistics from
            `neurons.corpus_statistics`, for which the options below are not used.
        k: number of examples with the largest z, and with the smallest.
        by: the quantity that ranks examples, as in `neurons.top_examples`.
        metric: the metric of attributions.
        work: how the model is run, as in `neurons.top_examples`.

    Returns:
        One page. It shows for each neuron: the texts in which z is largest and smallest, with
        tokens coloured by z; histograms of z, of the gate, and of gate and value together; in a
        gated MLP, how often each pair of signs occurs, with examples; the embedding tokens that
        activate the neuron most and the logits that the neuron changes most, in standard deviations
        over the vocabulary; and links to the heads with the largest `circuits.composition` scores.
        A feature that is never active in the corpus is marked as dead. For each attention head, the
        page shows the attention by offset and by token, and the attention pattern at the tokens
        where the head's output is largest.

    Raises:
        InputError: as in `neurons.top_examples`; or there are more than 3,000 names, or the
            statistics belong to another model.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, load, neurons, viz
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> corpus = neurons.Corpus([[3, 4, 113], [5, 7, 113]])
        >>> page = viz.neuron_page(model, ["L0N7", "L0N11"], corpus, k=2)
        >>> "L0N11" in page
        True
    """
    by_default = Sites.of_kinds(NEURON_KINDS)
    known = _known(corpus)
    if known is not None:
        about = known.about
        of, model_name = (Path(str(x)).name for x in (about.model, model.cfg.model_name))
        if of != model_name:
            refuse(f"got statistics of the model {of!r}; expected those of {model_name!r}")
        by_default = Sites(known.names)
    selected = by_default if names is None else Sites.of(names).without(*WIDE_KINDS)
    sites = resolve_sites(model, selected)
    refuse(*wide_reasons(sites), *whole_head_reasons(selected))
    wanted = [name for site in sites for name in site.names]
    if len(wanted) > MOST_NEURONS:
        refuse(
            f"got {count_names(wanted)}; expected at most {MOST_NEURONS:,} on one page: pass fewer "
            "names, or let `attn-only-lens atlas` make a page per layer"
        )
    if known is None:
        texts = cast(Corpus, corpus)
        known = corpus_statistics(model, wanted, texts, k=k, by=by, metric=metric, work=work)
    return page_of_statistics(model, known.of(wanted))


def _known(corpus: Corpus | AnyStatistics) -> CorpusStatistics | None:
    """Return statistics as `CorpusStatistics`, or None for anything else, such as a corpus."""
    if isinstance(corpus, NeuronStatistics):
        return CorpusStatistics(corpus, None)
    if isinstance(corpus, HeadStatistics):
        return CorpusStatistics(None, corpus)
    return corpus if isinstance(corpus, CorpusStatistics) else None


def count_names(names: Sequence[str]) -> str:
    """Return a string such as "4 heads and 512 neurons"."""
    return count_kinds(HeadName.parse(name).kind for name in names)


def page_of_statistics(
    model: Any, statistics: CorpusStatistics, others: dict[int, str] | None = None
) -> Page:
    """Render these statistics as a page; `others` maps other layers to their pages, for links."""
    neurons, heads = statistics
    names = list(neurons.names) if neurons else []
    lists, partners, notes = _by_weights(model, names) if neurons else ({}, {}, [])
    vocabulary = {**(heads.vocabulary if heads else {}), **(neurons.vocabulary if neurons else {})}
    listed = {token for tops in lists.values() for top in tops for token, _ in top}
    ids = sorted(listed.union(vocabulary))
    texts = [vocabulary.get(token) or token_text(model, token) for token in ids]
    place = {token: i for i, token in enumerate(ids)}
    data: dict[str, Any] = {
        "names": names,
        "count": count_names(statistics.names),
        "vocabulary": list(map(with_space, texts)),
        "bins": [BINS, JOINT],
        "tokens": {
            title: [[[place[token], round(score, 1)] for token, score in top] for top in tops]
            for title, tops in lists.items()
        },
        "partners": [partners.get(name, []) for name in names],
        "notes": notes,
        "others": others or {},
    }
    data |= _data_of_neurons(neurons, ids) if neurons else {}
    data["heads"] = _data_of_heads(heads, ids, place) if heads else None
    few = len(statistics.names) <= 3
    many = ", ".join(statistics.names) if few else count_names(statistics.names)
    model = model_title(statistics.about.model)
    title = many + f" of {model}" * bool(model)
    main = asset("assets/neurons.html")
    scripts = [asset("assets/attention_heads.js")]
    return page_of_tokens(title, _about(statistics), main, data, "neurons", scripts)


def _data_of_neurons(statistics: NeuronStatistics, ids: list[int]) -> dict[str, Any]:
    counts, limits = statistics.counts, _limits(statistics, "z")
    windows = {"z": limits, "gate": None}
    return {
        "by": statistics.by,
        "ends": _examples(statistics, ids, windows, ENDS),
        "quadrants": _examples(statistics, ids, windows, QUADRANTS),
        "signs": (counts["signs"] / statistics.n_tokens).double().numpy().round(5).tolist(),
        "limits": short_numbers(limits.tolist(), 4),
        "histograms": {
            name: {
                "counts": _packed(counts[f"{name}.counts"], "<u4"),
                "exponent": counts[f"{name}.exponent"].tolist(),
            }
            for name in QUANTITIES
        },
        "zeros": counts["zeros"].tolist(),
        "joint": _packed(_log_shares(counts["joint"]), "u1"),
    }


def _data_of_heads(
    statistics: HeadStatistics, ids: list[int], place: dict[int, int]
) -> dict[str, Any]:
    counts, n_heads = statistics.counts, len(statistics.names)

    def tokens(side: str, head: int) -> list[list[float]]:
        """Return a head's top tokens, each as a list of token, share and mean attention."""
        rows = (counts[f"{side}{end}"][head].tolist() for end in (".tokens", "", ".mean"))
        return [
            [place[token], *short_numbers(numbers, 3)]
            for token, *numbers in zip(*rows, strict=True)
            if token >= 0
        ]

    return {
        "names": list(statistics.names),
        "by": statistics.by,
        "ends": _examples(statistics, ids, {"pattern": None}, ENDS),
        "bos": short_numbers(counts["bos"].tolist(), 4),
        "offsets": _packed(counts["offsets"], "<f4"),
        "tokens": {side: [tokens(side, head) for head in range(n_heads)] for side in SIDES},
    }


def _about(statistics: CorpusStatistics) -> str:
    about = statistics.about
    metric = f" ({about.metric})" if about.metric else ""
    counts = f"{about.n_texts:,} texts, {about.n_tokens:,} tokens"
    by = " and ".join(dict.fromkeys(_RANKED_BY[part.by] for part in statistics if part))
    return f"{counts} · examples: the tokens with the largest {by}{metric}"


def _by_weights(
    model: Any, names: list[str]
) -> tuple[dict[str, list[TokenScores]], dict[str, Any], list[str]]:
    """Return each neuron's top tokens and strongest heads, from the weights, and error notes."""
    tokens: dict[str, list[TokenScores]] = {}
    partners: dict[str, Any] = {}
    notes: list[str] = []

    @contextmanager
    def note_error(what: str) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            notes.append(f"{what} are left out: {'; '.join(error.reasons)}")

    with note_error("Tokens read and written"):
        effects = DirectEffects(model)
        with note_error("Tokens read"):
            gated = [name for name in names if is_gated(model, HeadName.parse(name).layer)]
            plain = [name for name in names if name not in set(gated)]
            lists: list[tuple[str, list[str], Literal["q", "v"]]] = [
                ("It reads", plain, "q"),
                ("The gate reads", gated, "q"),
                ("The value reads", gated, "v"),
            ]
            for title, some, kind in lists:
                if some:
                    tops = effects.read_tokens(some, _TOP_TOKENS, kind)
                    of_name = dict(zip(some, tops, strict=True))
                    tokens[title] = [of_name.get(name, []) for name in names]
        tokens["It writes"] = effects.written_tokens(names, _TOP_TOKENS)
    with note_error("Connections"):
        for name, rows in strongest_partners(model, names, _PARTNERS).items():
            both = ([r for r in rows if r.side == side] for side in ("writes", "reads"))
            partners[name] = [
                [[r.name, r.kind, round(r.score, 3)] for r in side[:_PARTNERS]] for side in both
            ]
    return tokens, partners, notes


def _limits(statistics: AnyOneKind, window: str) -> Float[Tensor, "neuron"]:
    """Return, for each neuron, a quantity's largest |value| in the text of its examples."""
    windows = [x for key, x in statistics.examples.items() if key.endswith(f".{window}")]
    return torch.stack([x.abs().flatten(1).amax(1) for x in windows]).amax(0)


def _examples(
    statistics: AnyOneKind,
    ids: list[int],
    windows: dict[str, Tensor | None],
    ends: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Pack the examples of each end, as arrays [neuron, k] and [neuron, k, window].

    `windows` maps each quantity to one divisor per neuron, or to None (not divided).
    """
    tokens = torch.tensor(ids, device="cpu")
    kind = "<u2" if len(ids) < 2**16 else "<u4"
    packed_ends = {}
    for end in ends:
        if f"{end}.found" not in statistics.examples:
            continue
        of_end = {
            key.removeprefix(f"{end}."): x
            for key, x in statistics.examples.items()
            if key.startswith(f"{end}.")
        }
        # An index one past the last token stands for "no token".
        places = torch.searchsorted(tokens, of_end["tokens"].contiguous())
        places[of_end["tokens"] < 0] = len(ids)
        packed = {"score": "<f4", "text": "<i4", "position": "<i2", "bos": "<f4"}
        packed_ends[end] = {
            "k": of_end["tokens"].shape[1],
            "width": of_end["tokens"].shape[2],
            "found": of_end["found"].sum(1).tolist(),
            "wide": kind == "<u4",
            "tokens": _packed(places, kind),
            **{name: _packed(of_end[name], of) for name, of in packed.items() if name in of_end},
        }
        for name, limits in windows.items():
            scale = 1.0 if limits is None else torch.where(limits == 0, 1.0, limits)[:, None, None]
            packed_ends[end][name] = _packed(of_end[name] / scale, "<f2")
    return packed_ends


def _log_shares(counts: Tensor) -> Tensor:
    """Convert counts to a logarithmic scale on which the largest count of each neuron is 255."""
    logs = counts.double().log1p()
    most = logs.flatten(1).amax(1).clamp(min=1e-9).view(-1, 1, 1)
    return (logs / most * 255).ceil()


def _packed(x: Tensor, kind: str) -> str:
    array = np.ascontiguousarray(x.numpy().astype(np.dtype(kind)))
    return base64.b64encode(array.tobytes()).decode()


def index_of_layers(statistics: CorpusStatistics, pages: dict[int, str]) -> Page:
    """Return the index page, which links to the page of each layer."""
    names = defaultdict(list)
    for name in statistics.names:
        names[HeadName.parse(name).layer].append(name)
    model = model_title(statistics.about.model)
    title = count_names(statistics.names) + f" of {model}" * bool(model)
    rows = [
        f'<tr><td><a href="{escape(page)}">Layer {layer}</a></td>'
        f'<td class="number">{count_names(names[layer])}</td></tr>'
        for layer, page in sorted(pages.items())
    ]
    go = '<label>Go to <input id="go" type="search" placeholder="L3N7 or L3H2"></label>'
    main = f'<main id="layers">{go}<table>{"".join(rows)}</table></main>'
    return page_of_tokens(title, _about(statistics), main, pages, "layers")
