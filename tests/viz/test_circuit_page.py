"""Tests of a circuit's page in a browser: the first view, clicks, sliders and searches."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from browser import needs_browser
from drawn_circuit import META, circuit, details
from page_of_circuit import click, ids, read_back, show_all, slide, switch

from attn_only_lens import viz
from attn_only_lens.errors import InputError
from attn_only_lens.viz.circuit import _SCRIPTS, circuit_page
from attn_only_lens.viz.circuit_data import EXTRAS, NodeDetails
from attn_only_lens.viz.page import Page

PLAIN = 22  # the nodes of `circuit()` that the first view shows


def page(**changes):
    nodes, edges = circuit()
    arguments = {"nodes": nodes, "edges": edges, "meta": META, "details": details()}
    return circuit_page(**arguments | changes)


@needs_browser
def test_many_nodes_are_folded_at_first(opened):
    nodes, edges = circuit(n_neurons=320)
    many = {"nodes": nodes, "edges": edges.head(5000), "details": {}}
    shown = opened(page(**many, state={"pinned": ["L0N0@0"]}))
    assert {name for name in ids(shown) if "N" in name} == {"L0N0@0"}  # it is pinned
    assert sum(name.startswith("group") for name in ids(shown)) >= 3
    switch(shown, "fold")
    shown.drawn()
    assert sum("N" in name for name in ids(shown)) == 320
    # Groups made by readers stay, and small circuits are not folded.
    group = {"name": "mine", "members": ["L1N1@1", "L2N2@2"], "folded": True}
    shown = opened(page(**many, state={"groups": [group]}))
    assert sum(name.startswith("group") for name in ids(shown)) == 1
    shown = opened(page())
    assert not any(name.startswith("group") for name in ids(shown))


@needs_browser
def test_the_first_view(opened):
    nodes, _ = circuit()
    shown = opened(page())
    plain = nodes[~nodes["kind"].isin(EXTRAS)]
    assert ids(shown) == set(plain["id"])
    assert len(plain) == PLAIN
    signs = ["<bos>", "</script>", "<b>bold</b>", "↵", '·"q"', "日\\u2028"]
    assert shown.texts(".axis .token")[:6] == signs
    rows = ["tokens", "L0 neurons", "L1 heads", "L1 neurons", "L2 neurons", "metric"]
    assert shown.texts(".row:not(.axis-name)") == rows
    assert shown.texts(".axis-name") == ["token", "position"]
    labels = shown.texts(".node.embed text")  # embeddings show their tokens
    assert {label.lstrip("+− ") for label in labels} >= set(signs)
    # Layers go up and tokens go right; the metric is above its token.
    x, y = centres(shown)
    assert x["L0N0@0"] < x["L2N5@5"]
    assert y["L0N0@0"] > y["L2N5@5"] > y["metric"]
    assert abs(x["metric"] - x["embed@6"]) < 60  # a long name ends at the window's edge
    # Only value edges are shown; switches show other edges and nodes without a token.
    assert set(shown.js("return [...document.querySelectorAll('#stage .edge')]"
                        ".map(e => e.classList[1])")) == {"value"}  # fmt: skip
    show_all(shown)
    assert ids(shown) == set(nodes["id"])
    assert len(ids(shown, "#stage .edge")) == len(circuit()[1])
    assert len(page()) < 500_000


def centres(shown):
    boxes = shown.js(
        "return [...document.querySelectorAll('#stage .node')].map(n => {"
        "const b = n.querySelector('.box').getBoundingClientRect();"
        "return [n.dataset.id, b.x + b.width / 2, b.y + b.height / 2]})"
    )
    return {key: x for key, x, _ in boxes}, {key: y for key, _, y in boxes}


CROSSINGS = """
const boxes = [...document.querySelectorAll('#stage .node')].map(n => {
  const m = n.transform.baseVal[0].matrix, b = n.querySelector('.box');
  const w = b.width.baseVal.value / 2, h = b.height.baseVal.value / 2;
  return [n.dataset.id, m.e - w, m.e + w, m.f - h, m.f + h];
});
let looked = 0, through = [];
for (const e of document.querySelectorAll('#stage .edge')) {
  const edge = d3.select(e).datum(), ends = [edge.source, edge.target].map(i => arguments[0][i]);
  const n = e.getTotalLength();
  for (let s = 0; s <= n; s += 5) {
    const p = e.getPointAtLength(s);
    looked++;
    for (const [id, left, right, top, bottom] of boxes)
      if (!ends.includes(id) && p.x > left && p.x < right && p.y > top && p.y < bottom)
        through.push([ends, id]);
  }
}
return [looked, through.length];
"""


@needs_browser
def test_no_edge_runs_through_another_node(opened):
    nodes, _ = circuit()
    shown = opened(page())
    show_all(shown)
    looked, through = shown.js(CROSSINGS, nodes["id"].tolist())
    assert looked > 2_000
    assert through == 0


@needs_browser
def test_a_click_tells_of_the_node(opened):
    _, edges = circuit()
    shown = opened(page())
    click(shown, "L1N4@4")
    assert shown.texts("#panel h2") == ["L1N4@4"]
    for title, end, far_end in (("reads", "target", "source"), ("writes", "source", "target")):
        rows_of_neuron = edges[edges[end] == "L1N4@4"]
        rows_of_neuron = rows_of_neuron.loc[
            rows_of_neuron["weight"].abs().sort_values(ascending=False).index
        ]
        got = shown.texts(f"#{title} tr td:first-child")  # embeddings have their tokens
        assert [text.rpartition("(")[-1].rstrip(")") for text in got] == rows_of_neuron[
            far_end
        ].tolist()
        assert all(text.endswith(")") for text in got if "embed" in text)
        got = [float(text) for text in shown.texts(f"#{title} td.number")]
        assert got == pytest.approx(rows_of_neuron["weight"].tolist(), rel=1e-4)  # five digits
        assert len(rows_of_neuron) > 3
    assert shown.texts("#pattern .tokens span") == read_back(page())["tokens"]
    assert shown.texts("#pattern .here") == ['·"q"']
    assert shown.texts("#writes-tokens td") == ["</script>", "+2.5", "·Zebra", "−1.3"]
    assert shown.texts("#examples .example")[0] == "a·<b>"
    # Texts are never markup.
    assert shown.js("return document.querySelectorAll('b, i, img').length") == 0
    # The node's edges are lit; a click on a row selects its node.
    ends = edges[["source", "target"]]
    drawn = (edges["kind"] == "value") & ~ends.isin(["rest", "bias L2"]).any(axis=1)
    here = ends.isin(["L1N4@4"]).any(axis=1)
    assert ids(shown, "#stage .edge.near") == set(edges.index[here & drawn])
    first = shown.texts("#reads td:first-child")[0]
    shown.driver.find_element("css selector", "#reads tr").click()
    assert shown.texts("#panel h2") == [first]
    shown.driver.find_element("css selector", "body").send_keys("\ue00c")  # Escape
    assert shown.texts("#panel h2") == []


@needs_browser
def test_the_sliders_and_kinds_choose_what_is_shown(opened):
    nodes, edges = circuit()
    shown = opened(page())
    plain = nodes[~nodes["kind"].isin(EXTRAS)]
    sizes = plain["attribution"].abs().where(plain["kind"] != "metric", np.inf)  # always shown
    ranked = plain.loc[sizes.sort_values(ascending=False).index, "id"]
    slide(shown, "node-slider", 500)
    kept = ranked.head(round(PLAIN**0.5)).tolist()
    assert ids(shown) == set(kept)
    slide(shown, "node-slider", 1000)
    slide(shown, "edge-slider", 500)
    both = edges[edges["source"].isin(ranked) & edges["target"].isin(ranked)]
    for kinds in (["value"], ["value", "q"], ["q"]):
        if kinds != ["value"]:
            switch(shown, "edges-q" if "value" in kinds else "edges-value")
        among = both[both["kind"].isin(kinds)]
        most = among["weight"].abs().nlargest(round(len(edges) ** 0.5)).index
        assert ids(shown, "#stage .edge") == set(most)
    shown.driver.find_element("id", "more").click()
    more = both[both["kind"] == "q"]["weight"].abs().nlargest(2 * round(len(edges) ** 0.5)).index
    assert ids(shown, "#stage .edge") == set(more)


@needs_browser
def test_a_search_finds(opened):
    nodes, _ = circuit()
    shown = opened(page())
    field = shown.driver.find_element("id", "search")
    for typed, matches in (
        ("l1n4", nodes["id"].str.startswith("L1N4")),
        ("zebra", nodes["name"] == "L1N4"),  # a token that L1N4 writes
        ("<B>bold", nodes["position"] == 2),  # a token of the prompt
        ("nowhere", nodes["position"] == -1),
        ("rest", nodes["id"] == "rest"),
    ):
        field.clear()
        field.send_keys(typed)
        hits = set(nodes["id"][matches])
        hidden = ", 1 not shown" if typed == "rest" else ""
        assert shown.texts("#found") == [f"{len(hits)} found{hidden}"]
        assert ids(shown, "#stage .node.found") == hits - {"rest"}
    field.send_keys("\ue007")  # Enter shows the node and its panel
    assert shown.texts("#panel h2") == ["rest"]
    assert "rest" in ids(shown)


@needs_browser
def test_pins_names_and_groups_are_saved_with_the_page_and_come_back(opened, tmp_path):
    nodes, edges = circuit()
    shown = opened(page())
    members = ["L1N4@4", "L1N1@1"]
    for member in members:
        click(shown, member, shift=True)
    click(shown, "L2N5@5")
    shown.js("const n = document.getElementById('name'); n.value = '</script> \\u2028 & name';"
             "n.dispatchEvent(new Event('change'))")  # fmt: skip
    shown.js("document.getElementById('group').click()")  # while another node is selected
    # A group replaces its members, and their edges of one kind are added up.
    assert "group 0" in ids(shown)
    assert not set(members) & ids(shown)
    into = edges[(edges["kind"] == "value") & edges["source"].isin(members)]
    into = into[into["target"] == "metric"]["weight"].sum()
    got = shown.js("return [...document.querySelectorAll('#stage .edge')].map(e => "
                   "d3.select(e).datum()).filter(d => d.key.includes(' '))"
                   ".map(d => [d.target, d.kind, d.weight])")  # fmt: skip
    metric = int(np.flatnonzero(nodes["id"] == "metric")[0])
    assert dict((t, w) for t, _, w in got).get(metric, 0.0) == pytest.approx(into, rel=1e-4)
    # The page and the files that it saves keep pins, groups and names.
    shown.js("URL.createObjectURL = (b) => { (window.saved ??= []).push(b); return '#'; };"
             "HTMLAnchorElement.prototype.click = () => 0")  # fmt: skip
    for button in ("save-page", "save-state", "save-svg", "save-png"):
        shown.js("document.getElementById(arguments[0]).click()", button)
    shown.wait("window.saved.length === 4")
    html, state, svg, png = shown.driver.execute_async_script(
        "const [a, b, c, d] = window.saved; Promise.all([a.text(), b.text(), c.text(), d.size])"
        ".then(arguments[0])"
    )
    assert png > 5_000
    assert "</style>" in svg
    assert "var(--" not in svg
    document = json.loads(state)
    assert document["pinned"] == members
    assert document["groups"] == [{"name": "group 1", "members": members, "folded": True}]
    assert document["names"] == {"L2N5@5": "</script> \u2028 & name"}
    for saved in (html, page(state=document)):
        again = opened(saved)
        assert "group 0" in ids(again)
        assert any(text.endswith("</script> \u2028 & name") for text in shown.texts(".node text"))
        assert again.js("return document.scripts.length") == 2 + len(_SCRIPTS)
        switch(again, "only-pinned")
        assert ids(again) == {"group 0", "metric"}
    (tmp_path / "state.json").write_text(state)
    again = opened(page())
    again.driver.find_element("id", "load").send_keys(str(tmp_path / "state.json"))
    again.wait("document.getElementById('said').textContent === 'state.json loaded'")
    assert "group 0" in ids(again)
    # A file of another circuit changes nothing.
    (tmp_path / "other.json").write_text(state.replace("@", "#"))
    again.driver.find_element("id", "load").send_keys(str(tmp_path / "other.json"))
    again.wait("document.getElementById('said').textContent === 'other.json is of another circuit'")
    assert "group 0" in ids(again)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"pinned": ["L7N7"]}, "the state belongs to another circuit: 'L7N7'"),
        ({"groups": [{"name": "g"}]}, "state.groups.0.members: Field required"),
        ({"groups": [{"name": "g", "members": ["L1N4@4"] * 2}]}, "twice in one group"),
    ],
)
def test_a_state_that_is_none_is_refused(state, reason):
    with pytest.raises(InputError, match=re.escape(reason)):
        page(state=state)


@needs_browser
def test_a_page_in_a_frame_that_gets_its_size_later(opened):
    frame = page()._repr_html_()
    shown = opened(Page(f"<!DOCTYPE html><div id=cell style='display:none'>{frame}</div>"))
    shown.js("document.getElementById('cell').style.display = 'block'")
    shown.driver.switch_to.frame(0)
    box = "document.querySelector('#stage .node .box')"
    shown.wait(f"{box} && {box}.getBoundingClientRect().height > 5")
    assert len(ids(shown)) == PLAIN


def test_a_notebook_keeps_a_picture_where_frames_are_taken_out():
    drawn = page()
    html = drawn._repr_html_()
    assert 'sandbox="allow-scripts allow-downloads"' in html
    assert html.index("<img") < html.index("<iframe")
    assert drawn._repr_svg_() == drawn.picture
    assert drawn.picture.startswith("<svg")
    assert "<script" not in drawn.picture
    assert "</script>" not in drawn.picture  # a token of the prompt
    assert drawn.picture.count('<g class="node') == read_back(drawn)["first"]["nodes"] > 15


@needs_browser
@pytest.mark.parametrize("n_neurons", [13, 90])  # the second has several lines in a row
def test_the_picture_is_what_the_page_shows_first(browser, tmp_path, n_neurons):
    """The layout in Python equals that of the page's JavaScript."""
    shown, (nodes, edges) = browser, circuit(n_neurons)
    shown.open(viz.write(page(nodes=nodes, edges=edges), tmp_path / "page.html"))
    drawn = page(nodes=nodes, edges=edges).picture
    got = shown.js(
        "const d = JSON.parse(document.getElementById('circuit').textContent), n = d.nodes;"
        "const boxes = n.id.map((_, i) => ({row: n.row[i], column: n.column[i],"
        " width: n.width[i], overhangs: n.kind[i] === 'metric'}));"
        "const s = n.strength.map((a) => a ?? Infinity);"
        "const order = s.map((_, i) => i).filter((i) => !['bias', 'rest', 'offset'].includes("
        "n.kind[i])).sort((a, b) => s[b] - s[a]).slice(0, d.first.nodes), on = new Set(order);"
        "const e = d.edges, keys = e.source.map((_, j) => j).filter((j) => e.kind[j] === 'value'"
        " && on.has(e.source[j]) && on.has(e.target[j])).sort((a, b) => Math.abs(e.weight[b])"
        " - Math.abs(e.weight[a])).slice(0, d.first.edges);"
        "const at = layout.place(boxes, order, d.axis_width, 900, 600);"
        "const paths = layout.paths(at, boxes, keys.map((j) =>"
        " [e.source[j], e.target[j], e.kind[j]]));"
        "return [order.map((i) => [at.at.get(i).x, at.at.get(i).y]),"
        " paths.map((p) => layout.curve(p))]"
    )
    number = re.compile(r"-?\d+\.?\d*")
    nodes = re.findall(r'class="node[^>]*translate\(([\d.]+),([\d.]+)\)', drawn)
    assert np.array(nodes, dtype=float) == pytest.approx(np.array(got[0]), abs=0.06)
    paths = re.findall(r'class="edge[^>]* d="([^"]*)" stroke-width="[\d.]+" opacity', drawn)
    assert len(paths) == len(got[1]) > 20
    bent = 0
    for drawn_path, path in zip(paths, got[1], strict=True):
        numbers = [float(match) for match in number.findall(path)]
        drawn_numbers = [float(match) for match in number.findall(drawn_path)][: len(numbers)]
        assert drawn_numbers == pytest.approx(numbers, abs=0.11)
        bent += len(numbers) > 8
    assert bent > 3  # edges that go around a node


@needs_browser
def test_the_watch_sees_what_it_watches_for(browser, tmp_path):
    """Control: a page that sends requests, logs an error and contains markup is noticed."""
    html = (
        "<img src='https://x.invalid/a.png'><script>null.f()</script>"
        "<script>fetch('https://x.invalid/b').catch(() => 0)</script>"
    )
    browser.open(viz.write(html, tmp_path / "bad.html"))
    assert any("null" in message for message in browser.console())
    assert set(browser.left_for()) == {"https://x.invalid/a.png", "https://x.invalid/b"}
    # In a page of this package, the content security policy blocks the request.
    browser.open(viz.write(page().replace("<header>", html + "<header>"), tmp_path / "b.html"))
    assert any("Content Security Policy" in message for message in browser.console())
    assert browser.left_for() == []


NODES, EDGES = circuit()
REFUSED = {
    "occur twice, such as 'embed@0'": {"nodes": pd.concat([NODES, NODES[:1]])},
    "a node with position 7": {"nodes": NODES.assign(position=7)},
    "source that is not a node, such as 'L9N9@0'": {"edges": EDGES.assign(source="L9N9@0")},
    "edges repeat a source, target and kind": {"edges": pd.concat([EDGES, EDGES])},
    "z of 'L1N4' has 6": {"details": {"L1N4": NodeDetails([0.5] * 7, z=[1.0] * 6)}},
    "'L7N7', which is not a node's id or name": {"details": {"L7N7": NodeDetails()}},
    "got the role 'end' at token 7; the prompt has 7": {"meta": META | {"roles": {"end": 7}}},
}


@needs_browser
def test_columns_that_are_roles(opened):
    """A role's column has the role's token in both runs, and so has the panel of a node."""
    tokens, corrupted = list("abcdefg"), list("abXdefg")
    roles = dict(zip(("s", "t", "u", "v", "w", "x", "end"), (6, 5, 4, 3, 1, None, 2), strict=True))
    meta = META | {"tokens": tokens, "corrupted": corrupted, "roles": roles}
    drawn = page(meta=meta)
    below = ["g", "f", "e", "d", "b", "c / X"]  # "–" is also the column without tokens
    shown = opened(drawn)
    for name, expected in (("token", list(roles)), ("index", below)):
        in_picture = re.findall(rf'class="{name}" x[^>]*>([^<]*)<', drawn.picture)
        for texts in (in_picture, shown.texts(f".axis .{name}")):
            assert [text for text in texts if text not in ("–", "")] == expected
    click(shown, "L1H3@6")
    assert shown.texts("#pattern .here") == ["c"]  # the token of the seventh role
    assert "end: c / X  (2)" in shown.texts("#panel td")


@pytest.mark.parametrize("reason", REFUSED)
def test_what_does_not_fit_is_refused(reason):
    with pytest.raises(InputError, match=re.escape(reason)):
        page(**REFUSED[reason])


def test_all_reasons_at_once():
    with pytest.raises(InputError, match=r"(?s)kind 'mlp'.*kind 'v'"):
        page(nodes=NODES.assign(kind="mlp"), edges=EDGES.assign(kind="v"))
