"""Tests of sweeps as heatmaps and bars, and of the heatmap of circuits and tasks."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from browser import needs_browser
from random_sweeps import POSITIONS, SITES, TOKENS, sweep, values

from attn_only_lens import viz
from attn_only_lens.errors import InputError
from attn_only_lens.patching.prompt_tokens import PromptTokens

LABELS = ["0: <b>x</b>", "1: </script>", "2: ·the / ·a", "3: ↵", "4: &lt;"]


def strongest(sweep_of, rows):
    """Return the effect furthest from 0, and its head, for each row and position."""
    best = {}
    for row in sweep_of.frame.to_dict("records"):
        effect = row["score"] - sweep_of.baseline
        kind = {"attention": "heads", "neuron": "neurons"}[row["kind"]]
        key = row["name"] if rows == "name" else f"L{row['layer']} {kind}"
        if abs(effect) > abs(best.get((key, row["position"]), (0, ""))[0]):
            best[key, row["position"]] = effect, row["name"]
    return best


@pytest.mark.parametrize(("rows", "direction"), [("layer", "denoise"), ("name", "noise")])
def test_heatmap(rows, direction):
    result = sweep(direction=direction)
    (drawn,) = viz.heatmap(result, rows).data
    expected = strongest(result, rows)
    assert drawn.z.shape == ({"layer": 2, "name": SITES}[rows], POSITIONS)
    for i, row in enumerate(drawn.y):
        for position in range(POSITIONS):
            effect, name = expected[row, position]
            assert drawn.z[i, position] == pytest.approx(effect, rel=1e-14)
            assert drawn.customdata[i, position] == name
            if rows == "layer":  # the text in the cell
                strong = abs(effect) >= 0.05 * result.effect.abs().max()
                assert drawn.text[i, position] == (name if strong else "")
    name, *meaning = drawn.colorbar.title.text.split("<br>")
    assert (name, len(meaning)) == {"denoise": ("score", 2), "noise": ("effect", 1)}[direction]
    assert drawn.zmid == 0
    assert drawn.zmax == -drawn.zmin == pytest.approx(result.effect.abs().max())


def test_roles_are_in_the_order_asked_for():
    roles = ["subject", "end", "attractor"]
    assert list(viz.heatmap(sweep(frame=values(positions=roles))).data[0].x) == roles
    result = sweep(frame=values(positions=["subject", "all"]), tokens=TOKENS)
    assert list(viz.heatmap(result).data[0].x) == ["subject: ·the / ·a", "all"]


def test_positions_are_labelled_by_the_tokens_of_the_prompts_that_are_drawn():
    clean = [["The", " keys", " of"], ["The", " dogs", " of"], ["My", " keys", " in"]]
    others = [["The", " key", " of"], ["The", " dog", " of"], ["My", " key", " in"]]
    tokens = PromptTokens(clean, others, {})
    frame = values(positions=[0, 1, 2, -1])
    means = sweep(frame=frame, n_prompts=3, tokens=tokens)
    assert list(viz.heatmap(means).data[0].x) == [
        *("-1: ·of, ·in", "0: The, My", "1: ·keys, ·dogs", "2: ·of, ·in")
    ]
    by_prompt = pd.concat([frame.assign(prompt=i, unpatched=0.5) for i in range(3)])
    padded = PromptTokens([clean[0], [None, *clean[1][1:]], clean[2]], others, {})
    rows = sweep(frame=by_prompt, n_prompts=3, tokens=padded)
    second = rows.query("prompt == 1")
    drawn = viz.heatmap(second)
    assert list(drawn.data[0].x) == ["-1: ·of", "0", "1: ·dogs / ·dog", "2: ·of"]
    # Columns of prompts of different lengths hold different words, so they have no mean.
    for result in (rows, rows.query("prompt > 0"), replace(means, tokens=padded)):
        for draw in (viz.heatmap, viz.bars):
            with pytest.raises(InputError, match="the prompts differ in length"):
                draw(result)
            assert draw(result.query("position == -1"))
    assert viz.heatmap(rows.query("prompt != 1"))


def test_error_bars_are_standard_errors_over_prompts():
    rng, n, span = np.random.default_rng(3), 5, 5.0
    by_prompt = pd.concat(
        [
            values().assign(prompt=i, unpatched=rng.normal(), value=rng.normal(size=65))
            for i in range(n)
        ]
    )
    result = sweep(frame=by_prompt, n_prompts=n)
    figure = viz.bars(result, k=65)
    drawn = {
        label: (x, error)
        for part in figure.data
        for label, x, error in zip(part.y, part.x, part.error_x.array, strict=True)
    }
    grid = viz.heatmap(result, "name").data[0]
    for name in by_prompt["name"].unique():
        for index in range(POSITIONS):
            rows = by_prompt[(by_prompt["name"] == name) & (by_prompt["position"] == index)]
            effects = [
                (v - u) / span for v, u in zip(rows["value"], rows["unpatched"], strict=True)
            ]
            mean = sum(effects) / n
            error = (sum((effect - mean) ** 2 for effect in effects) / (n - 1) / n) ** 0.5
            assert drawn[f"{name} at {index}"] == pytest.approx((mean, error), rel=1e-9)
            assert grid.z[grid.y.index(name), index] == pytest.approx(mean, rel=1e-9)

    means = values().assign(value_standard_error=0.1, score_standard_error=0.25)
    bars = viz.bars(sweep(frame=means)).data
    assert {error for part in bars for error in part.error_x.array} == {0.25}
    blind = viz.bars(sweep(frame=means.assign(score_standard_error=np.nan)))
    assert "without error bars" in blind.layout.title.text
    single = viz.bars(result.query("prompt == 2"))
    assert all(part.error_x.array is None for part in (*single.data, *blind.data))


def test_bars():
    result = sweep(direction="noise")
    figure = viz.bars(result, k=7)
    top = result.top(7)
    labels = [f"{name} at {position}" for name, position in top[["name", "position"]].to_numpy()]
    assert figure.layout.yaxis.categoryarray == tuple(labels[::-1])
    bars = {y: x for part in figure.data for y, x in zip(part.y, part.x, strict=True)}
    assert [bars[label] for label in labels] == pytest.approx((top["score"] - 1.0).tolist())
    assert {part.name for part in figure.data} <= {"heads", "neurons"}


def test_refused():
    for draw in (viz.heatmap, viz.bars):
        with pytest.raises(InputError, match="no rows"):
            draw(sweep().query("layer == 5"))
        with pytest.raises(InputError, match="got a str; expected a sweep"):
            draw("sweep.csv")
    many = values().iloc[:1].loc[[0] * 101].assign(index=range(101))
    many["name"] = [f"L0N{i}" for i in range(101)]
    for call in (lambda s: viz.heatmap(s, "name"), lambda s: viz.bars(s, k=101)):
        with pytest.raises(InputError, match=r"101.*at most 100"):
            call(sweep(frame=many))


@needs_browser
@pytest.mark.parametrize("draw", [viz.heatmap, viz.bars])
def test_in_a_browser(opened, draw):
    page = opened(draw(sweep(tokens=TOKENS)))
    page.wait("document.querySelectorAll('.xtick').length > 0")
    ticks = page.texts(".xtick text" if draw is viz.heatmap else ".ytick text")
    if draw is viz.heatmap:
        assert ticks == LABELS
    else:
        assert len(ticks) == 20
        assert any(re.fullmatch(r"L\d[HN]\d+ at 1", tick) for tick in ticks)
    assert page.texts(".gtitle")[0].startswith("<tiny>: Logit difference ")  # no markup
    assert page.js("return document.body.scrollHeight <= innerHeight")
    # Every text is inside the picture.
    outside = page.js(
        "const frame = document.querySelector('.main-svg').getBoundingClientRect();"
        "return [...document.querySelectorAll('.main-svg text')].filter(e => {"
        " const box = e.getBoundingClientRect(); return box.width && (box.left < frame.left ||"
        " box.right > frame.right || box.top < frame.top || box.bottom > frame.bottom)})"
        ".map(e => e.textContent)"
    )
    assert outside == []


MATRIX = pd.DataFrame(
    [[0.95, 0.1, -0.3], [0.2, 1.4, 0.0]], ["a <b>", "c"], ["x", "y", "z"], dtype=float
)


def test_each_entry_stands_at_its_circuit_and_task():
    figure = viz.heatmap(MATRIX)
    (drawn,) = figure.data
    cells = {(y, x): drawn.z[i][j] for i, y in enumerate(drawn.y) for j, x in enumerate(drawn.x)}
    assert cells["c", "y"] == 1.4
    assert cells["a &lt;b&gt;", "z"] == -0.3
    assert len(cells) == MATRIX.size
    assert figure.layout.yaxis.autorange == "reversed"  # the first circuit is on top, as in print
    assert (drawn.zmin, drawn.zmid, drawn.zmax) == (-1.4, 0, 1.4)
    small = viz.heatmap(MATRIX / 2).data[0]
    assert small.zmax == 1  # control: a weak matrix does not look strong


def test_a_matrix_with_entries_that_are_not_finite_is_refused():
    with pytest.raises(InputError, match="not finite"):
        viz.heatmap(MATRIX.replace(0.1, np.nan))
