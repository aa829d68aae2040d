"""Tests that the demo's statements about the shipped model are true, and that its pages match."""

import re

import pytest
import torch
from typer.testing import CliRunner

from attn_only_lens import HeadName, pretrained
from attn_only_lens.cli import app
from attn_only_lens.cli.demo import CLEAN, CORRUPTED
from attn_only_lens.models.expose import expose_neuron_heads

pytestmark = pytest.mark.both_versions


@torch.no_grad()
def test_the_strongest_parts_and_their_pages(tmp_path):
    """The column "denoise" equals patches by plain hooks."""
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert "bitwise the same" in result.output
    numbers = r" +-?[\d.]+" * 3 + r" +(-?[\d.]+)"
    shown = re.findall(rf"^(L\d[HN]\d+)@(\d+) +' (\w+)'{numbers}", result.output, re.M)
    assert len(shown) == 8
    model = expose_neuron_heads(pretrained.small_english()).model
    are, is_ = map(model.to_single_token, (" are", " is"))
    words = [word.strip() for word in model.to_str_tokens(CLEAN)]

    def difference(logits):
        return (logits[0, -1, are] - logits[0, -1, is_]).item()

    logits, cache = model.run_with_cache(CLEAN)
    low, high = difference(model(CORRUPTED)), difference(logits)
    for name, number, word, score in shown:
        head, position = HeadName.parse(name), int(number)
        assert words[position] == word
        hook = head.hook("z", model)

        def patch(z, hook, head=head, position=position, clean=cache[hook]):
            z[:, position, head.index] = clean[:, position, head.index]
            return z

        patched = model.run_with_hooks(CORRUPTED, fwd_hooks=[(hook, patch)])
        assert abs((difference(patched) - low) / (high - low) - float(score)) < 0.006
    neuron = next(name for name, *_ in shown if "N" in name)
    for page in ("circuit", "neurons"):
        assert neuron in (tmp_path / "new" / f"{page}.html").read_text("utf-8")
