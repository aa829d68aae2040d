"""Tests of texts of different lengths on bridges whose tokenizers pad on the left, in float32.

The oracle runs each text alone, without padding, with plain hooks. `<bos>` may also be the padding
token, as in GPT-2.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import bridges
import numpy as np
import pytest
import torch
from common import D_VOCAB
from patched_runs import cached, head_of, hook_point
from path_oracle import PathOracle
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens import Contrast, HeadName, neurons
from attn_only_lens import patching as p
from attn_only_lens.circuits import Search, attribution_graph, discover, evaluate

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
CLEAN = ["w3 w5 w7 w2 w11 w1", "w3 w6", "w9 w1 w4 w4"]
CORRUPTED = ["w3 w8 w7 w2 w11 w1", "w13 w6", "w9 w2 w4 w4"]
ROLES = {"subject": [2, 1, 2], "end": -1}
SITES = ["L0H1", "L0N3", "L1H0", "L1N5"]
EVERY = {(name, role) for name in SITES for role in ROLES}
METRIC = p.logit_diff(7, 11)
CLOSE = 2e-5  # about 100 roundings of float32, of logits of about 1
PAIR = Contrast(CLEAN, CORRUPTED, METRIC, roles=ROLES)


@pytest.fixture(
    scope="module",
    params=["gpt2 <bos>", "llama <pad>"],  # learned and rotary positions
)
def name_and_model(request, tmp_path_factory):
    name, pad = request.param.split()
    model = bridges.exposed_copy(bridges.boot(name, torch.float32))
    model.tokenizer = tiny_tokenizer(D_VOCAB, tmp_path_factory.mktemp("words"))
    model.tokenizer.padding_side = "left"
    model.tokenizer.pad_token = pad
    model.cfg.tokenizer_prepends_bos, model.cfg.default_prepend_bos = False, True
    assert PAIR.pair(model).mask[1].tolist() == [0] * 4 + [1] * 3
    return name, model


@pytest.fixture
def model(name_and_model):
    return name_and_model[1]


def alone(model, texts):
    """Return the tokens [1, pos] of each text."""
    words = model.tokenizer.get_vocab()
    return [torch.tensor([[words[word] for word in f"<bos> {t}".split()]]) for t in texts]


def place(i, role, text):
    return text.shape[1] - 1 if role == "end" else ROLES[role][i]


def edited(model, point, index, change):
    """Return a hook that changes z at an index."""

    def edit(z, hook):
        z = z.clone()
        z[index] = change(z[index])
        return z

    return hook_point(model, point, "z"), edit


def diff(logits):
    return logits[0, -1, 7] - logits[0, -1, 11]


@torch.no_grad()
def with_patches(model, run, source, patches):
    """Return the metric of each text run alone, with patches (name, role) from another run."""
    values = []
    for i, (text, other) in enumerate(zip(run, source, strict=True)):
        cache, hooks = cached(model, other), []
        for name, role in patches:
            index = 0, place(i, role, text), head_of(name)
            new = cache[hook_point(model, name, "z")][index]
            hooks.append(edited(model, name, index, lambda z, new=new: new))
        values.append(diff(model.run_with_hooks(text, fwd_hooks=hooks)).item())
    return values


def estimates(model, name, role):
    """Return each text's corrupted value plus the gradient times the change of z."""
    values, point = [], hook_point(model, name, "z")
    texts = zip(alone(model, CORRUPTED), alone(model, CLEAN), strict=True)
    for i, (text, other) in enumerate(texts):
        index = 0, place(i, role, text), head_of(name)
        change = (cached(model, other)[point] - cached(model, text)[point])[index].detach()
        step = torch.zeros_like(change, requires_grad=True)
        hook = edited(model, name, index, lambda z, step=step: z + step)
        value = diff(model.run_with_hooks(text, fwd_hooks=[hook]))
        (slope,) = torch.autograd.grad(value, step)
        values.append((value + (slope * change).sum()).item())
    return values


def check(frame, expected, *keys):
    """Compare each row with the text's expected value; they must differ between rows."""
    numbers = [
        expected[tuple(getattr(row, key) for key in keys)][row.prompt] for row in frame.itertuples()
    ]
    np.testing.assert_allclose(frame["value"], numbers, rtol=0, atol=CLOSE)
    assert np.std(numbers) > 100 * CLOSE


def test_patches_estimates_and_paths(name_and_model):
    name, model = name_and_model
    clean, corrupted = alone(model, CLEAN), alone(model, CORRUPTED)
    sites = p.Sites(SITES, "roles")
    sweep = p.activation_patch(model, PAIR, sites=sites, per_prompt=True)
    assert len(sweep.frame) == len(EVERY) * len(CLEAN)
    expected = {site: with_patches(model, corrupted, clean, [site]) for site in EVERY}
    check(sweep.frame, expected, "name", "position")
    gradient = p.Estimate("gradient", budget=0)
    values = p.attribution(model, PAIR, sites=sites, method=gradient, per_prompt=True)
    expected = {site: estimates(model, *site) for site in EVERY}
    check(values.frame, expected, "name", "position")
    senders, receivers = ["L0H1", "L0N3"], ["L1H0", "L1N5", "logits"]
    edges = p.Edges(p.Sites(senders, "roles"), receivers, "z")
    paths = p.path_patch(model, PAIR, edges, per_prompt=True).frame
    plain = bridges.boot(name, torch.float32, "names")
    oracles = [
        PathOracle(plain, Contrast(*texts, METRIC)) for texts in zip(clean, corrupted, strict=True)
    ]
    expected = {}
    for key in product(senders, receivers, ROLES):
        sender, receiver = (x if x == "logits" else HeadName.parse(x) for x in key[:2])
        expected[key] = [
            one.value(sender, receiver, "z", place(i, key[2], clean[i]))
            for i, one in enumerate(oracles)
        ]
    check(paths, expected, "sender", "receiver", "position")


def test_circuits_and_graphs(model):
    clean, corrupted = alone(model, CLEAN), alone(model, CORRUPTED)
    sites, search = p.Sites(SITES, "roles"), Search(n_random=0)
    circuit = discover(model, PAIR, sites=sites, faithfulness=0.5, search=search)
    chosen = set(zip(circuit.frame["name"], circuit.frame["position"], strict=True))
    assert 0 < len(chosen) < len(EVERY)
    whole, kept, nothing = (
        np.mean(with_patches(model, clean, corrupted, gone)) for gone in ([], EVERY - chosen, EVERY)
    )
    expected = (kept - nothing) / (whole - nothing)
    loose = CLOSE / abs(whole - nothing)
    assert loose < 0.01
    assert circuit.faithfulness == pytest.approx(expected, abs=loose)
    result = evaluate(model, circuit, PAIR)
    assert result.faithfulness == pytest.approx(expected, abs=loose)
    sites = [f"{name}@{role}" for name, role in sorted(EVERY)]
    roles = [{role: place(i, role, clean[i]) for role in ROLES} for i in range(len(CLEAN))]
    singles = map(partial(Contrast, metric=METRIC), clean, corrupted)
    singles = [replace(one, roles=roles[i]) for i, one in enumerate(singles)]
    graph, *graphs = (
        attribution_graph(model, contrast, sites=sites, positions="roles")
        for contrast in (PAIR, *singles)
    )
    mean = np.mean([one.heads["attribution"] for one in graphs], axis=0)
    np.testing.assert_allclose(graph.heads["attribution"], mean, rtol=0, atol=CLOSE)
    assert mean.std() > 100 * CLOSE


@torch.no_grad()
def test_corpora_means_and_generation(model):
    texts, name, point = alone(model, CLEAN), "L0N3", hook_point(model, "L0N3", "z")
    z = [cached(model, text)[point][0, :, 3, 0] for text in texts]
    frame = neurons.top_examples(model, [name], neurons.Corpus(CLEAN, ends="largest"), k=99)
    got = {(row.text, row.at): row.value for row in frame.itertuples()}
    # BOS is no example.
    expected = {(i, at): value for i, one in enumerate(z) for at, value in enumerate(one) if at}
    assert got == pytest.approx({key: value.item() for key, value in expected.items()}, abs=CLOSE)
    every = (slice(None), slice(None), 3)
    mean = torch.cat(z).mean()
    put = edited(model, name, every, lambda z: mean)
    with p.ablated(model, [name], to="mean", prompts=CLEAN):
        logits = model(CLEAN)
        for row, text in zip(logits, texts, strict=True):
            single = model.run_with_hooks(text, fwd_hooks=[put])[0]
            torch.testing.assert_close(row[-text.shape[1] :], single, rtol=0, atol=CLOSE)
    how = {"max_new_tokens": 3, "do_sample": False, "verbose": False, "stop_at_eos": False}
    add = edited(model, name, every, lambda z: z + 2.0)
    for cache in (True, False):
        with p.steered(model, {name: 2.0}):
            how |= {"return_type": "tokens", "use_past_kv_cache": cache}
            together = model.generate(CLEAN, **how)
        for row, text in zip(together, texts, strict=True):
            for _ in range(3):
                logits = model.run_with_hooks(text, fwd_hooks=[add])
                text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
            assert torch.equal(row[-text.shape[1] :], text[0])
