"""Tests of node outlines: they show how often resampled circuits include a node."""

import pytest
from browser import needs_browser
from page_of_circuit import click, read_back

from attn_only_lens import circuits, explain, expose_neuron_heads, load, tasks, viz


@pytest.fixture(scope="module")
def why():
    """Return an explanation with resampled prompts, whose graph is by role."""
    model = expose_neuron_heads(load("small-english"), copy=True).model
    task = tasks.agreement(model.tokenizer, 4, structure="simple")
    return explain(model, task, search=circuits.Search(resamples=2), strong=1.0)


def page_with(graph, stability):
    return viz.circuit_view(graph, overlays=viz.Overlays(stability=stability))


def test_the_page_has_the_inclusion_of_each_site(why):
    circuit, graph = why.circuit, why.graph
    nodes = read_back(page_with(graph, circuit.stability))["nodes"]
    columns = nodes["id"], nodes["inclusion"], nodes["stability"]
    on_page = {key: rest for key, *rest in zip(*columns, strict=True)}
    assert {word for _, word in on_page.values()} >= {"core", "contingent", None}
    for site in circuit.stability.sites.to_dict("records"):
        key = f"{site['name']}@{site['position']}"
        if key in on_page:
            assert on_page[key] == [pytest.approx(site["inclusion"], rel=1e-4), site["class"]]
    assert on_page["metric"] == [None, None]
    assert "stability" not in read_back(viz.circuit_view(graph))["nodes"]  # control
    assert "core" in read_back(why.view())["nodes"]["stability"]


@needs_browser
def test_core_is_solid_and_contingent_is_dashed(opened, why):
    circuit, graph = why.circuit, why.graph
    page = opened(page_with(graph, circuit.stability))
    drawn = page.js(
        "return [...document.querySelectorAll('#stage .node')].map(n => [n.dataset.id, "
        "getComputedStyle(n.querySelector('.box')).strokeDasharray])"
    )
    sites = circuit.stability.sites
    ids = sites["name"].astype(str) + "@" + sites["position"].astype(str)
    classes = dict(zip(ids, sites["class"], strict=True))
    seen = {(classes[key], dashes == "none") for key, dashes in drawn if key in classes}
    assert seen >= {("core", True), ("contingent", False)}
    assert ("contingent", True) not in seen
    click(page, next(key for key, _ in drawn if classes.get(key) == "contingent"))
    panel = page.js("return document.getElementById('panel').textContent")
    assert "of resampled circuits, contingent" in panel
