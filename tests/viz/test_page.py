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
from attn_only_lens.viz.figures import plotly_text
from attn_only_lens.viz.page import inline_script, script_data, visible_token


@given(st.text())
def test_data_come_through_and_end_no_element(raw):
    written = script_data({"x": raw})
    assert json.loads(written) == {"x": raw}
    assert not set("<>&") & set(written)


def test_data_that_json_cannot_say_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_data([float("nan")])


@given(st.text(st.characters(), max_size=7))
def test_every_token_can_be_seen(raw):
    seen = visible_token(raw)
    assert seen.isprintable()
    assert " " not in seen
    if raw.isprintable() and " " not in raw:
        assert seen == raw
    seen.encode("utf-8")


def test_plotly_reads_no_tag():
    assert plotly_text("<b>&amp;</b>\n") == "&lt;b&gt;&amp;amp;&lt;/b&gt;↵"


def test_a_library_keeps_its_strings():
    element = inline_script('a = "</script>";\nb = "\u2028";\n//# sourceMappingURL=a.map')
    assert element == '<script>\na = "<\\/script>";\nb = "\u2028";\n</script>'


def test_the_bundled_library_is_the_one_that_was_published():
    folder = files("attn_only_lens.viz") / "vendor"
    readme = (folder / "README.md").read_text("utf-8")
    bundle = (folder / "d3.min.js").read_bytes()
    assert hashlib.sha256(bundle).hexdigest() in readme
    version = re.search(r"d3 (\d+\.\d+\.\d+)", readme)[1]
    assert f"d3js.org v{version} " in bundle.decode("utf-8")
    assert "Permission to use, copy, modify" in (folder / "d3-LICENSE").read_text("utf-8")


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "deep" / "a.html"
    assert viz.write_html(go.Figure(go.Bar(y=[2, 3, 5])), path) == path
    whole = path.read_text("utf-8")
    assert "Plotly.newPlot" in whole
    assert not re.search(r"<script[^>]+src=", whole)
    with pytest.raises(TypeError, match="got a dict"):
        viz.write_html({}, path)
    with pytest.raises(UnicodeEncodeError):
        viz.write_html("half a page \ud800", path)
    assert path.read_text("utf-8") == whole
    assert [entry.name for entry in path.parent.iterdir()] == ["a.html"]


WITHOUT_EXTRAS = """
import sys
sys.modules |= {"plotly": None, "circuitsvis": None}  # as if they were not installed
import torch
from typer.testing import CliRunner
import attn_only_lens
from attn_only_lens import Contrast, circuits, expose_neuron_heads, patching, pretrained, viz
from attn_only_lens.cli import app

exposed = expose_neuron_heads(pretrained.modular_addition())
tokens, metric = torch.tensor([[3, 4, 113]]), patching.logit_diff(7, 8)
_, cache = exposed.model.run_with_cache(tokens)
graph = circuits.attribution_graph(exposed.model, Contrast(tokens, None, metric), top=5)
assert viz.attention_view(cache, "L0N7", ["3", "4", "="])
assert "d3js.org" in attn_only_lens.viz.circuit_view(graph)
contrast = Contrast(tokens, torch.tensor([[3, 5, 113]]), metric)
sweep = patching.attribution(exposed.model, contrast)
for name, draw in {
    "plotly": lambda: viz.sweep_heatmap(sweep),
    "circuitsvis": lambda: viz.attention_view(cache, "L0H2", ["3", "4", "="]),
}.items():
    try:
        draw()
    except ImportError as error:
        assert str(error) == (
            f"this picture needs {name}: pip install {name}"
        ), error
    else:
        raise AssertionError(name)
sweep.save("sweep.csv")
told = CliRunner().invoke(app, ["picture", "sweep.csv", "--out", "sweep.html"])
assert (told.exit_code, "pip install" in told.output) == (2, True), told.output
print("done")
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
    assert ran.stdout == "done\n", ran.stderr
