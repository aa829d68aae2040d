"""Expand the logits of a prompt into a sum over paths through zero, one, two or more heads.

Elhage et al. 2021 ("A Mathematical Framework for Transformer Circuits") expand the logits of an
attention-only model into a sum over paths. An attention head is linear if its pattern is held
fixed. A neuron-head is linear if its gate is held fixed. So the residual stream is

    x = Σ_paths  F_t … F_s x_0        F_t: the linear map of head t (`engine/linear_run.py`)

The sum is over all paths from the embedding through heads s, …, t to the logits. The unembedding
maps this sum to the run's logits. The terms depend on the prompt, because attention patterns do.

A path begins at the embedding (of a token and its position) or at a bias. Each head on a path is
one hop. An output bias, b_O or b_out, enters the residual stream directly (0 hops). The biases b_V
and b_in and a norm's bias enter through a head (1 hop). With transcoders, a path can also begin at
an error node, which counts as 1 hop. One pass through the layers splits the residual stream into
the sums of all paths with 0, 1, 2, … hops. Let z_s be the output of head s when no other head
writes to the residual stream. Let c be the metric's gradient at the final residual stream. Then the
path embedding → s → t → logits has the effect z_s W_O[s] · F_tᵀ c.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import is_count, option_reasons, positive_reasons
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.engine.linear_run import LinearAttention, LinearRun, linearize
from attn_only_lens.engine.metrics import (
    AnyMetric,
    bind,
    no_gradient_reasons,
    one_run_reasons,
    require_differentiable,
)
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.model_weights import float32_weights
from attn_only_lens.engine.one_thread import one_thread, one_thread_per_model
from attn_only_lens.engine.positions import unlike_tokens
from attn_only_lens.engine.prompts import PromptPair, Prompts, single_prompts
from attn_only_lens.engine.recording import float32_runs
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import HeadName, host_of, logit_tolerance, reasons_without_heads
from attn_only_lens.precision import full_precision
from attn_only_lens.tolerances import disagreement

_MOST_HOPS = 1000
_HELD = ("gate", "up")
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
    _pair: PromptPair = field(repr=False)
    _linear: LinearRun = field(repr=False)
    _first: tuple[Tensor, ...] = field(repr=False)
    """The outputs z of each sublayer's heads in one-hop paths."""

    @full_precision()
    def effects(self, metric: AnyMetric) -> pd.DataFrame:
        """Return the total effect on a metric of all paths with the same number of hops.

        Args:
            metric: a function of the logits of one run; if it is not linear, effects are
                first-order approximations at the run's logits.

        Returns:
            A frame with columns `hops` ("0", "1", "2", …, "more") and `effect`; `attrs["value"]` is
            the metric's value. If the metric is linear in the logits, and the logits have no soft
            cap, the effects add up to this value.

        Raises:
            InputError: the metric compares two runs or has no gradient.
        """
        model = self._linear.model
        with one_thread([model]), float32_weights(model):
            gradient, value = self._gradient(metric)
        effect = (self.logits * gradient).sum((1, 2, 3)).cpu().double().numpy()
        hops = [*map(str, range(len(effect) - 1)), "more"]
        frame = pd.DataFrame({"hops": hops, "effect": effect})
        frame.attrs["value"] = value
        return frame

    @full_precision()
    def paths(
        self, metric: AnyMetric, k: int = 100, *, block: int = 1024, progress: bool = True
    ) -> pd.DataFrame:
        """Return the paths through one or two heads with the largest effects on a metric.

        Args:
            metric: as in `effects`.
            k: the largest number of paths to return.
            block: how many first heads, and how many second heads, to compute at once.
            progress: show a progress bar over positions.

        Returns:
            A frame sorted by decreasing |effect|, with columns `hops` (1 or 2), `first`, `second`
            (names with positions, such as `L3N7@13`; `second` is empty for one hop) and `effect`.
            `attrs["paths"]` is the number of all such paths; `attrs["value"]` is the metric's
            value.

        Raises:
            InputError: k or block is not positive, the metric is invalid, as in `effects`, or the
                prompts have different lengths.
        """
        reasons, model = positive_reasons(k=k, block=block), self._linear.model
        if reason := unlike_tokens(model, self._pair):
            reasons.append(f"{reason}; expected prompts of the same length")
        InputError.raise_if(reasons, _PROBLEM)
        with one_thread([model]), torch.no_grad(), float32_weights(model):
            gradient, value = self._gradient(metric)
            ranked = _RankedPaths(self._linear, self._first, k, block)
            stream = self._linear.stream_gradient(gradient)
            ends = stream.abs().amax((0, 2)).nonzero().flatten().tolist()
            for position in tqdm(ends, unit="position", disable=not progress):
                ranked.add(stream[:, [position]], position)
        frame = ranked.frame()
        frame.attrs["value"] = value
        return frame

    def _gradient(self, metric: AnyMetric) -> tuple[Float[Tensor, "batch pos d_vocab"], float]:
        InputError.raise_if([*one_run_reasons(metric), *no_gradient_reasons()], _PROBLEM)
        logits = self._linear.run.recording.logits
        bound = bind(metric, self._linear.model, self._pair, logits)
        require_differentiable(bound, logits)
        return self._linear.metric_gradient(bound)


@one_thread_per_model
@torch.no_grad()
@full_precision()
def path_expansion(
    model: Any,
    prompts: Prompts,
    hops: int = 2,
    *,
    held: Literal["gate", "up"] = "gate",
    mask: Tensor | None = None,
) -> PathExpansion:
    """Expand the logits of a run into paths through attention heads and MLP neurons (as heads).

    The expansion is exact if patterns and norm scales are held at their values in the run. The gate
    of a neuron-head is held fixed too, so that the neuron's output is linear in its value.

    The method is from Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

    Args:
        model: a model from `convert`, or one with exposed neuron-heads. A half-precision
            model is run in float32.
        prompts: a text, a list of texts, or tokens.
        hops: paths through at most this many heads have one entry for each number of heads.
        held: in a gated MLP with exact heads, the factor of the value that is held fixed: "gate"
            (paths go through W_in), or "up" (paths go through W_gate, the neuron's score).
        mask: the attention mask (0 for padding), if prompts are given as tokens.

    Raises:
        InputError: with every reason: invalid prompts, unsupported norms or matrices, `held="up"`
            if no neuron-head's value is a product.
        UnsupportedModelError: heads whose outputs are not linear in what they read; or paths that
            do not add up to the logits.

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.small_english()).model
        >>> expansion = circuits.path_expansion(model, "The keys near the cabinet")
        >>> expansion.logits.shape
        torch.Size([4, 1, 6, 456])
        >>> metric = p.logit_diff(" are", " is")
        >>> effects = expansion.effects(metric)
        >>> bool(abs(effects["effect"].sum() - effects.attrs["value"]) < 1e-4)
        True
        >>> expansion.paths(metric, k=3, progress=False).columns.tolist()
        ['hops', 'first', 'second', 'effect']
    """
    reasons = [*reasons_without_heads(model), *reasons_not_to_run(model)]
    reasons += option_reasons("held", held, _HELD)
    if not is_count(hops, 1, _MOST_HOPS):
        reasons.append(f"got hops={hops!r}; expected 1 to {_MOST_HOPS}")
    InputError.raise_if(reasons, _PROBLEM)
    if held == "up" and not any(heads.value_is_product for heads in host_of(model).neurons):
        reason = "got held='up', but no neuron-head's value is a product; leave held out"
        raise InputError([reason], _PROBLEM)
    pair = single_prompts(model, prompts, mask)
    with float32_runs(model, pair):
        linear = linearize(model, pair.clean, pair.mask, held=held)
        streams, first = _expand(linear, hops)
        logits = linear.unembed(streams)
        real, neurons = pair.real.to(logits.device), host_of(model).neurons
        tolerance = max(logit_tolerance(neurons, dtype) for dtype in (logits.dtype, torch.float32))
        # It is relative to Σ |logits of paths|, which may be much larger than the logits.
        size = logits.abs().sum(0)[real].amax()
        if off := disagreement(logits.sum(0), linear.logits, tolerance, size=size, mask=real):
            raise UnsupportedModelError(
                [f"the paths do not add up to the logits of the run: {off}"], _PROBLEM
            )
        return PathExpansion(logits, held, pair, linear, first)


def _expand(
    linear: LinearRun, hops: int
) -> tuple[Float[Tensor, "hops batch pos d_model"], tuple[Tensor, ...]]:
    """Return the final residual stream for each number of hops, and the heads' z after one hop."""
    embedding = linear.run.embedding
    streams = torch.stack([embedding, *[torch.zeros_like(embedding)] * (hops + 1)])
    history, first = [streams], []
    for index, sublayer in enumerate(linear.sublayers):
        read = history[linear.n_before(index) - index - 1].to(sublayer.constant.device)
        # Each head adds one hop. The last entry collects all paths with more than `hops` hops.
        z = sublayer.z(torch.cat([read[:hops], read[hops:].sum(0, keepdim=True)]))
        z[0] += sublayer.constant
        first.append(z[0])
        new = torch.cat([sublayer.writes.bias[None], sublayer.written(z)])
        # A layer has up to 4 sublayers: attention heads, features, a skip node, an error node.
        history = [*history[-3:], history[-1].to(z.device) + new]
    return history[-1], tuple(first)


class _RankedPaths:
    """Selects the k paths with the largest effects; `first` holds z of heads in one-hop paths."""

    def __init__(self, linear: LinearRun, first: tuple[Tensor, ...], k: int, block: int) -> None:
        self._linear, self._first, self._block = linear, first, block
        self._counts = [outputs.shape[2] for outputs in first]
        self._starts = list(accumulate(self._counts, initial=0))
        self._largest = LargestScores(k, by_size=True)

    def _number(self, index: int, position: int) -> int:
        """Return the number of a sublayer's first head at a position; nodes are numbered from 1."""
        return 1 + position * self._starts[-1] + self._starts[index]

    def add(self, stream: Float[Tensor, "batch pos=1 d_model"], end: int) -> None:
        """Add the paths whose last head is at position `end`; use the gradient at this position."""
        for index, last in enumerate(self._linear.sublayers):
            gradient = last.output_gradients(stream, slice(end, end + 1))[:, 0]
            alone = (gradient * self._first[index][:, end]).sum((0, 2))
            number = self._number(index, end)
            self._largest.add(alone[None], (0, number))
            for start in range(0, self._counts[index], self._block):
                nodes = slice(start, min(start + self._block, self._counts[index]))
                n_pos = self._linear.run.embedding.shape[1]
                is_attention = isinstance(last, LinearAttention)
                for key in range(n_pos) if is_attention else range(end, end + 1):
                    back = last.covectors(gradient[:, nodes], nodes, end, key)
                    if not back.any():  # position `end` does not attend to position `key`
                        continue
                    back = back.transpose(0, 1).flatten(1)
                    for before, written in self._writers(index, key):
                        self._largest.add_products(
                            back,
                            written.to(back).transpose(0, 1).flatten(1),
                            (number + start, self._number(before, key)),
                            block=self._block,
                        )

    def _writers(self, reader: int, position: int) -> Iterator[tuple[int, Tensor]]:
        for index in range(self._linear.n_before(reader)):
            sublayer, z = self._linear.sublayers[index], self._first[index][:, position]
            yield index, sublayer.write_vectors(z, slice(None), position)

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
        writes = self._linear.sublayers[index].writes
        head = HeadName(writes.layer, writes.kind, place - self._starts[index])
        return f"{head}@{position}"
