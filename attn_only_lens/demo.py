"""The demo: convert the shipped model, verify it, and show what its neuron-heads attend to.

Nanda et al. (2023) found that the neurons of a network which has learnt addition modulo p are
periodic in both inputs, with a few key frequencies. Seen as heads, its neurons therefore attend to
themselves periodically: the weight that '=' gives to itself, rather than to the bias token, is a
wave over (a, b).
"""

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import SELF
from attn_only_lens.convert import convert
from attn_only_lens.heads import HeadName, point_name
from attn_only_lens.pretrained import modular_addition, modular_addition_tokens
from attn_only_lens.pretrained.modular_addition import MODULUS
from attn_only_lens.tl import HookedTransformer
from attn_only_lens.two_blocks import AttentionOnlyTransformer
from attn_only_lens.verify import Verification, verify

__all__ = ["Demo", "periodicity", "run", "self_weights"]

PERIODIC = 0.85  # of the variance explained by one frequency: Nanda et al.'s criterion


@dataclass(frozen=True)
class Demo:
    """What the demo found.

    Attributes:
        verification: the converted model against its source, on every input of the task.
        neuron_heads: a row for each neuron-head: `name`, `frequency` k (waves over the 113
            numbers), `period` 113 / k, `explained` (fraction of the variance of its self weight
            over all (a, b) that frequency k carries), `lowest` and `highest` self weight.
        untrained: the same table for the model with random weights, as a control.
        grids: the self weight of every neuron-head at '=', over (a, b).
    """

    verification: Verification
    neuron_heads: pd.DataFrame
    untrained: pd.DataFrame
    grids: Float[Tensor, "neuron a b"]

    @property
    def key_frequencies(self) -> list[int]:
        """Frequencies of the periodic neuron-heads, the most frequent first."""
        periodic = self.neuron_heads.query("explained > @PERIODIC")
        return [int(k) for k in periodic["frequency"].value_counts().index]

    def clearest(self) -> pd.DataFrame:
        """For each key frequency, how many neuron-heads it has, and the one that shows it best."""
        periodic = self.neuron_heads.query("explained > @PERIODIC")
        best = periodic.loc[periodic.groupby("frequency")["explained"].idxmax()]
        best = best.assign(neuron_heads=best["frequency"].map(periodic["frequency"].value_counts()))
        return best.sort_values("neuron_heads", ascending=False, kind="stable", ignore_index=True)


def run() -> Demo:
    """Convert, verify and measure; a few seconds."""
    source, tokens = modular_addition(), modular_addition_tokens()
    converted = convert(source)
    grids = self_weights(converted)
    return Demo(
        verification=verify(source, converted, tokens),
        neuron_heads=periodicity(grids),
        untrained=periodicity(self_weights(convert(_untrained(source)))),
        grids=grids,
    )


def _untrained(model: HookedTransformer) -> HookedTransformer:
    """The same architecture with random weights, as training began."""
    fresh = modular_addition()
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if ".b_" not in name:
                parameter.normal_(std=model.cfg.initializer_range, generator=generator)
    return fresh


@torch.no_grad()
def self_weights(model: AttentionOnlyTransformer) -> Float[Tensor, "neuron a b"]:
    """How much '=' attends to itself in every neuron-head of layer 0, for every (a, b)."""
    hook = point_name(model, 0, "neuron", "pattern")
    _, cache = model.run_with_cache(modular_addition_tokens(), names_filter=hook)
    at_equals = cache[hook][:, :, -1, SELF]  # [batch, head_index]
    return at_equals.T.reshape(-1, MODULUS, MODULUS)


def periodicity(grids: Float[Tensor, "neuron a b"]) -> pd.DataFrame:
    """The frequency that explains most of each grid's variance, and how much.

    Frequency k is the span of the waves of a, of b, and of both at k: the nine entries
    (0 or ±k, 0 or ±k) of the 2-D Fourier transform, the constant left out.
    """
    centred = grids.double() - grids.double().mean(dim=(1, 2), keepdim=True)
    power = torch.fft.fft2(centred).abs() ** 2
    share = []
    for k in range(1, MODULUS // 2 + 1):
        entries = torch.tensor([0, k, MODULUS - k], device=power.device)
        share.append(power[:, entries[:, None], entries].sum(dim=(1, 2)))
    explained, best = (torch.stack(share) / power.sum(dim=(1, 2))).nan_to_num(0.0).max(dim=0)
    frequency = best + 1
    return pd.DataFrame(
        {
            "name": [str(HeadName(0, "neuron", i)) for i in range(len(grids))],
            "frequency": frequency.tolist(),
            "period": (MODULUS / frequency).tolist(),
            "explained": explained.tolist(),
            "lowest": grids.amin(dim=(1, 2)).tolist(),
            "highest": grids.amax(dim=(1, 2)).tolist(),
        }
    )
