"""Tests of attribution graphs of one run: sums, and edges against runs that edit the stream."""

import re
from functools import partial

import bridges
import networkx as nx
import patched_runs as oracle
import pytest
import torch
from common import IN_PLACE, tokens

from attn_only_lens import Contrast
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
POS = 5
PROMPT = tokens(0, 1, POS)
METRIC = p.logit_diff(correct=7, wrong=11)
difference = partial(oracle.difference, wrong=11)
ONE_RUN = Contrast(PROMPT, None, METRIC)
# Rounding in float64: sums of about 500 shares through two layers, for a metric of about 1.
ROUNDING = 1e-9
# The RMS norms of transformers, as in gemma2, compute in float32 in any dtype.
BOUNDS = {"gpt2": ROUNDING, "neox": ROUNDING, "native_gated": ROUNDING, "gemma2": 1e-5}
KEY = ["source", "target", "kind"]


@pytest.fixture(scope="module")
def models():
    return {name: bridges.exposed_copy(bridges.boot(name)) for name in BOUNDS}


@pytest.fixture(scope="module")
def model(models):
    return models["gpt2"]


@pytest.fixture(scope="module")
def graph(model):
    return attribution_graph(model, ONE_RUN, top=29)


def worst(sums, nodes):
    """Return the largest difference between the sums and the nodes' attributions."""
    expected = nodes.set_index("id")["attribution"].reindex(sums.index)
    return (sums - expected).abs().max()


def weights_of(graph):
    return graph.edges.set_index(KEY)["weight"]


@pytest.mark.parametrize("family", BOUNDS)
def test_what_flows_into_a_node_is_its_attribution_and_what_flows_out_too(models, family):
    for chosen in ({"mass": 1}, {"top": 17}):
        graph = attribution_graph(models[family], ONE_RUN, **chosen)
        bound = BOUNDS[family] * graph.nodes["attribution"].abs().max()
        into = graph.inflow()
        assert worst(into, graph.nodes) < bound
        assert into["metric"] == pytest.approx(graph.value, abs=bound)
        # Control: without the edges from the embedding, the sums do not hold.
        left = graph.edges.query("kind == 'value' and source.str.startswith('embed') == False")
        assert worst(left.groupby("target")["weight"].sum(), graph.nodes) > 1e3 * bound
        # Scores are functions of q · k, so edges into queries and into keys have equal sums.
        q, k = graph.inflow("q"), graph.inflow("k")
        assert len(k) or family == "gemma2"  # its capped scores are not bilinear
        assert (q.reindex(k.index) - k).abs().max() < bound or not len(k)
        if "top" in chosen:
            assert len(graph.heads) == 17
            continue
        out = graph.edges.query("kind == 'value'").groupby("source")["weight"].sum()
        assert worst(out, graph.nodes) < bound  # every head is a node: no edge leaves "rest"
        begin = graph.nodes[graph.nodes["kind"].isin(["embed", "bias", "offset"])]
        assert begin["attribution"].sum() == pytest.approx(graph.value, abs=bound)


def test_sums_over_prompts_and_of_metrics_that_are_not_linear(model):
    both = tokens(0, 2, POS)
    every = attribution_graph(model, Contrast(both, None, METRIC), mass=1)
    singles = [Contrast(row, None, METRIC) for row in both]
    alone = [weights_of(attribution_graph(model, one, mass=1)) for one in singles]
    mean = alone[0].add(alone[1], fill_value=0) / 2
    assert weights_of(every).sub(mean, fill_value=0).abs().max() < ROUNDING
    for metric in (METRIC, p.log_probability(7)):
        graph = attribution_graph(model, Contrast(both, None, metric), top=17)
        assert worst(graph.inflow(), graph.nodes) < ROUNDING
        assert graph.inflow()["metric"] == pytest.approx(graph.value, abs=ROUNDING)
        assert graph.edges.query("source == 'rest'")["weight"].abs().max() > 1e-3  # control
        offset = graph.nodes.query("kind == 'offset'")["attribution"].item()
        assert (abs(offset) > 1e-3) == (metric is not METRIC)


# Oracle: each edge is checked by one run with fixed patterns and norm scales, without autograd.


class Held:
    """A model whose patterns and norm scales plain hooks fix, while a head's z is changed."""

    def __init__(self, model):
        self.model, self.kept = model, {}
        ends = ("hook_scale", "hook_pattern", "hook_z", IN_PLACE["pattern"], IN_PLACE["z"])
        names = [name for name in model.hook_dict if name.endswith(ends)]
        keep = [(name, self._keep(name)) for name in names]
        with torch.no_grad():
            self.logits = model.run_with_hooks(PROMPT, fwd_hooks=keep)
        self.z = [name for name in self.kept if name.endswith(("hook_z", IN_PLACE["z"]))]
        self.fixed = [
            (name, lambda x, hook, name=name: self.kept[name])
            for name in self.kept
            if name not in self.z
        ]

    def _keep(self, name):
        return lambda x, hook: self.kept.update({name: x.clone()})

    def place(self, name, activation="z"):
        return HeadName.parse(name).hook(activation, self.model)

    @torch.no_grad()
    def run(self, moved):
        """Return every computed z, and the logits, when `moved` changes the z that is passed on."""
        seen = {}

        def hook_of(name):
            def hook(x, hook):
                seen[name] = x.clone()
                return moved(name, self.kept[name].clone())

            return hook

        hooks = [*self.fixed, *((name, hook_of(name)) for name in self.z)]
        return seen, self.model.run_with_hooks(PROMPT, fwd_hooks=hooks)

    @torch.no_grad()
    def gradient(self, name):
        """Return the metric's gradient in a head's z at the last position, by differences.

        With fixed patterns and scales, the model is linear.
        """
        place, index, differences = self.place(name), HeadName.parse(name).index, []
        for i in range(self.kept[place].shape[-1]):

            def shift(z, hook, i=i):
                z = z.clone()
                z[:, -1, index, i] += 1.0
                return z

            logits = self.model.run_with_hooks(PROMPT, fwd_hooks=[*self.fixed, (place, shift)])
            differences.append(difference(logits) - difference(self.logits))
        return torch.tensor(differences, dtype=torch.float64)

    def scaled(self, source, pos, factor):
        """Return the run's z and logits when a source is multiplied by a factor."""
        place, index = self.place(source), HeadName.parse(source).index

        def moved(name, z):
            if name == place:
                z[:, pos, index] *= factor
            return z

        return self.run(moved)


def test_an_edge_is_what_a_change_of_the_source_does_to_the_target_alone(models):
    """The central difference of a product of two linear forms is its exact derivative.

    A gated neuron's value is such a product, and each factor counts half; so only targets in the
    last layer have a gradient that differences tell.
    """
    model, held, checked = models["native_gated"], Held(models["native_gated"]), 0
    graph = attribution_graph(model, ONE_RUN, mass=1, patterns=False)
    weights = graph.edges.set_index(["source", "target"])["weight"]
    gradients = {name: held.gradient(name) for name in ("L1N7", "L1N13")}
    for source, pos in (("L0H1", 1), ("L0N3", 4), ("L1H0", 4), ("L0H0", 4)):
        (up, logits), (down, _) = (held.scaled(source, pos, factor) for factor in (2, 0))
        change = difference(logits) - difference(held.logits)
        direct = weights.get((f"{source}@{pos}", "metric"), 0.0)
        assert direct == pytest.approx(change, abs=ROUNDING)
        for target, slope in gradients.items():
            place, index = held.place(target), HeadName.parse(target).index
            change = (up[place] - down[place])[0, -1, index] / 4
            expected = float((slope * change).sum())
            got = weights.get((f"{source}@{pos}", f"{target}@{POS - 1}"), 0.0)
            assert got == pytest.approx(expected, abs=ROUNDING)
            checked += abs(expected) > 1e-6
    assert checked > 3


def test_edges_into_a_pattern_are_its_slope_along_each_query(models):
    """The edges' sum is the metric's slope, via the pattern, in the scale of a query or key."""
    model = models["neox"]
    graph, held = attribution_graph(model, ONE_RUN, mass=1), Held(model)
    for name, kind in (("L1H1", "q"), ("L1H1", "k"), ("L1H0", "q"), ("L1N7", "gate")):
        head, patterns, values = HeadName.parse(name), [], []
        point = held.place(name, "q" if kind == "gate" else kind)
        keep = [(held.place(name, "v"), lambda x, hook, to=values: to.append(x.clone()))]
        keep.append((held.place(name, "pattern"), lambda x, hook, to=patterns: to.append(x)))
        for epsilon in (1e-4, -1e-4):
            scale = (point, lambda x, hook, e=epsilon: x * (1 + e))
            with torch.no_grad():
                model.run_with_hooks(PROMPT, fwd_hooks=[scale, *keep])
        slope = (patterns[0] - patterns[1])[0, head.index, -1] / 2e-4
        if head.kind == "neuron":  # the bias token's value is 0
            v = values[0][0, -1, head.index]
            v = torch.stack([v, torch.zeros_like(v)])
        else:
            v = values[0][0, :, head.index]
        expected = float((held.gradient(name) * (slope.to(v) @ v)).sum())
        got = graph.inflow(kind)[f"{name}@{POS - 1}"]
        assert got == pytest.approx(expected, rel=1e-5)  # central differences
        assert abs(got) > 1e-6


# Choice and names of nodes


def test_nodes_are_the_same_again_with_values_and_gradients_of_the_run(model, graph, monkeypatch):
    monkeypatch.setattr("attn_only_lens.circuits.linear_graph._BLOCK", 0)  # one by one
    again = attribution_graph(model, ONE_RUN, top=29)
    assert list(graph.nodes["id"]) == list(again.nodes["id"])
    assert (weights_of(graph) - weights_of(again)).abs().max() < ROUNDING
    rows = graph.nodes[graph.nodes["kind"] == "neuron"]
    for row in rows.itertuples():
        head = HeadName.parse(row.name)
        z = oracle.seen(model, PROMPT, head.hook("z", model))[0, row.position, head.index, 0]
        assert row.value == pytest.approx(z.item(), abs=ROUNDING)
    assert (rows["value"] * rows["gradient"] - rows["attribution"]).abs().max() < ROUNDING


def test_pruning_keeps_sums_and_says_what_is_left(models):
    model = models["native_gated"]
    graph = attribution_graph(model, ONE_RUN, top=61)
    total = graph.heads["attribution"].abs().sum() / graph.mass
    for less in (graph.prune(mass=0.5), graph.prune(top=13).prune_edges(0.5)):
        assert worst(less.inflow(), less.nodes) < ROUNDING
        for kind in ("q", "k"):
            into = less.inflow(kind)
            assert (into - graph.inflow(kind).reindex(into.index)).abs().max() < ROUNDING
        assert less.mass == pytest.approx(less.heads["attribution"].abs().sum() / total)
        every, before = (
            x.nodes[x.nodes["kind"].isin(["attention", "neuron", "rest"])] for x in (less, graph)
        )
        assert every["attribution"].sum() == pytest.approx(before["attribution"].sum())
    direct, pruned = attribution_graph(model, ONE_RUN, top=13), graph.prune(top=13)
    left = graph.edges[graph.edges["source"].isin(set(pruned.nodes["id"]) - {"rest"})]
    sums = left[left["kind"] == "value"].groupby("target")["weight"].sum()
    from_nodes = pruned.inflow(rest=False)
    assert (from_nodes - sums.reindex(from_nodes.index).fillna(0.0)).abs().max() < ROUNDING
    assert set(from_nodes.index) == set(pruned.inflow().index)
    assert abs(from_nodes["metric"] - graph.inflow(rest=False)["metric"]) > 1e-3  # control
    assert set(pruned.nodes["id"]) == set(direct.nodes["id"])
    assert (weights_of(pruned) - weights_of(direct)).abs().max() < ROUNDING
    assert graph.prune(mass=1).edges.shape == graph.edges.shape


def test_too_large_a_graph_is_refused_with_its_cost_and_one_that_is_not(model):
    with pytest.raises(InputError, match="max_edges=1,000") as refused:
        attribution_graph(model, ONE_RUN, mass=0.9, max_edges=1000)
    top = int(re.search(r"top=(\d+)", str(refused.value))[1])
    fewer = attribution_graph(model, ONE_RUN, top=top, max_edges=1000)
    assert 500 < len(fewer.edges) <= 1000
    with pytest.raises(InputError, match="top="):  # control: one more node is too many
        attribution_graph(model, ONE_RUN, top=top + 1, max_edges=1000)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"top": 3, "mass": 0.5}, r"got top=3, mass=0\.5"),
        ({"positions": -1}, "got positions=-1; expected 'each', 'roles' or names of roles"),
        ({"contrast": Contrast(PROMPT, None, p.kl())}, "another run"),
    ],
)
def test_what_makes_no_sense_is_refused(model, how, match):
    with pytest.raises(InputError, match=match):
        attribution_graph(model, **{"contrast": ONE_RUN} | how)


def test_inference_mode_is_refused(model):
    with torch.inference_mode(), pytest.raises(InputError, match="inference_mode"):
        attribution_graph(model, ONE_RUN)


def test_networkx_holds_nodes_edges_and_kinds(graph):
    network = graph.to_networkx()
    assert (len(network), network.number_of_edges()) == (len(graph.nodes), len(graph.edges))
    row = graph.edges.query("kind == 'q'").iloc[0]
    assert network.edges[row["source"], row["target"], "q"]["weight"] == row["weight"]
    assert nx.is_directed_acyclic_graph(network)
