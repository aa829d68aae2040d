"""How far one attention pattern is from another: the Jensen–Shannon divergence, in bits.

    JS(P, Q) = H((P + Q) / 2) - (H(P) + H(Q)) / 2        H(P) = -Σ_k P_k log₂ P_k

is 0 where two rows are the same and 1 where they share no key, symmetric, and finite whatever is
zero (Lin, "Divergence measures based on the Shannon entropy", 1991). A row has its keys for
outcomes, and one more where a sink takes what the keys leave; a neuron-head has two, the token
itself and the bias token.

What heads write, compared without writing it: dot products by way of Gram matrices.

A head h that puts out z, a row, writes z W with W = W_O[h]; a neuron is a head of one coordinate,
whose W is its row of W_out. With J the map that puts a coordinate of the original's stream where it
is in the grown one's, and C the projection that takes the mean away,

    ⟨z W C J, z' W' C⟩ = z (W C J C W'ᵀ) z'ᵀ        ‖z W C‖² = z (W C Wᵀ) zᵀ

so three matrices of d_head × d_head a head, three numbers a neuron, give the dot product and both
norms of any token: nothing of size heads × d_model or neurons × d_model arises per token. C is
there where the norms that read the stream are LayerNorms, which do not see the mean (growth under
LayerNorm takes it out of the weights), and the identity elsewhere. Coordinates that are new count:
what a head writes there is a difference.

Over a set of tokens, outputs are one long vector each, so that

    cosine = Σ ⟨o, o'⟩ / √(Σ ‖o‖² Σ ‖o'‖²)         norm ratio = √(Σ ‖o'‖² / Σ ‖o‖²)

with tokens weighed by how much is written there, and sums are all that is kept.

What is kept of a dataset while it streams by: a few sums for each component, in float64.

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

What streams over the dataset: every batch through every model, into the sums of each pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_only_lens.circuits.head_weights import Weights
from attn_only_lens.comparison.alignment import Aligned, Alignment
from attn_only_lens.comparison.batches import Batch
from attn_only_lens.comparison.circuits import Floats, Names
from attn_only_lens.comparison.measure import Measured, key_of, measured
from attn_only_lens.heads import host_of
from attn_only_lens.numerics import where_float64_is
from attn_only_lens.runs.sites import LayerSites, all_heads, resolve
from attn_only_lens.tolerances import rounding

__all__ = [
    "Grams",
    "NewSums",
    "PairSums",
    "Streamed",
    "Writers",
    "divergence",
    "gate_divergence",
    "squares",
]

_ROUNDINGS = 16  # of a row's sum: what is missing beyond them is a sink's


def divergence(p: Float[Tensor, "*any key"], q: Float[Tensor, "*any key"]) -> Float[Tensor, "*any"]:
    """The divergence of rows of attention patterns, in bits.

    Rows in half precision are computed in float32, and each is divided by its sum.

    Example:
        >>> import torch
        >>> one = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> divergence(one, one.flip(-1)).tolist()
        [1.0, 0.0]
    """
    return _bits(_whole(p), _whole(q))


def gate_divergence(
    p: Float[Tensor, "*any head_index"], q: Float[Tensor, "*any head_index"]
) -> Float[Tensor, "*any head_index"]:
    """The divergence of neuron-heads, from the weight of each on its own token, in bits.

    Example:
        >>> import torch
        >>> gate_divergence(torch.tensor([0.0, 0.25]), torch.tensor([1.0, 0.25])).tolist()
        [1.0, 0.0]
    """
    # Two outcomes by hand: stacked, they would be a copy of all neurons.
    p, q = _wide(p), _wide(q)
    m = (p + q) / 2
    spread = _entropy(m) - (_entropy(p) + _entropy(q)) / 2
    return (spread / log(2)).clamp(min=0)


def _entropy(weight: Tensor) -> Tensor:
    """Of two outcomes, in nats."""
    return torch.special.entr(weight) + torch.special.entr(1 - weight)


def _bits(p: Tensor, q: Tensor) -> Tensor:
    halves = (torch.special.entr(p) + torch.special.entr(q)) / 2
    return ((torch.special.entr((p + q) / 2) - halves).sum(-1) / log(2)).clamp(min=0)


def _whole(rows: Tensor) -> Tensor:
    """Rows that sum to 1, with an outcome more for what a sink takes."""
    eps = torch.finfo(rows.dtype).eps
    rows = _wide(rows)
    left = 1 - rows.sum(-1, keepdim=True)
    rows = torch.cat([rows, torch.where(left > _ROUNDINGS * eps, left, 0.0)], dim=-1)
    return rows / rows.sum(-1, keepdim=True)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@dataclass(frozen=True, eq=False)
class Writers:
    """What the heads of a model write along, as readers see it.

    Attributes:
        weights: of the model, as they stand.
        centred: whether every norm that reads the stream takes the mean away.
    """

    weights: Weights
    centred: bool

    @classmethod
    def of(cls, model: Any) -> "Writers":
        """The writers of a model.

        Raises:
            CircuitError: norms or matrices of a bridge that are not known.
        """
        norms = [
            norm for each in host_of(model).norms() for norm in (each.attention[0], each.neuron[0])
        ]
        return cls(Weights.of(model, fold_norms=False), all(norm.centres for norm in norms))

    def rows(self, sites: LayerSites) -> Float[Tensor, "site d_head d_model"]:
        """W C of each site."""
        W: Tensor = self.weights.writes(sites).B
        return W - W.mean(dim=-1, keepdim=True) if self.centred else W


@dataclass(frozen=True, eq=False)
class Grams:
    """The three Gram matrices of heads of one kind in one layer, of two models.

    Attributes:
        cross: W C J C W'ᵀ.
        first: W C Wᵀ.
        second: W' C W'ᵀ.
    """

    cross: Float[Tensor, "site d_head d_head_2"]
    first: Float[Tensor, "site d_head d_head"]
    second: Float[Tensor, "site d_head_2 d_head_2"]

    @classmethod
    def of(
        cls, first: Writers, second: Writers, pair: Aligned, coordinates: Int[Tensor, "d_model"]
    ) -> "Grams":
        """Those of components that two models have.

        Args:
            first: what those of the first model write along.
            second: what those of the second do.
            pair: which.
            coordinates: where those of the first one's stream are in the second one's.
        """
        one, other = first.rows(pair.first), second.rows(pair.second)
        one, shared = one.to(other), other[..., coordinates.to(other.device)]
        return cls(_products(one, shared), _products(one, one), _products(other, other))

    def sums(
        self, z: Float[Tensor, "*token site d_head"], other: Float[Tensor, "*token site d_head_2"]
    ) -> Float[Tensor, "3 site"]:
        """Σ ⟨o, o'⟩, Σ ‖o‖² and Σ ‖o'‖² over tokens, in float64."""
        z, other = (x.flatten(0, -3).to(self.second) for x in (z, other))
        found = [
            _dot(z, self.cross, other),
            _dot(z, self.first, z),
            _dot(other, self.second, other),
        ]
        return torch.stack(found)


def squares(
    rows: Float[Tensor, "site d_head d_model"], z: Float[Tensor, "*token site d_head"]
) -> Float[Tensor, "site"]:
    """Σ ‖o‖² over tokens, in float64."""
    z = z.flatten(0, -3).to(rows)
    return _dot(z, _products(rows, rows), z)


def _products(one: Tensor, other: Tensor) -> Tensor:
    return torch.einsum("sam,sbm->sab", one, other)


def _dot(z: Tensor, gram: Tensor, other: Tensor) -> Float[Tensor, "site"]:
    if gram.shape[1:] == (1, 1):  # neurons: the matrix product would be as many of size 1
        written = where_float64_is((z * other).squeeze(-1)).sum(0, dtype=torch.float64)
        return written * where_float64_is(gram[:, 0, 0]).double()
    moved = torch.einsum("tsa,sab->tsb", z, gram)
    return where_float64_is((moved * other).sum(-1)).sum(0, dtype=torch.float64)


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


_NAMES = ("name", "grown_name", "kind", "layer", "grown_layer")
_MEASURES = ("divergence", "divergence_se", "cosine", "norm_ratio")
_CHANGES = ("attribution_change", "attribution_change_se")


class Streamed:
    """Sums over a dataset, of an original, what grew from it and, if there is one, a null."""

    def __init__(self, models: Sequence[Any], alignment: Alignment) -> None:
        self._models, self._alignment = models, alignment
        self._sites = [resolve(each, all_heads()) for each in models]
        writers = [Writers.of(each) for each in models]
        alignments = [alignment, alignment.of_second(models[1].cfg.d_model)]
        self._pairs = [
            PairSums(writers[i], writers[i + 1], alignments[i]) for i in range(len(models) - 1)
        ]
        self._new = [NewSums(each, alignment.new) for each in writers[1:]]
        self._values = np.zeros((len(models), 2))
        self._n_prompts = self._n_tokens = 0
        self._metric = ""

    def add(self, batch: Batch) -> list[Measured]:
        """Run a batch through every model.

        Returns:
            What each did.
        """
        runs = [
            measured(model, batch, sites)
            for model, sites in zip(self._models, self._sites, strict=True)
        ]
        # All that can fail first: what an error stops has whole batches in its sums.
        old = [pair.of(runs[i], runs[i + 1]) for i, pair in enumerate(self._pairs)]
        new = [each.of(run) for each, run in zip(self._new, runs[1:], strict=True)]
        for pair, found in zip(self._pairs, old, strict=True):
            pair.add(found, runs[0].real)
        for each, sums, run in zip(self._new, new, runs[1:], strict=True):
            each.add(sums, run)
        n_prompts = len(batch.pair.clean)
        self._values += [[n_prompts * v for v in (r.clean_value, r.corrupted_value)] for r in runs]
        self._n_prompts += n_prompts
        self._n_tokens += int(batch.pair.real.sum())
        self._metric = runs[0].metric
        return runs

    def names(self, batch: Batch) -> list[Names]:
        """For each model its components, by what they are called in the grown one."""
        own = self._sites[1]
        names = [name for each in own for name in each.names]
        n_pos = batch.pair.clean.shape[1]
        first = [pair.first for pair in self._alignment.pairs]
        called = [pair.second.names for pair in self._alignment.pairs]
        found = [Names.of(first, called, names, n_pos)]
        for sites in self._sites[1:]:
            found.append(Names.of(sites, [each.names for each in own], names, n_pos))
        return found

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """A row for each component of the original, for each that is new, for each silent one."""
        old, new = self._pairs[0].frame(), self._new[0].frame()
        if len(self._pairs) > 1:
            null = self._pairs[1].frame()
            for name in (*_MEASURES, *_CHANGES):
                # Of what is silent in both, patterns and outputs are noise.
                noise = null["silent"] & (name in _MEASURES)
                old[f"null_{name}"] = null[name].mask(noise)
            old["null_attribution"] = null["grown_attribution"]
            for name in ("attribution", "share"):
                new[f"null_{name}"] = self._new[1].frame()[name]
        silent = old.pop("silent")
        kept, left = (old[each].reset_index(drop=True) for each in (~silent, silent))
        return kept, new, left[list(_NAMES)]

    def about(self) -> dict[str, Any]:
        """What was compared, and on what."""
        labels = ("original", "grown", "null")
        values = zip(labels, (self._values / self._n_prompts).tolist(), strict=False)
        return {
            "model": str(getattr(self._models[0].cfg, "model_name", "")),
            "metric": self._metric,
            "n_prompts": self._n_prompts,
            "n_tokens": self._n_tokens,
            "values": {label: {"clean": c, "corrupted": o} for label, (c, o) in values},
        }
