"""What was found in a corpus so far, and the folder that keeps it."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.metrics import Metric
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.engine.token_texts import token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.neurons.accumulate import (
    ENDS,
    QUANTITIES,
    End,
    State,
    add_counts,
    add_examples,
    no_counts,
    no_examples,
)
from attn_only_lens.neurons.activations import OfNeurons, run_by_gradient, run_by_layer
from attn_only_lens.neurons.corpus import Batch, Row, chained_digest
from attn_only_lens.neurons.statistics import NeuronStatistics
from attn_only_lens.storage import Document, open_folder, read_tensors, write_tensors
from attn_only_lens.storage.atomic import atomic_write

_PROBLEM = "this corpus cannot be looked through"
_SECONDS = 30.0
_FILE = "statistics.safetensors"


class _Fields(TypedDict):
    settings: dict[str, Any]
    digest: str
    rows: int
    texts: int
    tokens_seen: int
    tensors: str


_SO_FAR = Document("attn_only_lens.NeuronStatisticsSoFar", 1, _Fields)


class Found:
    """What was found so far, of each layer on the device that it is computed on."""

    def __init__(
        self,
        model: Any,
        sites: tuple[LayerSites, ...],
        k: int,
        by: str,
        ends: tuple[End, ...],
        before: int,
        after: int,
        histograms: bool,
    ) -> None:
        self.model, self.sites, self.by, self.before = model, sites, by, before
        self.n_tokens = self.n_texts = 0
        self.examples: list[dict[End, State]] = []
        self.counts: list[State] = []
        for site in sites:
            W_out = host_of(model).neurons[site.layer].W_out
            like = float32_if_half(W_out.detach()[:0, 0])
            n, width = len(site.names), before + 1 + after
            self.examples.append({end: no_examples(n, k, width, like) for end in ends})
            self.counts.append(no_counts(n, like.device) if histograms else {})

    @property
    def names(self) -> tuple[str, ...]:
        """The neurons, in the order of all that is found."""
        return tuple(name for site in self.sites for name in site.names)

    @property
    def states(self) -> Iterator[tuple[str, list[State]]]:
        """The states of all layers, by the prefix of their names."""
        for end in self.examples[0]:
            yield f"{end}.", [example[end] for example in self.examples]
        yield "", self.counts

    def add(self, batch: Batch, metric: Metric | None) -> None:
        """Run the model on a batch, and take in what its neurons are."""
        finite: list[Tensor] = []

        def take_in(number: int, of_layer: OfNeurons) -> None:
            z, gate = of_layer["z"], of_layer["gate"]
            here = _on(batch, z.device)
            counted = {name: x[:, here.counted] for name, x in of_layer.items()}
            finite.append(torch.stack([x.isfinite().all() for x in counted.values()]).all())
            for end, state in self.examples[number].items():
                add_examples(state, end, of_layer[self.by], z, gate, here, self.before)
            if self.counts[number]:
                add_counts(self.counts[number], *(counted[name] for name in QUANTITIES))

        if metric is None:
            run_by_layer(self.model, self.sites, batch, take_in)
        else:
            run_by_gradient(self.model, self.sites, batch, metric, take_in)
        if not all(bool(value) for value in finite):
            texts = batch.text.tolist()
            raise InputError(
                [f"activations are not finite in one of the texts {texts[0]} to {texts[-1]}"],
                _PROBLEM,
            )
        self.n_tokens += len(batch.counted)

    def tensors(self) -> State:
        """All states, neurons of all layers together, on the CPU."""
        return {
            f"{prefix}{name}": torch.cat([state[name].cpu() for state in states])
            for prefix, states in self.states
            for name in states[0]
        }

    def restore(self, tensors: State) -> None:
        """Take the states that `tensors` gave."""
        for prefix, states in self.states:
            for name in states[0]:
                whole, first = tensors[f"{prefix}{name}"], 0
                for state in states:
                    n = len(state[name])
                    state[name] = whole[first : first + n].to(state[name])
                    first += n

    def result(self, metric: str) -> NeuronStatistics:
        """What was found, with the texts of tokens."""
        tensors = self.tensors()
        examples = {name: x for name, x in tensors.items() if name.startswith(ENDS)}
        counts = {name: x for name, x in tensors.items() if name not in examples}
        used = [x.unique() for name, x in examples.items() if name.endswith(".tokens")]
        ids = torch.cat(used).unique().tolist()
        vocabulary = {token: token_text(self.model, token) for token in ids if token >= 0}
        about = str(self.model.cfg.model_name), self.by, metric, self.n_texts, self.n_tokens
        return NeuronStatistics(self.names, *about, vocabulary, examples, counts)


def _on(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on another device: layers may be on several."""
    if batch.tokens.device == device:
        return batch
    return Batch(*(None if x is None else x.to(device) for x in vars(batch).values()))  # type: ignore[arg-type]


class Store:
    """A folder that keeps what was found so far."""

    def __init__(self, folder: str | Path, settings: dict[str, Any], results: Found) -> None:
        self._path, self._found = open_folder(folder) / _FILE, results
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._digest, self._rows, self._written = "", 0, monotonic()
        if not self._path.exists():
            return
        tensors, said = read_tensors(self._path, _SO_FAR)
        expected, stored = self._settings, said["settings"]
        differ = [
            f"{key}: got {_shown(expected.get(key))}; the folder has {_shown(stored.get(key))}"
            for key in sorted(expected.keys() | stored.keys())
            if expected.get(key) != stored.get(key)
        ]
        InputError.raise_if(differ, f"{self._path.parent} holds other statistics; use a new folder")
        results.restore(tensors)
        results.n_tokens, results.n_texts = said["tokens_seen"], said["texts"]
        self._digest, self._rows = said["digest"], said["rows"]

    def skip_seen(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Return the rows that were not seen, having checked that the others are those seen."""
        digest = ""
        for number in range(self._rows):
            row = next(rows, None)
            digest = digest if row is None else chained_digest(digest, row)
            if row is None or (number == self._rows - 1 and digest != self._digest):
                raise InputError(
                    [
                        f"{self._path.parent} holds what {self._rows} pieces of texts gave, and "
                        "these texts do not begin with them: use a new folder"
                    ],
                    _PROBLEM,
                )
        return rows

    def saw(self, rows: Sequence[Row]) -> None:
        """Note rows that were taken in, and write now and then."""
        for row in rows:
            self._digest = chained_digest(self._digest, row)
        self._rows += len(rows)
        if monotonic() - self._written > _SECONDS:
            self.write()

    def write(self) -> None:
        """Write all that was found."""
        results = self._found
        said = {"settings": self._settings, "digest": self._digest, "rows": self._rows}
        said |= {"texts": results.n_texts, "tokens_seen": results.n_tokens}
        with atomic_write(self._path) as new:
            write_tensors(new, results.tensors(), _SO_FAR, **said)
        self._written = monotonic()


def _shown(setting: Any) -> str:
    """Return a setting, without most of a digest."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1…", str(setting))
