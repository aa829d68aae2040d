"""Intervals around estimates of patches: do they contain the exact effect, and how wide are they?

For each part at each position, clean activations are patched into the corrupted run. There are
three estimates of the effect, g · Δz: with the gradient g of the corrupted run, of the clean run,
and with secant multipliers. Let h be half their spread. From these, five intervals:

    gradients   between the two gradient estimates. To second order, the effect of the whole change
                of the runs is their mean, so half their difference estimates the error.
    spread      between the smallest and the largest of the three estimates
    calibrated  the middle of the spread, plus and minus q (h + s), with
                s = |Δmetric| ‖Δwrite‖ / ‖stream‖, which is not 0 if all estimates are. The number
                q is the 95 % quantile of |exact - middle| / (h + s) on all other programs of the
                same form (split conformal prediction over programs).
    programs    the middle plus and minus q u, with u = h + |Δmetric| r. Here r is the largest
                change of an input of a later part (query, key, value, or a neuron's) by the write
                alone, 1 at most, in units of the input's root mean square. The number q is the
                largest of the other programs' 95 % quantiles of |exact - middle| / u.
    sampled     as "programs", but q is the largest ratio on sites of the same model: sites with
                r > 0 are patched exactly, in random order, until `SAMPLED` have an effect.

The quantiles of "programs" are those on hard sites, which have an effect and r > 0. If r = 0, no
later part reads the write, so that the effect is linear and the estimates are exact (but for
norms).

What is guaranteed. "programs": assume that a new program is exchangeable with the K others. Then,
with probability K / (K + 1) or more, its interval covers at least 95 % of the program's hard sites
(Duchi et al. 2024, "Predictive inference in multi-environment scenarios"). K is 25 for compiled and
disguised programs, and 9 for twins. "sampled": the order is random, so a hard site that is not
patched is covered with probability 20/21 or more, in every model, without any assumption. The
report has means over `DRAWS` random orders.

Sites whose output is the same in both runs are left out: their effect is 0, and so are all
estimates.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from analyses.benchmark import gradients as g
from analyses.benchmark.tasks import Problem, Task
from attn_only_lens import HeadName, Work, convert
from attn_only_lens import patching as p

ARMS = ("gradients", "spread", "calibrated", "programs", "sampled")
ROUNDING, LEAK = 1e-9, 1e-6
LEVEL = 0.95
SAMPLED, DRAWS = 20, 100
SMALL = 0.1
"""An interval shows that an effect is small if it lies within this share of |Δmetric| around 0."""
_KEYS = ["form", "program", "seed"]


def sites_of(problem: Problem) -> pd.DataFrame:
    """Return a row for each site and pair: the exact effect, the estimates, and scales of errors.

    The column `span` is |Δmetric|, `share` is ‖Δwrite‖ / ‖stream‖, and `read` is r.
    """
    task = problem.task
    frame = pd.concat(_of_length(task), ignore_index=True).dropna(subset="share")
    return frame.assign(form=task.form, program=task.name, seed=task.seed)


def _of_length(task: Task) -> Iterator[pd.DataFrame]:
    model = convert(task.model, copy_weights=True)
    for pairs in task.pairs:
        given = model, pairs.contrast
        how: dict[str, Any] = {"per_prompt": True, "work": Work(progress=False)}
        gradient, secants = (p.Estimate(method, budget=0) for method in ("gradient", "secant"))
        exact = p.activation_patch(*given, **how).frame
        first = p.attribution(*given, method=gradient, **how).frame
        last = p.attribution(*given, method=gradient, direction="noise", **how).frame
        secant = p.attribution(*given, method=secants, **how).frame
        keys = ["name", "position", "prompt"]
        frame = exact[keys].astype({"name": str}).assign(exact=exact["value"] - exact["unpatched"])
        for name, sign, other in (("first", 1, first), ("last", -1, last), ("secant", 1, secant)):
            effect = sign * (other["value"] - other["unpatched"])
            both = other[keys].astype({"name": str}).assign(**{name: effect})
            frame = frame.merge(both, on=keys, validate="one_to_one")
        yield frame.assign(**_scales(task, pairs, frame))


@torch.no_grad()
def _scales(task: Task, pairs: g.Pairs, frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return span, share and read for each row; share is nan if the output does not change."""
    model = task.model
    clean, corrupted = runs = [g.activations(model, x) for x in (pairs.clean, pairs.corrupted)]
    ends = [(model(x) * pairs.weights).sum((1, 2)) for x in (pairs.clean, pairs.corrupted)]
    last = corrupted[f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"]
    size = (last - last.mean((0, 1))).norm(dim=-1).square().mean(1).sqrt()  # no constants such as M
    one, other = (g.writes(model, run) for run in (clean, corrupted))
    change = torch.stack([one[name] - other[name] for name in task.nodes])
    lengths = change.norm(dim=-1)
    share = torch.where(lengths > ROUNDING, lengths / size[:, None], torch.nan)
    part = pd.Index(task.nodes).get_indexer(frame["name"])
    place = part, frame["prompt"].to_numpy(int), frame["position"].to_numpy(int)
    return {
        "span": (ends[0] - ends[1]).abs().numpy(force=True)[place[1]],
        "share": share.numpy(force=True)[place],
        "read": _reads(task, runs, change).numpy(force=True)[place],
    }


def _reads(
    task: Task, runs: list[dict[str, Tensor]], change: Float[Tensor, "part batch pos d_model"]
) -> Float[Tensor, "part batch pos"]:
    """Return the largest relative change of an input of a later part, 1 at most."""
    heads = [HeadName.parse(name) for name in task.nodes]
    places = [2 * head.layer + (head.kind != "attention") for head in heads]
    result, written = change.new_zeros(change.shape[:3]), change.new_tensor(places)[:, None, None]
    for hook, sizes in g.read_changes(task.model, runs[1], change):
        both = torch.cat([run[hook] for run in runs])
        both = (both - both.mean((0, 1))).flatten(2).unflatten(2, (sizes.shape[3], -1))
        usual = both.square().sum(-1).mean((0, 1)).sqrt()
        ratio = torch.where(sizes > ROUNDING, sizes / usual, 0.0).amax(-1)
        reader = 2 * int(hook.split(".")[1]) + ("mlp" in hook)
        result = torch.where(written < reader, ratio.maximum(result), result)
    return result.clamp(max=1)


def coverage(sites: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each model and arm: coverage and widths of its intervals.

    Args:
        sites: the frames of `sites_of`, of all programs.
    """
    estimates = sites[["first", "last", "secant"]].to_numpy()
    low, high = estimates.min(1), estimates.max(1)
    middle, half = (low + high) / 2, (high - low) / 2
    exact, span, share, read = (sites[x].to_numpy() for x in ("exact", "span", "share", "read"))
    error, hard = np.abs(exact - middle), (np.abs(exact) > LEAK) & (read > LEAK)
    unit_by_share, unit = half + span * share, half + span * read
    ratios_by_share, ratios = _ratios(error, unit_by_share), _ratios(error, unit)
    calibrated, programs = np.zeros(len(sites)), np.zeros(len(sites))  # half the widths
    models = list(sites.groupby(_KEYS, sort=False).indices.items())
    quantiles = {key: _quantile(ratios[rows[hard[rows]]]) for key, rows in models}
    for (form, program, _), rows in models:
        others = {k: x for k, x in models if k[0] == form and k[1] != program}
        others = others or dict(models)  # a trial has only one program
        every = np.concatenate(list(others.values()))
        calibrated[rows] = np.quantile(ratios_by_share[every], LEVEL) * unit_by_share[rows]
        programs[rows] = max(quantiles[key] for key in others) * unit[rows]
    arms = {
        "gradients": (estimates[:, :2].min(1), estimates[:, :2].max(1)),
        "spread": (low, high),
        "calibrated": (middle - calibrated, middle + calibrated),
        "programs": (middle - programs, middle + programs),
    }
    results = [
        dict(zip(_KEYS, key, strict=True))
        | {"arm": arm}
        | _judged(exact[rows], span[rows], hard[rows], lower[rows], upper[rows])
        for arm, (lower, upper) in arms.items()
        for key, rows in models
    ]
    for key, rows in models:
        draws = []
        for seed in range(DRAWS):
            patched = _sample(rows, read, hard, seed)
            left, counts = np.setdiff1d(rows, patched), {"patched": len(patched)}
            radius = max(ratios[patched], default=0.0) * unit[left]
            ends = middle[left] - radius, middle[left] + radius
            judged = _judged(exact[left], span[left], hard[left], *ends)
            draws.append(judged | counts | {"share patched": len(patched) / len(rows)})
        row = pd.DataFrame(draws).mean().to_dict()
        results.append(dict(zip(_KEYS, key, strict=True)) | {"arm": "sampled"} | row)
    return pd.DataFrame(results)


def _ratios(error: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Return error / unit; where both are 0, this is 0."""
    whole = np.where(error > ROUNDING, np.inf, 0.0)
    return np.divide(error, unit, out=whole, where=unit > ROUNDING)


def _quantile(ratios: np.ndarray) -> float:
    """Return the least number that is not below `LEVEL` of the ratios; 0 if there are none."""
    return float(np.quantile(ratios, LEVEL, method="inverted_cdf")) if len(ratios) else 0.0


def _sample(rows: np.ndarray, read: np.ndarray, hard: np.ndarray, seed: int) -> np.ndarray:
    """Return which sites of a model are patched: in random order, until `SAMPLED` are hard."""
    order = np.random.default_rng(seed).permutation(rows[read[rows] > LEAK])
    return order[hard[order].cumsum() - hard[order] < SAMPLED]


def _judged(
    exact: np.ndarray, span: np.ndarray, hard: np.ndarray, low: np.ndarray, high: np.ndarray
) -> dict[str, float]:
    """Return how many of some sites are covered, how wide intervals are, and what they show."""
    every = pd.DataFrame(
        {
            "covered": (exact >= low - ROUNDING) & (exact <= high + ROUNDING),
            "of the effect": (high - low) / np.maximum(np.abs(exact), LEAK),
            "of Δ": (high - low) / span,
            "sign": (low > ROUNDING) | (high < -ROUNDING),
            "small": (low >= -SMALL * span) & (high <= SMALL * span),
        }
    )
    moving, difficult = every[np.abs(exact) > LEAK], every[hard]
    return {
        "sites": len(every),
        "covered": every["covered"].mean(),
        "sites with an effect": len(moving),
        "covered, with an effect": moving["covered"].mean(),
        "hard sites": len(difficult),
        "covered, hard": difficult["covered"].mean(),
        "width, with an effect": moving["of the effect"].median(),
        "width, hard": difficult["of the effect"].median(),
        "width, hard, of Δ": difficult["of Δ"].median(),
        "sign": moving["sign"].mean(),
        "sign, hard": difficult["sign"].mean(),
        "small": every["small"].mean(),
    }
