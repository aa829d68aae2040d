"""Tests of graph files: they are read back bit for bit, and refused if damaged or newer."""

import json
from dataclasses import fields, replace

import pytest
from common import tokens
from models import build
from sealed_files import rewrite

from attn_only_lens import convert
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph, from_json, to_json
from attn_only_lens.errors import CheckpointError, InputError

METRIC = p.logit_diff(7, 11)


@pytest.fixture(scope="module")
def graph():
    return attribution_graph(convert(build("gelu", scale=0.25)), tokens(0, 1, 5), METRIC, top=23)


def test_a_graph_is_read_back_to_the_bit(graph, tmp_path):
    for original in (
        graph,
        graph.prune(top=5),
        replace(graph, tokens=(("é", "\n", '"', " ", "日"),)),
    ):
        to_json(original, tmp_path / "graph.json")
        again = from_json(tmp_path / "graph.json")
        for field in fields(original):
            written, read = getattr(original, field.name), getattr(again, field.name)
            if field.name in ("nodes", "edges"):
                assert written.equals(read)
                assert (written.dtypes == read.dtypes).all()
            else:
                assert written == read
    assert [path.name for path in tmp_path.iterdir()] == ["graph.json"]


def test_damage_newer_versions_and_other_files_are_refused(graph, tmp_path):
    path = tmp_path / "graph.json"
    to_json(graph, path)
    whole = json.loads(path.read_text("utf-8"))

    def refused(text, match):
        path.write_text(text, "utf-8")
        with pytest.raises(CheckpointError, match=match):
            from_json(path)

    text = json.dumps(whole)
    refused(text[:-7], "is not valid JSON")
    refused("[]", "has format 'list'")
    refused(json.dumps({**whole, "format": "Sweep"}), "has format 'Sweep'")
    refused(json.dumps({**whole, "format_version": 1}), "version 1, but this .* reads version 3")
    whole["graph"]["edges"]["weight"][3] += 1e-6
    refused(json.dumps(whole), "was changed after it was written")
    refused("[" * 100_000, "recursion")
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        from_json(path)


@pytest.mark.parametrize(
    ("path_to", "value", "match"),
    [
        (("edges", "source", 0), 0.7, "expected int"),
        (("edges", "source", 0), -1, "got source -1; expected a row index"),
        (("edges", "source", 0), 10**6, "IndexError"),
        (("nodes", "position", 0), 5, "embed@0 at a position outside the prompts"),
        (("nodes", "name", 0), 7, r"name\[0\]: got 7; expected str"),
        (("tokens", 0, 0), 7, r"tokens\[0\]\[0\]: got 7; expected str"),
        (("tokens", 0), "abcde", "got 'abcde'; expected list"),
        (("mass",), 1.5, "got mass=1.5"),
    ],
)
def test_what_another_program_wrote_is_read_as_it_stands_or_refused(
    graph, tmp_path, path_to, value, match
):
    """Refuse files with a correct digest whose contents are not a valid graph."""
    path = tmp_path / "graph.json"
    to_json(graph, path)
    *within, last = path_to

    def change(whole):
        inner = whole["graph"]
        for key in within:
            inner = inner[key]
        inner[last] = value

    rewrite(path, change)
    with pytest.raises(CheckpointError, match=match):
        from_json(path)


def test_what_does_not_hang_together_is_no_graph(graph):
    edges = graph.edges.copy()
    edges.loc[3, "source"] = "L9N9@9"
    with pytest.raises(InputError, match="source 'L9N9@9' of an edge is not a node"):
        replace(graph, edges=edges)
    with pytest.raises(InputError, match="node bias twice"):
        replace(graph, nodes=graph.nodes.replace("rest", "bias"))
    with pytest.raises(InputError, match="kind 'x'"):
        replace(graph, edges=graph.edges.assign(kind="x"))
    with pytest.raises(InputError, match="not finite"):
        replace(graph, value=float("nan"))
    with pytest.raises(InputError, match="expected one edge of each kind"):
        replace(graph, edges=graph.edges.iloc[[0, 0]])
    with pytest.raises(InputError, match="got nodes with"):
        replace(graph, nodes=graph.nodes.drop(columns="value"))
