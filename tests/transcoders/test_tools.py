"""Tests of tools on features, skip nodes and error nodes against hooks on the plain model.

With error nodes, a change of a feature's z by Δz changes the original MLP's output by Δz times the
feature's row of W_dec. So an edit of a node is an edit of the original MLP's output.
"""

from functools import cache, partial

import pytest
import torch
from common import needs_hooked_transformer
from drawn_transcoders import (
    FEATURES,
    active,
    bridge,
    hooked,
    imitated,
    layers_of,
    three_layers,
)
from patched_runs import faithfulness_by_hooks

from attn_only_lens import Contrast, circuits, neuron_pattern
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
from attn_only_lens.transcoders import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens and transformers

CORRECT, WRONG = 7, 11
METRIC = p.logit_diff(CORRECT, WRONG)
CLEAN = torch.tensor([[3, 17, 5, 29, 13], [2, 19, 23, 31, 37]])
CORRUPTED = torch.tensor([[3, 11, 5, 29, 8], [2, 7, 23, 31, 1]])  # other tokens at 1 and -1
CONTRAST = Contrast(CLEAN, CORRUPTED, METRIC)
L = 1  # the layer whose nodes are tested


# name: model, options of the transcoders, their input point, their output point, rounding
STREAM = {"reads": "stream"}
CASES = {
    "gpt2": (three_layers, {"skip": True}, "ln2.hook_out", "mlp.hook_out", 1e-9),
    "gpt2 topk": (
        *(partial(bridge, "gpt2"), STREAM | {"activation": "topk"}),
        *("ln2.hook_in", "mlp.hook_out", 1e-9),
    ),
    # its norms compute in float32 for every dtype
    "gemma2": (
        *(partial(bridge, "gemma2"), STREAM | {"skip": True, "after_norm": True}),
        *("ln2.hook_in", "ln2_post.hook_out", 1e-5),
    ),
    "hooked": (
        partial(hooked, "gelu", scale=0.24),
        {"skip": True, "reads": "normalized", "activation": "relu"},
        *("ln2.hook_normalized", "hook_mlp_out", 1e-9),
    ),
}


@cache
def oracle(name):
    make, options, reads, writes, rounding = CASES[name]
    model = make()
    return Oracle(model, layers_of(model, **options), reads, writes, rounding)


class Oracle:
    """The original model, and its nodes in both runs by their definition."""

    def __init__(self, model, transcoders, reads, writes, rounding):
        self.model, self.transcoders, self.rounding = model, transcoders, rounding
        self.reads, self.writes = reads, writes
        self.runs = [self.nodes(prompt) for prompt in (CLEAN, CORRUPTED)]

    @torch.no_grad()
    def nodes(self, prompt, layer=L):
        points = [f"blocks.{layer}.{point}" for point in (self.reads, self.writes)]
        cache = self.model.run_with_cache(prompt)[1]
        x, out = (cache[point] for point in points)
        transcoder = self.transcoders[layer]
        y, z = imitated(x, transcoder)
        q = x @ transcoder.W_enc + transcoder.b_enc
        return {"x": x, "q": q, "w": active(q, transcoder).to(q), "z": z, "error": out - y}

    def written(self, name, part="z"):
        """Return what a node's change from the corrupted to the clean run adds to the stream."""
        clean, corrupted = self.runs
        transcoder = self.transcoders[L]
        if name.endswith("E"):
            return clean["error"] - corrupted["error"]
        if name.endswith("S"):
            return (clean["x"] - corrupted["x"]) @ transcoder.W_skip
        feature = int(name.removeprefix(f"L{L}F"))
        w, q = ([run[key][..., feature] for run in self.runs] for key in "wq")
        dz = {
            "z": w[0] * q[0] - w[1] * q[1],
            "pattern": (w[0] - w[1]) * q[1],
            "value": w[1] * (q[0] - q[1]),
        }[part]
        return dz.unsqueeze(-1) * transcoder.W_dec[feature]

    @torch.no_grad()
    def metric(self, prompt, change=None, positions=slice(None)):
        """Return the metric of each prompt if something is added to the original MLP's output."""

        def add(out, hook):
            out = out.clone()
            if change is not None:
                out[:, positions] += change[:, positions]
            return out

        with self.model.hooks(fwd_hooks=[(f"blocks.{L}.{self.writes}", add)]):
            logits = self.model(prompt)[:, -1]
        return logits[:, CORRECT] - logits[:, WRONG]

    def gradient(self):
        """Return the gradient of the corrupted run's mean metric at the MLP's output."""
        kept = []

        def keep(out, hook):
            kept.append(out)
            out.retain_grad()

        with torch.enable_grad(), self.model.hooks(fwd_hooks=[(f"blocks.{L}.{self.writes}", keep)]):
            logits = self.model(CORRUPTED)[:, -1]
            (logits[:, CORRECT] - logits[:, WRONG]).mean().backward()
        self.model.zero_grad()
        return kept[0].grad

    def names(self, n=17):
        """Return the features that change most between the runs, and the skip and error nodes."""
        clean, corrupted = self.runs
        moved = (clean["z"] - corrupted["z"]).abs().sum((0, 1)).argsort(descending=True)
        features = [f"L{L}F{index}" for index in moved[:n].tolist()]
        skip = self.transcoders[L].W_skip is not None
        return [*features, *[f"L{L}S"] * skip, f"L{L}E"]

    def positions(self):
        return range(1, CLEAN.shape[1])


@pytest.fixture(
    params=[
        pytest.param(name, marks=[needs_hooked_transformer] * (name == "hooked")) for name in CASES
    ]
)
def case(request):
    return oracle(request.param)


@pytest.mark.parametrize("part", ["z", "pattern", "value"])
def test_activation_patch(case, part):
    names = case.names() if part == "z" else [name for name in case.names() if "F" in name]
    expected = {
        (name, position): case.metric(CORRUPTED, case.written(name, part), [position]).mean()
        for name in names
        for position in case.positions()
    }
    with attach(case.model, case.transcoders) as model:
        sweep = p.activation_patch(model, CONTRAST, sites=names, part=part)
        every = p.activation_patch(
            model,
            CONTRAST,
            sites=p.Sites("all" if part == "z" else "features", layers=L),
            part=part,
        )
    span = abs(sweep.clean_value - sweep.corrupted_value)
    for frame in (sweep.frame, every.frame):
        rows = frame.set_index(["name", "position"])["value"]
        for key, value in expected.items():
            assert abs(rows[key] - value.item()) < case.rounding * span
    largest = max(abs(value.item() - sweep.corrupted_value) for value in expected.values())
    assert largest > 1e-2 * span or part == "pattern"
    counts = every.frame.groupby("kind", observed=True)["name"].nunique()
    assert counts["feature"] == FEATURES


@pytest.mark.parametrize("method", ["gradient", "exact_gate"])
def test_gradients_are_autograd(case, method):
    gradient = case.gradient()
    with attach(case.model, case.transcoders) as model:
        sweep = p.attribution(
            model,
            CONTRAST,
            sites=case.names(),
            method=p.Estimate(method, budget=0),
        )
    rows = sweep.frame.set_index(["name", "position"])["value"]
    span = abs(sweep.clean_value - sweep.corrupted_value)
    for name in case.names():
        estimate = (gradient * case.written(name)).sum(-1).sum(0)
        for position in case.positions():
            expected = sweep.corrupted_value + estimate[position].item()
            assert abs(rows[name, position] - expected) < case.rounding * span


def test_steered_and_ablated(case):
    z, w = case.runs[0]["z"], case.transcoders[L].W_dec
    feature = int(z[:, -1].sum(0).argmax())
    name, row = f"L{L}F{feature}", w[feature]
    ones = torch.ones_like(z[..., :1])
    x = case.runs[0]["x"]
    vector = torch.linspace(-0.3, 0.7, x.shape[-1], dtype=x.dtype).square()
    changes = {
        ("steered", name): 1.7 * ones * row,
        ("zero", name): -z[..., feature, None] * row,
        ("bias", name): -z[..., feature, None] * row,
        ("mean", name): (z[..., feature].mean() - z[..., feature, None]) * row,
        ("zero", f"L{L}E"): -case.runs[0]["error"],
        ("mean", f"L{L}E"): case.runs[0]["error"].mean((0, 1)) - case.runs[0]["error"],
        ("steered", f"L{L}E"): torch.zeros_like(x) + vector,
    }
    if case.transcoders[L].W_skip is not None:
        W = case.transcoders[L].W_skip
        if case.transcoders[L].reads == "normalized":  # the node reads the norm's output
            norm = case.model.blocks[L].ln2
            x, W = x * norm.w + norm.b, W / norm.w[:, None]
        changes["zero", f"L{L}S"] = -x @ W
        changes["steered", f"L{L}S"] = torch.zeros_like(x) + vector @ W
    expected = {key: case.metric(CLEAN, change) for key, change in changes.items()}
    plain = case.metric(CLEAN)
    with attach(case.model, case.transcoders) as model:
        for (how, node), value in expected.items():
            if how == "steered":
                number = 1.7 if "F" in node else vector.tolist()
                context = p.steered(model, {node: number})
            else:
                prompts = {"prompts": CLEAN} if how == "mean" else {}
                context = p.ablated(model, node, how, **prompts)
            with context, torch.no_grad():
                logits = model(CLEAN)[:, -1]
            got = logits[:, CORRECT] - logits[:, WRONG]
            scale = plain.abs().max()
            assert (got - value).abs().max() < case.rounding * scale, (how, node)
            assert (value - plain).abs().max() > 1e-5 * scale
        with pytest.raises(InputError, match="no bias token"):
            p.ablated(model, f"L{L}E", "bias").__enter__()


def test_patterns_are_gates(case):
    with attach(case.model, case.transcoders) as model, torch.no_grad():
        cache = model.run_with_cache(CLEAN)[1]
        for feature in range(0, FEATURES, 11):
            expected = case.runs[0]["w"][..., feature]
            pattern = neuron_pattern(cache, f"L{L}F{feature}")
            assert torch.equal(pattern, torch.stack([expected, 1 - expected], -1))
            assert torch.equal(neuron_pattern(cache, f"L{L}F{feature}")[..., 0], expected)
            assert neuron_pattern(cache, f"L{L}F{feature}", dense=True).shape == (2, 5, 6)


@pytest.mark.parametrize("part", ["z", "pattern", "value"])
def test_path_patch(case, part):
    """Paths lead from heads and nodes of layer 0 into features of layer 1, and to the logits."""
    model, transcoder = case.model, case.transcoders[L]
    nodes = [case.nodes(prompt, layer=0) for prompt in (CLEAN, CORRUPTED)]
    first = case.transcoders[0]
    sent = {"L0E": nodes[0]["error"] - nodes[1]["error"]}
    if first.W_skip is not None:
        sent["L0S"] = (nodes[0]["x"] - nodes[1]["x"]) @ first.W_skip
    dz = nodes[0]["z"] - nodes[1]["z"]
    for feature in dz.abs().sum((0, 1)).argsort(descending=True)[:3].tolist():
        sent[f"L0F{feature}"] = dz[..., feature, None] * first.W_dec[feature]
    caches = [model.run_with_cache(prompt)[1] for prompt in (CLEAN, CORRUPTED)]
    q, w = (case.runs[1][key] for key in "qw")
    names = [name for name in case.names() if "F" in name][:5]
    expected = {}
    position = CLEAN.shape[1] - 1
    for sender, change in sent.items():
        delta = torch.zeros_like(change)
        delta[:, position] = change[:, position]
        entering = entered(case, model, caches[1], delta)
        for name in names:
            feature = int(name.removeprefix(f"L{L}F"))
            new_q = q + entering @ transcoder.W_enc
            new_w = w if transcoder.k else active(new_q, transcoder).to(w)
            new_q, new_w, old_q, old_w = (tensor[..., feature] for tensor in (new_q, new_w, q, w))
            new_z = {"z": new_w * new_q, "pattern": new_w * old_q, "value": old_w * new_q}[part]
            moved = (new_z - old_w * old_q).unsqueeze(-1) * transcoder.W_dec[feature]
            expected[sender, name] = case.metric(CORRUPTED, moved).mean().item()
    with attach(model, case.transcoders) as attached:
        sweep = p.path_patch(
            attached,
            CONTRAST,
            p.Edges(p.Sites(list(sent), positions=position), names, part=part),
        )
        for wide in (f"L{L}E", f"L{L}S")[: 1 + (first.W_skip is not None)]:
            with pytest.raises(InputError, match="as a receiver"):
                p.path_patch(attached, CONTRAST, p.Edges("L0E", [wide]))
    rows = sweep.frame.set_index(["sender", "receiver"])["value"]
    span = abs(sweep.clean_value - sweep.corrupted_value)
    assert len(rows) == len(expected)
    for key, value in expected.items():
        assert abs(rows[key] - value) < case.rounding * span
    if part != "pattern":
        most = max(abs(value - sweep.corrupted_value) for value in expected.values())
        assert most > 1e-4 * span


def entered(case, model, cache, delta):
    """Return the change of the input of layer 1's transcoder, with its norm's scale held fixed."""
    norm = model.blocks[L].ln2
    scale = cache[f"blocks.{L}.ln2.hook_scale"]
    if case.reads == "ln2.hook_in" or case.reads == "hook_resid_mid":
        return delta
    centred = delta - delta.mean(-1, keepdim=True)
    if case.reads == "ln2.hook_normalized":
        return centred / scale
    return centred / scale * norm.original_component.weight.detach()


def test_discover_and_faithfulness(case):
    topk = case.transcoders[L].k is not None
    method = "exact_gate" if topk else "secant"
    with attach(case.model, case.transcoders) as model:
        circuit = circuits.discover(
            model,
            CONTRAST,
            faithfulness=0.8,
            method=method,
            search=circuits.Search(n_random=1),
        )
        expected = faithfulness_by_hooks(
            model, circuit.sites, CLEAN, CORRUPTED, answers=(CORRECT, WRONG)
        )
    assert circuit.faithfulness == pytest.approx(expected, abs=max(1e-8, 10 * case.rounding))
    assert circuit.faithfulness >= 0.8


def test_graphs_add_up(case):
    """Graphs of a difference; features of topk have only graphs of one run."""
    difference = case.transcoders[L].k is None
    corrupted = CORRUPTED[:1] if difference else None
    with attach(case.model, case.transcoders) as model:
        graph = circuits.attribution_graph(model, Contrast(CLEAN[:1], corrupted, METRIC), mass=1)
    nodes = graph.nodes.set_index("id")
    into = graph.inflow()
    kinds = nodes["kind"].loc[into.index]
    assert {"feature", "attention"} <= set(kinds)
    errors = nodes.index[nodes["kind"] == "error"]
    assert len(errors)
    assert not graph.edges["target"].isin(errors).any()
    assert graph.edges["source"].isin(errors).any()
    rounding = max(1e-9, case.rounding / 10)
    scale = nodes["attribution"].abs().max()
    if difference:  # logits have rounding errors relative to their size
        scale = max(scale, case.model(CLEAN).abs().max().item())
    assert (into - nodes["attribution"].loc[into.index]).abs().max() < rounding * scale
    assert into["metric"] == pytest.approx(graph.value, abs=rounding * scale)
    if difference:
        out = graph.edges.groupby("source")["weight"].sum()
        shared = out.index.intersection(nodes.index)
        attributions = nodes["attribution"].loc[shared]
        assert (out[shared] - attributions).abs().max() < rounding * scale


def test_sums_of_graphs_do_not_depend_on_the_rounding_of_logits():
    """In float32, a difference of two logits near 4,096 has an error of about 1e-4."""
    model, prompt = bridge("gpt2", torch.float32), CLEAN[:1]
    values = []
    for bias in (0.0, 4096.0):
        with torch.no_grad():
            model.unembed.original_component.bias.fill_(bias)
        logits = model(prompt)[0, -1]
        values.append((logits[CORRECT] - logits[WRONG]).item())
        with attach(model, layers_of(model, dtype=torch.float32)):
            graph = circuits.attribution_graph(model, Contrast(prompt, None, METRIC), mass=1)
        scale = graph.nodes["attribution"].abs().max()
        assert abs(graph.inflow()["metric"] - graph.value) < 1e-6 * scale
        assert abs(graph.value - values[0]) < 1e-3 * scale
    assert abs(values[1] - values[0]) > 1e-5  # control
