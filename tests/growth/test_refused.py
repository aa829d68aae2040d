"""Tests that growth refuses with all reasons in one error and leaves the source unchanged."""

import pytest
import torch
import transformers
from bridges import FAMILIES, boot, bridged, exposed_copy
from common import tokens
from growing import native, same_bits

from attn_only_lens import grow, growth
from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.expansion import compose

MODELS = {name: lambda name=name: native(name) for name in ("ln", "grouped", "attention_only")}
MODELS |= {name: lambda name=name: boot(name) for name in ("gpt2", "llama", "bert")}
MODELS["last norm"] = lambda: native("ln", final_rms=True)
REQUESTS = [
    ("ln", {"d_mlp": 31, "n_layers": 1}, ["d_mlp=31, but the model has 37", "n_layers=1, but"]),
    ("ln", {"expansion": growth.AddNeurons(1), "d_mlp": 41}, ["give either an expansion or sizes"]),
    ("ln", {"d_mlp": True, "init": "x"}, ["d_mlp=True; expected a whole number", "init='x'"]),
    ("ln", {"d_mpl": 41}, ["got a size 'd_mpl'; expected one of d_mlp, n_heads, d_head, d_model"]),
    ("ln", {"expansion": "wider"}, ["expected an expansion from attn_only_lens.growth"]),
    ("ln", growth.AddNeurons(-3, layers=[5]), ["got n=-3", "got layers [5]"]),
    ("ln", growth.AddHeads(2, layers=[0, 0]), ["expected each layer once"]),
    ("ln", growth.InsertLayer(3), ["got at=3; expected 0 … 2"]),
    ("ln", growth.InsertLayer(0, like=2), ["got like=2; expected 0 … 1"]),
    ("ln", growth.WidenValues(2, heads=[2]), ["got heads [2]; expected heads 0 … 1"]),
    ("ln", growth.WidenValues(2), ["one d_head for both; widen both"]),
    ("ln", {"d_mlp": 10**15}, ["grown model takes"]),
    ("last norm", {"d_model": 37}, ["last norm is RMS"]),
    ("attention_only", growth.AddNeurons(1), ["no MLP"]),
    ("grouped", {"n_heads": 8}, ["a multiple of 3"]),
    ("grouped", growth.AddHeads(3, into_groups=True), ["2 groups; expected a multiple of 2"]),
    ("grouped", growth.WidenValues(3, heads=[0, 1]), ["pass whole groups"]),
    ("gpt2", growth.AddHeads(2, into_groups=True), ["would share keys and values"]),
    ("llama", growth.WidenQueriesAndKeys(3), ["even number"]),
    (
        *("bert", compose(growth.InsertLayer(0), growth.WidenStream(2))),
        ["LayerNorm(x) is not x", "no weight can subtract the mean"],
    ),
]


@pytest.fixture(scope="module")
def models():
    """Return a function that builds a model once, and its twin, which nothing changes."""
    made = {}
    return lambda name: made.setdefault(name, (MODELS[name](), MODELS[name]()))


@pytest.mark.parametrize(("name", "request_", "reasons"), REQUESTS)
def test_impossible_requests(name, request_, reasons, models):
    model, twin = models(name)
    with pytest.raises(InputError) as error:
        grow(model, **request_ if isinstance(request_, dict) else {"expansion": request_})
    for reason in reasons:
        assert reason in str(error.value)
    assert same_bits(model, twin)


def test_all_reasons_of_all_steps_at_once():
    steps = (
        growth.AddHeads(-1),
        growth.WidenQueriesAndKeys(-2),
        growth.AddNeurons(1),
        growth.InsertLayer(9),
    )
    with pytest.raises(InputError) as error:
        grow(native(), [compose(*steps[:2]), *steps[2:]])
    assert len(error.value.reasons) == 3
    for reason in ("AddHeads: ", "WidenQueriesAndKeys: ", "InsertLayer: got at=9"):
        assert reason in str(error.value)


def changed(name, path, attribute, value):
    """Return a model of which a module's attribute was changed."""
    model = MODELS[name]() if name in MODELS else native(name)
    setattr(model.original_model.get_submodule(path), attribute, value)
    return model


def with_config(name, **changes):
    """Return a bridge whose transformers configuration was changed."""
    bridge, config = boot(name), FAMILIES[name].config()
    for key, value in changes.items():
        setattr(config, key, value)
    bridge.original_model.config = config
    return bridge


def dynamic():
    config = FAMILIES["llama"].config()
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    make = transformers.AutoModelForCausalLM.from_config
    return bridged(make(config, attn_implementation="eager"))


def faster_rotation():
    bridge = boot("llama")
    for module in bridge.original_model.modules():
        if "inv_freq" in module._buffers:
            module.inv_freq *= 2
    return bridge


def shared():
    bridge = native()
    layers = bridge.original_model.layers
    layers[1].ln1._original_component.weight = layers[0].ln1._original_component.weight
    return bridge


def hooked():
    bridge = native()
    bridge.add_hook("blocks.0.hook_in", lambda value, hook: value)
    return bridge


ODD_MODELS = [
    (lambda: torch.nn.Linear(2, 3), "expected a HookedTransformer"),
    (lambda: boot("gptj"), "got a TransformerBridge of GPTJForCausalLM"),
    (lambda: exposed_copy(native()), "undo"),
    (lambda: boot("native", state="names"), "compatibility mode"),
    (lambda: native().to("meta"), "on the meta device"),
    (shared, "share one parameter"),
    (hooked, "hooks are attached"),
    (
        lambda: changed("rms", "layers.0.ln1._original_component", "eps", 0.5),
        "eps is 0.5; the configuration says",
    ),
    (
        lambda: changed("ln", "layers.0.mlp", "_original_component", torch.nn.Identity()),
        r"layers.0.mlp is an Identity; .* says NativeMLP",
    ),
    (faster_rotation, "inv_freq differs from its value"),
    (dynamic, "'dynamic'"),
    (lambda: with_config("gpt2", scale_attn_weights=False), "scale_attn_weights"),
    (
        lambda: with_config("llama", quantization_config={"quant_method": "gptq"}),
        "quantised weights",
    ),
]


@pytest.mark.parametrize(("make", "reason"), ODD_MODELS)
def test_models_that_are_not_plain(make, reason):
    with pytest.raises(InputError, match=reason):
        grow(make(), n_heads=4, d_head=20)


def test_an_error_half_way_leaves_the_source_as_it_was():
    model, same = native(), native()

    def fails(new, seed):
        if "blocks.1" in new.name:
            raise RuntimeError("power cut")
        return torch.ones(new.shape, dtype=torch.float64)

    with pytest.raises(RuntimeError, match="power cut"):
        grow(model, [growth.WidenStream(3), growth.AddNeurons(2)], init=fails)
    with pytest.raises(ValueError, match="returned"):
        grow(model, d_mlp=41, init=lambda new, seed: torch.ones(3))
    assert same_bits(model, same)
    assert torch.equal(model(tokens()), same(tokens()))
