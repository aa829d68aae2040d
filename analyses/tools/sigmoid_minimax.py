"""Minimax fit of α(g) by a constant and sigmoids of g on a range, from one starting point.

Least squares moves from the start to the neighbourhood of an optimum. Then the minimax problem is
repeatedly linearised and solved as a linear program inside a trust region, until the error stops
falling. Optima are local, so more starts give a better best fit. `fit_gated_gates.py` defines the
error that is minimised.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares, linprog
from scipy.special import expit

from attn_only_lens.gates.exact import GATES

ROUNDING = 2.0**-22
# How fast α turns from 0 to g, relative to silu. relu turns at one point; this number limits how
# narrow its sigmoids are.
SHARPNESS = {"silu": 1.0, "gelu": 1.702, "gelu_new": 1.702, "relu": 512.0}

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """One activation on one range, by samples of α(R x) / R at points x of [-1, 1].

    Parameters are a vector (a_0, a_1.., b_1.., c_1..) in units of x: a / R, b · R, c.
    """

    name: str
    range: float
    x: Array
    y: Array

    @classmethod
    def of(cls, name: str, range: float, points: int = 250) -> "Problem":
        """Return a problem with dense points near both ends, where errors peak, and near 0."""
        spread = np.linspace(-1, 1, points)
        detail = 4 * SHARPNESS[name] * range
        around_zero = np.sinh(spread * np.arcsinh(detail)) / detail
        x = np.unique(np.concatenate([np.sin(spread * np.pi / 2), around_zero, [0.0]]))
        y = GATES[name].activation(torch.from_numpy(range * x)).numpy() / range
        return cls(name, range, x, y)

    @property
    def sharpness(self) -> float:
        """The speed of α's turn from 0 to g, in units of x."""
        return SHARPNESS[self.name] * self.range

    def residual(self, theta: Array) -> Array:
        """Return the approximation minus the activation, at the points."""
        a, b, c = np.split(theta[1:], 3)
        return theta[0] + expit(np.outer(self.x, b) + c) @ a - self.y

    def jacobian(self, theta: Array) -> Array:
        """Return the derivative of the residual, [n_points, n_parameters]."""
        a, b, c = np.split(theta[1:], 3)
        s = expit(np.outer(self.x, b) + c)
        slope = a * s * (1 - s)
        return np.hstack([np.ones((len(s), 1)), s, slope * self.x[:, None], slope])

    def cost(self, theta: Array) -> float:
        """Return the minimised cost: the largest error plus float32 rounding."""
        return float(np.abs(self.residual(theta)).max() + ROUNDING * np.abs(linear(theta)).sum())


def linear(theta: Array) -> Array:
    """Return the parameters a_0, a_1, ..."""
    return theta[: 1 + len(theta) // 3]


def random_start(problem: Problem, n_sigmoids: int, rng: np.random.Generator) -> Array:
    """Return sigmoids with random centres and widths, and the best weights for them."""
    steepest = 2.0 * max(2.0, problem.sharpness)
    b = np.exp(rng.uniform(np.log(0.7), np.log(steepest), n_sigmoids))
    centre = rng.uniform(-1, 1, n_sigmoids) * np.minimum(2.0, 4 / b)
    centre += rng.uniform(0, 1.2) * (b < 3)  # wide sigmoids give the linear part on the right
    columns = np.hstack([np.ones((len(problem.x), 1)), expit(np.outer(problem.x, b) - b * centre)])
    ridge = 1e-4 * np.eye(n_sigmoids + 1)
    target = np.concatenate([problem.y, np.zeros(n_sigmoids + 1)])
    a = np.linalg.lstsq(np.vstack([columns, ridge]), target, rcond=None)[0]
    return np.concatenate([a, b, -b * centre])


def with_more_sigmoids(theta: Array, n_more: int, rng: np.random.Generator) -> Array:
    """Return the same function with more sigmoids of weight 0, with random centres and widths."""
    a, b, c = np.split(theta[1:], 3)
    wide = np.abs(b).max() * np.exp(rng.uniform(-3, 1, n_more))
    parts = (theta[:1], a, np.zeros(n_more), b, wide, c, wide * rng.uniform(-1, 1, n_more) / 3)
    return np.concatenate(parts)


def squares(problem: Problem, theta: Array) -> Array:
    """Return a least-squares fit from a start, with a ridge penalty on the weights a."""
    n_linear = len(linear(theta))
    ridge = 1e-7 * np.eye(len(theta))[:n_linear]
    solution = least_squares(
        lambda t: np.concatenate([problem.residual(t), ridge @ t]),
        theta,
        lambda t: np.vstack([problem.jacobian(t), ridge]),
        method="lm",
        max_nfev=200,
    )
    return np.asarray(solution.x)


def minimax(problem: Problem, theta: Array, steps: int = 60) -> Array:
    """Return a local minimum of the cost, by linear programs inside a trust region."""
    n, n_linear = len(theta), len(linear(theta))
    weights = np.concatenate([np.zeros(n), [1.0], np.full(n_linear, ROUNDING)])
    sizes = np.hstack([np.eye(n_linear, n), np.zeros((n_linear, 1)), -np.eye(n_linear)])
    flip = np.concatenate([-np.ones(n), np.ones(1 + n_linear)])
    cost, trust = problem.cost(theta), 0.1
    for _ in range(steps):
        residual = problem.residual(theta)
        kept = near_peaks(residual)
        rows = np.hstack([problem.jacobian(theta)[kept], np.zeros((kept.sum(), 1 + n_linear))])
        rows[:, n] = -1.0
        matrix = np.vstack([rows, rows * flip, sizes, sizes * flip])
        a, r = linear(theta), residual[kept]
        limit = np.concatenate([-r, r, -a, a])
        scale = np.maximum(np.abs(theta), 0.1)
        while True:
            box = [(-trust * s, trust * s) for s in scale] + [(0, None)] * (1 + n_linear)
            solution = linprog(weights, matrix, limit, bounds=box, method="highs-ds")
            if solution.status == 0:
                new = theta + solution.x[:n]
                gain, promised = cost - problem.cost(new), cost - solution.fun
                if gain > 0.1 * promised and gain > 0:
                    break
            trust *= 0.3
            if trust < 1e-7:
                return theta
        theta, cost = new, cost - gain
        if gain < 1e-5 * cost and trust >= 1e-3:
            return theta
        if gain > 0.75 * promised:
            trust = min(2 * trust, 1.0)
    return theta


def near_peaks(residual: Array) -> NDArray[np.bool_]:
    """Return which points are peaks of |residual|, their neighbours, ends, or every third point."""
    size = np.abs(residual)
    kept = np.zeros(len(size), dtype=bool)
    kept[1:-1] = (size[1:-1] >= size[:-2]) & (size[1:-1] >= size[2:])
    kept[[0, -1]] = True
    kept |= np.roll(kept, 1) | np.roll(kept, -1)
    kept[::3] = True
    return kept


def fit(problem: Problem, starts: Iterable[Array], polished: int = 4) -> Array | None:
    """Return the best fit: least squares from all starts, then minimax from the best ones."""
    fits = [t for t in (squares(problem, s) for s in starts) if np.isfinite(t).all()]
    polished_fits = [minimax(problem, t) for t in sorted(fits, key=problem.cost)[:polished]]
    return min(polished_fits, key=problem.cost, default=None)


def sharpened(theta: Array, factor: float) -> Array:
    """Return parameters of theta's function, with x and its values divided by a factor."""
    a, b, c = np.split(theta[1:], 3)
    return np.concatenate([theta[:1] / factor, a / factor, b * factor, c])
