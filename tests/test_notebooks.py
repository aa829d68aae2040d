"""Tests that the notebooks run, give the stored outputs, and are fit to be published.

They are written for transformer-lens 4, and run with it.
"""

import ast
import re
from collections import Counter
from contextlib import redirect_stdout
from html import unescape
from io import StringIO

import execute
import nbformat
import pandas as pd
import pytest
import torch
from common import needs_transformer_lens_4
from IPython.core.inputtransformer2 import TransformerManager
from plotly.basedatatypes import BaseFigure

pytestmark = pytest.mark.numeric

NOTEBOOKS = execute.NOTEBOOKS
KINDS = "image/png", "text/plain", "text/html", "image/svg+xml"
# A number, unless it is part of a name such as L0N142 or float64.
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(notebook):
    """Return the stored outputs of each cell as text."""
    return [
        "".join(output.get("text") or output.data.get("text/plain", "") for output in cell.outputs)
        for cell in code_cells(notebook)
    ]


def run(path):
    """Return the outputs of each cell from a new run."""
    namespace = {}
    with torch.enable_grad(), pd.option_context("display.max_columns", 20):  # as in a kernel
        for cell in code_cells(read(path)):
            *body, last = ast.parse(TransformerManager().transform_cell(cell.source)).body
            with redirect_stdout(StringIO()) as printed:
                exec(compile(ast.Module(body, []), path.name, "exec"), namespace)
                if isinstance(last, ast.Expr):
                    value = eval(compile(ast.Expression(last.value), path.name, "eval"), namespace)
                else:
                    value = exec(compile(ast.Module([last], []), path.name, "exec"), namespace)
            text = execute.FIGURE if isinstance(value, BaseFigure) else repr(value)
            yield printed.getvalue() + text * (value is not None)


def number(text):
    return float(text.replace(",", ""))


def agree(first, second):
    """Return whether two texts are equal, except for numbers that differ by rounding."""
    words = [NUMBER.sub("#", text).split() for text in (first, second)]
    numbers = [[number(n) for n in NUMBER.findall(text)] for text in (first, second)]
    # Most numbers have four digits; numbers below the absolute bound are only rounding.
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-3)


@pytest.mark.usefixtures("working_cache")
@needs_transformer_lens_4
@each_notebook
def test_it_gives_what_is_stored(path, tmp_path, monkeypatch):
    """The notebook runs in this process, because a kernel takes some seconds to start."""
    monkeypatch.chdir(tmp_path)
    for now, stored in zip(run(path), said(read(path)), strict=True):
        assert agree(now, stored), f"{stored}\nis now\n{now}\n`make notebooks` stores it"


def test_a_difference_is_seen():
    table = "  name  score\n0 L0H1  0.7495"
    assert agree(table, " name score\n0 L0H1 0.74950001")
    for changed in ("0.7395", "0.7495 3", "", "-0.7495"):
        assert not agree(table, table.replace("0.7495", changed))
    assert not agree(table, table.replace("L0H1", "L0H2"))


@each_notebook
def test_outputs_are_of_this_code_in_this_order(path):
    notebook = read(path)
    assert notebook.metadata.attn_only_lens.sources == execute.digest(notebook), "make notebooks"
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    cells[3].source += "  # edited"
    assert notebook.metadata.attn_only_lens.sources != execute.digest(notebook)


@each_notebook
def test_outputs_are_there_small_and_of_no_machine(path):
    assert path.stat().st_size < 1_500_000
    kinds = Counter()
    for output in (output for cell in code_cells(read(path)) for output in cell.outputs):
        assert output.output_type in ("display_data", "execute_result", "stream")
        assert output.get("name") != "stderr"
        data = output.get("data", {"text/plain": output.get("text")})
        assert set(data) <= {*KINDS, execute.PLOTLY}
        assert execute.PLOTLY not in data or "image/svg+xml" in data
        kinds.update(list(data))
        for text in (text for kind, text in data.items() if kind in KINDS[1:]):
            assert not elsewhere(text)
            assert not elsewhere(execute.framed(text))
            assert not re.search(r"/(tmp|home|root|work|Users)/|site-packages", text)
    assert kinds["text/html"] >= 1
    assert kinds["text/html"] + kinds["image/png"] + kinds[execute.PLOTLY] >= 3


def elsewhere(html):
    """Return what a page would fetch from another machine, in a frame's srcdoc too."""
    for _ in range(2):
        html = unescape(html)
    return re.findall(r"<\w+[^<>]*\b(?:src|href)\s*=\s*[\"']?(?:https?:)?//[^\s\"'>]*", html)


def test_what_would_be_fetched_is_seen():
    assert elsewhere('<script src="https://cdn.invalid/x.js"></script>')
    assert elsewhere('<iframe srcdoc="&lt;link href=&#x27;//cdn.invalid&#x27;&gt;"></iframe>')
    assert not elsewhere('<script>const at = "https://www.w3.org/2000/svg"</script>')
