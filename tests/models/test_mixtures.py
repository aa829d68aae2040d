"""Tests of neuron-heads of mixtures of experts, against the transformers model without a bridge.

Its neurons are computed for all experts and all tokens, and its runs are edited by torch's hooks.
"""

import pytest
import torch
from common import mlp_hook, relative, tokens
from exposed_states import EXACT, same, state
from mixtures import FAMILIES, SIZE, N, Oracle, boot, exposed, one_of, unvisited, visited

from attn_only_lens import Bilinear, HeadName, expose_neuron_heads, neuron_pattern
from attn_only_lens.errors import InputError, UnsupportedCallError, UnsupportedModelError
from attn_only_lens.heads.experts import Experts

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]
# TransformerLens' attention for gpt-oss computes in float32, not float64.
THEIR_FLOAT32 = {"gpt_oss": 1e-6}
ROUTER = "blocks.1.mlp.hook_router"
every = pytest.mark.parametrize("name", FAMILIES)


@every
@torch.no_grad()
def test_logits_and_every_hook(name):
    bound = THEIR_FLOAT32.get(name, EXACT)
    model, twin, oracle, x = boot(name), boot(name), Oracle(name), tokens()
    before, expected, expected_cache = state(model), twin(x), twin.run_with_cache(x)[1]
    exposed = expose_neuron_heads(model)
    assert torch.equal(model(x), expected)
    logits, cache = model.run_with_cache(x)
    assert relative(logits, expected) <= EXACT
    points = ("q", "k", "v", "attn_scores", "pattern", "z")
    assert set(cache) - set(expected_cache) == {
        *(mlp_hook(point, layer) for point in points for layer in (0, 1)),
        *("blocks.0.mlp.hook_router", ROUTER),
    }
    same(cache, expected_cache)
    # The neurons by definition
    true = oracle.neurons(x)
    assert relative(cache[ROUTER].squeeze(-2), true["r"]) <= bound
    visits = true["factor"] != 0
    assert 0 < visits.double().mean() < 1, "the control"
    for point, value in {"q": true["q"] * visits, "v": true["v"], "z": true["z"]}.items():
        assert relative(cache[mlp_hook(point)].squeeze(-1), value) <= bound, point
    pattern = torch.stack([true["w"], 1 - true["w"]], -1) * visits.unsqueeze(-1)
    assert relative(cache[mlp_hook("pattern")].transpose(1, 2), pattern) <= bound
    scores = cache[mlp_hook("attn_scores")].softmax(-1).nan_to_num(0.0).transpose(1, 2)
    assert relative(scores, pattern) <= bound
    assert relative(cache[mlp_hook("z")].squeeze(-1).roll(1, -1), true["z"]) > 0.1, "the control"
    assert torch.equal(neuron_pattern(cache, "L1E2N7"), cache[mlp_hook("pattern")][:, 2 * SIZE + 7])
    exposed.undo()
    assert torch.equal(model(x), expected)
    assert state(model) == before
    assert list(model.hook_dict) == list(twin.hook_dict)


def put(places, value):
    """Return a hook that sets some entries of a layer's activations."""

    def hook(x, hook):
        x = x.clone()
        x[places] = value
        return x

    return hook


@every
@torch.no_grad()
def test_edits_of_neurons_experts_and_routing_weights(name):
    """Also at a token that does not visit the edited expert: the edited value counts."""
    model, oracle, x = exposed(name), Oracle(name), tokens()
    true, W_out, (n, size) = oracle.neurons(x), oracle.W_out(), oracle.sizes()
    r, z, plain = true["r"], true["z"], oracle(x)
    edits, added = {}, {}
    expert, bound = one_of(r, n), THEIR_FLOAT32.get(name, EXACT)
    first = expert * size
    for word, find in {"in": visited, "out": unvisited}.items():
        (prompt, place), head = find(r, expert), first + 3
        edits[f"neuron {word}"] = (prompt, place, head), 0.9
        change = torch.zeros_like(z)
        change[prompt, place, head] = 0.9 - z[prompt, place, head]
        added[f"neuron {word}"] = change @ W_out
        rows = slice(first, first + size)
        edits[f"expert {word}"] = (prompt, place, rows), 0.4
        change = torch.zeros_like(z)
        change[prompt, place, rows] = 0.4 - z[prompt, place, rows]
        added[f"expert {word}"] = change @ W_out
    if oracle.shared is not None:
        edits["shared"] = (slice(None), 3, slice(n * size, None)), 0.2
        change = torch.zeros_like(z)
        change[:, 3, n * size :] = 0.2 - z[:, 3, n * size :]
        added["shared"] = change @ W_out
    for key, (place, value) in edits.items():
        got = model.run_with_hooks(x, fwd_hooks=[(mlp_hook("z"), put(place, value))])
        expected = oracle(x, added=added[key])
        assert relative(got, expected) <= bound, key
        assert relative(got, plain) > 1e-6, "the control"
    # The routing weights of one token, from another token, which visits other experts
    weights = model.run_with_cache(x)[1][ROUTER]
    visits = r[..., :n] != 0
    prompt, place = next(
        (i, j) for i in range(2) for j in range(11) if not visits[i, j].equal(visits[0, 0])
    )
    got = model.run_with_hooks(x, fwd_hooks=[(ROUTER, put((prompt, place), weights[0, 0]))])

    def route(index, chosen):
        index, chosen, row = index.clone(), chosen.clone(), prompt * 11 + place
        index[row], chosen[row] = index[0], chosen[0]
        return index, chosen

    added = None
    if r.shape[-1] > n:  # the last weight is that of the shared expert
        gate = r[..., n:]
        change = torch.zeros_like(z)
        of_shared = z[prompt, place, n * size :] / gate[prompt, place]
        change[prompt, place, n * size :] = of_shared * (gate[0, 0] - gate[prompt, place])
        added = change @ W_out
    assert relative(got, oracle(x, route=route, added=added)) <= bound
    assert relative(got, plain) > 1e-6, "the control"
    # Without an expert
    got = model.run_with_hooks(x, fwd_hooks=[(ROUTER, put((..., expert), 0.0))])

    def drop(index, chosen):
        return index, chosen.masked_fill(index == expert, 0.0)

    assert relative(got, oracle(x, route=drop)) <= bound

    def drop_in_place(weights, hook):
        weights[..., expert] = 0.0

    in_place = model.run_with_hooks(x, fwd_hooks=[(ROUTER, drop_in_place)])
    assert relative(in_place, got) <= EXACT
    assert relative(got, plain) > 1e-6, "the control"


@torch.no_grad()
def test_parts_and_results():
    """An edit of a pattern or a value is the edit of z that it implies; results add up."""
    model, oracle, x = exposed("qwen2"), Oracle("qwen2"), tokens()
    true, W_out = oracle.neurons(x), oracle.W_out()
    noise = torch.randn(true["z"].shape, dtype=torch.float64)
    visits = true["factor"] != 0
    z = {
        "v": (true["v"] + noise) * true["w"] * visits,
        "pattern": true["v"] * (true["w"] * visits + noise),
        "q": true["v"] * torch.sigmoid(true["q"] + noise),
    }

    def add(value, hook):
        if value.shape[-1] == 2:
            value = value.clone()
            value[..., 0] += noise.transpose(1, 2)
            return value
        return value + noise.unsqueeze(-1)

    def add_in_place(value, hook):
        value.copy_(add(value, hook))

    for point, expected in z.items():
        got = model.run_with_hooks(x, fwd_hooks=[(mlp_hook(point), add)])
        assert relative(got, oracle(x, added=(expected - true["z"]) @ W_out)) <= EXACT, point
        in_place = model.run_with_hooks(x, fwd_hooks=[(mlp_hook(point), add_in_place)])
        assert torch.equal(in_place, got), point
    model.set_use_attn_result(True)
    _, cache = model.run_with_cache(x)
    assert relative(cache[mlp_hook("result")].sum(2), cache["blocks.1.hook_mlp_out"]) <= EXACT
    half = (mlp_hook("result"), lambda x, hook: 0.5 * x)
    by_result = model.run_with_hooks(x, fwd_hooks=[half])
    by_z = model.run_with_hooks(x, fwd_hooks=[(mlp_hook("z"), half[1])])
    assert relative(by_result, by_z) <= EXACT


@every
@torch.no_grad()
def test_matrices(name):
    """The matrices that the neurons of all experts read with, without routing weights."""
    heads, oracle = exposed(name).blocks[1].mlp._neuron_heads, Oracle(name)
    true, matrices = oracle.neurons(tokens()), heads.read_matrices
    assert torch.equal(heads.W_out, oracle.W_out())
    if name == "gpt_oss":  # biases and clamps follow
        both = oracle.block.experts.gate_up_proj
        of_neuron = both[2][:, 14], both[2][:, 15]
        assert all(
            torch.equal(W[:, 2 * SIZE + 7], w) for W, w in zip(matrices, of_neuron, strict=True)
        )
        return
    for W, point in zip(matrices, ("q", "u"), strict=True):
        assert relative(true["x"] @ W, true[point]) <= EXACT
        assert relative(true["x"] @ W.roll(1, 1), true[point]) > 0.1, "the control"


@torch.no_grad()
def test_edits_inside_the_block_are_kept():
    """Hooks of TransformerLens inside the block act, whether or not the neuron-heads have hooks."""
    model, x = exposed("qwen2"), tokens()
    inside = [("blocks.1.mlp.experts.hook_out", lambda x, hook: 0.3 * x)]
    alone = model.run_with_hooks(x, fwd_hooks=inside)
    assert relative(alone, model(x)) > 1e-6, "the control"
    look = (mlp_hook("z"), lambda x, hook: None)
    assert relative(model.run_with_hooks(x, fwd_hooks=[*inside, look]), alone) <= EXACT


@pytest.mark.parametrize("name", ["mixtral", "qwen2", "gpt_oss"])
def test_gradients(name):
    """Gradients of parameters, and at z, also of neurons of experts that a token does not visit."""
    model, twin, oracle, x = exposed(name), boot(name), Oracle(name), tokens()
    for host in (model, twin):
        host.requires_grad_(True)
    twin(x).square().mean().backward()
    expected = [parameter.grad for parameter in twin.parameters()]
    seen = {}
    keep = (mlp_hook("z"), lambda g, hook: seen.update({hook.name: g}))
    for hooks in ([], [keep]):
        model.zero_grad()
        with model.hooks(bwd_hooks=hooks):
            model(x).square().mean().backward()
        for got, reference in zip(model.parameters(), expected, strict=True):
            assert relative(got.grad, reference) <= (EXACT if hooks else 0.0)
    added = torch.zeros(2, 11, 28, dtype=torch.float64, requires_grad=True)
    with oracle.hooked(added=added):
        oracle.model(x).logits.square().mean().backward()
    z = seen[mlp_hook("z")].squeeze(-1)
    assert relative(z, added.grad @ oracle.W_out().T) <= THEIR_FLOAT32.get(name, EXACT)
    assert z[oracle.neurons(x)["z"] == 0].abs().max() > 0, "the control"


@torch.no_grad()
def test_only_visited_experts_are_computed(monkeypatch):
    counted, project = [], Experts._project

    def count(self, x, expert):
        counted.append(len(x))
        return project(self, x, expert)

    monkeypatch.setattr(Experts, "_project", count)
    model = exposed("mixtral")
    counted.clear()
    model(tokens())
    assert not counted
    model.run_with_cache(tokens())
    assert sum(counted) == 2 * 2 * 11 * 3, "layers · prompts · tokens · experts that each visits"


@torch.no_grad()
def test_dense_layers():
    """A layer without experts in a model with mixtures has ordinary neurons."""
    model, twin, x = (
        boot("qwen2", mlp_only_layers=[0]),
        boot("qwen2", mlp_only_layers=[0]),
        tokens(),
    )
    exposed = expose_neuron_heads(model)
    assert repr(exposed).endswith("75 neurons as heads (layers: 2)>")
    _, cache = model.run_with_cache(x)
    expected = twin.run_with_cache(x)[1]["blocks.0.mlp.dense_out.hook_in"]
    assert relative(cache[mlp_hook("z", 0)].squeeze(-1), expected) <= EXACT


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_other_implementations_in_lower_precision(implementation):
    """The block's own kernels run; exposing adds no error except for rounding."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16}  # grouped_mm needs multiples of 8
    model, source = boot("qwen3", torch.bfloat16, **sizes), Oracle("qwen3", **sizes)
    x = tokens()
    model.original_model.config._experts_implementation = implementation
    expected = model(x)
    with expose_neuron_heads(model):
        assert torch.equal(model(x), expected)
        logits, cache = model.run_with_cache(x)
    assert cache[mlp_hook("z")].dtype == torch.bfloat16
    error = relative(expected.double(), source(x))
    assert relative(logits.double(), source(x)) <= 4 * error + 16 * torch.finfo(torch.bfloat16).eps


def test_names():
    model = exposed("qwen2")
    head = HeadName.parse("L1E3N7")
    assert (head.expert, head.index, str(head), head.place(model)) == (3, 7, "L1E3N7", 3 * SIZE + 7)
    shared = HeadName.parse("L1N5")
    assert (shared.expert, shared.place(model)) == (None, N * SIZE + 5)
    for place in (0, SIZE, N * SIZE - 1, N * SIZE, N * SIZE + 6):
        assert HeadName.at(model, 1, "neuron", place).place(model) == place
    assert str(HeadName.at(model, 1, "neuron", 3 * SIZE + 7)) == "L1E3N7"
    assert HeadName.parse("L1R").hook("z", model) == ROUTER
    assert head.hook("z", model) == mlp_hook("z")
    for wrong in (f"L1E{N}N0", f"L1E0N{SIZE}", "L1N7", "L1F0"):
        with pytest.raises(InputError, match="layer 1 has"):
            HeadName.parse(wrong).hook("z", model)
    for point in ("pattern", "v", "result"):
        with pytest.raises(InputError, match=f"got 'L1R' with point='{point}'; routers have only"):
            HeadName.parse("L1R").hook(point, model)
    for unreadable in ("L1E3H2", "L1E3", "L1E3F2", "L1R0"):
        with pytest.raises(InputError, match="expected"):
            HeadName.parse(unreadable)


def use_relu(block):
    block.experts.act_fn = torch.nn.Tanh()


def use_a_list(block):
    block.experts = torch.nn.ModuleList([torch.nn.Linear(3, 3)])


def add_a_module(block):
    block.latent = torch.nn.Linear(3, 3)


def scale(block):
    forward = block.forward
    block.forward = lambda x: 1.01 * forward(x)


SPOILS = {
    use_relu: "the activations of its experts are not q times a weight",
    use_a_list: "the experts of its mixture are a ModuleList",
    add_a_module: "has the modules latent",
    scale: "output is not the sum",
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_mixture_that_was_changed_by_hand(spoil):
    bridge = boot("mixtral")
    spoil(bridge.blocks[1].mlp.original_component)
    before = state(bridge)
    with pytest.raises(UnsupportedModelError, match=f"layer 1: .*{SPOILS[spoil]}") as caught:
        expose_neuron_heads(bridge)
    assert len(caught.value.reasons) == 1, "the other layer is as it should be"
    assert state(bridge) == before


def stack_of(model):
    return model.blocks[1].mlp.original_component.experts


def test_refused():
    bridge = boot("mixtral")
    with pytest.raises(UnsupportedModelError, match="bilinear gates for a mixture"):
        expose_neuron_heads(bridge, gate=Bilinear(4))
    model = expose_neuron_heads(bridge).model
    _, cache = model.run_with_cache(tokens())
    with pytest.raises(InputError, match="routers, which have no gate"):
        neuron_pattern(cache, "L1R")
    stacked = stack_of(model)
    stacked.act_fn, silu = torch.nn.ReLU(), stacked.act_fn
    with pytest.raises(UnsupportedCallError, match="no longer compute silu"):
        model.run_with_cache(tokens())
    stacked.act_fn = silu

    def late(x, hook):
        model.blocks[1].mlp.hook_neuron_act.add_hook(lambda z, hook: z * 0)

    silenced = [("blocks.1.mlp.hook_neuron_act", lambda z, hook: z * 0)]
    expected = model.run_with_hooks(tokens(), fwd_hooks=silenced)
    got = model.run_with_hooks(tokens(), fwd_hooks=[("blocks.1.mlp.gate.hook_out", late)])
    model.reset_hooks()
    assert torch.equal(got, expected)  # a hook may be added while the MLP is running
    assert not torch.equal(model(tokens()), expected)


def test_only_neurons_of_the_model_have_a_place():
    model = expose_neuron_heads(boot("qwen3", mlp_only_layers=[0])).model
    assert HeadName.parse("L1E3N2").place(model) == 3 * SIZE + 2
    assert HeadName.at(model, 1, "neuron", 3 * SIZE + 2) == HeadName.parse("L1E3N2")
    assert HeadName.parse("L0N3").place(model) == 3
    for name in (f"L1E3N{SIZE}", f"L1E{N}N0", "L1N3", "L0E1N3"):
        with pytest.raises(InputError, match=f"got '{name}'"):
            HeadName.parse(name).place(model)
    for place in (-1, N * SIZE):
        with pytest.raises(InputError, match=f"got place {place}; layer 1 has {N * SIZE} heads"):
            HeadName.at(model, 1, "neuron", place)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_processed_weights(name):
    """TransformerLens folds the norm's gains into experts and routers; their neurons follow."""
    model, twin, x = boot(name), boot(name), tokens()
    expose_neuron_heads(model)
    unfolded = model.run_with_cache(x)[1][mlp_hook("z")]
    for host in (model, twin):
        host.enable_compatibility_mode(disable_warnings=True)
    expected = twin(x)
    assert torch.equal(model(x), expected)
    logits, cache = model.run_with_cache(x)
    assert relative(logits, expected) <= EXACT
    assert relative(cache[mlp_hook("z")], unfolded) <= 1e-6
    W_out = model.blocks[1].mlp._neuron_heads.W_out
    z = cache[mlp_hook("z")].squeeze(-1)
    assert relative(z @ W_out, cache["blocks.1.hook_mlp_out"]) <= EXACT


def test_a_copy():
    bridge, x = boot("qwen2"), tokens()
    copy = expose_neuron_heads(bridge, copy=True, check=x)
    assert copy.verification.bitwise
    assert ROUTER in copy.model.hook_dict
    assert ROUTER not in bridge.hook_dict
    assert "124 neurons as heads" in repr(copy)
