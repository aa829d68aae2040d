"""Graphs in files: read back to the bit, refused when damaged or newer; circuit-tracer's schema."""

import json
from dataclasses import fields, replace

import pytest
from common import tokens
from models import build
from sealed_files import rewrite

from attn_only_lens import CheckpointError, InputError, convert
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph, from_json, to_json, to_neuronpedia

METRIC = p.logit_diff(7, 11)

# What circuit-tracer's pydantic models demand, retold: field, type, whether it may be left out.
NODE = {
    "node_id": str,
    "feature": int,
    "layer": str,
    "ctx_idx": int,
    "feature_type": str,
    "token_prob": float,
    "is_target_logit": bool,
    "run_idx": int,
    "reverse_ctx_idx": int,
    "jsNodeId": str,
    "clerp": str,
    "influence": float,
    "activation": float,
}
METADATA = {
    "slug": str,
    "scan": str,
    "transcoder_list": list,
    "prompt_tokens": list,
    "prompt": str,
    "node_threshold": float,
    "schema_version": int,
}
Q_PARAMS = {
    "pinnedIds": list,
    "supernodes": list,
    "linkType": str,
    "clickedId": str,
    "sg_pos": str,
}


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
    refused(text[:-7], "is no JSON")
    refused("[]", "has format 'list'")
    refused(json.dumps({**whole, "format": "Sweep"}), "has format 'Sweep'")
    refused(json.dumps({**whole, "format_version": 1}), "version 1, and this .* reads 3")
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
        (("edges", "source", 0), -1, "got ends such as"),
        (("edges", "source", 0), 10**6, "IndexError"),
        (("nodes", "position", 0), 5, "embed@0 beyond prompts of 5 tokens"),
        (("nodes", "name", 0), 7, r"name\[0\]: got 7; expected str"),
        (("tokens", 0, 0), 7, r"tokens\[0\]\[0\]: got 7; expected str"),
        (("tokens", 0), "abcde", "got 'abcde'; expected list"),
        (("mass",), 1.5, "got mass=1.5"),
    ],
)
def test_what_another_program_wrote_is_read_as_it_stands_or_refused(
    graph, tmp_path, path_to, value, match
):
    """Files whose digest is right and whose contents are no graph's."""
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
    with pytest.raises(InputError, match="source 'L9N9@9', no node"):
        replace(graph, edges=edges)
    with pytest.raises(InputError, match="node bias twice"):
        replace(graph, nodes=graph.nodes.replace("rest", "bias"))
    with pytest.raises(InputError, match="kind 'x'"):
        replace(graph, edges=graph.edges.assign(kind="x"))
    with pytest.raises(InputError, match="not finite"):
        replace(graph, value=float("nan"))
    with pytest.raises(InputError, match="expected one of each kind"):
        replace(graph, edges=graph.edges.iloc[[0, 0]])
    with pytest.raises(InputError, match="got nodes with"):
        replace(graph, nodes=graph.nodes.drop(columns="value"))


def test_the_schema_of_circuit_tracer(graph, tmp_path):
    path = tmp_path / "g.json"
    to_neuronpedia(graph, path, slug="g", scan="tiny")
    whole = json.loads(path.read_text("utf-8"))
    assert set(whole) == {"metadata", "qParams", "nodes", "links"}
    for part, schema in ((whole["metadata"], METADATA), (whole["qParams"], Q_PARAMS)):
        assert {k: type(v) for k, v in part.items()} == schema
    for node in whole["nodes"]:
        assert {k: type(v) for k, v in node.items()} == NODE
        layer, _, pos = node["node_id"].split("_")
        assert (layer, int(pos)) == (node["layer"], node["ctx_idx"])
    ids = [node["node_id"] for node in whole["nodes"]]
    assert len(set(ids)) == len(ids) == len(graph.nodes)
    by_id = {node["node_id"]: node for node in whole["nodes"]}
    names = dict(zip(graph.nodes["id"], ids, strict=True))
    neuron = graph.nodes.query("kind == 'neuron'").iloc[0]
    node = by_id[names[neuron["id"]]]
    assert node["clerp"] == neuron["name"]
    assert node["layer"] == str(2 * neuron["layer"] + 1)
    assert node["activation"] == neuron["value"]
    blocks = 2 * graph.n_layers  # a logit is in layer n_layers + 1 of circuit-tracer's model
    assert by_id[names["metric"]]["layer"] == str(blocks + 1)
    assert {by_id[names["embed@3"]]["feature_type"], by_id[names["metric"]]["feature_type"]} == {
        "embedding",
        "logit",
    }
    # sums hold there, too
    into = {}
    for link in whole["links"]:
        into[link["target"]] = into.get(link["target"], 0.0) + link["weight"]
    assert into[names["metric"]] == pytest.approx(graph.value, abs=1e-9)
    assert len(whole["links"]) == (graph.edges["kind"] == "value").sum()


def test_several_prompts_have_no_place_in_that_schema(tmp_path):
    model = convert(build("gelu", scale=0.25))
    graph = attribution_graph(model, tokens(0, 2, 5), METRIC, top=3)
    with pytest.raises(InputError, match="of 2 prompts"):
        to_neuronpedia(graph, tmp_path / "g.json", slug="g")
    assert not list(tmp_path.iterdir())
