"""Render the comparison of a model with its grown model, as a report or as a graph."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from attn_only_lens.growth import Comparison
from attn_only_lens.viz.circuit import circuit_page
from attn_only_lens.viz.circuit_data import STATUSES
from attn_only_lens.viz.figures import HEAD_COLOURS, empty_figure, plotly_text, style_figure
from attn_only_lens.viz.page import (
    Page,
    asset,
    document,
    import_extra,
    inline_script,
    model_title,
    refuse,
    short_numbers,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

_ROWS = 20
_POINTS = 2000
_NODES = 300
_NEW_COLOUR = "#009E73"
_MODEL_COLOURS = {"grown": "#D55E00", "null model": "#999999"}


def comparison_report(comparison: Comparison) -> Page:
    """Render the tables and figures of a comparison as one HTML page that works offline.

    Args:
        comparison: the result of `compare`.

    Returns:
        The page. The tables contain only the components that changed most.

    Raises:
        ImportError: plotly is not installed.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, compare, grow, growth, patching, pretrained, viz
        >>> model = pretrained.modular_addition()
        >>> sums = Contrast(torch.tensor([[3, 4, 113], [3, 5, 113]]), None,
        ...                 patching.logit_diff([7, 8], [8, 7]))
        >>> sizes = growth.ComparisonSizes(n_patched=5, n_nodes=20)
        >>> found = compare(model, grow(model, d_mlp=517, seed=0), sums, sizes=sizes)
        >>> len(viz.comparison_report(found)) < 6_000_000
        True
        >>> viz.comparison_circuit(found)[:15]
        '<!DOCTYPE html>'
    """
    about = comparison.about
    every = pd.concat([comparison.heads, comparison.neurons], ignore_index=True)
    changed = _largest(every, ["estimated_drop_change"], _ROWS)
    new = _largest(comparison.new, ["share"], _ROWS)
    model = model_title(about["model"])
    title = f"{model}: " * bool(model) + f"{about['metric']}, original against grown"
    models = pd.DataFrame(about["values"]).T.rename_axis("model").reset_index()
    models = models.assign(
        circuit_size=about["circuit_sizes"][: len(models)],
        faithfulness=about["faithfulness"][: len(models)],
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{about['n_prompts']} prompts, {about['n_tokens']} tokens; patching and circuits "
        f"use the first {about['n_prompts_of_circuits']} prompts. {len(comparison.silent)} neurons "
        "are not shown because they are silent in both models.</p>",
        _table("The models", models),
        _table("Circuits at equal faithfulness", comparison.circuits),
        "<p>first, second: the sizes of the circuits of the pair's two models. low, high: a "
        "confidence interval from resampled prompts, shifted so that the mean over resamples is "
        "the estimate.</p>",
        _overlap(comparison),
        _table("By layer: means over components", comparison.summary()),
        _divergences(every),
        _drops(every, comparison.new),
        _table(f"The {len(changed)} components whose estimated drop changed most", changed),
        _table(f"The {len(new)} new components with the largest share", new),
    ]
    script = inline_script(import_extra("plotly.offline").get_plotlyjs())
    body = f"{script}\n<main>{''.join(parts)}</main>"
    return document(title, body, asset("assets/report.css"))


def comparison_circuit(comparison: Comparison) -> Page:
    """Draw both circuits of a comparison as one graph of kept, lost and gained nodes and edges.

    Names, layers, effects and weights are from the grown model or, for lost nodes and edges, from
    the original model.

    Args:
        comparison: the result of `compare`.

    Returns:
        The page. If there are more than 300 nodes, the page shows only the 300 with the largest
        effects.

    Raises:
        InputError: neither circuit has a node.
    """
    nodes = comparison.nodes
    refuse(*["neither circuit has a node"] * (not len(nodes)))
    nodes = _largest(nodes, ["effect", "grown_effect"], _NODES).sort_index()
    lost = nodes["status"] == "lost"
    drawn = nodes[["id", "kind", "layer", "position", "status"]].assign(
        name=nodes["id"],
        value=np.nan,
        attribution=np.where(lost, nodes["effect"], nodes["grown_effect"]),
    )
    embedded = [
        {"id": f"embed@{token}", "kind": "embed", "name": "embed", "position": token}
        for token in range(len(comparison.tokens))
    ]
    ends = pd.DataFrame([*embedded, {"id": "metric", "kind": "metric", "name": "metric"}])
    drawn = pd.concat([drawn, ends], ignore_index=True)
    edges = comparison.edges
    edges = edges[edges["source"].isin(drawn["id"]) & edges["target"].isin(drawn["id"])]
    weight = np.where(edges["status"] == "lost", edges["weight"], edges["grown_weight"])
    edges = edges[["source", "target", "kind", "status"]].assign(weight=weight)
    about = comparison.about
    model = model_title(about["model"])
    every, counts = comparison.nodes["status"], drawn["status"].value_counts()
    notes = [
        "Of the model's heads and neurons, "
        + ", ".join(f"{(every == word).sum():,} {word}" for word in STATUSES)
        + ". Names, layers, effects and weights are from the grown model; effects and weights of "
        "lost nodes and edges are from the original."
    ]
    if about["n_prompts_of_circuits"] > 1:
        notes.append(
            f"These are circuits for {about['n_prompts_of_circuits']} prompts. The tokens are from "
            "the first prompt; other prompts may have other tokens and another length."
        )
    if counts.sum() < len(every):
        notes.append(f"Nodes: the {counts.sum()} with the largest effects, of {len(every):,}.")
    meta = {
        "tokens": list(comparison.tokens),
        "metric": about["metric"],
        "value": about["values"]["grown"]["clean"],
        "model": f"{model}, " * bool(model) + "original against grown",
        "notes": notes,
    }
    return circuit_page(drawn, edges, meta)


def _largest(frame: pd.DataFrame, columns: list[str], n: int) -> pd.DataFrame:
    """Return the n rows with the largest absolute values in these columns, in descending order."""
    return frame.loc[frame[columns].abs().max(axis=1).nlargest(n).index]


def _drops(every: pd.DataFrame, new: pd.DataFrame) -> str:
    """Plot each component's estimated drop in the grown model against that in the original."""
    every = _largest(every, ["estimated_drop", "grown_estimated_drop"], _POINTS)
    figure = _figure("Estimated drop of each component", "in the original", "in the grown model")
    for kind, part in every.groupby("kind", sort=False):
        _points(
            figure, part, "estimated_drop", part["name"] + " → " + part["grown_name"], str(kind)
        )
    new = _largest(new, ["estimated_drop"], _POINTS).assign(none=0.0)
    new = new.rename(columns={"estimated_drop": "grown_estimated_drop"})
    _points(figure, new, "none", new["grown_name"] + " (new)", "new")
    sizes = every[["estimated_drop", "grown_estimated_drop"]].abs().to_numpy()
    limit = float(np.nanmax(sizes)) if sizes.size else 1.0
    figure.add_shape(type="line", x0=-limit, y0=-limit, x1=limit, y1=limit, line_color="#bbb")
    return _html(figure)


def _points(
    figure: "go.Figure", part: pd.DataFrame, x: str, names: "pd.Series[str]", kind: str
) -> None:
    figure.add_scatter(
        x=short_numbers(part[x]),
        y=short_numbers(part["grown_estimated_drop"]),
        text=names.tolist(),
        mode="markers",
        name=plotly_text(kind),
        marker={"color": HEAD_COLOURS.get(kind, _NEW_COLOUR), "size": 6, "opacity": 0.7},
        hovertemplate="%{text}<br>%{x} → %{y}<extra></extra>",
    )


def _divergences(every: pd.DataFrame) -> str:
    """Plot the divergence of patterns by layer and kind, for the grown and the null model."""
    name = "Jensen–Shannon divergence of patterns: median and quartiles"
    figure = _figure(name, "layer of the original", "bits")
    prefixes = {"grown": "", "null model": "null_"} if "null_divergence" in every else {"grown": ""}
    rows = "L" + every["layer"].astype(str) + " " + every["kind"]
    for label, prefix in prefixes.items():
        quantiles = every[f"{prefix}divergence"].groupby(rows, sort=False).quantile
        middle = quantiles(0.5)
        _bars(figure, label, label, list(middle.index), quantiles(0.25), middle, quantiles(0.75))
    return _html(figure)


def _overlap(comparison: Comparison) -> str:
    """Plot the circuits' overlap in nodes and edges (Jaccard index), with confidence intervals."""
    figure = _figure("What the circuits have in common (Jaccard)", "", "share of the union")
    pairs = comparison.circuits.groupby("pair", sort=False)
    for colour, (pair, part) in zip(_MODEL_COLOURS, pairs, strict=False):
        low, middle, high = (part[f"jaccard{end}"] for end in ("_low", "", "_high"))
        _bars(figure, colour, str(pair), part["what"].tolist(), low, middle, high)
    return _html(figure.update_yaxes(range=[0, 1.05]))


def _bars(
    figure: "go.Figure",
    model: str,
    name: str,
    x: list[str],
    low: "pd.Series[float]",
    middle: "pd.Series[float]",
    high: "pd.Series[float]",
) -> None:
    """Add bars with error bars, which are extended if they do not contain the bar's value."""
    above, below = (high - middle).clip(lower=0), (middle - low).clip(lower=0)
    interval = {"type": "data", "array": short_numbers(above), "arrayminus": short_numbers(below)}
    colour = _MODEL_COLOURS[model]
    figure.add_bar(x=x, y=short_numbers(middle), error_y=interval, name=name, marker_color=colour)


def _figure(title: str, x: str, y: str) -> "go.Figure":
    return style_figure(empty_figure(), title, xaxis_title=x, yaxis_title=y, height=420)


def _html(figure: "go.Figure") -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False))


def _table(title: str, frame: pd.DataFrame) -> str:
    head = "".join(f"<th>{escape(str(column))}</th>" for column in frame.columns)
    rows = "".join(
        f"<tr>{''.join(_cells(row))}</tr>" for row in frame.to_numpy(dtype=object).tolist()
    )
    return f"<h2>{escape(title)}</h2>\n<table><tr>{head}</tr>\n{rows}</table>\n"


def _cells(row: Sequence[object]) -> list[str]:
    # Adding 0.0 turns -0.0 into 0.0.
    return [
        f'<td class="number">{"–" if pd.isna(cell) else format(cell + 0.0, ".4g")}</td>'
        if isinstance(cell, float | int)
        else f"<td>{'–' if cell is None else escape(str(cell))}</td>"
        for cell in row
    ]
