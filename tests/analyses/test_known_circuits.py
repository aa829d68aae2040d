"""The benchmark of known circuits: disguises are exact, the truth is checked by interventions.

The oracle of the truth shares no code with it: large random values are put into parts by hooks.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from common import needs_hooked_transformer

from analyses.benchmark import bounds, scoring, tasks, twins
from analyses.benchmark.disguise import disguise
from analyses.benchmark.methods import EDGES, NODES
from analyses.benchmark.tracr_cuts import logits_without
from attn_only_lens import HeadName

pytestmark = needs_hooked_transformer

FOLDER = Path(__file__).parents[2] / "analyses" / "benchmark"
SAME = 1e-9  # float64, and queries of compiled heads are about 100
SOME = ("follows_a", "hist", "pair_balance", "sort")  # two outputs of each kind, 1 to 3 layers


@pytest.fixture(scope="module", params=SOME)
def disguised(request):
    program = tasks.load(request.param)
    return program, disguise(program.model, seed=5), tasks.problem(program, "disguised")


def with_noise(model, tokens, names):
    """Logits of a run in which the outputs of parts are large random numbers."""
    generator = torch.Generator().manual_seed(0)

    def put(x, hook):
        layer, letter = hook.layer(), "H" if hook.name.endswith("hook_z") else "N"
        x = x.clone()
        for i in range(x.shape[2]):
            if f"L{layer}{letter}{i}" in names:
                noise = torch.randn(x[:, :, i].shape, generator=generator, dtype=x.dtype)
                x[:, :, i] = 10 * noise
        return x

    def chosen(name):
        return name.endswith(("attn.hook_z", "mlp.hook_post"))

    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=[(chosen, put)])


@torch.no_grad()
def test_a_disguise_computes_the_same_function():
    for name in tasks.PROGRAMS[::3]:
        program = tasks.load(name)
        hidden = disguise(program.model, seed=5)
        for tokens, expected, _ in program.batches():
            logits = program.model(tokens)
            assert program.agrees(logits, expected)
            for model in (hidden.without_norm, hidden.model):
                assert (model(tokens) - logits).abs().max() < SAME, name


@torch.no_grad()
def test_parts_outside_the_truth_do_nothing_whatever_they_output(disguised):
    program, _, problem = disguised
    nodes, model = problem.truth.nodes, problem.task.model
    false = set(nodes["name"][~nodes["true"]])
    assert len(false) > 5
    for tokens, _, _ in program.batches():
        assert (with_noise(model, tokens, false) - model(tokens)).abs().max() < SAME


@torch.no_grad()
def test_each_part_inside_the_truth_does_something(disguised):
    program, _, problem = disguised
    nodes, model = problem.truth.nodes, problem.task.model
    tokens, _, _ = next(program.batches())
    for name in nodes["name"][nodes["true"]]:
        assert (with_noise(model, tokens, {name}) - model(tokens)).abs().max() > 1e-3, name


def test_edges_outside_the_truth_carry_nothing(disguised):
    program, hidden, _ = disguised
    model, true = hidden.without_norm, program.true_edges()
    edges = tasks.candidate_edges(model)
    false = [edge for edge in edges if hidden.edge(edge) not in true]
    assert len(false) > 20
    for tokens, _, _ in program.batches():
        assert (logits_without(model, tokens, false) - model(tokens)).abs().max() < SAME
    # The control: with all edges of the output, too, its logits are constant.
    wrong = [edge for edge in edges if edge.reader == "output"]
    assert logits_without(model, tokens, {*false, *wrong}).var(0).max() < SAME


def test_twins_are_faithful_to_their_design():
    names = twins.names()
    assert len(names) >= 5
    for name in names:
        for seed in twins.SEEDS:
            assert min(twins.faithfulness(name, seed).values()) > 0.95, (name, seed)


@torch.no_grad()
def test_parts_outside_a_twins_design_hardly_matter():
    """Outputs stay right if all other parts get their outputs on another input."""
    program = tasks.load("hist")
    (problem,) = twins.problems(["hist"], [0])
    twin, nodes = problem.task.model, problem.truth.nodes
    tokens, expected, _ = next(program.batches())
    assert program.agrees(twin(tokens), expected)
    _, cache = twin.run_with_cache(tokens.roll(1, 0))

    def put(names):
        heads = [HeadName.parse(name) for name in names]

        def hook(x, hook):
            kind = "attention" if hook.name.endswith("hook_z") else "neuron"
            index = [h.index for h in heads if (h.layer, h.kind) == (hook.layer(), kind)]
            x = x.clone()
            x[:, :, index] = cache[hook.name][:, :, index]
            return x

        chosen = [name for name in cache if name.endswith(("attn.hook_z", "mlp.hook_post"))]
        return twin.run_with_hooks(tokens, fwd_hooks=[(name, hook) for name in chosen])

    assert program.agrees(put(nodes["name"][~nodes["true"]]), expected)
    assert not program.agrees(put(nodes["name"][nodes["true"]]), expected)


def test_auroc_is_the_share_of_pairs_in_order():
    assert scoring.auroc([3, 2, 1], [True, False, False]) == 1
    assert scoring.auroc([1, 2, 3], [True, False, False]) == 0
    assert scoring.auroc([5, 5, 5, 5], [True, False, True, False]) == 0.5
    # of (4, 3), (4, 2), (2, 3), (2, 2): right, right, wrong, a tie
    assert scoring.auroc([4, 3, 2, 2], [True, False, True, False]) == pytest.approx(2.5 / 4)
    assert np.isnan(scoring.auroc([1, 2], [True, True]))


def test_the_truth_as_scores_is_perfect_and_bad_frames_are_refused():
    problem = tasks.problem(tasks.load("pair_balance"), "disguised")
    for what in ("nodes", "edges"):
        truth = getattr(problem.truth, what)
        frame = truth.assign(score=truth["true"].astype(float)).sample(frac=1, random_state=0)
        assert scoring.compare(problem, frame, what)["true"] == 1
        assert scoring.compare(problem, frame.assign(score=0.0), what)["true"] == 0.5
        for bad in (frame[1:], frame.assign(score=np.nan), pd.concat([frame, frame[:1]])):
            with pytest.raises(ValueError, match="expected one finite score for each"):
                scoring.compare(problem, bad, what)


def test_gradient_methods_are_right_where_the_model_is_linear():
    """Edges into the output: the metric is linear, so every estimate is the exact effect."""
    task = tasks.problem(tasks.load("pair_balance"), "disguised").task
    task = replace(task, pairs=task.pairs[-1:])
    frames = {
        name: EDGES[name](task).query("reader == 'output'")["score"].to_numpy()
        for name in ("EAP", "EAP-IG", "RelP", "integrated", "secants")
    }
    assert frames["EAP"].max() > 0.1
    for name, scores in frames.items():
        assert scores == pytest.approx(frames["EAP"], abs=1e-6), name
    nodes = {
        name: NODES[name](task).set_index("name")["score"]
        for name in ("exact patches", "exact repairs", "secants")
    }
    # All that its last neurons write goes to the output, directly.
    last = [n for n in task.nodes if n.startswith("L1N")]
    for scores in nodes.values():
        assert scores[last].to_numpy() == pytest.approx(nodes["exact patches"][last], abs=1e-6)


def test_the_ten_lines_of_the_rules_run(capsys):
    text = (FOLDER / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert "disguised" in capsys.readouterr().out


def test_estimates_are_exact_unless_a_later_part_reads_the_write():
    (twin,) = twins.problems(["hist"], [2])
    for problem in (tasks.problem(tasks.load("hist"), "compiled"), twin):
        sites = bounds.sites_of(problem)
        errors = (sites["exact"] - sites["first"]).abs()
        assert errors[sites["read"] == 0].max() < SAME
        assert errors[sites["read"] > 0].max() > 0.1
        assert 0.1 < (sites["read"] > 0).mean() < 0.9
