"""What one pass over a corpus says of neurons, and its file."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import TypedDict

from attn_only_lens.errors import InputError
from attn_only_lens.neurons.accumulate import BINS, ENDS, State
from attn_only_lens.storage import Document, read_tensors, write_tensors
from attn_only_lens.storage.atomic import AnyPath, atomic_write


class _Fields(TypedDict):
    names: list[str]
    model: str
    by: str
    metric: str
    n_texts: int
    n_tokens: int
    vocabulary: dict[str, str]
    tensors: str


_DOCUMENT = Document("attn_only_lens.NeuronStatistics", 1, _Fields)


@dataclass(frozen=True, eq=False)
class NeuronStatistics:
    """Neurons over a corpus: their top examples, and how z, gate and value are distributed.

    Attributes:
        names: the neurons.
        model: its name.
        by: what examples are ranked by, "z", "gate" or "attribution".
        metric: the name of the metric of attributions; empty where there is none.
        n_texts: of the corpus.
        n_tokens: that were looked at: all but BOS.
        vocabulary: the texts of the tokens of all examples.
        examples: tensors by end and name, "largest.score" and so on (`accumulate.py`).
        counts: histograms by quantity and name, "gate.counts" and so on.
    """

    names: tuple[str, ...]
    model: str
    by: str
    metric: str
    n_texts: int
    n_tokens: int
    vocabulary: dict[int, str]
    examples: State
    counts: State

    def histogram(
        self, name: str, quantity: str
    ) -> tuple[Int[Tensor, "bin"], Float[Tensor, "edge"]]:
        """Return how often a quantity of a neuron was in each of 128 bins, and the bins' edges.

        Bins are closed at the end away from 0; 0 is in the first of positive numbers.

        Args:
            name: the neuron.
            quantity: "z", "gate" or "value".

        Raises:
            InputError: there is no such neuron or quantity.
        """
        row = self._row(name)
        if f"{quantity}.counts" not in self.counts:
            raise InputError([f"got {quantity!r}; expected 'z', 'gate' or 'value'"], _NOT_THERE)
        negative, positive = self.counts[f"{quantity}.counts"][row]
        limit = 2.0 ** int(self.counts[f"{quantity}.exponent"][row])
        edges = torch.arange(-BINS, BINS + 1, dtype=torch.float64, device="cpu") * limit / BINS
        return torch.cat([negative.flip(0), positive]), edges

    def frame(self) -> pd.DataFrame:
        """Return the examples as `top_examples` does."""
        frames = []
        for end in ENDS:
            if f"{end}.found" not in self.examples:
                continue
            of_end = {k.partition(".")[2]: v for k, v in self.examples.items() if end in k}
            rows, ranks = of_end["found"].nonzero(as_tuple=True)
            columns = {k: v[rows, ranks] for k, v in of_end.items() if k != "found"}
            real = (columns["tokens"] >= 0).sum(dim=1).tolist()
            windows: dict[str, list[Any]] = {
                key: [tuple(x[:n]) for x, n in zip(columns[key].tolist(), real, strict=True)]
                for key in ("tokens", "z", "gate")
            }
            texts = [tuple(self.vocabulary[t] for t in window) for window in windows["tokens"]]
            frames.append(
                pd.DataFrame(
                    {
                        "name": [self.names[row] for row in rows.tolist()],
                        "end": end,
                        "rank": (ranks + 1).tolist(),
                        "value": columns["score"].double().tolist(),
                        "text": columns["text"].tolist(),
                        "at": columns["at"].tolist(),
                        "tokens": texts,
                        "values": windows["z"],
                        "gates": windows["gate"],
                        "position": columns["position"].tolist(),
                        "row": rows.tolist(),
                    }
                )
            )
        whole = pd.concat(frames, ignore_index=True)
        whole = whole.sort_values("row", kind="stable", ignore_index=True)
        return whole.drop(columns="row")

    def save(self, path: AnyPath) -> Path:
        """Write these to one safetensors file, whole or not at all.

        Raises:
            CheckpointError: it cannot be written.
        """
        fields = {key: vars(self)[key] for key in _Fields.__annotations__ if key != "tensors"}
        with atomic_write(path) as new:
            write_tensors(new, self.examples | self.counts, _DOCUMENT, **fields)
        return Path(path)

    @classmethod
    def load(cls, path: AnyPath) -> "NeuronStatistics":
        """Read what `save` wrote.

        Raises:
            CheckpointError: it cannot be read, is of another format, or was changed.
        """
        tensors, said = read_tensors(path, _DOCUMENT)
        examples = {key: x for key, x in tensors.items() if key.startswith(ENDS)}
        counts = {key: x for key, x in tensors.items() if key not in examples}
        vocabulary = {int(token): text for token, text in said["vocabulary"].items()}
        names = tuple(said["names"])
        numbers = {key: said[key] for key in ("model", "by", "metric", "n_texts", "n_tokens")}
        return cls(names, vocabulary=vocabulary, examples=examples, counts=counts, **numbers)

    def of(self, names: list[str]) -> "NeuronStatistics":
        """Return the statistics of some of the neurons.

        Raises:
            InputError: one is not among them.
        """
        rows = torch.tensor([self._row(name) for name in names], device="cpu", dtype=torch.long)
        examples, counts = (
            {key: x[rows] for key, x in tensors.items()} for tensors in (self.examples, self.counts)
        )
        return replace(self, names=tuple(names), examples=examples, counts=counts)

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.names)}

    def _row(self, name: str) -> int:
        if name not in self._rows:
            raise InputError([f"got {name!r}; these are of {len(self.names)} others"], _NOT_THERE)
        return self._rows[name]


_NOT_THERE = "this is not among these statistics"
