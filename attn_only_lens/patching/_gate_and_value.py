"""Split a patch's effect into pattern, value and interaction.

A neuron-head puts out z = w v, so between a run and another, here with a prime,

    w'v' - wv = (w' - w) v + w (v' - v) + (w' - w)(v' - v)
       whole  =  pattern   +   value    +   interaction

exactly: the neuron opened, its value changed, or both. An MLP shows the left side only. The metric
is not linear in these changes, so its interaction is the effect of patching z less those of
patching pattern and value alone,

    score:  interaction = z - pattern - value,  each as the effect on the unpatched run's score.

A neuron writes along its row of W_out: the numbers here are the factors of that row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.engine.edits import change_of_z, interaction, neuron_changes
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.inputs import option_reasons
from attn_only_lens.engine.interventions import DIRECTIONS
from attn_only_lens.engine.metrics import AnyMetric, as_metric
from attn_only_lens.engine.positions import Positions
from attn_only_lens.engine.prompts import PromptPair, Prompts, prompt_pair
from attn_only_lens.engine.recording import NeuronRun, Recording, record
from attn_only_lens.engine.sites import Part, Sites, neuron_heads
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching.prompt_runs import prompts_per_run
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.site_groups import SiteGroup, site_groups
from attn_only_lens.patching.sweep_parts import SweepPart, sweep_parts
from attn_only_lens.storage import open_folder

_SITE = ["layer", "index", "name", "position"]
_WRITES: dict[str, Callable[[NeuronRun, NeuronRun], Tensor]] = {
    "write_pattern": partial(change_of_z, part="pattern"),
    "write_value": partial(change_of_z, part="value"),
    "write_interaction": interaction,
    "write": partial(change_of_z, part="z"),
}
"""The changes of z, in the order of columns."""


@warned_once()
def gate_and_value(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    *,
    sites: Sites | None = None,
    positions: Positions = "each",
    direction: str = "denoise",
    mask: Tensor | None = None,
    per_prompt: bool = False,
    prompts_at_once: int | None = None,
    batch_size: int | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Split the effect of patching neuron-heads into pattern, value and interaction.

    Args:
        model: see `activation_patch`, as for all others.
        clean: see there.
        corrupted: see there.
        metric: see there.
        sites: neuron-heads; by default all.
        positions: see there.
        direction: "denoise" or "noise".
        mask: see there.
        per_prompt: whether to return a row for each prompt of each site; by default one for each
            site, the mean over prompts.
        prompts_at_once: pairs whose activations are held at once; see there.
        batch_size: see there.
        resume: a folder, in which each of the three sweeps has its own.
        progress: whether to show bars, one for each of the three sweeps.

    Returns:
        A row for each site and position, with `layer`, `index`, `name`, `position`, with
        `per_prompt` also `prompt`, counted from 0, and

        write_pattern, write_value, write_interaction, write: by how much the neuron's activation
            changes, summed over the patched positions. The first three add up to the last.
        effect_pattern, effect_value, effect_interaction, effect: by how much the score changes
            (0 is the corrupted run, 1 the clean one). The first three add up to the last.

    Raises:
        InputError: as `activation_patch` does; or sites that are no neuron-heads, or an
            ablation for a direction.

    Example:
        >>> import torch
        >>> from attn_only_lens import convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> frame = p.gate_and_value(
        ...     model, torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]),
        ...     p.logit_diff(correct=7, wrong=8), positions=-1, progress=False)
        >>> split = frame["write_pattern"] + frame["write_value"] + frame["write_interaction"]
        >>> len(frame), bool((split - frame["write"]).abs().max() < 1e-5)
        (512, True)
    """
    sites = neuron_heads() if sites is None else sites
    pair = prompt_pair(model, clean, corrupted, mask)
    groups = site_groups(model, pair, sites, positions, "z")
    attention = [
        site_group.sites.names[0] for site_group in groups if site_group.sites.kind == "attention"
    ]
    reasons = [f"got {name}; expected neuron-heads" for name in attention]
    reasons += option_reasons("direction", direction, DIRECTIONS)
    InputError.raise_if(reasons, "gate and value cannot be told apart")

    folder = None if resume is None else open_folder(resume)
    chosen = tuple(dict.fromkeys(group.sites for group in groups))
    at_once = prompts_per_run(
        model, pair, as_metric(metric), chosen, "value", prompts_at_once, None
    )

    def sweep(part: Part) -> Sweep:
        return activation_patch(
            model,
            clean,
            corrupted,
            metric,
            sites=sites,
            part=part,
            positions=positions,
            direction=direction,
            mask=mask,
            per_prompt=per_prompt,
            prompts_at_once=prompts_at_once,
            batch_size=batch_size,
            resume=None if folder is None else folder / part,
            progress=progress,
        )

    parts: tuple[Part, ...] = ("pattern", "value", "z")
    sweeps = {part: sweep(part) for part in parts}
    whole = sweeps["z"]
    parts_of_prompts = sweep_parts(model, pair, groups, at_once, None)
    writes = _writes(model, pair, groups, parts_of_prompts, direction, per_prompt)
    effects = {f"effect_{part}": sweeps[part].effect for part in ("pattern", "value")}
    effects["effect_interaction"] = whole.effect - sum(effects.values())
    frame = whole.to_frame()[[*_SITE, *(["prompt"] if per_prompt else [])]].reset_index(drop=True)
    return frame.assign(**writes, **effects, effect=whole.effect)


def _writes(
    model: Any,
    pair: PromptPair,
    groups: Sequence[SiteGroup],
    parts: Sequence[SweepPart],
    direction: str,
    per_prompt: bool,
) -> dict[str, np.ndarray]:
    """Return the changes of each neuron's activation, in the order of a sweep's rows."""
    layers = [site_group.sites.layer for site_group in groups]
    n_rows, n_prompts = sum(map(len, groups)), len(pair.clean)
    shape = (n_rows, n_prompts) if per_prompt else (n_rows, 1)
    writes = {name: torch.zeros(shape, dtype=torch.float64, device="cpu") for name in _WRITES}
    for part in parts:
        some = pair.of_prompts(part.prompts)
        clean, corrupted = (
            record(model, tokens, some.mask, layers=layers)
            for tokens in (some.clean, some.corrupted)
        )
        target, source = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
        here = [group.of_prompts(some) for group in groups]
        for name, change in _WRITES.items():
            values = torch.cat([_sums(model, group, target, source, change) for group in here])
            if per_prompt:
                writes[name][:, part.prompts.start : part.prompts.stop] = values
            else:
                writes[name] += values.sum(dim=1, keepdim=True) / n_prompts
    return {name: values.flatten().numpy() for name, values in writes.items()}


def _sums(
    model: Any,
    group: SiteGroup,
    target: Recording,
    source: Recording,
    change: Callable[[NeuronRun, NeuronRun], Tensor],
) -> Float[Tensor, "row prompt"]:
    layer = group.sites.layer
    dz = change(target.neurons[layer], source.neurons[layer])
    moved = neuron_changes(host_of(model).neurons[layer], group.sites, dz)
    return group.sums(moved).cpu().double()
