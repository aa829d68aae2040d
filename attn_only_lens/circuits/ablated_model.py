r"""Ablate all sites outside a circuit, and measure how much of the metric the circuit keeps.

Sites are attention heads and neuron-heads at positions (the rows of a `Sweep`), or at roles (one
token in each prompt). At sites outside the circuit, the head's output z is replaced by

    "zero"             0
    "mean"             its mean over all tokens of the clean prompts, without padding
    "positional_mean"  its mean over the clean prompts at the same position, or role
    "resample"         its value in the corrupted run, at the same position

Only sites are ablated; the embedding, the biases, and all other heads and positions never are. Many
circuits are run as one batch (`engine/replay`). Let m be the metric, M all sites and C a circuit:

    faithfulness    f(C) = (m(C) - m(∅)) / (m(M) - m(∅))
    completeness    f(M \ C), the faithfulness of all other sites: near 0 if nothing was missed
    error           Σ_p |m_p(C) - m_p(M)| / Σ_p |m_p(M) - m_p(∅)|, over prompts p

The first two are from Marks et al., "Sparse Feature Circuits", 2024. The error is the mean of
|f_p(C) - 1| over prompts, weighted by |m_p(M) - m_p(∅)|: a faithfulness near 1 can hide prompts
that overshoot and prompts that fall short. For one prompt, the error is |f(C) - 1|. Let g be the
gradient of the error at a site's z when all sites outside C are ablated. Then the site adds, to
first order, g · (z - ablated z) to the error.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, cast, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.ablated_points import Floats, Rows, ablated_points, digest
from attn_only_lens.circuits.kept_heads import KeptHeads
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.edit_checks import require_edits_read
from attn_only_lens.engine.gradients import Tape
from attn_only_lens.engine.interventions import ablate
from attn_only_lens.engine.metrics import AnyMetric, as_metric, bind
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.positions import (
    PositionSet,
    length_reasons,
    resolve_positions,
)
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import NeuronRun, Recording, record_pair
from attn_only_lens.engine.replay import Variants, make_replay
from attn_only_lens.engine.sites import sites_of_rows
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.prompt_chunks import prompts_per_chunk
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.run_patches import Batching
from attn_only_lens.patching.site_groups import split_prompts
from attn_only_lens.storage.chunks import ChunkStore
from attn_only_lens.work import Work

Ablation = Literal["zero", "mean", "positional_mean", "resample"]
ABLATIONS: tuple[Ablation, ...] = get_args(Ablation)
Order = Literal["magnitude", "signed"]
ORDERS: tuple[Order, ...] = get_args(Order)
# ablations whose values for a prompt do not depend on other prompts
_BY_PROMPT = ("zero", "resample")
# How many circuits are run by their heads alone, and how small they are, relative to all sites.
_SEVERAL, _SMALL = 4, 8
_NOTHING: Rows = np.empty(0, dtype=np.int64)  # the circuit without sites
_PROBLEM = "these sites cannot be ablated"


class AblatedModel:
    """A model in which all sites outside a circuit are ablated.

    `whole` is the metric with no site ablated. With a `store`, results are kept in a folder, and
    nothing that the folder has is computed again.
    """

    store: ChunkStore | None = None

    def __init__(
        self,
        model: Any,
        pair: PromptPair,
        metric: AnyMetric,
        sites: pd.DataFrame,
        *,
        ablation: Ablation,
        on_done: Callable[[int], object] = lambda n: None,
    ) -> None:
        """Record the clean and the corrupted run, and run the clean prompts with all sites ablated.

        `sites` are rows of `Sweep.frame`. `on_done` is called with the number of newly finished
        circuits.
        """
        InputError.raise_if(reasons_not_to_run(model), "this model cannot be ablated")
        sites = sites.reset_index(drop=True)
        self.n_sites, self._n_pos, self.prompts = len(sites), pair.clean.shape[1], pair.indices
        roles = checked_places(pair, sites)
        groups = sites_of_rows(model, sites)
        runs = record_pair(model, pair, metric, groups, "z", distinct=pair.among is None)
        self.sites = sites
        source = ablated_run(runs.clean, runs.corrupted, ablation, pair, roles)
        self._points = ablated_points(model, source, sites, roles)
        self._replay = make_replay(model, runs.clean, runs.metric)
        tested = self._replay.tested
        for name, layers in sites.groupby("kind", observed=True)["layer"].unique().items():
            kind = cast("HeadKind", name)
            require_edits_read(model, runs.clean, kind, layers.tolist(), "z", tested)
        differ = ((pair.clean != pair.corrupted) & pair.real).any(dim=0)
        first_change = int(differ.int().argmax()) if ablation == "resample" else 0
        self._first = self._replay.start(0, first_change)
        self._batching = Batching(model, None, on_done, self._replay.numbers_per_token)
        self.whole, self.whole_by_prompt = runs.clean_value, runs.clean_values.cpu().numpy()

    @cached_property
    def weights(self) -> Float[np.ndarray, "prompt"]:
        """The weight of each prompt in the mean; one weight for a metric with one value for all."""
        return np.array(self._replay.metric.shares(len(self.whole_by_prompt)))

    @cached_property
    def nothing_by_prompt(self) -> Float[np.ndarray, "prompt"]:
        """The metric of each prompt with every site ablated."""
        return self.by_prompt([_NOTHING])[0]

    @cached_property
    def nothing(self) -> float:
        """The metric with every site ablated."""
        return float(self._mean(self.nothing_by_prompt))

    @cached_property
    def span(self) -> float:
        """The metric of the whole model minus the metric with every site ablated."""
        span = self.whole - self.nothing
        if not abs(span) > 1e-6 * max(abs(self.whole), abs(self.nothing)):
            reason = (
                f"the metric is {self.whole} for the whole model and {self.nothing} with every "
                "site ablated; expected sites, an ablation and a metric for which the values differ"
            )
            raise InputError([reason], _PROBLEM)
        return span

    def ranked(self, ranking: Sweep, order: Order, effects: Floats | None = None) -> Rows:
        """Return row indices sorted by |effect| or signed effect, from `effects` or `ranking`."""
        effect = ranking.effect.to_numpy() if effects is None else effects
        if order == "magnitude":
            return np.argsort(-abs(effect), kind="stable")
        return np.argsort(-effect * self.helps(ranking), kind="stable")

    def helps(self, ranking: Sweep) -> float:
        """Return 1 if sites with positive effects help the clean run, or -1 if they harm it."""
        # The metric's clean minus corrupted value and `self.span` may have opposite signs.
        span = ranking.clean_value - ranking.corrupted_value
        # In a `Sweep`, the score rises if a patch adds a useful site, and falls if it removes one.
        return float(np.sign(span * self.span) * (1 if ranking.baseline == 0 else -1))

    def faithfulness(self, circuits: Sequence[Rows]) -> Float[np.ndarray, "circuit"]:
        """Return the faithfulness of each circuit, given as row indices of its sites."""
        return self.faithfulness_and_error(circuits)[0]

    def faithfulness_and_error(self, circuits: Sequence[Rows]) -> tuple[Floats, Floats]:
        """Return the faithfulness and the error of each circuit, given as rows of its sites."""
        new = [] if "nothing_by_prompt" in vars(self) else [_NOTHING]
        by_prompt = self.by_prompt([*new, *circuits])
        if new:  # the empty circuit is in the same batch, which saves a pass
            self.nothing_by_prompt, by_prompt = by_prompt[0], by_prompt[1:]
        faithfulness = (self._mean(by_prompt) - self.nothing) / self.span
        return faithfulness, self.errors(by_prompt)

    @cached_property
    def error_of_nothing(self) -> float:
        """The weighted mean over prompts of |m(∅) - m(M)|, in units of the metric."""
        return float(self.weights @ abs(self.whole_by_prompt - self.nothing_by_prompt))

    def errors(
        self, by_prompt: Float[np.ndarray, "circuit prompt"]
    ) -> Float[np.ndarray, "circuit"]:
        """Return each circuit's error, from its metric on each prompt."""
        return (abs(by_prompt - self.whole_by_prompt) @ self.weights) / self.error_of_nothing

    def curves(
        self, circuits: Sequence[Rows], n_random: int = 0, seed: int = 0
    ) -> tuple[Floats, Floats, Float[np.ndarray, "random circuit"]]:
        """Return the faithfulness of circuits, of their complements, and of random circuits."""
        every = np.arange(self.n_sites)
        others = [np.delete(every, circuit) for circuit in circuits]
        generator = np.random.default_rng(seed)
        orders = [generator.permutation(self.n_sites) for _ in range(n_random)]
        random = [order[: len(circuit)] for order in orders for circuit in circuits]
        n = len(circuits)
        values = self.faithfulness([*circuits, *others, *random])
        return values[:n], values[n : 2 * n], values[2 * n :].reshape(n_random, n)

    def worth(self, circuit: Rows) -> Float[np.ndarray, "site"]:
        """Return how much each site lowers a circuit's error, to first order.

        For one prompt with f(C) < 1, this is the site's contribution to f(C).
        """
        return self._stored("worth", [circuit], lambda: self._worth(circuit))

    def _worth(self, circuit: Rows) -> Float[np.ndarray, "site"]:
        return self.slopes(circuit, self.fit(slice(None)))[1]

    def fit(self, some: slice) -> Callable[[Float[Tensor, "prompt"]], Float[Tensor, ""]]:
        """Return a function that computes minus the error from the metric of some prompts."""
        weights = self.weights[some] / self.error_of_nothing
        whole = self.whole_by_prompt[some]

        def fit(values: Float[Tensor, "prompt"]) -> Float[Tensor, ""]:
            scale, target = (torch.from_numpy(x).to(values) for x in (weights, whole))
            return -((values - target).abs() * scale).sum()

        return fit

    def slopes(
        self, circuit: Rows, loss: Callable[[Float[Tensor, "prompt"]], Float[Tensor, ""]]
    ) -> tuple[float, Float[np.ndarray, "site"]]:
        """Return a circuit's loss, and each site's first-order contribution to the loss."""
        computed, first = dict[str, Tensor](), self._first
        mlps = self._kept_heads.traced(circuit) if self._are_small([circuit]) else {}
        replaced = [(mlp.module, mlp.forward) for mlp in mlps.values()]
        with torch.enable_grad():
            tape = Tape(point.name for point in self._points if point.name not in mlps)
            stream = self._replay.recorded_stream(0, first, 1).requires_grad_()
            hooks = [*self._points.hooks([circuit], first, computed), *tape.hooks]
            logits = self._replay.logits(Variants(0, first, stream, hooks, replaced=replaced))
            (values,) = self._replay.metric.of_prompts(logits[None])
            value = loss(values)
            gradients = tape.gradients(value, {name: mlp.output for name, mlp in mlps.items()})
        for name, mlp in mlps.items():
            computed[name], gradients[name] = mlp.z, mlp.back(gradients[name])
        adds = []
        for point in self._points:
            change = computed[point.name] - point.replacement[:, first:]
            add = to_float64_device(gradients[point.name] * change).double().sum(dim=-1)
            add = add.sum(dim=0, keepdim=True) if len(point.place_of) == 1 else add
            adds.append(add.to(to_float64_device(stream).device))
        sizes = [add.numel() for add in adds]
        flat = torch.cat([add.flatten() for add in adds]).cpu().split(sizes)
        by_site = np.zeros(self.n_sites)
        for point, of_point in zip(self._points, flat, strict=True):
            by_head = of_point.view(-1, self._n_pos - self._first, point.replacement.shape[2])
            by_site[point.rows] = point.by_site(by_head.numpy(), self._first)
        return float(value.detach()), by_site

    def _mean(self, by_prompt: Float[np.ndarray, "*circuit prompt"]) -> Floats:
        """Return the mean over prompts, weighted by the metric's prompt weights."""
        return self._replay.metric.mean(torch.from_numpy(by_prompt)).numpy()

    def by_prompt(self, circuits: Sequence[Rows]) -> Float[np.ndarray, "circuit prompt"]:
        """Return each prompt's metric when all sites outside a circuit are ablated."""
        return self._stored("by_prompt", circuits, lambda: self._by_prompt(circuits))

    def _stored(self, name: str, circuits: Sequence[Rows], compute: Callable[[], Floats]) -> Floats:
        """Return what is stored about circuits, or compute it and store it."""
        if self.store is None:
            return compute()
        key = f"{name}-{digest(circuits, self.prompts)}"
        if (arrays := self.store.get(key)) is None:
            arrays = {name: compute()}
            self.store.put(key, arrays)
        return arrays[name]

    @torch.no_grad()
    def _by_prompt(self, circuits: Sequence[Rows]) -> Float[np.ndarray, "circuit prompt"]:
        n_prompts = len(self.whole_by_prompt)
        values = torch.empty(len(circuits), n_prompts, dtype=torch.float64, device="cpu")

        small = self._are_small(circuits)

        def run(chosen: Tensor) -> Tensor:
            some = [circuits[i] for i in chosen.tolist()]
            stream = self._replay.recorded_stream(0, self._first, len(chosen))
            if small:
                return self._replay.values(self._kept_heads.variants(some, stream))
            hooks = self._points.hooks(some, self._first)
            return self._replay.values(Variants(0, self._first, stream, hooks))

        every = torch.arange(len(circuits), device="cpu")
        per_variant = self._replay.numbers_per_variant(self._first)
        self._batching.fill(values, every, per_variant, run)
        return values.numpy()

    def _are_small(self, circuits: Sequence[Rows]) -> bool:
        """Return whether it pays to run only the heads that circuits keep."""
        several = len(circuits) >= _SEVERAL or "_kept_heads" in vars(self)
        return several and max(map(len, circuits), default=self.n_sites) * _SMALL <= self.n_sites

    @cached_property
    def _kept_heads(self) -> KeptHeads:
        return KeptHeads(self._replay, self._points, self._first)


def ablated_run(
    clean: Recording,
    corrupted: Recording,
    ablation: Ablation,
    pair: PromptPair,
    roles: Sequence[PositionSet],
) -> Recording:
    """Return a run that has, at every site, the output that the site has when it is ablated."""
    if ablation == "resample":
        return corrupted
    if ablation == "positional_mean":
        InputError.raise_if([] if roles else length_reasons(pair), _PROBLEM)
        return _positional_means(clean, roles or resolve_positions(pair, "each"))
    return ablate(clean, clean, ablation, pair.real)


def _positional_means(run: Recording, places: Sequence[PositionSet]) -> Recording:
    """Return a run in which z is replaced by its mean over prompts at each position or role."""

    def means(z: Tensor) -> Tensor:
        result = z.clone()
        for place in places:
            chosen = place.chosen.to(z.device)
            if chosen.any():
                result[chosen] = z[chosen].mean(dim=0)
        return result

    neurons = {layer: NeuronRun(means(one.z)) for layer, one in run.neurons.items()}
    hooked = {name: means(z) for name, z in run.hooked.items()}
    return replace(run, neurons=neurons, hooked=hooked)


def checked_places(pair: PromptPair, sites: pd.DataFrame) -> tuple[PositionSet, ...]:
    """Return the sites' roles; raise an error if sites have no clear place in each prompt."""
    labels = sites["position"].unique().tolist()
    reasons = _reasons_against_sites(sites, pair.clean.shape[1])
    roles: tuple[PositionSet, ...] = ()
    if names := [label for label in labels if isinstance(label, str) and label != "all"]:
        with InputError.collected(reasons):
            roles = resolve_positions(pair, names)
    if not all(isinstance(label, str) for label in labels):
        reasons += length_reasons(pair)
    InputError.raise_if(reasons, _PROBLEM)
    return roles


def _reasons_against_sites(sites: pd.DataFrame, n_pos: int) -> list[str]:
    reasons = []
    if "prompt" in sites:
        reasons.append(
            'got one row per prompt; expected means over prompts, or query("prompt == 0")'
        )
    if single := [name for name in sites["name"].unique() if "." in name]:
        reasons.append(f"got {single[0]}, one head of a neuron; expected whole neurons")
    numbers = [x for x in sites["position"].unique().tolist() if not isinstance(x, str)]
    if any(number < 0 for number in numbers):
        reasons.append(
            "got positions from the end; expected 'each', 'all', numbers from 0, or roles, such as "
            "Contrast(…, roles={'end': -1})"
        )
    elif any(number >= n_pos for number in numbers):
        reasons.append(
            f"got a site at position {max(numbers)}; the prompts have {n_pos} tokens: pass a "
            "ranking for prompts of this length"
        )
    return reasons


def ablated_model(
    model: Any,
    pair: PromptPair,
    metric: AnyMetric,
    sites: pd.DataFrame,
    *,
    ablation: Ablation,
    work: Work = Work(),
    on_done: Callable[[int], object] = lambda n: None,
) -> AblatedModel:
    """Return an `AblatedModel` that runs all prompts at once, or in chunks to save memory.

    Mean ablation and custom metrics need all prompts at once, so they never use chunks.
    """

    def make(some: PromptPair) -> AblatedModel:
        return AblatedModel(model, some, metric, sites, ablation=ablation, on_done=on_done)

    metric, n = as_metric(metric), len(pair.clean)
    if ablation not in _BY_PROMPT or not metric.by_prompt:
        return make(pair)
    layers = sites_of_rows(model, sites)
    at_once = prompts_per_chunk(model, pair, metric, layers, "z", work, traced=True)
    if at_once == n:
        return make(pair)
    weights = (1 / n,) * n
    if not metric.needs_reference:
        weights = bind(metric, model, pair).shares(n)
    chunks = [pair.of_prompts(some, cut=False) for some in split_prompts(n, at_once)]
    return _InChunks(make, chunks, weights)


class _InChunks(AblatedModel):
    """An ablated model that runs prompts in chunks, so its memory does not grow with their number.

    Each evaluation records the runs of every chunk again. This costs little, because a search makes
    only about ten evaluations, each of hundreds of circuits.
    """

    def __init__(
        self,
        make: Callable[[PromptPair], AblatedModel],
        chunks: Sequence[PromptPair],
        weights: Sequence[float],
    ) -> None:
        self._make, self._pairs, self.weights = make, chunks, np.array(weights)
        self.prompts = np.concatenate([pair.indices for pair in chunks])
        wholes, nothings = [], []
        for ablated in self._chunks():
            self.sites, self.n_sites = ablated.sites, ablated.n_sites
            wholes.append(ablated.whole_by_prompt)
            nothings.append(ablated.nothing_by_prompt)
        self.whole_by_prompt, self.nothing_by_prompt = map(np.concatenate, (wholes, nothings))
        self.whole = float(self._mean(self.whole_by_prompt))
        self.nothing = float(self._mean(self.nothing_by_prompt))

    def _chunks(self) -> Iterator[AblatedModel]:
        return map(self._make, self._pairs)

    def _by_prompt(self, circuits: Sequence[Rows]) -> Float[np.ndarray, "circuit prompt"]:
        return np.concatenate([ablated.by_prompt(circuits) for ablated in self._chunks()], axis=1)

    def _worth(self, circuit: Rows) -> Float[np.ndarray, "site"]:
        ends = np.cumsum([0, *(len(pair.clean) for pair in self._pairs)]).tolist()
        some = map(slice, ends[:-1], ends[1:])
        chunks = zip(self._chunks(), some, strict=True)
        slopes = [ablated.slopes(circuit, self.fit(part))[1] for ablated, part in chunks]
        return np.sum(slopes, axis=0)

    def _mean(self, by_prompt: Float[np.ndarray, "*circuit prompt"]) -> Any:
        return (by_prompt * self.weights).sum(axis=-1)
