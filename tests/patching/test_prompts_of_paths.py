"""Tests of paths per prompt and in chunks of prompts.

The oracle for a prompt is the same call with this prompt alone, without padding.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from common import tokens

from attn_only_lens import Contrast, Work
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

METRIC = p.logit_diff(7, 11)
LENGTHS = (7, 5, 6)
ROLES = {"subject": [1, 2, 1], "end": -1}
SENDERS = ["L0H1", "L0N3"]
EDGES = p.Edges(p.Sites(SENDERS, "roles"), ["L1H0", "L1N5", "logits"], "z")
# The tolerance allows for sums over prompts in another order, in float64.
EXACT = {"rtol": 0, "atol": 1e-12}


def prompts():
    """Return three pairs of unequal lengths, padded on the left, and the unpadded pairs."""
    clean = tokens(0, batch=3, pos=7)
    corrupted = clean.clone()
    for row, place in enumerate(ROLES["subject"]):
        corrupted[row, place] = (clean[row, place] + 7) % 41
    alone = [Contrast(clean[i, :n], corrupted[i, :n], METRIC) for i, n in enumerate(LENGTHS)]
    mask = torch.zeros(3, 7, dtype=torch.long)
    padded = [torch.zeros_like(clean) for _ in range(2)]
    for i, n in enumerate(LENGTHS):
        real = slice(7 - n, None)
        mask[i, real] = 1
        for row, prompt in zip(padded, (alone[i].clean, alone[i].corrupted), strict=True):
            row[i, real] = prompt
    return Contrast(*padded, METRIC, mask=mask, roles=ROLES), alone


def test_paths(model, tmp_path):
    (contrast, alone), edges, how = prompts(), replace(EDGES, scale="anew"), {"top": 5}

    def patched(**options):
        return p.path_patch(model, contrast, edges, **how, **options)

    rows = patched(per_prompt=True, work=Work(prompts_at_once=1))
    n = len(rows.frame) // 3
    assert rows.frame["prompt"].tolist() == [0, 1, 2] * n
    key = ["sender", "receiver", "position"]
    for i in range(3):
        roles = {ROLES["subject"][i]: "subject", LENGTHS[i] - 1: "end"}
        of_one = replace(edges, senders=p.Sites(SENDERS, list(roles)))
        one = p.path_patch(model, alone[i], of_one, **how | {"top": None}).frame
        one["position"] = one["position"].map(roles)
        expected = one.astype({"sender": str, "receiver": str}).set_index(key)["value"]
        of_prompt = rows.frame[rows.frame["prompt"] == i].astype({"sender": str, "receiver": str})
        of_prompt = of_prompt.set_index(key)["value"]
        np.testing.assert_allclose(of_prompt, expected[of_prompt.index], **EXACT)
    values = rows.frame["value"].to_numpy().reshape(n, 3)
    assert np.ptp(values, axis=1).max() > 1e-3  # control: prompts differ
    unpatched = rows.frame["unpatched"].to_numpy().reshape(n, 3)
    resumed = Work(prompts_at_once=2, resume=tmp_path / "paths")
    for together in (patched(), patched(work=resumed)):
        frame, span = together.frame, together.clean_value - together.corrupted_value
        assert frame[key].equals(rows.frame[key].iloc[::3].reset_index(drop=True))
        np.testing.assert_allclose(frame["value"], values.mean(axis=1), **EXACT)
        error = values.std(axis=1, ddof=1) / 3**0.5
        np.testing.assert_allclose(frame["value_standard_error"], error, **EXACT)
        error = (values - unpatched).std(axis=1, ddof=1) / 3**0.5 / abs(span)
        np.testing.assert_allclose(frame["score_standard_error"], error, **EXACT)
        scores = rows.frame["score"].to_numpy().reshape(n, 3).mean(axis=1)
        np.testing.assert_allclose(frame["score"], scores, **EXACT)
        np.testing.assert_allclose(frame["estimate"], rows.frame["estimate"][::3], **EXACT)
    with pytest.raises(InputError, match="per_prompt: got"):
        patched(work=resumed, per_prompt=True)
    rows.save(tmp_path / "rows.csv")
    assert p.Paths.load(tmp_path / "rows.csv").frame["prompt"].tolist() == [0, 1, 2] * n


def test_refused(model):
    mean = replace(prompts()[0], metric=lambda logits: logits[:, -1, 7].mean())
    for how, match in (
        ({"work": Work(prompts_at_once=1)}, "a function of the logits of all 3 prompts"),
        ({"per_prompt": True}, "one value for all 3 prompts"),
    ):
        with pytest.raises(InputError, match=match):
            p.path_patch(model, mean, EDGES, **how)
