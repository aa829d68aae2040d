"""Tests of converting real trained weights, made by others."""

import pytest
import torch
from common import needs_hooked_transformer

from attn_only_lens import convert, load, save
from attn_only_lens.models.verify import verify

pytestmark = needs_hooked_transformer


@torch.no_grad()
def test_real_weights(real):
    model, tokens, expected = real
    converted = convert(model)
    assert torch.equal(converted(tokens), model(tokens))
    report = verify(model, converted, tokens[:50])
    assert report.ok, report
    assert report.top1_agreement == 1.0
    assert report.max_kl < 1e-6
    loss = converted(tokens, return_type="loss").item()
    assert loss == pytest.approx(expected["loss_per_token"], rel=1e-5)
    largest = converted(tokens).abs().max().item()
    assert largest == pytest.approx(expected["logits_abs_max"], rel=1e-5)
    # float64: conversion is exact on trained weights, too
    model.to(torch.float64, print_details=False)
    report = verify(model, convert(model), tokens[:50])
    assert report.ok, report


@torch.no_grad()
def test_a_real_neuron_is_ablated_by_cutting_its_self_edge(real):
    model, tokens, _ = real
    tokens = tokens[:20]
    converted = convert(model)
    layer = model.cfg.n_layers - 1
    _, cache = model.run_with_cache(tokens)
    neuron = cache["post", layer].abs().mean((0, 1)).argmax().item()

    def cut(pattern, hook):
        pattern[:, neuron, :, 0] = 0.0

    def ablate(post, hook):
        post[..., neuron] = model.blocks[layer].mlp.b_in[neuron] if model.cfg.gated_mlp else 0.0

    hook = f"blocks.{2 * layer + 1}.attn.hook_pattern"
    got = converted.run_with_hooks(tokens, fwd_hooks=[(hook, cut)])
    ablation = [(f"blocks.{layer}.mlp.hook_post", ablate)]
    expected = model.run_with_hooks(tokens, fwd_hooks=ablation)
    clean = model(tokens)
    scale = clean.abs().max()
    assert (got - expected).abs().max() / scale < 2e-5
    assert (expected - clean).abs().max() / scale > 1e-3


@torch.no_grad()
def test_real_models_are_saved_and_generate(real, tmp_path):
    model, tokens, _ = real
    converted = convert(model)
    loaded = load(save(converted, tmp_path / "saved"))
    assert torch.equal(loaded(tokens), model(tokens))
    if model.tokenizer is not None:
        options = {"max_new_tokens": 12, "do_sample": False, "verbose": False}
        text = model.generate("Once upon a time", **options)
        assert converted.generate("Once upon a time", **options) == text
        assert loaded.generate("Once upon a time", **options) == text
