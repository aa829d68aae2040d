"""Neurons over a corpus: where each is largest, and how its gate and value are distributed."""

from attn_only_lens.neurons.examples import Example, examples_of

__all__ = [
    "Example",
    "examples_of",
]
