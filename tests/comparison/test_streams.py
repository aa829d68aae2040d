"""Tests of batches as a stream: accepted types, constant memory, and what is refused."""

import gc
import re
import weakref

import bridges
import numpy as np
import pandas as pd
import pytest
import torch
from common import mlp_hook, tokens
from tiny_tokenizer import tiny_tokenizer
from torch._subclasses import FakeTensor

from attn_only_lens import Contrast, Work, compare, grow, growth
from attn_only_lens import patching as p
from attn_only_lens.errors import ComparisonError, InputError
from attn_only_lens.growth.comparison.batches import batches

pytestmark = [
    pytest.mark.numeric,
    # The grown models have noise, so the metric may lose its effect.
    pytest.mark.filterwarnings("ignore:the grown model no longer does this task"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformer_lens"),
]

RESAMPLED = {"resampling": growth.Resampling(n_resamples=2)}
FEW = {"sizes": growth.ComparisonSizes(n_patched=0, n_nodes=3), **RESAMPLED}
NUMBERS = ["divergence", "cosine", "norm_ratio", "estimated_drop", "grown_estimated_drop"]


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
    sizes = growth.ComparisonSizes(batch_size=size, n_patched=0, n_nodes=3)
    return {"sizes": sizes, **RESAMPLED}


def alone(prompts, metric=None):
    """Return a contrast without corrupted prompts."""
    return Contrast(prompts, None, metric or p.loss())


def numbers(comparison, columns=NUMBERS):
    every = pd.concat([comparison.heads, comparison.neurons])
    return every[columns].to_numpy(dtype=float)


def test_sums_do_not_depend_on_how_prompts_are_cut(pair):
    clean, corrupted = tokens(batch=7), tokens(seed=1, batch=7)
    answers = list(range(7))  # which are cut with their prompts
    contrast = Contrast(clean, corrupted, p.logit_diff(answers, [x + 9 for x in answers]))
    whole = compare(*pair, contrast, **FEW)
    cut = compare(*pair, contrast, **in_batches(3))
    streamed = compare(*pair, iter([contrast[:2], contrast[2:]]), **FEW)
    # These are sums of the same terms in another order.
    for comparison in (cut, streamed):
        np.testing.assert_allclose(numbers(comparison), numbers(whole), rtol=1e-9, atol=1e-13)
        errors = numbers(comparison, ["divergence_se", "estimated_drop_change_se"])
        np.testing.assert_allclose(
            errors,
            numbers(whole, ["divergence_se", "estimated_drop_change_se"]),
            rtol=1e-6,
            atol=1e-13,
        )
        np.testing.assert_allclose(comparison.new["share"], whole.new["share"], rtol=1e-9)
        assert comparison.about["n_prompts"] == 7
    assert whole.new["share"].abs().max() > 1e-4


def test_padding_is_no_token(pair):
    """Texts of two lengths in a later batch give the same as each length alone."""
    texts = ["w1 w2 w3 w4", "w5 w6", "w7 w8"]
    others = ["w1 w9 w3 w4", "w5 w9", "w7 w10"]
    metric, everything = p.logit_diff(3, 5), slice(0, 3)

    def compared(*batches):
        stream = (Contrast(texts[rows], others[rows], metric) for rows in batches)
        return compare(*pair, stream, **FEW)

    padded = compared(slice(0, 1), everything)
    apart = compared(slice(0, 1), slice(0, 1), slice(1, 3))
    assert padded.about["n_tokens"] == apart.about["n_tokens"] == 12
    np.testing.assert_allclose(numbers(padded), numbers(apart), rtol=1e-8, atol=1e-12)
    with pytest.raises(ComparisonError, match="prompt 0 has 4 tokens, and prompt 1 has 2"):
        compared(everything)  # the circuits of the first batch have numbers as positions


def test_texts_without_pairs_go_by_length(pair):
    texts = ["w1 w2 w3", "w4 w5", "w6 w7 w8", "w9 w10"]
    comparison = compare(*pair, alone(texts), **FEW)
    assert (comparison.about["n_prompts"], comparison.about["n_tokens"]) == (4, 10)
    rows = [pair[0].to_tokens(text)[0].tolist() for text in texts]
    padded = torch.tensor([row + [0] * (3 - len(row)) for row in rows])
    masked = Contrast(padded, None, p.loss(), mask=torch.tensor([[1, 1, 1], [1, 1, 0]] * 2))
    np.testing.assert_array_equal(numbers(compare(*pair, masked, **FEW)), numbers(comparison))
    with pytest.raises(ComparisonError, match="a batch of prompts of 2 to 3 tokens without corr"):
        compare(*pair, [alone(texts)], **FEW)


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


def test_bfloat16(pair):
    """Activations in bfloat16 with 8 bits are summed in wider types."""
    low = bridges.boot("native").to(torch.bfloat16)
    prompts = tokens(batch=3)
    # The metric with the largest difference between prompts, so that rounding matters little.
    logits = pair[0](prompts)[:, -1]
    apart = logits - logits.roll(-1, 0)
    metric = p.logit_diff(apart.argmax(-1).tolist(), apart.argmin(-1).tolist())
    contrast = alone(prompts, metric)
    every = numbers(compare(low, grow(low, d_mlp=41, seed=0), contrast, **FEW))
    expected = numbers(compare(*pair, contrast, **FEW), ["estimated_drop"])
    drops = every[:, NUMBERS.index("estimated_drop")]
    assert np.corrcoef(drops, expected[:, 0])[0, 1] > 0.98
    np.testing.assert_allclose(every[:, :3], [[0.0, 1.0, 1.0]] * len(every), atol=1e-3)


def native(**changes):
    cfg = bridges.TransformerBridgeConfig(**bridges.NATIVE | changes)
    return bridges.TransformerBridge.boot_native(cfg, dtype=torch.float64)


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
        ((model, grown, alone(prompts[:1])), {}, "only prompt 0 has 11 tokens"),
        ((model, grown, good), {"null": null}, "the null model grew differently"),
        ((model, grown, good), {"null": 3}, "the null model: got an int"),
        ((model, grown, good), {"work": Work(batch_size=2)}, "does not use batch_size"),
    ):
        with pytest.raises(ComparisonError) as error:
            compare(*arguments, **options)
        assert message in str(error.value), (message, str(error.value))
    for contrast, message in (
        (alone(prompts + 41), "values from"),
        (alone(prompts, p.logit_diff(3, 99)), "99"),
        (alone(prompts, p.logit_diff([3, 3, 3], 5)), "3"),
        (alone(prompts, p.logit_diff(3, 5)), "this metric is constant"),  # the same prompts, rolled
    ):
        with pytest.raises((InputError, ComparisonError)) as error:
            compare(model, grown, contrast)
        assert message in str(error.value), (message, str(error.value))
    with pytest.raises(ComparisonError) as error:
        growth.ComparisonSizes(batch_size=0, faithfulness=2, n_patched=-1, n_nodes=1.5, edge_mass=0)
    assert [reason.partition(";")[0] for reason in error.value.reasons] == [
        *("got batch_size=0", "got n_patched=-1", "got n_nodes=1.5"),
        *("got faithfulness=2", "got edge_mass=0"),
    ]
    with pytest.raises(ComparisonError, match="got confidence=2"):
        growth.Resampling(confidence=2)
    with pytest.raises(ComparisonError, match="got n_resamples=1; expected 2 or more, or 0 for n"):
        growth.Resampling(1)
    point = grown.model.hook_dict["blocks.0.hook_in"]
    point.add_perma_hook(lambda value, hook: value)
    with pytest.raises(ComparisonError, match="the grown model: hooks are attached"):
        compare(model, grown, good)
    point.remove_hooks("both", including_permanent=True)
    smaller = native(d_vocab=31, d_vocab_out=41)
    with pytest.raises(ComparisonError, match="has d_vocab 41; the original has 31"):
        compare(smaller, grown, good)
    assert mlp_hook("z", 0) not in model.hook_dict


def test_interrupted_or_refused_models_are_as_they_were(pair):
    model, grown = pair

    def stream():
        yield alone(tokens())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(model, grown, stream(), **FEW)
    for side in (model, grown.model):
        assert mlp_hook("z", 0) not in side.hook_dict
        assert not any(point._forward_hooks for point in side.hook_dict.values())


def test_batches_of_any_size(pair):
    """A batch of one prompt is paired with a prompt of the previous batch.

    All prompts together are paired with the next one, wherever they are cut.
    """
    prompts = tokens(batch=5)
    for sizes, others in (
        ((2, 2, 1), (1, 0, 3, 2, 0)),
        ((3, 1, 1), (1, 2, 0, 0, 0)),
    ):
        comparison = compare(*pair, map(alone, prompts.split(sizes)), **FEW)
        expected = (
            Contrast(*both, p.loss())
            for both in zip(prompts.split(sizes), prompts[list(others)].split(sizes), strict=True)
        )
        expected = compare(*pair, expected, **FEW)
        np.testing.assert_allclose(numbers(comparison), numbers(expected), rtol=1e-9, atol=1e-13)
        assert comparison.about["n_prompts"] == 5
    whole = numbers(compare(*pair, alone(prompts), **FEW))
    for size in (1, 2):
        cut = numbers(compare(*pair, alone(prompts), **in_batches(size)))
        np.testing.assert_allclose(cut, whole, rtol=1e-9, atol=1e-13)


def test_prompts_may_repeat_in_a_later_batch(pair):
    same = tokens(seed=4, batch=1).repeat(2, 1)
    comparison = compare(*pair, map(alone, [tokens(batch=3), same]), **FEW)
    assert comparison.about["n_prompts"] == 5
    with pytest.raises(ComparisonError, match="2 or more different prompts"):
        compare(*pair, iter([alone(same)]), **FEW)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (lambda: alone(tokens(batch=1, pos=7)), "1 prompt of 7 tokens"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
    ids=["alone", "its own"],
)
def test_an_error_in_a_later_batch_loses_nothing(pair, last, message):
    def stream():
        yield alone(tokens(batch=3))
        yield alone(tokens(seed=1, batch=2))
        yield last()

    sizes = growth.ComparisonSizes(n_patched=3, n_nodes=3)
    with pytest.raises(ComparisonError, match="the comparison stopped") as error:
        compare(*pair, stream(), sizes=sizes, **RESAMPLED)
    assert re.search(message, str(error.value), re.DOTALL)
    so_far = error.value.so_far
    before = [alone(tokens(batch=3)), alone(tokens(seed=1, batch=2))]
    expected = compare(*pair, before, **FEW)
    assert np.array_equal(numbers(so_far), numbers(expected))
    assert so_far.about["n_prompts"] == 5
    assert so_far.heads["drop"].isna().all()
    assert mlp_hook("z", 0) not in pair[0].hook_dict


def test_an_error_of_the_first_batch_is_itself(pair):
    with pytest.raises(ComparisonError) as error:
        compare(*pair, iter([alone(tokens(batch=1))]), **FEW)
    assert error.value.so_far is None
    assert "1 prompt of 11 tokens" in str(error.value)


def test_no_prompt_is_held_against_itself(pair):
    """Pairing a prompt with itself would count a zero and make every mean too small."""
    a, b, c = tokens(batch=3).split(1)
    for stream in ([torch.cat([a, b]), a, b], [torch.cat([a, b, b, b, c])]):
        made = list(batches(pair[0], map(alone, stream), 2))
        assert sum(len(chunk.pair.clean) for chunk in made) == sum(map(len, stream))
        assert all((chunk.pair.clean != chunk.pair.corrupted).any(1).all() for chunk in made)
    whole = batches(pair[0], alone(torch.cat([a, b, b, b, c])), 2)
    assert all((chunk.pair.clean != chunk.pair.corrupted).any(1).all() for chunk in whole)
