"""Tests of the study of gates and Ω: its figures equal explicit sums and independent counts."""

import copy

import pytest
import torch
import torch.nn.functional as F
from common import needs_hooked_transformer

from analyses.studies import exactness_by_gate as study
from attn_only_lens import load

pytestmark = needs_hooked_transformer


def value(frame, dtype, gate, quantity):
    return frame.set_index(["dtype", "gate"]).loc[(dtype, gate), quantity]


def with_activation(source, activation, tokens):
    """Return the logits of a source whose MLPs have another activation, by hooks."""

    def replace(post, hook):
        mlp = source.blocks[hook.layer()].mlp
        return activation(seen[hook.layer()] @ mlp.W_in + mlp.b_in)

    def remember(x, hook):
        seen[hook.layer()] = x

    seen = {}
    hooks = [(lambda name: name.endswith("ln2.hook_normalized"), remember)]
    hooks += [(lambda name: name.endswith("mlp.hook_post"), replace)]
    return source.run_with_hooks(tokens, fwd_hooks=hooks)


@torch.no_grad()
def test_figures_of_one_head_by_hand():
    """One sigmoid with a slope, in hooks on the source, gives the same KL and other figures."""
    subject = next(subject for subject in study.tiny() if subject.name == "tiny_gelu")
    frame = study.measure(subject)
    source = copy.deepcopy(subject.source).to(torch.float64, print_details=False)
    gate, slope = "m = 1", 1.7729338588

    def one_head(q):
        return q / (1 + torch.exp(-slope * q))

    expected = source(subject.tokens)
    got = with_activation(source, one_head, subject.tokens)
    assert value(frame, "float64", gate, "logit") == pytest.approx(
        (got - expected).abs().max().item(), rel=1e-10
    )
    p, q = expected.softmax(-1), got.softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    # KL is 1e-5 here: this sum, whose terms cancel, has 1e-16 / 1e-5 left of its digits.
    assert value(frame, "float64", gate, "mean_kl") == pytest.approx(kl.mean().item(), rel=1e-9)
    assert value(frame, "float64", gate, "max_kl") == pytest.approx(kl.max().item(), rel=1e-9)
    same = (p.argmax(-1) == q.argmax(-1)).sum().item() / subject.tokens.numel()
    assert value(frame, "float64", gate, "top1") == pytest.approx(same, abs=1e-12)
    assert same < 1
    _, cache = source.run_with_cache(subject.tokens)
    pre = torch.cat([cache["pre", 0], cache["pre", 1]])
    error = (one_head(pre) - F.gelu(pre)).abs().max().item()
    assert value(frame, "float64", gate, "activation") == pytest.approx(error, rel=1e-10)
    # control: the other slope is a clearly different model
    control = with_activation(source, lambda q: q * torch.sigmoid(1.9 * q), subject.tokens)
    assert (control - got).abs().max() > 0.1 * (got - expected).abs().max()


# ---- Ω on random models


def test_errors_of_omega_are_those_of_the_construction():
    plain = study.random_transformer(2, 16, init="scaled", seed=3)
    x = torch.randn(5, 16)
    frame = study.errors(plain, x, [3.0, 9.0, 1000.0])
    value = frame[frame["depth"] == 2].set_index("omega")
    assert 1e-3 < value["float64"][3.0] < 1.0
    assert value["float64"][1000.0] < 1e-12
    assert value["float32"][9.0] < 1e-6 < value["float32"][1000.0] < 1e-4
    assert value["float32, shifted"][1000.0] < 1e-6
    # The error at the last depth, from the construction's output.
    exact = study.direct(plain, x.double())[0][-1]
    post = study.post_transformer(plain, 5, omega=3.0, dtype=torch.float64).run(x.double())
    error = ((post.output - exact).abs().max() / exact.abs().max()).item()
    assert value["float64"][3.0] == pytest.approx(error, rel=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("init", ["scaled", "growing", "unit"])
def test_the_direct_evaluation_against_torchs_attention(init, causal):
    plain = study.random_transformer(2, 8, init=init, seed=0, causal=causal)
    x = start = torch.randn(7, 8, dtype=torch.float64)
    for layer in plain.layers:
        w = layer.to(torch.float64)
        heads = (x @ w.W_Q, x @ w.W_K, x @ w.W_V)
        x = x + (F.scaled_dot_product_attention(*heads, is_causal=causal) @ w.W_O).sum(0)
        x = x + F.linear(F.silu(F.linear(x, w.W_1.T, w.b_1)), w.W_2.T, w.b_2)
    got, _, _ = study.direct(plain, start)
    # Sums of at most 32 terms, twice; "unit" weights give entries of 1e5, so errors are relative.
    torch.testing.assert_close(got[-1], x, rtol=1e-11, atol=1e-11 * x.abs().max().item())


# ---- trained models


def shipped(n_prompts):
    return study.Case.of("modular_addition", load("modular-addition"), n_prompts)


@torch.no_grad()
def test_it_compares_with_the_model_itself():
    model, case = load("modular-addition", dtype=torch.float64), shipped(5)
    torch.testing.assert_close(case.logits, model(case.tokens), rtol=0, atol=1e-11)
    _, cache = model.run_with_cache(case.tokens)
    assert torch.equal(case.answers, case.tokens[:, :2].sum(1) % 113)
    _, _, (hidden,) = case.direct(torch.float64)
    assert hidden == pytest.approx(cache["blocks.0.mlp.hook_pre"].abs().max().item())
    off = case.logits.clone()
    off[0, 0, 0] += 2 * case.logits.abs().max()
    assert case.errors(off)["logits"] == pytest.approx(2.0)
    assert case.errors(case.logits)["logits"] == 0.0
