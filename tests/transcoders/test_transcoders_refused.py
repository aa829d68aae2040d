"""Tests of models and transcoders that do not match, and of tools that do not take features."""

import re
from dataclasses import replace

import bridges
import pytest
import torch
import transformers
from common import needs_hooked_transformer, tokens
from drawn_transcoders import bridge, drawn, hooked, layers_of

from attn_only_lens import (
    Bilinear,
    Contrast,
    circuits,
    compare,
    convert,
    expose_neuron_heads,
    grow,
)
from attn_only_lens import patching as p
from attn_only_lens.errors import (
    ComparisonError,
    InputError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from attn_only_lens.transcoders import attach, detach, fidelity

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens and transformers

METRIC = p.logit_diff(7, 11)


def mixtral():
    config = transformers.MixtralConfig(**bridges.SIZES, **bridges.GROUPED, num_local_experts=3)
    make = transformers.AutoModelForCausalLM.from_config
    return bridges.bridged(make(config, attn_implementation="eager").double().eval())


@pytest.mark.parametrize(
    ("transcoders", "message"),
    [
        ({0: drawn(27)}, "layer 0: got a transcoder for d_model=27; the model has d_model=26"),
        ({7: drawn(26)}, "got layer 7; expected a layer from 0 to 1"),
    ],
)
def test_wrong_transcoders(transcoders, message):
    model = bridge("gpt2")
    with pytest.raises(UnsupportedModelError, match=message):
        attach(model, transcoders)
    assert not hasattr(model.blocks[0].mlp, "hook_error")


@pytest.mark.parametrize(
    ("make", "reads", "message"),
    [
        (lambda: bridge("gptj"), "stream", "attention reads the same norm"),
        (lambda: bridge("olmo2"), "normalized", "there is no norm"),
        (lambda: bridge("bert"), "input", "layer 0: its MLP is not a separate module"),
        (mixtral, "input", "layer 0: its MLP is a mixture of experts"),
        (
            *(lambda: expose_neuron_heads(bridge("gpt2")).model, "input"),
            r"exposed; first call expose_neuron_heads\(model\).undo\(\)",
        ),
        (
            *(lambda: attach(bridge("gpt2"), {1: drawn(26)}).model, "input"),
            r"transcoders replace its MLPs; first call transcoders.detach\(model\)",
        ),
    ],
)
def test_wrong_models(make, reads, message):
    model = make()
    transcoder = drawn(model.cfg.d_model, reads=reads)
    with pytest.raises(UnsupportedModelError, match=message):
        attach(model, {0: transcoder})


@needs_hooked_transformer
def test_converted_models():
    with pytest.raises(UnsupportedModelError, match="got an AttentionOnlyTransformer; expected"):
        attach(convert(hooked("gelu")), {0: drawn(26)})


def test_inputs_without_the_gains_of_norms():
    """Folding gains into an MLP changes its input, but not the normalised stream."""
    plain, folded = bridge("gpt2"), bridge("gpt2")
    folded.enable_compatibility_mode(disable_warnings=True)
    transcoders = layers_of(plain)
    refused = "layers [0, 1]: got transcoders that read the MLP's input, but the gains"
    with pytest.raises(UnsupportedModelError, match=re.escape(refused)):
        attach(folded, transcoders)
    norms = [block.ln2.original_component for block in plain.blocks]
    same = {
        layer: replace(
            transcoder,
            reads="normalized",
            W_enc=norms[layer].weight.detach()[:, None] * transcoder.W_enc,
            b_enc=transcoder.b_enc + norms[layer].bias.detach() @ transcoder.W_enc,
        )
        for layer, transcoder in transcoders.items()
    }
    require_same_features((folded, same), (plain, transcoders))


def require_same_features(*models):
    """Check that transcoders read the same in two forms of a model."""
    seen = []
    for model, transcoders in models:
        with attach(model, transcoders):
            seen.append(model.run_with_cache(tokens())[1])
    for layer in range(2):
        first, second = (cache[f"blocks.{layer}.mlp.hook_pre"] for cache in seen)
        assert (first - second).abs().max() < 1e-6


def test_streams_without_a_mean():
    model = bridge("gpt2")
    transcoders = layers_of(model, reads="stream")
    model.enable_compatibility_mode(disable_warnings=True)
    with pytest.raises(UnsupportedModelError, match=r"layers \[0, 1\]: .* were centred"):
        attach(model, transcoders)
    centred = {
        layer: replace(x, W_enc=x.W_enc - x.W_enc.mean(0)) for layer, x in transcoders.items()
    }
    require_same_features((model, centred), (bridge("gpt2"), centred))


def test_norms_with_gains_of_zero():
    model = bridge("gpt2")
    with torch.no_grad():
        model.blocks[1].ln2.original_component.weight[3] = 0
    attach(model, layers_of(model)).undo()
    attach(model, layers_of(model, reads="stream")).undo()
    with pytest.raises(UnsupportedModelError, match=r"layer 1: .* has gains of 0"):
        attach(model, layers_of(model, reads="normalized"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"W_dec": torch.ones(53, 25)}, r"got W_dec of shape \[53, 25\]; expected \[53, 26\]"),
        ({"b_enc": torch.full((53,), torch.nan).double()}, "b_enc with entries that are NaN"),
        ({"b_dec": torch.zeros(26)}, "expected one floating-point dtype"),
        ({"threshold": None}, "expected a threshold for 'jumprelu'"),
        ({"threshold": -torch.ones(53).double()}, "negative thresholds"),
        ({"activation": "topk", "threshold": None, "k": 54}, "got k=54"),
    ],
)
def test_invalid_transcoders(changes, message):
    with pytest.raises(InputError, match=message):
        replace(drawn(26), **changes)
    with pytest.raises(InputError, match="because W_skip reads it"):
        drawn(26, skip=True).decode(torch.zeros(53).double())


@pytest.mark.parametrize(
    "make", [bridge, pytest.param(hooked, marks=needs_hooked_transformer)], ids=["bridge", "hooked"]
)
def test_what_would_change_the_weights_is_refused(make):
    """TransformerLens would fail, or silently fold norms that no longer come before the MLP."""
    model, prompt = make("gpt2" if make is bridge else "gelu"), tokens()
    plain = model(prompt)
    attach(model, layers_of(model))
    before = model(prompt)
    calls = (
        [lambda: model.enable_compatibility_mode(True), lambda: model.process_weights()]
        if make is bridge
        else [
            lambda: model.process_weights_(),
            lambda: model.load_and_process_state_dict(model.state_dict()),
        ]
    )
    for call in (*calls, expose_neuron_heads(model).undo):
        with pytest.raises(UnsupportedCallError, match=r"first call transcoders.detach\(model\)"):
            call()
        assert torch.equal(model(prompt), before)
    for call in (lambda: convert(model), lambda: grow(model, d_mlp=64)):
        with pytest.raises((UnsupportedModelError, InputError), match=r"detach|TransformerBridge"):
            call()
    detach(model)
    assert torch.equal(model(prompt), plain)


def test_compare_refuses_transcoders():
    model = bridge("gpt2")
    grown = grow(model, d_mlp=64)
    attach(grown.model, {0: drawn(26)})
    with pytest.raises(ComparisonError, match=r"the grown model: transcoders replace its MLPs"):
        compare(model, grown, Contrast(tokens(), None, p.loss()))


def test_tools_that_do_not_take_transcoders():
    model, prompt, second = bridge("gpt2"), tokens(), tokens(1)
    with attach(model, {0: drawn(26)}):
        wrong_model = UnsupportedModelError
        refused = [
            (wrong_model, "detach", lambda: expose_neuron_heads(model, copy=True)),
            (wrong_model, "expected 'exact'", lambda: expose_neuron_heads(model, gate=Bilinear())),
            (wrong_model, "detach", lambda: fidelity(model, {1: drawn(26)}, prompt)),
        ]
        for error, message, call in refused:
            with pytest.raises(error, match=message):
                call()
            assert type(model.blocks[0].mlp).__name__ == "ExposedFeatureMLP"
        for names, part, message in (
            (["L0N5"], "z", "layer 0 has attention heads 0 to 1 and features 0 to 52"),
            (["L0E"], "q", "L0E, which has only an output"),
            (["L0F1"], "k", "keys are constant"),
            (p.Sites("features", layers=1), "z", "these layers have none"),
        ):
            with pytest.raises(InputError, match=message):
                p.activation_patch(model, Contrast(prompt, second, METRIC), sites=names, part=part)


def test_gates_of_topk_have_no_secants():
    model, prompt, second = bridge("gpt2"), tokens(), tokens(1)
    contrast = Contrast(prompt, second, METRIC)
    with attach(model, {1: drawn(26, activation="topk")}):
        for call in (
            lambda: p.attribution(model, contrast, method="secant"),
            lambda: circuits.attribution_graph(model, contrast),
            lambda: circuits.discover(model, contrast),
        ):
            with pytest.raises(UnsupportedModelError, match=r"layer 1 \(topk\) depend on each"):
                call()


def test_paths_begin_at_errors():
    """The path expansion adds up, and paths may also begin at error nodes."""
    model, prompt = bridge("gpt2"), tokens(batch=1, pos=5)
    logits = model(prompt)[0, -1]
    value = (logits[7] - logits[11]).item()
    with attach(model, layers_of(model, skip=True)):
        expansion = circuits.path_expansion(model, Contrast(prompt, None, METRIC), hops=4)
        effects = expansion.effects()["effect"]
        paths = expansion.paths(k=100_000)
    assert effects.sum() == pytest.approx(value, rel=1e-9)
    assert not paths.duplicated(["first", "second"]).any()
    sums = paths.groupby("hops")["effect"].sum()
    assert sums[1] == pytest.approx(effects[1], rel=1e-9)
    assert sums[2] == pytest.approx(effects[2], rel=1e-9)
    one = paths[paths["hops"] == 1]["first"].str.split("@").str[0]
    assert {"L0E", "L1E", "L1S"} <= set(one)
    assert not paths["second"].str.contains("E").any()
