"""Tests of a comparison's report and circuit in a browser, against the comparison's frames."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from browser import needs_browser

from attn_only_lens import viz
from attn_only_lens.errors import InputError
from attn_only_lens.growth.comparison.results import Comparison


def comparison_of_two(name="m"):
    """Return a small hand-made comparison."""
    rng = np.random.default_rng(0)
    rows = [(f"L0H{i}", f"L1H{i}", "attention") for i in range(3)]
    rows += [(f"L0N{i}", f"L1N{i}", "neuron") for i in range(7)]
    every = pd.DataFrame(rows, columns=["name", "grown_name", "kind"]).assign(
        layer=0, grown_layer=1
    )
    measures = ["divergence", "divergence_se", "cosine", "norm_ratio", "drop"]
    measures += ["grown_drop", "drop_change", "drop_change_se"]
    measures += [f"null_{m}" for m in ("divergence", "cosine", "norm_ratio", "drop_change")]
    every[measures] = rng.uniform(0.1, 0.9, (len(every), len(measures)))
    every["exact"] = every["name"] != "L0H2"  # an estimate, which no page may show
    new = pd.DataFrame({"grown_name": ["L0N0", "L1N7"], "kind": "neuron", "grown_layer": [0, 1]})
    new = new.assign(norm=1.0, drop=[0.25, -0.5], drop_se=0.01, share=[0.125, -0.0625])
    new = new.assign(exact=True)
    overlap = {"first": 3, "second": 3, "kept": 2, "lost": 1, "gained": 1, "jaccard": 0.5}
    overlap |= {"rank_correlation": 0.875, "jaccard_low": 0.25, "jaccard_high": 0.75}
    circuits = pd.DataFrame(
        [
            {"pair": pair, "what": what, **overlap}
            for pair in ("original and grown", "grown and null")
            for what in ("nodes", "value edges")
        ]
    )
    nodes = pd.DataFrame(
        [
            ("L1H0@1", "attention", 1, "L1H0", 1, "L0H0", "kept", 0.5, 0.75),
            ("L1N3@2", "neuron", 1, "L1N3", 2, "L0N3", "lost", -0.5, 0.0),
            ("L1N7@2", "neuron", 1, "L1N7", 2, None, "gained", np.nan, 0.25),
        ],
        columns=[
            *("id", "kind", "layer", "name", "position", "original_name", "status"),
            *("share", "grown_share"),
        ],
    )
    edges = pd.DataFrame(
        [
            ("embed@1", "L1H0@1", "value", "kept", 0.5, 0.625),
            ("L1H0@1", "L1N3@2", "q", "lost", 0.375, 0.0),
            ("L1N7@2", "metric", "value", "gained", np.nan, -0.25),
        ],
        columns=["source", "target", "kind", "status", "weight", "grown_weight"],
    )
    parts = pd.DataFrame({"part": ["in both circuits", "new neurons"], "n_sites": [2, 1]})
    parts = parts.assign(drop=[0.5, np.nan], share=[0.5, np.nan])
    parts = parts.assign(grown_drop=[0.375, 0.25], grown_share=[0.375, 0.25])
    labels = ("original", "grown", "null")
    about = {"model": name, "metric": "loss", "n_prompts": 5, "n_tokens": 55}
    about |= {"n_prompts_of_circuits": 3, "circuit_sizes": [3] * len(labels)}
    about |= {"faithfulness": [0.91] * len(labels)}
    about |= {"values": {label: {"clean": 1.5, "corrupted": 0.5} for label in labels}}
    heads, neurons = (every[every["kind"] == kind] for kind in ("attention", "neuron"))
    silent = neurons[["name", "grown_name", "kind", "layer", "grown_layer"]][:0]
    return Comparison(
        *(heads, neurons, new, silent, circuits, parts, nodes, edges, ("a", "</b>", "c"), about)
    )


@needs_browser
def test_the_report(opened):
    comparison = comparison_of_two("<img src=//x.invalid onerror=a()>")
    page = viz.comparison_report(comparison)
    assert page.count("plotly.js v") <= 2  # one bundle names itself twice
    shown = opened(page)
    shown.wait("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 3")
    last = shown.js(
        "return [...[...document.querySelectorAll('table')].at(-1).rows].map("
        "r => [...r.cells].map(c => c.textContent))"
    )
    assert last[1] == ["L0N0", "neuron", "0", "1", "0.25", "0.01", "0.125"]
    drawn = shown.js(
        "return [...document.querySelectorAll('.js-plotly-plot')].map(p => p.data.map("
        "d => [d.name, [...d.y]]))"
    )
    assert [name for name, _ in drawn[0]] == ["original and grown", "grown and null"]
    assert drawn[0][0][1] == [0.5, 0.5]
    assert [name for name, _ in drawn[1]] == ["grown", "null model"]
    middle = float(comparison.heads["divergence"].median())
    assert drawn[1][0][1][0] == pytest.approx(middle, rel=1e-4)
    scatter = dict(drawn[2])
    assert scatter["new"] == [0.25, -0.5]
    np.testing.assert_allclose(
        sorted(scatter["attention"]),
        sorted(comparison.heads.query("exact")["grown_drop"]),
        rtol=1e-4,
    )


@needs_browser
def test_the_circuit(opened):
    shown = opened(viz.circuit_view(comparison_of_two()))
    for kind in ("q", "k"):
        shown.js("document.getElementById(arguments[0])?.click()", f"edges-{kind}")
    nodes = dict(
        shown.js(
            "return [...document.querySelectorAll('#stage .node')].map(n => [n.dataset.id, "
            "[getComputedStyle(n.querySelector('.box')).fill, n.textContent.at(-1)]])"
        )
    )
    kept, lost, gained = ("rgb(0, 114, 178)", "rgb(213, 94, 0)", "rgb(0, 158, 115)")
    assert {name: fill for name, (fill, _) in nodes.items() if name.startswith("L1")} == {
        "L1H0@1": kept,
        "L1N3@2": lost,
        "L1N7@2": gained,
    }
    assert nodes["metric"][0] not in (kept, lost, gained)
    lines = shown.js(
        "return [...document.querySelectorAll('#stage .edge')].sort((a, b) => "
        "a.dataset.id < b.dataset.id ? -1 : 1).map(e => getComputedStyle(e).stroke)"
    )
    assert lines == [kept, lost, gained]


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(InputError, match="got a GPT2 with a comparison; expected only `state`"):
        viz.circuit_view(comparison_of_two(), type("GPT2", (), {})())
    with pytest.raises(InputError, match="got prompt=3 with a comparison"):
        viz.circuit_view(comparison_of_two(), prompt=3)
    with pytest.raises(InputError, match="got a str; expected the result of compare"):
        viz.comparison_report("comparison/")
    with pytest.raises(InputError, match="neither circuit has a node"):
        viz.circuit_view(replace(comparison_of_two(), nodes=comparison_of_two().nodes[:0]))
