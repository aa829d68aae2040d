"""Tests of counts of heads, parameters and flops against modules, torch and the constructions."""

from pathlib import Path

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from analyses.post import (
    PlainLayer,
    PlainTransformer,
    StreamCoordinates,
    post_transformer,
)
from analyses.tools import count_heads
from analyses.tools.count_heads import HeadCounts

GPT3 = HeadCounts(d_model=12288, n_heads=96, d_head=128, d_mlp=4 * 12288)


def test_what_the_paper_says_of_gpt3():
    assert GPT3.d_mlp / GPT3.n_heads == 512  # "500:1"
    assert GPT3.mlp_parameters == 2 * GPT3.attention_parameters  # "2:1"


def test_the_tables_are_those_of_the_guide():
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text("utf-8")
    assert count_heads.layers() in page
    assert count_heads.post() in page


def test_parameters_are_those_of_a_grouped_and_gated_layer():
    config = transformers.LlamaConfig(
        hidden_size=30, num_attention_heads=6, num_key_value_heads=2, head_dim=14,
        intermediate_size=37, num_hidden_layers=1, vocab_size=41,
    )  # fmt: skip
    layer = transformers.LlamaForCausalLM(config).model.layers[0]
    counts = HeadCounts(30, 6, 14, 37, 2, gated=True)
    attention, mlp = (
        sum(parameter.numel() for parameter in part.parameters())
        for part in (layer.self_attn, layer.mlp)
    )
    assert (counts.attention_parameters, counts.mlp_parameters) == (attention, mlp)


def flops(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def meta(*shape):
    return torch.empty(*shape, device="meta")


def test_flops_are_torchs():
    """The flops equal those of an explicit layer, for `pos` tokens that attend to all tokens."""
    d_model, n_heads, d_head, d_mlp, pos = 13, 3, 5, 37, 11
    counts = HeadCounts(d_model, n_heads, d_head, d_mlp)
    x = meta(pos, d_model)

    def attention():
        q, k, v = (x @ meta(d_model, n_heads * d_head) for _ in range(3))
        q, k, v = (vectors.view(pos, n_heads, d_head).transpose(0, 1) for vectors in (q, k, v))
        z = (q @ k.mT).softmax(-1) @ v
        z.transpose(0, 1).reshape(pos, -1) @ meta(n_heads * d_head, d_model)

    def neuron_heads(keys):
        """Compute neuron-heads; the bias token is one of the keys, and the value is the query."""
        q = (x @ meta(d_model, d_mlp)).T[:, :, None]
        z = (q @ meta(d_mlp, keys, 1).mT).softmax(-1) @ meta(d_mlp, keys, 1)
        z[..., 0].T @ meta(d_mlp, d_model)

    def narrow():
        q = (x @ meta(d_model, d_mlp)).view(-1, 1, 1)
        z = (q @ meta(pos * d_mlp, 2, 1).mT).softmax(-1) @ meta(pos * d_mlp, 2, 1)
        z.view(pos, d_mlp) @ meta(d_mlp, d_model)

    assert flops(attention) == pos * counts.attention_flops(pos)
    assert flops(narrow) == pos * counts.neuron_head_flops
    assert flops(lambda: neuron_heads(pos + 1)) == pos * counts.masked_flops(pos)
    assert flops(lambda: neuron_heads(pos)) != pos * counts.masked_flops(pos)  # control
    assert flops(lambda: x @ meta(d_model, d_mlp) @ meta(d_mlp, d_model)) == pos * counts.mlp_flops


def test_the_posts_heads_are_those_of_its_construction():
    """As built, all heads count; as worded, the rank of the two matrices over d_head counts."""
    d_model, n_heads, d_head, d_mlp, n_ctx = 7, 3, 2, 28, 5
    counts = HeadCounts(d_model, n_heads, d_head, d_mlp)
    shapes = dict.fromkeys(("W_Q", "W_K", "W_V"), (n_heads, d_model, d_head))
    shapes |= dict.fromkeys(("b_Q", "b_K", "b_V"), (n_heads, d_head))
    shapes |= {"W_O": (n_heads, d_head, d_model), "b_O": (d_model,)}
    shapes |= {"W_1": (d_model, d_mlp), "b_1": (d_mlp,), "W_2": (d_mlp, d_model), "b_2": (d_model,)}
    plain = PlainLayer(**{name: torch.randn(shape) for name, shape in shapes.items()})
    (layer,) = post_transformer(PlainTransformer((plain,)), n_ctx, omega=10.0).layers
    assert list(counts.post_heads(built=True).values()) == [len(s.W_Q) for s in layer.sublayers]
    ranks = [int(torch.linalg.matrix_rank(weight)) for weight in (plain.W_1, plain.W_2)]
    worded = counts.post_heads()
    assert [worded["into_hidden"], worded["out_of_hidden"]] == [-(-r // d_head) for r in ranks]
    assert (worded["attention"], worded["activation"]) == (n_heads, d_mlp)
    assert counts.post_width(n_ctx) == StreamCoordinates(n_ctx, d_model, d_mlp).width
