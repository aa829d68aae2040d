"""The intermediate results of a pass over a corpus, and the folder that stores them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.metrics import Metric
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.engine.tokens import token_text
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
from attn_only_lens.storage.chunks import ChunkStore

_PROBLEM = "this corpus cannot be used"
_SECONDS = 30.0
_KEY = "so-far"
ENDS_OF_OPTION = {"both": ENDS, "largest": ENDS[:1], "smallest": ENDS[1:]}
_COUNTS = ("n_rows", "n_texts", "n_tokens")


@dataclass(frozen=True)
class Options:
    """Options for a pass over a corpus; see `top_examples`."""

    k: int
    by: str
    ends: str
    before: int
    after: int
    context: int | None
    batch_size: int
    histograms: bool


class Summary:
    """Examples and counts so far; each layer's tensors stay on the layer's device."""

    def __init__(self, model: Any, sites: tuple[LayerSites, ...], options: Options) -> None:
        self.model, self.sites, self.options = model, sites, options
        self.n_tokens = self.n_texts = 0
        self.examples: list[dict[End, State]] = []
        self.counts: list[State] = []
        width = options.before + 1 + options.after
        for site in sites:
            W_out = host_of(model).neurons[site.layer].W_out
            like, n = float32_if_half(W_out.detach()[:0, 0]), len(site.names)
            ends = ENDS_OF_OPTION[options.ends]
            self.examples.append({end: no_examples(n, options.k, width, like) for end in ends})
            self.counts.append(no_counts(n, like.device) if options.histograms else {})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the neurons, in the order of the results."""
        return tuple(name for site in self.sites for name in site.names)

    @property
    def states(self) -> Iterator[tuple[str, list[State]]]:
        """Yield the states of all layers, with the prefix of their names."""
        for end in self.examples[0]:
            yield f"{end}.", [example[end] for example in self.examples]
        yield "", self.counts

    def add(self, batch: Batch, metric: Metric | None) -> None:
        """Run the model on a batch, and add the activations of its neurons."""
        finite: list[Tensor] = []
        by, before = self.options.by, self.options.before

        def take_in(number: int, of_layer: OfNeurons) -> None:
            z, gate = of_layer["z"], of_layer["gate"]
            here = _on(batch, z.device)
            counted = {name: x[:, here.counted] for name, x in of_layer.items()}
            finite.append(torch.stack([x.isfinite().all() for x in counted.values()]).all())
            for end, state in self.examples[number].items():
                add_examples(state, end, of_layer[by], z, gate, here, before)
            if self.counts[number]:
                add_counts(self.counts[number], *(counted[name] for name in QUANTITIES))

        if metric is None:
            run_by_layer(self.model, self.sites, batch, take_in)
        else:
            run_by_gradient(self.model, self.sites, batch, metric, take_in)
        if not all(bool(value) for value in finite):
            texts = batch.text.tolist()
            raise InputError(
                [f"activations in one of the texts {texts[0]} to {texts[-1]} are not finite"],
                _PROBLEM,
            )
        self.n_tokens += len(batch.counted)

    def tensors(self) -> State:
        """Return all states on the CPU, with the neurons of all layers in one tensor."""
        return {
            f"{prefix}{name}": torch.cat([state[name].cpu() for state in states])
            for prefix, states in self.states
            for name in states[0]
        }

    def restore(self, tensors: State) -> None:
        """Set the states to the tensors that the method `tensors` returned."""
        for prefix, states in self.states:
            for name in states[0]:
                whole, first = tensors[f"{prefix}{name}"], 0
                for state in states:
                    n = len(state[name])
                    state[name] = whole[first : first + n].to(state[name])
                    first += n

    def result(self, metric: str) -> NeuronStatistics:
        """Return the statistics, which include the tokens' texts."""
        tensors = self.tensors()
        examples = {name: x for name, x in tensors.items() if name.startswith(ENDS)}
        counts = {name: x for name, x in tensors.items() if name not in examples}
        used = [x.unique() for name, x in examples.items() if name.endswith(".tokens")]
        ids = torch.cat(used).unique().tolist()
        vocabulary = {token: token_text(self.model, token) for token in ids if token >= 0}
        about = str(self.model.cfg.model_name), self.options.by, metric, self.n_texts, self.n_tokens
        return NeuronStatistics(self.names, *about, vocabulary, examples, counts)


def _on(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on another device, because layers may be on several devices."""
    if batch.tokens.device == device:
        return batch
    return Batch(*(None if x is None else x.to(device) for x in vars(batch).values()))  # type: ignore[arg-type]


class Resumed:
    """A folder with intermediate results, from which a pass over a corpus can resume."""

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
        """Check and skip the rows that an earlier call processed; return the other rows."""
        digest = ""
        for number in range(self._rows):
            row = next(rows, None)
            digest = digest if row is None else chained_digest(digest, row)
            if row is None or (number == self._rows - 1 and digest != self._digest):
                raise InputError(
                    [
                        f"{self._store.folder} has results for {self._rows} pieces of other texts: "
                        "the corpus does not begin with these pieces; use a new folder"
                    ],
                    _PROBLEM,
                )
        return rows

    def saw(self, rows: Sequence[Row]) -> None:
        """Record rows that were added, and write the summary every half minute."""
        for row in rows:
            self._digest = chained_digest(self._digest, row)
        self._rows += len(rows)
        if monotonic() - self._written > _SECONDS:
            self.write()

    def write(self) -> None:
        """Write the summary so far."""
        summary = self._summary
        counts = zip(_COUNTS, (self._rows, summary.n_texts, summary.n_tokens), strict=True)
        arrays = {name: np.array(count) for name, count in counts}
        arrays["rows_digest"] = np.frombuffer(bytes.fromhex(self._digest), dtype=np.uint8)
        tensors = {name: tensor.numpy() for name, tensor in summary.tensors().items()}
        self._store.put(_KEY, tensors | arrays)
        self._written = monotonic()
