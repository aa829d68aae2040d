"""A model in which everything but a circuit is ablated, for many circuits at once.

Sites are attention heads and neuron-heads at positions, as the rows of a `Sweep` name them. A site
of the circuit computes as usual, from what then reaches it. Any other is ablated: its z becomes

    "zero"      0
    "mean"      its mean over all real tokens of the clean prompts
    "resample"  its value in the corrupted run, at the same position

Heads and positions that are no sites, the embedding and the biases are never ablated.

Positions are numbers, "all" together, or roles (`engine/positions.py`). A site by role is a head at
the role's token in each prompt; prompts may then differ in length.

Circuits are rows of one batch, each with its own sites (`engine/replay`). Resampled, nothing before
the first token that differs can change, and those positions are not run again.

With m the metric, C a circuit, M all sites, and g the gradient of m at a site where only C is left,

    worth = g · (z - what it becomes if ablated) / (m(M) - m(∅))

is what a site adds to the faithfulness of C, to first order: what it loses if taken away, for a
site of C, and what it gains if put back, for any other. One forward pass and a backward one tell it
of all sites.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.edit_checks import require_edits_read
from attn_only_lens.engine.gradients import Tape
from attn_only_lens.engine.inputs import option_reasons, reasons_not_to_run
from attn_only_lens.engine.interventions import ablate
from attn_only_lens.engine.metrics import AnyMetric
from attn_only_lens.engine.positions import Positions, PositionSet, resolve_positions
from attn_only_lens.engine.prompts import Prompts, prompt_pair
from attn_only_lens.engine.recording import Hooks, record_pair
from attn_only_lens.engine.replay import Variants, make_replay
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.run_patches import Batching

Ablation = Literal["zero", "mean", "resample"]
Order = Literal["magnitude", "signed"]
ORDERS: tuple[Order, ...] = get_args(Order)
Rows: TypeAlias = npt.NDArray[np.int64]
"""Rows of a frame of sites."""
_Floats: TypeAlias = npt.NDArray[np.float64]
_Flags: TypeAlias = npt.NDArray[np.bool_]
_PROBLEM = "these sites cannot be ablated"
_EXPECTED_POSITIONS = "expected 'each', 'all', or numbers from 0"


class AblatedModel:
    """A model of which only a circuit is left.

    Attributes:
        n_sites: the number of sites that may be ablated.
        n_pos: tokens of a prompt.
        whole: the metric of the whole model.
        nothing: the metric with every site ablated.
    """

    def __init__(
        self,
        model: Any,
        clean: Prompts,
        corrupted: Prompts,
        metric: AnyMetric,
        sites: pd.DataFrame,
        *,
        ablation: Ablation,
        mask: Tensor | None,
        positions: Positions | None = None,
        on_done: Callable[[int], object] = lambda n: None,
    ) -> None:
        """Run both prompts, and the clean ones with every site ablated.

        Args:
            model: converted, or with exposed neuron-heads; without hooks of its own.
            clean: the prompts whose circuits are measured.
            corrupted: the prompts to resample from, token for token.
            metric: that circuits are measured by.
            sites: that may be ablated, as rows of `Sweep.frame`.
            ablation: "zero", "mean", "resample".
            mask: 1 for real tokens, 0 for padding, if prompts are tokens.
            positions: where each role is in the prompts, for sites by role.
            on_done: called with the number of circuits that are done.

        Raises:
            InputError: an unknown ablation; positions from the end, or beyond the prompts; roles
                without a position, or two of them at one token; single heads of a neuron; ablating
                everything changes nothing.
            InputError: prompts or a metric that do not fit.
            UnsupportedModelError: ablating some heads has no effect, as the model does not read
                them where they are hooked.
        """
        InputError.raise_if(option_reasons("ablation", ablation, get_args(Ablation)), _PROBLEM)
        InputError.raise_if(reasons_not_to_run(model), "this model cannot be ablated")
        sites = sites.reset_index(drop=True)
        groups = resolve_sites(model, list(sites["name"].unique()))
        pair = prompt_pair(model, clean, corrupted, mask)
        runs = record_pair(model, pair, metric, groups, "z")
        self.n_sites, self.n_pos = len(sites), pair.clean.shape[1]
        self._sites = sites.groupby("name", observed=True)
        roles = resolve_positions(pair, positions) if isinstance(positions, Mapping) else ()
        InputError.raise_if(_reasons_against_sites(sites, self.n_pos, roles), _PROBLEM)
        source = (
            runs.corrupted
            if ablation == "resample"
            else ablate(runs.clean, runs.clean, ablation, pair.real)
        )
        layers: dict[HeadKind, list[int]] = {}
        self._points: list[_AblatedPoint] = []
        for key, rows in sites.groupby(["layer", "kind"], observed=True):
            layer, kind = cast("tuple[int, HeadKind]", key)
            layers.setdefault(kind, []).append(layer)
            name, width = host_of(model).hook_name(layer, kind, "z"), 1
            if kind == "attention":
                other = source.hooked[name]
            else:
                other = source.neurons[layer].z.unsqueeze(-1)
                width = host_of(model).neurons[layer].heads_per_neuron
            self._points.append(_AblatedPoint.of(name, other, width, rows, roles))
        for kind, of_kind in layers.items():
            require_edits_read(model, runs.clean, kind, of_kind, "z")
        self._replay = make_replay(model, runs.clean, runs.metric)
        differs = ((pair.clean != pair.corrupted) & pair.real).any(dim=0)
        earliest = int(differs.nonzero()[0]) if ablation == "resample" else 0
        self._first = self._replay.start(0, earliest)
        self._batching = Batching(model, None, on_done, self._replay.numbers_per_token)
        self.whole = runs.clean_value
        self.nothing = float(self._values([np.empty(0, dtype=np.int64)])[0])
        if not abs(self.whole - self.nothing) > 1e-6 * max(abs(self.whole), abs(self.nothing)):
            reason = (
                f"the metric is {self.whole} with all sites and {self.nothing} with none of them; "
                "expected sites, an ablation and a metric that tell the two apart"
            )
            raise InputError([reason], _PROBLEM)

    def ranked(self, ranking: Sweep, order: Order) -> Rows:
        """Return the rows of a ranking, the highest ranked first; of equals the first.

        Args:
            ranking: of the sites.
            order: by "magnitude" of effects, or "signed", with what helps faithfulness first.
        """
        # The two spans may differ in sign: of two prompts, and of all sites and none.
        own = ranking.clean_value - ranking.corrupted_value
        # What helps raises the score when put in, and lowers it when taken out.
        helps = np.sign(own * (self.whole - self.nothing)) * (1 if ranking.baseline == 0 else -1)
        effect = ranking.effect.to_numpy() * helps
        return np.argsort(-(abs(effect) if order == "magnitude" else effect), kind="stable")

    def faithfulness(self, circuits: Sequence[Rows]) -> Float[np.ndarray, "circuit"]:
        """Return (m(C) - m(∅)) / (m(M) - m(∅)) of circuits C, with m the metric, M all sites.

        Args:
            circuits: rows of the sites of each.
        """
        return (self._values(circuits) - self.nothing) / (self.whole - self.nothing)

    def losses(self, names: Sequence[str], on_done: Callable[[int], object]) -> _Floats:
        """Return how much of the metric is lost when one head is ablated, at all its positions.

        Args:
            names: of the heads.
            on_done: called with the number of heads that are done, here and from then on.
        """
        self._batching.on_done = on_done
        rows = self._sites.indices
        every = np.arange(self.n_sites)
        found = self.faithfulness([np.delete(every, rows[name]) for name in names])
        return (1 - found) * (self.whole - self.nothing)

    def curves(
        self, circuits: Sequence[Rows], n_random: int = 0, seed: int = 0
    ) -> tuple[_Floats, _Floats, Float[np.ndarray, "random circuit"]]:
        """Return the faithfulness of circuits, of all other sites, and of random ones.

        Args:
            circuits: rows of the sites of each.
            n_random: random rankings, whose first sites are circuits of the same sizes.
            seed: of those.
        """
        every = np.arange(self.n_sites)
        others = [np.delete(every, circuit) for circuit in circuits]
        generator = np.random.default_rng(seed)
        orders = [generator.permutation(self.n_sites) for _ in range(n_random)]
        random = [order[: len(circuit)] for order in orders for circuit in circuits]
        n = len(circuits)
        found = self.faithfulness([*circuits, *others, *random])
        return found[:n], found[n : 2 * n], found[2 * n :].reshape(n_random, n)

    def worth(self, circuit: Rows) -> Float[np.ndarray, "site"]:
        """Return what each site adds to a circuit's faithfulness, to first order."""
        kept, computed = self._kept([circuit]), dict[str, Tensor]()
        tape = Tape(point.name for point in self._points)
        with torch.enable_grad():
            stream = self._replay.recorded_stream(0, self._first, 1).requires_grad_()
            hooks = [*self._hooks(kept, computed), *tape.hooks]
            logits = self._replay.logits(Variants(0, self._first, stream, hooks))
            value = self._replay.metric.value(logits.unflatten(0, (-1, self._replay.batch)))[0]
            gradients = tape.gradients(value)
        worths = []
        for point in self._points:
            change = computed[point.name] - point.replacement[:, self._first :]
            worth = to_float64_device(gradients[point.name] * change).double().sum(dim=-1)
            worth = worth.sum(dim=0, keepdim=True) if point.role is None else worth
            worths.append(worth.to(to_float64_device(stream).device))
        flat = torch.cat([worth.flatten() for worth in worths]).cpu()
        by_site = np.zeros(self.n_sites)
        for point, worth in zip(
            self._points, flat.split([worth.numel() for worth in worths]), strict=True
        ):
            of_heads = worth.view(-1, self.n_pos - self._first, point.replacement.shape[2])
            by_site[point.rows] = point.by_site(of_heads.numpy(), self._first)
        return by_site / (self.whole - self.nothing)

    @torch.no_grad()
    def _values(self, circuits: Sequence[Rows]) -> _Floats:
        values = torch.empty(len(circuits), dtype=torch.float64, device="cpu")

        def run(chosen: Tensor) -> Tensor:
            hooks = self._hooks(self._kept([circuits[i] for i in chosen.tolist()]))
            stream = self._replay.recorded_stream(0, self._first, len(chosen))
            found = self._replay.values(Variants(0, self._first, stream, hooks))
            return self._replay.metric.mean(found)

        every = torch.arange(len(circuits), device="cpu")
        per_variant = self._replay.numbers_per_variant(self._first)
        self._batching.fill(values, every, per_variant, run)
        return values.numpy()

    def _kept(self, circuits: Sequence[Rows]) -> _Flags:
        kept = np.zeros((len(circuits), self.n_sites), dtype=bool)
        for row, circuit in enumerate(circuits):
            kept[row, circuit] = True
        return kept

    def _hooks(self, kept: _Flags, computed: dict[str, Tensor] | None = None) -> Hooks:
        return [point.hook(kept, self._first, computed) for point in self._points]


def _reasons_against_sites(
    sites: pd.DataFrame, n_pos: int, roles: Sequence[PositionSet]
) -> list[str]:
    reasons = []
    if "prompt" in sites:
        reasons.append('got rows of each prompt; expected means, or query("prompt == 0")')
    single = [name for name in sites["name"].astype(str) if "." in name]
    if single:
        reasons.append(f"got {single[0]}, one head of a neuron; expected whole neurons")
    numbers = set(sites["position"].unique().tolist()) - {"all"}
    if any(isinstance(number, str) for number in numbers):
        labels = [role.label for role in roles]
        unknown = sorted(str(number) for number in numbers if number not in labels)
        reasons += [
            f"got sites at the role {label!r}; expected its position in each prompt: pass "
            f"positions={{{label!r}: …}}"
            for label in unknown
        ]
        reasons += [
            f"got {first.label!r} and {second.label!r}, the same token of prompt "
            f"{int((first.where & second.where).any(dim=1).nonzero()[0])}; expected a token of its "
            "own for each role"
            for first, second in combinations(roles, 2)
            if (first.where & second.where).any()
        ]
    elif roles:
        reasons.append("got positions by role, and sites without a role; expected sites by role")
    elif any(each < 0 for each in numbers):
        reasons.append(f"got positions from the end; {_EXPECTED_POSITIONS}")
    elif any(each >= n_pos for each in numbers):
        reasons.append(
            f"got a site at position {max(numbers)}; the prompts have {n_pos} tokens: pass a "
            "ranking of prompts of this length"
        )
    return reasons


@dataclass(frozen=True, eq=False)
class _AblatedPoint:
    """Sites at one hook point.

    Attributes:
        name: of the hook point.
        replacement: of every z there.
        width: heads of a node.
        rows: of the sites, among all.
        index: of each site's head or neuron.
        position: of each site: a number, or its role's; None where a site is at all positions.
        role: [batch, pos], the number of the role at each token, -1 for none; None where sites are
            by position.
    """

    name: str
    replacement: Float[Tensor, "batch pos head_index d_head"]
    width: int
    rows: Rows
    index: Rows
    position: Rows | None
    role: Rows | None

    @classmethod
    def of(
        cls,
        name: str,
        replacement: Tensor,
        width: int,
        rows: pd.DataFrame,
        roles: Sequence[PositionSet],
    ) -> "_AblatedPoint":
        """Return the point of some rows of a frame of sites."""
        position: npt.NDArray[Any] | None = None
        role: npt.NDArray[Any] | None = None
        if roles:
            numbers = {one.label: number for number, one in enumerate(roles)}
            position = rows["position"].map(numbers).to_numpy(dtype=np.int64)
            is_role = torch.stack([one.where for one in roles]).cpu().numpy()
            role = np.where(is_role.any(axis=0), is_role.argmax(axis=0), -1)
        elif not (rows["position"] == "all").all():
            position = rows["position"].to_numpy(dtype=np.int64)
        at, index = rows.index.to_numpy(), rows["index"].to_numpy(dtype=np.int64)
        return cls(name, replacement, width, at, index, position, role)

    def hook(
        self, kept: _Flags, first: int, computed: dict[str, Tensor] | None
    ) -> tuple[str, Callable[[Tensor, Any], Tensor]]:
        """Return the hook that ablates the sites that each circuit does not keep.

        Args:
            kept: of all sites, for each circuit.
            first: the position at which the activation that the hook will see begins.
            computed: gets that activation, if given.
        """
        replacement = self.replacement[:, first:]

        def hook(value: Tensor, hook: Any) -> Tensor:
            if computed is not None:
                computed[self.name] = value.detach()
            by_circuit = value.unflatten(0, (-1, len(replacement)))
            where = self._where(kept, first).to(value.device)
            return torch.where(where, replacement.to(value), by_circuit).flatten(0, 1)

        return self.name, hook

    def _where(self, kept: _Flags, first: int) -> Tensor:
        """Return where heads are ablated: [circuit, batch or 1, pos, head_index, 1]."""
        n_pos, n_heads = self.replacement.shape[1:3]
        n_places = n_pos if self.role is None else self.role.max() + 2  # the last: no role
        gone = np.zeros((len(kept), n_places, n_heads // self.width), dtype=bool)
        at = slice(None) if self.position is None else self.position
        ablated = ~kept[:, self.rows]
        gone[:, at, self.index] = ablated[:, None] if self.position is None else ablated
        gone = gone[:, None] if self.role is None else gone[:, self.role]
        every_head = torch.from_numpy(gone[:, :, first:]).repeat_interleave(self.width, dim=3)
        return every_head.unsqueeze(-1)

    def by_site(self, of_heads: Float[np.ndarray, "row pos head_index"], first: int) -> _Floats:
        """Return a number for each site, from numbers for each head at each position.

        Args:
            of_heads: the sums over prompts; for sites by role, a row for each prompt.
            first: the position at which they begin; numbers before it are 0.
        """
        n_pos, n_heads = self.replacement.shape[1:3]
        full = np.zeros((len(of_heads), n_pos, n_heads // self.width))
        full[:, first:] = of_heads.reshape(*of_heads.shape[:2], -1, self.width).sum(-1)
        if self.position is None:
            return cast("_Floats", full.sum(axis=(0, 1))[self.index])
        if self.role is None:
            return cast("_Floats", full[0, self.position, self.index])
        of_roles = np.zeros((self.role.max() + 2, full.shape[-1]))
        np.add.at(of_roles, self.role, full)
        return cast("_Floats", of_roles[self.position, self.index])
