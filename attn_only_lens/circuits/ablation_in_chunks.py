"""Ablations of many prompts, a chunk of prompts at a time, so that memory does not grow with them.

The recorded runs of a chunk are made anew whenever circuits are measured, since a search measures
hundreds of circuits at once, and does so some ten times.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from attn_only_lens.circuits.ablation import AblatedModel, Ablation, Rows
from attn_only_lens.engine.metrics import AnyMetric, as_metric, bind
from attn_only_lens.engine.prompts import Prompts, prompt_pair
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.patching.prompt_chunks import prompts_per_chunk

_BY_PROMPT = ("zero", "resample")  # ablations of a prompt that depend on no other prompt


def ablated_model(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    sites: pd.DataFrame,
    *,
    ablation: Ablation,
    prompts_at_once: int | None = None,
    some: Sequence[int] | None = None,
    **options: Any,
) -> AblatedModel:
    """Return an ablated model that holds the runs of all prompts, or of a chunk if they are many.

    Means are over all prompts, and so are custom metrics: with these, all prompts are held.
    """
    prompts = model, clean, corrupted, metric
    make = partial(AblatedModel, *prompts, sites, ablation=ablation, **options)
    pair, metric = prompt_pair(model, clean, corrupted, options["mask"]), as_metric(metric)
    chosen = list(range(len(pair.clean)) if some is None else some)
    if ablation not in _BY_PROMPT or not metric.by_prompt:
        return make(some=some)
    here = pair.of_prompts(chosen)
    layers = resolve_sites(model, list(sites["name"].unique()))
    at_once = prompts_per_chunk(model, here, metric, layers, "z", prompts_at_once, traced=True)
    if at_once == len(chosen):
        return make(some=some)
    weights = (1 / len(chosen),) * len(chosen)
    if not metric.needs_reference:
        weights = bind(metric, model, here).shares(len(chosen))
    return _InChunks(
        make, [chosen[i : i + at_once] for i in range(0, len(chosen), at_once)], weights
    )


class _InChunks(AblatedModel):
    """An ablated model that records the runs of some prompts at a time."""

    def __init__(
        self, make: Callable[..., AblatedModel], chunks: list[list[int]], weights: Sequence[float]
    ) -> None:
        self._make, self._prompts, self._weights = make, chunks, np.array(weights)
        wholes, nothings = [], []
        for ablated in self._chunks():
            self.sites, self.n_sites, self.n_pos = ablated.sites, ablated.n_sites, ablated.n_pos
            wholes.append(ablated.whole_by_prompt)
            nothings.append(ablated.nothing_by_prompt)
        self.whole_by_prompt, self.nothing_by_prompt = map(np.concatenate, (wholes, nothings))
        self.whole = float(self._mean(self.whole_by_prompt))
        self.nothing = float(self._mean(self.nothing_by_prompt))

    def _chunks(self) -> Iterator[AblatedModel]:
        for prompts in self._prompts:
            yield self._make(some=prompts)

    def by_prompt(self, circuits: Sequence[Rows]) -> Float[np.ndarray, "circuit prompt"]:
        """Return the metric of each prompt when only a circuit is left."""
        return np.concatenate([ablated.by_prompt(circuits) for ablated in self._chunks()], axis=1)

    def worth(self, circuit: Rows) -> Float[np.ndarray, "site"]:
        """Return what each site adds to a circuit's faithfulness, to first order."""
        ends = np.cumsum([0, *map(len, self._prompts)])
        total = np.zeros(self.n_sites)
        for ablated, first, last in zip(self._chunks(), ends[:-1], ends[1:], strict=True):
            total += self._weights[first:last].sum() * ablated.mean_slopes(circuit)
        return total / self.span

    def _mean(self, by_prompt: Float[np.ndarray, "*circuit prompt"]) -> Any:
        return (by_prompt * self._weights).sum(axis=-1)
