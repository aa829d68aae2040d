"""Tests that secant multipliers add up to the metric's change between runs, for every model."""

from dataclasses import replace
from functools import cache

import bridges
import pandas as pd
import pytest
import split_oracle
import torch
from common import changed, tokens

from attn_only_lens import Bilinear, Contrast, circuits, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine import linear_rules, secants
from attn_only_lens.engine.gradients import Tape
from attn_only_lens.engine.linear_map import of_difference
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.multipliers import run_both, secant_multipliers
from attn_only_lens.errors import InputWarning, UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # raised by TransformerLens
]

METRICS = {
    "logit_diff": p.logit_diff(3, 7),
    "probability": p.probability(3),
    "log_probability": p.log_probability(3),
    "probability_diff": p.probability_diff([[3, 5]], [[7, 9]]),
    "kl": p.kl(),
    "loss": p.loss(),
}
EXACT = 1e-12
SECANT, SPLIT = p.Estimate("secant", budget=0), p.Estimate("secant", budget=0, split=True)
FAMILIES = ["gpt2", "gpt_neo", "neox", "llama", "granite", "gemma2", "olmo2", "bert", "native"]
if HAS_HOOKED_TRANSFORMER:  # bridges run with 4
    FAMILIES = ["converted parallel", "exposed post_norm", "bilinear relu"]
LAYOUTS = {
    "exposed": lambda model: expose_neuron_heads(model).model,
    "converted": convert,
    "bilinear": lambda model: convert(model, gate=Bilinear()),
}


def model_of(family):
    if " " not in family:
        return bridges.exposed_copy(bridges.boot(family))
    from models import build  # a module-level import would skip the module under 4

    layout, name = family.split()
    return LAYOUTS[layout](build(name))


made = cache(model_of)  # for tests that leave the model as it is


def contrast_of(metric="logit_diff", **sizes):
    """Return prompts that differ at two tokens, after equal first tokens."""
    clean = tokens(**sizes)
    return Contrast(clean, changed(clean, [2, -1], by=5), METRICS.get(metric, metric))


def pair_of(model):
    return contrast_of().pair(model)


def tape_of(model):
    host = host_of(model)
    kinds = ("attention", "neuron")
    return Tape(host.hook_name(i, kind, "z") for i in range(host.n_layers) for kind in kinds)


def difference(model, metric, **options):
    """Return the multipliers, and the metric's change computed from the model's own logits."""
    pair = pair_of(model)
    runs = run_both(model, pair)
    clean, corrupted = runs.logits.chunk(2)
    bound = bind(metric, model, pair, clean)
    change = bound.of(clean) - bound.of(corrupted)
    return secant_multipliers(model, runs, bound, tape_of(model), **options), change


def size_of(terms):
    return float(terms.abs().sum())


def require_sum(terms, change, bound, name):
    # The terms cancel, most of all if the loss hardly changes.
    assert abs(float(terms.double().sum()) - change) <= bound * max(size_of(terms), 1.0), name


@pytest.mark.both_versions
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_streams_add_up_to_the_change(family):
    model = made(family)
    pair = pair_of(model)
    runs = run_both(model, pair)
    with torch.no_grad():
        both = torch.cat([model(pair.clean), model(pair.corrupted)])
    # Some modules of transformers compute in float32 in any dtype, but not in these runs.
    assert torch.allclose(runs.logits, both, rtol=0, atol=2e-5 * both.abs().max())
    end = "hook_resid_pre", "hook_resid_mid", "hook_resid_post"
    names = [name for name in model.hook_dict if name.endswith(end)]
    if family == "converted parallel":  # its neurons read the stream before the attention block
        names = [name for name in names if (name.split(".")[1] in "135") != ("pre" in name)]
    assert len(names) >= model.cfg.n_layers
    tape = Tape([*tape_of(model).names, *names])
    clean, corrupted = runs.logits.chunk(2)
    bound = bind(METRICS["logit_diff"], model, pair, clean)
    result = secant_multipliers(model, runs, bound, tape)
    change = bound.of(clean) - bound.of(corrupted)
    clean, corrupted = runs.stream.chunk(2)
    require_sum(result.stream * (clean - corrupted), change, EXACT, "tokens")
    clean, corrupted = (
        model.run_with_cache(x, return_cache_object=False, names_filter=names)[1]
        for x in (pair.clean, pair.corrupted)
    )
    for name in names:
        change = clean[name] - corrupted[name]
        tolerance = EXACT if " " in family else 1e-6
        require_sum(result.gradients[name] * change, result.total, tolerance, name)


@pytest.mark.parametrize("metric", METRICS)
def test_tokens_add_up_to_the_change_of_every_metric(metric):
    result, change = difference(made("llama"), METRICS[metric])
    clean, corrupted = result.runs.stream.chunk(2)
    require_sum(result.stream * (clean - corrupted), change, EXACT, metric)


@pytest.mark.parametrize(
    ("family", "kinds"), [("neox", ("neuron", "attention")), ("gpt2", ("neuron",))]
)
def test_the_parts_of_patterns_and_values_are_those_by_hand(family, kinds):
    """Of heads that write directly to the last stream; in NeoX, attention heads do so too."""
    model, contrast = made(family), contrast_of(pos=7)
    prompts = model, contrast.clean, contrast.corrupted
    # The oracle's own sum holds.
    _, total = split_oracle.multiplier(*prompts, (3, 7))
    sweep = p.attribution(model, contrast, sites=p.Sites(positions=-1), method=SPLIT)
    span = sweep.clean_value - sweep.corrupted_value
    assert total == pytest.approx(span, rel=1e-6)  # NeoX rotates queries and keys in float32
    frame = sweep.to_frame().set_index("name")[["by_pattern", "by_value"]] * span
    for kind in kinds:
        *expected, one_sided = split_oracle.parts(*prompts, kind, (3, 7))
        names = [f"L1{'H' if kind == 'attention' else 'N'}{i}" for i in range(len(one_sided))]
        for column, part in zip(("by_pattern", "by_value"), expected, strict=True):
            assert abs(frame.loc[names, column] - part).max() < 1e-5 * abs(part).max()
        # Control: v of one run in the place of the mean gives other numbers.
        assert abs(one_sided - expected[0]).max() > 1e-2 * abs(expected[0]).max()


def test_exchanging_the_runs_changes_only_the_sign():
    """Before the first token that differs, there is nothing."""
    model, contrast, attributions = made("llama"), contrast_of(), []
    for one in (contrast, replace(contrast, clean=contrast.corrupted, corrupted=contrast.clean)):
        run = of_difference(model, one.pair(model), one.metric)
        attributions.append([run.attributions(i) for i in range(len(run.sublayers))])
    for first, second in zip(*attributions, strict=True):
        bound = EXACT * max(1.0, float(first.abs().max()))
        assert torch.allclose(first, -second, rtol=0, atol=bound)
        assert float(first[:, :2].abs().max()) <= EXACT


@pytest.mark.parametrize("rule", ["norm_change", "softmax_change", "slope"])
def test_a_broken_rule_is_noticed(rule, monkeypatch):
    """Control: if one rule uses a single run's derivative, the sums do not hold."""
    wrong = {
        "norm_change": lambda x, r_1, r_0, change: (r_1 + r_0) / 2 * change,
        "softmax_change": lambda L, w, change: L * (change - change.mean(-1, keepdim=True)),
        "slope": lambda y_1, y_0, x_1, x_0, derivative: derivative(x_0),
    }[rule]
    model = model_of("llama")
    for module in (secants, linear_rules):
        monkeypatch.setattr(module, rule, wrong, raising=False)
    with pytest.raises(UnsupportedModelError, match="contributions do not add up"):
        difference(model, METRICS["logit_diff"])


def test_a_metric_without_a_rule_has_a_remainder():
    model = model_of("gpt2")
    metric = p.custom(lambda logits: logits[:, -1, 3].sinh().mean())
    result, change = difference(model, metric)
    clean, corrupted = result.runs.stream.chunk(2)
    terms = result.stream * (clean - corrupted)
    assert abs(float(terms.sum()) - result.total) <= EXACT * max(size_of(terms), 1.0)
    assert abs(result.total - change) > 1e-9 * abs(change)
    assert result.total + result.remainder == pytest.approx(change)
    with pytest.warns(InputWarning, match="no exact secant rule"):
        p.attribution(model, contrast_of(metric), method=SECANT)


@pytest.mark.both_versions
@pytest.mark.filterwarnings("ignore")  # raised by TransformerLens
@pytest.mark.parametrize(
    ("family", "option"), [("llama", "use_split_qkv_input"), ("gpt2", "use_attn_in")]
)
def test_heads_with_inputs_of_their_own(family, option):
    """These options only add hook points, for edge attribution patching."""
    model, one = model_of(family), contrast_of(batch=1)
    runs = (
        lambda: p.attribution(model, one, method="secant").frame,
        lambda: p.activation_patch(model, one, part="q").frame,
        lambda: p.path_patch(model, one, p.Edges(["L0H1", "L0N3"], ["L1H0", "L1N5"])).frame,
        lambda: circuits.attribution_graph(model, one, top=7).edges,
    )
    expected = [run() for run in runs]
    getattr(model, f"set_{option}")(True)
    for run, frame in zip(runs, expected, strict=True):
        pd.testing.assert_frame_equal(run(), frame, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("distance", [1e-6, 1e-5, 1e-3])
def test_nearly_equal_inputs_in_float32_have_the_slope_between_them(distance):
    """In float32, the quotient of tanh loses digits. The oracle is the derivative, in float64."""
    middle = torch.linspace(-2.0, 2.0, 101)
    x_1, x_0 = middle + distance / 2, middle - distance / 2
    expected = 1 - torch.tanh(middle.double()) ** 2

    def error(slope):
        return (slope.double() - expected).abs().max().item()

    runs = x_1.tanh(), x_0.tanh(), x_1, x_0
    assert error(secants.slope(*runs, lambda x: 1 - x.tanh() ** 2)) < 1e-6 + distance**2
    quotient = (runs[0] - runs[1]) / (x_1 - x_0)  # the control
    assert distance > 1e-5 or error(quotient) > 1e-3
