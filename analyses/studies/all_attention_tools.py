"""What each tool of the package says about persistent vectors, next to direct computation.

A model with all-attention layers is loaded with memory tokens, and with some of its persistent
vectors as heads (`all_attention_models.loaded`). `direct` computes the same model without this
package and without TransformerLens: one text, one softmax over text and vectors, with edits. Each
check compares numbers of a tool with `direct`, and also with a *control*: what `direct` says about
another vector, another part or no edit. The tool's numbers must agree with the first and not with
the second.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from analyses.studies.all_attention_models import (
    AllAttentionModel,
    Split,
    loaded,
    normalised,
    with_memory,
)
from attn_only_lens import circuits, expansion, expose_neuron_heads, grow, load, neurons, save, viz
from attn_only_lens import patching as p
from attn_only_lens.errors import AttnOnlyLensError

Edit = Callable[[int, str, Tensor], Tensor]


@dataclass(frozen=True)
class Direct:
    """A run of a model with persistent vectors.

    Attributes:
        logits: [pos, d_vocab].
        scores: a_n and the scores of tokens, by layer, [head, pos, vector + pos].
        weights: the pattern by layer; its first N columns are p_n.
        streams: the stream before each layer, and the last one.
    """

    logits: Tensor
    scores: list[Tensor]
    weights: list[Tensor]
    streams: list[Tensor]


def direct(model: AllAttentionModel, text: Tensor, edit: Edit = lambda layer, part, x: x) -> Direct:
    """Run a model on one text, [pos].

    Args:
        model: the model's weights.
        text: the tokens.
        edit: returns the edited "scores", "weights" [head, pos, vector + pos] or "values"
            [head, vector + pos, d_head] of a layer.
    """
    pos, N = len(text), model.n_vectors
    x = model.W_E[text] + model.W_pos[:pos]
    seen = torch.ones(pos, N + pos, dtype=torch.bool).tril(N)
    run = Direct(x, [], [], [x])
    for number, layer in enumerate(model.layers):
        u = normalised(x, model.norm, model.eps) * layer.gain + layer.shift
        q, k, v = (
            u @ getattr(layer, f"W_{of}") + getattr(layer, f"b_{of}")[:, None] for of in "QKV"
        )
        k, values = torch.cat([layer.key, k], dim=1), torch.cat([layer.value, v], dim=1)
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        scores = edit(number, "scores", scores)
        weights = edit(number, "weights", scores.softmax(-1))
        values = edit(number, "values", values)
        x = x + (weights @ values @ layer.W_O).sum(0) + layer.b_O
        run.scores.append(scores.detach())
        run.weights.append(weights.detach())
        run.streams.append(x)
    last = normalised(x, model.norm, model.eps) * model.gain + model.shift
    return replace(run, logits=last @ model.W_U)


def set_entry(layer: int, part: str, index: tuple[int, ...], value: Any) -> Edit:
    """Return an edit that sets one entry of a part of a layer to a number or a vector."""

    def edit(number: int, name: str, x: Tensor) -> Tensor:
        if (number, name) != (layer, part):
            return x
        x = x.clone()
        x[index] = value
        return x

    return edit


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

    def value(self, run: Direct) -> float:
        """Return the metric of a direct run."""
        right, wrong = self.answers
        return float(run.logits[-1, right] - run.logits[-1, wrong])

    @cached_property
    def runs(self) -> tuple[Direct, Direct]:
        """The direct runs of the clean and of the corrupted prompt."""
        return direct(self.model, self.clean), direct(self.model, self.corrupted)

    def name(self, index: int) -> str:
        """Return the name of a split vector's head."""
        layer = self.split[index][0]
        before = sum(number == layer for number, _, _ in self.split[:index])
        return f"L{layer}H{len(self.model.layers[0].W_Q) + before}"

    @property
    def names(self) -> list[str]:
        """The names of all split vectors' heads."""
        return [self.name(index) for index in range(len(self.split))]

    def edited(self, text: Tensor, index: int, part: str, value: Any) -> float:
        """Return the metric after an edit of a split vector at the last position."""
        layer, head, vector = self.split[index]
        entry = (head, vector) if part == "values" else (head, self.last, vector)
        return self.value(direct(self.model, text, set_entry(layer, part, entry, value)))


@dataclass(frozen=True)
class Check:
    """A tool's numbers, next to those of direct computation, and next to those of the control."""

    tool: str
    what: str
    of_tool: Sequence[float]
    of_direct: Sequence[float]
    of_control: Sequence[float]

    def row(self) -> dict[str, Any]:
        """Return the largest differences, relative to the largest number of direct or control."""
        tool, right, wrong = (
            torch.as_tensor(x, dtype=torch.double).flatten()
            for x in (self.of_tool, self.of_direct, self.of_control)
        )
        size = torch.maximum(right.abs().max(), wrong.abs().max())
        return {
            "tool": self.tool,
            "compared": self.what,
            "difference": ((tool - right).abs().max() / size).item(),
            "control": ((tool - wrong).abs().max() / size).item(),
        }


def effects_of_all(model: AllAttentionModel, text: Tensor, answers: tuple[int, int]) -> Tensor:
    """Return gradient · p_n of every vector at the last position, [layer, head, vector]."""
    shares: dict[int, Tensor] = {}

    def edit(number: int, part: str, x: Tensor) -> Tensor:
        if part != "weights":
            return x
        shares[number] = torch.ones_like(x, requires_grad=True)
        return x * shares[number]

    run = direct(model, text, edit)
    right, wrong = answers
    effects = torch.autograd.grad(
        run.logits[-1, right] - run.logits[-1, wrong], list(shares.values())
    )
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


def every_vector(r: Reading) -> pd.DataFrame:
    """Return how far the model with all vectors as heads, in float32, is from `direct`."""
    effects = effects_of_all(r.model, r.clean, r.answers)
    every = [tuple(index) for index in torch.ones_like(effects).nonzero().tolist()]
    host = expose_neuron_heads(loaded(r.model, split=every, dtype=torch.float32)).model
    names = replace(r, split=every).names
    prompt, logits = r.prompt(r.clean), r.runs[0].logits
    with torch.no_grad():
        actual = host(prompt)[0, r.model.n_vectors :]
    sweep = p.attribution(
        *(host, prompt, None, r.metric),
        sites=names,
        positions=-1,
        direction="zero",
        method="gradient",
        budget=0,
        progress=False,
    )
    changes = sweep.frame.set_index("name")["value"][names].to_numpy() - r.value(r.runs[0])
    first = -effects.flatten()
    error = (torch.as_tensor(changes) - first).abs().max() / first.abs().max()
    return pd.DataFrame(
        {
            "heads a layer": [host.cfg.n_heads],
            "logits": [((actual - logits).abs().max() / logits.abs().max()).item()],
            "effects": [error.item()],
        }
    )


def shifted(numbers: Sequence[float]) -> list[float]:
    """Return the numbers of other vectors: each number moves to the next vector."""
    return [*numbers[1:], numbers[0]]


def less(numbers: Sequence[float], base: float) -> list[float]:
    """Return by how much an edit changed the metric."""
    return [number - base for number in numbers]


def checks(r: Reading) -> Iterator[Check]:
    """Yield the checks of all tools that can read persistent vectors."""
    yield from _in_a_run(r)
    yield from _patches(r)
    yield from _graphs(r)
    yield from _weights(r)
    yield from _files(r)


def _in_a_run(r: Reading) -> Iterator[Check]:
    N, clean = r.model.n_vectors, r.runs[0]
    with torch.no_grad():
        logits, cache = r.host.run_with_cache(r.prompt(r.clean))
        logits = logits[0, N:]
    plain = replace(r.model, layers=tuple(_without(x) for x in r.model.layers))
    yield Check(
        "forward pass",
        "logits of all tokens; control: no persistent vectors",
        logits.flatten(),
        clean.logits.detach().flatten(),
        direct(plain, r.clean).logits.flatten(),
    )
    ordinary = len(r.model.layers[0].W_Q)
    patterns = [
        cache[f"blocks.{i}.attn.hook_pattern"][0, :ordinary, N:] for i in range(len(plain.layers))
    ]
    yield Check(
        "`run_with_cache`",
        "patterns, [head, text, vector and text]; control: the next head",
        torch.stack(patterns).flatten(),
        torch.stack(clean.weights).flatten(),
        torch.stack(clean.weights).roll(1, 1).flatten(),
    )
    of_split, wanted = [], []
    for index, (layer, head, vector) in enumerate(r.split):
        z = cache[f"blocks.{layer}.attn.hook_z"][0, r.place, int(r.name(index).split("H")[1])]
        value = r.model.layers[layer].value[head, vector]
        of_split.append((z @ value / value.square().sum()).item())
        wanted.append(clean.weights[layer][head, -1, vector].item())
    yield Check(
        "`run_with_cache`",
        "z of a vector's head, divided by its value: p_n; control: the next vector",
        of_split,
        wanted,
        shifted(wanted),
    )


def _without(layer: Any) -> Any:
    return replace(layer, key=layer.key[:, :0], value=layer.value[:, :0])


def _patches(r: Reading) -> Iterator[Check]:
    clean, corrupted, prompts = *r.runs, (r.prompt(r.clean), r.prompt(r.corrupted))
    every = range(len(r.split))
    common = {"sites": r.names, "positions": -1, "progress": False}

    def swept(sweep: Any) -> list[float]:
        return sweep.frame.set_index("name")["value"][r.names].tolist()

    def weight(run: Direct, index: int) -> Tensor:
        layer, head, vector = r.split[index]
        return run.weights[layer][head, -1, vector]

    zeroed = [r.edited(r.clean, i, "weights", 0.0) for i in every]
    deleted = [r.edited(r.clean, i, "scores", -torch.inf) for i in every]
    sweep = p.activation_patch(r.host, prompts[0], None, r.metric, direction="zero", **common)
    yield Check(
        "`activation_patch`, zero",
        "effect of p_n = 0; control: n is deleted from the softmax",
        less(swept(sweep), r.value(clean)),
        less(zeroed, r.value(clean)),
        less(deleted, r.value(clean)),
    )
    base = r.value(corrupted)
    restored = less([r.edited(r.corrupted, i, "weights", weight(clean, i)) for i in every], base)
    none = [0.0] * len(restored)
    for part, compared, right, wrong in (
        ("z", "effect of the clean p_n in the corrupted run; control: none", restored, none),
        ("pattern", "the same numbers; control: none", restored, none),
        ("value", "none, because value_n is constant; control: the effect of p_n", none, restored),
    ):
        sweep = p.activation_patch(r.host, *prompts, r.metric, part=part, **common)
        yield Check(f"`activation_patch`, {part}", compared, less(swept(sweep), base), right, wrong)
    estimates = p.attribution(r.host, *prompts, r.metric, method="gradient", budget=0, **common)
    slopes = [_slope(r, i) for i in every]
    first = [slopes[i] * (weight(clean, i) - weight(corrupted, i)).item() for i in every]
    yield Check(
        "`attribution`, gradient",
        "first-order estimate of the effect; control: the exact effect",
        less(swept(estimates), base),
        first,
        restored,
    )
    with torch.no_grad(), p.ablated(r.host, r.names, positions=[r.place]):
        ablated = r.host(prompts[0])[0, -1]
    gone = {number: [(h, v) for at_, h, v in r.split if at_ == number] for number, _, _ in r.split}
    yield Check(
        "`ablated`",
        "logits with all split vectors at p_n = 0; control: not ablated",
        ablated,
        direct(r.model, r.clean, _all_zero(gone, r.last)).logits[-1].detach(),
        clean.logits[-1].detach(),
    )
    yield _path(r, prompts)


def _all_zero(gone: dict[int, list[tuple[int, int]]], last: int) -> Edit:
    def edit(number: int, part: str, x: Tensor) -> Tensor:
        if part != "weights" or number not in gone:
            return x
        x = x.clone()
        for head, vector in gone[number]:
            x[head, last, vector] = 0
        return x

    return edit


def _slope(r: Reading, index: int) -> float:
    """Return the derivative of the metric with respect to p_n, in the corrupted run."""
    layer, head, vector = r.split[index]
    weight = r.runs[1].weights[layer][head, -1, vector].clone().requires_grad_()
    run = direct(r.model, r.corrupted, set_entry(layer, "weights", (head, r.last, vector), weight))
    right, wrong = r.answers
    return torch.autograd.grad(run.logits[-1, right] - run.logits[-1, wrong], weight)[0].item()


def _path(r: Reading, prompts: tuple[Tensor, Tensor]) -> Check:
    """Return the check of paths from a vector of the first layer to the value of a later head."""
    senders = [i for i, (layer, _, _) in enumerate(r.split) if layer == 0]
    paths = p.path_patch(
        r.host,
        *prompts,
        r.metric,
        senders=[r.name(i) for i in senders],
        receivers=["L1H1"],
        part="value",
        positions=-1,
        progress=False,
    )
    clean, corrupted = r.runs
    wanted, patched, layer = [], [], r.model.layers[1]
    for index in senders:
        number, head, vector = r.split[index]
        of = r.model.layers[number]
        change = (
            clean.weights[number][head, -1, vector] - corrupted.weights[number][head, -1, vector]
        )
        written = change * of.value[head, vector] @ of.W_O[head]
        stream = corrupted.streams[1][-1]
        scale = ((stream - stream.mean()).square().mean() + r.model.eps).sqrt()
        moved = ((written - written.mean()) / scale * layer.gain) @ layer.W_V[1]

        def edit(number: int, part: str, x: Tensor, moved: Tensor = moved) -> Tensor:
            if (number, part) != (1, "values"):
                return x
            x = x.clone()
            x[1, -1] += moved
            return x

        wanted.append(r.value(direct(r.model, r.corrupted, edit)))
        weight = clean.weights[number][head, -1, vector]
        patched.append(r.edited(r.corrupted, index, "weights", weight))
    frame = paths.frame.set_index("sender")["value"]
    return Check(
        "`path_patch`",
        "effect of vector → value of L1H1; control: of the vector on all paths",
        less(frame[[r.name(i) for i in senders]].tolist(), r.value(corrupted)),
        less(wanted, r.value(corrupted)),
        less(patched, r.value(corrupted)),
    )


def _graphs(r: Reading) -> Iterator[Check]:
    clean, corrupted, prompts = *r.runs, (r.prompt(r.clean), r.prompt(r.corrupted))
    last = [i for i, (layer, _, _) in enumerate(r.split) if layer == len(r.model.layers) - 1]
    right, wrong = r.answers
    stream = clean.streams[-1][-1]
    scale = ((stream - stream.mean()).square().mean() + r.model.eps).sqrt()
    reads = r.model.gain * (r.model.W_U[:, right] - r.model.W_U[:, wrong]) / scale
    wanted = []
    for index in last:
        layer, head, vector = r.split[index]
        of = r.model.layers[layer]
        written = clean.weights[layer][head, -1, vector] * of.value[head, vector] @ of.W_O[head]
        wanted.append(((written - written.mean()) @ reads).item())
    sites = [f"{name}@{r.place}" for name in r.names]
    graph = circuits.attribution_graph(r.host, prompts[0], r.metric, sites=sites)
    edges = graph.edges.query("target == 'metric' and kind == 'value'").set_index("source")[
        "weight"
    ]
    yield Check(
        "`attribution_graph`, one run",
        "edge vector → metric is p_n value_n W_O · metric; control: the next vector",
        [edges[f"{r.name(i)}@{r.place}"] for i in last],
        wanted,
        shifted(wanted),
    )
    difference = circuits.attribution_graph(
        r.host, prompts[0], r.metric, corrupted=prompts[1], top=20
    )
    yield Check(
        "`attribution_graph`, difference",
        "Σ edges into the metric; control: the metric of one run",
        [difference.inflow()["metric"]],
        [r.value(clean) - r.value(corrupted)],
        [r.value(clean)],
    )
    effects = circuits.path_expansion(r.host, prompts[0]).effects(r.metric)["effect"]
    yield Check(
        "`path_expansion`",
        "Σ over all numbers of hops; control: without paths of one hop",
        [effects.sum()],
        [r.value(clean)],
        [effects.sum() - effects[1]],
    )
    shares, scores = [], []
    for index, (layer, head, vector) in enumerate(r.split):
        frame = circuits.score_sources(r.host, prompts[0], r.name(index), query=r.place, key=vector)
        shares.append(frame["share"].sum())
        scores.append(clean.scores[layer][head, -1, vector].item())
    yield Check(
        "`score_sources`",
        "Σ shares is a_n; control: the next vector",
        shares,
        scores,
        shifted(scores),
    )
    circuit = circuits.discover(r.host, *prompts, r.metric)
    checked = circuits.evaluate(r.host, circuit, *prompts, r.metric)
    yield Check(
        "`discover`, `evaluate`",
        "metric of the whole model; control: of everything ablated",
        [checked.whole],
        [r.value(clean)],
        [checked.nothing],
    )


def _weights(r: Reading) -> Iterator[Check]:
    rows, wanted = [], []
    for index, (layer, head, vector) in enumerate(r.split):
        matrix = circuits.ov_circuit(r.host, r.name(index)).matrix.AB
        row = matrix[len(r.model.W_E) + vector]
        rows.append(row / row.norm())
        of = r.model.layers[layer]
        written = of.value[head, vector] @ of.W_O[head]
        logits = ((written - written.mean()) * r.model.gain) @ r.model.W_U
        wanted.append((logits - logits.mean()) / (logits - logits.mean()).norm())
    yield Check(
        "`ov_circuit`",
        "row of the memory token: logits of value_n W_O, up to a factor; control: the next vector",
        torch.stack(rows).flatten(),
        torch.stack(wanted).flatten(),
        torch.stack(wanted).roll(1, 0).flatten(),
    )
    writers = [i for i, (layer, _, _) in enumerate(r.split) if layer == 0]
    of_tool, formula = [], []
    for index in writers:
        _, head, vector = r.split[index]
        matrix = circuits.virtual_weights(r.host, r.name(index), "L1H1", "v").AB
        row = matrix[len(r.model.W_E[0]) + vector, : len(r.model.W_E[0])]
        of_tool.append(row / row.norm())
        first, second = r.model.layers[0], r.model.layers[1]
        written = first.value[head, vector] @ first.W_O[head]
        moved = ((written - written.mean()) * second.gain) @ second.W_V[1] @ second.W_O[1]
        moved = moved - moved.mean()
        formula.append(moved / moved.norm())
    yield Check(
        "`virtual_weights`",
        "vector → W_OV of L1H1, up to a factor; control: the next vector",
        torch.stack(of_tool).flatten(),
        torch.stack(formula).flatten(),
        torch.stack(formula).roll(1, 0).flatten(),
    )


def _files(r: Reading) -> Iterator[Check]:
    N, expected = r.model.n_vectors, r.runs[0].logits.detach().flatten()
    of_corrupted = r.runs[1].logits.detach().flatten()
    prompt = r.prompt(r.clean)
    statistics = neurons.corpus_statistics(
        r.host,
        r.names,
        [prompt[0].tolist(), r.prompt(r.corrupted)[0].tolist()],
        k=2 * len(prompt[0]),  # all tokens, because memory rows have large weights
        context=r.host.cfg.n_ctx,  # by default, texts are cut after 128 tokens
        progress=False,
    )
    frame = statistics.heads.frame().query("at >= @N")  # memory rows are no text
    values, norms = frame.groupby("name")["value"].max(), []
    for layer, head, vector in r.split:
        of = r.model.layers[layer]
        written = of.value[head, vector] @ of.W_O[head]
        size = (written - written.mean()).norm()
        norms.append(
            max((run.weights[layer][head, :, vector].max() * size).item() for run in r.runs)
        )
    tool = [values[name] for name in r.names]
    yield Check(
        "`corpus_statistics`",
        "largest length of p_n value_n W_O over the texts; control: the next vector",
        tool,
        norms,
        shifted(norms),
    )
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        again = load(save(r.host, Path(folder) / "model"), dtype="float64")
        yield Check(
            "`save`, `load`",
            "logits; control: the other prompt",
            again(prompt)[0, N:].flatten(),
            expected,
            of_corrupted,
        )
    plain = loaded(r.model, split=r.split)
    with torch.no_grad():
        for change in (expansion.WidenStream(3), expansion.AddHeads(1)):
            grown = grow(plain, change).model
            yield Check(
                f"`grow`, {type(change).__name__}",
                "logits; control: the other prompt",
                grown(prompt)[0, N:].flatten(),
                expected,
                of_corrupted,
            )


def refusals(r: Reading) -> pd.DataFrame:
    """Return what tools of neurons say about persistent vectors."""
    prompts = r.prompt(r.clean), r.prompt(r.corrupted)
    calls: dict[str, Callable[[], Any]] = {
        "`gate_and_value`": lambda: p.gate_and_value(
            r.host, *prompts, r.metric, sites=[r.names[0]], progress=False
        ),
        "`neuron_statistics`": lambda: neurons.neuron_statistics(
            r.host, [r.names[0]], [prompts[0][0].tolist()], progress=False
        ),
        "`ablated(to='bias')`": lambda: p.ablated(r.host, [r.names[0]], to="bias").__enter__(),
        "`copying_scores`": lambda: circuits.copying_scores(r.host),
        "`neuron_page`": lambda: (
            type(viz.neuron_page(r.host, [r.names[0]], [prompts[0][0].tolist()])).__name__
        ),
    }
    rows = []
    for tool, call in calls.items():
        try:
            said = f"works: {call()!s:.60}"
        except AttnOnlyLensError as error:
            said = " ".join(str(error).split())
        rows.append({"tool": tool, "says": said})
    return pd.DataFrame(rows)
