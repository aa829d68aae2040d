"""Tests of circuit and graph files: read back bit for bit, refused if damaged or changed."""

from dataclasses import fields, replace

import numpy as np
import pandas as pd
import pytest
import torch
from sealed_files import rewrite

from attn_only_lens import Contrast, circuits, load
from attn_only_lens import patching as p
from attn_only_lens.circuits.circuit import Circuit
from attn_only_lens.circuits.stability import Stability
from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.heads import HeadName


def same(first, second):
    """Check equality to the bit, up to the dtype of texts and the type of sequences."""
    if isinstance(first, pd.DataFrame):
        loose = {"check_dtype": False, "check_categorical": False}
        pd.testing.assert_frame_equal(first, second, check_exact=True, **loose)
        numbers = first.select_dtypes("number").dtypes
        assert (numbers == second.select_dtypes("number").dtypes).all()
    elif isinstance(first, Circuit | Stability):
        assert type(first) is type(second)
        for field in fields(first):
            same(getattr(first, field.name), getattr(second, field.name))
    else:
        assert first == second


def test_a_circuit_is_read_back_and_evaluated_alike(model, task, circuit, tmp_path):
    path = tmp_path / "circuit.json"
    assert circuit.candidates == p.Sites(positions=tuple(task.roles))
    for original in (circuit, replace(circuit, stability=None), circuit.core()):
        original.save(path)
        again = load(path)
        same(original, again)
        if len(original):
            first, second = (circuits.evaluate(model, one, task) for one in (original, again))
            assert first == second
    assert [file.name for file in tmp_path.iterdir()] == ["circuit.json"]
    circuit.save(path)
    same(circuit.core().frame, load(path).core().frame)
    assert load(path).to_frame()["in_circuit"].sum() == len(circuit)


def test_all_sites_and_positions(circuit, tmp_path):
    for sites in (
        p.Sites("all", -1, layers=[0, 3]),
        p.Sites(["L3H3", HeadName.parse("L0N7")], (np.int64(3), 1)),
        p.Sites("neurons", torch.tensor([1, 5])),
        p.Sites("heads", ["end", "start"]),
    ):
        replace(circuit, candidates=sites).save(tmp_path / "a.json")
        again = load(tmp_path / "a.json").candidates
        assert again == replace(sites, heads=list(map(str, sites.heads)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda circuit: circuit["frame"].pop("effect"), "its frame has no effect"),
        (lambda circuit: circuit["candidates"].update(layers=[3, 3]), "layer 3 more than once"),
    ],
)
def test_what_another_program_wrote_is_refused(circuit, change, match, tmp_path):
    circuit.save(tmp_path / "a.json")
    rewrite(tmp_path / "a.json", lambda whole: change(whole["circuit"]))
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path / "a.json")


@pytest.fixture(scope="module")
def graph(model):
    clean, corrupted = "The keys near the cabinet", "The key near the cabinet"
    contrast = Contrast(clean, corrupted, p.logit_diff(" are", " is"))
    return circuits.attribution_graph(model, contrast, top=23)


def test_a_graph_is_read_back_to_the_bit(graph, tmp_path):
    words = (("é", "\n", '"', " ", "日", "x"),)
    for original in (graph, graph.prune(top=5), replace(graph, tokens=words)):
        original.save(tmp_path / "graph.json")
        again = load(tmp_path / "graph.json")
        for field in fields(original):
            written, read = getattr(original, field.name), getattr(again, field.name)
            if field.name in ("nodes", "edges"):
                assert written.equals(read)
                assert (written.dtypes == read.dtypes).all()
            else:
                assert written == read
    assert [path.name for path in tmp_path.iterdir()] == ["graph.json"]


@pytest.mark.parametrize(
    ("table", "column", "value", "match"),
    [
        ("edges", "source", -1, "got source -1; expected a row index"),
        ("edges", "source", 10**6, "IndexError"),
        ("nodes", "position", 6, "embed@0 at a position outside the prompts"),
    ],
)
def test_a_graph_that_another_program_wrote_is_refused(
    graph, tmp_path, table, column, value, match
):
    """Refuse files with a correct digest whose contents are not a valid graph."""
    path = tmp_path / "graph.json"
    graph.save(path)

    def change(whole):
        whole["graph"][table][column][0] = value

    rewrite(path, change)
    with pytest.raises(CheckpointError, match=match):
        load(path)


def test_what_does_not_hang_together_is_no_graph(graph):
    with pytest.raises(InputError, match="'L9N9@9' of an edge is not a node"):
        replace(graph, edges=graph.edges.assign(source="L9N9@9"))
    with pytest.raises(InputError, match="expected one edge of each kind"):
        replace(graph, edges=graph.edges.iloc[[0, 0]])
