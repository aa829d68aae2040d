"""A comparison of a model with one grown from it, as a report and as one circuit over the other.

The report holds plotly once, and every figure as data; the circuit is `circuit_page` with nodes and
edges by status.
"""

from collections.abc import Sequence
from html import escape

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from attn_only_lens.comparison import Comparison
from attn_only_lens.viz.circuit import circuit_page
from attn_only_lens.viz.page import Page, document, inline, refuse, resource, text

__all__ = ["comparison_circuit", "comparison_report"]

_ROWS = 20
_POINTS = 2000
_NODES = 300
_COLOUR = {"attention": "#0072B2", "neuron": "#E69F00"}
_PAIR = {"grown": "#D55E00", "null model": "#999999"}


def comparison_report(comparison: Comparison) -> Page:
    """One HTML page with the tables and figures of a comparison, which works offline.

    Args:
        comparison: by `compare`.

    Returns:
        The page; of many components the ones that changed most. `write_html` writes it to a file.

    Example:
        >>> import torch
        >>> from attn_only_lens import compare, grow, patching, pretrained, viz
        >>> model = pretrained.modular_addition()
        >>> found = compare(
        ...     model, grow(model, d_mlp=517, seed=0), torch.tensor([[3, 4, 113], [3, 5, 113]]),
        ...     patching.logit_diff([7, 8], [8, 7]), n_patched=5, n_nodes=20, progress=False)
        >>> len(viz.comparison_report(found)) < 6_000_000
        True
        >>> viz.comparison_circuit(found)[:15]
        '<!DOCTYPE html>'
    """
    about = comparison.about
    every = pd.concat([comparison.heads, comparison.neurons], ignore_index=True)
    changed = every.loc[every["attribution_change"].abs().nlargest(_ROWS).index]
    new = comparison.new.loc[comparison.new["share"].abs().nlargest(_ROWS).index]
    figures = [_attributions(every, comparison.new), _divergences(every), _overlap(comparison)]
    title = f"{about['model'] or 'model'}: {about['metric']}, original against grown"
    values = pd.DataFrame(about["values"]).T.rename_axis("model").reset_index()
    n_found = len(values)
    sizes = {"circuit_size": "circuit_sizes", "faithfulness": "faithfulness"}
    values = values.assign(**{name: about[key][:n_found] for name, key in sizes.items()})
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{about['n_prompts']} prompts, {about['n_tokens']} tokens; patching and circuits on "
        f"the first {about['n_prompts_of_circuits']}. {len(comparison.silent)} neurons are left "
        "out, which are silent in both models.</p>",
        _table("The models", values),
        _table("Circuits at equal faithfulness", comparison.circuits),
        _figure(figures[2]),
        _table("By layer: means over components", comparison.summary()),
        _figure(figures[1]),
        _figure(figures[0]),
        _table(f"The {len(changed)} components whose attribution changed most", changed),
        _table(f"The {len(new)} new components of largest share", new),
    ]
    body = "\n".join([inline(get_plotlyjs()), f"<main>{''.join(parts)}</main>"])
    return document(title, body, resource("assets/report.css"))


def comparison_circuit(comparison: Comparison) -> Page:
    """The circuit of a model over that of the grown one: nodes and edges kept, lost, gained.

    Names, layers and positions are those of the grown model. Sizes are effects and weights there,
    and of what was lost, in the original.

    Args:
        comparison: by `compare`.

    Returns:
        The page; of more than 300 nodes those of largest effect.

    Raises:
        PictureError: neither circuit has a node.
    """
    nodes = comparison.nodes
    refuse(["neither circuit has a node"] * (not len(nodes)))
    sizes = nodes[["effect", "grown_effect"]].abs().max(axis=1)
    nodes = nodes.loc[sizes.nlargest(_NODES).sort_index().index]
    lost = nodes["status"] == "lost"
    drawn = nodes[["id", "kind", "layer", "name", "position", "status"]].assign(
        value=np.nan, attribution=np.where(lost, nodes["effect"], nodes["grown_effect"])
    )
    embedded = [
        {"id": f"embed@{at}", "kind": "embed", "name": "embed", "position": at}
        for at in range(len(comparison.tokens))
    ]
    ends = pd.DataFrame([*embedded, {"id": "metric", "kind": "metric", "name": "metric"}])
    drawn = pd.concat([drawn, ends], ignore_index=True)
    edges = comparison.edges
    edges = edges[edges["source"].isin(drawn["id"]) & edges["target"].isin(drawn["id"])]
    weight = np.where(edges["status"] == "lost", edges["weight"], edges["grown_weight"])
    edges = edges[["source", "target", "kind", "status"]].assign(weight=weight)
    about = comparison.about
    meta = {
        "tokens": list(comparison.tokens),
        "metric": f"{about['metric']}, original against grown",
        "value": about["values"]["grown"]["clean"],
        "model": about["model"] or "model",
    }
    return circuit_page(drawn, edges, meta)


def _attributions(every: pd.DataFrame, new: pd.DataFrame) -> go.Figure:
    """Each component's attribution in one model against that in the other."""
    sizes = every[["attribution", "grown_attribution"]].abs().max(axis=1)
    every = every.loc[sizes.nlargest(_POINTS).index]
    figure = go.Figure()
    for kind, part in every.groupby("kind", sort=False):
        _points(figure, part, "attribution", part["name"] + " → " + part["grown_name"], str(kind))
    new = new.assign(none=0.0).loc[new["attribution"].abs().nlargest(_POINTS).index]
    new = new.rename(columns={"attribution": "grown_attribution"})
    _points(figure, new, "none", new["grown_name"] + " (new)", "new")
    limit = float(sizes.max()) if len(sizes) else 1.0
    figure.add_shape(type="line", x0=-limit, y0=-limit, x1=limit, y1=limit, line_color="#bbb")
    return _finish(figure, "Attribution of each component", "in the original", "in the grown model")


def _points(
    figure: go.Figure, part: pd.DataFrame, x: str, names: "pd.Series[str]", kind: str
) -> None:
    figure.add_scatter(
        x=_short(part[x]),
        y=_short(part["grown_attribution"]),
        text=names.tolist(),
        mode="markers",
        name=text(kind),
        marker={"color": _COLOUR.get(kind, "#009E73"), "size": 6, "opacity": 0.7},
        hovertemplate="%{text}<br>%{x} → %{y}<extra></extra>",
    )


def _divergences(every: pd.DataFrame) -> go.Figure:
    """How far patterns moved, by layer and kind, beside the null."""
    figure = go.Figure()
    prefixes = {"grown": "", "null model": "null_"} if "null_divergence" in every else {"grown": ""}
    rows = "L" + every["layer"].astype(str) + " " + every["kind"]
    for label, prefix in prefixes.items():
        quantiles = every[f"{prefix}divergence"].groupby(rows, sort=False).quantile
        low, middle, high = (quantiles(q) for q in (0.25, 0.5, 0.75))
        figure.add_bar(
            x=list(middle.index),
            y=_short(middle),
            error_y={
                "type": "data",
                "array": _short(high - middle),
                "arrayminus": _short(middle - low),
            },
            name=label,
            marker_color=_PAIR[label],
        )
    name = "Jensen–Shannon divergence of patterns: median and quartiles"
    return _finish(figure, name, "layer of the original", "bits")


def _overlap(comparison: Comparison) -> go.Figure:
    """Jaccard of nodes and edges, with intervals."""
    figure = go.Figure()
    for label, part in comparison.circuits.groupby("pair", sort=False):
        figure.add_bar(
            x=part["what"].tolist(),
            y=_short(part["jaccard"]),
            error_y={
                "type": "data",
                "array": _short((part["jaccard_high"] - part["jaccard"]).clip(lower=0)),
                "arrayminus": _short((part["jaccard"] - part["jaccard_low"]).clip(lower=0)),
            },
            name={"grown": "original and grown", "null model": "grown and null"}[str(label)],
            marker_color=_PAIR[str(label)],
        )
    figure.update_yaxes(range=[0, 1.05])
    return _finish(figure, "What the circuits have in common (Jaccard)", "", "share of the union")


def _finish(figure: go.Figure, title: str, x: str, y: str) -> go.Figure:
    figure.update_xaxes(title_text=x)
    figure.update_yaxes(title_text=y)
    return figure.update_layout(
        title={"text": title, "font_size": 15}, template="plotly_white", height=420
    )


def _short(values: "pd.Series[float]") -> list[float | None]:
    """Numbers to five figures; missing ones as none."""
    return [None if pd.isna(value) else float(f"{value:.5g}") for value in values]


def _figure(figure: go.Figure) -> str:
    html: str = figure.to_html(full_html=False, include_plotlyjs=False)
    return html


def _table(title: str, frame: pd.DataFrame) -> str:
    head = "".join(f"<th>{escape(str(column))}</th>" for column in frame.columns)
    rows = "".join(
        f"<tr>{''.join(_cells(row))}</tr>" for row in frame.to_numpy(dtype=object).tolist()
    )
    return f"<h2>{escape(title)}</h2>\n<table><tr>{head}</tr>\n{rows}</table>\n"


def _cells(row: Sequence[object]) -> list[str]:
    return [
        f'<td class="number">{"–" if pd.isna(each) else format(each, ".4g")}</td>'
        if isinstance(each, float | int)
        else f"<td>{'–' if each is None else escape(str(each))}</td>"
        for each in row
    ]
