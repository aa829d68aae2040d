"""Path patching: replace what one head writes, as another head reads it, exactly.

For each pair of a sender s and a receiver r, with the run that is patched into (the target) and the
other one (the source):

    δ = write_s(source) - write_s(target)        at the requested positions (`engine/writes.py`)
    what r reads by the inputs of `part` moves by δ, through its norm; nothing else moves
    r's output moves by Δz_r(δ)                  (`engine/readers.py`)
    z_r + Δz_r is patched into the target run, and measured

(Wang et al. 2022, "Interpretability in the Wild"; Goldowsky-Dill et al. 2023, "Localizing Model
Behavior with Path Patching".) So a pair stands for all paths whose first edge is s → r; for the
receiver "logits", for the direct path. `scale` is that of the norm that r reads through: "held" at
the target run, so that changes by several senders add up; "anew" from x + δ, as if a hook edited
the stream. (TransformerLens' `get_act_patch_direct_path` is "held" in 3.9, "anew" in 4.) A norm
after s belongs to s; norms of queries and keys belong to r, and are computed anew.

Cost of a pair in flops of matrix products, for each prompt, if δ has T positions and S positions
follow the first of them, besides the run after r of 2 S Σ_{later blocks} parameters:

    neuron r      2 d_model T (4 d_model T if gated)
    attention r   the attention of r's layer, once for each sender and shared by all its heads
    logits        the unembedding
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.arguments import option_reasons
from attn_only_lens.engine.gradients import Tape, start_graph
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.interventions import DIRECTIONS
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.engine.metrics import (
    AnyMetric,
    BoundMetric,
    Metric,
    as_metric,
    no_gradient_reasons,
    require_differentiable,
    require_slope,
)
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.model_weights import in_float32
from attn_only_lens.engine.positions import Positions
from attn_only_lens.engine.prompts import PromptPair, Prompts, prompt_pair
from attn_only_lens.engine.readers import READ_PARTS, Readers, input_hooks
from attn_only_lens.engine.recording import Recording, RunPair, Side, run, run_pair
from attn_only_lens.engine.replay import make_replay
from attn_only_lens.engine.sites import LayerSites, Selection, Sites, all_heads, resolve_sites
from attn_only_lens.engine.writes import SCALES, Decomposition, Scale, decompose
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching._activation_patch import count_reasons, prompt_settings
from attn_only_lens.patching.job import Arrays, Job, require_folder
from attn_only_lens.patching.over_prompts import OverPrompts
from attn_only_lens.patching.path_runs import LOGITS, PathBlock, PathRunner, names_of, path_blocks
from attn_only_lens.patching.prompt_chunks import PromptChunk, PromptChunks, prompts_per_chunk
from attn_only_lens.patching.results import Paths
from attn_only_lens.patching.run_patches import Batching, check_edits
from attn_only_lens.patching.scored_frame import BASELINE, PromptTokens
from attn_only_lens.patching.site_groups import (
    Chunk,
    SiteGroup,
    position_sets,
    site_groups,
    split_prompts,
)
from attn_only_lens.precision import full_precision

_PROBLEM = "these paths cannot be patched"
_AT_ONCE = 256  # paths in a chunk of exact values
_ESTIMATES_AT_ONCE = 2**24  # paths in a chunk of estimates: some ten seconds


@warned_once()
@in_float32
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
    """Patch every path from a sender to a receiver that reads after it, and measure.

    Exact: the receiver reads what the sender wrote in the other run instead of what it wrote in
    this one. Everything else is held, and the change of the receiver's output runs on to the metric
    (see `_path_patch.py` for the definition and the flops of a pair).

    Args:
        model: converted by `convert`, or with exposed neuron-heads; without hooks of its own.
            A model in half precision is run in float32 during the call, with the same weights.
        clean: a text, texts, or tokens [batch, pos]; see `prompt_pair`.
        corrupted: the same for the corrupted run, with the same number of tokens.
        metric: `logit_diff(...)` and the like, or any function of logits [batch, pos, d_vocab].
        senders: `neuron_heads()`, `heads()`, `all_heads()`, or names, with a position if you like:
            `L3N7@13`.
        receivers: the same; or "logits", or names with "logits" among them.
        part: the inputs by which receivers read: "q", "k", "value"; "pattern", queries and keys;
            or "z", all of them, which gives the whole direct effect. With "value", the default, the
            gate of a neuron does not move. A neuron-head's pattern depends only on its query, so
            "q" and "pattern" are the same and it has no "k"; its value is the pre-activation, and
            in a gated MLP the product with what it gates. The receiver "logits" ignores it.
        positions: where the sender's write is replaced: "each" in turn, "all" at once, a number
            (-1 is each prompt's last token), a list of numbers, or roles; see `activation_patch`.
        direction: "denoise", clean writes into the corrupted run; or "noise", the other way.
        scale: "held": norms that receivers read through keep their scale; "anew": they compute it.
        top: how many paths to patch: those of the largest |estimated effect|, the exact change of
            the receiver's output times the gradient of the metric there. None for all.
        mask: 1 for real tokens, 0 for padding, if prompts are tokens.
        per_prompt: whether to return a row for each prompt of each path; by default one for each
            path, the mean over prompts with its standard errors (see `Paths`). With `top`, the
            paths are those of the largest |mean estimate|.
        prompts_at_once: pairs whose activations are held at once; see `activation_patch`.
        batch_size: paths in one forward pass; by default as many as fit in memory.
        resume: checkpoint folder; see `activation_patch`.
        progress: whether to show a progress bar; a text is its label.

    Returns:
        The metric after each patch, and its score: 0 is the corrupted run, 1 the clean one.

    Raises:
        InputError: with every reason: prompts, metric, heads or positions that do not fit; no
            receiver reads after a sender; a flat metric with `top`; with `per_prompt`, a metric
            that is one number of all prompts.
        UnsupportedModelError: the writes of the model do not add up to its stream; a receiver's
            attention is not a function of its hooked queries, keys and values; the model, run in
            parts, has other logits.
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
    receiving = _resolve_receivers(model, receivers, part)
    pair, metric = prompt_pair(model, clean, corrupted, mask), as_metric(metric)
    sending = site_groups(model, pair, senders, positions, "z")
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
    work, rows = patches.all_paths() if top is None else patches.largest(job, top)
    chunks = [Chunk(prompts, some_rows) for prompts in plan.prompts for some_rows in rows]
    compute = partial(patches.compute, work=work)
    for chunk, arrays in job.run(chunks, compute, unit="path"):
        patches.totals.add(chunk, torch.from_numpy(arrays["kept"]))

    # Collect
    return patches.results(work)


@dataclass(frozen=True, eq=False)
class _PathPlan:
    """The prompts, senders, receivers and metric of path patching."""

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
        """The prompts that are held at once, in order."""
        return split_prompts(len(self.pair.clean), self.prompts_at_once)

    def settings(self) -> dict[str, Any]:
        """Return everything that values depend on, so that no other results are resumed."""
        return {
            **prompt_settings(self.model, self.pair, self.metric, self.senders),
            "senders": [[*sender.rows["name"]] for sender in self.senders],
            "positions": [sender.rows["position"].tolist() for sender in self.senders],
            "receivers": [name for receiver in self.receivers for name in names_of(receiver)],
            "part": self.part,
            "direction": self.direction,
            "scale": self.scale,
            "prompts_at_once": self.prompts_at_once,
        }


class _Recorder:
    """Records both runs of some prompts, decomposed into what each sublayer writes."""

    def __init__(self, plan: _PathPlan) -> None:
        host = host_of(plan.model)
        layers = [sites.layer for sites in plan.receivers if sites and sites.kind == "attention"]
        self._names = tuple(name for layer in layers for name in input_hooks(host, layer))
        self._plan = plan
        self.runs: dict[Side, Decomposition] = {}

    def record(self, pair: PromptPair, *, distinct: bool) -> RunPair:
        """Record both runs, and keep their decompositions."""
        model, names = self._plan.model, self._names
        self.runs["clean"] = decompose(model, pair.clean, pair.mask, names=names)
        self.runs["corrupted"] = decompose(model, pair.corrupted, pair.mask, names=names)
        recordings = self.runs["clean"].recording, self.runs["corrupted"].recording
        return run_pair(model, pair, *recordings, self._plan.metric, distinct=distinct)


@dataclass(frozen=True)
class _BlockChunk:
    """Some blocks of paths."""

    blocks: range

    @property
    def key(self) -> str:
        return f"blocks-{self.blocks.start}-{self.blocks.stop}"

    @property
    def size(self) -> int:
        return len(self.blocks)


class _PathPatches:
    """Estimates and patches of paths, computed chunk by chunk."""

    def __init__(
        self, plan: _PathPlan, top: int | None, per_prompt: bool, batch_size: int | None
    ) -> None:
        self._plan, self._batch_size = plan, batch_size
        self._recorder = _Recorder(plan)
        self._prompts = PromptChunks(
            plan.model, plan.pair, plan.metric, plan.direction, self._recorder.record
        )
        first, run = self._prompts.first(plan.prompts), self._recorder.runs["clean"]
        at_once = plan.prompts_at_once
        self.blocks = list(path_blocks(run, plan.senders, plan.receivers, at_once))
        reason = (
            "no receiver reads what a sender has written; expected a later layer, or an "
            "attention head and a neuron of one layer (not if they read in parallel)"
        )
        InputError.raise_if([reason] * (not self.blocks), _PROBLEM)
        self.n_paths = sum(map(_n_paths, self.blocks))
        n_rows = min(top or self.n_paths, self.n_paths)
        self.totals = self._prompts.totals(plan.prompts, n_rows, per_prompt)
        if top is not None:
            _require_gradients(first)
        self.on_done: Callable[[int], object] = lambda n: None
        self._tested = set[bool]()

    def all_paths(self) -> tuple[pd.DataFrame, list[range]]:
        """Return all paths, and the rows of each chunk of them: whole blocks."""
        chunks = _chunks_of_blocks(self.blocks, _AT_ONCE)
        frames = [_all_paths(self.blocks, chunk.blocks) for chunk in chunks]
        ends = np.cumsum([0, *map(len, frames)]).tolist()
        return pd.concat(frames, ignore_index=True), [range(*bounds) for bounds in pairwise(ends)]

    def largest(self, job: Job, top: int) -> tuple[pd.DataFrame, list[range]]:
        """Return the paths of largest |mean estimate|, and the rows of each chunk of them."""
        chunks = _chunks_of_blocks(self.blocks, _ESTIMATES_AT_ONCE)
        picked = [
            pd.DataFrame(arrays)
            for _, arrays in job.run(chunks, partial(self.pick, top=top), unit="block")
        ]
        work = _largest(picked, top)
        ends = [*range(0, len(work), _AT_ONCE), len(work)]
        return work, [range(*bounds) for bounds in pairwise(ends)]

    def pick(self, chunk: _BlockChunk, top: int) -> Arrays:
        """Return the paths of some blocks with the largest |mean estimate|."""
        blocks = {i: self.blocks[i] for i in chunk.blocks}
        total = {i: torch.zeros(b.shape, device="cpu").double() for i, b in blocks.items()}
        for some_prompts in self._plan.prompts:
            prompts = self._prompts.of(some_prompts)
            runner = self._runner(prompts)
            gradients = _gradients(
                self._plan.model, prompts.target, prompts.runs.metric, self._plan.receivers
            )
            for i, block in blocks.items():
                estimates = runner.estimates(block.of_prompts(prompts.pair), gradients)
                total[i] += self.totals.weight(some_prompts) * estimates.cpu().double()
        picked = _pick(blocks, total, top)
        return {str(name): picked[name].to_numpy(copy=True) for name in picked}

    def compute(self, chunk: Chunk, work: pd.DataFrame) -> Arrays:
        """Return what is stored of the metric after each path of a chunk."""
        prompts = self._prompts.of(chunk.prompts)
        runner = self._runner(prompts)
        values = [
            runner.values(self.blocks[number].of_prompts(prompts.pair), i, j)
            for number, i, j in _by_block(work.iloc[chunk.rows.start : chunk.rows.stop])
        ]
        return {"kept": prompts.reduced(self.totals, torch.cat(values)).numpy()}

    def results(self, work: pd.DataFrame) -> Paths:
        """Return the results of the paths, once all chunks were added up."""
        plan, (clean_value, corrupted_value) = self._plan, self.totals.ends
        return Paths(
            _frame(self.blocks, work, self.totals),
            part=plan.part,
            scale=plan.scale,
            direction=plan.direction,
            metric=self.totals.name,
            clean_value=clean_value,
            corrupted_value=corrupted_value,
            n_prompts=self.totals.n_prompts,
            n_paths=self.n_paths,
            model=str(getattr(plan.model.cfg, "model_name", "")),
            tokens=PromptTokens.of_groups(plan.model, plan.pair, plan.senders),
        )

    def _runner(self, prompts: PromptChunk) -> PathRunner:
        """Return the runner of paths on some prompts, with the edits of receivers tested."""
        if prompts.runner is None:
            plan, runs = self._plan, self._recorder.runs
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
            prompts.runner = PathRunner(
                Readers(replay, target), source, plan.part, plan.scale, prompts.unpatched, batching
            )
        runner: PathRunner = prompts.runner
        return runner


def _require_gradients(prompts: PromptChunk) -> None:
    """Refuse a metric without a gradient at the run that is patched into."""
    span = prompts.runs.clean_value - prompts.runs.corrupted_value
    require_differentiable(prompts.runs.metric, prompts.target.logits)
    require_slope(prompts.runs.metric, prompts.target.logits, prompts.source.logits, span)


def _resolve_receivers(model: Any, receivers: Any, part: str) -> list[LayerSites | None]:
    """Return heads by layer and kind; then None for the logits, if they are receivers."""
    names = [receivers] if isinstance(receivers, str | HeadName) else receivers
    if isinstance(names, Selection) or not isinstance(names, Iterable):
        resolved: list[LayerSites | None] = list(resolve_sites(model, names))
    else:
        names = list(names)
        heads = [name for name in names if name != LOGITS]
        only_logits = bool(names) and not heads
        resolved = [] if only_logits else list(resolve_sites(model, heads))
        resolved += [None] * (len(heads) < len(names))
    if part == "k":
        neurons = [site.names[0] for site in resolved if site is not None and site.kind == "neuron"]
        reasons = [
            f"got part='k' and receivers such as {name}: a neuron-head's keys do not depend on the "
            "token"
            for name in neurons[:1]
        ]
        InputError.raise_if(reasons, _PROBLEM)
    return resolved


def _gradients(
    model: Any,
    target: Recording,
    metric: BoundMetric,
    receivers: Iterable[LayerSites | None],
) -> dict[tuple[int, HeadKind], Tensor]:
    """Return the gradient of the metric with respect to the z of the receivers."""
    places = {(receiver.layer, receiver.kind) for receiver in receivers if receiver is not None}
    if not places:
        return {}
    names = {place: host_of(model).hook_name(*place, "z") for place in sorted(places)}
    tape = Tape(names.values())
    with torch.enable_grad(), start_graph(model):
        logits = run(model, target.tokens, target.mask, tape.hooks)
        gradients = tape.gradients(metric.of_logits(logits))
    return {place: gradients[name] for place, name in names.items()}


def _chunks_of_blocks(blocks: Sequence[PathBlock], n_paths: int) -> list[_BlockChunk]:
    """Return chunks of consecutive blocks; every chunk but the last has at least so many paths."""
    ends, n = [0], 0
    for number, block in enumerate(blocks):
        n += _n_paths(block)
        if n >= n_paths or number == len(blocks) - 1:
            ends.append(number + 1)
            n = 0
    return [_BlockChunk(range(*bounds)) for bounds in pairwise(ends)]


def _n_paths(block: PathBlock) -> int:
    return block.shape[0] * block.shape[1]


def _pick(
    blocks: dict[int, PathBlock], estimates: dict[int, Float[Tensor, "sender receiver"]], top: int
) -> pd.DataFrame:
    """Return the paths of largest |estimated effect|: block, sender, receiver and estimate."""
    largest = LargestScores(top)
    rows: dict[tuple[int, int], tuple[int, int, int, float]] = {}
    for number, block in blocks.items():
        estimate = estimates[number]
        largest.add(estimate.abs(), block.first)
        still = {}
        for pair in map(tuple, largest.pairs.tolist()):
            i, j = pair[0] - block.first[0], pair[1] - block.first[1]
            inside = 0 <= i < estimate.shape[0] and 0 <= j < estimate.shape[1]
            still[pair] = (number, i, j, float(estimate[i, j])) if inside else rows[pair]
        rows = still
    return pd.DataFrame(sorted(rows.values()), columns=["block", "i", "j", "estimate"])


def _largest(picked: list[pd.DataFrame], top: int) -> pd.DataFrame:
    """Return the paths of largest |estimated effect| of all picks, by block."""
    paths = pd.concat(picked, ignore_index=True)
    kept = paths["estimate"].abs().nlargest(top, keep="first").index
    return paths.loc[kept.sort_values()].reset_index(drop=True)


def _all_paths(blocks: Sequence[PathBlock], numbers: range) -> pd.DataFrame:
    """Return every path of some blocks."""
    frames = []
    for number in numbers:
        n, m = blocks[number].shape
        i, j = np.repeat(np.arange(n), m), np.tile(np.arange(m), n)
        frames.append(pd.DataFrame({"block": number, "i": i, "j": j}))
    return pd.concat(frames, ignore_index=True)


def _by_block(work: pd.DataFrame) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each block's number with the senders and receivers of its paths."""
    for number, rows in work.groupby("block"):
        i, j = (torch.from_numpy(rows[name].to_numpy(np.int64, copy=True)) for name in "ij")
        yield int(number), i, j  # type: ignore[arg-type]


def _frame(blocks: Sequence[PathBlock], work: pd.DataFrame, totals: OverPrompts) -> pd.DataFrame:
    """Return a frame with a row for each path, or for each prompt of each path."""
    paths = pd.concat(
        [blocks[number].frame(i, j) for number, i, j in _by_block(work)], ignore_index=True
    )
    if "estimate" in work:
        clean, corrupted = totals.ends
        paths["estimate"] = BASELINE[totals.direction] + work["estimate"] / (clean - corrupted)
    columns = totals.columns()
    repeated = np.repeat(np.arange(len(paths)), len(columns["value"]) // len(paths))
    return paths.iloc[repeated].reset_index(drop=True).assign(**columns)
