"""Draw plotly figures of sweeps (patching results), and of circuits' transfer between tasks.

Figures of a sweep show `Sweep.effect`: the score of the patched run minus the score of the same run
without a patch. With direction "denoise", the latter is 0, so the effect is called the score, as in
tables. Patches without effect are white. For several prompts, the effect is the mean, with
standard errors as error bars.
"""

from collections.abc import Iterable
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from attn_only_lens.arguments import POSITIVE, a_type, is_count
from attn_only_lens.heads.host import HEAD_KINDS, HEAD_PLURALS
from attn_only_lens.patching.over_prompts import SPREAD
from attn_only_lens.patching.results import MEASURED, Sweep
from attn_only_lens.viz.page import import_extra, model_title, refuse, visible_token

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_ROWS = 100
"""The maximum number of heatmap rows, or of bars, with readable names."""
MOST_LABELS = 60
"""The maximum number of heatmap positions that all get a label, and of rows with values."""
MOST_NAMED = 20
"""The maximum number of positions at which heatmap cells have room for names."""
HEAD_COLOURS = {
    "attention": "#0072B2",
    "neuron": "#E69F00",
    "feature": "#009E73",
    "skip": "#CC79A7",
    "error": "#555555",
    "router": "#56B4E9",
}  # distinguishable for colour-blind readers
_DIVERGING = ("#b2182b", "#f4a582", "#ffffff", "#92c5de", "#2166ac")  # red (negative) to blue
_OTHER = "#666666"
_STRONG = 0.05  # a cell shows its site's name if |effect| is at least this share of the largest
_PARTS = {"z": "the output z", "q": "the query", "k": "the key"}
_PATCHES = {
    "denoise": "{} of one site at a time is copied from the clean into the corrupted run",
    "noise": "{} of one site at a time is copied from the corrupted into the clean run",
    "zero": "{} of one site at a time is set to zero",
    "mean": "{} of one site at a time is set to its mean",
    "resample": "{} of one site at a time comes from another prompt",
    "bias": "one neuron at a time attends only to the bias token",
}  # by direction
_LINE = 95  # the maximum number of characters per line of a title


def heatmap(result: Sweep | pd.DataFrame, rows: Literal["layer", "name"] = "layer") -> "go.Figure":
    """Draw a heatmap of a sweep's effects, or of the faithfulness of circuits on several tasks.

    A sweep is drawn by layer and position, or by head and position. The effects of single patches
    do not add up, so a layer's cell shows the effect of its strongest site. A cell with a large
    effect also shows the site's name, if there is room; hover over other cells to see their sites'
    names. The labels of positions contain tokens: the clean token and, where the prompts differ,
    the corrupted token.

    Args:
        result: a sweep; `sweep.query` selects some of its rows, and if there is a row for each
            prompt, the mean over prompts is drawn. Or the frame from `circuits.transfer`, with a
            row per circuit and a column per task; a white cell means faithfulness 0: the circuit
            preserves none of the effect.
        rows: for a sweep, "layer" for one row per layer and kind: heads, neurons or features, skip
            nodes, error nodes; "name" for one row per head, neuron or feature, up to 100, with the
            strongest on top.

    Returns:
        A plotly figure, which `viz.write` writes to a page that works offline.

    Raises:
        InputError: the sweep is empty, or has too many heads; `rows` has another value; several
            prompts of different lengths, with numbers from 0 as positions; the frame is empty, or
            has repeated names or entries that are not finite.
        ImportError: plotly is not installed.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching, viz
        >>> from attn_only_lens.patching.results import Sweep
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [5, 7],
        ...                        "name": ["L0N5", "L0N7"], "position": 2, "value": [2.0, -1.0]})
        >>> sweep = Sweep(values, part="z", direction="denoise", metric="logit_diff",
        ...                           clean_value=3.0, corrupted_value=-1.0, n_prompts=1, model="m")
        >>> figure = viz.heatmap(sweep)
        >>> figure.data[0].y[0], float(figure.data[0].z[0][0])
        ('L0 neurons', 0.75)
        >>> matrix = pd.DataFrame({"nurse": [0.9, 0.1], "judge": [0.2, 1.0]}, ["nurse", "judge"])
        >>> viz.heatmap(matrix).data[0].z.tolist()
        [[0.9, 0.2], [0.1, 1.0]]
    """
    return _of_sweep(result, rows) if isinstance(result, Sweep) else _of_transfer(result)


def _of_sweep(sweep: Sweep, rows: str) -> "go.Figure":
    frame = _effects(sweep)
    if rows not in ("layer", "name"):
        refuse(f"got rows={rows!r}; expected 'layer' or 'name'")
    if rows == "name":
        frame["row"] = frame["name"]
        order = list(dict.fromkeys(frame["row"]))[::-1]  # plotly draws the first row at the bottom
        if len(order) > MOST_ROWS:
            refuse(f"got {len(order)} heads; expected at most {MOST_ROWS}: use sweep.query(...)")
    else:
        kinds = frame["kind"].map(lambda kind: HEAD_PLURALS.get(kind, kind))
        frame["row"] = "L" + frame["layer"].astype(str) + " " + kinds
        rank = frame["kind"].map({kind: i for i, kind in enumerate(HEAD_KINDS)})
        in_order = frame.assign(rank=rank).sort_values(["layer", "rank", "kind"])
        order = list(dict.fromkeys(in_order["row"]))
    positions = sorted(set(frame["position"]))
    if frame["position"].dtype == "category":  # keep roles in the task's order
        positions = list(frame["position"].cat.categories)
    labels = _position_labels(sweep, positions)
    frame["site"] = frame["name"].map(plotly_text)
    frame["said"] = frame["site"] + _errors_as_text(frame)
    strongest = frame.drop_duplicates(["row", "position"])  # `_effects` sorts them
    grid, sites, named = (
        strongest.pivot(index="row", columns="position", values=column).reindex(order)[positions]
        for column in ("effect", "site", "said")
    )
    limit = float(frame["effect"].abs().max()) or 1.0
    what = _effect_name(sweep)
    figure = _heatmap(
        grid,
        limit,
        {"score": "score<br>0 corrupted<br>1 clean", "effect": "effect<br>score − 1"}[what],
        "%{customdata}"
        + ", the strongest of the cell" * (rows == "layer")
        + f"<br>at %{{x}}<br>{what} %{{z:.4g}}",
        customdata=named.fillna("").to_numpy(),
        hoverongaps=False,
    )
    figure.update_traces(x=[plotly_text(labels[position]) for position in positions])
    if rows == "layer" and len(positions) <= MOST_NAMED:
        strong = grid.abs().ge(_STRONG * limit).to_numpy()
        figure.update_traces(text=np.where(strong, sites, ""), texttemplate="%{text}")
    figure.update_xaxes(
        title={"text": _position_title(sweep, labels.values()), "standoff": 12},
        tickmode="linear"
        if len(positions) <= MOST_LABELS
        else "auto",  # too many labels would overlap
        tickfont_size=12 if len(positions) <= 30 else 10,
    )
    figure.update_layout(plot_bgcolor="#e4e4e4")  # colour of cells without a patch
    notes = ["each cell shows its strongest site"] * (rows == "layer")
    notes.append(_mean_note(sweep))
    return _titled(figure, sweep, len(order) * max(14, min(32, 600 // len(order))), *notes)


def bars(sweep: Sweep, k: int = 20) -> "go.Figure":
    """Draw a bar chart of the k patches with the largest |effect|.

    If the sweep has tokens, the title lists the tokens at the bars' positions.

    Args:
        sweep: the results.
        k: the number of bars, at most 100.

    Returns:
        A plotly figure. For several prompts, error bars are standard errors of the mean; there are
        no error bars if the metric has one value for all prompts.

    Raises:
        InputError: the sweep is empty; k is not positive, or too large; several prompts of
            different lengths, with numbers from 0 as positions.
        ImportError: plotly is not installed.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching, viz
        >>> from attn_only_lens.patching.results import Sweep
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [5, 7],
        ...                        "name": ["L0N5", "L0N7"], "position": 2, "value": [2.0, -1.0]})
        >>> sweep = Sweep(values, part="z", direction="denoise", metric="logit_diff",
        ...                           clean_value=3.0, corrupted_value=-1.0, n_prompts=1, model="m")
        >>> viz.bars(sweep, k=1).data[0].y
        ('L0N5 at 2',)
    """
    frame = _effects(sweep)
    refuse(*POSITIVE.reasons(k=k))
    n_patches, frame = len(frame), frame.head(k)
    if len(frame) > MOST_ROWS:
        refuse(f"got k={k}; expected at most {MOST_ROWS}")
    labels = _position_labels(sweep, sorted(frame["position"].unique().tolist()))
    frame["label"] = (frame["name"] + " at " + frame["position"].astype(str)).map(plotly_text)
    frame["said"] = _errors_as_text(frame)
    figure, what = empty_figure(), _effect_name(sweep)
    for kind, part in frame.groupby("kind", observed=True, sort=False):
        errors = {"array": part["error"].tolist(), "thickness": 1.2, "width": 3, "color": "#222"}
        figure.add_bar(
            x=part["effect"].tolist(),
            y=part["label"].tolist(),
            orientation="h",
            name=plotly_text(HEAD_PLURALS.get(str(kind), str(kind))),
            marker_color=HEAD_COLOURS.get(str(kind), _OTHER),
            error_x=errors if part["error"].notna().any() else None,
            customdata=part[["value", "said"]].to_numpy(),
            hovertemplate=f"%{{y}}<br>{what} %{{x:.4g}}%{{customdata[1]}}<br>"
            "metric %{customdata[0]:.4g}<extra></extra>",
        )
    figure.update_xaxes(
        title_text="score: 0 for the corrupted run, 1 for the clean run"
        if what == "score"
        else "effect: score minus 1, the score without a patch",
        zeroline=True,
        zerolinecolor="#444",
    )
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=frame["label"].tolist()[::-1],
        automargin=True,
        tickmode="linear",
        ticklabelstandoff=5,
    )
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1, "yanchor": "bottom"})
    n = len(frame)
    largest = f"the {n} largest of {n_patches:,} effects" if n < n_patches else f"all {n} effects"
    notes = largest, _mean_note(sweep, bars=True)
    places = ", ".join(label.replace(": ", " (", 1) + ")" for label in labels.values())
    tokens = "" if sweep.tokens is None else f"{_token_name(sweep)}s: {places}"
    return _titled(figure, sweep, 22 * len(frame), *notes, last_line=tokens, legend=25)


def _of_transfer(matrix: pd.DataFrame) -> "go.Figure":
    refuse(*_matrix_reasons(matrix))
    rows, columns = ([plotly_text(str(name)) for name in axis] for axis in matrix.axes)
    faithfulness = pd.DataFrame(matrix.to_numpy(dtype=float), rows, columns)
    figure = _heatmap(
        faithfulness,
        max(1.0, float(faithfulness.abs().to_numpy().max())),
        "faithfulness",
        "circuit of %{y}<br>on %{x}<br>faithfulness %{z:.4g}",
        texttemplate="%{z:.2f}",
    )
    figure.update_xaxes(title="measured on")
    figure.update_yaxes(title="circuit found on", autorange="reversed")
    return style_figure(
        figure,
        "Faithfulness of each circuit (row) on each task (column)",
        height=max(300, 200 + 34 * len(rows)),
        margin={"l": 60, "r": 20, "t": 60, "b": 60},
    )


def empty_figure() -> "go.Figure":
    """Return a figure without traces."""
    import_extra("plotly.graph_objects")
    from attn_only_lens.viz.static_figure import StaticFigure  # needs plotly

    return StaticFigure()


def style_figure(figure: "go.Figure", title: str, **layout: Any) -> "go.Figure":
    """Set the title of a figure, and the style that all figures share."""
    return figure.update_layout(
        title={"text": title, "font_size": 15}, template="plotly_white", **layout
    )


def plotly_text(raw: str) -> str:
    """Escape a string for plotly, which interprets some HTML, and make white space visible."""
    return escape(" ".join(map(visible_token, raw.split(" "))), quote=False)


def _heatmap(frame: pd.DataFrame, limit: float, title: str, hover: str, **more: Any) -> "go.Figure":
    """Draw a frame as a heatmap whose colours range from -limit to limit."""
    figure = empty_figure().add_heatmap(
        z=frame.to_numpy(),
        x=frame.columns.tolist(),
        y=frame.index.tolist(),
        hovertemplate=f"{hover}<extra></extra>",
        colorscale=_DIVERGING,
        **{"zmid": 0, "zmin": -limit, "zmax": limit, "xgap": 1, "ygap": 1},
        colorbar={"title": title, "thickness": 15},
        **more,
    )
    shared = {"type": "category", "automargin": True, "tickmode": "linear", "showgrid": False}
    return figure.update_xaxes(**shared, autotickangles=[0, -45, -90]).update_yaxes(**shared)


def _effects(sweep: Sweep) -> pd.DataFrame:
    """Return each patch's effect and standard error, sorted by |effect| (ties keep their order)."""
    if not isinstance(sweep, Sweep):
        refuse(f"got {a_type(sweep)}; expected a sweep")
    refuse(*["the sweep has no rows"] * (not len(sweep)), *_length_reasons(sweep))
    frame = sweep.to_frame().assign(effect=sweep.effect)
    for column in ("name", "kind"):
        frame[column] = frame[column].astype(str)
    if sweep.has_prompts:
        site = ["layer", "kind", "name", "position"]
        of_site = frame.groupby(site, sort=False, observed=True)[["effect", "value"]]
        frame = of_site.mean().assign(error=of_site.sem()["effect"]).reset_index()
    else:
        frame["error"] = frame.get(SPREAD[1], np.nan)
    return frame.sort_values("effect", key=abs, ascending=False, kind="stable")


def _length_reasons(sweep: Sweep) -> list[str]:
    """Return a reason if effects would be means over different words of the prompts."""
    positions = sweep.frame["position"].unique().tolist()
    if sweep.tokens is None or not any(map(is_count, positions)):
        return []
    rows, prompts = sweep.tokens.clean, sweep.frame.get("prompt")
    shown = rows if prompts is None else [rows[i] for i in prompts.unique()]
    if len({tuple(token is None for token in row) for row in shown}) <= 1:
        return []
    return [
        "the prompts differ in length, so the same position holds different words in them; "
        "expected positions by role, or one prompt: sweep.query('prompt == 0')"
    ]


def _effect_name(sweep: Sweep) -> str:
    """Return the name of the plotted numbers; a score of 0 without a patch makes them scores."""
    return "effect" if sweep.baseline else "score"


def _errors_as_text(frame: pd.DataFrame) -> "pd.Series[str]":
    return frame["error"].map(lambda error: "" if np.isnan(error) else f" ± {error:.2g}")


def _position_labels(sweep: Sweep, positions: list[int | str]) -> dict[int | str, str]:
    """Return a label for each position: its number or role, and the tokens at the position."""
    if sweep.tokens is None:
        return {position: str(position) for position in positions}
    numbers = sweep.frame.get("prompt")
    prompts = None if numbers is None else np.unique(numbers).tolist()
    text = sweep.tokens.text
    texts = [text(position, prompts, visible_token) for position in positions]
    return {
        position: f"{position}: {text}" if text else str(position)
        for position, text in zip(positions, texts, strict=True)
    }


def _position_title(sweep: Sweep, labels: Iterable[str]) -> str:
    if sweep.tokens is None:
        return "position"
    differ = bool(sweep.tokens.corrupted) and any(" / " in label for label in labels)
    place = "role" if any(isinstance(x, str) for x in sweep.frame["position"]) else "position"
    different = " (clean / corrupted where they differ)" * differ
    return f"{place}: {_token_name(sweep)}{different}"


def _token_name(sweep: Sweep) -> str:
    """Return "token id" if a model has no tokenizer, so that token ids stand for their texts."""
    texts = [text for row in sweep.tokens.clean for text in row if text] if sweep.tokens else []
    return "token id" if texts and all(map(str.isdecimal, texts)) else "token"


def _mean_note(sweep: Sweep, bars: bool = False) -> str:
    """Return a note for the title that explains the mean over prompts and the error bars."""
    numbers = sweep.frame
    n = len(np.unique(numbers["prompt"])) if "prompt" in numbers else sweep.n_prompts
    if n == 1:
        return ""
    mean = f"mean over {n} prompts"
    if not bars:
        return mean
    if not sweep.has_prompts and np.isnan(numbers.get(SPREAD[1], np.full(1, np.nan))).all():
        return f"{mean}, without error bars: the metric has one value for all prompts"
    return f"{mean} ± its standard error"


def _titled(
    figure: "go.Figure",
    sweep: Sweep,
    height: int,
    *notes: str,
    last_line: str = "",
    legend: int = 0,
) -> "go.Figure":
    model = model_title(sweep.model)
    title = f"{model}: " * bool(model) + sweep.clean_and_corrupted
    part = _PARTS.get(sweep.part, f"the {sweep.part}")
    patched = _PATCHES[sweep.direction].format(part)
    method = "" if sweep.method == MEASURED else f"estimated by attribution ({sweep.method})"
    below = "; ".join(note for note in (sweep.metric, patched, method, *notes) if note)
    lines = [plotly_text(line) for line in wrap(title, _LINE)]
    lines += [
        f"<span style='font-size:12px'>{plotly_text(line)}</span>"
        for small in (below, last_line)
        for line in wrap(small, _LINE * 15 // 12)
    ]
    top = 50 + 20 * len(lines) + legend
    return style_figure(
        figure,
        "<br>".join(lines),
        height=max(300, 100 + top + height),
        margin={"l": 60, "r": 20, "t": top, "b": 60},
    ).update_layout(title={"y": 1, "yanchor": "top", "yref": "container", "pad": {"t": 36}})


def _matrix_reasons(matrix: object) -> list[str]:
    if not isinstance(matrix, pd.DataFrame):
        return [f"got {a_type(matrix)}; expected a sweep, or a frame from circuits.transfer"]
    if {"name", "position", "value"} <= {*matrix.columns}:
        return ["got the frame of a sweep; expected the sweep itself"]
    if not 0 < min(matrix.shape) <= max(matrix.shape) <= MOST_LABELS:
        size = f"{matrix.shape[0]} × {matrix.shape[1]}"
        return [f"got a {size} matrix; expected 1 to {MOST_LABELS} circuits and tasks"]
    names = [axis.map(str) for axis in matrix.axes]
    reasons = [f"got {name!r} twice" for axis in names for name in axis[axis.duplicated()].unique()]
    numbers = matrix.apply(pd.to_numeric, errors="coerce").to_numpy(dtype=float)
    if not np.isfinite(numbers).all():
        reasons.append("got entries that are not finite numbers; expected faithfulness")
    return reasons
