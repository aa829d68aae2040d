"""Intervals around estimates of patches: do they contain the exact effect, and how wide are they?

For each part at each position, clean activations are patched into the corrupted run. There are
three estimates of the effect, g · Δz: with the gradient g of the corrupted run, of the clean run,
and with secant multipliers. From these, three intervals:

    gradients   between the two gradient estimates. To second order, the effect of the whole change
                of the runs is their mean, so half their difference estimates the error.
    spread      between the smallest and the largest of the three estimates
    calibrated  the middle of the spread, plus and minus q (h + s). Here h is half the spread, and
                s = |Δmetric| ‖Δwrite‖ / ‖stream‖, which is not 0 if all estimates are. The number
                q is the 95 % quantile of |exact - middle| / (h + s) on all other programs of the
                same form (split conformal prediction over programs).

Sites whose output is the same in both runs are left out: their effect is 0, and so are all
estimates.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd
import torch

from analyses.benchmark import gradients as g
from analyses.benchmark.tasks import Problem, Task
from attn_only_lens import HeadName, convert
from attn_only_lens import patching as p

ARMS = ("gradients", "spread", "calibrated")
ROUNDING, LEAK = 1e-9, 1e-6
LEVEL = 0.95


def sites_of(problem: Problem) -> pd.DataFrame:
    """Return a row for each site and pair: the exact effect, the estimates, and the scale s."""
    task = problem.task
    return pd.concat(_of_length(task), ignore_index=True).assign(program=task.name, form=task.form)


def _of_length(task: Task) -> Iterator[pd.DataFrame]:
    model = convert(task.model, copy_weights=True)
    for pairs in task.pairs:
        prompts = model, pairs.clean, pairs.corrupted, pairs.metric
        how = {"per_prompt": True, "progress": False}
        exact = p.activation_patch(*prompts, **how).frame
        first = p.attribution(*prompts, method="gradient", budget=0, **how).frame
        last = p.attribution(*prompts, method="gradient", budget=0, direction="noise", **how).frame
        secant = p.attribution(*prompts, method="secant", budget=0, **how).frame
        keys = ["name", "position", "prompt"]
        frame = exact[keys].astype({"name": str}).assign(exact=exact["value"] - exact["unpatched"])
        for name, sign, other in (("first", 1, first), ("last", -1, last), ("secant", 1, secant)):
            effect = sign * (other["value"] - other["unpatched"])
            both = other[keys].astype({"name": str}).assign(**{name: effect})
            frame = frame.merge(both, on=keys, validate="one_to_one")
        yield frame.assign(scale=_scales(task, pairs, frame))


def _scales(task: Task, pairs: g.Pairs, frame: pd.DataFrame) -> np.ndarray:
    """Return |Δmetric| ‖Δwrite‖ / ‖stream‖ for each row; nan if the output does not change."""
    model = task.model
    clean, corrupted = (g.activations(model, x) for x in (pairs.clean, pairs.corrupted))
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    with torch.no_grad():
        ends = [(model(x) * pairs.weights).sum((1, 2)) for x in (pairs.clean, pairs.corrupted)]
    span = (ends[0] - ends[1]).abs()
    shifted = corrupted[last] - corrupted[last].mean((0, 1))  # without constants, such as ±M
    size = shifted.norm(dim=-1).square().mean((1,)).sqrt()
    by_name = {}
    for name in task.nodes:
        head = HeadName.parse(name)
        block, prefix = model.blocks[head.layer], f"blocks.{head.layer}."
        if head.kind == "attention":
            hook, W = f"{prefix}attn.hook_z", block.attn.W_O[head.index]
            change = (clean[hook] - corrupted[hook])[:, :, head.index] @ W
        else:
            hook, W = f"{prefix}mlp.hook_post", block.mlp.W_out[head.index]
            change = (clean[hook] - corrupted[hook])[:, :, head.index, None] * W
        lengths = change.detach().norm(dim=-1)
        scale = span[:, None] * lengths / size[:, None]
        by_name[name] = torch.where(lengths > ROUNDING, scale, torch.nan).cpu().numpy()
    rows = frame[["name", "prompt", "position"]].itertuples(index=False)
    return np.array([by_name[name][int(prompt), int(pos)] for name, prompt, pos in rows])


def coverage(problems: Iterable[Problem]) -> pd.DataFrame:
    """Return a row for each problem and arm: coverage and widths of its intervals."""
    frame = pd.concat([sites_of(problem) for problem in problems], ignore_index=True)
    frame = frame.dropna(subset="scale")
    estimates = frame[["first", "last", "secant"]].to_numpy()
    low, high = estimates.min(1), estimates.max(1)
    middle, half = (low + high) / 2, (high - low) / 2
    error, unit = (frame["exact"] - middle).abs().to_numpy(), half + frame["scale"].to_numpy()
    radius = np.zeros(len(frame))
    for (form, program), rows in frame.groupby(["form", "program"]).indices.items():
        same_form = (frame["form"] == form).to_numpy()
        others = same_form & (frame["program"] != program).to_numpy()
        ratios = (error / unit)[others if others.any() else same_form]
        radius[rows] = np.quantile(ratios, LEVEL) * unit[rows]
    gradients = estimates[:, :2]
    arms = {
        "gradients": (gradients.min(1), gradients.max(1)),
        "spread": (low, high),
        "calibrated": (middle - radius, middle + radius),
    }
    results = []
    exact = frame["exact"].to_numpy()
    for arm, (lower, upper) in arms.items():
        covered = (exact >= lower - ROUNDING) & (exact <= upper + ROUNDING)
        by_site = frame[["form", "program", "exact"]].assign(covered=covered, width=upper - lower)
        for (form, program), rows in by_site.groupby(["form", "program"], sort=False):
            moving = rows[rows["exact"].abs() > LEAK]
            results.append(
                {
                    "form": form,
                    "program": program,
                    "arm": arm,
                    "sites": len(rows),
                    "covered": rows["covered"].mean(),
                    "sites with an effect": len(moving),
                    "covered, with an effect": moving["covered"].mean(),
                    "width": rows["width"].median(),
                    "width, with an effect": (moving["width"] / moving["exact"].abs()).median(),
                }
            )
    return pd.DataFrame(results)
