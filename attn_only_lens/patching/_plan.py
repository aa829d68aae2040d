"""Estimate what a sweep costs, from a few timed patches, before it is run."""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.directions import Ablation
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.recording import run
from attn_only_lens.engine.sites import Part, Sites, SomeSites
from attn_only_lens.errors import InputError
from attn_only_lens.patching._activation_patch import activation_patch, plan_sweep, sweep_reasons
from attn_only_lens.patching.prompt_chunks import numbers_per_prompt
from attn_only_lens.work import Work, work_reasons

_SAMPLES = 16, 16, 128  # how many heads each timed run patches; the first run also tests the model


@dataclass(frozen=True)
class Plan:
    """What a sweep would cost. Made by `plan`.

    Attributes:
        n_patches: the number of patches: heads times positions.
        n_heads: the number of heads.
        seconds: an estimate of the time, from `n_timed` patches; exact patches are slower in early
            layers, so the timed heads are of a middle layer.
        passes: the same time as a number of forward passes of all clean and corrupted prompts.
        n_timed: how many patches were timed; 0 for a small sweep, which was run instead.
        bytes: an estimate of the memory for the activations of the prompts that are run at once,
            without the model and without the batches of patches.
        prompts_at_once: how many prompt pairs have their activations in memory at once.
    """

    n_patches: int
    n_heads: int
    seconds: float
    passes: float
    n_timed: int
    bytes: int
    prompts_at_once: int

    def __repr__(self) -> str:
        minutes = self.seconds > 90
        time_needed = f"{self.seconds / 60:.0f} minutes" if minutes else f"{self.seconds:.2g} s"
        source = f"an estimate from {self.n_timed:,} of them" if self.n_timed else "measured"
        return (
            f"{self.n_patches:,} patches of {self.n_heads:,} heads and neurons take about "
            f"{time_needed} ({source}), as long as {self.passes:,.0f} forward passes of all "
            f"prompts; activations need {self.bytes / 2**20:,.0f} MiB.\n"
            "Cheaper: `explain` and `attribution` take a few forward and backward passes; "
            "sites=, layers= and positions= of Sites choose fewer sites; positions='all' patches "
            "all positions of a head together."
        )


@one_thread_per_model
@warned_once()
def plan(
    model: Any,
    contrast: Contrast,
    *,
    sites: SomeSites = "all",
    part: Part = "z",
    direction: str | Ablation = "denoise",
    work: Work = Work(),
) -> Plan:
    """Estimate the time and the memory of a sweep with `activation_patch`; run only a part of it.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
        contrast: as for `activation_patch`, as are `sites`, `part` and `direction`.
        sites: which heads would be patched, and at which positions.
        part: the activation that would be patched.
        direction: the direction, or the ablation.
        work: how the patches would be run. A folder `resume` is not written.

    Raises:
        InputError, UnsupportedModelError: as in `activation_patch`.

    Example:
        >>> from attn_only_lens import Contrast, expose_neuron_heads, load, patching as p
        >>> model = expose_neuron_heads(load("small-english"), copy=True).model
        >>> keys = Contrast("The keys near the cabinet", "The key near the cabinet",
        ...                 p.logit_diff(" are", " is"))
        >>> cost = p.plan(model, keys, sites="neurons")
        >>> cost.n_patches, cost.n_heads, cost.seconds > 0  # 344 neurons in 4 layers, at 6 tokens
        (8256, 1376, True)
    """
    reasons = sweep_reasons(model, contrast, part, direction) + work_reasons(work)
    InputError.raise_if(reasons, "this cannot be patched")
    sweep = plan_sweep(model, contrast, sites, part, direction, False, work)
    names = [name for of_layer in sweep.sites for name in of_layer.names]
    how: dict[str, Any] = {"part": part, "direction": direction}
    asked = Sites.of(sites)
    few = replace(work, resume=None, progress=False)

    def seconds_for(some: SomeSites) -> float:
        start = time.perf_counter()
        activation_patch(model, contrast, sites=some, work=few, **how)
        return time.perf_counter() - start

    if not asked.kinds or len(names) < 8 * max(_SAMPLES):  # sampling would not be faster
        n_timed, seconds = 0, seconds_for(asked)
    else:
        chosen = [names[len(names) // 2 :][:n] for n in _SAMPLES]
        _, first, second = (seconds_for(Sites(some, asked.positions)) for some in chosen)
        per_head = max(second - first, 0) / (len(chosen[2]) - len(chosen[1]))
        seconds = first + per_head * (len(names) - len(chosen[1]))
        n_timed = len(chosen[2]) * sweep.n_rows // len(names)
    with torch.no_grad():
        start = time.perf_counter()
        run(model, *sweep.pair.together)
        of_pass = time.perf_counter() - start
    of_prompt = numbers_per_prompt(model, sweep.pair, sweep.sites, part)
    return Plan(
        n_patches=sweep.n_rows,
        n_heads=len(names),
        seconds=seconds,
        passes=seconds / of_pass,
        n_timed=n_timed,
        bytes=of_prompt * sweep.prompts_at_once * next(model.parameters()).element_size(),
        prompts_at_once=sweep.prompts_at_once,
    )
