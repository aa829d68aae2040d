"""What each tool of the package says about persistent vectors, next to direct computation.

A model with all-attention layers is loaded with memory tokens, and with some of its persistent
vectors as heads (`all_attention_models.loaded`). `direct` computes the same model without this
package and without TransformerLens. Each check compares numbers of a tool with `direct`, and also
with a *control*: what `direct` says about another vector, another part or no edit. The tool's
numbers must agree with the first and not with the second.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from analyses.studies.all_attention_models import (
    AllAttentionModel,
    Direct,
    Edit,
    Split,
    direct,
    loaded,
    set_entry,
    with_memory,
)
from attn_only_lens import circuits, expansion, expose_neuron_heads, grow, load, neurons, save
from attn_only_lens import patching as p

Row: TypeAlias = dict[str, Any]


def compared(
    part: str, claim: str, control: str, actual: Any, expected: Any, broken: Any, **columns: str
) -> Row:
    """Return a row: how far two computations differ, and how far the control differs.

    Differences are relative to the largest expected number; those of tools, to the largest number
    of direct computation or of the control, because direct computation may be 0.
    """
    actual, expected, broken = (
        torch.as_tensor(x, dtype=torch.double).flatten() for x in (actual, expected, broken)
    )
    size = expected.abs().max()
    if part == "tools":
        size = torch.maximum(size, broken.abs().max())
    difference, of_control = ((actual - x).abs().max() / size for x in (expected, broken))
    row = {"part": part, **columns, "claim": claim, "difference": difference.item()}
    return row | {"control": control, "of control": of_control.item()}


def tool(name: str, claim: str, control: str, actual: Any, expected: Any, broken: Any) -> Row:
    """Return the row of a tool: its numbers, those of direct computation, and of the control."""
    return compared("tools", claim, control, actual, expected, broken, tool=name)


@dataclass(frozen=True)
class Reading:
    """A model in two forms, and two prompts of one length.

    Attributes:
        model: the weights of the all-attention model.
        split: which persistent vectors are heads of the loaded model.
        clean: the tokens of a prompt, [pos].
        corrupted: the tokens of the other.
        answers: the right and the wrong answer to `clean`.
    """

    model: AllAttentionModel
    split: Split
    clean: Tensor
    corrupted: Tensor
    answers: tuple[int, int]

    @cached_property
    def host(self) -> Any:
        """The loaded model, with exposed (placeholder) neurons."""
        return expose_neuron_heads(loaded(self.model, split=self.split)).model

    def prompt(self, text: Tensor) -> Tensor:
        """Return a prompt with the memory tokens in front, [1, N + pos]."""
        return with_memory(text[None], self.model.n_vectors, len(self.model.W_E))

    @cached_property
    def prompts(self) -> tuple[Tensor, Tensor]:
        """Both prompts."""
        return self.prompt(self.clean), self.prompt(self.corrupted)

    @property
    def last(self) -> int:
        """The last position of the text, without memory tokens."""
        return len(self.clean) - 1

    @property
    def place(self) -> int:
        """The same position in the loaded model."""
        return self.model.n_vectors + self.last

    @property
    def metric(self) -> Any:
        """The logit difference of the answers."""
        return p.logit_diff(*self.answers)

    def value(self, run: Direct) -> Tensor:
        """Return the metric of a direct run."""
        right, wrong = self.answers
        return run.logits[-1, right] - run.logits[-1, wrong]

    @cached_property
    def runs(self) -> tuple[Direct, Direct]:
        """The direct runs of the clean and of the corrupted prompt."""
        with torch.no_grad():
            return direct(self.model, self.clean), direct(self.model, self.corrupted)

    @property
    def names(self) -> list[str]:
        """The names of the split vectors' heads, which follow the ordinary heads of a layer."""
        layers = [layer for layer, _, _ in self.split]
        ordinary = len(self.model.layers[0].W_Q)
        return [f"L{x}H{ordinary + layers[:i].count(x)}" for i, x in enumerate(layers)]

    def changed(self, text: int, index: int, part: str, value: Any) -> float:
        """Return what an edit of a split vector at the last position adds to the metric."""
        layer, head, vector = self.split[index]
        edit = set_entry(layer, part, (head, self.last, vector), value)
        with torch.no_grad():
            run = direct(self.model, (self.clean, self.corrupted)[text], edit)
        return (self.value(run) - self.value(self.runs[text])).item()

    def weight(self, run: Direct, index: int) -> Tensor:
        """Return p_n of a split vector at the last position."""
        layer, head, vector = self.split[index]
        return run.weights[layer][head, -1, vector]

    def write(self, index: int) -> Tensor:
        """Return value_n W_O of a split vector, with mean 0."""
        layer, head, vector = self.split[index]
        of = self.model.layers[layer]
        written = of.value[head, vector] @ of.W_O[head]
        return written - written.mean()

    def scale(self, stream: Tensor) -> Tensor:
        """Return the number by which LayerNorm divides a row of the stream."""
        return ((stream - stream.mean()).square().mean() + self.model.eps).sqrt()

    def of_layer(self, layer: int) -> list[int]:
        """Return the indices of a layer's split vectors."""
        return [i for i, (number, _, _) in enumerate(self.split) if number == layer]


def effects_of_all(model: AllAttentionModel, text: Tensor, answers: tuple[int, int]) -> Tensor:
    """Return gradient · p_n of every vector at the last position, [layer, head, vector]."""
    shares: dict[int, Tensor] = {}

    def edit(number: int, part: str, x: Tensor) -> Tensor:
        if part != "weights":
            return x
        shares[number] = torch.ones_like(x, requires_grad=True)
        return x * shares[number]

    logits = direct(model, text, edit).logits[-1]
    effects = torch.autograd.grad(logits[answers[0]] - logits[answers[1]], list(shares.values()))
    return torch.stack([effect[:, -1, : model.n_vectors] for effect in effects])


def strongest(
    model: AllAttentionModel, clean: Tensor, answers: tuple[int, int], per_layer: int
) -> list[tuple[int, int, int]]:
    """Return the vectors of each layer with the largest |gradient · p_n| at the last position."""
    effects = effects_of_all(model, clean, answers).abs().flatten(1)
    return [
        (layer, *divmod(index, model.n_vectors))
        for layer, of_layer in enumerate(effects)
        for index in of_layer.topk(per_layer).indices.tolist()
    ]


def every_vector(r: Reading) -> Iterator[Row]:
    """Yield how far the model with all vectors as heads, in float32, is from `direct`."""
    effects = effects_of_all(r.model, r.clean, r.answers)
    every = [tuple(index) for index in torch.ones_like(effects).nonzero().tolist()]
    host = expose_neuron_heads(loaded(r.model, split=every, dtype=torch.float32)).model
    names, expected, N = replace(r, split=every).names, r.runs[0].logits, r.model.n_vectors
    with torch.no_grad():
        logits = host(r.prompts[0])[0, N:]
    how = {"direction": "zero", "method": "gradient", "budget": 0, "progress": False}
    sweep = p.attribution(host, r.prompts[0], None, r.metric, sites=names, positions=-1, **how)
    values = sweep.frame.set_index("name")["value"][names].tolist()
    changes = torch.tensor(values).double() - r.value(r.runs[0])
    for claim, control, actual, right, wrong in (
        ("logits", "the next token", logits, expected, expected.roll(1, 0)),
        ("first-order effects", "the next vector", changes, -effects, -effects.roll(1, 2)),
    ):
        yield compared("every", claim, control, actual.flatten(), right, wrong)


def checks(r: Reading) -> Iterator[Row]:
    """Yield the checks of all tools that can read persistent vectors."""
    for check in (_in_a_run, _patches, _path, _graphs, _weights, _files):
        yield from check(r)


def shifted(numbers: Sequence[Any]) -> list[Any]:
    """Return the numbers of other vectors: each number moves to the next vector."""
    return [*numbers[1:], numbers[0]]


def _in_a_run(r: Reading) -> Iterator[Row]:
    N, clean = r.model.n_vectors, r.runs[0]
    with torch.no_grad():
        logits, cache = r.host.run_with_cache(r.prompts[0])
    layers = [replace(x, key=x.key[:, :0], value=x.value[:, :0]) for x in r.model.layers]
    none = direct(replace(r.model, layers=tuple(layers)), r.clean).logits
    what = "logits of all tokens", "no persistent vectors"
    yield tool("forward pass", *what, logits[0, N:], clean.logits, none)
    heads = range(len(layers[0].W_Q))
    patterns = [cache[f"blocks.{i}.attn.hook_pattern"][0, heads, N:] for i in range(len(layers))]
    expected = torch.stack(clean.weights)
    what = "patterns, [head, text, vector and text]", "the next head"
    yield tool("`run_with_cache`", *what, torch.stack(patterns), expected, expected.roll(1, 1))
    shares = []
    for name, (layer, head, vector) in zip(r.names, r.split, strict=True):
        z = cache[f"blocks.{layer}.attn.hook_z"][0, r.place, int(name.split("H")[1])]
        value = r.model.layers[layer].value[head, vector]
        shares.append((z @ value / value.square().sum()).item())
    wanted = [r.weight(clean, i) for i in range(len(shares))]
    what = "z of a vector's head, divided by its value: p_n", "the next vector"
    yield tool("`run_with_cache`", *what, shares, wanted, shifted(wanted))


def _patches(r: Reading) -> Iterator[Row]:
    clean, corrupted = r.runs
    every = range(len(r.split))
    how = {"sites": r.names, "positions": -1, "progress": False}

    def effects(sweep: Any, base: Direct) -> list[float]:
        values = sweep.frame.set_index("name")["value"][r.names]
        return (values - r.value(base).item()).tolist()

    sweep = p.activation_patch(r.host, r.prompts[0], None, r.metric, direction="zero", **how)
    zeroed = [r.changed(0, i, "weights", 0.0) for i in every]
    deleted = [r.changed(0, i, "scores", -torch.inf) for i in every]
    what = "effect of p_n = 0", "n is deleted from the softmax"
    yield tool("`activation_patch`, zero", *what, effects(sweep, clean), zeroed, deleted)
    restored = [r.changed(1, i, "weights", r.weight(clean, i)) for i in every]
    none = [0.0] * len(restored)
    for part, claim, control, right, wrong in (
        ("z", "effect of the clean p_n in the corrupted run", "none", restored, none),
        ("pattern", "the same numbers", "none", restored, none),
        ("value", "none, because value_n is constant", "the effect of p_n", none, restored),
    ):
        sweep = p.activation_patch(r.host, *r.prompts, r.metric, part=part, **how)
        patched = effects(sweep, corrupted)
        yield tool(f"`activation_patch`, {part}", claim, control, patched, right, wrong)
    sweep = p.attribution(r.host, *r.prompts, r.metric, method="gradient", budget=0, **how)
    moved = [(r.weight(clean, i) - r.weight(corrupted, i)).item() for i in every]
    first = [_slope(r, i) * moved[i] for i in every]
    what = "first-order estimate of the effect", "the exact effect"
    yield tool("`attribution`, gradient", *what, effects(sweep, corrupted), first, restored)

    def no_split(number: int, part: str, x: Tensor) -> Tensor:
        for layer, head, vector in r.split:
            if (number, part) == (layer, "weights"):
                x[head, r.last, vector] = 0
        return x

    with torch.no_grad(), p.ablated(r.host, r.names, positions=[r.place]):
        ablated = r.host(r.prompts[0])[0, -1]
        wanted = direct(r.model, r.clean, no_split).logits[-1]
    what = "logits with all split vectors at p_n = 0", "not ablated"
    yield tool("`ablated`", *what, ablated, wanted, clean.logits[-1])


def _slope(r: Reading, index: int) -> float:
    """Return the derivative of the metric with respect to p_n, in the corrupted run."""
    layer, head, vector = r.split[index]
    weight = r.weight(r.runs[1], index).clone().requires_grad_()
    edit = set_entry(layer, "weights", (head, r.last, vector), weight)
    return torch.autograd.grad(r.value(direct(r.model, r.corrupted, edit)), weight)[0].item()


def _path(r: Reading) -> Iterator[Row]:
    """Yield the check of paths from a vector of the first layer to the value of a later head."""
    (clean, corrupted), layer = r.runs, r.model.layers[1]
    how = {"part": "value", "positions": -1, "progress": False}
    senders, receivers = r.of_layer(0), ["L1H1"]
    names = [r.names[i] for i in senders]
    paths = p.path_patch(r.host, *r.prompts, r.metric, senders=names, receivers=receivers, **how)
    effects = paths.frame.set_index("sender")["value"][names] - r.value(corrupted).item()
    wanted = []
    for index in senders:
        change = r.weight(clean, index) - r.weight(corrupted, index)
        written = change * r.write(index) / r.scale(corrupted.streams[1][-1])
        edit = _added(1, (1, -1), (written * layer.gain) @ layer.W_V[1])
        with torch.no_grad():
            patched = r.value(direct(r.model, r.corrupted, edit))
        wanted.append((patched - r.value(corrupted)).item())
    on_all = [r.changed(1, i, "weights", r.weight(clean, i)) for i in senders]
    what = "effect of vector → value of L1H1", "effect of the vector on all paths"
    yield tool("`path_patch`", *what, effects.tolist(), wanted, on_all)


def _added(layer: int, index: tuple[int, int], more: Tensor) -> Edit:
    """Return an edit that adds a vector to one value of a layer."""

    def edit(number: int, part: str, x: Tensor) -> Tensor:
        if (number, part) == (layer, "values"):
            x[index] += more
        return x

    return edit


def _graphs(r: Reading) -> Iterator[Row]:
    clean, (right, wrong) = r.runs[0], r.answers
    last = r.of_layer(len(r.model.layers) - 1)
    reads = r.model.gain * (r.model.W_U[:, right] - r.model.W_U[:, wrong])
    reads = reads / r.scale(clean.streams[-1][-1])
    wanted = [r.weight(clean, i) * r.write(i) @ reads for i in last]
    sites = [f"{name}@{r.place}" for name in r.names]
    graph = circuits.attribution_graph(r.host, r.prompts[0], r.metric, sites=sites)
    edges = graph.edges.query("target == 'metric' and kind == 'value'")
    weights = edges.set_index("source")["weight"][[sites[i] for i in last]].tolist()
    what = "edge vector → metric is p_n value_n W_O · metric", "the next vector"
    yield tool("`attribution_graph`, one run", *what, weights, wanted, shifted(wanted))
    how = {"corrupted": r.prompts[1], "top": 20}
    inflow = circuits.attribution_graph(r.host, r.prompts[0], r.metric, **how).inflow()["metric"]
    whole, other = (r.value(run).item() for run in r.runs)
    what = "Σ edges into the metric", "the metric of one run"
    yield tool("`attribution_graph`, difference", *what, [inflow], [whole - other], [whole])
    effects = circuits.path_expansion(r.host, r.prompts[0]).effects(r.metric)["effect"]
    total = effects.sum()
    what = "Σ over all numbers of hops", "without paths of one hop"
    yield tool("`path_expansion`", *what, [total], [whole], [total - effects[1]])
    shares, scores = [], []
    for name, (layer, head, vector) in zip(r.names, r.split, strict=True):
        frame = circuits.score_sources(r.host, r.prompts[0], name, query=r.place, key=vector)
        shares.append(frame["share"].sum())
        scores.append(clean.scores[layer][head, -1, vector])
    what = "Σ shares is a_n", "the next vector"
    yield tool("`score_sources`", *what, shares, scores, shifted(scores))
    circuit = circuits.discover(r.host, *r.prompts, r.metric)
    checked = circuits.evaluate(r.host, circuit, *r.prompts, r.metric)
    what = "metric of the whole model", "everything ablated"
    yield tool("`discover`, `evaluate`", *what, [checked.whole], [whole], [checked.nothing])


def _weights(r: Reading) -> Iterator[Row]:
    (d_vocab, width), second = r.model.W_E.shape, r.model.layers[1]
    rows, logits = [], []
    for index, (_, _, vector) in enumerate(r.split):
        rows.append(circuits.ov_circuit(r.host, r.names[index]).matrix.AB[d_vocab + vector])
        written = (r.write(index) * r.model.gain) @ r.model.W_U
        logits.append(written - written.mean())
    what = "row of the memory token: logits of value_n W_O, up to a factor", "the next vector"
    yield tool("`ov_circuit`", *what, _units(rows), _units(logits), _units(shifted(logits)))
    rows, formula = [], []
    for index in r.of_layer(0):
        matrix = circuits.virtual_weights(r.host, r.names[index], "L1H1", "v").AB
        rows.append(matrix[width + r.split[index][2], :width])
        moved = (r.write(index) * second.gain) @ second.W_V[1] @ second.W_O[1]
        formula.append(moved - moved.mean())
    what = "vector → W_OV of L1H1, up to a factor", "the next vector"
    yield tool("`virtual_weights`", *what, _units(rows), _units(formula), _units(shifted(formula)))


def _units(rows: Sequence[Tensor]) -> Tensor:
    """Return rows of length 1."""
    return torch.nn.functional.normalize(torch.stack(list(rows)), dim=1)


def _files(r: Reading) -> Iterator[Row]:
    N, (expected, other) = r.model.n_vectors, (run.logits for run in r.runs)
    (prompt, corrupted), context = r.prompts, r.host.cfg.n_ctx  # by default, texts are cut
    texts = [prompt[0].tolist(), corrupted[0].tolist()]
    how = {"k": 2 * len(prompt[0]), "context": context, "progress": False}  # k: all tokens
    frame = neurons.corpus_statistics(r.host, r.names, texts, **how).heads.frame()
    values = frame.query("at >= @N").groupby("name")["value"].max()  # memory rows are no text
    norms = [
        max(run.weights[layer][head, :, vector].max() for run in r.runs) * r.write(index).norm()
        for index, (layer, head, vector) in enumerate(r.split)
    ]
    what = "largest length of p_n value_n W_O over the texts", "the next vector"
    yield tool("`corpus_statistics`", *what, values[r.names].tolist(), norms, shifted(norms))
    with tempfile.TemporaryDirectory() as folder:
        models = {"`save`, `load`": load(save(r.host, Path(folder) / "model"), dtype="float64")}
    for change in (expansion.WidenStream(3), expansion.AddHeads(1)):
        grown = grow(loaded(r.model, split=r.split), change).model
        models[f"`grow`, {type(change).__name__}"] = grown
    for name, model in models.items():
        with torch.no_grad():
            logits = model(prompt)[0, N:]
        yield tool(name, "logits", "the other prompt", logits, expected, other)
