"""Tests of models with bilinear neuron-heads: the approximation error and every hook."""

import copy
import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch
from common import D_MLP, N_LAYERS, POS, relative, tokens
from models import FAMILIES, build
from tiny_tokenizer import tiny_tokenizer
from transformer_lens import patching as tl_patching

from attn_only_lens import (
    Bilinear,
    Contrast,
    HeadName,
    calibrate,
    circuits,
    convert,
    expose_neuron_heads,
    load,
    neuron_pattern,
    patching,
    save,
)
from attn_only_lens.errors import (
    InputError,
    UnknownHeadError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from attn_only_lens.models.verify import verify
from attn_only_lens.tolerances import LOGIT_TOLERANCE

EXACT = 1e-12
HEADS = {"silu": 1, "relu": 1}  # all other activations have 4


def bilinear(source, copy_weights=False, **options):
    """Return the source converted, with 4 heads per neuron where its activation allows it."""
    if source.cfg.gated_mlp:
        how = {"heads": 4, "calibration": calibrate(source, tokens())}
    else:
        how = {"heads": HEADS.get(source.cfg.act_fn, 4)}
    return convert(source, gate=Bilinear(**how | options), copy_weights=copy_weights)


def approximated(source, model):
    """Return a copy of the source whose activations are replaced by explicit sums of sigmoids."""
    source = copy.deepcopy(source)
    for layer, block in enumerate(source.blocks):
        gate = model.blocks[2 * layer + 1].attn.bilinear_gate
        terms = list(zip(gate.w, gate.b, gate.c, strict=True))

        def activation(q, terms=terms, gated=source.cfg.gated_mlp):
            total = torch.zeros_like(q)
            for w, b, c in terms:
                total += w * (1.0 if math.isinf(c) else 1 / (1 + torch.exp(-(b * q + c))))
            return total if gated else total * q

        block.mlp.act_fn = activation
    return source


@pytest.mark.parametrize("name", [*list(FAMILIES)[:12], "llama", "parallel", "post_norm"])
@torch.no_grad()
def test_float64(name):
    source = build(name)
    model = bilinear(source)
    expected = approximated(source, model)(tokens())
    assert relative(model(tokens()), expected) <= EXACT
    hooked, cache = model.run_with_cache(tokens())
    assert relative(hooked, expected) <= EXACT
    m = model.cfg.gating.heads
    assert cache["pattern", 1].shape == (2, D_MLP * m, POS, 2)
    assert cache["q", 1].shape == cache["v", 1].shape == cache["z", 1].shape == (2, POS, 37 * m, 1)


@torch.no_grad()
def test_the_control_fails():
    """Without its last head, or with its heads permuted, a neuron computes another function."""
    source = build("gelu")
    model = bilinear(source)
    expected = model(tokens())

    def drop(z, hook):
        z[:, :, 3::4] = 0.0

    def rotate(pattern, hook):
        return pattern.roll(1, dims=1)

    for point, edit in (("z", drop), ("pattern", rotate)):
        got = model.run_with_hooks(tokens(), fwd_hooks=[(f"blocks.3.attn.hook_{point}", edit)])
        assert relative(got, expected) > 1e-3


@torch.no_grad()
def test_more_heads_are_nearer():
    source = build("gelu")
    expected = source(tokens())
    errors = [relative(bilinear(source, heads=m)(tokens()), expected) for m in (1, 4, 8)]
    assert errors[0] > 30 * errors[1] > 900 * errors[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gelu", "relu", "llama"])
@torch.no_grad()
def test_lower_precision(name, dtype):
    """In float16 and bfloat16, hooks change the logits only by rounding, and nothing is nan."""
    model = bilinear(build(name, dtype=dtype, scale=0.2))
    plain = model(tokens())
    hooked, _ = model.run_with_cache(tokens())
    assert hooked.dtype == dtype
    assert relative(hooked.double(), plain.double()) <= LOGIT_TOLERANCE[dtype]
    report = verify(build(name, dtype=dtype, scale=0.2), model, tokens())
    assert report.ok, report


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@torch.no_grad()
def test_no_nan_far_out(dtype):
    for name in ("gelu", "relu", "silu"):
        model = build(name, dtype=dtype)
        model.blocks[1].mlp.W_in.data[0] = 4.0  # the product with 2e4 overflows float16
        attn = bilinear(model).blocks[3].attn
        x = torch.zeros(1, 5, 26, dtype=dtype)
        x[0, :, 0] = torch.tensor([0.0, 100.0, -100.0, 2e4, -2e4], dtype=dtype)
        expected = model.blocks[1].mlp(x)
        assert not (attn(x).isnan() & ~expected.isnan()).any()
        for point in ("hook_pattern", "hook_attn_scores", "hook_k"):
            handle = getattr(attn, point).register_forward_hook(lambda *_: None)
            assert not (attn(x).isnan() & ~expected.isnan()).any()
            handle.remove()


@pytest.mark.parametrize("point", ["q", "k", "v", "attn_scores", "pattern", "z", "result"])
@pytest.mark.parametrize("name", ["gelu", "llama"])
def test_each_hook_point_alone_and_its_gradient(name, point):
    model = bilinear(build(name))
    model.set_use_attn_result(True)
    hook = f"blocks.3.attn.hook_{point}"
    logits, cache = model.run_with_cache(tokens(), names_filter=hook)
    assert list(cache) == [hook]
    n_heads = D_MLP * model.cfg.gating.heads
    by_head = {"attn_scores": (2, n_heads, POS, 2), "pattern": (2, n_heads, POS, 2)}
    last = 26 if point == "result" else 1
    assert cache[hook].shape == by_head.get(point, (2, POS, n_heads, last))
    assert relative(logits, model(tokens())) <= EXACT
    _, cache = model.run_with_cache(tokens(), return_type="loss", incl_bwd=True, names_filter=hook)
    assert cache[hook + "_grad"].shape == cache[hook].shape
    loss = model.run_with_hooks(
        tokens(), return_type="loss", fwd_hooks=[(hook, lambda x, hook: x.mul_(0.5))]
    )
    loss.backward()


@pytest.mark.parametrize("name", ["gelu", "llama"])
def test_gradients(name):
    source = build(name)
    model = bilinear(source, copy_weights=True)
    oracle = approximated(source, model)
    for net in (model, oracle):
        net(tokens()).square().mean().backward()
    for block, mlp in zip(model.blocks[1::2], [b.mlp for b in oracle.blocks], strict=True):
        for weight in ("W_in", "b_in", "W_out", "b_out"):
            gradient, expected = getattr(block.attn, weight).grad, getattr(mlp, weight).grad
            assert (gradient - expected).abs().max() <= 1e-11 * expected.abs().max()


@pytest.mark.parametrize("name", ["gelu", "llama", "silu"])
@torch.no_grad()
def test_weights_are_those_of_the_computation(name):
    """Scores, values and results can be computed from W_Q … b_O alone."""
    model = bilinear(build(name))
    model.set_use_attn_result(True)
    _, cache = model.run_with_cache(tokens())
    attn = model.blocks[3].attn
    x = cache["blocks.3.ln1.hook_normalized"]  # under LayerNorm, with its gain and bias
    x = model.blocks[3].ln1(cache["resid_pre", 3])
    query = torch.einsum("bpd,hde->bphe", x, attn.W_Q) + attn.b_Q
    value = torch.einsum("bpd,hde->bphe", x, attn.W_V) + attn.b_V
    torch.testing.assert_close(query, cache["q", 3])
    torch.testing.assert_close(value, cache["v", 3])
    bias = cache["attn_scores", 3][..., 1]
    torch.testing.assert_close(bias, -cache["q", 3].squeeze(-1).transpose(1, 2))
    torch.testing.assert_close(cache["result", 3], cache["z", 3] * attn.W_O.squeeze(-2))
    written = cache["result", 3].sum(2) + attn.b_O
    torch.testing.assert_close(written, cache["attn_out", 3])
    assert model.neuron_heads.W_O.shape == (
        N_LAYERS,
        D_MLP * model.cfg.gating.heads,
        1,
        26,
    )
    assert attn.OV.shape == (D_MLP * model.cfg.gating.heads, 26, 26)


@torch.no_grad()
def test_names():
    model = bilinear(build("gelu"))
    labels = model.all_head_labels(neurons=True)
    assert labels[2:7] == ["L0N0", "L0N1", "L0N2", "L0N3", "L0N4"]
    assert len(labels) == N_LAYERS * (2 + 4 * D_MLP)
    assert model.neuron_heads.labels[-1] == f"L2N{4 * D_MLP - 1}"
    _, cache = model.run_with_cache(tokens())
    pattern = model.neuron_pattern(cache, "L1N118")
    assert torch.equal(pattern, cache["pattern", 3][:, 29 * 4 + 2])
    for wrong in ("L1N29.0", "L1H1.0", "L1N29.", "L1N148"):
        with pytest.raises(UnknownHeadError):
            neuron_pattern(cache, wrong)
    single = convert(build("silu"), gate=Bilinear())
    assert single.all_head_labels(neurons=True)[-1] == f"L2N{D_MLP - 1}"
    _, cache = single.run_with_cache(tokens())
    assert neuron_pattern(cache, "L1N29").shape == (2, POS, 2)


@pytest.mark.parametrize("name", ["gelu", "llama"])
@torch.no_grad()
def test_neuron_gate(name):
    source = build(name)
    model = bilinear(source)
    _, cache = model.run_with_cache(tokens())
    got = model.neuron_gate(cache, "L1N29")
    torch.testing.assert_close(got * cache["v", 3][:, :, 29, 0], cache["z", 3][:, :, 29, 0])
    one = cache.apply_slice_to_batch_dim(1)
    torch.testing.assert_close(model.neuron_gate(one, "L1N29"), got[1])
    exact = convert(source)
    _, cache = exact.run_with_cache(tokens())
    assert torch.equal(exact.neuron_gate(cache, "L1N29"), cache["pattern", 3][:, 29, :, 0])


@pytest.mark.parametrize("name", ["gelu", "llama", "post_norm"])
@torch.no_grad()
def test_parts_sum_to_the_stream(name):
    model = bilinear(build(name))
    _, cache = model.run_with_cache(tokens())
    end = cache["resid_post", 5]
    for expand in (True, False):
        stack, labels = cache.get_full_resid_decomposition(
            expand_neurons=expand, return_labels=True
        )
        assert len(stack) == len(labels)
        assert relative(stack.sum(0), end) <= 1e-11
    assert ("L1N29" in labels) is False
    neurons, labels = cache.stack_neuron_results(-1, return_labels=True)
    n_neurons = model.cfg.gating.heads * D_MLP
    assert labels[n_neurons + 29] == "L1N29"
    heads, names = cache.stack_head_results(return_labels=True, neurons=True)
    assert names == model.all_head_labels(neurons=True)
    assert relative(heads[names.index("L1N29")], neurons[n_neurons + 29]) <= 1e-11


@pytest.mark.parametrize("name", ["gelu", "llama", "relu"])
@torch.no_grad()
def test_saved_copied_moved(name, tmp_path):
    model = bilinear(build(name))
    logits, cache = model.run_with_cache(tokens())
    loaded = load(save(model, tmp_path / "saved"))
    assert loaded.cfg.gating == model.cfg.gating
    for same in (loaded, copy.deepcopy(model)):
        again, cached = same.run_with_cache(tokens())
        assert torch.equal(logits, again)
        assert all(torch.equal(cache[key], cached[key]) for key in cache.keys())  # noqa: SIM118
    single = loaded.to(torch.float32, print_details=False)
    assert relative(single(tokens()).double(), logits) < 1e-4


@torch.no_grad()
def test_knocked_out_self_edges_ablate_the_neuron():
    model = bilinear(build("gelu"))

    def look_away(pattern, hook):
        pattern[:, 29 * 4 : 30 * 4, :, 0] = 0.0

    def ablate(post, hook):
        post[..., 29] = 0.0

    oracle = approximated(build("gelu"), model)
    got = model.run_with_hooks(tokens(), fwd_hooks=[("blocks.3.attn.hook_pattern", look_away)])
    expected = oracle.run_with_hooks(tokens(), fwd_hooks=[("blocks.1.mlp.hook_post", ablate)])
    assert relative(got, expected) <= EXACT
    assert relative(got, model(tokens())) > 1e-3


@pytest.mark.parametrize("name", ["gelu", "silu", "llama", "relu"])
@torch.no_grad()
def test_verify(name):
    source = build(name)
    report = verify(source, bilinear(source), tokens())
    assert report.ok, report
    table = report.activations
    assert (table["measured"] <= table["bound"] + 1e-14).all()
    assert name == "silu" or (table["measured"] > table["bound"] / 300).all(), "errors were found"
    assert "bilinear against exact" in str(report)


@pytest.mark.parametrize(("name", "m"), [("llama", 6), ("silu_gated", 4)])
@torch.no_grad()
def test_heads_that_cancel_are_allowed_their_rounding(name, m):
    """In float32, `verify` allows larger errors where heads cancel; the CPU decides how large."""
    source = build(name, dtype=torch.float32)
    model = bilinear(source, heads=m)
    report = verify(source, model, tokens())
    assert report.ok, report
    assert 8 < report.tolerance / LOGIT_TOLERANCE[torch.float32] < 17  # Σ|a| / R
    assert report.rounding < report.tolerance / 3
    prompts = tokens(seed=1, batch=1), tokens(seed=2, batch=1)
    contrast = Contrast(*prompts, patching.logit_diff(7, 11))
    circuits.attribution_graph(model, dataclasses.replace(contrast, corrupted=None))
    patching.attribution(model, contrast, method="integrated")
    damaged = bilinear(source, heads=m, copy_weights=True)
    damaged.blocks[3].attn.W_out.mul_(1.003)
    assert not verify(source, damaged, tokens()).ok


@torch.no_grad()
def test_verify_notices():
    """`verify` reports a gate of another activation, and an input outside the calibrated range."""
    source = build("gelu")
    model = bilinear(source)
    assert verify(source, model, tokens()).ok
    vars(model.cfg)["act_fn"] = "gelu_new"  # bypass the read-only check
    assert not verify(source, model, tokens()).ok
    vars(model.cfg)["act_fn"] = "gelu"
    for edit in ("W_in", "W_out", "b_out"):
        edited = bilinear(source, copy_weights=True)
        getattr(edited.blocks[3].attn, edit).data.mul_(1 + 1e-6)
        assert not verify(source, edited, tokens()).ok
    assert not verify(build("gelu", scale=0.39), model, tokens()).ok
    source = build("llama")
    model = convert(source, gate=Bilinear(calibration=calibrate(source, tokens(seed=1)[:1, :1])))
    model.blocks[3].attn.W_gate.data.mul_(40.0)
    report = verify(source, model, tokens())
    assert not report.ok
    assert report.activations["largest"][1] > report.activations["range"][1]


@torch.no_grad()
def test_each_layer_has_its_own_range():
    source = build("llama")
    source.blocks[2].mlp.W_gate.data.mul_(9.0)
    calibration = calibrate(source, tokens())
    model = convert(source, gate=Bilinear(calibration=calibration))
    served = [model.blocks[block].attn.bilinear_gate.limit for block in (1, 3, 5)]
    for limit, requested in zip(served, calibration.ranges, strict=True):
        assert requested <= limit < 2 * requested
    assert served[2] > served[0]
    assert verify(source, model, tokens()).ok


def test_refused_with_all_reasons():
    gelu, llama = build("gelu"), build("llama")
    calibration = calibrate(llama, tokens())
    for model, gate, message in (
        (gelu, "bilinear", r"expected 'exact', attn_only_lens\.Bilinear"),
        (gelu, Bilinear, r"expected 'exact', attn_only_lens\.Bilinear"),
        (gelu, Bilinear(3), r"got heads=3; gelu has gates with \[1, 2, 4, 6, 8\]"),
        (gelu, Bilinear(tolerance=1e-9), "8 heads"),
        (gelu, Bilinear(calibration=calibration), "leave it out"),
        (llama, Bilinear(), "calibrate"),
        (llama, Bilinear(tolerance=1e-3, calibration=calibration), "error depends on the limit"),
        (llama, Bilinear(5, calibration=calibration), "got heads=5"),
        (
            build("llama", n_layers=2),
            Bilinear(calibration=calibration),
            "calibration has ranges for 3 layers, but the model has 2",
        ),
        (
            build("relu", dtype=torch.float16),
            Bilinear(tolerance=1e-5),
            r"the gate's slope, 2\.78e\+04, would.* convert in float32",
        ),
    ):
        for call in (convert, expose_neuron_heads):
            with pytest.raises(UnsupportedModelError, match=message):
                call(model, gate=gate)
    far = dataclasses.replace(calibration, ranges=(1e4, 3.0, 1e5))
    with pytest.raises(UnsupportedModelError, match=r"layers \[0\]: .*; layers \[2\]: "):
        convert(llama, gate=Bilinear(calibration=far))
    for options, count in (
        ({"heads": 8.0}, 1),
        ({"heads": [4], "tolerance": "x"}, 2),
        ({"heads": True, "tolerance": True, "calibration": (3.0, 2.0, 1.0)}, 3),
    ):
        with pytest.raises(InputError, match="expected") as caught:
            Bilinear(**options)
        assert str(caught.value).count("expected") == count
    assert Bilinear(np.int64(4), np.float32(0.5)) == Bilinear(4, 0.5)
    gelu.add_hook("hook_embed", lambda x, hook: x)
    with pytest.raises(UnsupportedModelError) as caught:
        convert(gelu, gate=Bilinear(3))
    assert len(caught.value.reasons) == 2


def test_gates_are_settled():
    """A later change of the gates would misalign every label, so the settings are read-only."""
    model = bilinear(build("gelu"))
    for name, value in (("gating", convert(build("gelu")).cfg.gating), ("act_fn", "relu")):
        with pytest.raises(UnsupportedCallError, match=f"{name} is read-only after conversion"):
            setattr(model.cfg, name, value)


@pytest.mark.parametrize("key", [-3.0, 1.5])
@torch.no_grad()
def test_keys_of_a_head_that_sees_itself_alone(key):
    """With patched keys, a head that attends only to itself has pattern 0 or 1, never nan."""
    model = bilinear(build("llama"))

    def patch(k, hook):
        k.fill_(key)

    _, cache = model.run_with_cache(tokens())
    with model.hooks(fwd_hooks=[("blocks.3.attn.hook_k", patch)]):
        _, patched = model.run_with_cache(tokens())
    query, pattern = cache["q", 3].squeeze(-1).transpose(1, 2), patched["pattern", 3]
    expected = torch.sigmoid(query[:, :-1:4] * (1 + key))  # the first heads, with a sigmoid
    torch.testing.assert_close(pattern[:, :-1:4, :, 0], expected)
    alone = pattern[:, 3::4]
    assert torch.equal(alone[..., 0], torch.full_like(alone[..., 0], float(key > -1)))
    assert (pattern.sum(-1) - 1).abs().max() < 1e-12


# TransformerLens' own tools


CLEAN, CORRUPTED = tokens(1, batch=1), tokens(2, batch=1)


def metric(logits):
    return (logits[:, -1, 7] - logits[:, -1, 11]).sum()


@pytest.mark.parametrize("name", ["gelu", "llama"])
@torch.no_grad()
def test_patching_the_heads_of_a_neuron_patches_the_neuron(name):
    model = bilinear(build(name))
    _, cache = model.run_with_cache(CLEAN)
    head, heads = HeadName.parse("L1N116"), slice(116, 120)

    def patch(z, hook):
        z[:, 4, heads] = cache[hook.name][:, 4, heads]

    got = model.run_with_hooks(CORRUPTED, fwd_hooks=[(head.hook("z", model), patch)])
    _, corrupted = model.run_with_cache(CORRUPTED)
    neuron = [
        c.get_neuron_results(3, neuron_slice=(116, 120))[:, 4].sum(-2) for c in (cache, corrupted)
    ]

    def move(out, hook):
        out[:, 4] += neuron[0] - neuron[1]

    expected = model.run_with_hooks(CORRUPTED, fwd_hooks=[("blocks.3.hook_attn_out", move)])
    assert relative(got, expected) <= 1e-11
    assert relative(got, model(CORRUPTED)) > 1e-6
    # Each head alone, by TransformerLens' function.
    frame = pd.DataFrame([(3, 4, heads.start + j) for j in range(4)])
    frame.columns = ["layer", "pos", "head_index"]
    setter = tl_patching.layer_pos_head_vector_patch_setter
    one_by_one = tl_patching.generic_activation_patch(
        model, CORRUPTED, cache, metric, setter, "z", index_df=frame
    )
    for j, value in enumerate(one_by_one.tolist()):

        def single(z, hook, head_index=heads.start + j):
            z[:, 4, head_index] = cache[hook.name][:, 4, head_index]

        logits = model.run_with_hooks(CORRUPTED, fwd_hooks=[(head.hook("z", model), single)])
        assert value == pytest.approx(metric(logits).item(), rel=1e-5)


@pytest.mark.parametrize("cached", [True, False])
@torch.no_grad()
def test_generation(cached, tmp_path):
    model = bilinear(build("llama", d_vocab_out=41))
    model.set_tokenizer(tiny_tokenizer(41, tmp_path / "tokenizer"))
    options = {"max_new_tokens": 7, "do_sample": False, "verbose": False, "stop_at_eos": False}
    ids = start = model.to_tokens("w3 w5 w8")
    for _ in range(7):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(start, use_past_kv_cache=cached, **options), ids)
