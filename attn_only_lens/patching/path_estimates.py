"""Estimate how much each path changes the metric, from the mean gradient at its receiver."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.engine.gradients import Tape, start_graph
from attn_only_lens.engine.recording import run
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS, HeadKind
from attn_only_lens.patching.path_blocks import PathBlock
from attn_only_lens.patching.path_runner import PathRunner
from attn_only_lens.patching.prompt_chunks import PromptChunk
from attn_only_lens.patching.site_groups import SiteGroup


def receiver_gradients(
    model: Any, receivers: Sequence[SiteGroup | None], prompts: PromptChunk
) -> dict[tuple[int, HeadKind], Tensor]:
    """Return the gradient of the metric with respect to each receiver's z."""
    target = prompts.target
    layers = {(group.sites.layer, group.sites.kind) for group in receivers if group is not None}
    if not layers:
        return {}
    names = {layer: host_of(model).hook_name(*layer, "z") for layer in sorted(layers)}
    tape = Tape(names.values())
    with torch.enable_grad(), start_graph(model):
        logits = run(model, target.tokens, target.mask, tape.hooks)
        gradients = tape.gradients(prompts.runs.metric.of_logits(logits))
    return {layer: gradients[name] for layer, name in names.items()}


@torch.no_grad()
def estimates(
    runner: PathRunner, block: PathBlock, gradients: dict[tuple[int, HeadKind], Tensor]
) -> Float[Tensor, "sender receiver"]:
    """Estimate how much each path changes the metric (exact for paths to the logits)."""
    receivers, n = block.receivers, len(block.senders.names)
    if not block.positions.chosen.any():
        return torch.zeros(block.shape, device="cpu")
    if receivers is None:
        senders = torch.arange(n, device="cpu")
        silent = replace(runner, batching=runner.batching.silent())
        mean = runner.replay.metric.mean
        values = mean(silent.values(block, senders, torch.zeros_like(senders)))
        return (values - mean(runner.baseline))[:, None]
    gradient = gradients[receivers.layer, receivers.kind]
    if receivers.kind in NEURON_KINDS:
        dz, columns = runner.neuron_dz(block, receivers)
        index = receivers.index.to(gradient.device)
        along = gradient.squeeze(-1)[:, columns][:, :, index]
        return (dz.unflatten(0, (n, -1)) * along).sum((1, 2))
    z, begins = runner.attention_z(block, receivers)
    dz = z - runner.target.of(receivers.layer, "attention").z[:, begins:]
    index = receivers.index.to(z.device)
    return torch.einsum("nbphd,bphd->nh", dz[:, :, :, index], gradient[:, begins:, index])


def largest(picked: list[pd.DataFrame], top: int) -> pd.DataFrame:
    """Return the `top` paths with the largest |estimate| in these frames, sorted by path block."""
    paths = pd.concat(picked, ignore_index=True)
    rows = paths["estimate"].abs().nlargest(top).index
    return paths.loc[rows.sort_values()].reset_index(drop=True)
