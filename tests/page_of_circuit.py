"""Helpers for tests of a circuit's page: read its data, click, slide, list visible elements."""

import json
import re


def read_back(html):
    """Return the data of a page."""
    return json.loads(re.search(r'id="circuit">(.*?)</script>', html, re.S)[1])


def click(opened, key, *, shift=False):
    """Click on a node, by its id."""
    opened.js(
        "const n = [...document.querySelectorAll('#stage .node')]"
        ".find(n => n.dataset.id === arguments[0]);"
        "n.dispatchEvent(new MouseEvent('click', {bubbles: true, shiftKey: arguments[1]}))",
        key,
        shift,
    )


def slide(opened, which, value):
    opened.js(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('input'))",
        which,
        value,
    )


def ids(opened, selector="#stage .node"):
    """Return the ids of visible nodes, or the rows of visible edges (`#stage .edge`)."""
    listed = opened.js(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.dataset.id)", selector
    )
    edge = re.compile(r"e(\d+)")
    return {int(edge.fullmatch(item)[1]) if edge.fullmatch(item) else item for item in listed}


def switch(opened, *boxes):
    for box in boxes:
        opened.js("document.getElementById(arguments[0]).click()", box)


def show_all(opened):
    """Show all nodes and edges, of all kinds."""
    switch(opened, "extras", *(f"edges-{kind}" for kind in ("q", "k")))
    slide(opened, "node-slider", 1000)
    slide(opened, "edge-slider", 1000)
