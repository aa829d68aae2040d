"""Tests that secant multipliers add up to the metric's change between runs, for every model."""

import bridges
import pandas as pd
import pytest
import torch
from common import tokens

from attn_only_lens import Bilinear, circuits, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.circuits.attributed_run import attribute_difference
from attn_only_lens.circuits.linear_graph import LinearGraph, Places, node_frame
from attn_only_lens.engine import contrast as engine
from attn_only_lens.engine import secants
from attn_only_lens.engine.contrast import contrast, metric_multiplier, run_both
from attn_only_lens.engine.gradients import Tape
from attn_only_lens.engine.metrics import bind
from attn_only_lens.errors import InputWarning, UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = [pytest.mark.both_versions, pytest.mark.numeric]

METRICS = {
    "logit_diff": p.logit_diff(3, 7),
    "probability": p.probability(3),
    "log_probability": p.log_probability(3),
    "probability_diff": p.probability_diff([[3, 5]], [[7, 9]]),
    "kl": p.kl(),
    "loss": p.loss(),
}
EXACT = 1e-12
HOOKED = {
    "exposed": lambda model: expose_neuron_heads(model, copy=True).model,
    "converted": convert,
    "bilinear": lambda model: convert(model, gate=Bilinear()),
}
FAMILIES = [f"bridge {name}" for name in bridges.EVERY if name != "vit"]
if HAS_HOOKED_TRANSFORMER:  # bridges run with 4
    import models

    FAMILIES = [f"exposed {name}" for name in models.CORE if name != "no_norm"]
    FAMILIES += [f"converted {name}" for name in ("gelu", "llama", "parallel", "soft_caps")]
    FAMILIES += ["bilinear gelu", "bilinear relu"]


def model_of(family):
    layout, name = family.split(" ")
    if layout == "bridge":
        return bridges.exposed_copy(bridges.boot(name))
    return HOOKED[layout](models.build(name))


def pair_of(model):
    """Return prompts that differ at two tokens, after equal first tokens."""
    clean = tokens()
    corrupted = clean.clone()
    corrupted[:, 2], corrupted[:, -1] = (clean[:, 2] + 5) % 31, (clean[:, -1] + 3) % 31
    return p.prompt_pair(model, clean, corrupted)


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
    return contrast(model, runs, bound, tape_of(model), **options), change


def size_of(terms):
    return float(terms.abs().sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_add_up_to_the_change_of_every_metric(family):
    model = model_of(family)
    for name, metric in METRICS.items():
        result, change = difference(model, metric)
        clean, corrupted = result.runs.stream.chunk(2)
        terms = result.stream * (clean - corrupted)
        # The terms cancel, most of all if the loss hardly changes.
        assert abs(float(terms.sum()) - change) <= EXACT * max(size_of(terms), 1.0), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stream_adds_up_at_every_hook_point(family):
    model = model_of(family)
    pair = pair_of(model)
    runs = run_both(model, pair)
    end = "hook_resid_pre", "hook_resid_mid", "hook_resid_post"
    names = [name for name in model.hook_dict if name.endswith(end)]
    if family == "converted parallel":  # its neurons read the stream before the attention block
        names = [name for name in names if (name.split(".")[1] in "135") != ("pre" in name)]
    assert len(names) >= model.cfg.n_layers
    tape = Tape([*tape_of(model).names, *names])
    metric = bind(METRICS["logit_diff"], model, pair, runs.logits.chunk(2)[0])
    result = contrast(model, runs, metric, tape)
    clean, corrupted = (
        model.run_with_cache(x, return_cache_object=False, names_filter=names)[1]
        for x in (pair.clean, pair.corrupted)
    )
    # Some modules of transformers compute in float32 in any dtype, but not in the contrast.
    bound = 1e-6 if family.startswith("bridge") else EXACT
    for name in names:
        terms = result.gradients[name] * (clean[name] - corrupted[name])
        assert abs(float(terms.sum()) - result.total) <= bound * max(size_of(terms), 1.0), name


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_add_up_in_float32(family):
    model = model_of(family).to(torch.float32)
    model.cfg.dtype = torch.float32
    result, change = difference(model, METRICS["logit_diff"])
    clean, corrupted = result.runs.stream.chunk(2)
    terms = result.stream * (clean - corrupted)
    assert terms.dtype == torch.float32
    # The change is a difference of rounded logits.
    size = size_of(terms) + float(result.runs.logits.abs().max())
    assert abs(float(terms.double().sum()) - change) <= 1e-5 * size


@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_runs_are_the_models_own(family):
    model = model_of(family)
    pair = pair_of(model)
    with torch.no_grad():
        both = torch.cat([model(pair.clean), model(pair.corrupted)])
    # Some modules of transformers compute in float32 in any dtype, but not in these runs.
    assert torch.allclose(run_both(model, pair).logits, both, rtol=0, atol=2e-5 * both.abs().max())


@pytest.mark.parametrize("family", [f for f in FAMILIES if "bert" not in f and "clip" not in f])
def test_flows_into_every_node_add_up_to_its_attribution(family):
    """The graph uses the model's weights, which the backward pass does not, so this checks both."""
    model = model_of(family)
    pair = pair_of(model)
    run = attribute_difference(model, pair, METRICS["logit_diff"])
    chosen = [[(i, j) for i in range(g.shape[1]) for j in range(g.shape[2])] for g in run.gradients]
    edges, _ = LinearGraph(run, pair, chosen).edges()
    places = Places.of(pair)
    attributions = [places.sums(run.attributions(i)) for i in range(len(chosen))]
    nodes = node_frame(run, places, attributions, chosen, 0.0).set_index("id")["attribution"]
    largest = nodes.abs().max()
    inflow = edges.groupby("target")["weight"].sum().reindex(nodes.index).fillna(0.0)
    ends = nodes.index.str.startswith("embed") | nodes.index.isin(["bias", "rest", "offset"])
    assert (inflow - nodes)[~ends].abs().max() <= EXACT * largest
    outflow = edges.groupby("source")["weight"].sum().reindex(nodes.index).fillna(0.0)
    assert (outflow - nodes).drop("metric").abs().max() <= EXACT * largest
    assert not (edges["source"] == "bias").any()
    assert abs(inflow["metric"] - run.value) <= EXACT * largest


@pytest.mark.parametrize("family", ["bridge gpt2", "bridge llama"])
def test_exchanging_the_runs_changes_only_the_sign(family):
    model = model_of(family)
    pair = pair_of(model)
    attributions = []
    for clean, corrupted in ((pair.clean, pair.corrupted), (pair.corrupted, pair.clean)):
        swapped = p.prompt_pair(model, clean, corrupted)
        run = attribute_difference(model, swapped, METRICS["logit_diff"])
        attributions.append([run.attributions(i) for i in range(len(run.gradients))])
    for first, second in zip(*attributions, strict=True):
        assert torch.allclose(
            first, -second, rtol=0, atol=EXACT * max(1.0, float(first.abs().max()))
        )


@pytest.mark.parametrize("family", ["bridge gpt2", "bridge llama", "bridge gemma2"])
def test_before_the_first_token_that_differs_there_is_nothing(family):
    model = model_of(family)
    run = attribute_difference(model, pair_of(model), METRICS["logit_diff"])
    for i in range(len(run.gradients)):
        assert float(run.attributions(i)[:, :2].abs().max()) <= EXACT


@pytest.mark.skipif(not HAS_HOOKED_TRANSFORMER, reason="needs transformer-lens 3.9")
def test_converted_exposed_and_bridged_models_have_the_same_parts():
    """Converted and exposed models split the change in the same way."""
    results = []
    for make in (HOOKED["exposed"], convert):
        model = make(models.build("gelu"))
        run = attribute_difference(model, pair_of(model), METRICS["logit_diff"])
        attributions = [run.attributions(i) for i in range(len(run.gradients))]
        slopes = [x.gradient for s in run.slopes for x in s.values()]
        results.append(attributions + slopes)
    for first, second in zip(*results, strict=True):
        assert torch.allclose(first, second, rtol=0, atol=EXACT)


@pytest.mark.parametrize("family", ["bridge gpt2", "bridge llama"])
@pytest.mark.parametrize("rule", ["norm_change", "softmax_change", "slope"])
def test_a_broken_rule_is_noticed(family, rule, monkeypatch):
    """Control: if one rule uses a single run's derivative, the sums do not hold."""
    wrong = {
        "norm_change": lambda x, r_1, r_0, change: (r_1 + r_0) / 2 * change,
        "softmax_change": lambda L, w, change: L * (change - change.mean(-1, keepdim=True)),
        "slope": lambda y_1, y_0, x_1, x_0, derivative: derivative(x_0),
    }[rule]
    model = model_of(family)
    for module in (secants, engine):
        monkeypatch.setattr(module, rule, wrong, raising=False)
    with pytest.raises(UnsupportedModelError, match="contributions do not add up"):
        difference(model, METRICS["logit_diff"])


def test_a_sum_that_fails_names_the_layer(monkeypatch):
    model = model_of("bridge gpt2")
    right = engine._gate_slopes

    def wrong(alike, queries):
        weights, slopes = right(alike, queries)
        slopes[:, [heads.layer == 1 for heads in alike]] *= 2
        return weights, slopes

    monkeypatch.setattr(engine, "_gate_slopes", wrong)
    place = r"first wrong sum is at layer 1's (?!.*layer [02])"
    with pytest.raises(UnsupportedModelError, match=place):
        difference(model, METRICS["logit_diff"])


def test_a_metric_without_a_rule_has_a_remainder():
    model = model_of("bridge gpt2")
    metric = p.custom(lambda logits: logits[:, -1, 3].sinh().mean())
    result, change = difference(model, metric)
    clean, corrupted = result.runs.stream.chunk(2)
    terms = result.stream * (clean - corrupted)
    assert abs(float(terms.sum()) - result.total) <= EXACT * max(size_of(terms), 1.0)
    assert abs(result.total - change) > 1e-9 * abs(change)
    assert result.total + result.remainder == pytest.approx(change)
    clean, corrupted = tokens(), pair_of(model).corrupted
    how = {"method": "secant", "budget": 0, "progress": False}
    with pytest.warns(InputWarning, match="no exact secant rule"):
        p.attribution(model, clean, corrupted, metric, **how)


def test_half_precision_is_computed_in_float32_and_its_error_is_said():
    model = model_of("bridge gpt2")  # a model without buffers that rounding would change
    for one in model.parameters():
        one.data = one.data.bfloat16().double()
    clean, corrupted = tokens(), pair_of(model).corrupted
    metric, how = METRICS["logit_diff"], {"method": "secant", "budget": 0, "progress": False}
    wide = p.attribution(model, clean, corrupted, metric, **how)
    model.to(torch.bfloat16)
    before = [one.clone() for one in model.parameters()]
    with pytest.warns(InputWarning, match="in the model's precision"):
        sweep = p.attribution(model, clean, corrupted, metric, **how)
    with pytest.warns(InputWarning, match="in the model's precision"):
        graph = circuits.attribution_graph(model, clean, metric, corrupted=corrupted, top=5)
    change = wide.clean_value - wide.corrupted_value
    assert graph.value == pytest.approx(change, rel=1e-4)
    assert (sweep.effect - wide.effect).abs().max() <= 1e-4 * wide.effect.abs().max()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_metric_of_functions_with_rules_has_none():
    model = model_of("bridge gpt2")
    pair = pair_of(model)
    runs = run_both(model, pair)
    clean, corrupted = runs.logits.chunk(2)
    metric = p.custom(lambda logits: (logits[:, -1].softmax(-1)[:, 3] - logits[:, 0, 5]).mean())
    bound = bind(metric, model, pair)
    total = (metric_multiplier(bound, clean, corrupted) * (clean - corrupted)).sum()
    assert abs(float(total) - bound.of(clean) + bound.of(corrupted)) <= EXACT


PADDED = ["bridge gpt2", "bridge llama", "bridge native"]
if HAS_HOOKED_TRANSFORMER:
    PADDED += ["exposed rotary", "converted alibi"]


@pytest.mark.parametrize("family", PADDED)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing(family, side):
    """A batch of two lengths has the same parts as its prompts, each run alone."""
    model, metric = model_of(family), METRICS["logit_diff"]
    clean = tokens(1, batch=2, pos=6)
    mask = torch.ones_like(clean)
    mask[0, slice(4, 6) if side == "right" else slice(0, 2)] = 0
    clean = clean * mask
    corrupted = clean.clone()
    corrupted[:, 3] = (clean[:, 3] + 5) % 31
    how = {"method": "secant", "budget": 0, "split": True, "progress": False}
    columns = ["by_pattern", "by_value"]

    def parts(sweep, first=0):
        frame = sweep.to_frame()
        frame["position"] += first
        span = sweep.clean_value - sweep.corrupted_value
        return frame.set_index(["name", "position"])[columns] * span

    together = parts(p.attribution(model, clean, corrupted, metric, mask=mask, **how))
    alone = 0.0
    for row in range(2):
        kept = mask[row].bool()
        rows = clean[row, kept][None], corrupted[row, kept][None]
        one = parts(p.attribution(model, *rows, metric, **how), int(kept.nonzero()[0]))
        alone = alone + one.reindex(together.index).fillna(0.0) / 2
    assert not together.isna().any(axis=None)
    assert (together - alone).abs().max(axis=None) <= EXACT
    assert (together - alone).abs().max(axis=None) < together.abs().max(axis=None)


def test_gradients_need_not_be_enabled():
    model = model_of("bridge gpt2")
    with torch.no_grad():
        result, change = difference(model, METRICS["logit_diff"])
    assert abs(result.total - change) <= EXACT


def test_nothing_is_left_on_the_model_and_its_weights_have_no_gradients():
    model = model_of("bridge llama")

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    model.run_with_hooks(tokens(), fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: z)])
    before = hooks()  # a bridge attaches some hooks in its first run with hooks
    difference(model, METRICS["logit_diff"])
    with pytest.raises(RuntimeError, match="stop"):
        difference(model, p.custom(lambda logits: exec("raise RuntimeError('stop')")))
    assert hooks() == before
    assert all(parameter.grad is None for parameter in model.parameters())
    x = torch.ones(2, dtype=torch.float64)
    assert x.float().dtype == torch.float32  # no torch mode is left active


NORMS_AFTER = [name for name in ("gemma2", "gemma3", "olmo2") if name in bridges.EVERY]


@pytest.mark.parametrize("name", [*NORMS_AFTER, "gpt2"])
def test_what_a_sublayer_writes_after_its_own_norm_has_the_gradient_of_the_stream(name):
    """The last output, after any norm (Gemma 2), has the same multiplier as the stream."""
    model = bridges.exposed_copy(bridges.boot(name))
    pair = pair_of(model)
    runs = run_both(model, pair)
    bound = bind(METRICS["logit_diff"], model, pair, runs.logits.chunk(2)[0])
    names = ["blocks.1.hook_mlp_out", "blocks.1.hook_resid_post"]
    multipliers = contrast(model, runs, bound, Tape(names)).gradients
    written, after = (multipliers[name] for name in names)
    assert after.abs().max() > 1e-3
    assert (written - after).abs().max() < EXACT * after.abs().max()


@pytest.mark.parametrize("name", NORMS_AFTER)
def test_secants_are_repaired_on_bridges_with_norms_after_sublayers(name):
    model = bridges.exposed_copy(bridges.boot(name))
    prompts = (model, tokens(1), tokens(2), p.logit_diff(3, 7))
    scores = p.attribution(*prompts, method="secant", budget=3, progress=False).frame
    exact = scores[scores["exact"]]
    patched = p.activation_patch(*prompts, positions="each", direction="denoise", progress=False)
    key = ["name", "position"]
    both = exact.merge(patched.frame, on=key, suffixes=("", "_patched"))
    assert 16 < len(both) == len(exact)
    assert (both["value"] - both["value_patched"]).abs().max() < 1e-9


SPLIT = ["bridge gpt2", "bridge llama"]
SPLIT += ["exposed llama", "converted gelu"] if HAS_HOOKED_TRANSFORMER else []


@pytest.mark.filterwarnings("ignore")  # raised by TransformerLens
@pytest.mark.parametrize("option", ["use_split_qkv_input", "use_attn_in"])
@pytest.mark.parametrize("family", SPLIT)
def test_heads_with_inputs_of_their_own(family, option):
    """These options only add hook points, for edge attribution patching."""
    if (family, option) == ("exposed llama", "use_attn_in"):
        pytest.skip("TransformerLens refuses this option for grouped queries")
    model = model_of(family)
    pair, metric = pair_of(model), METRICS["logit_diff"]
    one = pair.clean[:1], pair.corrupted[:1]
    paths = {"senders": ["L0H1", "L0N3"], "receivers": ["L1H0", "L1N5"], "progress": False}
    runs = (
        lambda: p.attribution(model, *one, metric, method="secant", progress=False).frame,
        lambda: p.attribution(model, *one, metric, part="k", progress=False).frame,
        lambda: p.activation_patch(model, *one, metric, part="q", progress=False).frame,
        lambda: p.path_patch(model, *one, metric, **paths).frame,
        lambda: circuits.attribution_graph(model, one[0], metric, corrupted=one[1], top=7).edges,
        lambda: circuits.attribution_graph(model, one[0], metric, top=7).edges,
    )
    expected = [run() for run in runs]
    getattr(model, f"set_{option}")(True)
    for run, frame in zip(runs, expected, strict=True):
        pd.testing.assert_frame_equal(run(), frame, rtol=1e-9, atol=1e-12)
        assert getattr(model.cfg, option)
