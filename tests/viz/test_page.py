"""Tests that files are complete or absent, texts stay intact, and the bundle is as published."""

import hashlib
import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_only_lens import viz
from attn_only_lens.errors import InputError
from attn_only_lens.viz import circuit
from attn_only_lens.viz.page import script_data


@given(st.text())
def test_data_come_through_and_end_no_element(raw):
    written = script_data({"x": raw})
    assert json.loads(written) == {"x": raw}
    assert not set("<>&") & set(written)


def test_the_bundled_libraries_are_those_that_were_published():
    folder = files("attn_only_lens.viz") / "vendor"
    rows = re.findall(
        r"\| (d3-\w+)\.min\.js \| ([\d.]+) \| (\w+) \|", (folder / "README.md").read_text()
    )
    assert {name for name, *_ in rows} == {f"d3-{part}" for part in circuit._D3}
    for name, version, digest in rows:
        bundle = (folder / f"{name}.min.js").read_bytes()
        assert hashlib.sha256(bundle).hexdigest() == digest
        assert f"d3js.org/{name}/ v{version} " in bundle.decode()
    for licence, words in {"d3": "Permission to use", "d3-ease": "Redistribution and use"}.items():
        assert words in (folder / f"{licence}-LICENSE").read_text("utf-8")


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "deep" / "a.html"
    assert viz.write(go.Figure(go.Bar(y=[2, 3, 5])), path) == path
    whole = path.read_text("utf-8")
    assert "Plotly.newPlot" in whole
    assert not re.search(r"<script[^>]+src=", whole)
    with pytest.raises(InputError, match="got a dict"):
        viz.write({}, path)
    with pytest.raises(InputError, match=r"got a str without an SVG; expected a circuit's page"):
        viz.write("<p>", path.with_suffix(".svg"))
    with pytest.raises(InputError, match=r"ends in \.html or \.svg"):
        viz.write("<p>", path.with_suffix(".png"))
    with pytest.raises(UnicodeEncodeError):
        viz.write("half a page \ud800", path)
    assert path.read_text("utf-8") == whole
    assert [entry.name for entry in path.parent.iterdir()] == ["a.html"]


WITHOUT_EXTRAS = """
import sys
sys.modules |= {"plotly": None, "circuitsvis": None}  # as if they were not installed
import torch
from attn_only_lens import Contrast, circuits, expose_neuron_heads, load, patching, viz

model = expose_neuron_heads(load("modular-addition")).model
clean, corrupted = torch.tensor([[[3, 4, 113]], [[3, 5, 113]]])
contrast = Contrast(clean, corrupted, patching.logit_diff(7, 8))
assert viz.attention_view(model, "L0N7", clean)
assert viz.circuit_view(circuits.attribution_graph(model, contrast, top=5))
for name, draw in {
    "plotly": lambda: viz.heatmap(patching.attribution(model, contrast)),
    "circuitsvis": lambda: viz.attention_view(model, "L0H2", clean),
}.items():
    try:
        draw()
    except ImportError as error:
        print(error)
"""


def test_plotly_and_circuitsvis_are_optional(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRAS],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(viz.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = [f"this picture needs {x}: pip install {x}" for x in ("plotly", "circuitsvis")]
    assert ran.stdout.splitlines() == expected, ran.stderr
