"""Tests of transcoder features in a corpus: sparse or dead, next to neurons of gated MLPs."""

from functools import partial

import pytest
import torch
from feature_model import DEAD, with_features

from attn_only_lens import neurons, pretrained
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.numeric

CONTEXT = 32
corpus_of = partial(neurons.Corpus, context=CONTEXT)


@pytest.fixture(scope="module")
def model():
    return with_features()


@pytest.fixture(scope="module")
def texts(model):
    every = pretrained.small_english_texts()[:60]
    short = [text for text in every if len(model.to_tokens(text)[0]) <= CONTEXT]
    return short[:12]


@pytest.fixture(scope="module")
def acts(model, texts):
    """Return z [token, feature] by layer, and each token's text and position, without BOS."""
    rows, places = {1: [], 3: []}, []
    for number, text in enumerate(texts):
        _, cache = model.run_with_cache(text)
        for layer, of_layer in rows.items():
            of_layer.append(cache[f"blocks.{layer}.mlp.hook_post"][0, 1:].double())
        places += [(number, position) for position in range(1, len(of_layer[-1]) + 1)]
    return {layer: torch.cat(x) for layer, x in rows.items()}, places


def test_examples_are_the_tokens_at_which_a_feature_is_active(model, texts, acts):
    z, places = acts[0][3], acts[1]
    active = (z > 0).sum(0)
    rare = int(torch.where((active > 0) & (active < 6), active, 1000).argmin())
    often = int(active.argmax())
    assert 0 < active[rare] < 6 < 20 < active[often]  # control
    names = [f"L3F{index}" for index in (rare, often, DEAD)]
    frame = neurons.top_examples(model, names, corpus_of(texts), k=6)
    assert set(frame["name"]) == set(names[:2])  # a dead feature has no examples
    for name, index in zip(names[:2], (rare, often), strict=True):
        here = [i for i in range(len(z)) if z[i, index] > 0]
        for end, sign in (("largest", -1), ("smallest", 1)):
            rows = frame[(frame["name"] == name) & (frame["end"] == end)]
            expected = sorted(here, key=lambda i: sign * z[i, index])[:6]
            assert rows["value"].tolist() == pytest.approx(z[expected, index].tolist(), rel=1e-4)
            got = list(zip(rows["text"], rows["at"], strict=True))
            assert got == [places[i] for i in expected]


def test_histograms_count_tokens_at_which_a_feature_is_inactive(model, texts, acts):
    z = acts[0][3]
    index = int((z > 0).sum(0).argmax())
    names = [f"L3F{index}", f"L3F{DEAD}"]
    statistics = neurons.corpus_statistics(model, names, corpus_of(texts), k=3).neurons
    assert statistics.n_tokens == len(z)
    row = statistics.names.index(f"L3F{index}")
    zeros = statistics.counts["zeros"]
    assert zeros[row] == (z[:, index] == 0).sum()
    assert zeros[1 - row] == len(z)
    counts, edges = statistics.histogram(f"L3F{index}", "z")
    above = edges[:-1] > 0
    assert counts.sum() == len(z)
    assert counts[edges[1:] <= 0].sum() == 0
    assert counts[above].sum() == (z[:, index] > edges[1:][edges[:-1] == 0]).sum()


def test_features_and_neurons_of_gated_mlps_together(model, texts):
    """None selects features and neurons, with the same results as each selection alone."""
    corpus = corpus_of(texts[:3])
    both = neurons.corpus_statistics(model, None, corpus, k=2).neurons
    kinds = [sum(letter in name for name in both.names) for letter in "NF"]
    assert kinds == [2 * 344, 2 * 344]
    assert len(both.names) == sum(kinds)
    for selection in ("neurons", "features"):
        alone = neurons.corpus_statistics(model, selection, corpus, k=2).neurons
        same = both.of(list(alone.names))
        for part in ("examples", "counts"):
            for name, expected in getattr(alone, part).items():
                got = getattr(same, part)[name]  # hooks in a layer change its rounding
                assert torch.allclose(got.double(), expected.double(), atol=1e-5), name
    shares = both.quadrants()  # neurons only
    assert [("N" in name) for name in shares["name"]] == [True] * (2 * 344)
    assert shares.drop(columns="name").sum(axis=1).to_numpy() == pytest.approx(1.0)
    assert all("N" in name for name in both.quadrant_examples()["name"])


def test_error_and_skip_nodes_are_left_out_or_refused(model, texts):
    corpus = corpus_of(texts[:1])
    every = neurons.corpus_statistics(model, "all", corpus, k=1)
    assert len(every.neurons.names) == 4 * 344
    assert len(every.heads.names) == 16
    with pytest.raises(InputError) as refused:
        neurons.top_examples(model, ["L3E", "L1S", "L3F7"], corpus)
    text = str(refused.value)
    assert "L3E, one of the error nodes" in text
    assert "L1S, one of the skip nodes" in text
