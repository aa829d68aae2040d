"""Heads, parameters and flops of MLPs as attention heads: the tables of docs/limits.md.

The paper states these counts for GPT-3, which has d_model 12,288, 96 heads of width 128, and
4 · 12,288 = 49,152 neurons: 49,152 neuron-heads per layer against 96 heads, "500:1" (512), and
parameters "2:1". In general, for weight matrices without biases,

    attention     2 · d_model · d_head · (n_heads + n_key_value_heads)      W_Q, W_O; W_K, W_V
    MLP           2 · d_model · d_mlp, or 3 · d_model · d_mlp if it is gated

so the ratio is 2 only if n_heads · d_head = d_model, every head has its own keys and values,
d_mlp = 4 · d_model, and the MLP is plain: 8 d_model² against 4 d_model².

Flops count the multiplications and additions of matrix products, for one token that attends to
`pos` tokens including itself: 2 per weight, and 4 · d_head per key and head (scores and values). A
neuron-head has two keys, the token itself and the bias token, and d_head = 1. So it takes 8 flops
per neuron in addition to the MLP's products, because W_Q = W_V is applied once. The paper's dense
form computes the scores with all pos + 1 keys, and masks all but two.

The blog post's heads: "the linear transformation sublayer just needs enough to spread the rank of
the weight matrix across the V matrices". A D × 4D matrix has rank D at most, and a value matrix has
rank d_head, so this takes ⌈D / d_head⌉ heads. (The numbers are blank in our copies of the post, so
we derived them.) The construction takes more heads: the biases add one to each rank, and the
sublayer that reads the hidden part also clears the hidden part, so its rank is d_mlp + 1.

    python -m analyses.tools.count_heads

Sources: "Attention-Only Transformers and Implementing MLPs with Attention Heads", sections 4 and 5;
"No Really, Attention is ALL You Need" (Robert_AIZI, 2023), with its comments.
"""

from dataclasses import dataclass

from analyses.tools.benching import markdown


@dataclass(frozen=True)
class HeadCounts:
    """The sizes of one layer, and the counts that follow from them.

    Attributes:
        d_model: the width of the residual stream.
        n_heads: attention heads.
        d_head: their width.
        d_mlp: neurons, each a neuron-head of width 1.
        n_key_value_heads: grouped keys and values; None if each head has its own.
        gated: whether the MLP is gated.
    """

    d_model: int
    n_heads: int
    d_head: int
    d_mlp: int
    n_key_value_heads: int | None = None
    gated: bool = False

    @property
    def attention_parameters(self) -> int:
        """Weights of W_Q, W_K, W_V and W_O of all attention heads."""
        keys = self.n_heads if self.n_key_value_heads is None else self.n_key_value_heads
        return 2 * self.d_model * self.d_head * (self.n_heads + keys)

    @property
    def mlp_parameters(self) -> int:
        """Weights of W_in, W_out and W_gate; the neuron-heads have the same weights."""
        return (2 + self.gated) * self.d_model * self.d_mlp

    def attention_flops(self, pos: int) -> int:
        """Flops of the attention heads, for a token that attends to `pos` tokens."""
        return 2 * self.attention_parameters + 4 * pos * self.n_heads * self.d_head

    @property
    def mlp_flops(self) -> int:
        """Flops of the MLP, for one token."""
        return 2 * self.mlp_parameters

    @property
    def neuron_head_flops(self) -> int:
        """Flops of the neuron-heads with two keys each, as in this package, for one token."""
        return self.masked_flops(1)

    def masked_flops(self, pos: int) -> int:
        """Flops of the neuron-heads in the paper's dense form, for one of `pos` tokens."""
        return self.mlp_flops + 4 * (pos + 1) * self.d_mlp

    def post_heads(self, *, built: bool = False) -> dict[str, int]:
        """Count the heads of the blog post's four sublayers, for a plain MLP.

        With `built`, count the heads of the construction in `analyses.post`. Otherwise, count the
        heads that spread the rank of the two weight matrices.
        """
        assert not self.gated, "the post has plain MLPs"
        rank = min(self.d_model, self.d_mlp)
        into, out = (self.d_model + 1, self.d_mlp + 1) if built else (rank, rank)
        return {
            "attention": self.n_heads,
            "into_hidden": -(-into // self.d_head),
            "activation": self.d_mlp,
            "out_of_hidden": -(-out // self.d_head),
        }

    def post_width(self, n_ctx: int) -> int:
        """Return the width of the blog post's stream for `n_ctx` tokens: D + 4D + (N + 1)."""
        return self.d_model + self.d_mlp + n_ctx + 1


MODELS = {
    "GPT-2 small": (HeadCounts(768, 12, 64, 3072), 1024),
    "GPT-3": (HeadCounts(12288, 96, 128, 49152), 2048),
    "T5 11B, encoder": (HeadCounts(1024, 128, 128, 65536), 512),
    "SmolLM2-135M": (HeadCounts(576, 9, 64, 1536, 3, gated=True), 8192),
    "LLaMA 3 8B": (HeadCounts(4096, 32, 128, 14336, 8, gated=True), 8192),
}
"""The sizes of one layer of each model, and the model's context length."""


def layers() -> str:
    """Return the table of a layer's counts, MLP against attention, in Markdown."""
    header = ["a layer of", "heads", "neuron-heads", "ratio", "parameters, MLP : attention"]
    header += ["context", "neuron-heads / MLP, flops", "masked / MLP, flops", "scores thrown away"]
    rows = []
    for name, (counts, n_ctx) in MODELS.items():
        parameters = counts.mlp_parameters / counts.attention_parameters
        rows.append(
            [
                name,
                f"{counts.n_heads}",
                f"{counts.d_mlp:,}",
                f"{counts.d_mlp / counts.n_heads:.4g}",
                f"{parameters:.3g}",
                f"{n_ctx:,}",
                f"{counts.neuron_head_flops / counts.mlp_flops:.4f}",
                f"{counts.masked_flops(n_ctx) / counts.mlp_flops:.2f}",
                f"{(n_ctx - 1) / (n_ctx + 1):.2%}",
            ]
        )
    return markdown(header, rows)


def post() -> str:
    """Return the table of the blog post's heads and the width of its stream, in Markdown."""
    header = ["a layer of", "attention", "into the hidden layer", "activation"]
    header += ["out of it", "into and out of it, as built", "stream", "over d_model"]
    rows = []
    for name, (counts, n_ctx) in MODELS.items():
        if counts.gated:
            continue
        built, width = counts.post_heads(built=True), counts.post_width(n_ctx)
        rows.append(
            [
                name,
                *(f"{heads:,}" for heads in counts.post_heads().values()),
                f"{built['into_hidden']}, {built['out_of_hidden']}",
                f"{width:,}",
                f"{width / counts.d_model:.3g}",
            ]
        )
    return markdown(header, rows)


if __name__ == "__main__":
    print(layers(), post(), sep="\n\n")
