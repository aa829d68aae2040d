"""Sweeps as a heatmap and as ranked bars, of the effect

    effect = score - score of the run that is patched into        (`Sweep.effect`)

so that a patch without effect is white, whatever the direction of the sweep. Of several prompts it
is their mean, and the standard error of that mean is drawn as an error bar:

    means                     the sweep's own `score_standard_error`
    rows of each prompt       s/√n of the effects of the n prompts; their mean weighs them alike
"""

from collections.abc import Iterable
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from attn_only_lens.arguments import is_count
from attn_only_lens.patching import Sweep
from attn_only_lens.patching.over_prompts import SPREAD
from attn_only_lens.patching.results import MEASURED
from attn_only_lens.viz.checks import refuse
from attn_only_lens.viz.figures import (
    DIVERGING,
    HEAD_COLOURS,
    empty_figure,
    plotly_text,
    style_figure,
)
from attn_only_lens.viz.page import HEAD_PLURALS, model_title, visible_token

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_ROWS = 100
"""Rows of a heatmap, or bars, whose names one can still read."""

MOST_LABELS = 60
"""Positions of a heatmap that are all labelled."""

_OTHER = "#666666"
_LINE = 95  # characters of a title, which are 860 px at most


def sweep_heatmap(sweep: Sweep, rows: Literal["layer", "name"] = "layer") -> "go.Figure":
    """Draw the effect of patches by layer and position, or by head and position.

    Effects of single patches do not add up, so the cell of a layer shows not their sum but the
    effect of its strongest site, which is named under the pointer. Positions are labelled by the
    tokens that the sweep was run on; where the corrupted prompt has another token, it follows after
    "/".

    Args:
        sweep: the results; `sweep.query` and `sweep.top` narrow them. Of rows of each prompt, the
            mean over prompts is drawn.
        rows: "layer", a row for the heads and one for the neurons of each layer, upward; "name", a
            row for each of up to 100 heads, the strongest on top.

    Returns:
        A plotly figure; `viz.write_html` writes it to a page that works offline.

    Raises:
        InputError: the sweep is empty, or has too many heads; `rows` is another word.
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
    labels = _position_labels(sweep, positions)
    strongest = frame.drop_duplicates(["row", "position"])  # the first is: see _effects
    grid = strongest.pivot(index="row", columns="position", values="effect")
    strongest = strongest.assign(
        said=strongest["name"].map(plotly_text) + _errors_as_text(strongest)
    )
    named = strongest.pivot(index="row", columns="position", values="said")
    grid, named = (frame_.reindex(index=order, columns=positions) for frame_ in (grid, named))
    limit = float(frame["effect"].abs().max()) or 1.0
    figure = empty_figure().add_heatmap(
        z=grid.to_numpy(),
        x=[labels[position] for position in positions],
        y=order,
        customdata=named.fillna("").to_numpy(),
        hoverongaps=False,
        hovertemplate="%{x}<br>effect %{z:.4g}<br>%{customdata}<extra></extra>",
        colorscale=DIVERGING,
        zmid=0,
        zmin=-limit,
        zmax=limit,
        colorbar={"title": "effect"},
        xgap=1,
        ygap=1,
    )
    figure.update_xaxes(
        title={"text": _position_title(sweep, labels.values()), "standoff": 12},
        type="category",
        automargin=True,
        tickmode="linear" if len(positions) <= MOST_LABELS else "auto",  # every position, or some
        tickfont_size=12 if len(positions) <= 30 else 10,
        autotickangles=[0, -45, -90],
        showgrid=False,
    )
    figure.update_yaxes(type="category", automargin=True, tickmode="linear", showgrid=False)
    figure.update_layout(plot_bgcolor="#e4e4e4")  # where nothing was patched
    notes = ["strongest site of each cell"] * (rows == "layer") + [_mean_note(sweep)]
    return _titled(figure, sweep, (14 if len(order) > 30 else 20) * len(order), *notes)


def sweep_bars(sweep: Sweep, k: int = 20) -> "go.Figure":
    """Draw the k patches of largest |effect| as bars, the largest on top.

    Of several prompts, an error bar is the standard error of the mean over prompts, and the title
    says so. There is none where the metric is one number of all prompts, and of one prompt.

    Args:
        sweep: the results.
        k: how many, 100 at most.

    Returns:
        A plotly figure.

    Raises:
        InputError: the sweep is empty, or k is too large.
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
    if not is_count(k, 1):
        refuse(f"got k={k!r}; expected 1 or more")
    n_patches, frame = len(frame), frame.head(k)
    if len(frame) > MOST_ROWS:
        refuse(f"got k={k}; expected {MOST_ROWS} at most")
    positions = _position_labels(sweep, list(dict.fromkeys(frame["position"])))
    frame["label"] = [
        f"{plotly_text(name)} at {positions[position]}"
        for name, position in frame[["name", "position"]].to_numpy()
    ]
    frame["said"] = _errors_as_text(frame)
    figure = empty_figure()
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
            hovertemplate="%{y}<br>effect %{x:.4g}%{customdata[1]}<br>"
            "metric %{customdata[0]:.4g}<extra></extra>",
        )
    figure.update_xaxes(
        title_text="effect on the score (0 corrupted, 1 clean)", zeroline=True, zerolinecolor="#444"
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
    notes = f"{len(frame)} of {n_patches} patches", _mean_note(sweep, bars=True)
    return _titled(figure, sweep, 22 * len(frame), *notes, legend=25)


def _effects(sweep: Sweep) -> pd.DataFrame:
    """Return the effect of each patch and its error, the strongest first; ties keep their order."""
    refuse(*["the sweep has no rows"] * (not len(sweep)))
    frame = sweep.to_frame().assign(effect=sweep.effect)
    for column in ("name", "kind"):
        frame[column] = frame[column].astype(str)
    if sweep.has_prompts:
        site = ["layer", "kind", "name", "position"]
        of_site = frame.groupby(site, sort=False, observed=True)[["effect", "value"]]
        frame = of_site.mean().assign(error=of_site.sem()["effect"]).reset_index()
    else:
        frame["error"] = frame.get(SPREAD[1], np.nan)
    order = frame["effect"].abs().sort_values(ascending=False, kind="stable").index
    return frame.loc[order]


def _errors_as_text(frame: pd.DataFrame) -> "pd.Series[str]":
    return frame["error"].map(lambda error: "" if np.isnan(error) else f" ± {error:.2g}")


def _position_labels(sweep: Sweep, positions: list[int | str]) -> dict[int | str, str]:
    """Return the label of each position: itself, and the tokens that are there."""
    if sweep.tokens is None:
        return {position: plotly_text(str(position)) for position in positions}
    numbers = sweep.frame.get("prompt")
    prompts = None if numbers is None else np.unique(numbers).tolist()
    texts = {
        position: sweep.tokens.text(position, prompts, visible_token) for position in positions
    }
    return {item: plotly_text(f"{item} {text}".rstrip()) for item, text in texts.items()}


def _position_title(sweep: Sweep, labels: Iterable[str]) -> str:
    if sweep.tokens is None:
        return "position"
    differ = bool(sweep.tokens.corrupted) and any(" / " in label for label in labels)
    return f"position and token{' (clean / corrupted where they differ)' * differ}"


def _mean_note(sweep: Sweep, bars: bool = False) -> str:
    """Return the words for the mean over several prompts and its error bars."""
    numbers = sweep.frame
    n = len(np.unique(numbers["prompt"])) if "prompt" in numbers else sweep.n_prompts
    if n == 1:
        return ""
    mean = f"mean over {n} prompts"
    if not bars:
        return mean
    if not sweep.has_prompts and np.isnan(numbers.get(SPREAD[1], np.full(1, np.nan))).all():
        return f"{mean}, without error bars: the metric is one number of all prompts"
    return f"{mean} ± its standard error"


def _titled(
    figure: "go.Figure", sweep: Sweep, height: int, *notes: str, legend: int = 0
) -> "go.Figure":
    method = "measured" if sweep.method == MEASURED else f"estimated by {sweep.method}"
    title = f"{model_title(sweep.model)}: {sweep.part}, {sweep.direction} · {sweep.metric}"
    below = " · ".join(note for note in (method, *notes) if note)
    lines = [plotly_text(line) for line in wrap(title, _LINE)]
    lines += [
        f"<span style='font-size:12px'>{plotly_text(line)}</span>" for line in wrap(below, _LINE)
    ]
    top = 50 + 20 * len(lines) + legend
    return style_figure(
        figure,
        "<br>".join(lines),
        height=max(300, 100 + top + height),
        margin={"l": 60, "r": 20, "t": top, "b": 60},
    ).update_layout(title={"y": 1, "yanchor": "top", "yref": "container", "pad": {"t": 36}})
