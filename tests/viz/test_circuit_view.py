"""Tests of an attribution graph's page: its details of nodes agree with independent code."""

from dataclasses import replace

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from browser import needs_browser
from common import tokens
from dense_heads import Dense
from page_of_circuit import click, ids, read_back, slide

from attn_only_lens import Bilinear, Contrast, expose_neuron_heads, viz
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph
from attn_only_lens.errors import InputError
from attn_only_lens.gates import bilinear_gate
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
    sizes, n = heads_of(graph)["attribution"].abs(), 2 * (2 + 37) * POS
    every = attribution_graph(model, contrast, mass=1.0)
    share = sizes.sum() / heads_of(every)["attribution"].abs().sum()
    note, prompts, of_bars = data["notes"]
    from_rest = graph.edges.query("source == 'rest' and target == 'metric'")["weight"].sum()
    assert of_bars.endswith(f"{from_rest / graph.value:.0%} is from 'rest'.")
    assert prompts.startswith("Prompts: tokens, attention and written tokens are from prompt 1;")
    assert "add up to the mean over 2 prompts" in prompts
    n_heads = int((heads_of(graph)["kind"] == "attention").sum())
    counts = f"{n_heads} heads and {61 - n_heads} neurons (61 of {n} sites; a site is"
    assert note.startswith(f"Nodes: {counts}")
    assert f"The sites have {share:.0%} of" in note
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
    assert any(note.startswith("Details: attention of both runs") for note in data["notes"])
    without_details = read_back(viz.circuit_view(graph))
    assert not without_details["corrupted"]
    assert not any(note.startswith("Details:") for note in without_details["notes"])


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
        (text,) = filter(None, shown.texts(".said"))
        assert text.startswith(f"{100 * part['metric']:.0f} % drawn".replace("-", "−"))
        signed |= {round(x, 2) for x in part[visible]}
        if edges == 1000:  # all edges are drawn
            assert part["metric"] == pytest.approx((graph.inflow(rest=False) / into)["metric"])
    assert min(signed) < 0 or max(signed) > 1  # control: some parts act against each other
    click(shown, visible[0])
    assert "inflow" in shown.texts("#panel td")


def test_the_contrast_of_another_graph_is_refused(of_difference, drawn):
    graph, model, contrast, _ = of_difference
    alone, _, prompts, _ = drawn
    both = Contrast(prompts.clean, prompts.clean.flip(0), METRIC)
    flipped = Contrast(contrast.corrupted, contrast.clean, METRIC)
    for item, other, reason in (
        (graph, flipped, "other than the graph's prompts"),
        (alone, both, "with corrupted prompts for a graph of one run"),
        (alone, Contrast(prompts.clean, None, p.logit_diff(7, 12)), "the metric .* the graph's is"),
    ):
        with pytest.raises(InputError, match=reason):
            viz.circuit_view(item, model, other)


def test_neurons_of_bilinear_gates_tell_what_they_raise(model):
    contrast = one_run(3, 1, POS)
    split = bridges.exposed_copy(bridges.boot("gpt2"), gate=Bilinear(2))
    graph = attribution_graph(split, contrast, top=23)
    details = read_back(viz.circuit_view(graph, split, contrast))["details"]
    neurons = heads_of(graph).query("kind == 'neuron'")
    assert len(neurons)
    cache, w = split.run_with_cache(contrast.clean)[1], bilinear_gate("gelu_new", 2).w
    for node in neurons.itertuples():
        head = HeadName.parse(node.name)
        i, j = divmod(head.index, 2)
        z = cache[head.hook("z", split)][0, node.position, head.index]
        best = str(int(written(model, replace(head, index=i), z.sign() * w[j]).argmax()))
        assert details[node.id]["writes"][0][0] == best
        assert "pattern" in details[node.name]


# For models of transformers: the output projections of heads and neurons.
PARTS = {
    "gpt2": ("h", "attn.c_proj", "mlp.c_proj", "ln_f"),
    "granite": ("layers", "self_attn.o_proj", "mlp.down_proj", "norm"),
    "gemma2": ("layers", "self_attn.o_proj", "mlp.down_proj", "norm"),
}


@pytest.mark.parametrize("family", PARTS)
@torch.no_grad()
def test_top_tokens_are_what_the_original_makes_of_them(family):
    bridge, plain, contrast = bridges.boot(family), bridges.original(family), one_run(3, 1, POS)
    expose_neuron_heads(bridge)
    with torch.enable_grad():
        graph = attribution_graph(bridge, contrast, top=31)
    details = read_back(viz.circuit_view(graph, bridge, contrast, top_tokens=3))["details"]
    nodes = heads_of(graph)
    assert set(nodes["kind"]) == {"attention", "neuron"}
    layers, attn, mlp, last = PARTS[family]
    blocks, last, seen = getattr(plain.base_model, layers), getattr(plain.base_model, last), {}
    for layer, block in enumerate(blocks):
        for kind, path in (("attention", attn), ("neuron", mlp)):

            def keep(module, args, key=(layer, kind)):
                seen.setdefault(key, (args[0][0], module))  # the first call

            block.get_submodule(path).register_forward_pre_hook(keep)
    plain(contrast.clean)

    def through(norm, row):
        if family == "gpt2":
            return norm.weight * (row - row.mean())
        return row * (norm.weight + (family == "gemma2"))

    dense, without_norm = Dense(family) if family != "granite" else None, 0
    for node in nodes.itertuples():
        given_to, module = seen[node.layer, node.kind]
        index = HeadName.parse(node.name).index
        size = given_to.shape[1] // 2 if node.kind == "attention" else 1
        alone = torch.zeros_like(given_to[0])
        columns = slice(index * size, (index + 1) * size)
        alone[columns] = given_to[node.position, columns]
        row = module(alone[None])[0] - module(torch.zeros_like(alone)[None])[0]
        if family == "gemma2":
            after = "attention" if node.kind == "attention" else "feedforward"
            row = through(getattr(blocks[node.layer], f"post_{after}_layernorm"), row)
        expected = standard(plain.lm_head.weight @ through(last, row))
        check_tokens(details[node.id]["writes"], expected, 3)
        without_norm += int((plain.lm_head.weight @ row).argmax()) != int(expected.argmax())
        if node.kind == "neuron" and dense:
            queries = standard((dense.writes["embed"] @ dense.reads[node.name]["q"])[:, 0])
            check_tokens(details[node.name]["reads"], queries, 3)
    assert without_norm  # control


def test_a_page_of_a_thousand_nodes_is_bounded_and_says_so():
    config = bridges.transformers.GPT2Config(**bridges.GPT | {"n_layer": 3})
    deeper = bridges.randomise(bridges.transformers.GPT2LMHeadModel(config).double().eval())
    model, contrast = expose_neuron_heads(bridges.bridged(deeper)).model, one_run(0, 1, 13)
    graph = attribution_graph(model, contrast, top=1000)
    assert len(heads_of(graph)) == 1000
    rows = [
        {"name": name, "rank": rank, "tokens": ("word",) * 24, "values": (-0.123,) * 24}
        | {"gates": (0.123,) * 24, "position": 7, "value": 2.0, "text": 3}
        for name in graph.heads.query("kind == 'neuron'")["name"].unique()
        for rank in range(5)
    ]
    examples = viz.Overlays(examples=pd.DataFrame(rows))
    page = viz.circuit_view(graph, model, contrast, top_tokens=20, overlays=examples)
    data = read_back(page)
    assert len(graph.edges) > 60_000 > 30_000 > len(data["edges"]["weight"])
    *_, note = data["notes"]
    assert "strongest into each node" in note
    # The edges that are left out are part of "rest", so the sums still hold.
    ids, into = np.array(data["nodes"]["id"]), {}
    rows = zip(*(data["edges"][c] for c in ("target", "kind", "weight")), strict=True)
    for target, kind, weight in rows:
        if kind == "value":
            into[ids[target]] = into.get(ids[target], 0.0) + weight
    attribution = graph.nodes.set_index("id")["attribution"]
    apart = [abs(into[name] - attribution[name]) for name in into]
    assert max(apart) < 1e-3 * attribution.abs().max()  # each edge has five digits
    # Room for longer texts: patterns of 100 tokens, and 8 more characters for each token.
    longest = len(page.encode()) + 1000 * (4 * 20 * 8 + 100 * 6)
    assert longest < 3_100_000


def test_patterns_that_do_not_fit_are_left_out_and_it_is_said(drawn, monkeypatch):
    graph, model, contrast, page = drawn
    monkeypatch.setattr("attn_only_lens.viz.graph_details._WEIGHTS", 7 * POS)
    data = read_back(viz.circuit_view(graph, model, contrast))
    assert data["notes"][-1:] == ["Patterns: only for the 7 nodes with the largest |attribution|."]
    heads = heads_of(graph)
    strongest = heads.loc[heads["attribution"].abs().nlargest(7).index]
    keys = {n.name if n.kind == "neuron" else n.id for n in strongest.itertuples()}
    assert {key for key, detail in data["details"].items() if "pattern" in detail} == keys
    every = {key for key, detail in read_back(page)["details"].items() if "pattern" in detail}
    assert keys < every


def test_what_is_not_the_graphs_is_refused(drawn):
    graph, model, contrast, _ = drawn
    prompts, other = contrast.clean, bridges.exposed_copy(bridges.boot("gpt2"))
    with torch.no_grad():
        other.blocks[0].mlp.W_out.mul_(1.1)
    for how, match in (
        ({"model": model}, "got a model alone"),
        ({"contrast": contrast}, "got a contrast alone"),
        ({"prompt": 2}, "got prompt=2; the graph has 2 prompts"),
        ({"notes": "text"}, "got notes='text'; expected a list of texts"),
        ({"overlays": "exact"}, "got a str as overlays; expected viz.Overlays"),
        (
            {"model": model, "contrast": Contrast(prompts[:1], None, METRIC)},
            "prompts other than the graph's",
        ),
        ({"model": bridges.boot("gpt2"), "contrast": contrast}, "no neuron-heads"),
        ({"model": other, "contrast": contrast}, "from another model"),
    ):
        with pytest.raises(InputError, match=match):
            viz.circuit_view(graph, **how)
    point = model.hook_dict["blocks.0.hook_in"]
    point.add_perma_hook(lambda value, hook: value)
    try:
        with pytest.raises(InputError, match="hook"):
            viz.circuit_view(graph, model, contrast)
    finally:
        point.remove_hooks("both", including_permanent=True)


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
    frame = pd.DataFrame(
        [
            {"name": name, "rank": rank, "tokens": ("a", "b"), "values": (0.5, 2.0),
             "gates": (0.25, 0.75), "position": 1, "value": 2.0, "text": 3}
            for name in ranked.unique() for rank in range(3)
        ]
    )  # fmt: skip
    data = read_back(viz.circuit_view(graph, overlays=viz.Overlays(examples=frame)))
    (first, *rest) = data["details"][ranked.iloc[0]]["examples"]
    assert first == {"tokens": ["a", "b"], "values": [0.5, 2.0], "gates": [0.25, 0.75],
                     "position": 1, "text": 3}  # fmt: skip
    assert len(rest) == 2
    monkeypatch.setattr("attn_only_lens.viz.graph_details._EXAMPLES", 12)
    data = read_back(viz.circuit_view(graph, overlays=viz.Overlays(examples=frame)))
    assert set(data["details"]) == set(ranked.unique()[:2])
    assert data["notes"][-1:] == ["Examples: only for the 2 nodes with the largest |attribution|."]
    with pytest.raises(InputError, match="expected those of top_examples"):
        viz.Overlays(examples=frame.drop(columns="gates"))
    with pytest.raises(InputError) as refused:
        viz.Overlays(exact=frame, stability=3)
    assert [reason.partition(";")[0] for reason in refused.value.reasons] == [
        "got a DataFrame as exact",
        "got an int as stability",
    ]
