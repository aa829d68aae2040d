"""What is kept of a dataset while it streams by: a few sums for each component, in float64.

The unit is a prompt, so that long prompts do not count for more and errors can be told: with x_i
the mean of a divergence over the tokens of prompt i, or the effect of a component in it,

    mean = Σ x_i / n        standard error = √((Σ x_i² - n mean²) / ((n - 1) n))

Outputs are summed over tokens (`outputs.py`). Eight numbers a component that both models have,
three for one that is new: nothing grows with the number of prompts.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.comparison.alignment import Aligned, Alignment
from attn_only_lens.comparison.measure import Measured, key_of
from attn_only_lens.comparison.outputs import Grams, Writers, squares
from attn_only_lens.comparison.overlap import Floats
from attn_only_lens.comparison.patterns import divergence, gate_divergence
from attn_only_lens.numerics import where_float64_is
from attn_only_lens.patching.sites import LayerSites

__all__ = ["NewSums", "PairSums"]


class PairSums:
    """Sums over components that two models have."""

    def __init__(self, first: Writers, second: Writers, alignment: Alignment) -> None:
        self._pairs = alignment.pairs
        self._grams = [
            Grams.of(first, second, pair, alignment.coordinates) for pair in alignment.pairs
        ]
        self._sums = [_zeros(8, pair.first) for pair in self._pairs]
        self._n_prompts = 0

    def add(self, one: Measured, other: Measured) -> None:
        """What both models did on a batch."""
        self._n_prompts += len(one.real)
        for pair, grams, sums in zip(self._pairs, self._grams, self._sums, strict=True):
            js = _divergences(one, other, pair)
            first, second = (
                _by_prompt(each, sites).to(js.device)
                for each, sites in ((one, pair.first), (other, pair.second))
            )
            device = grams.second.device
            outputs = grams.sums(one.z(pair.first).to(device), other.z(pair.second).to(device))
            found = [js, js**2, first, second, (second - first) ** 2]
            sums += torch.cat([torch.stack([x.sum(1) for x in found]).cpu(), outputs.cpu()])

    def frame(self) -> pd.DataFrame:
        """A row for each component: names in both models, and what differs."""
        frames = []
        for pair, sums in zip(self._pairs, self._sums, strict=True):
            js, js_2, first, second, change_2, dot, norm_1, norm_2 = sums.numpy()
            n = self._n_prompts
            with np.errstate(divide="ignore", invalid="ignore"):  # what writes nothing has none
                cosine = dot / np.sqrt(norm_1 * norm_2)
                ratio = np.sqrt(norm_2 / norm_1)
            frames.append(
                pd.DataFrame(
                    {
                        "name": pair.first.names,
                        "grown_name": pair.second.names,
                        "kind": pair.kind,
                        "layer": pair.first.layer,
                        "grown_layer": pair.second.layer,
                        "divergence": js / n,
                        "divergence_se": _error(js, js_2, n),
                        "cosine": cosine,
                        "norm_ratio": np.where(np.isinf(ratio), np.nan, ratio),
                        "attribution": first / n,
                        "grown_attribution": second / n,
                        "attribution_change": (second - first) / n,
                        "attribution_change_se": _error(second - first, change_2, n),
                    }
                )
            )
        return pd.concat(frames, ignore_index=True)


class NewSums:
    """Sums over components that one model has of its own."""

    def __init__(self, writers: Writers, sites: Sequence[LayerSites]) -> None:
        self._sites, self._writers = sites, writers
        self._sums = [_zeros(3, each) for each in sites]
        self._n_prompts = self._n_tokens = 0
        self._span = 0.0

    def add(self, one: Measured) -> None:
        """What the model did on a batch."""
        self._n_prompts += len(one.real)
        self._n_tokens += int(one.real.sum())
        self._span += (one.clean_value - one.corrupted_value) * len(one.real)
        for sites, sums in zip(self._sites, self._sums, strict=True):
            effect = _by_prompt(one, sites)
            written = squares(self._writers.rows(sites), one.z(sites))
            found = [effect.sum(1), (effect**2).sum(1), written.to(effect.device)]
            sums += torch.stack(found).cpu()

    @property
    def span(self) -> float:
        """The metric of the clean run less that of the other, the mean over prompts."""
        return self._span / self._n_prompts

    def frame(self) -> pd.DataFrame:
        """A row for each component: its name, what it writes and what it does."""
        columns = ["grown_name", "kind", "grown_layer"]
        columns += ["attribution", "attribution_se", "share", "norm"]
        frames = [pd.DataFrame(columns=columns)] * (not self._sites)
        for sites, sums in zip(self._sites, self._sums, strict=True):
            effect, effect_2, written = sums.numpy()
            n = self._n_prompts
            frames.append(
                pd.DataFrame(
                    {
                        "grown_name": sites.names,
                        "kind": sites.kind,
                        "grown_layer": sites.layer,
                        "attribution": effect / n,
                        "attribution_se": _error(effect, effect_2, n),
                        "share": effect / self._span,
                        "norm": np.sqrt(written.clip(min=0) / self._n_tokens),
                    }
                )
            )
        return pd.concat(frames, ignore_index=True)


def _zeros(rows: int, sites: LayerSites) -> Float[Tensor, "row site"]:
    return torch.zeros(rows, len(sites.names), dtype=torch.float64, device="cpu")


def _by_prompt(one: Measured, sites: LayerSites) -> Float[Tensor, "site batch"]:
    effects = one.effects[key_of(sites)]
    return where_float64_is(effects[sites.index.to(effects.device)]).sum(-1, dtype=torch.float64)


def _divergences(one: Measured, other: Measured, pair: Aligned) -> Float[Tensor, "site batch"]:
    """The mean over the real tokens of each prompt."""
    if pair.kind == "attention":
        mine, theirs = one.patterns(pair.first), other.patterns(pair.second)
        found = divergence(mine, theirs.to(mine.device)).transpose(1, 2)
    else:
        mine, theirs = one.gates(pair.first), other.gates(pair.second)
        found = gate_divergence(mine, theirs.to(mine.device)).mean(-1)
    real = one.real.to(found.device).unsqueeze(-1)
    total = where_float64_is(found.where(real, 0.0)).sum(1, dtype=torch.float64)  # [batch, site]
    return (total / real.sum(1).to(total.device)).T


def _error(total: Floats, squared: Floats, n: int) -> Floats:
    """The standard error of a mean; none of one prompt."""
    if n < 2:
        return np.full_like(total, np.nan)
    return np.sqrt((squared - total**2 / n).clip(min=0) / ((n - 1) * n))
