"""Tests of attribution graphs: sums, pruning, and edges compared with runs that edit the stream."""

import re

import networkx as nx
import patch_oracle as oracle
import pytest
import torch
from common import IN_PLACE, tokens
from models import build

from attn_only_lens import Bilinear, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph
from attn_only_lens.engine import linear_run
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.writes import FrozenNorm
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import HeadName

POS = 5
LAYOUTS = ("two blocks a layer", "in place")
METRIC = p.logit_diff(oracle.CORRECT, oracle.WRONG)
# Rounding in float64: sums of about 700 shares through three layers, for a metric of about 1.
ROUNDING = 1e-9
WIDE = ("gelu", "llama", "parallel", "no_norm", "rms", "gemma", "post_norm", "qk_norm", "grouped")


PLAIN = {"gated_mlp": False, "act_fn": "gelu"}  # changes a family's MLP into one without gates


def model_of(family, layout="two blocks a layer", **changes):
    source = build(family, scale=0.25, **changes)
    if layout == "two blocks a layer":
        return convert(source)
    expose_neuron_heads(source)
    return source


def graph_of(family, layout="two blocks a layer", batch=1, metric=METRIC, **how):
    how = how or {"mass": 1}
    return attribution_graph(model_of(family, layout), tokens(0, batch, POS), metric, **how)


def worst(sums, nodes):
    """Return the largest difference between the sums and the nodes' attributions."""
    expected = nodes.set_index("id")["attribution"].reindex(sums.index)
    return (sums - expected).abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", WIDE)
def test_what_flows_into_a_node_is_its_attribution_and_what_flows_out_too(family, layout):
    graph = graph_of(family, layout)
    into = graph.inflow()
    out = graph.edges.query("kind == 'value'").groupby("source")["weight"].sum()
    assert graph.mass == 1
    assert worst(into, graph.nodes) < ROUNDING
    assert worst(out, graph.nodes) < ROUNDING  # every head is a node, so no edge leaves "rest"
    heads = graph.nodes[graph.nodes["kind"].isin(["attention", "neuron"])]
    assert set(heads.loc[heads["attribution"].abs() > ROUNDING, "id"]) <= set(into.index)
    assert into["metric"] == pytest.approx(graph.value, abs=ROUNDING)
    # The attributions of the nodes without inputs add up to the metric.
    begin = graph.nodes[graph.nodes["kind"].isin(["embed", "bias", "offset"])]
    assert begin["attribution"].sum() == pytest.approx(graph.value, abs=ROUNDING)
    # Control: without the edges from biases, the sums do not hold.
    left = graph.edges.query("kind == 'value' and source != 'bias'")
    assert worst(left.groupby("target")["weight"].sum(), graph.nodes) > 1e-3


@pytest.mark.parametrize("family", ["gelu", "llama", "soft_caps"])
def test_sums_hold_whatever_is_chosen(family):
    for batch, metric in ((2, METRIC), (1, p.log_probability(7))):
        graph = graph_of(family, batch=batch, metric=metric, top=17)
        assert graph.nodes["kind"].isin(["attention", "neuron"]).sum() == 17
        assert worst(graph.inflow(), graph.nodes) < ROUNDING
        assert graph.inflow()["metric"] == pytest.approx(graph.value, abs=ROUNDING)
        # Control: "rest" is not zero, nor is the offset if the metric is not linear in the stream.
        rest = graph.edges.query("source == 'rest'")["weight"]
        assert rest.abs().max() > 1e-3
        offset = graph.nodes.query("kind == 'offset'")["attribution"].item()
        assert (abs(offset) > 1e-3) == (metric is not METRIC or family == "soft_caps")


def test_several_prompts_are_added_up():
    model, both = model_of("gelu"), tokens(0, 2, POS)
    graph = attribution_graph(model, both, METRIC, mass=1)
    weights = graph.edges.set_index(["source", "target", "kind"])["weight"]
    alone = [
        attribution_graph(model, row[None], METRIC, mass=1).edges.set_index(
            ["source", "target", "kind"]
        )["weight"]
        for row in both
    ]
    expected = alone[0].add(alone[1], fill_value=0) / 2  # the metric is the mean
    assert weights.sub(expected, fill_value=0).abs().max() < ROUNDING


def test_bilinear_heads_of_a_neuron_are_one_node():
    model = convert(build("gelu", scale=0.1), gate=Bilinear())
    graph = attribution_graph(model, tokens(0, 1, POS), METRIC, top=31)
    assert worst(graph.inflow(), graph.nodes) < ROUNDING
    assert graph.nodes["name"].str.fullmatch(r"L\dN\d+").any()
    assert graph.nodes["gradient"].isna().all()


# Oracle: each edge is checked by one run with fixed patterns and norm scales, without autograd.


class Held:
    """A model whose patterns and norm scales plain hooks fix, while a head's z is changed."""

    def __init__(self, model, prompt):
        self.model, self.prompt = model, prompt
        held = ("hook_scale", "hook_pattern", "hook_z", IN_PLACE["pattern"], IN_PLACE["z"])
        names = [n for n in model.hook_dict if n.endswith(held)]
        self.kept = {}
        keep = [(n, lambda x, hook: self.kept.update({hook.name: x.clone()})) for n in names]
        with torch.no_grad(), model.hooks(fwd_hooks=keep):
            self.logits = model(prompt)

    def place(self, name, activation="z"):
        return HeadName.parse(name).hook(activation, self.model)

    @torch.no_grad()
    def run(self, moved):
        """Return every computed z, and the logits, when `moved` changes the z that is passed on."""
        seen = {}

        def hook(x, hook):
            kept = self.kept[hook.name]
            if not hook.name.endswith(("hook_z", IN_PLACE["z"])):
                return kept
            seen[hook.name] = x.clone()
            return moved(hook.name, kept.clone())

        with self.model.hooks(fwd_hooks=[(n, hook) for n in self.kept]):
            return seen, self.model(self.prompt)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gelu", "rms", "parallel", "grouped", "rotary", "post_norm"])
def test_an_edge_is_what_doubling_the_source_does_to_the_target_alone(family, layout):
    model, prompt = model_of(family, layout, **PLAIN), tokens(0, 1, POS)
    graph = attribution_graph(model, prompt, METRIC, mass=1, patterns=False)
    weights = graph.edges.set_index(["source", "target"])["weight"]
    held = Held(model, prompt)
    gradients = {}  # by differences; with fixed patterns and scales the model is linear
    checked = 0
    for source, pos in (("L0H1", 1), ("L0N3", 4), ("L1H0", 4), ("L1N29", 2)):
        place, index = held.place(source), HeadName.parse(source).index

        def doubled(name, z, place=place, index=index, pos=pos):
            if name == place:
                z[:, pos, index] *= 2
            return z

        seen, logits = held.run(doubled)
        moved = oracle.difference(logits) - oracle.difference(held.logits)
        assert weights.get((f"{source}@{pos}", "metric"), 0.0) == pytest.approx(moved, abs=ROUNDING)
        for target in ("L0N5", "L1H1", "L1N7", "L2N11", "L2N13"):
            place, index = held.place(target), HeadName.parse(target).index
            change = (seen[place] - held.kept[place])[0, POS - 1, index]
            key = (target, POS - 1)
            if key not in gradients:
                gradients[key] = gradient(model, held, place, index)
            expected = float((gradients[key] * change).sum())
            got = weights.get((f"{source}@{pos}", f"{target}@{POS - 1}"), 0.0)
            assert got == pytest.approx(expected, abs=ROUNDING)
            checked += abs(expected) > 1e-6
    assert checked > 5


def gradient(model, held, place, index):
    """Return the gradient of the metric in a head's z at the last position, by differences."""
    names = [n for n in held.kept if not n.endswith(("hook_z", IN_PLACE["z"]))]
    hooks = [(n, lambda x, hook: held.kept[hook.name]) for n in names]
    differences = []
    for i in range(held.kept[place].shape[-1]):

        def shift(z, hook, i=i):
            z[:, -1, index, i] += 1.0
            return z

        with torch.no_grad(), model.hooks(fwd_hooks=[*hooks, (place, shift)]):
            differences.append(
                oracle.difference(model(held.prompt)) - oracle.difference(held.logits)
            )
    return torch.tensor(differences, dtype=torch.float64)


def test_without_the_scales_of_norms_sums_do_not_hold(monkeypatch):
    """Check the control of the first test: sums break if the norms' scales are left out."""
    model = model_of("gelu")

    def without_scale(self, gradient, positions=slice(None)):
        return self.norm.before(gradient.flatten(0, -2).T).T.view_as(gradient)

    monkeypatch.setattr(FrozenNorm, "back", without_scale)
    graph = attribution_graph(model, tokens(0, 1, POS), METRIC, top=7)
    assert worst(graph.inflow(), graph.nodes) > 1e-2


def test_heads_that_are_not_what_their_weights_say_are_refused(monkeypatch):
    model = model_of("gelu")
    with torch.no_grad():
        model.blocks[0].ln1.b[:] = 1.0
    monkeypatch.setattr(linear_run, "_norm_bias", lambda sublayer: 0.0)
    with pytest.raises(UnsupportedModelError, match="not linear in their values"):
        attribution_graph(model, tokens(0, 1, POS), METRIC, top=7)


# Edges into patterns


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gelu", "llama", "rotary"])
def test_edges_into_a_pattern_are_its_slope_along_each_query(family, layout):
    """The edges' sum is the metric's slope, via the pattern, in the scale of a query or key."""
    model, prompt = model_of(family, layout, **PLAIN), tokens(0, 1, POS)
    graph = attribution_graph(model, prompt, METRIC, mass=1)
    held = Held(model, prompt)
    for name, kind in (("L1H1", "q"), ("L1H1", "k"), ("L2H0", "q"), ("L1N7", "gate")):
        place, index = held.place(name), HeadName.parse(name).index
        pattern = held.place(name, "pattern")
        patterns = []
        for epsilon in (1e-4, -1e-4):

            def scaled(x, hook, epsilon=epsilon):
                return x * (1 + epsilon)

            def keep(x, hook, patterns=patterns):
                patterns.append(x.clone())

            point = "q" if kind == "gate" else kind
            hooks = [(held.place(name, point), scaled), (pattern, keep)]
            with torch.no_grad(), model.hooks(fwd_hooks=hooks):
                model(prompt)
        slope = (patterns[0] - patterns[1])[0, index, -1] / 2e-4
        values = values_of(model, held, name, prompt)
        expected = float((gradient(model, held, place, index) * (slope @ values)).sum())
        got = graph.inflow(kind)[f"{name}@{POS - 1}"]
        assert got == pytest.approx(expected, rel=1e-5)  # central differences, step 1e-4
        assert abs(got) > 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_edge_into_a_pattern_is_a_share_of_the_query(layout):
    """Each edge is the source's part of the query, times the slope of the pattern."""
    model, prompt = model_of("gelu", layout), tokens(0, 1, POS)
    graph = attribution_graph(model, prompt, METRIC, mass=1)
    held = Held(model, prompt)
    weights = graph.edges.query("kind == 'gate'").set_index(["source", "target"])["weight"]
    target = HeadName.parse("L1N7")
    attn = model.blocks[3].attn if layout == LAYOUTS[0] else model.blocks[1].mlp
    norm = model.blocks[3].ln1 if layout == LAYOUTS[0] else model.blocks[1].ln2
    scale = held.kept[norm.hook_scale.name][0, -1]
    direction = norm.w * attn.W_in[:, target.index] / scale
    direction = (direction - direction.mean()).detach()
    q = oracle.seen(model, prompt, target.hook("q", model))[0, -1, target.index, 0]
    weight = [0.5 * (1 + torch.erf((q + e) / 2**0.5)) for e in (1e-4, -1e-4)]
    slope = (weight[0] - weight[1]) / 2e-4  # Φ', the slope of gelu's gate
    effect = gradient(model, held, held.place("L1N7"), target.index)[0] * q * slope
    for source in ("L0N3", "L0N29", "L0H1", "L1H0"):
        head = HeadName.parse(source)
        z = held.kept[held.place(source)][0, -1, head.index]
        written = held.model.blocks[head.block(model)]
        if head.kind == "attention":
            row = z @ written.attn.W_O[head.index]
        else:
            row = z * (written.attn if layout == LAYOUTS[0] else written.mlp).W_out[head.index]
        expected = float(effect * (row.detach() @ direction))
        assert weights[f"{source}@4", "L1N7@4"] == pytest.approx(expected, rel=1e-6)
    assert abs(weights["L0H1@4", "L1N7@4"]) > 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_edge_into_a_neuron_of_a_gated_mlp_is_half_of_each_factor(layout):
    model, prompt = model_of("llama", layout), tokens(0, 1, POS)
    weights = attribution_graph(model, prompt, METRIC, mass=1, patterns=False).edges
    weights = weights.set_index(["source", "target"])["weight"]
    held = Held(model, prompt)
    for source in ("L0H1", "L0N3", "L2H0"):
        index, place = HeadName.parse(source).index, held.place(source)
        seen = []
        for factor in (2, 0):

            def scaled(name, z, place=place, index=index, factor=factor):
                if name == place:
                    z[:, -1, index] *= factor
                return z

            seen.append(held.run(scaled)[0][held.place("L2N11")][0, -1, 11])
        # The central difference of a product of two linear forms is its exact derivative.
        expected = (seen[0] - seen[1]) / 4 * gradient(model, held, held.place("L2N11"), 11)
        assert weights[f"{source}@4", "L2N11@4"] == pytest.approx(expected.item(), abs=ROUNDING)
        assert abs(expected.item()) > 1e-5


def values_of(model, held, name, prompt):
    """Return v of a head at every key. A neuron-head has its own v and the bias token's 0."""
    head, seen = HeadName.parse(name), {}
    keep = (held.place(name, "v"), lambda x, hook: seen.update(v=x.clone()))
    with torch.no_grad(), model.hooks(fwd_hooks=[keep]):
        model(prompt)
    if head.kind == "neuron":
        self_value = seen["v"][0, -1, head.index]
        return torch.stack([self_value, torch.zeros_like(self_value)])
    shared = held.kept[held.place(name)].shape[2] // seen["v"].shape[2]
    return seen["v"][0, :, head.index // shared]


def test_a_gate_that_is_a_step_has_no_edges_into_its_pattern():
    graph = graph_of("relu")
    into = graph.edges.query("kind == 'q'")["target"]
    assert into.str.contains("H").all()
    assert len(into)


# Choice and names of nodes


def test_ids_and_rows_are_the_same_again_and_in_either_layout():
    one, again = graph_of("gelu", top=29), graph_of("gelu", top=29)
    in_place = graph_of("gelu", "in place", top=29)
    assert one.nodes.equals(again.nodes)
    assert one.edges.equals(again.edges)
    assert list(one.nodes["id"]) == list(in_place.nodes["id"])
    assert {"embed@4", "bias", "rest", "offset", "metric"} <= set(one.nodes["id"])
    rows = one.nodes[one.nodes["kind"] == "neuron"]
    assert (rows["id"] == rows["name"] + "@" + rows["position"].astype(str)).all()


def test_values_and_gradients_of_neurons_are_those_of_the_run():
    model, prompt = model_of("gelu"), tokens(0, 1, POS)
    graph = attribution_graph(model, prompt, METRIC, top=29)
    rows = graph.nodes[graph.nodes["kind"] == "neuron"]
    for row in rows.itertuples():
        head = HeadName.parse(row.name)
        z = oracle.seen(model, prompt, head.hook("z", model))[0, row.position, head.index, 0]
        assert row.value == pytest.approx(z.item(), abs=ROUNDING)
    assert (rows["value"] * rows["gradient"] - rows["attribution"]).abs().max() < ROUNDING


def test_padding_is_no_node():
    model, prompt = model_of("gelu"), tokens(0, 1, POS)
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), prompt], dim=1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    graph = attribution_graph(model, padded, METRIC, mask=mask, mass=1)
    heads = graph.nodes[graph.nodes["kind"].isin(["attention", "neuron"])]
    assert heads.loc[heads["position"] < 2, "attribution"].abs().max() == 0
    assert graph.nodes.query("kind == 'embed'")["position"].tolist() == [2, 3, 4, 5, 6]
    assert worst(graph.inflow(), graph.nodes) < ROUNDING


def test_pruning_keeps_sums_and_says_what_is_left():
    graph = graph_of("llama", top=61)
    sizes = graph.nodes[graph.nodes["kind"].isin(["attention", "neuron"])]
    for less in (graph.prune(top=13), graph.prune(mass=0.5), graph.prune(top=13).prune_edges(0.5)):
        assert worst(less.inflow(), less.nodes) < ROUNDING
        for kind in ("q", "k"):
            into = less.inflow(kind)
            assert (into - graph.inflow(kind).reindex(into.index)).abs().max() < ROUNDING
        kept = less.nodes[less.nodes["kind"].isin(["attention", "neuron"])]
        total = sizes["attribution"].abs().sum() / graph.mass
        assert less.mass == pytest.approx(kept["attribution"].abs().sum() / total)
        every = less.nodes[less.nodes["kind"].isin(["attention", "neuron", "rest"])]
        before = graph.nodes[graph.nodes["kind"].isin(["attention", "neuron", "rest"])]
        assert every["attribution"].sum() == pytest.approx(before["attribution"].sum())
    direct = graph_of("llama", top=13)
    pruned = graph.prune(top=13)
    assert set(pruned.nodes["id"]) == set(direct.nodes["id"])
    key = ["source", "target", "kind"]
    apart = pruned.edges.set_index(key)["weight"] - direct.edges.set_index(key)["weight"]
    assert apart.abs().max() < ROUNDING
    assert graph.prune(mass=1).edges.shape == graph.edges.shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_too_large_a_graph_is_refused_with_its_cost_and_one_that_is_not(layout):
    model, prompt = model_of("gelu", layout), tokens(0, 1, 5)
    whole = attribution_graph(model, prompt, METRIC, mass=0.9)
    with pytest.raises(InputError, match="max_edges=1,000") as refused:
        attribution_graph(model, prompt, METRIC, mass=0.9, max_edges=1000)
    said = str(refused.value).replace(",", "")
    n_edges, top = (
        int(re.search(pattern, said)[1]) for pattern in (r"up to (\d+) edges", r"top=(\d+)")
    )
    assert len(whole.edges) <= n_edges < 1.5 * len(whole.edges)
    assert f"{len(whole.heads)} nodes (90% of the mass)" in said
    fewer = attribution_graph(model, prompt, METRIC, top=top, max_edges=1000)
    assert f"top={top} ({fewer.mass:.0%} of the mass)" in said
    assert 500 < len(fewer.edges) <= 1000
    with pytest.raises(InputError, match="top="):  # control: one more node is too many
        attribution_graph(model, prompt, METRIC, top=top + 1, max_edges=1000)
    with pytest.raises(InputError, match="even top=1 has too many"):
        attribution_graph(model, prompt, METRIC, mass=0.9, max_edges=1)
    with pytest.raises(InputError, match="got max_edges=0"):
        attribution_graph(model, prompt, METRIC, max_edges=0)


def test_blocks_change_nothing(monkeypatch):
    whole = graph_of("gelu", top=29)
    monkeypatch.setattr("attn_only_lens.circuits.linear_graph._BLOCK", 0)
    one_by_one = graph_of("gelu", top=29)
    key = ["source", "target", "kind"]
    apart = whole.edges.set_index(key)["weight"] - one_by_one.edges.set_index(key)["weight"]
    assert apart.abs().max() < ROUNDING


def test_networkx_holds_nodes_edges_and_kinds():
    graph = graph_of("gelu", top=29)
    network = graph.to_networkx()
    assert (len(network), network.number_of_edges()) == (len(graph.nodes), len(graph.edges))
    row = graph.edges.query("kind == 'q'").iloc[0]
    assert network.edges[row["source"], row["target"], "q"]["weight"] == row["weight"]
    assert nx.is_directed_acyclic_graph(network)


def test_nothing_is_left_on_the_model():
    model = model_of("gelu")
    before = [x.requires_grad for x in model.parameters()]
    attribution_graph(model, tokens(0, 1, POS), METRIC, top=3)
    assert not reasons_not_to_run(model)
    assert [x.requires_grad for x in model.parameters()] == before
    assert all(x.grad is None for x in model.parameters())


def test_what_makes_no_sense_is_refused():
    model, prompt = model_of("gelu"), tokens(0, 1, POS)
    with pytest.raises(InputError, match=r"got top=3, mass=0\.5"):
        attribution_graph(model, prompt, METRIC, top=3, mass=0.5)
    for mass in (1.5, 0, "a", True):
        with pytest.raises(InputError, match=f"got mass={mass!r}; expected a number above 0"):
            attribution_graph(model, prompt, METRIC, mass=mass)
    for top in (0, -1):
        with pytest.raises(InputError, match=f"got top={top}; expected 1 or more"):
            attribution_graph(model, prompt, METRIC, top=top)
    with pytest.raises(InputError, match="another run"):
        attribution_graph(model, prompt, p.kl())
    with pytest.raises(InputError, match="no neuron-heads"):
        attribution_graph(build("gelu"), prompt, METRIC)
    with pytest.raises(InputError, match="got float64"):
        attribution_graph(model, prompt.double(), METRIC)
    with pytest.raises(UnsupportedModelError, match="not linear in their values"):
        attribution_graph(model_of("clip_qkv"), prompt, METRIC)
    with torch.inference_mode(), pytest.raises(InputError, match="inference_mode"):
        attribution_graph(model, prompt, METRIC)


def test_edges_of_no_kind_are_refused():
    with pytest.raises(InputError, match="got kind='z'"):
        graph_of("gelu", top=3).inflow("z")
