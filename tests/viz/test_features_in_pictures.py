"""Tests that pictures show features, skip nodes and error nodes as kinds of their own."""

import pytest
import torch
from browser import needs_browser
from feature_model import DEAD, PAIR, with_features
from page_of_circuit import read_back

from attn_only_lens import Contrast, neurons, viz
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph
from attn_only_lens.errors import InputError

KEYS = Contrast(*PAIR, p.logit_diff(" are", " is"))


@pytest.fixture(scope="module")
def model():
    return with_features()


@pytest.fixture(scope="module")
def graph(model):
    sites = ["L3E@5", "L1E@2", "L1S@2", "L3F11@5", "L3F66@5", "L1F58@2", "L2N19@2", "L3H3@5"]
    return attribution_graph(model, KEYS, sites=sites)


@pytest.fixture(scope="module")
def page(graph, model):
    return viz.circuit_view(graph, model, KEYS)


@torch.no_grad()
def test_details_of_each_kind(page, model):
    """Features have gates, z and tokens; error and skip nodes have the tokens that they raise."""
    details = read_back(page)["details"]
    (_, cache), (_, corrupted) = map(model.run_with_cache, PAIR)
    for side, run in (("", cache), ("corrupted_", corrupted)):
        z = run["blocks.3.mlp.hook_post"][0, :, 11]
        assert details["L3F11"][f"{side}z"] == pytest.approx(z.tolist(), rel=1e-2)
        assert details["L3F11"][f"{side}pattern"] == (z > 0).float().tolist()
    assert len(details["L3F11"]["reads"]) == 20
    for node in ("L3E@5", "L1E@2", "L1S@2"):
        assert set(details[node]) == {"writes"}
        assert node.partition("@")[0] not in details
    # The tokens follow from the vector's change, the final norm's gain and the unembedding.
    error, skip = (
        cache[f"blocks.{hook}"][0, position, 0] - corrupted[f"blocks.{hook}"][0, position, 0]
        for hook, position in (("3.mlp.hook_error", 5), ("1.mlp.hook_skip", 2))
    )
    gain = model.ln_final.weight.detach() if hasattr(model.ln_final, "weight") else model.ln_final.w
    for node, vector in (
        ("L3E@5", error),
        ("L1S@2", skip @ model.blocks[1].mlp.W_skip),
    ):
        logits = (vector * gain) @ model.W_U
        scores = (logits - logits.mean()) / logits.std(correction=0)
        texts = [text for text, _ in details[node]["writes"]]
        best = model.tokenizer.decode([int(scores.argmax())]).replace(" ", "·")
        assert texts[0] == best
        assert details[node]["writes"][0][1] == pytest.approx(float(scores.max()), abs=0.011)


def test_attention_view_of_features(model):
    _, cache = model.run_with_cache(PAIR[0])
    tokens = model.to_tokens(PAIR[0])[0]
    by_model, by_cache = (
        viz.attention_view(source, ["L3F11", "L2N19"], text)
        for source, text in ((model, PAIR[0]), (cache, tokens))
    )
    assert by_model == by_cache
    assert '"name":"L3F11"' in by_model
    with pytest.raises(InputError, match="one of the error nodes"):
        viz.attention_view(model, ["L3F11", "L3E"], PAIR[0])


def test_sweeps_have_a_row_for_each_kind(model):
    sites = ["L3E", "L3F11", "L1S", "L1F58", "L2N19", "L3H3"]
    sweep = p.activation_patch(model, KEYS, sites=sites)
    rows = viz.heatmap(sweep).data[0].y
    assert rows == (
        *("L1 features", "L1 skip nodes", "L2 neurons", "L3 heads", "L3 features"),
        "L3 error nodes",
    )
    bars = {bar.name: bar.marker.color for bar in viz.bars(sweep, k=36).data}
    assert {*bars} == {"features", "skip nodes", "neurons", "heads", "error nodes"}
    assert len({*bars.values()}) == 5


@pytest.fixture(scope="module")
def statistics(model):
    names = [f"L3F{DEAD}", "L3F11", "L2N19", "L3H3"]
    corpus = neurons.Corpus([f"{PAIR[0]} are here", f"{PAIR[1]} is here"])
    return neurons.corpus_statistics(model, names, corpus, k=3)


@needs_browser
def test_neuron_page(opened, model, statistics):
    page = opened(viz.neuron_page(model, None, statistics))
    page.wait("document.querySelectorAll('#rows a').length > 0")
    assert page.texts("#count") == ["1 head, 1 neuron and 2 features"]

    def show(name):
        page.js(f"location.hash = '#{name}'")
        page.wait(f"document.querySelector('#one h2').textContent === '{name}'")
        return " ".join(page.texts("#one"))

    text = show(f"L3F{DEAD}")
    assert "dead: this feature is never active in these texts" in text
    assert not page.texts("#one .example")
    assert "Gate input" not in show("L3F11")
    assert page.texts("#one .lists h4") == ["It reads", "It writes"]
    assert "Gate input" in show("L2N19")
    assert page.texts("#one .lists h4") == ["The gate reads", "The value reads", "It writes"]
