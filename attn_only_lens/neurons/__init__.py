"""Collect top examples and statistics of neurons and attention heads over a corpus of texts."""

from attn_only_lens.neurons._expert_visits import expert_visits
from attn_only_lens.neurons._top_examples import corpus_statistics, top_examples
from attn_only_lens.neurons.corpus import Corpus

__all__ = ["Corpus", "corpus_statistics", "expert_visits", "top_examples"]
