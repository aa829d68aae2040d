"""Tests of patterns over a text: the numbers equal the model's, and tokens are not changed."""

import json
import re

import circuitsvis
import numpy as np
import pytest
import torch
from bridges import boot
from browser import needs_browser
from common import POS, mlp_hook, tokens

from attn_only_lens import (
    Bilinear,
    calibrate,
    dense_pattern,
    expose_neuron_heads,
    neuron_gate,
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


def test_a_gated_neuron_with_exact_and_with_bilinear_gates():
    bridge, one = boot("llama"), tokens(batch=1)
    mlp, seen = bridge.original_model.model.layers[1].mlp, {}
    exact = expose_neuron_heads(bridge, copy=True).model
    (neuron,) = drawn(viz.attention_view(exact, "L1N29", one))["neurons"]
    calibration = calibrate(bridge, one)
    gate = Bilinear(4, calibration=calibration)
    shared = expose_neuron_heads(bridge, gate=gate, copy=True).model
    for module_name in ("gate_proj", "up_proj"):
        getattr(mlp, module_name).register_forward_hook(
            lambda module, args, value, module_name=module_name: seen.update(
                {module_name: value[0, :, 29].detach()}
            )
        )
    bridge(one)
    g, u = seen["gate_proj"], seen["up_proj"]
    assert neuron["value"] == pytest.approx((g * u).tolist(), rel=6e-4)
    assert neuron["z"] == pytest.approx((g.sigmoid() * g * u).tolist(), rel=6e-4)
    (neuron,) = drawn(viz.attention_view(shared, ["L1N118"], one))["neurons"]
    assert neuron["value"] == pytest.approx(u.tolist(), rel=0.02)
    assert all(0 <= gate <= 1 for gate in neuron["gate"])
    product = np.array(neuron["gate"]) * np.array(neuron["value"])
    assert neuron["z"] == pytest.approx(product.tolist(), rel=2e-3, abs=1e-9)


def test_a_model_and_its_cache_make_one_page_and_a_name_is_drawn_once(cache):
    names = [*NAMES, *NAMES, "L1H1"]
    texts = [str(token) for token in tokens()[0].tolist()]
    of_cache = viz.attention_view(cache, names, texts)
    assert viz.attention_view(cache.model, names, tokens()[0]) == of_cache
    assert len(drawn(of_cache)["neurons"]) == len(NAMES)
    _, alone = cache.model.run_with_cache(tokens()[:1], remove_batch_dim=True)
    assert not alone.has_batch_dim
    assert viz.attention_view(alone, names, texts) == of_cache
    assert viz.attention_view(alone, names, tokens()[0].tolist()) == of_cache
    with pytest.raises(InputError, match="prompts 0 to 0"):
        viz.attention_view(alone, names, texts, prompt=1)
    whole = drawn(viz.attention_view(cache, p.Sites("heads", layers=1), TEXTS))["heads"][
        "attentionHeadNames"
    ]
    assert whole == ["L1H0", "L1H1"]


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


def test_nothing_is_loaded_from_elsewhere(cache):
    page = viz.attention_view(cache, "L1H0", TEXTS)
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert "script" in page
    assert not EXTERNAL.search(markup)
    assert "default-src 'none'" in markup
    # Control: circuitsvis' own HTML loads its script.
    assert EXTERNAL.search(str(circuitsvis.tokens.colored_tokens(["a"], [0.5])))


EXTERNAL = re.compile(r"<(script|link|img)[^>]+(src|href)=|from \"https?:|import\(")


@pytest.mark.parametrize(
    ("names", "texts", "how", "reason"),
    [
        ([], TEXTS, {}, "got 0 heads; expected 1 to 24"),
        ([f"L0N{i}" for i in range(29)], TEXTS, {}, "got 29 heads; expected 1 to 24: select"),
        (NAMES, TEXTS[:-1], {}, "got 10 tokens; expected the texts of the cache's 11 tokens"),
        (NAMES, TEXTS, {"prompt": 2}, "got prompt=2; the cache has prompts 0 to 1"),
        (p.Sites(NAMES, -1), TEXTS, {}, "got positions=-1; expected heads without positions"),
    ],
)
def test_refused(cache, names, texts, how, reason):
    with pytest.raises(InputError, match=re.escape(reason)):
        viz.attention_view(cache, names, texts, **how)


def test_refused_texts_and_caches(cache):
    for text, reason in (
        (TEXTS, "got a list of texts"),
        (tokens(), "got 2 prompts; expected one"),
    ):
        with pytest.raises(InputError, match=reason):
            viz.attention_view(cache.model, NAMES, text)
    with pytest.raises(UnsupportedCallError, match="no tokenizer"):
        viz.attention_view(cache.model, NAMES, "a text")
    model = expose_neuron_heads(boot("gpt2")).model
    model.train()  # GPT-2's configuration has 10% dropout
    with pytest.raises(InputError, match="dropout is active"):
        viz.attention_view(model, NAMES, tokens()[0])
    _, partial = cache.model.run_with_cache(tokens(), names_filter="blocks.0.attn.hook_pattern")
    with pytest.raises(UnsupportedCallError, match=r"does not hold blocks\.1\.attn\.hook_pattern"):
        viz.attention_view(partial, "L1H0", TEXTS)


READERS = {
    "neuron_pattern": lambda cache: neuron_pattern(cache, "L1N29"),
    "neuron_gate": lambda cache: neuron_gate(cache, "L1N29"),
    "dense_pattern": lambda cache: dense_pattern(cache, "L1N29"),
    "attention_view": lambda cache: viz.attention_view(cache, "L1N29", TEXTS),
}


@torch.no_grad()
def test_caches_of_a_model_that_had_no_neuron_heads_then_or_has_none_now():
    bridge = boot("gpt2")
    _, before = bridge.run_with_cache(tokens())
    states = [(before, r"without neuron-heads.*call convert")]
    exposed = expose_neuron_heads(bridge)
    refused = {"attention_view": f"does not hold {mlp_hook('z')}.*had no neuron-heads yet"}
    for name, read in READERS.items():
        reason = refused.get(name, f"does not hold {mlp_hook('pattern')}.*had no neuron-heads yet")
        with pytest.raises(UnsupportedCallError, match=reason):
            read(before)
    _, during = bridge.run_with_cache(tokens())
    for read in READERS.values():
        read(during)
    exposed.undo()
    states += [(during, r"without neuron-heads.*or expose")]
    states += [(dict(during), "got a dict; expected the cache")]
    for kept, reason in states:
        for read in READERS.values():
            with pytest.raises(UnsupportedCallError, match=reason):
                read(kept)


def test_a_text_too_long_to_draw_is_refused(cache, monkeypatch):
    monkeypatch.setattr("attn_only_lens.viz.attention.MOST_CELLS", POS * POS)
    with pytest.raises(InputError, match="242 heatmap cells"):
        viz.attention_view(cache, p.Sites("heads", layers=1), TEXTS)
