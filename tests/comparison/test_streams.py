"""Tests of batches as a stream: accepted types, constant memory, and what is refused."""

import gc
import weakref

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from common import mlp_hook, tokens
from growing import native
from tiny_tokenizer import tiny_tokenizer
from torch._subclasses import FakeTensor

from attn_only_lens import Contrast, Work, compare, grow, growth
from attn_only_lens import patching as p
from attn_only_lens.errors import ComparisonError, InputError

pytestmark = [
    pytest.mark.numeric,
    # The grown models have noise, so the metric may lose its effect.
    pytest.mark.filterwarnings("ignore:the grown model no longer does this task"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformer_lens"),
]

FEW = {"sizes": growth.ComparisonSizes(faithfulness=0.5, n_patched=0, n_nodes=3)}
NUMBERS = ["divergence", "cosine", "norm_ratio"]
DROPS = ["drop", "grown_drop", "drop_change"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return a small model with a tokenizer, and a grown model that was edited afterwards."""
    model = bridges.boot("native")
    model.tokenizer = tiny_tokenizer(41, tmp_path_factory.mktemp("tokenizer"))
    model.cfg.tokenizer_prepends_bos = model.cfg.default_prepend_bos = False
    grown = grow(model, d_mlp=41, seed=0)
    with torch.no_grad():
        for parameter in grown.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(3))
    return model, grown


def in_batches(size):
    return {"sizes": growth.ComparisonSizes(size, 0.5, n_patched=0, n_nodes=3)}


def alone(prompts, metric=None):
    """Return a contrast without corrupted prompts."""
    return Contrast(prompts, None, metric or p.loss())


def numbers(comparison, columns=NUMBERS):
    every = pd.concat([comparison.heads, comparison.neurons])
    return every[columns].to_numpy(dtype=float)


def test_sums_do_not_depend_on_how_prompts_are_cut(pair):
    """Patterns are of all prompts; circuits and drops are of the first batch."""
    clean, corrupted = tokens(batch=7), tokens(seed=1, batch=7)
    answers = list(range(7))  # which are cut with their prompts
    contrast = Contrast(clean, corrupted, p.logit_diff(answers, [x + 9 for x in answers]))
    whole = compare(*pair, contrast, **FEW)
    cut = compare(*pair, contrast, **in_batches(3))
    streamed = compare(*pair, iter([contrast[:3], contrast[3:]]), **FEW)
    # These are sums of the same terms in another order.
    for comparison in (cut, streamed):
        np.testing.assert_allclose(numbers(comparison), numbers(whole), rtol=1e-9, atol=1e-13)
        errors = numbers(comparison, ["divergence_se"]), numbers(whole, ["divergence_se"])
        np.testing.assert_allclose(*errors, rtol=1e-6, atol=1e-13)
        first = compare(*pair, contrast[:3], **FEW)
        np.testing.assert_allclose(numbers(comparison, DROPS), numbers(first, DROPS), rtol=1e-9)
        assert comparison.nodes["id"].tolist() == first.nodes["id"].tolist()
        assert comparison.about["n_prompts"] == 7
        assert comparison.about["n_prompts_of_circuits"] == 3
    assert whole.new["share"].abs().max() > 1e-4


def test_texts_of_any_length(pair):
    """Padding is no token: drops and patterns are those of the texts, one by one."""
    texts = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w9 w10"]
    comparison = compare(*pair, alone(texts), **FEW)
    assert (comparison.about["n_prompts"], comparison.about["n_tokens"]) == (4, 11)
    assert set(comparison.nodes["position"]) == {"all"}
    assert not len(comparison.edges)
    others = ["w4 w5 w6", "w6 w7", "w9 w10 w1 w2", "w1 w2"]  # the texts that follow
    rows = [[int(word[1:]) for word in text.split()] for text in texts]
    with_others = compare(*pair, Contrast(texts, others, p.loss()), **FEW)
    np.testing.assert_array_equal(numbers(comparison, DROPS), numbers(with_others, DROPS))
    single = [
        compare(*pair, Contrast(text, other, p.loss()), **FEW)
        for text, other in zip(texts, others, strict=True)
    ]
    weights = np.array([len(row) - 1 for row in rows])  # the loss is a mean over tokens
    expected = np.average([numbers(one, DROPS) for one in single], axis=0, weights=weights)
    np.testing.assert_allclose(numbers(comparison, DROPS), expected, rtol=1e-7, atol=1e-11)
    expected = np.mean([numbers(one, ["divergence"]) for one in single], axis=0)
    np.testing.assert_allclose(numbers(comparison, ["divergence"]), expected, rtol=1e-7, atol=1e-12)
    assert all(one.heads["drop_change_se"].isna().all() for one in single)  # of one prompt
    assert comparison.heads["drop_change_se"].notna().all()


def test_a_text_that_begins_like_the_next_one(pair):
    """The next text is one that differs, and a text that is too short is continued."""
    comparison = compare(*pair, alone(["w1 w2", "w1 w2 w3", "w4 w5 w6 w7"]), **FEW)
    others = ["w4 w5", "w4 w5 w6", "w1 w2 w1 w2"]
    expected = compare(
        *pair, Contrast(["w1 w2", "w1 w2 w3", "w4 w5 w6 w7"], others, p.loss()), **FEW
    )
    np.testing.assert_array_equal(numbers(comparison, DROPS), numbers(expected, DROPS))
    with pytest.raises(ComparisonError, match="no other text for prompt 0"):
        compare(*pair, alone(["w1 w2", "w1 w2 w3"]), **FEW)


def live_bytes():
    gc.collect()
    types = [(type(item), item) for item in gc.get_objects()]
    # torch keeps fake tensors of its last export in a global variable; they need no memory.
    tensors = [x for kind, x in types if issubclass(kind, torch.Tensor) and kind is not FakeTensor]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_nothing_grows_with_the_number_of_batches(pair):
    """Memory before each batch is constant, and the batches themselves are freed."""
    seen, batches_given = [], []
    gc.collect()
    gc.freeze()  # look only at new objects, which is much faster

    def stream():
        for i in range(5):
            seen.append(live_bytes())
            batch = tokens(seed=i, batch=3)
            batches_given.append(weakref.ref(batch))
            yield alone(batch)
            del batch

    try:
        compare(*pair, stream(), **FEW)
    finally:
        gc.unfreeze()
    # The runs of the first batch are kept for patching; later, 3 × 11 tokens and their pairs.
    assert max(seen) <= seen[1] + 8 * (3 * 11 * 8)
    assert max(seen[2:]) == seen[2]
    assert sum(reference() is not None for reference in batches_given) <= 1


@pytest.mark.filterwarnings("ignore:this model is in half precision")
def test_bfloat16(pair):
    """Activations in bfloat16 with 8 bits are summed in wider types."""
    low = bridges.boot("native").to(torch.bfloat16)
    prompts = tokens(batch=3)
    # The metric with the largest difference between prompts, so that rounding matters little.
    logits = pair[0](prompts)[:, -1]
    apart = logits - logits.roll(-1, 0)
    metric = p.logit_diff(apart.argmax(-1).tolist(), apart.argmin(-1).tolist())
    contrast = alone(prompts, metric)
    comparison = compare(low, grow(low, d_mlp=41, seed=0), contrast, **FEW)
    expected = numbers(compare(*pair, contrast, **FEW), ["drop"])
    assert np.corrcoef(numbers(comparison, ["drop"])[:, 0], expected[:, 0])[0, 1] > 0.98
    every = numbers(comparison)
    np.testing.assert_allclose(every, [[0.0, 1.0, 1.0]] * len(every), atol=1e-3)


def test_what_is_refused(pair):
    model, grown = pair
    prompts, good = tokens(), alone(tokens())
    deeper = native(n_layers=3)
    null = grow(model, d_mlp=43, seed=0)
    for arguments, options, message in (
        ((model, grown.model, good), {}, "got provenance of type NoneType"),
        ((deeper, grown, good), {}, "along head of layer 2; the provenance has size 0"),
        ((model, deeper, good), {"provenance": grown.provenance}, "the grown model has size 37"),
        ((grown.model, grown, good), {}, "the original has size 41 along d_mlp"),
        ((model, grown, 3.5), {}, "got a float; expected Contrast(clean, corrupted, metric), or"),
        ((model, grown, iter([])), {}, "got no contrasts"),
        ((model, grown, [3]), {}, "got an int as a batch"),
        ((model, grown, good), {"null": null}, "the null model grew differently"),
        ((model, grown, good), {"work": Work(batch_size=2)}, "does not use batch_size"),
    ):
        with pytest.raises(ComparisonError) as error:
            compare(*arguments, **options)
        assert message in str(error.value), (message, str(error.value))
    with pytest.raises(InputError, match="values from"):
        compare(model, grown, alone(prompts + 41))
    with pytest.raises(InputError, match="this metric is constant"):  # of prompts, rolled
        compare(model, grown, alone(prompts, p.logit_diff(3, 5)))
    with pytest.raises(ComparisonError, match="got resamples=1; expected 2 or more, or 0 for none"):
        growth.ComparisonSizes(resamples=1)
    point = grown.model.hook_dict["blocks.0.hook_in"]
    point.add_perma_hook(lambda value, hook: value)
    with pytest.raises(ComparisonError, match="the grown model: hooks are attached"):
        compare(model, grown, good)
    point.remove_hooks("both", including_permanent=True)
    assert mlp_hook("z", 0) not in model.hook_dict


def test_an_interrupted_comparison_leaves_the_models_as_they_were(pair):
    def stream():
        yield alone(tokens())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(*pair, stream(), **FEW)
    for side in (pair[0], pair[1].model):
        assert mlp_hook("z", 0) not in side.hook_dict
        assert not any(point._forward_hooks for point in side.hook_dict.values())


def test_an_error_in_a_later_batch_loses_nothing(pair):
    """Later batches need no corrupted prompts: one prompt, equal prompts, and another length."""
    before = [alone(tokens(batch=3)), alone(tokens(batch=1, pos=7))]
    before += [alone(tokens(seed=4, batch=1).repeat(2, 1))]

    def stream():
        yield from before
        yield 1 / 0

    with pytest.raises(ComparisonError, match="the comparison stopped") as error:
        compare(*pair, stream(), **FEW)
    assert "ZeroDivisionError: division by zero" in str(error.value)
    so_far, expected = error.value.so_far, compare(*pair, before, **FEW)
    assert np.array_equal(numbers(so_far), numbers(expected))
    assert np.array_equal(numbers(so_far, DROPS), numbers(expected, DROPS))
    assert so_far.about["n_prompts"] == 6
    assert so_far.about["n_tokens"] == 3 * 11 + 7 + 2 * 11
    with pytest.raises(ComparisonError, match="no other text for prompt 0") as error:
        compare(*pair, iter([alone(tokens(batch=1))]), **FEW)
    assert error.value.so_far is None  # the error is of the first batch
