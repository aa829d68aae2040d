"""Every public function on a simulated device without float64: the same as on the CPU.

`test_devices.py` runs this file, in processes of its own.
"""

import dataclasses
import math
from functools import partial

import bridges
import models
import numpy as np
import pandas as pd
import pytest
import torch
from common import tokens
from simulated_device import SimulatedDevice, set_up

import attn_only_lens as aol
from attn_only_lens import circuits, viz
from attn_only_lens import patching as p
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = pytest.mark.filterwarnings("ignore")
DEVICE = "simulated:1"


@pytest.fixture(autouse=True)
def device():
    set_up()
    with SimulatedDevice(forbid_float64=True) as entered:
        yield entered


def same(got, expected, where=""):
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), where
        assert got.dtype == expected.dtype and got.shape == expected.shape, where
        got, expected = got.detach().cpu(), expected.detach().cpu()
        assert torch.equal(got.isnan(), expected.isnan()), where
        assert torch.equal(got.nan_to_num(), expected.nan_to_num()), (
            where,
            (got - expected).abs().max(),
        )
    elif isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(got, expected, check_exact=True, obj=where)
    elif isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key in expected:
            same(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for i, (a, b) in enumerate(zip(got, expected)):
            same(a, b, f"{where}[{i}]")
    elif dataclasses.is_dataclass(expected):
        assert type(got) is type(expected)
        for f in dataclasses.fields(expected):
            same(getattr(got, f.name), getattr(expected, f.name), f"{where}.{f.name}")
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(got), where
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(got, expected)
    else:
        assert got == expected, (where, got, expected)


F32 = {"dtype": torch.float32}


def hooked(name, device, **changes):
    return models.build(name, **F32 | {"d_vocab_out": 41} | changes).to(device)


def bilinear_gated(source):
    return {"gate": "bilinear", "calibration": aol.calibrate(source, tokens())}


def converted(name, device, **changes):
    return aol.convert(hooked(name, device, **changes))


def converted_then_moved(name, device, **changes):
    return converted(name, "cpu", **changes).to(device)


def exposed(name, device, **changes):
    return aol.expose_neuron_heads(hooked(name, device, **changes)).model


def exposed_then_moved(name, device):
    return exposed(name, "cpu").to(device)


def converted_bilinear(name, device):
    source = hooked(name, device)
    how = bilinear_gated(source) if source.cfg.gated_mlp else {"gate": "bilinear"}
    return aol.convert(source, **how)


def exposed_bilinear(name, device):
    source = hooked(name, device)
    how = bilinear_gated(source) if source.cfg.gated_mlp else {"gate": "bilinear"}
    return aol.expose_neuron_heads(source, **how).model


def bridge(name, device, dtype=torch.float32, **gate):
    return aol.expose_neuron_heads(bridges.boot(name, dtype).to(device), **gate).model


def bridge_then_moved(name, device):
    return bridge(name, "cpu").to(device)


def bridge_bilinear(name, device):
    source = bridges.boot(name, torch.float32).to(device)
    how = bilinear_gated(source) if "gated" in name or name == "llama" else {"gate": "bilinear"}
    return aol.expose_neuron_heads(source, **how).model


BF16 = {"dtype": torch.bfloat16}
HOOKED = {
    "converted": partial(converted, "gelu"),
    "converted llama moved": partial(converted_then_moved, "llama"),
    "converted parallel": partial(converted, "parallel"),
    "converted bilinear": partial(converted_bilinear, "gelu"),
    "converted bilinear gated": partial(converted_bilinear, "silu_gated"),
    "converted half": partial(converted, "gelu", **BF16),
    "exposed llama": partial(exposed, "llama"),
    "exposed moved": partial(exposed_then_moved, "gelu"),
    "exposed bilinear gated": partial(exposed_bilinear, "silu_gated"),
    "exposed half": partial(exposed, "llama", **BF16),
}
BRIDGES = {
    "bridge gpt2": partial(bridge, "gpt2"),
    "bridge llama moved": partial(bridge_then_moved, "llama"),
    "bridge neox": partial(bridge, "neox"),
    "bridge native": partial(bridge, "native"),
    "bridge native gated": partial(bridge, "native_gated"),
    "bridge bilinear": partial(bridge_bilinear, "gpt2"),
    "bridge bilinear gated": partial(bridge_bilinear, "llama"),
    "bridge half": partial(bridge, "gpt2", torch.bfloat16),
}
KINDS = (HOOKED if HAS_HOOKED_TRANSFORMER else {}) | BRIDGES

CLEAN, CORRUPTED = tokens(0, pos=7), tokens(1, pos=7)
METRIC = p.logit_diff([7, 8], [8, 9])
SITES = ["L0N3", "L1N29", "L0H1", "L1H0"]


def sweep(model, **how):
    return p.activation_patch(
        model, CLEAN, CORRUPTED, METRIC, sites=SITES, positions=[2, -1], progress=False, **how
    )


def attribution(model, **how):
    return p.attribution(model, CLEAN, CORRUPTED, METRIC, progress=False, **how)


def graph(model):
    return circuits.attribution_graph(model, CLEAN, METRIC, top=10)


def cache_of(model):
    return model.run_with_cache(CLEAN)[1]


def run(model):
    logits, cache = model.run_with_cache(CLEAN)
    return logits, {k: v for k, v in cache.items()}


def backward(model):
    model(CLEAN).float().square().mean().backward()
    return [x.grad for x in model.parameters() if x.grad is not None]


def patterns(model):
    cache = cache_of(model)
    bil = aol.heads.neuron_heads(model)[0].heads_per_neuron > 1
    name = "L1N29.0" if bil else "L1N29"
    return (
        aol.neuron_pattern(cache, name),
        aol.dense_pattern(cache, name),
        aol.neuron_gate(cache, "L1N29"),
    )


def ranking(model):
    return p.attribution(model, CLEAN, CORRUPTED, METRIC, method="gradient", progress=False)


def faith(ablation, model):
    return circuits.faithfulness(
        model,
        CLEAN,
        CORRUPTED,
        METRIC,
        ranking(model),
        ablation=ablation,
        shares=[0.1, 0.5, 1.0],
        n_random=1,
    )


def discover(model):
    return circuits.discover(model, CLEAN, CORRUPTED, METRIC)


def composition(kind, model):
    return circuits.composition(model, p.all_heads([0]), p.all_heads([1]), kind)


def viewed(model):
    cache = cache_of(model)
    texts = [[str(i) for i in row] for row in CLEAN.tolist()]
    g = circuits.attribution_graph(model, CLEAN[:1], p.logit_diff([7], [8]), top=10)
    found = [
        viz.gate_value_scatter(cache, "L1N29", texts).to_json(),
        str(viz.attention_view(cache, 1, texts[0])),
        repr(viz.node_patterns(model.run_with_cache(CLEAN[:1])[1], g.nodes)),
        str(viz.sweep_heatmap(sweep(model)).to_json()),
        str(viz.circuit_page(g, texts[0])),
    ]
    if aol.heads.neuron_heads(model)[0].heads_per_neuron == 1:
        found.append(str(viz.neuron_pattern_view(cache, ["L1N29", "L0N3"], texts[0])))
    return found


FUNCTIONS = {
    "run": run,
    "backward": backward,
    "patterns": patterns,
    **{f"sweep {part}": partial(sweep, part=part) for part in ("z", "pattern", "value", "q")},
    **{
        f"sweep {d}": partial(sweep, direction=d)
        for d in ("noise", "zero", "mean", "resample", "bias")
    },
    **{
        f"attribution {m}": partial(attribution, method=m)
        for m in ("gradient", "exact_gate", "integrated", "frozen_pattern")
    },
    "attribution q": partial(attribution, part="q"),
    "attribution pattern noise": partial(attribution, part="pattern", direction="noise"),
    "gate_and_value": lambda m: p.gate_and_value(
        m, CLEAN, CORRUPTED, METRIC, sites=["L0N3", "L1N29"], positions=-1, progress=False
    ),
    "kl": lambda m: p.activation_patch(
        m, CLEAN, CORRUPTED, p.kl("clean"), sites=SITES, positions=-1, progress=False
    ),
    "loss": lambda m: p.activation_patch(
        m, CLEAN, CORRUPTED, p.loss(), sites=SITES, positions=-1, progress=False
    ),
    "custom": lambda m: p.activation_patch(
        m,
        CLEAN,
        CORRUPTED,
        lambda logits: logits[:, -1, 7].mean(),
        sites=SITES,
        positions=-1,
        progress=False,
    ),
    "custom float": lambda m: p.activation_patch(
        m,
        CLEAN,
        CORRUPTED,
        lambda logits: logits[:, -1, 7].mean().item(),
        sites=SITES,
        positions=-1,
        progress=False,
    ),
    "graph": graph,
    "discover": discover,
    **{f"faithfulness {a}": partial(faith, a) for a in ("zero", "mean", "resample")},
    **{f"composition {k}": partial(composition, k) for k in "qkv"},
    "embed": lambda m: circuits.composition(m, ["embed"], p.all_heads([1]), "v"),
    "top": lambda m: circuits.top_compositions(m, p.all_heads(), p.all_heads(), "v", k=5),
    "enrichment": circuits.enrichment,
    "virtual": lambda m: (
        circuits.virtual_weights(m, "L0H1", "L1N5", "v").AB
        if aol.heads.neuron_heads(m)[0].heads_per_neuron == 1
        else None
    ),
    "neuron_like": lambda m: circuits.neuron_like_heads(m, CLEAN),
    "viz": viewed,
    "fingerprint": p.fingerprint,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_same(kind, function, device):
    make, of = KINDS[kind], FUNCTIONS[function]
    torch.manual_seed(0)
    try:
        expected = of(make("cpu"))
    except aol.AttnOnlyLensError as e:
        pytest.skip(f"refused on cpu: {e}")
    torch.manual_seed(0)
    got = of(make(DEVICE))
    assert device.total("kernel") > 0
    same(got, expected)
