"""Tests of the graph of a circuit's own run: it adds up to what the circuit keeps, as by hand.

The oracle puts plain hooks on the model: every head outside the circuit gets its ablated output.
"""

from dataclasses import replace
from functools import cache

import bridges
import pytest
import torch
from common import tokens
from patched_runs import node_outputs, others_held

from attn_only_lens import Contrast, load
from attn_only_lens import patching as p
from attn_only_lens.circuits import (
    Search,
    attribution_graph,
    discover,
    evaluate,
    group_nodes,
)
from attn_only_lens.circuits.circuit import SITE
from attn_only_lens.errors import InputError
from attn_only_lens.viz import circuit_view

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # raised by TransformerLens
]
METRIC, EXACT, POS = p.logit_diff(3, 7), 1e-12, 7
CASES = [("gpt2", "zero"), ("gpt2", "positional_mean"), ("gemma2", "resample")]


def contrast(seed=0, batch=2):
    clean = tokens(seed, batch=batch, pos=POS)
    corrupted = clean.clone()
    corrupted[:, 2], corrupted[:, -1] = (clean[:, 2] + 5) % 31, (clean[:, -1] + 3) % 31
    return Contrast(clean, corrupted, METRIC, roles={"subject": 2, "end": -1})


@cache
def model_of(family):
    return bridges.exposed_copy(bridges.boot(family))


def some_circuit(model, some, ablation="resample", share=0.2, **sites):
    """Return a circuit of some share of all sites, which no search chose."""
    ranking = p.attribution(model, some, sites=p.Sites(**sites), method=p.Estimate(budget=0))
    frame = ranking.frame[SITE].assign(effect=1.0).sample(frac=share, random_state=0)
    search = Search(ablation=ablation, order="magnitude", n_random=0)
    circuit = discover(model, some, sites=p.Sites(**sites), search=search)
    return replace(circuit, frame=frame.reset_index(drop=True))


@torch.no_grad()
def what_it_keeps(model, some, circuit, ablation):
    """Return the metric's change from the corrupted run to the circuit's run, by plain hooks."""
    ablated_run = some.corrupted if ablation == "resample" else some.clean
    ablate = {
        "resample": lambda z: z,
        "zero": torch.zeros_like,
        "positional_mean": lambda z: z.mean(0, keepdim=True).expand_as(z),
    }[ablation]
    outputs = node_outputs(model.run_with_cache(ablated_run)[1], 2)
    hooks = others_held(circuit.sites, {x: (point, ablate(z)) for x, (point, z) in outputs.items()})

    def run(x, hooks):
        logits = model.run_with_hooks(x, fwd_hooks=hooks)[:, -1]
        return (logits[:, 3] - logits[:, 7]).mean().item()

    return run(some.clean, hooks) - run(some.corrupted, [] if ablation == "resample" else hooks)


def off(graph):
    """Return how far inflows are from attributions, and tokens from the value, relative."""
    attribution, inflow = graph.nodes.set_index("id")["attribution"], graph.inflow()
    heads = graph.heads["id"]
    apart = (inflow.reindex(heads).fillna(0.0) - attribution[heads]).abs().max()
    tokens_apart = abs(attribution.filter(like="embed").sum() - graph.value)
    metric_apart = abs(inflow["metric"] - graph.value)
    return max(apart, tokens_apart, metric_apart) / attribution.abs().max()


@pytest.mark.parametrize(("family", "ablation"), CASES)
def test_it_adds_up_to_what_the_circuit_keeps(family, ablation):
    model, some = model_of(family), contrast()
    circuit = some_circuit(model, some, ablation)
    graph = attribution_graph(model, some, sites=circuit)
    expected = what_it_keeps(model, some, circuit, ablation)
    assert graph.value == pytest.approx(expected, rel=1e-5)  # rotations and norms are in float32
    assert off(graph) <= EXACT
    assert not (graph.edges["source"] == "rest").any()
    assert set(graph.heads["id"]) == set(circuit.sites)
    # Control: the graph of the whole difference with the same nodes has a rest.
    whole = attribution_graph(model, some, sites=circuit.sites)
    assert (whole.edges["source"] == "rest").any()
    assert whole.value != pytest.approx(graph.value, rel=1e-2)


def test_it_is_stored_with_its_circuit_and_drawn_again(tmp_path):
    model, some = model_of("gpt2"), contrast(batch=1)
    circuit = some_circuit(model, some)
    graph = attribution_graph(model, some, sites=circuit)
    graph.save(tmp_path / "graph.json")
    again = load(tmp_path / "graph.json")
    assert again.edges.equals(graph.edges)
    assert again.circuit.sites == circuit.sites
    assert again.circuit.candidates == circuit.candidates
    assert circuit_view(again, model, some)
    # Control: the values of the circuit's run are not those of the clean run.
    with pytest.raises(InputError, match="the graph is from another model, or from other prompts"):
        circuit_view(replace(again, circuit=None), model, some)


def test_groups_of_its_nodes_ablate_what_the_circuit_ablates():
    """The nodes keep what `evaluate` says, also with other ablations and few candidates."""
    model, some = model_of("gpt2"), contrast()
    circuit = some_circuit(model, some, "mean", share=0.5, heads=["heads"])
    graph = attribution_graph(model, some, sites=circuit)
    groups = group_nodes(graph, model, some)
    expected = evaluate(model, circuit, some).faithfulness
    assert groups.faithfulness == pytest.approx(expected, abs=1e-6)
    # Control: resampling all other sites keeps another share.
    resampled = replace(circuit, ablation="resample", candidates=p.Sites())
    assert evaluate(model, resampled, some).faithfulness != pytest.approx(expected, abs=1e-2)
