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

from typing import Any

from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.directions import Ablation
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import no_gradient_reasons
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.sites import Part, SomeSites
from attn_only_lens.errors import InputError
from attn_only_lens.patching._activation_patch import SweepPlan, plan_sweep, sweep_reasons
from attn_only_lens.patching._attribute import attribute
from attn_only_lens.patching.estimate import Estimate, Method
from attn_only_lens.patching.results import Sweep
from attn_only_lens.work import Work, work_reasons


@one_thread_per_model
@warned_once()
def attribution(
    model: Any,
    contrast: Contrast,
    *,
    sites: SomeSites = "all",
    part: Part = "z",
    direction: str | Ablation = "denoise",
    method: Method | Estimate = "exact_gate",
    per_prompt: bool = False,
    work: Work = Work(),
) -> Sweep:
    """Estimate the results of activation patching for all sites at once.

    The scale of the scores and the columns of the frame are the same as in `activation_patch`.
    `Sweep.agreement` compares estimates with exact results.

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
        contrast: the two runs and the metric, a differentiable function; see `Contrast`. Without
            corrupted prompts, only ablations are possible, and scores are fractions of the clean
            run's metric.
        sites: the heads and their positions; see `Sites`.
        part: "z", "pattern", "value", "q", "k"; see `activation_patch`.
        direction: "denoise" or "noise"; or an ablation of z in the clean run; see
            `activation_patch`.
        method: "gradient", "exact_gate", "integrated" or "secant" (see the module docstring), or an
            `Estimate` with more options.
        per_prompt: whether to return one row per site and prompt; see `activation_patch`. The
            estimates of all prompts come from the same gradients.
        work: how the estimates are run; see `Work`, without its batch size. Each chunk of prompts
            has its own budget: a row is `exact` if it was patched in all chunks. Progress bars
            count exact patches and the steps of "integrated", or sites if there are several chunks
            of prompts.

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
        >>> from attn_only_lens import Contrast, convert, load, patching as p
        >>> model = convert(load("modular-addition"))
        >>> sums = Contrast(torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]),
        ...                 p.logit_diff(correct=7, wrong=8))
        >>> sites = p.Sites("neurons", positions=-1)
        >>> estimate = p.attribution(model, sums, sites=sites)
        >>> exact = p.activation_patch(model, sums, sites=sites)
        >>> bool(exact.agreement(estimate)["pearson"].item() > 0.99)
        True
    """
    estimate = Estimate.of(method)
    plan = plan_attribution(model, contrast, sites, part, direction, estimate, per_prompt, work)
    return attribute(plan, estimate, work, top_by_prompt=per_prompt)


def plan_attribution(
    model: Any,
    contrast: Contrast,
    sites: SomeSites,
    part: Part,
    direction: str | Ablation,
    estimate: Estimate,
    per_prompt: bool,
    work: Work,
) -> SweepPlan:
    """Check all arguments of `attribution`, and plan the rows of its result."""
    reasons = sweep_reasons(model, contrast, part, direction)
    reasons += estimate.reasons(part, Ablation.of(direction).kind, per_prompt)
    reasons += work_reasons(work, "batch_size") + no_gradient_reasons()
    InputError.raise_if(reasons, "this cannot be attributed")
    return plan_sweep(model, contrast, sites, part, direction, per_prompt, work, traced=True)
