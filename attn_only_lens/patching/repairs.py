"""Exact patches in place of the estimates that are likely to be wrong.

Most of the squared error of estimates by gradients is in a few sites, of more than ten thousand.
`expected_error.py` predicts which sites these are: its key is the expected error of a site, up to a
factor. These sites are patched, and the exact values replace their estimates.

Which sites first? The aim is a high correlation (Pearson) with exact scores, among the attention
heads and among the neuron-heads. Let e be the current scores, and `cost` the flops of a patch
divided by those of a forward pass. A flop raises the correlation most at the site where the gain

    √c · key / √(cost · Σ (e - mean e)²)         Σ: over the heads of the site's kind

is largest. Here the squared error of a site is modelled as c key², and c is fitted to the sites
patched so far. Each layer has its own c for each kind of head, but at least a quarter of the c of
all layers, as the errors of a few patched sites may be small by chance.

The correlation to expect, for each kind of head, is

    expected correlation = √(1 - 4 Σ_unpatched c key² / Σ (e - mean e)²)

with 4 as a margin, since c varies from site to site. The estimates of the largest writes may err
less than their keys predict, since a norm limits the effect of a write. So a second sum takes its c
from the patched sites that are most like the unpatched ones, the half with the smaller keys; the
larger sum counts. The result is an expectation, not a bound. With fewer than 16 patched sites of a
kind, or a budget below 3 forward passes, it is unknown (None): minimal pairs of the shipped model
were expected at .985 after one pass, and reached .930.

How many sites? As many as a number of forward passes pays for. Or with "auto":

    at least     3 forward passes, or 0.2 Gflop if that is more
    at most      10 forward passes, or 4 Gflop if that is more

and between the two, until the expected correlation is .99 for both kinds. A forward pass here runs
all prompts of the call. So patches of a large model cost a bounded number of passes. In a small
model 4 Gflop, about a second on one CPU core, may pay for all sites.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_number
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.run_patches import PatchRunner, check_edits
from attn_only_lens.patching.site_groups import SiteGroup

Budget: TypeAlias = float | Literal["auto"]
_AT_LEAST, _AT_MOST = (3.0, 2e8), (10.0, 4e9)  # of "auto": forward passes, flops
_TARGET, _STEP = 0.99, 1.5  # of "auto": the correlation, and by how much each step spends more
_SAFETY, _LUCK, _FEWEST = 4.0, 0.25, 16
_TINY = 1e-100  # where errors, or effects, are all 0
_LEAST_COST = 1e-3  # forward passes: what a patch costs besides its flops
_Numbers: TypeAlias = npt.NDArray[np.float64]
_Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Repairs:
    """What exact patches made of estimates.

    Attributes:
        values: of the rows of each group, some of them exact.
        exact: which.
        expected_errors: for each kind of head, the root of the expected sum of squared errors over
            rows, with a margin; None if too few sites were patched to tell.
        forwards: what the patches cost, in flops of forward passes.
    """

    values: list[Float[Tensor, "row prompt"]]
    exact: list[torch.Tensor]
    expected_errors: dict[HeadKind, float | None]
    forwards: float


def expected_pearson(error: float | None, scores: Float[Tensor, "row"] | _Numbers) -> float | None:
    """Return the correlation with exact scores to expect; None if unknown, or without effects."""
    if error is None or np.isnan(error):
        return None
    total = float(((scores - scores.mean()) ** 2).sum())
    if error == 0:
        return 1.0
    return None if total <= 0 else float(np.sqrt(max(0.0, 1.0 - error**2 / total)))


def budget_reasons(budget: object) -> list[str]:
    """Return why a budget is none."""
    if budget == "auto" or is_number(as_plain(budget), 0):
        return []
    return [f"got budget={budget!r}; expected 0 or more forward passes, or 'auto'"]


class Repairer:
    """Patch the rows of groups whose estimates are likely to be wrong."""

    def __init__(
        self,
        runner: PatchRunner,
        groups: Sequence[SiteGroup],
        keys: Sequence[Float[Tensor, "row"]],
        values: Sequence[Float[Tensor, "row prompt"]],
        mean: Callable[[Float[Tensor, "row prompt"]], Tensor],
        bar: Any,
        tested: set[tuple[LayerSites, int, bool]],
        n_prompts: int,
    ) -> None:
        self._runner, self._groups, self._mean, self._bar = runner, groups, mean, bar
        self._n_prompts = n_prompts
        self._cost = self._costs()
        self._key = self._positive(torch.cat(list(keys)).double().numpy())
        self._values = torch.cat(list(values))
        self._estimates: _Numbers = mean(self._values).numpy().copy()  # the values will change
        self._sites = list(dict.fromkeys(group.sites for group in groups))
        place = {sites: i for i, sites in enumerate(self._sites)}
        self._layer = np.concatenate([np.full(len(g), place[g.sites]) for g in groups])
        kinds = np.array([sites.kind for sites in self._sites])
        self._of_kind: dict[HeadKind, npt.NDArray[np.bool_]] = {
            sites.kind: (kinds == sites.kind)[self._layer] for sites in self._sites
        }
        self._tested = tested
        self._exact = np.zeros(len(self._key), dtype=bool)

    def spend(self, budget: Budget) -> Repairs:
        """Patch as many sites as a budget allows, or as "auto" asks for."""
        if budget == "auto":
            self._patch_until_expected()
        else:
            self._patch(self._rows_to_patch(float(budget), self._of_kind))
        sizes = [len(group) for group in self._groups]
        return Repairs(
            list(self._values.split(sizes)),
            list(torch.from_numpy(self._exact).split(sizes)),
            {kind: self._expected_error(kind, budget) for kind in self._of_kind},
            self._spent,
        )

    @property
    def _spent(self) -> float:
        return float(self._cost[self._exact].sum())

    def _costs(self) -> _Numbers:
        """Return the cost of each row, in forward passes; infinite where nothing can change."""
        replay = self._runner.replay
        blocks, starts = zip(*map(self._runner.starts, self._groups), strict=True)
        every = torch.cat(starts)
        moving = every[every >= 0]
        first = int(moving.min()) if len(moving) else 0
        self._first = replay.start(min(blocks), first)
        if self._first < first:  # no run leaves out what comes before
            starts = tuple(start.clamp(max=0) for start in starts)
        shares = map(replay.share_of_forward, blocks, starts)
        costs: _Numbers = torch.cat(list(shares)).numpy() + _LEAST_COST
        costs[every.numpy() < 0] = np.inf
        return costs

    def _positive(self, keys: _Numbers) -> _Numbers:
        """Return keys that are 0 where a patch changes nothing, and positive elsewhere.

        Where a model saturates, a gradient may be 0 and a patch not: such sites are patched last.
        """
        least = keys[keys > 0].min(initial=np.inf)
        changes = np.isfinite(self._cost) & np.isfinite(least)
        return np.where(changes, np.maximum(keys, least), 0.0)

    def _patch_until_expected(self) -> None:
        replay = self._runner.replay
        flops = replay.flops_of_forward / replay.batch * self._n_prompts
        goal, most = (max(passes, limit / flops) for passes, limit in (_AT_LEAST, _AT_MOST))
        short = list(self._of_kind)
        self._patch(self._rows_to_patch(goal, short))
        while goal < most:
            scores: _Numbers = self._mean(self._values).numpy()
            short = [
                kind
                for kind, here in self._of_kind.items()
                if (expected_pearson(self._expected_error(kind, "auto"), scores[here]) or 0.0)
                < _TARGET
                and (self._key[here & ~self._exact] > 0).any()
            ]
            if not short:
                break
            goal = min(most, _STEP * goal)
            self._patch(self._rows_to_patch(goal, short))

    def _rows_to_patch(self, budget: float, kinds: Iterable[HeadKind]) -> _Rows:
        """Return rows of some kinds that a budget still pays for, in the order of their gain.

        A row that costs more than what is left is skipped, and cheaper rows are taken.
        """
        scores: _Numbers = self._mean(self._values).numpy()
        gain = np.zeros(len(scores))
        for kind in kinds:
            here = self._of_kind[kind]
            spread = ((scores[here] - scores[here].mean()) ** 2).sum()
            c = self._squared_errors(kind)[self._layer[here]]
            scale = np.maximum(c, _TINY) / max(spread, _TINY)
            gain[here] = self._key[here] * np.sqrt(scale / self._cost[here])
        gain[self._exact] = 0.0
        rows = np.argsort(-gain, kind="stable")
        rows, left = rows[gain[rows] > 0], budget - self._spent
        chosen = list[_Rows]()
        while len(rows):
            total = self._cost[rows].cumsum()
            n = int(np.searchsorted(total, left, side="right"))
            chosen.append(rows[:n])
            left -= float(total[n - 1]) if n else 0.0
            rows = rows[n:][self._cost[rows[n:]] <= left]
        return np.concatenate(chosen) if chosen else rows

    def _patch(self, rows: _Rows) -> None:
        """Patch rows of any groups, those of one layer and kind together."""
        self._bar.total = self._bar.n + len(rows)
        self._bar.refresh()
        firsts = np.cumsum([0, *map(len, self._groups)])
        joined: list[tuple[_Rows, SiteGroup]] = []
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
        replay = self._runner.replay.precise
        padded = not (replay.recording.mask is None or bool(replay.recording.mask.all()))
        edits = [(group.sites, self._first, padded) for _, group in joined]
        untested = [
            group
            for (_, group), edit in zip(joined, edits, strict=True)
            if edit not in self._tested
        ]
        check_edits(replay, untested, self._runner.part, [self._first])
        self._tested.update(edits)
        patched = self._runner.values([group for _, group in joined])
        for (here, _), values in zip(joined, patched, strict=True):
            self._values[here] = values
            self._exact[here] = True

    def _squared_errors(self, kind: HeadKind) -> _Numbers:
        """Return c, the squared error of a site over its key², of each layer of a kind."""
        patched = np.flatnonzero(self._of_kind[kind] & self._exact & (self._key > 0))
        if not len(patched):
            return np.ones(len(self._sites))
        key2, error2 = self._key[patched] ** 2, self._errors()[patched] ** 2
        keys, errors = (
            np.bincount(self._layer[patched], numbers, len(self._sites))
            for numbers in (key2, error2)
        )
        of_kind = float(error2.sum() / key2.sum())
        of_layers = np.divide(errors, keys, out=np.full(len(keys), of_kind), where=keys > 0)
        return np.maximum(of_layers, _LUCK * of_kind)

    def _expected_error(self, kind: HeadKind, budget: Budget) -> float | None:
        """Return the root of the squared error expected of a kind's scores; None if unknown."""
        unseen = self._key**2 * (self._of_kind[kind] & ~self._exact)
        if not unseen.any():
            return 0.0
        patched = np.flatnonzero(self._of_kind[kind] & self._exact)
        if len(patched) < _FEWEST or (budget != "auto" and budget < _AT_LEAST[0]):
            return None
        half = patched[self._key[patched].argsort(kind="stable")][: len(patched) // 2]
        c_half = (self._errors()[half] ** 2).sum() / (self._key[half] ** 2).sum()
        of_layers = float((self._squared_errors(kind)[self._layer] * unseen).sum())
        return float(np.sqrt(_SAFETY * max(of_layers, c_half * unseen.sum())))

    def _errors(self) -> _Numbers:
        """Return the errors of the estimates of patched rows, and 0 for the other rows."""
        errors: _Numbers = self._mean(self._values).numpy() - self._estimates
        return errors
