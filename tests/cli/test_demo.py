"""Tests that the demo's statements about the shipped model are true, and that its pages match."""

import re

import numpy as np
import torch
from common import run_cli

from attn_only_lens import Contrast, HeadName, load, tasks
from attn_only_lens import patching as p
from attn_only_lens.cli.demo import CLEAN, CORRUPTED, PAIRS, WORDS
from attn_only_lens.models.expose import expose_neuron_heads


@torch.no_grad()
def test_the_strongest_parts_and_their_pages(tmp_path):
    """The column "denoise" equals patches by plain hooks."""
    result = run_cli("demo", "--out", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert "bitwise the same" in result.output
    assert "held-out pairs" in result.output
    shown = re.findall(r"^(L\d[HN]\d+)@(\w+) .*?" + r" +(-?[\d.]+)" * 5 + "$", result.output, re.M)
    assert len(shown) == 8
    model = expose_neuron_heads(load("small-english")).model
    are, is_ = map(model.to_single_token, (" are", " is"))
    pairs = tasks.from_pair(
        model, 2 * PAIRS, Contrast(CLEAN, CORRUPTED, p.logit_diff(" are", " is")), WORDS
    )[:PAIRS]

    def difference(logits):
        return (logits[0, -1, are] - logits[0, -1, is_]).item()

    restored = np.zeros(len(shown))
    span = 0.0
    for clean, corrupted in zip(pairs.clean, pairs.corrupted, strict=True):
        logits, cache = model.run_with_cache(clean)
        words = [word.strip() for word in model.to_str_tokens(clean)]
        of_role = {"keys": words.index(clean.split()[1]), "cabinet": words.index(clean.split()[-1])}
        of_role["end"] = of_role.pop("cabinet")  # the same token
        low = difference(model(corrupted))
        span += difference(logits) - low
        for row, (name, role, *_) in enumerate(shown):
            head, position = HeadName.parse(name), of_role[role]
            hook = head.hook("z", model)

            def patch(z, hook, head=head, position=position, clean=cache[hook]):
                z[:, position, head.index] = clean[:, position, head.index]
                return z

            patched = model.run_with_hooks(corrupted, fwd_hooks=[(hook, patch)])
            restored[row] += difference(patched) - low
    printed = [float(row[-2]) for row in shown]
    np.testing.assert_allclose(restored / span, printed, rtol=0, atol=0.006)
    neuron = next(name for name, *_ in shown if "N" in name)
    for page in ("circuit", "neurons"):
        assert neuron in (tmp_path / "new" / f"{page}.html").read_text("utf-8")
