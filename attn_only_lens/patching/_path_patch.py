"""Exact path patching: replace one head's output, but only where one other head reads it.

A path has a sender s and a receiver r. Patching copies activations from a source run into a target
run; one of the two runs is the clean run, the other the corrupted run.

    δ = write_s(source) - write_s(target)        at the requested positions (`engine/writes.py`)
    the stream that r reads for its inputs `part` changes by δ before r's norm; all else stays fixed
    r's output changes by Δz_r(δ)                (`engine/readers.py`)
    z_r + Δz_r is patched into the target run, and the metric is computed

This method is from Wang et al. 2022, "Interpretability in the Wild", and Goldowsky-Dill et al.
2023, "Localizing Model Behavior with Path Patching". The pair (s, r) stands for all paths whose
first edge is s → r. If r is "logits", the pair stands only for the direct path from s to the
logits. The scale of the norm before r is "held" at its value in the target run, so that the effects
of several senders add up, or computed "anew" from the changed residual stream. (TransformerLens'
`get_act_patch_direct_path` uses "held" in version 3.9 and "anew" in version 4.) A norm that follows
s belongs to s. Norms of queries and keys belong to r, and are always computed anew.

For each prompt, a pair (s, r) costs one computation of Δz_r and one pass through the blocks after
r. This pass costs 2 S P flops, where P is the number of parameters in later blocks, and S the
number of positions from the first changed position to the end. For a neuron, Δz_r costs 2 d_model T
flops, where T is the number of positions of δ (4 d_model T if the MLP is gated). For attention
heads, Δz_r costs one pass per sender through the receivers' attention layer. If the receiver is
"logits", only the unembedding is computed.

Paths are computed in groups, called path blocks. In a path block, all senders are of one kind, in
one layer and at the same positions; all receivers are of one kind, in one layer. The size of a path
block is chosen so that its tensors have at most about `_NUMBERS` entries.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_only_lens.arguments import option_reasons
from attn_only_lens.engine.directions import DIRECTIONS
from attn_only_lens.engine.edits import neuron_variants
from attn_only_lens.engine.gradients import Tape, start_graph
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import (
    AnyMetric,
    Metric,
    as_metric,
    no_gradient_reasons,
    require_differentiable,
    require_slope,
)
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import Positions, PositionSet, warn_of_unlike_tokens
from attn_only_lens.engine.prompts import PromptPair, Prompts, prompt_pair
from attn_only_lens.engine.readers import READ_PARTS, Readers, input_hooks
from attn_only_lens.engine.recording import RunPair, Side, float32_runs, run, run_pair
from attn_only_lens.engine.replay import Variants, make_replay
from attn_only_lens.engine.sites import LayerSites, Selection, Sites, all_heads, resolve_sites
from attn_only_lens.engine.writes import SCALES, Decomposition, Scale, decompose
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS, HeadKind
from attn_only_lens.patching._activation_patch import count_reasons, prompt_settings
from attn_only_lens.patching.job import Arrays, Job, require_folder
from attn_only_lens.patching.prompt_chunks import PromptChunk, PromptChunks, prompts_per_chunk
from attn_only_lens.patching.results import Paths, run_settings
from attn_only_lens.patching.run_patches import Batching, check_edits
from attn_only_lens.patching.site_groups import (
    Chunk,
    SiteGroup,
    position_sets,
    site_groups,
    site_rows,
    split_prompts,
)
from attn_only_lens.precision import full_precision

_PROBLEM = "these paths cannot be patched"
_LOGITS = "logits"
_AT_ONCE = 256  # number of paths per chunk when computing exact values
_ESTIMATES_AT_ONCE = 2**24  # number of paths per chunk of estimates: about ten seconds of work
_NUMBERS = 2**21  # maximum number of entries in each tensor of a path block


@one_thread_per_model
@warned_once()
@full_precision()
def path_patch(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    *,
    senders: Sites,
    receivers: Sites,
    part: str = "value",
    positions: Positions = "each",
    direction: str = "denoise",
    scale: Scale = "held",
    top: int | None = None,
    mask: Tensor | None = None,
    per_prompt: bool = False,
    prompts_at_once: int | None = None,
    batch_size: int | None = None,
    resume: str | Path | None = None,
    progress: bool | str = True,
) -> Paths:
    """Patch each path from a sender to a later receiver, and compute the metric after each patch.

    Results are exact. The receiver reads the sender's output in the other run, while the rest of
    its input stays fixed. The changed output of the receiver then affects the rest of the forward
    pass and the metric (see `_path_patch.py`).

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
            A half-precision model is run in float32 during the call.
        clean: a text, a list of texts, or tokens [batch, pos]; see `prompt_pair`.
        corrupted: the corrupted prompts, with the same number of tokens.
        metric: `logit_diff(...)` or another metric, or any function of logits
            [batch, pos, d_vocab].
        senders: `neuron_heads()`, `heads()`, `all_heads()`, or names; a name may have a position:
            `L3N7@13`.
        receivers: `neuron_heads()`, `heads()`, `all_heads()`, "logits", or names, which may include
            "logits".
        part: the receiver inputs that change: "q"; "k"; "value" (a neuron's gate stays fixed);
            "pattern", queries and keys; or "z", all inputs, which is the whole direct effect. A
            neuron-head has no "k", and its "q" sets its pattern. Its value is the pre-activation,
            or in a gated MLP the pre-activation times the output of W_in. The receiver "logits"
            ignores `part`.
        positions: the positions at which the sender's output is replaced: "each" in turn, "all" at
            once, a number (-1 is each prompt's last token), a list of numbers, or roles; see
            `activation_patch`.
        direction: "denoise" patches clean outputs into the corrupted run; "noise" patches corrupted
            outputs into the clean run.
        scale: "held" keeps the scale of the norms before receivers as it was in the target run;
            "anew" computes it from the changed stream.
        top: how many paths to patch: the paths with the largest |estimated effect|. The estimate is
            the exact change in the receiver's output times the mean gradient of the metric there.
            None patches all paths.
        mask: 1 for real tokens, 0 for padding, if prompts are given as tokens.
        per_prompt: whether to return one row per path and prompt; by default there is one row per
            path, with the mean over prompts and standard errors (see `Paths`).
        prompts_at_once: how many prompt pairs have their activations in memory at once; see
            `activation_patch`.
        batch_size: how many paths run in one forward pass; by default as many as fit in memory.
        resume: a checkpoint folder; see `activation_patch`.
        progress: whether to show a progress bar; a string is its label.

    Returns:
        The metric and the score after each patch. The score is 0 for the corrupted run and 1 for
        the clean run.

    Raises:
        InputError: with every reason: invalid prompts, metric, heads or positions; no receiver
            comes after a sender; with `top`, a metric with zero gradient; with `per_prompt`, a
            metric that has one value for all prompts.
        UnsupportedModelError: sublayer outputs do not add up to the residual stream; attention in a
            receiver's layer is not a function of the queries, keys and values at its hook points; a
            forward pass of the model cannot be split at block boundaries.
        CheckpointError: files in the folder `resume` are damaged.

    Example:
        >>> import torch
        >>> from attn_only_lens import convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> paths = p.path_patch(
        ...     model, torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]),
        ...     p.logit_diff(correct=7, wrong=8), senders=p.heads(), receivers=p.neuron_heads(),
        ...     part="z", positions=-1, top=5, progress=False)
        >>> len(paths.to_frame()), paths.n_paths  # 4 heads and 512 neurons
        (5, 2048)
    """
    # Check
    reasons = [*reasons_not_to_run(model)]
    reasons += count_reasons(batch_size=batch_size, top=top, prompts_at_once=prompts_at_once)
    reasons += option_reasons("part", part, READ_PARTS)
    reasons += option_reasons("direction", direction, DIRECTIONS)
    reasons += option_reasons("scale", scale, SCALES)
    reasons += no_gradient_reasons() if top is not None else []
    InputError.raise_if(reasons, _PROBLEM)
    require_folder(resume)

    # Plan
    pair, metric = prompt_pair(model, clean, corrupted, mask), as_metric(metric)
    with float32_runs(model, pair):
        receiving = _resolve_receivers(model, receivers, part)
        sending = site_groups(model, pair, senders, positions, "z")
        if not per_prompt:
            warn_of_unlike_tokens(model, pair, position_sets(sending))
        at_once = prompts_per_chunk(
            *(model, pair, metric, resolve_sites(model, all_heads()), "value", prompts_at_once),
            resume=resume,
            traced=top is not None,
            decomposed=True,
        )
        plan = _PathPlan(model, pair, metric, sending, receiving, part, direction, scale, at_once)
        patches = _PathPatches(plan, top, per_prompt, batch_size)

        # Run
        settings = {"top": top, "per_prompt": bool(per_prompt)}
        job = Job(resume, lambda: plan.settings() | settings, progress)
        patches.on_done = job.advance
        work, rows = patches.all_paths() if top is None else patches.largest_paths(job, top)
        chunks = [Chunk(prompts, some_rows) for prompts in plan.prompts for some_rows in rows]
        compute = partial(patches.compute, work=work)
        for chunk, arrays in job.run(chunks, compute, unit="path"):
            patches.totals.add(chunk, torch.from_numpy(arrays["kept"]))

        # Collect
        return patches.results(work)


@dataclass(frozen=True, eq=False)
class _PathPlan:
    """The prompts, senders, receivers, metric and options of path patching."""

    model: Any
    pair: PromptPair
    metric: Metric
    senders: tuple[SiteGroup, ...]
    receivers: list[LayerSites | None]
    part: str
    direction: str
    scale: Scale
    prompts_at_once: int

    @property
    def prompts(self) -> list[range]:
        """The indices of the prompts in each chunk, in order."""
        return split_prompts(len(self.pair.clean), self.prompts_at_once)

    def settings(self) -> dict[str, Any]:
        """Return all settings that affect results. Only jobs with equal settings are resumed."""
        return {
            **prompt_settings(self.model, self.pair, self.metric, self.senders),
            "senders": [[*site_rows([group])["name"]] for group in self.senders],
            "positions": [site_rows([group])["position"].tolist() for group in self.senders],
            "receivers": [name for receiver in self.receivers for name in _names_of(receiver)],
            "part": self.part,
            "direction": self.direction,
            "scale": self.scale,
            "prompts_at_once": self.prompts_at_once,
        }


class _PathPatches:
    """Computes the metric after each path's patch, or estimates it, chunk by chunk."""

    def __init__(
        self, plan: _PathPlan, top: int | None, per_prompt: bool, batch_size: int | None
    ) -> None:
        self._plan, self._batch_size = plan, batch_size
        host = host_of(plan.model)
        layers = [sites.layer for sites in plan.receivers if sites and sites.kind == "attention"]
        self._names = tuple(name for layer in layers for name in input_hooks(host, layer))
        self._runs: dict[Side, Decomposition] = {}
        self._prompts = PromptChunks(
            plan.model, plan.pair, plan.metric, plan.direction, self._record
        )
        first, run = self._prompts.first(plan.prompts), self._runs["clean"]
        self.blocks = list(_path_blocks(run, plan.senders, plan.receivers, plan.prompts_at_once))
        reason = (
            "no receiver reads what a sender writes; expected a receiver in a later layer, or an "
            "attention head as sender and a neuron of the same layer as receiver (unless attention "
            "and MLP run in parallel)"
        )
        InputError.raise_if([reason] * (not self.blocks), _PROBLEM)
        self.n_paths = sum(block.n_paths for block in self.blocks)
        n_rows = min(top or self.n_paths, self.n_paths)
        self.totals = self._prompts.totals(plan.prompts, n_rows, per_prompt)
        if top is not None:
            runs = first.runs
            require_differentiable(runs.metric, first.target.logits)
            span = runs.clean_value - runs.corrupted_value
            require_slope(runs.metric, first.target.logits, first.source.logits, span)
        self.on_done: Callable[[int], object] = lambda n: None
        self._tested = set[bool]()

    def _record(self, pair: PromptPair, *, distinct: bool) -> RunPair:
        """Record both runs on the given prompts, including the output of each sublayer."""
        model, names = self._plan.model, self._names
        self._runs["clean"] = decompose(model, pair.clean, pair.mask, names=names)
        self._runs["corrupted"] = decompose(model, pair.corrupted, pair.mask, names=names)
        recordings = self._runs["clean"].recording, self._runs["corrupted"].recording
        return run_pair(model, pair, *recordings, self._plan.metric, distinct=distinct)

    def all_paths(self) -> tuple[pd.DataFrame, list[range]]:
        """Return all paths, and each chunk's range of rows. Chunks never split a path block."""
        work = pd.concat([block.paths(number) for number, block in enumerate(self.blocks)])
        ends = np.cumsum([0, *(block.n_paths for block in self.blocks)]).tolist()
        cuts = _split_blocks(self.blocks, _AT_ONCE)
        return work, [range(ends[cut.start], ends[cut.stop]) for cut in cuts]

    def largest_paths(self, job: Job, top: int) -> tuple[pd.DataFrame, list[range]]:
        """Return the paths with the largest |mean estimate|, and each chunk's range of rows."""
        # The rows of these chunks are path blocks. Their ranges of prompts are not used.
        chunks = [Chunk(range(0), cut) for cut in _split_blocks(self.blocks, _ESTIMATES_AT_ONCE)]
        estimated = job.run(chunks, partial(self.estimate, top=top), unit="block")
        work = _largest([pd.DataFrame(arrays) for _, arrays in estimated], top)
        ends = [*range(0, len(work), _AT_ONCE), len(work)]
        return work, [range(*bounds) for bounds in pairwise(ends)]

    def estimate(self, chunk: Chunk, top: int) -> Arrays:
        """Estimate all paths of some path blocks; return those with the largest |mean estimate|."""
        blocks = {number: self.blocks[number] for number in chunk.rows}
        total: dict[int, Any] = dict.fromkeys(blocks, 0.0)
        for some_prompts in self._plan.prompts:
            prompts = self._prompts.of(some_prompts)
            runner, gradients = self._runner(prompts), self._gradients(prompts)
            for number, block in blocks.items():
                estimates = runner.estimates(block.of_prompts(prompts.pair), gradients)
                weight = self.totals.weight(some_prompts)
                total[number] = total[number] + weight * estimates.cpu().double().numpy()
        frames = [
            _largest([block.paths(number).assign(estimate=np.ravel(total[number]))], top)
            for number, block in blocks.items()
        ]
        picked = _largest(frames, top)
        return {str(name): picked[name].to_numpy(copy=True) for name in picked}

    def compute(self, chunk: Chunk, work: pd.DataFrame) -> Arrays:
        """Run a chunk's patches, and return the statistics that a job stores."""
        prompts = self._prompts.of(chunk.prompts)
        runner = self._runner(prompts)
        values = [
            runner.values(self.blocks[number].of_prompts(prompts.pair), i, j)
            for number, i, j in _by_block(work.iloc[chunk.rows.start : chunk.rows.stop])
        ]
        return {"kept": prompts.reduced(self.totals, torch.cat(values)).numpy()}

    def results(self, work: pd.DataFrame) -> Paths:
        """Return the results of all chunks as a frame: one row per path, or per path and prompt."""
        plan = self._plan
        settings = run_settings(plan.model, plan.pair, plan.senders, self.totals, plan.part)
        paths = pd.concat(
            [self.blocks[number].frame(i, j) for number, i, j in _by_block(work)],
            ignore_index=True,
        )
        if "estimate" in work:
            clean, corrupted = self.totals.ends
            baseline = 0.0 if plan.direction == "denoise" else 1.0
            paths["estimate"] = baseline + work["estimate"] / (clean - corrupted)
        columns = self.totals.columns()
        repeated = np.repeat(np.arange(len(paths)), len(columns["value"]) // len(paths))
        frame = paths.iloc[repeated].reset_index(drop=True).assign(**columns)
        return Paths(frame=frame, scale=plan.scale, n_paths=self.n_paths, **settings)

    def _runner(self, prompts: PromptChunk) -> "_PathRunner":
        """Return a path runner for these prompts, after testing edits in full forward passes."""
        if prompts.runner is None:
            plan, runs = self._plan, self._runs
            replay = make_replay(plan.model, prompts.target, prompts.runs.metric)
            if prompts.padded not in self._tested:
                positions = position_sets(plan.senders)
                groups = [SiteGroup.product(sites, positions) for sites in plan.receivers if sites]
                check_edits(replay, [group.of_prompts(prompts.pair) for group in groups], "z")
                self._tested.add(prompts.padded)
            target, source = runs["clean"], runs["corrupted"]
            if plan.direction == "denoise":
                target, source = source, target
            numbers = replay.numbers_per_token
            batching = Batching(plan.model, self._batch_size, self.on_done, numbers)
            prompts.runner = _PathRunner(
                Readers(replay, target), source, plan.part, plan.scale, prompts.unpatched, batching
            )
        runner: _PathRunner = prompts.runner
        return runner

    def _gradients(self, prompts: PromptChunk) -> dict[tuple[int, HeadKind], Tensor]:
        """Return the gradient of the metric with respect to each receiver's z."""
        model, target = self._plan.model, prompts.target
        layers = {(sites.layer, sites.kind) for sites in self._plan.receivers if sites is not None}
        if not layers:
            return {}
        names = {layer: host_of(model).hook_name(*layer, "z") for layer in sorted(layers)}
        tape = Tape(names.values())
        with torch.enable_grad(), start_graph(model):
            logits = run(model, target.tokens, target.mask, tape.hooks)
            gradients = tape.gradients(prompts.runs.metric.of_logits(logits))
        return {layer: gradients[name] for layer, name in names.items()}


def _resolve_receivers(model: Any, receivers: Any, part: str) -> list[LayerSites | None]:
    """Return receivers by layer and kind. Append None if the logits are a receiver."""
    names, has_logits = receivers, False
    if isinstance(names, str | HeadName):
        names = [names]
    if isinstance(names, Iterable) and not isinstance(names, Selection):
        with_logits = list(names)
        names = [name for name in with_logits if name != _LOGITS]
        has_logits = len(names) < len(with_logits)
    only_logits = has_logits and not names
    resolved: list[LayerSites | None] = [] if only_logits else [*resolve_sites(model, names)]
    wide = [sites.names[0] for sites in resolved if sites and sites.kind in WIDE_KINDS]
    if wide and isinstance(names, Selection):
        resolved = [sites for sites in resolved if sites and sites.kind not in WIDE_KINDS]
    elif wide:
        reason = (
            f"got {wide[0]} as a receiver; expected attention heads, neurons or features: "
            "error nodes are held fixed on paths, and skip nodes pass on their input unchanged"
        )
        raise InputError([reason], _PROBLEM)
    neurons = [sites.names[0] for sites in resolved if sites and sites.kind in NEURON_KINDS]
    if part == "k" and neurons:
        reason = (
            f"got part='k' and receivers such as {neurons[0]}; expected attention heads: a "
            "neuron-head's keys do not depend on the token"
        )
        raise InputError([reason], _PROBLEM)
    return [*resolved, *[None] * has_logits]


def _split_blocks(blocks: Sequence["_PathBlock"], n_paths: int) -> list[range]:
    """Group consecutive path blocks so that each group but the last has `n_paths` or more paths."""
    ends, n = [0], 0
    for number, block in enumerate(blocks):
        n += block.n_paths
        if n >= n_paths or number == len(blocks) - 1:
            ends.append(number + 1)
            n = 0
    return [range(*bounds) for bounds in pairwise(ends)]


def _largest(picked: list[pd.DataFrame], top: int) -> pd.DataFrame:
    """Return the `top` paths with the largest |estimate| in these frames, sorted by path block."""
    paths = pd.concat(picked, ignore_index=True)
    rows = paths["estimate"].abs().nlargest(top).index
    return paths.loc[rows.sort_values()].reset_index(drop=True)


def _by_block(work: pd.DataFrame) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each path block's number, and the senders and receivers of its paths."""
    for number, rows in work.groupby("block"):
        i, j = (torch.from_numpy(rows[name].to_numpy(np.int64, copy=True)) for name in "ij")
        yield int(number), i, j  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class _PathBlock:
    """All paths from these senders, at these positions, to these receivers (None: the logits)."""

    senders: LayerSites
    positions: PositionSet
    receivers: LayerSites | None

    @property
    def shape(self) -> tuple[int, int]:
        """The number of senders and the number of receivers."""
        return len(self.senders.names), len(_names_of(self.receivers))

    @property
    def n_paths(self) -> int:
        """The number of paths."""
        return self.shape[0] * self.shape[1]

    def paths(self, number: int) -> pd.DataFrame:
        """Return a frame with one row per path: columns block, i (sender) and j (receiver)."""
        i, j = (index.ravel() for index in np.indices(self.shape))
        return pd.DataFrame({"block": number, "i": i, "j": j})

    def of_prompts(self, pair: PromptPair) -> "_PathBlock":
        """Return the same paths, with positions only in the given prompts."""
        if pair.among is None:
            return self
        positions = self.positions.of_prompts(pair.among[0], pair.clean.shape[1])
        return replace(self, positions=positions)

    def frame(self, i: Int[Tensor, "path"], j: Int[Tensor, "path"]) -> pd.DataFrame:
        """Return a frame with one row per path from sender i to receiver j."""
        receivers = _names_of(self.receivers)
        return pd.DataFrame(
            {
                "sender": np.array(self.senders.names, dtype=object)[i.cpu().numpy()],
                "receiver": np.array(receivers, dtype=object)[j.cpu().numpy()],
                "position": self.positions.label,
            }
        )


def _path_blocks(
    run: Decomposition,
    senders: Sequence[SiteGroup],
    receivers: Sequence[LayerSites | None],
    prompts_at_once: int,
) -> Iterator[_PathBlock]:
    """Yield path blocks that contain all pairs whose receiver can read the sender's output.

    Their order and sizes depend only on the prompts, the heads and `prompts_at_once`.
    """
    for group in senders:
        for place, position in enumerate(group.positions):
            heads = group.head[group.place == place]
            if not len(heads):
                continue
            sending = _take(group.sites, heads)
            for receiving in receivers:
                if _in_order(run, sending, receiving):
                    block = _PathBlock(sending, position, receiving)
                    yield from _split(run, block, prompts_at_once)


def _in_order(run: Decomposition, sending: LayerSites, receiving: LayerSites | None) -> bool:
    if receiving is None:
        return True
    written = run.before(receiving.layer, receiving.kind)
    return run.of(sending.layer, sending.kind) in written


def _split(run: Decomposition, whole: _PathBlock, prompts_at_once: int) -> Iterator[_PathBlock]:
    """Split a path block into smaller ones whose tensors fit in memory."""
    chosen, receivers = whole.positions.chosen, whole.receivers
    batch, n_pos = prompts_at_once, chosen.shape[1]
    some = chosen.any(dim=0)
    width = run.embedding.shape[-1]
    if receivers is not None and receivers.kind == "attention":
        tokens = batch * (n_pos - int(some.int().argmax()))
        width = max(width, run.of(receivers.layer, "attention").z[0, 0].numel())
        many = len(_names_of(receivers))
    else:
        tokens = batch * int(some.sum())
        many = max(1, _NUMBERS // (tokens * min(len(whole.senders.names), 64)))
    few = max(
        1, min(_NUMBERS // (tokens * width), _NUMBERS // (tokens * min(many, whole.shape[1])))
    )
    for i in range(0, whole.shape[0], few):
        for j in range(0, whole.shape[1], many):
            yield _PathBlock(
                _take(whole.senders, slice(i, i + few)),
                whole.positions,
                None if receivers is None else _take(receivers, slice(j, j + many)),
            )


def _names_of(receivers: LayerSites | None) -> tuple[str, ...]:
    """Return the receivers' names."""
    return (_LOGITS,) if receivers is None else receivers.names


def _take(sites: LayerSites, chosen: slice | Int[Tensor, "site"]) -> LayerSites:
    indices = torch.arange(len(sites.names), device="cpu")[chosen]
    names = tuple(sites.names[i] for i in indices.tolist())
    return replace(sites, names=names, index=sites.index[chosen])


@dataclass(eq=False)
class _PathRunner:
    """Patches paths into one run. `baseline` is each prompt's metric before any patch."""

    readers: Readers
    source: Decomposition
    part: str
    scale: Scale
    baseline: Float[Tensor, "prompt"]
    batching: Batching

    def __post_init__(self) -> None:
        self.replay, self.target = self.readers.replay, self.readers.decomposition

    @torch.no_grad()
    def values(
        self, block: _PathBlock, i: Int[Tensor, "path"], j: Int[Tensor, "path"]
    ) -> Float[Tensor, "path prompt"]:
        """Return the metric of each prompt after a patch of each path, from sender i to receiver j.

        If a path cannot affect the metric, its value is the baseline, and no forward pass is run.
        """
        values = self.baseline.repeat(len(i), 1)
        if not block.positions.chosen.any():  # none of these prompts has these positions
            self.batching.on_done(len(i))
            return values
        senders, i = i.unique(return_inverse=True)
        receivers, j = j.unique(return_inverse=True)
        block = replace(
            block,
            senders=_take(block.senders, senders),
            receivers=None if block.receivers is None else _take(block.receivers, receivers),
        )
        last = block.receivers or block.senders
        device = self.target.of(last.layer, last.kind).z.device
        if block.receivers is None:
            self._run_to_logits(block, i.to(device), values)
        elif block.receivers.kind in NEURON_KINDS:
            self._run_neurons(block, block.receivers, i.to(device), j.to(device), values)
        else:
            self._run_attention(block, block.receivers, i.to(device), j.to(device), values)
        return values

    def _fill(
        self,
        values: Float[Tensor, "path prompt"],
        changed: Bool[Tensor, "path batch some"],
        positions: Int[Tensor, "some"],
        block: int,
        run: Callable[[Tensor, int], Tensor],
    ) -> None:
        """Fill in the metric after each patch, running only paths that can affect the metric."""
        replay = self.replay
        effective = replay.effective(changed, block, positions)
        moving, first = effective.flatten(1).any(1), 0
        if moving.any():
            first = replay.start(block, int(positions[changed[moving].any(dim=0).any(dim=0)][0]))
        rows = moving.nonzero()[:, 0].cpu()
        self.batching.on_done(len(values) - len(rows))
        numbers = replay.numbers_per_variant(first)
        self.batching.fill(values, rows, numbers, lambda batch: run(batch, first))

    def _sent(self, block: _PathBlock, positions: Any) -> Float[Tensor, "sender batch pos d_model"]:
        """Return each sender's output in the source run minus its output in the target run."""
        layer, kind = block.senders.layer, block.senders.kind
        if isinstance(positions, Tensor):
            positions = positions.to(self.target.of(layer, kind).z.device)
        source, target = (
            run.of(layer, kind).written(block.senders, positions)
            for run in (self.source, self.target)
        )
        chosen = block.positions.chosen.to(target.device)[:, positions]
        return (source - target) * chosen.unsqueeze(-1)

    def _run_to_logits(self, block: _PathBlock, i: Tensor, values: Tensor) -> None:
        sent = self._sent(block, slice(None))[i]
        everywhere = torch.arange(self.replay.n_pos, device=sent.device)

        def run(some: Tensor, first: int) -> Tensor:
            return self.readers.values_at_end(sent[some, :, first:], first, self.scale)

        self._fill(values, (sent != 0).any(-1), everywhere, self.replay.n_blocks, run)

    def _neuron_dz(
        self, block: _PathBlock, receivers: LayerSites
    ) -> tuple[Float[Tensor, "row pos head_index"], Int[Tensor, "pos"]]:
        """Return how each sender changes the receivers' z, and the positions of the changes."""
        neuron_run = self.target.of(receivers.layer, "neuron")
        columns = block.positions.chosen.any(dim=0).nonzero()[:, 0].to(neuron_run.z.device)
        reads = neuron_run.reads.at(columns)
        entering = reads.change(self._sent(block, columns), self.scale)
        change = self.readers.neuron_change(receivers, entering, self.part, columns)
        return change.flatten(0, 1), columns

    def _run_neurons(
        self, block: _PathBlock, receivers: LayerSites, i: Tensor, j: Tensor, values: Tensor
    ) -> None:
        replay = self.replay
        heads = replay.host.neurons[receivers.layer]
        dz, columns = self._neuron_dz(block, receivers)
        moves = dz.permute(2, 0, 1).unflatten(1, (-1, replay.batch))[j, i]
        block_number = replay.host.block(receivers.layer, "neuron")
        after = block_number + replay.adds_mlp_output(block_number, heads.output_module)
        rows = heads.W_O[receivers.index.to(dz.device), 0]

        def run(some: Tensor, first: int) -> Tensor:
            directions = rows[j[some]].repeat_interleave(replay.batch, dim=0).unsqueeze(1)
            change = moves.new_zeros(len(some), replay.batch, replay.n_pos)
            change[:, :, columns] = moves[some]
            added = change[:, :, first:].flatten(0, 1).unsqueeze(-1) * directions
            return replay.values(neuron_variants(replay, receivers.layer, first, added))

        self._fill(values, moves != 0, columns, after, run)

    def _attention_z(
        self, block: _PathBlock, receivers: LayerSites
    ) -> tuple[Float[Tensor, "sender batch pos head_index d_head"], int]:
        """Return z of the receivers' layer after each sender's patch, and the first position."""
        replay, layer = self.replay, receivers.layer
        number = replay.host.block(layer, "attention")
        begins = int(block.positions.chosen.any(dim=0).nonzero()[0])
        first = begins if replay.can_start_at(number, begins) else 0
        here = slice(first, None)
        sent = self._sent(block, here)
        entering = self.target.of(layer, "attention").reads.at(here).change(sent, self.scale)
        values = self.target.of(layer, "attention").z[:, here]
        z_patched = values.cpu().repeat(len(sent), 1, 1, 1, 1)
        self.batching.silent().fill(
            z_patched,
            (sent != 0).flatten(1).any(1).nonzero()[:, 0].cpu(),
            replay.numbers_per_variant(first),
            lambda some: self.readers.attention_z(layer, entering[some], self.part, first),
        )
        return z_patched.to(values.device), first

    def _run_attention(
        self, block: _PathBlock, receivers: LayerSites, i: Tensor, j: Tensor, values: Tensor
    ) -> None:
        replay, layer = self.replay, receivers.layer
        number = replay.host.block(layer, "attention")
        z, begins = self._attention_z(block, receivers)
        z_values = self.target.of(layer, "attention").z
        index = receivers.index.to(z.device)[j]
        moved = z[i, :, :, index]  # [path, batch, pos, d_head]
        recorded = z_values[:, begins:, index].movedim(2, 0)
        columns = torch.arange(begins, replay.n_pos, device=z.device)
        name = replay.host.hook_name(layer, "attention", "z")

        def run(some: Tensor, first: int) -> Tensor:
            # The pass may start before the first position that the path changes.
            before = z_values[:, first:begins, index[some]].movedim(2, 0)
            rows = torch.cat([before, moved[some][:, :, max(first - begins, 0) :]], dim=2)
            rows, heads = rows.flatten(0, 1), index[some].repeat_interleave(replay.batch)

            def put(value: Tensor, hook: Any) -> Tensor:
                value = value.clone()
                value[torch.arange(len(heads), device=value.device), :, heads] = rows
                return value

            stream = replay.recorded_stream(number, first, len(some))
            return replay.values(Variants(number, first, stream, [(name, put)]))

        self._fill(values, (moved != recorded).any(-1), columns, number, run)

    @torch.no_grad()
    def estimates(
        self, block: _PathBlock, gradients: dict[tuple[int, HeadKind], Tensor]
    ) -> Float[Tensor, "sender receiver"]:
        """Estimate how much each path changes the metric (exact for paths to the logits)."""
        receivers, n = block.receivers, len(block.senders.names)
        if not block.positions.chosen.any():
            return torch.zeros(block.shape, device="cpu")
        if receivers is None:
            senders = torch.arange(n, device="cpu")
            silent = replace(self, batching=self.batching.silent())
            mean = self.replay.metric.mean
            values = mean(silent.values(block, senders, torch.zeros_like(senders)))
            return (values - mean(self.baseline))[:, None]
        gradient = gradients[receivers.layer, receivers.kind]
        if receivers.kind in NEURON_KINDS:
            dz, columns = self._neuron_dz(block, receivers)
            index = receivers.index.to(gradient.device)
            along = gradient.squeeze(-1)[:, columns][:, :, index]
            return (dz.unflatten(0, (n, -1)) * along).sum((1, 2))
        z, begins = self._attention_z(block, receivers)
        dz = z - self.target.of(receivers.layer, "attention").z[:, begins:]
        index = receivers.index.to(z.device)
        return torch.einsum("nbphd,bphd->nh", dz[:, :, :, index], gradient[:, begins:, index])
