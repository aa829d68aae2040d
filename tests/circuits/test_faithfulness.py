"""Tests of faithfulness: ablations against plain hooks, areas by hand, and sufficient circuits."""

from dataclasses import replace
from functools import partial

import bridges
import numpy as np
import patched_runs as oracle
import pytest
import torch
from common import tokens

from attn_only_lens import Contrast
from attn_only_lens import patching as p
from attn_only_lens.circuits import Search, attribution_graph, discover, evaluate, faithfulness
from attn_only_lens.circuits._faithfulness import SHARES
from attn_only_lens.circuits.ablated_model import AblatedModel
from attn_only_lens.circuits.search import SearchRun
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName

pytestmark = pytest.mark.numeric

POS = 5
METRIC = p.logit_diff(correct=7, wrong=11)
difference = partial(oracle.difference, wrong=11)
NAMES = ["L0H1", "L0N3", "L0N29", "L1H0", "L1N7", "L1N11", "L1H1"]
ROUNDING = 1e-9


@pytest.fixture(scope="module")
def model():
    return bridges.exposed_copy(bridges.boot("gpt2"))


def prompts(batch=2, seed=0):
    clean = tokens(seed, batch=batch, pos=POS)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 7) % 41
    return clean, corrupted


def contrast_of(metric=METRIC, **how):
    return Contrast(*prompts(**how), metric)


def ablated_model(model, contrast, ranking, ablation="resample"):
    pair = contrast.pair(model)
    return AblatedModel(model, pair, contrast.metric, ranking.frame, ablation=ablation)


@torch.no_grad()
def metric_of(model, prompt, gone, ablation, other_prompt, value=difference):
    """Return the metric with shares of sites ablated by plain hooks, one per site.

    `gone` has rows (name, position), or maps them to the share that is ablated.
    """
    hooks, replacements = [], {}
    shares = gone if isinstance(gone, dict) else dict.fromkeys(map(tuple, gone), 1.0)
    for (name, position), share in shares.items():
        head = HeadName.parse(name)
        hook_name = head.hook("z", model)
        if hook_name not in replacements:
            source = other_prompt if ablation == "resample" else prompt
            replacements[hook_name] = oracle.seen(model, source, hook_name)
        seen = replacements[hook_name]
        put = {
            "zero": torch.zeros_like,
            "mean": lambda z: z.mean(dim=(0, 1), keepdim=True).expand_as(z),
            "positional_mean": lambda z: z.mean(dim=0, keepdim=True).expand_as(z),
            "resample": lambda z: z,
        }[ablation](seen)
        places = slice(None) if position == "all" else position

        def hook(z, hook, put=put, index=head.index, places=places, share=share):
            z = z.clone()
            z[:, places, index] += share * (put[:, places, index] - z[:, places, index])
            return z

        hooks.append((hook_name, hook))
    return value(model.run_with_hooks(prompt, fwd_hooks=hooks))


def ranked(ranking):
    """Return the sites of a ranking by the size of their effect, the largest first."""
    rows = ranking.frame.assign(size=ranking.effect.abs())
    rows = rows.sort_values("size", ascending=False, kind="stable")
    return list(zip(rows["name"], rows["position"], strict=True))


@pytest.mark.parametrize(
    ("ablation", "positions"),
    [*((x, "each") for x in ("zero", "positional_mean", "resample")), ("mean", "all")],
)
def test_the_curve_is_what_plain_hooks_make_of_it(model, ablation, positions):
    contrast = contrast_of()
    ranking = p.attribution(model, contrast, sites=p.Sites(NAMES, positions))
    how = {"ablation": ablation, "shares": (0.0, 0.3, 0.6, 1.0), "n_random": 0}
    result, sites = faithfulness(model, contrast, ranking, **how), ranked(ranking)

    def value(gone):
        return metric_of(model, contrast.clean, gone, ablation, contrast.corrupted)

    whole, nothing = value([]), value(sites)
    assert abs(whole - nothing) > 1e-3
    assert (result.whole, result.nothing) == pytest.approx((whole, nothing), abs=ROUNDING)
    for row in result.frame.itertuples():
        size = int(row.share * len(sites))
        assert row.n_sites == size
        for got, gone in ((row.faithfulness, sites[size:]), (row.completeness, sites[:size])):
            expected = (value(gone) - nothing) / (whole - nothing)
            assert got == pytest.approx(expected, abs=1e-8)  # the denominator is at least 1e-3
    assert result.frame["faithfulness"].iloc[[0, -1]].tolist() == pytest.approx([0, 1])
    assert result.frame["completeness"].iloc[[0, -1]].tolist() == pytest.approx([1, 0])


def test_cpr_and_cmd_of_a_curve_worked_out_by_hand(model, monkeypatch):
    """Use MIB's shares, where 0.5 to 1 is half of the range; f(C) is made up and exceeds 1 at 0.5.

    f equals the share k for k up to 0.2, 1.5 at k = 0.5, and 1 at k = 1. The trapezoids are:

        CPR  .001 to .2, on the line f = k: (.2² - .001²) / 2 = .0199995
             .3 (.2 + 1.5) / 2 = .255, .5 (1.5 + 1) / 2 = .625         .8999995
        CMD  1 - k up to .2: .199 - .0199995 = .1790005
             |1 - f| is .8 and then .5: .3 (.8 + .5) / 2 = .195, .5 (.5 + 0) / 2 = .125   .4990005
    """
    contrast = Contrast(tokens(0), tokens(1), METRIC)
    ranking = p.attribution(model, contrast, sites="neurons")
    n = len(ranking.frame)
    curve = {int(share * n): share for share in SHARES} | {int(0.5 * n): 1.5, n: 1.0}

    def made_up(self, circuits):
        return np.array([curve.get(len(circuit), float("nan")) for circuit in circuits])

    monkeypatch.setattr("attn_only_lens.circuits.ablated_model.AblatedModel.faithfulness", made_up)
    result = faithfulness(model, contrast, ranking, n_random=2)
    assert result.frame["n_sites"].tolist() == [int(share * n) for share in SHARES]
    assert result.cpr == pytest.approx(0.8999995, abs=1e-12)
    assert result.cmd == result.random_cmd == pytest.approx(0.4990005, abs=1e-12)


def test_signed_order_puts_what_helps_first(model):
    """The first site lowers faithfulness most, even if whole minus nothing is negative."""
    signs = set()
    for wrong in range(6):
        contrast = contrast_of(p.logit_diff(7, wrong), batch=1)
        how = {"direction": "zero", "sites": ["L0H1", "L1H0", "L1N3"]}
        ranking = p.activation_patch(model, replace(contrast, corrupted=None), **how)
        ablated = ablated_model(model, contrast, ranking, "zero")
        every = np.arange(len(ranking.frame))
        without = ablated.faithfulness([np.delete(every, site) for site in every])
        first = ablated.ranked(ranking, "signed")[0]
        assert without[first] == pytest.approx(without.min(), abs=1e-9)
        signs.add(np.sign((ablated.whole - ablated.nothing) * ranking.clean_value))
    assert signs == {-1.0, 1.0}


def test_the_circuit_found_suffices_and_each_of_its_sites_is_needed(model):
    contrast, (clean, corrupted) = contrast_of(), prompts()
    names = ["L0H0", "L0H1", "L1H0", "L1H1"]
    names += [f"L{layer}N{neuron}" for layer in (0, 1) for neuron in range(5)]
    circuit = discover(model, contrast, sites=names, method="patching", faithfulness=0.8)
    assert 1 < len(circuit) < circuit.n_sites == 14 * POS
    # Control: random circuits of the same size are not faithful enough.
    assert all(abs(1 - f) > 0.2 for f in circuit.random)
    every = [(name, pos) for name in names for pos in range(POS)]
    kept = list(zip(circuit.frame["name"], circuit.frame["position"], strict=True))
    rest = [site for site in every if site not in kept]

    def share(clean, corrupted, left):
        whole, value, nothing = (
            metric_of(model, clean, gone, "resample", corrupted)
            for gone in ([], [site for site in every if site not in left], every)
        )
        return (value - nothing) / (whole - nothing)

    def error(left):
        values = [
            [
                metric_of(model, x, gone, "resample", y)
                for x, y in zip(clean.split(1), corrupted.split(1), strict=True)
            ]
            for gone in ([], [site for site in every if site not in left], every)
        ]
        whole, kept_of_it, nothing = map(np.array, values)
        return abs(kept_of_it - whole).sum() / abs(whole - nothing).sum()

    assert error(kept) <= 0.2
    for site in kept:
        assert error([name for name in kept if name != site]) > 0.2
    # Also on other prompts.
    others = clean.flip(0) + 1, corrupted.flip(0) + 1
    result = evaluate(model, circuit, Contrast(*others, METRIC))
    for measured, pair in ((circuit, (clean, corrupted)), (result, others)):
        assert measured.faithfulness == pytest.approx(share(*pair, kept), abs=1e-8)
        assert measured.completeness == pytest.approx(share(*pair, rest), abs=1e-8)
    pairs = list(zip(*(side.split(1) for side in others), strict=True))
    wins = [
        np.mean([metric_of(model, x, gone, "resample", y) > 0 for x, y in pairs])
        for gone in (rest, [], every)
    ]
    assert [result.accuracy, result.whole_accuracy, result.nothing_accuracy] == wins


def test_a_circuit_of_several_prompts_is_found_among_prefixes_that_overshoot():
    """By hand: the metric of a prompt is the sum of the sites' effects; all sites add 1 to both.

    20 sites add .05 to both, of which 16 suffice for .79. They are ranked after 101 sites that add
    .2 to the first prompt only. As many with -.2 come last, so only nearly all sites suffice.
    """
    only_first, both, tail = 101, 20, 1797
    effects = np.zeros((only_first * 2 + both + tail, 2))
    effects[:only_first, 0], effects[-only_first:, 0] = 0.2, -0.2
    effects[only_first : only_first + both] = 0.05

    class Ablated:
        n_sites, largest, tried = len(effects), 0, []

        def faithfulness_and_error(self, circuits):
            self.largest = max([self.largest, *map(len, circuits)])
            self.tried += [frozenset(circuit.tolist()) for circuit in circuits]
            sums = [effects[circuit].sum(axis=0) for circuit in circuits]
            values = np.array(sums).reshape(-1, 2)
            return values.mean(axis=1), abs(values - 1).mean(axis=1)

        def worth(self, circuit):
            falls_short = np.sign(1 - effects[circuit].sum(axis=0).round(9))
            return effects @ falls_short / 2

    ablated, orders = Ablated(), {"magnitude": np.arange(len(effects))}
    search = SearchRun(ablated, 0.79)
    nowhere = np.array([], dtype=np.int64)
    circuit = search.smallest(orders, nowhere, prune=True, rank_again=True)
    assert len(circuit) <= 16
    assert abs(effects[circuit].sum(axis=0) - 1).mean() <= 0.21
    assert ablated.largest <= 512
    assert len(set(ablated.tried)) == len(ablated.tried) == len(search.tried)
    without = search.prefixes(orders)[0]  # control
    assert len(without) > len(effects) - only_first


def test_slopes_are_those_of_plain_hooks(model):
    """Compare with differences of a loss in which every prompt has its own weight.

    Each site is moved by a small share of its ablation.
    """
    right, wrong = [3, 5, 7], [4, 6, 11]
    contrast, (clean, corrupted) = contrast_of(p.logit_diff(right, wrong), batch=3), prompts(3)
    ranking = p.attribution(model, contrast, sites=NAMES)
    ablated = ablated_model(model, contrast, ranking)
    sites = list(zip(ranking.frame["name"], ranking.frame["position"], strict=True))
    kept, weights = np.array([0, 3, 7, 11, 19, 23, 31]), torch.tensor([0.5, -2.0, 1.5])

    def loss(values):
        return (weights.to(values) * values**2).sum()

    def by_hand(row=None, step=0.0):
        gone = {site: float(i not in kept) for i, site in enumerate(sites)}
        if row is not None:
            gone[sites[row]] += step
        logits = metric_of(model, clean, gone, "resample", corrupted, lambda x: x)
        rows = torch.arange(3)
        return float(loss(logits[rows, -1, right] - logits[rows, -1, wrong]))

    value, slopes = ablated.slopes(kept, loss)
    assert float(value) == pytest.approx(by_hand(), rel=1e-9)
    assert (slopes != 0).sum() > 15
    step, largest = 1e-4, abs(slopes).max()
    for row in np.argsort(-abs(slopes))[:9]:
        slope = (by_hand(row, -step) - by_hand(row, step)) / (2 * step)
        assert slopes[row] == pytest.approx(slope, abs=1e-5 * largest)


def test_nothing_less_than_everything_is_faithful_to_the_bit(model):
    circuit = discover(
        model, contrast_of(), faithfulness=1.0, sites=p.Sites(["L0N3", "L1H0"], "all")
    )
    assert len(circuit) == circuit.n_sites == 2
    # Sites at all positions allow prompts of any length.
    longer = Contrast(tokens(3, 2, POS + 2), tokens(5, 2, POS + 2), METRIC)
    assert evaluate(model, circuit, longer).faithfulness == pytest.approx(1)


@pytest.mark.parametrize(
    ("ranked", "match"),
    [
        # No later head reads this neuron at position 0.
        ({"sites": p.Sites(["L1N3"], [0])}, "for which the values differ"),
        ({"sites": p.Sites(["L1N3"], "end")}, "but the contrast has no roles"),
        ({"sites": ["L1N3"], "per_prompt": True}, "one row per prompt"),
    ],
)
def test_rankings_that_make_no_sense_are_refused(model, ranked, match):
    contrast = contrast_of()
    ranking = p.attribution(model, replace(contrast, roles={"end": -1}), **ranked)
    with pytest.raises(InputError, match=match):
        faithfulness(model, contrast, ranking)


def test_shares_that_fall_are_refused(model):
    ranking = p.attribution(model, contrast_of(), sites=["L0N3"])
    with pytest.raises(InputError, match=r"shares \[0\.5, 0\.1\]"):
        faithfulness(model, contrast_of(), ranking, shares=[0.5, 0.1])


def test_a_circuit_at_columns_has_prompts_with_the_same_columns(model):
    """With padding on the left, columns move; padding on the right changes nothing."""
    padding = torch.zeros(2, 2, dtype=torch.long)

    def padded(first, last):
        sides = [torch.cat([padding[:, :first], x, padding[:, :last]], 1) for x in prompts()]
        mask = torch.ones_like(sides[0])
        mask[:, :first] = mask[:, POS + first :] = 0
        return Contrast(*sides, METRIC, mask=mask)

    moved = discover(model, padded(2, 0), sites=["L0N3", "L1H0"], search=Search(n_random=0))
    assert (moved.n_pos, moved.start) == (POS, 2)
    expected = evaluate(model, moved, padded(2, 0))
    assert expected.faithfulness == pytest.approx(moved.faithfulness, abs=1e-9)
    assert attribution_graph(model, padded(2, 0), sites=moved).circuit is moved
    found = discover(model, contrast_of(), sites=["L0N3", "L1H0"], search=Search(n_random=0))
    again = evaluate(model, found, padded(0, 2))
    assert again.faithfulness == pytest.approx(found.faithfulness, abs=1e-9)
    for measure in (
        lambda contrast: evaluate(model, moved, contrast),
        lambda contrast: attribution_graph(model, contrast, sites=moved),
    ):
        with pytest.raises(InputError, match="first token has position 1; expected position 2"):
            measure(padded(1, 1))


def test_prompts_of_another_length_and_single_runs_are_refused(model):
    contrast = contrast_of()
    longer = Contrast(tokens(0, 2, POS + 2), tokens(1, 2, POS + 2), METRIC)
    there = p.attribution(model, longer, sites=["L0N3"])
    with pytest.raises(InputError, match=f"at position {POS + 1}; the prompts have {POS} tokens"):
        faithfulness(model, contrast, there)
    circuit = discover(model, contrast, sites=["L0N3", "L1H0"], search=Search(n_random=0))
    with pytest.raises(InputError, match=f"prompts of {POS + 2} tokens; expected {POS}"):
        evaluate(model, circuit, longer)
    with pytest.raises(InputError, match="a contrast without corrupted prompts"):
        evaluate(model, circuit, replace(contrast, corrupted=None))
