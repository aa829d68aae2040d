"""Gate and value over a corpus: their product is the neuron's activation, at its own token."""

import re

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
    calibrate,
    convert,
    expose_neuron_heads,
    viz,
)

TEXTS = [[f"<{row}.{at}>" for at in range(POS)] for row in range(BATCH)]


def run(name, make):
    source = boot(name) if make == "expose" else models.build(name)
    with torch.no_grad():
        _, plain = source.run_with_cache(tokens())
        post = plain["blocks.1.mlp.hook_post"][..., 29].numpy()
        if make != "expose" and source.cfg.gated_mlp:
            post = post - source.blocks[1].mlp.b_in[29].item()  # which comes after the product
        if make == "bilinear":
            model = convert(source, gate=Bilinear(calibration=calibrate(source, tokens())))
        else:
            model = expose_neuron_heads(source).model if make == "expose" else convert(source)
        return model.run_with_cache(tokens())[1], post


@pytest.mark.parametrize(
    ("name", "make", "close"),
    [
        ("gpt2", "expose", 1e-12),
        ("llama", "expose", 1e-12),
        pytest.param("silu_gated", "convert", 1e-12, marks=needs_hooked_transformer),
        # Eight heads a neuron, which approximate it on the range of these tokens.
        pytest.param("silu_gated", "bilinear", 0.05, marks=needs_hooked_transformer),
    ],
)
def test_gate_times_value_is_the_activation(name, make, close):
    cache, post = run(name, make)
    (drawn,) = viz.gate_value_scatter(cache, "L1N29", TEXTS).data
    got = np.array(drawn.x) * np.array(drawn.y)
    scale = np.abs(post).max()
    assert np.abs(got - post.ravel()).max() < close * scale
    assert np.abs(got - post.T.ravel()).max() > 1e-3 * scale  # the control: another order
    assert np.abs(np.array(drawn.marker.color) - got).max() < 1e-12 * scale
    assert [each[0] for each in drawn.customdata] == [
        f"&lt;{row}.{at}&gt;" for row in range(BATCH) for at in range(POS)
    ]
    assert [tuple(each[2:]) for each in drawn.customdata] == [*np.ndindex(BATCH, POS)]


def test_padding_is_left_out():
    cache, post = run("gpt2", "expose")
    mask = torch.ones(BATCH, POS, dtype=torch.long)
    mask[0, :3] = 0
    (drawn,) = viz.gate_value_scatter(cache, "L1N29", TEXTS, mask).data
    assert np.array(drawn.x) * np.array(drawn.y) == pytest.approx(post.ravel()[3:], rel=1e-12)
    assert drawn.customdata[0][0] == "&lt;0.3&gt;"


def test_context_is_the_tokens_around():
    cache, _ = run("gpt2", "expose")
    told = viz.gate_value_scatter(cache, "L1N29", TEXTS).data[0].customdata[POS + 7][1]
    plain = re.sub("</?b>", "|", told).replace("&lt;", "<").replace("&gt;", ">")
    before, after = ("".join(f"<1.{at}>" for at in where) for where in (range(2, 7), range(8, 11)))
    assert plain == f"…{before}|<1.7>|{after}"


@pytest.mark.parametrize(
    ("texts", "mask", "reason"),
    [
        (TEXTS[0], None, "the tokens of each of the 2 prompts"),
        ([TEXTS[0], TEXTS[1][:-1]], None, "prompt 1: got 10 tokens; expected 11"),
        (["a" * POS] * 2, None, "prompt 0: got a str for tokens"),
        (TEXTS, torch.ones(POS, BATCH), r"got a mask [11, 2]; expected [2, 11]"),
        (TEXTS, torch.zeros(BATCH, POS), "leaves no token"),
    ],
)
def test_refused(texts, mask, reason):
    cache, _ = run("gpt2", "expose")
    with pytest.raises(InputError, match=re.escape(reason)):
        viz.gate_value_scatter(cache, "L1N29", texts, mask)


def test_refused_caches(monkeypatch):
    cache, _ = run("gpt2", "expose")
    with pytest.raises(UnknownHeadError):
        viz.gate_value_scatter(cache, "L1H1", TEXTS)
    monkeypatch.setattr("attn_only_lens.viz.gate_value.MOST_POINTS", 19)
    with pytest.raises(InputError, match="got 22 tokens; expected 19 at most"):
        viz.gate_value_scatter(cache, "L1N29", TEXTS)
    del cache.cache_dict[mlp_hook("v")]
    with pytest.raises(UnsupportedCallError, match=f"does not hold {mlp_hook('v')}"):
        viz.gate_value_scatter(cache, "L1N29", TEXTS)


@needs_hooked_transformer
def test_heads_with_values_of_their_own_are_refused():
    model = convert(models.build("gelu"), gate=Bilinear(4))
    _, cache = model.run_with_cache(tokens())
    assert viz.gate_value_scatter(cache, "L1N29", TEXTS)
    cache.cache_dict["blocks.3.attn.hook_v"][0, 0, 29 * 4 + 1] += 1.0
    with pytest.raises(InputError, match="values of their own"):
        viz.gate_value_scatter(cache, "L1N29", TEXTS)


@needs_browser
def test_in_a_browser(opened):
    cache, _ = run("gpt2", "expose")
    page = opened(viz.gate_value_scatter(cache, "L1N29", TEXTS))
    page.wait(f"document.querySelectorAll('.scatterlayer path.point').length == {BATCH * POS}")
    assert page.texts(".xtitle") == ["value"]
