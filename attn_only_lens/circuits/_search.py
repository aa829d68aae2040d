r"""Small circuits: the fewest sites found that nearly do what the model does.

With f the faithfulness (`_faithfulness.py`), a circuit C suffices if |1 - f(C)| ≤ 1 - wanted. A
circuit with f > 1 does more than the model and is not more faithful. Along a ranking f need not
grow with size: sites that work against each other leave it apart. So the search does not halve a
gap along one curve; it has three steps, each of which starts from the best of the one before.

    prefixes   By |effect| and by signed effect, the k highest ranked sites, for k on a grid of
               ratio √√2. Wherever f comes within the bound, or leaps over it, between two sizes of
               the grid, a finer grid goes between the two: the shortest prefix found.
    worth      The ranking was of the whole model, and what a site adds in a circuit is another
               thing. Sites are ranked anew by what they add to the circuit at hand, to first order,
               those outside it included (`AblatedModel.worth`), and the shortest sufficient prefix
               of that is the next circuit. Ranks are averaged with those of the rounds before,
               each with half the weight of the next, as rounds may take turns. It ends
               after two rounds that find no smaller circuit.
    pruning    Every chunk of sites is left out in turn, exactly; of those that can be, as many as
               can go together are gone. Chunks halve when none can be, down to single sites.

and at the end every prefix of either order that is shorter than the circuit is measured. So of a
circuit of up to 1,000 sites two things are exact: none of its sites can be left out alone, and no
shorter prefix of either order suffices. That no smaller circuit exists is not proved.

Circuits are small since they are fitted to their prompts, and can be to these alone: `evaluate`
measures one on others. What holds for a task is found with several prompts of it at once.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.arguments import as_plain, is_number
from attn_only_lens.circuits._faithfulness import reasons_against_draws
from attn_only_lens.circuits.ablation import ORDERS, AblatedModel, Ablation, Order, Rows
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.inputs import option_reasons
from attn_only_lens.engine.metrics import AnyMetric
from attn_only_lens.engine.positions import Positions, Roles
from attn_only_lens.engine.prompts import Prompts, prompt_pair
from attn_only_lens.engine.sites import Sites, all_heads
from attn_only_lens.errors import InputError
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._attribution import METHODS, attribution
from attn_only_lens.patching.repairs import Budget
from attn_only_lens.patching.results import MEASURED
from attn_only_lens.patching.site_groups import site_groups

_PER_DOUBLING = 4  # sizes of the grid
_BETWEEN = 16  # sizes that refine it
_IDLE_ROUNDS = 2
_EVERY = 1000  # circuits of up to so many sites are pruned site by site
_SITE = ["layer", "kind", "index", "name", "position"]
_KEY = ["name", "position"]
_PROBLEM = "this circuit cannot be measured on these prompts"
_Step: TypeAlias = Literal["magnitude", "signed", "worth", "pruning", "prefix"]
_Asks: TypeAlias = Generator[list[Rows], Float[np.ndarray, "circuit"], int | None]
"""Yields circuits, is sent their faithfulness, and returns a size."""


@dataclass(frozen=True, eq=False)
class Circuit:
    """Sites that nearly do what the model does. Made by `discover`.

    Attributes:
        frame: a row for each site, the highest ranked first: `layer`, `kind`, `index`, `name`,
            `position`, and its `effect` by the ranking.
        n_sites: how many were ranked.
        n_pos: tokens of a prompt.
        faithfulness: of the circuit.
        completeness: the faithfulness of all other sites: near 0 if nothing was missed.
        random: faithfulness of random circuits of the same size.
        wanted: the faithfulness that was asked for.
        tried: a row for each circuit that was measured, in that order: the `step` of the search
            ("magnitude", "signed", "worth", "pruning", "prefix"), `n_sites`, `faithfulness`.
        ablation: of all other sites.
        method: of the ranking.
        metric: its name.
        candidates: the heads that were ranked.
        positions: at which they were.
    """

    frame: pd.DataFrame
    n_sites: int
    n_pos: int
    faithfulness: float
    completeness: float
    random: tuple[float, ...]
    wanted: float
    tried: pd.DataFrame
    ablation: Ablation
    method: str
    metric: str
    candidates: Sites
    positions: Positions

    def __len__(self) -> int:
        return len(self.frame)


@warned_once()
def discover(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    *,
    faithfulness: float = 0.9,
    method: str = "exact_gate",
    budget: Budget = "auto",
    ablation: Ablation = "resample",
    order: Order | None = None,
    sites: Sites | None = None,
    positions: Positions = "each",
    n_random: int = 3,
    seed: int = 0,
    mask: Tensor | None = None,
    progress: bool | str = False,
) -> Circuit:
    """Find a small circuit whose faithfulness is within 1 - `faithfulness` of 1.

    Args:
        model: converted, or with exposed neuron-heads; without hooks of its own.
        clean: the prompts whose circuit it is; see `prompt_pair`. Several are one circuit, by the
            metric's mean.
        corrupted: prompts that differ from them in what the circuit is about, token for token.
        metric: `logit_diff(...)` and the like, or a differentiable function of logits.
        faithfulness: the faithfulness wanted, more than 0, up to 1.
        method: of the ranking: one of `attribution`'s, or "patching" for `activation_patch`, which
            takes no gradients, so that the search goes without ranking anew.
        budget: of exact patches in the ranking, as in `attribution`.
        ablation: of everything outside: "zero", "mean", "resample".
        order: None to search and prune; "magnitude" or "signed" for the shortest prefix found of
            that order of effects alone, "signed" with what helps the clean run first.
        sites: candidates, all heads by default. Others are never ablated. Sites before the first
            token that differs are among them: resampled, they are what they were, and a pruned
            circuit has none.
        positions: "each" separately, "all" together, or by role: `task.roles`. By role, a site is
            a head at a role's token, prompts may differ in length, and tokens without a role are
            never ablated.
        n_random: random circuits of the same size to measure.
        seed: of those.
        mask: 1 for real tokens, 0 for padding, if prompts are tokens.
        progress: whether to show a bar over the circuits that are run; a text is its label.

    Returns:
        The circuit, with all that were tried.

    Raises:
        InputError: invalid settings; ablating everything changes nothing.
        InputError: with every reason: prompts, metric, sites or positions that do not fit.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> circuit = circuits.discover(
        ...     convert(pretrained.modular_addition()), torch.tensor([3, 4, 113]),
        ...     torch.tensor([3, 5, 113]), p.logit_diff(correct=7, wrong=8))
        >>> abs(1 - circuit.faithfulness) <= 0.1, len(circuit) < 0.1 * circuit.n_sites
        (True, True)
    """
    return search_circuit(
        *(model, clean, corrupted, metric),
        faithfulness=faithfulness,
        method=method,
        budget=budget,
        ablation=ablation,
        order=order,
        sites=sites,
        positions=positions,
        n_random=n_random,
        seed=seed,
        mask=mask,
        progress=progress,
    )[0]


def search_circuit(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    *,
    faithfulness: float,
    budget: Budget,
    seed: int,
    method: str = "exact_gate",
    ablation: Ablation = "resample",
    order: Order | None = None,
    sites: Sites | None = None,
    positions: Positions = "each",
    n_random: int = 3,
    mask: Tensor | None = None,
    progress: bool | str = False,
) -> tuple[Circuit, AblatedModel]:
    """Return the circuit that `discover` finds, and the ablated model that it was found in."""
    reasons = option_reasons("method", method, (*METHODS, MEASURED))
    if order is not None:
        reasons += option_reasons("order", order, ORDERS)
    if not (is_number(as_plain(faithfulness), 0, 1) and faithfulness > 0):
        reasons.append(f"got faithfulness={faithfulness!r}; expected more than 0, up to 1")
    reasons += reasons_against_draws(n_random, seed)
    InputError.raise_if(reasons, "no circuit can be looked for")
    sites = all_heads() if sites is None else sites
    settings: dict[str, Any] = {"sites": sites, "positions": positions, "mask": mask}
    settings |= {"direction": "noise", "progress": False}
    label = f"{progress}: " if isinstance(progress, str) else ""
    with tqdm(unit="circuit", desc=f"{label}ranking", disable=not progress) as bar:
        if method == MEASURED:
            ranking = activation_patch(model, clean, corrupted, metric, **settings)
        else:
            settings |= {"method": method, "budget": budget}
            ranking = attribution(model, clean, corrupted, metric, **settings)
        bar.set_description_str(f"{label}search")
        given = model, clean, corrupted, metric, ranking.frame
        how: dict[str, Any] = {"ablation": ablation, "mask": mask, "positions": positions}
        ablated = AblatedModel(*given, **how, on_done=bar.update)
        search = _Search(ablated, faithfulness)
        orders: dict[_Step, Rows] = {
            each: ablated.ranked(ranking, each) for each in ((order,) if order else ORDERS)
        }
        circuit = min(search.prefixes(orders), key=len)
        if not order:
            if method != MEASURED:
                circuit = search.rank_anew(circuit)
            circuit = search.prune(circuit)
            shorter = search.shorter_prefix(orders.values(), circuit)
            circuit = search.prune(shorter) if len(shorter) < len(circuit) else circuit
        found, complete, random = ablated.curves([circuit], n_random, seed)
        bar.total = bar.n  # not known before
        bar.refresh()
    frame = ranking.frame[_SITE].assign(effect=ranking.effect).iloc[circuit]
    by_effect = frame["effect"].abs().sort_values(ascending=False, kind="stable").index
    circuit_found = Circuit(
        frame.loc[by_effect].reset_index(drop=True),
        n_sites=ablated.n_sites,
        n_pos=ablated.n_pos,
        faithfulness=float(found[0]),
        completeness=float(complete[0]),
        random=tuple(random[:, 0].tolist()),
        wanted=faithfulness,
        tried=pd.DataFrame(search.tried, columns=["step", "n_sites", "faithfulness"]),
        ablation=ablation,
        method=method,
        metric=ranking.metric,
        candidates=sites,
        positions=positions,
    )
    return circuit_found, ablated


class _Search:
    """Circuits of one ablated model, and the faithfulness of those that were measured.

    Args:
        ablated: the model.
        wanted: the faithfulness that suffices.

    Attributes:
        tried: step, size and faithfulness of each.
    """

    def __init__(self, ablated: AblatedModel, wanted: float) -> None:
        self._ablated, self._wanted = ablated, wanted
        self.tried: list[tuple[_Step, int, float]] = []

    def prefixes(self, orders: Mapping[_Step, Rows], longest: int | None = None) -> list[Rows]:
        """Return of each order the shortest prefix found that suffices; all sites if none is.

        Args:
            orders: by the step of the search: sites, the highest ranked first.
            longest: of the prefixes to measure; None for all.
        """
        searches = {step: self._search(order, longest) for step, order in orders.items()}
        asked = {step: next(search) for step, search in searches.items()}
        found: dict[_Step, Rows] = {}
        while asked:
            steps = [step for step, circuits in asked.items() for _ in circuits]
            values = self._measure(
                steps, [each for circuits in asked.values() for each in circuits]
            )
            measured, asked = asked, {}
            for step, circuits in measured.items():
                own, values = values[: len(circuits)], values[len(circuits) :]
                try:
                    asked[step] = searches[step].send(own)
                except StopIteration as done:
                    found[step] = orders[step][: done.value]
        return [found[step] for step in orders]

    def _search(self, order: Rows, longest: int | None) -> _Asks:
        """Ask for the faithfulness of prefixes, and return the shortest size that suffices."""
        longest = len(order) if longest is None else min(longest, len(order))
        # The same sizes whatever the number of sites: by |effect|, sites that do nothing come last,
        # and a model that only grew by such has the same prefix.
        grid = 2.0 ** (np.arange(_PER_DOUBLING * np.log2(longest)) / _PER_DOUBLING)
        sizes = np.unique([*grid.round().astype(int), longest])
        return (yield from self._first(order, 0, 0.0, sizes))

    def rank_anew(self, circuit: Rows) -> Rows:
        """Return the smallest circuit found by what sites add to the circuit at hand."""
        best, idle, worth = circuit, 0, self._ablated.worth(circuit)
        while idle < _IDLE_ROUNDS:
            order = np.argsort(-worth, kind="stable")
            (circuit,) = self.prefixes({"worth": order}, 2 * len(circuit))
            if len(circuit) == len(order):
                break
            best, idle = (circuit, 0) if len(circuit) < len(best) else (best, idle + 1)
            worth = (worth + self._ablated.worth(circuit)) / 2
        return best

    def prune(self, circuit: Rows) -> Rows:
        """Return a part of a circuit that suffices while no less of it does, chunk by chunk."""
        n_chunks = 16
        while True:
            finest = min(len(circuit), _EVERY)
            n_chunks = min(n_chunks, finest)
            fewer = self._without_chunks(circuit, np.array_split(circuit, n_chunks))
            if len(fewer) < len(circuit):
                circuit = fewer
            elif n_chunks == finest:
                return circuit
            else:
                n_chunks *= 2

    def shorter_prefix(self, orders: Iterable[Rows], circuit: Rows) -> Rows:
        """Return the shortest sufficient prefix of the orders, or the circuit if none is shorter.

        All prefixes are measured that are shorter than the circuit; none, if it is very large.
        """
        sizes = range(1, len(circuit) if len(circuit) <= _EVERY else 1)
        every = [order[:size] for order in orders for size in sizes]
        found = self._measure(["prefix"] * len(every), every)
        enough = [
            each for each, f in zip(every, found, strict=True) if self._suffices(f, len(each))
        ]
        return min([circuit, *enough], key=len)

    def _without_chunks(self, circuit: Rows, chunks: Sequence[Rows]) -> Rows:
        """Return a circuit without as many of the chunks as can be left out together."""
        without = [np.setdiff1d(circuit, chunk, assume_unique=True) for chunk in chunks]
        *found, own = self._measure(["pruning"] * (len(chunks) + 1), [*without, circuit])
        can_go = [i for i, rest in enumerate(without) if self._suffices(found[i], len(rest))]
        # What changes least goes first; or what works against the circuit, which makes room.
        rests = [
            np.setdiff1d(circuit, np.concatenate([chunks[i] for i in order[:n]]))
            for key in (lambda i: abs(found[i] - own), lambda i: -found[i])
            for order in [sorted(can_go, key=key)]
            for n in np.unique(np.geomspace(1, max(1, len(order)), 17).round().astype(int))
            if len(order)
        ]
        values = self._measure(["pruning"] * len(rests), rests)
        enough = [
            rest for rest, f in zip(rests, values, strict=True) if self._suffices(f, len(rest))
        ]
        return min([circuit, *enough], key=len)

    def _first(self, order: Rows, short: int, f: float, sizes: Rows) -> _Asks:
        """Return the first sufficient size of a prefix that is found, if there is one.

        Args:
            order: sites, the highest ranked first.
            short: the size before those, which does not suffice.
            f: its faithfulness.
            sizes: to measure, increasing.

        Yields:
            Circuits, whose faithfulness is then sent.
        """
        found = yield [order[:size] for size in sizes]
        for size, g in zip(sizes.tolist(), found.tolist(), strict=True):
            suffices = self._suffices(g, size)
            if suffices or (f - 1) * (g - 1) < 0:  # or leaps over the bound
                if size - short > 1:
                    between = np.linspace(short + 1, size, _BETWEEN).round().astype(np.int64)
                    earlier = yield from self._first(order, short, f, np.unique(between))
                    if earlier is not None:
                        return earlier
                elif suffices:
                    return size
            short, f = size, g
        return None

    def _measure(
        self, steps: Sequence[_Step], circuits: Sequence[Rows]
    ) -> Float[np.ndarray, "circuit"]:
        found = self._ablated.faithfulness(circuits)
        self.tried += zip(steps, map(len, circuits), found.tolist(), strict=True)
        return found

    def _suffices(self, f: float, size: int) -> bool:
        # All sites are the model itself, to rounding.
        return size == self._ablated.n_sites or (size > 0 and abs(1 - f) <= 1 - self._wanted)


@dataclass(frozen=True)
class Evaluation:
    """What a circuit does on prompts that need not be its own. Made by `evaluate`.

    Attributes:
        faithfulness: of the circuit.
        completeness: the faithfulness of all other sites.
        whole: the metric of the whole model.
        nothing: the metric with every site ablated.
    """

    faithfulness: float
    completeness: float
    whole: float
    nothing: float


@warned_once()
def evaluate(
    model: Any,
    circuit: Circuit,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    *,
    positions: Roles | None = None,
    mask: Tensor | None = None,
) -> Evaluation:
    """Measure a circuit on other prompts, with everything outside it ablated as it was.

    Args:
        model: that the circuit is of.
        circuit: found by `discover`.
        clean: prompts of the same length, in which positions mean the same; for a circuit by role,
            prompts of any lengths.
        corrupted: their pairs, token for token.
        metric: of them, such as another answer's.
        positions: for a circuit by role, where each role is in these prompts: `task.roles`.
        mask: 1 for real tokens, 0 for padding, if prompts are tokens.

    Returns:
        Faithfulness and completeness there: shares of what all sites do on these prompts.

    Raises:
        InputError: prompts of another length, unless positions are "all" or by role; roles that
            are not those of the circuit; a circuit with sites that the model does not have;
            ablating everything changes nothing.
        InputError: prompts or a metric that do not fit.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> circuit = circuits.discover(
        ...     model, torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]), p.logit_diff(7, 8))
        >>> other = circuits.evaluate(
        ...     model, circuit, torch.tensor([9, 4, 113]), torch.tensor([9, 5, 113]),
        ...     p.logit_diff(13, 14))
        >>> abs(1 - circuit.faithfulness) < abs(1 - other.faithfulness)  # it is of one sum alone
        True
    """
    pair = prompt_pair(model, clean, corrupted, mask)
    roles = circuit.positions if isinstance(circuit.positions, Mapping) else {}
    if {*roles} != {*(positions or {})}:
        expected = sorted(roles) or "none, as its sites have numbers as positions"
        reason = (
            f"got the roles {sorted(positions or {})}; expected those of the circuit, {expected}"
        )
        raise InputError([reason], _PROBLEM)
    everywhere = bool(roles) or (circuit.frame["position"] == "all").all()
    lengths = sorted(set(pair.real.sum(dim=1).tolist()))
    if lengths != [circuit.n_pos] and not everywhere:
        raise InputError(
            [
                f"got prompts of {' and '.join(map(str, lengths))} tokens; expected "
                f"{circuit.n_pos}, as those that the circuit was found on: its sites are at "
                "positions"
            ],
            _PROBLEM,
        )
    here = positions or circuit.positions
    groups = site_groups(model, pair, circuit.candidates, here, "z")
    sites = pd.concat([each.rows for each in groups], ignore_index=True)
    kept = sites[_KEY].merge(circuit.frame[_KEY].assign(kept=True), how="left")["kept"].notna()
    rows = np.flatnonzero(kept)
    if len(rows) != len(circuit):
        missing = len(circuit) - len(rows)
        raise InputError(
            [f"{missing} sites of the circuit are none of these prompts and this model"], _PROBLEM
        )
    given = model, clean, corrupted, metric, sites
    ablated = AblatedModel(*given, ablation=circuit.ablation, mask=mask, positions=here)
    found, complete, _ = ablated.curves([rows])
    return Evaluation(
        faithfulness=float(found[0]),
        completeness=float(complete[0]),
        whole=ablated.whole,
        nothing=ablated.nothing,
    )
