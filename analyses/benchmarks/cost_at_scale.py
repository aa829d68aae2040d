"""What a language model of 8 billion parameters costs, by arithmetic: estimates, nothing measured.

Of LLaMA 3 8B's shape, in float32, on a pair of prompts that differ from one token on. Flops are
multiplications and additions of matrix products, as `bench_patching.py` counts them: a patch at
position t of layer l runs the tokens from t on through the blocks after l. Sites are taken to lie
evenly over layers and positions. The table is that of `docs/scale.md`:

    python -m analyses.benchmarks.cost_at_scale
"""

from collections.abc import Iterator
from dataclasses import dataclass

from analyses.tools.benching import markdown
from analyses.tools.count_heads import HeadCounts

# What NVIDIA states for an H100 (SXM, 80 GB): flops a second, without sparsity, and bytes a second.
PEAK = {"float32": 67e12, "TF32": 495e12}
BANDWIDTH = 3.35e12
MEMORY = 80e9
SHARE = 0.5  # of the peaks
DEVICES = 8
NUMBER = 4  # bytes


@dataclass(frozen=True)
class Shape:
    """A model's sizes; its MLPs are gated, and its unembedding is not its embedding."""

    n_layers: int = 32
    d_model: int = 4096
    d_mlp: int = 14336
    n_heads: int = 32
    n_key_value_heads: int = 8
    d_head: int = 128
    d_vocab: int = 128256

    @property
    def layer(self) -> HeadCounts:
        """The counts of a block."""
        sizes = self.d_model, self.n_heads, self.d_head, self.d_mlp, self.n_key_value_heads
        return HeadCounts(*sizes, gated=True)

    @property
    def block(self) -> int:
        """Weights of a block's matrices."""
        return self.layer.attention_parameters + self.layer.mlp_parameters

    @property
    def parameters(self) -> int:
        """All of them, norms included."""
        norms = (2 * self.n_layers + 1) * self.d_model
        return self.n_layers * self.block + 2 * self.d_vocab * self.d_model + norms

    def per_token(self, pos: int) -> int:
        """Flops of a block for one token that attends to so many."""
        return self.layer.attention_flops(pos) + self.layer.mlp_flops

    def forward(self, pos: int) -> int:
        """Flops of a whole run."""
        blocks = self.n_layers * self.per_token(pos)
        return pos * (blocks + 2 * self.d_model * self.d_vocab)

    def patch(self, pos: int, first: int) -> float:
        """Flops of a patch, the mean over layers and over positions from the first on."""
        tokens, blocks = (pos - first + 1) / 2, (self.n_layers - 1) / 2
        return tokens * blocks * self.per_token(pos)

    def sites(self, pos: int) -> int:
        """Neurons and attention heads, at so many positions."""
        return pos * self.n_layers * (self.d_mlp + self.n_heads)

    def recordings(self, pos: int) -> int:
        """Bytes of two runs: value, weight and z of every neuron, z of heads, and the stream."""
        of_layer = 3 * self.d_mlp + self.n_heads * self.d_head + self.d_model
        return 2 * NUMBER * pos * self.n_layers * of_layer

    def at_once(self, pos: int, first: int) -> int:
        """Patches in one forward pass, in half of the memory that weights and recordings leave."""
        left = MEMORY - NUMBER * self.parameters - self.recordings(pos)
        of_token = 5 * self.d_model + 6 * self.d_mlp  # as `Replay.numbers_per_token` has it
        of_keys = 2 * pos * self.n_heads * self.d_head
        return int(left / 2 / NUMBER / ((pos - first) * of_token + of_keys))


@dataclass(frozen=True)
class Work:
    """What is done.

    Attributes:
        name: in words.
        flops: of all of it.
        passes: how often the weights are read.
        result: bytes.
        divides: whether devices share it.
    """

    name: str
    flops: float
    passes: float
    result: float
    divides: bool

    def seconds(self, peak: float, weights: float) -> float:
        """The time of its flops, or of reading the weights if that is longer."""
        return max(self.flops / peak, self.passes * weights / BANDWIDTH) / SHARE


def works(shape: Shape, pos: int, first: int) -> Iterator[Work]:
    """What is done with a pair of prompts."""
    forward, changed = shape.forward(pos), shape.sites(pos - first)
    patch, batch = shape.patch(pos, first), shape.at_once(pos, first)
    # Both runs; a backward pass without gradients of weights costs as much as a forward one.
    every = 8 * shape.sites(pos)
    yield Work("attribution of every head and neuron", 3 * forward, 3, every, divides=False)
    for name, n in (
        ("1,000 sites exactly", 1000),
        (f"all {changed / 1e6:.1f} million sites", changed),
    ):
        yield Work(name, n * patch, n / batch, 8 * n, divides=True)


def table(shape: Shape | None = None, pos: int = 64, first: int = 24) -> str:
    """The estimates, in Markdown."""
    shape = Shape() if shape is None else shape
    weights = NUMBER * shape.parameters
    lines = []
    for work in works(shape, pos, first):
        one = [work.seconds(peak, weights) for peak in PEAK.values()]
        more = (
            [duration(seconds / DEVICES) for seconds in one] if work.divides else ["of 8 pairs"] * 2
        )
        times = [*map(duration, one), *more]
        lines.append([work.name, f"{work.flops / 1e12:,.3g}", amount(work.result), *times])
    header = ["", "Tflop", "result", *(f"{name}, one device" for name in PEAK)]
    header += [f"{name}, eight" for name in PEAK]
    held = [amount(weights), amount(shape.recordings(pos))]
    return (
        f"{markdown(header, lines)}\n\n"
        f"{held[0]} of weights and {held[1]} of recordings leave room for "
        f"{shape.at_once(pos, first):,} patches at once on each device."
    )


def amount(size: float) -> str:
    """Bytes, in words."""
    units = ("B", "kB", "MB", "GB")
    power = min(3, (len(f"{size:.0f}") - 1) // 3)
    return f"{size / 1000**power:.3g} {units[power]}"


def duration(seconds: float) -> str:
    """A time, in words."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 6000 else f"{seconds / 3600:.2g} h"


if __name__ == "__main__":
    print(table())
