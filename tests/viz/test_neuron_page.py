"""Tests of the neuron page in a browser: it shows the given statistics, and navigation works."""

from dataclasses import replace

import pytest
import torch
from bridges import boot
from browser import needs_browser
from common import D_VOCAB

from attn_only_lens import circuits, expose_neuron_heads, neurons, viz
from attn_only_lens.circuits.weights._composition import strongest_partners
from attn_only_lens.errors import InputError
from attn_only_lens.viz import neurons as pages

NAMES = ["L0N3", "L1N0", "L1N29"]


@pytest.fixture(scope="module")
def model():
    return expose_neuron_heads(boot("llama")).model


@pytest.fixture(scope="module")
def examples(model):
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(0, D_VOCAB, (11, 13), generator=generator)
    return neurons.corpus_statistics(model, None, neurons.Corpus([*texts, texts[2]]), k=5).neurons


def test_partners_are_those_of_composition(model):
    top = strongest_partners(model, NAMES, 3)
    W_out = [block.mlp.down_proj.weight.T for block in model.original_model.model.layers]
    others = ["heads", "neurons"]  # without the embedding
    for name, side in (("L0N3", "reads"), ("L1N0", "writes"), ("L1N29", "writes")):
        pair, partner = (
            ((others, name), "writer") if side == "writes" else ((name, others), "reader")
        )
        for kind in ("q", "v"):
            scores = circuits.composition(model, *pair, kind).frame
            expected = scores.nlargest(3, "score").set_index(partner)["score"]
            got = {x.name: abs(x.score) for x in top[name] if (x.side, x.kind) == (side, kind)}
            assert got == pytest.approx(expected.to_dict())
    # The sign is that of the writer's output times the reader's input weights.
    second = model.original_model.model.layers[1]
    gate = second.mlp.gate_proj.weight * second.post_attention_layernorm.weight
    for token in top["L1N0"]:
        if (token.side, token.kind, token.name[:3]) == ("writes", "q", "L0N"):
            assert (W_out[0][int(token.name[3:])] @ gate[0] > 0) == (token.score > 0)


SHOWN = """
return [...document.querySelectorAll('.example:not(.quadrant *)')].map(row => [
  row.querySelector('.value').textContent,
  [...row.querySelectorAll('.t')].map(t => t.textContent),
  [...row.querySelectorAll('.tok')].findIndex(t => t.classList.contains('here')),
  row.querySelector('.from').textContent])
"""


@needs_browser
def test_looking_around(opened, model, examples):
    page = opened(viz.neuron_page(model, None, examples))
    page.wait("document.querySelectorAll('.example').length > 0")
    page.js("location.hash = '#L1N29'")
    page.wait("document.querySelector('#one h2').textContent === 'L1N29'")
    frame = examples.frame()
    for end, button in (("largest", 0), ("smallest", 1)):
        page.js(f"document.querySelectorAll('.bar-of-tabs button')[{button}].click()")
        of_end = frame[(frame["name"] == "L1N29") & (frame["end"] == end)]
        windows = of_end.assign(tokens=[tuple(tokens) for tokens in of_end["tokens"]])
        rows = windows.drop_duplicates(["tokens", "position"]).to_dict("records")
        times = windows.groupby(["tokens", "position"]).size()
        shown = page.js(SHOWN)
        assert len(shown) == len(rows)
        for (value, tokens, here, source), row in zip(shown, rows, strict=True):
            assert float(value.replace("−", "-")) == pytest.approx(row["value"], rel=6e-3)
            assert (tuple(tokens), here) == (row["tokens"], row["position"])
            n = times[row["tokens"], row["position"]]
            assert source == (f"{n} times" if n > 1 else f"text {row['text']}")
    # Hovering over a token shows its numbers.
    page.js("document.querySelector('.example .tok').dispatchEvent(new MouseEvent('mouseenter'))")
    z, gate, value = (float(t.split()[-1].replace("−", "-")) for t in page.texts("#tip div")[1:])
    expected, of_gate = rows[0]["values"][0], rows[0]["gates"][0]
    assert z == pytest.approx(expected, rel=6e-3)
    assert gate == pytest.approx(of_gate, rel=6e-3)
    assert value == pytest.approx(expected / of_gate, rel=6e-3)
    # The quadrants show their shares, and z of the first example.
    of_signs = examples.quadrants().set_index("name").loc["L1N29"]
    titles = page.texts(".quadrant h4")
    assert titles[1].startswith("Gate input positive, linear input negative: ")
    got = [float(title.split(": ")[1].split("%")[0]) for title in titles]
    assert got == pytest.approx((100 * of_signs).tolist(), abs=0.06)
    inside = examples.quadrant_examples()
    inside = inside[(inside["name"] == "L1N29") & (inside["end"] == "+-")].iloc[0]
    first = page.texts(".quadrant:nth-child(2) .value")[0].replace("−", "-")
    assert float(first) == pytest.approx(inside["values"][inside["position"]], rel=6e-3)
    # Follow a connection; search for a name and for a token.
    name = page.texts(".connections a")[0]
    page.js("document.querySelector('.connections a').click()")
    assert page.texts("#one h2") == [name]
    search = "const s = document.getElementById('search'); s.value = arguments[0];"
    search += (
        "s.dispatchEvent(new Event('input')); return document.querySelectorAll('#rows a').length"
    )
    assert page.js(search, "l1n2") == 11
    peaks = frame[frame["value"] == frame["value"].max()].iloc[0]
    assert page.js(search, peaks["tokens"][peaks["position"]]) > 0
    assert page.js(search, "no such token") == 0


@needs_browser
def test_heads(opened, model):
    generator = torch.Generator().manual_seed(3)
    corpus = neurons.Corpus(torch.randint(0, D_VOCAB, (5, 13), generator=generator))
    both = neurons.corpus_statistics(model, "all", corpus, k=5)
    page = opened(viz.neuron_page(model, None, both))
    page.js("location.hash = '#L1H0'")
    page.wait("document.querySelector('#one h2').textContent === 'L1H0'")
    frame = both.heads.frame()
    rows = frame[frame["name"] == "L1H0"].to_dict("records")
    shown = page.js(SHOWN)
    assert len(shown) == len(rows) == 5
    for (value, tokens, here, source), row in zip(shown, rows, strict=True):
        assert float(value) == pytest.approx(row["value"], rel=6e-3)
        assert (tokens, here) == (list(row["tokens"]), row["position"])
        assert source.startswith(f"text {row['text']}")
    # Check the attention from the example's token to the first token, the split and the tokens.
    page.js(
        "document.querySelectorAll('.example')[4].querySelector('.tok')"
        ".dispatchEvent(new MouseEvent('mouseenter'))"
    )
    attention = float(page.texts("#tip div")[1].split()[-1].rstrip("%"))
    assert attention == pytest.approx(100 * rows[4]["weights"][0], abs=0.06)
    looks = both.heads.looks().set_index("name").loc["L1H0"]
    split = [float(text.split()[-1].rstrip("%")) for text in page.texts(".split + .legend span")]
    expected = [100 * looks[part] for part in ("bos", "itself", "previous", "other")]
    assert split == pytest.approx(expected, abs=0.06)
    attended = both.heads.tokens("L1H0")["token"].tolist()[:12]
    assert page.texts(".looks .token")[:12] == attended
    alone = opened(viz.neuron_page(model, ["L0H1"], corpus, k=3))
    assert alone.texts("#one h2") == ["L0H1"]
    assert len(alone.js(SHOWN)) == 3


def test_sizes_and_refusals(model, examples, monkeypatch):
    assert len(viz.neuron_page(model, None, examples)) < 74 * 14_000 + 60_000
    some = examples.of(["L0N3"])
    with pytest.raises(InputError, match="got 'L1N29'"):
        viz.neuron_page(model, ["L1N29"], some)
    with pytest.raises(InputError, match="got statistics of the model 'another'"):
        viz.neuron_page(model, None, replace(examples, model="models/another"))
    monkeypatch.setattr(pages, "MOST_NEURONS", 73)
    with pytest.raises(InputError, match="got 74 neurons; expected at most 73 on one page"):
        viz.neuron_page(model, None, examples)
