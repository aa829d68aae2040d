"""Tests that the study of gates runs, and that its figures equal explicit sums."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from common import needs_hooked_transformer, run_script

from analyses.studies import exactness_by_gate, exactness_measures

pytestmark = needs_hooked_transformer
NAMES = ("modular_addition", "tiny_gelu", "tiny_gelu_new", "tiny_relu", "tiny_silu_gated")


@pytest.fixture(scope="module")
def tiny():
    return {subject.name: subject for subject in exactness_measures.tiny()}


@pytest.fixture(scope="module")
def measured(tiny):
    return {name: exactness_measures.measure(subject) for name, subject in tiny.items()}


def test_smoke(tmp_path):
    result = run_script(exactness_by_gate.main, ["--smoke", "--out", str(tmp_path)])
    page = (tmp_path / "exactness_by_gate.md").read_text("utf-8")
    assert page.strip() in result.output
    assert re.findall(r"^## (\w+)$", page, re.M) == list(NAMES)
    figure = (tmp_path / "exactness_by_gate.svg").read_text("utf-8")
    assert "tiny_gelu_new, float32" in figure


def test_what_is_not_there_is_named(tmp_path, measured):
    page = exactness_by_gate.report(
        measured["tiny_relu"], {"tiny_relu": "", "char_gelu_4l": ""}, smoke=False
    )
    left_out = re.search(r"Left out.*: (.*)\.$", page, re.M)
    expected = [name for name in exactness_measures.REAL if name != "char_gelu_4l"]
    assert left_out is not None
    assert left_out[1].split(", ") == expected


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
@pytest.mark.parametrize("gate", ["slope 1.702", "m = 1"])
def test_figures_of_one_head_by_hand(gate, tiny, measured):
    """One sigmoid with a slope, in hooks on the source, gives the same KL and other figures."""
    subject, frame = tiny["tiny_gelu"], measured["tiny_gelu"]
    source = copy.deepcopy(subject.source).to(torch.float64, print_details=False)
    slope = {"slope 1.702": 1.702, "m = 1": 1.7729338588}[gate]

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


def test_errors_fall_with_every_head_and_stay_within_their_bounds(measured):
    for name in ("tiny_gelu", "tiny_gelu_new", "tiny_silu_gated", "tiny_relu"):
        frame = measured[name].query("dtype == 'float64' and gate != 'slope 1.702'")
        for quantity in ("activation", "relative", "mean_kl", "max_kl"):
            # A steep relu equals relu on all the data, so its error may stay at 0.
            assert (frame[quantity].diff()[1:] <= 0).all(), (name, quantity)
            assert frame[quantity].iloc[1] < frame[quantity].iloc[0] / 2
        bilinear = frame[frame["gate"] != "exact"]
        assert (bilinear["activation"] <= bilinear["bound"] + 1e-14).all()  # rounding in float64
        assert frame["top1"].iloc[-1] == 1
        # control: the bounds are close to the errors where the data include the worst q
        assert bilinear["activation"].iloc[0] > 0.9 * bilinear["bound"].iloc[0]


def test_float32_shows_rounding_where_float64_shows_the_approximation(measured):
    frame = measured["tiny_gelu"]
    assert value(frame, "float32", "m = 2", "relative") == pytest.approx(
        value(frame, "float64", "m = 2", "relative"), rel=1e-2
    )
    assert value(frame, "float64", "m = 8", "relative") < 1.5e-7
    assert 1e-8 < value(frame, "float32", "exact", "relative") < 2e-5
    assert value(frame, "float64", "exact", "relative") < 1e-14


def test_gated_gates_are_calibrated_on_other_tokens_than_they_are_compared_on(tiny):
    subject = tiny["tiny_silu_gated"]
    together = torch.cat([subject.calibration, subject.tokens])
    assert len(subject.calibration) == len(subject.tokens) == 3
    assert not any((row == subject.tokens).all(-1).any() for row in subject.calibration)
    assert together.unique(dim=0).shape == together.shape


def test_kl_holds_its_digits_where_the_plain_sum_has_none():
    mpmath = pytest.importorskip("mpmath")
    logits = torch.randn(1, 1, 7, dtype=torch.float64)
    moved = logits + 1e-10 * torch.randn(1, 1, 7, dtype=torch.float64)
    with mpmath.workdps(60):
        p, q = ([mpmath.exp(mpmath.mpf(x)) for x in t.flatten().tolist()] for t in (logits, moved))
        P, Q = sum(p), sum(q)
        exact = float(sum(a / P * mpmath.log(a / P / (b / Q)) for a, b in zip(p, q, strict=True)))
    got = exactness_measures.compare(logits, moved)["mean_kl"]
    # d is 1e-10 to 1e-16, so six digits
    assert got == pytest.approx(exact, rel=1e-4)
    log_p, log_q = logits.log_softmax(-1), moved.log_softmax(-1)
    plain = (log_p.exp() * (log_p - log_q)).sum().item()
    assert abs(plain - exact) > exact / 10  # control
