"""Tests of what `expose_neuron_heads(model, copy=True)` shares with the model or copies."""

import functools
import math
import types
import weakref
from copy import deepcopy

import pytest
import torch
import transformers
from bridges import (
    CHOSEN,
    GATED_CHOSEN,
    NEURON,
    STATES,
    boot,
    bridged,
    exposed_copy,
    inputs,
    randomise,
)
from common import D_MLP, POS, mlp_hook, relative, tokens
from tiny_tokenizer import tiny_tokenizer
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import (
    Bilinear,
    calibrate,
    convert,
    dense_pattern,
    expose_neuron_heads,
    neuron_gate,
    neuron_pattern,
    verify,
)
from attn_only_lens.errors import UnknownHeadError, UnsupportedCallError, UnsupportedModelError
from attn_only_lens.heads.bilinear import BilinearHeads
from attn_only_lens.models import Calibration
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]
EXACT = 1e-12  # float64, as for HookedTransformers


def storages(model):
    return {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}


def snapshot(model):
    modules = {name: (id(m), type(m)) for name, m in model.named_modules()}
    hooks = {n: len(m._forward_hooks) for n, m in model.named_modules()}
    weights = {name: p.clone() for name, p in model.named_parameters()}
    return modules, hooks, list(model.hook_dict), vars(model.cfg).copy(), weights


def unchanged(before, model):
    after = snapshot(model)
    assert before[:4] == after[:4]
    assert all(torch.equal(before[4][name], after[4][name]) for name in after[4])


@pytest.mark.parametrize("copy_weights", [False, True])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", [*CHOSEN, "bert"])
@torch.no_grad()
def test_same_function_and_the_callers_bridge_untouched(name, state, copy_weights):
    bridge, twin = boot(name, torch.float32, state), boot(name, torch.float32, state)
    expected, expected_cache = twin.run_with_cache(tokens())
    before = snapshot(bridge)
    converted = exposed_copy(bridge, copy_weights=copy_weights)
    assert type(bridge) is TransformerBridge
    unchanged(before, bridge)
    assert torch.equal(converted(tokens()), expected)
    logits, cache = converted.run_with_cache(tokens())
    assert relative(logits, expected) <= 2e-5
    assert set(expected_cache) < set(cache)
    assert mlp_hook("pattern") in cache
    assert converted.cfg.dtype == torch.float32
    mode = {n: m.training for n, m in bridge.named_modules()}
    assert {n: m.training for n, m in converted.named_modules() if n in mode} == mode
    assert torch.equal(bridge(tokens()), expected)
    unchanged(before, bridge)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", CHOSEN)
@torch.no_grad()
def test_weights_are_shared_or_copied(name, state):
    """After a weight of the source changes, only the copy that shares weights follows."""
    bridge = boot(name, torch.float32, state)
    sharing, copied = exposed_copy(bridge), exposed_copy(bridge, copy_weights=True)
    assert storages(sharing) == storages(bridge)
    assert not storages(copied) & storages(bridge)
    assert len(storages(copied)) == len(storages(bridge))
    expected = bridge(tokens())
    # Whole weights are changed: in joint attention, q, k and v are views of one weight.
    for parameter in bridge.parameters():
        parameter.mul_(1.5) if parameter.ndim == 2 else None
    assert torch.equal(sharing(tokens()), bridge(tokens()))
    assert not torch.equal(bridge(tokens()), expected)
    assert torch.equal(copied(tokens()), expected)


def reaches(start, targets):
    """Return paths from an object to `targets`, also via closures, methods and weak references."""
    seen, paths, todo = {}, [], [("", start)]
    while todo:
        path, it = todo.pop()
        if id(it) in targets:
            paths.append(path)
            continue
        if id(it) in seen or isinstance(it, torch.Tensor | type | types.ModuleType | str):
            continue
        seen[id(it)] = it
        if isinstance(it, types.FunctionType):
            names = it.__code__.co_freevars
            cells = zip(names, it.__closure__ or (), strict=True)
            todo += [(f"{path}<{it.__name__}:{name}>", c.cell_contents) for name, c in cells]
        elif isinstance(it, types.MethodType):
            # The adapter's functions of the configuration hold no module of a bridge.
            todo.append((f"{path}<method>", it.__self__))
        elif type(it) in weakref.ProxyTypes:
            todo.append((f"{path}<proxy>", it.__repr__.__self__))
        elif isinstance(it, weakref.ref):
            todo.append((f"{path}<weak>", it()))
        elif isinstance(it, functools.partial):
            todo.append((f"{path}<partial>", (it.func, it.args, it.keywords)))
        elif isinstance(it, dict):
            todo += [(f"{path}[{key!r}]", value) for key, value in it.items()]
        elif isinstance(it, list | tuple | set | frozenset):
            todo += [(f"{path}[]", value) for value in it]
        elif hasattr(it, "__dict__"):
            todo += [(f"{path}.{key}", value) for key, value in vars(it).items()]
    return paths


@pytest.mark.parametrize("name", [*CHOSEN, "bert"])
@torch.no_grad()
def test_the_copy_holds_nothing_of_the_callers_modules(name):
    """The copy drops TransformerBridge's capture hooks, closures that a plain deepcopy keeps."""
    bridge = boot(name)
    bridge(tokens())  # attaches the capture hooks
    converted = exposed_copy(bridge)
    converted(tokens())
    owned = {id(m) for m in [*bridge.modules(), *bridge.original_model.modules()]} | {id(bridge)}
    assert not reaches(converted, owned)
    assert reaches(deepcopy(bridge), owned), "the control: what the test would find"
    assert torch.equal(converted(tokens()), bridge(tokens()))


@torch.no_grad()
def test_settings_of_the_copy_are_its_own():
    bridge = boot("gpt2")
    converted = exposed_copy(bridge)
    converted.set_use_attn_result(True)
    converted.cfg.use_split_qkv_input = True
    assert not bridge.cfg.use_attn_result
    assert not bridge.cfg.use_split_qkv_input
    assert relative(converted(tokens()), bridge(tokens())) <= EXACT
    zero = [("blocks.1.hook_q_input", lambda x, hook: x * 0.0)]
    split = boot("gpt2")
    split.cfg.use_split_qkv_input = True
    expected = split.run_with_hooks(tokens(), fwd_hooks=zero)
    assert relative(converted.run_with_hooks(tokens(), fwd_hooks=zero), expected) <= EXACT
    assert relative(expected, bridge(tokens())) > 1e-6


def test_gradients_reach_the_copy_alone():
    bridge = boot("neox")
    converted = exposed_copy(bridge)
    converted(tokens()).square().mean().backward()
    assert all(p.grad is None for p in bridge.parameters())
    assert any(p.grad is not None for p in converted.parameters())


@torch.no_grad()
def test_tokenizer_is_handed_over(tmp_path):
    bridge = boot("llama")
    bridge.tokenizer = tiny_tokenizer(41, tmp_path)
    converted = exposed_copy(bridge, copy_weights=True)
    assert converted.tokenizer is bridge.tokenizer
    assert torch.equal(converted("w3 w5"), bridge("w3 w5"))


@torch.no_grad()
def test_a_bridge_with_hooks_or_exposed_is_refused():
    bridge = boot("llama")
    bridge.add_hook("blocks.0.hook_resid_pre", lambda x, hook: None, is_permanent=True)
    with pytest.raises(UnsupportedModelError, match=r"hooks are attached.*would be lost"):
        exposed_copy(bridge)
    bridge.reset_hooks(including_permanent=True)
    exposed_copy(bridge)
    handle = bridge.original_model.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="hooks are attached"):
        exposed_copy(bridge)
    handle.remove()
    with expose_neuron_heads(bridge), pytest.raises(UnsupportedModelError, match="undo"):
        exposed_copy(bridge)
    exposed_copy(bridge)


@torch.no_grad()
def test_what_cannot_be_copied_is_refused_with_all_reasons():
    with pytest.raises(UnsupportedModelError, match="pass copy=True, too"):
        expose_neuron_heads(boot("gpt2"), copy_weights=True)
    with pytest.raises(UnsupportedModelError, match="expected a TransformerBridge or a Hooked"):
        expose_neuron_heads(nn.Linear(2, 3), copy=True)
    bridge = boot("gpt2")
    bridge.add_hook("blocks.0.hook_resid_pre", lambda x, hook: None)
    bridge.blocks[1].mlp.original_component.act = nn.Tanh()
    with pytest.raises(UnsupportedModelError) as caught:
        exposed_copy(bridge)
    assert len(caught.value.reasons) == 2
    with pytest.raises(UnsupportedModelError, match=r"expose_neuron_heads\(bridge, copy=True\)"):
        convert(bridge)


@torch.no_grad()
def test_bert_has_no_module_for_its_mlp():
    """BERT's MLP runs within its layer; transformer-lens 4 hooks the layer's parts to show it."""
    bridge = boot("bert")
    expected = bridge(tokens())
    converted = exposed_copy(bridge)
    double = [("blocks.1.mlp.hook_in", lambda x, hook: x * 2.0)]
    edited = boot("bert").run_with_hooks(tokens(), fwd_hooks=double)
    assert torch.equal(edited, expected) == HAS_HOOKED_TRANSFORMER, "it fires with 4"
    assert relative(converted.run_with_hooks(tokens(), fwd_hooks=double), edited) <= EXACT
    with bridge.hooks(fwd_hooks=double):
        assert torch.equal(converted(tokens()), expected)
    # Removed hooks stay removed in the copy; a permanent user-added hook is refused.
    bridge.add_hook("blocks.0.mlp.in.hook_in", lambda x, hook: None, is_permanent=True)
    with pytest.raises(UnsupportedModelError, match=r"blocks\.0\.mlp\.in\.hook_in"):
        exposed_copy(bridge)
    bridge.reset_hooks(including_permanent=True)
    assert torch.equal(exposed_copy(bridge).run_with_hooks(tokens(), fwd_hooks=double), expected)


# verify


@pytest.mark.parametrize("name", CHOSEN)
def test_verify_a_copy_a_twin_and_itself(name):
    bridge, twin = boot(name), boot(name)
    reports = [verify(bridge, exposed_copy(bridge), tokens())]
    with expose_neuron_heads(bridge) as exposed:
        before = list(exposed.hook_dict)
        reports += [verify(twin, exposed, tokens()), verify(exposed, exposed, tokens())]
        assert sorted(before) == sorted(exposed.hook_dict)
    for report in reports:
        assert report.ok, report
        assert report.bitwise
        assert report.relative <= EXACT
        assert report.n_tokens == 2 * POS
        assert report.activations.empty
        points = list(report.by_layer["point"])
        assert points[0] == "0_pre"
        assert points[-1] == "final_post"
    assert type(bridge) is TransformerBridge


@torch.no_grad()
def test_verify_notices_a_changed_weight_and_says_from_where():
    bridge = boot("llama")
    converted = exposed_copy(bridge, copy_weights=True)
    converted.blocks[1].mlp.out.weight.mul_(1.01)
    report = verify(bridge, converted, tokens())
    assert not report.ok
    assert str(report).startswith("DIFFERENT")
    change = (bridge(tokens()) - converted(tokens())).abs().max().item()
    assert report.max_abs_logit == pytest.approx(change, rel=1e-9)
    by_point = report.by_layer.set_index("point")["max_abs"]
    assert (by_point[["0_pre", "0_mid", "1_pre", "1_mid"]] < 1e-12).all()
    assert by_point["final_post"] > 1e-3


@torch.no_grad()
def test_verify_notices_neuron_heads_that_are_wrong():
    """The check runs with live hooks: logits without hooks do not depend on the heads."""
    bridge = boot("gpt2")
    with expose_neuron_heads(bridge):
        heads = bridge.blocks[1].mlp._neuron_heads
        attend = heads._attend
        heads._attend = lambda q, up: attend(q, up) * 1.01
        report = verify(bridge, bridge, tokens())
    assert report.bitwise
    assert report.relative > 1e-6
    assert not report.ok


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "native_gated"])
@torch.no_grad()
def test_verify_bilinear_gates(name):
    bridge = boot(name)
    how = {"calibration": calibrate(bridge, tokens())} if name in GATED_CHOSEN else {}
    converted = exposed_copy(bridge, gate=Bilinear(8, **how))
    for source in (bridge, converted):
        report = verify(source, converted, tokens())
        assert report.ok, report
        assert not report.bitwise
        assert 1e-12 < report.relative < 0.2
        assert report.rounding <= EXACT
        assert list(report.activations["layer"]) == [0, 1]
        assert (report.activations["measured"] <= report.activations["bound"] + 1e-14).all()
        assert (report.activations["largest"] <= report.activations["range"]).all()
    if name == "gemma2":
        # The control: outside the calibrated range, the bound does not hold.
        narrow = Calibration(tuple(r / 9 for r in how["calibration"].ranges), 1.25, 22)
        converted = exposed_copy(bridge, gate=Bilinear(8, calibration=narrow))
        report = verify(bridge, converted, tokens())
        assert not report.ok
        assert (report.activations["largest"] > report.activations["range"]).all()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_verify_notices_nan_with_hooks_alone(name, monkeypatch):
    """The nan is in the second of two outputs, where Python's `max` would return the first."""
    bridge = boot(name)
    how = {"calibration": calibrate(bridge, tokens())} if name in GATED_CHOSEN else {}
    converted = exposed_copy(bridge, gate=Bilinear(8, **how))
    assert verify(bridge, converted, tokens()).ok
    attend = BilinearHeads._attend
    monkeypatch.setattr(
        BilinearHeads,
        "_attend",
        lambda heads, q, v: attend(heads, q, v) * (torch.nan if heads.layer == 1 else 1.0),
    )
    report = verify(bridge, converted, tokens())
    assert math.isnan(report.rounding)
    assert not report.ok


@torch.no_grad()
def test_verify_where_all_is_zero():
    bridge = boot("gpt2")
    converted = exposed_copy(bridge)
    for parameter in bridge.original_model.parameters():
        parameter.zero_()
    report = verify(bridge, converted, tokens())
    assert report.ok
    assert (report.by_layer["relative"] == 0).all()
    # The control: relative to zero, every difference is large.
    twin = exposed_copy(bridge, copy_weights=True)
    twin.original_model.transformer.wte.weight.fill_(1.0)  # also changes the unembedding
    twin.original_model.transformer.ln_f.bias.fill_(1.0)
    report = verify(bridge, twin, tokens())
    assert not report.ok
    assert report.relative == report.by_layer["relative"].iloc[0] == math.inf


@torch.no_grad()
def test_verify_where_a_point_of_the_stream_does_not_fire():
    """OpenAI GPT's blocks have no hook_resid_post that fires, in either version."""
    config = transformers.OpenAIGPTConfig(vocab_size=41, n_positions=17, n_embd=26, n_layer=2)
    config.n_head = 2
    torch.manual_seed(0)
    source = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    bridge = bridged(randomise(source.double().eval()))
    report = verify(bridge, exposed_copy(bridge), tokens())
    assert report.ok, report
    assert list(report.by_layer["point"]) == ["0_pre", "0_mid", "1_pre", "1_mid"]


def test_a_model_of_pictures_is_not_compared_on_tokens():
    bridge = boot("vit")
    with expose_neuron_heads(bridge), pytest.raises(UnsupportedCallError, match="no vocabulary"):
        verify(bridge, bridge, inputs("vit"))


def test_models_that_cannot_be_compared():
    bridge = boot("llama")
    converted = exposed_copy(bridge)
    for a, b, message in (
        (bridge, bridge, r"expected a model from attn_only_lens\.convert"),
        (converted, exposed_copy(boot("llama")), "source: got ExposedBridge"),
        (nn.Linear(2, 3), converted, "expected the model before conversion, a TransformerBridge"),
        (boot("llama", torch.float32), converted, "dtype: got torch.float32"),
        (boot("phi3"), converted, "d_model: got 28"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            verify(a, b, tokens())
    with pytest.raises(UnsupportedCallError, match="got 18 tokens; the model has 17"):
        verify(bridge, converted, torch.zeros((1, 18), dtype=torch.long))
    with pytest.raises(UnsupportedCallError, match="values from 0 to 41"):
        verify(bridge, converted, torch.tensor([[0, 41]]))


# calibrate


@pytest.mark.parametrize("name", GATED_CHOSEN)
@torch.no_grad()
def test_calibrate(name):
    """The ranges are computed from the pre-activations in TransformerBridge's own cache."""
    bridge = boot(name)
    _, cache = bridge.run_with_cache(tokens())
    calibration = calibrate(bridge, tokens(), margin=1.5)
    for layer, limit in enumerate(calibration.ranges):
        largest = cache[f"blocks.{layer}.mlp.hook_pre"].abs().max().item()
        assert limit == pytest.approx(1.5 * largest, rel=1e-12)
    assert calibration.n_tokens == 2 * POS
    assert calibration == calibrate(exposed_copy(bridge), tokens(), margin=1.5)
    assert type(bridge) is TransformerBridge
    points = (m for m in bridge.modules() if isinstance(m, HookPoint))
    assert not any(m._forward_hooks for m in points)


def test_calibrate_refuses():
    with pytest.raises(UnsupportedModelError, match="not gated"):
        calibrate(boot("gpt2"), tokens())
    with pytest.raises(UnsupportedModelError, match="cannot be calibrated"):
        calibrate(nn.Linear(2, 3), tokens())
    broken = boot("llama")
    broken.blocks[1].mlp.gate.weight.data[3] = float("nan")
    with pytest.raises(UnsupportedModelError, match=r"not finite in layers \[1\]|layer 1"):
        calibrate(broken, tokens())


# accessors


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_accessors(name):
    bridge = boot(name)
    converted = exposed_copy(bridge)
    _, cache = converted.run_with_cache(tokens())
    _, single = converted.run_with_cache(tokens()[:1], remove_batch_dim=True)
    _, few = converted.run_with_cache(tokens(), names_filter=[mlp_hook("pattern")])
    _, whole = converted.run_with_cache(
        tokens(), names_filter=lambda name: name == mlp_hook("pattern")
    )
    pattern = neuron_pattern(cache, "L1N29")
    assert pattern.shape == (2, POS, 2)
    assert torch.equal(pattern, cache[mlp_hook("pattern")][:, NEURON])
    q = cache[mlp_hook("q")][..., NEURON, 0]
    # The pattern is act(q) / q, with torch's own activation.
    act = nn.functional.silu if name == "llama" else functools.partial(nn.functional.gelu)
    how = {} if name == "llama" else {"approximate": "tanh"}
    torch.testing.assert_close(pattern[..., 0], act(q, **how) / q, rtol=1e-9, atol=1e-12)
    assert torch.equal(neuron_gate(cache, "L1N29"), pattern[..., 0])
    dense = dense_pattern(cache, "L1N29")
    assert dense.shape == (2, POS, POS + 1)
    assert torch.equal(dense.diagonal(dim1=1, dim2=2), pattern[..., 0])
    assert torch.equal(dense[..., -1], pattern[..., 1])
    for some_cache in (few, whole):
        # Equal only up to rounding, because layer 0 has no live hook in this run.
        got = neuron_pattern(some_cache, "L1N29")
        torch.testing.assert_close(got, pattern, rtol=1e-9, atol=1e-12)
        with pytest.raises(UnsupportedCallError, match="names_filter"):
            neuron_pattern(some_cache, "L0N29")
    for read in (neuron_pattern, neuron_gate, dense_pattern):
        torch.testing.assert_close(
            read(single, "L1N29"), read(cache, "L1N29")[0], rtol=1e-9, atol=1e-12
        )
    with pytest.raises(UnknownHeadError, match=f"0 to {D_MLP - 1}"):
        neuron_pattern(cache, "L1N37")
    _, plain = bridge.run_with_cache(tokens())
    with pytest.raises(UnsupportedCallError, match="converted or exposed"):
        neuron_pattern(plain, "L1N29")


@torch.no_grad()
def test_accessors_refuse_a_cache_from_before_the_model_was_exposed_anew():
    """Head 12 is L0N3.0 with four heads per neuron, and L0N12 with one."""
    bridge = boot("gpt2")
    with expose_neuron_heads(bridge, gate=Bilinear(4)):
        _, cache = bridge.run_with_cache(tokens())
        assert neuron_pattern(cache, "L1N3.0").shape == (2, POS, 2)
    with expose_neuron_heads(bridge):
        for read in (neuron_pattern, neuron_gate, dense_pattern):
            with pytest.raises(UnsupportedCallError, match=r"148 neuron-heads .* now has 37"):
                read(cache, "L1N12")
