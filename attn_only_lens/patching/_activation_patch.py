"""Activation patching: exact, site by site, at the cost of what each site can change."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, ones_like
from tqdm.auto import tqdm

from attn_only_lens.axes import Tokens
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import HEAD_KINDS
from attn_only_lens.numerics import full_precision, is_count, matmul_precision
from attn_only_lens.patching.processes import Processes
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.resume import MemoryParts, PartStore
from attn_only_lens.patching.run_patches import Batching, PatchRunner, site_groups
from attn_only_lens.runs.edit_checks import require_same_edit
from attn_only_lens.runs.fingerprint import fingerprint
from attn_only_lens.runs.identity import Unidentified, identity
from attn_only_lens.runs.inputs import checked_tokens, option_reasons, reasons_not_to_run
from attn_only_lens.runs.interventions import ABLATIONS, DIRECTIONS, ablate
from attn_only_lens.runs.metrics import AnyMetric, Metric, as_metric
from attn_only_lens.runs.positions import Positions, PositionSet, resolve_positions
from attn_only_lens.runs.prompts import Prompts, prompt_pair
from attn_only_lens.runs.recording import Recording, RunPair, record, record_pair
from attn_only_lens.runs.replay import Replay, make_replay
from attn_only_lens.runs.sites import PARTS, LayerSites, Part, Sites, all_heads, resolve_sites


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
    progress: bool | str = True,
) -> Sweep:
    """Patch every site in turn, and measure.

    Exact: each value is that of a whole forward pass with the patch in it, to rounding. Only what
    a patch can change is computed (see `replay`), for many sites at once. A site whose patch
    cannot affect the metric has the value of the unpatched run.

    Args:
        model: converted by `convert`, or with exposed neuron-heads; without hooks of its own.
        clean: a text, texts, or tokens [batch, pos]; see `prompt_pair`.
        corrupted: the same for the other run, token for token.
        metric: `logit_diff(...)` and the like, or any function of logits [batch, pos, d_vocab].
        sites: `neuron_heads()`, `heads()`, `all_heads()`, or names; by default all heads.
        part: "z", a head's output; "pattern", its attention; "value"; "q". A patch of a
            neuron-head's query moves its pattern and nothing else. Several heads that share a
            neuron are patched together, unless a name says which.
        positions: "each" in turn, "all" at once, a number (-1 is each prompt's last token), or a
            list of them.
        direction: "denoise", clean activations into the corrupted run; "noise", the other way; or
            an ablation of z in the clean run: to "zero", to the "mean" over all real tokens of
            all prompts, to another prompt's z there ("resample": the next one's, and the first's
            for the last), or of a neuron-head's attention to the "bias" token.
        mask: 1 for real tokens, 0 for padding, where prompts are tokens.
        reference: a text, or tokens [batch, pos] without padding, to take means or other prompts'
            activations from; by default the clean prompts. For "resample" in their shape: prompt
            i is resampled from row i, so that the caller draws them.
        batch_size: sites in one forward pass; by default as many as fit in memory, halved whenever
            it runs out. It changes roundings and nothing else.
        resume: a folder to write results to as they come. An interrupted sweep resumes there; a
            folder of another sweep is refused. A metric of your own is identified by its code and
            the values it depends on (see `custom`). Needed under `accelerate launch`, where
            processes share the work.
        progress: whether to show a bar; a text is its label.

    Returns:
        The metric after each patch, and its score: 0 is the corrupted run, 1 the clean one.

    Raises:
        InputError: with every reason: prompts, metric, sites or positions that do not fit.
        UnsupportedModelError: the model, run in parts, has other logits, or an edit of the sites
            in it differs from a hook in a whole run: both are tested first.
        CheckpointError: files in the folder `resume` are damaged.

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
    _check(model, part, direction, reference, batch_size)
    chosen = resolve_sites(model, all_heads() if sites is None else sites)
    pair = prompt_pair(model, clean, corrupted, mask)
    where = resolve_positions(pair, positions)
    runs = record_pair(model, pair, metric, chosen, part)
    tokens = None if reference is None else checked_tokens(model, reference)
    target, source, baseline = runs.target(direction)
    if direction in ABLATIONS:
        source = _ablate(model, runs, direction, tokens, chosen)

    groups = site_groups(chosen, where)
    parts: MemoryParts | PartStore = MemoryParts()
    if resume is not None:
        settings = _settings(model, runs, as_metric(metric), chosen, where, part, direction, tokens)
        parts = PartStore(resume, settings, len(groups))
    processes = Processes(resume)
    done = [parts.has(i) for i in range(len(groups))]
    mine = [i for i in processes.share(range(len(groups))) if not done[i]]
    total = sum(len(groups[i]) for i in mine)
    hidden = not (progress and processes.first)
    label = progress if isinstance(progress, str) else processes.name
    with tqdm(total=total, unit="site", desc=label, disable=hidden) as bar:
        replay = make_replay(model, target, runs.metric)
        check_edits(replay.precise, chosen, where, part)
        batching = Batching(model, batch_size, bar.update, replay.numbers_per_token)
        runner = PatchRunner(replay, source, part, baseline, batching)
        for i in mine:
            parts.write(i, groups[i].frame(runner.values(groups[i])))
    processes.wait()
    return Sweep.of_runs(model, runs, parts.read_all(), part, direction)


def _check(model: Any, part: str, direction: str, reference: object, batch_size: object) -> None:
    reasons = reasons_not_to_run(model)
    if batch_size is not None and not is_count(batch_size, 1):
        reasons.append(f"got batch_size={batch_size!r}; expected 1 or more, or None")
    reasons += option_reasons("part", part, PARTS)
    reasons += option_reasons("direction", direction, (*DIRECTIONS, *ABLATIONS))
    if direction in ABLATIONS and part != "z":
        reasons.append(f"got part={part!r} with direction={direction!r}; an ablation is of z")
    if reference is not None and direction not in ("mean", "resample"):
        reasons.append(f"got a reference with direction={direction!r}, which uses none")
    InputError.raise_if(reasons, "this cannot be patched")


@full_precision()
def check_edits(
    replay: Replay, sites: Sequence[LayerSites], positions: Sequence[PositionSet], part: Part
) -> None:
    """Test the edits of the sweep on all positions, and from one of those asked for on."""
    starts = {int(each.where.any(dim=0).nonzero()[0]) for each in positions}
    later = sorted(starts - {0}) or [0]
    for kind in HEAD_KINDS:
        layers = sorted({each.layer for each in sites if each.kind == kind})
        if layers:
            block = replay.host.block(layers[0], kind)
            for first in sorted({0, replay.start(block, later[len(later) // 2])}):
                require_same_edit(replay, kind, layers, part, first)


def _ablate(
    model: Any,
    runs: RunPair,
    to: str,
    reference: Tokens | None,
    sites: Sequence[LayerSites],
) -> Recording:
    """Return the clean run with ablated heads, by means or prompts of the reference if any."""
    other, real = runs.clean, runs.pair.real
    if reference is not None:
        layers = [each.layer for each in sites if each.kind == "neuron"]
        other = record(model, reference, None, layers=layers, names=runs.clean.hooked)
        real = ones_like(reference).bool()
    return ablate(runs.clean, other, to, real)  # type: ignore[arg-type]


def _settings(
    model: Any,
    runs: RunPair,
    metric: Metric,
    sites: Sequence[LayerSites],
    positions: Sequence[PositionSet],
    part: str,
    direction: str,
    reference: Tokens | None,
) -> dict[str, Any]:
    """Return everything that values depend on, so that no other sweep is resumed."""
    pair = runs.pair
    return {
        "model": fingerprint(model),
        "clean": pair.clean.tolist(),
        "corrupted": pair.corrupted.tolist(),
        "mask": None if pair.mask is None else pair.mask.tolist(),
        "reference": None if reference is None else reference.tolist(),
        "metric": metric.name,
        "metric_code": metric_identity(metric),
        "sites": [name for each in sites for name in each.names],
        "positions": [each.label for each in positions],
        "float32 products": matmul_precision(),
        "part": part,
        "direction": direction,
    }


def metric_identity(metric: Metric) -> str:
    """Return what identifies a metric in settings that results depend on."""
    if metric.version is not None:
        return f"version {metric.version}"
    try:
        return identity(metric.bound)
    except Unidentified as error:
        raise InputError(
            [
                f"{metric.name}: {error}; expected a function that depends on plain values, arrays "
                "and functions, or a version: p.custom(fn, version='1'), with another one whenever "
                "fn changes"
            ],
            "it cannot be told whether a resumed sweep has the same metric",
        ) from error
