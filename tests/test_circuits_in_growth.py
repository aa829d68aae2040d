"""The study of circuits in growth runs, and measures what it says; its page is of its tables."""

import json
from itertools import permutations, product
from pathlib import Path

import circuit_measures as measures
import circuits_in_growth as study
import circuits_report as report
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

NAME = Path(study.__file__).stem
KEPT = Path(__file__).parents[1] / "analyses" / "results"


def frames_in(folder):
    parts = ("", "again", "exact", "neurons")
    files = {part: f"{NAME}_{part}.csv" if part else f"{NAME}.csv" for part in parts}
    return {part: study.stored((folder / file).read_text("utf-8")) for part, file in files.items()}


def test_smoke(tmp_path):
    app = study.typer.Typer()
    app.command()(study.main)
    asked = ["--smoke", "--n-seeds", "1", "--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    page = (tmp_path / f"{NAME}.md").read_text("utf-8")
    assert page.strip() in result.output
    assert "Two growths" in page
    found = frames_in(tmp_path)[""]
    assert found.groupby("arm")["flops"].max().between(1, 1e9).all()
    first = found[found["check"] == 0]
    assert (first["correlation"] > 0.9999).all()
    assert (first["new_share"] < 1e-4).all()
    last = found[(found["check"] == 1) & (found["arm"] == "neurons")]
    assert (last["new_share"] > 1e-4).all()
    assert (last["kept"] <= 1).all()
    again = CliRunner().invoke(app, [*asked[:2], "2", *asked[3:]])
    assert "choose another --runs" in str(again.exception)


def test_the_page_is_of_its_tables():
    """Every figure on the stored page comes from the stored tables."""
    settings = json.loads((KEPT / f"{NAME}.run.json").read_text("utf-8"))["settings"]
    made = report.page(frames_in(KEPT), settings, "")
    assert (KEPT / f"{NAME}.md").read_text("utf-8") == made


def test_what_the_guide_says():
    frames = frames_in(KEPT)

    def percent(column, *names):
        found = (report.over_seeds(frames, name, column).mean() for name in names)
        return [round(100 * each) for each in found]

    kept = percent("kept", *report.KINDS)
    assert (min(kept), max(kept), percent("kept", "none")) == (52, 53, [44])
    assert round(100 * frames[""].query("check == 1")["kept_chance"].mean()) == 11
    new = percent("new_share", *report.WITH_NEW)
    assert (min(new), max(new), percent("new_share", "neurons, splits")) == (0, 4, [19])
    assert percent("idle_share", "none") == [8]
    failed = [each for each in report.PREDICTIONS if not each.answer(frames)[0]]
    assert (len(failed), len(report.PREDICTIONS)) == (7, 9)


def test_patches_are_those_of_the_wrapped_model():
    """By torch's hooks on the modules of transformers, which share no code with ours."""
    model = study.plan_of(study.SMOKE, 3).model().double()
    asked = study.Asked.of(study.SMOKE, "cpu").questions["gender"]
    names = ["L0H1", "L0N2", "L0N5"]
    with measures.expose_neuron_heads(model) as exposed:
        got = measures.patched(exposed, asked, names)
        everything = [f"L0H{i}" for i in range(2)] + [f"L0N{i}" for i in range(7)]
        alone = {name: measures.patched(exposed, asked, [name]) for name in everything}
    wrapped = study.plan_of(study.SMOKE, 3).model().double().original_model
    layer, kept = wrapped.model.layers[0], {}
    columns = {"attention": [4, 5, 6, 7], "mlp": [2, 5]}  # head 1 of two with 4 coordinates
    modules = {"attention": layer.self_attn.o_proj, "mlp": layer.mlp.down_proj}

    def runs(tokens, make_hook):
        hooks = [each.register_forward_pre_hook(make_hook(kind)) for kind, each in modules.items()]
        with torch.no_grad():
            logits = wrapped(tokens).logits
        for hook in hooks:
            hook.remove()
        last = [logits[row, n - 1] for row, n in enumerate(asked.mask.sum(1))]
        pairs = zip(last, asked.right, asked.wrong, strict=True)
        return np.array([(each[right] - each[wrong]).item() for each, right, wrong in pairs])

    def keeps(kind):
        return lambda module, inputs: kept.__setitem__(kind, inputs[0].clone())

    def replaces(kind):
        def hook(module, inputs):
            z = inputs[0].clone()
            for column in columns[kind]:
                z[..., column] = kept[kind][..., column]
            return (z,)

        return hook

    runs(asked.corrupted, keeps)
    # float64 throughout; control: another set of neurons gives another number
    np.testing.assert_allclose(got, runs(asked.clean, replaces), atol=1e-10)
    columns["mlp"] = [2, 6]
    assert abs(got - runs(asked.clean, replaces)).max() > 1e-8
    # And one at a time they are the effects.
    with measures.expose_neuron_heads(model) as exposed:
        exact = measures.sweep(measures.p.activation_patch, exposed, asked).to_frame()
    for name, value in zip(exact["name"], exact["value"], strict=True):
        assert alone[name].mean() == pytest.approx(value, abs=1e-10)


def a_look(generator, names, n_prompts=5, n_tokens=11):
    effects = generator.normal(size=(len(names), n_prompts))
    other = [generator.normal(size=n_prompts) for _ in range(4)]
    neurons = [name for name in names if "N" in name]
    places = {
        name: tuple(
            frozenset((0, int(at)) for at in generator.choice(7, 3, replace=False)) for _ in "ab"
        )
        for name in neurons
    }
    return measures.Look(
        tuple(names),
        {"task": measures.Part(effects, *other)},
        {name: generator.normal(size=n_tokens) for name in neurons},
        {name: generator.normal(size=n_tokens) for name in names if "H" in name},
        places,
    )


NAMES = ["L0H0", "L0N0", "L0N1", "L0N2", "L1H0", "L1N0", "L1N1", "L1N2", "L1N3"]


def a_pair():
    generator = np.random.default_rng(7)
    moved = {"L1": "L2"}  # a layer came between, and a neuron before the others
    names = {name: moved.get(name[:2], name[:2]) + name[2:] for name in NAMES}
    grown = [*names.values(), "L1N0", "L1N1", "L1H0", "L0N3"]
    return measures.Pair(a_look(generator, NAMES), a_look(generator, grown), names)


def test_what_is_kept_by_counting(monkeypatch):
    monkeypatch.setattr(measures, "K", 3)
    pair = a_pair()
    got = measures.kept_measures(pair, "task", pair.similarities())
    neurons = [name for name in NAMES if "N" in name]
    one = dict(zip(pair.first.names, pair.first.parts["task"].effects.mean(1), strict=True))
    other = dict(zip(pair.second.names, pair.second.parts["task"].effects.mean(1), strict=True))
    other = {name: other[pair.names[name]] for name in neurons}
    assert got["correlation"] == pytest.approx(
        np.corrcoef([one[n] for n in neurons], [other[n] for n in neurons])[0, 1], abs=1e-12
    )

    def first(effects, names):
        return set(sorted(names, key=lambda name: -abs(effects[name]))[:3])

    circuit, still = first(one, neurons), first(other, neurons)
    assert got["kept"] == pytest.approx(len(circuit & still) / 3)
    assert got["kept_low"] <= got["kept_high"]
    # By chance: over every way to match neurons within their layers.
    counts, layers = [], [[n for n in neurons if n.startswith(f"L{i}")] for i in range(2)]
    for a, b in product(*(permutations(layer) for layer in layers)):
        matched = dict(zip(neurons, [*a, *b], strict=True))
        counts.append(sum(matched[name] in still for name in circuit) / 3)
    assert got["kept_chance"] == pytest.approx(np.mean(counts), abs=1e-12)
    gates, chance, examples = [], [], []
    for name in circuit:
        mine = pair.first.gates[name]
        gates.append(np.corrcoef(mine, pair.second.gates[pair.names[name]])[0, 1])
        others = [n for n in neurons if n[:2] == name[:2] and n != name]
        chance.append(
            np.mean([np.corrcoef(mine, pair.second.gates[pair.names[n]])[0, 1] for n in others])
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
    # Parity: over every way to call 3 neurons and 1 head new.
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
    # Resemblance: the two foremost new neurons, each with the old one that it is most like.
    old = [name for name in neurons if name not in new]
    foremost = sorted(new - {"L1H0"}, key=lambda name: -sizes[name])[:2]
    most = [max(abs(np.corrcoef(now.gates[a], now.gates[b])[0, 1]) for b in old) for a in foremost]
    assert measures.resemblances(now, "task", new)["resemblance"] == pytest.approx(np.mean(most))


def _choices(names, n):
    return {tuple(sorted(each)) for each in permutations(names, n)}


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
