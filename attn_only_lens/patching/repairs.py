"""Exact patches in place of the estimates that are likely to be wrong.

A few sites, of more than ten thousand, hold most of the squared error of an estimate by gradients,
and `expected_error.py` tells which they are likely to be. Those are patched, and their estimates
replaced. In which order? With `cost` the flops of a patch over those of a forward pass, the squared
error that a flop removes is largest where

    key / √cost                         key: the expected error, up to a factor

is. How many? A number of forward passes, as many sites as fit; or until the correlation (Pearson)
of all scores with exact ones is expected to be at least .98. For that, the squared error of a site
is taken as c key², with c of each layer and kind of head fitted to the sites patched so far, and
with e the scores as they stand,

    expected correlation = √(1 - 4 Σ_unpatched c key² / Σ (e - mean e)²)

4 is for safety: c varies from site to site. No c is taken to be less than a quarter of that of all
layers together, since a layer may have been lucky. It is an expectation, not a bound.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.numerics import as_plain, is_number
from attn_only_lens.patching.run_patches import PatchRunner, check_edits
from attn_only_lens.patching.site_groups import SiteGroup
from attn_only_lens.runs.sites import LayerSites

Budget: TypeAlias = float | Literal["auto"]
_TARGET, _SAFETY, _SEEDS, _LUCK = 0.98, 4.0, 2, 0.25
_LEAST_COST = 1e-3  # forward passes: what a patch costs besides its flops
_STEP = 8  # sites that are patched before c is fitted again; or a quarter of those so far
_Numbers: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Repairs:
    """What exact patches made of estimates.

    Attributes:
        values: of the rows of each group, some of them exact.
        exact: which.
        expected_pearson: the correlation expected of the scores with exact ones; None if no patch,
            or no effect, tells.
        forwards: what the patches cost, in flops of forward passes.
    """

    values: list[Float[Tensor, "row prompt"]]
    exact: list[torch.Tensor]
    expected_pearson: float | None
    forwards: float


def budget_reasons(budget: object) -> list[str]:
    """Return why a budget is none."""
    if budget == "auto" or is_number(as_plain(budget), 0):
        return []
    return [f"got budget={budget!r}; expected 0 or more forward passes, or 'auto'"]


class Repairer:
    """Patch the rows of groups whose estimates are likely to be wrong.

    Args:
        runner: of the patches.
        groups: of sites.
        keys: of their rows.
        values: estimates of their rows.
        mean: of the values of prompts, for each row.
        bar: to show how many sites are to be patched.
    """

    def __init__(
        self,
        runner: PatchRunner,
        groups: Sequence[SiteGroup],
        keys: Sequence[Float[Tensor, "row"]],
        values: Sequence[Float[Tensor, "row prompt"]],
        mean: Callable[[Float[Tensor, "row prompt"]], Tensor],
        bar: Any,
    ) -> None:
        self._runner, self._groups, self._mean, self._bar = runner, groups, mean, bar
        self._key: _Numbers = torch.cat(list(keys)).double().numpy()
        self._cost = self._costs()
        self._values = torch.cat(list(values))
        self._estimates: _Numbers = mean(self._values).numpy().copy()  # the values will change
        self._sites = list(dict.fromkeys(group.sites for group in groups))
        place = {sites: i for i, sites in enumerate(self._sites)}
        self._layer = np.concatenate([np.full(len(g), place[g.sites]) for g in groups])
        self._tested: set[LayerSites] = set()
        self._exact = np.zeros(len(self._key), dtype=bool)
        order = np.argsort(-self._key / np.sqrt(self._cost), kind="stable")
        self._order = order[(self._key[order] > 0) & np.isfinite(self._cost[order])]

    def spend(self, budget: Budget) -> Repairs:
        """Patch as many sites as a budget allows, or as "auto" asks for."""
        if budget == "auto":
            self._patch_until_expected()
        else:
            left, chosen = float(budget), list[int]()
            for row in self._order.tolist():
                if left < _LEAST_COST:
                    break
                if self._cost[row] <= left:
                    left -= self._cost[row]
                    chosen.append(row)
            self._patch(np.array(chosen, dtype=int))
        sizes = [len(group) for group in self._groups]
        return Repairs(
            list(self._values.split(sizes)),
            list(torch.from_numpy(self._exact).split(sizes)),
            self._expected_pearson(),
            float(self._cost[self._exact].sum()),
        )

    def _costs(self) -> _Numbers:
        """Return the cost of each row, in forward passes; infinite where nothing can change."""
        replay = self._runner.replay
        blocks, starts = zip(*map(self._runner.starts, self._groups), strict=True)
        every = torch.cat(starts)
        moving = every[every >= 0]
        first = int(moving.min()) if len(moving) else 0
        self._first = replay.start(min(blocks), first)
        if self._first < first:  # no run leaves out what comes before
            starts = tuple(each.clamp(max=0) for each in starts)
        shares = map(replay.share_of_forward, blocks, starts)
        costs: _Numbers = torch.cat(list(shares)).numpy() + _LEAST_COST
        costs[every.numpy() < 0] = np.inf
        return costs

    def _patch_until_expected(self) -> None:
        seeds = [
            self._order[self._layer[self._order] == i][:_SEEDS] for i in range(len(self._sites))
        ]
        rows = np.concatenate(seeds) if seeds else self._order
        while len(rows):
            self._patch(rows)
            if (self._expected_pearson() or 0.0) >= _TARGET:
                break
            unseen = self._order[~self._exact[self._order]]
            rows = unseen[: max(_STEP, int(self._exact.sum()) // 4)]

    def _patch(self, rows: npt.NDArray[np.int64]) -> None:
        """Patch rows of any groups, those of one layer and kind together."""
        self._bar.total = self._bar.n + len(rows)
        self._bar.refresh()
        firsts = np.cumsum([0, *map(len, self._groups)])
        joined: list[tuple[npt.NDArray[np.int64], SiteGroup]] = []
        for i, sites in enumerate(self._sites):
            here = np.sort(rows[self._layer[rows] == i])
            if not len(here):
                continue
            of_groups = [
                group[torch.from_numpy(here[(here >= first) & (here < first + len(group))] - first)]
                for group, first in zip(self._groups, firsts, strict=False)
                if group.sites is sites
            ]
            joined.append((here, SiteGroup.joined(of_groups)))
        untested = [group for _, group in joined if group.sites not in self._tested]
        check_edits(self._runner.replay.precise, untested, self._runner.part, [self._first])
        self._tested |= {group.sites for group in untested}
        found = self._runner.values([group for _, group in joined])
        for (here, _), values in zip(joined, found, strict=True):
            self._values[here] = values
            self._exact[here] = True

    def _expected_pearson(self) -> float | None:
        """Return the correlation expected of all scores with exact ones; None if there is none."""
        scores: _Numbers = self._mean(self._values).numpy()
        key2 = np.where(np.isfinite(self._cost), self._key**2, 0.0)
        error2 = (scores - self._estimates) ** 2
        unseen = key2 * ~self._exact
        if not unseen.any():
            return 1.0
        if not (key2 * self._exact).any():
            return None
        least = _LUCK * error2.sum() / key2[self._exact].sum()
        left = 0.0
        for i in range(len(self._sites)):
            here = self._layer == i
            seen = key2[here & self._exact].sum()
            c = max(least, error2[here].sum() / seen) if seen > 0 else least / _LUCK
            left += c * unseen[here].sum()
        total = ((scores - scores.mean()) ** 2).sum()
        if total <= 0:
            return None
        return float(np.sqrt(max(0.0, 1.0 - _SAFETY * left / total)))
