"""Expand the logits of a prompt into a sum over paths through zero, one, two or more heads.

Elhage et al. 2021 ("A Mathematical Framework for Transformer Circuits") expand the logits of an
attention-only model into a sum over paths. An attention head is linear if its pattern is held
fixed. A neuron-head is linear if its gate is held fixed. So the residual stream is

    x = Σ_paths  F_t … F_s x_0        F_t: the linear map of head t (`engine/linear_map.py`)

The sum is over all paths from the embedding through heads s, …, t to the logits. The unembedding
maps this sum to the run's logits. The terms depend on the prompt, because attention patterns do.

A path begins at the embedding (of a token and its position) or at a bias. Each head on a path is
one hop. An output bias, b_O or b_out, enters the residual stream directly (0 hops). The biases b_V
and b_in and a norm's bias enter through a head (1 hop). With transcoders, a path can also begin at
an error node, which counts as 1 hop. One pass with held patterns and norm scales splits the
residual stream into the sums of all paths with 0, 1, 2, … hops: the batch has one copy of the
prompts for each number of hops, and each head's output in one copy is passed on in the next. Let
z_s be the output of head s when no other head writes to the residual stream. Let c be the metric's
gradient at the final residual stream. Then the path embedding → s → t → logits has the effect
z_s W_O[s] · F_tᵀ c.
"""

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import POSITIVE, one_of, whole
from attn_only_lens.devices import added
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.engine.gradients import as_leaf
from attn_only_lens.engine.held_run import HeldRun
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.engine.linear_map import LinearMap, of_held_run
from attn_only_lens.engine.metrics import (
    AnyMetric,
    BoundMetric,
    bind,
    no_gradient_reasons,
    one_run_reasons,
    require_differentiable,
)
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.model_weights import float32_weights
from attn_only_lens.engine.one_thread import one_thread, one_thread_per_model
from attn_only_lens.engine.positions import length_reasons
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import float32_runs
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import HeadName, host_of, logit_tolerance, reasons_without_heads
from attn_only_lens.precision import full_precision
from attn_only_lens.tolerances import disagreement
from attn_only_lens.work import Work, work_reasons

_MOST_HOPS = 1000
_HELD = ("gate", "up")
_AT_ONCE = 1024
_PROBLEM = "the logits of this model cannot be expanded into paths"


@dataclass(frozen=True, eq=False)
class PathExpansion:
    """The logits of a run, split by the number of attention heads and MLP neurons on each path.

    Attributes:
        logits: the logits of paths through 0, 1, 2, … heads; the last entry has all longer paths.
            The entries add up to the logits of the run, before any soft cap.
        held: which factor of gated neurons is held fixed.
    """

    logits: Float[Tensor, "hops batch pos d_vocab"]
    held: Literal["gate", "up"]
    _metric: AnyMetric = field(repr=False)
    _pair: PromptPair = field(repr=False)
    _run: HeldRun = field(repr=False)
    _first: tuple[Tensor, ...] = field(repr=False)
    """The outputs z of each sublayer's heads in one-hop paths."""

    @full_precision()
    def effects(self) -> pd.DataFrame:
        """Return the total effect on the metric of all paths with the same number of hops.

        If the metric is not linear, effects are first-order approximations at the run's logits.

        Returns:
            A frame with columns `hops` ("0", "1", "2", …, "more") and `effect`; `attrs["value"]` is
            the metric's value. If the metric is linear in the logits, and the logits have no soft
            cap, the effects add up to this value.

        Raises:
            InputError: the metric compares two runs or has no gradient.
        """
        with one_thread([self._run.model]), float32_weights(self._run.model):
            gradient, value = self._gradient(self._bound())
        effect = (self.logits * gradient).sum((1, 2, 3)).cpu().double().numpy()
        hops = [*map(str, range(len(effect) - 1)), "more"]
        frame = pd.DataFrame({"hops": hops, "effect": effect})
        frame.attrs["value"] = value
        return frame

    @full_precision()
    def paths(self, k: int = 100, *, work: Work = Work()) -> pd.DataFrame:
        """Return the paths through one or two heads with the largest effects on the metric.

        Args:
            k: the largest number of paths to return.
            work: how paths are computed; see `Work`. `batch_size` is the number of first heads, and
                of second heads, at once, by default 1024. A progress bar counts positions.

        Returns:
            A frame sorted by decreasing |effect|, with columns `hops` (1 or 2), `first`, `second`
            (names with positions, such as `L3N7@13`; `second` is empty for one hop) and `effect`.
            `attrs["paths"]` is the number of all such paths; `attrs["value"]` is the metric's
            value.

        Raises:
            InputError: k is not positive, the metric is invalid, as in `effects`, or the prompts
                have different lengths.
        """
        reasons, model = POSITIVE.reasons(k=k), self._run.model
        reasons += work_reasons(work, "prompts_at_once", "resume", "share")
        InputError.raise_if(reasons + length_reasons(self._pair, only_columns=True), _PROBLEM)
        with one_thread([model]), torch.no_grad(), float32_weights(model):
            bound = self._bound()
            linear = of_held_run(self._run, bound, patterns=False)
            ranked = _RankedPaths(linear, self._first, k, work.batch_size or _AT_ONCE)
            ends = linear.last.abs().amax((0, 2)).nonzero().flatten().tolist()
            label = work.progress if isinstance(work.progress, str) else None
            for position in tqdm(ends, unit="position", desc=label, disable=not work.progress):
                ranked.add(position)
        frame = ranked.frame()
        frame.attrs["value"] = bound.of(self._run.run.recording.logits)
        return frame

    def _bound(self) -> BoundMetric:
        InputError.raise_if([*one_run_reasons(self._metric), *no_gradient_reasons()], _PROBLEM)
        logits = self._run.run.recording.logits
        bound = bind(self._metric, self._run.model, self._pair, logits)
        require_differentiable(bound, logits)
        return bound

    def _gradient(self, metric: BoundMetric) -> tuple[Float[Tensor, "batch pos d_vocab"], float]:
        """Return the metric's gradient at the logits before any soft cap, and its value."""
        with torch.enable_grad():
            done = self._run.forward(start=as_leaf)
            slope = self._run.logit_gradient(metric)
            (gradient,) = torch.autograd.grad(done.logits, done.uncapped, slope)
        value = metric.of(self._run.run.recording.logits)
        return gradient / (self._run.run.logit_factor or 1.0), value


@one_thread_per_model
@torch.no_grad()
@full_precision()
def path_expansion(
    model: Any,
    contrast: Contrast,
    hops: int = 2,
    *,
    held: Literal["gate", "up"] = "gate",
) -> PathExpansion:
    """Expand the clean run's logits into paths through attention heads and MLP neurons (as heads).

    The expansion is exact if patterns and norm scales are held at their values in the run. The gate
    of a neuron-head is held fixed too, so that the neuron's output is linear in its value.

    The method is from Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

    Args:
        model: a model from `convert`, or one with exposed neuron-heads. A half-precision
            model is run in float32.
        contrast: the clean prompts and the metric; see `Contrast`. Corrupted prompts are not used.
        hops: paths through at most this many heads have one entry for each number of heads.
        held: in a gated MLP with exact heads, the factor of the value that is held fixed: "gate"
            (paths go through W_in), or "up" (paths go through W_gate, the neuron's score).

    Raises:
        InputError: with every reason: an invalid contrast, unsupported norms or matrices,
            `held="up"` if no neuron-head's value is a product.
        UnsupportedModelError: heads whose outputs are not linear in what they read; or paths that
            do not add up to the logits.

    Example:
        >>> from attn_only_lens import Contrast, circuits, expose_neuron_heads
        >>> from attn_only_lens import load, patching as p
        >>> model = expose_neuron_heads(load("small-english")).model
        >>> keys = Contrast("The keys near the cabinet", None, p.logit_diff(" are", " is"))
        >>> expansion = circuits.path_expansion(model, keys)
        >>> expansion.logits.shape
        torch.Size([4, 1, 6, 456])
        >>> effects = expansion.effects()
        >>> bool(abs(effects["effect"].sum() - effects.attrs["value"]) < 1e-4)
        True
        >>> expansion.paths(k=3).columns.tolist()
        ['hops', 'first', 'second', 'effect']
    """
    reasons = [*reasons_without_heads(model), *reasons_not_to_run(model)]
    reasons += contrast_reasons(contrast, both=False) + one_of(*_HELD).reasons(held=held)
    reasons += whole(1, _MOST_HOPS).reasons(hops=hops)
    InputError.raise_if(reasons, _PROBLEM)
    if held == "up" and not any(heads.value_is_product for heads in host_of(model).neurons):
        reason = "got held='up', but no neuron-head's value is a product; leave held out"
        raise InputError([reason], _PROBLEM)
    pair = contrast.pair(model)
    pair = replace(pair, corrupted=pair.clean)
    with float32_runs(model, pair):
        run = HeldRun.record(model, pair.clean, pair.mask, held)
        logits, first = _expand(run, hops)
        real, neurons = pair.real.to(logits.device), host_of(model).neurons
        tolerance = max(logit_tolerance(neurons, dtype) for dtype in (logits.dtype, torch.float32))
        # It is relative to Σ |logits of paths|, which may be much larger than the logits.
        size = logits.abs().sum(0)[real].amax()
        if off := disagreement(logits.sum(0), run.run.uncapped, tolerance, size=size, mask=real):
            reason = (
                f"the paths do not add up to the logits of the run ({off}), so the outputs of some "
                "heads are not linear in their values"
            )
            raise UnsupportedModelError([reason], _PROBLEM)
        return PathExpansion(logits, held, contrast.metric, pair, run, first)


def _expand(
    run: HeldRun, hops: int
) -> tuple[Float[Tensor, "hops batch pos d_vocab"], tuple[Tensor, ...]]:
    """Return the logits of paths by their number of hops, and the heads' z after one hop.

    The batch has copies of the prompts for 0, …, `hops` and more hops, and a last copy without an
    embedding, whose stream holds only the biases that sublayers write. The first copy keeps these.
    """
    host, first, more = host_of(run.model), dict[str, Tensor](), hops + 1
    copies = more + 2

    def by_hops(batch: Tensor) -> Tensor:
        return batch.unflatten(0, (copies, -1))

    def start(stream: Tensor) -> Tensor:
        embedding, *others = by_hops(stream)
        return torch.cat([embedding, *map(torch.zeros_like, others)])

    def read(stream: Tensor) -> Tensor:
        parts = by_hops(stream)
        return torch.cat([parts[:1], parts[1:] - parts[-1]]).flatten(0, 1)

    def shift(name: str, z: Tensor, hook: Any) -> Tensor:
        parts, passed_on = by_hops(z), torch.zeros_like(by_hops(z))
        first[name] = passed_on[1] = parts[0]
        passed_on[2 : more + 1] = parts[1:more] - parts[-1]
        passed_on[more] += parts[more] - parts[-1]
        return passed_on.flatten(0, 1)

    names = [host.hook_name(writes.layer, writes.kind, "z") for writes in run.run.sublayers]
    hooks = [(name, partial(shift, name)) for name in names]
    done = run.forward(copies=copies, start=start, read=read, hooks=hooks)
    logits = by_hops(done.uncapped)
    factor = 1.0 if run.run.logit_factor is None else run.run.logit_factor
    logits = factor * torch.cat([logits[:1], logits[1:-1] - logits[-1]])
    return logits, tuple(first[name] for name in names)


class _RankedPaths:
    """Selects the k paths with the largest effects."""

    def __init__(self, linear: LinearMap, first: tuple[Tensor, ...], k: int, block: int) -> None:
        # In this map, heads write only what has passed no other head, and only the logits read it.
        some = zip(linear.sublayers, first, strict=True)
        sublayers = tuple(writes.with_outputs(z) for writes, z in some)
        direct = [added(x.back(linear.last) for x in writes.everywhere) for writes in sublayers]
        run = replace(linear.run, sublayers=sublayers)
        self._linear, self._block = replace(linear, run=run, multipliers=direct), block
        self._counts = [writes.n_heads for writes in sublayers]
        self._starts = list(accumulate(self._counts, initial=0))
        self._largest = LargestScores(k, by_size=True)

    def _number(self, index: int, position: int) -> int:
        """Return the number of a sublayer's first head at a position; nodes are numbered from 1."""
        return 1 + position * self._starts[-1] + self._starts[index]

    def add(self, end: int) -> None:
        """Add the paths whose last head is at position `end`."""
        for index, n in enumerate(self._counts):
            alone = self._linear.attributions(index)[:, end].sum(0)
            number = self._number(index, end)
            self._largest.add(alone[None], (0, number))
            for start in range(0, n, self._block) if self._linear.kinds(index) else ():
                nodes = torch.arange(start, min(start + self._block, n), device="cpu")
                self._add_pairs(index, end, nodes, number + start)

    def _add_pairs(self, index: int, end: int, nodes: Tensor, number: int) -> None:
        """Add the paths through two heads whose second head is one of these nodes."""
        ends = torch.full_like(nodes, end)
        covectors, _ = self._linear.covectors(index, "value", ends, nodes)
        own = self._linear.reads_own(index, "value")
        for key in (end,) if own else range(covectors.shape[2]):
            back = covectors if own else covectors[:, :, key]
            if not back.any():  # position `end` does not attend to position `key`
                continue
            back = back.transpose(0, 1).flatten(1)
            n_before, here = self._linear.n_before(index), slice(key, key + 1)
            for before in range(n_before):
                parts = self._linear.run.parts_before(self._linear.sublayers[before], n_before)
                vectors = (x.vectors(x.z[:, key], slice(None), here) for x in parts)
                written = added(vectors).to(back)
                self._largest.add_products(
                    back,
                    written.transpose(0, 1).flatten(1),
                    (number, self._number(before, key)),
                    block=self._block,
                )

    def frame(self) -> pd.DataFrame:
        """Return a frame of the paths, sorted by decreasing |effect|."""
        pairs = self._largest.pairs.tolist()
        columns = {
            "hops": [2 if second else 1 for second, _ in pairs],
            "first": [self._name(first) for _, first in pairs],
            "second": [self._name(second) for second, _ in pairs],
        }
        frame = pd.DataFrame(columns | {"effect": self._largest.values.tolist()})
        frame.attrs["paths"] = self._largest.seen
        return frame

    def _name(self, number: int) -> str:
        if not number:
            return ""
        position, place = divmod(number - 1, self._starts[-1])
        index = bisect_right(self._starts, place) - 1
        writes = self._linear.sublayers[index]
        head = HeadName.at(
            self._linear.model, writes.layer, writes.kind, place - self._starts[index]
        )
        return f"{head}@{position}"
