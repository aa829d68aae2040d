"""The study of fewer heads: its heads, its measures, its trial run and its page."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from common import relative, run_script

from analyses.studies import how_few_heads as study
from analyses.tools.benching import table
from attn_only_lens import expose_neuron_heads, pretrained
from attn_only_lens.reference import Head

RESULTS = Path(__file__).parents[2] / "analyses" / "results"
N, D, M, WIDTH = 7, 5, 3, 2


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_its_heads_are_masked_heads_of_the_paper():
    """They see their own token and the bias token, which has the value 0."""
    torch.manual_seed(0)
    heads = study.Heads(
        *(rand(D, M), rand(M), rand(M, D, WIDTH), rand(M, WIDTH), rand(M, WIDTH, D), rand(D))
    )
    x = rand(N, D)
    # tokens [x | 1 | 0]; the bias token is [0 | 0 | 1]
    stream = torch.zeros(N + 1, D + 2, dtype=torch.float64)
    stream[:N, :D], stream[:N, D], stream[N, D + 1] = x, 1, 1
    mask = torch.eye(N + 1, dtype=torch.float64)
    mask[:, N] = 1
    total = heads.b_O.expand(N, D).clone()
    for head in range(M):
        W_QK = torch.zeros(D + 2, D + 2, dtype=torch.float64)
        W_QK[:D, D + 1], W_QK[D, D + 1] = -heads.a[:, head], -heads.b[head]
        W_V = torch.cat([heads.W_V[head], heads.b_V[head][None], torch.zeros(1, WIDTH)])
        W_OV = torch.zeros(D + 2, D + 2, dtype=torch.float64)
        W_OV[:, :D] = W_V @ heads.W_O[head]
        total = total + Head(W_QK.detach(), W_OV.detach(), mask)(stream)[:N, :D]
    assert relative(heads(x), total) < 1e-12


def layer(n=400, n_neurons=11):
    """Return an MLP of M clusters of neurons; in a cluster, all have the same gate."""
    torch.manual_seed(1)
    x = rand(n, D)
    gates = 4 * rand(D, M)
    group = torch.arange(n_neurons) % M
    q = x @ gates[:, group]
    pattern = q.sigmoid()
    z = pattern * (x @ rand(D, n_neurons))
    y = z @ rand(n_neurons, D) + 1.0
    return study.Layer(x.float(), y.float(), q.float(), pattern.float(), z.float(), 1.0), group


def test_neurons_with_equal_gates_are_one_head():
    made, group = layer()
    chosen = study.clustered(made.pattern, M, seed=0)
    assert sorted(group[chosen].tolist()) == list(range(M))
    heads = study.heads_by_least_squares(made, chosen, 1.0, D)
    # least squares with a ridge of 1e-4 of the mean square of a feature
    assert relative(heads(made.x), made.y) < 1e-2
    same_gate = [i for i in range(11) if group[i] == 0][:M]
    assert relative(study.heads_by_least_squares(made, same_gate, 1.0, D)(made.x), made.y) > 0.1
    assert relative(study.heads_by_least_squares(made, chosen, 1.0, 1)(made.x), made.y) > 0.1
    assert relative(study.strongest(made, 11)(made.z), made.y) < 1e-2
    assert relative(study.strongest(made, 2)(made.z), made.y) > 0.1


@pytest.mark.parametrize("part", ["mlp", "attn"])
@torch.no_grad()
def test_kl_is_of_the_replaced_sublayer(part):
    """It is 0 for what the sublayer writes itself, as an independent forward pass has it."""
    with expose_neuron_heads(pretrained.small_english()) as model:
        tokens = model.to_tokens("The keys near the cabinet")
        subject = study.Subject("any", model, [tokens], [tokens], lambda tokens: tokens >= 0)
        recorded = study.layer_of(subject, 1, part, 100)
        assert study.kl(subject, 1, part, lambda x: recorded.y[None]) < 1e-6
        hook = (f"blocks.1.hook_{part}_out", lambda y, hook: torch.zeros_like(y))
        exact, cut = model(tokens), model.run_with_hooks(tokens, fwd_hooks=[hook])
        exact, cut = exact.double().softmax(-1), cut.double().softmax(-1)
        expected = (exact * (exact / cut).log()).sum(-1).mean().item()
        assert study.kl(subject, 1, part, torch.zeros_like) == pytest.approx(expected, rel=1e-4)
        if part == "mlp":
            every = study.kl(
                subject, 1, part, lambda z: z @ model.blocks[1].mlp.out.weight.T, of_neurons=True
            )
            assert every < 1e-6


def test_smoke(tmp_path):
    run_script(study.main, ["--smoke", "--out", str(tmp_path)])
    rows = pd.read_csv(tmp_path / "how_few_heads.csv")
    assert set(rows["arm"]) == {"mean", "linear", *study.ARMS}
    assert (rows["kl"] > -1e-6).all()
    back = pd.read_csv(tmp_path / "how_few_heads_attention.csv")
    assert back["to itself"].between(0, 1).all()


def test_the_page_has_its_rows():
    rows = pd.read_csv(RESULTS / "how_few_heads.csv")
    back = pd.read_csv(RESULTS / "how_few_heads_attention.csv")
    page = (RESULTS / "how_few_heads.md").read_text("utf-8")
    assert study.verdicts(rows, back) in page
    assert table(study.fewest(rows)) in page
    assert table(study.curves(rows)) in page
    assert table(study.backwards(back)) in page
