"""Split the effect of patching a neuron-head into effects of its pattern, value and interaction.

A neuron-head is an MLP neuron that is computed as an attention head. The output of a neuron-head is
z = w v, where w is the attention pattern and v the value. Let a prime mark the second of two runs.
The difference between the z of both runs is

    w'v' - wv = (w' - w) v + w (v' - v) + (w' - w)(v' - v)
       whole  =  pattern   +   value    +   interaction

exactly. For an ordinary MLP, only the left side is known, because the MLP computes only z. The
metric is not linear in z, so the effects of the three parts need not add up. The effect of the
interaction is therefore defined as the effect of patching z minus the effects of patching only the
pattern and only the value.
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

from attn_only_lens.arguments import option_reasons
from attn_only_lens.engine.directions import DIRECTIONS
from attn_only_lens.engine.edits import by_site, change_of_z, interaction
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import AnyMetric, as_metric
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import Positions
from attn_only_lens.engine.prompts import PromptPair, Prompts, prompt_pair
from attn_only_lens.engine.recording import NeuronRun, Recording, record
from attn_only_lens.engine.sites import Part, Sites, neuron_heads
from attn_only_lens.errors import InputError
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching.prompt_chunks import prompts_per_chunk
from attn_only_lens.patching.site_groups import SiteGroup, site_groups, split_prompts
from attn_only_lens.storage import open_folder

_PARTS: tuple[Part, ...] = ("pattern", "value", "z")
_WRITES: dict[str, Callable[[NeuronRun, NeuronRun], Tensor]] = {
    "write_pattern": partial(change_of_z, part="pattern"),
    "write_value": partial(change_of_z, part="value"),
    "write_interaction": interaction,
    "write": partial(change_of_z, part="z"),
}
"""The parts of the change in z, in the order of the columns."""


@one_thread_per_model
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
    """Split effects of patching neuron-heads (neurons as attention heads) into three parts.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads.
        clean: a text, a list of texts, or tokens [batch, pos].
        corrupted: the corrupted prompts, with the same number of tokens.
        metric: `logit_diff(...)` or another metric, or a function of logits.
        sites: neuron-heads; by default all.
        positions: "each", "all", numbers, or roles; see `activation_patch`.
        direction: "denoise" or "noise".
        mask: 1 for real tokens, 0 for padding.
        per_prompt: whether to return one row per site and prompt.
        prompts_at_once: how many prompt pairs have their activations in memory at once.
        batch_size: how many sites run in one forward pass.
        resume: a checkpoint folder with one folder for each of the three sweeps.
        progress: whether to show progress bars.

    Returns:
        A frame with one row per site and position. Its columns are `name`, `position`, with
        `per_prompt` also `prompt` (counted from 0), `layer`, `index`, and

        write_pattern, write_value, write_interaction, write: the change in the neuron's activation
            (which multiplies the neuron's row of W_O), summed over the patched positions. The
            first three add up to the last.
        effect_pattern, effect_value, effect_interaction, effect: the change in the score (0 is the
            corrupted run, 1 the clean one). The first three add up to the last.

    Raises:
        InputError: for the same reasons as in `activation_patch`, or if a site is not a
            neuron-head, or if the direction is an ablation.

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
    # Check
    sites = neuron_heads() if sites is None else sites
    pair = prompt_pair(model, clean, corrupted, mask)
    groups = site_groups(model, pair, sites, positions, "z")
    attention = [group.sites.names[0] for group in groups if group.sites.kind == "attention"]
    reasons = [f"got {name}; expected neuron-heads" for name in attention]
    reasons += option_reasons("direction", direction, DIRECTIONS)
    InputError.raise_if(reasons, "effects cannot be split into pattern and value")

    # Run
    folder = None if resume is None else open_folder(resume)
    sweeps = {
        part: activation_patch(
            *(model, clean, corrupted, metric),
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
        for part in _PARTS
    }
    layers = tuple(dict.fromkeys(group.sites for group in groups))
    at_once = prompts_per_chunk(model, pair, as_metric(metric), layers, "value", prompts_at_once)
    writes = _writes(model, pair, groups, at_once, direction, per_prompt)

    # Collect
    effects = {f"effect_{part}": sweeps[part].effect for part in _PARTS[:2]}
    effects["effect_interaction"] = sweeps["z"].effect - sum(effects.values())
    # Names come first, because pandas prints only the first and last columns of wide frames.
    site = ["name", "position", *(["prompt"] if per_prompt else []), "layer", "index"]
    frame = sweeps["z"].to_frame()[site].reset_index(drop=True)
    return frame.assign(**writes, **effects, effect=sweeps["z"].effect)


def _writes(
    model: Any,
    pair: PromptPair,
    groups: Sequence[SiteGroup],
    prompts_at_once: int,
    direction: str,
    per_prompt: bool,
) -> dict[str, np.ndarray]:
    """Return how much each part changes a neuron's activation, in the order of a sweep's rows."""
    layers = [group.sites.layer for group in groups]
    n_rows, n_prompts = sum(map(len, groups)), len(pair.clean)
    shape = (n_rows, n_prompts) if per_prompt else (n_rows, 1)
    writes = {name: torch.zeros(shape, dtype=torch.float64, device="cpu") for name in _WRITES}
    for prompts in split_prompts(n_prompts, prompts_at_once):
        some = pair.of_prompts(prompts)
        clean, corrupted = (
            record(model, tokens, some.mask, layers=layers)
            for tokens in (some.clean, some.corrupted)
        )
        target, source = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
        groups_here = [group.of_prompts(some) for group in groups]
        for name, change in _WRITES.items():
            sums = torch.cat([_sums(g, target, source, change) for g in groups_here])
            if per_prompt:
                writes[name][:, prompts.start : prompts.stop] = sums
            else:
                writes[name] += sums.sum(dim=1, keepdim=True) / n_prompts
    return {name: values.flatten().numpy() for name, values in writes.items()}


def _sums(
    group: SiteGroup,
    target: Recording,
    source: Recording,
    change: Callable[[NeuronRun, NeuronRun], Tensor],
) -> Float[Tensor, "row prompt"]:
    layer = group.sites.layer
    dz = change(target.neurons[layer], source.neurons[layer])
    return group.sums(by_site(group.sites, dz)).cpu().double()
