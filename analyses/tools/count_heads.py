"""Heads, parameters and flops of MLPs as attention heads, by arithmetic: tables of docs/limits.md.

The counts that the paper states of GPT-3 in sections 4 and 5, and those of the blog post's
comments, for models of other shapes too: `attn_only_lens.heads.counts` has the arithmetic.

    python -m analyses.tools.count_heads
"""

from analyses.tools.benching import markdown
from attn_only_lens import HeadCounts

MODELS = {
    "GPT-2 small": (HeadCounts(768, 12, 64, 3072), 1024),
    "GPT-3": (HeadCounts(12288, 96, 128, 49152), 2048),
    "T5 11B, encoder": (HeadCounts(1024, 128, 128, 65536), 512),
    "SmolLM2-135M": (HeadCounts(576, 9, 64, 1536, 3, gated=True), 8192),
    "LLaMA 3 8B": (HeadCounts(4096, 32, 128, 14336, 8, gated=True), 8192),
}
"""One layer of each, and the length of its context."""


def layers() -> str:
    """What a layer has, MLP against attention, in Markdown."""
    header = ["a layer of", "heads", "neuron-heads", "ratio", "parameters, MLP : attention"]
    header += ["context", "neuron-heads / MLP, flops", "masked / MLP, flops", "scores thrown away"]
    rows = []
    for name, (counts, n_ctx) in MODELS.items():
        parameters = counts.mlp_parameters / counts.attention_parameters
        rows.append(
            [
                name,
                f"{counts.n_heads}",
                f"{counts.n_neuron_heads:,}",
                f"{counts.n_neuron_heads / counts.n_heads:.4g}",
                f"{parameters:.3g}",
                f"{n_ctx:,}",
                f"{counts.neuron_head_flops / counts.mlp_flops:.4f}",
                f"{counts.masked_flops(n_ctx) / counts.mlp_flops:.2f}",
                f"{(n_ctx - 1) / (n_ctx + 1):.2%}",
            ]
        )
    return markdown(header, rows)


def post() -> str:
    """The blog post's heads a sublayer, and the width of its stream, in Markdown."""
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
