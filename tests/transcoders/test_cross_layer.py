"""Tests of cross-layer transcoders in models, against plain hooks on the original model.

The oracles loop over the layers that a feature writes to. In them, a feature has no more in common
with the package than its definition (`imitated`).
"""

from dataclasses import replace

import pytest
import torch
from common import needs_hooked_transformer, relative, tokens
from drawn_transcoders import bridge, cross_layer_of, hooked, imitated, three_layers

from attn_only_lens import expose_neuron_heads, load, save
from attn_only_lens.errors import UnsupportedCallError, UnsupportedModelError
from attn_only_lens.transcoders import attach, fidelity

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]

GPT2 = three_layers, {"skip": True}, "ln2.hook_out", "mlp.hook_out", 1e-11
# the norms of Gemma 2's bridge compute in float32 for every dtype
GEMMA = (
    *(lambda: bridge("gemma2"), {"reads": "stream", "after_norm": True}),
    *("ln2.hook_in", "ln2_post.hook_out", 1e-5),
)
HOOKED = (
    *(lambda: hooked("gelu", scale=0.24), {"reads": "normalized", "activation": "topk"}),
    *("ln2.hook_normalized", "hook_mlp_out", 1e-11),
)
CASES = [
    pytest.param(GPT2, id="gpt2"),
    pytest.param(GEMMA, id="gemma2"),
    pytest.param(HOOKED, id="hooked", marks=needs_hooked_transformer),
]


def with_features(case, model, transcoders, prompt, edit=None, error=True):
    """Return the logits of the plain model whose MLPs' outputs hooks replace, layer by layer.

    Args:
        edit: (layer, feature, factor): multiplies this feature's activation.
        error: whether errors are kept: an output then changes only by what the edit writes.
    """
    _, _, reads, writes, _ = case
    entered, activations = {}, {}

    def enter(x, hook, layer):
        entered[layer] = x.detach().clone()

    def leave(y, hook, layer):
        own, z = imitated(entered[layer], transcoders[layer])
        change = torch.zeros_like(z)
        if edit and edit[0] == layer:
            change[..., edit[1]] = (edit[2] - 1) * z[..., edit[1]]
        activations[layer] = z, change
        total = y if error else own
        for source, (z_source, changed) in activations.items():
            if source == layer:
                total = total + changed @ transcoders[layer].W_dec
                continue
            decoder = transcoders[source].W_later[layer - source - 1]
            for feature in range(decoder.shape[0]):
                write = changed[..., feature, None] + (0 if error else z_source[..., feature, None])
                total = total + write * decoder[feature]
        return total

    hooks = []
    for layer in range(len(model.blocks)):
        hooks.append((f"blocks.{layer}.{reads}", lambda x, hook, i=layer: enter(x, hook, i)))
        hooks.append((f"blocks.{layer}.{writes}", lambda y, hook, i=layer: leave(y, hook, i)))
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        return model(prompt)


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def test_errors_keep_the_output_and_the_replacement_model_has_all_writes(case):
    make, options, *_, rounding = case
    model, prompt = make(), tokens()
    transcoders = cross_layer_of(model, **options)
    before = model(prompt)
    expected = with_features(case, model, transcoders, prompt, error=False)
    with attach(model, transcoders):
        assert relative(model(prompt), before) < 1e-12
    with attach(model, transcoders, error="zero"):
        assert relative(model(prompt), expected) < rounding
    assert relative(expected, before) > 1e-2  # control: the replacement model is another function
    alone = {layer: replace(x, W_later=None) for layer, x in transcoders.items()}
    with attach(model, alone, error="zero"):
        assert relative(model(prompt), expected) > 1e-3  # control: later writes count
    assert torch.equal(model(prompt), before)


@pytest.mark.parametrize("error", ["node", "zero"])
def test_an_edit_of_a_feature_reaches_every_layer_that_it_writes_to(case, error):
    make, options, *_, rounding = case
    model, prompt = make(), tokens()
    transcoders = cross_layer_of(model, **options)
    before = with_features(case, model, transcoders, prompt, error=error == "node")
    for layer in range(len(model.blocks)):
        with attach(model, transcoders):
            z = model.run_with_cache(prompt)[1][f"blocks.{layer}.mlp.hook_neuron_act"]
        feature = int(z.abs().sum((0, 1, 3)).argmax())

        def scale(z, hook, feature=feature):
            z = z.clone()
            z[:, :, feature] *= -1.7
            return z

        edit = layer, feature, -1.7
        expected = with_features(case, model, transcoders, prompt, edit, error == "node")
        with attach(model, transcoders, error=error), torch.no_grad():
            hooks = [(f"blocks.{layer}.mlp.hook_neuron_act", scale)]
            got = model.run_with_hooks(prompt, fwd_hooks=hooks)
        assert relative(got, expected) < rounding
        assert relative(expected, before) > 1e-4  # control: the edit has an effect


def test_fidelity_counts_later_writes():
    model, prompt = three_layers(), tokens(batch=3)
    transcoders = cross_layer_of(model)
    result = fidelity(model, transcoders, prompt)
    cache = model.run_with_cache(prompt)[1]
    x, y = ([cache[f"blocks.{i}.{p}"] for i in range(3)] for p in ("ln2.hook_out", "mlp.hook_out"))
    outputs, activations = zip(*[imitated(x[i], transcoders[i]) for i in range(3)], strict=True)
    for row in result.layers.itertuples():
        guess = outputs[row.layer]
        for source in range(row.layer):
            guess = (
                guess + activations[source] @ transcoders[source].W_later[row.layer - source - 1]
            )
        miss = (y[row.layer] - guess).square().sum()
        variance = (y[row.layer] - y[row.layer].mean((0, 1))).square().sum()
        assert row.fvu == pytest.approx((miss / variance).item(), rel=1e-9)
        assert row.l0 == pytest.approx((activations[row.layer] != 0).sum(-1).double().mean().item())
    replacement = with_features(GPT2, model, transcoders, prompt, error=False)
    loss = torch.nn.functional.cross_entropy(
        replacement[:, :-1].flatten(0, 1), prompt[:, 1:].flatten()
    )
    assert result.replacement_loss == pytest.approx(loss.item(), rel=1e-9)


def test_gradients_of_features_pass_through_all_writes():
    """A feature's gradient is the sum, over its writes, of decoder times the output's gradient."""
    model, prompt = three_layers(), tokens()
    transcoders = cross_layer_of(model)
    kept = {}

    def keep(y, hook):
        y.retain_grad()
        kept[hook.name] = y

    points = [f"blocks.{layer}.mlp.hook_out" for layer in range(3)]
    with torch.enable_grad(), model.hooks(fwd_hooks=[(name, keep) for name in points]):
        model(prompt)[:, -1, 7].sum().backward()
    written = [kept[name].grad for name in points]
    model.zero_grad()
    first = transcoders[0]
    expected = written[0] @ first.W_dec.T
    for number, W in enumerate(first.W_later):
        expected = expected + written[1 + number] @ W.T
    with attach(model, transcoders), torch.enable_grad():
        hooks = [("blocks.0.mlp.hook_neuron_act", keep)]
        with model.hooks(fwd_hooks=hooks):
            model(prompt)[:, -1, 7].sum().backward()
    got = kept["blocks.0.mlp.hook_neuron_act"].grad.squeeze(-1)
    assert relative(got, expected) < 1e-11
    assert relative(got, written[0] @ first.W_dec.T) > 1e-2  # control


def test_parts_of_cross_layer_transcoders_are_refused():
    model = three_layers()
    whole = cross_layer_of(model)
    untouched = type(model.blocks[0].mlp)
    shorter = {0: replace(whole[0], W_later=whole[0].W_later[:1])}
    after = {2: replace(whole[2], after_norm=True)}
    for transcoders, message in (
        ({0: whole[0]}, r"got layers \[0\] of a cross-layer transcoder.*up to 2.*from layer 0"),
        ({1: whole[1], 2: whole[2]}, r"got layers \[1, 2\] of a cross-layer"),
        (cross_layer_of(bridge("gpt2")), r"got layers \[0, 1\].*the model has 3 layers"),
        (whole | shorter, "layer 0: its features write to 1 later layers; expected 2"),
        (whole | after, "different values of after_norm"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            attach(model, transcoders)
        assert type(model.blocks[0].mlp) is untouched


def test_layers_run_in_one_pass_of_the_model():
    model, prompt = three_layers(), tokens()
    with attach(model, cross_layer_of(model)), torch.no_grad():
        mlp, x = model.blocks[1].mlp, torch.ones(1, 2, model.cfg.d_model, dtype=torch.float64)
        with pytest.raises(UnsupportedCallError, match=r"layer 1 ran without layers \[0\]"):
            mlp(x)
        model(prompt)
        with pytest.raises(UnsupportedCallError, match=r"layer 1 ran without layers \[0\]"):
            mlp(x)  # no values remain after a pass

        def again(y, hook):
            mlp(x)

        def look(y, hook):
            model.blocks[0].mlp(x)  # would replace what layer 0 wrote

        with pytest.raises(UnsupportedCallError, match="layer 0 ran twice, or another pass"):
            model.run_with_hooks(prompt, fwd_hooks=[("blocks.0.hook_mlp_out", look)])
        stream = model.run_with_cache(prompt)[1]["blocks.1.hook_resid_pre"]
        with pytest.raises(UnsupportedCallError, match="start_at_layer=1 skips layers"):
            model(stream, start_at_layer=1)
        with pytest.raises(UnsupportedCallError, match="layer 1 ran twice, or another pass"):
            model.run_with_hooks(prompt, fwd_hooks=[("blocks.1.hook_mlp_out", again)])
        expected, inner = model(prompt), []

        def other_run(y, hook):
            if not inner:
                inner.append(None)
                inner[0] = model(prompt.flip(0))

        got = model.run_with_hooks(prompt, fwd_hooks=[("blocks.1.hook_mlp_out", other_run)])
        assert torch.equal(got, expected)  # a hook may run the model
        assert torch.equal(inner[0], model(prompt.flip(0)))

        def wrapped(y, hook):
            if len(inner) < 2:
                inner.append(None)
                model.original_model(prompt.flip(0))

        with pytest.raises(UnsupportedCallError, match="layer 0 ran twice, or another pass"):
            model.run_with_hooks(prompt, fwd_hooks=[("blocks.1.hook_mlp_out", wrapped)])
        with pytest.raises(UnsupportedCallError, match="not a block, or the model that it wraps"):
            model.original_model(prompt)


@pytest.mark.parametrize("make", [three_layers, lambda: bridge("gemma2")])
def test_generation(make):
    model, prompt = make(), tokens(batch=1)
    options = {"max_new_tokens": 3, "do_sample": False, "verbose": False, "stop_at_eos": False}
    plain = model.generate(prompt, **options)
    transcoders = cross_layer_of(model)
    with attach(model, transcoders):
        assert torch.equal(model.generate(prompt, **options), plain)
    with attach(model, transcoders, error="zero"), torch.no_grad():
        got, expected = model.generate(prompt, **options), prompt
        for _ in range(3):
            expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], 1)
    assert torch.equal(got, expected)


def test_saved_models_keep_their_later_writes(tmp_path):
    model, prompt = three_layers(), tokens()
    transcoders = cross_layer_of(model)
    with attach(model, transcoders, error="zero"), torch.no_grad():
        expected = model(prompt)
        save(model, tmp_path / "x")
    with torch.no_grad():
        loaded = load(tmp_path / "x")
        assert relative(loaded(prompt), expected) < 1e-12
    assert torch.equal(loaded.blocks[0].mlp.W_later, transcoders[0].W_later)


def test_a_comparison_without_heads_is_refused():
    model = three_layers()
    with (
        attach(model, cross_layer_of(model)),
        pytest.raises(UnsupportedModelError, match="they run only as heads"),
    ):
        expose_neuron_heads(model, check=tokens())
