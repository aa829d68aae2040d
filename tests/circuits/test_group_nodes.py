"""Tests of grouped nodes: joint effects against plain hooks, joint faithfulness, and refusals."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from attn_only_lens import (
    Contrast,
    HeadName,
    circuits,
    expose_neuron_heads,
    load,
    tasks,
    viz,
)
from attn_only_lens import patching as p
from attn_only_lens.circuits._group_nodes import _similar_weights
from attn_only_lens.errors import InputError

CLEAN, CORRUPTED = "The keys near the cabinet", "The key near the cabinet"
CONTRAST = Contrast(CLEAN, CORRUPTED, p.logit_diff(" are", " is"))


pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def case(model):
    """Return a graph and its groups."""
    graph = circuits.attribution_graph(model, CONTRAST, top=40)
    return graph, circuits.group_nodes(graph, model, CONTRAST)


def metric_of(model, changed=(), cache=None):
    """Return the metric when plain hooks replace z of some nodes by the cached values."""
    hooks = []
    for node in changed:
        name, _, position = node.partition("@")
        head = HeadName.parse(name)
        place = head.hook("z", model)

        def put(z, hook, place=place, i=head.index, pos=int(position)):
            z = z.clone()
            z[:, pos, i] = cache[place][:, pos, i]
            return z

        hooks.append((place, put))
    with torch.no_grad():
        last = model.run_with_hooks(CLEAN, fwd_hooks=hooks)[0, -1]
    are, is_ = (model.to_single_token(text) for text in (" are", " is"))
    return float(last[are] - last[is_])


def test_joint_effects_are_those_of_one_patch(model, case):
    groups, (_, cache) = case[-1], model.run_with_cache(CORRUPTED)
    whole, single = metric_of(model), groups.nodes.set_index("id")["effect"]
    for _, group in groups.frame.iterrows():
        members = list(group["members"])
        joint = whole - metric_of(model, members, cache)
        assert group["effect"] == pytest.approx(joint, abs=2e-4)
        alone = sum(whole - metric_of(model, [node], cache) for node in members)
        assert group["sum_of_effects"] == pytest.approx(alone, abs=2e-3)
        assert group["sum_of_effects"] == pytest.approx(single[members].sum())
    assert (abs(groups.frame["effect"] - groups.frame["sum_of_effects"]) > 1e-3).any()


def test_groups_as_a_whole_are_as_faithful_as_their_members(case):
    graph, groups = case
    assert len(groups) >= 2
    assert abs(groups.faithfulness - groups.group_faithfulness) <= 0.05
    members = [node for group in groups.frame["members"] for node in group]
    assert len(members) == len(set(members))
    assert set(members) <= set(graph.heads["id"])
    kinds = graph.heads.set_index("id")[["kind", "position"]]
    for group in groups.frame["members"]:
        assert len(group) > 1
        assert len(kinds.loc[list(group)].drop_duplicates()) == 1


@torch.no_grad()
def test_neurons_that_act_against_one_another_are_not_similar(model):
    """A neuron whose output falls reads, with the opposite sign, what one that rises reads."""
    names, block = [f"L2N{i}" for i in range(29)], model.blocks[2]
    heads = pd.DataFrame({"name": names, "kind": "neuron", "layer": 2})
    z = torch.randn(len(names), 1, generator=torch.Generator().manual_seed(0))
    written = z * block.mlp.W_out[: len(names)]
    reads = z.sign() * (block.ln2.w[:, None] * block.mlp.W_gate)[:, : len(names)].T
    cosine = torch.nn.functional.cosine_similarity
    expected = torch.maximum(
        *(cosine(rows[:, None], rows[None], dim=-1) for rows in (written, reads))
    )
    got = _similar_weights(model, heads, written)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert (z < 0).any()


def test_why_there_are_no_groups(model, case):
    graph, groups = case
    assert groups.why_none == ""
    alone = circuits.group_nodes(graph, model, CONTRAST, similarity=0.999)
    assert len(alone) == 0
    most = re.search(r"have a similarity of ([\d.]+); pass similarity=([\d.]+)", repr(alone))
    least = float(most[2])
    assert least <= float(most[1]) < 0.999
    assert len(circuits.group_nodes(graph, model, CONTRAST, similarity=least, tolerance=1)) > 0
    strict = circuits.group_nodes(graph, model, CONTRAST, tolerance=0)
    assert len(strict) == 0
    assert "changed the faithfulness to" in repr(strict)
    assert "pass a larger tolerance=" in repr(strict)


def test_what_cannot_be_grouped_is_refused(model, case):
    graph, groups = case
    of_one = circuits.attribution_graph(model, replace(CONTRAST, corrupted=None), top=5)

    def refused(match, graph=graph, contrast=CONTRAST):
        with pytest.raises(InputError, match=match):
            circuits.group_nodes(graph, model, contrast)

    refused("a graph of one run", graph=of_one)
    swapped = replace(CONTRAST, clean=CORRUPTED, corrupted=CLEAN)
    refused("prompts other than the graph's", contrast=swapped)
    refused("expected the graph's metric", contrast=replace(CONTRAST, metric=p.loss()))
    with pytest.raises(InputError, match="groups of another graph"):
        viz.circuit_view(of_one, overlays=viz.Overlays(groups=groups))


def test_a_graph_by_role_is_grouped_only_with_its_own_runs(model):
    """Its file holds roles and no tokens, so its runs are recognised by their values."""
    task, other = (
        replace(tasks.agreement(model.tokenizer, 3, structure="simple", seed=i), roles={"end": -1})
        for i in (0, 1)
    )
    graph = circuits.attribution_graph(model, task, positions="roles", top=10)
    assert circuits.group_nodes(graph, model, task).faithfulness > 0
    changed = expose_neuron_heads(load("small-english"), copy=True).model
    with torch.no_grad():
        next(changed.blocks[0].mlp.parameters()).mul_(1.1)
    for match, call in {
        "from another model, or from other prompts": (model, replace(other, metric=task.metric)),
        "the graph is from another model": (changed, task),
        "other corrupted prompts": (model, replace(task, corrupted=other.corrupted)),
    }.items():
        with pytest.raises(InputError, match=match):
            circuits.group_nodes(graph, *call)
