r"""Search for a small circuit that is nearly as faithful as the whole model.

Let f(C) be the faithfulness of a circuit C (`ablated_model.py`). The circuit is sufficient if its
error and |1 - f(C)| are at most 1 - wanted, where `wanted` is the requested faithfulness. The error
is |1 - f(C)| for one prompt, and a mean of |1 - f(C)| over several prompts. A prefix of a ranking
is its k highest-ranked sites. Faithfulness does not always rise with circuit size, because the
effects of sites can cancel. Bisection over k may therefore miss the shortest sufficient prefix. The
search has three steps. Each step starts from the best circuit so far:

    prefixes   Prefixes of two rankings, by |effect| and by signed effect, are tried for k on a grid
               with ratio √2. The grid is refined where f becomes sufficient or crosses 1 (for
               several prompts, if their f are close to each other there). Prefixes of more than
               512 sites are tried only if the next step finds no circuit.
    worth      Sites are ranked again by what they add to the current circuit, to first order
               (`AblatedModel.worth`), averaged with earlier rounds. Prefixes of about its size are
               tried. The step ends after two rounds without a circuit that is 5 % smaller. If no
               short prefix suffices, it starts from the prefix with the smallest error, and adds
               and removes some sites until the error is small.
    pruning    From a circuit of more than 64 sites, as many as possible of those that add least to
               it are removed, again and again. Then the circuit is evaluated without each chunk of
               sites, and as many chunks as possible are removed together. If more than a tenth of
               the circuit can be removed, the second step follows again. Otherwise, chunks are made
               smaller, down to single sites. Then the second step follows again, and also exchanges
               sites: some that add least for fewer that would add most. The search ends if this
               step finds no smaller circuit.

If another circuit of at most 128 sites is given as a start, the second step starts from it, and the
first step is only taken if the second finds no circuit. At the end, the search evaluates every
prefix of both rankings (by |effect| and by signed effect) that is shorter than the circuit. A
circuit of at most 128 sites is therefore minimal in two ways: it becomes insufficient if any single
site is removed, and no shorter prefix of the two rankings is sufficient. A smaller circuit may
still exist.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Float

from attn_only_lens.arguments import COUNT, RESAMPLES, one_of
from attn_only_lens.circuits.ablated_model import ABLATIONS, ORDERS, AblatedModel, Ablation, Order
from attn_only_lens.circuits.ablated_points import Floats, Rows, digest
from attn_only_lens.errors import InputError

_PER_DOUBLING = 2  # the number of prefix sizes to try from k to 2k
_BETWEEN = 16  # the number of sizes that a refined grid has between two neighbouring sizes
_AT_ONCE = 32  # the number of prefix sizes that are evaluated as one batch, small sizes first
_IDLE_ROUNDS, _SMALLER = 2, 0.95  # a round is idle if its circuit is not so much smaller
_ROUNDS = 8  # rounds that lower the error of a circuit that does not suffice
_STEPS = 0, 1, 2, 4, 8, 16  # how many sites such a round adds and removes, for small circuits
# A round tries these sizes, relative to a circuit's. One pass runs them all, and costs little more
# than a pass for one of them.
_MUCH_LESS = 0.25, 0.35, 0.45, 0.55, 0.65
_LITTLE_LESS = 0.7, 0.75, 0.8, 0.84, 0.87, 0.9, 0.92, 0.94, 0.96, 0.97, 0.98, 0.99, 1.0
_MORE_THAN = 1.03, 1.07, 1.12, 1.2, 1.3, 1.45, 1.65, 2.0
_RELATIVE = np.array([*_MUCH_LESS, *_LITTLE_LESS, *_MORE_THAN])
_ALL_SIZES, _LEAST, _MORE = 23, 16, 8  # near smaller circuits, every size is tried, up to these
_SHORT = 512  # longer prefixes are tried only if no other circuit suffices
_AROUND = 4  # sizes within this factor of `near`, another circuit's size, are tried first
_SMALL, _LARGE = 64, 128  # from larger circuits, sites that add least, or chunks, are removed first
_CHUNKS = 32  # the number of chunks of a large circuit
_MANY = 0.1  # the share of a circuit whose removal calls for another ranking
_REMOVALS = 12  # how many numbers of sites or chunks are removed together
Step: TypeAlias = Literal[
    "magnitude", "signed", "start", "worth", "pruning", "prefix", "tilted", "search"
]
Objective: TypeAlias = Literal["smallest", "held_out"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
HELD_OUT: Objective = "held_out"
_Questions: TypeAlias = Generator[list[Rows], Float[np.ndarray, "2 circuit"], int | None]
"""A generator that yields circuits, receives their faithfulness and errors, and returns a size."""


@dataclass(frozen=True)
class Search:
    """How `discover` searches for a circuit, and what it compares the circuit with.

    Attributes:
        ablation: how sites outside the circuit are ablated: "zero", "mean", "positional_mean" or
            "resample".
        objective: "smallest" for a small circuit whose error on these prompts is at most
            1 - faithfulness; "held_out" for a small circuit that has such an error also on prompts
            that were not used to find it (`circuits/held_out.py`). It can contain a large part of
            all sites, and needs four pairs or more, and `resamples`.
        order: None to search and prune. "magnitude" or "signed" returns the shortest sufficient
            prefix of the sites in this order of effects; "signed" puts sites that help the clean
            run first.
        n_random: how many random circuits of the same size to evaluate.
        resamples: how many times to search again on a random half of the prompts, for instance 20;
            the circuit then has a `stability`.
        seed: the seed of random circuits and halves.
        start: the sites of a circuit to start from, such as "L3H3@5" or, at all positions,
            "L3H3@all": for instance of the same model before training. The search is then shorter,
            and prefers these sites to others of the same worth. Halves start from it, too. A start
            of more than 128 sites is not used.

    Raises:
        InputError: an option has another value. The error lists every reason.

    Example:
        >>> from attn_only_lens.circuits import Search
        >>> search = Search(ablation="mean", objective="held_out", resamples=4)
        >>> search.order, search.n_random, search.seed
        (None, 3, 0)
    """

    ablation: Ablation = "resample"
    objective: Objective = "smallest"
    order: Order | None = None
    n_random: int = 3
    resamples: int = 0
    seed: int = 0
    start: Sequence[str] = ()

    def __post_init__(self) -> None:
        reasons = one_of(*ABLATIONS).reasons(ablation=self.ablation)
        reasons += one_of(*OBJECTIVES).reasons(objective=self.objective)
        reasons += one_of(*ORDERS).or_none.reasons(order=self.order)
        reasons += COUNT.reasons(n_random=self.n_random, seed=self.seed)
        reasons += RESAMPLES.reasons(resamples=self.resamples)
        start = self.start
        listed = isinstance(start, Sequence) and all(isinstance(site, str) for site in start)
        if isinstance(start, str) or not listed:  # a text is a sequence of texts
            reasons.append(f"got start={start!r}; expected a list of sites, such as ['L3H3@5']")
        elif start and self.order is not None:
            reasons.append(f"got a start and order={self.order!r}; expected at most one of them")
        if self.objective == HELD_OUT and self.order is not None:
            reasons.append(
                f"got objective={HELD_OUT!r} and order={self.order!r}; expected no order"
            )
        if self.objective == HELD_OUT and not self.resamples:
            reasons.append(f"got objective={HELD_OUT!r} without resamples; expected resamples=4")
        InputError.raise_if(reasons, "no circuit can be searched")


class SearchRun:
    """A search for circuits in one ablated model; `tried` lists the evaluated circuits.

    `near` is the size of a circuit that was found for other prompts. With `near`, the search tries
    similar sizes first, and skips the final test of all shorter prefixes.
    """

    def __init__(self, ablated: AblatedModel, wanted: float, near: int | None = None) -> None:
        self._ablated, self._wanted, self._near = ablated, wanted, near
        self.tried: list[dict[str, Any]] = []
        self._measured: dict[str, tuple[float, float]] = {}
        self._last_worth: tuple[str, Floats] | None = None  # with the circuit's digest
        self._closest = np.empty(0, dtype=np.int64)  # the last prefixes' circuit of least error

    def smallest(
        self,
        orders: Mapping[Step, Rows],
        start: Rows,
        *,
        prune: bool,
        rank_again: bool,
        short: bool = False,
    ) -> Rows:
        """Return the smallest circuit found; if prune=False, the shortest sufficient prefix.

        `start` is another circuit to start from, unless it is empty. With `short`, all sites are
        returned if no short prefix suffices.
        """
        if not prune:
            return min(self.prefixes(orders), key=len)
        circuit = every = np.arange(self._ablated.n_sites)
        if 0 < len(start) <= _LARGE:
            self._closest = start
            circuit = self._smallest_sufficient("start", every, [start])
            circuit = self.rank_again(circuit) if rank_again else circuit
        if len(circuit) == len(every):
            circuit = min(self.prefixes(orders, _SHORT), key=len)
            if short and len(circuit) == len(every):
                return every
            circuit = self.rank_again(circuit) if rank_again else circuit
        if len(circuit) == self._ablated.n_sites > _SHORT:  # no short prefix suffices
            circuit = min(self.prefixes(orders), key=len)
        circuit = self.shrink(circuit) if rank_again else self.prune(circuit)
        if self._near is not None:
            return circuit
        shorter = self.shorter_prefix(orders.values(), circuit)
        return self.prune(shorter) if len(shorter) < len(circuit) else circuit

    def prefixes(self, orders: Mapping[Step, Rows], longest: int | None = None) -> list[Rows]:
        """Return each ranking's shortest sufficient prefix, or all sites if no prefix suffices."""
        searches = {step: self._search(order, longest) for step, order in orders.items()}
        asked = {step: next(search) for step, search in searches.items()}
        prefixes: dict[Step, Rows] = {}
        least = np.inf
        while asked:
            circuits = [circuit for some in asked.values() for circuit in some]
            steps = [step for step, some in asked.items() for _ in some]
            ends = np.cumsum([len(some) for some in asked.values()])[:-1]
            values, errors = self.measure(steps, circuits)
            if errors.min() < least:
                least, self._closest = errors.min(), circuits[int(errors.argmin())]
            answers = np.split(np.stack([values, errors]), ends, axis=1)
            for step, answer in zip(list(asked), answers, strict=True):
                try:
                    asked[step] = searches[step].send(answer)
                except StopIteration as done:
                    prefixes[step] = orders[step][: done.value]
                    del asked[step]
        return [prefixes[step] for step in orders]

    def _search(self, order: Rows, longest: int | None) -> _Questions:
        """Yield prefixes to evaluate, and return the size of the shortest sufficient prefix."""
        longest = len(order) if longest is None else min(longest, len(order))
        # The prefix sizes to try do not depend on the number of sites. So the search finds the same
        # prefix after growth adds sites without an effect, which are ranked last.
        grid = 2.0 ** (np.arange(_PER_DOUBLING * np.log2(longest)) / _PER_DOUBLING)
        sizes = np.unique([*grid.round().astype(int), longest])
        if (near := self._near) is not None:
            few = sizes[(sizes * _AROUND >= near) & (sizes <= _AROUND * near)]
            size = yield from self._first(order, 0, (0.0, 0.0), few)
            if size is not None:
                return size
        return (yield from self._first(order, 0, (0.0, 0.0), sizes))

    def _first(
        self, order: Rows, short: int, at_short: tuple[float, float], sizes: Rows
    ) -> _Questions:
        """Search a grid of sizes, then refine it; return the shortest sufficient size or None.

        `short` is the size of an insufficient prefix below the grid, and `at_short` is its
        faithfulness, and how much larger its error is than |1 - f|.
        """
        for start in range(0, len(sizes), _AT_ONCE):
            some = sizes[start : start + _AT_ONCE]
            measured, errors = yield [order[:size] for size in some]
            for size, f, error in zip(
                some.tolist(), measured.tolist(), errors.tolist(), strict=True
            ):
                suffices, excess = self._suffices(error, size), error - abs(1 - f)
                # A prefix between two sizes may suffice if f crosses 1 between them, unless some
                # prompts overshoot while others fall short.
                crosses = (at_short[0] - 1) * (f - 1) < 0
                crosses &= max(at_short[1], excess) <= 1 - self._wanted
                if suffices or crosses:
                    if size - short > 1:
                        between = np.linspace(short + 1, size, _BETWEEN).round().astype(np.int64)
                        sizes_between = np.unique(between)
                        earlier = yield from self._first(order, short, at_short, sizes_between)
                        if earlier is not None:
                            return earlier
                    elif suffices:
                        return size
                short, at_short = size, (f, excess)
        return None

    def rank_again(self, circuit: Rows, exchange: bool = False) -> Rows:
        """Repeatedly rank sites by what they add to the circuit; return the smallest circuit.

        With `exchange`, also try the circuit without some of its sites, and with fewer others.
        """
        best, every, worth, idle = circuit, np.arange(self._ablated.n_sites), None, 0
        while idle < _IDLE_ROUNDS:
            start = circuit if len(circuit) < len(every) else self._closest
            new = self._worth(start)
            worth = new if worth is None else (worth + new) / 2
            order = np.argsort(-worth, kind="stable")
            prefixes = [order[:size] for size in _sizes_around(len(start), len(every))]
            changed = _changed(start, new, fewer=True) if exchange else []
            circuit = self._smallest_sufficient("worth", every, [*prefixes, *changed])
            if len(circuit) == len(every):
                _, errors = self.measure(["worth"] * len(prefixes), prefixes)
                self._closest = prefixes[int(errors.argmin())]
                if len(best) == len(every):
                    circuit = self.lower_error(self._closest)
            idle = 0 if len(circuit) < _SMALLER * len(best) else idle + 1
            best = min(best, circuit, key=len)
        return best

    def lower_error(self, circuit: Rows) -> Rows:
        """Add and remove a few sites at a time; return the first sufficient circuit, or all sites.

        For several prompts, a short prefix may nearly suffice, while longer prefixes overshoot on
        some prompts before they suffice for others.
        """
        every = np.arange(self._ablated.n_sites)
        for _ in range(_ROUNDS):
            changed = _changed(circuit, self._worth(circuit))
            sufficient = self._smallest_sufficient("worth", every, changed)
            if len(sufficient) < len(every):
                return sufficient
            _, errors = self.measure(["worth"] * len(changed), changed)
            circuit = changed[int(errors.argmin())]
        return every

    def shrink(self, circuit: Rows) -> Rows:
        """Remove and exchange sites, and rank again, until the circuit becomes no smaller."""
        while True:
            circuit = self.without_worthless(circuit)
            n_chunks = len(circuit) if len(circuit) <= _LARGE else _CHUNKS
            fewer, _ = self._without_chunks(circuit, np.array_split(circuit, n_chunks))
            if len(fewer) < (1 - _MANY) * len(circuit):
                circuit = self.rank_again(fewer)
                continue
            pruned = self.prune(fewer)
            circuit = self.rank_again(pruned, exchange=True)
            if len(circuit) == len(pruned):
                return pruned

    def without_worthless(self, circuit: Rows) -> Rows:
        """Remove the sites that add least, many at a time, while the circuit is large.

        These are sites that make the circuit worse, or whose removal changes it least.
        """
        while len(circuit) > _SMALL:
            worth = self._worth(circuit)[circuit]
            orders = [circuit[np.argsort(-x, kind="stable")] for x in (worth, abs(worth))]
            numbers = np.unique(np.geomspace(1, len(circuit) - 1, _REMOVALS).round().astype(int))
            fewer = [best_first[:-number] for best_first in orders for number in numbers]
            smaller = self._smallest_sufficient("pruning", circuit, fewer)
            if len(smaller) == len(circuit):
                break
            circuit = smaller
        return circuit

    def prune(self, circuit: Rows) -> Rows:
        """Remove chunks of sites, down to single sites, while the circuit remains sufficient."""
        n_chunks = _CHUNKS
        while True:
            finest, n_before = min(len(circuit), _LARGE), len(circuit)
            n_chunks = finest if len(circuit) <= _LARGE else n_chunks
            chunks = np.array_split(circuit, n_chunks)
            while chunks:  # then those that could have gone, too
                circuit, chunks = self._without_chunks(circuit, chunks)
            if n_chunks < finest:
                n_chunks = finest
            elif len(circuit) == n_before:
                return circuit

    def _without_chunks(self, circuit: Rows, chunks: Sequence[Rows]) -> tuple[Rows, list[Rows]]:
        """Return the smallest sufficient circuit found by removing several chunks together.

        Also return the chunks that could have been removed alone, but were not removed; none if no
        chunk was removed.
        """
        without = [np.setdiff1d(circuit, chunk, assume_unique=True) for chunk in chunks]
        values, errors = self.measure(["pruning"] * (len(chunks) + 1), [*without, circuit])
        can_go = [i for i, rest in enumerate(without) if self._suffices(errors[i], len(rest))]
        # Remove chunks in two orders: first those whose removal changes f least, or first those
        # whose removal leaves the largest f.
        orders = [
            sorted(can_go, key=lambda i: abs(values[i] - values[-1])),
            sorted(can_go, key=lambda i: -values[i]),
        ]
        rests = [
            np.setdiff1d(circuit, np.concatenate([chunks[i] for i in order[:n]]))
            for order in orders
            for n in np.unique(np.geomspace(1, max(1, len(order)), _REMOVALS).round().astype(int))
            if len(order)
        ]
        smallest = self._smallest_sufficient("pruning", circuit, rests)
        if len(smallest) == len(circuit):
            return circuit, []
        return smallest, [chunks[i] for i in can_go if np.isin(chunks[i], smallest).all()]

    def shorter_prefix(self, orders: Iterable[Rows], circuit: Rows) -> Rows:
        """Return the shortest sufficient prefix, or the circuit if no shorter prefix suffices."""
        sizes = range(1, len(circuit) if len(circuit) <= _LARGE else 1)
        prefixes = [order[:size] for order in orders for size in sizes]
        return self._smallest_sufficient("prefix", circuit, prefixes)

    def _smallest_sufficient(self, step: Step, circuit: Rows, others: list[Rows]) -> Rows:
        _, errors = self.measure([step] * len(others), others)
        enough = [
            rows
            for rows, error in zip(others, errors, strict=True)
            if self._suffices(error, len(rows))
        ]
        return min([circuit, *enough], key=len)

    def _worth(self, circuit: Rows) -> Floats:
        """Return how much each site lowers the circuit's error; remember it for this circuit."""
        key = digest([circuit])
        if self._last_worth is None or self._last_worth[0] != key:
            self._last_worth = key, self._ablated.worth(circuit)
        return self._last_worth[1]

    def measure(
        self, steps: Sequence[Step], circuits: Sequence[Rows]
    ) -> tuple[Float[np.ndarray, "circuit"], Float[np.ndarray, "circuit"]]:
        """Return each circuit's faithfulness, and the larger of |1 - f| and its error.

        The error is the larger one, unless the metric rises on some prompts and falls on others
        when all sites are ablated.
        """
        keys = [digest([circuit]) for circuit in circuits]
        new = dict[str, tuple[Step, Rows]]()
        for key, step, circuit in zip(keys, steps, circuits, strict=True):
            if key not in self._measured:
                new.setdefault(key, (step, circuit))
        if new:
            measures = self._ablated.faithfulness_and_error([rows for _, rows in new.values()])
            for (key, (step, rows)), *measure in zip(new.items(), *measures, strict=True):
                f, error = map(float, measure)
                self._measured[key] = f, max(error, abs(1 - f))
                row = {"step": step, "n_sites": len(rows)}
                self.tried.append(row | {"faithfulness": f, "error": error})
        measured = np.array([self._measured[key] for key in keys]).reshape(-1, 2)
        return measured[:, 0], measured[:, 1]

    def _suffices(self, error: float, size: int) -> bool:
        # The circuit of all sites has no error up to rounding, so it always suffices.
        return size == self._ablated.n_sites or (size > 0 and error <= 1 - self._wanted)


def _changed(circuit: Rows, worth: Floats, fewer: bool = False) -> list[Rows]:
    """Return circuits without some sites that add least, and with some that would add most.

    With `fewer`, only smaller circuits are returned.
    """
    inside = circuit[np.argsort(worth[circuit], kind="stable")]
    order = np.argsort(-worth, kind="stable")
    outside = order[~np.isin(order, circuit)]
    numbers = [max(1, len(circuit) // _SMALL) * step for step in _STEPS]
    return [
        np.concatenate([inside[n_removed:], outside[:n_added]])
        for n_added in numbers
        for n_removed in numbers
        if n_added + n_removed > 0 and n_removed < len(circuit)
        if n_added < n_removed or not fewer
    ]


def _sizes_around(size: int, most: int) -> list[int]:
    """Return sizes to try: many of a little less than `size`, fewer of much less or more."""
    sizes = np.arange(1, max(_LEAST, size + _MORE) + 1)
    if size > _ALL_SIZES:
        sizes = np.unique((size * _RELATIVE).round().astype(int))
    return [int(x) for x in sizes[sizes <= most]]
