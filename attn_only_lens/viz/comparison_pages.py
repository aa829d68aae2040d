"""Render the comparison of a model with its grown model, as a report or as a graph."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from attn_only_lens.arguments import a_type
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
_NODES = 300
_NEW_COLOUR = "#009E73"
_MODEL_COLOURS = {"grown": "#D55E00", "null model": "#999999"}
_HEADINGS = {
    "grown_name": "name in the grown model",
    "grown_layer": "layer in the grown model",
    "divergence": "change of pattern (bits)",
    "cosine": "cosine of outputs",
    "norm_ratio": "length of outputs, grown / original",
    "drop": "drop",
    "grown_drop": "drop in the grown model",
    "drop_change": "change of drop",
    "drop_change_se": "its standard error",
    "null_drop": "drop in the null model",
    "drop_se": "its standard error",
    "norm": "length of outputs",
    "n_sites": "sites",
    "grown_share": "share in the grown model",
    "what": "of",
    "first": "in the first",
    "second": "in the second",
    "rank_correlation": "rank correlation",
    "jaccard": "in both / in any",
    "jaccard_low": "low",
    "jaccard_high": "high",
    "circuit_size": "sites in its circuit",
}
_CHANGED = ["name", "grown_name", "divergence", "cosine", "norm_ratio"]
_CHANGED += ["drop", "grown_drop", "drop_change", "drop_change_se"]


def comparison_report(comparison: Comparison) -> Page:
    """Render the tables and figures of a comparison as one HTML page that works offline.

    Args:
        comparison: the result of `compare`.

    Returns:
        The page. The tables contain only the components that changed most.

    Raises:
        InputError: this is not the result of `compare`.
        ImportError: plotly is not installed.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, compare, grow, growth, load, patching, viz
        >>> model = load("modular-addition")
        >>> sums = Contrast(torch.tensor([[3, 4, 113], [3, 5, 113]]), None,
        ...                 patching.logit_diff([7, 8], [8, 7]))
        >>> sizes = growth.ComparisonSizes(n_patched=5)
        >>> found = compare(model, grow(model, d_mlp=517, seed=0), sums, sizes=sizes)
        >>> len(viz.comparison_report(found)) < 6_000_000
        True
    """
    if not isinstance(comparison, Comparison):
        refuse(f"got {a_type(comparison)}; expected the result of compare")
    about = comparison.about
    every = pd.concat([comparison.heads, comparison.neurons], ignore_index=True)
    exact, new = every[every["exact"]], comparison.new[comparison.new["exact"]]
    changed = _largest(exact, ["drop_change"], _ROWS)[_CHANGED]
    most = _largest(new, ["share"], _ROWS).drop(columns="exact")
    model = model_title(about["model"])
    title = f"{model}: " * bool(model) + f"{about['metric']}, original against grown"
    models = pd.DataFrame(about["values"]).T.rename_axis("model").reset_index()
    models = models.assign(
        circuit_size=about["circuit_sizes"][: len(models)],
        faithfulness=about["faithfulness"][: len(models)],
    )
    circuits = comparison.circuits.dropna(axis=1, how="all")
    n_first = about["n_prompts_of_circuits"]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p><b>{escape(comparison.title)}.</b></p>",
        f"<p>Patterns and outputs are of {about['n_prompts']} prompts, with {about['n_tokens']} "
        f"tokens; circuits and drops are of the first {n_first}. All drops on this page are exact: "
        f"{len(exact) + len(new):,} of {len(every) + len(comparison.new):,} heads and neurons were "
        f"patched. {len(comparison.silent)} neurons are silent in both models, and are left out."
        "</p>",
        _table("What became of the circuit", comparison.parts),
        "<p>drop: how much the metric falls when all sites of the group have their outputs on the "
        "corrupted prompt. share: the same, of the metric's difference with all sites.</p>",
        _table("The models", models),
        _table("The circuits", circuits),
        _overlap(comparison),
        _table("By layer: means over components", comparison.summary()),
        _divergences(every),
        _drops(exact, new),
        _table(f"The {len(changed)} components whose drop changed most", changed),
        _table(f"The {len(most)} new components with the largest share", most),
    ]
    script = inline_script(import_extra("plotly.offline").get_plotlyjs())
    body = f"{script}\n<main class='light-only'>{''.join(parts)}</main>"
    return document(title, body, asset("assets/report.css") + asset("assets/light_only.css"))


def comparison_circuit(comparison: Comparison, state: Mapping[str, Any] | None = None) -> Page:
    """Draw both circuits of a comparison as one graph, as `circuit_view` says."""
    nodes = comparison.nodes
    refuse(*["neither circuit has a node"] * (not len(nodes)))
    nodes = _largest(nodes, ["share", "grown_share"], _NODES).sort_index()
    places = {"all": 0} | {place: index for index, place in enumerate(comparison.tokens)}
    positions = nodes["position"].map(lambda place: places.get(place, place))
    lost = nodes["status"] == "lost"
    drawn = nodes[["id", "kind", "layer", "status"]].assign(
        position=positions,
        name=nodes["id"],
        value=np.nan,
        attribution=np.where(lost, nodes["share"], nodes["grown_share"]),
    )
    by_name = nodes["position"].map(lambda place: isinstance(place, str)).any()
    embedded = [
        {"id": f"embed@{text if by_name else place}", "kind": "embed", "name": "embed"}
        | {"position": place}
        for place, text in enumerate(comparison.tokens)
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
        f"{comparison.title}.",
        "Of the sites, "
        + ", ".join(f"{(every == word).sum():,} {word}" for word in STATUSES)
        + ". Names, layers, shares and weights are from the grown model; shares and weights of "
        "lost nodes and edges are from the original.",
    ]
    if about["n_prompts_of_circuits"] > 1:
        notes.append(
            f"These are circuits for {about['n_prompts_of_circuits']} prompts. The tokens are from "
            "the first prompt; other prompts may have other tokens and another length."
        )
    if counts.sum() < len(every):
        notes.append(f"Nodes: the {counts.sum()} with the largest shares, of {len(every):,}.")
    meta = {
        "tokens": list(comparison.tokens),
        "metric": about["metric"],
        "value": about["values"]["grown"]["clean"],
        "model": f"{model}, " * bool(model) + "original against grown",
        "notes": notes,
        "axes": ("role", "number") if by_name else None,
    }
    return circuit_page(drawn, edges, meta, state=state)


def _largest(frame: pd.DataFrame, columns: list[str], n: int) -> pd.DataFrame:
    """Return the n rows with the largest absolute values in these columns, in descending order."""
    return frame.loc[frame[columns].abs().max(axis=1).nlargest(n).index]


def _drops(every: pd.DataFrame, new: pd.DataFrame) -> str:
    """Plot each patched component's drop in the grown model against that in the original."""
    figure = _figure("Drop of each patched component", "in the original", "in the grown model")
    for kind, part in every.groupby("kind", sort=False):
        names = part["name"] + " → " + part["grown_name"]
        _points(figure, part["drop"], part["grown_drop"], names, str(kind))
    _points(figure, new["drop"] * 0.0, new["drop"], new["grown_name"] + " (new)", "new")
    drops = every[["drop", "grown_drop"]].to_numpy()
    low, high = (float(drops.min()), float(drops.max())) if drops.size else (0.0, 1.0)
    figure.add_shape(type="line", x0=low, y0=low, x1=high, y1=high, line_color="#bbb")
    return _html(figure)


def _points(
    figure: "go.Figure",
    x: "pd.Series[float]",
    y: "pd.Series[float]",
    names: "pd.Series[str]",
    kind: str,
) -> None:
    figure.add_scatter(
        x=short_numbers(x),
        y=short_numbers(y),
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
    """Plot the circuits' overlap in nodes and edges (Jaccard index), with intervals if any."""
    title = "What the circuits have in common (Jaccard)"
    if comparison.circuits["jaccard_low"].notna().any():
        title += ", with 90 % of the circuits of random halves of the prompts"
    figure = _figure(title, "", "in both circuits / in any")
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
    """Add bars, with error bars where there are intervals; these are extended to the bar."""
    above, below = (x.clip(lower=0) for x in (high - middle, middle - low))
    interval: dict[str, Any] = {"type": "data", "visible": bool(above.notna().any())}
    interval |= {"array": short_numbers(above), "arrayminus": short_numbers(below)}
    colour = _MODEL_COLOURS[model]
    figure.add_bar(x=x, y=short_numbers(middle), error_y=interval, name=name, marker_color=colour)


def _figure(title: str, x: str, y: str) -> "go.Figure":
    return style_figure(empty_figure(), title, xaxis_title=x, yaxis_title=y, height=420)


def _html(figure: "go.Figure") -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False))


def _table(title: str, frame: pd.DataFrame) -> str:
    headings = [_HEADINGS.get(str(name), str(name).replace("_", " ")) for name in frame.columns]
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
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
