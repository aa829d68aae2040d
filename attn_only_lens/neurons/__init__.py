"""Neurons over a corpus: top examples, and the distributions of z, gate and value."""

from attn_only_lens.neurons._top_examples import neuron_statistics, top_examples
from attn_only_lens.neurons.statistics import Example, NeuronStatistics, examples_of

__all__ = [
    "Example",
    "NeuronStatistics",
    "examples_of",
    "neuron_statistics",
    "top_examples",
]
