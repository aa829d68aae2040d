"""Run a batch through a model, and return every component's pattern, output and effect.

The computation takes two forward passes and a backward pass, as in `patching.attribution(part="z",
direction="noise")`. Let g be the gradient of the metric at a head's output z in the clean run, and
let z* be the head's output in the corrupted run. The head's effect is

    effect = g · (z - z*)

To first order, this is the decrease of the metric when z* replaces z. The effect is positive for a
component that increases the metric. A component has one effect per prompt. The metric is a mean
over prompts, so its gradient is multiplied by the number of prompts.

For the components with the largest estimated effects, `add_patching` computes the exact decrease on
one batch with `patching.activation_patch`, which replaces z at all positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.gradients import Tape, gradient_node, site_estimates, start_graph
from attn_only_lens.engine.metrics import require_differentiable, require_slope
from attn_only_lens.engine.prompts import PromptPair, require_ignored_padding
from attn_only_lens.engine.recording import NeuronRun, record_pair
from attn_only_lens.engine.sites import LayerSites, Sites, hook_name
from attn_only_lens.growth.comparison.batches import Batch
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.work import Work

MODELS = ("the original", "the grown model", "the null model")
"""The names of the compared models, in order."""


def stage_bar(text: str, total: int | None, unit: str, shown: bool) -> "tqdm[Any]":
    """Return a progress bar that is shown at once, because the first step may take minutes."""
    return tqdm(desc=text, total=total, unit=unit, disable=not shown)


@dataclass(frozen=True, eq=False)
class BatchRun:
    """One model's results on a batch: the clean run, effects by layer and kind, and metric values.

    `pair` is on the model's device. `hooked` holds patterns and outputs of attention heads, by hook
    name. `values` is the metric of the clean and of the corrupted run.
    """

    model: Any
    pair: PromptPair
    hooked: dict[str, Tensor]
    neurons: dict[int, NeuronRun]
    effects: dict[tuple[int, HeadKind], Float[Tensor, "site batch pos"]]
    values: tuple[float, float]
    metric: str

    @property
    def real(self) -> Bool[Tensor, "batch pos"]:
        """False at padding."""
        return self.pair.real

    def effects_of(self, sites: LayerSites) -> Float[Tensor, "site batch pos"]:
        effects = self.effects[sites.layer, sites.kind]
        return effects[sites.index.to(effects.device)]

    def z(self, sites: LayerSites) -> Float[Tensor, "token site d_head"]:
        """Return z at non-padding tokens."""
        if sites.kind == "attention":
            z = self.hooked[hook_name(self.model, sites.layer, "z")]
        else:
            z = self.neurons[sites.layer].z.unsqueeze(-1)
        tokens = z.flatten(0, 1)[self._real_tokens.to(z.device)]
        return tokens[:, sites.index.to(z.device)]

    @cached_property
    def _real_tokens(self) -> Int[Tensor, "token"]:
        """The indices of non-padding tokens; indexing with a mask would synchronize the device."""
        return self.real.flatten().nonzero()[:, 0]

    def patterns(self, sites: LayerSites) -> Float[Tensor, "batch site query_pos key"]:
        """Return the patterns of the given attention heads."""
        patterns = self.hooked[hook_name(self.model, sites.layer, "pattern")]
        return patterns[:, sites.index.to(patterns.device)]

    def gates(self, sites: LayerSites) -> Float[Tensor, "batch pos site"]:
        """Return the gates of the given neurons: the attention of each token to itself."""
        weight = self.neurons[sites.layer].weight
        return weight[:, :, sites.index.to(weight.device)]


def run_batch(
    model: Any, batch: Batch, sites: Sequence[LayerSites], *, has_circuit: bool = False
) -> BatchRun:
    """Run a batch's clean and corrupted prompts, and estimate the effect of every component.

    If a circuit is searched on this batch, the metric must differ between the runs.
    """
    pair = pair_for(model, batch.pair)
    nodes = [gradient_node(model, site, "z", closed=True) for site in sites]
    heads = [site for site in sites if site.kind == "attention"]
    patterns = [hook_name(model, site.layer, "pattern") for site in heads]
    tape = Tape(nodes)
    with start_graph(model):
        runs = record_pair(
            *(model, pair, batch.metric, sites, "z"),
            names=patterns,
            gates=True,
            traced="clean",
            hooks=tape.hooks,
            distinct=has_circuit,
        )
    logits, values = runs.clean.logits.detach(), (runs.clean_value, runs.corrupted_value)
    require_differentiable(runs.metric, logits)
    if has_circuit:
        require_slope(runs.metric, logits, runs.corrupted.logits, values[0] - values[1])
    gradients = tape.gradients(runs.metric.of_logits(runs.clean.logits))
    weight = -len(pair.clean) * pair.real
    effects = {}
    for site, node in zip(sites, nodes, strict=True):
        estimates = site_estimates(
            model, site, "z", node, gradients[node], runs.clean, runs.corrupted
        )
        effects[site.layer, site.kind] = estimates * weight.to(estimates.device)
    recorded = runs.clean.hooked, runs.clean.neurons
    return BatchRun(model, pair, *recorded, effects, values, runs.metric.name)


def pair_for(model: Any, pair: PromptPair) -> PromptPair:
    """Move prompts to a model's device; raise InputError if their padding changes its logits."""
    require_ignored_padding(model, pair.mask, "models cannot be compared on these prompts")
    device = next(model.parameters()).device
    mask = None if pair.mask is None else pair.mask.to(device)
    return PromptPair(pair.clean.to(device), pair.corrupted.to(device), mask)


def add_patching(
    models: Sequence[Any],
    batch: Batch,
    old: pd.DataFrame,
    new: pd.DataFrame,
    n_patched: int | None,
    progress: bool = False,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Patch the components with the largest estimates; add exact effects to both frames."""
    estimates = ["estimated_drop", "grown_estimated_drop", "null_estimated_drop"]
    sizes = pd.concat([old, new]).reindex(columns=estimates).abs().max(axis=1).to_numpy()
    chosen = np.zeros(len(sizes), dtype=bool)
    chosen[np.argsort(-sizes, kind="stable")[:n_patched]] = True
    old, new = old.copy(), new.copy()
    patched, gained = old[chosen[: len(old)]], new[chosen[len(old) :]]
    names = [*patched["grown_name"], *gained["grown_name"]]
    effects = [
        _losses(model, batch, some, progress and f"patching {label}")
        for model, some, label in zip(
            models, [patched["name"].tolist(), names, names], MODELS, strict=False
        )
    ]
    old["drop"] = old["name"].map(effects[0])
    columns = (("grown_drop", "drop"), ("null_drop", "null_drop"))
    for (of_old, of_new), losses in zip(columns, effects[1:], strict=False):
        old[of_old] = old["grown_name"].map(losses)
        new[of_new] = new["grown_name"].map(losses)
    old["drop_change"] = old["grown_drop"] - old["drop"]
    if len(models) > 2:
        old["null_drop_change"] = old["null_drop"] - old["grown_drop"]
    return old, new


def _losses(model: Any, batch: Batch, names: list[str], progress: bool | str) -> "pd.Series[float]":
    """Return how much the metric falls when each component is patched at all positions."""
    if not names:
        return pd.Series(dtype=float)
    pair = pair_for(model, batch.pair)
    contrast = Contrast(pair.clean, pair.corrupted, batch.metric, mask=pair.mask)
    sites, work = Sites(names, positions="all"), Work(progress=progress)
    sweep = activation_patch(model, contrast, sites=sites, direction="noise", work=work)
    losses = sweep.clean_value - sweep.frame["value"].to_numpy()
    return pd.Series(losses, index=sweep.frame["name"].astype(str))
