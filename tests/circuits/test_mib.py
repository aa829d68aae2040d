"""Tests of circuits and graphs in the format of the MIB benchmark's evaluation.

The reader below shares no code with the writer. It builds nodes and edges from `cfg` by the rules
of `Graph.from_model` in hannamw/EAP-IG, and takes from the file what `Graph.from_json` takes.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bridges import with_heads
from common import needs_hooked_transformer
from pydantic import BaseModel, ConfigDict

from attn_only_lens import (
    Contrast,
    circuits,
    convert,
    expose_neuron_heads,
    load,
    tasks,
    transcoders,
)
from attn_only_lens import patching as p
from attn_only_lens.errors import CheckpointError, InputError

pytestmark = pytest.mark.numeric


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class GraphConfig(Strict):
    n_layers: int
    n_heads: int
    parallel_attn_mlp: bool
    d_model: int


class Node(Strict):
    in_graph: bool
    score: float | None = None  # MIB keeps nodes without a score in every graph


class Edge(Strict):
    in_graph: bool
    score: float


class File(Strict):
    cfg: GraphConfig
    nodes: dict[str, Node]
    edges: dict[str, Edge]


def forward_index(cfg, name):
    """The row of a node in EAP-IG's matrix of scores."""
    if name == "input":
        return 0
    layer = int(re.match(r"[am](\d+)", name)[1])
    first = 1 + layer * (cfg.n_heads + 1)
    return first + (cfg.n_heads if name[0] == "m" else int(name.partition(".h")[2]))


def read(path):
    """Return the config, and matrices of edges [forward, backward] as EAP-IG has them."""
    file = File(**json.loads(path.read_text()))
    cfg, n = file.cfg, file.cfg.n_layers * (file.cfg.n_heads + 1) + 1
    columns = [
        column
        for layer in range(cfg.n_layers)
        for column in (
            *(f"a{layer}.h{head}<{side}>" for side in "qkv" for head in range(cfg.n_heads)),
            f"m{layer}",
        )
    ] + ["logits"]
    real = torch.zeros(n, len(columns), dtype=torch.bool)
    for j, column in enumerate(columns):
        target = column.partition("<")[0]
        end = n if target == "logits" else 1 + int(target[1:].partition(".")[0]) * (cfg.n_heads + 1)
        if target[0] == "m" and not cfg.parallel_attn_mlp:
            end += cfg.n_heads
        real[:end, j] = True
    scores, kept = torch.zeros(real.shape, dtype=torch.float64), torch.zeros_like(real)
    seen = torch.zeros_like(real)
    for name, edge in file.edges.items():
        source, target = name.split("->")
        place = forward_index(cfg, source), columns.index(target)
        scores[place], kept[place], seen[place] = edge.score, edge.in_graph, True
    assert torch.equal(seen, real)  # every edge of the model, and no other
    forward = [forward_index(cfg, name) for name in file.nodes if name != "logits"]
    assert forward == list(range(n))
    assert len(file.nodes) == n + 1
    without_score = {name for name, node in file.nodes.items() if node.score is None}
    assert without_score == {"input", "logits"}
    assert all(file.nodes[name].in_graph for name in without_score)
    return SimpleNamespace(file=file, columns=columns, real=real, scores=scores, kept=kept)


@pytest.fixture(scope="module")
def model():
    return expose_neuron_heads(load("small-english"), copy=True).model


KEYS = Contrast(
    "The keys near the cabinet", "The key near the cabinet", p.logit_diff(" are", " is")
)


def test_scores_of_a_graph_are_sums_over_positions_and_neurons(model, tmp_path):
    graph = circuits.attribution_graph(model, KEYS, top=60)
    graph.save(tmp_path / "keys.json", format="mib", model=model)
    mib = read(tmp_path / "keys.json")
    assert mib.file.cfg.model_dump() == {
        **{"n_layers": 4, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 128}
    }
    expected, of_nodes = torch.zeros_like(mib.scores), Counter()
    layers = graph.nodes.set_index("id")["layer"]
    heads = {x: f"{re.match('L[0-9]+(H[0-9]+|N)', x)[0]}" for x in graph.heads["id"]}

    def place(node):
        if node.startswith("embed"):
            return 0
        layer, head = int(layers[node]), re.search(r"H(\d+)", heads[node])
        return 1 + 5 * layer + (int(head[1]) if head else 4)

    for row in graph.heads.itertuples():
        of_nodes[place(row.id)] += row.attribution
    for edge in graph.edges.itertuples():
        if edge.source in ("bias", "rest", "offset") or edge.target in ("bias", "rest"):
            continue
        into = edge.target
        if into == "metric":
            column = len(mib.columns) - 1
        elif "H" in into:
            head = int(re.search(r"H(\d+)", into)[1])
            column = 13 * int(layers[into]) + 4 * "qkv".index(edge.kind[0]) + head
        else:
            column = 13 * int(layers[into]) + 12
        expected[place(edge.source), column] += edge.weight
    assert torch.allclose(mib.scores, expected, atol=1e-9)
    assert torch.equal(mib.kept, expected != 0)
    assert mib.kept[:, [c.endswith("<q>") for c in mib.columns]].any()
    for name, node in mib.file.nodes.items():
        if name not in ("input", "logits"):
            index = forward_index(mib.file.cfg, name)
            assert node.score == pytest.approx(of_nodes[index], abs=1e-9)
            assert node.in_graph == (index in of_nodes)
    assert sum(node.in_graph for node in mib.file.nodes.values()) < len(mib.file.nodes)


def test_a_circuit_has_the_nodes_of_its_sites_and_the_edges_between_them(model, tmp_path):
    pairs = tasks.agreement(model.tokenizer, 4)
    for sites in (p.Sites(), p.Sites(positions="roles")):
        circuit = circuits.discover(model, pairs, sites=sites, faithfulness=0.7)
        circuit.save(tmp_path / "circuit.json", format="mib", model=model)
        mib = read(tmp_path / "circuit.json")
        effects = Counter()
        for row in circuit.frame.itertuples():
            node = f"a{row.layer}.h{row.index}" if row.kind == "attention" else f"m{row.layer}"
            effects[node] += row.effect
        inside = {name for name, node in mib.file.nodes.items() if node.in_graph}
        assert inside == {*effects, "input", "logits"}
        assert 0 < len(effects) < len(mib.file.nodes) - 2
        for name, node in mib.file.nodes.items():
            if node.score is not None:
                assert node.score == pytest.approx(effects.get(name, 0.0))
        # As MIB's evaluation of nodes: all edges out of nodes, without those into dropped nodes.
        rows = [forward_index(mib.file.cfg, name) for name in inside - {"logits"}]
        kept = torch.zeros_like(mib.real)
        kept[rows] = mib.real[rows]
        kept[:, [column.partition("<")[0] not in inside for column in mib.columns]] = False
        assert torch.equal(mib.kept, kept)
        assert torch.equal(mib.scores, kept.double())


@pytest.mark.parametrize(
    "kind", ["neox", pytest.param("converted", marks=needs_hooked_transformer)]
)
def test_parallel_layers_and_converted_models_have_the_layers_of_the_original(kind, tmp_path):
    if kind == "neox":  # heads and neurons of a layer read the same stream
        model = with_heads("neox")
        contrast = Contrast(torch.arange(7), torch.arange(1, 8), p.logit_diff(3, 4))
    else:
        model = convert(load("modular-addition"))
        contrast = Contrast(
            torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]), p.logit_diff(7, 8)
        )
    graph = circuits.attribution_graph(model, contrast, top=40)
    graph.save(tmp_path / "graph.json", format="mib", model=model)
    mib = read(tmp_path / "graph.json")
    assert mib.file.cfg.parallel_attn_mlp == (kind == "neox")
    assert mib.kept.any()
    total = graph.edges.query("target == 'metric' and source not in ['bias', 'rest', 'offset']")
    assert float(mib.scores[:, -1].sum()) == pytest.approx(total["weight"].sum(), rel=1e-6)


def test_the_file_cannot_be_loaded(model, tmp_path):
    path = tmp_path / "graph.json"
    circuits.attribution_graph(model, KEYS, top=9).save(path, format="mib", model=model)
    with pytest.raises(CheckpointError, match="for MIB, which lacks positions"):
        load(path)


def test_what_mib_has_no_place_for_is_refused_with_all_reasons(model, tmp_path):
    path = tmp_path / "graph.json"
    graph = circuits.attribution_graph(model, KEYS, top=9)
    one_run = circuits.attribution_graph(model, Contrast(KEYS.clean, None, KEYS.metric), top=9)
    circuit = circuits.discover(model, KEYS, faithfulness=0.5)
    odd = replace(circuit, frame=circuit.frame.assign(effect=float("nan")))
    features = load("small-english")
    transcoders.attach(features, transcoders.load("small-english"))
    of_features = circuits.attribution_graph(
        features, Contrast(KEYS.clean, None, KEYS.metric), top=40
    )
    small = expose_neuron_heads(load("modular-addition"), copy=True).model
    for saved, options, reasons in (
        (graph, {"format": "mib"}, ["expected the model, with"]),
        (graph, {"format": "mib", "model": load("small-english")}, ["expected the model, with"]),
        (graph, {"model": model}, ["got a model with format='attn_only_lens'"]),
        (graph, {"format": "mib", "model": model, "labels": {"L0H0@1": "x"}}, ["got labels"]),
        (graph, {"format": "mib", "model": small}, ["which this model does not have"]),
        (one_run, {"format": "mib", "model": model}, ["got a graph of one run"]),
        (
            of_features,
            {"format": "mib", "model": model},
            ["got nodes of kinds .*'feature'", "got a graph of one run"],
        ),
        (circuit, {"format": "mib"}, ["expected the model, with"]),
        (odd, {"format": "mib", "model": model}, ["not finite; expected finite"]),
        (circuit, {"format": "neuronpedia"}, ["got format='neuronpedia'"]),
        (circuit, {"model": model}, ["got a model with format='attn_only_lens'"]),
    ):
        with pytest.raises(InputError) as caught:
            saved.save(path, **options)
        for reason in reasons:
            assert re.search(reason, str(caught.value)), (reason, caught.value)
        assert not path.exists()
