"""Activation patching: exact, site by site, at the cost of what each site can change."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.axes import Tokens
from attn_only_lens.errors import InputError
from attn_only_lens.numerics import is_count, matmul_precision, precision_reasons
from attn_only_lens.patching.over_prompts import OverPrompts
from attn_only_lens.patching.processes import Processes
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.resume import MemoryParts, PartStore
from attn_only_lens.patching.run_patches import Batching, PatchRunner, check_edits, together
from attn_only_lens.patching.site_groups import SiteGroup, site_groups
from attn_only_lens.patching.sweep_rows import SweepRows
from attn_only_lens.runs.fingerprint import fingerprint
from attn_only_lens.runs.identity import Unidentified, identity
from attn_only_lens.runs.inputs import checked_tokens, option_reasons, reasons_not_to_run
from attn_only_lens.runs.interventions import ABLATIONS, DIRECTIONS, ablate
from attn_only_lens.runs.metrics import AnyMetric, Metric, as_metric
from attn_only_lens.runs.positions import Positions, PositionSet
from attn_only_lens.runs.prompts import PromptPair, Prompts, prompt_pair, single_prompts
from attn_only_lens.runs.recording import Recording, RunPair, record, record_pair
from attn_only_lens.runs.replay import make_replay
from attn_only_lens.runs.sites import PARTS, LayerSites, Part, Sites, hook_name, split_positions


def activation_patch(
    model: Any,
    clean: Prompts,
    corrupted: Prompts | None,
    metric: AnyMetric,
    *,
    sites: Sites | None = None,
    part: Part = "z",
    positions: Positions = "each",
    direction: str = "denoise",
    mask: Tensor | None = None,
    reference: str | Tokens | None = None,
    per_prompt: bool = False,
    batch_size: int | None = None,
    precision: str | None = None,
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
        corrupted: the same for the other run, token for token; None for an ablation without one,
            whose scores are shares of the clean run's metric.
        metric: `logit_diff(...)` and the like, or any function of logits [batch, pos, d_vocab].
        sites: `neuron_heads()`, `heads()`, `all_heads()`, or names; by default all heads.
        part: "z", a head's output; "pattern", its attention; "value"; "q"; "k", of attention
            heads. A patch of a neuron-head's query moves its pattern and nothing else. Several
            heads that share a neuron are patched together, unless a name says which. Values and
            keys that grouped queries share are refused.
        positions: "each" in turn, "all" at once, a number (-1 is each prompt's last token), a list
            of them, or by role: `{"subject": [2, 4], "end": -1}`, one for all prompts or one of
            each, counted in its own tokens.
        direction: "denoise", clean activations into the corrupted run; "noise", the other way; or
            an ablation of z in the clean run: to "zero", to the "mean" over all real tokens of
            all prompts, to another prompt's z there ("resample": the next one's, and the first's
            for the last), or of a neuron-head's attention to the "bias" token.
        mask: 1 for real tokens, 0 for padding, where prompts are tokens.
        reference: a text, or tokens [batch, pos] without padding, to take means or other prompts'
            activations from; by default the clean prompts. For "resample" in their shape: prompt
            i is resampled from row i, so that the caller draws them.
        per_prompt: whether to return a row for each prompt of each site; by default one for each
            site, the mean over prompts with its standard errors (see `Sweep`).
        batch_size: sites in one forward pass; by default as many as fit in memory, halved whenever
            it runs out. It changes roundings and nothing else.
        precision: "tf32", on NVIDIA GPUs, or "bf16" rounds what enters matrix products in the
            blocks of a float32 model: a faster approximation. The two runs, all tests, the
            unembedding and the metric stay in full precision, and a sample of rows is run in both:
            `Sweep.rounding` says by how much their scores differ. By default nothing is rounded
            but as the model's dtype and torch's own settings say.
        resume: a folder to write results to as they come. An interrupted sweep resumes there; a
            folder of another sweep is refused. A metric of your own is identified by its code and
            the values it depends on (see `custom`). Needed under `accelerate launch`, where
            processes share the work.
        progress: whether to show a bar; a text is its label.

    Returns:
        The metric after each patch, and its score: 0 is the corrupted run, 1 the clean one.

    Raises:
        InputError: with every reason: prompts, metric, sites or positions that do not fit; prompts
            without values of their own, under `per_prompt`.
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
    reasons = one_prompt_reasons(corrupted, direction)
    parameter = next(model.parameters())
    reasons += precision_reasons(precision, parameter.dtype, parameter.device)
    _check(model, part, direction, reference, batch_size, reasons)
    pair = pair_or_single(model, clean, corrupted, mask)
    groups = site_groups(model, pair, sites, positions, part)
    chosen = tuple(dict.fromkeys(each.sites for each in groups))
    runs = record_pair(model, pair, metric, chosen, part)
    tokens = None if reference is None else checked_tokens(model, reference)
    target, source, baseline = runs.target(direction)
    if direction in ABLATIONS:
        source = ablated_source(model, runs, direction, tokens, chosen)
    over = OverPrompts.of_runs(runs, direction, per_prompt)

    parts: MemoryParts | PartStore = MemoryParts()
    if resume is not None:
        settings = _settings(model, runs, as_metric(metric), groups, part, direction, tokens)
        settings["precision"] = precision
        settings["at"] = None if sites is None else split_positions(sites)
        parts = PartStore(resume, settings, len(groups))
    processes = Processes(resume)
    done = [parts.has(i) for i in range(len(groups))]
    mine = [i for i in processes.share(range(len(groups))) if not done[i]]
    total = sum(len(groups[i]) for i in mine)
    hidden = not (progress and processes.first)
    label = progress if isinstance(progress, str) else processes.name
    with tqdm(total=total, unit="site", desc=label, disable=hidden) as bar:
        replay = make_replay(model, target, runs.metric)
        batching = Batching(model, batch_size, bar.update, replay.numbers_per_token)
        runner = PatchRunner(replay, source, part, baseline, batching, precision)
        first = runner.earliest(groups)
        check_edits(replay.precise, groups, part, (0, first) if first else ())
        for batch in together([groups[i] for i in mine]):
            found = runner.values([groups[mine[place]] for place in batch])
            for place, values in zip(batch, found, strict=True):
                column = pd.DataFrame({"value": values.flatten().numpy()})
                parts.write(mine[place], column)
        errors = None if precision is None else runner.rounding(groups)
    processes.wait()
    values = torch.from_numpy(parts.read_all()["value"].to_numpy(copy=True)).view(-1, len(baseline))
    of_groups = values.split([len(each) for each in groups])
    rows = SweepRows.of_groups(groups, [over.columns(each) for each in of_groups])
    sweep = Sweep.of_runs(model, runs, rows, part, direction)
    if errors is None:
        return sweep
    span = sweep.clean_value - sweep.corrupted_value
    largest = float((errors / span).abs().max()) if len(errors) else 0.0
    return replace(
        sweep, given=sweep.rows, precision=precision, rounding=largest, n_rounded=len(errors)
    )


def pair_or_single(
    model: Any, clean: Prompts, corrupted: Prompts | None, mask: Tensor | None
) -> PromptPair:
    """Return a pair of prompts, or of one with itself where there is no other."""
    if corrupted is None:
        return single_prompts(model, clean, mask)
    return prompt_pair(model, clean, corrupted, mask)


def one_prompt_reasons(corrupted: object, direction: object) -> list[str]:
    """Return why there must be another run."""
    if corrupted is not None or direction in ABLATIONS:
        return []
    return [
        f"got no corrupted prompt with direction={direction!r}; expected one, or an ablation: "
        f"direction={' or '.join(map(repr, ABLATIONS))}"
    ]


def ablation_reasons(part: object, direction: object, reference: object) -> list[str]:
    """Return why a part, or a reference, does not go with a direction."""
    reasons = []
    if direction in ABLATIONS and part != "z":
        reasons.append(f"got part={part!r} with direction={direction!r}; an ablation is of z")
    if reference is not None and direction not in ("mean", "resample"):
        reasons.append(f"got a reference with direction={direction!r}, which uses none")
    return reasons


def _check(
    model: Any,
    part: str,
    direction: str,
    reference: object,
    batch_size: object,
    reasons: list[str],
) -> None:
    reasons = [*reasons_not_to_run(model), *reasons]
    if batch_size is not None and not is_count(batch_size, 1):
        reasons.append(f"got batch_size={batch_size!r}; expected 1 or more, or None")
    reasons += option_reasons("part", part, PARTS)
    reasons += option_reasons("direction", direction, (*DIRECTIONS, *ABLATIONS))
    reasons += ablation_reasons(part, direction, reference)
    InputError.raise_if(reasons, "this cannot be patched")


def ablated_source(
    model: Any,
    runs: RunPair,
    to: str,
    reference: Tokens | None,
    sites: Sequence[LayerSites],
) -> Recording:
    """Return the clean run with ablated heads, by means or prompts of the reference if any."""
    z = {hook_name(model, each.layer, "z") for each in sites if each.kind == "attention"}
    own = replace(runs.clean, hooked={name: runs.clean.hooked[name] for name in z})
    other, real = own, runs.pair.real
    if reference is not None:
        layers = [each.layer for each in sites if each.kind == "neuron"]
        other = record(model, reference, None, layers=layers, names=z)
        real = torch.ones_like(reference).bool()
    return ablate(own, other, to, real)  # type: ignore[arg-type]


def _settings(
    model: Any,
    runs: RunPair,
    metric: Metric,
    groups: Sequence[SiteGroup],
    part: str,
    direction: str,
    reference: Tokens | None,
) -> dict[str, Any]:
    """Return everything that values depend on, so that no other sweep is resumed."""
    pair = runs.pair
    sites = dict.fromkeys(each.sites for each in groups)
    sets = dict.fromkeys(each for group in groups for each in group.positions)
    return {
        "model": fingerprint(model),
        "clean": pair.clean.tolist(),
        "corrupted": pair.corrupted.tolist(),
        "mask": None if pair.mask is None else pair.mask.tolist(),
        "reference": None if reference is None else reference.tolist(),
        "metric": metric.name,
        "metric_code": metric_identity(metric),
        "sites": [name for each in sites for name in each.names],
        "positions": [each.label for each in sets],
        "where": [each.where.nonzero().tolist() for each in sets if _is_role(each)],
        "float32 products": matmul_precision(),
        "part": part,
        "direction": direction,
    }


def _is_role(positions: PositionSet) -> bool:
    """True for positions that their label does not give."""
    return isinstance(positions.label, str) and positions.label != "all"


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
