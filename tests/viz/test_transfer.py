"""Tests of the heatmap of circuits and tasks: correct rows and columns, and readable numbers."""

import numpy as np
import pandas as pd
import pytest

from attn_only_lens import viz
from attn_only_lens.errors import InputError

MATRIX = pd.DataFrame(
    [[0.95, 0.1, -0.3], [0.2, 1.4, 0.0]], ["a <b>", "c"], ["x", "y", "z"], dtype=float
)


def test_each_entry_stands_at_its_circuit_and_task():
    figure = viz.transfer_heatmap(MATRIX)
    (drawn,) = figure.data
    cells = {(y, x): drawn.z[i][j] for i, y in enumerate(drawn.y) for j, x in enumerate(drawn.x)}
    assert cells["c", "y"] == 1.4
    assert cells["a &lt;b&gt;", "z"] == -0.3
    assert len(cells) == MATRIX.size
    assert figure.layout.yaxis.autorange == "reversed"  # the first circuit is on top, as in print
    assert (drawn.zmin, drawn.zmid, drawn.zmax) == (-1.4, 0, 1.4)
    small = viz.transfer_heatmap(MATRIX / 2).data[0]
    assert small.zmax == 1  # control: a weak matrix does not look strong


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        (MATRIX.to_numpy(), "got a ndarray; expected a frame"),
        (MATRIX.iloc[:0], "got a 0 × 3 matrix"),
        (MATRIX.replace(0.1, np.nan), "not finite"),
        (MATRIX.astype(object).replace(0.1, "x"), "not finite"),
        (pd.concat([MATRIX, MATRIX]), "got 'a <b>' twice"),
    ],
)
def test_what_cannot_be_read_is_refused(matrix, said):
    with pytest.raises(InputError, match=said):
        viz.transfer_heatmap(matrix)
