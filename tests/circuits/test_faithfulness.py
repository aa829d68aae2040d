"""Tests of faithfulness: ablations against plain hooks, areas by hand, and sufficient circuits."""

import numpy as np
import patch_oracle as oracle
import pytest
import torch
from common import tokens
from models import build

from attn_only_lens import Bilinear, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.circuits import SHARES, discover, evaluate, faithfulness
from attn_only_lens.circuits import ablation as ablation_module
from attn_only_lens.circuits._search import _Search, smallest_prefix
from attn_only_lens.circuits.ablation import AblatedModel
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName

POS = 5
METRIC = p.logit_diff(oracle.CORRECT, oracle.WRONG)
ROUNDING = 1e-9
LAYOUTS = ("two blocks a layer", "in place")


def prompts(batch=2):
    clean = tokens(0, batch=batch, pos=POS)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 7) % 41
    return clean, corrupted


def model_of(family, layout=LAYOUTS[0]):
    source = build(family, scale=0.25)
    if layout == "two blocks a layer":
        return convert(source)
    expose_neuron_heads(source)
    return source


@torch.no_grad()
def metric_of(model, prompt, gone, ablation, other_prompt):
    """Return the logit difference with the `gone` sites ablated by plain hooks, one per site."""
    hooks, replacements = [], {}
    for name, position in gone:
        head = HeadName.parse(name)
        hook_name = head.hook("z", model)
        if hook_name not in replacements:
            replacements[hook_name] = oracle.seen(
                model, other_prompt if ablation == "resample" else prompt, hook_name
            )
        seen = replacements[hook_name]
        if ablation == "zero":
            put = torch.zeros_like(seen)
        elif ablation == "mean":
            put = seen.mean(dim=(0, 1), keepdim=True).expand_as(seen)
        elif ablation == "positional_mean":
            put = seen.mean(dim=0, keepdim=True).expand_as(seen)
        else:
            put = seen
        places = range(POS) if position == "all" else [position]

        def hook(z, hook, put=put, index=head.index, places=places):
            for pos in places:
                z[:, pos, index] = put[:, pos, index]
            return z

        hooks.append((hook_name, hook))
    with model.hooks(fwd_hooks=hooks):
        return oracle.difference(model(prompt))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ablation", ["zero", "mean", "positional_mean", "resample"])
@pytest.mark.parametrize("positions", ["each", "all"])
def test_the_curve_is_what_plain_hooks_make_of_it(layout, ablation, positions):
    model, (clean, corrupted) = model_of("gelu", layout), prompts()
    names = ["L0H1", "L0N3", "L0N29", "L1H0", "L1N7", "L2N11", "L2H1"]
    ranking = p.attribution(model, clean, corrupted, METRIC, sites=names, positions=positions)
    shares = (0.0, 0.3, 0.6, 1.0)
    result = faithfulness(
        model, clean, corrupted, METRIC, ranking, ablation=ablation, shares=shares, n_random=0
    )
    rows = ranking.frame.assign(size=ranking.effect.abs())
    rows = rows.sort_values("size", ascending=False, kind="stable")
    sites = list(zip(rows["name"], rows["position"], strict=True))

    def value(gone):
        return metric_of(model, clean, gone, ablation, corrupted)

    whole, nothing = value([]), value(sites)
    assert abs(whole - nothing) > 1e-3
    assert (result.whole, result.nothing) == pytest.approx((whole, nothing), abs=ROUNDING)
    for row in result.frame.itertuples():
        size = int(row.share * len(sites))
        assert row.n_sites == size
        for got, gone in (
            (row.faithfulness, sites[size:]),
            (row.completeness, sites[:size]),
        ):
            expected = (value(gone) - nothing) / (whole - nothing)
            assert got == pytest.approx(expected, abs=1e-8)  # the denominator is at least 1e-3
    assert result.frame["faithfulness"].iloc[[0, -1]].tolist() == pytest.approx([0, 1])
    assert result.frame["completeness"].iloc[[0, -1]].tolist() == pytest.approx([1, 0])


def test_areas_are_those_of_trapezoids():
    model, (clean, corrupted) = model_of("gelu"), prompts()
    ranking = p.attribution(model, clean, corrupted, METRIC)
    shares = (0.1, 0.4, 1.0)
    result = faithfulness(model, clean, corrupted, METRIC, ranking, shares=shares, n_random=2)
    a, b, c = result.frame["faithfulness"]
    assert result.cpr == pytest.approx(0.3 * (a + b) / 2 + 0.6 * (b + c) / 2)
    gaps = [abs(1 - f) for f in (a, b, c)]
    assert result.cmd == pytest.approx(0.3 * sum(gaps[:2]) / 2 + 0.6 * sum(gaps[1:]) / 2)
    # Control: random rankings do worse, and another seed draws other rankings.
    assert result.cmd < result.random_cmd
    reseeded = faithfulness(
        model, clean, corrupted, METRIC, ranking, shares=shares, n_random=2, seed=1
    )
    assert reseeded.cmd == result.cmd
    assert reseeded.random_cmd != result.random_cmd
    assert (result.frame["random_min"] <= result.frame["random_max"]).all()


def test_cpr_and_cmd_of_a_curve_worked_out_by_hand(monkeypatch):
    """Use MIB's shares, where 0.5 to 1 is half of the range; f(C) is made up and exceeds 1 at 0.5.

    f equals the share k for k up to 0.2, 1.5 at k = 0.5, and 1 at k = 1. The trapezoids are:

        CPR  .001 to .2, on the line f = k: (.2² - .001²) / 2 = .0199995
             .3 (.2 + 1.5) / 2 = .255, .5 (1.5 + 1) / 2 = .625         .8999995
        CMD  1 - k up to .2: .199 - .0199995 = .1790005
             |1 - f| is .8 and then .5: .3 (.8 + .5) / 2 = .195, .5 (.5 + 0) / 2 = .125   .4990005
    """
    model, (clean, corrupted) = model_of("gelu"), prompts()
    sites = p.neuron_heads()
    ranking = p.attribution(model, clean, corrupted, METRIC, sites=sites, positions="each")
    n = len(ranking.frame)
    curve = {int(share * n): share for share in SHARES} | {int(0.5 * n): 1.5, n: 1.0}

    def made_up(self, circuits):
        return np.array([curve.get(len(circuit), float("nan")) for circuit in circuits])

    monkeypatch.setattr("attn_only_lens.circuits.ablation.AblatedModel.faithfulness", made_up)
    result = faithfulness(model, clean, corrupted, METRIC, ranking, n_random=0)
    assert result.frame["n_sites"].tolist() == [0, 1, 2, 5, 11, 27, 55, 111, 277, 555]
    assert result.cpr == pytest.approx(0.8999995, abs=1e-12)
    assert result.cmd == pytest.approx(0.4990005, abs=1e-12)


def test_signed_order_puts_what_helps_first_in_either_direction():
    model, (clean, corrupted) = model_of("gelu"), prompts()
    for direction in ("denoise", "noise"):
        ranking = p.attribution(model, clean, corrupted, METRIC, direction=direction)
        curves = {
            order: faithfulness(model, clean, corrupted, METRIC, ranking, order=order, n_random=0)
            for order in ("signed", "magnitude")
        }
        # Sites that raise the metric, kept alone, raise it above the whole model's.
        assert curves["signed"].frame["faithfulness"].max() > 1
        assert curves["signed"].cpr > curves["magnitude"].cpr


@pytest.mark.parametrize(
    ("method", "layout"), [("exact_gate", LAYOUTS[1]), ("patching", LAYOUTS[0])]
)
def test_the_circuit_found_suffices_and_each_of_its_sites_is_needed(method, layout):
    model, (clean, corrupted) = model_of("gelu", layout), prompts()
    names = [f"L{layer}H{head}" for layer in range(3) for head in range(2)]
    names += [f"L{layer}N{neuron}" for layer in range(3) for neuron in range(5)]
    circuit = discover(
        model, clean, corrupted, METRIC, sites=names, method=method, faithfulness=0.8
    )
    assert 1 < len(circuit) < circuit.n_sites == 21 * POS
    assert abs(1 - circuit.faithfulness) <= 0.2
    # Control: random circuits of the same size are not faithful enough.
    assert all(abs(1 - f) > 0.2 for f in circuit.random)
    # Evaluate the circuit with plain hooks.
    every = [(name, pos) for name in names for pos in range(POS)]
    kept = list(zip(circuit.frame["name"], circuit.frame["position"], strict=True))
    whole, nothing = (metric_of(model, clean, g, "resample", corrupted) for g in ([], every))

    def share(left):
        gone = [site for site in every if site not in left]
        value = metric_of(model, clean, gone, "resample", corrupted)
        return (value - nothing) / (whole - nothing)

    assert circuit.faithfulness == pytest.approx(share(kept), abs=1e-8)
    rest = [site for site in every if site not in kept]
    assert circuit.completeness == pytest.approx(share(rest), abs=1e-8)
    for site in kept:
        assert abs(1 - share([name for name in kept if name != site])) > 0.2
    # The same holds on other prompts.
    clean, corrupted = clean.flip(0) + 1, corrupted.flip(0) + 1
    result = evaluate(model, circuit, clean, corrupted, METRIC)
    whole, nothing = (metric_of(model, clean, g, "resample", corrupted) for g in ([], every))
    assert (result.whole, result.nothing) == pytest.approx((whole, nothing), abs=ROUNDING)
    assert result.faithfulness == pytest.approx(share(kept), abs=1e-8)
    assert result.completeness == pytest.approx(share(rest), abs=1e-8)
    left = [[name for name in every if name not in kept], [], every]  # ablated: rest, none, all
    pairs = list(zip(clean.split(1), corrupted.split(1), strict=True))
    wins = [np.mean([metric_of(model, x, g, "resample", y) > 0 for x, y in pairs]) for g in left]
    assert [result.accuracy, result.whole_accuracy, result.nothing_accuracy] == wins


def sufficient_prefixes(model, clean, corrupted, threshold):
    """Return the shortest sufficient prefix of each order, by trying all, and the curves."""
    ranking = p.attribution(model, clean, corrupted, METRIC, direction="noise")
    arguments = model, clean, corrupted, METRIC, ranking.frame
    ablated = AblatedModel(*arguments, ablation="resample", mask=None)
    shortest, curves = {}, {}
    for order in ("magnitude", "signed"):
        sites = ablated.ranked(ranking, order)
        curve = ablated.faithfulness([sites[:k] for k in range(1, len(sites) + 1)])
        shortest[order] = 1 + int((abs(1 - curve) <= 1 - threshold).argmax())
        curves[order] = curve
    return shortest, curves


def test_what_helps_faithfulness_is_first_in_the_signed_order():
    """Ablating the first site lowers faithfulness most, even if whole minus nothing is negative."""
    model, (clean, corrupted), signs = model_of("gelu"), prompts(batch=1), set()
    for wrong in range(4):
        metric = p.logit_diff(oracle.CORRECT, wrong)
        how = {"direction": "zero", "sites": ["L0H1", "L1H0", "L2H1", "L2N3"], "progress": False}
        ranking = p.activation_patch(model, clean, None, metric, **how)
        arguments = model, clean, corrupted, metric, ranking.frame
        ablated = AblatedModel(*arguments, ablation="zero", mask=None)
        every = np.arange(len(ranking.frame))
        without = ablated.faithfulness([np.delete(every, site) for site in every])
        first = ablated.ranked(ranking, "signed")[0]
        assert without[first] == pytest.approx(without.min(), abs=1e-9)
        signs.add(np.sign((ablated.whole - ablated.nothing) * ranking.clean_value))
    assert signs == {-1.0, 1.0}


@pytest.mark.parametrize("threshold", [0.8, 0.95])
def test_the_last_look_finds_the_shortest_prefix(threshold):
    """The search tries all prefixes shorter than the circuit, whatever order the circuit has."""
    model, (clean, corrupted) = model_of("gelu"), prompts(batch=1)
    shortest, _ = sufficient_prefixes(model, clean, corrupted, threshold)
    ranking = p.attribution(model, clean, corrupted, METRIC, direction="noise")
    arguments = model, clean, corrupted, METRIC, ranking.frame
    ablated = AblatedModel(*arguments, ablation="resample", mask=None)
    search = _Search(ablated, threshold)
    orders = [ablated.ranked(ranking, order) for order in ("magnitude", "signed")]
    size = min(shortest.values())
    longer = orders[0][: size + 5]
    assert len(search.shorter_prefix(orders, longer)) == size
    # Control: no prefix is shorter than the shortest.
    best = orders[0][:size]
    assert search.shorter_prefix(orders, best) is best


def test_a_search_runs_no_circuits_far_larger_than_the_one_it_finds():
    class Ablated:
        n_sites, sizes = 2**17, []

        def faithfulness(self, circuits):
            self.sizes += map(len, circuits)
            return np.array([min(len(circuit) / 100, 1) for circuit in circuits])

    ablated = Ablated()
    assert len(smallest_prefix(ablated, np.arange(ablated.n_sites), 0.9)) == 90
    assert max(ablated.sizes) < 2**10


@pytest.mark.parametrize("ablation", ["resample", "positional_mean"])
def test_a_search_does_not_record_the_runs_of_its_ranking_again(ablation, monkeypatch):
    """The search's circuits are as faithful as for an ablated model that records its own runs."""

    def refuse(*args, **options):
        raise AssertionError("recorded again")

    model, (clean, corrupted) = model_of("gelu", LAYOUTS[1]), prompts()
    arguments = model, clean, corrupted, METRIC
    how = {"order": "magnitude", "budget": 0, "ablation": ablation}
    with monkeypatch.context() as patch:
        patch.setattr(ablation_module, "record_pair", refuse)
        with pytest.raises(AssertionError, match="recorded again"):
            discover(*arguments, **how)  # control: a float64 ranking is not in the model's dtype
        model.to(torch.float32)
        model.cfg.dtype = torch.float32
        tried = discover(*arguments, **how).tried
    how = {"method": "secant", "direction": "noise", "budget": 0}
    ranking = p.attribution(*arguments, positions="each", **how)
    ablated = AblatedModel(*arguments, ranking.frame, ablation=ablation, mask=None)
    order = ablated.ranked(ranking, "magnitude")
    expected = ablated.faithfulness([order[:size] for size in tried["n_sites"]])
    np.testing.assert_allclose(tried["faithfulness"], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("seed", "threshold"), [(5, 0.8), (10, 0.99)])
def test_no_prefix_of_either_order_is_shorter(seed, threshold):
    model, (clean, corrupted) = model_of("gelu"), prompts(batch=1)
    clean, corrupted = (clean + seed) % 41, (corrupted + 5 * seed) % 41
    shortest, curves = sufficient_prefixes(model, clean, corrupted, threshold)
    how = {"faithfulness": threshold, "n_random": 0}
    circuit = discover(model, clean, corrupted, METRIC, **how)
    assert abs(1 - circuit.faithfulness) <= 1 - threshold
    assert len(circuit) <= min(shortest.values()) < 0.3 * circuit.n_sites
    for order, size in shortest.items():
        prefix = discover(model, clean, corrupted, METRIC, order=order, **how)
        k = len(prefix)  # a grid may miss shorter sufficient prefixes
        assert k >= size
        assert abs(1 - curves[order][k - 1]) <= 1 - threshold or k == circuit.n_sites
        assert abs(1 - curves[order][k - 2]) > 1 - threshold
    # Control: no curve is monotone, so a bisection would have failed.
    assert all((np.diff(curve) < -0.01).any() for curve in curves.values())


def test_what_a_site_is_worth_is_the_gradient_of_its_ablation():
    """Compare with differences: move each site by a small share of its ablation."""
    model, (clean, corrupted) = model_of("gelu", LAYOUTS[1]), prompts()
    names = ["L0H1", "L0N3", "L0N29", "L1H0", "L1N7", "L2N11", "L2H1"]
    ranking = p.attribution(model, clean, corrupted, METRIC, sites=names)
    arguments = model, clean, corrupted, METRIC, ranking.frame
    ablated = AblatedModel(*arguments, ablation="resample", mask=None)
    sites = list(zip(ranking.frame["name"], ranking.frame["position"], strict=True))
    kept = [0, 3, 7, 11, 19, 23, 31]
    worth = ablated.worth(np.array(kept))
    assert (worth != 0).sum() > 20

    def share(moved):
        """Return the faithfulness of `kept` when one site is moved by a share of its ablation."""
        hooks = []
        for row, (name, position) in enumerate(sites):
            head = HeadName.parse(name)
            hook_name = head.hook("z", model)
            put = oracle.seen(model, corrupted, hook_name)
            gone = float(row not in kept) + moved.get(row, 0.0)

            def hook(z, hook, put=put, gone=gone, pos=position, i=head.index):
                z[:, pos, i] = z[:, pos, i] + gone * (put[:, pos, i] - z[:, pos, i])
                return z

            hooks.append((hook_name, hook))
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            value = oracle.difference(model(clean))
        return (value - ablated.nothing) / (ablated.whole - ablated.nothing)

    step = 1e-4
    for row in (*kept, 1, 6, 12, 17, 29, 34):
        slope = (share({row: -step}) - share({row: step})) / (2 * step)
        assert worth[row] == pytest.approx(slope, abs=1e-7)  # from step² and rounding


def test_slopes_of_a_loss_are_those_of_plain_hooks():
    """Compare with differences, for a loss in which every prompt has its own weight."""
    model = model_of("gelu", LAYOUTS[1])
    clean = torch.randint(1, 41, (3, POS), generator=torch.Generator().manual_seed(0))
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 7) % 41
    right, wrong = [3, 5, 7], [4, 6, 11]
    names = ["L0H1", "L0N3", "L1H0", "L1N7", "L2N11"]
    frame = p.attribution(*(model, clean, corrupted, p.logit_diff(right, wrong)), sites=names).frame
    ablated = AblatedModel(
        *(model, clean, corrupted, p.logit_diff(right, wrong), frame),
        ablation="resample",
        mask=None,
    )
    kept, weights = np.array([0, 3, 8, 13, 17]), torch.tensor([0.5, -2.0, 1.5])

    def loss(values):
        return (weights.to(values) * values**2).sum()

    value, slopes = ablated.slopes(kept, loss)
    sites = list(zip(frame["name"], frame["position"], strict=True))

    def plain(moved):
        hooks = []
        for row, (name, position) in enumerate(sites):
            head = HeadName.parse(name)
            hook_name = head.hook("z", model)
            put = oracle.seen(model, corrupted, hook_name)
            gone = float(row not in kept) + moved.get(row, 0.0)

            def hook(z, hook, put=put, gone=gone, pos=position, i=head.index):
                z[:, pos, i] = z[:, pos, i] + gone * (put[:, pos, i] - z[:, pos, i])
                return z

            hooks.append((hook_name, hook))
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            last = model(clean)[:, -1]
        rows = torch.arange(3)
        return float(loss(last[rows, right] - last[rows, wrong]))

    assert value == pytest.approx(plain({}), rel=1e-9)
    step, largest = 1e-4, abs(slopes).max()
    assert largest > 1e-4
    for row in np.argsort(-abs(slopes))[:12]:
        slope = (plain({row: -step}) - plain({row: step})) / (2 * step)
        assert slopes[row] == pytest.approx(slope, abs=1e-5 * largest)


def test_nothing_less_than_everything_is_faithful_to_the_bit():
    model, (clean, corrupted) = model_of("gelu"), prompts()
    circuit = discover(
        model, clean, corrupted, METRIC, sites=["L0N3", "L1H0"], faithfulness=1.0, positions="all"
    )
    assert len(circuit) == circuit.n_sites == 2
    # Sites at all positions allow prompts of any length.
    longer = tokens(3, 2, POS + 2), tokens(5, 2, POS + 2)
    assert evaluate(model, circuit, *longer, METRIC).faithfulness == pytest.approx(1)


def test_the_bar_says_what_is_done(capsys):
    model, (clean, corrupted) = model_of("gelu"), prompts()
    discover(
        model, clean, corrupted, METRIC, sites=["L0N3"], positions="all", progress="the original"
    )
    said = capsys.readouterr().err
    assert "the original: ranking: " in said
    assert "the original: search: " in said
    assert "search: :" not in said


def test_neurons_of_several_heads_are_ablated_whole():
    model = convert(build("gelu", scale=0.1), gate=Bilinear())
    clean, corrupted = prompts()
    ranking = p.attribution(model, clean, corrupted, METRIC, positions="all")
    result = faithfulness(model, clean, corrupted, METRIC, ranking, n_random=0)
    assert result.frame["faithfulness"].iloc[-1] == pytest.approx(1)
    assert np.isfinite(result.frame["completeness"]).all()


@pytest.mark.parametrize("n", [1, 2])
def test_a_standard_error_needs_two_pairs_of_different_prompts(n):
    model, (clean, corrupted) = model_of("gelu"), prompts()
    circuit = discover(model, clean[:1], corrupted[:1], METRIC, progress=False)
    rows = [0, *range(n)]  # the first pair is equal
    corrupted = torch.cat([clean[:1], corrupted[:n]])
    error = evaluate(model, circuit, clean[rows], corrupted, METRIC).standard_error
    assert np.isnan(error) == (n < 2)


def test_what_makes_no_sense_is_refused():
    model, (clean, corrupted) = model_of("gelu"), prompts()
    ranking = p.attribution(model, clean, corrupted, METRIC, sites=["L0N3"])
    arguments = model, clean, corrupted, METRIC

    def refused(match, ranking=ranking, **how):
        with pytest.raises(InputError, match=match):
            faithfulness(*arguments, ranking, **how)

    refused("ablation='bias'", ablation="bias")
    refused("order='best'", order="best")
    refused(r"shares \[0\.5\]", shares=[0.5])
    refused(r"shares \[0\.5, 0\.1\]", shares=[0.5, 0.1])
    refused(r"shares \[0, 'x'\]", shares=[0, "x"])
    refused("n_random=-1", n_random=-1)
    refused("seed='x'", seed="x")
    refused("ranking: got a list", ["L0N3@1"])
    after = p.attribution(*arguments, sites=["L2N3"], positions=[0])
    refused("for which the values differ", after)  # no later head reads this neuron at position 0
    refused("from the end", p.attribution(*arguments, sites=["L2N3"], positions=-1))
    refused("token role 'end'", p.attribution(*arguments, sites=["L2N3"], positions={"end": -1}))
    refused("one row per prompt", p.attribution(*arguments, sites=["L2N3"], per_prompt=True))
    longer = tokens(0, 2, POS + 2), tokens(1, 2, POS + 2)
    there = p.attribution(model, *longer, METRIC, sites=["L0N3"], positions="each")
    refused(f"at position {POS + 1}; the prompts have {POS} tokens", there)
    with pytest.raises(InputError, match=r"(?s)method='best'.*order='best'"):
        discover(*arguments, method="best", order="best")
    circuit = discover(*arguments, sites=["L0N3", "L1H0"], n_random=0)
    with pytest.raises(InputError, match=f"prompts of {POS + 2} tokens; expected {POS}"):
        evaluate(model, circuit, *longer, METRIC)
    for value in (2, "x"):
        with pytest.raises(InputError, match=rf"(?s)faithfulness={value!r}.*n_random=-1.*seed=1.5"):
            discover(*arguments, faithfulness=value, n_random=-1, seed=1.5)
    handle = model.hook_embed.register_forward_hook(lambda *args: None)
    with pytest.raises(InputError, match="hooks are attached"):
        faithfulness(*arguments, ranking)
    handle.remove()
