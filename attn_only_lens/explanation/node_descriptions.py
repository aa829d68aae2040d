"""Describe what the nodes of a graph read and write, and label them."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import SELF, Logits
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.own_run import graph_runs
from attn_only_lens.circuits.weights.vocabulary import DirectEffects, TokenScores
from attn_only_lens.engine.metrics import AnyMetric, BoundMetric, bind
from attn_only_lens.engine.multipliers import run_both
from attn_only_lens.engine.positions import PositionSet
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.tokens import token_text
from attn_only_lens.explanation.model_answers import model_answers
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import WIDE_KINDS

_LONGEST = 12  # the maximum length of a token in a label, in characters
_DIRECT = 0.1  # name tokens if the direct path carries at least this part of a site's share
_APART = 0.1  # the smallest difference between two runs to describe (relative for outputs)
_WIDE = {
    "skip": "what W_skip reads",
    "error": "what the transcoder misses of the MLP's output",
}


@torch.no_grad()
def describe_nodes(
    model: Any,
    pair: PromptPair,
    metric: AnyMetric,
    graph: CircuitGraph,
    places: Sequence[PositionSet],
) -> tuple[pd.DataFrame, dict[str, str], dict[str, str], int]:
    """Return the model's answers, each node's description and label, and the shown pair.

    Nodes are described as they are in the two runs of the graph, such as a circuit's own run.
    `places` are the positions or roles of nodes. If a role has no token in the shown pair, its
    nodes are described in the first pair in which it has one.
    """
    ids, host = list(graph.heads["id"]), host_of(model)
    heads = [HeadName.parse(name) for name in graph.heads["name"]]
    tokens_at = {str(place.label): place.chosen.nonzero().cpu() for place in places}
    into_metric = graph.edges[graph.edges["target"] == "metric"].set_index("source")["weight"]
    direct = into_metric.reindex(graph.heads["id"], fill_value=0.0).abs().to_numpy()
    is_direct = direct >= _DIRECT * graph.heads["attribution"].abs().to_numpy()
    hooks = {
        point: [host.hook_name(head.layer, head.kind, point) for head in heads]
        for point in ("z", "pattern")
    }
    runs = graph_runs(graph, model, pair, sorted({*hooks["z"], *hooks["pattern"]}))
    whole = run_both(model, pair).logits.chunk(2)
    answers = model_answers(model, pair, metric, *whole)
    clean, corrupted = (run.hooked for run in runs)
    shown = _pair_to_show(pair, bind(metric, model, pair, whole[0]), whole)
    changes = {hook: clean[hook] - corrupted[hook] for hook in hooks["z"]}
    tokens = [tokens_at[node.partition("@")[2]] for node in ids]
    first = [next((x for x in some.tolist() if x[0] == shown), some[0].tolist()) for some in tokens]
    nodes = [(str(head), *token) for head, token in zip(heads, first, strict=True)]
    written = DirectEffects(model).promoted_tokens(changes, nodes, 2)

    def means(hook: str, *index: Any) -> list[Tensor]:
        """Return the [clean, corrupted] means over prompts of an activation at `index`."""
        return [run[hook][index].float().mean(0) for run in (clean, corrupted)]

    does, labels = dict[str, str](), dict[str, str]()
    rows = zip(heads, nodes, tokens, written, is_direct, hooks["z"], hooks["pattern"], strict=True)
    for key, (head, node, at, top, has_tokens, of_z, of_pattern) in zip(ids, rows, strict=True):
        name, prompt, position = node
        writes, label = _writes(model, top if has_tokens else [])
        if head.kind in WIDE_KINDS:
            lengths = [float(z.norm()) for z in means(of_z, *at.T)]
            reads = f"{_WIDE[head.kind]}, {_in_both_runs('length', lengths)}"
        elif head.kind == "attention":  # by role, keys have other positions in other prompts
            some = torch.tensor([[prompt, position]]) if graph.roles else at
            patterns = means(of_pattern, some[:, 0], head.index, some[:, 1])
            reads, label = _looks(model, pair, prompt, patterns, bool(graph.roles))
        else:
            outputs = [float(z[head.index, 0]) for z in means(of_z, *at.T)]
            is_off = head.kind == "feature" and not any(outputs)
            reads = "inactive" if is_off else _in_both_runs("z", outputs)
            if head.kind == "neuron":
                gates = [float(x[SELF]) for x in means(of_pattern, at[:, 0], head.index, at[:, 1])]
                reads = f"{_in_both_runs('gate', gates, _APART)}; {reads}"
        does[key], labels[key] = "; ".join(filter(None, (reads, writes))), f"{name} {label}".strip()
    return answers, does, labels, shown


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


def _writes(model: Any, top: TokenScores) -> tuple[str, str]:
    """Describe and label a node by the tokens whose logits its output raises or lowers."""
    ends = [("raises", "↑", [token for token, amount in top if amount > 0])]
    ends += [("lowers", "↓", [token for token, amount in reversed(top) if amount < 0])]
    if top and abs(top[-1][1]) > abs(top[0][1]):
        ends.reverse()
    texts = [
        (verb, arrow, [token_text(model, token) for token in tokens[:2]])
        for verb, arrow, tokens in ends
        if tokens
    ]
    if not texts:
        return "", ""
    writes = "; ".join(f"{verb} {', '.join(map(repr, tokens))}" for verb, _, tokens in texts)
    return writes, f"{texts[0][1]} {short_token(texts[0][2][0])}"


def short_token(token: str) -> str:
    """Return a token without spaces around it, cut to the length of a label."""
    text = token.strip()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
