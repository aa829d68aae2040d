"""Intermediate results of a pass over a corpus, which can be stored in a folder."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.metrics import Metric
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.engine.tokens import token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS, HeadKind
from attn_only_lens.neurons.accumulate import (
    ENDS,
    IN_QUADRANT,
    QUADRANTS,
    QUANTITIES,
    State,
    add_counts,
    add_examples,
    add_histogram,
    no_counts,
    no_examples,
    rows_with_new,
)
from attn_only_lens.neurons.activations import OfLayer, run_by_gradient, run_by_layer, shows_q
from attn_only_lens.neurons.corpus import Batch, Row, chained_digest
from attn_only_lens.neurons.looks import SIDES, add_looks, no_looks, shares
from attn_only_lens.neurons.statistics import CorpusStatistics, HeadStatistics, NeuronStatistics
from attn_only_lens.storage.chunks import ChunkStore

_PROBLEM = "this corpus cannot be used"
_SECONDS = 30.0
_KEY = "so-far"
_IN_CACHE = 2**18  # this many activations fit into the CPU cache
ENDS_OF_OPTION = {"both": ENDS, "largest": ENDS[:1], "smallest": ENDS[1:]}
_KINDS: dict[str, tuple[HeadKind, ...]] = {"attention": ("attention",), "neuron": NEURON_KINDS}
"""For each group of heads that share tensors, the kinds of heads in it."""
_NUMBERS = {"neuron": ("score",), "attention": ("score", "bos")}
_WINDOWS = {"neuron": ("z", "gate"), "attention": ("pattern",)}
HEAD_WINDOW = 4
"""Windows of attention heads have this many times `before` tokens, because keys can be distant."""
_COUNTS = ("n_rows", "n_texts", "n_tokens")


@dataclass(frozen=True)
class Options:
    """Options that change the results of a pass over a corpus; see `Corpus` and `top_examples`."""

    k: int
    by: str
    ends: str
    before: int
    after: int
    context: int
    histograms: bool


class Summary:
    """The examples and counts from all batches so far, as tensors on the device of each layer."""

    def __init__(self, model: Any, sites: tuple[LayerSites, ...], options: Options) -> None:
        self.model, self.sites, self.options = model, sites, options
        self.n_tokens = self.n_texts = 0
        self.occurrences = torch.zeros(model.cfg.d_vocab, dtype=torch.long, device="cpu")
        self.examples, self.counts = dict[int, dict[str, State]](), dict[int, State]()
        self._blocks: dict[str, list[tuple[dict[str, State], State]]] = {}
        for group, kinds in _KINDS.items():
            of_group = [(i, self._like(site)) for i, site in enumerate(sites) if site.kind in kinds]
            for _, some in groupby(of_group, lambda pair: (pair[1].device, pair[1].dtype)):
                self._add_block(group, list(some))

    def _like(self, site: LayerSites) -> Tensor:
        """Return a number on the device of a layer, with the dtype of its results."""
        host, layer = host_of(self.model), site.layer
        W = host.neurons[layer].W_out if site.kind in NEURON_KINDS else host.attention(layer).W_O
        return float32_if_half(W.new_zeros(0))

    def _add_block(self, group: str, layers: list[tuple[int, Tensor]]) -> None:
        """Create the tensors of consecutive layers on one device; each layer's are views."""
        options, like = self.options, layers[0][1]
        ends: dict[str, int] = {end: options.k for end in ENDS_OF_OPTION[options.ends]}
        sizes = [len(self.sites[number].names) for number, _ in layers]
        counts: State = {}
        if group == "attention":
            counts = no_looks(sum(sizes), options.context, len(self.occurrences), like)
            if options.by != "attribution":
                ends = {"largest": options.k}
        elif options.histograms:
            counts = no_counts(sum(sizes), like.device)
            if any(shows_q(self.model, site) for site in self.sites):  # others leave these empty
                ends |= dict.fromkeys(QUADRANTS, min(options.k, IN_QUADRANT))
        width = self._before(group) + 1 + options.after
        kinds = _NUMBERS[group], _WINDOWS[group]
        examples = {end: no_examples(sum(sizes), k, width, like, *kinds) for end, k in ends.items()}
        self._blocks.setdefault(group, []).append((examples, counts))
        for (number, _), stop, size in zip(layers, accumulate(sizes), sizes, strict=True):
            rows = slice(stop - size, stop)
            self.examples[number] = {end: _rows(state, rows) for end, state in examples.items()}
            self.counts[number] = _rows(counts, rows)

    def _before(self, group: str) -> int:
        return self.options.before * (HEAD_WINDOW if group == "attention" else 1)

    def names(self, *kinds: HeadKind) -> tuple[str, ...]:
        """Return the names of the heads of these kinds, in the order of the results."""
        return tuple(name for site in self.sites if site.kind in kinds for name in site.names)

    @property
    def states(self) -> Iterator[tuple[str, list[State]]]:
        """Yield each prefix for tensor names, with the states whose tensors have this prefix."""
        for group, blocks in self._blocks.items():
            for end in blocks[0][0]:
                yield f"{group}.{end}.", [examples[end] for examples, _ in blocks]
            yield f"{group}.", [counts for _, counts in blocks]

    def add(self, batch: Batch, metric: Metric | None) -> None:
        """Run the model on a batch, and add the batch's activations to the results."""
        finite: list[Tensor] = []

        def take_in(number: int, of_layer: OfLayer) -> None:
            finite.append(self._add_layer(number, of_layer, batch))

        if metric is None:
            run_by_layer(self.model, self.sites, batch, take_in)
        else:
            run_by_gradient(self.model, self.sites, batch, metric, take_in)
        if not all(bool(value) for value in finite):
            texts = batch.text.tolist()
            raise InputError(
                [f"an activation in texts {texts[0]} to {texts[-1]} is not finite"],
                _PROBLEM,
            )
        counted = batch.tokens.flatten()[batch.counted].cpu()
        self.occurrences += torch.bincount(counted, minlength=len(self.occurrences))
        self.n_tokens += len(batch.counted)

    def _add_layer(self, number: int, of_layer: OfLayer, batch: Batch) -> Bool[Tensor, ""]:
        """Add the activations of a layer to the results; return True if all of them are finite."""
        site = self.sites[number]
        add: Callable[..., Tensor] = self._add_heads
        if site.kind in NEURON_KINDS:
            # A feature that is 0, or a neuron of an expert that is not visited, is no example.
            in_expert = host_of(self.model).experts(site.layer, site.kind)[0] > 0
            add = partial(self._add_neurons, only_active=in_expert or site.kind == "feature")
        some = next(iter(of_layer.values()))
        here, step = _on(batch, some.device), len(site.names)
        if some.device.type == "cpu" and site.kind in NEURON_KINDS:
            in_caches = _IN_CACHE * torch.get_num_threads()  # each core has a cache
            step = max(1, in_caches // batch.tokens.numel())  # a chunk stays in them
        finite = []
        for first in range(0, len(site.names), step):
            rows = slice(first, first + step)
            states = {end: _rows(state, rows) for end, state in self.examples[number].items()}
            counts = _rows(self.counts[number], rows)
            values = {
                name: x[rows] if name == "pattern" else x[:, rows] for name, x in of_layer.items()
            }
            finite.append(add(values, here, states, counts))
        return torch.stack(finite).all()

    def _add_neurons(
        self,
        values: OfLayer,
        batch: Batch,
        examples: dict[str, State],
        counts: State,
        *,
        only_active: bool,
    ) -> Bool[Tensor, ""]:
        values = {name: _by_neuron(x) for name, x in values.items()}
        counted = {name: _counted(x, batch) for name, x in values.items()}
        if counts:
            add_counts(counts, *(counted[name] for name in QUANTITIES))
        quadrant = counted.pop("quadrant", None)
        if quadrant is None:
            examples = {end: state for end, state in examples.items() if end not in QUADRANTS}
        scores = dict.fromkeys(examples, counted[self.options.by])
        if only_active:  # tokens with a score of ±∞ are never examples
            inactive = counted["gate"] == 0
            for end, x in scores.items():
                scores[end] = x.masked_fill(
                    inactive, torch.inf if end == "smallest" else -torch.inf
                )
        size = counted["z"].abs()
        if quadrant is not None and set(QUADRANTS) & set(examples):
            add_histogram(counts["signs"], quadrant.int())
            none = size.new_full((len(size), len(QUADRANTS)), -torch.inf)
            largest = none.scatter_reduce(1, quadrant.long(), size, "amax")
            scores |= dict(zip(QUADRANTS, largest.split(1, dim=1), strict=True))

        def numbers(end: str, rows: Int[Tensor, "row"]) -> State:
            if end not in QUADRANTS:
                return {"score": _chosen(scores[end], rows)}
            assert quadrant is not None
            inside = _chosen(quadrant, rows) == QUADRANTS.index(end)
            return {"score": torch.where(inside, _chosen(size, rows), -torch.inf)}

        self._add_examples("neuron", examples, scores, numbers, values, batch)
        return _all_finite(counted)

    def _add_heads(
        self, values: OfLayer, batch: Batch, examples: dict[str, State], counts: State
    ) -> Bool[Tensor, ""]:
        pattern = values["pattern"]
        others = {name: _by_neuron(x) for name, x in values.items() if name != "pattern"}
        counted = {name: _counted(x, batch) for name, x in others.items()}
        add_looks(counts, pattern, batch)
        begins = torch.ones_like(batch.tokens, dtype=torch.bool).flatten()
        begins[batch.counted] = False
        bos = (pattern[..., 0] * begins.view(batch.tokens.shape)[:, :1]).flatten(1)
        score = counted["attribution" if self.options.by == "attribution" else "norm"]
        of_tokens = {"score": score, "bos": _counted(bos, batch)}

        def numbers(end: str, rows: Int[Tensor, "row"]) -> State:
            return _rows(of_tokens, rows)

        scores = dict.fromkeys(examples, score)
        windows = {"pattern": pattern.flatten(1, 2)}
        self._add_examples("attention", examples, scores, numbers, windows, batch)
        return _all_finite(counted)

    def _add_examples(
        self,
        group: str,
        examples: dict[str, State],
        scores: dict[str, Tensor],
        numbers: Callable[[str, Tensor], State],
        values: OfLayer,
        batch: Batch,
    ) -> None:
        """Add a batch's top entries; `numbers(end, rows)` returns the quantities of these rows."""
        windows = {name: values[name] for name in _WINDOWS[group]}
        for end, state in examples.items():
            rows = rows_with_new(state, end, scores[end])
            if len(rows):
                new = numbers(end, rows)
                add_examples(state, end, rows, new, windows, batch, self._before(group))

    def tensors(self) -> State:
        """Return all results on the CPU; only layers on several devices need a copy."""
        joined: State = {}
        for prefix, states in self.states:
            for name in states[0]:
                parts = [state[name].cpu() for state in states]
                joined[f"{prefix}{name}"] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined | {"occurrences": self.occurrences}

    def restore(self, tensors: State) -> None:
        self.occurrences = tensors["occurrences"]
        for prefix, states in self.states:
            for name in states[0]:
                whole, first = tensors[f"{prefix}{name}"], 0
                for state in states:
                    n = len(state[name])
                    state[name].copy_(whole[first : first + n])
                    first += n

    def result(self, metric: str) -> CorpusStatistics:
        """Return the statistics of all batches so far, with the text of every token used."""
        tensors, by = self.tensors(), self.options.by
        neurons = heads = None
        if self.names(*NEURON_KINDS):
            neurons = NeuronStatistics(*self._about("neuron", by, metric, tensors))
        if self.names("attention"):
            by = "attribution" if by == "attribution" else "norm"
            sums = {name: tensors.pop(f"attention.{name}") for name in ("bos", "offsets", *SIDES)}
            looks = shares(sums, self.occurrences)
            tensors |= {f"attention.{name}": x for name, x in looks.items()}
            heads = HeadStatistics(*self._about("attention", by, metric, tensors))
        return CorpusStatistics(neurons, heads)

    def _about(self, group: str, by: str, metric: str, tensors: State) -> tuple[Any, ...]:
        """Return the constructor arguments for a `NeuronStatistics` or a `HeadStatistics`."""
        of_kind = {
            name.removeprefix(f"{group}."): x
            for name, x in tensors.items()
            if name.startswith(f"{group}.")
        }
        examples = {name: x for name, x in of_kind.items() if name.startswith((*ENDS, *QUADRANTS))}
        counts = {name: x for name, x in of_kind.items() if name not in examples}
        used = torch.zeros(len(self.occurrences) + 1, dtype=torch.bool, device="cpu")
        for name, x in of_kind.items():
            if name.endswith(".tokens"):
                used[x.flatten().long()] = True  # -1, which is no token, is the last entry
        ids = used[:-1].nonzero()[:, 0].tolist()
        vocabulary = {token: token_text(self.model, token) for token in ids}
        about = str(self.model.cfg.model_name), by, metric, self.n_texts, self.n_tokens
        return self.names(*_KINDS[group]), *about, vocabulary, examples, counts


def _all_finite(values: OfLayer) -> Bool[Tensor, ""]:
    return torch.stack([end for x in values.values() for end in x.aminmax()]).isfinite().all()


def _rows(state: State, rows: slice | Tensor) -> State:
    """Return the given rows of each tensor; for a slice, the results are views."""
    return {name: x[rows] for name, x in state.items()}


def _chosen(x: Tensor, rows: Int[Tensor, "row"]) -> Tensor:
    """Return the given rows, in order, without a copy if they are all rows."""
    return x if len(rows) == len(x) else x[rows]


def _by_neuron(x: Float[Tensor, "place neuron"]) -> Float[Tensor, "neuron place"]:
    # A transpose of the copy, which is in the cache, is several times faster than one of `x`.
    return x.contiguous().T.contiguous()


def _counted(x: Float[Tensor, "neuron place"], batch: Batch) -> Float[Tensor, "neuron token"]:
    """Return the values at all tokens except BOS and padding."""
    return x if len(batch.counted) == x.shape[1] else x.index_select(1, batch.counted)


def _on(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on this device, because layers may be on different devices."""
    if batch.tokens.device == device:
        return batch
    return Batch(*(None if x is None else x.to(device) for x in vars(batch).values()))  # type: ignore[arg-type]


class Resumed:
    """A folder that stores intermediate results, so that a user can resume an interrupted pass."""

    def __init__(self, folder: str | Path, settings: dict[str, Any], summary: Summary) -> None:
        self._store, self._summary = ChunkStore(folder, settings), summary
        self._digest, self._rows, self._written = "", 0, monotonic()
        arrays = self._store.get(_KEY)
        if arrays is not None:
            self._digest = bytes(arrays.pop("rows_digest").tolist()).hex()
            counts = (int(arrays.pop(name)) for name in _COUNTS)
            self._rows, summary.n_texts, summary.n_tokens = counts
            summary.restore({name: torch.from_numpy(array) for name, array in arrays.items()})

    def skip_seen(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Skip the rows that an interrupted pass processed; raise an error if they have changed."""
        digest = ""
        for number in range(self._rows):
            row = next(rows, None)
            digest = digest if row is None else chained_digest(digest, row)
            if row is None or (number == self._rows - 1 and digest != self._digest):
                raise InputError(
                    [
                        f"{self._store.folder} has results for {self._rows} pieces of text, but "
                        "this corpus does not begin with the same pieces; use a new folder"
                    ],
                    _PROBLEM,
                )
        return rows

    def saw(self, rows: Sequence[Row]) -> None:
        """Record that the given rows were processed; write the results every 30 seconds."""
        for row in rows:
            self._digest = chained_digest(self._digest, row)
        self._rows += len(rows)
        if monotonic() - self._written > _SECONDS:
            self.write()

    def write(self) -> None:
        """Write the current results to the folder."""
        summary = self._summary
        counts = zip(_COUNTS, (self._rows, summary.n_texts, summary.n_tokens), strict=True)
        arrays = {name: np.array(count) for name, count in counts}
        arrays["rows_digest"] = np.frombuffer(bytes.fromhex(self._digest), dtype=np.uint8)
        tensors = {name: tensor.numpy() for name, tensor in summary.tensors().items()}
        self._store.put(_KEY, tensors | arrays)
        self._written = monotonic()
