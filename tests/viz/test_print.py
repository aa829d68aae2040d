"""Tests of pages on paper: complete, in light colours, and without controls."""

from contextlib import contextmanager

import pytest
from browser import needs_browser
from drawn_circuit import META, circuit, details
from page_of_circuit import ids

from attn_only_lens import Contrast, expose_neuron_heads, load, viz
from attn_only_lens import patching as p
from attn_only_lens.viz.circuit import circuit_page

pytestmark = needs_browser

WIDTH = 718  # of A4 without margins, in CSS pixels
WIDE = (
    "return [...document.querySelectorAll('body *:not(svg *)')].filter(e => e.checkVisibility()"
    " && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 90))"
)
CONTROLS = (
    "return [...document.querySelectorAll('button, input, select, summary, .modebar')]"
    ".filter(e => e.checkVisibility()).length"
)


@contextmanager
def on_paper(shown):
    """Lay the page out as for printing."""
    size = {"width": WIDTH, "height": 1050, "deviceScaleFactor": 1, "mobile": False}
    run = shown.driver.execute_cdp_cmd
    shown.js("dispatchEvent(new Event('beforeprint'))")
    run("Emulation.setEmulatedMedia", {"media": "print"})
    run("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        run("Emulation.clearDeviceMetricsOverride", {})
        run("Emulation.setEmulatedMedia", {"media": ""})
        shown.js("dispatchEvent(new Event('afterprint'))")


def colour(shown, selector, name):
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    return shown.js(script, selector, name)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_circuit_is_printed_whole_with_its_notes(opened, theme):
    nodes, edges = circuit()
    meta = META | {"lead": ["43 sites keep 90%."]}  # with these lines, the notes are folded
    drawn = circuit_page(nodes=nodes, edges=edges, meta=meta, details=details())
    shown = opened(drawn)
    seen = "return [...document.querySelectorAll('aside .note')].map(e => e.checkVisibility())"
    assert not any(shown.js(seen))
    if theme == "dark":
        shown.js("document.getElementById('theme').click()")
        assert colour(shown, "body", "backgroundColor") == "rgb(20, 24, 31)"
    names, notes = ids(shown), shown.texts("aside .note")
    with on_paper(shown):
        assert shown.js(CONTROLS) == 0
        assert shown.js(WIDE) == []
        copies = "return document.querySelectorAll('#paper .node:not(.chip)').length"
        assert shown.js(copies) == len(names)
        box = "const box = document.querySelector('#paper svg').getBoundingClientRect();"
        assert shown.js(f"{box} return box.left >= 0 && box.right <= innerWidth && box.width > 600")
        nodes_right = "return Math.max(...[...document.querySelectorAll('#paper .node')].map("
        nodes_right += "e => e.getBoundingClientRect().right)) <= innerWidth"
        assert shown.js(nodes_right)
        assert shown.js("return document.getElementById('stage').checkVisibility()") is False
        assert shown.texts("aside .note") == notes
        assert all(shown.js(f"{seen}.slice(1)"))  # all but the note about clicks
        assert colour(shown, "body", "backgroundColor") == "rgb(255, 255, 255)"
        assert colour(shown, "#paper .back", "fill") == "rgb(255, 255, 255)"
    assert shown.texts("#paper svg") == []
    assert not any(shown.js(seen))
    if theme == "dark":  # as before
        assert colour(shown, "body", "backgroundColor") == "rgb(20, 24, 31)"


def test_sweeps_are_printed_without_controls(opened):
    model = expose_neuron_heads(load("small-english"), copy=True).model
    keys = Contrast("The keys near", "The key near", p.logit_diff(" are", " is"))
    shown = opened(viz.heatmap(p.activation_patch(model, keys, sites="heads")))
    assert shown.js(CONTROLS) > 0
    with on_paper(shown):
        assert shown.js(CONTROLS) == 0
