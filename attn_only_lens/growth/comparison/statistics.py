"""Compute statistics of components over a dataset, from float64 sums over batches.

**Divergence** of attention patterns: Jensen–Shannon, in bits (Lin, 1991),

    JS(P, Q) = H((P + Q) / 2) - (H(P) + H(Q)) / 2        H(P) = -Σ_k P_k log₂ P_k

The sum is over the keys k in one row of a pattern, and over the attention sink if the model has
one. For a neuron-head, the keys are its own token and the bias token.

**Outputs** are compared through Gram matrices. A head with activation z adds z W to the residual
stream, where W = W_O[h]; a neuron is a head with d_head = 1. Let J map coordinates of the
original's residual stream to those of the grown model's. Let C be the projection that removes the
mean if LayerNorms read the residual stream, and otherwise the identity. Then

    ⟨z W C J, z' W' C⟩ = z (W C J C W'ᵀ) z'ᵀ        ‖z W C‖² = z (W C Wᵀ) zᵀ

Three d_head × d_head matrices per head, or three values per neuron, therefore suffice for these
sums over tokens:

    cosine = Σ ⟨o, o'⟩ / √(Σ ‖o‖² Σ ‖o'‖²)         norm ratio = √(Σ ‖o'‖² / Σ ‖o‖²)

**Standard errors** are over prompts: if x_i is a mean over the tokens of prompt i, the mean is
Σ x_i / n, and the standard error is √((Σ x_i² - n mean²) / ((n - 1) n)).

**Silent neurons** have outputs that never exceed the rounding error of their layer's output:

    max_t |z_ti| ≤ ρ √(mean of z² over tokens and neurons)      ρ = `tolerances.rounding`

The gate of a silent neuron depends only on rounding errors. In ReLU models with LayerNorm, the
outputs of dead neurons were at most 6.6 machine epsilons times this root mean square. In five
trained models, the output of every neuron that fires reached at least 0.002 times this root mean
square.
"""

from collections.abc import Callable, Sequence
from math import log
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.circuits.weights.head_matrices import HeadMatrices
from attn_only_lens.devices import float32_if_half, to_float64_device
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.sites import LayerSites, resolve_sites
from attn_only_lens.growth.comparison.alignment import Alignment, SharedComponents
from attn_only_lens.growth.comparison.clean_runs import MODELS, CleanRun
from attn_only_lens.heads import host_of
from attn_only_lens.tolerances import rounding

_Floats: TypeAlias = npt.NDArray[np.float64]
_ROUNDINGS = 16  # a row sum up to this many eps below 1 is a rounding error, not a sink


def pattern_divergence(
    p: Float[Tensor, "*any key"], q: Float[Tensor, "*any key"]
) -> Float[Tensor, "*any"]:
    """Return the Jensen–Shannon divergence between rows of attention patterns, in bits.

    Half-precision rows are converted to float32, and each row is divided by its sum.

    Example:
        >>> import torch
        >>> one = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> pattern_divergence(one, one.flip(-1)).tolist()
        [1.0, 0.0]
    """
    p, q = _with_sink(p), _with_sink(q)
    entropy = torch.special.entr((p + q) / 2) - (torch.special.entr(p) + torch.special.entr(q)) / 2
    return (entropy.sum(-1) / log(2)).clamp(min=0)


def _with_sink(rows: Tensor) -> Tensor:
    """Return rows that sum to 1, with the weight of the attention sink as the last entry."""
    eps = torch.finfo(rows.dtype).eps
    rows = float32_if_half(rows)
    missing = 1 - rows.sum(-1, keepdim=True)
    rows = torch.cat([rows, torch.where(missing > _ROUNDINGS * eps, missing, 0.0)], dim=-1)
    return rows / rows.sum(-1, keepdim=True)


def gate_divergence(
    p: Float[Tensor, "*any head_index"], q: Float[Tensor, "*any head_index"]
) -> Float[Tensor, "*any head_index"]:
    """Return the divergence between the patterns of neurons, in bits, from their gates p and q.

    Example:
        >>> import torch
        >>> gate_divergence(torch.tensor([0.0, 0.25]), torch.tensor([1.0, 0.25])).tolist()
        [1.0, 0.0]
    """

    # The two terms are written out, because stacking them would copy the weights of all neurons.
    def entropy(weight: Tensor) -> Tensor:
        return torch.special.entr(weight) + torch.special.entr(1 - weight)

    p, q = float32_if_half(p), float32_if_half(q)
    divergence = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    return (divergence / log(2)).clamp(min=0)


_Directions: TypeAlias = Callable[[LayerSites], Float[Tensor, "site d_head d_model"]]


def _write_directions(model: Any) -> _Directions:
    """Return a function from sites to their W_O, which is centred if norms remove the mean."""
    is_centred, matrices = host_of(model).reads_centred(), HeadMatrices.of(model, fold_norms=False)

    def directions(sites: LayerSites) -> Float[Tensor, "site d_head d_model"]:
        W: Tensor = matrices.write_matrices(sites).B
        return W - W.mean(dim=-1, keepdim=True) if is_centred else W

    return directions


def _gram(
    one: Float[Tensor, "site d_head d_model"], second: Float[Tensor, "site d_head_2 d_model"]
) -> Float[Tensor, "site d_head d_head_2"]:
    return torch.einsum("sam,sbm->sab", one, second)


def _dot(
    z: Float[Tensor, "token site d_head"],
    gram: Float[Tensor, "site d_head d_head_2"],
    second: Float[Tensor, "token site d_head_2"],
) -> Float[Tensor, "site"]:
    """Return, for each pair of components, the dot product of their outputs, summed over tokens."""
    z, second = z.to(gram), second.to(gram)
    if gram.shape[1:] == (1, 1):  # neurons: multiply elementwise instead of as 1 × 1 matrices
        product = to_float64_device((z * second).squeeze(-1)).sum(0, dtype=torch.float64)
        return product * to_float64_device(gram[:, 0, 0]).double()
    product = (torch.einsum("tsa,sab->tsb", z, gram) * second).sum(-1)
    return to_float64_device(product).sum(0, dtype=torch.float64)


def _read(rows: Sequence[Sequence[Tensor]]) -> _Floats:
    """Copy measures to the CPU; `rows` has a list of measures [site] per layer and kind.

    The result is an array [measure, site]. Tensors are concatenated first, because each transfer
    synchronizes the device.
    """
    device = rows[0][0].device  # this device has float64
    stacked = [torch.stack([x.to(device).double() for x in measures]) for measures in rows]
    return torch.cat(stacked, dim=1).cpu().numpy()


def _divergences_by_prompt(
    one: CleanRun, second: CleanRun, pair: SharedComponents
) -> Float[Tensor, "site prompt"]:
    """Return each pair's pattern divergence on each prompt, averaged over non-padding tokens."""
    if pair.kind == "attention":
        p, q = one.patterns(pair.first), second.patterns(pair.second)
        divergence = pattern_divergence(p, q.to(p.device)).transpose(1, 2)
    else:
        p, q = one.gates(pair.first), second.gates(pair.second)
        divergence = gate_divergence(p, q.to(p.device))
    real = one.prompts.real.to(divergence.device).unsqueeze(-1)
    total = to_float64_device(divergence.where(real, 0.0)).sum(1, dtype=torch.float64)
    return (total / real.sum(1).to(total.device)).T


def _standard_error(total: _Floats, squares: _Floats, n: int) -> _Floats:
    """Return the standard error of a mean; NaN for one prompt."""
    if n < 2:
        return np.full_like(total, np.nan)
    return np.sqrt((squares - total**2 / n).clip(min=0) / ((n - 1) * n))


_NAMES = ["name", "grown_name", "kind", "layer", "grown_layer"]


class _SharedStatistics:
    """Sums and maxima of measures over batches, for the components that two models share."""

    def __init__(self, first: _Directions, second: _Directions, alignment: Alignment) -> None:
        self._shared, self._grams = alignment.shared, []
        for pair in alignment.shared:
            W_2 = second(pair.second)
            W = first(pair.first).to(W_2)
            kept = W_2[..., alignment.coordinates.to(W_2.device)]
            self._grams.append((_gram(W, kept), _gram(W, W), _gram(W_2, W_2)))
        names = [
            (*both, pair.kind, pair.first.layer, pair.second.layer)
            for pair in alignment.shared
            for both in zip(pair.first.names, pair.second.names, strict=True)
        ]
        self._names = pd.DataFrame(names, columns=_NAMES)
        self.sums = np.zeros((7, len(names)))
        self.maxima = np.zeros((4, len(names)))

    def measure(
        self, one: CleanRun, second_run: CleanRun, bar: "tqdm[Any]"
    ) -> tuple[_Floats, _Floats]:
        """Return the sums and maxima over a batch, and advance the progress bar."""
        rows, roundings = [], []
        for pair, (cross, first, second) in zip(self._shared, self._grams, strict=True):
            js = _divergences_by_prompt(one, second_run, pair)
            z, z_2 = one.z(pair.first), second_run.z(pair.second)
            products = [_dot(z, cross, z_2), _dot(z, first, z), _dot(z_2, second, z_2)]
            squares = [to_float64_device(_norm(x)).double() ** 2 for x in (z, z_2)]
            largest = [x.abs().amax((0, 2)) for x in (z, z_2)]
            rows.append([js.sum(1), (js**2).sum(1), *products, *squares, *largest])
            roundings.append(
                np.full((len(pair.first.names), 2), [rounding(z.dtype), rounding(z_2.dtype)])
            )
            bar.update()
        numbers = _read(rows)
        return numbers[:7], np.concatenate([numbers[7:], np.concatenate(roundings).T])

    def frame(self, n_prompts: int, n_tokens: int) -> pd.DataFrame:
        """Return a frame with one row per component: names, differences and a flag `silent`."""
        js, js_2, dot, norm_1, norm_2, *squares = self.sums
        n = n_prompts
        with np.errstate(divide="ignore", invalid="ignore"):  # a norm of outputs may be zero
            cosine = dot / np.sqrt(norm_1 * norm_2)
            ratio = np.sqrt(norm_2 / norm_1)
        silent = self._names["kind"] == "neuron"
        for square, largest, unit in zip(squares, self.maxima, self.maxima[2:], strict=False):
            layers = pd.Series(square).groupby([self._names["layer"], self._names["kind"]])
            silent &= largest <= unit * np.sqrt(layers.transform("mean") / n_tokens)
        return self._names.assign(
            divergence=js / n,
            divergence_se=_standard_error(js, js_2, n),
            cosine=cosine,
            norm_ratio=np.where(np.isinf(ratio), np.nan, ratio),
            silent=silent,
        )


def _norm(z: Float[Tensor, "token site d_head"]) -> Float[Tensor, "site"]:
    dtype = torch.promote_types(z.dtype, torch.float32)
    return torch.linalg.vector_norm(z, dim=(0, 2), dtype=dtype)


class _NewStatistics:
    """Sums for the new components of a grown model."""

    def __init__(self, directions: _Directions, new: Sequence[LayerSites]) -> None:
        self._new = new
        self._grams = [_gram(W, W) for W in map(directions, new)]
        self.sums = np.zeros((1, sum(len(sites.names) for sites in new)))

    def measure(self, run: CleanRun) -> _Floats:
        """Return the sums over a batch."""
        z = [(run.z(sites), gram) for sites, gram in zip(self._new, self._grams, strict=True)]
        rows = [[_dot(of_sites, gram, of_sites)] for of_sites, gram in z]
        return _read(rows) if rows else np.zeros_like(self.sums)

    def frame(self, n_tokens: int) -> pd.DataFrame:
        """Return a frame with each component's name and norm."""
        names = [(name, sites.kind, sites.layer) for sites in self._new for name in sites.names]
        return pd.DataFrame(names, columns=["grown_name", "kind", "grown_layer"]).assign(
            norm=np.sqrt(self.sums[0].clip(min=0) / n_tokens)
        )


_MEASURES = ("divergence", "divergence_se", "cosine", "norm_ratio")


class Statistics:
    """Statistics of an original, its grown model and, optionally, a null model (see `compare`)."""

    def __init__(self, models: Sequence[Any], alignment: Alignment) -> None:
        self._models = models
        self._sites = [resolve_sites(model, "all") for model in models]
        directions = list(map(_write_directions, models))
        alignments = [alignment, alignment.with_null(models[1].cfg.d_model)]
        self._shared = [
            _SharedStatistics(directions[i], directions[i + 1], alignments[i])
            for i in range(len(models) - 1)
        ]
        self._n_shared = len(alignment.shared)
        self._new = _NewStatistics(directions[1], alignment.new)
        self.n_prompts = self.n_tokens = 0

    @property
    def n_steps(self) -> int:
        """The number of progress-bar steps per batch."""
        return len(self._models) + len(self._shared) * self._n_shared

    def add(self, prompts: PromptPair, label: str, bar: "tqdm[Any]") -> None:
        """Run a batch through every model, and add its patterns and outputs to the sums."""
        runs = []
        for model, sites, name in zip(self._models, self._sites, MODELS, strict=False):
            bar.set_description(f"{label}: {name}")
            runs.append(CleanRun.of(model, prompts, sites))
            bar.update()
        # Change the sums only after all steps that can fail, so that a batch is never half added.
        bar.set_description(f"{label}: patterns and outputs")
        shared = [pair.measure(runs[i], runs[i + 1], bar) for i, pair in enumerate(self._shared)]
        new = self._new.measure(runs[1])
        for pair, (sums, maxima) in zip(self._shared, shared, strict=True):
            pair.sums += sums
            pair.maxima = np.maximum(pair.maxima, maxima)
        self._new.sums += new
        self.n_prompts += len(prompts.clean)
        self.n_tokens += int(prompts.real.sum())

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """Return frames of the original's components, of new components and of silent neurons."""
        counts = self.n_prompts, self.n_tokens
        old, *nulls = (pair.frame(*counts) for pair in self._shared)
        for null in nulls:
            for name in _MEASURES:  # outputs of silent neurons are rounding errors
                old[f"null_{name}"] = null[name].mask(null["silent"])
        silent = old.pop("silent")
        audible = old[~silent].reset_index(drop=True)
        silent_names = old.loc[silent, _NAMES].reset_index(drop=True)
        return audible, self._new.frame(self.n_tokens), silent_names
