"""Tests of the graph of a difference between two runs: all sums hold, edge by edge, as by hand."""

import bridges
import pytest
import split_oracle
import torch
from common import tokens

from attn_only_lens import Bilinear, Contrast, circuits, convert
from attn_only_lens import patching as p
from attn_only_lens.circuits.linear_graph import LinearGraph, Places, node_frame
from attn_only_lens.engine.linear_map import of_difference
from attn_only_lens.errors import InputWarning
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # raised by TransformerLens
]
METRIC, EXACT = p.logit_diff(3, 7), 1e-12
FAMILIES = ["gpt2", "neox", "granite", "qwen3", "gemma2", "olmo2", "native_gated"]
if HAS_HOOKED_TRANSFORMER:  # bridges run with 4
    FAMILIES = ["converted parallel", "bilinear relu"]


def model_of(family):
    if " " not in family:
        return bridges.exposed_copy(bridges.boot(family))
    from models import build  # a module-level import would skip the module under 4

    layout, name = family.split()
    return convert(build(name), **{"gate": Bilinear()} if layout == "bilinear" else {})


def prompts(**size):
    """Return prompts that differ at two tokens, after equal first tokens."""
    clean = tokens(**size)
    corrupted = clean.clone()
    corrupted[:, 2], corrupted[:, -1] = (clean[:, 2] + 5) % 31, (clean[:, -1] + 3) % 31
    return clean, corrupted


@pytest.mark.both_versions
@pytest.mark.parametrize("family", FAMILIES)
def test_flows_into_every_node_add_up_to_its_attribution(family):
    """Sources write with the model's weights, which the backward pass does not use."""
    model = model_of(family)
    pair = Contrast(*prompts(pos=7), METRIC).pair(model)
    run = of_difference(model, pair, METRIC)
    chosen = [[(i, j) for i in range(7) for j in range(x.n_heads)] for x in run.sublayers]
    edges, _ = LinearGraph(run, pair, chosen).edges()
    places = Places.of(pair)
    attributions = [places.sums(run.attributions(i)) for i in range(len(chosen))]
    nodes = node_frame(run, places, attributions, chosen, 0.0).set_index("id")["attribution"]
    largest = nodes.abs().max()
    inflow = edges.groupby("target")["weight"].sum().reindex(nodes.index).fillna(0.0)
    ends = nodes.index.str.startswith("embed") | nodes.index.isin(["bias", "rest", "offset"])
    assert (inflow - nodes)[~ends].abs().max() <= EXACT * largest
    outflow = edges.groupby("source")["weight"].sum().reindex(nodes.index).fillna(0.0)
    assert (outflow - nodes).drop("metric").abs().max() <= EXACT * largest
    assert not (edges["source"] == "bias").any()
    assert abs(inflow["metric"] - run.value) <= EXACT * largest
    assert run.value == pytest.approx(sum(nodes.filter(like="embed")), rel=1e-6)


@pytest.mark.parametrize(("family", "kind"), [("neox", "attention"), ("gpt2", "neuron")])
def test_edges_into_patterns_and_values_add_up_to_the_parts_by_hand(family, kind):
    model, (clean, corrupted) = model_of(family), prompts(pos=7)
    n, letter = (model.cfg.n_heads, "H") if kind == "attention" else (37, "N")
    sites = [f"L1{letter}{i}@6" for i in range(n)]
    contrast = Contrast(clean, corrupted, METRIC)
    graph = circuits.attribution_graph(model, contrast, sites=sites)
    edges = graph.edges.assign(
        into=graph.edges["kind"].astype(str).replace({"q": "k", "gate": "k"})
    )
    got = edges.groupby(["target", "into"])["weight"].sum().unstack(fill_value=0.0).reindex(sites)
    by_pattern, by_value, one_sided = split_oracle.parts(model, clean, corrupted, kind, (3, 7))
    for column, part in (("k", by_pattern), ("value", by_value)):
        assert abs(got[column] - part).max() < 1e-5 * abs(part).max()  # rotations are in float32
    # Control: v of one run in the place of the mean gives other numbers.
    assert abs(one_sided - by_pattern).max() > 1e-2 * abs(by_pattern).max()


def test_half_precision_is_computed_in_float32_and_its_error_is_said():
    model, contrast = model_of("gpt2"), Contrast(*prompts(pos=7), METRIC)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().double()
    wide = circuits.attribution_graph(model, contrast, top=5)
    model.to(torch.bfloat16)
    with pytest.warns(InputWarning, match="in the model's precision"):
        graph = circuits.attribution_graph(model, contrast, top=5)
    assert graph.value == pytest.approx(wide.value, rel=1e-4)
