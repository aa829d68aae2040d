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

from attn_only_lens import Contrast, HeadName, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
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
    again = p.Sweep.load(tmp_path / "sweep.csv")
    assert (again.unknown, repr(again)) == (sweep.unknown, repr(sweep))
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


def keys_by_hand(model, layer):
    """Return Σ_t a² ‖g‖ / ‖x‖ of z of a bridge layer's heads and neurons, with plain hooks."""
    block, kept = f"blocks.{layer}", {}
    points = {"x": f"{block}.hook_resid_post", "out": f"{block}.hook_attn_out"}
    points |= {"pre": f"{block}.hook_resid_pre", "z": f"{block}.attn.hook_z"}
    points |= {"post": f"{block}.mlp.hook_neuron_act"}
    names = {model.hook_dict[name].name: key for key, name in points.items()}

    def keep(value, hook):
        value = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
        kept[names[hook.name]] = value
        return value

    with model.hooks(fwd_hooks=[(name, keep) for name in points.values()]):
        model(CLEAN)
        clean = {key: value.detach() for key, value in kept.items()}
        logits = model(CORRUPTED)
        difference = logits[0, -1, 7] - logits[0, -1, 11]
        g_post, g_mid = torch.autograd.grad(difference, [kept["x"], kept["out"]])
    dirty = {key: value.detach() for key, value in kept.items()}
    middle = dirty["pre"] + dirty["out"]
    of_neurons = (g_post.norm(dim=-1) / dirty["x"].norm(dim=-1))[0]
    of_heads = (g_mid.norm(dim=-1) / middle.norm(dim=-1))[0]
    W_O, W_out = model.blocks[layer].attn.W_O, model.blocks[layer].mlp.W_out
    expected = {}
    for t in range(5):
        for i in range(37):
            a = (clean["post"] - dirty["post"])[0, t, i, 0] * W_out[i].norm()
            expected[f"L{layer}N{i}", t] = float(a**2 * of_neurons[t])
        for h in range(2):
            a = ((clean["z"] - dirty["z"])[0, t, h] @ W_O[h]).norm()
            expected[f"L{layer}H{h}", t] = float(a**2 * of_heads[t])
    return pd.Series(expected)


def test_the_key_by_plain_hooks(monkeypatch):
    """The key decides which sites are repaired first."""
    seen = {}

    class Looking(repairs.Repairer):
        def __init__(self, runner, groups, keys, *args, **options):
            for group, of_group in zip(groups, keys.split([*map(len, groups)]), strict=True):
                for head, place, key in zip(group.head, group.place, of_group, strict=True):
                    site = group.sites.names[head], group.positions[place].label
                    seen[site] = float(key)
            super().__init__(runner, groups, keys, *args, **options)

    monkeypatch.setattr("attn_only_lens.patching.estimator.Repairer", Looking)
    ask(budget=1)
    expected = keys_by_hand(bridge(), 1)
    assert (pd.Series(seen).reindex(expected.index) - expected).abs().max() < 1e-9 * expected.max()
    assert expected.max() > 10 * expected.median() > 0


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
    with pytest.raises(InputError, match="0 or more forward passes, or 'auto'"):
        ask(budget=-1)
    for sites, positions, words in (
        (["L0N5@9"], "each", "from -5 to 4"),
        (["L0N5@4", "L0N5@-1"], "each", "L0N5@4 more than once"),
        (["L0N5@1"], [1], "names that all include a position"),
        (["L0N5@1", "L0N7"], "end", "positions='end' for L0N7, but other names include numbers"),
        (["L0N5@verb"], "each", "got the role 'verb'; expected a role of the contrast: subject, e"),
    ):
        with pytest.raises(InputError, match=words):
            p.activation_patch(bridge(), PAIR, sites=p.Sites(sites, positions))
    # Position -1 of one head next to all positions of another.
    both = patched(["L0N5@4", "L1H1@-1", "L0N7"])
    assert abs(both["L0N5", 4] - exact()["L0N5", 4]) < 1e-12
    assert abs(both["L1H1", -1] - exact()["L1H1", 4]) < 1e-12
    assert len(both) == 7


def test_one_prompt_alone():
    """The score is the share of the metric that is left without the head, by plain hooks."""
    model = bridge()
    with torch.no_grad():
        logits = model(CLEAN)[0, -1]
    whole = float(logits[7] - logits[11])
    alone = replace(PAIR, corrupted=None)
    how = {"contrast": alone, "direction": "zero", "sites": p.Sites(["L0N5", "L1H1"], "all")}
    sweep = p.activation_patch(model, **how)
    hook = HeadName.parse("L1H1").hook("z", model)

    def without(value, hook):
        value = value.clone()
        value[:, :, 1] = 0
        return value

    with torch.no_grad(), model.hooks(fwd_hooks=[(hook, without)]):
        left = model(CLEAN)[0, -1]
    assert abs(scores(sweep)["L1H1", "all"] - float(left[7] - left[11]) / whole) < 1e-10
    assert (sweep.clean_value, sweep.corrupted_value) == (pytest.approx(whole), 0.0)
    with pytest.raises(InputError, match="no corrupted prompt with direction='denoise'"):
        p.attribution(model, alone)


def test_kept_in_a_file(tmp_path):
    """Files keep the exact rows and the expected correlation, also if there are none."""
    for budget, suffix in ((1e-9, "csv"), (4, "parquet")):
        sweep = ask(budget=budget)
        assert sweep.frame["exact"].any() == (budget > 1)
        sweep.save(tmp_path / f"found.{suffix}")
        again = p.Sweep.load(tmp_path / f"found.{suffix}")
        assert again.frame["exact"].tolist() == sweep.frame["exact"].tolist()
        assert again.expected_pearson == sweep.expected_pearson
        assert (again.forwards, repr(again)) == (sweep.forwards, repr(sweep))
