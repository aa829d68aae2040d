"""Tests of a small circuit's layout against pixels worked out by hand."""

import pytest

from attn_only_lens.viz.coordinates import Boxes, place


def test_positions_by_hand():
    """Two rows and two tokens: boxes 50 wide, tokens 20, no spare room."""
    boxes = Boxes(row=[0, 0, 1, 1], column=[0, 1, 0, 1], width=[50.0] * 4, overhangs=[False] * 4)
    layout = place(boxes, range(4), [20.0, 20.0], width=0.0, height=0.0)
    # A column has a box (50), the space next to it (12) and the gap between columns (10): 72. The
    # first one starts after the row names (96), and 14 pixels follow the last one.
    assert [layout.x[node] for node in range(4)] == pytest.approx([132, 204, 132, 204])
    assert [column[2:] for column in layout.columns] == [(96, 72), (168, 72)]
    assert layout.width == pytest.approx(96 + 2 * 72 + 14)
    # From the top: 12, two lines of 34 with a gap of 6 between them, and the axis (40).
    assert [layout.y[node] for node in range(4)] == pytest.approx([69, 69, 29, 29])
    assert layout.height == pytest.approx(12 + 34 + 6 + 34 + 40)
