"""Repair gradient estimates: patch sites whose estimates are likely to be wrong.

Of more than ten thousand sites, a few cause most of the squared error of gradient estimates. A
number that we call a site's repair key (not an attention key) predicts which sites these are. Sites
with large repair keys are patched, and the exact values replace the estimates.

A first-order estimate has a large error if a patch adds a long vector to the residual stream,
because this vector changes the next norm's scale. Let a_t be the length of the vector that a patch
adds to a head's output at token t. Let x_t be the residual stream after the head's sublayer in the
target run (the run that is patched into), and g_t the gradient of the metric with respect to x_t.
The repair key is

    key = Σ_t a_t² ‖g_t‖ / ‖x_t‖

In each term, a_t ‖g_t‖ is the largest possible effect in a linear model, and a_t / ‖x_t‖ is the
relative size of the change. The lengths a_t are

    neuron-heads, any part    |Δz_i| ‖W_O[i]‖, for each layer that they write to
    attention, z              ‖Δz W_O‖
    pattern, q                ‖Δz W_O‖, from a pass in which all patterns (or queries) are
                              replaced, and z is restored before anything reads it
    value                     P[t, s] ‖Δv_s W_O‖, written at every t by a value at s
    k                         |P'[t, s] - P[t, s]| ‖(v_s - z_t) W_O‖, where P' comes from a pass in
                              which all keys are replaced

Let e be the estimated effects, and let t be those estimated with the gradient in the target run.
For methods "gradient" and "exact_gate", e = t. "integrated" and "secant" use other slopes, which
differ from this gradient at nearly every site; the effect of a small change is t. The expected
squared error of e is thus

    (e - t)² + c key²

Here, c key² is the expected squared error of t. Each layer and kind of head has its own c, which is
fitted to the sites patched so far, but is at least a quarter of the c that is fitted to all layers
of the kind. As the gradient in the target run may be 0, the key of "integrated" and "secant" uses
the longer of this gradient and the method's own.

The next patch should raise the correlation between e and the exact effects most per flop. We
therefore patch the site with the largest value of

    √((e - t)² + c key²) / √(cost · Σ (e - mean e)²)         Σ: over the heads of the site's kind

The rows that `Sweep.top` shows are also patched: the 20 rows with the largest |effect|. An exact
effect may be smaller than its estimate, so this is repeated until all 20 rows are exact.

The expected correlation for a kind of head is

    √(1 - Σ_unpatched ((e - t)² + 4 c key²) / Σ (e - mean e)²)

The factor 4 is a safety margin. The larger of two sums of c key² is used: one with each layer's own
coefficient c, and one with a c fitted to the patched sites with below-median repair keys. The
expected correlation is not a bound.

A switch is a position at which the norm of the residual stream at a block's input differs by a
factor of two or more between the runs: for example, SmolLM2 gives some tokens right after BOS the
very large activations of an attention sink, and others not. What is written before or at the last
such block decides whether the stream switches, and slopes in one run say little about that.

The expected correlation for a kind is None if

    - sites before a switch were not patched;
    - fewer than 16 of its sites (and not all) were patched, or the budget is below 3 passes;
    - it would be below 0.8: the estimates are so poor that their errors cannot be predicted either.

The budget "auto" first spends 2 forward passes or 0.2 GFLOP, whichever is larger, and checks the
top 20 rows. Patching then continues, with further checks of the top 20 rows, until this correlation
is 0.99 for each kind of head and all sites before a switch are exact, or until the cost reaches 7
passes (10 with the estimates) or 4 GFLOP, whichever is larger. This limit is multiplied by 2.5 if
one of the top 20 estimates has the wrong sign, or if it does not suffice for the top 20 rows. Once
these rows are exact, further patches add only exact rows to them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_number
from attn_only_lens.devices import float32_if_half, on_cpu
from attn_only_lens.engine.edits import by_head, by_site, change_of_z
from attn_only_lens.engine.recording import Recording, run
from attn_only_lens.engine.sites import SHARED_PARTS, LayerSites, Part, hook_name
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS, HeadKind
from attn_only_lens.patching.results import TOP
from attn_only_lens.patching.run_patches import PatchRunner, check_edits
from attn_only_lens.patching.site_groups import SiteGroup
from attn_only_lens.tolerances import LOGIT_TOLERANCE, disagreement

Budget: TypeAlias = float | Literal["auto"]
_AT_LEAST, _AT_MOST = (2.0, 2e8), (7.0, 4e9)  # limits of budget="auto": passes and flops
_TARGET, _STEP = 0.99, 2.5  # for "auto": correlation to reach, and growth factor of the budget
_RAISE = 2.5  # for "auto": factor of the limit if the top rows need it (see the docstring)
_FIRST, _NEXT = 2 / 7, 0.2  # shares of the budget that are spent before the top rows are checked
_SAFETY, _LUCK, _FEWEST, _JUDGED = 4.0, 0.25, 16, 3.0
_LOWEST = 0.8  # an expected correlation below this is too uncertain to state
_SWITCH = 2.0  # the ratio of two norms of the residual stream from which we speak of a switch
_TINY = 1e-100  # prevents divisions by 0 if all errors or effects are 0
_LEAST_COST = 1e-3  # added to the cost of each patch, in forward passes
_Numbers: TypeAlias = npt.NDArray[np.float64]
_Rows: TypeAlias = npt.NDArray[np.int64]

_READ: dict[Part, tuple[Part, ...]] = {"value": ("pattern",), "k": ("pattern", "value", "z")}
"""For each part of attention heads, the other activations on which the repair key depends."""


@dataclass(frozen=True, eq=False)
class Repairs:
    """Estimates, some of which were replaced by exact values.

    Attributes:
        values: the metric after the patch of each row.
        exact: whether each row was patched.
        before_switch: whether each row's site lies before a switch.
        expected_errors: for each kind of head, the square root of the expected sum of squared
            errors over rows, with a margin; None if too few sites were patched for an estimate.
        forwards: the cost of the patches, in forward passes (counted in flops).
    """

    values: Float[Tensor, "row prompt"]
    exact: npt.NDArray[np.bool_]
    before_switch: npt.NDArray[np.bool_]
    expected_errors: dict[HeadKind, float | None]
    forwards: float

    @classmethod
    def nothing(
        cls, values: Tensor, groups: Sequence[SiteGroup], before_switch: npt.NDArray[np.bool_]
    ) -> "Repairs":
        """Return the estimates unchanged, without any exact values."""
        errors = dict.fromkeys(group.sites.kind for group in groups)
        return cls(values, np.zeros(len(values), dtype=bool), before_switch, {**errors}, 0.0)


def expected_pearson(error: float | None, scores: Float[Tensor, "row"] | _Numbers) -> float | None:
    """Return the expected correlation of scores with exact scores; None if it is too uncertain."""
    if error is None or np.isnan(error):
        return None
    total = float(((scores - scores.mean()) ** 2).sum())
    if error == 0:
        return 1.0
    return None if error**2 > (1 - _LOWEST**2) * total else float(np.sqrt(1.0 - error**2 / total))


def budget_reasons(budget: object) -> list[str]:
    """Return an error message, in a list, if the budget is invalid."""
    if budget == "auto" or is_number(as_plain(budget), 0):
        return []
    return [f"got budget={budget!r}; expected 0 or more forward passes, or 'auto'"]


class Repairer:
    """Patches the sites whose estimates are likely to be wrong, until the budget is spent.

    Args:
        runner: patches groups of sites.
        groups: the sites; each has one row.
        keys: each row's repair key.
        before_switch: whether each row's site lies before a switch.
        values: the estimated metric after each row's patch.
        tangents: the same, estimated with the gradient in the target run.
        mean: computes means over prompts.
        bar: a progress bar.
        tested: the first patched position of earlier chunks of prompts whose edits were tested,
            and whether these prompts have padding.
        n_prompts: the number of all prompts.
        per_prompt: whether the top rows are those of single prompts.
    """

    def __init__(
        self,
        runner: PatchRunner,
        groups: Sequence[SiteGroup],
        keys: Float[Tensor, "row"],
        before_switch: npt.NDArray[np.bool_],
        values: Float[Tensor, "row prompt"],
        tangents: Float[Tensor, "row prompt"],
        mean: Callable[[Float[Tensor, "row prompt"]], Tensor],
        bar: Any,
        tested: set[tuple[int, bool]],
        n_prompts: int,
        *,
        per_prompt: bool,
    ) -> None:
        self._runner, self._groups, self._mean, self._bar = runner, groups, mean, bar
        self._tested, self._n_prompts, self._per_prompt = tested, n_prompts, per_prompt
        self._values, self._estimates = values.clone(), mean(values).numpy()
        self._tangents: _Numbers = mean(tangents).numpy()
        self._differences: _Numbers = (self._estimates - self._tangents) ** 2
        self._unpatched = runner.baseline.cpu().double()
        self._exact = np.zeros(len(values), dtype=bool)
        self._cost = self._costs()
        self._before_switch = before_switch & np.isfinite(self._cost)
        self._key = self._positive(keys.cpu().double().numpy())
        self._sites = list(dict.fromkeys(group.sites for group in groups))
        sizes = [len(group) for group in groups]
        self._layer = np.repeat([self._sites.index(group.sites) for group in groups], sizes)
        kinds = np.array([sites.kind for sites in self._sites])
        self._of_kind: dict[HeadKind, npt.NDArray[np.bool_]] = {
            kind: (kinds == kind)[self._layer]
            for kind in dict.fromkeys(sites.kind for sites in self._sites)
        }

    def spend(self, budget: Budget) -> Repairs:
        """Patch as many sites as the budget allows."""
        if budget == "auto":
            replay = self._runner.replay
            flops = replay.flops_of_forward / replay.batch * self._n_prompts
            least, most = (max(passes, limit / flops) for passes, limit in (_AT_LEAST, _AT_MOST))
            self._patch_until_expected(least, most, target=_TARGET, factor=_RAISE)
        else:
            self._patch_until_expected(_FIRST * budget, float(budget), target=np.inf, factor=1.0)
        errors = {kind: self._expected_error(kind) for kind in self._of_kind}
        if budget != "auto" and budget < _JUDGED:  # too few patches to estimate errors
            errors = {kind: error if error == 0.0 else None for kind, error in errors.items()}
        return Repairs(self._values, self._exact, self._before_switch, errors, self._spent)

    @property
    def _spent(self) -> float:
        return float(self._cost[self._exact].sum())

    @property
    def _scores(self) -> _Numbers:
        """The mean metric after each row's patch: exact if the patch was run, else estimated."""
        scores: _Numbers = self._mean(self._values).numpy()
        return scores

    def _costs(self) -> _Numbers:
        """Return the cost of each patch in forward passes; infinity if the patch has no effect."""
        replay = self._runner.replay
        blocks, starts = zip(*map(self._runner.starts, self._groups), strict=True)
        all_starts = torch.cat(starts)
        moving = all_starts[all_starts >= 0]
        first = int(moving.min()) if len(moving) else 0
        self._first = replay.start(min(blocks), first)
        if self._first < first:  # this model's passes cannot start at later positions
            starts = tuple(start.clamp(max=0) for start in starts)
        shares = map(replay.share_of_forward, blocks, starts)
        costs: _Numbers = torch.cat(list(shares)).numpy() + _LEAST_COST
        costs[all_starts.numpy() < 0] = np.inf
        return costs

    def _positive(self, keys: _Numbers) -> _Numbers:
        """Return positive keys for all patches that can have an effect, and 0 for all others.

        If the model is saturated, a site's gradient (and so its key) may be 0 although its patch
        has an effect. Such sites are patched last.
        """
        least = keys[keys > 0].min(initial=np.inf)
        changes = np.isfinite(self._cost) & np.isfinite(least)
        return np.where(changes, np.maximum(keys, least), 0.0)

    def _patch_until_expected(
        self, least: float, most: float, target: float, factor: float
    ) -> None:
        """Patch sites with large gain and the top rows in turn, within `most` forward passes.

        The limit `most` is multiplied by `factor` once, if `_check_top` asks for more.
        """
        kinds, goal = list(self._of_kind), least
        while kinds:
            # One pass for both costs less than two: many rows need little more time than one.
            rows, (top, _) = self._rows_to_patch(goal, kinds), self._top_rows(most)
            room = most - self._spent - self._cost[top].sum()
            rows = rows[~np.isin(rows, top) & (self._cost[rows].cumsum() <= room)]
            self._patch(np.concatenate([top, rows]))
            if (self._is_wrong(top) | self._check_top(most)) and factor > 1:
                most, factor = factor * most, 1.0
                self._check_top(most)
            if goal >= most:
                break
            kinds = [
                kind
                for kind, rows in self._of_kind.items()
                if self._falls_short(kind, rows, target)
            ]
            goal = min(most, max(_STEP * goal, self._spent + _NEXT * (most - self._spent)))

    def _check_top(self, most: float) -> bool:
        """Patch the rows that `Sweep.top` shows; return whether a sign was wrong or some are left.

        An exact effect that is smaller than its estimate may move another row to the top.
        """
        is_wrong = False
        while True:
            rows, is_short = self._top_rows(most)
            if not len(rows):
                return is_wrong or is_short
            self._patch(rows)
            is_wrong |= self._is_wrong(rows)

    def _top_rows(self, most: float) -> tuple[_Rows, bool]:
        """Return the unpatched rows that `Sweep.top` shows, within the limit, and if there are any.

        The limit is `most` forward passes.
        """
        changes = self._values - self._unpatched
        effects = (changes if self._per_prompt else self._mean(changes)[:, None]).numpy()
        sizes = np.abs(effects).ravel()
        least = np.partition(sizes, -TOP)[-TOP] if len(sizes) > TOP else 0.0
        top = np.flatnonzero(sizes >= least)  # sorting all rows would take as long as a pass
        top = top[np.argsort(-sizes[top], kind="stable")][:TOP]
        rows = np.array(list(dict.fromkeys(top // effects.shape[1])), dtype=np.int64)
        rows = rows[~self._exact[rows] & np.isfinite(self._cost[rows])]
        n = int(np.searchsorted(self._cost[rows].cumsum(), most - self._spent, side="right"))
        return rows[:n], len(rows) > 0

    def _is_wrong(self, rows: _Rows) -> bool:
        """Return whether the effect of a patched row has another sign than its estimate."""
        unpatched = float(self._mean(self._unpatched[None])[0])
        estimates, exact = self._estimates[rows] - unpatched, self._scores[rows] - unpatched
        return bool((estimates * exact < 0).any())

    def _falls_short(self, kind: HeadKind, rows: npt.NDArray[np.bool_], target: float) -> bool:
        """Return True if the correlation for this kind of head is too low and could be improved."""
        expected = expected_pearson(self._expected_error(kind), self._scores[rows]) or 0.0
        left = rows & ~self._exact
        short = expected < target or bool((left & self._before_switch).any())
        return short and bool((self._key[left] > 0).any())

    def _rows_to_patch(self, budget: float, kinds: Iterable[HeadKind]) -> _Rows:
        """Return the rows to patch within the remaining budget, in order of decreasing gain.

        A row's gain is the quantity that the module docstring maximizes to choose the next site.
        Rows that cost more than the remaining budget are skipped.
        """
        scores, left = self._scores, budget - self._spent
        gain = np.zeros(len(scores))
        for kind in kinds:
            mask = self._of_kind[kind]
            spread = ((scores[mask] - scores[mask].mean()) ** 2).sum()
            c = self._squared_errors(kind)[self._layer[mask]]
            square = np.maximum(c, _TINY) * self._key[mask] ** 2 + self._differences[mask]
            gain[mask] = np.sqrt(square / max(spread, _TINY) / self._cost[mask])
        gain[self._exact] = 0.0
        rows = np.flatnonzero((gain > 0) & (self._cost <= left))
        n_most = int(left / _LEAST_COST)  # at most this many rows fit into the budget
        if len(rows) > n_most:
            rows = np.sort(rows[np.argpartition(-gain[rows], n_most)[:n_most]])
        rows = rows[np.argsort(-gain[rows], kind="stable")]
        chosen = list[_Rows]()
        while len(rows):
            total = self._cost[rows].cumsum()
            n = int(np.searchsorted(total, left, side="right"))
            chosen.append(rows[:n])
            left -= float(total[n - 1]) if n else 0.0
            rows = rows[n:][self._cost[rows[n:]] <= left]
        return np.concatenate(chosen) if chosen else rows

    def _patch(self, rows: _Rows) -> None:
        """Patch the given rows. Rows of one layer and kind are patched together."""
        self._bar.total = self._bar.n + len(rows)
        self._bar.refresh()
        firsts = np.cumsum([0, *map(len, self._groups)])
        joined: list[tuple[_Rows, SiteGroup]] = []
        for i, sites in enumerate(self._sites):
            chosen_rows = np.sort(rows[self._layer[rows] == i])
            if len(chosen_rows):
                chosen = [
                    group[torch.from_numpy(chosen_rows[inside] - first)]
                    for group, first in zip(self._groups, firsts, strict=False)
                    if group.sites is sites
                    for inside in [(chosen_rows >= first) & (chosen_rows < first + len(group))]
                ]
                joined.append((chosen_rows, SiteGroup.joined(chosen)))
        self._check_edits()
        patched = self._runner.values([group for _, group in joined])
        for (chosen_rows, _), values in zip(joined, patched, strict=True):
            self._values[chosen_rows] = values
            self._exact[chosen_rows] = True

    def _check_edits(self) -> None:
        """Test the edits of all groups, unless they were tested on an earlier chunk of prompts."""
        replay = self._runner.replay.precise
        padded = not (replay.recording.mask is None or bool(replay.recording.mask.all()))
        if (self._first, padded) not in self._tested:
            check_edits(replay, self._groups, self._runner.part, [self._first])
            self._tested.add((self._first, padded))

    def _squared_errors(self, kind: HeadKind) -> _Numbers:
        """Return each layer's ratio c of the squared error of t to key², fitted to patched rows."""
        patched = np.flatnonzero(self._of_kind[kind] & self._exact & (self._key > 0))
        if not len(patched):
            return np.ones(len(self._sites))
        key2, error2 = self._key[patched] ** 2, self._errors(patched) ** 2
        keys, errors = (
            np.bincount(self._layer[patched], numbers, len(self._sites))
            for numbers in (key2, error2)
        )
        of_kind = float(error2.sum() / key2.sum())
        of_layers = np.divide(errors, keys, out=np.full(len(keys), of_kind), where=keys > 0)
        return np.maximum(of_layers, _LUCK * of_kind)

    def _expected_error(self, kind: HeadKind) -> float | None:
        """Return the root of the expected sum of squared errors, or None if this sum is unknown."""
        unseen = self._key**2 * (self._of_kind[kind] & ~self._exact)
        if not unseen.any():
            return 0.0
        patched = np.flatnonzero(self._of_kind[kind] & self._exact)
        if len(patched) < _FEWEST:
            return None
        half = patched[self._key[patched].argsort(kind="stable")][: len(patched) // 2]
        c_half = (self._errors(half) ** 2).sum() / (self._key[half] ** 2).sum()
        of_layers = float((self._squared_errors(kind)[self._layer] * unseen).sum())
        square = _SAFETY * max(of_layers, c_half * unseen.sum())
        return float(np.sqrt(square + self._differences[unseen > 0].sum()))

    def _errors(self, rows: _Rows) -> _Numbers:
        """Return exact effects minus t (see the module docstring) for rows that were patched."""
        exact: _Numbers = self._mean(self._values[torch.from_numpy(rows)]).numpy()
        return exact - self._tangents[rows]


def hook_points(model: Any, sites: Sequence[LayerSites], part: Part) -> tuple[set[str], set[str]]:
    """Return the hook points whose gradients, and those whose activations, repair keys need."""
    host = host_of(model)
    writes = {
        host.write_hook(layer, site.kind)
        for site in sites
        for layer in host.layers_written(site.layer, site.kind)
    }
    points = {*_READ.get(part, ()), "z"}
    return writes, writes | {
        hook_name(model, site.layer, point, site.kind)
        for site in sites
        if site.kind not in NEURON_KINDS
        for point in points
    }


@torch.no_grad()
def lie_before_switch(
    model: Any, groups: Sequence[SiteGroup], target: Recording, source: Recording
) -> npt.NDArray[np.bool_]:
    """Return, for each row, whether its site lies before a switch (see the module docstring)."""
    inputs = [run.streams[1:-1] for run in (target, source)]  # what all blocks but the first read
    if not inputs[0]:
        return np.zeros(sum(map(len, groups)), dtype=bool)
    device = target.tokens.device
    one, other = (
        torch.stack([float32_if_half(x).norm(dim=-1).to(device) for x in streams])
        for streams in inputs
    )
    large, small = torch.maximum(one, other), torch.minimum(one, other)
    switched = (large >= _SWITCH * small) & (large > 0)
    if target.mask is not None:
        switched &= target.mask.bool().to(device)
    blocks = torch.arange(1, 1 + len(switched), device=device)[:, None, None]
    last = (switched * blocks).amax(0)  # [batch, pos]; 0 without a switch
    host, sets = host_of(model), list[Tensor]()
    for group in groups:
        is_before = (last > 0) & (last >= host.block(group.sites.layer, group.sites.kind))
        sets.append((group.everywhere_on(device) & is_before).flatten(1).any(1))
    rows = [is_set[group.place] for is_set, group in zip(on_cpu(sets), groups, strict=True)]
    lies: npt.NDArray[np.bool_] = torch.cat(rows).numpy()
    return lies


@torch.no_grad()
def repair_keys(
    model: Any,
    groups: Sequence[SiteGroup],
    part: Part,
    target: Recording,
    source: Recording,
    gradients: dict[str, Tensor],
) -> Float[Tensor, "row"]:
    """Return each row's repair key, which is proportional to the expected error of its estimate."""
    keys = _Keys(model, part, target, source, gradients)
    attention = {group.sites.layer for group in groups if group.sites.kind == "attention"}
    if attention and part in ("pattern", "q", "k"):
        keys.replaced = run_with_part(model, target, source, sorted(attention), part)
    by_site = {site: keys.of(site) for site in dict.fromkeys(group.sites for group in groups)}
    return on_one_device([group.sums(by_site[group.sites]).sum(dim=1) for group in groups])


def on_one_device(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate rows on one device, since different layers may be on different devices."""
    return torch.cat([x.to(rows[0].device) for x in rows])


class _Keys:
    """Computes repair keys (see the module docstring) for the heads of a layer at each token."""

    def __init__(
        self,
        model: Any,
        part: Part,
        target: Recording,
        source: Recording,
        gradients: dict[str, Tensor],
    ) -> None:
        self._host, self._model, self._part = host_of(model), model, part
        self._target, self._source, self._gradients = target, source, gradients
        self.replaced: dict[str, Tensor] = {}  # by hook point, from `run_with_part`

    def of(self, sites: LayerSites) -> Float[Tensor, "head batch pos"]:
        if sites.kind in NEURON_KINDS:
            return self._of_neurons(sites)
        if sites.kind in WIDE_KINDS:
            return self._of_wide(sites.layer, sites.kind)
        key = self._of_attention(sites.layer)
        return key[:, :, sites.index.to(key.device)].permute(2, 0, 1)

    def _slope(self, layer: int, kind: HeadKind) -> Float[Tensor, "batch pos"]:
        """Return ‖g‖ / ‖x‖."""
        name, block = self._host.write_hook(layer, kind), self._host.block(layer, kind)
        write, streams = self._target.hooked[name], self._target.streams
        write = self._host.residual_factor(layer) * write
        x = streams[block].to(write) + write if kind == "attention" else streams[block + 1]
        length = float32_if_half(x).norm(dim=-1)
        gradient = float32_if_half(self._gradients[name]).norm(dim=-1)
        return torch.where(length > 0, gradient / length, 0.0)

    def _of_neurons(self, sites: LayerSites) -> Float[Tensor, "head batch pos"]:
        layer, heads = sites.layer, self._host.neurons[sites.layer]
        dz = change_of_z(self._target.neurons[layer], self._source.neurons[layer], self._part)
        change = float32_if_half(by_site(sites, dz))
        key: Any = 0.0
        for written, W in enumerate(heads.decoders, layer):
            rows = float32_if_half(W).square().sum(1)[sites.index.to(change.device)]
            slope = self._slope(written, "neuron").to(change.device)
            key = key + change.square() * rows[:, None, None] * slope
        return key

    def _of_wide(self, layer: int, kind: HeadKind) -> Float[Tensor, "head=1 batch pos"]:
        name = self._host.hook_name(layer, kind, "z")
        change = float32_if_half(self._source.hooked[name] - self._target.hooked[name])
        if kind == "skip":
            change = change @ float32_if_half(self._host.neurons[layer].module.W_skip)
        key = change.square().sum(-1) * self._slope(layer, kind).unsqueeze(-1)
        return key.permute(2, 0, 1)

    def _of_attention(self, layer: int) -> Float[Tensor, "batch pos head_index"]:
        slope, z = self._slope(layer, "attention"), self._activation(layer, "z")
        if self._part == "value":
            moved = self._source.hooked[hook_name(self._model, layer, "value")]
            dv = by_head(moved, self._host.n_heads[layer]) - self._activation(layer, "value")
            pattern = self._activation(layer, "pattern")
            spread = torch.einsum("bhts,bt->bsh", pattern.square(), slope)
            return self._written(layer, dv).square().sum(-1) * spread
        if self._part == "k":
            new = self.replaced[hook_name(self._model, layer, "pattern")]
            dP = new - self._activation(layer, "pattern")
            v, z = self._written(layer, self._activation(layer, "value")), self._written(layer, z)
            square = v.square().sum(-1).transpose(1, 2)[:, :, None]
            square = square + z.square().sum(-1).transpose(1, 2)[..., None]
            square = square - 2 * torch.einsum("bthm,bshm->bhts", z, v)
            return torch.einsum("bhts,bt->bsh", dP.square() * square.clamp(min=0), slope)
        name = hook_name(self._model, layer, "z")
        new = self.replaced[name] if name in self.replaced else self._source.hooked[name]
        return self._written(layer, new - z).square().sum(-1) * slope.unsqueeze(-1)

    def _activation(self, layer: int, part: Part) -> Tensor:
        """Return an activation of the target run with one entry per query head."""
        value = self._target.hooked[hook_name(self._model, layer, part)]
        if part in SHARED_PARTS:
            value = by_head(value, self._host.n_heads[layer])
        return float32_if_half(value)

    def _written(self, layer: int, z: Tensor) -> Float[Tensor, "batch pos head d_model"]:
        W_O = float32_if_half(self._host.attention(layer).W_O)
        return torch.einsum("bphd,hdm->bphm", float32_if_half(z), W_O)


@torch.no_grad()
def run_with_part(
    model: Any, target: Recording, source: Recording, layers: Sequence[int], part: Part
) -> dict[str, Tensor]:
    """Run the target prompts with one part from the source run; return each layer's z.

    If the part is "k", also return the patterns. One forward pass serves all heads, because the
    part of one head affects only the z of this head, and z is restored before later layers read it.
    For queries, a second pass tests this assumption.
    """
    if part == "q":
        moved = _run_with_part(model, target, source, layers, part, n_heads=1)
        changed = [
            name
            for name, z in moved.items()
            if disagreement(z[:, :, 1:], target.hooked[name][:, :, 1:], LOGIT_TOLERANCE[z.dtype])
        ]
        if changed:
            raise UnsupportedModelError(
                [
                    "a patch of one head's query changes the z of other heads "
                    f"({', '.join(changed)}), because one norm acts on the queries of all heads; "
                    "use method='gradient' with budget=0, or patch the pattern"
                ],
                "the queries of this model cannot be patched in closed form",
            )
    return _run_with_part(model, target, source, layers, part, n_heads=None)


def _run_with_part(
    model: Any,
    target: Recording,
    source: Recording,
    layers: Sequence[int],
    part: Part,
    n_heads: int | None,
) -> dict[str, Tensor]:
    """Run with one part replaced in the first `n_heads` heads (None: all heads), and restore z."""
    seen: dict[str, Tensor] = {}
    head_axis = 1 if part == "pattern" else 2

    def replace_part(value: Tensor, hook: Any, name: str) -> Tensor:
        if n_heads is None:
            return source.hooked[name].clone()
        new = source.hooked[name].narrow(head_axis, 0, n_heads)
        rest = value.narrow(head_axis, n_heads, value.shape[head_axis] - n_heads)
        return torch.cat([new, rest], dim=head_axis)

    def see(value: Tensor, hook: Any, name: str) -> None:
        seen[name] = value.clone()

    def restore_z(value: Tensor, hook: Any, name: str) -> Tensor:
        seen[name] = value.clone()
        return target.hooked[name]

    actions: list[tuple[Part, Callable[..., Tensor | None]]] = [(part, replace_part)]
    actions += [("pattern", see)] if part == "k" else []
    actions += [("z", restore_z)]
    hooks = [
        (name, partial(action, name=name))
        for point, action in actions
        for name in [hook_name(model, layer, point) for layer in layers]
    ]
    run(model, target.tokens, target.mask, hooks)
    return seen
