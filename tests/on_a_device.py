"""Tests that all public functions give the CPU's results on another device.

Prompts are on a simulated device without float64 (like MPS), and so are models, or they are split
over two devices. Tensors without a given device are made on another device
(`torch.set_default_device`), and mixing devices raises. So a tensor on the wrong device, or in
float64 where it does not exist, is an error.

`test_devices.py` runs this file, each part in a process of its own.
"""

import copy
import dataclasses
from functools import partial

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from accelerate import dispatch_model
from common import D_VOCAB, needs_hooked_transformer, tokens
from drawn_transcoders import cross_layer_of
from simulated_device import Float64Forbidden, MixedDevices, SimulatedDevice, set_up
from transformer_lens.model_bridge import TransformerBridge

from analyses.benchmarks import cost_at_scale
from analyses.tools.training import Training
from attn_only_lens import (
    Bilinear,
    Contrast,
    circuits,
    compare,
    convert,
    expose_neuron_heads,
    grow,
    growth,
    load,
    neuron_pattern,
    neurons,
    save,
    to_stock,
    transcoders,
    viz,
)
from attn_only_lens import patching as p
from attn_only_lens.engine.metrics import bind
from attn_only_lens.growth.expansion.expansion import compose
from attn_only_lens.models.verify import verify
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from libraries
HERE, ELSEWHERE, SECOND = "simulated:1", "simulated:0", "simulated:2"
CLEAN, CORRUPTED, OTHERS = (tokens(seed, pos=5) for seed in range(3))
METRIC = p.logit_diff([7, 8], [8, 9])
PAIR = Contrast(CLEAN, CORRUPTED, METRIC, roles={"one": [1, 2], "end": -1})
ALONE = dataclasses.replace(PAIR, corrupted=None)
SITES = ["L0N3", "L1N29", "L0H1", "L1H0"]
FEW, EVERYWHERE, LAST = (
    p.Sites(SITES, [2, -1]),
    p.Sites(SITES, "all"),
    p.Sites(["L0N3", "L1H0"], -1),
)
NO_REPAIRS = p.Estimate(budget=0)
# Results are bitwise the CPU's, except where a gradient is summed in another order.
WITHIN = 1e-5
of_bridges = pytest.mark.skipif(HAS_HOOKED_TRANSFORMER, reason="bridges are tested with 4")


def twice(make, use):
    """Check that `use` gives the same for a model on the device as for the model on the CPU."""
    model = make("cpu")
    expected = use(model)
    set_up()
    with SimulatedDevice(forbid_float64=True) as device:
        model = make(HERE)
        device.counts.clear()
        torch.set_default_device(ELSEWHERE)
        try:
            got = use(model)
        finally:
            torch.set_default_device(None)
    assert device.counts
    same(got, expected, WITHIN)


def same(got, expected, within, place="result"):
    """Check that two results agree; numbers may differ by a fraction of the largest one."""
    if isinstance(expected, torch.Tensor):
        got, expected = got.detach().cpu(), expected.detach().cpu()
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), place
        if expected.is_floating_point():
            return same(got.double().numpy(), expected.double().numpy(), within, place)
        assert torch.equal(got, expected), place
    elif isinstance(expected, np.ndarray | float):
        largest = np.abs(np.nan_to_num(expected)).max(initial=0.0)
        np.testing.assert_allclose(got, expected, rtol=0, atol=within * largest, err_msg=place)
    elif isinstance(expected, pd.DataFrame):
        assert list(got) == list(expected), place
        for name, column in expected.items():
            columns = got[name].to_numpy(), column.to_numpy()
            numbers = column.dtype == float
            same(*(columns if numbers else map(list, columns)), within, f"{place}.{name}")
    elif isinstance(expected, dict):
        same(list(got.items()), list(expected.items()), within, place)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), place
        for i, pair in enumerate(zip(got, expected, strict=True)):
            same(*pair, within, f"{place}[{i}]")
    elif dataclasses.is_dataclass(expected):
        names = [field.name for field in dataclasses.fields(expected)]
        for name in names:
            same(getattr(got, name), getattr(expected, name), within, f"{place}.{name}")
    else:
        assert got == expected or (pd.isna(got) and pd.isna(expected)), place
    return None


# Models by device, made there or moved from the CPU.


def bridge(name, device, dtype=torch.float32):
    return bridges.boot(name, dtype).to(device)


# The modules of each family in a device map, and those of them on the second device.
# GPT-2's unembedding is tied to its embedding on the first, so the stream comes back.
PLACES = {
    "gpt2": (
        "transformer.wte transformer.wpe transformer.h.0 lm_head",
        "transformer.h.1 transformer.ln_f",
    ),
    "llama": (
        "model.embed_tokens model.layers.0",
        "model.layers.1 model.norm model.rotary_emb lm_head",
    ),
}


def split(name, device, dtype=torch.float32):
    """Return a bridge on two devices, as transformers loads it with a `device_map`."""
    if device == "cpu":
        return bridges.boot(name, dtype)
    places = zip(PLACES[name], (HERE, SECOND), strict=True)
    device_map = {module: place for modules, place in places for module in modules.split()}
    model = bridges.bridged(dispatch_model(bridges.original(name, dtype), device_map))
    model.cfg.device, model.cfg.n_devices = HERE, 2  # as `boot_transformers` does
    return model


def hooked(name, device, dtype=torch.float32):
    from models import build

    return build(name, dtype, device=device, n_layers=2, d_vocab_out=D_VOCAB)


def with_heads(source, how, gate, device):
    model = source(device)
    if gate == "bilinear":
        gated = getattr(model.blocks[0].mlp, "W_gate", None) is not None
        gate = Bilinear.calibrated(model, CLEAN) if gated else Bilinear()
    if how == "converted":
        return convert(model, gate=gate)
    return expose_neuron_heads(model, gate=gate).model


def made(make, name, how, gate, dtype=torch.float32):
    return partial(with_heads, partial(make, name, dtype=dtype), how, gate)


def moved(*model):
    return lambda device: made(*model)("cpu").to(device)


OF_BRIDGES = made(split, "llama", "exposed", "exact")
SOME = {
    "gpt2, split": made(split, "gpt2", "exposed", "exact"),
    "native_gated, bilinear, moved": moved(bridge, "native_gated", "exposed", "bilinear"),
}
if HAS_HOOKED_TRANSFORMER:  # bridges are tested with 4
    CONVERTED = moved(hooked, "gelu", "converted", "exact")
    SOME = {
        "converted, bilinear, moved": moved(hooked, "silu_gated", "converted", "bilinear"),
        "in place, bilinear": made(hooked, "silu_gated", "exposed", "bilinear"),
    }


# The functions to test


def there(model):
    """Return the prompts on the model's device, because a bridge does not move them."""
    return CLEAN.to(next(model.parameters()).device)


def passes(model):
    """Run a forward pass with every hook live, and a backward pass."""
    logits, cache = model.run_with_cache(there(model))
    logits.float().square().mean().backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return logits, dict(cache.items()), gradients


def patterns(model):
    cache = model.run_with_cache(there(model))[1]
    texts = [[str(token) for token in row] for row in CLEAN.tolist()]
    looked_up = neurons.corpus_statistics(
        model, ["L1N29"], neurons.Corpus(CLEAN.tolist()), k=3
    ).neurons
    return (
        neuron_pattern(cache, "L1N29"),
        neuron_pattern(cache, "L1N29", dense=True),
        neuron_pattern(cache, "L1N29")[..., 0],
        str(viz.attention_view(cache, ["L1N29", "L1H1"], texts[0])),
        looked_up.examples["largest.score"],
        looked_up.counts["z.counts"].sum(),
    )


def sweeps(model):
    return [
        p.activation_patch(model, PAIR, sites=FEW),
        p.activation_patch(model, PAIR, sites=FEW, part="q", direction="noise"),
        p.activation_patch(model, PAIR, sites=FEW, direction="mean"),
    ]


def other_sweeps(model):
    """Run sweeps with other metrics, padding and references, and of both parts of neuron-heads."""
    mask = torch.ones_like(CLEAN)
    mask[0, :2] = 0
    number = p.custom(lambda logits: logits[:, -1, 7].mean().item(), "a number")
    padded = Contrast(CLEAN, CORRUPTED, number, mask=mask)
    pair = padded.pair(model)
    logits = model(pair.clean), model(pair.corrupted)
    metrics = [p.kl(), p.loss(), p.probability(7), p.custom(lambda logits: logits[:, -1, 7].mean())]
    values = [bind(metric, model, pair, logits[0]).of(logits[1]) for metric in metrics]
    resampled, last_neurons = p.Ablation("resample", OTHERS), p.Sites(["L0N3", "L1N29"], -1)
    return (
        values,
        p.activation_patch(model, padded, sites=LAST),
        p.activation_patch(model, PAIR, sites=LAST, direction=resampled),
        p.activation_patch(model, PAIR, sites=last_neurons, part="pattern"),
        p.activation_patch(model, PAIR, sites=last_neurons, part="value"),
    )


def attributions(model):
    return [
        p.attribution(model, PAIR, method="gradient"),
        p.attribution(model, PAIR, part="q", direction="noise", sites="neurons"),
        p.attribution(model, PAIR, method=p.Estimate("integrated", budget=0, steps=2)),
    ]


def circuit(model):
    ranking = p.attribution(model, PAIR, sites=EVERYWHERE, method=NO_REPAIRS)
    how = {"n_random": 1, "ablation": "mean"}
    curve = circuits.faithfulness(model, PAIR, ranking, shares=[0.4, 1.0], **how)
    how = {"sites": EVERYWHERE, "search": circuits.Search(**how)}
    secant = p.Estimate("secant", budget=0)
    circuit = circuits.discover(model, PAIR, faithfulness=0.5, method=secant, **how)
    return curve, circuit, circuits.evaluate(model, circuit, PAIR)


def difference(model):
    graph, pair = (circuits.attribution_graph(model, x, top=10) for x in (ALONE, PAIR))
    assert len(viz.circuit_view(graph, model, ALONE)) > 10_000
    return graph, pair, p.attribution(model, PAIR, method=p.Estimate("secant", 0, split=True))


def weights(model):
    into, onto = (p.Sites(layers=layer) for layer in (0, 1))
    return (
        [circuits.composition(model, into, onto, kind).frame for kind in "qkv"],
        circuits.composition(model, top=5).frame,  # includes the embedding
        circuits.copying_scores(model, tokens=range(D_VOCAB)).drop(columns="copying"),
        circuits.token_circuit(model, "L1H0", "ov").top(3)[["score"]],
        circuits.token_circuit(model, "L1N29", "qk", tokens=[3, 5]).top(2)[["score"]],
        circuits.composition(model, "L0H1", "L1H0", "v").virtual_weights().AB,
    )


def paths(model):
    edges = p.Edges(p.Sites(["L0H1", "L0N3"], -1), ["L1H0", "L1N29", "logits"], "z")
    results = [p.path_patch(model, PAIR, edges, top=3)]
    results.append(circuits.score_sources(model, CLEAN[0], "L1N29", top=3))
    expanded = circuits.path_expansion(model, ALONE)
    results += [expanded.logits, expanded.paths(3)]
    return results, circuits.score_sources(model, CLEAN[0], "L1H0", -1, 0)


def steered(model):
    """Run and generate with heads ablated and steered, and compute scores for each prompt."""
    prompts = there(model)
    width = model.run_with_cache(prompts)[1]["blocks.0.attn.hook_z"].shape[-1]
    results = []
    for context in (
        p.ablated(model, SITES, to="mean", prompts=OTHERS),
        p.ablated(model, "L1N29@1", to="bias"),
        p.steered(model, {"L0N3": 4.0, "L1H0@5": [1.0] * width}),
    ):
        with context:
            results.append(model(prompts))
            # HookedTransformer generates in inference mode, which this device does not support.
            if isinstance(model, TransformerBridge):
                how = {"max_new_tokens": 3, "do_sample": False, "stop_at_eos": False}
                how |= {"return_type": "tokens", "verbose": False}
                results.append(model.generate(prompts, **how))
    probability = p.probability_diff([[7], [9, 11]], [[8, 5], [3]])
    contrast = dataclasses.replace(PAIR, metric=probability)
    rows = p.attribution(model, contrast, sites=p.Sites(SITES, "roles"), per_prompt=True)
    return results, rows


USES = (
    *(passes, patterns, sweeps, other_sweeps, attributions, circuit),
    *(difference, weights, paths, steered),
)
if HAS_HOOKED_TRANSFORMER:  # the others have no code of their own for HookedTransformers
    USES = (passes, sweeps, weights)


@pytest.mark.parametrize("use", USES)
def test_all_that_is_done(use):
    twice(CONVERTED if HAS_HOOKED_TRANSFORMER else OF_BRIDGES, use)


@pytest.mark.parametrize("kind", SOME)
def test_other_models(kind):
    def use(model):
        methods = p.activation_patch, p.attribution
        return passes(model), [method(model, PAIR, sites=LAST) for method in methods]

    twice(SOME[kind], use)


def with_features(make, device):
    """Return a bridge with a cross-layer transcoder, whose features write to both layers."""
    model = make("gpt2", device)
    transcoders.attach(model, cross_layer_of(model, dtype=torch.float32, skip=True))
    return model


def features(model):
    """Patch features, draw graphs with all of them, and find a circuit."""
    names = p.Sites(["L0F3", "L0F7", "L1F5"], -1)
    search = circuits.Search(n_random=1)
    graphs = [circuits.attribution_graph(model, x, top=40) for x in (PAIR, ALONE)]
    return (
        model(there(model)).detach(),
        p.activation_patch(model, PAIR, sites=names).frame,
        p.attribution(model, PAIR, sites=p.Sites("features", -1), method="secant").frame,
        p.path_patch(model, PAIR, p.Edges(p.Sites(["L0F3"], -1), ["L1F5", "logits"])).frame,
        [frame for graph in graphs for frame in (graph.nodes, graph.edges)],
        circuits.discover(
            model, PAIR, faithfulness=0.7, method="secant", search=search
        ).faithfulness,
    )


@of_bridges
@pytest.mark.parametrize("make", [bridge, split])
def test_features_that_write_to_several_layers(make):
    twice(partial(with_features, make), features)


@of_bridges
def test_half_precision():
    """Functions run; values in half precision depend on rounding, and are not compared."""
    set_up()
    with SimulatedDevice(forbid_float64=True):
        model = moved(bridge, "gpt2", "exposed", "exact")(HERE).to(torch.bfloat16)
        torch.set_default_device(ELSEWHERE)
        try:
            for use in (passes, sweeps):
                use(model)
        finally:
            torch.set_default_device(None)
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}


# Models made from other models


def verified(model):
    """Verify the exposed model, and on 3.9 converted models with both kinds of gates."""
    with expose_neuron_heads(model):
        results = [verify(model, model, CLEAN)]
    if HAS_HOOKED_TRANSFORMER:
        gate = Bilinear.calibrated(model, CLEAN)
        results += [
            verify(model, made, CLEAN) for made in (convert(model), convert(model, gate=gate))
        ]
    return results


def grown(model):
    """Grow every size, train before and after, and shrink the result."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = Training(model, optimizer, {1: compose(growth.AddNeurons(3), growth.WidenStream(2))})
    losses = []
    for _ in training.steps(2):
        loss = training.model(there(model)).square().mean()
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        losses.append(float(loss))
    one = grow(training.model, d_mlp=43, n_layers=3, init=growth.init.copies(), seed=1)
    return losses, [model_now(there(model)) for model_now in (one.model, one.shrink())]


def compared(model):
    larger = grow(model, d_mlp=41, seed=0)
    sizes = growth.ComparisonSizes(2, 0.5, n_patched=1, n_nodes=0)
    contrast = Contrast(torch.cat([CLEAN, CORRUPTED]), None, p.loss())
    comparison = compare(model, larger, contrast, sizes=sizes)
    return comparison.heads, comparison.neurons, comparison.new, comparison.circuits


def trained_and_compared(model):
    """Train a model and its grown model with one optimizer, without a wait, and compare them."""
    device = SimulatedDevice.current()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(some):
        some(there(some)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model)
    larger = grow(model, growth.AddNeurons(5), seed=0)
    waits = device.synchronisations
    optimizer = larger.optimizer(optimizer, model)
    for _ in range(2):
        step(larger.model)
    assert device.synchronisations == waits
    contrast = Contrast(torch.cat([CLEAN, CORRUPTED]), None, p.loss())
    sizes = growth.ComparisonSizes(2, 0.5, n_patched=7, n_nodes=5)
    found = compare(model, larger, contrast, sizes=sizes)
    return found.heads, found.neurons, found.new, found.circuits, found.nodes, found.parts


@of_bridges
@pytest.mark.parametrize("make", [partial(split, "gpt2"), partial(bridge, "native")])
def test_bridges_are_trained_grown_and_compared(make):
    twice(make, trained_and_compared)


@needs_hooked_transformer
def test_converted_models_are_trained_grown_and_compared():
    twice(partial(hooked, "gelu"), trained_and_compared)
    twice(lambda device: convert(hooked("gelu", device)), trained_and_compared)


@of_bridges
@pytest.mark.parametrize("use", [verified, grown, compared], ids=lambda use: use.__name__)
def test_models_made_from_others(use):
    twice(partial(split, "llama"), use)


@needs_hooked_transformer
def test_hooked_transformers_made_from_others():
    def use(model):
        larger = grow(model, growth.AddNeurons(5), seed=0).model
        stock = to_stock(convert(model, gate=Bilinear()))
        return larger(there(model)), stock(there(model))

    twice(partial(hooked, "silu_gated"), verified)
    twice(partial(hooked, "gelu"), use)


def test_saved_and_loaded(tmp_path):
    def use(model):
        folder = save(model, tmp_path / "saved")
        return load(folder, device=there(model).device)(there(model))

    twice(CONVERTED if HAS_HOOKED_TRANSFORMER else OF_BRIDGES, use)


@of_bridges
def test_a_training_goes_on(tmp_path):
    def use(model):
        start = copy.deepcopy(model.state_dict())

        def made():
            model.load_state_dict(start)
            return Training(model, torch.optim.AdamW(model.parameters()), {1: growth.AddNeurons(3)})

        training = made()
        for _ in training.steps(2):
            training.model(there(model)).square().mean().backward()
            training.optimizer.step()
        training.save(tmp_path / "training.safetensors")
        again = made()
        again.resume(tmp_path / "training.safetensors")
        parameters = [list(training_now.model.parameters()) for training_now in (training, again)]
        same(*parameters, within=0.0)
        return parameters

    twice(partial(bridge, "native"), use)


# How many operations are needed


@pytest.mark.usefixtures("working_cache")
@of_bridges
def test_kernels_and_waits_of_a_sweep_of_few_names():
    """The limits hold for any names at any positions: kernels depend on layers, not on widths.

    The model has GPT-2 small's 12 layers. Most passes take the model apart and test it.
    """
    sizes = {"n_layer": 12, "n_embd": 12, "n_head": 2, "vocab_size": 41, "n_positions": 17}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    source = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    exposed = expose_neuron_heads(bridges.bridged(source.eval())).model
    clean = tokens(pos=15)[:1]
    corrupted = clean.clone()
    corrupted[0, 10] = (clean[0, 10] + 1) % D_VOCAB
    names = [f"L{i % 12}N{3 + 2 * i}@{i % 13}" for i in range(17)]
    set_up()
    with SimulatedDevice(forbid_float64=True) as device:
        model, counts = exposed.to(HERE), []
        for _ in range(2):  # the second time, checks are known
            device.counts.clear()
            # A new contrast, because the runs of one are kept.
            contrast = Contrast(clean.to(HERE), corrupted.to(HERE), p.logit_diff(7, 8))
            p.activation_patch(model, contrast, sites=names)
            counts.append((device.total("kernel"), device.synchronisations))
    assert counts[1][0] <= 2_000
    assert counts[1][1] <= 30  # 24 needed; a wait for each name would add 17
    assert counts[0][0] <= 10_000


@pytest.mark.usefixtures("working_cache")
@of_bridges
@pytest.mark.parametrize("n_layers", [2, 5])
def test_kernels_are_as_many_as_the_guide_counts_on(n_layers):
    shape = cost_at_scale.Shape(n_layers, 12, 29, 6, 3, 2, D_VOCAB)
    sizes = {"hidden_size": 12, "intermediate_size": 29, "head_dim": 2, "vocab_size": D_VOCAB}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    config = transformers.LlamaConfig(**sizes, **heads, num_hidden_layers=n_layers)
    source = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    exposed = expose_neuron_heads(bridges.bridged(source.eval())).model
    clean = tokens(pos=13)[:1]
    corrupted = clean.clone()
    corrupted[0, 5] = (clean[0, 5] + 1) % D_VOCAB
    secants = p.Estimate("secant", budget=0)
    set_up()
    with SimulatedDevice() as device, torch.no_grad():
        model = exposed.to(HERE)
        for work, call in (
            ("attribution", lambda pair: p.attribution(model, pair, method=secants)),
            ("forward", lambda pair: model(pair.clean)),
        ):
            for _ in range(2):  # the second time, checks are known
                device.counts.clear()
                call(Contrast(clean.to(HERE), corrupted.to(HERE), p.logit_diff(7, 8)))
            assert device.total("kernel") == pytest.approx(shape.kernels(work), rel=0.1)


# The device itself


def test_what_it_refuses_and_counts():
    set_up()
    x, elsewhere = torch.arange(6.0), torch.ones(3)
    with SimulatedDevice(forbid_float64=True) as device:
        here = x.to(HERE)
        assert (here[:2].sum() + 1).item() == 2.0
        here[torch.tensor([True, False] * 3).to(HERE).nonzero()] = 0
        assert here.cpu().tolist() == [0.0, 1.0, 0.0, 3.0, 0.0, 5.0]
        for tensor in (elsewhere, elsewhere.to(ELSEWHERE)):
            with pytest.raises(MixedDevices, match="mul: simulated:1 and"):
                here[:3] * tensor
        with pytest.raises(MixedDevices, match="generator"):
            torch.randn(3, device=HERE, generator=torch.Generator())
        for conversion in (torch.Tensor.double, lambda x: x.to("cpu", torch.float64)):
            with pytest.raises(Float64Forbidden):
                conversion(here)
        here.cpu().double()
    assert [device.total(kind) for kind in ("H2D", "D2H", "D2D")] == [3, 3, 0]
    assert device.total("sync") == 2  # one number, and one mask
    assert device.synchronisations == 5
