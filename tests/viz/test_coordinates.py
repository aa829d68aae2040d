"""Tests of a small circuit's layout against pixels worked out by hand."""

import pytest

from attn_only_lens.viz import coordinates
from attn_only_lens.viz.coordinates import Boxes, place


def two_by_two():
    """Return a layout of two rows and two tokens: boxes 50 wide, tokens 20, no spare room."""
    boxes = Boxes(row=[0, 0, 1, 1], column=[0, 1, 0, 1], width=[50.0] * 4, overhangs=[False] * 4)
    return place(boxes, range(4), [20.0, 20.0], width=0.0, height=0.0)


def test_positions_by_hand():
    layout = two_by_two()
    # A column has a box (50), the space next to it (12) and the gap between columns (10): 72. The
    # first one starts after the row names (96), and 14 pixels follow the last one.
    assert [layout.x[node] for node in range(4)] == pytest.approx([132, 204, 132, 204])
    assert [column[2:] for column in layout.columns] == [(96, 72), (168, 72)]
    assert layout.width == pytest.approx(96 + 2 * 72 + 14)
    # From the top: 12, two lines of 34 with a gap of 6 between them, and the axis (40).
    assert [layout.y[node] for node in range(4)] == pytest.approx([69, 69, 29, 29])
    assert layout.height == pytest.approx(12 + 34 + 6 + 34 + 40)


def test_boxes_of_neighbours_are_apart():
    layout = two_by_two()
    assert layout.x[1] - layout.x[0] - 50 >= 20  # between the boxes of two columns
    assert layout.y[0] - layout.y[2] - coordinates.BOX >= 18  # between the boxes of two rows


@pytest.mark.parametrize("constant", ["_COLUMN_GAP", "_ROW_GAP"])
def test_another_gap_is_another_layout(constant, monkeypatch):
    monkeypatch.setattr(coordinates, constant, getattr(coordinates, constant) - 1)
    with pytest.raises(AssertionError):
        test_positions_by_hand()
