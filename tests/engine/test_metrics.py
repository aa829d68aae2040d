"""Tests of metrics against sums written out by hand, TransformerLens' loss, and refusals."""

import math

import bridges
import numpy as np
import pytest
import torch
from common import changed, tokens
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens import patching as p
from attn_only_lens.engine.metrics import bind, require_differentiable
from attn_only_lens.engine.prompts import prompt_pair
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.numeric

BATCH, POS, VOCAB, SITES = 3, 7, 41, 5
LAST = [6, 1, 4]
EXACT = 1e-12  # rounding of a softmax over 41 entries and a mean: some hundred times 1e-16
CORRECT, WRONG = [2, 3, 5], [7, 11, 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = bridges.boot("gpt2")
    model.tokenizer = tiny_tokenizer(VOCAB, tmp_path_factory.mktemp("tokenizer"))
    return model


@pytest.fixture(scope="module")
def pair(model):
    clean = tokens(batch=BATCH, pos=POS)
    mask = torch.tensor([[1] * (n + 1) + [0] * (POS - n - 1) for n in LAST])
    return prompt_pair(model, clean, changed(clean, 1), mask)


@pytest.fixture(scope="module")
def whole_pair(model, pair):
    """The same prompts without padding."""
    return prompt_pair(model, pair.clean, pair.corrupted)


def logits_of(seed, sites=SITES):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((sites, BATCH, POS, VOCAB), generator=generator, dtype=torch.float64)


def softmax(row):
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


CLEAN = logits_of(99, sites=1)[0]
CLEAN_ODDS = [softmax(CLEAN[i, LAST[i]].tolist()) for i in range(BATCH)]
TEXTS = ["w1", "w9", "w3"]  # w0 is token 4, after four special tokens
SETS = [[2, 3], (5,), ["w1", 7]], [[11], torch.tensor([2, 13, 3]), range(17, 18)]
TOKENS = [[2, 3], [5], [5, 7]], [[11], [2, 13, 3], [17]]
# Each metric, and its value of prompt i by hand, of the prompt's logits [pos][token] as lists.
BY_HAND = {
    "logit_diff": (
        p.logit_diff(np.array(CORRECT), [torch.tensor([7]), np.int64(11), 2]),
        lambda i, run: run[-1][CORRECT[i]] - run[-1][WRONG[i]],
    ),
    "texts": (p.logit_diff(17, TEXTS), lambda i, run: run[-1][17] - run[-1][[5, 13, 7][i]]),
    "probability_diff": (
        p.probability_diff(*SETS),
        lambda i, run: sum(
            sign * softmax(run[-1])[t]
            for sign, of_prompts in zip((1, -1), TOKENS, strict=True)
            for t in of_prompts[i]
        ),
    ),
    "probability": (p.probability(CORRECT), lambda i, run: softmax(run[-1])[CORRECT[i]]),
    "log_probability": (p.log_probability(3), lambda i, run: math.log(softmax(run[-1])[3])),
    "kl": (
        p.kl(),
        lambda i, run: sum(
            c * math.log(c / q) for c, q in zip(CLEAN_ODDS[i], softmax(run[-1]), strict=True)
        ),
    ),
    "custom": (lambda logits: logits[:, -1, 3].mean(), lambda i, run: run[-1][3]),
    "custom, each": (lambda logits: logits[:, -2, 3], lambda i, run: run[-2][3]),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand_with_gradients_that_are_differences(case, model, pair):
    metric, by_hand = BY_HAND[case]
    bound = bind(metric, model, pair, reference=CLEAN)
    logits = logits_of(0)
    values = bound.value(bound.select(logits))
    expected = [
        sum(by_hand(i, run[i, : LAST[i] + 1].tolist()) for i in range(BATCH)) / BATCH
        for run in logits
    ]
    assert values.tolist() == pytest.approx(expected, rel=EXACT, abs=EXACT)
    assert bound.of(logits[2]) == pytest.approx(expected[2], rel=EXACT, abs=EXACT)
    # Controls: sites have different values, and reading one position off gives another value.
    assert len(set(values.tolist())) == SITES
    shifted = bound.value(bound.select(logits.roll(1, dims=2)))
    assert (shifted - values).abs().min() > 1e-6
    # Gradients
    run, direction = logits_of(3, sites=1)[0], logits_of(4, sites=1)[0]
    require_differentiable(bound, run)
    leaf, step = run.clone().requires_grad_(), 1e-5
    bound.value(bound.select(leaf)[None]).sum().backward()
    difference = (bound.of(run + step * direction) - bound.of(run - step * direction)) / (2 * step)
    # Central differences have errors of step² (truncation) and 1e-16 / step (rounding).
    assert (leaf.grad * direction).sum().item() == pytest.approx(difference, rel=1e-6, abs=1e-9)
    assert abs(difference) > 1e-4


def test_positions_from_the_start_of_prompts_of_different_lengths(model, pair):
    for position in (6, slice(3)):  # a real token of the longest prompt only, and of all prompts
        with pytest.raises(InputError, match=r"2 to 7 tokens.*counts positions from the end"):
            bind(lambda x, at=position: x[:, at].mean(), model, pair, reference=CLEAN)
    # Control: prompts of the same length have the same positions, whatever the padding.
    clean, corrupted = (x[:, [3, 4, 0, 1, 2, 3, 4]] for x in (pair.clean, pair.corrupted))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0]])
    same = prompt_pair(model, clean, corrupted, mask)
    bound = bind(lambda logits: logits[:, 0, 3], model, same, reference=CLEAN)
    assert bound.of_run(CLEAN).tolist() == [CLEAN[i, 2 - i, 3].item() for i in range(BATCH)]


def test_loss_is_transformer_lens(model, pair):
    bound = bind(p.loss(), model, pair)
    for run in (pair.clean, pair.corrupted):
        logits = model(run, attention_mask=pair.mask)
        got = bound.of(logits)
        logs = logits.log_softmax(-1)
        by_token = [
            -logs[i, t, pair.clean[i, t + 1]].item() for i in range(BATCH) for t in range(LAST[i])
        ]
        assert got == pytest.approx(sum(by_token) / len(by_token), rel=EXACT)
    # Without padding, it is TransformerLens' mean. Control: with padding, it differs from it.
    whole = prompt_pair(model, pair.clean, pair.corrupted)
    reference = model(pair.clean, return_type="loss").item()
    assert bind(p.loss(), model, whole).of(model(pair.clean)) == pytest.approx(reference, rel=EXACT)
    assert abs(reference - bound.of(model(pair.clean))) > 1e-3


def test_kl_has_a_direction_and_half_precision_is_summed_in_float32(model, pair):
    bound = bind(p.kl(), model, pair, reference=CLEAN)
    shifted = logits_of(1, sites=1)[0]
    assert abs(bound.of(CLEAN)) < EXACT
    swapped = bind(p.kl(), model, pair, reference=shifted).of(CLEAN)
    assert abs(swapped - bound.of(shifted)) > 1e-3
    barred = CLEAN.clone()
    barred[..., 5] = -torch.inf
    assert math.isfinite(bind(p.kl(), model, pair, reference=barred).of(shifted))
    bound = bind(p.log_probability(3), model, pair)
    half = logits_of(0).to(torch.bfloat16)
    got = bound.value(bound.select(half))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, bound.value(bound.select(half.float())))


def test_a_detached_metric_serves_sweeps_and_not_attribution(model, whole_pair):
    bound = bind(lambda logits: logits.mean().item(), model, whole_pair)
    assert bound.of(CLEAN) == pytest.approx(CLEAN.mean().item())
    with pytest.raises(InputError, match="detached"):
        require_differentiable(bound, CLEAN)


class Counter:
    calls = 0

    def __call__(self, logits):
        self.calls += 1
        return logits.mean() * self.calls


REFUSED = {
    "remembers": (Counter(), "and then"),
    "in place": (lambda logits: logits.mul_(2.0).mean(), "changes the logits"),
    "not a number": (lambda logits: logits.mean() * torch.nan, "not finite for 1 of 1"),
    "other prompts": (
        p.probability_diff([[1], [4]], [[2], [], [3]]),
        "(?s)correct: got 2 answers.*wrong, prompt 1: got 0 answers",
    ),
    "right and wrong": (
        p.probability_diff([[1], [2], [3]], [[4], [5], [3, 6]]),
        r"same token for prompts \[2\]",
    ),
    "two tokens": (p.probability("w1 w2"), r"'w1 w2', which is 2 tokens \['w1', ' w2'\]"),
    "range": (p.logit_diff(41, -1), "(?s)correct: got 41; .*0 to 40.*wrong: got -1"),
    "same": (p.logit_diff([1, 2, 3], [2, 2, 3]), r"same token for prompts \[1, 2\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, model, whole_pair):
    metric, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        bind(metric, model, whole_pair).of(CLEAN)
