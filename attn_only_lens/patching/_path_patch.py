"""Exact path patching: replace one head's output, but only where one other head reads it.

A path has a sender s and a receiver r. Patching copies activations from a source run into a target
run; one of the two runs is the clean run, the other the corrupted run.

    δ = write_s(source) - write_s(target)        at the requested positions (`engine/writes.py`)
    the stream that r reads for its inputs `part` changes by δ before r's norm; all else stays fixed
    r's output changes by Δz_r(δ)                (`engine/readers.py`)
    z_r + Δz_r is patched into the target run, at r's positions, and the metric is computed

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
"""

from functools import partial
from typing import Any

import torch

from attn_only_lens.arguments import POSITIVE, a_type, one_of
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.engine.directions import DIRECTIONS
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import as_metric, no_gradient_reasons
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.recording import float32_runs
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.errors import InputError
from attn_only_lens.patching.edges import Edges
from attn_only_lens.patching.job import Job
from attn_only_lens.patching.path_blocks import PROBLEM, receiver_groups
from attn_only_lens.patching.path_patches import PathPatches, PathPlan
from attn_only_lens.patching.processes import Processes
from attn_only_lens.patching.prompt_chunks import prompts_per_chunk
from attn_only_lens.patching.results import Paths
from attn_only_lens.patching.site_groups import Chunk, site_groups
from attn_only_lens.precision import full_precision
from attn_only_lens.work import Work, work_reasons


@one_thread_per_model
@warned_once()
@full_precision()
def path_patch(
    model: Any,
    contrast: Contrast,
    edges: Edges,
    *,
    direction: str = "denoise",
    top: int | None = None,
    per_prompt: bool = False,
    work: Work = Work(),
) -> Paths:
    """Patch each path from a sender to a later receiver, and compute the metric after each patch.

    Results are exact. The receiver reads the sender's output in the other run, while the rest of
    its input stays fixed. The changed output of the receiver, at its positions, then affects the
    rest of the forward pass and the metric (see `_path_patch.py`).

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
            A half-precision model is run in float32 during the call.
        contrast: the two runs and the metric; see `Contrast`.
        edges: the senders, the receivers and what they read; see `Edges`.
        direction: "denoise" patches clean outputs into the corrupted run; "noise" patches corrupted
            outputs into the clean run.
        top: how many paths to patch: the paths with the largest |estimated effect|. The estimate is
            the exact change in the receiver's output times the mean gradient of the metric there.
            None patches all paths.
        per_prompt: whether to return one row per path and prompt; by default there is one row per
            path, with the mean over prompts and standard errors (see `Paths`).
        work: how the patches are run; see `Work`.

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
        >>> from attn_only_lens import Contrast, convert, load, patching as p
        >>> model = convert(load("modular-addition"))
        >>> sums = Contrast(torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]),
        ...                 p.logit_diff(correct=7, wrong=8))
        >>> edges = p.Edges(p.Sites("heads", positions=-1), "neurons", part="z")
        >>> paths = p.path_patch(model, sums, edges, top=5)
        >>> len(paths.to_frame()), paths.n_paths  # 4 heads and 512 neurons
        (5, 2048)
    """
    # Check
    reasons = [*reasons_not_to_run(model), *contrast_reasons(contrast)]
    reasons += POSITIVE.or_none.reasons(top=top) + work_reasons(work)
    if isinstance(edges, Edges):
        reasons += edges.reasons()
    else:
        reasons.append(f"got {a_type(edges)}; expected Edges(senders, receivers)")
    reasons += one_of(*DIRECTIONS).reasons(direction=direction)
    reasons += no_gradient_reasons() if top is not None else []
    InputError.raise_if(reasons, PROBLEM)

    # Plan
    pair, metric, part = contrast.pair(model), as_metric(contrast.metric), edges.part
    with float32_runs(model, pair):
        receiving = receiver_groups(model, pair, edges.receivers, part, averaged=not per_prompt)
        sending = site_groups(model, pair, edges.senders, "z", averaged=not per_prompt)
        if any(group.sites.kind == "router" for group in sending):
            reason = "got routers as senders, which write nothing; choose neurons of their experts"
            raise InputError([reason], PROBLEM)
        every = resolve_sites(model, "all")
        of_chunk: dict[str, Any] = {"traced": top is not None, "decomposed": True}
        at_once = prompts_per_chunk(model, pair, metric, every, "value", work, **of_chunk)
        options: Any = (sending, receiving, part, direction, edges.scale, at_once)
        plan = PathPlan(model, pair, metric, *options)
        patches = PathPatches(plan, top, per_prompt, work.batch_size)

        # Run
        settings = {"top": top, "per_prompt": bool(per_prompt)}
        job = Job(
            work.resume,
            lambda: plan.settings() | settings,
            work.progress,
            Processes.of(work.share),
        )
        patches.on_done = job.advance
        paths, rows = patches.all_paths() if top is None else patches.largest_paths(job, top)
        chunks = [Chunk(prompts, some_rows) for prompts in plan.prompts for some_rows in rows]
        compute = partial(patches.compute, work=paths)
        for chunk, arrays in job.run(chunks, compute, unit="path"):
            patches.totals.add(chunk, torch.from_numpy(arrays["kept"]))

        # Collect
        return patches.results(paths)
