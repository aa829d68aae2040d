"""Tests that measures of circuits in growth are right, and that the guide matches the tables."""

from itertools import permutations, product

import numpy as np
import pytest

from analyses.studies import circuits_in_growth as study
from analyses.tools import circuit_measures as measures


def test_patches_of_one_component_are_those_of_a_sweep():
    """In float64; the control: a patch of two components gives another value."""
    model = study.plan_of(study.SMOKE, 3).model().double()
    question = study.Asked.of(study.SMOKE, "cpu").questions["gender"]
    with measures.expose_neuron_heads(model) as exposed:
        exact = measures.sweep(measures.p.activation_patch, exposed, question).to_frame()
        for name, value in zip(exact["name"], exact["value"], strict=True):
            alone = measures.patched(exposed, question, [name])
            assert alone.mean() == pytest.approx(value, abs=1e-10)
        both = measures.patched(exposed, question, [name, "L0N2"])
    assert abs(both - alone).max() > 1e-8


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
