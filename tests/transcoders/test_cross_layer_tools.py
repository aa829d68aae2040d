"""Tests of tools on features with several writes, against plain hooks on the original model.

With error nodes, a change of a feature's z by Δz changes the original MLP's output of each layer
that it writes to by Δz times the feature's row of this layer's decoder.
"""

from functools import cache

import pytest
import torch
from common import needs_hooked_transformer
from drawn_transcoders import (
    FEATURES,
    active,
    bridge,
    cross_layer_of,
    hooked,
    imitated,
    three_layers,
)
from patched_runs import faithfulness_by_hooks

from attn_only_lens import Contrast, HeadName, circuits
from attn_only_lens import patching as p
from attn_only_lens.circuits.weights.head_matrices import HeadMatrices
from attn_only_lens.engine.linear_map import direct_logits
from attn_only_lens.engine.multipliers import run_both
from attn_only_lens.engine.prompts import prompt_pair
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.errors import InputError
from attn_only_lens.patching import repairs
from attn_only_lens.transcoders import attach

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]

CORRECT, WRONG = 7, 11
METRIC = p.logit_diff(CORRECT, WRONG)
CLEAN = torch.tensor([[3, 17, 5, 29, 13], [2, 19, 23, 31, 37]])
CORRUPTED = torch.tensor([[3, 11, 5, 29, 8], [2, 7, 23, 31, 1]])  # other tokens at 1 and -1
CONTRAST = Contrast(CLEAN, CORRUPTED, METRIC)

# name: model, options of the transcoders, their input point, their output point, rounding
MODELS = {
    "gpt2": (three_layers, {"skip": True}, "ln2.hook_out", "mlp.hook_out", 1e-9),
    # its norms compute in float32 for every dtype
    "gemma2": (
        *(lambda: bridge("gemma2"), {"reads": "stream", "after_norm": True}),
        *("ln2.hook_in", "ln2_post.hook_out", 1e-5),
    ),
    "hooked": (
        lambda: hooked("gelu", scale=0.24),
        {"skip": True, "reads": "normalized", "activation": "relu"},
        *("ln2.hook_normalized", "hook_mlp_out", 1e-9),
    ),
}


class Oracle:
    """The original model, and each layer's features in both runs by their definition."""

    def __init__(self, name):
        make, options, self.reads, self.writes, self.rounding = MODELS[name]
        self.model = make()
        self.transcoders = cross_layer_of(self.model, **options)
        self.runs = [self.nodes(prompt) for prompt in (CLEAN, CORRUPTED)]

    @torch.no_grad()
    def nodes(self, prompt):
        seen = self.model.run_with_cache(prompt)[1]
        nodes = []
        for layer, transcoder in self.transcoders.items():
            x = seen[f"blocks.{layer}.{self.reads}"]
            q = x @ transcoder.W_enc + transcoder.b_enc
            nodes.append({"x": x, "q": q, "w": active(q, transcoder).to(q)})
            nodes[-1]["out"] = seen[f"blocks.{layer}.{self.writes}"]
        return nodes

    def change_of_z(self, name, part="z"):
        """Return the change of a feature's z from the corrupted to the clean run."""
        layer, feature = map(int, name.removeprefix("L").split("F"))
        w, q = ([run[layer][key][..., feature] for run in self.runs] for key in "wq")
        return {
            "z": w[0] * q[0] - w[1] * q[1],
            "pattern": (w[0] - w[1]) * q[1],
            "value": w[1] * (q[0] - q[1]),
        }[part]

    def decoders(self, name):
        """Return {layer: row} for the layers to which a feature writes."""
        layer, feature = map(int, name.removeprefix("L").split("F"))
        transcoder = self.transcoders[layer]
        rows = {layer: transcoder.W_dec[feature]}
        for number, W in enumerate(transcoder.W_later):
            rows[layer + 1 + number] = W[feature]
        return rows

    def written(self, name, part="z"):
        """Return {layer: what the change of a feature adds to the layer's output}."""
        dz = self.change_of_z(name, part).unsqueeze(-1)
        return {layer: dz * row for layer, row in self.decoders(name).items()}

    @torch.no_grad()
    def metric(self, prompt, changes=None, positions=slice(None)):
        """Return each prompt's metric if changes are added to the original MLPs' outputs."""

        def add(out, hook, change):
            out = out.clone()
            out[:, positions] += change[:, positions]
            return out

        hooks = [
            (f"blocks.{i}.{self.writes}", lambda out, hook, x=x: add(out, hook, x))
            for i, x in (changes or {}).items()
        ]
        with self.model.hooks(fwd_hooks=hooks):
            logits = self.model(prompt)[:, -1]
        return logits[:, CORRECT] - logits[:, WRONG]

    def names(self, layer, n=7):
        """Return the features of a layer that change most between the runs."""
        q, w = ([run[layer][key] for run in self.runs] for key in "qw")
        moved = (w[0] * q[0] - w[1] * q[1]).abs().sum((0, 1)).argsort(descending=True)
        return [f"L{layer}F{index}" for index in moved[:n].tolist()]


@cache
def oracle(name):
    return Oracle(name)


@pytest.fixture(
    params=[
        pytest.param(name, marks=[needs_hooked_transformer] * (name == "hooked")) for name in MODELS
    ]
)
def case(request):
    return oracle(request.param)


@pytest.mark.parametrize("part", ["z", "pattern", "value"])
def test_patches_reach_all_layers(case, part):
    layers, last = range(len(case.model.blocks)), CLEAN.shape[1] - 1
    names = [name for layer in layers for name in case.names(layer)]
    expected, own = {}, {}
    for name in names:
        changes = case.written(name, part)
        layer = min(changes)
        for position in (1, last):
            value = case.metric(CORRUPTED, changes, [position]).mean().item()
            expected[name, position] = value
            alone = case.metric(CORRUPTED, {layer: changes[layer]}, [position]).mean().item()
            own[name, position] = alone
    with attach(case.model, case.transcoders) as model:
        some = p.activation_patch(model, CONTRAST, sites=names, part=part)
        every = p.activation_patch(model, CONTRAST, sites="features", part=part)
    span = abs(some.clean_value - some.corrupted_value)
    for frame in (some.frame, every.frame):
        rows = frame.set_index(["name", "position"])["value"]
        for key, value in expected.items():
            assert abs(rows[key] - value) < case.rounding * span, key
    if part != "pattern":  # control: later writes count
        assert max(abs(own[key] - value) for key, value in expected.items()) > 1e-3 * span
    assert every.frame["name"].nunique() == FEATURES * len(layers)


def test_patches_of_one_prompt():
    """Runs that start in different layers must not share what skipped layers wrote.

    With several prompts, their rows could not be added at all.
    """
    case, position = oracle("gpt2"), CLEAN.shape[1] - 1
    names = [name for layer in case.transcoders for name in case.names(layer)]
    with attach(case.model, case.transcoders) as model:
        contrast = Contrast(CLEAN[:1], CORRUPTED[:1], METRIC)
        sweep = p.activation_patch(model, contrast, sites="features")
    rows = sweep.frame.set_index(["name", "position"])["value"]
    for name in names:
        changes = {layer: change[:1] for layer, change in case.written(name).items()}
        for place in (1, position):
            expected = case.metric(CORRUPTED[:1], changes, [place]).item()
            assert rows[name, place] == pytest.approx(expected, abs=1e-9)


def test_patches_of_a_replacement_model(case):
    """Without errors, later features also change; the oracle is a hook in a full run."""
    names = [name for layer in range(len(case.model.blocks)) for name in case.names(layer, 3)]
    with attach(case.model, case.transcoders, error="zero") as model, torch.no_grad():
        sweep = p.activation_patch(model, CONTRAST, sites=[*names, "L0H1", "L1H0"])
        runs = [model.run_with_cache(prompt)[1] for prompt in (CLEAN, CORRUPTED)]
        rows = sweep.frame.set_index(["name", "position"])["value"]
        for name in names:
            layer, feature = map(int, name.removeprefix("L").split("F"))
            point = f"blocks.{layer}.mlp.hook_neuron_act"

            def put(z, hook, feature=feature, point=point):
                z = z.clone()
                z[:, 1, feature] = runs[0][point][:, 1, feature]
                return z

            logits = model.run_with_hooks(CORRUPTED, fwd_hooks=[(point, put)])[:, -1]
            value = (logits[:, CORRECT] - logits[:, WRONG]).mean().item()
            span = abs(sweep.clean_value - sweep.corrupted_value)
            assert abs(rows[name, 1] - value) < case.rounding * span


@pytest.mark.parametrize("method", ["gradient", "exact_gate", "secant"])
def test_estimates_with_repairs(case, method):
    """Estimates of all sites; those that are repaired are exact."""
    with attach(case.model, case.transcoders) as model:
        exact = p.activation_patch(model, CONTRAST, sites="features")
        sweep = p.attribution(model, CONTRAST, sites="features", method=method)
    both = exact.frame.merge(sweep.frame, on=["name", "position"], suffixes=("", "_2"))
    span = abs(sweep.clean_value - sweep.corrupted_value)
    repaired = both[both["exact"]]
    assert len(repaired) > 10
    assert (repaired["value"] - repaired["value_2"]).abs().max() < case.rounding * span
    assert both["value"].corr(both["value_2"]) > 0.9


def kept_with_gradients(case, points):
    """Return activations of the corrupted run, which hold the gradients of the mean metric."""
    kept = {}

    def keep(out, hook):
        kept[hook.name] = out
        out.retain_grad()

    with torch.enable_grad(), case.model.hooks(fwd_hooks=[(x, keep) for x in points]):
        logits = case.model(CORRUPTED)[:, -1]
        (logits[:, CORRECT] - logits[:, WRONG]).mean().backward()
    case.model.zero_grad()
    return kept


def test_repair_keys_add_up_all_writes(monkeypatch):
    """key = Σ a² ‖g‖ / ‖x‖ over the layers that a feature writes to (`patching/repairs.py`)."""
    case, keys, compute = oracle("gpt2"), [], repairs.repair_keys

    def look(*args):
        keys.append(compute(*args))
        return keys[-1]

    monkeypatch.setattr(f"{repairs.__package__}.estimator.repair_keys", look)
    with attach(case.model, case.transcoders) as model:
        sweep = p.attribution(model, CONTRAST, sites=p.Sites("features", layers=0))
    kept = kept_with_gradients(case, [f"blocks.{i}.mlp.hook_out" for i in range(3)])
    streams = case.model.run_with_cache(CORRUPTED)[1]
    frame = sweep.frame.assign(key=keys[-1].numpy()).set_index(["name", "position"])
    for name in case.names(0):
        dz, key = case.change_of_z(name), 0.0
        for layer, row in case.decoders(name).items():
            slope = kept[f"blocks.{layer}.mlp.hook_out"].grad.norm(dim=-1)
            slope = slope / streams[f"blocks.{layer}.hook_resid_post"].norm(dim=-1)
            key = key + dz.square() * row.square().sum() * slope
        for position in range(1, CLEAN.shape[1]):
            got = frame["key"][name, position]
            assert got == pytest.approx(key[:, position].sum().item(), rel=1e-9)


def test_gradients_are_autograd(case):
    points = {layer: f"blocks.{layer}.{case.writes}" for layer in case.transcoders}
    kept = kept_with_gradients(case, points.values())
    names = [name for layer in points for name in case.names(layer)]
    with attach(case.model, case.transcoders) as model:
        method = p.Estimate("gradient", budget=0)
        sweep = p.attribution(model, CONTRAST, sites=names, method=method)
    rows = sweep.frame.set_index(["name", "position"])["value"]
    span = abs(sweep.clean_value - sweep.corrupted_value)
    for name in names:
        estimate = sum(
            (kept[points[layer]].grad * change).sum(-1).sum(0)
            for layer, change in case.written(name).items()
        )
        for position in range(1, CLEAN.shape[1]):
            expected = sweep.corrupted_value + estimate[position].item()
            assert abs(rows[name, position] - expected) < case.rounding * span


def test_steered_and_ablated(case):
    name = case.names(0, 1)[0]
    _, feature = map(int, name.removeprefix("L").split("F"))
    run = case.runs[0][0]
    z = (run["q"] * run["w"])[..., feature, None]
    for context, change in (
        (lambda model: p.steered(model, {name: 1.7}), 1.7 + 0 * z),
        (lambda model: p.ablated(model, name, "zero"), -z),
    ):
        changes = {layer: change * row for layer, row in case.decoders(name).items()}
        expected = case.metric(CLEAN, changes)
        with attach(case.model, case.transcoders) as model, context(model), torch.no_grad():
            logits = model(CLEAN)[:, -1]
        got = logits[:, CORRECT] - logits[:, WRONG]
        scale = case.metric(CLEAN).abs().max()
        assert (got - expected).abs().max() < case.rounding * scale
        assert (expected - case.metric(CLEAN)).abs().max() > 1e-5 * scale


def test_discover_and_faithfulness(case):
    with attach(case.model, case.transcoders) as model:
        circuit = circuits.discover(
            *(model, CONTRAST),
            faithfulness=0.8,
            method="secant",
            search=circuits.Search(n_random=1),
        )
        expected = faithfulness_by_hooks(
            model, circuit.sites, CLEAN, CORRUPTED, answers=(CORRECT, WRONG)
        )
    assert circuit.faithfulness == pytest.approx(expected, abs=max(1e-8, 10 * case.rounding))
    assert circuit.faithfulness >= 0.8


def test_oracles_are_nontrivial(case):
    """The features of every layer change the metric through later layers alone."""
    for layer in list(case.transcoders)[:-1]:
        name = case.names(layer, 1)[0]
        changes = case.written(name)
        del changes[layer]
        moved = case.metric(CORRUPTED, changes) - case.metric(CORRUPTED)
        assert moved.abs().max() > 1e-4
    x, transcoder = case.runs[0][0]["x"], case.transcoders[0]
    z = case.runs[0][0]["q"] * case.runs[0][0]["w"]
    assert torch.equal(imitated(x, transcoder)[1], z)


def edge_sums(graph):
    """Return the largest error of sums into nodes, and of sums out of nodes."""
    nodes, into = graph.nodes.set_index("id"), graph.inflow()
    out = graph.edges.groupby("source")["weight"].sum()
    shared = out.index.intersection(nodes.index[nodes["layer"].notna()])
    errors = (into - nodes["attribution"].loc[into.index]).abs().max()
    return errors, (out[shared] - nodes["attribution"].loc[shared]).abs().max()


def test_graphs_of_a_difference_add_up(case):
    with attach(case.model, case.transcoders) as model:
        contrast = Contrast(CLEAN[:1], CORRUPTED[:1], METRIC)
        graph = circuits.attribution_graph(model, contrast, mass=1)
    into, out = edge_sums(graph)
    nodes = graph.nodes.set_index("id")
    size = max(nodes["attribution"].abs().max(), case.model(CLEAN).abs().max().item())
    rounding = max(1e-12, case.rounding / 10) * size  # Gemma 2 has norms in float32
    assert into < rounding
    assert out < rounding
    assert nodes["kind"].eq("feature").sum() > 20
    assert graph.inflow()["metric"] == pytest.approx(graph.value, abs=rounding)
    clean, corrupted = (case.metric(x[:1]).item() for x in (CLEAN, CORRUPTED))
    assert graph.value == pytest.approx(clean - corrupted, abs=rounding)


def test_graphs_of_one_run_add_up(case):
    with attach(case.model, case.transcoders) as model:
        graph = circuits.attribution_graph(model, Contrast(CLEAN[:1], None, METRIC), mass=1)
    into, _ = edge_sums(graph)
    nodes = graph.nodes.set_index("id")
    assert into < max(1e-12, case.rounding / 10) * nodes["attribution"].abs().max()
    assert graph.inflow()["metric"] == pytest.approx(case.metric(CLEAN[:1]).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "reads"), [("gemma2", "input"), ("olmo2", "stream"), ("gptj", "input")]
)
def test_norms_after_mlps_and_parallel_layers(name, reads):
    """Later writes pass the norm after the MLP that they are added to."""
    model = bridge(name)
    with attach(model, cross_layer_of(model, reads=reads)), torch.no_grad():
        contrast = Contrast(CLEAN[:1], CORRUPTED[:1], METRIC)
        for some in (contrast, Contrast(CLEAN[:1], None, METRIC)):
            graph = circuits.attribution_graph(model, some, mass=1)
            size = max(graph.nodes["attribution"].abs().max(), model(CLEAN).abs().max().item())
            assert max(edge_sums(graph)[: 1 + (some is contrast)]) < 1e-6 * size
            assert graph.nodes["kind"].eq("feature").sum() > 10
        sweep = p.activation_patch(model, contrast, sites=p.Sites("features", layers=0))
        runs = [model.run_with_cache(x)[1] for x in (CLEAN[:1], CORRUPTED[:1])]
        point, rows = "blocks.0.mlp.hook_neuron_act", sweep.frame
        change = (rows["value"] - sweep.corrupted_value).abs()
        assert change.nlargest(7).min() > 1e-4
        for row in rows.loc[change.nlargest(7).index].itertuples():
            feature, position = int(row.name.removeprefix("L0F")), row.position

            def put(z, hook, feature=feature, position=position):
                z = z.clone()
                z[:, position, feature] = runs[0][point][:, position, feature]
                return z

            logits = model.run_with_hooks(CORRUPTED[:1], fwd_hooks=[(point, put)])[0, -1]
            assert row.value == pytest.approx((logits[CORRECT] - logits[WRONG]).item(), abs=1e-5)


def test_sums_in_float32():
    model = three_layers().float()
    transcoders = cross_layer_of(model, dtype=torch.float32)
    with attach(model, transcoders):
        for corrupted in (CORRUPTED[:1], None):
            contrast = Contrast(CLEAN[:1], corrupted, METRIC)
            graph = circuits.attribution_graph(model, contrast, mass=1)
            nodes = graph.nodes
            assert max(edge_sums(graph)[: 1 + (corrupted is not None)]) < 1e-6 * max(
                nodes["attribution"].abs().sum(), abs(graph.value)
            )


def entering(case, cache, changes, layer):
    """Return the change of a transcoder's input if earlier outputs change; GPT-2's norm is held."""
    norm = case.model.blocks[layer].ln2.original_component
    delta = sum(change for written, change in changes.items() if written < layer)
    centred = delta - delta.mean(-1, keepdim=True)
    return centred / cache[f"blocks.{layer}.ln2.hook_scale"] * norm.weight.detach()


@pytest.mark.parametrize("part", ["z", "value"])
def test_path_patch(part):
    """A receiver reads all writes before it; its change is written to all later layers."""
    case = oracle("gpt2")
    cache = case.model.run_with_cache(CORRUPTED)[1]
    senders, receivers = [*case.names(0, 3), *case.names(1, 3)], [*case.names(1, 4), *case.names(2)]
    position, expected, near = CLEAN.shape[1] - 1, {}, {}
    for sender in senders:
        written = case.written(sender)
        for change in written.values():
            change[:, :position] = 0
        expected[sender, "logits"] = logits_after(case, cache, written)
        for receiver in receivers:
            layer, feature = map(int, receiver.removeprefix("L").split("F"))
            if layer <= min(written):
                continue
            for result, changes in ((expected, written), (near, dict([min(written.items())]))):
                q, w = (case.runs[1][layer][key] for key in "qw")
                change = entering(case, cache, changes, layer) @ case.transcoders[layer].W_enc
                new_w = active(q + change, case.transcoders[layer]).to(w) if part == "z" else w
                dz = (new_w * (q + change) - w * q)[..., feature, None]
                moved = {i: dz * row for i, row in case.decoders(receiver).items()}
                result[sender, receiver] = case.metric(CORRUPTED, moved).mean().item()
    with attach(case.model, case.transcoders) as model:
        edges = p.Edges(p.Sites(senders, positions=position), [*receivers, "logits"], part=part)
        sweep = p.path_patch(model, CONTRAST, edges)
    rows = sweep.frame.set_index(["sender", "receiver"])["value"]
    span = abs(sweep.clean_value - sweep.corrupted_value)
    assert len(rows) == len(expected)
    for key, value in expected.items():
        assert abs(rows[key] - value) < case.rounding * span, key
    # control: the sender's later writes count
    assert max(abs(near[key] - expected[key]) for key in near) > 1e-4 * span


def logits_after(case, cache, changes):
    """Return the mean metric if the last norm reads all changes, with its scale held."""
    norm, delta = case.model.ln_final.original_component, sum(changes.values())
    centred = delta - delta.mean(-1, keepdim=True)
    more = (centred / cache["ln_final.hook_scale"] * norm.weight.detach())[:, -1]
    W_U = case.model.unembed.original_component.weight.detach()
    effect = more @ (W_U[CORRECT] - W_U[WRONG])
    return (case.metric(CORRUPTED) + effect).mean().item()


def test_edges_between_features_are_what_their_weights_say():
    """In one run, an edge is the target's slope times its encoder times what the source writes."""
    case, position = oracle("gpt2"), CLEAN.shape[1] - 1
    cache = case.model.run_with_cache(CLEAN[:1])[1]
    with attach(case.model, case.transcoders) as model:
        graph = circuits.attribution_graph(model, Contrast(CLEAN[:1], None, METRIC), mass=1)
    slopes = graph.nodes.set_index("id")["gradient"]
    edges = graph.edges[graph.edges["kind"] == "value"].set_index(["source", "target"])["weight"]
    checked = far = 0
    run = case.runs[0]
    for (source, target), weight in edges.items():
        ends = [x.partition("@") for x in (source, target)]
        if any("F" not in name for name, *_ in ends) or int(ends[0][2]) != position:
            continue
        layer, feature = map(int, ends[1][0].removeprefix("L").split("F"))
        start, index = map(int, ends[0][0].removeprefix("L").split("F"))
        z = (run[start]["q"] * run[start]["w"])[:1, :, index, None]
        written = {i: z * row for i, row in case.decoders(ends[0][0]).items()}
        change = entering(case, cache, written, layer) @ case.transcoders[layer].W_enc
        gate = run[layer]["w"][0, position, feature]
        expected = slopes[target] * gate * change[0, position, feature]
        assert weight == pytest.approx(expected.item(), rel=1e-8, abs=1e-12)
        checked += 1
        far += layer - start > 1
    assert checked > 100
    assert far > 20


def test_paths_add_up():
    case = oracle("gpt2")
    with attach(case.model, case.transcoders, error="zero") as model:
        expansion = circuits.path_expansion(model, Contrast(CLEAN[:1], None, METRIC))
        paths, effects = expansion.paths(10**7), expansion.effects()["effect"]
        total = expansion.logits.sum(0)
        with torch.no_grad():
            assert (total - model(CLEAN[:1])).abs().max() < 1e-10
    for hops in (1, 2):
        assert paths[paths["hops"] == hops]["effect"].sum() == pytest.approx(
            effects[hops], rel=1e-8
        )


def test_score_sources_add_up():
    """The call itself tests that sources add up; the oracle is one source's writes."""
    case, name = oracle("gpt2"), oracle("gpt2").names(2, 1)[0]
    layer, feature = map(int, name.removeprefix("L").split("F"))
    source = case.names(0, 1)[0]
    cache, position = case.model.run_with_cache(CLEAN[:1])[1], CLEAN.shape[1] - 1
    index = int(source.split("F")[1])
    z = (case.runs[0][0]["q"] * case.runs[0][0]["w"])[:1, :, index, None]
    written = {i: z * row for i, row in case.decoders(source).items()}
    expected = entering(case, cache, written, layer) @ case.transcoders[layer].W_enc
    with attach(case.model, case.transcoders) as model:
        frame = circuits.score_sources(model, CLEAN[:1], name)
    share = frame.set_index("name")["share"][source]
    assert share == pytest.approx(expected[0, position, feature].item(), rel=1e-8)


def test_tools_of_weights_are_refused_or_count_all_writes():
    case = oracle("gpt2")
    with attach(case.model, case.transcoders) as model:
        for call in (
            lambda: circuits.composition(model, ["L0F3"], ["L1F5"], kind="v"),
            lambda: circuits.token_circuit(model, "L0F3", "ov"),
        ):
            with pytest.raises(InputError, match="no single row of output weights"):
                call()


def test_direct_effects_count_all_writes():
    """A feature's direct effect on two logits is its edge into the metric of a graph."""
    case, position = oracle("gpt2"), CLEAN.shape[1] - 1
    names = [name for layer in case.transcoders for name in case.names(layer, 5)]
    contrast = Contrast(CLEAN[:1], CORRUPTED[:1], METRIC)
    with attach(case.model, case.transcoders) as model:
        graph = circuits.attribution_graph(model, contrast, mass=1)
        runs = run_both(model, prompt_pair(model, CLEAN[:1], CORRUPTED[:1]), decomposed=True)
        nodes = [(HeadName.parse(name), position) for name in names]
        logits = direct_logits(model, runs, nodes, [0] * len(nodes))
    into = graph.edges[graph.edges["target"] == "metric"].set_index("source")["weight"]
    for name, of_node in zip(names, logits, strict=True):
        expected = into.get(f"{name}@{position}", 0.0)  # edges of 0 are left out
        got = (of_node[CORRECT] - of_node[WRONG]).item()
        assert got == pytest.approx(expected, rel=1e-8, abs=1e-10)
    assert into.filter(like="L0F").abs().sum() > 1e-3


def test_promoted_tokens_count_all_writes(case):
    names = [name for layer in case.transcoders for name in case.names(layer, 5)]
    with attach(case.model, case.transcoders) as model:
        matrices = HeadMatrices.of(model, fold_norms=False)
        for name in names:
            sites = LayerSites.of(model, [HeadName.parse(name)])
            got = matrices.outputs(sites, torch.full((1, 1), 1.7, dtype=torch.float64))[0]
            expected = 1.7 * sum(case.decoders(name).values())
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
