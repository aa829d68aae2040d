"""Tests of the replacement model and its fidelity against plain hooks on the original model."""

import pytest
import torch
from common import needs_hooked_transformer, relative, tokens
from drawn_transcoders import bridge, hooked, imitated, layers_of

from attn_only_lens import Work
from attn_only_lens.errors import InputError
from attn_only_lens.transcoders import Transcoder, attach, fidelity

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # warnings from TransformerLens and transformers
]


def replaced(model, prompt, transcoders, points):
    """Return the logits and the features' activations if hooks replace the outputs of MLPs.

    Args:
        points: for each layer, the hook points with the transcoder's input and with the output that
                it imitates.
    """
    entered, activations, hooks = {}, {}, []

    def enter(x, hook, layer):
        entered[layer] = x.detach().clone()

    def leave(y, hook, layer):
        x = entered[layer]
        y, activations[layer] = imitated(x, transcoders[layer])
        return y

    def after(layer, act):
        return lambda value, hook: act(value, hook, layer)

    for layer in transcoders:
        reads, writes = (f"blocks.{layer}.{point}" for point in points)
        hooks += [(reads, after(layer, enter)), (writes, after(layer, leave))]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        return model(prompt), activations


HOOKED = {"marks": needs_hooked_transformer}


@pytest.mark.parametrize(
    ("make", "name", "reads", "points"),
    [
        (bridge, "gpt2", "stream", ("ln2.hook_in", "mlp.hook_out")),
        (bridge, "gpt2", "normalized", ("ln2.hook_normalized", "mlp.hook_out")),
        (bridge, "gemma2", "input", ("ln2.hook_out", "ln2_post.hook_out")),
        pytest.param(hooked, "post_norm", "input", ("hook_resid_mid", "hook_mlp_out"), **HOOKED),
        pytest.param(
            *(hooked, "llama", "normalized", ("ln2.hook_normalized", "hook_mlp_out")), **HOOKED
        ),
    ],
)
def test_without_errors_it_computes_what_hooks_replace(make, name, reads, points):
    model, prompt, after_norm = make(name), tokens(), name in ("gemma2", "post_norm")
    activation = {"stream": "topk", "input": "jumprelu", "normalized": "relu"}[reads]
    options = {"reads": reads, "after_norm": after_norm, "activation": activation}
    transcoders = layers_of(model, skip=True, **options)
    expected, activations = replaced(model, prompt, transcoders, points)
    original = model(prompt)
    with attach(model, transcoders, error="zero"):
        logits, cache = model.run_with_cache(prompt)
        plain = model(prompt)
    # The norms of some bridges compute in float32, so inputs agree only up to its rounding.
    rounding = 1e-5 if (make, name) == (bridge, "gemma2") else 1e-11
    assert relative(logits, expected) < rounding
    assert relative(plain, expected) < rounding
    assert relative(original, expected) > 1e-2  # control
    for layer, z in activations.items():
        got = cache[f"blocks.{layer}.mlp.hook_neuron_act"].squeeze(-1)
        assert relative(got, z) < rounding
        assert 0.02 < (z != 0).double().mean() < 0.7
        assert f"blocks.{layer}.mlp.hook_error" not in cache


def test_fidelity_is_that_of_hooks():
    model, prompt = bridge("gpt2"), tokens(batch=5)
    transcoders = layers_of(model)
    mask = torch.ones_like(prompt)
    mask[1, 7:] = 0
    mask[3, 3:] = 0
    result = fidelity(model, transcoders, prompt, mask=mask, work=Work(prompts_at_once=2))

    points = ("ln2.hook_out", "mlp.hook_out")
    original = model(prompt, attention_mask=mask).detach()
    _, cache = model.run_with_cache(prompt)
    replacement, _ = replaced(model, prompt, transcoders, points)
    without, _ = replaced(model, prompt, {k: zero(t) for k, t in transcoders.items()}, points)
    kl = top = 0.0
    losses, n = torch.zeros(3, dtype=torch.float64), 0
    for row in range(5):
        for pos in range(int(mask[row].sum()) - 1):
            logs = [x[row, pos].log_softmax(-1) for x in (original, replacement, without)]
            kl += (logs[0].exp() * (logs[0] - logs[1])).sum().item()
            top += float(logs[0].argmax() == logs[1].argmax())
            losses -= torch.stack([x[prompt[row, pos + 1]] for x in logs])
            n += 1
    loss, replaced_loss, without_loss = (losses / n).tolist()
    assert result.kl == pytest.approx(kl / n, rel=1e-9)
    assert result.top_token == pytest.approx(top / n, rel=1e-9)
    assert result.loss == pytest.approx(loss, rel=1e-9)
    assert result.replacement_loss == pytest.approx(replaced_loss, rel=1e-9)
    recovered = (without_loss - replaced_loss) / (without_loss - loss)
    assert result.loss_recovered == pytest.approx(recovered, rel=1e-9)
    assert result.n_tokens == mask.sum()
    real = mask.bool()
    for row in result.layers.itertuples():
        x, y = (cache[f"blocks.{row.layer}.{point}"][real] for point in points)
        guess, z = imitated(x, transcoders[row.layer])
        assert row.fvu == pytest.approx(
            ((y - guess).square().sum() / (y - y.mean(0)).square().sum()).item(), rel=1e-9
        )
        assert row.l0 == pytest.approx((z != 0).sum(-1).double().mean().item())
        assert row.dead == pytest.approx((z == 0).all(0).double().mean().item())


def zero(transcoder):
    W = torch.zeros_like(transcoder.W_dec)
    return Transcoder(transcoder.W_enc, W, transcoder.b_enc, 0 * transcoder.b_dec)


def test_fidelity_refuses_hooks_and_dropout():
    model, prompt = bridge("gpt2"), tokens()
    transcoders = layers_of(model)
    model.add_hook("blocks.0.hook_mlp_out", lambda x, hook: 0 * x)
    with pytest.raises(InputError, match=r"hooks are attached .*blocks.0.mlp.hook_out"):
        fidelity(model, transcoders, prompt)
    model.reset_hooks()
    model.train()  # GPT-2's configuration has 10% dropout
    with pytest.raises(InputError, match="dropout is active"):
        fidelity(model, transcoders, prompt)
