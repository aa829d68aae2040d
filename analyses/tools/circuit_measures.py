"""Shared: measures of circuits in growth, for one model and for two.

A component is an attention head or a neuron, at all positions of a prompt. A component's *effect*
is how much the metric, a logit difference, decreases if only the component's output in the clean
run is replaced by the output in the corrupted run. Effects are estimated by `patching.attribution`,
which patches the strongest sites; for one small model, all measures are also computed by patching
every component. A component's *share* is its part of the sum of |effects|, each the mean over
prompts. A task's *circuit* in a model is the K neurons with the largest |effect|.

These measures compare a model with a model grown from it, over the components of both:

    correlation    Pearson's, of the effects of neurons
    kept           the share of the circuit's K neurons that are among the K strongest old neurons
    overlap        the sum over neurons of the smaller of a neuron's two shares of Σ |effects|,
                   where both effects have the same sign; 1 if effects are proportional, 0 if no
                   neuron has an effect in both models
    gates          Pearson's, of a neuron's gate (its attention to itself) over the tokens of texts;
                   the mean over the circuit
    examples       the share of a neuron's EXAMPLES largest and EXAMPLES smallest activations that
                   are at the same places in both models; the mean over the circuit
    heads          Pearson's, of an attention head's pattern over these texts; the mean over heads

The chance level of each measure is the mean over all ways to match each neuron with a random neuron
of its layer. Correlations with a constant count as 0.

These measures describe new components:

    new_share      the share of new components
    parity         the expected new_share if the label "new" were random within each kind
    idle_share     the share of each layer's old neurons that were the weaker half, by |effect|,
                   before growth: how much old but unused components take part
    without_new    the metric with all new components patched together, on a scale from 0 (all
                   components patched) to 1 (none patched); 1 if no component is new
    resemblance    the largest |correlation| of a neuron's gate with an old neuron's gate: the mean
                   over the K new neurons with the largest |effect|

Intervals are quantiles over resamples of prompts; all components use the same resamples.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attn_only_lens import Contrast, Work, expose_neuron_heads, neurons
from attn_only_lens import patching as p
from attn_only_lens.heads import HeadName
from attn_only_lens.patching.results import Sweep

K = 20
EXAMPLES = 10
QUIET = Work(progress=False)
RESAMPLES = 200

Method: TypeAlias = Callable[..., Sweep]
Floats: TypeAlias = Float[np.ndarray, "..."]


@dataclass(frozen=True)
class Question:
    """Prompts of a task, as tokens padded on the right, and the two answers."""

    clean: Int[Tensor, "prompt pos"]
    corrupted: Int[Tensor, "prompt pos"]
    mask: Int[Tensor, "prompt pos"]
    right: Int[Tensor, "prompt"]
    wrong: Int[Tensor, "prompt"]

    @classmethod
    def of(cls, pairs: Contrast, tokenizer: Any, some: slice = slice(None)) -> "Question":
        """Return the question with some of the prompts, tokenized; every prompt has one answer."""
        clean, corrupted = (
            tokenizer(list(texts[some]), padding=True, return_tensors="pt")
            for texts in (pairs.clean, pairs.corrupted)
        )
        right, wrong = (torch.tensor(tokens)[some, 0] for tokens in (pairs.answers, pairs.wrong))
        mask = clean["attention_mask"]
        return cls(clean["input_ids"], corrupted["input_ids"], mask, right, wrong)

    def to(self, device: str) -> "Question":
        """Return the same question on a device."""
        return Question(*(tensor.to(device) for tensor in vars(self).values()))

    @property
    def contrast(self) -> Contrast:
        """The prompts, with the logit of the right answer minus that of the wrong answer."""
        metric = p.logit_diff(self.right, self.wrong)
        return Contrast(self.clean, self.corrupted, metric, mask=self.mask)

    def of_logits(self, logits: Float[Tensor, "prompt pos d_vocab"]) -> Floats:
        """Return the metric of each prompt, given the logits of a whole run."""
        rows = torch.arange(len(logits), device=logits.device)
        last = logits[rows, self.mask.sum(1).to(logits.device) - 1]
        differences: Floats = (
            (last[rows, self.right] - last[rows, self.wrong]).cpu().double().numpy()
        )
        return differences


@dataclass(frozen=True)
class Part:
    """The results of one task in a model.

    Attributes:
        effects: the effect of each component, in logits.
        clean: the metric of each prompt.
        nothing: the metric with all components patched together.
        without_new: the metric with all new components patched.
        without_old: the metric with all old components patched.
    """

    effects: Float[np.ndarray, "component prompt"]
    clean: Float[np.ndarray, "prompt"]
    nothing: Float[np.ndarray, "prompt"]
    without_new: Float[np.ndarray, "prompt"]
    without_old: Float[np.ndarray, "prompt"]


@dataclass(frozen=True)
class Look:
    """The measurements of a model.

    Attributes:
        names: names of its components, heads and neurons by layer.
        parts: the results by task.
        gates: gates of neurons, at the tokens of the texts.
        patterns: patterns of attention heads, in the texts.
        examples: the places where each neuron is largest, and where it is smallest.
    """

    names: tuple[str, ...]
    parts: Mapping[str, Part]
    gates: Mapping[str, Float[np.ndarray, "token"]]
    patterns: Mapping[str, Float[np.ndarray, "entry"]]
    examples: Mapping[str, tuple[frozenset[tuple[int, int]], ...]]


def is_neuron(names: Sequence[str]) -> Bool[np.ndarray, "component"]:
    """Return which components are neurons."""
    return np.array(["N" in name for name in names])


def layers(names: Sequence[str]) -> Int[np.ndarray, "component"]:
    """Return the layer of each component."""
    return np.array([HeadName.parse(name).layer for name in names])


def look(
    model: Any,
    questions: Mapping[str, Question],
    texts: Sequence[Tensor],
    new: Collection[str] = (),
    method: Method = p.attribution,
) -> Look:
    """Measure a model; its neuron-heads are exposed for the call.

    Args:
        model: a bridge.
        questions: the questions by task.
        texts: the tokens of each text, starting with BOS.
        new: names of the model's new components.
        method: computes effects: `patching.attribution` or `patching.activation_patch`.
    """
    with expose_neuron_heads(model) as exposed:
        names, parts = parts_of(exposed, questions, new, method)
        gates, patterns = in_texts(exposed, texts)
        corpus = neurons.Corpus(texts)
        examples_frame = neurons.top_examples(exposed, None, corpus, k=EXAMPLES, work=QUIET)
    examples: dict[str, tuple[frozenset[tuple[int, int]], ...]] = {}
    for (name, _), rows in examples_frame.groupby(["name", "end"], sort=False):
        places = frozenset(zip(rows["text"], rows["at"], strict=True))
        examples[str(name)] = (*examples.get(str(name), ()), places)
    return Look(names, parts, gates, patterns, examples)


def parts_of(
    exposed: Any, questions: Mapping[str, Question], new: Collection[str], method: Method
) -> tuple[tuple[str, ...], dict[str, Part]]:
    """Return the names of a model's components, and the results of each task."""
    parts, names = {}, tuple[str, ...]()
    for task, asked in questions.items():
        frame = sweep(method, exposed, asked, per_prompt=True).to_frame()
        names = tuple(frame["name"].unique())
        lost = (frame["unpatched"] - frame["value"]).to_numpy()
        old = [name for name in names if name not in new]
        together = (patched(exposed, asked, some) for some in ((), names, new, old))
        parts[task] = Part(lost.reshape(len(names), -1), *together)
    return names, parts


def on_prompts(
    model: Any,
    seen: Look,
    questions: Mapping[str, Question],
    new: Collection[str],
    method: Method,
) -> Look:
    """Return the look at the same model, with effects on other prompts."""
    with expose_neuron_heads(model) as exposed:
        _, parts = parts_of(exposed, questions, new, method)
    return replace(seen, parts=parts)


def sweep(method: Method, exposed: Any, asked: Question, **how: Any) -> Sweep:
    """Return the effects of all components, estimated or measured."""
    everywhere = p.Sites(positions="all")
    return method(
        *(exposed, asked.contrast), sites=everywhere, direction="noise", work=QUIET, **how
    )


@torch.no_grad()
def patched(exposed: Any, asked: Question, names: Iterable[str]) -> Float[np.ndarray, "prompt"]:
    """Return each prompt's metric with these components patched together (corrupted values)."""
    points: dict[str, list[int]] = {}
    for name in names:
        head = HeadName.parse(name)
        points.setdefault(head.hook("z", exposed), []).append(head.index)
    _, cache = exposed.run_with_cache(asked.corrupted, names_filter=list(points))

    def patch(z: Tensor, hook: Any, corrupted_z: Tensor, positions: list[int]) -> Tensor:
        return z.index_copy(
            2, torch.tensor(positions, device=z.device), corrupted_z[:, :, positions]
        )

    hooks = [
        (name, partial(patch, corrupted_z=cache[name], positions=positions))
        for name, positions in points.items()
    ]
    return asked.of_logits(exposed.run_with_hooks(asked.clean, fwd_hooks=hooks))


@torch.no_grad()
def in_texts(exposed: Any, texts: Sequence[Tensor]) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return gates of neurons and patterns of attention heads, at every token except BOS."""
    tokens = pad_sequence(list(texts), batch_first=True)  # right padding: no token sees it
    lengths = torch.tensor([len(text) for text in texts])
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    real[:, 0] = False
    rows = {"neuron": dict[str, Floats](), "attention": dict[str, Floats]()}
    hooks = {
        head.hook("pattern", exposed)
        for layer in range(exposed.cfg.n_layers)
        for head in (HeadName(layer, "neuron", 0), HeadName(layer, "attention", 0))
    }
    _, cache = exposed.run_with_cache(tokens, names_filter=sorted(hooks))
    for layer in range(exposed.cfg.n_layers):
        for kind, by_name in rows.items():
            head = HeadName(layer, kind, 0)
            # [head_index, token, key]; a neuron-head's keys are its own token and the bias token
            pattern = cache[head.hook("pattern", exposed)].transpose(0, 1)[:, real]
            for index, scores in enumerate(pattern[..., 0] if kind == "neuron" else pattern):
                by_name[str(HeadName(layer, kind, index))] = scores.flatten().cpu().double().numpy()
    return rows["neuron"], rows["attention"]


# Between two models


@dataclass(frozen=True)
class Pair:
    """Two looks at common components, and a mapping from names in the first to the second.

    The chance level is the mean over all other neurons in a neuron's layer, which is the expected
    value if each neuron is matched with another random neuron.
    """

    first: Look
    second: Look
    names: Mapping[str, str]

    def neurons(self) -> list[str]:
        """Return the components that are neurons, by their names in the first model."""
        return [name for name in self.names if "N" in name]

    def similarities(self) -> pd.DataFrame:
        """Return the similarity of each neuron's gates and examples, and the chance levels."""
        names, rows = np.array(self.neurons()), []
        for layer in np.unique(layers(names)):
            here = names[layers(names) == layer]
            there, others = [self.names[name] for name in here], ~np.eye(len(here), dtype=bool)
            examples = [
                [shared(self.first.examples[a], self.second.examples[b]) for b in there]
                for a in here
            ]
            gates = (
                np.stack([look.gates[name] for name in some])
                for look, some in ((self.first, here), (self.second, there))
            )
            alike = {"gates": correlations(*gates), "examples": np.array(examples)}
            row = {name: measured.diagonal() for name, measured in alike.items()}
            row |= {f"{name}_chance": x.mean(1, where=others) for name, x in alike.items()}
            rows.append(pd.DataFrame(row, index=here))
        return pd.concat(rows)

    def heads(self) -> float:
        """Return the mean correlation of attention heads' patterns."""
        heads = {a: b for a, b in self.names.items() if "N" not in a}
        patterns = ((self.first.patterns[a], self.second.patterns[b]) for a, b in heads.items())
        return float(np.mean([correlations(a[None], b[None]) for a, b in patterns]))


def correlations(
    first: Float[np.ndarray, "row number"], second: Float[np.ndarray, "row_2 number"]
) -> Float[np.ndarray, "row row_2"]:
    """Return Pearson's correlation of every pair of rows; 0 where a row is constant."""
    scaled = []
    for rows in (first, second):
        rows = rows - rows.mean(1, keepdims=True)
        norm = np.linalg.norm(rows, axis=1, keepdims=True)
        # A constant row may have a small norm because of float32 rounding.
        constant = norm <= 1e-6 * np.sqrt(rows.shape[1])
        scaled.append(np.where(constant, 0, rows / np.where(constant, 1, norm)))
    cosines: Floats = scaled[0] @ scaled[1].T
    return cosines


def shared(first: Sequence[frozenset[Any]], second: Sequence[frozenset[Any]]) -> float:
    """Return the share of places in common, over both ends."""
    return sum(len(a & b) for a, b in zip(first, second, strict=True)) / sum(map(len, first))


def first_k(effects: Float[np.ndarray, "*resample component"], k: int) -> Bool[np.ndarray, "..."]:
    """Return which k components have the largest |effect|."""
    order = np.argsort(-abs(effects), axis=-1, kind="stable")[..., :k]
    chosen = np.zeros(effects.shape, dtype=bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen


def resamples(n_prompts: int, seed: int = 0) -> Float[np.ndarray, "resample prompt"]:
    """Return weights of prompts: uniform first, then RESAMPLES draws with replacement."""
    drawn = np.random.default_rng(seed).multinomial(
        n_prompts, np.full(n_prompts, 1 / n_prompts), size=RESAMPLES
    )
    return np.concatenate([np.ones((1, n_prompts)), drawn]) / n_prompts


def with_interval(name: str, values: Float[np.ndarray, "resample"]) -> dict[str, float]:
    """Return the value for all prompts, and the quantiles over resamples."""
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return {name: values[0], f"{name}_low": low, f"{name}_high": high}


def shares_in_common(
    first: Float[np.ndarray, "resample component"], second: Float[np.ndarray, "resample component"]
) -> Float[np.ndarray, "resample"]:
    """Return `overlap` between corresponding rows of effects."""
    first, second = (row / abs(row).sum(1, keepdims=True) for row in (first, second))
    shared: Floats = (np.minimum(abs(first), abs(second)) * (first * second > 0)).sum(1)
    return shared


def overlap_by_chance(names: Sequence[str], first: Floats, second: Floats) -> float:
    """Return the mean overlap if each component is matched with a random one of its layer."""
    # Every component pairs equally often with each of its layer, so this is a mean over pairs.
    first, second = (effects / abs(effects).sum() for effects in (first, second))
    of_layer, total = layers(names), 0.0
    for layer in np.unique(of_layer):
        a, b = first[of_layer == layer][:, None], second[of_layer == layer][None]
        total += (np.minimum(abs(a), abs(b)) * (a * b > 0)).sum() / b.size
    return float(total)


def agreement(pair: Pair, task: str) -> dict[str, float]:
    """Return how well two models' effects agree, and the chance levels of `kept` and `overlap`."""
    names = pair.neurons()
    before = _rows(pair.first, task, names)
    now = _rows(pair.second, task, [pair.names[name] for name in names])
    first, second = before.mean(1), now.mean(1)
    k = min(K, len(names) // 2)
    chosen, still = first_k(first, k), first_k(second, k)
    of_layer = layers(names)
    kept_chance = sum(
        chosen[of_layer == layer].sum() * still[of_layer == layer].mean()
        for layer in np.unique(of_layer)
    )
    weights = resamples(before.shape[1])
    rows = zip(weights @ before.T, weights @ now.T, strict=True)  # of neurons, by resample
    correlation = np.array([np.corrcoef(one, two)[0, 1] for one, two in rows])
    return {
        **with_interval("correlation", correlation),
        "kept": (chosen & still).sum() / k,
        "overlap": float(shares_in_common(first[None], second[None])[0]),
        "kept_chance": kept_chance / k,
        "overlap_chance": overlap_by_chance(names, first, second),
    }


def kept_measures(pair: Pair, task: str, alike: pd.DataFrame) -> dict[str, float]:
    """Return `agreement` for a task, and the means of `similarities` over its circuit."""
    names = pair.neurons()
    before = _rows(pair.first, task, names).mean(1)
    circuit = alike.loc[np.array(names)[first_k(before, min(K, len(names) // 2))]].mean()
    return agreement(pair, task) | {str(name): float(value) for name, value in circuit.items()}


def effects(seen: Look, new: Collection[str] = ()) -> pd.DataFrame:
    """Return a row per component: its name, whether it is new, and its effect on each task."""
    frame = pd.DataFrame({"name": seen.names, "new": [int(name in new) for name in seen.names]})
    return frame.assign(**{task: part.effects.mean(1) for task, part in seen.parts.items()})


def _rows(look: Look, task: str, names: Sequence[str]) -> Float[np.ndarray, "component prompt"]:
    index_of = {name: i for i, name in enumerate(look.names)}
    return look.parts[task].effects[[index_of[name] for name in names]]


def new_measures(
    now: Look, task: str, new: Collection[str], idle: Collection[str]
) -> dict[str, float]:
    """Return how much of a task new components do: `new_share`, `parity`, `without_new` and others.

    `idle` has the names of the old neurons that were the weaker half before growth.
    """
    part, names = now.parts[task], np.array(now.names)
    weights = resamples(len(part.clean))
    resampled = abs(weights @ part.effects.T)  # [resample, component]
    resampled = resampled / resampled.sum(1, keepdims=True)
    is_new, of_neurons, sizes = np.isin(names, list(new)), is_neuron(names), resampled[0]
    clean, nothing, left = (run.mean() for run in (part.clean, part.nothing, part.without_new))
    return {
        **with_interval("new_share", resampled[:, is_new].sum(1)),
        "parity": sum(
            sizes[kind].sum() * is_new[kind].mean() for kind in (of_neurons, ~of_neurons)
        ),
        "idle_share": sizes[np.isin(names, list(idle))].sum(),
        "without_new": (left - nothing) / (clean - nothing),
    }


def learned(seen: Look, task: str) -> dict[str, float]:
    """Return what a model has learned: its metric, also with all parts patched, and more."""
    part, sizes = seen.parts[task], abs(seen.parts[task].effects.mean(1))
    return {
        "metric": part.clean.mean(),
        "nothing": part.nothing.mean(),
        "right answers": float((part.clean > 0).mean()),
        "share of heads": sizes[~is_neuron(seen.names)].sum() / sizes.sum(),
    }


def idle_half(before: Look, task: str) -> list[str]:
    """Return the half of each layer's neurons that has the smaller |effect|."""
    names = [name for name in before.names if "N" in name]
    sizes = pd.Series(abs(_rows(before, task, names).mean(1)), index=names)
    by_layer = sizes.groupby(layers(names), group_keys=False)
    return list(by_layer.apply(lambda group: group.nsmallest(len(group) // 2)).index)


def resemblance(now: Look, task: str, new: Collection[str]) -> float:
    """Return how similar gates of the strongest new neurons are to old neurons' gates."""
    some, old = (
        [name for name in now.names if "N" in name and (name in new) == is_new]
        for is_new in (True, False)
    )
    if not some:
        return float("nan")
    chosen = first_k(_rows(now, task, some).mean(1), min(K, len(some)))
    first, second = (
        np.stack([now.gates[name] for name in names]) for names in (np.array(some)[chosen], old)
    )
    return float(abs(correlations(first, second)).max(1).mean())
