"""Explain in one call why a metric differs between two prompts.

Secant attribution ranks all sites. A search finds a small circuit that keeps most of the
difference. An attribution graph of the difference shows how the circuit's sites affect each other.
The strongest sites are also patched one by one, which gives their exact effects.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.arguments import positive_reasons, resamples_reasons
from attn_only_lens.axes import SELF
from attn_only_lens.circuits._attribution_graph import attribution_graph
from attn_only_lens.circuits._group_nodes import peak_tokens
from attn_only_lens.circuits._search import discover
from attn_only_lens.circuits.circuit import MISSING, Circuit
from attn_only_lens.circuits.export import to_json
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.model_answers import answer_cells, answer_warnings, model_answers
from attn_only_lens.circuits.weights.vocabulary import DirectEffects, TokenScores
from attn_only_lens.engine.answers import WRONG
from attn_only_lens.engine.contrast import float32_slopes
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import AnyMetric, BoundMetric, bind
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import unlike_tokens
from attn_only_lens.engine.prompts import PromptPair, Prompts, prompt_pair
from attn_only_lens.engine.recording import Recording, record
from attn_only_lens.engine.tokens import joined, token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._attribution import attribution
from attn_only_lens.patching.results import Sweep
from attn_only_lens.precision import full_precision
from attn_only_lens.storage.atomic import atomic_folder, write_text

_LONGEST = 12  # the maximum length of a token in a label, in characters
_STRONG, _MOST = 0.1, 3  # which sites outside the circuit are named: their |share| and number
_DIRECT = 0.1  # name tokens if the direct path carries at least this part of a site's share
_APART = 0.1  # the smallest difference between two runs to describe (relative for outputs)
_BOTH = 1 / 3  # a label is "both" if the smaller part exceeds this share of |pattern| + |value|
_HELD_OUT = 0.7  # warn if held-out faithfulness is below this share of the circuit's faithfulness
_CHANGE = (
    "Descriptions are of the clean run; 'corrupted' follows if the corrupted run differs. 'raises' "
    "and 'lowers' list the tokens whose logits the change of the site's output, clean minus "
    "corrupted, raises and lowers most by the direct path, if at least a tenth of the site's share "
    "takes this path."
)
_MEANINGS = (
    "share: the part of the difference that passes through the site, by its pattern (by_pattern) "
    "and by its value (by_value). A path through several sites counts at each of them, so shares "
    "can add up to more than 1. denoise, noise: the part that a patch of this site alone brings "
    "back to the corrupted run, or removes from the clean run; report these two, which are exact. "
    f"If the circuit missed nothing, everything else keeps about 0%. {_CHANGE}"
)
_OF_SEVERAL = (
    " Ranks are medians, and probabilities, attention, gates and outputs are means, over {} "
    "prompts; tokens are of prompt {}, counted from 0, which adds most to the difference."
)
_FILES = ("explanation.csv", "circuit.json", "graph.json", "attribution.parquet", "page.html")
_WIDE = {
    "skip": "what W_skip reads",
    "error": "what the transcoder misses of the MLP's output",
}
_COLUMNS = (
    *("id", "token", "does", "share", "by_pattern", "by_value", "denoise", "noise", "disputed"),
)
_LEAST = 0.001  # below this, the sign of a share or of an effect may be rounding
_DISPUTED = (
    "both exact patches have the opposite sign to this share, so do not trust the share's sign"
)


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """An explanation of why a metric differs between two prompts. Made by `explain`.

    Attributes:
        attribution: every site's part of the difference, split into pattern and value.
        circuit: a small circuit that keeps most of the difference.
        graph: the attribution graph of the difference, with the sites of the circuit as nodes.
        patches: exact patches of the strongest sites, by direction: "denoise" and "noise".
        answers: one row for each run ("clean", "corrupted") and prompt, with the most probable
            token and its probability, and each answer of the metric ("correct" and "wrong", or
            "answer") with its rank and its probability.
        does: a short description of what each node reads and writes, by node id: what it does in
            the clean run and, if this differs, in the corrupted run; and the tokens whose logits
            the change in its output (clean minus corrupted) raises and lowers most, if the direct
            path carries a tenth of its share. Numbers are means over prompts; tokens are of the
            prompt `shown`.
        labels: the label of each node, by id: a head with the token to which it attends most (in
            the clean run / in the corrupted run), another node with the first token that `does`
            says the change raises (↑) or lowers (↓).
        shown: the index of the pair of prompts whose tokens are shown: the pair that adds most to
            the difference.
        model: the model that was explained.
        clean: the clean prompts.
        corrupted: the corrupted prompts.
    """

    attribution: Sweep
    circuit: Circuit
    graph: CircuitGraph
    patches: dict[str, Sweep]
    answers: pd.DataFrame
    does: dict[str, str]
    labels: dict[str, str]
    shown: int
    model: Any
    clean: Prompts
    corrupted: Prompts

    @property
    def title(self) -> str:
        """A sentence that states the circuit's size and how much of the difference it keeps.

        If prompts were resampled, it also states how much the resampled circuits keep on held-out
        prompts.
        """
        kept, n, held_out = self.circuit.faithfulness, len(self.circuit), self._held_out
        title = f"{n:,} of {self.circuit.n_sites:,} sites keep {_percent(kept)} of the difference"
        return title + f" ({_percent(held_out or 0)} on held-out prompts)" * (held_out is not None)

    @property
    def _held_out(self) -> float | None:
        stability = self.circuit.stability
        return None if stability is None else float(stability.held_out["mean"]["faithfulness"])

    @property
    def _warnings(self) -> list[str]:
        """Warnings about the prompts, and about circuits that fail on held-out prompts."""
        held_out, warnings = self._held_out, answer_warnings(self.answers, self.shown)
        if held_out is not None and held_out < _HELD_OUT * self.circuit.faithfulness:
            warnings.append(
                f"Warning: circuits for half of the prompts keep only {_percent(held_out)} of the "
                "difference on the other half. This circuit may not hold on new prompts: choose "
                "more prompts."
            )
        return warnings

    @property
    def neurons(self) -> list[str]:
        """The names of the graph's neurons and features, to pass to `neurons.top_examples`."""
        heads = self.graph.heads
        return list(heads.loc[heads["kind"].isin(NEURON_KINDS), "name"].unique())

    def table(self) -> pd.DataFrame:
        """Return a frame with one row per node of the graph, sorted by decreasing |share|.

        The nodes are the sites of the circuit or, if it has more than `most_nodes` sites (see
        `explain`), the sites with the largest |share|. Column `token` is the token at the site's
        position in the clean prompt `shown`. Column `does` describes what the site reads and writes
        (see the attribute `does`). Column `share` is the site's share of the difference, the sum of
        `by_pattern` and `by_value`. A path through several sites is counted for each of these
        sites, so shares can add up to more than 1. Columns `denoise` and `noise` are the effects of
        patching only this site in the corrupted and in the clean run, as shares of the difference.
        These two columns are missing for sites that were not patched. Column `disputed` is true if
        both have the opposite sign to the share, so that the share's sign cannot be trusted.
        """
        frame = self.attribution.to_frame().set_axis(_ids(self.attribution))
        rows = frame.loc[self.graph.heads["id"], ["by_pattern", "by_value"]].reset_index(names="id")
        rows["share"] = rows["by_pattern"] + rows["by_value"]
        rows["token"] = [self.graph.tokens[self.shown][pos] for pos in self.graph.heads["position"]]
        rows["does"] = rows["id"].map(self.does).fillna("")
        for way, sweep in self.patches.items():
            effect = sweep.effect.set_axis(_ids(sweep))
            rows[way] = rows["id"].map(effect if way == "denoise" else -effect)
        parts = rows[["share", "denoise", "noise"]]
        signs = np.sign(parts.where(parts.abs() >= _LEAST))
        rows["disputed"] = (signs["share"] == -signs["denoise"]) & (
            signs["share"] == -signs["noise"]
        )
        order = rows["share"].abs().sort_values(ascending=False, kind="stable").index
        return rows.loc[order, list(_COLUMNS)].reset_index(drop=True)

    def page(self, path: str | Path, *, examples: pd.DataFrame | None = None) -> Path:
        """Write the page that `view` returns to a file, and return the file's path."""
        viz = import_module("attn_only_lens.viz")
        result: Path = viz.write_html(self.view(examples), path)
        return result

    def view(self, examples: pd.DataFrame | None = None) -> Any:
        """Render the graph as an interactive page (`viz.circuit_view`), and return the page.

        Args:
            examples: top examples of the explanation's `neurons`, from `neurons.top_examples`. The
                page shows them, and names a neuron after the token at which its output is largest.
        """
        # `viz` imports this package, so an import of `viz` at the top would be circular.
        viz = import_module("attn_only_lens.viz")
        labels, names, peaks = dict(self.labels), {}, peak_tokens(examples)
        for node, name in zip(self.graph.heads["id"], self.graph.heads["name"], strict=True):
            if name in peaks:
                labels[node] = f"{name} at “{_short(peaks[name])}”"
        for row in self.table().to_dict("records"):
            names[row["id"]] = labels[row["id"]] + _by(row["by_pattern"], row["by_value"])
            names[row["id"]] += ", sign disputed" * row["disputed"]
        circuit, answers = self.circuit, answer_cells(self.answers).items()
        notes = [
            f"{self.title}; everything else keeps {_percent(circuit.completeness)} (about 0% if "
            "the circuit missed nothing).",
            *self._omitted,
            *(f"The {run} run: {'; '.join(map(' '.join, row.items()))}." for run, row in answers),
            *self._warnings,
            "Labels: ← the token to which a head attends most (clean / corrupted run); ↑ or ↓ the "
            "token whose logit the change of the node's output, clean minus corrupted, raises or "
            "lowers most by the direct path; by pattern, or by both pattern and value: what "
            "carries the node's share, if not mainly its value."
            + f" Sign disputed: {_DISPUTED}."
            * any(", sign disputed" in x for x in names.values()),
        ]
        if (tokens := self.attribution.tokens) is not None:
            notes.insert(0, f"Corrupted prompt: {joined(tokens.corrupted[self.shown])}")
        return viz.circuit_view(
            self.graph,
            self.model,
            self.clean,
            corrupted=self.corrupted,
            prompt=self.shown,
            exact=self.patches["noise"],
            notes=notes,
            examples=examples,
            stability=circuit.stability,
            state={"names": names},
        )

    def save(self, folder: str | Path) -> None:
        """Write the explanation to a folder, atomically.

        The folder contains `page.html`, `explanation.csv` (the frame from `table`), `circuit.json`
        (for `Circuit.load`), `graph.json` (for `circuits.from_json`) and `attribution.parquet` (for
        `patching.Sweep.load`).
        """
        with atomic_folder(folder, _FILES, "graph.json") as new:
            write_text(new / "explanation.csv", self.table().to_csv(index=False))
            self.circuit.save(new / "circuit.json")
            to_json(self.graph, new / "graph.json")
            self.attribution.save(new / "attribution.parquet")
            self.page(new / "page.html")

    def text(self, k: int = 10) -> str:
        """Return a text with the model's answers and the first k rows of `table`."""
        table, n, stability = self.table(), self.attribution.n_prompts, self.circuit.stability
        rows = table.head(k).round(2).drop(columns=["does", "disputed"])
        disputed = table.head(k)["disputed"]
        if disputed.any():
            rows.insert(list(rows).index("share") + 1, "", disputed.map({True: "!", False: ""}))
        rows[rows.select_dtypes("number").columns] += 0.0  # turn -0.00 into 0.00
        rows["token"] = rows["token"].map(repr)
        for name in ("id", "token"):  # pandas would align strings to the right
            rows[name] = rows[name].str.ljust(rows[name].str.len().max())
        text = rows.to_string(index=False, float_format="{:.2f}".format, na_rep="")
        head, *lines = text.splitlines()
        descriptions = map(_indented, table["does"])
        lines = list(chain(*zip(lines, filter(None, descriptions), strict=False)))
        if len(table) > k:
            lines.append(f"... {len(table) - k} more rows: .table() in Python, --top in a shell")
        lines += [fill(text, 80) for text in self._omitted]
        meanings = f"{_MEANINGS} {MISSING}" + f" !: {_DISPUTED}." * bool(disputed.any())
        meanings += _OF_SEVERAL.format(n, self.shown) * (n > 1)
        return "\n".join(
            [
                fill(
                    f"{self.title}; everything else keeps {_percent(self.circuit.completeness)}", 80
                ),
                self.attribution.clean_and_corrupted,
                pd.DataFrame(answer_cells(self.answers)).to_string(),
                *(fill(warning, 80) for warning in self._warnings),
                *("", head, *lines, "", fill(meanings, 80)),
                *([] if stability is None else ["", fill(f"Stability: {stability!r}", 80)]),
            ]
        )

    @property
    def _omitted(self) -> list[str]:
        """Sentences about strong sites outside the circuit, and about sites that have no node."""
        frame, listed, n = self.attribution.frame, len(self.graph.heads), len(self.circuit)
        outside = frame["score"].where(~self.circuit.contains(frame), 0.0).abs().nlargest(_MOST)
        rows = frame.loc[outside[outside >= _STRONG].index, ["name", "position", "score"]]
        strong = ", ".join("{}@{} {:.2f}".format(*row) for row in rows.to_numpy())
        return [
            f"Not in the circuit, which does not need them, but with a large share: {strong}."
        ] * bool(strong) + [
            f"Of the circuit's {n:,} sites, the graph and the table have the {listed:,} with the "
            "largest |share|: for more, pass most_nodes= to explain."
        ] * (listed < n)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        html: str = self.view()._repr_html_()
        return html


def _indented(text: str) -> str:
    """Wrap a description into indented lines of 80 columns, without line breaks in tokens."""
    kept = re.sub(r"""(['"]) """, "\\1\N{NO-BREAK SPACE}", text)
    lines = fill(kept, 80, initial_indent=" " * 4, subsequent_indent=" " * 6)
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def _percent(value: float) -> str:
    return f"{round(value, 2) + 0.0:.0%}"  # adding 0.0 turns -0% into 0%


def _by(by_pattern: float, by_value: float) -> str:
    """Return ", by pattern" or ", by both" if a node does not act mainly through its value."""
    pattern, value = abs(by_pattern), abs(by_value)
    if min(pattern, value) > _BOTH * (pattern + value):
        return ", by both"
    return ", by pattern" * (pattern > value)


def _short(token: str) -> str:
    text = token.strip()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _ids(sweep: Sweep) -> "pd.Series[str]":
    return sweep.frame["name"].astype(str) + "@" + sweep.frame["position"].astype(str)


@one_thread_per_model
@warned_once(WRONG)
@full_precision()
def explain(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    *,
    faithfulness: float = 0.9,
    most_nodes: int = 60,
    n_patched: int = 20,
    resamples: int = 0,
    progress: bool = True,
) -> Explanation:
    """Explain why a metric differs between a clean and a corrupted prompt.

    A site is a head or neuron at one position. To choose positions or roles, use `discover` and
    `attribution_graph` instead. The circuit is found by `discover`, with its default search method.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
        clean: a text, a list of texts of the same length, or tokens [batch, pos].
        corrupted: the corrupted prompts, with the same number of tokens.
        metric: `logit_diff(...)` or another metric, or a differentiable function of logits.
        faithfulness: the share of the difference that the circuit must keep; see `discover`.
        most_nodes: the largest number of sites in the graph; sites with the largest shares are
            kept.
        n_patched: how many of the strongest sites are patched exactly, in both directions.
        resamples: as in `discover`; the page then shows how stable each node is.
        progress: whether to show a progress bar for the search.

    Raises:
        InputError: with every reason: invalid numbers, prompts or metric.
        UnsupportedModelError: the model has an operation without a secant rule
            (`engine/secants.py`).

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.small_english(), copy=True).model
        >>> why = circuits.explain(model, "The keys near the cabinet", "The key near the cabinet",
        ...                        p.logit_diff(" are", " is"))
        >>> why.circuit.faithfulness > 0.9, why.table()["id"][0]
        (True, 'L3H3@5')
    """
    reasons = positive_reasons(most_nodes=most_nodes, n_patched=n_patched)
    reasons += resamples_reasons(resamples)
    InputError.raise_if(reasons, "nothing can be explained")
    prompts, pair = (model, clean, corrupted, metric), prompt_pair(model, clean, corrupted)
    if reason := unlike_tokens(model, pair):
        reason += "; expected prompts of the same length, or discover(…, positions=task.roles)"
        raise InputError([reason], "nothing can be explained")
    with float32_slopes(model, pair, metric):
        whole = attribution(*prompts, method="secant", budget=0, split=True, progress=False)
        search: dict[str, Any] = {"faithfulness": faithfulness, "resamples": resamples}
        circuit = discover(*prompts, **search, progress=progress)
        shares = whole.to_frame().set_index(["name", "position"])["score"]
        keys = list(zip(circuit.frame["name"], circuit.frame["position"], strict=True))
        keys = sorted(keys, key=lambda key: -abs(float(shares[key])))[:most_nodes]
        sites = [f"{name}@{position}" for name, position in keys]
        graph = attribution_graph(model, clean, metric, corrupted=corrupted, sites=sites)
        some = keys[:n_patched]
        options: dict[str, Any] = {"positions": sorted({int(position) for _, position in some})}
        options |= {"sites": list(dict.fromkeys(str(name) for name, _ in some)), "progress": False}
        ways = ("denoise", "noise")
        patches = {way: activation_patch(*prompts, direction=way, **options) for way in ways}
        what = _what_nodes_do(model, pair, metric, graph)
        return Explanation(whole, circuit, graph, patches, *what, model, clean, corrupted)


@torch.no_grad()
def _what_nodes_do(
    model: Any, pair: PromptPair, metric: AnyMetric, graph: CircuitGraph
) -> tuple[pd.DataFrame, dict[str, str], dict[str, str], int]:
    """Return the model's answers, each node's description and label, and the shown pair."""
    nodes = list(zip(graph.heads["name"], graph.heads["position"].astype(int), strict=True))
    host, heads = host_of(model), [HeadName.parse(name) for name, _ in nodes]
    into_metric = graph.edges[graph.edges["target"] == "metric"].set_index("source")["weight"]
    direct = into_metric.reindex(graph.heads["id"], fill_value=0.0).abs().to_numpy()
    is_direct = direct >= _DIRECT * graph.heads["attribution"].abs().to_numpy()
    hooks = {
        point: [host.hook_name(head.layer, head.kind, point) for head in heads]
        for point in ("z", "pattern")
    }
    names = sorted({*hooks["z"], *hooks["pattern"]})
    runs = [record(model, side, pair.mask, names=names) for side in (pair.clean, pair.corrupted)]
    answers = model_answers(model, pair, metric, *(run.logits for run in runs))
    clean, corrupted = (run.hooked for run in runs)
    shown = _pair_to_show(pair, bind(metric, model, pair, runs[0].logits), runs)
    changes = {hook: clean[hook] - corrupted[hook] for hook in hooks["z"]}
    written = DirectEffects(model).promoted_tokens(changes, nodes, 2, prompt=shown)
    does, labels = dict[str, str](), dict[str, str]()
    rows = zip(heads, nodes, written, is_direct, hooks["z"], hooks["pattern"], strict=True)
    for head, (name, position), top, has_tokens, of_z, of_pattern in rows:
        here = pair.real[:, position]  # use only prompts that have a token at this position

        def means(hook: str, *index: Any, here: Tensor = here) -> list[Tensor]:
            """Return the [clean, corrupted] means over prompts of an activation at `index`."""
            both = (run[hook][(slice(None), *index)] for run in (clean, corrupted))
            return [x[here.to(x.device)].float().mean(0) for x in both]

        writes, label = _writes(model, top if has_tokens else [])
        if head.kind in WIDE_KINDS:
            lengths = [float(z.norm()) for z in means(of_z, position)]
            reads = f"{_WIDE[head.kind]}, {_in_both_runs('length', lengths)}"
        elif head.kind == "attention":
            reads, label = _looks(model, pair, shown, means(of_pattern, head.index, position))
        else:
            outputs = [float(z) for z in means(of_z, position, head.index, 0)]
            is_off = head.kind == "feature" and not any(outputs)
            reads = "inactive" if is_off else _in_both_runs("z", outputs)
            if head.kind == "neuron":
                gates = [float(x) for x in means(of_pattern, head.index, position, SELF)]
                reads = f"{_in_both_runs('gate', gates, _APART)}; {reads}"
        key = f"{name}@{position}"
        does[key], labels[key] = "; ".join(filter(None, (reads, writes))), f"{name} {label}".strip()
    return answers, does, labels, shown


def _pair_to_show(pair: PromptPair, metric: BoundMetric, runs: Sequence[Recording]) -> int:
    """Return the index of the pair that adds most to the change of the metric.

    If the metric has one value for all prompts, it is the first pair of different prompts in the
    order of their tokens. The order in which pairs are given has no influence.
    """
    clean, corrupted = (metric.of_run(run.logits) for run in runs)
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
    model: Any, pair: PromptPair, shown: int, patterns: Sequence[Float[Tensor, "key_pos"]]
) -> tuple[str, str]:
    """Describe and label a head by the token that it attends to most in each run."""
    keys = [int(weights.argmax()) for weights in patterns]
    shares = [float(weights[key]) for weights, key in zip(patterns, keys, strict=True)]
    sides = (pair.clean[shown], pair.corrupted[shown])
    texts = [token_text(model, int(side[key])) for side, key in zip(sides, keys, strict=True)]
    short = list(map(_short, texts))
    names = [
        repr(text) + f"@{key}" * (keys[0] != keys[1] and texts[0] == texts[1])
        for text, key in zip(texts, keys, strict=True)
    ]
    differ = keys[0] != keys[1] or texts[0] != texts[1]
    tokens = pair.clean[:, keys[0]]
    of_one = f" in prompt {shown}" * bool((tokens != tokens[shown]).any())
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
    return writes, f"{texts[0][1]} {_short(texts[0][2][0])}"
