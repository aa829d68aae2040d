"""Estimate the cost of analyses on a model with 8 billion parameters; nothing is measured.

The model has LLaMA 3 8B's shape, in float32, and the two prompts differ starting at one token.
Flops are multiplications and additions in matrix products, counted as in `bench_patching.py`: a
patch at position t of layer l runs tokens t and later through the blocks after l. Sites are assumed
to be spread evenly over layers and positions. The host starts every kernel; kernels were counted on
the simulated device of the tests, and the host's time for one was measured on small models. A
second table shows which prompt lengths fit in memory, by the numbers that the package itself counts
(`patching/prompt_chunks.py`). Both tables are in `docs/scale.md`:

    python -m analyses.benchmarks.cost_at_scale
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from analyses.tools.benching import markdown
from analyses.tools.count_heads import HeadCounts

# NVIDIA's figures for an H100 (SXM, 80 GB): flops a second, without sparsity, and bytes a second.
PEAK = {"float32": 67e12, "TF32": 495e12}
BANDWIDTH = 3.35e12
MEMORY = 80e9
SHARE = 0.5  # assumed share of the peak speeds
# The kernels of a call on a bridge, when the model has been tested: for any number of layers, and
# for each layer. A sweep of 1,000 names has seven to nine batches.
KERNELS = {"attribution": (406, 253), "sweep": (374, 756), "forward": (34, 57)}
HOST = 72e-6  # seconds: one thread of an Intel Xeon, for a kernel and the Python code around it
DEVICES = 8
NUMBER = 4  # bytes of a float32 number


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. By default, MLPs are gated and the unembedding is not tied."""

    n_layers: int = 32
    d_model: int = 4096
    d_mlp: int = 14336
    n_heads: int = 32
    n_key_value_heads: int = 8
    d_head: int = 128
    d_vocab: int = 128256
    gated: bool = True
    tied: bool = False

    @property
    def layer(self) -> HeadCounts:
        """Return the counts of a block."""
        sizes = self.d_model, self.n_heads, self.d_head, self.d_mlp, self.n_key_value_heads
        return HeadCounts(*sizes, gated=self.gated)

    @property
    def block(self) -> int:
        """Return the number of weights in a block's matrices."""
        return self.layer.attention_parameters + self.layer.mlp_parameters

    @property
    def parameters(self) -> int:
        """Return the number of parameters, including norms."""
        norms = (2 * self.n_layers + 1) * self.d_model
        embeddings = (1 if self.tied else 2) * self.d_vocab * self.d_model
        return self.n_layers * self.block + embeddings + norms

    def per_token(self, pos: int) -> int:
        """Return the flops of a block for one token that attends to `pos` tokens."""
        return self.layer.attention_flops(pos) + self.layer.mlp_flops

    def forward(self, pos: int) -> int:
        """Return the flops of a forward pass."""
        blocks = self.n_layers * self.per_token(pos)
        return pos * (blocks + 2 * self.d_model * self.d_vocab)

    def patch(self, pos: int, first: int) -> float:
        """Return the flops of a patch: the mean over layers and over positions from `first`."""
        tokens, blocks = (pos - first + 1) / 2, (self.n_layers - 1) / 2
        return tokens * blocks * self.per_token(pos)

    def kernels(self, work: str) -> int:
        """Return the number of kernels of a computation in `KERNELS`."""
        fixed, by_layer = KERNELS[work]
        return fixed + by_layer * self.n_layers

    def sites(self, pos: int) -> int:
        """Return the number of neurons and attention heads, at `pos` positions."""
        return pos * self.n_layers * (self.d_mlp + self.n_heads)

    def recordings(self, pos: int) -> int:
        """Return bytes for two runs: value, weight, z of neurons, z of heads, and the stream."""
        of_layer = 3 * self.d_mlp + self.n_heads * self.d_head + self.d_model
        return 2 * NUMBER * pos * self.n_layers * of_layer

    def at_once(self, pos: int, first: int) -> int:
        """Return patches per forward pass, using half of the memory that the rest leaves."""
        left = MEMORY - NUMBER * self.parameters - self.recordings(pos)
        of_token = 5 * self.d_model + 6 * self.d_mlp  # as in `Replay.numbers_per_token`
        of_keys = 2 * pos * self.n_heads * self.d_head
        return int(left / 2 / NUMBER / ((pos - first) * of_token + of_keys))

    def numbers_per_token(self, pos: int, *, traced: bool, decomposed: bool = False) -> int:
        """Return how many numbers are held per token of a pair, with gradients if `traced`.

        `decomposed` adds inputs and outputs of sublayers and norms, and the values of all heads.
        """
        kept = (self.n_layers + 1) * self.d_model
        kept += self.n_layers * (self.n_heads * max(self.d_head, pos) + self.d_mlp)
        if decomposed:
            kept += self.n_layers * (10 * self.d_model + 2 * self.d_mlp)
        graph = 10 * self.d_model + 8 * self.d_mlp + 4 * self.n_heads * pos
        return 2 * kept + (6 if traced else 4) * self.d_vocab + traced * self.n_layers * graph

    def longest(self, memory: float, number: int, **how: bool) -> int:
        """Return the length of the longest pair of prompts that fits; 0 if weights do not fit.

        Args:
            memory: the memory in bytes.
            number: the bytes of a number.
            how: `traced` and `decomposed` of `numbers_per_token`.
        """
        batch = 2048 * (5 * self.d_model + 6 * self.d_mlp)  # a batch of 2,048 tokens, as on a CPU

        def too_long(pos: int) -> bool:
            numbers = self.parameters + batch + pos * self.numbers_per_token(pos, **how)
            return number * numbers > memory

        return bisect_left(range(1, 10**6), True, key=too_long)

    @property
    def statistics(self) -> int:
        """Return the bytes of `corpus_statistics` for all neurons, with k = 20 examples per end.

        An example has 3 integers, a flag, its score, and a window of 19 tokens: for each, half an
        integer and 2 numbers. A neuron has 1,416 integers for histograms and quadrants.
        """
        window, integer = 19, 8
        example = 3 * integer + window * integer // 2 + 1 + (1 + 2 * window) * NUMBER
        return self.n_layers * self.d_mlp * (2 * 20 * example + 1416 * integer)


MODELS = {
    "GPT-2 small": (Shape(12, 768, 3072, 12, 12, 64, 50257, gated=False, tied=True), NUMBER),
    "SmolLM2-135M": (Shape(30, 576, 1536, 9, 3, 64, 49152, tied=True), NUMBER),
    "LLaMA 3 8B, float32": (Shape(), NUMBER),
    "LLaMA 3 8B, bfloat16": (Shape(), 2),
}
"""The shape of each model, and the bytes of a number."""
MEMORIES = {"24 GiB": 24 * 2**30, "80 GB": 80 * 10**9}


def limits() -> str:
    """Return a Markdown table of the longest pairs of prompts that fit."""
    header = ["model", "weights"]
    for memory in MEMORIES:
        header += [f"sweep, {memory}", f"attribution, {memory}"]
    lines = []
    for name, (shape, number) in MODELS.items():
        line = [name, amount(number * shape.parameters)]
        for memory in MEMORIES.values():
            longest = [shape.longest(memory, number, traced=traced) for traced in (False, True)]
            line += [f"{pos:,}" if pos else "does not fit" for pos in longest]
        lines.append([*line, amount(shape.statistics)])
    return markdown([*header, "statistics that are kept"], lines)


@dataclass(frozen=True)
class Work:
    """A computation with a pair of prompts.

    Attributes:
        name: a description.
        flops: the flops of the whole computation.
        passes: how often the weights are read.
        kernels: the number of kernels that the host starts.
        result: the size of the result in bytes.
        divides: whether several devices can share the computation.
    """

    name: str
    flops: float
    passes: float
    kernels: float
    result: float
    divides: bool

    def time(self, peak: float, weights: float, devices: int = 1) -> str:
        """Return the longest of three times, and its name if it is not that of the flops."""
        times = {
            self.flops / peak / SHARE: "",
            self.passes * weights / BANDWIDTH / SHARE: " (weights)",
            self.kernels * HOST: " (host)",
        }
        return duration(max(times) / devices) + times[max(times)]


def works(shape: Shape, pos: int, first: int) -> Iterator[Work]:
    """Yield the computations with a pair of prompts."""
    forward, changed = shape.forward(pos), shape.sites(pos - first)
    patch, batch = shape.patch(pos, first), shape.at_once(pos, first)
    # Both runs; a backward pass without weight gradients costs as much as a forward pass.
    every = 8 * shape.sites(pos)
    name, kernels = "attribution of every head and neuron", shape.kernels("attribution")
    yield Work(name, 3 * forward, 3, kernels, every, divides=False)
    for name, n, kernels in (
        ("1,000 sites exactly", 1000, shape.kernels("sweep")),
        (
            f"all {changed / 1e6:.1f} million sites",
            changed,
            changed / batch * shape.kernels("forward"),
        ),
    ):
        yield Work(name, n * patch, n / batch, kernels, 8 * n, divides=True)


def table(shape: Shape | None = None, pos: int = 64, first: int = 24) -> str:
    """Return the estimates as a Markdown table."""
    shape = Shape() if shape is None else shape
    weights = NUMBER * shape.parameters
    lines = []
    for work in works(shape, pos, first):
        times = [work.time(peak, weights) for peak in PEAK.values()]
        if work.divides:
            times += [work.time(peak, weights, DEVICES) for peak in PEAK.values()]
        else:
            times += ["of 8 pairs"] * len(PEAK)
        counts = f"{work.flops / 1e12:,.3g}", f"{work.kernels:,.0f}", amount(work.result)
        lines.append([work.name, *counts, *times])
    header = ["", "Tflop", "kernels", "result", *(f"{name}, one device" for name in PEAK)]
    header += [f"{name}, eight" for name in PEAK]
    held = [amount(weights), amount(shape.recordings(pos))]
    return (
        f"{markdown(header, lines)}\n\n"
        f"In addition to {held[0]} of weights and {held[1]} of recordings, each device can hold "
        f"{shape.at_once(pos, first):,} patches at once."
    )


def amount(size: float) -> str:
    """Return a number of bytes as text."""
    units = ("B", "kB", "MB", "GB")
    power = min(3, (len(f"{size:.0f}") - 1) // 3)
    return f"{size / 1000**power:.3g} {units[power]}"


def duration(seconds: float) -> str:
    """Return a time as text."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 6000 else f"{seconds / 3600:.2g} h"


if __name__ == "__main__":
    print(table(), limits(), sep="\n\n")
