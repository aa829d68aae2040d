"""Tests of the static pictures of sweeps, and of how notebooks store figures and pages."""

import re
from html import unescape
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io
import pytest
from browser import needs_browser
from drawn_circuit import META, circuit, details
from random_sweeps import POSITIONS, TOKENS, sweep, values

from attn_only_lens import viz
from attn_only_lens.errors import InputError
from attn_only_lens.patching.prompt_tokens import PromptTokens
from attn_only_lens.viz.circuit import circuit_page
from attn_only_lens.viz.page import Page, unpacked

SVG = "{http://www.w3.org/2000/svg}"
MATRIX = pd.DataFrame([[0.95, 0.1, -0.3], [0.2, 1.4, 0.0]], ["a <b>", "c"], ["x", "y", "z"])


def shapes(figure, tag):
    """Return the attributes of the picture's elements, with their text."""
    return [
        {key: float(x) if re.fullmatch(r"-?[\d.]+", x) else x for key, x in shape.attrib.items()}
        | {"words": shape.text}
        for shape in ElementTree.fromstring(figure.picture).iter(f"{SVG}{tag}")
    ]


def words(figure):
    return [text["words"] for text in shapes(figure, "text")]


def share_of(colour):
    """Return how blue (1), white (0) or red (-1) a colour of the scale is, roughly."""
    red, _, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return np.sign(blue - red)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_each_cell_has_its_value_s_colour_at_its_row_and_column(direction):
    figure = viz.heatmap(sweep(direction=direction, tokens=TOKENS), "name")
    (trace,) = figure.data
    names = {text["words"]: text for text in shapes(figure, "text")}
    columns = [names[unescape(str(label))]["x"] for label in trace.x]
    rows = [names[str(name)]["y"] for name in trace.y]
    assert len(columns) == POSITIONS
    assert all(low > high for low, high in pairwise(rows))  # plotly's first row is at the bottom
    cells = {}
    for box in shapes(figure, "rect"):
        for i, y in enumerate(rows):
            for j, x in enumerate(columns):
                inside = box["x"] < x < box["x"] + box["width"] < 700
                if inside and box["y"] < y < box["y"] + box["height"] and box["height"] < 60:
                    cells[i, j] = box["fill"]
    assert len(cells) == trace.z.size
    order = sorted(cells, key=lambda cell: trace.z[cell])
    for cell in order:
        if abs(trace.z[cell]) > 0.1 * trace.zmax:
            assert share_of(cells[cell]) == np.sign(trace.z[cell])
    assert cells[max(cells, key=lambda cell: trace.z[cell])] in ("#2166ac", cells[order[-1]])
    largest = max(cells, key=lambda cell: abs(trace.z[cell]))
    assert cells[largest] in ("#2166ac", "#b2182b")


def test_bars_are_as_long_as_their_effects_with_error_bars():
    means = values().assign(value_standard_error=0.1, score_standard_error=0.25)
    figure = viz.bars(sweep(frame=means), k=9)
    effects = {y: x for part in figure.data for y, x in zip(part.y, part.x, strict=True)}
    at = {text["words"]: text["y"] for text in shapes(figure, "text") if text["words"] in effects}
    assert {*at} == {*effects}
    bars = {}
    for box in shapes(figure, "rect"):
        for name, y in at.items():
            if box["y"] < y < box["y"] + box["height"] < y + 20:
                bars[name] = box
    scale = {abs(effects[name]) / box["width"] for name, box in bars.items()}
    assert max(scale) == pytest.approx(min(scale), rel=0.02)
    ends = {
        box["x"] if effects[name] > 0 else box["x"] + box["width"] for name, box in bars.items()
    }
    assert max(ends) - min(ends) < 0.3  # all bars begin at 0
    lines = [re.findall(r"-?[\d.]+", path["d"]) for path in shapes(figure, "path")]
    whiskers = [abs(float(c) - float(a)) for a, b, c, d in lines if b == d]
    assert whiskers == pytest.approx([2 * 0.25 / max(scale)] * 9, rel=0.02)


def test_a_matrix_is_drawn_from_the_top_with_its_numbers():
    said = words(viz.heatmap(MATRIX))
    assert [text for text in said if re.fullmatch(r"-?\d\.\d\d", text)] == [
        *("0.95", "0.10", "-0.30", "0.20", "1.40", "0.00")
    ]
    rows = {text["words"]: text["y"] for text in shapes(viz.heatmap(MATRIX), "text")}
    assert rows["a <b>"] < rows["c"]


def test_figures_say_what_was_measured_without_names_of_arguments():
    for direction, what in {
        "denoise": "the output z of one site at a time is copied from the clean into the corrupted",
        "noise": "the output z of one site at a time is copied from the corrupted into the clean",
        "zero": "the output z of one site at a time is set to zero",
    }.items():
        for draw in (viz.heatmap, viz.bars):
            figure = draw(sweep(direction=direction))
            said = " ".join(words(figure))
            assert what in said
            assert not re.search("measured|rows=|noise", said)
    estimated = " ".join(words(viz.heatmap(sweep(method="secant"))))
    assert "estimated by attribution (secant)" in estimated


def test_an_axis_tells_token_ids_from_positions():
    ids = [["3", "4", "113"]]
    tokens = PromptTokens(ids, [["3", "5", "113"]], {})
    figure = viz.heatmap(sweep(frame=values(positions=range(3)), n_prompts=1, tokens=tokens))
    assert list(figure.data[0].x) == ["0: 3", "1: 4 / 5", "2: 113"]
    title = "position: token id (clean / corrupted where they differ)"
    assert figure.layout.xaxis.title.text == title
    assert title in words(figure)
    of_words = viz.heatmap(sweep(tokens=TOKENS))
    assert of_words.layout.xaxis.title.text.startswith("position: token (")


def test_a_picture_is_written_for_figures_that_have_one(tmp_path):
    figure = viz.heatmap(sweep())
    assert viz.write(figure, tmp_path / "a.svg").read_text("utf-8") == figure.picture
    for other in (go.Figure(figure), figure.add_scatter(x=[1], y=[2])):
        with pytest.raises(InputError, match=r"without an SVG; expected .* the figure of a sweep"):
            viz.write(other, tmp_path / "b.svg")


def test_notebooks_store_the_picture_beside_the_figure(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    figure = viz.bars(sweep())
    monkeypatch.setattr(plotly.io.renderers, "default", "plotly_mimetype")
    figure._ipython_display_()
    assert shown == [figure._repr_mimebundle_()]
    assert {*shown[0]} == {"application/vnd.plotly.v1+json", "image/svg+xml"}
    assert shown[0]["image/svg+xml"] == figure.picture
    # A renderer without plotly's own type shows the figure in its own way.
    opened = []
    monkeypatch.setattr(plotly.io, "show", opened.append)
    monkeypatch.setattr(plotly.io.renderers, "default", "notebook_connected")
    figure._ipython_display_()
    assert (len(shown), opened) == (1, [figure])


def drawn_page():
    nodes, edges = circuit()
    return circuit_page(nodes=nodes, edges=edges, meta=META, details=details())


def test_a_notebook_stores_pages_compressed_and_always_the_same():
    page = drawn_page()
    html = page._repr_html_()
    assert html == drawn_page()._repr_html_()
    frame = unescape(html.partition('srcdoc="')[2].partition('"')[0])
    assert unpacked(frame) == page
    assert len(frame) < 0.45 * len(page)
    assert unpacked("<p>not compressed") == "<p>not compressed"


@needs_browser
@pytest.mark.parametrize("width", [1400, 900])
def test_the_frame_covers_the_picture_and_shows_the_page(opened, width):
    shown = opened(
        Page(f"<!DOCTYPE html><div style='width:{width}px'>{drawn_page()._repr_html_()}</div>")
    )
    bottoms = shown.js(
        "return ['img', 'iframe', 'body > div'].map(e =>"
        " document.querySelector(e).getBoundingClientRect().bottom)"
    )
    assert bottoms[0] <= bottoms[1] + 1
    assert bottoms[2] <= bottoms[1] + 8  # nothing else is below the frame
    shown.driver.switch_to.frame(0)
    shown.wait("document.querySelectorAll('#stage .node').length > 15")
    assert shown.js("return document.title") == drawn_page()._title()


@needs_browser
def test_the_page_s_picture_says_what_python_s_picture_says(opened):
    page = drawn_page()
    shown = opened(page)
    shown.js("dispatchEvent(new Event('beforeprint'))")
    got = {key: shown.texts(f"#paper {key}") for key in (".sample > .row", ".title", ".axis-name")}
    caption = shown.texts("#paper svg > .row")
    tree = ElementTree.fromstring(page.picture)

    def texts(path):
        return [text.text for text in tree.findall(path.replace("text", f"{SVG}text"))]

    samples = [
        s.findall(f"{SVG}text[@class='row']") for s in tree.findall(f"{SVG}g[@class='sample']")
    ]
    assert got[".sample > .row"] == [text.text for some in samples for text in some] != []
    assert " ".join(got[".title"]) == " ".join(texts("text[@class='title']"))
    drawn = " ".join(texts("text[@class='row']"))
    assert " ".join(caption) in drawn
    assert "strongest of" in " ".join(caption)
    assert " ".join(got[".axis-name"]) in drawn


@needs_browser
def test_figures_are_dark_in_a_dark_browser(opened):
    shown = opened(viz.heatmap(sweep()))
    look = "return getComputedStyle(document.querySelector('main')).filter"
    assert shown.js(look) == "none"
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    shown.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    try:
        assert "invert" in shown.js(look)
    finally:
        shown.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
