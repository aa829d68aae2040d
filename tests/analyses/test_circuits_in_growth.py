"""Tests that measures of circuits in growth are right, and that the guide matches the tables."""

import re
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
import torch
from common import entry_of

from analyses import study as frame
from analyses.studies import circuits_in_growth as study
from analyses.tools import circuit_measures as measures


def test_stored_measures_can_be_computed_again_from_stored_effects():
    """Recompute kept, overlap, correlation and shares at the end from effects, by sets and sums.

    Effects have four digits, which may decide in which half a neuron in the middle is.
    """
    tables = frame.read("circuits_in_growth")
    end = tables[""].query("check == 1 and seed == 0 and growth_seed == 0")
    end, effects = end.set_index(["arm", "task"]), tables["effects"].set_index("name")
    before = effects[(effects["arm"] == study.SMALL_MODEL) & effects.index.str.contains("N")]
    compared = 0
    for arm, task in product(study.WITH_EFFECTS, study.TASKS):
        now, row, one = effects[effects["arm"] == arm], end.loc[arm, task], before[task]
        whole, two = now[task].abs().sum(), now.loc[one.index, task]
        circuits = [set(effect.abs().nlargest(measures.K).index) for effect in (one, two)]
        shares = [effect / effect.abs().sum() for effect in (one, two)]
        smaller = np.minimum(*(abs(share) for share in shares))[shares[0] * shares[1] > 0]
        halves = one.abs().groupby(one.index.str[:2], group_keys=False)
        idle = halves.apply(lambda half: half.nsmallest(len(half) // 2)).index
        got = {
            "kept": len(circuits[0] & circuits[1]) / measures.K,
            "overlap": smaller.sum(),
            "correlation": one.corr(two),
            "new_share": now.loc[now["new"] == 1, task].abs().sum() / whole,
            "idle_share": two[idle].abs().sum() / whole,
        }
        assert got == pytest.approx(dict(row[list(got)]), abs=2e-3)
        compared += 1
    assert compared == 6


def test_arms_without_growth_have_the_steps_and_the_texts_that_they_are_said_to_have(tmp_path):
    small = study.run(study.plan_of(study.SMOKE, 1), tmp_path, "cpu")
    arms = study.arms(study.SMOKE)
    plans = {
        (name, seed): study.plan_after(study.SMOKE, arms[name], small, seed)[0]
        for name in ("none", "none, equal steps", "none, other texts", "neurons")
        for seed in (0, 1)
    }
    # a step with more neurons needs more flops, so growth gets fewer steps
    study_of = replace(study.SMOKE, more=1000)
    steps = {
        name: study.plan_after(study_of, arms[name], small, 0)[0].steps
        for name in ("none", "none, equal steps", "neurons")
    }
    assert steps["none"] > steps["none, equal steps"] == steps["neurons"]
    start = small.plan.steps
    texts = {name: study.batch(plan, start) for name, plan in plans.items()}
    assert torch.equal(texts["none", 0], texts["neurons", 1])
    assert torch.equal(texts["none", 0], texts["none, equal steps", 0])
    first, second = (texts["none, other texts", seed] for seed in (0, 1))
    assert not torch.equal(first, texts["none", 0])
    assert not torch.equal(first, second)


def test_what_the_guide_says():
    tables = frame.read("circuits_in_growth")
    facts = study.facts(tables)
    guide = (frame.RESULTS.parents[1] / "docs" / "growth.md").read_text("utf-8")
    said = guide[guide.index("(analyses/results/circuits_in_growth.md)") :].split("\n\n")[0]

    def percents(column, *arms, part=""):
        return sorted(100 * mean for mean in study.means(tables, arms, column, part=part).values())

    kept, new = percents("kept", *study.KINDS), percents("new_share", *study.WITH_NEW)
    figures = [kept[0], kept[-1], 100 * facts["chance"]]
    figures += [*percents("kept", study.EQUAL_STEPS), *percents("kept", study.NONE)]
    figures += [100, *percents("kept", study.OTHER_TEXTS, part="again")]
    figures += [*percents("kept", study.SMALL_MODEL, part="prompts"), new[0], new[-1]]
    figures = [f"{mean:.0f}" for mean in figures]
    figures += [f"{percent:.1f}" for percent in percents("idle_share", study.EQUAL_STEPS)]
    figures += [f"{percent:.0f}" for percent in percents("new_share", study.SPLITS)]
    assert re.findall(r"([\d.]+)(?: %| to)", said) == figures
    less = {kind: study.less(tables, "kept", kind) for kind in study.KINDS}
    assert [f"{100 * less[kind].mean():.0f}" for kind in ("heads", "neurons")] == ["5", "2"]
    assert {kind for kind in less if study.is_clear(less[kind])} == {"heads", "neurons"}
    assert study.n_clear(tables, "overlap", study.AGAINST_TRAINING) == 0
    assert study.n_clear(tables, "kept", study.BETWEEN_KINDS) == 0
    verdicts = list(facts["verdicts"].values())
    assert (verdicts.count(False), verdicts.count(None), len(verdicts)) == (6, 1, 9)
    entry = entry_of("circuits_in_growth")
    low, high, _, equal, *_ = figures
    assert f"{low} to {high} % of the strongest neurons" in entry
    assert f"without growth {equal} % (the ceiling is {figures[7]} %)" in entry


def test_patches_are_those_of_the_wrapped_model():
    """Patches equal those by torch hooks on the transformers model, in independent code."""
    model = study.plan_of(study.SMOKE, 3).model().double()
    question = study.Asked.of(study.SMOKE, "cpu").questions["gender"]
    names = ["L0H1", "L0N2", "L0N5"]
    with measures.expose_neuron_heads(model) as exposed:
        got = measures.patched(exposed, question, names)
        everything = [f"L0H{i}" for i in range(2)] + [f"L0N{i}" for i in range(7)]
        alone = {name: measures.patched(exposed, question, [name]) for name in everything}
    wrapped = study.plan_of(study.SMOKE, 3).model().double().original_model
    layer, kept = wrapped.model.layers[0], {}
    columns = {"attention": [4, 5, 6, 7], "mlp": [2, 5]}  # head 1 of two with 4 coordinates
    modules = {"attention": layer.self_attn.o_proj, "mlp": layer.mlp.down_proj}

    def runs(tokens, make_hook):
        hooks = [
            module.register_forward_pre_hook(make_hook(kind)) for kind, module in modules.items()
        ]
        with torch.no_grad():
            logits = wrapped(tokens).logits
        for hook in hooks:
            hook.remove()
        last = [logits[row, n - 1] for row, n in enumerate(question.mask.sum(1))]
        pairs = zip(last, question.right, question.wrong, strict=True)
        return np.array([(row[right] - row[wrong]).item() for row, right, wrong in pairs])

    def keeps(kind):
        return lambda module, inputs: kept.__setitem__(kind, inputs[0].clone())

    def replaces(kind):
        def hook(module, inputs):
            z = inputs[0].clone()
            for column in columns[kind]:
                z[..., column] = kept[kind][..., column]
            return (z,)

        return hook

    runs(question.corrupted, keeps)
    # float64 throughout; control: another set of neurons gives another value
    np.testing.assert_allclose(got, runs(question.clean, replaces), atol=1e-10)
    columns["mlp"] = [2, 6]
    assert abs(got - runs(question.clean, replaces)).max() > 1e-8
    # Single patches give the effects.
    with measures.expose_neuron_heads(model) as exposed:
        exact = measures.sweep(measures.p.activation_patch, exposed, question).to_frame()
    for name, value in zip(exact["name"], exact["value"], strict=True):
        assert alone[name].mean() == pytest.approx(value, abs=1e-10)


def a_look(generator, names, n_prompts=5, n_tokens=11):
    effects = generator.normal(size=(len(names), n_prompts))
    vectors = [generator.normal(size=n_prompts) for _ in range(4)]
    neurons = [name for name in names if "N" in name]
    places = {
        name: tuple(
            frozenset((0, int(token)) for token in generator.choice(7, 3, replace=False))
            for _ in "ab"
        )
        for name in neurons
    }
    return measures.Look(
        tuple(names),
        {"task": measures.Part(effects, *vectors)},
        {name: generator.normal(size=n_tokens) for name in neurons},
        {name: generator.normal(size=n_tokens) for name in names if "H" in name},
        places,
    )


NAMES = ["L0H0", "L0N0", "L0N1", "L0N2", "L1H0", "L1N0", "L1N1", "L1N2", "L1N3"]


def a_pair():
    generator = np.random.default_rng(7)
    moved = {"L1": "L2"}  # a layer was inserted, and a neuron before the others
    names = {name: moved.get(name[:2], name[:2]) + name[2:] for name in NAMES}
    grown = [*names.values(), "L1N0", "L1N1", "L1H0", "L0N3"]
    return measures.Pair(a_look(generator, NAMES), a_look(generator, grown), names)


def test_what_is_kept_by_counting(monkeypatch):
    monkeypatch.setattr(measures, "K", 3)
    pair = a_pair()
    got = measures.kept_measures(pair, "task", pair.similarities())
    neurons = [name for name in NAMES if "N" in name]
    of_first = dict(zip(pair.first.names, pair.first.parts["task"].effects.mean(1), strict=True))
    of_second = dict(zip(pair.second.names, pair.second.parts["task"].effects.mean(1), strict=True))
    of_second = {name: of_second[pair.names[name]] for name in neurons}
    assert got["correlation"] == pytest.approx(
        np.corrcoef([of_first[n] for n in neurons], [of_second[n] for n in neurons])[0, 1],
        abs=1e-12,
    )

    def first(effects, names):
        return set(sorted(names, key=lambda name: -abs(effects[name]))[:3])

    circuit, still = first(of_first, neurons), first(of_second, neurons)
    assert got["kept"] == pytest.approx(len(circuit & still) / 3)
    assert got["correlation_low"] <= got["correlation"] <= got["correlation_high"]
    shares = [
        {name: effect / sum(map(abs, effects.values())) for name, effect in effects.items()}
        for effects in ({name: of_first[name] for name in neurons}, of_second)
    ]

    def in_common(a, b):
        return min(abs(a), abs(b)) if a * b > 0 else 0.0

    overlap = sum(in_common(shares[0][name], shares[1][name]) for name in neurons)
    assert got["overlap"] == pytest.approx(overlap, abs=1e-12)
    # The chance level enumerates all ways to match neurons within their layers.
    counts, overlaps, layers = (
        [],
        [],
        [[n for n in neurons if n.startswith(f"L{i}")] for i in range(2)],
    )
    for a, b in product(*(permutations(layer) for layer in layers)):
        matched = dict(zip(neurons, [*a, *b], strict=True))
        counts.append(sum(matched[name] in still for name in circuit) / 3)
        overlaps.append(sum(in_common(shares[0][n], shares[1][matched[n]]) for n in neurons))
    assert got["kept_chance"] == pytest.approx(np.mean(counts), abs=1e-12)
    assert got["overlap_chance"] == pytest.approx(np.mean(overlaps), abs=1e-12)
    gates, chance, examples = [], [], []
    for name in circuit:
        gates_of_first = pair.first.gates[name]
        gates.append(np.corrcoef(gates_of_first, pair.second.gates[pair.names[name]])[0, 1])
        others = [n for n in neurons if n[:2] == name[:2] and n != name]
        chance.append(
            np.mean(
                [
                    np.corrcoef(gates_of_first, pair.second.gates[pair.names[n]])[0, 1]
                    for n in others
                ]
            )
        )
        ends = zip(pair.first.examples[name], pair.second.examples[pair.names[name]], strict=True)
        examples.append(sum(len(a & b) for a, b in ends) / 6)
    assert got["gates"] == pytest.approx(np.mean(gates), abs=1e-12)
    assert got["gates_chance"] == pytest.approx(np.mean(chance), abs=1e-12)
    assert got["examples"] == pytest.approx(np.mean(examples), abs=1e-12)
    heads = [
        np.corrcoef(pair.first.patterns[a], pair.second.patterns[b])[0, 1]
        for a, b in pair.names.items()
        if "H" in a
    ]
    assert pair.heads() == pytest.approx(np.mean(heads), abs=1e-12)


def test_what_is_new_by_counting(monkeypatch):
    monkeypatch.setattr(measures, "K", 2)
    pair = a_pair()
    now, new = pair.second, {"L1N0", "L1N1", "L1H0", "L0N3"}
    idle = measures.idle_half(pair.first, "task")
    before = dict(zip(pair.first.names, abs(pair.first.parts["task"].effects.mean(1)), strict=True))
    assert set(idle) == {
        name
        for layer, n in (("L0", 1), ("L1", 2))
        for name in sorted((x for x in NAMES if x.startswith(f"{layer}N")), key=before.get)[:n]
    }
    got = measures.new_measures(now, "task", new, [pair.names[name] for name in idle])
    sizes = dict(zip(now.names, abs(now.parts["task"].effects.mean(1)), strict=True))
    total = sum(sizes.values())
    assert got["new_share"] == pytest.approx(sum(sizes[name] for name in new) / total)
    assert got["idle_share"] == pytest.approx(sum(sizes[pair.names[n]] for n in idle) / total)
    # Parity enumerates all ways to call 3 neurons and 1 head new.
    neurons, heads = ([name for name in now.names if kind in name] for kind in "NH")
    every = [
        sum(sizes[name] for name in (*some, head)) / total
        for some in map(list, _choices(neurons, 3))
        for head in heads
    ]
    assert got["parity"] == pytest.approx(np.mean(every), abs=1e-12)
    part = now.parts["task"]
    left = (part.without_new.mean() - part.nothing.mean()) / (
        part.clean.mean() - part.nothing.mean()
    )
    assert got["without_new"] == pytest.approx(left, abs=1e-12)
    # Resemblance uses the two strongest new neurons and the most similar old neuron of each.
    old = [name for name in neurons if name not in new]
    foremost = sorted(new - {"L1H0"}, key=lambda name: -sizes[name])[:2]
    most = [max(abs(np.corrcoef(now.gates[a], now.gates[b])[0, 1]) for b in old) for a in foremost]
    assert measures.resemblance(now, "task", new) == pytest.approx(np.mean(most))


def _choices(names, n):
    return {tuple(sorted(names_in_order)) for names_in_order in permutations(names, n)}


def test_intervals_are_of_resampled_prompts():
    weights = measures.resamples(7)
    assert weights.shape == (measures.RESAMPLES + 1, 7)
    np.testing.assert_allclose(weights.sum(1), 1)
    assert (weights[0] == 1 / 7).all()
    assert (weights[1:] * 7 % 1 < 1e-9).all()
    values = weights @ np.arange(7.0)
    got = measures.with_interval("x", values)
    # The standard error of the mean of 0 … 6 is .756; 200 draws give it to a tenth or so.
    assert got["x"] == pytest.approx(3)
    assert got["x_high"] - got["x_low"] == pytest.approx(2 * 1.96 * 0.756, rel=0.25)


def test_constants_correlate_with_nothing():
    rows = np.stack([np.full(9, 0.3), np.arange(9.0)])
    np.testing.assert_allclose(measures.correlations(rows, -rows), [[0, 0], [0, -1]], atol=1e-12)
