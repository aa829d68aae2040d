"""What streams over the dataset: every batch through every model, into the sums of each pair."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from attn_only_lens.comparison.alignment import Alignment
from attn_only_lens.comparison.batches import Batch
from attn_only_lens.comparison.circuits import Names
from attn_only_lens.comparison.measure import Measured, measured
from attn_only_lens.comparison.outputs import Writers
from attn_only_lens.comparison.sums import NewSums, PairSums
from attn_only_lens.patching.sites import all_heads, resolve

__all__ = ["Streamed"]

_NAMES = ("name", "grown_name", "kind", "layer", "grown_layer")
_MEASURES = ("divergence", "divergence_se", "cosine", "norm_ratio")
_CHANGES = ("attribution_change", "attribution_change_se")


class Streamed:
    """Sums over a dataset, of an original, what grew from it and, if there is one, a null."""

    def __init__(self, models: Sequence[Any], alignment: Alignment) -> None:
        self._models, self._alignment = models, alignment
        self._sites = [resolve(each, all_heads()) for each in models]
        writers = [Writers.of(each) for each in models]
        alignments = [alignment, alignment.of_second(models[1].cfg.d_model)]
        self._pairs = [
            PairSums(writers[i], writers[i + 1], alignments[i]) for i in range(len(models) - 1)
        ]
        self._new = [NewSums(each, alignment.new) for each in writers[1:]]
        self._values = np.zeros((len(models), 2))
        self._n_prompts = self._n_tokens = 0
        self._metric = ""

    def add(self, batch: Batch) -> list[Measured]:
        """Run a batch through every model.

        Returns:
            What each did.
        """
        runs = [
            measured(model, batch, sites)
            for model, sites in zip(self._models, self._sites, strict=True)
        ]
        # All that can fail first: what an error stops has whole batches in its sums.
        old = [pair.of(runs[i], runs[i + 1]) for i, pair in enumerate(self._pairs)]
        new = [each.of(run) for each, run in zip(self._new, runs[1:], strict=True)]
        for pair, found in zip(self._pairs, old, strict=True):
            pair.add(found, runs[0].real)
        for each, sums, run in zip(self._new, new, runs[1:], strict=True):
            each.add(sums, run)
        n_prompts = len(batch.pair.clean)
        self._values += [[n_prompts * v for v in (r.clean_value, r.corrupted_value)] for r in runs]
        self._n_prompts += n_prompts
        self._n_tokens += int(batch.pair.real.sum())
        self._metric = runs[0].metric
        return runs

    def names(self, batch: Batch) -> list[Names]:
        """For each model its components, by what they are called in the grown one."""
        own = self._sites[1]
        names = [name for each in own for name in each.names]
        n_pos = batch.pair.clean.shape[1]
        first = [pair.first for pair in self._alignment.pairs]
        called = [pair.second.names for pair in self._alignment.pairs]
        found = [Names.of(first, called, names, n_pos)]
        for sites in self._sites[1:]:
            found.append(Names.of(sites, [each.names for each in own], names, n_pos))
        return found

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """A row for each component of the original, for each that is new, for each silent one."""
        old, new = self._pairs[0].frame(), self._new[0].frame()
        if len(self._pairs) > 1:
            null = self._pairs[1].frame()
            for name in (*_MEASURES, *_CHANGES):
                # Of what is silent in both, patterns and outputs are noise.
                noise = null["silent"] & (name in _MEASURES)
                old[f"null_{name}"] = null[name].mask(noise)
            old["null_attribution"] = null["grown_attribution"]
            for name in ("attribution", "share"):
                new[f"null_{name}"] = self._new[1].frame()[name]
        silent = old.pop("silent")
        kept, left = (old[each].reset_index(drop=True) for each in (~silent, silent))
        return kept, new, left[list(_NAMES)]

    def about(self) -> dict[str, Any]:
        """What was compared, and on what."""
        labels = ("original", "grown", "null")
        values = zip(labels, (self._values / self._n_prompts).tolist(), strict=False)
        return {
            "model": str(getattr(self._models[0].cfg, "model_name", "")),
            "metric": self._metric,
            "n_prompts": self._n_prompts,
            "n_tokens": self._n_tokens,
            "values": {label: {"clean": c, "corrupted": o} for label, (c, o) in values},
        }
