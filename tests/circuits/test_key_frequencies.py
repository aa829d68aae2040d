"""Circuits for one wave of the shipped model's logits consist of that wave's neurons.

A network that has learnt addition modulo p uses a few key frequencies (Nanda et al.,
"Progress measures for grokking via mechanistic interpretability", 2023). Its logits are a sum of
waves cos(2πk(c - a - b)/p). The neurons of one wave are those whose activations over all (a, b)
are waves of that k, so a metric that is the share of one wave has a known circuit.
"""

import math
from functools import cache

import pytest
import torch

from attn_only_lens import Contrast, expose_neuron_heads, pretrained
from attn_only_lens import patching as p
from attn_only_lens.circuits import Search, attribution_graph, discover
from attn_only_lens.heads import HeadName

pytestmark = pytest.mark.numeric

P = 113
KEYS = (7, 22, 49)
SUMS = torch.randint(0, P, (23, 2), generator=torch.Generator().manual_seed(0))


@cache
def shipped():
    return expose_neuron_heads(pretrained.modular_addition()).model


def by_frequency(power):
    """Return the share of each frequency [..., 56] in the power [..., 113, 113] or [..., 113]."""
    axes = power.ndim - 1  # frequencies of one summand, or of both
    shares = []
    for k in range(1, P // 2 + 1):
        entries = torch.tensor([0, k, P - k]) if axes == 2 else torch.tensor([k, P - k])
        selected = power[..., entries]
        shares.append(selected[..., entries, :].sum((-1, -2)) if axes == 2 else selected.sum(-1))
    return torch.stack(shares, -1)


@cache
@torch.no_grad()
def neuron_frequencies():
    """Return for each neuron the frequency with the most variance of its activation at '='."""
    hook = HeadName(0, "neuron", 0).hook("z", shipped())
    _, seen = shipped().run_with_cache(pretrained.modular_addition_tokens(), names_filter=hook)
    grids = seen[hook][:, -1, :, 0].T.reshape(-1, P, P).double()
    power = torch.fft.fft2(grids).abs() ** 2
    power[:, 0, 0] = 0
    return (by_frequency(power).argmax(-1) + 1).numpy()


def wave(k):
    """Return a metric: the share of one wave in the logits of the answers, over SUMS."""
    angles = 2 * math.pi * k / P * (torch.arange(P) - SUMS.sum(1, keepdim=True)).double()
    return p.custom(
        lambda logits: (logits[:, -1, :P].double() * torch.cos(angles)).sum(-1).mean(),
        name=f"wave {k}",
    )


@torch.no_grad()
def test_the_key_frequencies_are_those_of_the_embedding():
    """Three waves carry the embedding, and every neuron has the frequency of one of them."""
    W_E = shipped().W_E[:P].double()
    power = torch.fft.fft(W_E - W_E.mean(0), dim=0).abs() ** 2
    strength = by_frequency(power.T).sum(0)
    order = strength.argsort(descending=True)
    assert {int(k) + 1 for k in order[:3]} == set(KEYS)
    assert strength[order[2]] > 20 * strength[order[3]]
    assert set(neuron_frequencies()) == set(KEYS)


@pytest.mark.parametrize("k", KEYS)
def test_neurons_that_are_found_for_a_wave_are_of_its_frequency(k):
    equals = torch.full((len(SUMS), 1), P)
    prompts = torch.cat([SUMS, equals], dim=1)
    one_run = Contrast(prompts, None, wave(k))
    graph = attribution_graph(shipped(), one_run, top=20, patterns=False)
    neurons = graph.nodes[(graph.nodes["kind"] == "neuron") & (graph.nodes["position"] == 2)]
    others = torch.cat([(SUMS + 31) % P, equals], dim=1)
    contrast = Contrast(prompts, others, wave(k))
    circuit = discover(shipped(), contrast, sites="neurons", search=Search(order="signed"))
    assert circuit.frame["position"].tolist() == [2] * len(circuit)
    for names in (neurons.nlargest(8, "attribution")["name"], circuit.frame["name"]):
        assert len(names) > 3
        found = neuron_frequencies()[[HeadName.parse(name).index for name in names]]
        assert (found == k).mean() > 0.97  # clipping leaks a little into other waves
    assert (neuron_frequencies() == k).mean() < 0.6  # control: most neurons are of other waves
