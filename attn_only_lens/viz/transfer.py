"""The faithfulness of circuits on other tasks than their own, as a heatmap."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from attn_only_lens.viz.checks import refuse
from attn_only_lens.viz.figures import DIVERGING, empty_figure, plotly_text, style_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MOST = 60
"""Rows or columns whose numbers one can still read."""


def transfer_heatmap(matrix: pd.DataFrame) -> "go.Figure":
    """Draw the faithfulness of each circuit on each task, with its number in the cell.

    Args:
        matrix: of `circuits.transfer`: a row for each circuit, a column for each task.

    Returns:
        A plotly figure. White is 0: a circuit that keeps nothing of the effect of all sites.

    Raises:
        InputError: no frame, or an empty one; names that repeat; entries that are not finite.
        ImportError: plotly is not installed.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import viz
        >>> matrix = pd.DataFrame({"nurse": [0.9, 0.1], "judge": [0.2, 1.0]}, ["nurse", "judge"])
        >>> viz.transfer_heatmap(matrix).data[0].z.tolist()
        [[0.9, 0.2], [0.1, 1.0]]
    """
    refuse(*_reasons(matrix))
    rows, columns = ([plotly_text(str(name)) for name in axis] for axis in matrix.axes)
    faithfulness = matrix.to_numpy(dtype=float)
    limit = max(1.0, float(abs(faithfulness).max()))
    figure = empty_figure().add_heatmap(
        z=faithfulness,
        x=columns,
        y=rows,
        texttemplate="%{z:.2f}",
        hovertemplate="circuit of %{y}<br>on %{x}<br>faithfulness %{z:.4g}<extra></extra>",
        colorscale=DIVERGING,
        zmid=0,
        zmin=-limit,
        zmax=limit,
        colorbar={"title": "faithfulness"},
        xgap=1,
        ygap=1,
    )
    shared = {"type": "category", "automargin": True, "tickmode": "linear", "showgrid": False}
    figure.update_xaxes(title="measured on", **shared, autotickangles=[0, -45, -90])
    figure.update_yaxes(title="circuit found on", **shared, autorange="reversed")
    return style_figure(
        figure,
        "Faithfulness of each circuit (row) on each task (column)",
        height=max(300, 200 + 34 * len(rows)),
        margin={"l": 60, "r": 20, "t": 60, "b": 60},
    )


def _reasons(matrix: object) -> list[str]:
    if not isinstance(matrix, pd.DataFrame):
        return [f"got a {type(matrix).__name__}; expected the frame of circuits.transfer"]
    if not 0 < min(matrix.shape) <= max(matrix.shape) <= _MOST:
        return [f"got {matrix.shape[0]} × {matrix.shape[1]} entries; expected 1 to {_MOST} of each"]
    names = [axis.map(str) for axis in matrix.axes]
    reasons = [f"got {name!r} twice" for axis in names for name in axis[axis.duplicated()].unique()]
    numbers = matrix.apply(pd.to_numeric, errors="coerce").to_numpy(dtype=float)
    if not np.isfinite(numbers).all():
        reasons.append("got entries that are not finite numbers; expected faithfulness")
    return reasons
