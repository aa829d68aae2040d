"""Take prompts a run at a time, so that memory is bounded by a run and not by all prompts.

A run is recorded, its parts are measured or read from a folder, and what is kept of it is joined
with what was kept before (`over_prompts.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.engine.metrics import Metric, bind, require_distinct
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import Recording, RunPair
from attn_only_lens.engine.sites import LayerSites, Part
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.patching.ablated_runs import AblatedRuns
from attn_only_lens.patching.over_prompts import OverPrompts
from attn_only_lens.patching.processes import n_launched
from attn_only_lens.patching.resume import PartStore, kept_settings
from attn_only_lens.patching.sweep_parts import SweepPart

_SHARE = 0.2  # of all memory, for what a run of prompts records


@dataclass(frozen=True, eq=False)
class PromptRun:
    """A run of prompts, recorded.

    Attributes:
        prompts: which of all.
        runs: the clean and the corrupted run.
        target: the run patched into.
        source: the run that patches come from.
        unpatched: the metric of each prompt of the target.
        first: whether the first pair of unlike prompts is among them.
    """

    prompts: range
    runs: RunPair
    target: Recording
    source: Recording
    unpatched: Float[Tensor, "prompt"]
    first: bool

    @property
    def shares(self) -> tuple[float, ...]:
        """The weight of each prompt in the mean of these."""
        return self.runs.metric.shares(len(self.unpatched))

    def reduced(
        self, over: OverPrompts, values: Float[Tensor, "row prompt"]
    ) -> Float[Tensor, "end_or_row number"]:
        """Return what is kept of the values of its prompts."""
        return over.reduced(self.runs.clean_values, self.runs.corrupted_values, values, self.shares)

    @property
    def padded(self) -> bool:
        """Whether one has padding."""
        return not bool(self.runs.pair.real.all())


class PromptRuns:
    """The runs of all prompts, of which one is held at a time."""

    def __init__(
        self,
        model: Any,
        pair: PromptPair,
        metric: Metric,
        direction: str,
        ablated: AblatedRuns | None,
        record: Callable[[PromptPair, bool], RunPair],
    ) -> None:
        self._model, self._pair, self._metric = model, pair, metric
        self._direction, self._ablated, self._record = direction, ablated, record
        self._held: PromptRun | None = None
        unlike = ((pair.clean != pair.corrupted) & pair.real).any(dim=1)
        self._first = int(unlike.int().argmax())

    def of(self, prompts: range) -> PromptRun:
        """Return a run of prompts, recorded now if it was not the last one."""
        if self._held is None or self._held.prompts != prompts:
            self._held = None
            # HookedTransformers that are not causal attend to padding.
            causal = getattr(self._model.cfg, "attention_dir", "causal") == "causal"
            pair = self._pair.of_prompts(prompts, cut=causal)
            runs = self._record(pair, pair is self._pair)
            target, source, unpatched = runs.target(self._direction)
            if self._ablated is not None:
                source = self._ablated.of(runs.clean, prompts)
            first = self._first in prompts
            self._held = PromptRun(prompts, runs, target, source, unpatched, first)
        return self._held

    def first_of(self, parts: Sequence[SweepPart]) -> PromptRun:
        """Return the run with the first pair whose prompts differ."""
        return self.of(next(part.prompts for part in parts if self._first in part.prompts))

    def over(self, parts: Sequence[SweepPart], n_rows: int, per_prompt: bool) -> OverPrompts:
        """Return what the values of all prompts are joined in, once a first run fits."""
        run = self.first_of(parts)
        n_prompts, weights = len(self._pair.clean), run.shares
        if len(run.prompts) < n_prompts:
            if torch.equal(run.runs.clean_values, run.runs.corrupted_values):
                require_distinct(run.runs.clean_value, run.runs.corrupted_value, torch.float64)
            weights = (1 / n_prompts,) * n_prompts
            if not self._metric.needs_reference:  # each run of prompts has its own
                weights = bind(self._metric, self._model, self._pair).shares(n_prompts)
        name = run.runs.metric.name
        return OverPrompts(name, n_rows, n_prompts, weights, self._direction, per_prompt)


def measure_parts(
    parts: Sequence[SweepPart],
    store: PartStore | None,
    measure: Callable[[SweepPart], Float[Tensor, "number"]],
    add: Callable[[SweepPart, Float[Tensor, "number"]], None],
    on_other: Callable[[int], None],
    first: int = 0,
) -> None:
    """Measure the parts of a sweep, and add up what each leaves, in order."""
    if store is None:
        for part in parts:
            add(part, measure(part))
        return
    numbers = range(first, first + len(parts))
    with store.todo(numbers, lambda i: on_other(i - first)) as todo:
        for i in todo:
            store.write(i, pd.DataFrame({"value": measure(parts[i - first]).numpy()}))
    for part, frame in zip(parts, store.read_all(first), strict=True):
        add(part, torch.from_numpy(frame["value"].to_numpy(copy=True)))


def prompts_per_run(
    model: Any,
    pair: PromptPair,
    metric: Metric,
    sites: Sequence[LayerSites],
    part: Part,
    asked: int | None,
    resume: str | Path | None,
    *,
    traced: bool = False,
    apart: bool = False,
) -> int:
    """Return how many prompts to run at once: as asked, as in the folder, or as fit in memory."""
    n_prompts = len(pair.clean)
    if asked is None and resume is not None and metric.by_prompt:
        asked = kept_settings(resume).get("prompts_at_once")
    if asked is None:
        asked = n_prompts
        if metric.by_prompt:
            gates = 1 if part == "z" else 3
            n_numbers = _numbers_per_prompt(model, pair, sites, gates, traced, apart)
            asked = max(1, _numbers_that_fit(model) // n_numbers)
    if asked < n_prompts and not metric.by_prompt:
        raise InputError(
            [
                f"got prompts_at_once={asked} and {metric.name}, a function of the logits of all "
                f"{n_prompts} prompts; expected one of this package's metrics, or None"
            ],
            "these prompts cannot be taken a run at a time",
        )
    return min(asked, n_prompts)


def _numbers_that_fit(model: Any) -> int:
    """Return how many numbers may be recorded: the same for all processes of a machine."""
    parameter = next(model.parameters())
    if parameter.device.type == "cuda":
        memory = torch.cuda.mem_get_info(parameter.device)[1]
    else:
        memory = psutil.virtual_memory().total // n_launched()
    return int(_SHARE * memory / parameter.element_size())


def _numbers_per_prompt(
    model: Any,
    pair: PromptPair,
    sites: Sequence[LayerSites],
    gates: int,
    traced: bool,
    apart: bool,
) -> int:
    """Estimate the maximum of the numbers that are held at once for a prompt.

    Within a quarter of what torch allocates on SmolLM2, traced and not.
    """
    host, cfg, n_pos = host_of(model), model.cfg, pair.clean.shape[1]
    kept = (len(model.blocks) + 1) * cfg.d_model
    if apart:  # inputs and outputs of two sublayers and of their norms
        kept += 10 * host.n_layers * cfg.d_model
    for site in sites:
        if site.kind == "attention":
            kept += host.n_heads[site.layer] * max(cfg.d_head, n_pos)  # z, or rows of the pattern
        else:
            heads = host.neurons[site.layer]
            kept += gates * heads.W_out.shape[0] * heads.heads_per_neuron
    width = max(len(heads.W_out) for heads in host.neurons)
    graph = 10 * cfg.d_model + 8 * width + 4 * max(host.n_heads) * n_pos
    per_token = 2 * kept + (6 if traced else 4) * cfg.d_vocab + traced * len(model.blocks) * graph
    return per_token * n_pos
