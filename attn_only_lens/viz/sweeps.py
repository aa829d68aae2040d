"""Sweeps as a heatmap and as ranked bars, of the effect

    effect = score - score of the run that is patched into        (`Sweep.effect`)

so that a patch without effect is white, whatever the direction of the sweep.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import pandas as pd

from attn_only_lens.patching import Sweep
from attn_only_lens.patching.results import MEASURED
from attn_only_lens.viz.checks import refuse, token_reasons
from attn_only_lens.viz.figures import HEAD_COLOURS, empty_figure, plotly_text, style_figure
from attn_only_lens.viz.page import HEAD_PLURALS

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_ROWS = 100
"""Rows of a heatmap, or bars, whose names one can still read."""

_OTHER = "#666666"


def sweep_heatmap(
    sweep: Sweep,
    rows: Literal["layer", "name"] = "layer",
    tokens: Sequence[str] | None = None,
) -> "go.Figure":
    """Draw the effect of patches by layer and position, or by head and position.

    Effects of single patches do not add up to that of all, so a cell of a layer is not their sum
    but that of its strongest site, named under the pointer.

    Args:
        sweep: the results; `sweep.query` and `sweep.top` narrow them.
        rows: "layer", a row for the heads and one for the neurons of each layer, upward; "name", a
            row for each of up to 100 heads, the strongest on top.
        tokens: the texts of the prompt's tokens, for the names of positions.

    Returns:
        A plotly figure; `viz.write_html` writes it to a page that works offline.

    Raises:
        InputError: the sweep is empty, has too many heads, or rows of several prompts; `rows` is
            another word, or tokens are too few.
        ImportError: plotly is not installed.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching, viz
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [5, 7],
        ...                        "name": ["L0N5", "L0N7"], "position": 2, "value": [2.0, -1.0]})
        >>> sweep = patching.Sweep(values, part="z", direction="denoise", metric="logit_diff",
        ...                           clean_value=3.0, corrupted_value=-1.0, n_prompts=1, model="m")
        >>> figure = viz.sweep_heatmap(sweep)
        >>> figure.data[0].y[0], float(figure.data[0].z[0][0])
        ('L0 neurons', 0.75)
    """
    frame = _effects(sweep)
    if sweep.rows.has_prompts:
        refuse('the sweep has rows of each prompt; expected means, or sweep.query("prompt == 0")')
    if rows not in ("layer", "name"):
        refuse(f"got rows={rows!r}; expected 'layer' or 'name'")
    if rows == "name":
        frame["row"] = frame["name"]
        order = list(dict.fromkeys(frame["row"]))[::-1]  # plotly's first row is the lowest
        if len(order) > MOST_ROWS:
            refuse(f"{len(order)} heads; expected {MOST_ROWS} at most: sweep.query(...) narrows it")
    else:
        kinds = frame["kind"].map(lambda kind: HEAD_PLURALS.get(kind, kind))
        frame["row"] = "L" + frame["layer"].astype(str) + " " + kinds
        order = list(dict.fromkeys(frame.sort_values(["layer", "kind"])["row"]))
    positions = sorted(set(frame["position"]))
    if frame["position"].dtype == "category":  # roles, in the order asked for
        positions = list(frame["position"].cat.categories)
    labels = [_position(position, tokens) for position in positions]
    strongest = frame.drop_duplicates(["row", "position"])  # the first is: see _effects
    grid = strongest.pivot(index="row", columns="position", values="effect")
    named = strongest.pivot(index="row", columns="position", values="name")
    grid, named = (each.reindex(index=order, columns=positions) for each in (grid, named))
    limit = float(frame["effect"].abs().max()) or 1.0
    figure = empty_figure().add_heatmap(
        z=grid.to_numpy(),
        x=labels,
        y=order,
        customdata=named.map(plotly_text, na_action="ignore").fillna("").to_numpy(),
        hoverongaps=False,
        hovertemplate="%{customdata} at %{x}<br>effect %{z:.4g}<extra></extra>",
        colorscale="RdBu",
        zmid=0,
        zmin=-limit,
        zmax=limit,
        colorbar={"title": "effect"},
    )
    figure.update_xaxes(title_text="position", type="category")
    figure.update_yaxes(type="category")
    return _titled(figure, sweep, len(order), "strongest site of each cell" * (rows == "layer"))


def sweep_bars(sweep: Sweep, k: int = 20, tokens: Sequence[str] | None = None) -> "go.Figure":
    """Draw the k patches of largest |effect| as bars, the largest on top.

    Args:
        sweep: the results.
        k: how many, 100 at most.
        tokens: as for `sweep_heatmap`.

    Returns:
        A plotly figure.

    Raises:
        InputError: the sweep is empty, k is too large, or tokens are too few.
        InputError: k is not a positive number.
        ImportError: plotly is not installed.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching, viz
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [5, 7],
        ...                        "name": ["L0N5", "L0N7"], "position": 2, "value": [2.0, -1.0]})
        >>> sweep = patching.Sweep(values, part="z", direction="denoise", metric="logit_diff",
        ...                           clean_value=3.0, corrupted_value=-1.0, n_prompts=1, model="m")
        >>> viz.sweep_bars(sweep, k=1).data[0].y
        ('L0N5 at 2',)
    """
    frame = _effects(sweep)
    top = sweep.top(k)
    if len(top) > MOST_ROWS:
        refuse(f"got k={k}; expected {MOST_ROWS} at most")
    frame = frame.loc[top.index]
    frame["label"] = [
        f"{name} at {_position(position, tokens)}"
        for name, position in frame[["name", "position"]].to_numpy()
    ]
    if sweep.rows.has_prompts:  # else bars of the same name would be drawn in one place
        frame["label"] += ", prompt " + frame["prompt"].astype(str)
    figure = empty_figure()
    for kind, part in frame.groupby("kind", observed=True, sort=False):
        figure.add_bar(
            x=part["effect"].tolist(),
            y=part["label"].tolist(),
            orientation="h",
            name=plotly_text(str(kind)),
            marker_color=HEAD_COLOURS.get(str(kind), _OTHER),
            customdata=part["value"].tolist(),
            hovertemplate="%{y}<br>effect %{x:.4g}<br>metric %{customdata:.4g}<extra></extra>",
        )
    figure.update_xaxes(title_text="effect", zeroline=True, zerolinecolor="#444")
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=frame["label"].tolist()[::-1]
    )
    figure.update_layout(showlegend=True)
    return _titled(figure, sweep, len(frame), f"{len(frame)} of {len(sweep)} patches")


def _effects(sweep: Sweep) -> pd.DataFrame:
    """Return the sweep's rows with their effect, the strongest first; ties keep their order."""
    refuse(*["the sweep has no rows"] * (not len(sweep)))
    frame = sweep.to_frame().assign(effect=sweep.effect)
    for column in ("name", "kind"):
        frame[column] = frame[column].astype(str)
    order = frame["effect"].abs().sort_values(ascending=False, kind="stable").index
    return frame.loc[order]


def _position(position: int | str, tokens: Sequence[str] | None) -> str:
    if tokens is None or isinstance(position, str):
        return str(position)
    reasons = token_reasons(tokens)
    if not reasons and not -len(tokens) <= position < len(tokens):
        reasons = [f"got {len(tokens)} tokens; the sweep has position {position}"]
    refuse(*reasons)
    return f"{position} {plotly_text(tokens[position])}"


def _titled(figure: "go.Figure", sweep: Sweep, n_rows: int, note: str) -> "go.Figure":
    method = "measured" if sweep.method == MEASURED else f"estimated by {sweep.method}"
    parts = [f"{sweep.model}: {sweep.part}, {sweep.direction}", sweep.metric, method, note]
    return style_figure(
        figure,
        plotly_text(" · ".join(part for part in parts if part)),
        height=max(400, 220 + 22 * n_rows),
        margin={"l": 130, "b": 110},
    )
