"""Neuron-heads that are trained: what they compute, count and become; the study and its page."""

import itertools
from pathlib import Path

import attention_only_models as models
import attention_only_report as report
import pandas as pd
import pytest
import torch
import train_attention_only as study
from common import needs_hooked_transformer, relative
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from attn_only_lens import expose_neuron_heads, neuron_gate, reference

NAME = Path(study.__file__).stem
KEPT = Path(__file__).parents[1] / "analyses" / "results"
D, H, POS = 5, 3, 7
TINY = {"text": study.SMOKE.text, "addition": study.SMOKE.addition}
TASKS = ["text", pytest.param("addition", marks=needs_hooked_transformer)]


def neurons(kind, n_heads=H, d_model=D):
    torch.manual_seed(11)
    made = models.Neurons(kind, d_model, n_heads, 0.7, 0.9, nn.Parameter(torch.zeros(d_model)))
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
    made.bias = made.bias if made.bias is None else nn.Parameter(torch.randn(D).double())
    return made


def to_the_letter(made, x):
    """Heads of Definition 1 on [x | 0] over the bias token's row, one after the other."""
    none = torch.zeros(H, dtype=torch.float64)
    unit = torch.tensor([[0.0] * D + [1.0]], dtype=torch.float64)
    row = unit if made.bias is None else torch.cat([made.bias, unit[0, -1:]])[None]
    stream = torch.cat([torch.cat([x, 0 * x[:, :1]], dim=1), row])

    def full(name, last):
        vectors = getattr(made, name, torch.zeros_like(made.W_Q))
        return vectors if len(vectors) == D + 1 else torch.cat([vectors, last[None]])

    W_Q = full("W_Q", none)
    W_K = full("W_K", made.key_b if made.kind == "persistent" else none - 1)
    W_V = full("W_V" if hasattr(made, "W_V") else "W_Q", getattr(made, "value_b", none))
    mask = torch.eye(POS + 1, dtype=torch.float64)
    mask[:, -1] = 1
    written = [
        reference.Head(W_Q[:, [i]] @ W_K[:, i][None], W_V[:, [i]] @ made.W_O[[i]], mask)
        for i in range(H)
        if W_V.shape[0] == made.W_O.shape[1]
    ]
    heads = []
    for i in range(H):
        W_O = torch.cat([made.W_O[i], made.W_O.new_zeros(1)])
        heads.append(reference.Head(W_Q[:, [i]] @ W_K[:, i][None], W_V[:, [i]] @ W_O[None], mask))
    assert not written
    return sum(head(stream) for head in heads)[:POS, :D]


@pytest.mark.parametrize("kind", models.KINDS)
@torch.no_grad()
def test_heads_are_masked_heads_of_the_paper(kind):
    made, x = neurons(kind), torch.randn(2, POS, D, dtype=torch.float64)
    expected = torch.stack([to_the_letter(made, each) for each in x])
    assert relative(made(x), expected) < 1e-13
    assert relative(made.dense(x), expected) < 1e-13
    made.W_Q[0, 0] += 0.1
    assert relative(made(x), expected) > 1e-3


@pytest.mark.parametrize("task", TASKS)
def test_the_theorem_is_the_mlp_step_for_step(task):
    task = TINY[task]
    trained = {}
    for kind in ("mlp", "theorem", "set free"):
        model = task.model(kind, 6, seed=1).double()
        optimizer = task.optimizer(model, 1e-2)
        for step in range(13):
            loss = task.loss(model, task.batch(step % 5, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained[kind] = torch.cat(
            [p.detach().flatten() for n, p in model.named_parameters() if "W_" in n]
        )
    assert relative(trained["theorem"], trained["mlp"]) < 1e-9
