"""Explain in one call why a metric differs between two prompts.

Secant attribution ranks all sites. A search finds a small circuit that keeps most of the
difference. An attribution graph of the difference shows how the circuit's sites affect each other.
The strongest sites are also patched one by one, which gives their exact effects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Any

import pandas as pd
import torch

from attn_only_lens.arguments import positive_reasons
from attn_only_lens.axes import SELF
from attn_only_lens.circuits._attribution_graph import attribution_graph
from attn_only_lens.circuits._group_nodes import peak_tokens
from attn_only_lens.circuits._search import discover
from attn_only_lens.circuits.circuit import MISSING, Circuit
from attn_only_lens.circuits.export import to_json
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.circuits.model_answers import answer_cells, answer_warnings, model_answers
from attn_only_lens.circuits.stability import resamples_reasons
from attn_only_lens.circuits.weights.vocabulary import DirectEffects
from attn_only_lens.engine.contrast import float32_slopes
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import AnyMetric
from attn_only_lens.engine.prompts import PromptPair, Prompts, prompt_pair
from attn_only_lens.engine.recording import record
from attn_only_lens.engine.tokens import token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._attribution import attribution
from attn_only_lens.patching.results import Sweep
from attn_only_lens.precision import full_precision
from attn_only_lens.storage.atomic import atomic_folder, write_text

_LONGEST = 9  # the maximum length of a token in a label, in characters
_MEANINGS = (
    "share: the part of the difference that passes through the site, by its pattern (by_pattern) "
    "and by its value (by_value). A path through several sites counts at each of them, so shares "
    "can add up to more than 1. denoise, noise: the part that a patch of this site alone brings "
    "back to the corrupted run, or removes from the clean run."
)
_OF_SEVERAL = " Ranks are medians, probabilities means, over {} prompts; tokens are of the first."
_FILES = ("explanation.csv", "circuit.json", "graph.json", "attribution.parquet", "page.html")
_WIDE = {
    "skip": "what W_skip reads",
    "error": "what the transcoder misses of the MLP's output",
}
_COLUMNS = ("id", "token", "does", "share", "by_pattern", "by_value", "denoise", "noise")


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
        does: a short description of what each node reads and writes, by node id.
        labels: the label of each node, by id: its name with the token that it attends to or
            promotes most.
        model: the model that was explained.
        clean: the clean prompts.
    """

    attribution: Sweep
    circuit: Circuit
    graph: CircuitGraph
    patches: dict[str, Sweep]
    answers: pd.DataFrame
    does: dict[str, str]
    labels: dict[str, str]
    model: Any
    clean: Prompts

    @property
    def title(self) -> str:
        """A sentence that states the circuit's size and how much of the difference it keeps."""
        kept, n = self.circuit.faithfulness, len(self.circuit)
        return f"{n:,} of {self.circuit.n_sites:,} sites keep {kept:.0%} of the difference"

    @property
    def neurons(self) -> list[str]:
        """The names of the graph's neurons and features, to pass to `neurons.top_examples`."""
        heads = self.graph.heads
        return list(heads.loc[heads["kind"].isin(NEURON_KINDS), "name"].unique())

    def table(self) -> pd.DataFrame:
        """Return a frame with one row per site of the circuit, sorted by decreasing |share|.

        The columns are `id`; `token`, the token at the site's position in the first clean prompt;
        `does`, what the site reads and writes; `share`, the site's share of the difference, which
        is the sum of `by_pattern` and `by_value`; and `denoise` and `noise`. `denoise` is the
        effect of patching only this site in the corrupted run, and `noise` is the effect in the
        clean run, both as shares of the difference. Both are missing for sites that were not
        patched. A path through several sites is counted for each of these sites, so shares can add
        up to more than 1.
        """
        frame = self.attribution.to_frame().set_axis(_ids(self.attribution))
        rows = frame.loc[self.graph.heads["id"], ["by_pattern", "by_value"]].reset_index(names="id")
        rows["share"] = rows["by_pattern"] + rows["by_value"]
        rows["token"] = [self.graph.tokens[0][pos] for pos in self.graph.heads["position"]]
        rows["does"] = rows["id"].map(self.does).fillna("")
        for way, sweep in self.patches.items():
            effect = sweep.effect.set_axis(_ids(sweep))
            rows[way] = rows["id"].map(effect if way == "denoise" else -effect)
        order = rows["share"].abs().sort_values(ascending=False, kind="stable").index
        return rows.loc[order, list(_COLUMNS)].reset_index(drop=True)

    def page(self, path: str | Path, *, examples: pd.DataFrame | None = None) -> Path:
        """Write the page that `view` returns to a file, and return the file's path."""
        viz = import_module("attn_only_lens.viz")
        result: Path = viz.write_html(self.view(examples), path)
        return result

    def view(self, examples: pd.DataFrame | None = None) -> Any:
        """Return the graph as an interactive page (`viz.circuit_view`).

        Args:
            examples: top examples of the explanation's `neurons`, from `neurons.top_examples`. The
                page shows them, and names a neuron after the token at which its output is largest.
        """
        # `viz` imports this package, so an import of `viz` at the top would be circular.
        viz = import_module("attn_only_lens.viz")
        labels, names, peaks = dict(self.labels), {}, peak_tokens(examples)
        for node, name in zip(self.graph.heads["id"], self.graph.heads["name"], strict=True):
            if name in peaks:
                labels[node] = f"{name} at “{peaks[name].strip()[:_LONGEST]}”"
        for row in self.table().to_dict("records"):
            kind = "pattern" if abs(row["by_pattern"]) > abs(row["by_value"]) else "value"
            names[row["id"]] = f"{labels[row['id']]}, by {kind}"
        circuit, answers = self.circuit, answer_cells(self.answers).items()
        notes = [
            f"{self.title}; everything else keeps {circuit.completeness:.0%}.",
            *(f"The {run} run: {'; '.join(map(' '.join, row.items()))}." for run, row in answers),
            *answer_warnings(self.answers),
            "Labels: ← the token that a head attends to most, → the token promoted most.",
        ]
        if (tokens := self.attribution.tokens) is not None:
            texts = [text for text in tokens.corrupted[0] if text is not None]
            notes.insert(0, f"Corrupted prompt: {''.join(texts)}")
        return viz.circuit_view(
            self.graph,
            self.model,
            self.clean,
            exact=self.patches["noise"],
            notes=notes,
            examples=examples,
            stability=circuit.stability,
            state={"names": names},
        )

    def save(self, folder: str | Path) -> None:
        """Write the explanation to a folder, atomically.

        The folder has `page.html`; `explanation.csv`, which is `table()`; and files that
        `Circuit.load`, `circuits.from_json` and `patching.Sweep.load` read: `circuit.json`,
        `graph.json` and `attribution.parquet`.
        """
        with atomic_folder(folder, _FILES, "graph.json") as new:
            write_text(new / "explanation.csv", self.table().to_csv(index=False))
            self.circuit.save(new / "circuit.json")
            to_json(self.graph, new / "graph.json")
            self.attribution.save(new / "attribution.parquet")
            self.page(new / "page.html")

    def text(self, k: int = 10) -> str:
        """Return the model's answers and the first k rows of `table` as text of 80 columns."""
        table, n, stability = self.table(), self.attribution.n_prompts, self.circuit.stability
        rows = table.head(k).round(2).drop(columns="does")
        rows[rows.select_dtypes("number").columns] += 0.0  # turn -0.00 into 0.00
        rows["token"] = rows["token"].map(repr)
        for name in ("id", "token"):  # pandas would align strings to the right
            rows[name] = rows[name].str.ljust(rows[name].str.len().max())
        text = rows.to_string(index=False, float_format="{:.2f}".format, na_rep="")
        head, *lines = text.splitlines()
        lines = [f"{x}\n    {does:.76}" for x, does in zip(lines, table["does"], strict=False)]
        if len(table) > k:
            lines.append(f"... {len(table) - k} more rows; see .table(), or --top in a shell")
        meanings = f"{_MEANINGS} {MISSING}" + _OF_SEVERAL.format(n) * (n > 1)
        return "\n".join(
            [
                f"{self.title}; everything else keeps {self.circuit.completeness:.0%}",
                self.attribution.clean_and_corrupted,
                pd.DataFrame(answer_cells(self.answers)).T.to_string(),
                *(fill(warning, 80) for warning in answer_warnings(self.answers)),
                *("", head, *lines, "", fill(meanings, 80)),
                *([] if stability is None else ["", f"Stability: {stability!r}"]),
            ]
        )

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        html: str = self.view()._repr_html_()
        return html


def _ids(sweep: Sweep) -> "pd.Series[str]":
    return sweep.frame["name"].astype(str) + "@" + sweep.frame["position"].astype(str)


@warned_once()
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
    progress: bool = False,
) -> Explanation:
    """Explain why a metric differs between a clean and a corrupted prompt.

    Every position is a site of its own. For chosen positions or roles, use `discover` and
    `attribution_graph`.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
        clean: a text, a list of texts, or tokens [batch, pos].
        corrupted: the corrupted prompts, with the same number of tokens.
        metric: `logit_diff(...)` or another metric, or a differentiable function of logits.
        faithfulness: the share of the difference that the circuit must keep; see `discover`.
        most_nodes: the largest number of sites in the graph; sites with the largest shares are
            kept.
        n_patched: how many of the strongest sites are patched exactly, in both directions.
        resamples: as in `discover`; the page then shows how stable each node is.
        progress: show a progress bar for the search.

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
    prompts = model, clean, corrupted, metric
    with float32_slopes(model, prompt_pair(model, clean, corrupted), metric):
        whole = attribution(*prompts, method="secant", budget=0, split=True, progress=False)
        search: dict[str, Any] = {"faithfulness": faithfulness, "resamples": resamples}
        circuit = discover(*prompts, **search, method="secant", budget=0, progress=progress)
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
        nodes = [(str(name), int(position)) for name, position in keys]
        what = _what_nodes_do(model, prompt_pair(model, clean, corrupted), metric, nodes)
        return Explanation(whole, circuit, graph, patches, *what, model, clean)


@torch.no_grad()
def _what_nodes_do(
    model: Any, pair: PromptPair, metric: AnyMetric, nodes: Sequence[tuple[str, int]]
) -> tuple[pd.DataFrame, dict[str, str], dict[str, str]]:
    """Return the model's answers, a description of each node, and a label for each node."""
    host, heads = host_of(model), [HeadName.parse(name) for name, _ in nodes]
    hooks = {
        host.hook_name(head.layer, head.kind, point) for head in heads for point in ("z", "pattern")
    }
    run = record(model, pair.clean, pair.mask, names=sorted(hooks))
    corrupted = record(model, pair.corrupted, pair.mask)
    answers = model_answers(model, pair, metric, run.logits, corrupted.logits)
    written = DirectEffects(model).promoted_tokens(run.hooked, nodes, 2)
    texts = [token_text(model, token) for token in pair.clean[0].tolist()]
    does, labels = dict[str, str](), dict[str, str]()
    for head, (name, position), top in zip(heads, nodes, written, strict=True):
        tokens = [token_text(model, token) for token, _ in top[:2]]
        writes = f"writes {', '.join(map(repr, tokens))}" if tokens else ""
        label = f"{name} → {tokens[0].strip()[:_LONGEST]}" if tokens else name
        z, pattern = (
            run.hooked[host.hook_name(head.layer, head.kind, point)][0]
            for point in ("z", "pattern")
        )
        reads = ""
        if head.kind in WIDE_KINDS:
            reads = f"{_WIDE[head.kind]}, length {float(z[position].norm()):.2f}"
        elif head.kind == "attention":
            weights = pattern[head.index, position, : len(texts)]
            most = int(weights.argmax())
            reads = f"looks at {texts[most]!r} ({float(weights[most]):.0%})"
            label = f"{name} ← {texts[most].strip()[:_LONGEST]}"
        elif head.kind == "feature":
            here = float(z[position, head.index])
            reads = f"active, z {here:.2f}" if here else "inactive"
        elif host.neurons[head.layer].heads_per_neuron == 1:
            reads = f"gate {float(pattern[head.index, position, SELF]):.2f}"
        key = f"{name}@{position}"
        does[key], labels[key] = "; ".join(filter(None, (reads, writes))), label
    return answers, does, labels
