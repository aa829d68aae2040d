"""What is kept of a dataset while it streams by: a few sums for each component, in float64.

The unit is a prompt, so that long prompts do not count for more and errors can be told: with x_i
the mean of a divergence over the tokens of prompt i, or the effect of a component in it,

    mean = Σ x_i / n        standard error = √((Σ x_i² - n mean²) / ((n - 1) n))

Outputs are summed over tokens (`outputs.py`). Twelve numbers a component that both models have,
three for one that is new: nothing grows with the number of prompts.

A neuron is silent where on no token it puts out more than a rounding of what its layer does:

    max_t |z_ti| ≤ ρ √(mean of z² over tokens and neurons)      ρ: sixteen units in the last place

(`tolerances.rounding`; of half precision one of bfloat16). What it adds to the sum that the MLP
writes is then lost in that sum's own roundings, and its gate is a function of noise: the sign of a
ReLU's input of 1e-10, say. Dead neurons of ReLU models with LayerNorm, whose d_model grows, come to
at most .25 units of that root mean square, 2.3 in bfloat16 beside an outlier of 1000, and 6.6 where
the new rows of W_in are of size 1; the quietest neurons of five trained models that fire at all, on
four prompts, to .002 to 3.5 of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_only_lens.comparison.alignment import Aligned, Alignment
from attn_only_lens.comparison.measure import Measured, key_of
from attn_only_lens.comparison.outputs import Grams, Writers, squares
from attn_only_lens.comparison.overlap import Floats
from attn_only_lens.comparison.patterns import divergence, gate_divergence
from attn_only_lens.numerics import where_float64_is
from attn_only_lens.patching.sites import LayerSites
from attn_only_lens.tolerances import rounding

__all__ = ["NewSums", "PairSums"]


@dataclass(frozen=True, eq=False)
class _Found:
    """What a batch adds to the sums of components of one kind in one layer.

    Attributes:
        sums: of divergences, effects and outputs.
        loudest: the largest |z| of each in both models.
        squares: Σ z² of each in both models.
        rounding: of the numbers that z was computed in.
    """

    sums: Float[Tensor, "8 site"]
    loudest: Float[Tensor, "2 site"]
    squares: Float[Tensor, "2 site"]
    rounding: Float[Tensor, "2 1"]

    @classmethod
    def none(cls, n: int) -> "_Found":
        """Of no batch."""
        shapes = (8, n), (2, n), (2, n), (2, 1)
        return cls(*(torch.zeros(each, dtype=torch.float64, device="cpu") for each in shapes))

    def with_(self, other: "_Found") -> "_Found":
        """Of both."""
        return _Found(
            self.sums + other.sums,
            self.loudest.maximum(other.loudest),
            self.squares + other.squares,
            self.rounding.maximum(other.rounding),
        )


class PairSums:
    """Sums over components that two models have."""

    def __init__(self, first: Writers, second: Writers, alignment: Alignment) -> None:
        self._pairs = alignment.pairs
        self._grams = [
            Grams.of(first, second, pair, alignment.coordinates) for pair in alignment.pairs
        ]
        self._found = [_Found.none(len(pair.first.names)) for pair in self._pairs]
        self._n_prompts = self._n_tokens = 0

    def of(self, one: Measured, other: Measured) -> list[_Found]:
        """What both models did on a batch, by layer and kind."""
        found = []
        for pair, grams in zip(self._pairs, self._grams, strict=True):
            js = _divergences(one, other, pair)
            first, second = (
                _by_prompt(each, sites).to(js.device)
                for each, sites in ((one, pair.first), (other, pair.second))
            )
            device = grams.second.device
            z = one.z(pair.first), other.z(pair.second)
            outputs = grams.sums(z[0].to(device), z[1].to(device))
            each = [js, js**2, first, second, (second - first) ** 2]
            sums = torch.cat([torch.stack([x.sum(1) for x in each]).cpu(), outputs.cpu()])
            loudest = torch.stack([x.abs().amax((0, 2)).cpu().double() for x in z])
            squares = torch.stack([_norms(x).cpu().double() ** 2 for x in z])
            lost = torch.tensor([[rounding(x.dtype)] for x in z], dtype=torch.float64, device="cpu")
            found.append(_Found(sums, loudest, squares, lost))
        return found

    def add(self, found: list[_Found], real: Bool[Tensor, "batch pos"]) -> None:
        """Take a batch in. Nothing here can fail: no batch is half in the sums."""
        self._n_prompts += len(real)
        self._n_tokens += int(real.sum())
        self._found = [a.with_(b) for a, b in zip(self._found, found, strict=True)]

    def frame(self) -> pd.DataFrame:
        """A row for each component: names in both models, what differs, whether it is silent."""
        frames = []
        for pair, found in zip(self._pairs, self._found, strict=True):
            js, js_2, first, second, change_2, dot, norm_1, norm_2 = found.sums.numpy()
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
                        "silent": self._silent(pair, found),
                    }
                )
            )
        return pd.concat(frames, ignore_index=True)

    def _silent(self, pair: Aligned, found: _Found) -> npt.NDArray[np.bool_]:
        """Which neurons put out nothing but roundings in both models."""
        size = (found.squares.mean(1, keepdim=True) / self._n_tokens).sqrt()
        silent = (found.loudest <= found.rounding * size).all(0)
        return (silent & (pair.kind == "neuron")).numpy()


class NewSums:
    """Sums over components that one model has of its own."""

    def __init__(self, writers: Writers, sites: Sequence[LayerSites]) -> None:
        self._sites, self._writers = sites, writers
        self._sums = [
            torch.zeros(3, len(each.names), dtype=torch.float64, device="cpu") for each in sites
        ]
        self._n_prompts = self._n_tokens = 0
        self._span = 0.0

    def of(self, one: Measured) -> list[Float[Tensor, "3 site"]]:
        """What the model did on a batch, by layer and kind."""
        found = []
        for sites in self._sites:
            effect = _by_prompt(one, sites)
            written = squares(self._writers.rows(sites), one.z(sites))
            each = [effect.sum(1), (effect**2).sum(1), written.to(effect.device)]
            found.append(torch.stack(each).cpu())
        return found

    def add(self, found: list[Float[Tensor, "3 site"]], one: Measured) -> None:
        """Take a batch in. Nothing here can fail: no batch is half in the sums."""
        self._n_prompts += len(one.real)
        self._n_tokens += int(one.real.sum())
        self._span += (one.clean_value - one.corrupted_value) * len(one.real)
        for each, sums in zip(found, self._sums, strict=True):
            sums += each

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


def _norms(z: Float[Tensor, "token site d_head"]) -> Float[Tensor, "site"]:
    """√Σ z² of each, in no less than float32."""
    dtype = torch.promote_types(z.dtype, torch.float32)
    return torch.linalg.vector_norm(z, dim=(0, 2), dtype=dtype)


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
