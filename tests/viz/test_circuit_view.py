"""Tests of an attribution graph's page: its details of nodes agree with independent code."""

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from browser import needs_browser
from common import tokens
from dense_heads import Dense
from page_of_circuit import ids, read_back, slide

from attn_only_lens import Contrast, expose_neuron_heads, viz
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
POS, METRIC = 5, p.logit_diff(7, 11)


@pytest.fixture(scope="module")
def model():
    return bridges.exposed_copy(bridges.boot("gpt2"))


def one_run(*arguments):
    return Contrast(tokens(*arguments), None, METRIC)


def heads_of(graph):
    return graph.nodes[graph.nodes["kind"].isin(["attention", "neuron"])]


@pytest.fixture(scope="module")
def drawn(model):
    """Return a graph, its model and contrast, and its page."""
    contrast = one_run(0, 2, POS)
    graph = attribution_graph(model, contrast, top=61)
    return graph, model, contrast, viz.circuit_view(graph, model, contrast, prompt=1)


def test_the_page_holds_the_graph(drawn):
    graph, model, contrast, page = drawn
    data = read_back(page)
    assert data["nodes"]["id"] == graph.nodes["id"].tolist()
    assert data["nodes"]["kind"] == graph.nodes["kind"].tolist()
    assert data["nodes"]["attribution"] == pytest.approx(graph.nodes["attribution"], rel=1e-4)
    assert data["tokens"] == [str(token) for token in contrast.clean[1].tolist()]
    ids, edges = graph.nodes["id"].to_numpy(), data["edges"]
    keys = zip(ids[edges["source"]], ids[edges["target"]], edges["kind"], strict=True)
    expected = graph.edges.set_index(["source", "target", "kind"])["weight"].to_dict()
    assert dict(zip(keys, edges["weight"], strict=True)) == pytest.approx(expected, rel=1e-4)
    assert set(data["edges"]["kind"]) == {"value", "q", "k", "gate"}
    every = attribution_graph(model, contrast, mass=1.0)
    share = graph.heads["attribution"].abs().sum() / every.heads["attribution"].abs().sum()
    assert f"The sites have {share:.0%} of" in data["notes"][0]
    assert 0.3 < share < 0.99  # control: some nodes are left out


def standard(x):
    return (x - x.mean()) / x.std(correction=0)


def check_tokens(got, expected, k):
    """Check the texts: the k largest, then the k smallest in falling order."""
    order = expected.argsort(descending=True)
    ends = torch.cat([order[:k], order[-k:]])
    assert [text for text, _ in got] == [str(token) for token in ends.tolist()]
    assert [amount for _, amount in got] == pytest.approx(expected[ends].tolist(), abs=6e-3)


def written(model, head, z):
    """Return the logits of a head's output by the direct path, for a model with LayerNorm."""
    block = model.blocks[head.layer]
    W = block.attn.W_O if head.kind == "attention" else block.mlp.W_out[:, None]
    row = z @ W[head.index].detach()
    return ((row - row.mean()) * model.ln_final.w.detach()) @ model.W_U.detach()


def test_patterns_and_tokens_are_of_the_prompt_that_is_shown(drawn):
    graph, model, contrast, page = drawn
    _, cache = model.run_with_cache(contrast.clean)
    details, seen, moved = read_back(page)["details"], set(), 0
    for node in heads_of(graph).itertuples():
        head = HeadName.parse(node.name)
        pattern = cache[head.hook("pattern", model)][:, head.index]
        z = cache[head.hook("z", model)][:, :, head.index]
        if head.kind == "neuron":
            this_row, other_row = pattern[1, :, 0], pattern[0, :, 0]
            got = details[node.name]["pattern"]
            # three digits
            assert details[node.name]["z"] == pytest.approx(z[1, :, 0].tolist(), rel=6e-3)
        else:
            this_row, other_row = (rows[node.position] for rows in (pattern[1], pattern[0]))
            got = details[node.id]["pattern"]
            first, second = (standard(written(model, head, x[node.position])) for x in z)
            check_tokens(details[node.id]["writes"], second, 10)
            moved += bool((first - second).abs().max() > 0.01)
        assert got == pytest.approx(this_row.tolist(), abs=6e-4)  # three decimals
        seen.add((head.kind, bool((this_row - other_row).abs().max() > 0.01)))
    assert {("neuron", True), ("attention", True)} <= seen  # control: prompts differ
    assert moved


@pytest.fixture(scope="module")
def of_difference(model):
    """Return a graph of a difference, its model and contrast, and its page with both runs."""
    contrast = Contrast(*tokens(0, 2, POS).split(1), METRIC)
    graph = attribution_graph(model, contrast, top=20)
    return graph, model, contrast, viz.circuit_view(graph, model, contrast, top_tokens=3)


def test_a_page_of_a_difference_has_both_runs(of_difference):
    """The page agrees with cached patterns and with the logits of each output's change."""
    graph, model, contrast, page = of_difference
    data = read_back(page)
    assert data["corrupted"] == list(graph.corrupted[0])
    caches = [model.run_with_cache(side)[1] for side in (contrast.clean, contrast.corrupted)]
    kinds = set()
    for node in heads_of(graph).itertuples():
        head, position = HeadName.parse(node.name), int(node.position)
        of_node = data["details"].get(node.id, {}) | data["details"].get(node.name, {})
        for side, cache in zip(("", "corrupted_"), caches, strict=True):
            pattern = cache[head.hook("pattern", model)][0, head.index]
            row = pattern[:, 0] if head.kind == "neuron" else pattern[position]
            assert of_node[f"{side}pattern"] == pytest.approx(row.tolist(), abs=6e-4)
        hook = head.hook("z", model)
        first, second = (cache[hook][0, position, head.index] for cache in caches)
        logits = written(model, head, first - second)
        order = logits.argsort(descending=True).tolist()
        assert [text for text, _ in of_node["writes"]] == [
            str(token) for token in (*order[:3], *order[-3:])
        ]
        kinds.add(head.kind)
    assert kinds == {"attention", "neuron"}
    assert not read_back(viz.circuit_view(graph))["corrupted"]


def shares(edges, into):
    """Return the share of each node's inflow along these edges, but for "rest", by hand."""
    seen = edges[edges["source"] != "rest"].groupby("target")["weight"].sum()
    seen = seen.reindex(into.index).fillna(0.0)
    return seen / into, seen.abs() / (seen.abs() + (into - seen).abs())


def bars(shown):
    """Return the share of each bar that is solid, by node, as the page draws it."""
    found = shown.js(
        "return [...document.querySelectorAll('#stage .node')].map(n => [n.dataset.id, "
        "...[...n.querySelectorAll('.bar')].map(b => b.getTotalLength())])"
    )
    return {node: solid / (solid + dotted) for node, solid, dotted in found if solid + dotted}


@needs_browser
def test_bars_show_which_part_of_the_inflow_is_drawn(of_difference, opened):
    """The drawn edges, added up by hand, are the solid part of every bar."""
    graph, page = of_difference[0], of_difference[-1]
    shown, into = opened(page), graph.edges.groupby("target")["weight"].sum()
    key = ["source", "target", "kind"]
    weights, names = graph.edges.set_index(key)["weight"], np.array(graph.nodes["id"])
    rows = pd.DataFrame(read_back(page)["edges"])[key]  # in the page's order
    rows[["source", "target"]] = names[rows[["source", "target"]].to_numpy()]
    assert "rest" in ids(shown)
    assert not {"bias", "offset"} & ids(shown)  # they have no edges
    signed = set()
    for edges in (None, 1000, 400):
        if edges is not None:
            slide(shown, "edge-slider", edges)
        drawn = pd.MultiIndex.from_frame(rows.loc[sorted(ids(shown, "#stage .edge"))])
        part, bar = shares(weights[drawn].reset_index(), into)
        visible = [node for node in into.index if node in ids(shown)]
        assert bars(shown) == pytest.approx(bar[visible].to_dict(), abs=0.01)
        signed |= {round(x, 2) for x in part[visible]}
        if edges == 1000:  # all edges are drawn
            assert part["metric"] == pytest.approx((graph.inflow(rest=False) / into)["metric"])
    assert min(signed) < 0 or max(signed) > 1  # control: some parts act against each other


@torch.no_grad()
def test_top_tokens_are_what_the_original_makes_of_them():
    """In Gemma 2, norms follow the output projections of heads and neurons."""
    bridge, plain, contrast = bridges.boot("gemma2"), bridges.original("gemma2"), one_run(3, 1, POS)
    expose_neuron_heads(bridge)
    with torch.enable_grad():
        graph = attribution_graph(bridge, contrast, top=31)
    details = read_back(viz.circuit_view(graph, bridge, contrast, top_tokens=3))["details"]
    nodes = heads_of(graph)
    assert set(nodes["kind"]) == {"attention", "neuron"}
    blocks, seen = plain.base_model.layers, {}
    for layer, block in enumerate(blocks):
        for kind, path in (("attention", "self_attn.o_proj"), ("neuron", "mlp.down_proj")):

            def keep(module, args, key=(layer, kind)):
                seen.setdefault(key, (args[0][0], module))  # the first call

            block.get_submodule(path).register_forward_pre_hook(keep)
    plain(contrast.clean)

    dense, last, without_norm = Dense("gemma2"), plain.base_model.norm, 0
    for node in nodes.itertuples():
        given_to, module = seen[node.layer, node.kind]
        index = HeadName.parse(node.name).index
        size = given_to.shape[1] // 2 if node.kind == "attention" else 1
        alone = torch.zeros_like(given_to[0])
        columns = slice(index * size, (index + 1) * size)
        alone[columns] = given_to[node.position, columns]
        row = module(alone[None])[0] - module(torch.zeros_like(alone)[None])[0]
        after = "attention" if node.kind == "attention" else "feedforward"
        row = row * (1 + getattr(blocks[node.layer], f"post_{after}_layernorm").weight)
        expected = standard(plain.lm_head.weight @ (row * (1 + last.weight)))
        check_tokens(details[node.id]["writes"], expected, 3)
        without_norm += int((plain.lm_head.weight @ row).argmax()) != int(expected.argmax())
        if node.kind == "neuron":
            queries = standard((dense.writes["embed"] @ dense.reads[node.name]["q"])[:, 0])
            check_tokens(details[node.name]["reads"], queries, 3)
    assert without_norm  # control


def test_edges_that_do_not_fit_are_left_out_and_sums_still_hold(drawn, monkeypatch):
    """The edges that are left out are part of "rest"."""
    graph, model, contrast, page = drawn
    monkeypatch.setattr("attn_only_lens.viz.graph_view._EDGES", 60)
    data = read_back(viz.circuit_view(graph, model, contrast))
    assert len(data["edges"]["weight"]) < len(read_back(page)["edges"]["weight"])
    ids, into = np.array(data["nodes"]["id"]), {}
    rows = zip(*(data["edges"][c] for c in ("target", "kind", "weight")), strict=True)
    for target, kind, weight in rows:
        if kind == "value":
            into[ids[target]] = into.get(ids[target], 0.0) + weight
    attribution = graph.nodes.set_index("id")["attribution"]
    apart = [abs(into[name] - attribution[name]) for name in into]
    assert max(apart) < 1e-3 * attribution.abs().max()  # each edge has five digits


def test_patterns_that_do_not_fit_are_left_out_and_it_is_said(drawn, monkeypatch):
    graph, model, contrast, page = drawn
    monkeypatch.setattr("attn_only_lens.viz.graph_details._WEIGHTS", 7 * POS)
    data = read_back(viz.circuit_view(graph, model, contrast))
    heads = heads_of(graph)
    strongest = heads.loc[heads["attribution"].abs().nlargest(7).index]
    keys = {n.name if n.kind == "neuron" else n.id for n in strongest.itertuples()}
    assert {key for key, detail in data["details"].items() if "pattern" in detail} == keys
    every = {key for key, detail in read_back(page)["details"].items() if "pattern" in detail}
    assert keys < every


def test_what_is_not_the_graphs_is_refused(drawn, of_difference):
    graph, model, contrast, _ = drawn
    difference, _, pair, _ = of_difference
    flipped = Contrast(pair.corrupted, pair.clean, METRIC)
    with pytest.raises(InputError, match="other than the graph's prompts"):
        viz.circuit_view(difference, model, flipped)
    prompts, other = contrast.clean, bridges.exposed_copy(bridges.boot("gpt2"))
    with torch.no_grad():
        other.blocks[0].mlp.W_out.mul_(1.1)
    for how, match in (
        ({"model": model}, "got a model alone"),
        ({"prompt": 2}, "got prompt=2; the graph has 2 prompts"),
        (
            {"model": model, "contrast": Contrast(prompts, prompts.flip(0), METRIC)},
            "with corrupted prompts for a graph of one run",
        ),
        (
            {"model": model, "contrast": Contrast(prompts, None, p.logit_diff(7, 12))},
            "the metric .* the graph's is",
        ),
        ({"model": other, "contrast": contrast}, "from another model"),
    ):
        with pytest.raises(InputError, match=match):
            viz.circuit_view(graph, **how)


def test_exact_effects_stand_beside_attributions(drawn):
    """The exact effect equals a run of the model with one node's output set to zero by a hook."""
    graph, model, contrast, _ = drawn
    names = heads_of(graph)["name"].unique().tolist()[:5]
    zeroed = {"direction": "zero", "sites": names}
    sweep = p.activation_patch(model, contrast, **zeroed)
    data = read_back(viz.circuit_view(graph, overlays=viz.Overlays(exact=sweep)))
    shown = dict(zip(data["nodes"]["id"], data["nodes"]["exact"], strict=True))
    known = {key for key, value in shown.items() if value is not None}
    assert known == set(heads_of(graph)["id"][heads_of(graph)["name"].isin(names)])
    assert "set to zero" in data["exact"]
    key = min(known)
    name, position = key.split("@")
    head = HeadName.parse(name)

    def zero(z, hook):
        z = z.clone()
        z[:, int(position), head.index] = 0
        return z

    with torch.no_grad():
        whole = model(contrast.clean)[:, -1]
        hooks = [(head.hook("z", model), zero)]
        without = model.run_with_hooks(contrast.clean, fwd_hooks=hooks)[:, -1]
    fall = ((whole - without)[:, 7] - (whole - without)[:, 11]).mean().item()
    assert shown[key] == pytest.approx(fall, rel=1e-3)
    other_metric = Contrast(contrast.clean, None, p.logit_diff(7, 12))
    at_all = zeroed | {"sites": p.Sites(names, "all")}
    for wrong, match in (
        (p.activation_patch(model, other_metric, **zeroed), "the graph's metric is"),
        (p.activation_patch(model, one_run(5, 2, POS), **zeroed), "over other prompts"),
        (p.activation_patch(model, contrast, **at_all), 'expected positions "each"'),
    ):
        with pytest.raises(InputError, match=match):
            viz.circuit_view(graph, overlays=viz.Overlays(exact=wrong))


def test_examples_of_neurons(drawn, monkeypatch):
    graph, *_ = drawn
    neurons = heads_of(graph).query("kind == 'neuron'")
    ranked = neurons.loc[neurons["attribution"].abs().sort_values(ascending=False).index, "name"]
    example = {"tokens": ("a", "b"), "values": (0.5, 2.0), "gates": (0.25, 0.75), "value": 2.0}
    example |= {"position": 1, "text": 3}
    frame = pd.DataFrame(
        [{"name": name, "rank": rank} | example for name in ranked.unique() for rank in range(3)]
    )
    data = read_back(viz.circuit_view(graph, overlays=viz.Overlays(examples=frame)))
    (first, *rest) = data["details"][ranked.iloc[0]]["examples"]
    del example["value"]
    assert first == {k: list(v) if isinstance(v, tuple) else v for k, v in example.items()}
    assert len(rest) == 2
    monkeypatch.setattr("attn_only_lens.viz.graph_details._EXAMPLES", 12)
    data = read_back(viz.circuit_view(graph, overlays=viz.Overlays(examples=frame)))
    assert set(data["details"]) == set(ranked.unique()[:2])
    with pytest.raises(InputError, match="expected those of top_examples"):
        viz.Overlays(examples=frame.drop(columns="gates"))
