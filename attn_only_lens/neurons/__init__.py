"""Collect top examples and statistics of neurons and attention heads over a corpus of texts."""

from attn_only_lens.neurons._top_examples import (
    corpus_statistics,
    neuron_statistics,
    top_examples,
)
from attn_only_lens.neurons.corpus import Corpus
from attn_only_lens.neurons.statistics import (
    Example,
    HeadStatistics,
    NeuronStatistics,
    examples_of,
)

__all__ = [
    "Corpus",
    "Example",
    "HeadStatistics",
    "NeuronStatistics",
    "corpus_statistics",
    "examples_of",
    "neuron_statistics",
    "top_examples",
]
