"""What an ablation patches in: activations of the clean run with z ablated, for a run of prompts.

Means, and the prompts that others are resampled from, are of all prompts: so means are taken in a
pass of their own, and the prompts after those of a run are run beside them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Bool
from torch import Tensor

from attn_only_lens.axes import Tokens
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.interventions import Ablation, ablate, resample_reasons
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import NeuronRun, Recording, record
from attn_only_lens.engine.sites import LayerSites, hook_name
from attn_only_lens.errors import InputError


class AblatedRuns:
    """The ablated clean run of each run of prompts."""

    def __init__(
        self,
        model: Any,
        pair: PromptPair,
        to: str,
        reference: Tokens | None,
        sites: Sequence[LayerSites],
        prompts_at_once: int,
    ) -> None:
        self._model, self._pair, self._to = model, pair, cast(Ablation, to)
        self._reference, self._at_once = reference, prompts_at_once
        self._layers = [site.layer for site in sites if site.kind == "neuron"]
        attention = [site.layer for site in sites if site.kind == "attention"]
        self._names = [hook_name(model, layer, "z") for layer in attention]
        self._means: Recording | None = None
        if to == "resample":
            reasons = resample_reasons(pair.clean, reference, pair.real)
            InputError.raise_if(reasons, "these heads cannot be ablated like this")

    def of(self, clean: Recording, prompts: range) -> Recording:
        """Return the ablated clean run of a run of prompts."""
        reference_run = replace(clean, hooked={name: clean.hooked[name] for name in self._names})
        rows, n_pos = slice(prompts.start, prompts.stop), clean.tokens.shape[1]
        whole = len(prompts) == len(self._pair.clean) and self._reference is None
        if self._to == "mean" and not whole:
            self._means = self._means or self._mean()
            return ablate(
                reference_run, self._means, "mean", torch.ones_like(clean.tokens[:1, :1]).bool()
            )
        if self._to == "resample" and not whole:
            others, mask = self._reference, None
            if others is None:
                others, mask = self._pair.clean.roll(-1, dims=0), clean.mask
            recorded = self._record(others[rows, :n_pos], mask)
            return replace(reference_run, neurons=recorded.neurons, hooked=recorded.hooked)
        return ablate(reference_run, reference_run, self._to, self._pair.real[rows, :n_pos])

    def _record(self, tokens: Tokens, mask: Tensor | None) -> Recording:
        names, layers = self._names, self._layers
        return record(self._model, tokens, mask, layers=layers, names=names, gates=False)

    def _mean(self) -> Recording:
        """Return the mean z of all real tokens, as a run of one token."""
        tokens, mask, real = self._pair.clean, self._pair.mask, self._pair.real
        if self._reference is not None:
            tokens, mask, real = self._reference, None, torch.ones_like(self._reference).bool()
        sums: dict[int | str, Tensor] = {}
        for start in range(0, len(tokens), self._at_once):
            rows = slice(start, start + self._at_once)
            run = self._record(tokens[rows], None if mask is None else mask[rows])
            every = {
                layer: run_of_layer.z for layer, run_of_layer in run.neurons.items()
            } | run.hooked
            for key, z in every.items():
                total = to_float64_device(_of_real(z, real[rows])).double().sum(dim=0)
                sums[key] = sums[key] + total if key in sums else total
        means = {
            key: (total / int(real.sum())).to(every[key])[None, None] for key, total in sums.items()
        }
        return replace(
            run,
            neurons={layer: NeuronRun(means[layer]) for layer in run.neurons},
            hooked={name: means[name] for name in run.hooked},
        )


def _of_real(z: Tensor, real: Bool[Tensor, "batch pos"]) -> Tensor:
    return z[real.to(z.device)]
