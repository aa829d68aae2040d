"""What is patched in: the other run's activations, or what an ablation puts in their place."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from attn_only_lens.errors import PatchingError
from attn_only_lens.runs.recording import NeuronRun, Recording

__all__ = ["ABLATIONS", "DIRECTIONS", "Ablation", "Source", "ablated", "patched"]

DIRECTIONS = ("denoise", "noise")
"""Which way another run's activations go: clean into corrupted, or corrupted into clean."""
Ablation = Literal["zero", "mean", "resample", "bias"]
ABLATIONS: tuple[str, ...] = get_args(Ablation)


@dataclass(frozen=True)
class Source:
    """What is patched in.

    Attributes:
        neurons: by source layer.
        hooked: by hook name, for attention heads.
    """

    neurons: dict[int, NeuronRun]
    hooked: dict[str, Tensor]


def patched(recording: Recording) -> Source:
    """What another run did."""
    return Source(recording.neurons, recording.hooked)


def ablated(
    recording: Recording, reference: Recording, to: Ablation, real: Bool[Tensor, "batch pos"]
) -> Source:
    """What an ablation puts in place of z.

    Args:
        recording: the run to be ablated.
        reference: a run to take means, or other prompts' activations, from; the recording itself
            where there is no other.
        to: "zero"; "mean" over all real tokens of the reference; "resample", what another prompt
            has at the same position: for prompt i, row i of the reference, or where that is the
            recording itself, the next row (the first, for the last); "bias", all attention of a
            neuron-head on the bias token.
        real: where the reference has real tokens.

    Raises:
        PatchingError: attention heads have no bias token; a prompt would be resampled from none or
            from itself, or from a token that is not there.
    """
    own = reference is recording
    reasons = []
    if to == "bias" and recording.hooked:
        reasons.append(
            "'bias' is for neuron-heads: attention heads have no bias token; patch "
            "neuron_heads(), or ablate to 'zero'"
        )
    if to == "resample" and own and len(real) < 2:
        reasons.append(
            "'resample' takes activations of other prompts: give two prompts or more, or a "
            "reference"
        )
    if to == "resample" and real.shape != recording.tokens.shape:
        reasons.append(
            f"got reference prompts {list(real.shape)}; expected {list(recording.tokens.shape)}, a "
            "row for each clean prompt, token for token"
        )
    elif to == "resample" and not own:
        reasons += [
            f"got clean prompt {row} itself in row {row} of the reference, from which it is "
            "resampled; expected another prompt"
            for row, (mine, other) in enumerate(
                zip(recording.tokens, reference.tokens, strict=True)
            )
            if torch.equal(mine, other)
        ]
    if to == "resample" and own and not torch.equal(real, real.roll(-1, 0)):
        reasons.append(
            "'resample' would take what other prompts have at padding: give prompts of one length, "
            "or a reference"
        )
    if reasons:
        raise PatchingError(reasons, "these heads cannot be ablated like this")

    def instead(z: Tensor, of: Tensor) -> Tensor:
        if to == "mean":
            return of[real].mean(dim=0).expand_as(z)
        if to == "resample":
            return of.roll(-1, dims=0) if own else of
        return torch.zeros_like(z)

    neurons = {
        layer: NeuronRun(
            each.v,
            torch.zeros_like(each.weight) if to == "bias" else each.weight,
            instead(each.z, reference.neurons[layer].z),
        )
        for layer, each in recording.neurons.items()
    }
    hooked = {name: instead(z, reference.hooked[name]) for name, z in recording.hooked.items()}
    return Source(neurons, hooked)
