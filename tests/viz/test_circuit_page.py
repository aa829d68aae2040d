"""The page of a circuit, in a browser: what is there, what a click, the sliders and a search do."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from browser import needs_browser
from drawn_circuit import EVIL, META, circuit, details
from page_of_circuit import click, read_back, slide, visible

from attn_only_lens import InputError, viz
from attn_only_lens.viz.coordinates import node_coordinates


def page(**changes):
    nodes, edges = circuit()
    given = {"nodes": nodes, "edges": edges, "meta": META, "details": details()}
    return viz.circuit_page(**given | changes)


def index(nodes, name):
    return int(np.flatnonzero(nodes["id"] == name)[0])


@needs_browser
def test_all_of_it_is_there(opened):
    nodes, edges = circuit()
    shown = opened(page())
    assert visible(shown, "nodes()") == set(range(len(nodes)))
    assert visible(shown, "edges()") == set(range(len(edges)))
    assert shown.texts("h1") == ["<tiny>: p('</title>') & \"x\" = 3.7"]
    signs = ["0 <bos>", "1 </script>", "2 <b>bold</b>", "3 ↵", '4 ·"q"', "5 日\\u2028"]
    assert shown.texts("#columns span")[:7] == ["none", *signs]
    rows = ["embed", "rest", "L0 neurons", "L1 heads", "L1 neurons", "L2 neurons", "L2 bias"]
    assert shown.texts("#rows span") == [*rows, "metric"]
    # Layers go up and tokens across, on the screen.
    at = shown.js(
        "return circuit.nodes().map(n => [n.renderedPosition().x, n.renderedPosition().y])"
    )
    x, y = np.array(at).T
    first, last = index(nodes, "L0N0@0"), index(nodes, "L2N5@5")
    assert 0 < y.min() < y.max() < shown.js("return document.getElementById('columns').offsetTop")
    assert x[first] < x[last]
    assert y[first] > y[last]


@needs_browser
def test_it_fits_a_frame_that_is_given_its_size_later(opened):
    shown = opened(page())
    before = shown.js("return circuit.zoom()")
    shown.js("document.body.style.width = '700px'; document.body.style.height = '500px'")
    shown.wait(f"circuit.zoom() < {before}")
    assert shown.js(
        "const box = circuit.nodes().renderedBoundingBox({includeLabels: false});"
        "return box.x1 >= 0 && box.x2 <= circuit.width()"
        " && box.y1 >= 0 && box.y2 <= circuit.height()"
    )
    # Where the reader has moved it, it stays.
    shown.js("circuit.zoom(1.25); circuit.emit('scrollzoom'); document.body.style.width = '900px'")
    shown.wait("circuit.width() > 500")
    assert shown.js("return circuit.zoom()") == 1.25


@needs_browser
def test_a_click_tells_of_the_node(opened):
    nodes, edges = circuit()
    shown, node = opened(page()), index(nodes, "L1N4@4")
    click(shown, node)
    shown.wait("document.querySelector('#details h2')")
    assert shown.texts("#details h2") == ["L1N4@4"]
    for title, end, other in (("reads", "target", "source"), ("writes", "source", "target")):
        mine = edges[edges[end] == "L1N4@4"]
        mine = mine.loc[mine["weight"].abs().sort_values(ascending=False).index]
        assert shown.texts(f"#{title} tr td:first-child") == mine[other].tolist()
        got = [float(text) for text in shown.texts(f"#{title} td.number")]
        assert got == pytest.approx(mine["weight"].tolist(), rel=1e-4)  # five figures
        assert len(mine) > 3
    assert shown.texts("#pattern .tokens span") == shown.js(
        "return JSON.parse(document.getElementById('circuit').textContent).tokens"
    )
    tints = shown.js(
        "return [...document.querySelectorAll('#pattern .tokens span')]"
        ".map(s => Number(s.style.backgroundColor.match(/\\d+/)[0]))"
    )
    assert tints == sorted(tints, reverse=True)  # the pattern rises
    assert tints[0] == 255
    assert shown.texts("#pattern .here") == ['·"q"']
    assert shown.texts("#top-tokens td") == ["</script>", "2.5", "·Zebra", "1.25"]
    # Another one by its line in the table, and none by a click beside all.
    first = shown.texts("#reads td:first-child")[0]
    shown.driver.find_element("css selector", "#reads tr").click()
    assert shown.texts("#details h2") == [first]
    box = shown.js(
        "const b = document.getElementById('graph').getBoundingClientRect();"
        "return [b.right - 4, b.top + 4]"
    )
    shown.click_at(*box)
    shown.wait("!document.querySelector('#details h2')")


@needs_browser
def test_the_sliders_are_thresholds(opened):
    nodes, edges = circuit()
    shown = opened(page())
    for which, frame, column, what in (
        ("node-threshold", nodes, "attribution", "nodes()"),
        ("edge-threshold", edges, "weight", "edges()"),
    ):
        size = frame[column].abs()
        for value in (0, 500, 1000):
            slide(shown, which, value)
            kept = round(len(frame) ** (value / 1000))
            assert visible(shown, what) == set(np.argsort(-size.to_numpy())[:kept].tolist())
            assert shown.texts(f"#{what[:5]}-shown")[0].startswith(f"{kept} of {len(frame)} ")
    # An edge goes with its nodes; a node that is looked at stays, with its edges.
    slide(shown, "node-threshold", 0)
    assert visible(shown, "edges()") == set()
    weakest = int(nodes["attribution"].abs().idxmin())
    slide(shown, "node-threshold", 1000)
    slide(shown, "edge-threshold", 0)
    click(shown, weakest)
    mine = edges.index[(edges[["source", "target"]] == nodes["id"][weakest]).any(axis=1)]
    shown.wait("document.querySelector('#details h2')")
    assert visible(shown, "edges()") == {*mine, int(edges["weight"].abs().idxmax())}
    slide(shown, "node-threshold", 0)
    assert weakest in visible(shown, "nodes()")


@needs_browser
def test_kinds_of_edges_come_and_go(opened):
    _, edges = circuit()
    shown = opened(page())
    for kind in ("q", "value"):
        shown.driver.find_element("id", f"edges-{kind}").click()
    assert visible(shown, "edges()") == set(edges.index[edges["kind"] == "k"])


@needs_browser
@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("l1n4", lambda nodes: nodes["id"].str.startswith("L1N4")),
        ("zebra", lambda nodes: nodes["name"] == "L1N4"),  # a top token
        ("<B>bold", lambda nodes: nodes["position"] == 2),  # a token of the prompt
        ("nowhere", lambda nodes: nodes["position"] == -1),
    ],
)
def test_a_search_finds(opened, typed, found):
    nodes, _ = circuit()
    shown = opened(page())
    shown.driver.find_element("id", "search").send_keys(typed)
    hits = set(nodes.index[found(nodes)])
    assert shown.texts("#found") == [f"{len(hits)} found"]
    assert set(shown.js("return circuit.nodes('.found').map(n => n.data('index'))")) == hits
    faded = set(shown.js("return circuit.nodes('.faded').map(n => n.data('index'))"))
    assert faded == set(nodes.index) - hits
    if hits:
        slide(shown, "node-threshold", 0)
        hidden = len(hits - {int(nodes["attribution"].abs().idxmax())})
        assert shown.texts("#found") == [f"{len(hits)} found, {hidden} hidden"]


@needs_browser
def test_status_is_colour(opened):
    nodes, _ = circuit()
    words = np.array(["kept", "lost", "gained"])[np.arange(len(nodes)) % 3]
    shown = opened(page(nodes=nodes.assign(status=words)))
    tints = shown.js("return circuit.nodes().map(n => n.style('background-color'))")
    by_word = {word: {t for t, w in zip(tints, words, strict=True) if w == word} for word in words}
    assert all(len(each) == 1 for each in by_word.values())
    assert len(set.union(*by_word.values())) == 3
    assert shown.texts("#legend .key")[:3] == ["kept", "lost", "gained"]


@needs_browser
def test_texts_are_never_markup(opened):
    shown = opened(page())
    click(shown, 13)
    assert shown.js("return document.querySelectorAll('b, i:not(.key i), img').length") == 0
    assert shown.js("return document.scripts.length") == 3


@needs_browser
def test_the_watch_sees_what_it_watches_for(browser, tmp_path):
    """The control: a page that asks another machine, logs an error, and has markup in a token."""
    html = (
        "<img src='https://x.invalid/a.png'><script>null.f()</script>"
        "<script>fetch('https://x.invalid/b').catch(() => 0)</script>"
    )
    browser.open(viz.write_html(html, tmp_path / "bad.html"))
    assert any("null" in each for each in browser.console())
    assert set(browser.left_for()) == {"https://x.invalid/a.png", "https://x.invalid/b"}
    # The same in a page of ours: its policy does not let the request out.
    browser.open(viz.write_html(page().replace("<header>", html + "<header>"), tmp_path / "b.html"))
    assert any("Content Security Policy" in each for each in browser.console())
    assert browser.left_for() == []


@needs_browser
def test_a_thousand_nodes(opened):
    rng = np.random.default_rng(0)
    count, n_edges = 1000, 10_007
    names = [f"L{i % 12}N{i}" for i in range(count)]
    nodes = pd.DataFrame(
        {
            "id": [f"{name}@{i % 7}" for i, name in enumerate(names)],
            "kind": "neuron",
            "layer": np.arange(count) % 12,
            "name": names,
            "position": np.arange(count) % 7,
            "value": rng.normal(size=count),
            "attribution": rng.normal(size=count),
        }
    )
    pair = rng.choice(count * count, size=n_edges, replace=False)
    edges = pd.DataFrame(
        {
            "source": nodes["id"].to_numpy()[pair // count],
            "kind": "value",
            "target": nodes["id"].to_numpy()[pair % count],
            "weight": rng.normal(size=n_edges),
        }
    )
    tops = [(f" token{k}", 1 / (k + 1)) for k in range(11)]
    told = {name: viz.NodeDetails(rng.random(7).tolist(), tops) for name in names}
    html = viz.circuit_page(nodes, edges, META, told)
    assert len(html.encode()) < 3_000_000
    shown = opened(html)
    assert len(visible(shown, "nodes()")) == count


def test_what_is_in_the_page_is_what_was_given():
    nodes, edges = circuit()
    data = read_back(page())
    assert data["nodes"]["id"] == nodes["id"].tolist()
    assert data["nodes"]["attribution"] == pytest.approx(nodes["attribution"].tolist(), rel=1e-4)
    assert data["nodes"]["layer"][0] is None
    ids = nodes["id"].to_numpy()
    assert ids[data["edges"]["source"]].tolist() == edges["source"].tolist()
    assert ids[data["edges"]["target"]].tolist() == edges["target"].tolist()
    assert data["edges"]["weight"] == pytest.approx(edges["weight"].tolist(), rel=1e-4)
    assert "</script>" not in json.dumps(data["rows"])


def test_no_two_nodes_at_one_place_and_rows_do_not_mix():
    nodes, _ = circuit(n_neurons=211)
    at = node_coordinates(nodes, len(EVIL))
    gaps = np.abs(at.xy[:, None] - at.xy[None])
    apart = (gaps[..., 0] >= 84) | (gaps[..., 1] >= 58)  # the size of a node with its label
    assert apart[~np.eye(len(nodes), dtype=bool)].all()
    neurons = nodes["kind"] == "neuron"
    y = -at.xy[:, 1]
    for layer in (0, 1):
        assert (
            y[neurons & (nodes["layer"] == layer)].max()
            < y[neurons & (nodes["layer"] == layer + 1)].min()
        )
    x = at.xy[:, 0]
    for position in range(6):
        here, after = nodes["position"] == position, nodes["position"] == position + 1
        assert x[here].max() < x[after].min()


def broken(**columns):
    def change(nodes, edges):
        for name, (row, value) in columns.items():
            which, column = name.split("_", 1)
            frame = nodes if which == "nodes" else edges
            frame[column] = frame[column].astype(object)
            frame.loc[row, column] = value

    return change


REFUSED = {
    "there twice, such as 'embed@0'": broken(nodes_id=(3, "embed@0")),
    "kind 'mlp'": broken(nodes_kind=(3, "mlp")),
    "position such as 7": broken(nodes_position=(3, 7)),
    "position such as -1": broken(nodes_position=(3, -1)),
    "layer such as 0.5": broken(nodes_layer=(9, 0.5)),
    "infinite attribution": broken(nodes_attribution=(3, np.inf)),
    "'value' of nodes holds what is not a number": broken(nodes_value=(3, "much")),
    "got 5 for a node's name": broken(nodes_name=(3, 5)),
    "source that is no node, such as 'L9N9@0'": broken(edges_source=(3, "L9N9@0")),
    "weight that is not finite": broken(edges_weight=(3, np.nan)),
    "edges of kind 'v'": broken(edges_kind=(3, "v")),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_frames_that_do_not_fit_are_refused(reason):
    nodes, edges = circuit()
    REFUSED[reason](nodes, edges)
    with pytest.raises(InputError, match=re.escape(reason)):
        page(nodes=nodes, edges=edges)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"meta": {**META, "tokens": "text"}}, "got a str for tokens"),
        ({"meta": {**META, "value": float("nan")}}, "got meta value nan"),
        ({"meta": {"tokens": EVIL}}, "meta has no 'metric'"),
        ({"details": {"L7N7": viz.NodeDetails()}}, "'L7N7', which is no node's id or name"),
        ({"details": {"L1N4": viz.NodeDetails([0.5] * 5)}}, "expected one weight for each of 7"),
        ({"details": {"L1N4": viz.NodeDetails([0.5] * 6 + [1.5])}}, "leaves [0, 1]"),
        ({"details": {"L1N4": viz.NodeDetails(None, [("a", np.inf)])}}, "finite number"),
        ({"nodes": circuit()[0].assign(status="new")}, "nodes of status 'new'"),
        ({"nodes": circuit()[0].drop(columns="value")}, "nodes have no column 'value'"),
        ({"edges": pd.concat([circuit()[1]] * 2)}, "edges repeat a source, target and kind"),
    ],
)
def test_the_rest_that_does_not_fit_is_refused(changes, reason):
    with pytest.raises(InputError, match=re.escape(reason)):
        page(**changes)


def test_all_reasons_at_once():
    nodes, edges = circuit()
    broken(nodes_id=(3, "embed@0"), nodes_kind=(4, "mlp"), edges_kind=(3, "v"))(nodes, edges)
    with pytest.raises(InputError) as refused:
        page(nodes=nodes, edges=edges)
    assert len(refused.value.reasons) == 4  # edges of the node that was renamed end nowhere
