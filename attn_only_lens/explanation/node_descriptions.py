"""Describe what the nodes of a graph read and write, and label them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import SELF, Logits
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.own_run import graph_runs, own_run
from attn_only_lens.engine.linear_map import direct_logits
from attn_only_lens.engine.metrics import AnyMetric, BoundMetric, bind
from attn_only_lens.engine.multipliers import BothRuns, metric_multiplier, run_both
from attn_only_lens.engine.positions import PositionSet
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.tokens import is_readable, token_text
from attn_only_lens.explanation.model_answers import model_answers, tokens_of_answers
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import WIDE_KINDS
from attn_only_lens.heads.names import place_of

_RUNS = "clean", "corrupted"
_LONGEST = 12  # the maximum length of a token in a label, in characters
_DIRECT = 0.1  # name tokens if the direct path carries at least this part of a site's effect
_APART = 0.1  # the smallest difference between two runs to describe (relative for outputs)
_ANSWERS, _OTHERS = 4, 2  # how many answers and other tokens are named
_PROBABLE = 50  # other tokens are named only if they are so probable in one of the runs: by rank,
STRONGER = 2.0  # and if the direct effect on them is so many times the effect on any answer
_LEAST = 0.005  # a smaller effect on a logit would be written as 0.00
_WIDE = {
    "skip": "what W_skip reads",
    "error": "what the transcoder misses of the MLP's output",
    "router": "the routing weights",
}


@torch.no_grad()
def describe_nodes(
    model: Any,
    pair: PromptPair,
    metric: AnyMetric,
    graph: CircuitGraph,
    others: "pd.Series[float]",
    places: Sequence[PositionSet],
) -> tuple[pd.DataFrame, dict[str, str], dict[str, str], int]:
    """Return the model's answers, each node's description and label, and the shown pair.

    Nodes are described as they are in the two runs of the graph, such as a circuit's own run.

    Args:
        model: the model.
        pair: the prompts.
        metric: the metric.
        graph: the graph.
        others: the effects of further sites on the metric, by id. These sites are described as they
            are in the clean and the corrupted run.
        places: the positions or roles of nodes. If a role has no token in the shown pair, its nodes
            are described in the first pair in which it has one.
    """
    whole = run_both(model, pair, decomposed=True)
    own = whole if graph.circuit is None else own_run(model, pair, graph.circuit)
    logits = whole.logits.chunk(2)
    bound = bind(metric, model, pair, logits[0])
    table = model_answers(model, pair, metric, *logits)
    shown = _pair_to_show(pair, bound, logits)
    answers = [*chain(*(rows[shown] for rows in tokens_of_answers(model, pair, metric).values()))]
    tokens_at = {str(place.label): place.chosen.nonzero().tolist() for place in places}
    describe = partial(_describe, model, pair, shown, answers, tokens_at)

    # Nodes of the graph
    heads, edges = graph.heads, graph.edges
    into_metric = edges[edges["target"] == "metric"].groupby("source")["weight"].sum()
    direct = into_metric.reindex(heads["id"], fill_value=0.0).to_numpy()
    effects = np.asarray(heads["attribution"], dtype=np.float64)
    does, labels = describe(graph, own, list(heads["id"]), effects, lambda _: direct)
    if not len(others):
        return table, does, labels, shown

    # Other sites
    multiplier, shares = metric_multiplier(bound, *logits), bound.shares(len(pair.clean))
    prompts, positions = zip(*_shown_tokens(others.index, tokens_at, shown), strict=True)
    slopes = multiplier[list(prompts), list(positions)]
    slopes = slopes / slopes.new_tensor([shares[i] for i in prompts])[:, None]

    def by_logits(change: Float[Tensor, "node d_vocab"]) -> npt.NDArray[np.float64]:
        direct = (slopes * change).sum(-1)
        return cast(npt.NDArray[np.float64], direct.cpu().double().numpy())

    of_whole = replace(graph, circuit=None)
    more = describe(
        of_whole, whole, list(others.index), np.asarray(others, dtype=np.float64), by_logits
    )
    return table, does | more[0], labels | more[1], shown


def _describe(
    model: Any,
    pair: PromptPair,
    shown: int,
    answers: Sequence[int],
    tokens_at: Mapping[str, Sequence[Sequence[int]]],
    graph: CircuitGraph,
    both: BothRuns,
    sites: Sequence[str],
    effects: npt.NDArray[np.float64],
    direct: Callable[[Float[Tensor, "node d_vocab"]], npt.NDArray[np.float64]],
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the description and the label of each site in the two runs of a graph.

    `effects` are the sites' effects on the metric. `direct` returns the part of them that takes the
    direct path, given the direct effects of the changes of the sites' outputs on all logits.
    """
    host, parts = host_of(model), [site.partition("@") for site in sites]
    heads, by_role = [HeadName.parse(name) for name, *_ in parts], bool(graph.roles)
    nodes = _shown_tokens(sites, tokens_at, shown)
    hooks = {
        point: [host.hook_name(head.layer, head.kind, point) for head in heads]
        for point in ("z", "pattern")
    }
    runs = graph_runs(graph, model, pair, sorted({*hooks["z"], *hooks["pattern"]}))
    clean, corrupted = (run.hooked for run in runs)
    prompts, positions = zip(*nodes, strict=True) if nodes else ((), ())
    written = direct_logits(model, both, list(zip(heads, positions, strict=True)), prompts)
    by_direct_path = np.abs(direct(written))
    is_direct = (by_direct_path > 0) & (by_direct_path >= _DIRECT * np.abs(effects))
    written = written - written.mean(-1, keepdim=True)  # softmax does not depend on the mean

    def means(hook: str, *index: Any) -> list[Tensor]:
        """Return the [clean, corrupted] means over prompts of an activation at `index`."""
        return [run[hook][index].float().mean(0) for run in (clean, corrupted)]

    does, labels = dict[str, str](), dict[str, str]()
    rows = zip(heads, nodes, written, is_direct, hooks["z"], hooks["pattern"], strict=True)
    for key, (head, node, change, has_tokens, of_z, of_pattern) in zip(sites, rows, strict=True):
        (prompt, position), index = node, place_of(head, model)
        tokens = list[int]()
        for run in both.logits.chunk(2):
            tokens += run[prompt, position].topk(min(_PROBABLE, run.shape[-1])).indices.tolist()
        writes, label = _writes(model, change, answers, tokens) if has_tokens else ("", "")
        some, columns = map(list, zip(*tokens_at[key.partition("@")[2]], strict=True))
        if head.kind in WIDE_KINDS:
            lengths = [float(z.norm()) for z in means(of_z, some, columns)]
            reads = f"{_WIDE[head.kind]}, {_in_both_runs('length', lengths)}"
        elif head.kind == "attention":
            if by_role:  # keys have other positions in other prompts
                some, columns = [prompt], [position]
            patterns = means(of_pattern, some, index, columns)
            reads, label = _looks(model, pair, prompt, patterns, by_role)
        else:
            outputs = [float(z[index, 0]) for z in means(of_z, some, columns)]
            is_off = head.kind == "feature" and not any(outputs)
            reads = "inactive" if is_off else _in_both_runs("z", outputs)
            if head.kind == "neuron":
                patterns = means(of_pattern, some, index, columns)
                gates = [float(x[SELF]) for x in patterns]
                reads = f"{_in_both_runs('gate', gates, _APART)}; {reads}"
                runs_without = [
                    name for name, x in zip(_RUNS, patterns, strict=True) if not x.any()
                ]
                if runs_without:  # in a mixture of experts
                    reads += f"; expert not visited in the {' or the '.join(runs_without)} run"
        does[key], labels[key] = "; ".join(filter(None, (reads, writes))), f"{head} {label}".strip()
    return does, labels


def _shown_tokens(
    sites: Iterable[str], tokens_at: Mapping[str, Sequence[Sequence[int]]], shown: int
) -> list[tuple[int, int]]:
    """Return each site's token (prompt, position) in the shown prompt, or in the first with one."""
    places = [tokens_at[site.partition("@")[2]] for site in sites]
    tokens = [next((x for x in place if x[0] == shown), place[0]) for place in places]
    return [(prompt, position) for prompt, position in tokens]


def _pair_to_show(pair: PromptPair, metric: BoundMetric, logits: Sequence[Logits]) -> int:
    """Return the index of the pair that adds most to the change of the metric.

    If the metric has one value for all prompts, it is the first pair of different prompts in the
    order of their tokens. The order in which pairs are given has no influence.
    """
    clean, corrupted = map(metric.of_run, logits)
    if len(clean) == len(pair.clean):
        changes = clean - corrupted
        return int((changes * changes.sum().sign()).argmax())
    differ = ((pair.clean != pair.corrupted) & pair.real).any(dim=1).nonzero()[:, 0].tolist()
    return int(min(differ, key=lambda i: (pair.clean[i].tolist(), pair.corrupted[i].tolist())))


def _in_both_runs(what: str, values: Sequence[float], apart: float | None = None) -> str:
    """Format a clean value and, if the corrupted value differs enough, also the corrupted value."""
    clean, corrupted = values
    apart = _APART * max(abs(clean), abs(corrupted)) if apart is None else apart
    differs = abs(clean - corrupted) > apart
    return f"{what} {clean:.2f}" + f", corrupted {corrupted:.2f}" * differs


def _looks(
    model: Any,
    pair: PromptPair,
    shown: int,
    patterns: Sequence[Float[Tensor, "key_pos"]],
    only_shown: bool,
) -> tuple[str, str]:
    """Describe and label a head by the token that it attends to most in each run.

    With `only_shown`, these are the patterns of the prompt `shown`, instead of means over prompts.
    """
    keys = [int(weights.argmax()) for weights in patterns]
    shares = [float(weights[key]) for weights, key in zip(patterns, keys, strict=True)]
    sides = (pair.clean[shown], pair.corrupted[shown])
    texts = [token_text(model, int(side[key])) for side, key in zip(sides, keys, strict=True)]
    short = list(map(short_token, texts))
    names = [
        repr(text) + f"@{key}" * (keys[0] != keys[1] and texts[0] == texts[1])
        for text, key in zip(texts, keys, strict=True)
    ]
    differ = keys[0] != keys[1] or texts[0] != texts[1]
    tokens = pair.clean[:, keys[0]]
    of_one = f" in prompt {shown}" * (only_shown or bool((tokens != tokens[shown]).any()))
    reads = f"looks at {names[0]}{of_one} ({shares[0]:.0%})"
    if differ or abs(shares[0] - shares[1]) > _APART:
        reads += f", corrupted {names[1]} ({shares[1]:.0%})"
    return reads, f"← {' / '.join(short if differ else short[:1])}"


def _writes(
    model: Any, change: Float[Tensor, "d_vocab"], answers: Sequence[int], probable: Sequence[int]
) -> tuple[str, str]:
    """Describe and label a node by the logits that the change of its output changes directly.

    The answers come first. If there are none, or if other probable tokens change far more than the
    answers, these follow.
    """
    tokens = list(dict.fromkeys((*answers, *probable)))
    amounts = dict(zip(tokens, change[tokens].tolist(), strict=True))
    ranked = sorted(tokens, key=lambda token: -abs(amounts[token]))
    most = max((abs(amounts[token]) for token in answers), default=0.0)
    others = [
        token
        for token in ranked
        if token not in answers
        and abs(amounts[token]) >= STRONGER * most
        and is_readable(token_text(model, token))
    ]
    chosen = [token for token in ranked if token in answers][:_ANSWERS] + others[:_OTHERS]
    chosen = [token for token in chosen if abs(amounts[token]) >= _LEAST]
    if not chosen:
        return "", ""
    texts = [token_text(model, token) for token in chosen]
    words = [f"{amounts[t]:+.2f} {text!r}" for t, text in zip(chosen, texts, strict=True)]
    arrow = "↑" if amounts[chosen[0]] > 0 else "↓"
    return f"writes {', '.join(words)}", f"{arrow} {short_token(texts[0])}"


def short_token(token: str) -> str:
    """Return a token without spaces around it, cut to the length of a label."""
    text = token.strip()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
