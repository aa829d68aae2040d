"""Tests that TransformerLens' tools give the same on an exposed model as on the model itself.

The tools of 3.9 and 4 differ. A tool that raises on the plain model raises the same error on the
exposed one; a table lists these tools, so that no tool is skipped for a wrong reason.
"""

import re

import pytest
import torch
from bridges import boot
from common import IN_PLACE, mlp_hook, tokens
from exposed_states import each
from tiny_tokenizer import tiny_tokenizer
from tools_of_transformerlens import (
    NEED_A_NETWORK,
    NEED_NO_MODEL,
    TOOLS,
    outcome,
    public_functions,
    raises,
    same,
)

from attn_only_lens import expose_neuron_heads
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.filterwarnings("ignore"),
]

RAW, PROCESSED, GROUPED = "gpt2", "gpt2 in compatibility mode", "llama"
HOOKED = "hooked gelu"
RAISE = {
    # These require folded norms, or require unfolded ones.
    (GROUPED, "direct_logit_attribution"), (GROUPED, "direct_logit_attribution heads"),
    (PROCESSED, "JacobianLens"), (PROCESSED, "BackwardLens"),
    # These need GPT-2, ungrouped queries, or modules with a reset method.
    (GROUPED, "BackwardLens"), (GROUPED, "attribution_patch edges"), (GROUPED, "faithfulness"),
    *((kind, "reinitialized") for kind in (PROCESSED, GROUPED)),
}  # fmt: skip
"""The tools that raise on a kind of bridge, whether it is exposed or not."""
if HAS_HOOKED_TRANSFORMER:
    RAISE.add((HOOKED, "attribution_patch edges"))
    of_bridges = ("JacobianLens", "BackwardLens", "attention_head_subspace_affinity")
    RAISE |= {(HOOKED, name) for name in of_bridges}


def made(kind):
    if kind == HOOKED:
        from models import build

        return build("gelu", dtype=torch.float32, d_vocab_out=41)
    return boot(kind.split()[0], torch.float32)


@pytest.fixture(
    scope="module",
    params=[HOOKED] if HAS_HOOKED_TRANSFORMER else [PROCESSED, GROUPED],
)
def pair(request, tmp_path_factory):
    """Return a model, and a copy exposed with live hooks on its neuron-heads."""
    pair = [made(request.param) for _ in range(2)]
    for model in pair:
        model.tokenizer = tiny_tokenizer(41, tmp_path_factory.mktemp("words"))
        if request.param == PROCESSED:
            model.enable_compatibility_mode(disable_warnings=True)
    expose_neuron_heads(pair[1])
    seen = []
    for point in ("q", "z"):
        pair[1].add_perma_hook(mlp_hook(point), lambda x, hook: seen.append(hook.name))
    return request.param, *pair, seen


# Tools whose names end with "every" call the others.
@pytest.mark.parametrize("name", [name for name in TOOLS if not name.endswith("_every")])
def test_tool(pair, name):
    kind, alone, exposed, seen = pair
    del seen[:]
    expected, got = outcome(TOOLS[name], alone), outcome(TOOLS[name], exposed)
    assert expected, "a tool that gives nothing compares nothing"
    assert raises(expected) == ((kind, name) in RAISE), expected
    # Several tools use float32, and the two bridges round differently.
    same(got, expected, rtol=1e-3, atol=1e-4)
    of_weights = {"attention_head_subspace_affinity", "decompose_head", "logit_readout"}
    of_modules = {"JacobianLens", "BackwardLens"}  # these hook the transformers model
    if not raises(expected) and name not in of_weights | of_modules:
        assert mlp_hook("z") in seen, "the hooks of the neuron-heads were live"


def test_a_tool_that_gives_another_result_is_seen():
    """The control: with some neurons ablated, several tools give another result."""
    alone, less = boot(RAW, torch.float32), boot(RAW, torch.float32)
    expose_neuron_heads(less)
    less.add_perma_hook(mlp_hook("z", 0), lambda z, hook: z.index_fill(2, torch.arange(20), 0.0))
    for name in ("get_act_patch_mlp_out", "decompose_resid", "attribution_patch", "logit_attrs"):
        with pytest.raises(AssertionError):
            same(outcome(TOOLS[name], less), outcome(TOOLS[name], alone), rtol=1e-3, atol=1e-4)


def test_every_public_tool_is_run_or_needs_no_model():
    """A tool that a later TransformerLens adds fails here until the tables mention it."""
    run = {name.split()[0] for name in TOOLS} | {"EdgeAttributionConfig"}
    names = public_functions()
    assert names - run - NEED_NO_MODEL - NEED_A_NETWORK == set(), "new in TransformerLens"
    assert not NEED_NO_MODEL & run


# TransformerLens' main demo and ARENA's notebooks choose hooks by a word in their names. A filter
# for attention hooks that also chose neuron-heads' hooks would patch, freeze or mask neurons too.


@pytest.mark.parametrize("make", each(["gpt2", "llama"], ["llama"]))
@torch.no_grad()
def test_no_word_of_another_hook_selects_a_neuron_head(make):
    """A filter made from any word in a model's hook names selects what it selects without heads."""
    model = make()
    hook_names, plain_cache = list(model.hook_dict), model.run_with_cache(tokens())[1]
    expose_neuron_heads(model)
    new_names = set(model.hook_dict) - set(hook_names)
    n_layers = len(model.blocks)
    assert new_names == {mlp_hook(point, layer) for point in IN_PLACE for layer in range(n_layers)}
    words = {word for name in hook_names for word in re.split(r"[._]", name)}
    for word in words - {"blocks", "mlp", "hook"}:
        if word.isdecimal():
            continue
        assert not any(name.endswith(word) for name in new_names), word
        if len(word) > 1 or word == "z":
            assert not any(word in name for name in new_names), word
    assert any("act" in name for name in new_names), "the control"
    _, cache = model.run_with_cache(tokens(), names_filter=lambda name: "attn" in name)
    assert set(cache) == {name for name in plain_cache if "attn" in name}
