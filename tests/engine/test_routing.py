"""Tests of the difference of two runs of mixtures of experts, divided through routing weights.

The parts by hand use the neurons of `mixtures.Oracle`, from the transformers model alone.
"""

from functools import cache

import pytest
import torch
from common import changed, relative, tokens
from mixtures import Oracle, exposed

from attn_only_lens import Contrast, circuits
from attn_only_lens import patching as p
from attn_only_lens.engine import routing
from attn_only_lens.engine.gradients import Tape
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.multipliers import run_both, secant_multipliers
from attn_only_lens.engine.routing import RoutingRule
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]
EXACT = 1e-12
CLEAN = tokens()
CORRUPTED = changed(CLEAN, [2, -1], by=5)
CONTRAST = Contrast(CLEAN, CORRUPTED, p.logit_diff(3, 7))
SECANT = p.Estimate("secant", budget=0, split=True)
CHOICES = {"some": 3, "all": 5}
"""How many of the five experts each token visits: with all, they are equal in both runs."""
FAMILIES = ["mixtral", "olmoe", "qwen2", "qwen3", "granite", "gpt_oss", "ernie", "minimax", "glm4"]


@cache
def made(name, choice="some"):
    chosen = CHOICES[choice] + (name == "glm4" and choice == "all")  # it has six experts
    return exposed(name, num_experts_per_tok=chosen, **MORE.get(name, {}))


MORE = {"glm4": {"n_group": 1}}

FUNCTIONS = {
    "softmax of the chosen": lambda s, c: s.masked_fill(~c, -torch.inf).softmax(-1),
    "softmax of all": lambda s, c: 1.7 * s.softmax(-1) * c,
    "sigmoid": lambda s, c: s.sigmoid() * c,
    "shares of sigmoids": lambda s, c: 2.5 * s.sigmoid() * c / (s.sigmoid() * c).sum(-1, True),
    "another": lambda s, c: s.square() * c,
}


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rules(name):
    """The rules are identities; where experts differ, or the function is unknown, Δr is whole."""
    function, n = FUNCTIONS[name], 7
    scores, multiplier = 2 * draw(2 * 3, 5, n + 1), draw(3, 5, n + 1)
    chosen = torch.ones(6, 5, n, dtype=torch.bool)
    chosen[..., 2] = chosen[..., 4] = False
    chosen[1, 3, 2], chosen[1, 3, 0] = True, False  # the clean run of one token
    weights = torch.cat([function(scores[..., :n], chosen), scores[..., n:].sigmoid()], -1)
    rule = RoutingRule.between(scores, weights, n)
    differs = torch.ones(3, 5, dtype=torch.bool) * (name == "another")
    differs[1, 3] = True
    assert torch.equal(~rule.same[..., :n].all(-1), differs)
    assert rule.same[..., n].all()
    ds, dr = (a - b for a, b in (scores.chunk(2), weights.chunk(2)))
    through = (rule.back(multiplier) * ds).sum(-1)
    whole = (multiplier * rule.whole).sum(-1)
    assert relative(through + whole, (multiplier * dr).sum(-1)) <= EXACT
    assert torch.equal(whole != 0, differs)
    # In equal runs, the rule is the derivative.
    one = scores[:3].clone().requires_grad_()
    same = torch.cat([function(one[..., :n], chosen[3:]), one[..., n:].sigmoid()], -1)
    (gradient,) = torch.autograd.grad((same * multiplier).sum(), one)
    rule = RoutingRule.between(one.detach().repeat(2, 1, 1), same.detach().repeat(2, 1, 1), n)
    if name != "another":
        assert relative(rule.back(multiplier), gradient) <= 1e-9


def multipliers(model):
    pair, host = CONTRAST.pair(model), host_of(model)
    runs = run_both(model, pair)
    clean, corrupted = runs.logits.chunk(2)
    bound = bind(CONTRAST.metric, model, pair, clean)
    tape = Tape(host.hook_names("z", ("attention", "neuron", "router")))
    result = secant_multipliers(model, runs, bound, tape)
    return result, bound.of(clean) - bound.of(corrupted)


def difference(both):
    clean, corrupted = both.chunk(2)
    return clean - corrupted


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_routers_add_up_to_the_change(name, choice):
    model = made(name, choice)
    result, change = multipliers(model)
    hooked = result.runs.recording.hooked
    embedding = result.stream * difference(result.runs.stream)
    routers = [x * difference(hooked[name]) for name, x in result.sources.items()]
    assert len(routers) == len(model.blocks)
    terms = torch.cat([x.flatten() for x in (embedding, *routers)])
    size = max(terms.abs().sum().item(), 1e-3)
    assert abs(terms.sum().item() - change) <= EXACT * size
    visits = [hooked[f"blocks.{i}.mlp.hook_router"] != 0 for i in (0, 1)]
    differs = [(x.chunk(2)[0] != x.chunk(2)[1]).any(-1) for x in visits]
    acted = False
    for router, where in zip(routers, differs, strict=True):
        acting = router.abs().sum(-1) > 0  # in the last layer, only the last token matters
        assert not (acting & ~where).any()
        acted = acted or bool(acting.any())
    assert acted == (choice == "some"), "the control"
    # The neurons of the last layer, and the stream that passes them
    z, middle = (f"blocks.1.{x}" for x in ("mlp.hook_neuron_act", "hook_resid_mid"))
    both = model.run_with_cache(torch.cat([CLEAN, CORRUPTED]), names_filter=[middle])[1][middle]
    terms = result.gradients[z] * difference(hooked[z]), result.final * difference(both)
    total, size = (sum(f(x) for x in terms) for f in (torch.sum, lambda x: x.abs().sum()))
    if name != "gpt_oss":  # its router's weights multiply output biases, too
        # The cache has norms in float32, which the two runs do not have.
        assert abs(total - change) <= 1e-6 * max(size, 1e-3)


@pytest.mark.parametrize("rule", ["softmax_change", "_sigmoid_slope"])
def test_a_broken_rule_is_noticed(rule, monkeypatch):
    right = getattr(routing, rule)
    monkeypatch.setattr(routing, rule, lambda *args: 1.1 * right(*args))
    with pytest.raises(UnsupportedModelError, match="do not add up"):
        multipliers(exposed("qwen2"))


@cache
def by_hand(name):
    """Return M Δz of each neuron of the last layer at the last token, and its parts.

    M is the multiplier of the last stream, by the rule of the last RMSNorm.
    """
    oracle, runs, streams = Oracle(name), [], []
    model = oracle.model.model
    for run in (CLEAN, CORRUPTED):
        with model.norm.register_forward_pre_hook(lambda m, args: streams.append(args[0])):
            runs.append({key: x[:, -1] for key, x in oracle.neurons(run).items()})
    with torch.no_grad():
        x_1, x_0 = (x[:, -1] for x in streams)
        r_1, r_0 = (
            (x.square().mean(-1, keepdim=True) + oracle.model.config.rms_norm_eps).rsqrt()
            for x in (x_1, x_0)
        )
        W_U = oracle.model.lm_head.weight
        gain = (W_U[3] - W_U[7]) * model.norm.weight / len(CLEAN)
        along = ((x_1 + x_0) / 2 * gain).mean(-1, keepdim=True)
        M = (r_1 + r_0) / 2 * gain - (r_1 * r_0) ** 2 * 2 / (r_1 + r_0) * along * (x_1 + x_0) / 2
        M = M * getattr(oracle.model.config, "residual_multiplier", 1.0)
        M = M / getattr(oracle.model.config, "logits_scaling", 1.0)
        M = M @ oracle.W_out().T
    clean, corrupted = runs

    def delta(key):
        return clean[key] - corrupted[key]

    def mean(key):
        return (clean[key] + corrupted[key]) / 2

    routed = mean("q") * mean("u") * delta("factor")
    return {
        "z": (M * delta("z")).sum(0),
        "pattern": (M * delta("w") * mean("v")).sum(0),
        "value": (M * mean("w") * delta("v")).sum(0),
        "routing": (M * mean("w") * routed).sum(0),
    }


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2", "granite", "minimax"])
def test_parts_by_hand(name):
    """At tokens where neurons of an expert are visited in one run only, too."""
    expected = by_hand(name)
    n = len(expected["z"])
    sites = p.Sites("neurons", positions=-1, layers=1)
    sweep = p.attribution(made(name), CONTRAST, sites=sites, method=SECANT)
    table, span = sweep.to_frame(), sweep.clean_value - sweep.corrupted_value
    assert list(table["index"]) == list(range(n))
    for column, part in (("by_pattern", "pattern"), ("by_value", "value")):
        got = torch.tensor(table[column].to_numpy()) * span
        assert relative(got, expected[part]) <= 1e-5, column
    assert relative(expected["routing"], expected["value"]) > 1e-2, "the control"
    graph = circuits.attribution_graph(made(name), CONTRAST, sites=["L1E2N3", "L1E1N7", "L0H1"])
    edges = graph.edges[graph.edges["target"].str.endswith("@10")]
    for target, index in (("L1E2N3@10", 25), ("L1E1N7@10", 18)):
        into = edges[edges["target"] == target].groupby("kind")["weight"].sum()
        assert abs(into.sum() - expected["z"][index]) <= 1e-5 * expected["z"].abs().max()
        of_routing = into.get("routing", 0.0)
        assert abs(of_routing - expected["routing"][index]) <= 1e-5 * expected["z"].abs().max()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["mixtral", "qwen2", "glm4"])
def test_graphs(name, choice):
    """All edges into a node add up to its attribution; routers are sources where experts differ."""
    model = made(name, choice)
    graph = circuits.attribution_graph(model, CONTRAST, top=60)
    nodes = graph.nodes.set_index("id")
    heads, size = graph.heads[graph.heads["kind"] != "router"], nodes["attribution"].abs().max()
    inflow = graph.edges.groupby("target")["weight"].sum()
    assert (inflow.reindex(heads["id"]) - heads.set_index("id")["attribution"]).abs().max() <= (
        1e-9 * size
    )
    assert abs(inflow["metric"] - graph.value) <= 1e-9 * size
    tokens_and_routers = nodes[nodes["kind"].isin(["embed", "router"])]["attribution"].sum()
    assert abs(tokens_and_routers - graph.value) <= 1e-9 * size
    routers = nodes[nodes["kind"] == "router"]
    assert bool(len(routers)) == (choice == "some")
    assert not set(routers.index) & set(graph.edges["target"])
    of_routers = graph.edges[graph.edges["source"].isin(routers.index)]
    assert set(of_routers["kind"]) == ({"routing"} if choice == "some" else set())
    assert "routing" in set(graph.edges["kind"]), "also from the stream"
    assert "bias" not in set(graph.edges["source"])


def test_one_run_holds_the_routing_weights():
    graph = circuits.attribution_graph(
        made("qwen2"), Contrast(CLEAN[:1], None, p.logit_diff(3, 7)), top=40
    )
    assert set(graph.edges["kind"]) == {"value", "q", "k", "gate"}
    inflow = graph.edges[graph.edges["kind"] == "value"].groupby("target")["weight"].sum()
    heads = graph.heads.set_index("id")["attribution"]
    assert (inflow.reindex(heads.index) - heads).abs().max() <= 1e-5 * heads.abs().max()
