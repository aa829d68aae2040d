"""Tests of attribution against derivatives and patches made with TransformerLens' hooks only."""

import math
from functools import partial

import patch_oracle as oracle
import pytest
import torch
from common import tokens
from models import CORE, build
from torch.utils.flop_counter import FlopCounterMode

from attn_only_lens import Bilinear, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

estimate = partial(p.attribution, budget=0)  # `test_repairs.py` tests exact repairs

POS = 5
LAYOUTS = ("two blocks a layer", "in place")
METRIC = p.logit_diff(oracle.CORRECT, oracle.WRONG)
# Central differences leave step² f‴/6, near 1e-8 of the largest derivative here.
SLOPE = 1e-6


def prompts(batch=1):
    clean = tokens(0, batch=batch, pos=POS)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 7) % 41
    return clean, corrupted


def model_of(family, layout, **changes):
    source = build(family, scale=0.25, **changes)
    if layout == "two blocks a layer":
        return convert(source)
    expose_neuron_heads(source)
    return source


def change_of(sweep, name, position):
    """Return the change of the metric that the estimate predicts."""
    row = sweep.frame.query(f"name == {name!r} and position == {position!r}")
    assert len(row) == 1
    span = sweep.clean_value - sweep.corrupted_value
    return (row["score"].item() - sweep.baseline) * span


NAMES = ("L0H1", "L0N3", "L1N29", "L2H0", "L2N36")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [*CORE, "parallel_norms"])
def test_gradient_is_the_slope_of_small_patches(family, layout):
    model, (clean, corrupted) = model_of(family, layout), prompts()
    grouped = family == "llama"
    for part in ("z", "q") if grouped else oracle.ACTIVATION:
        names = [name for name in NAMES if part != "k" or "H" in name]
        result = estimate(model, clean, corrupted, METRIC, part=part, method="gradient")
        expected, got = [], []
        for name in names:
            for pos in (1, POS - 1):
                hook_name, index = oracle.place(model, name, part, pos)
                change = oracle.seen(model, clean, hook_name)[index]
                change = change - oracle.seen(model, corrupted, hook_name)[index]
                expected.append(oracle.slope(model, corrupted, hook_name, index, change))
                got.append(change_of(result, name, pos))
        expected, got = torch.tensor(expected), torch.tensor(got)
        assert (got - expected).abs().max() < SLOPE * expected.abs().max(), part
        # Control: a whole patch, or the gradient of the other run, gives another value.
        noised = estimate(
            model, clean, corrupted, METRIC, part=part, method="gradient", direction="noise"
        )
        reverse = torch.tensor([-change_of(noised, n, i) for n in names for i in (1, POS - 1)])
        assert (reverse - expected).abs().max() > 1e-3 * expected.abs().max(), part


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [f for f in CORE if f != "post_norm"])
def test_exact_gate_is_the_slope_along_the_z_that_a_query_makes(family, layout):
    model, (clean, corrupted) = model_of(family, layout), prompts()
    result = estimate(model, clean, corrupted, METRIC, part="q", method="exact_gate")
    linear = estimate(model, clean, corrupted, METRIC, part="q", method="gradient")
    expected, got, control = [], [], []
    for name in NAMES:
        for pos in (1, POS - 1):
            q, index = oracle.place(model, name, "q", pos)
            z, _ = oracle.place(model, name, "z", pos)
            clean_q = oracle.seen(model, clean, q)

            def ask(value, hook, index=index, clean_q=clean_q):
                value = value.clone()
                value[index] = clean_q[index]
                return value

            change = oracle.seen(model, corrupted, z, hooks=[(q, ask)])[index]
            change = change - oracle.seen(model, corrupted, z)[index]
            expected.append(oracle.slope(model, corrupted, z, index, change))
            got.append(change_of(result, name, pos))
            control.append(change_of(linear, name, pos))
    expected, got, control = map(torch.tensor, (expected, got, control))
    assert (got - expected).abs().max() < SLOPE * expected.abs().max()
    assert (control - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("part", ["z", "pattern", "value"])
def test_exact_gate_is_gradient_where_no_gate_is_passed(part):
    model, (clean, corrupted) = model_of("gelu", "in place"), prompts()
    first, second = (
        estimate(model, clean, corrupted, METRIC, part=part, method=method)
        for method in ("gradient", "exact_gate")
    )
    assert first.frame.equals(second.frame)


def test_queries_that_are_normed_together_have_no_closed_form():
    model, (clean, corrupted) = model_of("post_norm", "in place"), prompts()
    with pytest.raises(UnsupportedModelError, match="changes the z of other heads"):
        estimate(model, clean, corrupted, METRIC, part="q", method="exact_gate")
    estimate(model, clean, corrupted, METRIC, part="q", method="exact_gate", sites=p.neuron_heads())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_batches_and_sets_of_positions(layout):
    model = model_of("gelu", layout)
    clean, corrupted = prompts(batch=3)
    mask = torch.ones_like(clean)
    mask[1, :2] = 0
    corrupted[1, 3] = (clean[1, 3] + 5) % 41
    settings = {"mask": mask, "part": "pattern", "method": "gradient", "sites": list(NAMES)}
    result = estimate(model, clean, corrupted, METRIC, **settings)
    together = estimate(model, clean, corrupted, METRIC, positions="all", **settings)
    for name in NAMES:
        total = sum(change_of(result, name, pos) for pos in range(POS))
        # The sums of five terms are taken in another order.
        assert change_of(together, name, "all") == pytest.approx(total, rel=1e-10, abs=1e-13)
        hook_name, index_of_site = oracle.place(model, name, "pattern", slice(None))
        change = oracle.seen(model, clean, hook_name, mask)[index_of_site]
        change = change - oracle.seen(model, corrupted, hook_name, mask)[index_of_site]
        change[1, :2] = 0  # padding is not patched
        expected = oracle.slope(model, corrupted, hook_name, index_of_site, change, mask=mask)
        assert total == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_heads_that_share_a_neuron():
    model = convert(build("gelu", scale=0.25), gate=Bilinear(4))
    clean, corrupted = prompts()
    sites = ["L1N7", "L1N7.0", "L1N7.1", "L1N7.2", "L1N7.3", "L1N8.2"]
    for part in ("z", "q"):
        result = estimate(
            model, clean, corrupted, METRIC, sites=sites, part=part, method="gradient"
        )
        hook_name = f"blocks.3.attn.hook_{part}"
        change = oracle.seen(model, clean, hook_name) - oracle.seen(model, corrupted, hook_name)
        for name, index in (("L1N7.0", 28), ("L1N7.1", 29), ("L1N7.2", 30), ("L1N8.2", 34)):
            index_of_site = (slice(None), 1, index)
            expected = oracle.slope(
                model, corrupted, hook_name, index_of_site, change[index_of_site]
            )
            assert change_of(result, name, 1) == pytest.approx(expected, rel=1e-5, abs=1e-10)
        parts = [change_of(result, name, 1) for name in sites[1:5]]
        assert change_of(result, "L1N7", 1) == pytest.approx(sum(parts), rel=1e-10)
        assert max(map(abs, parts)) > 1e-6


def micro():
    """Return a model with one neuron on one coordinate, no norm, and attention that writes zero."""
    cfg = HookedTransformerConfig(
        n_layers=1, d_model=2, n_ctx=3, d_head=2, n_heads=1, d_mlp=1, d_vocab=3, act_fn="silu",
        normalization_type=None, dtype=torch.float64, device="cpu",
    )  # fmt: skip
    model = HookedTransformer(cfg)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E.copy_(torch.tensor([[0.0, 0.0], [2.0, 0.0], [-1.0, 0.0]]))
        model.blocks[0].mlp.W_in.copy_(torch.tensor([[1.5], [0.0]]))
        model.blocks[0].mlp.b_in.copy_(torch.tensor([0.5]))
        model.blocks[0].mlp.W_out.copy_(torch.tensor([[0.0, 3.0]]))
        model.unembed.W_U.copy_(torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, -1.0]]))
    return model


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_worked_out_by_hand(layout):
    """q is 3.5 (clean) and -1 (corrupted); the metric is 6 z, so it is linear in z."""
    model = micro()
    model = convert(model) if layout == LAYOUTS[0] else (expose_neuron_heads(model), model)[1]
    q, q2 = -1.0, 3.5
    w, w2 = sigmoid(q), sigmoid(q2)
    expected = {
        ("z", "gradient"): 6 * (w2 * q2 - w * q),
        ("pattern", "gradient"): 6 * (w2 - w) * q,
        ("value", "gradient"): 6 * w * (q2 - q),
        ("q", "gradient"): 6 * w * (1 - w) * (q2 - q) * q,
        ("q", "exact_gate"): 6 * (w2 - w) * q,
        ("z", "secant"): 6 * (w2 * q2 - w * q),
        ("z", "integrated"): 6 * (w2 * q2 - w * q),
    }
    metric = p.logit_diff(1, 2)
    clean, corrupted = torch.tensor([0, 1]), torch.tensor([0, 2])
    for (part, method), change in expected.items():
        result = estimate(
            model, clean, corrupted, metric, sites="L0N0", part=part, method=method, positions=-1,
            progress=False,
        )  # fmt: skip
        # about a dozen roundings of numbers up to 21
        assert result.corrupted_value == pytest.approx(6 * w * q, rel=1e-13)
        assert change_of(result, "L0N0", -1) == pytest.approx(change, rel=1e-12), (part, method)
        span = 6 * (w2 * q2 - w * q)
        assert result.frame["score"].item() == pytest.approx(change / span, rel=1e-12)
        assert (result.method, result.part) == (method, part)


@pytest.mark.parametrize("params", [True, False])
def test_cost_in_forwards(params):
    """A backward pass without weight gradients costs one forward pass: 3 in all, 2 per step."""
    model, (clean, corrupted) = model_of("gelu", "in place"), prompts()
    model.requires_grad_(params)

    def flops(run):
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    def attribute(**settings):
        return flops(lambda: estimate(model, clean, corrupted, METRIC, progress=False, **settings))

    with torch.no_grad():
        forward = flops(lambda: model(clean))
    one = attribute(method="gradient")
    # The backward pass starts at the logits and ends below the first block's heads.
    assert 2.8 * forward < one <= 3.2 * forward
    # Control: weight gradients would add the cost of one more forward pass.
    model.requires_grad_(True)
    with_weights = flops(lambda: model(clean)[0, -1, 3].backward())
    model.zero_grad()
    assert with_weights > 2.7 * forward
    steps = [attribute(method="integrated", steps=k) for k in (1, 3)]
    assert steps[1] - steps[0] == pytest.approx(2 * 2 * forward, rel=0.1)


def state_of(model):
    points = [m for m in model.modules() if hasattr(m, "_forward_hooks")]
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in points
    ]
    wants = [(q.requires_grad, q.grad is None, q._version) for q in model.parameters()]
    return hooks, wants, torch.is_grad_enabled()


def raises(logits):
    raise ZeroDivisionError


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_is_left_as_it_was(layout):
    model, (clean, corrupted) = model_of("llama", layout), prompts()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    before = state_of(model)
    for method in ("gradient", "exact_gate", "integrated", "secant"):
        with torch.no_grad():
            within = estimate(model, clean, corrupted, METRIC, method=method, progress=False).frame
        result = estimate(model, clean, corrupted, METRIC, method=method, progress=False)
        assert result.frame.equals(within)
        assert state_of(model) == before

        calls = []

        def fails(logits, calls=calls):
            calls.append(logits)
            if logits.requires_grad and len(calls) > 5:
                raises(logits)
            return logits[:, -1, 3].mean()

        with pytest.raises(ZeroDivisionError):
            estimate(
                model, clean, corrupted, p.custom(fails, name="fails"), method=method,
                progress=False,
            )  # fmt: skip
        assert state_of(model) == before


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"part": "w"}, "got part='w'"),
        ({"direction": "up"}, "got direction='up'; expected one of denoise, noise"),
        ({"direction": "zero", "part": "q"}, "expected part='z'"),
        ({"direction": "zero", "method": "integrated"}, "interpolates between the clean"),
        ({"method": "atp"}, "got method='atp'; expected one of gradient, exact_gate"),
        ({"part": "q", "method": "secant"}, "expected part='z'"),
        ({"split": True}, "got split=True with method='exact_gate'"),
        ({"steps": 3}, "expected steps=None"),
        ({"steps": 0, "method": "integrated"}, "got steps=0"),
        ({"steps": True, "method": "integrated"}, "got steps=True"),
        ({"sites": "L0N99"}, "neurons 0 to 36"),
        ({"positions": 9}, "got 9"),
    ],
)
def test_refusals(settings, reason):
    model, (clean, corrupted) = model_of("gelu", "in place"), prompts()
    with pytest.raises(InputError, match=reason):
        estimate(model, clean, corrupted, METRIC, **settings)


def test_more_refusals():
    model, (clean, corrupted) = model_of("gelu", "in place"), prompts()
    with pytest.raises(InputError, match="identical prompts"):
        estimate(model, clean, clean, METRIC)
    with pytest.raises(InputError, match="constant"):
        estimate(model, clean, corrupted, p.custom(lambda x: 0 * x.sum(), name="nought"))
    with pytest.raises(InputError, match="detached"):
        estimate(
            model, clean, corrupted, p.custom(lambda x: x.detach()[:, -1, 3].mean(), name="off")
        )
    with (
        model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x)]),
        pytest.raises(InputError, match="hooks are attached"),
    ):
        estimate(model, clean, corrupted, METRIC)


def custom_kl(logits):
    """Return the KL divergence from a float64 model's clean run, as a user may write it."""
    clean = custom_kl.clean[:, -1].log_softmax(-1)
    return (clean.exp() * (clean - logits[:, -1].log_softmax(-1))).sum(-1).mean()


@pytest.mark.parametrize("metric", ["kl", "own kl", "clamped"])
@pytest.mark.parametrize("method", ["gradient", "exact_gate"])
def test_a_metric_that_is_flat_where_it_is_patched_into(metric, method):
    """Refuse a metric with a zero gradient on the patched run: all its estimates would be zero."""
    model, (clean, corrupted) = model_of("gelu", "in place"), prompts()
    with torch.no_grad():
        custom_kl.clean, corrupted_logits = model(clean), model(corrupted)
    difference = (custom_kl.clean - corrupted_logits)[0, -1]
    token = int(difference.argmax())
    top = float(custom_kl.clean[0, -1, token] - difference[token] / 7)  # below the clean logit
    metrics = {
        "kl": p.kl(),
        "own kl": p.custom(custom_kl),
        "clamped": p.custom(lambda logits: logits[0, -1, token].clamp(max=top), name="clamped"),
    }
    how = {"method": method, "progress": False}
    with pytest.raises(InputError, match="gradient is zero on the run that is patched"):
        estimate(model, clean, corrupted, metrics[metric], direction="noise", **how)
    # Controls: the gradient is not zero in the other direction, nor on the path between the runs.
    result = estimate(model, clean, corrupted, metrics[metric], **how)
    assert result.effect.abs().max() > 1e-3
    how["method"] = "integrated"
    result = estimate(model, clean, corrupted, metrics[metric], direction="noise", **how)
    assert result.effect.abs().max() > 1e-3
