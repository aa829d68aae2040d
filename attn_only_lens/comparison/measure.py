"""One batch through one model: patterns, outputs, and what each component does to the metric.

Two forward passes and one backward, as `patching.attribution` takes of part "z" with direction
"noise": with g the gradient of the metric at what a head puts out in the clean run, z* what it puts
out in the other,

    effect = g · (z - z*)

is what the metric is estimated to lose when z* replaces z, in the metric's own units: positive for
what supports it. Effects are kept for each prompt: a metric that is a mean over B prompts has B
times what the batch's gradient gives.

What the largest components do to the metric, measured rather than estimated.

`patching.activation_patch` of z at all positions, with direction "noise": the metric of the clean
run less that with another prompt's activation, in units of the metric. It runs part of the model
for every component, so it is for those that attribution thinks largest, and for one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from torch import Tensor

from attn_only_lens.comparison.batches import Batch
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.runs.edits import hook_name
from attn_only_lens.runs.gradients import Tape, node_of, rooted, shares, value_of
from attn_only_lens.runs.metrics import require_differentiable
from attn_only_lens.runs.paired_runs import recorded
from attn_only_lens.runs.prompts import PromptPair
from attn_only_lens.runs.recording import NeuronRun
from attn_only_lens.runs.sites import LayerSites

__all__ = ["Key", "Measured", "key_of", "measured", "on", "patched", "with_patching"]

Key = tuple[int, HeadKind]
"""A layer and a kind of its components."""


def key_of(sites: LayerSites) -> Key:
    """Which group these are of."""
    return sites.layer, sites.kind


@dataclass(frozen=True, eq=False)
class Measured:
    """What one model did on one batch.

    Attributes:
        model: the model.
        hooked: of the clean run, what attention heads attended to and put out, by hook name.
        neurons: of the clean run, what neuron-heads did, by layer.
        real: where tokens are real.
        effects: of every component, by layer and kind.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the other.
        metric: its name.
    """

    model: Any
    hooked: dict[str, Tensor]
    neurons: dict[int, NeuronRun]
    real: Bool[Tensor, "batch pos"]
    effects: dict[Key, Float[Tensor, "site batch pos"]]
    clean_value: float
    corrupted_value: float
    metric: str

    def z(self, sites: LayerSites) -> Float[Tensor, "token site d_head"]:
        """What components put out at real tokens; of a neuron, all of its heads together."""
        if sites.kind == "attention":
            z = self.hooked[hook_name(self.model, sites.layer, "z")]
        else:
            heads = host_of(self.model).neurons[sites.layer]
            z = heads.neurons(self.neurons[sites.layer].z).unsqueeze(-1)
        return z[self.real][:, sites.index.to(z.device)]

    def patterns(self, sites: LayerSites) -> Float[Tensor, "batch site query_pos key"]:
        """The patterns of attention heads."""
        found = self.hooked[hook_name(self.model, sites.layer, "pattern")]
        return found[:, sites.index.to(found.device)]

    def gates(self, sites: LayerSites) -> Float[Tensor, "batch pos site member"]:
        """The weight of neuron-heads on their own token."""
        heads = host_of(self.model).neurons[sites.layer]
        weight = self.neurons[sites.layer].weight.unflatten(-1, (-1, heads.heads_per_neuron))
        return weight[:, :, sites.index.to(weight.device)]


def measured(model: Any, batch: Batch, sites: Sequence[LayerSites]) -> Measured:
    """Run both prompts of a batch, and take the gradient at every component.

    Args:
        model: with neuron-heads, without hooks of its own.
        batch: the prompts, on any device.
        sites: all components of the model.

    Raises:
        PatchingError: the metric does not fit, or no gradient passes through it.
    """
    pair = on(model, batch.pair)
    nodes = [node_of(model, each, "z", closed=True) for each in sites]
    patterns = [
        hook_name(model, each.layer, "pattern") for each in sites if each.kind == "attention"
    ]
    tape = Tape(nodes)
    with rooted(model):
        runs = recorded(
            *(model, pair, batch.metric, sites, "z"),
            names=patterns,
            traced="clean",
            hooks=tape.hooks,
            distinct=False,  # of each batch; no score divides by it
        )
    require_differentiable(runs.metric, runs.clean.logits.detach())
    gradients = tape.gradients(value_of(runs.metric, runs.clean.logits))
    weight = -len(pair.clean) * pair.real
    effects = {}
    for each, node in zip(sites, nodes, strict=True):
        found = shares(model, each, "z", node, gradients[node], runs.clean, runs.corrupted)
        effects[key_of(each)] = found * weight
    return Measured(
        *(model, runs.clean.hooked, runs.clean.neurons, pair.real, effects),
        clean_value=runs.clean_value,
        corrupted_value=runs.corrupted_value,
        metric=runs.metric.name,
    )


def on(model: Any, pair: PromptPair) -> PromptPair:
    """Prompts on the device of a model."""
    device = next(model.parameters()).device
    mask = None if pair.mask is None else pair.mask.to(device)
    return PromptPair(pair.clean.to(device), pair.corrupted.to(device), mask)


_SIZES = ("attribution", "grown_attribution", "null_attribution")


def patched(model: Any, batch: Batch, names: Sequence[str]) -> "pd.Series[float]":
    """What the metric loses by each component, by name.

    Args:
        model: with neuron-heads.
        batch: the prompts and the metric.
        names: of components of this model.
    """
    if not names:
        return pd.Series(dtype=float)
    pair = on(model, batch.pair)
    sweep = activation_patch(
        *(model, pair.clean, pair.corrupted, batch.metric),
        sites=list(names),
        positions="all",
        direction="noise",
        mask=pair.mask,
        progress=False,
    )
    lost = sweep.clean_value - sweep.frame["value"]
    return pd.Series(lost.to_numpy(), index=sweep.frame["name"].astype(str))


def with_patching(
    models: Sequence[Any],
    batch: Batch,
    old: pd.DataFrame,
    new: pd.DataFrame,
    n_patched: int | None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The frames of old and new components, with what patching of the largest gives.

    Args:
        models: the original, the grown one and, if there is one, the null.
        batch: the prompts and the metric.
        old: a row for each component of the original.
        new: a row for each other one of the grown model.
        n_patched: how many to patch; None for all.
    """
    sizes = pd.concat([old, new])[[c for c in _SIZES if c in old]].abs().max(axis=1).to_numpy()
    chosen = np.zeros(len(sizes), dtype=bool)
    chosen[np.argsort(-sizes, kind="stable")[:n_patched]] = True
    old, new = old.copy(), new.copy()
    few, gained = old[chosen[: len(old)]], new[chosen[len(old) :]]
    own, grown = few["name"].tolist(), few["grown_name"].tolist()
    found = [patched(models[0], batch, own)]
    found += [patched(each, batch, [*grown, *gained["grown_name"]]) for each in models[1:]]
    old["patching"] = old["name"].map(found[0])
    for label, effects in zip(("grown_", "null_"), found[1:], strict=False):
        old[f"{label}patching"] = old["grown_name"].map(effects)
        new["patching" if label == "grown_" else "null_patching"] = new["grown_name"].map(effects)
    old["patching_change"] = old["grown_patching"] - old["patching"]
    if len(models) > 2:
        old["null_patching_change"] = old["null_patching"] - old["grown_patching"]
    return old, new
