"""Tests that TransformerLens' tools are right on a converted model, or raise a helpful error."""

import re

import pandas as pd
import pytest
import torch
from common import relative, tokens
from models import build
from tiny_tokenizer import tiny_tokenizer
from transformer_lens import SVDInterpreter, patching
from transformer_lens.head_detector import detect_head
from transformer_lens.tools.analysis import direct_logit_attribution
from transformer_lens.tools.analysis.attribution_patching import attribution_patch

import attn_only_lens.patching
from attn_only_lens import HeadName, convert
from attn_only_lens.errors import UnsupportedCallError

CLEAN, CORRUPTED = tokens(1, batch=1), tokens(2, batch=1)


def metric(logits):
    return (logits[:, -1, 7] - logits[:, -1, 11]).sum()


CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # TransformerLens holds results in float32
SWEEPS = [name for name in dir(patching) if name.startswith("get_act_patch_")]
OF_BLOCKS = {"get_act_patch_resid_pre": ("resid_pre", "resid_mid")}
OF_BLOCKS["get_act_patch_attn_out"] = ("attn_out", "mlp_out")


@pytest.mark.parametrize("name", OF_BLOCKS)
@torch.no_grad()
def test_sweeps_without_heads_run(name):
    """A row for each block: even blocks patch the stream or attention, odd ones read MLPs."""
    source = build("gelu")
    converted = convert(source)
    _, cache = converted.run_with_cache(CLEAN)
    _, source_cache = source.run_with_cache(CLEAN)
    got = getattr(patching, name)(converted, CORRUPTED, cache, metric)
    for half, point in enumerate(OF_BLOCKS[name]):
        sweep = getattr(patching, f"get_act_patch_{point}")
        of_source = sweep(source, CORRUPTED, source_cache, metric)
        torch.testing.assert_close(got[half::2], of_source, **CLOSE)


@pytest.mark.parametrize("name", [name for name in SWEEPS if name not in OF_BLOCKS])
@torch.no_grad()
def test_sweeps_by_head_or_layer_are_refused_with_the_call_to_make(name):
    converted = convert(build("gelu"))
    clean, corrupted = CLEAN[:, :3], CORRUPTED[:, :3]
    _, cache = converted.run_with_cache(clean)
    with pytest.raises(UnsupportedCallError, match=r"index_df|block 2l|hook_mlp_out") as caught:
        getattr(patching, name)(converted, corrupted, cache, metric)
    if name in ("get_act_patch_resid_mid", "get_act_patch_mlp_out", "get_act_patch_block_every"):
        call = "resid_pre" if name.endswith("resid_mid") else "attn_out"
        start = f"call transformer_lens.patching.get_act_patch_{call}(model, "
        assert str(caught.value).startswith(start)
        assert "row 2l + 1 is" in str(caught.value).partition("\n")[0]
        return
    assert "activation_patch(" in str(caught.value).partition("\n")[0]
    call = re.search(r"patching\.activation_patch\([^)]*\)", str(caught.value)).group()
    contrast = attn_only_lens.Contrast(clean, corrupted, metric)
    names = {"model": converted, "contrast": contrast, "patching": attn_only_lens.patching}
    assert set(eval(call, names).frame["name"]) >= {"L0H0", "L2H1"}


@torch.no_grad()
def test_patching_of_named_neuron_heads():
    """generic_activation_patch with an explicit frame equals patches of the source's neurons."""
    source = build("llama")
    converted = convert(source)
    _, cache = converted.run_with_cache(CLEAN)
    _, source_cache = source.run_with_cache(CLEAN)
    heads = [HeadName.parse(text) for text in ("L0N3", "L1N29", "L2N36")]
    frame = pd.DataFrame(
        [(head.block(converted), pos, head.index) for head in heads for pos in (4, 10)],
        columns=["layer", "pos", "head_index"],
    )
    got = patching.generic_activation_patch(
        converted,
        CORRUPTED,
        cache,
        metric,
        patching.layer_pos_head_vector_patch_setter,
        "z",
        index_df=frame,
    )
    expected = []
    for block, pos, neuron in frame.itertuples(index=False):
        hook = f"blocks.{block // 2}.mlp.hook_post"

        def patch(post, hook, pos=pos, neuron=neuron):
            post[:, pos, neuron] = source_cache[hook.name][:, pos, neuron]
            return post

        logits = source.run_with_hooks(CORRUPTED, fwd_hooks=[(hook, patch)])
        expected.append(metric(logits).item())
    torch.testing.assert_close(got, torch.tensor(expected), **CLOSE)
    assert (got - metric(converted(CORRUPTED))).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["llama", "parallel"])
def test_attribution_patching_scores_every_neuron(name):
    source = build(name)
    converted = convert(source)
    scores = attribution_patch(converted, CLEAN, CORRUPTED, metric).node_scores

    names = [f"blocks.{layer}.mlp.hook_post" for layer in range(3)]
    with torch.no_grad():
        _, clean = source.run_with_cache(CLEAN, names_filter=names)
    live = {}

    def keep(x, hook):
        x.requires_grad_(True)
        x.retain_grad()
        live[hook.name] = x

    metric(source.run_with_hooks(CORRUPTED, fwd_hooks=[(n, keep) for n in names])).backward()
    n_checked = 0
    for node, score in scores.items():
        if node.kind == "mlp_out":
            assert score == 0.0
        elif node.kind == "attn_head_out" and node.layer % 2:
            hook = names[node.layer // 2]
            delta = (clean[hook] - live[hook]).detach()[0, node.position, node.head]
            expected = (delta * live[hook].grad[0, node.position, node.head]).item()
            assert score == pytest.approx(expected, rel=1e-9, abs=1e-11)
            n_checked += 1
    assert n_checked == 3 * 37 * CLEAN.shape[1]


@torch.no_grad()
def test_tools_that_count_heads_are_refused(tmp_path):
    source = build("gelu", d_vocab_out=41)
    source.set_tokenizer(tiny_tokenizer(41, tmp_path))
    converted = convert(source)
    with pytest.raises(UnsupportedCallError, match=r"blocks\[i\]\.cfg\.n_heads"):
        detect_head(converted, "w3 w5 w3", "previous_token_head")
    with pytest.raises(
        UnsupportedCallError,
        match=r"tl_parameters is not available on a converted model: SVDInterpreter",
    ):
        SVDInterpreter(converted)
    instead = converted.attention_heads.OV[1, 1].svd()
    expected = SVDInterpreter(source)._get_OV_matrix(1, 1).svd()
    assert all(torch.equal(*pair) for pair in zip(instead, expected, strict=True))


@torch.no_grad()
def test_direct_logit_attribution_by_name():
    """The outputs of all neurons and heads times the unembedding add up to the logit."""
    converted = convert(build("no_norm"))
    logits, cache = converted.run_with_cache(CLEAN)
    for unit, names in (
        ("head", [*converted.all_head_labels(), "remainder"]),
        ("component", cache.decompose_resid(return_labels=True)[1]),
    ):
        result = direct_logit_attribution(converted, CLEAN, 7, unit=unit, pos=None)
        assert result.labels == names
        got = result.attribution.sum(0) + converted.b_U[7]
        assert relative(got, logits[..., 7]) <= 1e-11
