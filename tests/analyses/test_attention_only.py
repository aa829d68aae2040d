"""Tests of trained neuron-heads: their function, their counts, and the measures of the study."""

import pytest
import torch
from common import needs_hooked_transformer, relative
from oracles.definitions import Head
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from analyses.studies import attention_only_models as models
from analyses.studies import train_attention_only as study

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
    """Compute Definition 1's heads on [x | 0] and the bias token's row, one after the other."""
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
    W_O = torch.cat([made.W_O, torch.zeros(H, 1, dtype=torch.float64)], dim=1)
    heads = [
        Head(torch.outer(W_Q[:, i], W_K[:, i]), torch.outer(W_V[:, i], W_O[i]), mask)
        for i in range(H)
    ]
    return sum(head(stream) for head in heads)[:POS, :D]


@pytest.mark.parametrize("kind", models.KINDS)
@torch.no_grad()
def test_heads_are_masked_heads_of_the_paper(kind):
    made, x = neurons(kind), torch.randn(2, POS, D, dtype=torch.float64)
    expected = torch.stack([to_the_letter(made, row) for row in x])
    assert relative(made(x), expected) < 1e-13
    assert relative(made.dense(x), expected) < 1e-13
    made.W_Q[0, 0] += 0.1
    assert relative(made(x), expected) > 1e-3


@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("dense", [False, True])
def test_flops_of_a_step_of_one_layer(kind, dense):
    made = neurons(kind)
    x = torch.randn(2, POS, D, dtype=torch.float64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        (made.dense if dense else made)(x).sum().backward()
    counted = counter.get_total_flops()
    if made.bias is not None:  # the bias token's key and value are one row times W_K and W_V
        counted -= 3 * 2 * 2 * (D + 1) * H
    if dense and kind in ("mlp", "theorem", "without keys"):  # the keys have no gradient
        counted += 2 * 2 * POS * (POS + 1) * H
    assert counted == 3 * 2 * POS * models.flops(kind, D, H, dense * (POS + 1))


@pytest.mark.parametrize("task", TASKS)
def test_the_theorem_is_the_mlp_step_for_step(task):
    """The theorem's heads train like the MLP, unless W_V is independent of W_Q."""
    task, trained = TINY[task], {}
    for kind in ("mlp", "theorem", "set free"):
        model = task.model(kind, 6, seed=1).double()
        optimizer = task.optimizer(model, 1e-2)
        for step in range(5):
            loss = task.loss(model, task.batch(step % 2, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        layer = models.neurons_of(model)[0]
        trained[kind] = torch.cat([layer.W_Q.flatten(), layer.W_O.flatten()]).detach()
    # AdamW divides by the size of a gradient, rounded at 1e-16 of the largest, five times
    assert relative(trained["theorem"], trained["mlp"]) < 1e-9
    assert relative(trained["set free"], trained["mlp"]) > 1e-4
