"""Record the patterns and outputs of all heads and neurons on the clean prompts of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import Recording, record
from attn_only_lens.engine.sites import LayerSites, hook_name
from attn_only_lens.growth.comparison.batches import on_device

MODELS = ("the original", "the grown model", "the null model")
"""The names of the compared models, in order."""


@dataclass(frozen=True, eq=False)
class CleanRun:
    """One model's run on the clean prompts of a batch, which are on the model's device."""

    model: Any
    prompts: PromptPair
    recording: Recording

    @classmethod
    def of(cls, model: Any, prompts: PromptPair, sites: Sequence[LayerSites]) -> "CleanRun":
        """Run the model, and record the given sites."""
        prompts = on_device(model, prompts)
        heads = [site for site in sites if site.kind == "attention"]
        recording = record(
            *(model, prompts.clean, prompts.mask),
            layers=[site.layer for site in sites if site.kind == "neuron"],
            names=[hook_name(model, site.layer, x) for site in heads for x in ("z", "pattern")],
        )
        return cls(model, prompts, recording)

    def z(self, sites: LayerSites) -> Float[Tensor, "token site d_head"]:
        """Return z at non-padding tokens."""
        if sites.kind == "attention":
            z = self.recording.hooked[hook_name(self.model, sites.layer, "z")]
        else:
            z = self.recording.neurons[sites.layer].z.unsqueeze(-1)
        tokens = z.flatten(0, 1)[self._real_tokens.to(z.device)]
        return tokens[:, sites.index.to(z.device)]

    @cached_property
    def _real_tokens(self) -> Int[Tensor, "token"]:
        """The indices of non-padding tokens; indexing with a mask would synchronize the device."""
        return self.prompts.real.flatten().nonzero()[:, 0]

    def patterns(self, sites: LayerSites) -> Float[Tensor, "batch site query_pos key"]:
        """Return the patterns of the given attention heads."""
        patterns = self.recording.hooked[hook_name(self.model, sites.layer, "pattern")]
        return patterns[:, sites.index.to(patterns.device)]

    def gates(self, sites: LayerSites) -> Float[Tensor, "batch pos site"]:
        """Return the gates of the given neurons: the attention of each token to itself."""
        weight = self.recording.neurons[sites.layer].weight
        return weight[:, :, sites.index.to(weight.device)]
