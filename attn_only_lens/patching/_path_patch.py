"""Path patching: what one head writes, as another reads it, exactly.

For each pair of a sender s and a receiver r, and the run that is patched into (the target) and the
other one (the source):

    δ = write_s(source) - write_s(target)        at the positions asked for (`engine/writes.py`)
    what r reads by the inputs of `part` moves by δ, through its norm; nothing else moves
    r's output moves by Δz_r(δ)                  (`engine/readers.py`)
    and runs on to the metric: z_r + Δz_r is patched into the target run

(Wang et al. 2022, "Interpretability in the Wild"; Goldowsky-Dill et al. 2023, "Localizing Model
Behavior with Path Patching".) So the paths from s to the metric that are counted are those whose
first edge is s → r; of the receiver "logits", the direct one.

One convention holds for every pair, of heads and neurons alike: with `scale="held"` the norm that r
reads through keeps the scale that it had in the target run, so that the inputs that several senders
move add up; with "anew" it is computed from x + δ, as where a hook edits the stream. A norm after
s belongs to s: each run's write has that run's scale. Norms of queries and keys belong to r, and
are computed anew.

Cost, in flops of matrix products, of a pair of a sender and a receiver with T positions that δ is
at, S from the first of them on, for each prompt:

    neuron r      2 d_model T (4 d_model T if gated) + the run from after r on
    attention r   the attention of r's layer, once for each sender and shared by all its heads,
                  + the run from r's block on
    logits        the unembedding

The run on is that of an activation patch of r (`engine/replay`): 2 S Σ_{later blocks} parameters.
`top=k` makes Δz_r of every pair, k runs, and no more.

TransformerLens' `get_act_patch_direct_path` between attention heads is "held" in 3.9, "anew" in 4.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.engine.fingerprint import fingerprint
from attn_only_lens.engine.gradients import Tape, start_graph
from attn_only_lens.engine.in_float32 import in_float32
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.inputs import option_reasons, reasons_not_to_run
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
from attn_only_lens.patching._activation_patch import count_reasons, roles_where
from attn_only_lens.patching.over_prompts import OverPrompts
from attn_only_lens.patching.path_results import Paths
from attn_only_lens.patching.path_runs import LOGITS, PathBlock, PathRunner, names_of, path_blocks
from attn_only_lens.patching.processes import is_first, require_folder
from attn_only_lens.patching.prompt_runs import PromptRuns, measure_parts, prompts_per_run
from attn_only_lens.patching.prompt_tokens import PromptTokens
from attn_only_lens.patching.resume import MemoryParts, PartStore
from attn_only_lens.patching.run_patches import Batching, check_edits
from attn_only_lens.patching.scored_frame import BASELINE
from attn_only_lens.patching.site_groups import SiteGroup, site_groups
from attn_only_lens.patching.sweep_parts import SweepPart, sweep_parts
from attn_only_lens.precision import full_precision

_PROBLEM = "these paths cannot be patched"
_AT_ONCE = 256  # paths in a part of exact values
_ESTIMATES_AT_ONCE = 2**24  # in a part of estimates: some ten seconds


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

    Exact: the receiver reads what the sender wrote in the other run in place of what it wrote in
    this one, everything else held, and the change of what the receiver puts out runs on to the
    metric (see `_path_patch.py` for the definition, and the flops of a pair).

    Args:
        model: converted by `convert`, or with exposed neuron-heads; without hooks of its own.
            A model in half precision is run in float32 during the call, with the same weights.
        clean: a text, texts, or tokens [batch, pos]; see `prompt_pair`.
        corrupted: the same for the other run, token for token.
        metric: `logit_diff(...)` and the like, or any function of logits [batch, pos, d_vocab].
        senders: `neuron_heads()`, `heads()`, `all_heads()`, or names, which may say where they
            are: `L3N7@13`.
        receivers: the same; or "logits", or names with "logits" among them.
        part: the inputs by which receivers read: "q", "k", "value"; "pattern", queries and keys;
            "z", all of them, which the whole direct effect takes: by "value" alone, the default, a
            neuron's gate stays. A neuron-head's pattern depends on its query alone ("q" and
            "pattern" are one, and it has no "k"); its value is the pre-activation too, and in a
            gated MLP the product with what it gates. It is of no account to the logits.
        positions: where the sender's write is replaced: "each" in turn, "all" at once, a number
            (-1 is each prompt's last token), a list of them, or by role; see `activation_patch`.
        direction: "denoise", clean writes into the corrupted run; or "noise", the other way.
        scale: "held", norms that receivers read through keep their scale; "anew", they compute it.
        top: how many paths to patch: those of the largest |estimated effect|, the exact change of
            what the receiver puts out times the gradient of the metric there. None for all.
        mask: 1 for real tokens, 0 for padding, where prompts are tokens.
        per_prompt: whether to return a row for each prompt of each path; by default one for each
            path, the mean over prompts with its standard errors (see `Paths`). With `top`, the
            paths are those of the largest |mean estimate|.
        prompts_at_once: pairs whose activations are held at once; see `activation_patch`.
        batch_size: paths in one forward pass; by default as many as fit in memory.
        resume: a folder to write results to as they come, as in `activation_patch`.
        progress: whether to show a bar; a text is its label.

    Returns:
        The metric after each patch, and its score: 0 is the corrupted run, 1 the clean one.

    Raises:
        InputError: with every reason: prompts, metric, heads or positions that do not fit; no
            receiver reads after a sender; a flat metric with `top`; with `per_prompt`, a metric
            without a value for each prompt.
        UnsupportedModelError: what parts of the model write does not add up to its stream; a
            receiver's attention is not a function of its hooked queries, keys and values; the
            model, run in parts, has other logits.
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
    reasons = [*reasons_not_to_run(model), *count_reasons(batch_size=batch_size, top=top)]
    reasons += count_reasons(prompts_at_once=prompts_at_once)
    reasons += option_reasons("part", part, READ_PARTS)
    reasons += option_reasons("direction", direction, DIRECTIONS)
    reasons += option_reasons("scale", scale, SCALES)
    if top is not None:
        reasons += no_gradient_reasons()
    InputError.raise_if(reasons, _PROBLEM)
    require_folder(resume)
    receiving = _resolve_receivers(model, receivers, part)
    pair = prompt_pair(model, clean, corrupted, mask)
    sending = site_groups(model, pair, senders, positions, "z")
    metric, host, traced = as_metric(metric), host_of(model), top is not None
    every = resolve_sites(model, all_heads())
    at_once = prompts_per_run(
        model, pair, metric, every, "value", prompts_at_once, resume, traced=traced, apart=True
    )
    prompts = sweep_parts(model, pair, sending, at_once, None)
    reading = [
        receiver.layer
        for receiver in receiving
        if receiver is not None and receiver.kind == "attention"
    ]
    names = tuple(name for layer in reading for name in input_hooks(host, layer))
    apart: dict[Side, Decomposition] = {}  # the runs that were recorded last

    def record(pair: PromptPair, whole: bool) -> RunPair:
        apart["clean"] = decompose(model, pair.clean, pair.mask, names=names)
        apart["corrupted"] = decompose(model, pair.corrupted, pair.mask, names=names)
        recordings = apart["clean"].recording, apart["corrupted"].recording
        return run_pair(model, pair, *recordings, metric, distinct=whole)

    runs = PromptRuns(model, pair, metric, direction, None, record)
    first = runs.first_of(prompts)
    blocks = list(path_blocks(apart["clean"], sending, receiving, at_once))
    n_paths = sum(n * m for n, m in (path_block.shape for path_block in blocks))
    if not blocks:
        raise InputError(
            [
                "no receiver reads what a sender has written; expected a later layer, or an "
                "attention head and a neuron of one layer (not where they read in parallel)"
            ],
            _PROBLEM,
        )
    n_picked = n_paths if top is None else min(top, n_paths)
    over = runs.over(prompts, n_picked, per_prompt)
    if traced:
        span = first.runs.clean_value - first.runs.corrupted_value
        require_differentiable(first.runs.metric, first.target.logits)
        require_slope(first.runs.metric, first.target.logits, first.source.logits, span)

    picks = _chunks(blocks, _ESTIMATES_AT_ONCE) if traced else []
    if top is None:
        sizes = [sum(map(_n_paths, blocks[chunk.start : chunk.stop])) for chunk in _chunks(blocks)]
        ends = np.cumsum([0, *sizes]).tolist()
    else:
        ends = [*range(0, n_picked, _AT_ONCE), n_picked]
    rows = [range(start, stop) for start, stop in pairwise(ends)]
    parts = [SweepPart(whole.prompts, some) for whole in prompts for some in rows]
    store = None
    if resume is not None:
        settings = _settings(model, pair, metric, sending, receiving)
        settings |= {"part": part, "direction": direction, "scale": scale, "top": top}
        settings |= {"per_prompt": bool(per_prompt), "prompts_at_once": at_once}
        store = PartStore(resume, settings, len(picks) + len(parts))
    label = progress if isinstance(progress, str) else None
    hidden = not (progress and is_first())
    with tqdm(total=len(prompts) * n_picked, unit="path", desc=label, disable=hidden) as bar:
        sender_positions = tuple(
            dict.fromkeys(position for group in sending for position in group.positions)
        )
        reading_heads = [
            SiteGroup.product(receiver, sender_positions)
            for receiver in receiving
            if receiver is not None
        ]
        tested, made = set[bool](), dict[range, PathRunner]()

        def runner_of(prompts: range) -> PathRunner:
            if prompts not in made:
                made.clear()
                run = runs.of(prompts)
                replay = make_replay(model, run.target, run.runs.metric)
                if run.padded not in tested:
                    heads = [group.of_prompts(run.runs.pair) for group in reading_heads]
                    check_edits(replay, heads, "z")
                    tested.add(run.padded)
                target, source = apart["clean"], apart["corrupted"]
                if direction == "denoise":
                    target, source = source, target
                readers = Readers(replay, target)
                batching = Batching(model, batch_size, bar.update, replay.numbers_per_token)
                made[prompts] = PathRunner(readers, source, part, scale, run.unpatched, batching)
            return made[prompts]

        def pick(number: int) -> pd.DataFrame:
            """Return the paths with the largest |mean estimate| in one chunk of blocks."""
            assert top is not None
            chunk = {i: blocks[i] for i in picks[number]}
            total = {
                i: torch.zeros(block.shape, device="cpu").double() for i, block in chunk.items()
            }
            for part_of_prompts in prompts:
                some = part_of_prompts.prompts
                runner, run = runner_of(some), runs.of(some)
                gradients = _gradients(model, run.target, run.runs.metric, receiving)
                weight = sum(over.weights[some.start : some.stop])
                for i, block in chunk.items():
                    estimates = runner.estimates(block.of_prompts(run.runs.pair), gradients)
                    total[i] += weight * estimates.cpu().double()
            return _pick(chunk, total, top)

        picked: MemoryParts | PartStore = store or MemoryParts()
        with (
            tqdm(total=len(blocks), unit="block", desc="estimates", disable=hidden) as estimated,
            picked.todo(range(len(picks)), lambda i: estimated.update(len(picks[i]))) as todo,
        ):
            for number in todo:
                picked.write(number, pick(number))
                estimated.update(len(picks[number]))
        if top is None:
            work = _every(blocks, range(len(blocks)))
        else:
            work = _largest([picked.read(i) for i in range(len(picks))], top)

        def measure(sweep_part: SweepPart) -> Tensor:
            runner, run = runner_of(sweep_part.prompts), runs.of(sweep_part.prompts)
            here = [block.of_prompts(run.runs.pair) for block in blocks]
            values = _values(runner, here, work.iloc[sweep_part.rows.start : sweep_part.rows.stop])
            return run.reduced(over, values).flatten()

        def on_other(number: int) -> None:
            bar.update(len(parts[number].rows))

        measure_parts(parts, store, measure, over.add, on_other, len(picks))
    return Paths(
        _frame(blocks, work, over),
        part=part,
        scale=scale,
        direction=direction,
        metric=over.name,
        clean_value=over.ends[0],
        corrupted_value=over.ends[1],
        n_prompts=len(pair.clean),
        n_paths=n_paths,
        model=str(getattr(model.cfg, "model_name", "")),
        tokens=PromptTokens.of_groups(model, pair, sending),
    )


def _settings(
    model: Any,
    pair: PromptPair,
    metric: Metric,
    senders: Sequence[SiteGroup],
    receivers: Sequence[LayerSites | None],
) -> dict[str, Any]:
    """Return what values depend on, besides plain options."""
    return {
        "model": fingerprint(model),
        "clean": pair.clean.tolist(),
        "corrupted": pair.corrupted.tolist(),
        "mask": None if pair.mask is None else pair.mask.tolist(),
        "metric": metric.name,
        "metric_identity": metric.identity(),
        "senders": [[*sender.rows["name"]] for sender in senders],
        "positions": [sender.rows["position"].tolist() for sender in senders],
        "where": roles_where(senders),
        "receivers": [name for receiver in receivers for name in names_of(receiver)],
    }


def _resolve_receivers(model: Any, receivers: Any, part: str) -> list[LayerSites | None]:
    """Heads by layer and kind; then None for the logits, if they are among the receivers."""
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
        reason = f"got part='k' and receivers such as {neurons[0]}" if neurons else ""
        InputError.raise_if(
            [f"{reason}: a neuron-head's keys do not depend on the token"] * bool(neurons), _PROBLEM
        )
    return resolved


def _gradients(
    model: Any,
    target: Recording,
    metric: BoundMetric,
    receivers: Iterable[LayerSites | None],
) -> dict[tuple[int, HeadKind], Tensor]:
    """Return the gradient of the metric by z of the receivers, in one run."""
    places = {(receiver.layer, receiver.kind) for receiver in receivers if receiver is not None}
    if not places:
        return {}
    names = {place: host_of(model).hook_name(*place, "z") for place in sorted(places)}
    tape = Tape(names.values())
    with torch.enable_grad(), start_graph(model):
        logits = run(model, target.tokens, target.mask, tape.hooks)
        gradients = tape.gradients(metric.of_logits(logits))
    return {place: gradients[name] for place, name in names.items()}


def _chunks(blocks: Sequence[PathBlock], n_paths: int | None = None) -> list[range]:
    """Return runs of blocks with so many paths, or one more block: what a part is about."""
    ends = [0]
    n, at_once = 0, _AT_ONCE if n_paths is None else n_paths
    for number, block in enumerate(blocks):
        n += _n_paths(block)
        if n >= at_once or number == len(blocks) - 1:
            ends.append(number + 1)
            n = 0
    return [range(*pair) for pair in pairwise(ends)]


def _n_paths(block: PathBlock) -> int:
    return block.shape[0] * block.shape[1]


def _pick(
    blocks: dict[int, PathBlock], estimates: dict[int, Float[Tensor, "sender receiver"]], top: int
) -> pd.DataFrame:
    """Return the paths of largest |estimated effect|, by their blocks, and numbers in these."""
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
    every = pd.concat(picked, ignore_index=True)
    kept = every["estimate"].abs().nlargest(top, keep="first").index
    return every.loc[kept.sort_values()].reset_index(drop=True)


def _every(blocks: Sequence[PathBlock], chunk: range) -> pd.DataFrame:
    """Return every path of some blocks."""
    shapes = [(number, *blocks[number].shape) for number in chunk]
    every = [
        {"block": number, "i": np.repeat(np.arange(n), m), "j": np.tile(np.arange(m), n)}
        for number, n, m in shapes
    ]
    return pd.concat(map(pd.DataFrame, every), ignore_index=True)


def _by_block(work: pd.DataFrame) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the number of each block, and the numbers of its paths' senders and receivers."""
    for number, of_block in work.groupby("block"):
        i, j = (torch.from_numpy(of_block[name].to_numpy(np.int64, copy=True)) for name in "ij")
        yield int(number), i, j  # type: ignore[arg-type]


def _values(
    runner: PathRunner, blocks: Sequence[PathBlock], work: pd.DataFrame
) -> Float[Tensor, "path prompt"]:
    """Return the metric of each prompt after the patch of each path."""
    return torch.cat([runner.values(blocks[number], i, j) for number, i, j in _by_block(work)])


def _frame(blocks: Sequence[PathBlock], work: pd.DataFrame, over: OverPrompts) -> pd.DataFrame:
    """Return a frame with a row for each path, or for each prompt of each path."""
    paths = pd.concat(
        [blocks[number].frame(i, j) for number, i, j in _by_block(work)], ignore_index=True
    )
    if "estimate" in work:
        clean, corrupted = over.ends
        paths["estimate"] = BASELINE[over.direction] + work["estimate"] / (clean - corrupted)
    columns = over.columns()
    repeated = np.repeat(np.arange(len(paths)), len(columns["value"]) // len(paths))
    return paths.iloc[repeated].reset_index(drop=True).assign(**columns)
