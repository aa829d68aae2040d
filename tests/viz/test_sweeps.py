"""Sweeps as heatmaps and bars: each cell and bar is the effect that the sweep holds."""

import re

import numpy as np
import pandas as pd
import pytest
from browser import needs_browser
from random_sweeps import POSITIONS, SITES, sweep, values

from attn_only_lens import InputError, viz

TEXTS = ["<b>x</b>", "</script>", " the", "\n", "&lt;"]
LABELS = ["0 <b>x</b>", "1 </script>", "2  the", "3 ↵", "4 &lt;"]


def strongest(found, rows):
    """By hand: of each row and position the effect that is furthest from 0, and whose it is."""
    best = {}
    for row in found.frame.to_dict("records"):
        effect = row["score"] - found.baseline
        kind = {"attention": "heads", "neuron": "neurons"}[row["kind"]]
        key = row["name"] if rows == "name" else f"L{row['layer']} {kind}"
        if abs(effect) > abs(best.get((key, row["position"]), (0, ""))[0]):
            best[key, row["position"]] = effect, row["name"]
    return best


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("rows", ["layer", "name"])
def test_heatmap(rows, direction):
    found = sweep(direction=direction)
    (drawn,) = viz.sweep_heatmap(found, rows).data
    expected = strongest(found, rows)
    assert drawn.z.shape == ({"layer": 2, "name": SITES}[rows], POSITIONS)
    for i, row in enumerate(drawn.y):
        for position in range(POSITIONS):
            effect, name = expected[row, position]
            assert drawn.z[i, position] == pytest.approx(effect, rel=1e-14)
            assert drawn.customdata[i, position] == name
    assert drawn.zmid == 0
    assert drawn.zmax == -drawn.zmin == pytest.approx(found.effect.abs().max())


def test_layers_go_up_and_names_go_down():
    assert viz.sweep_heatmap(sweep()).data[0].y == ("L0 heads", "L1 neurons")
    top = sweep().top(1)["name"].iloc[0]
    assert viz.sweep_heatmap(sweep(), "name").data[0].y[-1] == top  # plotly draws from below


def test_a_cell_without_a_patch_is_empty():
    frame = values()
    frame = frame[~((frame["layer"] == 0) & (frame["position"] == 3))]
    drawn = viz.sweep_heatmap(sweep(frame=frame)).data[0]
    assert np.isnan(drawn.z[0]).tolist() == [False, False, False, True, False]


def test_roles_are_in_the_order_asked_for_and_prompts_apart():
    roles = ["subject", "end", "attractor"]
    assert list(viz.sweep_heatmap(sweep(frame=values(positions=roles))).data[0].x) == roles
    frame = values().assign(prompt=0, unpatched=0.5)
    both = sweep(frame=pd.concat([frame, frame.assign(prompt=1)]))
    with pytest.raises(InputError, match=r'sweep.query\("prompt == 0"\)'):
        viz.sweep_heatmap(both)
    viz.sweep_heatmap(both.query("prompt == 0"))
    bars = viz.sweep_bars(both, k=2).data
    assert {label for bar in bars for label in bar.y} == {
        f"{name} at {position}, prompt {prompt}"
        for name, position, prompt in both.top(2)[["name", "position", "prompt"]].to_numpy()
    }


def test_bars():
    found = sweep(direction="noise")
    figure = viz.sweep_bars(found, k=7)
    top = found.top(7)
    wanted = [f"{name} at {at}" for name, at in top[["name", "position"]].to_numpy()]
    assert figure.layout.yaxis.categoryarray == tuple(wanted[::-1])
    bars = {y: x for part in figure.data for y, x in zip(part.y, part.x, strict=True)}
    assert [bars[label] for label in wanted] == pytest.approx((top["score"] - 1.0).tolist())
    assert {part.name for part in figure.data} <= {"attention", "neuron"}


def test_the_title_says_what_it_is_of():
    measured = viz.sweep_bars(sweep()).layout.title.text
    assert measured.startswith("&lt;tiny&gt;: z, denoise · logit_diff(")
    assert "measured · 20 of 65 patches" in measured
    assert "estimated by atp" in viz.sweep_bars(sweep(method="atp")).layout.title.text


@pytest.mark.parametrize("draw", [viz.sweep_heatmap, viz.sweep_bars])
def test_refused(draw):
    with pytest.raises(InputError, match="no rows"):
        draw(sweep().query("layer == 5"))
    with pytest.raises(InputError, match=r"got 4 tokens; the sweep has position 4"):
        draw(sweep(), tokens=TEXTS[:4])
    with pytest.raises(InputError, match="got a str for tokens"):
        draw(sweep(), tokens="text")


def test_refused_too_many():
    with pytest.raises(InputError, match="expected 'layer' or 'name'"):
        viz.sweep_heatmap(sweep(), "head")
    with pytest.raises(InputError, match="expected 1 or more"):
        viz.sweep_bars(sweep(), k=0)
    many = values().iloc[:1].loc[[0] * 101].assign(index=range(101))
    many["name"] = [f"L0N{i}" for i in range(101)]
    for call in (lambda s: viz.sweep_heatmap(s, "name"), lambda s: viz.sweep_bars(s, k=101)):
        with pytest.raises(InputError, match=r"101.*100 at most"):
            call(sweep(frame=many))
    assert len(viz.sweep_heatmap(sweep(frame=many.iloc[:100]), "name").data[0].y) == 100


@needs_browser
@pytest.mark.parametrize("draw", [viz.sweep_heatmap, viz.sweep_bars])
def test_in_a_browser(opened, draw):
    page = opened(draw(sweep(), tokens=TEXTS))
    page.wait("document.querySelectorAll('.xtick').length > 0")
    ticks = page.texts(".xtick text" if draw is viz.sweep_heatmap else ".ytick text")
    if draw is viz.sweep_heatmap:
        assert [" ".join(tick.split()) for tick in ticks] == [" ".join(x.split()) for x in LABELS]
    else:
        assert len(ticks) == 20
        assert any(re.fullmatch(r"L\d[HN]\d+ at 1 </script>", tick) for tick in ticks)
    assert page.texts(".gtitle") == [
        "<tiny>: z, denoise · logit_diff(' Mary', \" John\") · measured · "
        + ("strongest site of each cell" if draw is viz.sweep_heatmap else "20 of 65 patches")
    ]
