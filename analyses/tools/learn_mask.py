r"""Learn a circuit of a given size that is also faithful on held-out prompts.

Every candidate site has a score θ. The circuit C consists of the k sites with the highest scores.
Scores are trained by gradient descent on this loss (in the notation of `ablated_model.py`):

    loss = mean over prompts of |m(C) - m(M)| / max(r, mean(r) / 2)        r = |m(M) - m(∅)|

The loss is a mean of absolute errors, because signed errors of different prompts would cancel. The
forward pass ablates all sites outside the circuit. The choice of the k highest scores has no
gradient. So the gradient of a score is defined as the site's first-order contribution to the loss,
for sites inside and outside the circuit. This is a straight-through estimator (Bengio et al.,
"Estimating or Propagating Gradients Through Stochastic Neurons", 2013). Gradient steps use
momentum. Each score's step is divided by √(a b), where a is a running root mean square of this
score's gradient, and b is the root mean square of all scores' gradients. If the step were divided
by a alone, as in Adam, the scores of all useful sites would rise equally fast, however useful they
are. The size k decreases from the number of candidates to `n_sites` in the first 40 % of the steps.
The circuit with the smallest error on the validation prompts is returned.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.circuits._discover import circuit_of, rank_sites
from attn_only_lens.circuits.ablated_model import AblatedModel, ablated_model
from attn_only_lens.circuits.ablated_points import Rows
from attn_only_lens.circuits.circuit import Circuit
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.positions import aligned, token_columns
from attn_only_lens.engine.sites import Sites, SomeSites
from attn_only_lens.patching.estimate import Estimate

_SHRINKING = 0.4  # the fraction of the steps, at the start, in which the circuit becomes smaller
_RATE, _LAST_RATE = 0.03, 0.006
_MOMENTUM, _MEMORY = 0.9, 0.98
_CHECKS = 16  # the number of evaluations on validation prompts during training
_VALIDATION = 0.2  # the fraction of prompts used for validation
_CANDIDATES = 5  # times the size of the circuit
BATCH = 24  # the number of prompts in a step
_ABLATION = "resample"


def learn_mask(
    model: Any,
    contrast: Contrast,
    n_sites: int,
    *,
    steps: int,
    groups: Sequence[Hashable] | None = None,
    sites: SomeSites = "all",
    label: str | None = None,
) -> Circuit:
    """Learn a circuit of a given size that preserves the metric on each prompt, and on new prompts.

    In contrast, `discover` finds a small circuit that preserves the metric's mean over the given
    prompts. Each step costs three passes. The candidates are five times as many sites, those with
    the largest |effect| by integrated gradients.

    Args:
        model: a model with exposed neuron-heads.
        contrast: five pairs of prompts or more, with a metric that has a value for each prompt.
        n_sites: the size of the circuit.
        steps: the number of training steps.
        groups: a label for each pair, for instance its noun; a random fifth of the labels is used
            for validation. By default each pair has its own label.
        sites: the heads to choose from, and their positions; see `discover`. Other heads are never
            ablated.
        label: the label of a progress bar; None for no bar.

    Returns:
        The circuit, evaluated on all prompts. Its `tried` has one row per evaluation on the
        validation prompts, with columns `n_sites`, `faithfulness` and `error` (see `Evaluation`).
    """
    pair, metric, sites = contrast.pair(model), contrast.metric, Sites.of(sites)
    if sites.positions == "each" and sites.split() is None:
        sites = replace(sites, positions=aligned(pair, "each"))
    if sites.positions == "roles":  # the circuit keeps their names, for contrasts with more roles
        sites = replace(sites, positions=list(contrast.roles))
    ranking = rank_sites(model, contrast, sites, Estimate("integrated", budget=0))
    frame, effects = ranking.frame, ranking.effect.to_numpy()
    candidates = np.argsort(-abs(effects), kind="stable")[: _CANDIDATES * n_sites]

    def ablate(some: Rows) -> AblatedModel:
        prompts = pair.of_prompts(some.tolist(), cut=False)
        return AblatedModel(model, prompts, metric, frame, ablation=_ABLATION)

    training, validation = _split(range(len(pair.clean)) if groups is None else groups)
    batches = list(map(ablate, np.array_split(training, math.ceil(len(training) / BATCH))))
    search = _Training(batches, ablate(validation), candidates, n_sites)
    between = max(1, steps // _CHECKS)
    for step in tqdm(range(steps), desc=label, disable=label is None):
        search.step(step / steps)
        if step % between == steps % between:
            search.validate()
    search.validate()
    return circuit_of(
        ablated_model(model, pair, metric, frame, ablation=_ABLATION),
        *(ranking, effects, search.circuit, search.tried),
        method="learned mask",
        wanted=None,
        columns=token_columns(pair),
        ablation=_ABLATION,
        candidates=sites,
    )


def _split(labels: Sequence[Hashable], seed: int = 0) -> tuple[Rows, Rows]:
    """Return the indices of training and validation prompts, which have no label in common."""
    generator = np.random.default_rng(seed)
    names = list(dict.fromkeys(labels))
    chosen = generator.permutation(len(names))[: max(1, round(_VALIDATION * len(names)))]
    held_out = {names[i] for i in chosen}
    is_held_out = np.array([label in held_out for label in labels])
    return generator.permutation(np.flatnonzero(~is_held_out)), np.flatnonzero(is_held_out)


class _Training:
    """The scores of the candidates, and the circuit with the smallest validation error so far."""

    def __init__(
        self,
        batches: Sequence[AblatedModel],
        validation: AblatedModel,
        candidates: Rows,
        n_sites: int,
    ) -> None:
        self._batches, self._validation = batches, validation
        self._candidates, self._n_sites, self._size = candidates, n_sites, len(candidates)
        self._scores = torch.linspace(1.5, -0.5, len(candidates), dtype=torch.float64, device="cpu")
        self._mean = self._scores.clone()
        self._slope, self._square = (torch.zeros_like(self._scores) for _ in range(2))
        self._n_steps, self._best = 0, math.inf
        self.circuit: Rows = candidates[:n_sites]
        self.tried: list[dict[str, Any]] = []

    def step(self, done: float) -> None:
        """Update the scores with the next batch; `done` is the fraction of steps already done."""
        ablated = self._batches[self._n_steps % len(self._batches)]
        self._n_steps += 1
        ratio = self._n_sites / len(self._candidates)
        self._size = round(len(self._candidates) * ratio ** min(1.0, done / _SHRINKING))
        highest = self._scores.topk(self._size).indices.numpy()
        whole = torch.from_numpy(ablated.whole_by_prompt)
        spans = abs(whole - torch.from_numpy(ablated.nothing_by_prompt))
        scale = spans.clamp_min(spans.mean() / 2)

        def loss(measured: Tensor) -> Tensor:
            return (abs(measured - whole.to(measured)) / scale.to(measured)).mean()

        _, slopes = ablated.slopes(self._candidates[highest], loss)
        slope = torch.from_numpy(slopes[self._candidates])
        self._slope += (1 - _MOMENTUM) * (slope - self._slope)
        self._square += (1 - _MEMORY) * (slope**2 - self._square)
        # Both running means begin at 0, so after n steps they are divided by 1 - decay^n, as in
        # Adam.
        sizes = (self._square / (1 - _MEMORY**self._n_steps)).sqrt()
        divisor = (sizes * (sizes**2).mean().sqrt()).sqrt()
        rate = _RATE + (_LAST_RATE - _RATE) * done
        step = self._slope / (1 - _MOMENTUM**self._n_steps) / divisor.clamp_min(1e-30)
        self._scores -= rate * step
        self._mean += (1 - _MOMENTUM) * (self._scores - self._mean)

    def validate(self) -> None:
        """Evaluate the circuit on validation prompts; keep it if its error is a new minimum."""
        circuit = self._candidates[self._mean.topk(self._size).indices.numpy()]
        ablated = self._validation
        (measured,) = ablated.by_prompt([circuit])
        spans = abs(ablated.whole_by_prompt - ablated.nothing_by_prompt)
        errors = abs(measured - ablated.whole_by_prompt)
        row = {"step": "training", "n_sites": len(circuit)}
        row |= {"faithfulness": float(ablated.faithfulness([circuit])[0])}
        self.tried.append(row | {"error": float((errors / spans).mean())})
        # Divide by the mean of |m(M) - m(∅)|, so that prompts for which this difference is small do
        # not dominate the error.
        error = errors.mean() / spans.mean()
        if self._size == self._n_sites and error < self._best:
            self.circuit, self._best = circuit, float(error)
