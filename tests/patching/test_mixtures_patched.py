"""Tests of analyses of mixtures of experts, against torch's hooks on the transformers model.

In the prompts, tokens visit other experts in the clean and in the corrupted run.
"""

from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from common import D_VOCAB, changed, tokens
from mixtures import N, Oracle, exposed
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens import Contrast, Work, circuits, expose_neuron_heads, load, neurons, save, viz
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError, UnsupportedCallError, UnsupportedModelError

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]
EXACT = {"mixtral": 1e-10, "qwen2": 1e-10, "granite": 1e-10, "gpt_oss": 1e-6}
CLEAN = tokens(batch=1)
CORRUPTED = changed(CLEAN, [2, 5], by=5)
CONTRAST = Contrast(CLEAN, CORRUPTED, p.logit_diff(3, 7))
PAIR = Contrast(CLEAN, CORRUPTED, p.logit_diff(3, 7))
TEXTS = ["w3 w5 w7 w2", "w3 w5 w11 w2 w29 w1"]
made = cache(exposed)
small = {"intermediate_size": 12}  # the kernels need multiples of 4


@cache
def oracle(name):
    result = Oracle(name, layer=0)
    return result, result.neurons(CLEAN), result.neurons(CORRUPTED)


def metric(logits):
    return (logits[0, -1, 3] - logits[0, -1, 7]).item()


def name_of(index, n, size):
    return f"L0E{index // size}N{index % size}" if index < n * size else f"L0N{index - n * size}"


@pytest.mark.parametrize("part", ["z", "pattern", "value"])
@pytest.mark.parametrize("name", EXACT)
def test_sweeps_of_neurons(name, part):
    """A neuron's z is patched in at tokens that do not visit its expert; its parts are 0 there."""
    model, (plain, clean, corrupted) = made(name), oracle(name)
    sites = p.Sites("neurons", layers=0)
    frame = p.activation_patch(model, CONTRAST, sites=sites, part=part).to_frame()
    n, size = plain.sizes()
    visits = [(run["factor"] != 0) * 1.0 for run in (clean, corrupted)]
    w_1, w_0 = (run["w"] * x for run, x in zip((clean, corrupted), visits, strict=True))
    dz = {
        "z": clean["z"] - corrupted["z"],
        "pattern": (w_1 - w_0) * corrupted["v"],
        "value": w_0 * (clean["v"] - corrupted["v"]),
    }[part]
    W_out, before = plain.W_out(), metric(plain(CORRUPTED))
    largest, different = 0.0, 0
    wanted = dz[0].abs().flatten().topk(7).indices.tolist()  # and where only one run visits
    both = visits[0] != visits[1]
    wanted += (dz[0].abs() * both[0]).flatten().topk(5).indices.tolist()
    for place in wanted:
        position, index = divmod(place, dz.shape[-1])
        change = torch.zeros_like(dz)
        change[0, position, index] = dz[0, position, index]
        expected = metric(plain(CORRUPTED, added=change @ W_out))
        row = frame[(frame["name"] == name_of(index, n, size)) & (frame["position"] == position)]
        assert abs(row["value"].item() - expected) <= EXACT[name]
        largest = max(largest, abs(expected - before))
        different += bool(both[0, position, index]) and expected != before
    assert largest > 1e-4, "the control"
    assert different > 0 or part != "z", "the control"


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2", "gpt_oss"])
def test_sweeps_of_routers(name, direction):
    """All routing weights of one token come from the other run, and its choice of experts."""
    model, (plain, *runs) = made(name), oracle(name)
    seen, n = [], plain.sizes()[0]
    for run in (CLEAN, CORRUPTED):
        with plain.block.experts.register_forward_pre_hook(lambda m, args: seen.append(args[1:])):
            plain(run)
    target, (source, here) = (CORRUPTED, runs), seen and (0, 1)
    if direction == "noise":
        target, source, here = CLEAN, 1, 0
    else:
        target = CORRUPTED
    sites = p.Sites(["L0R"])
    frame = p.activation_patch(model, CONTRAST, sites=sites, direction=direction).to_frame()
    assert len(frame) == CLEAN.shape[1]
    before, largest = metric(plain(target)), 0.0
    for position, got in zip(frame["position"], frame["value"], strict=True):

        def route(index, chosen, position=position):
            index, chosen = index.clone(), chosen.clone()
            index[position], chosen[position] = (x[position] for x in seen[source])
            return index, chosen

        added = None
        if name == "qwen2":
            gates, first = [run["r"][:, :, n:] for run in runs], n * plain.sizes()[1]
            change = torch.zeros_like(runs[here]["z"])
            of_shared = runs[here]["z"][0, position, first:] / gates[here][0, position]
            delta = gates[source][0, position] - gates[here][0, position]
            change[0, position, first:] = of_shared * delta
            added = change @ plain.W_out()
        expected = metric(plain(target, route=route, added=added))
        assert abs(got - expected) <= EXACT[name]
        largest = max(largest, abs(expected - before))
    assert largest > 1e-4, "the control"


@torch.no_grad()
@pytest.mark.parametrize("name", EXACT)
def test_whole_experts(name):
    """All neurons of an expert are ablated by name, or come from the other run by a hook."""
    model, (plain, clean, corrupted) = made(name), oracle(name)
    (n, size), point = plain.sizes(), "blocks.0.mlp.hook_neuron_act"
    for expert in range(n):
        rows, change = slice(expert * size, (expert + 1) * size), torch.zeros_like(clean["z"])
        change[..., rows] = -clean["z"][..., rows]
        with p.ablated(model, [f"L0E{expert}N{i}" for i in range(size)]):
            got = metric(model(CLEAN))
        expected = metric(plain(CLEAN, added=change @ plain.W_out()))
        assert abs(got - expected) <= EXACT[name]
        assert change.any() == (expected != metric(plain(CLEAN))), "the control"

        def patch(z, hook, rows=rows):
            z = z.clone()
            z[:, :, rows, 0] = corrupted["z"][..., rows]
            return z

        change[..., rows] += corrupted["z"][..., rows]
        got = metric(model.run_with_hooks(CLEAN, fwd_hooks=[(point, patch)]))
        expected = metric(plain(CLEAN, added=change @ plain.W_out()))
        assert abs(got - expected) <= EXACT[name]


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixtral", "qwen2", "granite"])
def test_single_routing_weights(name):
    """One expert's weight comes from the other run, also at tokens that visit it in one run."""
    model, (plain, clean, corrupted) = made(name), oracle(name)
    (n, size), largest = plain.sizes(), 0.0
    changed_visits = (clean["r"] != 0) != (corrupted["r"] != 0)
    for position, expert in changed_visits[0, :, :n].nonzero().tolist()[:7]:
        rows, change = slice(expert * size, (expert + 1) * size), torch.zeros_like(clean["z"])
        here = 0, position, rows
        per_weight = clean["w"][here] * clean["q"][here] * clean["u"][here]
        weight = corrupted["r"][0, position, expert]
        change[here] = (weight - clean["r"][0, position, expert]) * per_weight

        def patch(r, hook, position=position, expert=expert, weight=weight):
            r[0, position, 0, expert] = weight
            return r

        hooks = [("blocks.0.mlp.hook_router", patch)]
        got = metric(model.run_with_hooks(CLEAN, fwd_hooks=hooks))
        expected = metric(plain(CLEAN, added=change @ plain.W_out()))
        assert abs(got - expected) <= EXACT[name]
        largest = max(largest, abs(expected - metric(plain(CLEAN))))
    assert largest > 1e-4, "the control"


@pytest.mark.parametrize("method", ["gradient", "integrated", "secant"])
def test_estimates_of_the_last_layer(method):
    """Estimates of neurons that write to the last stream equal patches if the effect is small."""
    model = made("mixtral")
    sites = p.Sites("neurons", layers=1, positions=-1)
    exact = p.activation_patch(model, CONTRAST, sites=sites).to_frame()["score"]
    estimate = p.Estimate(method, budget=0)
    got = p.attribution(model, CONTRAST, sites=sites, method=estimate).to_frame()["score"]
    assert got.corr(exact) > 0.99
    routers = p.attribution(model, CONTRAST, sites="routers", method=estimate).to_frame()
    assert set(routers["name"]) == {"L0R", "L1R"}
    assert routers["score"].abs().max() > 1e-3


@pytest.mark.parametrize("name", ["mixtral", "qwen2"])
def test_gradients_of_routers_equal_small_changes_of_routing_weights(name):
    """Also where tokens visit other experts, whose weights change from 0."""
    model, estimate = made(name), p.Estimate("gradient", budget=0)
    sweep = p.attribution(model, CONTRAST, sites="routers", method=estimate)
    _, clean = model.run_with_cache(CLEAN)
    before, small_step = metric(model(CORRUPTED)), 1e-3
    other = 0
    for row in sweep.frame.itertuples():
        hook = f"blocks.{row.layer}.mlp.hook_router"

        def step(r, hook, position=row.position):
            r = r.clone()
            r[:, position] += small_step * (clean[hook.name][:, position] - r[:, position])
            return r

        _, corrupted = model.run_with_cache(CORRUPTED)
        visits = [x[hook][0, row.position] != 0 for x in (clean, corrupted)]
        other += not torch.equal(*visits)
        after = metric(model.run_with_hooks(CORRUPTED, fwd_hooks=[(hook, step)]))
        effect = row.value - sweep.corrupted_value
        assert effect == pytest.approx((after - before) / small_step, rel=0.05, abs=2e-3)
    assert other > 2


@pytest.mark.parametrize(("name", "options"), [("qwen3", {"mlp_only_layers": [0]}), ("glm4", {})])
def test_a_mixture_with_a_dense_layer_has_graphs(name, options):
    options = options or {"first_k_dense_replace": 1}
    model = exposed(name, torch.float32, **options)
    graph = circuits.attribution_graph(model, CONTRAST, top=40)
    assert graph.inflow()["metric"] == pytest.approx(graph.value, rel=1e-4)
    names = set(graph.heads["name"])
    assert any(x.startswith("L0N") for x in names)
    assert any(x.startswith("L1E") for x in names)


def test_neurons_of_shared_experts_come_last():
    model = made("qwen2")
    names = ["L1N3", "L1E4N2", "L1E0N5"]
    frame = p.activation_patch(model, CONTRAST, sites=p.Sites(names, positions=-1)).to_frame()
    assert frame["name"].tolist() == ["L1E0N5", "L1E4N2", "L1N3"]
    assert frame["index"].tolist() == [5, 46, 58]


def test_routers_are_no_part_of_all():
    assert "router" not in p.Sites("all").kinds
    frame = p.activation_patch(made("mixtral"), CONTRAST).to_frame()
    assert set(frame["kind"]) == {"attention", "neuron"}


@pytest.mark.parametrize("name", ["mixtral", "qwen2"])
def test_circuits(name):
    """A circuit's faithfulness is that of a run with hooks; its graph has no other sources."""
    model = made(name)
    circuit = circuits.discover(model, CONTRAST, faithfulness=0.8)
    own = circuits.evaluate(model, circuit, CONTRAST)
    assert own.faithfulness == pytest.approx(circuit.faithfulness, abs=1e-6)
    inside = {(row.kind, row.layer, row.index, row.position) for row in circuit.frame.itertuples()}
    runs = [model.run_with_cache(run)[1] for run in (CLEAN, CORRUPTED)]
    points = {"attention": "attn.hook_z", "neuron": "mlp.hook_neuron_act"}

    def hold(z, hook, kind, layer):
        held = runs[1][hook.name].clone()
        for index in range(z.shape[2]):
            for position in range(z.shape[1]):
                if (kind, layer, index, position) in inside:
                    held[:, position, index] = z[:, position, index]
        return held

    hooks = [
        (
            f"blocks.{layer}.{point}",
            lambda z, hook, kind=kind, layer=layer: hold(z, hook, kind, layer),
        )
        for layer in (0, 1)
        for kind, point in points.items()
    ]
    with torch.no_grad():
        alone = metric(model.run_with_hooks(CLEAN, fwd_hooks=hooks))
        ends = [metric(model(run)) for run in (CLEAN, CORRUPTED)]
    assert circuit.faithfulness == pytest.approx((alone - ends[1]) / (ends[0] - ends[1]), abs=1e-6)
    graph = circuits.attribution_graph(model, CONTRAST, sites=circuit)
    assert graph.value == pytest.approx(alone - ends[1], abs=1e-6)
    sources = graph.nodes[graph.nodes["kind"].isin(["embed", "router"])]
    assert sources["attribution"].sum() == pytest.approx(graph.value, abs=1e-9)
    assert graph.nodes.set_index("id")["attribution"]["rest"] == pytest.approx(0, abs=1e-9)


@cache
def with_words(folder):
    model = exposed("mixtral", torch.float32, **small)
    model.tokenizer = tiny_tokenizer(D_VOCAB, folder)
    return model


@pytest.fixture(scope="module")
def wordy(tmp_path_factory):
    return with_words(tmp_path_factory.mktemp("words"))


def test_statistics(wordy):
    """z, gate and value of a neuron at every token; 0 at tokens that do not visit its expert."""
    names = ["L1E1N3", "L1E2N4", "L0E4N11"]
    statistics = neurons.corpus_statistics(wordy, names, neurons.Corpus(TEXTS), k=3).neurons
    frame = statistics.frame()
    for text in TEXTS:
        ids = torch.tensor([[int(word[1:]) + 4 for word in text.split()]])
        _, cache = wordy.run_with_cache(ids)
        for name, (layer, index) in zip(names, ((1, 15), (1, 28), (0, 59)), strict=True):
            z = cache[f"blocks.{layer}.mlp.hook_neuron_act"][0, :, index, 0]
            rows = frame[(frame["name"] == name) & (frame["text"] == TEXTS.index(text))]
            r = cache[f"blocks.{layer}.mlp.hook_router"][0, :, 0, index // 12]
            for row in rows.itertuples():
                assert torch.equal(torch.tensor(row.gates) != 0, r != 0)
                assert r[row.position] != 0, "an example visits the expert"
                assert row.value == pytest.approx(z[row.position].item(), abs=1e-6)
    assert set(frame["name"]) == set(names)
    assert (np.concatenate(frame["gates"].to_list()) == 0).any(), "the control"


def test_visits_of_experts(wordy):
    """Against loops over texts, tokens and experts."""
    frame = neurons.expert_visits(wordy, neurons.Corpus(TEXTS), k=2)
    assert list(zip(frame["layer"], frame["expert"], strict=True)) == [
        (layer, expert) for layer in range(2) for expert in range(N)
    ]
    words = [word for text in TEXTS for word in text.split()]
    for row in frame.itertuples():
        weights = dict.fromkeys(words, ())
        for text in TEXTS:
            ids = torch.tensor([[int(word[1:]) + 4 for word in text.split()]])
            r = wordy.run_with_cache(ids)[1][f"blocks.{row.layer}.mlp.hook_router"][0, :, 0]
            for word, x in zip(text.split(), r[:, row.expert].tolist(), strict=True):
                weights[word] += (x,)
        visits = [x for some in weights.values() for x in some if x]
        assert row.visits == pytest.approx(len(visits) / len(words))
        assert row.weight == pytest.approx(np.mean(visits)) if visits else np.isnan(row.weight)
        excess = {
            word: n * np.log(n / (len(some) * row.visits))
            for word, some in weights.items()
            if (n := sum(x != 0 for x in some))
        }
        listed = [token.strip() for token in row.tokens]
        expected = sorted(excess.values(), reverse=True)[:2]
        assert [excess[word] for word in listed] == pytest.approx(expected)
        for word, share in zip(listed, row.shares, strict=True):
            assert share == pytest.approx(np.mean([x != 0 for x in weights[word]]))
    assert frame.groupby("layer")["visits"].sum().to_list() == pytest.approx([3.0, 3.0])
    one = neurons.expert_visits(wordy, neurons.Corpus(TEXTS), k=2, work=Work(batch_size=1))
    pd.testing.assert_frame_equal(one, frame)


def test_visits_are_refused_without_experts_or_texts(wordy):
    dense = expose_neuron_heads(load("modular-addition")).model
    with pytest.raises(InputError, match="no layer is a mixture of experts"):
        neurons.expert_visits(dense, neurons.Corpus([[3, 4, 113]]))
    with pytest.raises(InputError, match=r"(?s)got k=0.*got a list; expected a corpus"):
        neurons.expert_visits(wordy, TEXTS, k=0)
    with pytest.raises(InputError, match="no tokens except BOS"):
        neurons.expert_visits(wordy, neurons.Corpus([]))


def test_pages(wordy):
    graph = circuits.attribution_graph(wordy, PAIR, top=60)
    assert {"router", "neuron"} <= set(graph.nodes["kind"])
    page = viz.circuit_view(graph, wordy, PAIR)
    assert "L0R@" in page
    assert "through routing weights" in page
    corpus = neurons.Corpus(TEXTS)
    statistics = neurons.corpus_statistics(wordy, ["L1E1N3"], corpus, k=3).neurons
    assert "L1E1N3" in viz.neuron_page(wordy, ["L1E1N3"], statistics)
    assert "L1E1N3" in viz.attention_view(wordy, ["L1E1N3"], TEXTS[0])


def test_saved_results(wordy, tmp_path):
    """Names of experts' neurons and routers survive files."""
    graph = circuits.attribution_graph(wordy, PAIR, top=60)
    graph.save(tmp_path / "graph.json")
    again = load(tmp_path / "graph.json")
    assert again.nodes["id"].tolist() == graph.nodes["id"].tolist()
    circuit = circuits.discover(wordy, PAIR, faithfulness=0.5)
    circuit.save(tmp_path / "circuit.json")
    again = load(tmp_path / "circuit.json")
    assert again.frame["name"].tolist() == circuit.frame["name"].tolist()
    sweep = p.activation_patch(wordy, PAIR, sites=["L1E1N3", "L0E4N11", "L0R"])
    sweep.save(tmp_path / "sweep.csv")
    again = load(tmp_path / "sweep.csv")
    assert again.to_frame()["name"].tolist() == sweep.to_frame()["name"].tolist()


def test_a_saved_model(wordy, tmp_path):
    again = load(save(wordy, tmp_path / "model"))
    with torch.no_grad():
        assert torch.equal(again(CLEAN), wordy(CLEAN))
        caches = [model.run_with_cache(CLEAN)[1] for model in (again, wordy)]
    point = "blocks.1.mlp.hook_router"
    assert torch.equal(caches[0][point], caches[1][point])


@torch.no_grad()
def test_interventions():
    """Heads that are set or ablated are those that hooks set."""
    model, point = made("mixtral"), "blocks.0.mlp.hook_neuron_act"

    def put(value):
        def hook(x, hook):
            x[:, 4, 14] = value
            return x

        return model.run_with_hooks(CLEAN, fwd_hooks=[(point, hook)])

    with p.ablated(model, ["L0E1N3@4"]):
        assert torch.equal(model(CLEAN), put(0.0))
    with p.steered(model, {"L0E1N3@4": 4.0}):
        got = model(CLEAN)
    z = model.run_with_cache(CLEAN)[1][point][0, 4, 14, 0]
    assert (got - put(z + 4.0)).abs().max() <= 1e-12 * got.abs().max()
    assert (got - model(CLEAN)).abs().max() > 1e-3, "the control"


def test_noise_of_routers_in_training_is_refused():
    model = exposed("mixtral", router_jitter_noise=0.1)
    model.train()
    with pytest.raises(InputError, match="noise on the inputs of routers is active"):
        p.activation_patch(model, CONTRAST, sites=["L0E1N3"])


def test_a_replaced_forward_pass_of_experts_is_noticed():
    """A graph is about the sum of the neurons' outputs, which the block no longer computes."""
    model = exposed("mixtral")
    circuits.attribution_graph(model, CONTRAST, top=10)
    experts = model.blocks[1].mlp.original_component.experts
    forward = experts.forward
    experts.forward = lambda *args, **options: 1.01 * forward(*args, **options)
    with pytest.raises(UnsupportedCallError, match="layer 1: the output of its mixture is no long"):
        circuits.attribution_graph(model, CONTRAST, top=10)
    experts.forward = forward
    circuits.attribution_graph(model, CONTRAST, top=10)


def test_refused(wordy, tmp_path):
    model = made("mixtral")
    with pytest.raises(UnsupportedModelError, match="layer 1 is a mixture of experts: the values"):
        p.path_patch(model, CONTRAST, p.Edges(["L0E1N3"], ["L1E1N3"]))
    for sites in ("neurons", ["L0E1N3"]):
        with pytest.raises(InputError, match="expected part='pattern', which has the same"):
            p.activation_patch(model, CONTRAST, sites=sites, part="q")
    assert len(p.activation_patch(model, CONTRAST, sites="heads", part="q").frame)
    with pytest.raises(InputError, match="got routers as senders, which write nothing"):
        p.path_patch(model, CONTRAST, p.Edges(["L0R"], ["L1H1"]))
    graph = circuits.attribution_graph(model, CONTRAST, top=60)
    with pytest.raises(InputError, match="a neuron of an expert, for which this format"):
        graph.save(tmp_path / "graph.json", format="neuronpedia")
    with pytest.raises(InputError, match="a router, which cannot be in a group"):
        circuits.group_nodes(graph, model, CONTRAST)
    routers = model.run_with_cache(CLEAN)[1]["blocks.1.mlp.hook_router"][0, :, 0]
    position, expert = (routers == 0).nonzero()[0].tolist()
    with pytest.raises(InputError, match=f"does not visit the expert of L1E{expert}N3"):
        circuits.score_sources(model, CLEAN, f"L1E{expert}N3", query=position)
    with pytest.raises(UnsupportedModelError, match="have output biases, which the routing"):
        circuits.attribution_graph(made("gpt_oss"), CONTRAST)
    with pytest.raises(InputError, match="W_Q is not available"):
        circuits.attribution_graph(made("deepseek3"), CONTRAST)
    for call in (p.attribution, circuits.discover):
        options = {"method": p.Estimate("secant", budget=0)} if call is p.attribution else {}
        with pytest.raises(UnsupportedModelError, match=r"expected \[batch, pos, head_index"):
            call(made("deepseek3"), CONTRAST, **options)
    assert len(p.activation_patch(made("deepseek3"), CONTRAST, sites=["L1E0N3", "L0N2"]).frame)
