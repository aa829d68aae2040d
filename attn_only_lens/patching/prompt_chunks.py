"""Record runs in chunks of prompts, so that their activations fit in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, cast

import psutil
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import TypeVar

from attn_only_lens.axes import Tokens
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.directions import AblationKind
from attn_only_lens.engine.interventions import ablate, resample_reasons
from attn_only_lens.engine.metrics import Metric, bind, require_distinct
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import NeuronRun, Recording, RunPair, record
from attn_only_lens.engine.sites import LayerSites, Part, hook_name
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS
from attn_only_lens.patching.over_prompts import OverPrompts
from attn_only_lens.patching.processes import n_launched
from attn_only_lens.storage.chunks import ChunkStore
from attn_only_lens.work import Work

_SHARE = 0.2  # fraction of all memory that a chunk's activations may take
Runs = TypeVar("Runs", bound=RunPair, default=RunPair)


@dataclass(eq=False)
class PromptChunk(Generic[Runs]):
    """The recordings of both runs on some prompts. Patches copy from `source` into `target`.

    Attributes:
        unpatched: the metric of each prompt in the target run, before any patch.
        first: whether the chunk contains the first prompt pair whose two prompts differ.
        runner: the patch runner for these prompts, or None before its first use.
    """

    prompts: range
    runs: Runs
    target: Recording
    source: Recording
    unpatched: Float[Tensor, "prompt"]
    first: bool
    runner: Any = None

    @property
    def pair(self) -> PromptPair:
        return self.runs.pair

    @property
    def shares(self) -> tuple[float, ...]:
        """The weight of each prompt in the mean over the chunk."""
        return self.runs.metric.shares(len(self.unpatched))

    @property
    def padded(self) -> bool:
        return not bool(self.pair.real.all())

    def reduced(
        self, totals: OverPrompts, values: Float[Tensor, "row prompt"]
    ) -> Float[Tensor, "end_or_row number"]:
        """Reduce the given prompts' values to the statistics that a job stores."""
        runs = self.runs
        return totals.reduced(runs.clean_values, runs.corrupted_values, values, self.shares)


class PromptChunks(Generic[Runs]):
    """The recordings of both runs on all prompts. Only one chunk is in memory at a time."""

    def __init__(
        self,
        model: Any,
        pair: PromptPair,
        metric: Metric,
        direction: str,
        record: Callable[..., Runs],
        ablated: "AblatedRuns | None" = None,
    ) -> None:
        self._model, self._pair, self._metric = model, pair, metric
        self._direction, self._record, self._ablated = direction, record, ablated
        self._held: PromptChunk[Runs] | None = None
        differ = ((pair.clean != pair.corrupted) & pair.real).any(dim=1)
        self._first = int(differ.int().argmax())

    def of(self, prompts: range) -> PromptChunk[Runs]:
        """Return the runs on the given prompts; record them unless they are in memory."""
        if self._held is None or self._held.prompts != prompts:
            self._held = None
            pair = self._pair.of_prompts(prompts)
            runs = self._record(pair, distinct=pair is self._pair)
            target, source, unpatched = runs.target(self._direction)
            if self._ablated is not None:
                source = self._ablated.of(runs.clean, prompts)
            first = self._first in prompts
            self._held = PromptChunk(prompts, runs, target, source, unpatched, first)
        return self._held

    def first(self, prompts: Sequence[range]) -> PromptChunk[Runs]:
        """Return the chunk that contains the first prompt pair whose two prompts differ."""
        return self.of(next(some for some in prompts if self._first in some))

    def totals(self, prompts: Sequence[range], n_rows: int, per_prompt: bool) -> OverPrompts:
        """Return empty totals, to which the results of all chunks are added."""
        chunk, n_prompts = self.first(prompts), len(self._pair.clean)
        weights = chunk.shares
        if len(chunk.prompts) < n_prompts:
            if torch.equal(chunk.runs.clean_values, chunk.runs.corrupted_values):
                require_distinct(chunk.runs.clean_value, chunk.runs.corrupted_value, torch.float64)
            weights = (1 / n_prompts,) * n_prompts
            if not self._metric.needs_reference:  # references differ between chunks
                weights = bind(self._metric, self._model, self._pair).shares(n_prompts)
        name = chunk.runs.metric.name
        return OverPrompts(name, n_rows, n_prompts, weights, self._direction, per_prompt)


class AblatedRuns:
    """An ablation's source runs: clean runs whose z is replaced, chunk by chunk.

    For "mean", a separate pass computes the means of z. For "resample", a separate pass records z
    of the prompts from which z is copied. If one chunk holds all prompts and there is no reference,
    this pass is not needed.
    """

    def __init__(
        self,
        model: Any,
        pair: PromptPair,
        to: str,
        reference: Tokens | None,
        sites: Sequence[LayerSites],
        prompts_at_once: int,
    ) -> None:
        self._model, self._pair, self._to = model, pair, cast(AblationKind, to)
        self._reference, self._at_once = reference, prompts_at_once
        self._layers = [site.layer for site in sites if site.kind in NEURON_KINDS]
        self._names = [
            hook_name(model, site.layer, "z", site.kind)
            for site in sites
            if site.kind not in NEURON_KINDS
        ]
        self._means: Recording | None = None
        if to == "resample":
            reasons = resample_reasons(pair.clean, reference, pair.real)
            InputError.raise_if(reasons, "these heads cannot be ablated in this way")

    def of(self, clean: Recording, prompts: range) -> Recording:
        """Return the clean run on the given prompts, with z ablated."""
        z = replace(clean, hooked={name: clean.hooked[name] for name in self._names})
        rows, n_pos = slice(prompts.start, prompts.stop), clean.tokens.shape[1]
        whole = len(prompts) == len(self._pair.clean) and self._reference is None
        if self._to == "mean" and not whole:
            self._means = self._means or self._mean()
            return ablate(z, self._means, "mean", torch.ones_like(clean.tokens[:1, :1]).bool())
        if self._to == "resample" and not whole:
            tokens, mask = self._reference, None
            if tokens is None:
                tokens, mask = self._pair.clean.roll(-1, dims=0), clean.mask
            recorded = self._record(tokens[rows, :n_pos], mask)
            return replace(z, neurons=recorded.neurons, hooked=recorded.hooked)
        return ablate(z, z, self._to, self._pair.real[rows, :n_pos])

    def _record(self, tokens: Tokens, mask: Tensor | None) -> Recording:
        names, layers = self._names, self._layers
        return record(self._model, tokens, mask, layers=layers, names=names, gates=False)

    def _mean(self) -> Recording:
        """Return a one-token recording whose z is averaged over all non-padding tokens."""
        tokens, mask, real = self._pair.clean, self._pair.mask, self._pair.real
        if self._reference is not None:
            tokens, mask, real = self._reference, None, torch.ones_like(self._reference).bool()
        sums: dict[Any, Tensor] = {}
        for start in range(0, len(tokens), self._at_once):
            rows = slice(start, start + self._at_once)
            run = self._record(tokens[rows], None if mask is None else mask[rows])
            z_by_key: dict[Any, Tensor] = dict(run.hooked)
            z_by_key |= {layer: layer_run.z for layer, layer_run in run.neurons.items()}
            for key, z in z_by_key.items():
                real_rows = z[real[rows].to(z.device)]
                total = to_float64_device(real_rows).double().sum(dim=0)
                sums[key] = sums[key] + total if key in sums else total
        n_tokens = int(real.sum())
        means = {key: (sums[key] / n_tokens).to(z)[None, None] for key, z in z_by_key.items()}
        return replace(
            run,
            neurons={layer: NeuronRun(means[layer]) for layer in run.neurons},
            hooked={name: means[name] for name in run.hooked},
        )


def prompts_per_chunk(
    model: Any,
    pair: PromptPair,
    metric: Metric,
    sites: Sequence[LayerSites],
    part: Part,
    work: Work,
    *,
    traced: bool = False,
    decomposed: bool = False,
) -> int:
    """Return how many prompts to run at once: as `work` says, else as stored, else as many as fit.

    A metric that has one value for all prompts needs all prompts at once.
    """
    n_prompts, asked = len(pair.clean), work.prompts_at_once
    if asked is None and work.resume is not None and metric.by_prompt:
        asked = ChunkStore.settings_of(work.resume).get("prompts_at_once")
    if asked is None:
        asked = n_prompts
        if metric.by_prompt:
            numbers = numbers_per_prompt(model, pair, sites, part, traced, decomposed)
            asked = max(1, _numbers_that_fit(model) // numbers)
    if asked < n_prompts and not metric.by_prompt:
        raise InputError(
            [
                f"got prompts_at_once={asked} and {metric.name}, which is a function of the logits "
                f"of all {n_prompts} prompts; expected a metric from this package, or "
                "prompts_at_once=None"
            ],
            "these prompts cannot be split into chunks",
        )
    return min(asked, n_prompts)


def _numbers_that_fit(model: Any) -> int:
    """Return how many numbers a chunk may hold; all processes on a machine get the same result."""
    parameter = next(model.parameters())
    if parameter.device.type == "cuda":
        memory = torch.cuda.mem_get_info(parameter.device)[1]
    else:
        memory = psutil.virtual_memory().total // n_launched()
    return int(_SHARE * memory / parameter.element_size())


def numbers_per_prompt(
    model: Any,
    pair: PromptPair,
    sites: Sequence[LayerSites],
    part: Part,
    traced: bool = False,
    decomposed: bool = False,
) -> int:
    """Estimate how many numbers one prompt needs in memory at once.

    For SmolLM2, the estimate is within 25 % of the memory that torch allocates.
    """
    host, cfg, n_pos = host_of(model), model.cfg, pair.clean.shape[1]
    kept = (len(model.blocks) + 1) * cfg.d_model
    if decomposed:  # count the inputs and outputs of sublayers and norms
        kept += 10 * host.n_layers * cfg.d_model
    if host.writes_later:  # two vectors for each pair of layers
        kept += host.n_layers**2 * cfg.d_model
    for site in sites:
        if site.kind in WIDE_KINDS:
            kept += cfg.d_model
        elif site.kind == "attention":
            kept += host.n_heads[site.layer] * max(cfg.d_head, n_pos)  # keep z or a pattern row
        else:
            heads = host.neurons[site.layer]
            gates = 1 if part == "z" else 3
            kept += gates * heads.n_neurons
    width = max(heads.n_neurons for heads in host.neurons)
    graph = 10 * cfg.d_model + 8 * width + 4 * max(host.n_heads) * n_pos
    per_token = 2 * kept + (6 if traced else 4) * cfg.d_vocab + traced * len(model.blocks) * graph
    return per_token * n_pos
