"""Tests of TransformerLens' tools, generation and files on models with several heads per neuron."""

import io

import pandas as pd
import pytest
import torch
from common import relative, tokens
from models import build
from tiny_tokenizer import tiny_tokenizer
from transformer_lens import patching
from transformer_lens.tools.analysis.attribution_patching import attribution_patch

from attn_only_lens import Bilinear, HeadName, calibrate, convert
from attn_only_lens.errors import UnsupportedCallError

CLEAN, CORRUPTED = tokens(1, batch=1), tokens(2, batch=1)
M = 4


def metric(logits):
    return (logits[:, -1, 7] - logits[:, -1, 11]).sum()


@pytest.fixture(params=["gelu", "llama", "parallel"])
def model(request):
    source = build(request.param, d_vocab_out=41)
    how = {"calibration": calibrate(source, tokens())} if source.cfg.gated_mlp else {}
    return convert(source, gate=Bilinear(M, **how))


def test_attribution_patching_scores_every_head(model):
    """Attribution patching equals Δz times the gradient of z per head, from plain torch hooks."""
    scores = attribution_patch(model, CLEAN, CORRUPTED, metric).node_scores
    names = [f"blocks.{block}.attn.hook_z" for block in (1, 3, 5)]
    with torch.no_grad():
        _, clean = model.run_with_cache(CLEAN, names_filter=names)
    live = {}

    def keep(x, hook):
        x.retain_grad()
        live[hook.name] = x

    metric(model.run_with_hooks(CORRUPTED, fwd_hooks=[(n, keep) for n in names])).backward()
    checked = 0
    for node, score in scores.items():
        if node.kind == "attn_head_out" and node.layer % 2:
            hook = names[node.layer // 2]
            index = (0, node.position, node.head, 0)
            expected = ((clean[hook] - live[hook].detach())[index] * live[hook].grad[index]).item()
            assert score == pytest.approx(expected, rel=1e-8, abs=1e-10)
            checked += 1
    assert checked == 3 * 37 * M * CLEAN.shape[1]


@torch.no_grad()
def test_patching_the_heads_of_a_neuron_patches_the_neuron(model):
    _, cache = model.run_with_cache(CLEAN)
    head = HeadName.parse("L1N29")
    heads = head.heads(M)

    def patch(z, hook):
        z[:, 4, heads] = cache[hook.name][:, 4, heads]

    got = model.run_with_hooks(CORRUPTED, fwd_hooks=[(head.hook("z", model), patch)])
    _, corrupted = model.run_with_cache(CORRUPTED)
    neuron = [
        c.get_neuron_results(3, neuron_slice=29)[:, 4].squeeze(-2) for c in (cache, corrupted)
    ]

    def move(out, hook):
        out[:, 4] += neuron[0] - neuron[1]

    expected = model.run_with_hooks(CORRUPTED, fwd_hooks=[("blocks.3.hook_attn_out", move)])
    assert relative(got, expected) <= 1e-11
    assert relative(got, model(CORRUPTED)) > 1e-6

    frame = pd.DataFrame([(3, 4, heads.start + j) for j in range(M)])
    frame.columns = ["layer", "pos", "head_index"]
    setter = patching.layer_pos_head_vector_patch_setter
    one_by_one = patching.generic_activation_patch(
        model, CORRUPTED, cache, metric, setter, "z", index_df=frame
    )
    for j, value in enumerate(one_by_one.tolist()):

        def single(z, hook, head_index=heads.start + j):
            z[:, 4, head_index] = cache[hook.name][:, 4, head_index]

        logits = model.run_with_hooks(CORRUPTED, fwd_hooks=[(head.hook("z", model), single)])
        assert value == pytest.approx(metric(logits).item(), rel=1e-5)
    with pytest.raises(UnsupportedCallError, match="index_df"):
        patching.get_act_patch_attn_head_out_all_pos(model, CORRUPTED, cache, metric)


@pytest.mark.parametrize("cached", [True, False])
@torch.no_grad()
def test_generation(model, cached, tmp_path):
    model.tokenizer = None
    model.set_tokenizer(tiny_tokenizer(41, tmp_path / "tokenizer"))
    options = {"max_new_tokens": 7, "do_sample": False, "verbose": False}
    ids = model.to_tokens("w3 w5 w8")
    for _ in range(7):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == model.tokenizer.eos_token_id:
            break
    got = model.generate(model.to_tokens("w3 w5 w8"), use_past_kv_cache=cached, **options)
    assert torch.equal(got[0, : ids.shape[1]], ids[0])


def test_torch_save_and_training(model):
    with torch.no_grad():
        expected = model(tokens())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        assert torch.equal(again(tokens()), expected)
    optimizer = torch.optim.SGD(again.parameters(), lr=1e-3)
    before = again(tokens(), return_type="loss")
    before.backward()
    optimizer.step()
    with torch.no_grad():
        assert again(tokens(), return_type="loss") < before
        assert torch.equal(model(tokens()), expected)
