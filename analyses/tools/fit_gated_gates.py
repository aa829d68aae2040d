"""Fit the table of gates for gated MLPs: α(q) ≈ w_0 + Σ_j w_j σ(b_j q + c_j) on [-R, R].

The fit minimises the error in float32: the largest error on the range, plus the rounding error of a
sum whose terms are as large as the coefficients,

    max |α - approximation| + 2^-22 Σ |w_j|.

2^-22 is four float32 roundings: of the sigmoid's argument, the sigmoid, the product and the sum. In
x = q / R, the error and the coefficients w scale with R, so fits are made on [-1, 1].

Optima are local, so a fit starts from several points: random centres and widths, the fit with fewer
heads, the fits of the next sharper and the next smoother problem, and the existing table. So a run
improves the table or leaves it unchanged; delete the table to start from scratch. Coefficients are
rounded to float32, and the rounded coefficients are certified.

    python -m analyses.tools.fit_gated_gates              # the package's table and analyses/results
    python -m analyses.tools.fit_gated_gates --smoke --out runs/gates
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from tqdm import tqdm

from analyses.tools.benching import leave
from analyses.tools.certificates import certified_bound
from analyses.tools.options import Smoke
from analyses.tools.sigmoid_minimax import (
    ROUNDING,
    Array,
    Problem,
    fit,
    minimax,
    random_start,
    sharpened,
    with_more_sigmoids,
)
from attn_only_lens.gates.bilinear import BilinearGate, gates_from_json
from attn_only_lens.gates.exact import GATES
from attn_only_lens.storage import write_text

NAMES = ("silu", "gelu", "gelu_new", "relu")
RANGES = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
HEADS = (4, 6, 8, 12)
TABLE = Path("attn_only_lens/gates/gated.json")

Key = tuple[str, float, int]  # activation, range, heads per neuron


def ranges_of(name: str) -> tuple[float, ...]:
    """Return the ranges of an activation; relu scales with q, so one range is enough."""
    return (1.0,) if name == "relu" else RANGES


def sweep(
    problems: Sequence[Problem],
    heads: Iterable[int],
    known: Mapping[Key, Array],
    n_starts: int,
    seed: int,
) -> dict[Key, Array]:
    """Return fits of every problem for every number of heads, each alone and then along a ladder.

    The ladder sorts problems by sharpness, because problems of similar sharpness have similar fits.
    """
    rng = np.random.default_rng(seed)
    ladder = sorted(problems, key=lambda problem: problem.sharpness)
    best = dict(known)

    costs = {key: certified_cost(gate_of(*key[:2], theta)) for key, theta in best.items()}

    def keep(problem: Problem, n_heads: int, theta: Array | None) -> None:
        """Replace the existing fit only for a clear gain, so that a second run changes little."""
        key = problem.name, problem.range, n_heads
        if theta is None:
            return
        # The cost is certified, because a steep sigmoid could hide between the points of the fit.
        cost = certified_cost(gate_of(problem.name, problem.range, theta))
        if cost < 0.99 * costs.get(key, math.inf):
            best[key], costs[key] = theta, cost

    previous = None
    for n_heads in tqdm(sorted(heads), desc="heads"):
        for problem in tqdm(ladder, desc=f"{n_heads} heads", leave=False):
            starts = [random_start(problem, n_heads - 1, rng) for _ in range(n_starts)]
            keep(problem, n_heads, fit(problem, starts))
            if previous:
                idle, more = best[problem.name, problem.range, previous], n_heads - previous
                starts = [with_more_sigmoids(idle, more, rng) for _ in range(8)]
                keep(problem, n_heads, fit(problem, starts))
        for rungs in (ladder, ladder[::-1]):
            for lower, upper in tqdm(list(pairwise(rungs)), desc="ladder", leave=False):
                theta = best[lower.name, lower.range, n_heads]
                starts = [theta, sharpened(theta, upper.sharpness / lower.sharpness)]
                keep(upper, n_heads, fit(upper, starts))
        for problem in ladder:
            theta = best[problem.name, problem.range, n_heads]
            keep(problem, n_heads, minimax(problem, theta, steps=200))
        previous = n_heads
    return best


def theta_of(gate: BilinearGate) -> Array:
    """Return a gate's coefficients as parameters, in units of x."""
    *w, constant = (np.array(gate.w) / gate.limit).tolist()
    b, c = gate.limit * np.array(gate.b[:-1]), np.array(gate.c[:-1])
    return np.concatenate([[constant], w, b, c])


def gate_of(name: str, limit: float, theta: Array) -> BilinearGate:
    """Return a certified gate in units of q, sorted by centres and rounded to float32."""
    w, b, c = np.split(theta[1:], 3)
    order = np.argsort(-c / b)

    def rounded(values: Array) -> tuple[float, ...]:
        return tuple(float(v) for v in np.float32(values))

    gate = BilinearGate(
        name=name,
        w=rounded(limit * np.append(w[order], theta[0])),
        b=(*rounded(b[order] / limit), 0.0),
        c=(*rounded(c[order]), math.inf),
        bound=math.nan,
        limit=limit,
    )
    return replace(gate, bound=certified_bound(gate))


def certified_cost(gate: BilinearGate) -> float:
    """Return the minimised cost, with the certified bound as the error."""
    return gate.bound + ROUNDING * gate.sum_abs_w


def float32_error(gate: BilinearGate, points: int = 100_003) -> float:
    """Return the largest error on the range when the gate is evaluated in float32."""
    q = torch.linspace(-gate.limit, gate.limit, points)
    exact = GATES[gate.name].activation(q.double())
    return (gate.activation(q).double() - exact).abs().max().item()


def report(gates: Iterable[BilinearGate]) -> str:
    """Return the report, with a table of the gates."""
    rows: list[dict[str, Any]] = [
        {
            "activation": gate.name,
            "R": f"{gate.limit:g}",
            "heads": gate.heads,
            "certified bound": f"{gate.bound:.2e}",
            "bound / R": f"{gate.bound / gate.limit:.1e}",
            "Σ|w|": f"{gate.sum_abs_w:.3g}",
            "float32 error": f"{float32_error(gate):.2e}",
        }
        for gate in gates
    ]
    frame = pd.DataFrame(rows)
    lines = [frame.columns, ["---"] * len(frame.columns), *frame.to_numpy()]
    table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    return (
        "# Gates for gated MLPs\n\n"
        "α(q) ≈ w_0 + Σ w_j σ(b_j q + c_j) on [-R, R]; one head a sigmoid, one for w_0. The bound\n"
        "is certified for every q of the range; the float32 error is the largest of 100,003\n"
        "points. relu's rows hold for every power of two as R, with bound and Σ|w| times R.\n\n"
        "Made by `python -m analyses.tools.fit_gated_gates`, run more than once: a run begins\n"
        f"from the table that there is, and replaces what it betters by 1% or more.\n\n{table}\n"
    )


def main(
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("analyses/results"),
    table: Annotated[Path, typer.Option(help="coefficients, improved in place")] = TABLE,
    starts: Annotated[int, typer.Option(help="random starts a fit")] = 40,
    seed: int = 0,
    smoke: Smoke = False,
) -> None:
    """Fit, certify, and write the table, the report and its record."""
    started = time.perf_counter()
    cases, heads = [(name, r) for name in NAMES for r in ranges_of(name)], HEADS
    if smoke:
        cases, heads, starts, table = [("silu", 8.0)], (4,), 2, out / TABLE.name
        table.unlink(missing_ok=True)
    pinned = {(g.name, g.limit, g.heads): theta_of(g) for g in read(table)}
    fits = sweep([Problem.of(name, r) for name, r in cases], heads, pinned, starts, seed)
    gates = [gate_of(name, r, fits[name, r, n_heads]) for name, r in cases for n_heads in heads]
    entries = ",\n".join(json.dumps(asdict(gate)) for gate in gates)
    write_text(table, f"[\n{entries}\n]\n")
    settings = {"smoke": smoke, "starts": starts, "seed": seed}
    leave(__file__, out, {"gated_gates.md": report(gates)}, started=started, **settings)


def read(table: Path) -> Sequence[BilinearGate]:
    """Return the gates in a table, or nothing if the file does not exist."""
    return gates_from_json(table.read_text("utf-8")) if table.exists() else ()


if __name__ == "__main__":
    typer.run(main)
