"""Tests of attribution with exact repairs against sweeps, and of site names with positions."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from bridges import bridged
from patched_runs import difference, whole_runs

from analyses.tools import brackets
from attn_only_lens import Contrast, expose_neuron_heads, load
from attn_only_lens import patching as p
from attn_only_lens.patching import repairs

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
CLEAN, CORRUPTED = torch.tensor([[3, 5, 7, 11, 13]]), torch.tensor([[3, 17, 7, 11, 13]])
METRIC = p.logit_diff(7, 11)
PAIR = Contrast(CLEAN, CORRUPTED, METRIC, roles={"subject": 1, "end": -1})
SITE = ["name", "position"]


@cache
def bridge():
    """Return a float64 bridge in which one neuron's output is large."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{"vocab_size": 41, "hidden_size": 26, "num_hidden_layers": 3, "intermediate_size": 37},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 14},
        **{"max_position_embeddings": 19, "initializer_range": 0.3},
    )
    source = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        source.model.layers[0].mlp.down_proj.weight[:, 5] *= 40
    return expose_neuron_heads(bridged(source.double().eval())).model


def ask(method="exact_gate", budget="auto", model=None, contrast=PAIR, **how):
    return p.attribution(model or bridge(), contrast, method=p.Estimate(method, budget), **how)


@cache
def exact():
    """Return the score of each site, patched."""
    return scores(p.activation_patch(bridge(), PAIR))


def scores(sweep):
    return sweep.frame.set_index(SITE)["score"].astype(float)


@pytest.mark.usefixtures("working_cache")
def test_some_rows_are_patches_and_the_rest_estimates():
    plain, sweep = scores(ask(budget=0)), ask(budget=3)
    mended, flags = scores(sweep), sweep.frame.set_index(SITE)["exact"]
    assert 0 < flags.mean() < 0.3
    assert (mended - exact())[flags].abs().max() < 1e-10
    assert mended[~flags].equals(plain[~flags])
    # The site with the worst estimate is repaired, and a few sites remove most of the error.
    assert flags[(plain - exact()).abs().idxmax()]
    assert ((mended - exact()) ** 2).sum() < 0.3 * ((plain - exact()) ** 2).sum()


@pytest.mark.parametrize(
    "how",
    [
        {"part": "pattern"},
        {"part": "value", "direction": "noise"},
        {"part": "q", "sites": p.Sites(positions="all")},
        {"part": "k"},
        {"method": "secant", "sites": p.Sites(positions="roles")},
        {"direction": "bias", "sites": "neurons"},
    ],
    ids=lambda how: " ".join(str(value) for value in how.values() if isinstance(value, str)),
)
def test_enough_budget_repairs_every_site(how):
    """All sites that can have an effect are repaired; the others have none."""
    sweep = ask(budget=1e6, **how)
    options = {name: value for name, value in how.items() if name != "method"}
    patched = scores(p.activation_patch(bridge(), PAIR, **options))
    assert (scores(sweep) - patched).abs().max() < 1e-10
    assert set(sweep.expected_pearson.values()) == {1.0}
    assert set(sweep.expected_pearson) == set(sweep.frame["kind"])


def spent_at_least(sweep):
    """Return a lower bound of the patches' cost in forward passes: later layers and tokens."""
    rows = sweep.frame[sweep.frame["exact"]]
    return 0.8 * ((2 - rows["layer"]) / 3 * (5 - rows["position"]) / 5).sum()


@pytest.mark.usefixtures("working_cache")
def test_by_default_all_sites_of_a_small_model_are_patched(monkeypatch):
    """A large model's sites are patched for up to ten forward passes, if three are not enough."""
    sweep = ask()
    assert (scores(sweep) - exact()).abs().max() < 1e-10
    assert sweep.expected_pearson == {"attention": 1.0, "neuron": 1.0}
    assert sweep.forwards > 30

    monkeypatch.setattr(repairs, "_AT_LEAST", (3.0, 0.0))
    monkeypatch.setattr(repairs, "_AT_MOST", (10.0, 0.0))
    monkeypatch.setattr(repairs, "_RAISE", 1.0)
    large = ask()
    assert 2.9 < large.forwards <= 10
    assert spent_at_least(large) < 10


@pytest.mark.usefixtures("working_cache")
def test_the_expected_correlation_is_the_formula_of_the_docs(monkeypatch):
    """√(1 - Σ 4 c key² / Σ (e - mean e)²) with the larger of both sums, from a sweep's rows."""
    monkeypatch.setattr(repairs, "_SWITCH", np.inf)
    monkeypatch.setattr(repairs, "_LOWEST", 0.0)
    keys, compute = [], repairs.repair_keys

    def kept(*args):
        keys.append(compute(*args))
        return keys[-1]

    monkeypatch.setattr(f"{repairs.__package__}.estimator.repair_keys", kept)
    before = ask(budget=0, sites="neurons").frame
    sweep = ask(budget=10, sites="neurons")
    frame = sweep.frame
    assert frame[SITE].equals(before[SITE])
    key = np.maximum(keys[-1].numpy(), keys[-1][keys[-1] > 0].min())
    rows = pd.DataFrame({"key": key, "exact": frame["exact"], "layer": frame["layer"]})
    rows["error"] = frame["score"] - before["score"]
    rows["key2"], rows["error2"] = rows["key"] ** 2, rows["error"] ** 2
    changes = frame["position"] >= (CLEAN != CORRUPTED)[0].nonzero().min().item()
    unseen, seen = rows[~rows["exact"] & changes], rows[rows["exact"]]
    sums = seen.groupby("layer")[["error2", "key2"]].sum()
    of_kind = seen["error2"].sum() / seen["key2"].sum()
    c = (sums["error2"] / sums["key2"]).reindex(range(3), fill_value=of_kind).clip(of_kind / 4)
    by_layer = (unseen["layer"].map(c).astype(float) * unseen["key2"]).sum()
    half = seen.sort_values("key", kind="stable").head(len(seen) // 2)
    by_half = half["error2"].sum() / half["key2"].sum() * unseen["key2"].sum()
    assert by_half > 1.1 * by_layer  # or this would not test the second sum
    spread = ((frame["score"] - frame["score"].mean()) ** 2).sum()
    expected = np.sqrt(1 - 4 * by_half / spread)
    assert sweep.expected_pearson["neuron"] == pytest.approx(expected, abs=1e-6)


@cache
def switching(size):
    """Return a bridge whose neuron L1N5 adds a vector of norm `size` to the clean run at token 1.

    In the corrupted run, its gate is 0, where its slope is steep. The next norm hides how long the
    vector is, so the gradient of the corrupted run overestimates what earlier sites do.
    """
    torch.manual_seed(8)
    config = transformers.LlamaConfig(
        **{"vocab_size": 41, "hidden_size": 26, "num_hidden_layers": 5, "intermediate_size": 37},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 14},
        max_position_embeddings=19,
    )
    source = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    source, seen = source.double().eval(), []
    with torch.no_grad():
        for _, weight in sorted(source.named_parameters()):
            if weight.ndim > 1:
                weight.normal_(std=0.3)
        mlp = source.model.layers[1].mlp
        with mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0][0, 1])):
            for tokens in (CLEAN, CORRUPTED):
                source(tokens)
        inverse = torch.linalg.pinv(torch.stack(seen))
        mlp.gate_proj.weight[5] = inverse @ torch.tensor([8.0, 0.0]).double()
        mlp.up_proj.weight[5] = inverse @ torch.tensor([1.0, 1.0]).double()
        mlp.down_proj.weight[:, 5] *= size / mlp.down_proj.weight[:, 5].norm()
    return expose_neuron_heads(bridged(source)).model


def scores_by_hand(model, rows):
    """Return the score of each row's patch, from whole runs with hooks."""
    measure = partial(difference, correct=7, wrong=11)
    with torch.no_grad():
        clean, corrupted = (measure(model(run)) for run in (CLEAN, CORRUPTED))
    values = np.array(whole_runs(model, PAIR, rows, measure=measure))
    return (values - corrupted) / (clean - corrupted)


def switches_by_hand(model):
    """Return the last layer whose input norm differs by a factor of two, at each position."""
    norms = []
    for tokens in (CLEAN, CORRUPTED):
        _, cache = model.run_with_cache(tokens)
        inputs = [cache[f"blocks.{layer}.hook_resid_pre"] for layer in range(1, 5)]
        norms.append(torch.stack(inputs)[:, 0].norm(dim=-1))
    ratio = (norms[0] / norms[1]).log2().abs() >= 1
    return [
        max((layer + 1 for layer in range(4) if ratio[layer, pos]), default=0) for pos in range(5)
    ]


@pytest.fixture
def as_if_large(monkeypatch):
    """Give small models the default budget of large ones."""
    for name in ("_AT_LEAST", "_AT_MOST"):
        monkeypatch.setattr(repairs, name, (getattr(repairs, name)[0], 0.0))


@pytest.mark.usefixtures("working_cache")
def test_the_top_rows_are_exact_where_runs_differ_by_a_switch(as_if_large, tmp_path):
    model = switching(20.0)
    sweep = ask(model=model)
    assert 7 < sweep.forwards <= 17.5
    top = sweep.top()
    assert top["exact"].all()
    assert abs(top["score"] - scores_by_hand(model, top)).max() < 1e-9
    last = np.array(switches_by_hand(model))
    assert last[1] == 4
    frame = sweep.frame
    before = (frame["layer"] <= last[frame["position"]]) & (last[frame["position"]] > 0)
    n = int((frame["before_switch"] & ~frame["exact"] & (frame["kind"] == "neuron")).sum())
    assert sweep.unknown["neuron"] == f"{n} estimates are of sites before a switch"
    sweep.save(tmp_path / "sweep.csv")
    again = load(tmp_path / "sweep.csv")
    for name in ("unknown", "expected_pearson", "forwards"):
        assert getattr(again, name) == getattr(sweep, name)
    assert again.frame["exact"].equals(sweep.frame["exact"])
    assert repr(again) == repr(sweep)
    # Control: without exact patches, a gradient ranks a row first whose effect has another sign.
    plain = ask(model=model, budget=0)
    assert plain.frame["before_switch"].equals(before.rename("before_switch"))
    # With patches, sites that cannot have an effect are left out.
    left_out = before & ~frame["before_switch"]
    assert (plain.effect[left_out] == 0).all()
    assert not (frame["before_switch"] & ~before).any()
    first = plain.top(1)
    assert not first["exact"].item()
    assert first["score"].item() * scores_by_hand(model, first).item() < 0


@pytest.mark.usefixtures("working_cache")
def test_a_gradient_of_zero_in_the_target_run_repairs_the_largest_estimates():
    """The gradient of `kl` in the clean run is zero, so it predicts no effect."""
    how = {"model": switching(1.0), "contrast": replace(PAIR, metric=p.kl()), "direction": "noise"}
    patched, alone = scores(p.activation_patch(**how)), scores(ask("secant", 0, **how))
    sweep = ask("secant", 20, **how)
    flags, repaired = sweep.frame.set_index(SITE)["exact"], scores(sweep)
    assert 0 < flags.sum() < len(flags)
    assert ((repaired - patched) ** 2).sum() < 0.2 * ((alone - patched) ** 2).sum()


def test_names_that_say_where():
    """Names with positions select rows of a whole sweep; -1 is 4 here, and both are labels."""
    names = ["L0N5@1", "L0N5@-1", "L2H1@3"]
    for run in (p.activation_patch, p.attribution):
        result = scores(run(bridge(), PAIR, sites=names))
        assert set(result.index) == {("L0N5", 1), ("L0N5", -1), ("L2H1", 3)}

    def patched(*sites):
        return scores(p.activation_patch(bridge(), PAIR, sites=p.Sites(*sites)))

    mixed = patched(["L1N3@2", "L1N7"], 3)
    assert sorted(mixed.index) == [("L1N3", 2), ("L1N7", 3)]


# A saturated model


def pearsons(exact, estimated):
    """Return the correlation of the exact and estimated effects among heads of each kind."""
    kinds = exact.frame["kind"].to_numpy()
    return {
        kind: np.corrcoef(exact.effect[kinds == kind], estimated.effect[kinds == kind])[0, 1]
        for kind in ("attention", "neuron")
    }


def test_no_more_is_promised_than_is_reached():
    """The default gives what patches give, in a classifier of brackets with poor gradients."""
    model = expose_neuron_heads(brackets.load()).model
    contrast = Contrast(*next(iter(brackets.pairs(model, seed=3))), brackets.BALANCED)
    lowest = 1.0
    for direction in ("denoise", "noise"):
        how = {"model": model, "contrast": contrast, "direction": direction}
        exact, sweep = p.activation_patch(**how), p.attribution(**how)
        assert min(pearsons(exact, sweep).values()) > 0.999
        assert min(sweep.expected_pearson.values()) > 0.98
        for budget in (0, 1, 3):
            few = p.attribution(**how, method=p.Estimate(budget=budget))
            reached = pearsons(exact, few)
            lowest = min(lowest, *reached.values())
            for kind, expected in few.expected_pearson.items():
                assert expected is None or expected - reached[kind] <= 0.02
    assert lowest < 0.9  # control: estimates without repairs correlate far less
