"""One page for up to a few thousand neurons.

The page contains packed arrays, and its script (`assets/neurons.js`) draws one neuron at a time. An
example with 19 tokens takes 114 bytes: z (relative to the neuron's largest |z|) and the gate are in
half precision, and the page divides z by the gate for the value. Joint counts of gate and value are
on a logarithmic scale from 0 to 255. `NeuronStatistics` has the exact values.
"""

import base64
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.weights._composition import is_gated, strongest_partners
from attn_only_lens.circuits.weights.vocabulary import DirectEffects, TokenScores
from attn_only_lens.engine.metrics import AnyMetric
from attn_only_lens.engine.sites import Sites, neuron_heads, resolve_sites
from attn_only_lens.engine.tokens import token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName
from attn_only_lens.neurons import NeuronStatistics, neuron_statistics
from attn_only_lens.neurons._top_examples import By
from attn_only_lens.neurons.accumulate import BINS, ENDS, JOINT, QUANTITIES
from attn_only_lens.neurons.corpus import Texts
from attn_only_lens.viz.page import (
    Page,
    asset,
    model_title,
    page_of_tokens,
    refuse,
    short_numbers,
    with_space,
)

MOST_NEURONS = 3_000
"""The most neurons on one page; for more, `attn-only-lens atlas` makes one page per layer."""

_TOP_TOKENS = 8
_PARTNERS = 6


def neuron_page(
    model: Any,
    names: Sites | None,
    texts: Texts | NeuronStatistics,
    k: int = 20,
    *,
    by: By = "z",
    metric: AnyMetric | None = None,
    context: int | None = None,
    batch_size: int = 32,
    resume: str | Path | None = None,
    progress: bool | str = True,
) -> Page:
    """Draw neurons: their top examples, densities, tokens, and strongest connections.

    Args:
        model: converted, or with exposed neuron-heads.
        names: neurons, such as ["L3N7", "L2N5"], or `patching.neuron_heads(layers)`; None for all,
            or all of the statistics.
        texts: a corpus, as in `neurons.top_examples`; or statistics from
            `neurons.neuron_statistics`, for which the options below are not used.
        k: number of examples with the largest z, and with the smallest z.
        by: the quantity of the ranking, as in `neurons.top_examples`.
        metric: the metric for attributions.
        context: as in `neurons.top_examples`.
        batch_size: as in `neurons.top_examples`.
        resume: as in `neurons.top_examples`.
        progress: as in `neurons.top_examples`.

    Returns:
        One page. For each neuron, it shows the texts in which z is largest and smallest, with
        tokens coloured by z; histograms of z, of the gate, and of gate and value together; the
        tokens that its weights read from the embedding and write to the logits, in standard
        deviations over the vocabulary; and links to the heads with the largest
        `circuits.composition` scores.

    Raises:
        InputError: as in `neurons.top_examples`; or there are more than 3,000 neurons, or the
            statistics are from another model.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, pretrained, viz
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> texts = [[3, 4, 113], [5, 7, 113]]
        >>> page = viz.neuron_page(model, ["L0N7", "L0N11"], texts, k=2, progress=False)
        >>> "L0N11" in page
        True
    """
    by_default: Sites = neuron_heads()
    if isinstance(texts, NeuronStatistics):
        of, model_name = (Path(str(name)).name for name in (texts.model, model.cfg.model_name))
        if of != model_name:
            refuse(f"got statistics of the model {of!r}; expected those of {model_name!r}")
        by_default = list(texts.names)
    sites = resolve_sites(model, by_default if names is None else names)
    wanted = [name for site in sites for name in site.names]
    if len(wanted) > MOST_NEURONS:
        refuse(
            f"got {len(wanted):,} neurons; expected at most {MOST_NEURONS:,} on one page: pass "
            "fewer names, or let `attn-only-lens atlas` make one page per layer"
        )
    if isinstance(texts, NeuronStatistics):
        statistics = texts.of(wanted)
    else:
        statistics = neuron_statistics(
            *(model, wanted, texts, k, by, metric),
            context=context,
            batch_size=batch_size,
            resume=resume,
            progress=progress,
        )
    return page_of_statistics(model, statistics)


def page_of_statistics(
    model: Any, statistics: NeuronStatistics, others: dict[int, str] | None = None
) -> Page:
    """Draw statistics."""
    names = list(statistics.names)
    lists, partners, notes = _by_weights(model, names)
    listed = {token for tops in lists.values() for top in tops for token, _ in top}
    ids = sorted(listed.union(statistics.vocabulary))
    texts = [statistics.vocabulary.get(token) or token_text(model, token) for token in ids]
    place = {token: i for i, token in enumerate(ids)}
    data = {
        "names": names,
        "by": statistics.by,
        "vocabulary": list(map(with_space, texts)),
        "ends": {
            end: _examples(statistics, end, ids)
            for end in ENDS
            if f"{end}.z" in statistics.examples
        },
        "limits": short_numbers(_limits(statistics).tolist(), 4),
        "histograms": {
            name: {
                "counts": _packed(statistics.counts[f"{name}.counts"], "<u4"),
                "exponent": statistics.counts[f"{name}.exponent"].tolist(),
            }
            for name in QUANTITIES
        },
        "zeros": statistics.counts["zeros"].tolist(),
        "joint": _packed(_log_shares(statistics.counts["joint"]), "u1"),
        "bins": [BINS, JOINT],
        "tokens": {
            title: [[[place[token], round(score, 1)] for token, score in top] for top in tops]
            for title, tops in lists.items()
        },
        "partners": [partners.get(name, []) for name in names],
        "notes": notes,
        "others": others or {},
    }
    many = f"{len(names):,} neurons" if len(names) > 3 else ", ".join(names)
    title = f"{many} of {model_title(statistics.model)}" if statistics.model else many
    main = asset("assets/neurons.html")
    return page_of_tokens(title, _about(statistics), main, data, "neurons")


def _about(statistics: NeuronStatistics) -> str:
    metric = f" ({statistics.metric})" if statistics.metric else ""
    counts = f"{statistics.n_texts:,} texts, {statistics.n_tokens:,} tokens"
    return f"{counts} · examples by {statistics.by}{metric}"


def _by_weights(
    model: Any, names: list[str]
) -> tuple[dict[str, list[TokenScores]], dict[str, Any], list[str]]:
    """Return the tokens that neurons read and write, their partners, and notes on omissions."""
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
            gated = is_gated(model, HeadName.parse(names[0]).layer)
            title = "The gate reads" if gated else "It reads"
            tokens[title] = effects.read_tokens(names, _TOP_TOKENS)
            if gated:
                tokens["The value reads"] = effects.read_tokens(names, _TOP_TOKENS, "v")
        tokens["It writes"] = effects.written_tokens(names, _TOP_TOKENS)
    with note_error("Connections"):
        for name, rows in strongest_partners(model, names, _PARTNERS).items():
            both = ([r for r in rows if r.side == side] for side in ("writes", "reads"))
            partners[name] = [
                [[r.name, r.kind, round(r.score, 3)] for r in side[:_PARTNERS]] for side in both
            ]
    return tokens, partners, notes


def _limits(statistics: NeuronStatistics) -> Float[Tensor, "neuron"]:
    """Return the largest |z| in each neuron's windows, which gets the strongest colour."""
    windows = [x for key, x in statistics.examples.items() if key.endswith(".z")]
    return torch.stack([x.abs().flatten(1).amax(1) for x in windows]).amax(0)


def _examples(statistics: NeuronStatistics, end: str, ids: list[int]) -> dict[str, Any]:
    """Pack the examples of one end into arrays [neuron, k] and [neuron, k, window]."""
    parts = ("found", "score", "text", "position", "tokens", "z", "gate")
    of_end = {name: statistics.examples[f"{end}.{name}"] for name in parts}
    limits = _limits(statistics).view(-1, 1, 1)
    tokens = torch.tensor(ids, device="cpu")
    # The index after the last token's index means that there is no token.
    places = torch.searchsorted(tokens, of_end["tokens"].contiguous())
    places[of_end["tokens"] < 0] = len(ids)
    kind = "<u2" if len(ids) < 2**16 else "<u4"
    shares = of_end["z"] / torch.where(limits == 0, 1.0, limits)
    return {
        "k": of_end["z"].shape[1],
        "width": of_end["z"].shape[2],
        "found": of_end["found"].sum(1).tolist(),
        "score": _packed(of_end["score"], "<f4"),
        "text": _packed(of_end["text"], "<i4"),
        "position": _packed(of_end["position"], "<i2"),
        "wide": kind == "<u4",
        "tokens": _packed(places, kind),
        "z": _packed(shares, "<f2"),
        "gate": _packed(of_end["gate"], "<f2"),
    }


def _log_shares(counts: Tensor) -> Tensor:
    """Return each neuron's counts on a logarithmic scale from 0 to 255."""
    logs = counts.double().log1p()
    most = logs.flatten(1).amax(1).clamp(min=1e-9).view(-1, 1, 1)
    return (logs / most * 255).ceil()


def _packed(x: Tensor, kind: str) -> str:
    array = np.ascontiguousarray(x.numpy().astype(np.dtype(kind)))
    return base64.b64encode(array.tobytes()).decode()


def index_of_layers(statistics: NeuronStatistics, pages: dict[int, str]) -> Page:
    """Return the index page, with links to the layers' pages."""
    counts = Counter(HeadName.parse(name).layer for name in statistics.names)
    title = f"{len(statistics.names):,} neurons of {model_title(statistics.model)}"
    rows = [
        f'<tr><td><a href="{escape(page)}">Layer {layer}</a></td>'
        f'<td class="number">{counts[layer]:,} neurons</td></tr>'
        for layer, page in sorted(pages.items())
    ]
    go = '<label>Go to a neuron <input id="go" type="search" placeholder="L3N7"></label>'
    main = f'<main id="layers">{go}<table>{"".join(rows)}</table></main>'
    return page_of_tokens(title, _about(statistics), main, pages, "layers")
