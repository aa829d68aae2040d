"""Activation patching: exact, site by site, at the cost of what each site can change."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.axes import Tokens
from attn_only_lens.errors import PatchingError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import HEAD_KINDS
from attn_only_lens.numerics import full_precision, is_count, matmul_precision
from attn_only_lens.patching.processes import Processes
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.resume import PartStore
from attn_only_lens.patching.sweep import Batching, Sweeper, frame_of, groups_of
from attn_only_lens.runs.edits import PARTS, Part
from attn_only_lens.runs.identity import Unidentified, fingerprint, identity
from attn_only_lens.runs.inputs import checked_tokens
from attn_only_lens.runs.metrics import AnyMetric, Metric, as_metric
from attn_only_lens.runs.paired_runs import Runs, not_one_of, reasons_against, recorded
from attn_only_lens.runs.positions import Positions, PositionSet, resolve_positions
from attn_only_lens.runs.prompts import Prompts, prompt_pair
from attn_only_lens.runs.recording import record
from attn_only_lens.runs.replacements import ABLATIONS, DIRECTIONS, Source, ablated, patched
from attn_only_lens.runs.replay import Replay, replay_of
from attn_only_lens.runs.replay.trials import require_same
from attn_only_lens.runs.sites import LayerSites, Sites, all_heads, resolve

__all__ = ["activation_patch"]


def activation_patch(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    *,
    sites: Sites | None = None,
    part: Part = "z",
    positions: Positions = "each",
    direction: str = "denoise",
    mask: Tensor | None = None,
    reference: str | Tokens | None = None,
    batch_size: int | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
) -> Sweep:
    """Patch every site in turn, and measure.

    Exact: each value is that of a whole forward pass with the patch in it, to rounding. Only what
    a patch can change is computed (see `replay`), for many sites at once. A site whose patch
    changes nothing that the metric can feel has the value of the unpatched run.

    Args:
        model: converted by `convert`, or with exposed neuron-heads; without hooks of its own.
        clean: a text, texts, or tokens [batch, pos]; see `prompt_pair`.
        corrupted: the same for the other run, token for token.
        metric: `logit_diff(...)` and the like, or any function of logits [batch, pos, d_vocab].
        sites: `neuron_heads()`, `heads()`, `all_heads()`, or names; by default all heads.
        part: "z", what a head puts out; "pattern", what it attends to; "value"; "q". A patch of a
            neuron-head's query moves its pattern and nothing else. Several heads that share a
            neuron are patched together, unless a name says which.
        positions: "each" in turn, "all" at once, a number (-1 is each prompt's last token), or a
            list of them.
        direction: "denoise", clean activations into the corrupted run; "noise", the other way; or
            an ablation of z in the clean run: to "zero", to the "mean" over all real tokens of
            all prompts, to what another prompt has there ("resample": the next one, and the first
            for the last), or of a neuron-head's attention to the "bias" token.
        mask: 1 for real tokens, 0 for padding, where prompts are tokens.
        reference: a text, or tokens [batch, pos] without padding, to take means or other prompts'
            activations from; by default the clean prompts. For "resample" in their shape: row i is
            what prompt i is resampled from, so that to draw them is the caller's.
        batch_size: sites in one forward pass; by default what memory allows, halved whenever it
            runs out. It changes roundings and nothing else.
        resume: a folder to write results to as they come. A sweep that was interrupted goes on
            from there; a folder of another sweep is refused. A metric of your own is identified by
            its code and by what it depends on (see `custom`). Needed under `accelerate launch`,
            where processes share the work.
        progress: whether to show a bar.

    Returns:
        The metric after each patch, and its score: 0 is the corrupted run, 1 the clean one.

    Raises:
        PatchingError: with every reason: prompts, metric, sites or positions that do not fit.
        UnsupportedModelError: the model, run in parts, is not itself, or an edit of the sites in
            it does not do what a hook in a whole run does: both are tried first.

    Example:
        >>> import torch
        >>> from attn_only_lens import convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> sweep = p.activation_patch(
        ...     model, torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]),
        ...     p.logit_diff(correct=7, wrong=8), sites=p.neuron_heads(), progress=False)
        >>> len(sweep.to_frame())  # 512 neurons at 3 positions
        1536
    """
    part, direction = _checked(model, part, direction, reference, batch_size)
    chosen = resolve(model, all_heads() if sites is None else sites)
    pair = prompt_pair(model, clean, corrupted, mask)
    where = resolve_positions(pair, positions)
    runs = recorded(model, pair, metric, chosen, part)
    target = runs.corrupted if direction == "denoise" else runs.clean
    tokens = None if reference is None else checked_tokens(model, reference)
    source = _source(model, runs, direction, tokens, chosen)
    groups = groups_of(chosen, where)
    store = None
    if resume is not None:
        settings = _settings(model, runs, as_metric(metric), chosen, where, part, direction)
        settings["reference"] = None if tokens is None else tokens.tolist()
        store = PartStore(resume, settings)
    processes = Processes(store)
    done = [store is not None and store.has(_id(i)) for i in range(len(groups))]
    mine = [i for i in processes.share(range(len(groups))) if not done[i]]
    baseline = runs.corrupted_value if direction == "denoise" else runs.clean_value
    frames: list[pd.DataFrame] = []
    total = sum(len(groups[i]) for i in mine)
    shown = progress and processes.first
    with tqdm(total=total, unit="site", desc=processes.name, disable=not shown) as bar:
        replay = replay_of(model, target, runs.metric)
        batching = Batching(model, batch_size, bar.update, replay.numbers_of_token)
        with full_precision():
            _try(replay.judge, chosen, where, part)
        sweeper = Sweeper(replay, source, part, baseline, batching)
        for i in mine:
            frame = frame_of(groups[i], sweeper.values(groups[i]))
            if store is None:
                frames.append(frame)
            else:
                store.write(_id(i), frame)
    processes.wait()
    if store is None:
        values = pd.concat(frames, ignore_index=True)
    else:
        values = store.read_all([_id(i) for i in range(len(groups))])
    return Sweep.of(
        values,
        part=part,
        direction=direction,
        metric=runs.metric.name,
        clean_value=runs.clean_value,
        corrupted_value=runs.corrupted_value,
        n_prompts=len(pair.clean),
        model=str(getattr(model.cfg, "model_name", "")),
    )


def _checked(
    model: Any, part: str, direction: str, reference: object, batch_size: object
) -> tuple[Part, str]:
    reasons = reasons_against(model)
    if batch_size is not None and not is_count(batch_size, 1):
        reasons.append(f"got batch_size={batch_size!r}; expected 1 or more, or None")
    reasons += not_one_of("part", part, PARTS)
    reasons += not_one_of("direction", direction, (*DIRECTIONS, *ABLATIONS))
    if direction in ABLATIONS and part != "z":
        reasons.append(f"got part={part!r} with direction={direction!r}; an ablation is of z")
    if reference is not None and direction not in ("mean", "resample"):
        reasons.append(f"got a reference with direction={direction!r}, which uses none")
    if reasons:
        raise PatchingError(reasons, "this cannot be patched")
    return part, direction  # type: ignore[return-value]


def _try(
    replay: Replay, sites: Sequence[LayerSites], positions: Sequence[PositionSet], part: Part
) -> None:
    """Try the edits that are to be made, for all positions, and from one of those asked for on."""
    starts = {int(each.where.any(dim=0).nonzero()[0]) for each in positions}
    later = sorted(starts - {0}) or [0]
    for kind in HEAD_KINDS:
        layers = sorted({each.layer for each in sites if each.kind == kind})
        if layers:
            block = host_of(replay.model).block(layers[0], kind)
            for first in sorted({0, replay.start(block, later[len(later) // 2])}):
                require_same(replay, kind, layers, part, first)


def _source(
    model: Any,
    runs: Runs,
    direction: str,
    reference: Tokens | None,
    sites: Sequence[LayerSites],
) -> Source:
    """What is patched in."""
    if direction in DIRECTIONS:
        return patched(runs.clean if direction == "denoise" else runs.corrupted)
    clean, other, real = runs.clean, runs.clean, runs.pair.real
    if reference is not None:
        layers = [each.layer for each in sites if each.kind == "neuron"]
        other = record(model, reference, None, layers=layers, names=clean.hooked)
        real = torch.ones_like(reference, dtype=torch.bool)
    return ablated(clean, other, direction, real)  # type: ignore[arg-type]


def _id(i: int) -> str:
    return f"{i:06d}"


def _settings(
    model: Any,
    runs: Runs,
    metric: Metric,
    sites: Sequence[LayerSites],
    positions: Sequence[PositionSet],
    part: str,
    direction: str,
) -> dict[str, Any]:
    """Everything that values depend on, so that nothing is resumed that began otherwise."""
    pair = runs.pair
    return {
        "model": fingerprint(model),
        "clean": pair.clean.tolist(),
        "corrupted": pair.corrupted.tolist(),
        "mask": None if pair.mask is None else pair.mask.tolist(),
        "metric": metric.name,
        "metric_code": _identified(metric),
        "sites": [name for each in sites for name in each.names],
        "positions": [each.label for each in positions],
        "float32 products": matmul_precision(),
        "part": part,
        "direction": direction,
    }


def _identified(metric: Metric) -> str:
    """What tells a metric from another of its name."""
    if metric.version is not None:
        return f"version {metric.version}"
    try:
        return identity(metric.bound)
    except Unidentified as error:
        raise PatchingError(
            [
                f"{metric.name}: {error}; expected a function that depends on plain values, arrays "
                "and functions, or a version: p.custom(fn, version='1'), with another one whenever "
                "fn changes"
            ],
            "it cannot be told whether a resumed sweep has the same metric",
        ) from error
