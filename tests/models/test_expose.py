"""Tests of neuron-heads in place on a HookedTransformer: the model's function does not change."""

import copy
import re

import pytest
import torch
from common import D_MLP, N_LAYERS, POS, in_threads, meeting, mlp_hook, relative, tokens
from models import CORE, FAMILIES, build

from attn_only_lens import (
    Bilinear,
    calibrate,
    convert,
    dense_pattern,
    expose_neuron_heads,
    neuron_gate,
    neuron_pattern,
)
from attn_only_lens.errors import UnknownHeadError, UnsupportedCallError, UnsupportedModelError
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig
from attn_only_lens.tolerances import LOGIT_TOLERANCE

EXACT = 1e-12
LAYER, NEURON = 1, 29
POINTS = ("q", "k", "v", "attn_scores", "pattern", "z", "result")


def state(model):
    """Return the state that `undo` has to restore."""
    modules = {name: type(module) for name, module in model.named_modules()}
    return type(model), modules, list(model.hook_dict), list(model.mod_dict), set(vars(model))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_and_every_hook(name):
    """Logits are equal, bitwise or up to rounding with new hooks; heads are as with `convert`."""
    model, converted = build(name), convert(build(name))
    before = state(model)
    expected, expected_cache = model.run_with_cache(tokens())
    _, heads = converted.run_with_cache(tokens())
    exposed = expose_neuron_heads(model)
    assert torch.equal(model(tokens()), expected)
    silent, kept = model.run_with_cache(tokens(), names_filter=list(expected_cache))
    assert torch.equal(silent, expected)
    assert all(torch.equal(kept[key], expected_cache[key]) for key in expected_cache)
    model.set_use_attn_result(True)
    logits, cache = model.run_with_cache(tokens())
    assert relative(logits, expected) <= EXACT
    for key in expected_cache:
        finite = expected_cache[key].isfinite()
        assert relative(cache[key][finite], expected_cache[key][finite]) <= EXACT
    for layer in range(N_LAYERS):
        assert cache[mlp_hook("result", layer)].shape == (2, POS, D_MLP, 26)
        for point in POINTS[:-1]:
            got, twin = cache[mlp_hook(point, layer)], heads[point, 2 * layer + 1]
            assert got.shape == twin.shape
            scale = max(twin.abs().max().item(), 1e-300)
            assert (got - twin).abs().max().item() <= 1e-11 * scale or scale > 1e300
    model.set_use_attn_result(False)
    exposed.undo()
    assert state(model) == before
    assert torch.equal(model(tokens()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CORE)
@torch.no_grad()
def test_lower_precision(name, dtype):
    model = build(name, dtype=dtype, scale=0.2)
    expected = model(tokens())
    with expose_neuron_heads(model):
        assert torch.equal(model(tokens()), expected)
        logits, _ = model.run_with_cache(tokens())
        assert logits.dtype == dtype
        assert relative(logits.double(), expected.double()) <= LOGIT_TOLERANCE[dtype]


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name):
    model = build(name)
    model.requires_grad_(True)
    model.set_use_attn_result(True)
    model(tokens()).square().mean().backward()
    expected = {key: p.grad for key, p in model.named_parameters()}
    largest = max(grad.abs().max() for grad in expected.values() if grad is not None)
    seen = {}
    for live in (False, True):
        model.zero_grad()
        with expose_neuron_heads(model):
            keep = [(mlp_hook(p), lambda g, hook: seen.update({hook.name: g})) for p in POINTS]
            with model.hooks(bwd_hooks=keep if live else []):
                model(tokens()).square().mean().backward()
        for key, parameter in model.named_parameters():
            if expected[key] is None:
                assert parameter.grad is None
                continue
            # A key bias's gradient is only rounding noise: use the other gradients' scale.
            scale = max(expected[key].abs().max(), 1e-4 * largest)
            error = (parameter.grad - expected[key]).abs().max()
            assert error <= (1e-11 * scale if live else 0.0), key
    assert set(seen) == {mlp_hook(p) for p in POINTS}
    assert seen[mlp_hook("z")].shape == (2, POS, D_MLP, 1)


@pytest.mark.parametrize("name", CORE)
@pytest.mark.parametrize("in_place", [True, False])
@torch.no_grad()
def test_an_edit_reaches_all_that_follow_and_nothing_before(name, in_place):
    """Edits at hook_pre, q, z and hook_post in turn have the effect of an edit of the source."""
    model = build(name)
    act, gated = model.blocks[LAYER].mlp.act_fn, model.cfg.gated_mlp
    b_in = model.blocks[LAYER].mlp.b_in[NEURON] if gated else 0.0

    def change(to):
        def edit(x, hook):
            x = x if in_place else x.clone()
            head = x[:, :, NEURON]
            head.copy_(to(head))
            return None if in_place else x

        return edit

    pre, post = change(lambda q: q + 0.9), change(lambda a: 2 * a + 0.3)
    source = [(mlp_hook("pre"), pre), (mlp_hook("post"), post)]
    expected = model.run_with_hooks(tokens(), fwd_hooks=source)
    clean = model(tokens())
    assert relative(expected, clean) > 1e-6
    with expose_neuron_heads(model):
        with model.hooks(source):
            logits, cache = model.run_with_cache(tokens())
        assert relative(logits, expected) <= EXACT
        q, z = cache[mlp_hook("q")][..., NEURON, 0], cache[mlp_hook("z")][..., NEURON, 0]
        assert torch.equal(q, cache[mlp_hook("pre")][..., NEURON])
        up = cache[mlp_hook("pre_linear")][..., NEURON] if gated else 1.0
        torch.testing.assert_close(z, act(q) * up, rtol=EXACT, atol=1e-14)
        shown = cache[mlp_hook("post")][..., NEURON]
        torch.testing.assert_close(shown, 2 * (z + b_in) + 0.3, rtol=EXACT, atol=1e-13)
        # The same edit of the activation at hook_z, which comes before the b_in of a gated MLP.
        at_z = [
            (mlp_hook("pre"), pre),
            (mlp_hook("z"), change(lambda a: 2 * (a + b_in) + 0.3 - b_in)),
        ]
        assert relative(model.run_with_hooks(tokens(), fwd_hooks=at_z), expected) <= EXACT
        # An edit of the query changes neither hook_pre nor the value.
        _, plain = model.run_with_cache(tokens())
        with model.hooks([(mlp_hook("q"), pre)]):
            _, moved = model.run_with_cache(tokens())
        for point, same in (("pre", True), ("v", True), ("q", False), ("pattern", False)):
            assert torch.equal(moved[mlp_hook(point)], plain[mlp_hook(point)]) == same, point


@pytest.mark.parametrize("name", CORE)
@torch.no_grad()
def test_results_add_up_and_can_be_edited(name):
    model = build(name)
    drop = lambda x, hook: x.index_fill(2, torch.tensor(NEURON), 0.0)  # noqa: E731
    double = lambda x, hook: 2 * x  # noqa: E731
    mlp = model.blocks[LAYER].mlp
    bias = mlp.b_out + (mlp.b_in @ mlp.W_out if model.cfg.gated_mlp else 0.0)
    out = {}
    with expose_neuron_heads(model):
        mlp.register_forward_hook(lambda m, i, o: out.update(mlp=o))
        model.set_use_attn_result(True)
        with model.hooks([(mlp_hook("post"), double)]):
            _, cache = model.run_with_cache(tokens())
        total = cache[mlp_hook("result")].sum(2) + bias
        assert relative(total, out["mlp"]) <= EXACT
        by_z = model.run_with_hooks(tokens(), fwd_hooks=[(mlp_hook("z"), drop)])
        by_result = model.run_with_hooks(tokens(), fwd_hooks=[(mlp_hook("result"), drop)])
        assert relative(by_result, by_z) <= EXACT
        assert relative(by_z, model(tokens())) > 1e-6


@torch.no_grad()
def test_twice_changes_nothing():
    model = build("gelu")
    with expose_neuron_heads(model):
        before = state(model)
        with expose_neuron_heads(model) as again:
            assert again is model
        assert state(model) == before, "what the outer call has done stays"
        with pytest.raises(UnsupportedModelError, match="already exposed"):
            expose_neuron_heads(model, gate=Bilinear(2))
    exposed = expose_neuron_heads(model)
    expose_neuron_heads(model).undo()
    assert type(model) is HookedTransformer
    exposed.undo()
    assert type(model) is HookedTransformer


def test_undone_after_an_error_too():
    model = build("gelu")
    before = state(model)

    def fail(x, hook):
        raise RuntimeError("in a hook")

    with expose_neuron_heads(model), pytest.raises(RuntimeError, match="in a hook"):
        model.run_with_hooks(tokens(), fwd_hooks=[(mlp_hook("z"), fail)])
    with pytest.raises(RuntimeError, match="in a hook"), expose_neuron_heads(model):
        model.run_with_hooks(tokens(), fwd_hooks=[(mlp_hook("pre"), fail)])
    assert state(model) == before


@torch.no_grad()
def test_hooks_of_others_stay():
    """User-added hooks stay, also after `undo`, and do not fire during the inspection of an MLP."""
    model = build("gelu")
    calls, post = [], mlp_hook("post")
    model.add_perma_hook("blocks.0.hook_resid_pre", lambda x, hook: calls.append("resid"))
    model.add_perma_hook(post, lambda x, hook: calls.append("post"))
    model.add_hook(post, lambda x, hook: x.index_fill(-1, torch.tensor(NEURON), 0.0))
    expected = model(tokens())
    assert calls == ["resid", "post"]
    exposed = expose_neuron_heads(model)
    assert len(calls) == 2
    assert torch.equal(model(tokens()), expected)
    exposed.undo()
    assert torch.equal(model(tokens()), expected)
    assert calls == 3 * ["resid", "post"]
    model.reset_hooks()
    assert not torch.equal(model(tokens()), expected), "the edit was there"
    model.reset_hooks(including_permanent=True)
    model(tokens())
    assert len(calls) == 8


@torch.no_grad()
def test_accessors_and_a_copy():
    model = build("llama")
    _, twin = convert(model).run_with_cache(tokens())
    with expose_neuron_heads(model):
        copied = copy.deepcopy(model)
        for host in (model, copied):
            _, cache = host.run_with_cache(tokens())
            for read in (neuron_pattern, neuron_gate, dense_pattern):
                got = read(cache, "L1N29")
                torch.testing.assert_close(got, read(twin, "L1N29"), rtol=1e-10, atol=1e-12)
        with pytest.raises(UnknownHeadError, match=re.escape("cache['pattern', 1]")):
            neuron_pattern(cache, "L1H0")
        with pytest.raises(UnknownHeadError, match="0 to 36"):
            neuron_pattern(cache, "L1N37")
    _, plain = model.run_with_cache(tokens())
    with pytest.raises(UnsupportedCallError, match="converted or exposed"):
        neuron_pattern(plain, "L1N29")
    assert mlp_hook("q", 0) in copied.hook_dict, "the copy is exposed still"


@pytest.mark.parametrize("name", [*CORE, "relu", "silu"])
@torch.no_grad()
def test_bilinear(name):
    source = build(name)
    heads = 1 if source.cfg.act_fn in ("silu", "relu") and not source.cfg.gated_mlp else 4
    calibration = calibrate(source, tokens()) if source.cfg.gated_mlp else None
    gate = Bilinear(heads, calibration=calibration)
    twin = convert(source, gate=gate)
    exact = source(tokens())
    with expose_neuron_heads(source, gate=gate):
        expected = twin(tokens())
        assert relative(source(tokens()), expected) <= EXACT
        source.set_use_attn_result(True)
        logits, cache = source.run_with_cache(tokens())
        assert relative(logits, expected) <= EXACT
        assert cache[mlp_hook("pattern")].shape == (2, D_MLP * heads, POS, 2)
        assert cache[mlp_hook("result")].shape == (2, POS, D_MLP * heads, 26)
        assert neuron_gate(cache, "L1N29").shape == (2, POS)
        source.set_use_attn_result(False)
    assert torch.equal(source(tokens()), exact)


@torch.no_grad()
def test_generate():
    model = build("llama", d_vocab_out=41, dtype=torch.float32)
    start = tokens(batch=1, pos=3)
    how = {"max_new_tokens": 5, "do_sample": False, "use_past_kv_cache": False, "verbose": False}
    how |= {"stop_at_eos": False}
    expected = model.generate(start, **how)
    seen = []
    with expose_neuron_heads(model), model.hooks([(mlp_hook("z"), lambda z, hook: seen.append(z))]):
        assert torch.equal(model.generate(start, **how), expected)
    assert [z.shape[1] for z in seen] == [3, 4, 5, 6, 7]


def test_hook_result_that_would_not_fire_is_refused():
    model = build("gelu")
    with expose_neuron_heads(model):
        for call in (
            lambda: model.run_with_hooks(tokens(), fwd_hooks=[(mlp_hook("result"), print)]),
            lambda: model.run_with_cache(tokens(), names_filter=mlp_hook("result")),
            lambda: model.run_with_cache(tokens(), names_filter=mlp_hook("result").__eq__),
            lambda: model.add_hook(mlp_hook("result"), print),
            lambda: model.add_hook(lambda name: "neuron" in name, print),
        ):
            with pytest.raises(UnsupportedCallError, match="set_use_attn_result"):
                call()
            assert not any(point.fwd_hooks for point in model.hook_dict.values())
        _, cache = model.run_with_cache(tokens())
        assert mlp_hook("result") not in cache


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: setattr(m.blocks[1].mlp, "act_fn", torch.tanh), "act_fn is not gelu"),
        (lambda m: setattr(m.cfg, "act_fn", "solu"), "solu"),
        (lambda m: setattr(m.blocks[1], "mlp", torch.nn.Linear(26, 26)), "Linear"),
        (lambda m: setattr(m.blocks[2].mlp, "forward", lambda x: x), "forward was replaced"),
        (lambda m: setattr(m.cfg, "n_devices", 2), "spread over 2 devices"),
    ],
)
def test_refused_and_left_alone(spoil, reason):
    model = build("gelu")
    spoil(model)
    before = type(model), list(model.hook_dict), set(vars(model.blocks[0].mlp))
    with pytest.raises(UnsupportedModelError, match=reason):
        expose_neuron_heads(model)
    assert before == (type(model), list(model.hook_dict), set(vars(model.blocks[0].mlp)))


def test_refused_by_kind():
    for bad in (3, convert(build("gelu"))):
        with pytest.raises(UnsupportedModelError):
            expose_neuron_heads(bad)
    cfg = HookedTransformerConfig(
        n_layers=1, d_model=26, n_heads=2, d_head=13, d_vocab=41, n_ctx=17, attn_only=True
    )
    with pytest.raises(UnsupportedModelError, match="attention-only"):
        expose_neuron_heads(HookedTransformer(cfg))
    with (
        expose_neuron_heads(build("gelu")) as model,
        pytest.raises(UnsupportedModelError, match=r"undo\(\)"),
    ):
        convert(model)


@pytest.mark.parametrize("copy_weights", [False, True])
@torch.no_grad()
def test_a_copy(copy_weights):
    model, twin = build("llama"), build("llama")
    expected, before = model(tokens()), list(model.hook_dict)
    copied = expose_neuron_heads(model, copy=True, copy_weights=copy_weights)
    assert type(model) is type(twin)
    assert list(model.hook_dict) == before
    logits, cache = copied.model.run_with_cache(tokens())
    assert relative(logits, expected) <= EXACT
    assert cache[mlp_hook("pattern")].shape == (2, D_MLP, POS, 2)
    shared = model.W_E.data_ptr() == copied.model.W_E.data_ptr()
    assert shared is not copy_weights
    copied.model.blocks[1].mlp.W_out.mul_(1.01)
    assert torch.equal(model(tokens()), expected) is copy_weights
    copied.undo()
    assert type(copied.model) is type(twin)


def of_kind(gate, model):
    """Return the gates of one kind for a model."""
    calibration = calibrate(model, tokens()) if model.cfg.gated_mlp else None
    return Bilinear(calibration=calibration) if gate == "bilinear" else gate


@pytest.mark.parametrize("live", ["nothing", "z", "post and result"])
@pytest.mark.parametrize("gate", ["exact", "bilinear"])
@pytest.mark.parametrize("name", ["gelu", "llama"])
@torch.no_grad()
def test_threads_share_a_model(name, gate, live):
    """Threads share a model although each pauses in the middle of an MLP."""
    inputs, model = [tokens(seed, batch=seed) for seed in (1, 2, 3)], build(name)
    gate = of_kind(gate, model)
    mlp = model.blocks[LAYER].mlp
    act, post, wait = mlp.act_fn, f"blocks.{LAYER}.mlp.hook_post", [lambda: None]
    mlp.act_fn = lambda q: (wait[0](), act(q))[1]
    expose_neuron_heads(model, gate=gate)
    model.set_use_attn_result("result" in live)
    edits = {
        "nothing": [],
        "z": [(mlp_hook("z"), lambda z, hook: 0.5 * z)],
        "post and result": [
            (post, lambda post, hook: wait[0]()),
            (mlp_hook("result"), lambda result, hook: 0.5 * result),
        ],
    }
    with model.hooks(fwd_hooks=edits[live]):
        expected = [model(x) for x in inputs]
        wait[0] = meeting(inputs)
        results_of_all = in_threads(torch.no_grad()(model), inputs)
    for results, one in zip(results_of_all, expected, strict=True):
        assert all(torch.equal(result, one) for result in results)


def test_a_hook_may_run_its_own_mlp_alone():
    model, x = build("llama"), torch.ones(1, 2, 1)
    x = x.expand(1, 2, model.cfg.d_model).to(model.W_E)
    expected, inner, seen = model(tokens()), model.blocks[LAYER].mlp(x), []

    def again(u, hook):
        if not seen:
            seen.append(None)
            seen[0] = model.blocks[LAYER].mlp(x)

    with expose_neuron_heads(model):
        hooks = [(f"blocks.{LAYER}.mlp.hook_pre_linear", again), (mlp_hook("z"), lambda z, hook: z)]
        got = model.run_with_hooks(tokens(), fwd_hooks=hooks)
    assert relative(got, expected) < EXACT
    assert relative(seen[0], inner) < EXACT


@pytest.mark.parametrize("gate", ["exact", "bilinear"])
@pytest.mark.parametrize("name", ["gelu", "llama"])
@torch.no_grad()
def test_a_hook_may_run_the_model_again(name, gate):
    """A hook within an MLP may run the whole model again, or its first layers."""
    model = build(name)
    expose_neuron_heads(model, gate=of_kind(gate, model))
    model.set_use_attn_result(True)
    halve = (mlp_hook("result"), lambda result, hook: 0.5 * result)
    with model.hooks(fwd_hooks=[halve]):
        expected, inner = model(tokens()), model(tokens(seed=3))
    pre = "hook_pre_linear" if name == "llama" else "hook_pre"
    for point in (f"blocks.{LAYER}.mlp.{pre}", mlp_hook("z"), f"blocks.{LAYER}.mlp.hook_post"):
        for stop in (None, LAYER + 1):
            seen = []

            def again(x, hook, seen=seen, stop=stop):
                if not seen:
                    seen.append(None)
                    seen[0] = model(tokens(seed=3), stop_at_layer=stop)

            got = model.run_with_hooks(tokens(), fwd_hooks=[(point, again), halve])
            assert relative(got, expected) < EXACT
            assert stop or relative(seen[0], inner) < EXACT
