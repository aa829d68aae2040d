"""Activation patching: exact, site by site, at the cost of what each site can change."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import is_count
from attn_only_lens.axes import Tokens
from attn_only_lens.engine.fingerprint import fingerprint
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.inputs import checked_tokens, option_reasons, reasons_not_to_run
from attn_only_lens.engine.interventions import ABLATIONS, DIRECTIONS
from attn_only_lens.engine.metrics import AnyMetric, Metric, as_metric
from attn_only_lens.engine.positions import Positions
from attn_only_lens.engine.prompts import PromptPair, Prompts, prompt_pair, single_prompts
from attn_only_lens.engine.recording import RunPair, record_pair
from attn_only_lens.engine.replay import make_replay
from attn_only_lens.engine.sites import PARTS, Part, Sites, split_positions
from attn_only_lens.errors import InputError
from attn_only_lens.patching.ablated_runs import AblatedRuns
from attn_only_lens.patching.processes import is_first, require_folder
from attn_only_lens.patching.prompt_runs import PromptRuns, measure_parts, prompts_per_run
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.resume import PartStore
from attn_only_lens.patching.run_patches import Batching, PatchRunner, check_edits, together
from attn_only_lens.patching.site_groups import SiteGroup, site_groups
from attn_only_lens.patching.sweep_parts import SweepPart, sweep_parts
from attn_only_lens.precision import matmul_precision


@warned_once()
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
    prompts_at_once: int | None = None,
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
        corrupted: the same for the other run, token for token; None for an ablation without one,
            whose scores are shares of the clean run's metric.
        metric: `logit_diff(...)` and the like, or any function of logits [batch, pos, d_vocab].
        sites: `neuron_heads()`, `heads()`, `all_heads()`, or names; by default all heads.
        part: "z", a head's output; "pattern", its attention; "value"; "q"; "k", of attention
            heads. A patch of a neuron-head's query moves its pattern and nothing else. Several
            heads that share a neuron are patched together, unless a name says which. With
            grouped queries (LLaMA, Gemma) heads share values and keys; a patch is for one head:
            this head reads the patched value or key, and the other heads of its group still read
            the unpatched one.
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
        prompts_at_once: pairs whose activations are held at once; by default as many as fit a
            fifth of the memory, or as in the folder `resume`. It changes roundings and nothing
            else. Of your own functions of the logits all, since they may depend on all.
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
    _check(model, part, direction, reference, batch_size, prompts_at_once, reasons)
    require_folder(resume)
    pair = pair_or_single(model, clean, corrupted, mask)
    groups = site_groups(model, pair, sites, positions, part)
    tokens = None if reference is None else checked_tokens(model, reference)
    chosen = tuple(dict.fromkeys(group.sites for group in groups))
    metric = as_metric(metric)
    at_once = prompts_per_run(model, pair, metric, chosen, part, prompts_at_once, resume)
    parts = sweep_parts(model, pair, groups, at_once, None if resume is None else direction)

    def record(pair: PromptPair, whole: bool) -> RunPair:
        return record_pair(model, pair, metric, chosen, part, distinct=whole)

    ablated = None
    if direction in ABLATIONS:
        ablated = AblatedRuns(model, pair, direction, tokens, chosen, at_once)
    runs = PromptRuns(model, pair, metric, direction, ablated, record)
    over = runs.over(parts, sum(map(len, groups)), per_prompt)
    store = None
    if resume is not None:
        settings = sweep_settings(model, pair, metric, groups, sites, part, direction, tokens)
        settings |= {"per_prompt": bool(per_prompt), "prompts_at_once": at_once}
        settings["parts"] = [len(chunk.rows) for chunk in parts if not chunk.prompts.start]
        store = PartStore(resume, settings, len(parts))
    hidden = not (progress and is_first())
    label = progress if isinstance(progress, str) else None
    total = sum(len(chunk.rows) for chunk in parts)
    with tqdm(total=total, unit="site", desc=label, disable=hidden) as bar:
        tested, made = set[tuple[bool, int]](), dict[range, PatchRunner]()

        def runner_of(prompts: range) -> PatchRunner:
            if prompts not in made:
                made.clear()
                run = runs.of(prompts)
                replay = make_replay(model, run.target, run.runs.metric)
                batching = Batching(model, batch_size, bar.update, replay.numbers_per_token)
                runner = PatchRunner(replay, run.source, part, run.unpatched, batching)
                here = [group.of_prompts(run.runs.pair) for group in groups]
                first = runner.earliest(here)
                if (run.padded, first) not in tested:
                    check_edits(replay.precise, here, part, (0, first) if first else ())
                    tested.add((run.padded, first))
                made[prompts] = runner
            return made[prompts]

        def measure(chunk: SweepPart) -> Tensor:
            runner, run = runner_of(chunk.prompts), runs.of(chunk.prompts)
            here = chunk.groups(groups, run.runs.pair)
            batches = (runner.values([here[i] for i in batch]) for batch in together(here))
            values = torch.cat([of_group for batch in batches for of_group in batch])
            return run.reduced(over, values).flatten()

        measure_parts(parts, store, measure, over.add, lambda i: bar.update(len(parts[i].rows)))
    return Sweep.of_prompts(model, pair, groups, over, part)


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


def count_reasons(**counts: object) -> list[str]:
    """Return why counts are none."""
    return [
        f"got {name}={count!r}; expected 1 or more, or None"
        for name, count in counts.items()
        if count is not None and not is_count(count, 1)
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
    prompts_at_once: object,
    reasons: list[str],
) -> None:
    reasons = [*reasons_not_to_run(model), *reasons]
    reasons += count_reasons(batch_size=batch_size, prompts_at_once=prompts_at_once)
    reasons += option_reasons("part", part, PARTS)
    reasons += option_reasons("direction", direction, (*DIRECTIONS, *ABLATIONS))
    reasons += ablation_reasons(part, direction, reference)
    InputError.raise_if(reasons, "this cannot be patched")


def sweep_settings(
    model: Any,
    pair: PromptPair,
    metric: Metric,
    groups: Sequence[SiteGroup],
    asked: Sites | None,
    part: str,
    direction: str,
    reference: Tokens | None,
) -> dict[str, Any]:
    """Return everything that values depend on, so that no other sweep is resumed."""
    sites = dict.fromkeys(site_group.sites for site_group in groups)
    sets = dict.fromkeys(position for group in groups for position in group.positions)
    return {
        "model": fingerprint(model),
        "clean": pair.clean.tolist(),
        "corrupted": pair.corrupted.tolist(),
        "mask": None if pair.mask is None else pair.mask.tolist(),
        "reference": None if reference is None else reference.tolist(),
        "metric": metric.name,
        "metric_identity": metric.identity(),
        "sites": [name for site in sites for name in site.names],
        "positions": [position_set.label for position_set in sets],
        "where": roles_where(groups),
        "at": None if asked is None else split_positions(asked),
        "float32 products": matmul_precision(),
        "part": part,
        "direction": direction,
    }


def roles_where(groups: Sequence[SiteGroup]) -> list[list[list[int]]]:
    """Return where each role is, which its label does not tell."""
    sets = dict.fromkeys(position for group in groups for position in group.positions)
    roles = [
        position_set
        for position_set in sets
        if isinstance(position_set.label, str) and position_set.label != "all"
    ]
    return [role.where.nonzero().tolist() for role in roles]
