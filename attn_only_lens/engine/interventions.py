"""Directions of patches, and ablations of z: zero, mean, resample and bias."""

from dataclasses import replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from attn_only_lens.axes import Tokens
from attn_only_lens.engine.recording import NeuronRun, Recording
from attn_only_lens.errors import InputError

DIRECTIONS = ("denoise", "noise")
"""Patch clean activations into the corrupted run, or corrupted ones into the clean run."""
Ablation = Literal["zero", "mean", "resample", "bias"]
ABLATIONS: tuple[str, ...] = get_args(Ablation)


def ablate(
    recording: Recording, reference: Recording, to: Ablation, real: Bool[Tensor, "batch pos"]
) -> Recording:
    """Return a run's activations with z ablated at every recorded head."""
    is_reference = reference is recording
    reasons = []
    if to == "bias" and recording.hooked:
        reasons.append(
            "'bias' is for neuron-heads: attention heads have no bias token; patch "
            "neuron_heads(), or ablate to 'zero'"
        )
    if to == "resample":
        reasons += resample_reasons(
            recording.tokens, None if is_reference else reference.tokens, real
        )
    InputError.raise_if(reasons, "these heads cannot be ablated like this")

    def ablated_z(z: Tensor, of_reference: Tensor) -> Tensor:
        if to == "mean":
            return of_reference[real.to(z.device)].mean(dim=0).expand_as(z)
        if to == "resample":
            return of_reference.roll(-1, dims=0) if is_reference else of_reference
        return torch.zeros_like(z)

    neurons = {
        layer: NeuronRun(ablated_z(run.z, reference.neurons[layer].z))
        for layer, run in recording.neurons.items()
    }
    hooked = {name: ablated_z(z, reference.hooked[name]) for name, z in recording.hooked.items()}
    return replace(recording, neurons=neurons, hooked=hooked)


def resample_reasons(
    clean: Tokens, reference: Tokens | None, real: Bool[Tensor, "batch pos"]
) -> list[str]:
    """Return why prompts cannot be resampled from a reference, or from each other without one."""
    if reference is not None and reference.shape != clean.shape:
        return [
            f"got reference prompts {list(reference.shape)}; expected {list(clean.shape)}, a "
            "row for each clean prompt, token for token"
        ]
    if reference is not None:
        rows = enumerate(zip(clean, reference, strict=True))
        return [
            f"got clean prompt {row} itself in row {row} of the reference, from which it is "
            "resampled; expected another prompt"
            for row, (index, other_index) in rows
            if torch.equal(index, other_index)
        ]
    reasons = []
    if len(real) < 2:
        reasons.append(
            "'resample' takes activations of other prompts: give two prompts or more, or a "
            "reference"
        )
    if not torch.equal(real, real.roll(-1, 0)):
        reasons.append(
            "'resample' would take activations at padding of other prompts: give prompts of one "
            "length, or a reference"
        )
    return reasons
