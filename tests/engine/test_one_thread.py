"""Tests that analyses of one model in several threads have the results of one thread."""

import threading

import bridges
import numpy as np
import pytest
from common import changed, in_threads, tokens

from attn_only_lens import Contrast, neurons, viz
from attn_only_lens import patching as p
from attn_only_lens.circuits import Search, attribution_graph, discover, path_expansion
from attn_only_lens.engine.one_thread import one_thread
from attn_only_lens.models.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
METRIC = p.logit_diff(7, 11)
SITES = ["L0H1", "L0N3", "L1H0", "L1N5"]
EDGES, NONE = p.Edges(SITES[:2], SITES[2:], "z"), Search(n_random=0)


def examples(model, contrast):
    return neurons.top_examples(model, None, neurons.Corpus([*contrast.clean]), k=2)["value"]


RUNS = {
    "sweep": lambda *x: p.activation_patch(*x).frame["value"],
    "attribution": lambda *x: p.attribution(*x).frame["value"],
    "paths": lambda *x: p.path_patch(*x, EDGES).frame["value"],
    "graph": lambda *x: attribution_graph(*x).heads["attribution"],
    "circuit": lambda *x: discover(*x, sites=SITES, search=NONE).faithfulness,
    "verify": lambda model, x: verify(model, model, x.clean).max_kl,
    "view": lambda model, x: [*viz.attention_view(model, SITES, x.clean[0]).encode()],
    "corpus": examples,
}


def test_analyses_of_one_model_in_eight_threads():
    model = bridges.exposed_copy(bridges.boot("gpt2"))

    def run(of):
        seed = list(RUNS).index(of)
        clean = tokens(seed, pos=7)
        return np.asarray(RUNS[of](model, Contrast(clean, changed(clean, 2), METRIC)))

    expected = [run(of) for of in RUNS]
    for results, alone in zip(in_threads(run, list(RUNS), times=1), expected, strict=True):
        for result in results:
            np.testing.assert_allclose(result, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["effects", "paths"])
def test_methods_that_run_the_model_wait(method):
    model, called = bridges.exposed_copy(bridges.boot("gpt2")), threading.Event()

    def metric(logits):
        called.set()
        return logits[0, -1, 7]

    expansion = path_expansion(model, Contrast(tokens(batch=1), None, metric))
    called.clear()
    thread = threading.Thread(target=getattr(expansion, method))
    with one_thread([model]):
        thread.start()
        assert not called.wait(0.5)
    thread.join(60)
    assert called.is_set()
