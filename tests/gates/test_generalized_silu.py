"""Tests of models with the activation a_1 SiLU(a_2 x): exact heads with any coefficients."""

import math

import bridges
import models
import pytest
import torch
from common import BATCH, D_MLP, POS, mlp_hook, needs_hooked_transformer, relative, tokens

from attn_only_lens import (
    Bilinear,
    GeneralizedSiLU,
    convert,
    expose_neuron_heads,
    grow,
    load,
    save,
    to_stock,
)
from attn_only_lens.circuits.weights.head_matrices import HeadMatrices
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.errors import CheckpointError, InputError, UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.models.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
EXACT = 1e-12
SILU = GeneralizedSiLU(0.4, -3.1)


def alpha(x, a_1=SILU.a_1, a_2=SILU.a_2):
    """Compute the activation a_1 SiLU(a_2 x), independently of the package."""
    return a_1 * a_2 * x / (1 + torch.exp(-a_2 * x))


class Activation(torch.nn.Module):
    """An activation module like those of transformers."""

    def __init__(self, function=alpha):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def hooked(name, act_fn=alpha):
    source = models.build(name)
    for block in source.blocks:
        block.mlp.act_fn = act_fn
    return source


def bridge(name, function=alpha):
    """Return a bridge around a model of transformers with replaced activations."""
    model = bridges.original(name)
    for module in model.modules():
        for child in ("act", "act_fn"):
            if hasattr(module, child):
                setattr(module, child, Activation(function))
    return bridges.bridged(model)


def test_coefficients_that_make_no_activation_are_refused():
    for a_1, a_2, reason in (
        (0.0, 1.0, "a_1=0.0"),
        (1.0, math.nan, "a_2=nan"),
        (1e-30, 1e-30, "a_1 · a_2"),
    ):
        with pytest.raises(InputError, match=reason):
            GeneralizedSiLU(a_1, a_2)


def entering(module, run):
    """Return the input of a module in a run."""
    seen = []
    handle = module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    run()
    handle.remove()
    return seen[0]


def check_heads(seen, x, W_Q, W_V, b):
    """Check all values of all heads against the stream that they read and the MLP's weights."""
    a_1, a_2 = SILU.a_1, SILU.a_2
    q = torch.einsum("bpd,dn->bpn", x, W_Q) + b
    u = 1.0 if W_V is None else torch.einsum("bpd,dn->bpn", x, W_V)
    pattern = 1 / (1 + torch.exp(-a_2 * q))
    assert relative(seen["q"][..., 0], q) <= EXACT
    assert relative(seen["v"][..., 0], a_1 * a_2 * q * u) <= EXACT
    assert relative(seen["z"][..., 0], a_1 * a_2 * q * pattern * u) <= EXACT
    assert relative(seen["attn_scores"][..., 1].transpose(1, 2), -a_2 * q) <= EXACT
    assert not seen["attn_scores"][..., 0].any()
    assert relative(seen["pattern"][..., 0].transpose(1, 2), pattern) <= EXACT
    # Control: swapping a_1 and a_2 keeps the product, but changes the pattern.
    swapped = 1 / (1 + torch.exp(-a_1 * q))
    assert relative(seen["pattern"][..., 0].transpose(1, 2), swapped) > 0.1


POINTS = ("q", "v", "attn_scores", "pattern", "z")


@needs_hooked_transformer
@pytest.mark.parametrize("name", ["silu", "llama"])
@torch.no_grad()
def test_hooked_transformers(name):
    source, x = hooked(name), tokens()
    mlp = source.blocks[1].mlp
    expected, reads = source(x), entering(mlp, lambda: source(x))
    gated = source.cfg.gated_mlp
    weights = (mlp.W_gate, mlp.W_in, 0.0) if gated else (mlp.W_in, None, mlp.b_in)
    for model in (convert(source, gate=SILU), expose_neuron_heads(source, gate=SILU, copy=True)):
        model = getattr(model, "model", model)
        assert torch.equal(model(x), expected)
        logits, cache = model.run_with_cache(x)
        assert relative(logits, expected) <= EXACT
        host = host_of(model)
        seen = {point: cache[host.hook_name(1, "neuron", point)] for point in POINTS}
        check_heads(seen, reads, *weights)
        assert verify(source, model, x).ok
    for call in (convert, expose_neuron_heads):
        with pytest.raises(UnsupportedModelError, match=r"not 0\.4 SiLU\(-3\.1001 x\)"):
            call(source, gate=GeneralizedSiLU(0.4, -3.1001))
        with pytest.raises(UnsupportedModelError, match=r"pass gate=GeneralizedSiLU\(a_1, a_2\)"):
            call(source)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_bridges(name):
    model, x = bridge(name), tokens()
    expected, reference_cache = model.run_with_cache(x)
    with pytest.raises(UnsupportedModelError, match="not q times a weight"):
        expose_neuron_heads(model)
    twin = bridge(name)
    exposed = expose_neuron_heads(twin, gate=SILU).model
    assert torch.equal(exposed(x), expected)
    logits, cache = exposed.run_with_cache(x)
    assert relative(logits, expected) <= EXACT
    seen = {point: cache[mlp_hook(point)] for point in POINTS}
    mlp = model.blocks[1].mlp
    gated = name != "gpt2"
    weights = (mlp.W_gate, mlp.W_in, 0.0) if gated else (mlp.W_in, None, mlp.b_in)
    check_heads(seen, reference_cache["blocks.1.mlp.hook_in"], *weights)
    assert verify(model, exposed, x).ok


# refusals


def test_a_bridge_with_another_activation_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"expected one of 0\.4 SiLU\(3\.1 x\)"):
        expose_neuron_heads(bridge("gpt2"), gate=GeneralizedSiLU(0.4, 3.1))
    exposed = expose_neuron_heads(bridge("gpt2"), gate=SILU).model
    with pytest.raises(UnsupportedModelError, match="no exact gate"):
        expose_neuron_heads(exposed)
    assert expose_neuron_heads(exposed, gate=SILU).model is exposed


# files, growth and stock parts


@needs_hooked_transformer
@torch.no_grad()
def test_files_keep_the_gate(tmp_path):
    x, source = tokens(), hooked("llama", SILU)
    exposed = expose_neuron_heads(source, gate=SILU, copy=True).model
    for model, folder in ((convert(source, gate=SILU), "two"), (exposed, "one")):
        same = load(save(model, tmp_path / folder))
        assert torch.equal(same(x), source(x))
        assert relative(same.run_with_cache(x)[0], source(x)) <= EXACT
        assert host_of(same).gates()[2]["silu"] == {"a_1": 0.4, "a_2": -3.1}
    exposed = expose_neuron_heads(hooked("llama"), gate=SILU).model
    for model in (convert(hooked("llama"), gate=SILU), exposed):  # alpha differs by rounding
        with pytest.raises(CheckpointError, match="activation is custom code"):
            save(model, tmp_path / "other")


@torch.no_grad()
def test_bridges_are_saved_where_their_configuration_names_the_activation(tmp_path):
    config = bridges.FAMILIES["gpt2"].config()
    config.activation_function = "quick_gelu"
    gpt2 = bridges.transformers.AutoModelForCausalLM.from_config(config)
    model = bridges.bridged(bridges.randomise(gpt2.double().eval()))
    exposed = expose_neuron_heads(model, gate=GeneralizedSiLU(1 / 1.702, 1.702)).model
    same = load(save(exposed, tmp_path / "saved"))
    assert torch.equal(same(tokens()), exposed(tokens()))
    assert host_of(same).gates() == host_of(exposed).gates()
    with pytest.raises(CheckpointError):
        save(expose_neuron_heads(bridge("gpt2"), gate=SILU).model, tmp_path / "other")


@needs_hooked_transformer
@torch.no_grad()
def test_matrices_growth_and_stock_parts():
    """W_V W_O is a_1 a_2 V_1 V_2, as in the theorem, and hook_v shows x W_V + b_V."""
    source = hooked("silu")
    model, x = convert(source, gate=SILU), tokens()
    attn = model.blocks[3].attn
    outer = SILU.a_1 * SILU.a_2 * torch.outer(attn.W_in[:, 17], attn.W_out[17])
    assert relative((attn.W_V @ attn.W_O)[17], outer) <= EXACT
    _, cache = model.run_with_cache(x)
    read = entering(attn, lambda: model(x))
    v = torch.einsum("bpd,ndh->bpnh", read, attn.W_V) + attn.b_V
    assert relative(cache["v", 3], v) <= EXACT
    matrices = HeadMatrices.of(model, fold_norms=False)
    (sites,) = resolve_sites(model, ["L1N0", "L1N17"])
    assert relative(matrices.read_matrices(sites, "v").A, attn.W_V[[0, 17]]) <= EXACT
    grown = grow(model, d_mlp=43, n_layers=4).model
    assert relative(grown(x), source(x)) <= EXACT
    stock = to_stock(model)
    assert relative(stock(x), source(x)) <= EXACT
    assert stock.blocks[1].attn.b_K[:D_MLP, -1].unique().tolist() == [-3.1]


# one head with a given slope


def one_head(slope):
    return lambda q: q / (1 + torch.exp(-slope * q))


@torch.no_grad()
def test_the_papers_gelu(tmp_path):
    """Compare GPT-2 (tanh gelu) with a bridge whose activation is the paper's approximation."""
    model, x = bridges.boot("gpt2"), tokens()
    with expose_neuron_heads(model, gate=Bilinear(slope="paper")) as exposed:
        expected = bridge("gpt2", one_head(1.702))(x)
        assert relative(exposed(x), expected) <= EXACT
        logits, cache = exposed.run_with_cache(x)
        assert relative(logits, expected) <= EXACT
        assert cache[mlp_hook("pattern")].shape == (BATCH, D_MLP, POS, 2)
        report = verify(bridges.boot("gpt2"), exposed, x)
        assert report.ok
        assert (report.activations["measured"] <= report.activations["bound"]).all()
        assert report.activations["bound"].unique() == pytest.approx([0.0207], abs=5e-5)
        # Control: the best single head computes another function.
        assert relative(expected, bridge("gpt2", one_head(1.77))(x)) > 1e-6
        assert torch.equal(load(save(exposed, tmp_path / "saved"))(x), exposed(x))


def test_slopes_that_are_refused():
    model = bridges.boot("gpt2")
    for options, reason in (
        ({"slope": 0.5}, "a number from 1"),
        ({"slope": math.nan}, "slope=nan"),
        ({"slope": 1.702, "tolerance": 0.1}, "only a slope"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            expose_neuron_heads(model, gate=Bilinear(**options))
    with pytest.raises(InputError, match="expected a number, or 'paper'"):
        Bilinear(slope="steep")
