"""Tests that a model's passed tests are remembered until it changes or prompts are longer."""

import gc
import weakref
from contextlib import suppress
from types import MethodType

import bridges
import pytest
import torch
from common import HAS_HOOKED_TRANSFORMER, of_a_library

from attn_only_lens import AttnOnlyLensError, Contrast, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine import passed_tests

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
KINDS = ["gpt2", "llama", *["HookedTransformer"] * HAS_HOOKED_TRANSFORMER]


class Counted:
    """A model that counts the runs of its blocks."""

    def __init__(self, kind):
        if kind == "HookedTransformer":
            from models import build

            source = build("gelu")
        else:
            source = bridges.boot(kind, torch.float64)
        self.model, self.n_runs = expose_neuron_heads(source).model, 0
        for block in self.model.blocks:
            block.register_forward_hook(of_a_library(lambda *run: self.count()))

    def count(self):
        self.n_runs += 1

    def sweep(self, n_pos=7, batch=1, mask=None):
        """Return effects and the number of block runs."""
        self.n_runs, generator = 0, torch.Generator().manual_seed(1)
        clean = torch.randint(0, 37, (batch, n_pos), generator=generator)
        corrupted = clean.clone()
        corrupted[:, 3:] = (clean[:, 3:] + 5) % 37
        contrast = Contrast(clean, corrupted, p.logit_diff(7, 8), mask=mask)
        sites, per_prompt = ["L0N5", "L1N3", "L1H0"], batch > 1
        result = p.activation_patch(self.model, contrast, sites=sites, per_prompt=per_prompt)
        return result.effect.to_numpy(), self.n_runs


def count_hook(module, args, output):
    pass


def inner(norm):
    return getattr(norm, "original_component", norm)


def norm_weight(model):
    return next(p for p in inner(model.ln_final)._parameters.values() if p is not None)


CHANGES = {
    "a vector is written to through .data": lambda model: norm_weight(model).data.mul_(1.5),
    "a weight is written to": lambda model: next(model.parameters()).detach().mul_(1.0),
    "a hook": lambda model: model.blocks[0].register_forward_hook(of_a_library(count_hook)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tests_run_once(kind):
    counted = Counted(kind)
    first, n_first = counted.sweep()
    second, n_second = counted.sweep()
    assert (first == second).all()
    assert n_second <= n_first - 3 * len(counted.model.blocks)
    assert counted.sweep(n_pos=5)[1] < n_first  # shorter prompts
    assert counted.sweep(n_pos=11)[1] > n_second  # longer prompts
    assert counted.sweep(n_pos=11)[1] <= n_second


@pytest.mark.parametrize(
    ("kind", "change"),
    [*(("gpt2", change) for change in CHANGES), (KINDS[-1], "a weight is written to")],
)
def test_a_changed_model_is_tested_again(kind, change):
    counted = Counted(kind)
    n_first, n_second = (counted.sweep()[1] for _ in range(2))
    CHANGES[change](counted.model)
    assert counted.sweep()[1] == n_first
    assert counted.sweep()[1] == n_second
    with torch.autocast("cpu", torch.bfloat16), suppress(AttnOnlyLensError):
        assert counted.sweep()[1] > n_second


def test_metrics_of_other_columns_are_tested():
    """The tests cover new columns, because a forward pass may treat one logit differently."""
    model = expose_neuron_heads(bridges.boot("gpt2")).model
    wrapped = model.original_model
    forward = type(wrapped).forward

    def masking(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits[..., 0] = -3.0
        return output

    wrapped.forward = MethodType(masking, wrapped)
    clean, corrupted = (torch.tensor([[3, 5, 7, x, 13]]) for x in (11, 17))
    for correct in (0, 5):
        contrast = Contrast(clean, corrupted, p.logit_diff(correct, 7))
        remembered = p.activation_patch(model, contrast, sites="heads").effect.to_numpy()
        passed_tests._PASSED.clear()
        fresh = p.activation_patch(model, contrast, sites="heads").effect.to_numpy()
        assert (remembered == fresh).all()


def test_a_model_is_not_kept_alive():
    counted = Counted("gpt2")
    counted.sweep()
    reference = weakref.ref(counted.model)
    del counted
    gc.collect()
    assert reference() is None


def test_padded_prompts_are_always_tested():
    counted, mask = Counted("gpt2"), torch.ones(2, 7, dtype=torch.long)
    mask[0, -2:] = 0
    # Only whether the model ignores padding is remembered after the first sweep.
    _, n_second, n_third = (counted.sweep(batch=2, mask=mask)[1] for _ in range(3))
    _, without_padding = (counted.sweep(batch=2)[1] for _ in range(2))
    assert n_second == n_third > without_padding
