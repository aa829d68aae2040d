"""What `explain` returns: an explanation as a table, a text, a page and a folder of files."""

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd

from attn_only_lens.circuits._evaluate import Evaluation
from attn_only_lens.circuits._group_nodes import peak_tokens
from attn_only_lens.circuits.circuit import Circuit
from attn_only_lens.circuits.graph import CircuitGraph
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.tokens import joined, require_model
from attn_only_lens.explanation.labelled_view import (
    MARKS,
    attribution_by_pattern,
    names_of_nodes,
)
from attn_only_lens.explanation.model_answers import answer_cells, answer_warnings
from attn_only_lens.explanation.node_descriptions import STRONGER, short_token
from attn_only_lens.explanation.strong_sites import single_effects
from attn_only_lens.heads.host import NEURON_KINDS
from attn_only_lens.patching.results import Sweep
from attn_only_lens.storage.atomic import atomic_folder, write_text
from attn_only_lens.viz import Overlays, circuit_view, write
from attn_only_lens.viz.graph_notes import what_it_keeps
from attn_only_lens.viz.page import Page

_DIRECT = 0.01  # name the direct path from tokens to the metric from this share on
_FAR = 0.5  # warn if everything else keeps more than this, or less than minus this
_NARROW = 0.2  # warn if the sites carry less than this share of the difference
_HELD_OUT = 0.7  # warn if held-out faithfulness is below this share of the circuit's faithfulness
_CHANGE = (
    "Descriptions are of the circuit's own run (the clean tokens, with all other sites of the "
    "search as in the corrupted run), or, for sites outside the circuit, of the clean run; "
    "'corrupted' follows if the corrupted run differs. 'writes' says how the change of the site's "
    "output between these runs changes the logits of the metric's answers by the direct path, if "
    "at least a tenth of the site's effect takes this path; probable tokens whose logits change at "
    f"least {STRONGER:g} times as much follow."
)
_GROUPS = {
    "circuit": "The circuit",
    "not needed": "Strong, but not needed: others carry the same",
    "against": "Strong, against the answer",
}
_MEANINGS = (
    "share: the part of what the circuit keeps that passes through the site, by its pattern "
    "(by_pattern) and by its value (by_value). A path through several sites counts at each of "
    "them, so shares can add up to more than 1. denoise, noise: the part of the whole difference "
    "that a patch of this site alone brings back to the corrupted run, or removes from the clean "
    "run; report these two, which are exact. If the circuit missed nothing, everything else keeps "
    f"about 0%. {_CHANGE}"
)
_OF_SEVERAL = (
    " Ranks are medians, and probabilities, attention, gates and outputs are means, over {} "
    "prompts; tokens are of prompt {}, counted from 0, which adds most to the difference."
)
_BY_ROLE = (
    " A site is a head or a neuron at a role. Ranks are medians, and probabilities, gates and "
    "outputs are means, over {} prompts; tokens and attention are of prompt {}, counted from 0, "
    "which adds most to the difference, or of the first prompt with a token of the role."
)
_FILES = (
    *("explanation.csv", "contrast.json", "circuit.json", "graph.json"),
    *("attribution.parquet", "page.html"),
)
_COLUMNS = (
    *("group", "id", "token", "does", "share", "by_pattern", "by_value"),
    *("denoise", "noise", "disputed"),
)
_LEAST = 0.001  # below this, the sign of a share or of an effect may be rounding
_DISPUTED = (
    "both exact patches have the opposite sign to this share, so do not trust the share's sign"
)


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """An explanation of why a metric differs between two prompts. Made by `explain`.

    Attributes:
        attribution: every site's part of the whole difference, split into pattern and value.
        circuit: a small circuit that keeps most of the difference.
        graph: the attribution graph of the circuit's own run; see `attribution_graph`.
        patches: exact patches of the graph's sites, and of all sites whose effect may reach
            `strong`, by direction: "denoise" and "noise".
        answers: one row for each run ("clean", "corrupted") and prompt, with the most probable
            token and its probability, and each answer of the metric ("correct" and "wrong", or
            "answer") with its rank and its probability.
        does: a short description of what each site reads and writes, by its id: what it does in the
            circuit's own run (outside the circuit: in the clean run) and, if this differs, in the
            corrupted run; and how the change in its output between these two changes the logits of
            the metric's answers, relative to the mean of all logits, if the direct path carries a
            tenth of its effect. Numbers are means over prompts; tokens and logits are of the prompt
            `shown`.
        labels: the label of each site, by id: a head with the token to which it attends most (in
            the circuit's own run / in the corrupted run), another site with the first token that
            `does` says it writes: raised (↑) or lowered (↓).
        shown: the index of the pair of prompts whose tokens are shown: the pair that adds most to
            the difference.
        model: the model that was explained. It is not pickled or copied; pass your own model to
            `dataclasses.replace(why, model=model)` to draw an explanation from another process.
        contrast: the two runs and the metric.
        strong: the share of the difference from which a site's effect counts as strong.
        unpatched: the largest estimate, as a share of the difference, of the effect of a site that
            was not patched. It is below `strong`, but an estimate can miss.
        held_out: what the circuit keeps on held-out pairs of prompts, if there are any.
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
    contrast: Contrast
    strong: float
    unpatched: float
    held_out: Evaluation | None

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: everything but the model."""
        return vars(self) | {"model": None}

    @property
    def title(self) -> str:
        """A sentence that states the circuit's size and how much of the difference it keeps.

        The difference is that between the clean and the corrupted run. The sentence also states
        which part of it the tokens carry to the metric directly, without any site, and how much the
        circuit keeps on held-out pairs of prompts or, if prompts were resampled, how much the
        resampled circuits keep on those that their search did not use.
        """
        difference = self.attribution.clean_value - self.attribution.corrupted_value
        title, n = what_it_keeps(self.graph, self.circuit, self.attribution), len(self.contrast)
        title += f" on {n} pairs of prompts" * (n > 1)
        if abs(direct := self._direct) >= _DIRECT * abs(difference):
            title += f", {direct:.3g} of it directly from the tokens"
        if (held_out := self.held_out) is not None:
            error = f" ± {held_out.standard_error:.0%}" * (held_out.standard_error >= 0)
            pairs = f"{held_out.n_prompts} held-out pair{'s' * (held_out.n_prompts > 1)}"
            return f"{title}; {_percent(held_out.faithfulness)}{error} on {pairs}"
        if (resampled := self.on_other_halves) is not None:
            return f"{title}; {_percent(resampled)} on held-out halves of them"
        return f"{title}; {'found on one pair, ' * (n == 1)}not tested on other pairs"

    @property
    def _direct(self) -> float:
        """What the tokens add to the metric directly, without any site."""
        edges = self.graph.edges
        direct = edges["source"].str.startswith("embed") & (edges["target"] == "metric")
        return float(edges.loc[direct, "weight"].sum())

    @property
    def on_other_halves(self) -> float | None:
        """What circuits for half of the prompts keep on the other half, if there are any."""
        stability = self.circuit.stability
        return None if stability is None else float(stability.held_out["mean"]["faithfulness"])

    @property
    def warnings(self) -> list[str]:
        """Warnings about the prompts, and about circuits that fail on other prompts."""
        resampled, warnings = self.on_other_halves, answer_warnings(self.answers, self.shown)
        least = _HELD_OUT * self.circuit.faithfulness
        if resampled is not None and resampled < least:
            warnings.append(
                f"Warning: circuits for half of the prompts keep only {_percent(resampled)} of the "
                "difference on the other half. This circuit may not hold on new prompts: choose "
                "more prompts."
            )
        if self.held_out is None and resampled is None:
            warnings.append(
                "Test it on other pairs: circuits.evaluate(model, why.circuit, pairs), or find it "
                "on some pairs and test it on others: explain(model, pairs[:8], "
                "held_out=pairs[8:]). tasks.from_pair makes many pairs from one."
            )
        elif self.held_out is not None and self.held_out.faithfulness < least:
            kept = _percent(self.held_out.faithfulness)
            warnings.append(
                f"Warning: the circuit keeps only {kept} of the difference on held-out pairs: it "
                "does not hold there. Choose more pairs, or pairs that are more alike."
            )
        circuit, sweep = self.circuit, self.attribution
        carried = (circuit.whole - circuit.nothing) / (sweep.clean_value - sweep.corrupted_value)
        if abs(circuit.completeness) > _FAR:
            warnings.append(
                f"Warning: everything else keeps {_percent(circuit.completeness)}, far from 0%: "
                "other sites do the same as the circuit, or act against it."
            )
        if abs(carried) < _NARROW:
            warnings.append(
                f"Warning: all sites together carry only {_percent(carried)} of the difference, "
                "and the tokens carry the rest directly. What everything else keeps is a share of "
                "this small part."
            )
        return warnings

    @property
    def neurons(self) -> list[str]:
        """The names of the graph's neurons and features, to pass to `neurons.top_examples`."""
        heads = self.graph.heads
        return list(heads.loc[heads["kind"].isin(NEURON_KINDS), "name"].unique())

    def table(self) -> pd.DataFrame:
        """Return a frame with one row per site: the circuit's, and other strong sites.

        Column `group` is "circuit" for the graph's nodes, which are the sites of the circuit or, if
        it has more than `most_nodes` sites (see `explain`), the sites with the largest |share|.
        Other sites are those with |`denoise`| or |`noise`| of at least `strong`: "not needed", if
        the larger effect is positive, so that other sites carry the same effect; or "against".
        In each group, rows are sorted by decreasing max(|`denoise`|, |`noise`|).

        Columns `denoise` and `noise` are the exact effects of patching only this site in the
        corrupted and in the clean run, as shares of the whole difference. Column `token` is the
        token at the site's position in the clean prompt `shown`. Column `does` describes what the
        site reads and writes (see the attribute `does`). Column `share` is the site's share of what
        the circuit keeps, the sum of `by_pattern` and `by_value`; it is missing for other sites. A
        path through several sites is counted for each of these sites, so shares can add up to more
        than 1. Column `disputed` is true if both effects have the opposite sign to the share, so
        that the share's sign cannot be trusted.
        """
        nodes = self.graph.heads.set_index("id")
        share = nodes["attribution"] / self.graph.value
        effects = single_effects(self.patches)
        is_node = effects.index.isin(nodes.index)
        rows = effects[is_node | (effects.abs().max(axis=1) >= self.strong)].copy()
        rows["share"] = share
        rows["by_pattern"] = attribution_by_pattern(self.graph) / self.graph.value
        rows["by_value"] = rows["share"] - rows["by_pattern"]
        rows["id"], rows["does"] = rows.index, rows.index.map(self.does).fillna("")
        rows["token"] = [self._token(site.partition("@")[2]) for site in rows["id"]]
        parts = rows[["share", "denoise", "noise"]]
        signs = np.sign(parts.where(parts.abs() >= _LEAST))
        rows["disputed"] = (signs["share"] == -signs["denoise"]) & (
            signs["share"] == -signs["noise"]
        )
        strength = parts[["denoise", "noise"]].abs().max(axis=1)
        helps = parts[["denoise", "noise"]].sum(axis=1) > 0  # the sign of the larger effect, or
        rows["group"] = np.where(helps, "not needed", "against")
        rows.loc[rows["id"].isin(self.circuit.sites), "group"] = "circuit"
        groups = rows["group"].map(list(_GROUPS).index)
        order = np.lexsort((np.arange(len(rows)), -strength, groups))
        return rows.iloc[order][list(_COLUMNS)].reset_index(drop=True)

    def _token(self, place: str) -> str:
        """Return the shown clean prompt's token at a place; "" if it has no token of this role."""
        tokens = self.attribution.tokens
        if not self.graph.roles:
            return self.graph.tokens[self.shown][int(place)]
        return "" if tokens is None else tokens.clean_text(place, [self.shown])

    def page(self, path: str | Path, *, examples: pd.DataFrame | None = None) -> Path:
        """Write the page that `view` returns to a file, and return the file's path."""
        return write(self.view(examples), path)

    def view(self, examples: pd.DataFrame | None = None) -> Page:
        """Render the graph as an interactive page (`viz.circuit_view`), and return the page.

        Args:
            examples: top examples of the explanation's `neurons`, from `neurons.top_examples`. The
                page shows them, and names a neuron after the token at which its output is largest.
        """
        require_model(self.model)
        labels, peaks = dict(self.labels), peak_tokens(examples)
        for node, name in zip(self.graph.heads["id"], self.graph.heads["name"], strict=True):
            if name in peaks:
                labels[node] = f"{name} at “{short_token(peaks[name])}”"
        table, names = self.table(), names_of_nodes(self.graph, labels)
        nodes = set(names)
        for row in table.to_dict("records"):
            if row["id"] in nodes:
                names[row["id"]] += ", sign disputed" * row["disputed"]
            else:
                alone = f" ({row['denoise']:.2f}, {row['noise']:.2f})"
                names[row["id"]] = labels[row["id"]] + alone.replace("-", "−")
        circuit, answers = self.circuit, answer_cells(self.answers).items()
        lead = [
            f"{self.title}; everything else keeps {_percent(circuit.completeness)} (about 0% if "
            "the circuit missed nothing).",
            *(f"The {run} run: {'; '.join(map(' '.join, row.items()))}." for run, row in answers),
            *self.warnings,
        ]
        notes = [
            *self._selection,
            *[
                f"Grey: sites outside the circuit that restore or remove {self.strong:g} of the "
                "difference or more if they are patched alone. If the two shares are negative, the "
                "site acts against the answer."
            ]
            * bool(set(table["id"]) - nodes),
        ]
        if (tokens := self.attribution.tokens) is not None:
            lead.insert(0, f"Corrupted prompt: {joined(tokens.corrupted[self.shown])}")
        return circuit_view(
            self.graph,
            *(self.model, self.contrast),
            prompt=self.shown,
            overlays=Overlays(
                *(self.patches["noise"], examples, circuit.stability),
                alone=table[["id", "denoise", "noise"]],
                notes=notes,
                marks=MARKS,
            ),
            notes=lead,
            state={"names": names},
        )

    def save(self, folder: str | Path) -> None:
        """Write the explanation to a folder, atomically.

        The folder contains `page.html` and `explanation.csv` (the frame from `table`); and
        `contrast.json`, `circuit.json`, `graph.json` and `attribution.parquet`, which
        `attn_only_lens.load` reads.
        """
        with atomic_folder(folder, _FILES, "graph.json") as new:
            write_text(new / "explanation.csv", self.table().to_csv(index=False))
            self.contrast.save(new / "contrast.json")
            self.circuit.save(new / "circuit.json")
            self.graph.save(new / "graph.json")
            self.attribution.save(new / "attribution.parquet")
            self.page(new / "page.html")

    def text(self, k: int = 10) -> str:
        """Return a text with the model's answers and the first k rows of each group of `table`."""
        table, n, stability = self.table(), self.attribution.n_prompts, self.circuit.stability
        table = table.reset_index(names="row")
        shown = table.groupby("group", sort=False).head(k)
        rows = shown.round(2).drop(columns=["row", "group", "does", "disputed"])
        disputed = shown["disputed"]
        if disputed.any():
            rows.insert(list(rows).index("share") + 1, "", disputed.map({True: "!", False: ""}))
        rows[rows.select_dtypes("number").columns] += 0.0  # turn -0.00 into 0.00
        rows["token"] = rows["token"].map(repr)
        for name in ("id", "token"):  # pandas would align strings to the right
            rows[name] = rows[name].str.ljust(rows[name].str.len().max())
        text = rows.to_string(index=False, float_format="{:.2f}".format, na_rep="")
        head, *texts = text.splitlines()
        line_of, lines = dict(zip(shown["row"], texts, strict=True)), list[str]()
        for group, some in table.groupby("group", sort=False):
            if group != "circuit":
                lines += ["", f"{_GROUPS[str(group)]} ({len(some)} site{'s' * (len(some) > 1)})"]
            for row, does in zip(some["row"].head(k), some["does"], strict=False):
                lines += filter(None, (line_of[row], _indented(does)))
            if len(some) > k:
                more = f"... {len(some) - k} more rows: .table() in Python, --top in a shell"
                lines.append(more)
        lines += ["", *(fill(text, 80) for text in self._selection)]
        meanings = _MEANINGS + f" !: {_DISPUTED}." * bool(disputed.any())
        meanings += (_BY_ROLE if self.graph.roles else _OF_SEVERAL).format(n, self.shown) * (n > 1)
        return "\n".join(
            [
                fill(
                    f"{self.title}; everything else keeps {_percent(self.circuit.completeness)}", 80
                ),
                self.attribution.clean_and_corrupted,
                pd.DataFrame(answer_cells(self.answers)).to_string(),
                *(fill(warning, 80) for warning in self.warnings),
                *("", head, *lines, "", fill(meanings, 80)),
                *([] if stability is None else ["", fill(f"Stability: {stability!r}", 80)]),
            ]
        )

    @property
    def _selection(self) -> list[str]:
        """Sentences about the sites that were patched, and about those that have no node."""
        listed, n, n_patched = len(self.graph.heads), len(self.circuit), len(self.patches["noise"])
        return [
            f"{n_patched:,} sites were patched one by one, in both directions: the circuit's, and "
            f"all others whose effect may be {self.strong:g} or more by estimates. The largest "
            f"estimate of any other site is {self.unpatched:.3g}; an estimate can miss."
        ] + [
            f"Of the circuit's {n:,} sites, the graph and the table have the {listed:,} with the "
            "largest |share|: for more, pass most_nodes= to explain."
        ] * (listed < n)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()


def _indented(text: str) -> str:
    """Wrap a description into indented lines of 80 columns, without line breaks in tokens."""
    kept = re.sub(r"""(['"]) """, "\\1\N{NO-BREAK SPACE}", text)
    lines = fill(kept, 80, initial_indent=" " * 4, subsequent_indent=" " * 6)
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def _percent(value: float) -> str:
    return f"{round(value, 2) + 0.0:.0%}"  # adding 0.0 turns -0% into 0%
