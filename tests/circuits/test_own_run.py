"""Tests of the graph of a circuit's own run: it adds up to what the circuit keeps, as by hand.

The oracle puts plain hooks on the model: every head outside the circuit gets its ablated output.
"""

from dataclasses import replace
from functools import cache

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from common import mlp_hook, relative, tokens

from attn_only_lens import Contrast, HeadName, expose_neuron_heads, pretrained
from attn_only_lens import patching as p
from attn_only_lens.circuits import (
    CircuitGraph,
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
ABLATIONS = ["resample", "zero", "mean", "positional_mean"]
CASES = [("gpt2", x) for x in ABLATIONS] + [(x, "resample") for x in ("llama", "gemma2", "neox")]


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


def z_hook(head):
    return (
        f"blocks.{head.layer}.attn.hook_z"
        if head.kind == "attention"
        else mlp_hook("z", head.layer)
    )


@torch.no_grad()
def what_it_keeps(model, some, circuit, places, ablation):
    """Return the metric's change from the corrupted run to the circuit's run, by plain hooks."""
    names = [name for name in model.hook_dict if name.endswith(("attn.hook_z", mlp_hook("z")[9:]))]
    clean, corrupted = (
        model.run_with_cache(x, names_filter=names, return_cache_object=False)[1]
        for x in (some.clean, some.corrupted)
    )
    held = {
        "resample": lambda name: corrupted[name],
        "zero": lambda name: torch.zeros_like(clean[name]),
        "mean": lambda name: clean[name].flatten(0, 1).mean(0).expand_as(clean[name]),
        "positional_mean": lambda name: clean[name].mean(0, keepdim=True).expand_as(clean[name]),
    }[ablation]
    outside = {name: torch.zeros(clean[name].shape[:3], dtype=torch.bool) for name in names}
    for name in names:
        for pos in places.values():
            outside[name][:, pos] = True
    for name, place in circuit.frame[["name", "position"]].to_numpy():
        head = HeadName.parse(str(name))
        outside[z_hook(head)][:, places[place], head.index] = False

    def run(x, ablated):
        hooks = [
            (name, lambda z, hook, name=name: torch.where(outside[name][..., None], held(name), z))
            for name in names
        ]
        logits = model.run_with_hooks(x, fwd_hooks=hooks if ablated else [])[:, -1]
        return (logits[:, 3] - logits[:, 7]).mean().item()

    return run(some.clean, True) - run(some.corrupted, ablation != "resample")


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
    places = {pos: pos for pos in range(POS)}
    expected = what_it_keeps(model, some, circuit, places, ablation)
    assert graph.value == pytest.approx(expected, rel=1e-5)  # rotations and norms are in float32
    assert off(graph) <= EXACT
    assert not (graph.edges["source"] == "rest").any()
    assert set(graph.heads["id"]) == set(circuit.sites)
    # Control: the graph of the whole difference with the same nodes has a rest.
    whole = attribution_graph(model, some, sites=circuit.sites)
    assert (whole.edges["source"] == "rest").any()
    assert whole.value != pytest.approx(graph.value, rel=1e-2)


@pytest.mark.parametrize(
    ("family", "ablation"), [("gpt2", "positional_mean"), ("llama", "resample")]
)
def test_tokens_without_a_role_keep_their_outputs(family, ablation):
    """The circuit is by role; the graph needs no positions."""
    model, some = model_of(family), contrast()
    circuit = some_circuit(model, some, ablation, share=0.8, positions="roles")
    graph = attribution_graph(model, some, sites=circuit)
    places = {"subject": 2, "end": POS - 1}
    expected = what_it_keeps(model, some, circuit, places, ablation)
    assert graph.value == pytest.approx(expected, rel=1e-5)
    assert graph.inflow()["metric"] == pytest.approx(graph.value, rel=EXACT)
    assert graph.tokens == (("subject", "end"),)
    assert (graph.edges["source"] == "rest").any()


def test_a_search_found_it_and_it_keeps_what_the_search_says():
    """Where both runs end with the same token, both percentages are of the same difference."""
    model = model_of("gpt2")
    some = contrast()
    same_end = some.corrupted.clone()
    same_end[:, -1] = some.clean[:, -1]
    some = replace(some, corrupted=same_end)
    circuit = discover(model, some, search=Search(n_random=0))
    graph = attribution_graph(model, some, sites=circuit)
    change = p.activation_patch(model, some, sites=["L0H1"])
    kept = graph.value / (change.clean_value - change.corrupted_value)
    assert kept == pytest.approx(circuit.faithfulness, abs=1e-6)


def test_it_is_stored_with_its_circuit_and_drawn_again(tmp_path):
    model, some = model_of("gpt2"), contrast(batch=1)
    circuit = some_circuit(model, some)
    graph = attribution_graph(model, some, sites=circuit)
    graph.save(tmp_path / "graph.json")
    again = CircuitGraph.load(tmp_path / "graph.json")
    assert again.edges.equals(graph.edges)
    assert again.circuit.sites == circuit.sites
    assert again.circuit.candidates == circuit.candidates
    assert "nothing in it comes from the rest of the model" in circuit_view(again, model, some)
    assert group_nodes(again, model, some).nodes is not None
    # Control: the values of the circuit's run are not those of the clean run.
    with pytest.raises(InputError, match="the graph is from another model, or from other prompts"):
        circuit_view(replace(again, circuit=None), model, some)


@pytest.mark.parametrize(
    ("sites", "ablation", "said"),
    [
        ({}, "resample", ("sites alone", "from the corrupted run to")),
        ({}, "zero", ("sites alone", "from the corrupted tokens, also ablated, to")),
        ({"heads": "neurons"}, "resample", ("no candidates work as in the model", "in the node")),
        ({"positions": "roles"}, "resample", ("all other candidates of its search ablated",)),
    ],
)
def test_the_page_says_which_runs_are_compared(sites, ablation, said):
    model, some = model_of("gpt2"), contrast()
    circuit = some_circuit(model, some, ablation, **sites)
    page = circuit_view(attribution_graph(model, some, sites=circuit))
    assert all(words in page for words in said)
    nothing = "nothing in it comes from the rest of the model" in page
    assert nothing == (not sites)
    assert bool(attribution_graph(model, some, sites=circuit).nodes["id"].eq("rest").any())


def test_what_has_no_own_run():
    model, some = model_of("gpt2"), contrast()
    circuit = some_circuit(model, some)
    with pytest.raises(InputError, match="got a circuit without corrupted prompts"):
        attribution_graph(model, replace(some, corrupted=None), sites=circuit)
    longer = Contrast(tokens(5, pos=9), tokens(6, pos=9), METRIC)
    with pytest.raises(InputError, match="got prompts of 9 tokens; expected 7"):
        attribution_graph(model, longer, sites=circuit)
    frame = circuit.frame.assign(name=["L9H0", *circuit.frame["name"][1:]])
    with pytest.raises(InputError, match="sites of the circuit do not exist"):
        attribution_graph(model, some, sites=replace(circuit, frame=frame))


class Edges:
    """Edges of modular addition, cut by plain hooks, while all sites outside a circuit are held.

    The model has one layer and no norm; all of the circuit's sites are at the last token.
    """

    Z, NEURON, PRE = "blocks.0.attn.hook_z", mlp_hook("z", 0), mlp_hook("pre", 0)
    START, END = "blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"

    def __init__(self, model, some, circuit, answers):
        self.model, self.block, self.answers = model, model.blocks[0], answers
        self.inputs, self.hold = {"own": some.clean, "corrupted": some.corrupted}, []
        self.values, self.runs = {}, {}
        self.values["corrupted"], self.runs["corrupted"] = self.run("corrupted")
        for name in (self.Z, self.NEURON):
            inside = torch.zeros(self.runs["corrupted"][name].shape[:3], dtype=torch.bool)
            for head in map(HeadName.parse, circuit.frame["name"].astype(str)):
                if (name == self.Z) == (head.kind == "attention"):
                    inside[:, -1, head.index] = True
            other = self.runs["corrupted"][name]
            self.hold.append((name, self.replaced(inside[..., None], other)))
        self.values["own"], self.runs["own"] = self.run("own")

    @staticmethod
    def replaced(inside, other):
        return lambda z, hook: torch.where(inside, z, other)

    @torch.no_grad()
    def run(self, which, *hooks):
        names, cache = (self.Z, self.NEURON, self.PRE, self.START), {}
        keep = [(x, lambda value, hook, x=x: cache.update({x: value.clone()})) for x in names]
        inputs = self.inputs[which]
        logits = self.model.run_with_hooks(inputs, fwd_hooks=[*self.hold, *hooks, *keep])[0, -1]
        return (logits[self.answers[0]] - logits[self.answers[1]]).item(), cache

    def written(self, node, which):
        name, _, pos = node.partition("@")
        if name == "embed":
            return self.runs[which][self.START][0, int(pos)]
        head = HeadName.parse(name)
        if head.kind == "attention":
            return self.runs[which][self.Z][0, -1, head.index] @ self.block.attn.W_O[head.index]
        z = self.runs[which][self.NEURON][0, -1, head.index]
        return z * self.block.mlp.W_out[head.index]

    @torch.no_grad()
    def cut(self, source, target, which, other):
        """Return the fall of the metric if the target reads the source as in the other run."""
        change = self.written(source, other) - self.written(source, which)
        head = None if target == "metric" else HeadName.parse(target.partition("@")[0])
        position = int(source.partition("@")[2])

        def add(vector, *place):
            def hook(value, hook):
                value = value.clone()
                value[(0, *place)] += vector
                return value

            return hook

        if head is None:
            hooks = [(self.END, add(change, -1))]
        elif head.kind == "attention":  # which reads tokens before the last one
            hooks = [
                (f"blocks.0.attn.hook_{x[-1].lower()}",
                 add(change @ getattr(self.block.attn, x)[head.index], position, head.index))
                for x in ("W_K", "W_V")
            ]  # fmt: skip
        else:
            x = self.runs[which][self.PRE][0, -1, head.index]
            silu, moved = torch.nn.functional.silu, change @ self.block.mlp.W_in[:, head.index]
            hooks = [(self.NEURON, add(silu(x + moved) - silu(x), -1, head.index))]
        return self.values[which] - self.run(which, *hooks)[0]


@pytest.mark.both_versions
@pytest.mark.parametrize("summands", [(3, 4, 5), (20, 50, 81)])
def test_its_strongest_edges_are_what_interventions_find(summands):
    """A secant is a mean of two interventions: the edge is cut, or alone restored."""
    a, b, c = summands
    answers = (a + b) % 113, (a + c) % 113
    model = expose_neuron_heads(pretrained.modular_addition().double()).model
    clean, corrupted = torch.tensor([[a, b, 113]]), torch.tensor([[a, c, 113]])
    some = Contrast(clean, corrupted, p.logit_diff(*answers))
    circuit = discover(model, some, search=Search(n_random=0))
    assert set(circuit.frame["position"]) == {2}
    own, whole = (attribution_graph(model, some, sites=x) for x in (circuit, circuit.sites))
    weights = own.edges.groupby(["source", "target"])["weight"].sum()
    strongest = weights.abs().nlargest(50).index
    by_hand = Edges(model, some, circuit, answers)
    frame = pd.DataFrame(index=strongest)
    frame["cut"] = [by_hand.cut(*edge, "own", "corrupted") for edge in strongest]
    frame["restored"] = [-by_hand.cut(*edge, "corrupted", "own") for edge in strongest]
    frame["own"] = weights
    frame["whole"] = whole.edges.groupby(["source", "target"])["weight"].sum()
    assert (np.sign(frame["cut"]) == np.sign(frame["own"])).all()
    assert (np.sign(frame["restored"]) == np.sign(frame["own"])).all()
    to_metric = frame.index.get_level_values("target") == "metric"  # linear: nothing is estimated
    for column in ("cut", "restored"):
        assert relative(*(frame.loc[to_metric, x] for x in (column, "own"))) < 1e-9
    others = frame[~to_metric]
    assert len(others) > 10
    assert np.corrcoef(others["own"], others["cut"])[0, 1] > 0.99
    mean = others[["cut", "restored"]].mean(axis=1)
    off = {x: (others[x] - mean).abs().sum() / mean.abs().sum() for x in ("own", "whole")}
    assert off["own"] < 0.06
    assert off["whole"] > 0.09  # control: in the whole difference, other sites carry a part


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
