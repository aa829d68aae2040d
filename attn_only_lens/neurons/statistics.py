"""Statistics of neurons and attention heads over a corpus, which can be saved to files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Self, TypedDict

from attn_only_lens.arguments import a_type
from attn_only_lens.errors import InputError
from attn_only_lens.neurons.accumulate import BINS, ENDS, QUADRANTS, State
from attn_only_lens.neurons.looks import SIDES
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


@dataclass(frozen=True)
class Example:
    """A token at which a neuron has a large or a small value, and the text around the token.

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
    """Return the examples of one neuron in a frame, in the order of its rows.

    Args:
        frame: the frame from `top_examples`.
        name: the name of the neuron.

    Raises:
        InputError: the frame lacks columns of `top_examples`, or does not contain the neuron.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, load, neurons
        >>> from attn_only_lens.neurons.statistics import examples_of
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> corpus = neurons.Corpus([[3, 4, 113], [5, 7, 113]])
        >>> frame = neurons.top_examples(model, ["L0N7"], corpus, k=2)
        >>> examples_of(frame, "L0N7")[0].tokens
        ['3', '4', '113']
    """
    problem = "no examples can be taken from this frame"
    if not isinstance(frame, pd.DataFrame):
        raise InputError([f"got {a_type(frame)}; expected a frame of examples"], problem)
    missing = sorted({"name", *COLUMNS} - set(frame.columns))
    if missing:
        raise InputError([f"the frame has no column {', '.join(missing)}"], problem)
    rows = frame[frame["name"] == name]
    if rows.empty:
        names = frame["name"].unique().tolist()
        known = ", ".join(names[:5]) + ", …" * (len(names) > 5)
        raise InputError([f"got {name!r}; the frame has examples of {known}"], problem)
    return [Example(**{key: row[key] for key in COLUMNS}) for row in rows.to_dict("records")]


@dataclass(frozen=True, eq=False)
class _Statistics:
    """Top examples and counts, as tensors whose first axis has one entry per name in `names`."""

    _document: ClassVar[Document]
    _windows: ClassVar[dict[str, str]]
    _numbers: ClassVar[tuple[str, ...]] = ()

    names: tuple[str, ...]
    model: str
    by: str
    metric: str
    n_texts: int
    n_tokens: int
    vocabulary: dict[int, str]
    examples: State
    counts: State

    def frame(self) -> pd.DataFrame:
        """Return the examples as a frame, sorted by `name`, `end` (largest or smallest) and `rank`.

        The columns are those of `top_examples`. For attention heads, `weights` (the attention to
        each token of the window) and `bos` (the attention to BOS) replace `values` and `gates`.

        If pyarrow is installed, list columns contain Arrow lists. Otherwise they contain Python
        lists, which take about ten times the time and four times the memory. Lists cannot be
        hashed, so group examples by the text of their windows, `frame["tokens"].map("".join)`. Read
        a frame that was saved as parquet with `pd.read_parquet(path, dtype_backend="pyarrow")`.
        """
        return self._frame(ENDS)

    def _frame(self, ends: Sequence[str]) -> pd.DataFrame:
        ends = [end for end in ends if f"{end}.found" in self.examples]

        def stacked(name: str) -> np.ndarray[Any, Any]:
            """Stack highest and lowest examples as in the frame: [neuron, end, rank, ...]."""
            return np.stack([self.examples[f"{end}.{name}"].numpy() for end in ends], axis=1)

        is_filled = stacked("found")
        row, end_index, rank = is_filled.nonzero()
        tokens = stacked("tokens")
        real = (tokens >= 0) & is_filled[..., None]  # short windows are padded with -1
        offsets = np.concatenate([[0], real.sum(axis=-1)[is_filled].cumsum()])
        ids = sorted(self.vocabulary)
        index_of_id = np.zeros(max(ids, default=-1) + 1, dtype=np.int32)
        index_of_id[ids] = np.arange(len(ids))
        texts = [self.vocabulary[token] for token in ids]
        return pd.DataFrame(
            {
                "name": np.array(self.names, dtype=object)[row],
                "end": np.array(ends, dtype=object)[end_index],
                "rank": rank + 1,
                "value": stacked("score")[is_filled].astype(float),
                "text": stacked("text")[is_filled],
                "at": stacked("at")[is_filled],
                "tokens": _lists(index_of_id[tokens[real]], offsets, texts),
                **{
                    column: _lists(stacked(name)[real], offsets)
                    for column, name in self._windows.items()
                },
                "position": stacked("position")[is_filled],
                **{name: stacked(name)[is_filled] for name in self._numbers},
            }
        )

    def save(self, path: AnyPath) -> Path:
        """Write the statistics atomically to a safetensors file.

        Raises:
            CheckpointError: the file cannot be written.
        """
        fields = {key: vars(self)[key] for key in _Fields.__annotations__ if key != "tensors"}
        with atomic_write(path) as new:
            write_tensors(new, self.examples | self.counts, self._document, **fields)
        return Path(path)

    @classmethod
    def read(cls, path: AnyPath) -> Self:
        tensors, said = read_tensors(path, cls._document)
        examples = {key: x for key, x in tensors.items() if key.startswith((*ENDS, *QUADRANTS))}
        counts = {key: x for key, x in tensors.items() if key not in examples}
        vocabulary = {int(token): text for token, text in said["vocabulary"].items()}
        names = tuple(said["names"])
        numbers = {key: said[key] for key in ("model", "by", "metric", "n_texts", "n_tokens")}
        return cls(names, vocabulary=vocabulary, examples=examples, counts=counts, **numbers)

    def of(self, names: list[str]) -> Self:
        """Return the statistics of only the neurons or heads with these names.

        Raises:
            InputError: a name is missing from the statistics.
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
                [f"got {name!r}; expected one of the {len(self.names)} names"], _NOT_THERE
            )
        return self._rows[name]


class NeuronStatistics(_Statistics):
    """Top examples of neurons and features in a corpus, and histograms of z, gate and value.

    Attributes:
        names: the neurons and features.
        model: the name of the model.
        by: the quantity that ranks examples: "z", "gate" or "attribution".
        metric: the name of the metric of attributions; empty if there is none.
        n_texts: number of texts in the corpus.
        n_tokens: number of tokens that were counted: all except BOS.
        vocabulary: the text of each token in the examples.
        examples: tensors by end and name, "largest.score" and so on (`accumulate.py`).
        counts: histograms by quantity and name, "gate.counts" and so on.
    """

    _document = Document("attn_only_lens.NeuronStatistics", 1, _Fields)
    _windows: ClassVar[dict[str, str]] = {"values": "z", "gates": "gate"}

    def histogram(
        self, name: str, quantity: str
    ) -> tuple[Int[Tensor, "bin"], Float[Tensor, "edge"]]:
        """Return a histogram of one quantity of a neuron: counts in 128 bins, and bin edges.

        A value on a boundary of two bins is in the bin closer to 0; 0 is in the first positive bin.

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

    def quadrants(self) -> pd.DataFrame:
        """Return the share of tokens for each pair of signs of x W_gate and x W_in in a gated MLP.

        The columns are `name`, "++", "+-", "-+" and "--"; the first sign is the sign of x W_gate,
        and 0 counts as positive. The table omits transcoder features, which have no W_gate.
        Source: GLUScope, arXiv 2602.23826.

        Raises:
            InputError: the model has no gated MLPs, or they have bilinear gates.
        """
        self._require_quadrants()
        shares = (self.counts["signs"].double() / self.n_tokens).numpy()
        frame = pd.DataFrame(shares, columns=list(QUADRANTS)).assign(name=list(self.names))
        gated = (self.counts["signs"].sum(1) > 0).numpy()
        return frame.loc[gated, ["name", *QUADRANTS]].reset_index(drop=True)

    def quadrant_examples(self) -> pd.DataFrame:
        """Return the tokens with the largest |z| for each pair of signs (column `end`).

        The other columns are the same as in `frame`, and the errors are the same as in `quadrants`.
        """
        self._require_quadrants()
        return self._frame(QUADRANTS)

    def _require_quadrants(self) -> None:
        if "++.found" not in self.examples or not self.counts["signs"].any():
            reason = "the neurons have no quadrants; expected a gated MLP, with exact gates"
            raise InputError([reason], _NOT_THERE)


class HeadStatistics(_Statistics):
    """Top examples of attention heads in a corpus, and the tokens that the heads attend to.

    Attributes:
        names: the heads.
        model: the name of the model.
        by: the quantity that ranks examples: "norm" (of the head's output z W_O) or "attribution".
        metric: the name of the metric of attributions; empty if there is none.
        n_texts: number of texts in the corpus.
        n_tokens: number of tokens that were counted: all except BOS.
        vocabulary: the text of each token in the examples and lists.
        examples: tensors by end and name, "largest.score" and so on (`accumulate.py`).
        counts: fractions of attention, with names such as "bos" and "attended" (`looks.py`).
    """

    _document = Document("attn_only_lens.HeadStatistics", 1, _Fields)
    _windows: ClassVar[dict[str, str]] = {"weights": "pattern"}
    _numbers = ("bos",)

    def looks(self) -> pd.DataFrame:
        """Return each head's mean attention to BOS, to the query token itself and to other tokens.

        The columns are `name`, `bos`, `itself`, `previous` (the previous token except BOS) and
        `other`.
        """
        bos, offsets = self.counts["bos"].numpy(), self.counts["offsets"].numpy()
        middle = offsets.shape[1] // 2
        itself, previous = offsets[:, middle], offsets[:, middle + 1]
        return pd.DataFrame(
            {
                "name": list(self.names),
                "bos": bos,
                "itself": itself,
                "previous": previous,
                "other": offsets.sum(axis=1) - itself - previous,
            }
        )

    def offsets(self, name: str) -> "pd.Series[float]":
        """Return a head's mean attention by offset: the query's position minus the key's.

        Attention to BOS is excluded, so the offsets' sum is 1 minus the mean attention to BOS.

        Raises:
            InputError: there is no such head.
        """
        numbers = self.counts["offsets"][self._row(name)].numpy()
        index = np.arange(len(numbers)) - len(numbers) // 2
        return pd.Series(numbers, pd.Index(index, name="offset"), name=name)

    def tokens(
        self, name: str, side: Literal["attended", "attending"] = "attended"
    ) -> pd.DataFrame:
        """Return the tokens that receive, or pay, the largest shares of a head's attention.

        Attention to BOS, and of a token to itself, is excluded.

        Returns:
            A frame of up to 20 rows: `token`; `share`, the token's share of this attention; `mean`,
            the mean attention that one occurrence of the token receives or gives.

        Raises:
            InputError: there is no such head or side.
        """
        row = self._row(name)
        if side not in SIDES:
            raise InputError([f"got {side!r}; expected 'attended' or 'attending'"], _NOT_THERE)
        ids, share, mean = (self.counts[f"{side}{end}"][row] for end in (".tokens", "", ".mean"))
        texts = [self.vocabulary[token] for token in ids.tolist() if token >= 0]
        n = len(texts)
        return pd.DataFrame({"token": texts, "share": share[:n], "mean": mean[:n]})


class CorpusStatistics(NamedTuple):
    """Statistics of neurons and of attention heads; a field that would be empty is None."""

    neurons: NeuronStatistics | None
    heads: HeadStatistics | None

    @property
    def names(self) -> list[str]:
        """The names of the neurons, then of the attention heads."""
        return [name for part in self if part is not None for name in part.names]

    @property
    def about(self) -> NeuronStatistics | HeadStatistics:
        """The statistics of neurons, or of heads if no neuron was analysed."""
        part = self.neurons or self.heads
        assert part is not None
        return part

    def of(self, names: Sequence[str]) -> "CorpusStatistics":
        """Return the statistics of only these neurons and heads.

        Raises:
            InputError: a name is missing from the statistics.
        """
        known = set(self.names)
        missing = [name for name in names if name not in known]
        expected = f"expected one of the {len(known)} names"
        InputError.raise_if([f"got {name!r}; {expected}" for name in missing[:1]], _NOT_THERE)
        wanted = set(names)
        parts = [part and part.of([n for n in part.names if n in wanted]) for part in self]
        neurons, heads = (part if part and part.names else None for part in parts)
        return CorpusStatistics(neurons, heads)  # type: ignore[arg-type]


def _lists(entries: Any, offsets: Any, texts: Sequence[str] | None = None) -> Any:
    """Return a column of lists; row i contains `entries[offsets[i]:offsets[i + 1]]`.

    If `texts` is given, the lists contain `texts[entry]` instead of entries.
    """
    if find_spec("pyarrow") is None:
        plain = entries.tolist() if texts is None else [texts[i] for i in entries.tolist()]
        return [plain[start:stop] for start, stop in pairwise(offsets.tolist())]
    import pyarrow as pa

    values = pa.array(entries)
    if texts is not None:
        values = pa.DictionaryArray.from_arrays(values, pa.array(texts, pa.string()))
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), values)
    return pd.arrays.ArrowExtensionArray(lists)


_NOT_THERE = "this is not in the statistics"
