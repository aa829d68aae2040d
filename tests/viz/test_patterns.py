"""Tests of patterns over a text: the numbers equal the model's, and tokens are not changed."""

import json
import re

import numpy as np
import pytest
import torch
from bridges import boot
from browser import needs_browser
from common import POS, tokens

from attn_only_lens import (
    expose_neuron_heads,
    neuron_pattern,
    viz,
)
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError, UnsupportedCallError

TEXTS = ["<bos>", "</script>", "<b>x</b>", "\n", ' "q"', "&amp;", " the", " the", "日", "'", "</"]
SHOWN = ["<bos>", "</script>", "<b>x</b>", "↵", '·"q"', "&amp;", "·the", "·the", "日", "'", "</"]
NAMES = ["L1N29", "L0N3", "L1N0"]


@pytest.fixture(scope="module")
def plain():
    """Return the cache of a model without neuron-heads."""
    return boot("gpt2").run_with_cache(tokens())[1]


@pytest.fixture(scope="module")
def cache():
    model = expose_neuron_heads(boot("gpt2")).model
    with torch.no_grad():
        return model.run_with_cache(tokens())[1]


def drawn(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def mixed(cache, prompt=0, names=(*NAMES, "L1H1", "L0H0")):
    return drawn(viz.attention_view(cache, names, TEXTS, prompt=prompt))


@torch.no_grad()
def test_heads_and_neuron_heads_are_the_sources(cache, plain):
    prompt = 1
    page = mixed(cache, prompt)
    assert [token["name"] for token in page["tokens"]] == SHOWN
    assert [neuron["name"] for neuron in page["neurons"]] == NAMES
    for name, neuron in zip(NAMES, page["neurons"], strict=True):
        layer, index = map(int, re.fullmatch(r"L(\d+)N(\d+)", name).groups())
        pre, post = (
            plain[f"blocks.{layer}.mlp.hook_{side}"][..., index] for side in ("pre", "post")
        )
        # The page shows four digits.
        assert neuron["z"] == pytest.approx(post[prompt].tolist(), rel=6e-4)
        assert neuron["value"] == pytest.approx(pre[prompt].tolist(), rel=6e-4)
        assert neuron["gate"] == pytest.approx((post / pre)[prompt].tolist(), rel=6e-4)
        assert neuron["z"] != pytest.approx(post[1 - prompt].tolist(), rel=0.01)  # control
    heads = page["heads"]
    assert heads["attentionHeadNames"] == ["L1H1", "L0H0"]
    for layer, index, square in ((1, 1, heads["attention"][0]), (0, 0, heads["attention"][1])):
        expected = plain[f"blocks.{layer}.attn.hook_pattern"][prompt, index].numpy()
        assert np.abs(np.array(square) - expected).max() < 6e-4
    assert heads["maskUpperTri"]


def test_only_what_cannot_be_seen_is_grey():
    page = viz.attention_view(expose_neuron_heads(boot("bert")).model, "L1H0", tokens()[0])
    assert not drawn(page)["heads"]["maskUpperTri"]


@torch.no_grad()
def test_a_gated_neuron():
    bridge, one = boot("llama"), tokens(batch=1)
    cache = bridge.run_with_cache(one)[1]
    g, u = (cache[f"blocks.1.mlp.{name}.hook_out"][0, :, 29] for name in ("gate", "in"))
    exposed = expose_neuron_heads(bridge).model
    (neuron,) = drawn(viz.attention_view(exposed, "L1N29", one))["neurons"]
    assert neuron["value"] == pytest.approx((g * u).tolist(), rel=6e-4)
    assert neuron["z"] == pytest.approx((g.sigmoid() * g * u).tolist(), rel=6e-4)


def test_a_model_and_its_cache_make_one_page_and_a_name_is_drawn_once(cache):
    names = [*NAMES, *NAMES, "L1H1"]
    texts = [str(token) for token in tokens()[0].tolist()]
    of_cache = viz.attention_view(cache, names, texts)
    assert viz.attention_view(cache.model, names, tokens()[0]) == of_cache
    assert len(drawn(of_cache)["neurons"]) == len(NAMES)
    _, alone = cache.model.run_with_cache(tokens()[:1], remove_batch_dim=True)
    assert viz.attention_view(alone, names, texts) == of_cache
    layer = drawn(viz.attention_view(cache, p.Sites("heads", layers=1), TEXTS))
    assert layer["heads"]["attentionHeadNames"] == ["L1H0", "L1H1"]


@needs_browser
def test_tokens_are_seen_as_they_are(opened, cache):
    page = opened(viz.attention_view(cache, [*NAMES, "L1H0", "L1H1"], TEXTS))
    page.wait("document.querySelectorAll('canvas').length == 3")
    assert [text.replace(" ", "·") for text in page.texts(".neuron:first-of-type .t")] == SHOWN
    assert page.js("return document.querySelectorAll('main b:not(.legend b)').length") == 0
    assert page.texts("h4") == ["L1H0", "L1H1"]
    # White means 0 and blue means positive, so red falls as z grows.
    colours = page.js(
        "return [...document.querySelectorAll('.neuron')].map(n => [...n.querySelectorAll('.t')]"
        ".map(s => getComputedStyle(s).backgroundColor.match(/[\\d.]+/g).map(Number)))"
    )
    for neuron, colour in zip(mixed(cache)["neurons"], colours, strict=True):
        most = max(map(abs, neuron["z"]))
        for z, (red, _, blue, *_) in zip(neuron["z"], colour, strict=True):
            assert (blue > red) == (z > 0) or abs(z) < 0.01 * most


@pytest.mark.parametrize(
    ("names", "texts", "how", "reason"),
    [
        ([f"L0N{i}" for i in range(29)], TEXTS, {}, "got 29 heads; expected 1 to 24: select"),
        (NAMES, TEXTS[:-1], {}, "got 10 tokens; expected the texts of the cache's 11 tokens"),
        (NAMES, TEXTS, {"prompt": 2}, "got prompt=2; the cache has prompts 0 to 1"),
    ],
)
def test_refused(cache, names, texts, how, reason):
    with pytest.raises(InputError, match=re.escape(reason)):
        viz.attention_view(cache, names, texts, **how)


def test_refused_texts_and_caches(cache):
    with pytest.raises(InputError, match="got 2 prompts; expected one"):
        viz.attention_view(cache.model, NAMES, tokens())
    model = expose_neuron_heads(boot("gpt2")).model
    model.train()  # GPT-2's configuration has 10% dropout
    with pytest.raises(InputError, match="dropout is active"):
        viz.attention_view(model, NAMES, tokens()[0])
    _, partial = cache.model.run_with_cache(tokens(), names_filter="blocks.0.attn.hook_pattern")
    with pytest.raises(UnsupportedCallError, match=r"does not hold blocks\.1\.attn\.hook_pattern"):
        viz.attention_view(partial, "L1H0", TEXTS)


READERS = (
    lambda cache: neuron_pattern(cache, "L1N29"),
    lambda cache: neuron_pattern(cache, "L1N29", dense=True),
    lambda cache: viz.attention_view(cache, "L1N29", TEXTS),
)


@torch.no_grad()
@pytest.mark.parametrize("read", READERS)
def test_caches_of_a_model_that_had_no_neuron_heads_then_or_has_none_now(read):
    bridge = boot("gpt2")
    _, before = bridge.run_with_cache(tokens())
    exposed = expose_neuron_heads(bridge)
    with pytest.raises(UnsupportedCallError, match="had no neuron-heads yet"):
        read(before)
    _, during = bridge.run_with_cache(tokens())
    read(during)  # control
    exposed.undo()
    with pytest.raises(UnsupportedCallError, match="without neuron-heads"):
        read(during)


def test_a_text_too_long_to_draw_is_refused(cache, monkeypatch):
    monkeypatch.setattr("attn_only_lens.viz.attention.MOST_CELLS", POS * POS)
    with pytest.raises(InputError, match="242 heatmap cells"):
        viz.attention_view(cache, p.Sites("heads", layers=1), TEXTS)
