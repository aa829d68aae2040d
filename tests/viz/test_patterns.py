"""Patterns over a text: the numbers are the model's, and the tokens are shown as they are."""

import json
import re

import circuitsvis
import models
import numpy as np
import pytest
import torch
from bridges import boot
from browser import needs_browser
from common import BATCH, POS, mlp_hook, needs_hooked_transformer, tokens

from attn_only_lens import (
    Bilinear,
    InputError,
    UnknownHeadError,
    UnsupportedCallError,
    convert,
    dense_pattern,
    expose_neuron_heads,
    neuron_gate,
    neuron_pattern,
    viz,
)
from attn_only_lens.viz.circuitsvis_page import Component, circuitsvis_page

TEXTS = ["<bos>", "</script>", "<b>x</b>", "\n", ' "q"', "&amp;", " the", " the", "日", "'", "</"]
SHOWN = ["<bos>", "</script>", "<b>x</b>", "↵", '·"q"', "&amp;", "·the", "·the", "日", "'", "</"]
NAMES = ["L1N29", "L0N3", "L1N0"]
JOINER = "\u2060"


def run(layout):
    """The cache of a model with neuron-heads, and its source's activations and patterns."""
    source = boot("gpt2") if layout == "bridge" else models.build("gelu")
    with torch.no_grad():
        _, plain = source.run_with_cache(tokens())
        model = convert(source) if layout == "two blocks" else expose_neuron_heads(source).model
        _, cache = model.run_with_cache(tokens())
    return cache, plain


LAYOUTS = [
    "bridge",
    pytest.param("in place", marks=needs_hooked_transformer),
    pytest.param("two blocks", marks=needs_hooked_transformer),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def ran(request):
    return run(request.param)


@pytest.fixture(scope="module")
def cache():
    return run("bridge")[0]


def parts(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def self_weight(plain, name):
    """Activation over pre-activation, of the source's own MLP: [batch, pos]."""
    layer, index = map(int, re.fullmatch(r"L(\d+)N(\d+)", name).groups())
    pre, post = (plain[f"blocks.{layer}.mlp.hook_{each}"][..., index] for each in ("pre", "post"))
    return (post / pre).tolist()


@pytest.mark.parametrize("prompt", range(BATCH))
def test_neuron_heads_attend_as_the_source_activates(ran, prompt):
    cache, plain = ran
    *coloured, heads = parts(viz.neuron_pattern_view(cache, NAMES, TEXTS, prompt=prompt))
    assert heads[1]["attentionHeadNames"] == NAMES
    assert heads[1]["tokens"][-1] == "[bias]"
    assert len(heads[1]["tokens"]) == POS + 1
    assert not heads[1]["maskUpperTri"]  # the bias token comes after all queries
    for name, (kind, props), square in zip(NAMES, coloured, heads[1]["attention"], strict=True):
        expected = np.array(self_weight(plain, name)[prompt])
        other = np.array(self_weight(plain, name)[1 - prompt])
        assert kind == "ColoredTokens"
        assert props["values"] == pytest.approx(expected, abs=6e-5)  # four decimals
        assert np.abs(props["values"] - other).max() > 0.01  # the control: another prompt
        # pos × (pos + 1): on itself, and on the bias token in the last column.
        grid = np.zeros((POS, POS + 1))
        grid[range(POS), range(POS)], grid[:, POS] = expected, 1 - expected
        assert np.abs(np.array(square) - grid).max() < 6e-5


def test_attention_heads_are_the_sources(ran):
    cache, plain = ran
    ((kind, props),) = parts(viz.attention_view(cache, 1, TEXTS, prompt=1))
    assert kind == "AttentionHeads"
    assert props["attentionHeadNames"] == ["L1H0", "L1H1"]
    expected = plain["blocks.1.attn.hook_pattern"][1].numpy()
    assert np.abs(np.array(props["attention"]) - expected).max() < 6e-5
    assert props["maskUpperTri"]


@needs_hooked_transformer
def test_only_what_cannot_be_seen_is_grey():
    model = convert(models.build("bidirectional"))
    _, cache = model.run_with_cache(tokens())
    assert not parts(viz.attention_view(cache, 1, TEXTS))[0][1]["maskUpperTri"]


@needs_hooked_transformer
def test_one_head_of_several():
    model = convert(models.build("gelu"), gate=Bilinear(4))
    _, cache = model.run_with_cache(tokens())
    (_, props), _ = parts(viz.neuron_pattern_view(cache, "L1N29.2", TEXTS))
    expected = cache["pattern", 3][0, 29 * 4 + 2, :, 0]
    assert props["values"] == pytest.approx(expected.tolist(), abs=6e-5)


def test_a_name_given_twice_is_drawn_once(cache):
    assert len(parts(viz.neuron_pattern_view(cache, NAMES * 2, TEXTS))) == len(NAMES) + 1


def test_a_cache_may_have_no_batch(cache):
    _, alone = cache.model.run_with_cache(tokens()[:1], remove_batch_dim=True)
    assert not alone.has_batch_dim
    assert viz.neuron_pattern_view(alone, NAMES, TEXTS) == viz.neuron_pattern_view(
        cache, NAMES, TEXTS
    )
    assert viz.attention_view(alone, 1, TEXTS) == viz.attention_view(cache, 1, TEXTS)
    with pytest.raises(InputError, match="prompts 0 to 0"):
        viz.attention_view(alone, 1, TEXTS, prompt=1)


@needs_browser
def test_tokens_are_seen_as_they_are(opened, cache):
    page = opened(viz.neuron_pattern_view(cache, NAMES, TEXTS))
    page.wait("document.querySelectorAll('.colored-tokens').length == 3")
    page.wait("document.querySelectorAll('canvas').length == 4")  # three small, one large
    spans = page.texts("#part-1 .colored-tokens > span")
    assert [text.replace(JOINER, "") for text in spans] == SHOWN
    assert page.js("return document.querySelectorAll('.colored-tokens b').length") == 0
    # White is 0 and blue is 1, on one scale for all: red falls as the weight grows.
    reds = page.js(
        "return [...document.querySelectorAll('.colored-tokens > span > span')]"
        ".map(s => Number(getComputedStyle(s).backgroundColor.match(/\\d+/)[0]))"
    )
    coloured = parts(viz.neuron_pattern_view(cache, NAMES, TEXTS))[:3]
    drawn = [value for _, props in coloured for value in props["values"]]
    order = np.argsort(drawn)
    assert (np.diff(np.array(reds)[order]) <= 0).all()
    assert max(reds) - min(reds) > 100


@needs_browser
def test_circuitsvis_alone_would_make_tags_of_tokens(browser, tmp_path):
    """The control: why tokens are made safe."""
    component = Component("ColoredTokens", {"tokens": ["<b>x</b>"], "values": [0.5]})
    browser.open(viz.write_html(circuitsvis_page("", "", [component]), tmp_path / "raw.html"))
    browser.wait("document.querySelectorAll('.colored-tokens b').length == 1")


@needs_browser
def test_heads_in_a_browser(opened, cache):
    page = opened(viz.attention_view(cache, 1, TEXTS))
    page.wait("document.querySelectorAll('canvas').length == 3")
    assert page.texts("h4") == ["L1H0", "L1H1"]


EXTERNAL = re.compile(r"<(script|link|img)[^>]+(src|href)=|from \"https?:|import\(")


def test_nothing_is_loaded_from_elsewhere(cache):
    page = viz.attention_view(cache, 1, TEXTS)
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert "script" in page
    assert not EXTERNAL.search(markup)
    assert "default-src 'none'" in markup
    # The control: circuitsvis' own HTML loads its script.
    assert EXTERNAL.search(str(circuitsvis.tokens.colored_tokens(["a"], [0.5])))


@pytest.mark.parametrize(
    ("names", "texts", "how", "reason"),
    [
        ([], TEXTS, {}, "got 0 neuron-heads; expected 1 to 24"),
        (
            [f"L0N{i}" for i in range(29)],
            TEXTS,
            {},
            "got 29 neuron-heads; expected 1 to 24: filter",
        ),
        (NAMES, TEXTS[:-1], {}, "got 10 tokens; expected 11"),
        (NAMES, "text", {}, "got a str for tokens"),
        (NAMES, list(range(POS)), {}, "got 0 among the tokens"),
        (NAMES, TEXTS, {"prompt": 2}, "got prompt=2; the cache holds prompts 0 to 1"),
        (NAMES, TEXTS, {"prompt": -1}, "got prompt=-1"),
    ],
)
def test_refused(cache, names, texts, how, reason):
    with pytest.raises(InputError, match=re.escape(reason)):
        viz.neuron_pattern_view(cache, names, texts, **how)


def test_refused_names_layers_and_caches(cache):
    with pytest.raises(UnknownHeadError):
        viz.neuron_pattern_view(cache, "L0H1", TEXTS)
    for layer in (2, -1, True):
        with pytest.raises(InputError, match="source layers 0 to 1"):
            viz.attention_view(cache, layer, TEXTS)
    _, partial = cache.model.run_with_cache(tokens(), names_filter="blocks.0.attn.hook_pattern")
    with pytest.raises(UnsupportedCallError, match=r"does not hold blocks\.1\.attn\.hook_pattern"):
        viz.attention_view(partial, 1, TEXTS)


READERS = {
    "neuron_pattern": lambda cache: neuron_pattern(cache, "L1N29"),
    "neuron_gate": lambda cache: neuron_gate(cache, "L1N29"),
    "dense_pattern": lambda cache: dense_pattern(cache, "L1N29"),
    "neuron_pattern_view": lambda cache: viz.neuron_pattern_view(cache, "L1N29", TEXTS),
    "gate_value_scatter": lambda cache: viz.gate_value_scatter(cache, "L1N29", [TEXTS] * BATCH),
    "attention_view": lambda cache: viz.attention_view(cache, 1, TEXTS),
}


@pytest.mark.parametrize("reader", READERS)
@torch.no_grad()
def test_caches_of_a_model_that_had_no_neuron_heads_then_or_has_none_now(reader):
    read, bridge = READERS[reader], boot("gpt2")
    _, before = bridge.run_with_cache(tokens())
    with pytest.raises(UnsupportedCallError, match=r"without neuron-heads.*convert the"):
        read(before)
    exposed = expose_neuron_heads(bridge)
    if reader == "attention_view":  # it holds what is read
        read(before)
    else:
        reason = f"does not hold {mlp_hook('pattern')}.*before the model"
        with pytest.raises(UnsupportedCallError, match=reason):
            read(before)
    _, during = bridge.run_with_cache(tokens())
    read(during)
    exposed.undo()
    with pytest.raises(UnsupportedCallError, match=r"without neuron-heads.*call expose"):
        read(during)
    with pytest.raises(UnsupportedCallError, match="got a dict; expected the cache"):
        read(bridge.run_with_cache(tokens(), return_cache_object=False)[1])


def test_a_text_too_long_to_draw_is_refused(cache, monkeypatch):
    monkeypatch.setattr("attn_only_lens.viz.attention.MOST_CELLS", POS * POS)
    with pytest.raises(InputError, match="242 cells"):
        viz.attention_view(cache, 1, TEXTS)


def test_without_circuitsvis_it_says_what_to_install(cache, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "circuitsvis", None)
    with pytest.raises(ImportError, match=r"pip install circuitsvis"):
        viz.attention_view(cache, 1, TEXTS)
