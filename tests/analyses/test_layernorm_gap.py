"""Tests of the study of gaps under norms: the exact cases, and that its page matches its table."""

import pytest
import torch
from bridges import boot
from common import D_VOCAB, relative

from analyses.studies import layernorm_gap as study
from attn_only_lens.growth.models._grow import growable_of

PROMPTS = torch.arange(22).reshape(2, 11) * 7 % D_VOCAB


def test_what_is_exact_in_float64(monkeypatch):
    source = growable_of(boot("gpt2"))  # LayerNorm, float64
    size = source.model.cfg.d_model
    with torch.no_grad():
        logits = source.model(PROMPTS)
        for arm, times, exact in (
            ("evenly", 2, True),
            ("Deep Fusion", 2, True),
            ("bert2BERT", 2, False),
            ("Theorem 3.5", 1.5, True),
        ):
            wider = study.widened(source, arm, round(times * size), 0)
            assert wider.cfg.d_model == times * size
            difference = relative(wider(PROMPTS), logits)
            assert difference < 1e-12 if exact else difference > 1e-3, arm
        # The control: input weights are not divided by the number of copies.
        monkeypatch.setattr(torch, "bincount", lambda x, minlength: torch.ones(minlength))
        assert relative(study.widened(source, "evenly", 2 * size, 0)(PROMPTS), logits) > 0.5


def test_gap_by_hand():
    tokens = torch.tensor([[0, 1]])
    old = torch.tensor([[[0.0, 0.0], [3.0, 1.0]]])
    new = torch.tensor([[[0.0, torch.log(torch.tensor(3.0))], [3.0, 1.0]]])
    gap = study.gap(old, new, tokens)
    assert gap["logits"] == pytest.approx(1.0986123 / 3)
    assert gap["KL"] == pytest.approx(0.1438410)  # ln(2 / √3)
    assert (gap["loss before"], gap["loss"]) == pytest.approx((0.6931472, 0.2876821))
