"""Everything public on a device that is not the CPU: the same results as on the CPU.

Models and prompts are on one simulated device, without float64 (as MPS is); tensors that do not say
where they go are made on another (`torch.set_default_device`), and to mix devices raises. So
whatever is made in the wrong place, or in float64 where there is none, is an error.

`test_devices.py` runs this file, in processes of its own.
"""

import dataclasses
from functools import partial

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from common import D_VOCAB, tokens
from simulated_device import SimulatedDevice, set_up

from attn_only_lens import (
    calibrate,
    circuits,
    convert,
    dense_pattern,
    expose_neuron_heads,
    neuron_gate,
    neuron_pattern,
    viz,
)
from attn_only_lens import patching as p
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = pytest.mark.filterwarnings("ignore")  # TransformerLens' and transformers' own
HERE, ELSEWHERE = "simulated:1", "simulated:0"
CLEAN, CORRUPTED = tokens(0, pos=5), tokens(1, pos=5)
# Results are the CPU's, but where a gradient is summed up in another order.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


@pytest.fixture
def device():
    set_up()
    with SimulatedDevice(forbid_float64=True) as entered:
        yield entered


def twice(device, make, use):
    """What `use` makes of a model on the CPU and on the device, held against each other."""
    expected = use(make("cpu"))
    dtype = use.__dict__.get("dtype", torch.float32)
    model = make(HERE)
    device.counts.clear()
    torch.set_default_device(ELSEWHERE)
    try:
        got = use(model)
    finally:
        torch.set_default_device(None)
    assert device.counts
    same(got, expected, ROUNDING[dtype])


def same(got, expected, within, where="result"):
    """Fail where two results are not one, numbers within a share of the largest beside them."""
    if isinstance(expected, torch.Tensor):
        got, expected = (x.detach().cpu() for x in (got, expected))
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
        if not expected.is_floating_point():
            assert torch.equal(got, expected), where
        else:
            same(got.double().numpy(), expected.double().numpy(), within, where)
    elif isinstance(expected, np.ndarray | float):
        largest = np.nanmax(np.abs(expected), initial=0, where=np.isfinite(expected))
        np.testing.assert_allclose(got, expected, rtol=0, atol=within * largest, err_msg=where)
    elif isinstance(expected, pd.DataFrame):
        assert list(got) == list(expected), where
        for name in expected:
            one, other = got[name].to_numpy(), expected[name].to_numpy()
            same(
                one if other.dtype == float else list(one),
                other if other.dtype == float else list(other),
                within,
                f"{where}.{name}",
            )
    elif isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key in expected:
            same(got[key], expected[key], within, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            same(one, other, within, f"{where}[{i}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            one, other = (getattr(each, field.name) for each in (got, expected))
            same(one, other, within, f"{where}.{field.name}")
    else:
        assert got == expected or (got is expected) or (pd.isna(got) and pd.isna(expected)), where


# Models with neuron-heads, by device: made there, or made on the CPU and moved.


def source(name, device, dtype=torch.float32):
    if name in bridges.FAMILIES:
        return bridges.boot(name, dtype).to(device)
    import models

    return models.build(name, dtype, device=device, n_layers=2, d_vocab_out=D_VOCAB)


def with_heads(name, how, gate, device, **model):
    given = source(name, device, **model)
    gates = {"gate": gate}
    if gate == "bilinear" and given.cfg.gated_mlp:
        gates["calibration"] = calibrate(given, CLEAN)
    return (
        convert(given, **gates) if how == "converted" else expose_neuron_heads(given, **gates).model
    )


def moved(name, how, gate, device, **model):
    return with_heads(name, how, gate, "cpu", **model).to(device)


HALF = {"dtype": torch.bfloat16}
ALL = {
    "gpt2": partial(with_heads, "gpt2", "exposed", "exact"),
    "llama, moved": partial(moved, "llama", "exposed", "exact"),
}
SOME = {
    "native": partial(with_heads, "native", "exposed", "exact"),
    "native_gated, bilinear": partial(with_heads, "native_gated", "exposed", "bilinear"),
    "neox, bilinear, moved": partial(moved, "neox", "exposed", "bilinear"),
    "gpt2, half": partial(with_heads, "gpt2", "exposed", "exact", **HALF),
}
if HAS_HOOKED_TRANSFORMER:
    ALL |= {
        "converted": partial(with_heads, "gelu", "converted", "exact"),
        "converted, bilinear, gated": partial(with_heads, "silu_gated", "converted", "bilinear"),
        "in place, gated, moved": partial(moved, "silu_gated", "exposed", "exact"),
    }
    SOME |= {
        "converted llama, moved": partial(moved, "llama", "converted", "exact"),
        "converted parallel, bilinear": partial(with_heads, "parallel", "converted", "bilinear"),
        "converted, half": partial(with_heads, "gelu", "converted", "exact", **HALF),
        "in place, bilinear": partial(with_heads, "gelu", "exposed", "bilinear"),
    }

METRIC = p.logit_diff([7, 8], [8, 9])
SITES = ["L0N3", "L1N29", "L0H1", "L1H0"]
GIVEN = (CLEAN, CORRUPTED, METRIC)
QUIET = {"progress": False}


def on(model):
    return CLEAN.to(next(model.parameters()).device)


def passes(model):
    """Forward with every hook, and backward."""
    logits, cache = model.run_with_cache(on(model))
    logits.float().square().mean().backward()
    return (
        logits,
        dict(cache),
        {n: x.grad for n, x in model.named_parameters() if x.grad is not None},
    )


def patterns(model):
    cache = model.run_with_cache(on(model))[1]
    name = "L1N29" if len(neuron_pattern_names(model)) == 1 else "L1N29.0"
    texts = [[str(token) for token in row] for row in CLEAN.tolist()]
    return (
        neuron_pattern(cache, name),
        dense_pattern(cache, name),
        neuron_gate(cache, "L1N29"),
        viz.gate_value_scatter(cache, "L1N29", texts).to_dict(),
        str(viz.neuron_pattern_view(cache, [name], texts[0])),
        str(viz.attention_view(cache, 1, texts[0])),
    )


def neuron_pattern_names(model):
    from attn_only_lens.heads import neuron_heads

    return range(neuron_heads(model)[0].heads_per_neuron)


def sweeps(model):
    at = {"sites": SITES, "positions": [2, -1], **QUIET}
    every = [
        p.activation_patch(model, *GIVEN, part=part, **at)
        for part in ("z", "pattern", "value", "q")
    ]
    for direction in ("noise", "zero", "mean", "resample"):
        every.append(p.activation_patch(model, *GIVEN, direction=direction, **at))
    return every


def metrics(model):
    mask = torch.ones_like(CLEAN)
    mask[0, :2] = 0
    every = [
        p.kl(),
        p.loss(),
        p.log_probability(7),
        p.custom(lambda logits: logits[:, -1, 7].mean(), "number"),
        p.custom(lambda logits: logits[:, -1, 7].mean().item(), "float"),
    ]
    at = {"sites": ["L0N3", "L1H0"], "positions": -1, "mask": mask, **QUIET}
    return [p.activation_patch(model, CLEAN, CORRUPTED, metric, **at) for metric in every]


def split(model):
    return p.gate_and_value(model, *GIVEN, sites=["L0N3", "L1N29"], positions=-1, **QUIET)


def attributions(model):
    found = [p.attribution(model, *GIVEN, method=m, **QUIET) for m in ("gradient", "exact_gate")]
    found += [
        p.attribution(model, *GIVEN, method="exact_gate", part="q", direction="noise", **QUIET)
    ]
    found += [p.attribution(model, *GIVEN, method="integrated", steps=2, **QUIET)]
    return found


def frozen(model):
    graph = circuits.attribution_graph(model, CLEAN, METRIC, top=10)
    picture = viz.circuit_view(graph, model, CLEAN)
    assert len(picture) > 1000
    return p.attribution(model, *GIVEN, method="frozen_pattern", **QUIET), graph


def circuit(model):
    ranking = p.attribution(model, *GIVEN, positions="all", **QUIET)
    given = {"n_random": 1, "ablation": "mean"}
    curve = circuits.faithfulness(model, *GIVEN, ranking, shares=[0.1, 1.0], **given)
    found = circuits.discover(model, *GIVEN, positions="all", faithfulness=0.5, **given)
    return curve, found


def weights(model):
    into, onto = p.all_heads([0]), p.all_heads([1])
    return (
        [circuits.composition(model, into, onto, kind) for kind in "qkv"],
        circuits.top_compositions(model, 5, kind="v"),
        circuits.enrichment(model),
        circuits.virtual_weights(model, "L0H1", "L1H0", "v").AB,
        circuits.neuron_like_heads(model, CLEAN),
    )


USES = {
    use.__name__: use
    for use in (passes, patterns, sweeps, metrics, split, attributions, frozen, circuit, weights)
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ALL)
def test_all_of_some_kinds(kind, use, device):
    twice(device, ALL[kind], USES[use])


@pytest.mark.parametrize("use", ["passes", "sweeps", "attributions"])
@pytest.mark.parametrize("kind", SOME)
def test_some_of_all_kinds(kind, use, device):
    twice(device, SOME[kind], USES[use])
