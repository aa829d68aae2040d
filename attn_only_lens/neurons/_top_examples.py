"""One pass over a corpus: top examples and histograms of neurons, in bounded memory.

A layer's activations are taken in as they are computed, and forgotten: beyond the model and its
pass of one batch, memory is that of what is kept, for each neuron and end

    k (4 + window) integers and k (1 + 2 window) numbers         top examples
    1,024 + 3 · 128 integers                                     histograms

An attribution is z times the gradient of a metric with respect to z, an estimate of what setting z
to 0 takes from the metric of its text (`patching.attribution`, direction "zero", has the same
numbers with the other sign): a forward and a backward pass, in which every layer is held.

A corpus may be longer than anyone waits. With `resume`, what was found so far is written to a
folder every half minute; the next call skips the texts seen, and checks that they are the same.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypedDict, get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.axes import SELF
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
from attn_only_lens.neurons.corpus import (
    Batch,
    Row,
    Texts,
    batches,
    chained_digest,
    corpus_rows,
    n_texts,
)
from attn_only_lens.neurons.statistics import NeuronStatistics
from attn_only_lens.numerics import float32_if_half, full_precision, is_count
from attn_only_lens.patching._activation_patch import metric_identity
from attn_only_lens.runs.fingerprint import fingerprint
from attn_only_lens.runs.gradients import Tape, start_graph
from attn_only_lens.runs.inputs import option_reasons, reasons_not_to_run
from attn_only_lens.runs.metrics import AnyMetric, Metric, as_metric, bind
from attn_only_lens.runs.prompts import PromptPair
from attn_only_lens.runs.recording import require_seen, run, run_blocks
from attn_only_lens.runs.sites import ALL_MEMBERS, LayerSites, Sites, neuron_heads, resolve_sites
from attn_only_lens.runs.token_texts import token_text
from attn_only_lens.storage import Document, open_folder, read_tensors, write_tensors
from attn_only_lens.storage.atomic import atomic_write

By = Literal["z", "gate", "attribution"]
Ends = Literal["both", "largest", "smallest"]
_BY: tuple[str, ...] = get_args(By)
_ENDS: dict[str, tuple[End, ...]] = {"both": ENDS, "largest": ENDS[:1], "smallest": ENDS[1:]}
_PROBLEM = "these neurons cannot be looked up in a corpus"
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


def top_examples(
    model: Any,
    names: Sites | None,
    texts: Texts,
    k: int = 20,
    by: By = "z",
    metric: AnyMetric | None = None,
    *,
    ends: Ends = "both",
    before: int = 12,
    after: int = 6,
    context: int | None = None,
    batch_size: int = 32,
    resume: str | Path | None = None,
    progress: bool | str = True,
) -> pd.DataFrame:
    """Return the places of a corpus where neurons are largest, and where they are least.

    The corpus is read once, text by text, and never held. A BOS that begins a text is no example:
    there, neurons are what they are in every text.

    Args:
        model: converted, or with exposed neuron-heads.
        names: neurons, such as "L3N7", or `patching.neuron_heads(layers)`; None for all.
        texts: a list or any iterable (of `datasets` too) of texts, of dictionaries with a "text",
            or of tokens of one text [pos]; or the path of a file with a text a line, or, if its
            name ends in .jsonl, a dictionary a line.
        k: examples of each neuron and end; fewer if the corpus has fewer tokens.
        by: "z", gate × value, what a neuron puts out; "gate", its attention to itself; or
            "attribution", z times the gradient of a metric of that text: an estimate of what
            setting z to 0 there would take from the metric.
        metric: for attributions: `patching.loss()`, or another that has a number for each text.
        ends: "largest", "smallest", or "both". In a gated MLP z has either sign.
        before: tokens of a window before the one that it is of.
        after: and after it.
        context: tokens that are run at once: longer texts are cut, and each piece begins with BOS
            if texts do. None for 128, or as many as the model takes.
        batch_size: pieces that are run at once. It changes roundings, and nothing else.
        resume: a folder to write to as results come; an interrupted call goes on from there, and a
            longer corpus after a shorter one that begins alike.
        progress: whether to show a bar; a text is its label.

    Returns:
        Rows by neuron, end and rank: `name`, `end`, `rank` from 1, `value` (what is ranked), `text`
        (its number), `at` (the position in the text); and of the window `tokens`, `values` (z),
        `gates`, `position` (of the example in it). `examples_of` makes `Example`s of them. Of
        equals, those of earlier texts and positions come first.

    Raises:
        InputError: with every reason: names that are not of whole neurons, options out of range, a
            corpus without tokens; a metric that does not fit; a folder of other results.
        CheckpointError: files in the folder `resume` are damaged.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, neurons, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> texts = [[3, 4, 113], [5, 7, 113], [3, 4, 113]]
        >>> frame = neurons.top_examples(model, ["L0N7"], texts, k=2, ends="largest",
        ...                              progress=False)
        >>> frame[["name", "rank", "text", "at"]].to_numpy().tolist()
        [['L0N7', 1, 0, 2], ['L0N7', 2, 2, 2]]
    """
    windows = before, after, context
    options = (batch_size, resume, progress)
    return _pass(model, names, texts, k, by, metric, ends, *windows, *options, False).frame()


def neuron_statistics(
    model: Any,
    names: Sites | None,
    texts: Texts,
    k: int = 20,
    by: By = "z",
    metric: AnyMetric | None = None,
    *,
    ends: Ends = "both",
    before: int = 12,
    after: int = 6,
    context: int | None = None,
    batch_size: int = 32,
    resume: str | Path | None = None,
    progress: bool | str = True,
) -> NeuronStatistics:
    """Return top examples of neurons, and histograms of z, gate and value, from one pass.

    Arguments and errors are those of `top_examples`.

    Returns:
        The statistics, which `save` and `load` keep, and `viz.neuron_page` draws.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, neurons, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> texts = [[3, 4, 113], [5, 7, 113]]
        >>> found = neurons.neuron_statistics(model, ["L0N7"], texts, k=2, progress=False)
        >>> counts, edges = found.histogram("L0N7", "gate")
        >>> int(counts.sum()), found.n_tokens
        (6, 6)
    """
    windows = before, after, context
    options = (batch_size, resume, progress)
    return _pass(model, names, texts, k, by, metric, ends, *windows, *options, True)


@full_precision()
def _pass(
    model: Any,
    names: Sites | None,
    texts: Texts,
    k: int,
    by: str,
    metric: AnyMetric | None,
    ends: str,
    before: int,
    after: int,
    context: int | None,
    batch_size: int,
    resume: str | Path | None,
    progress: bool | str,
    histograms: bool,
) -> NeuronStatistics:
    sites = resolve_sites(model, neuron_heads() if names is None else names)
    n_ctx = model.cfg.n_ctx
    context = min(128, n_ctx) if context is None else context
    reasons = _site_reasons(sites) + reasons_not_to_run(model)
    reasons += option_reasons("by", by, _BY) + option_reasons("ends", ends, tuple(_ENDS))
    counts = {
        "k": (k, 1),
        "batch_size": (batch_size, 1),
        "before": (before, 0),
        "after": (after, 0),
    }
    for option, (got, least) in counts.items():
        if not is_count(got, least):
            reasons.append(f"got {option}={got!r}; expected a whole number from {least} on")
    if not is_count(context, 2, n_ctx):
        reasons.append(f"got context={context!r}; expected 2 to {n_ctx}, as the model takes")
    if (metric is None) == (by == "attribution"):
        expected = "a metric" if by == "attribution" else "none"
        reasons.append(f"got by={by!r} and metric={metric!r}; expected {expected}")
    InputError.raise_if(reasons, _PROBLEM)
    bound = None if metric is None else as_metric(metric)
    found = _Found(model, sites, k, by, _ENDS[ends], before, after, histograms)
    settings = {
        "names": hashlib.sha256(" ".join(found.names).encode()).hexdigest(),
        "n_neurons": len(found.names),
        "numbers": [k, before, after, context],
        "by": by,
        "ends": ends,
        "histograms": histograms,
    }
    store = None
    if resume is not None:
        settings["model"] = fingerprint(model)
        settings["metric"] = "" if bound is None else f"{bound.name} {metric_identity(bound)}"
        store = _Store(resume, settings, found)
    rows = corpus_rows(model, texts, context)
    rows = rows if store is None else store.skip_seen(rows)
    label = progress if isinstance(progress, str) else None
    with tqdm(total=n_texts(texts), unit="text", desc=label, disable=not progress) as bar:
        bar.update(found.n_texts)
        for batch, some in batches(rows, batch_size, next(model.parameters()).device):
            found.add(batch, bound)
            bar.update(some[-1].text + 1 - found.n_texts)
            found.n_texts = some[-1].text + 1
            if store is not None:
                store.saw(some)
    if store is not None:
        store.write()
    if not found.n_tokens:
        raise InputError(["the corpus holds no tokens but BOS"], _PROBLEM)
    return found.result("" if bound is None else bound.name)


def _site_reasons(sites: Sequence[LayerSites]) -> list[str]:
    heads = [name for each in sites if each.kind == "attention" for name in each.names]
    members = [
        name
        for each in sites
        for name, member in zip(each.names, each.member.tolist(), strict=True)
        if member != ALL_MEMBERS
    ]
    more = "one of several heads of a neuron; expected the neuron, without the dot"
    reasons = [f"got {name}, an attention head; expected neurons" for name in heads[:1]]
    return reasons + [f"got {name}, {more}" for name in members[:1]]


class _Found:
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
        for each in sites:
            W_out = host_of(model).neurons[each.layer].W_out
            like = float32_if_half(W_out.detach()[:0, 0])
            n, width = len(each.names), before + 1 + after
            self.examples.append({end: no_examples(n, k, width, like) for end in ends})
            self.counts.append(no_counts(n, like.device) if histograms else {})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for each in self.sites for name in each.names)

    @property
    def states(self) -> Iterator[tuple[str, list[State]]]:
        """The states of all layers, by the prefix of their names."""
        for end in self.examples[0]:
            yield f"{end}.", [each[end] for each in self.examples]
        yield "", self.counts

    def add(self, batch: Batch, metric: Metric | None) -> None:
        """Run the model on a batch, and take in what its neurons are."""
        finite: list[Tensor] = []

        def take_in(number: int, of_layer: dict[str, Tensor]) -> None:
            z, gate = of_layer["z"], of_layer["gate"]
            here = _on(batch, z.device)
            counted = {name: x[:, here.counted] for name, x in of_layer.items()}
            finite.append(torch.stack([x.isfinite().all() for x in counted.values()]).all())
            for end, state in self.examples[number].items():
                add_examples(state, end, of_layer[self.by], z, gate, here, self.before)
            if self.counts[number]:
                add_counts(self.counts[number], *(counted[name] for name in QUANTITIES))

        if metric is None:
            _run_by_layer(self.model, self.sites, batch, take_in)
        else:
            _run_by_gradient(self.model, self.sites, batch, metric, take_in)
        if not all(bool(each) for each in finite):
            texts = batch.text.tolist()
            raise InputError(
                [f"activations are not finite in one of the texts {texts[0]} to {texts[-1]}"],
                _PROBLEM,
            )
        self.n_tokens += len(batch.counted)

    def tensors(self) -> State:
        """All states, neurons of all layers together, on the CPU."""
        return {
            f"{prefix}{name}": torch.cat([each[name].cpu() for each in states])
            for prefix, states in self.states
            for name in states[0]
        }

    def restore(self, tensors: State) -> None:
        """Take the states that `tensors` gave."""
        for prefix, states in self.states:
            for name in states[0]:
                whole, first = tensors[f"{prefix}{name}"], 0
                for each in states:
                    n = len(each[name])
                    each[name] = whole[first : first + n].to(each[name])
                    first += n

    def result(self, metric: str) -> NeuronStatistics:
        tensors = self.tensors()
        examples = {name: x for name, x in tensors.items() if name.startswith(ENDS)}
        counts = {name: x for name, x in tensors.items() if name not in examples}
        used = [x.unique() for name, x in examples.items() if name.endswith(".tokens")]
        ids = torch.cat(used).unique().tolist()
        vocabulary = {token: token_text(self.model, token) for token in ids if token >= 0}
        about = str(self.model.cfg.model_name), self.by, metric, self.n_texts, self.n_tokens
        return NeuronStatistics(self.names, *about, vocabulary, examples, counts)


_TakeIn = Callable[[int, dict[str, Tensor]], None]
_POINTS = ("v", "pattern", "z")


def _run_by_layer(model: Any, sites: Sequence[LayerSites], batch: Batch, take_in: _TakeIn) -> None:
    """Run a model up to its last block, and give each layer's activations to `take_in`."""
    ran: set[str] = set()

    def look(number: int) -> Callable[[str, Tensor], None]:
        seen: dict[str, Tensor] = {}

        def keep(point: str, value: Tensor) -> None:
            seen[point] = value
            if point == "z":  # the last
                ran.add(str(sites[number].layer))
                take_in(number, _of_neurons(model, sites[number], seen))
                seen.clear()

        return keep

    with torch.no_grad(), _looking(model, sites, [look(i) for i in range(len(sites))]):
        run_blocks(model, batch.tokens, batch.mask)
    require_seen({str(each.layer): f"neurons of layer {each.layer}" for each in sites}, ran)


def _run_by_gradient(
    model: Any, sites: Sequence[LayerSites], batch: Batch, metric: Metric, take_in: _TakeIn
) -> None:
    """Run a model and the gradient of a metric, and give all layers' activations to `take_in`."""
    seen: list[dict[str, Tensor]] = [{} for _ in sites]
    nodes = [host_of(model).hook_name(each.layer, "neuron", "z") for each in sites]
    pair = PromptPair(batch.tokens, batch.tokens, batch.mask)
    tape = Tape(nodes)
    with torch.enable_grad(), _looking(model, sites, [x.__setitem__ for x in seen]):
        with start_graph(model):
            logits = run(model, batch.tokens, batch.mask, tape.hooks)
        bound = bind(metric, model, pair, logits.detach())
        values = bound.of_prompts(bound.select(logits)[None])[0]
        if len(values) != len(batch.tokens):
            raise InputError(
                [
                    f"{bound.name} has one number for {len(batch.tokens)} texts; expected one of "
                    "each: a tensor [batch]. Or take batch_size=1"
                ],
                _PROBLEM,
            )
        # Each is a function of its own text alone: the gradient of their sum has those of all.
        gradients = tape.gradients(values.sum())
    for number, (each, node) in enumerate(zip(sites, nodes, strict=True)):
        z = seen[number]["z"]
        seen[number]["attribution"] = gradients[node].detach() * z
        take_in(number, _of_neurons(model, each, seen[number]))


@contextmanager
def _looking(
    model: Any, sites: Sequence[LayerSites], keep: Sequence[Callable[[str, Tensor], None]]
) -> Iterator[None]:
    """Show the values, patterns and outputs of each layer's neuron-heads as they are computed."""
    with ExitStack() as stack:
        for each, of_layer in zip(sites, keep, strict=True):
            heads = host_of(model).neurons[each.layer]
            for point in _POINTS:

                def look(
                    module: Any, args: Any, value: Tensor, at: Any = of_layer, of: str = point
                ) -> None:
                    at(of, value.detach().clone())

                hook = getattr(heads, f"hook_{point}").register_forward_hook(look)
                stack.callback(hook.remove)
        yield


def _of_neurons(
    model: Any, sites: LayerSites, seen: dict[str, Tensor]
) -> dict[str, Float[Tensor, "neuron place"]]:
    """Return z, gate and value of neurons, and attributions, of all tokens row after row."""
    heads = host_of(model).neurons[sites.layer]
    of_heads = {
        "z": seen["z"].squeeze(-1),
        "gate": seen["pattern"][..., SELF].transpose(1, 2),
        "value": seen["v"].squeeze(-1),
    }
    if "attribution" in seen:
        of_heads["attribution"] = seen["attribution"].squeeze(-1)
    index, each = sites.index.to(seen["z"].device), heads.heads_per_neuron
    found = {}
    for name, x in of_heads.items():
        if name in ("z", "gate"):
            x = heads.neuron_outputs(x)
        elif each > 1:  # one value for all heads of a neuron; an attribution is their sum
            x = x.unflatten(-1, (-1, each))
            x = x[..., 0] if name == "value" else x.sum(-1)
        found[name] = float32_if_half(x.flatten(0, 1)[:, index].T.contiguous())
    return found


def _on(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on another device: layers may be on several."""
    if batch.tokens.device == device:
        return batch
    return Batch(*(None if x is None else x.to(device) for x in vars(batch).values()))  # type: ignore[arg-type]


class _Store:
    """A folder that keeps what was found so far."""

    def __init__(self, folder: str | Path, settings: dict[str, Any], found: _Found) -> None:
        self._path, self._found = open_folder(folder) / _FILE, found
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._digest, self._rows, self._written = "", 0, monotonic()
        if not self._path.exists():
            return
        tensors, said = read_tensors(self._path, _SO_FAR)
        theirs = said["settings"]
        keys = sorted(self._settings.keys() | theirs.keys())
        differ = [
            f"{key}: got {self._settings.get(key)}; the folder has {theirs.get(key)}"
            for key in keys
            if self._settings.get(key) != theirs.get(key)
        ]
        InputError.raise_if(differ, f"{self._path.parent} holds other statistics; use a new folder")
        found.restore(tensors)
        found.n_tokens, found.n_texts = said["tokens_seen"], said["texts"]
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
        found = self._found
        said = {"settings": self._settings, "digest": self._digest, "rows": self._rows}
        said |= {"texts": found.n_texts, "tokens_seen": found.n_tokens}
        with atomic_write(self._path) as new:
            write_tensors(new, found.tensors(), _SO_FAR, **said)
        self._written = monotonic()
