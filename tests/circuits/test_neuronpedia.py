"""Tests of graphs in the format of Neuronpedia and circuit-tracer."""

import json
from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from attn_only_lens import Contrast, circuits, expose_neuron_heads, load, tasks, transcoders
from attn_only_lens import patching as p
from attn_only_lens.errors import CheckpointError, InputError

pytestmark = pytest.mark.numeric


class Strict(BaseModel):
    """What Neuronpedia's schema and circuit-tracer's data classes require, with exact types."""

    model_config = ConfigDict(strict=True)


class Metadata(Strict):
    slug: str
    scan: str
    transcoder_list: list[str]
    prompt_tokens: list[str]
    prompt: str
    node_threshold: float
    schema_version: int


class View(Strict):
    pinnedIds: list[str]
    supernodes: list[list[str]]
    linkType: str
    clickedId: str
    sg_pos: str


class Node(Strict):
    node_id: str
    feature: int
    layer: str
    ctx_idx: int
    feature_type: Literal[
        "cross layer transcoder", "mlp reconstruction error", "embedding", "logit",
        "attention head", "mlp neuron", "transcoder skip",
    ]  # fmt: skip
    token_prob: float
    is_target_logit: bool
    run_idx: int
    reverse_ctx_idx: int
    jsNodeId: str
    clerp: str
    influence: float
    activation: float | None


class Link(Strict):
    source: str
    target: str
    weight: float


class File(Strict):
    metadata: Metadata
    qParams: View
    nodes: list[Node]
    links: list[Link]


def saved(graph, path, **options):
    """Return the file's contents, with each node's id in the graph, after general checks."""
    graph.save(path, format="neuronpedia", **options)
    file = File(**json.loads(path.read_text()))
    assert len({node.node_id for node in file.nodes}) == len(file.nodes) == len(graph.nodes)
    # The viewers merge nodes that agree in these three.
    assert len({(x.layer, x.feature, x.ctx_idx) for x in file.nodes}) == len(file.nodes)
    ids = dict(zip([node.node_id for node in file.nodes], graph.nodes["id"], strict=True))
    sums = Counter()
    for link in file.links:
        sums[ids[link.target]] += link.weight
    for target, inflow in graph.inflow().items():
        assert sums[target] == pytest.approx(inflow, abs=1e-6 + 1e-6 * abs(graph.value))
    assert all(0 <= node.ctx_idx < len(file.metadata.prompt_tokens) for node in file.nodes)
    return file, ids


@pytest.fixture(scope="module")
def model():
    return expose_neuron_heads(load("small-english"), copy=True).model


KEYS = Contrast(
    "The keys near the cabinet", "The key near the cabinet", p.logit_diff(" are", " is")
)


@pytest.fixture(scope="module")
def graph(model):
    return circuits.attribution_graph(model, KEYS, top=30)


def test_nodes_links_labels_and_groups_are_those_of_the_graph(graph, tmp_path):
    heads = graph.heads["id"].tolist()
    groups = {"first": heads[:3], "others": tuple(heads[3:5])}
    labels = {heads[0]: "a label"}
    file, ids = saved(graph, tmp_path / "keys.json", labels=labels, groups=groups)
    by_id = {ids[node.node_id]: node for node in file.nodes}
    kinds = {"attention": "attention head", "neuron": "mlp neuron", "embed": "embedding"}
    kinds |= {"metric": "logit", "rest": "mlp reconstruction error", "bias": "embedding"}
    for row in graph.nodes.itertuples():
        node = by_id[row.id]
        assert node.feature_type == kinds[row.kind]
        assert node.clerp == {heads[0]: "a label"}.get(row.id, row.id) or row.kind == "metric"
        if row.kind in ("attention", "neuron"):
            assert (node.layer, node.ctx_idx) == (str(row.layer), row.position)
            size = abs(row.attribution)
            sizes = graph.heads["attribution"].abs()
            larger = sizes[sizes >= size].sum() / sizes.sum()
            assert node.influence == pytest.approx(larger)
    assert [[ids[x] for x in some[1:]] for some in file.qParams.supernodes] == [
        heads[:3],
        heads[3:5],
    ]
    assert [some[0] for some in file.qParams.supernodes] == ["first", "others"]
    assert ids[file.qParams.clickedId] == "metric"
    assert file.metadata.prompt == "<s>The keys near the cabinet"
    assert "(p=" in by_id["metric"].clerp  # circuit-tracer's viewer splits the label here
    odd = replace(graph, metric="logit_diff(\"'s\", ' is') (p=3)").prune(top=5)
    file, ids = saved(odd, tmp_path / "odd.json", labels=labels | {heads[-1]: "not a node"})
    (label,) = (node.clerp for node in file.nodes if node.feature_type == "logit")
    assert label.count('"') == 2
    assert label.split("(p=")[1:] == ["1.000)"]


def test_graphs_by_role_of_one_run_and_with_features_are_written(model, tmp_path):
    task = tasks.agreement(model.tokenizer, 4)
    by_role = circuits.attribution_graph(model, task, sites=p.Sites(positions="roles")).prune(top=9)
    file, _ = saved(by_role, tmp_path / "roles.json")
    assert tuple(file.metadata.prompt_tokens) == by_role.roles
    one_run = circuits.attribution_graph(model, Contrast(KEYS.clean, None, KEYS.metric), top=9)
    saved(one_run, tmp_path / "one.json")
    features = load("small-english")
    transcoders.attach(features, transcoders.load("small-english"))
    graph = circuits.attribution_graph(features, KEYS, top=40)
    file, ids = saved(graph, tmp_path / "features.json")
    feature = next(x for x in file.nodes if x.feature_type == "cross layer transcoder")
    layer, index = ids[feature.node_id].split("@")[0][1:].split("F")
    total = int(layer) + int(index)
    assert feature.feature == total * (total + 1) // 2 + int(index)  # Cantor's pairing


def test_wrong_options_write_nothing_and_such_files_are_not_read(graph, tmp_path):
    path = tmp_path / "keys.json"
    for options, reason in (
        ({"format": "gexf"}, "got format='gexf'"),
        ({"labels": {"L0N1@1": "x"}}, "with format='attn_only_lens'; expected 'neuronpedia'"),
        ({"format": "neuronpedia", "groups": {"x": ["L9N1@1"]}}, r"got \['L9N1@1'\] in groups"),
        ({"format": "neuronpedia", "groups": {"x": "L3H3@5"}}, "got wrong groups; expected"),
        ({"format": "neuronpedia", "groups": [1]}, "got wrong groups; expected"),
        ({"format": "neuronpedia", "labels": None}, "got wrong labels; expected"),
        ({"format": "neuronpedia", "labels": {"L3H3@5": 3}}, "got wrong labels; expected"),
    ):
        with pytest.raises(InputError, match=reason):
            graph.save(path, **options)
        assert not path.exists()
    graph.save(path, format="neuronpedia")
    with pytest.raises(CheckpointError, match="which lacks the values of the corrupted run"):
        load(path)
