"""Attribution: estimate the effects of all patches from a few forward and backward passes.

    value after the patch ≈ value + Σ_{patched positions} g · Δ

Here `value` is the metric of the target run, into which activations are patched. Δ is the
difference of a head's activation (source run minus target run), and g is the gradient of the metric
with respect to this activation. Scores are defined in `results.py`. For an ablation, the source run
is the clean run with z ablated. The methods differ in g:

    "gradient"    g is the gradient in the target run: attribution patching (Nanda 2023; Syed, Rager
                  and Conmy 2023, "Attribution Patching Outperforms Automated Circuit Discovery").
    "exact_gate"  g is the same, but the gate's change with its query is exact: w(q') - w(q), not
                  w'(q) Δq. For an attention head, z' = softmax(q' · K) V comes from one pass,
                  in which all queries are replaced and each z is restored before anything reads it.
    "integrated"  g is averaged over k runs with embeddings x + α_j (x' - x) between the two runs,
                  where α_j = (j - 1/2)/k: EAP-IG (Hanna, Pezzelle and Belinkov 2024, "Have Faith in
                  Faithfulness"), by the midpoint rule.
    "secant"      g is a multiplier between the two runs (`engine/multipliers.py`), made of secant
                  slopes. Σ g · Δ over a layer's heads, plus the part of the residual stream that
                  bypasses them, is exactly the change in the metric. The direction changes only its
                  sign, so compare it with the mean of denoising and noising.

Every method treats z as linear in the keys of attention heads (part "k"); "gradient" and
"integrated" also treat z as linear in queries. In all other cases Δ is exact: a patch of any part
of a neuron-head (a neuron computed as an attention head) is treated as the change Δz that it causes
in the neuron-head's output (`edits.py`). The "gradient" estimate is exact to first order: as ε → 0,
a patch of ε Δ changes the metric by ε times the estimate.

The unit of cost is a forward pass, which takes 2 · n_pos · parameters flops (a backward pass
without weight gradients costs the same). "gradient" costs 3 forward passes; "exact_gate" costs 3,
plus 2 for queries of attention heads; "secant" costs 4; "integrated" costs 3 + 2 · steps.
Afterwards, the sites whose estimates are likely to be wrong are patched exactly (`repairs.py`). To
find these sites, "secant" and "integrated" also take the gradient in the target run, which costs 3
more passes for "secant" and 1 for "integrated". In `analyses/results`, `attribution_repairs.md` and
`contrast_vs_patching.md` report how well the estimates agree with exact patching.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from attn_only_lens.arguments import POSITIVE
from attn_only_lens.axes import Tokens
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import (
    AnyMetric,
    no_gradient_reasons,
)
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import Positions
from attn_only_lens.engine.prompts import Prompts
from attn_only_lens.engine.sites import Part, Sites
from attn_only_lens.errors import InputError
from attn_only_lens.patching._activation_patch import (
    SweepPlan,
    plan_sweep,
    sweep_reasons,
)
from attn_only_lens.patching._attribute import attribute
from attn_only_lens.patching.attribution_options import AttributionOptions, Method
from attn_only_lens.patching.repairs import Budget
from attn_only_lens.patching.results import Sweep


@one_thread_per_model
@warned_once()
def attribution(
    model: Any,
    clean: Prompts,
    corrupted: Prompts | None,
    metric: AnyMetric,
    *,
    sites: Sites | None = None,
    part: Part = "z",
    positions: Positions = "each",
    direction: str = "denoise",
    method: Method = "exact_gate",
    steps: int | None = None,
    budget: Budget = "auto",
    split: bool = False,
    mask: Tensor | None = None,
    reference: str | Tokens | None = None,
    per_prompt: bool = False,
    prompts_at_once: int | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
) -> Sweep:
    """Estimate the results of activation patching for all sites at once.

    The scale of the scores and the columns of the frame are the same as in `activation_patch`.
    `agreement` compares estimates with exact results.

    Gradient estimates can miss the site with the largest effect, which is usually an early-layer
    neuron at the first token that differs between the prompts. Sites with the largest expected
    errors are thus patched exactly, and so are the rows that `top` shows, as far as the budget
    allows (`repairs.py`). Column `exact` marks these rows. In a small model, most or all sites are
    patched; with `budget=0`, none are. `expected_pearson` is the expected correlation with exact
    scores, for attention heads and for neuron-heads, or None; `unknown` then says why.

    Estimates are worst where the runs differ by a switch: at a position, the norm of the residual
    stream at some block's input differs by a factor of two or more. Column `before_switch` marks
    the sites that lie before a switch; no correlation is expected unless they all were patched.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
            The `requires_grad` and `grad` of its parameters do not change. "secant" runs a
            half-precision model in float32, and warns by how much this alters the metric's range
            (clean minus corrupted).
        clean: a text, a list of texts, or tokens [batch, pos]; see `prompt_pair`.
        corrupted: the corrupted prompts, with the same number of tokens; None for an ablation
            without corrupted prompts, whose scores are fractions of the clean run's metric.
        metric: `logit_diff(...)` or another metric, or a differentiable function of logits
            [batch, pos, d_vocab].
        sites: `neuron_heads()`, `heads()`, `all_heads()`, or names; by default all heads.
        part: "z", "pattern", "value", "q", "k"; see `activation_patch`.
        positions: "each", "all", numbers, or roles; see `activation_patch`.
        direction: "denoise" or "noise"; or an ablation of z in the clean run, "zero", "mean",
            "resample" or "bias"; see `activation_patch`.
        method: "gradient", "exact_gate", "integrated" or "secant"; see the module docstring.
        steps: for "integrated", how many gradients to average; by default 5.
        budget: the cost of exact patches, in forward passes (counted in flops), or "auto". "auto"
            spends at least 2 forward passes or 0.2 GFLOP. "auto" then continues until the top 20
            rows and the sites before a switch are exact and the expected correlations are .99, or
            until it has spent 7 forward passes (10 with the estimates) or 4 GFLOP. Of the two
            limits, the larger one applies. It is 2.5 times as large if one of the top 20
            estimates has the wrong sign, or if the top 20 rows need more. Tests of a new model cost
            about ten passes.
        split: with method "secant" and budget=0, also return each head's effect through its pattern
            and through its values: columns `by_pattern` and `by_value`, which add up to the effect
            on the score.
        mask: 1 for real tokens, 0 for padding, if prompts are given as tokens.
        reference: the prompts for "mean" and "resample"; see `activation_patch`.
        per_prompt: whether to return one row per site and prompt; see `activation_patch`. The
            estimates of all prompts come from the same gradients.
        prompts_at_once: how many prompt pairs are run at once; see `activation_patch`. Each chunk
            of prompts has its own budget: a row is `exact` if it was patched in all chunks.
        resume: a checkpoint folder; see `activation_patch`.
        progress: whether to show progress bars. They count exact patches and the steps of
            "integrated", or sites if there are several chunks of prompts.

    Returns:
        The estimated metric and score after each patch. The score is 0 for the corrupted run and 1
        for the clean run.

    Raises:
        InputWarning: with "secant", the metric has no secant rule, and shares do not add up to the
            metric's change.
        InputError: with every reason: invalid prompts, metric, sites or positions; the metric has
            zero gradient in the target run (for instance `kl` in the clean run).
        UnsupportedModelError: the model has an operation without a secant rule ("secant"), reads
            tokens again after its embedding ("integrated"), or norms the queries of all heads
            together ("exact_gate"); a hook point of the sites does not fire, or is read-only.

    Example:
        >>> import torch
        >>> from attn_only_lens import convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> prompts = torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113])
        >>> metric, sites = p.logit_diff(correct=7, wrong=8), p.neuron_heads()
        >>> estimate = p.attribution(model, *prompts, metric, sites=sites, positions=-1)
        >>> exact = p.activation_patch(
        ...     model, *prompts, metric, sites=sites, positions=-1, progress=False)
        >>> bool(p.agreement(exact, estimate)["pearson"].item() > 0.99)
        True
    """
    options = AttributionOptions(method, budget, steps, split, top_by_prompt=per_prompt)
    plan = plan_attribution(
        *((model, clean, corrupted, metric), options),
        sites=sites,
        part=part,
        positions=positions,
        direction=direction,
        mask=mask,
        reference=reference,
        per_prompt=per_prompt,
        prompts_at_once=prompts_at_once,
        resume=resume,
    )
    return attribute(plan, options, resume=resume, progress=progress)


def plan_attribution(
    prompts: tuple[Any, ...], options: AttributionOptions, **of_sweep: Any
) -> SweepPlan:
    """Check all arguments of `attribution`, and plan the rows of its result."""
    model, _, corrupted, _ = prompts
    part, direction = of_sweep["part"], of_sweep["direction"]
    reasons = sweep_reasons(model, corrupted, part, direction, of_sweep["reference"])
    reasons += POSITIVE.or_none.reasons(prompts_at_once=of_sweep["prompts_at_once"])
    reasons += options.reasons(part, direction, of_sweep["per_prompt"])
    reasons += no_gradient_reasons()
    InputError.raise_if(reasons, "this cannot be attributed")
    return plan_sweep(*prompts, **of_sweep, traced=True)
