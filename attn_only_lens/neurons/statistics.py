"""Top examples and histograms of neurons over a corpus, and their file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import TypedDict

from attn_only_lens.errors import InputError
from attn_only_lens.neurons.accumulate import BINS, ENDS, State
from attn_only_lens.storage import Document, read_tensors, write_tensors
from attn_only_lens.storage.atomic import AnyPath, atomic_write

COLUMNS = ("tokens", "values", "gates", "position", "value", "text")
"""The columns of `top_examples` that an `Example` has."""


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


@dataclass(frozen=True)
class Example:
    """A window of text around one token, at which a neuron is large (or small).

    Attributes:
        tokens: the texts of the window's tokens.
        values: z (gate × value) of the neuron at each token.
        gates: the attention of each token to itself.
        position: index of the example's token in the window.
        value: the quantity of the ranking at that token: z, the gate, or an attribution.
        text: index of the text in the corpus.
    """

    tokens: Sequence[str]
    values: Sequence[float]
    gates: Sequence[float]
    position: int
    value: float
    text: int


def examples_of(frame: pd.DataFrame, name: str) -> list[Example]:
    """Return the examples of one neuron, by end and then by rank.

    Args:
        frame: the frame from `top_examples`.
        name: the name of the neuron.

    Raises:
        InputError: the frame lacks columns, or has no such neuron.

    Example:
        >>> import torch
        >>> from attn_only_lens import expose_neuron_heads, neurons, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> texts = [[3, 4, 113], [5, 7, 113]]
        >>> frame = neurons.top_examples(model, ["L0N7"], texts, k=2, progress=False)
        >>> neurons.examples_of(frame, "L0N7")[0].tokens
        ['3', '4', '113']
    """
    problem = "no examples can be taken from this frame"
    if not isinstance(frame, pd.DataFrame):
        raise InputError([f"got a {type(frame).__name__}; expected a frame of examples"], problem)
    missing = sorted({"name", *COLUMNS} - set(frame.columns))
    if missing:
        raise InputError([f"it has no column {', '.join(missing)}"], problem)
    rows = frame[frame["name"] == name]
    if rows.empty:
        names = frame["name"].unique().tolist()
        known = ", ".join(names[:5]) + ", …" * (len(names) > 5)
        raise InputError([f"got {name!r}; the frame has examples of {known}"], problem)
    return [Example(**{key: row[key] for key in COLUMNS}) for row in rows.to_dict("records")]


@dataclass(frozen=True, eq=False)
class NeuronStatistics:
    """Neurons over a corpus: their top examples, and the distributions of z, gate and value.

    Attributes:
        names: the names of the neurons.
        model: the name of the model.
        by: the quantity of the ranking: "z", "gate" or "attribution".
        metric: the name of the metric for attributions; empty if there are no attributions.
        n_texts: number of texts in the corpus.
        n_tokens: number of tokens in the corpus, without BOS.
        vocabulary: the text of each token in the examples.
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
        """Return a neuron's histogram for a quantity: counts in 128 bins, and the bins' edges.

        A bin includes the edge that is further from 0; 0 is in the first positive bin.

        Args:
            name: the name of the neuron.
            quantity: "z", "gate" or "value".

        Raises:
            InputError: the neuron or the quantity does not exist.
        """
        row = self._row(name)
        if f"{quantity}.counts" not in self.counts:
            raise InputError([f"got {quantity!r}; expected 'z', 'gate' or 'value'"], _NOT_THERE)
        negative, positive = self.counts[f"{quantity}.counts"][row]
        limit = 2.0 ** int(self.counts[f"{quantity}.exponent"][row])
        edges = torch.arange(-BINS, BINS + 1, dtype=torch.float64, device="cpu") * limit / BINS
        return torch.cat([negative.flip(0), positive]), edges

    def frame(self) -> pd.DataFrame:
        """Return the examples as a frame, like `top_examples`.

        If pyarrow is installed, `tokens`, `values` and `gates` are columns of arrow lists. Without
        it, they are Python lists, which take about ten times as long and four times the memory. To
        group by windows, join their tokens, `frame["tokens"].map("".join)`: lists have no hash. To
        read the frame from parquet, call `pd.read_parquet(path, dtype_backend="pyarrow")`.
        """
        ends = [end for end in ENDS if f"{end}.found" in self.examples]

        def stacked(name: str) -> np.ndarray[Any, Any]:
            """Return one tensor's values as [neuron, end, rank, ...], the order of the rows."""
            return np.stack([self.examples[f"{end}.{name}"].numpy() for end in ends], axis=1)

        found = stacked("found")
        row, end_index, rank = found.nonzero()
        tokens = stacked("tokens")
        real = (tokens >= 0) & found[..., None]  # short windows are filled with -1
        offsets = np.concatenate([[0], real.sum(axis=-1)[found].cumsum()])
        ids = sorted(self.vocabulary)
        index_of_id = np.zeros(max(ids) + 1, dtype=np.int32)
        index_of_id[ids] = np.arange(len(ids))
        texts = [self.vocabulary[token] for token in ids]
        return pd.DataFrame(
            {
                "name": np.array(self.names, dtype=object)[row],
                "end": np.array(ends, dtype=object)[end_index],
                "rank": rank + 1,
                "value": stacked("score")[found].astype(float),
                "text": stacked("text")[found],
                "at": stacked("at")[found],
                "tokens": _lists(index_of_id[tokens[real]], offsets, texts),
                "values": _lists(stacked("z")[real], offsets),
                "gates": _lists(stacked("gate")[real], offsets),
                "position": stacked("position")[found],
            }
        )

    def save(self, path: AnyPath) -> Path:
        """Write the statistics to one safetensors file, completely or not at all.

        Raises:
            CheckpointError: the file cannot be written.
        """
        fields = {key: vars(self)[key] for key in _Fields.__annotations__ if key != "tensors"}
        with atomic_write(path) as new:
            write_tensors(new, self.examples | self.counts, _DOCUMENT, **fields)
        return Path(path)

    @classmethod
    def load(cls, path: AnyPath) -> "NeuronStatistics":
        """Read a file that `save` wrote.

        Raises:
            CheckpointError: the file cannot be read, has another format, or was changed.
        """
        tensors, said = read_tensors(path, _DOCUMENT)
        examples = {key: x for key, x in tensors.items() if key.startswith(ENDS)}
        counts = {key: x for key, x in tensors.items() if key not in examples}
        vocabulary = {int(token): text for token, text in said["vocabulary"].items()}
        names = tuple(said["names"])
        numbers = {key: said[key] for key in ("model", "by", "metric", "n_texts", "n_tokens")}
        return cls(names, vocabulary=vocabulary, examples=examples, counts=counts, **numbers)

    def of(self, names: list[str]) -> "NeuronStatistics":
        """Return the statistics for a subset of the neurons.

        Raises:
            InputError: one of the neurons is not in the statistics.
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
            raise InputError(
                [f"got {name!r}; expected one of {len(self.names)} neurons (`names`)"], _NOT_THERE
            )
        return self._rows[name]


def _lists(entries: Any, offsets: Any, texts: Sequence[str] | None = None) -> Any:
    """Return a column of lists: row i has the entries from offset i to offset i + 1.

    With `texts`, the entries are indices into `texts`.
    """
    if find_spec("pyarrow") is None:
        plain = entries.tolist() if texts is None else [texts[i] for i in entries.tolist()]
        return [plain[start:stop] for start, stop in pairwise(offsets.tolist())]
    import pyarrow as pa

    values = pa.array(entries)
    if texts is not None:
        values = pa.DictionaryArray.from_arrays(values, pa.array(texts))
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), values)
    return pd.arrays.ArrowExtensionArray(lists)


_NOT_THERE = "this is not in the statistics"
