"""The tasks of the benchmark: models whose circuits are known, with pairs of prompts.

A method sees a `Task`: a model, pairs of prompts with a metric, and the parts and edges to score.
It does not see the `Truth`, which is kept next to it in a `Problem`.

Parts are heads and neurons, such as `L0H1` and `L0N17`. Edges have a writer (a part, or `embed`), a
reader (a part, or `output`), and a side: `q`, `k` or `v` of a head, or `in` of a neuron and the
output. A part or an edge is *true* if it belongs to the program (`tracr_edges.py`, `disguise.py`).
It *changes a logit* if removing it alone does so, at a position where an output is defined: for an
edge, the reader gets everything except the writer's output; for a part, all its edges are removed.
"""

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.benchmark.disguise import disguise, parts
from analyses.benchmark.tracr_cuts import logits_without
from analyses.benchmark.tracr_edges import Edge, candidates
from analyses.benchmark.tracr_models import FIXTURES, TracrProgram, load_program
from attn_only_lens import Contrast
from attn_only_lens import patching as p
from attn_only_lens.tl import HookedTransformer

COMPILED = Path(__file__).parent / "programs"
KINDS = {
    "maps": ("is_vowel", "token_plus_place", "vowel_at_even_place"),
    "moves": ("previous", "first_token", "last_token", "follows_a"),
    "comparisons": (
        "repeats_previous",
        "sum_with_previous",
        "parity_of_three",
        "detect_ab",
        "detect_abc",
        "equals_mirror",
    ),
    "counts": (
        "count_x",
        "rank",
        "occurs_once",
        "first_time",
        "count_rare",
        "hist",
    ),
    "fractions": ("frac_prevs", "pair_balance", "weighted_fractions", "fraction_repeated"),
    "sorting": ("sort", "sort_unique", "sort_by_frequency"),
}
PROGRAMS = tuple(name for names in KINDS.values() for name in names)
FORMS = ("compiled", "disguised")
PAIRS_PER_LENGTH = 6
# Between what a compiled head leaks, 1e-7, and the least effect of a value that occurs, 1e-2.
LEAK = 1e-5


@dataclass(frozen=True)
class Pairs:
    """Pairs of prompts of one length.

    Attributes:
        clean: the tokens of the clean prompts.
        corrupted: the tokens of the corrupted prompts, each with other outputs.
        weights: the metric of a prompt is Σ weights · logits. Where the outputs of both prompts are
            defined and differ, it is the logit of the clean output minus the logit of the corrupted
            one (for a numerical output, its value, with the sign of the difference).
    """

    clean: Int[Tensor, "batch pos"]
    corrupted: Int[Tensor, "batch pos"]
    weights: Float[Tensor, "batch pos d_vocab_out"]

    @property
    def contrast(self) -> Contrast:
        """The pairs with their metric, one number per prompt, for functions of the package."""
        weights = self.weights
        name = "difference of outputs"
        metric = p.custom(lambda logits: (logits * weights).sum((1, 2)), name=name)
        return Contrast(self.clean, self.corrupted, metric)


@dataclass(frozen=True)
class Task:
    """What a method sees.

    Attributes:
        name: of the program.
        form: "compiled", "disguised" or "trained".
        model: a `HookedTransformer` in float64.
        pairs: one element for each length of prompts.
        nodes: the names of all heads and neurons.
        edges: all edges that the architecture allows.
        seed: the seed of a twin's training; 0 for the other forms.
    """

    name: str
    form: str
    model: HookedTransformer
    pairs: tuple[Pairs, ...]
    nodes: tuple[str, ...]
    edges: tuple[Edge, ...]
    seed: int = 0

    def batches(self) -> list[Int[Tensor, "batch pos"]]:
        """Return all different prompts of the pairs, clean and corrupted, a batch per length."""
        both = (torch.cat([some.clean, some.corrupted]) for some in self.pairs)
        different = ({tuple(row.tolist()): row for row in rows} for rows in both)
        return [torch.stack(list(rows.values())) for rows in different]


@dataclass(frozen=True)
class Truth:
    """The ground truth: frames with columns `true` and `changes` in the order of the task.

    Attributes:
        nodes: a row for each part.
        edges: a row for each edge.
    """

    nodes: pd.DataFrame
    edges: pd.DataFrame


@dataclass(frozen=True)
class Problem:
    """A task and its truth."""

    task: Task
    truth: Truth

    def to(self, device: str) -> "Problem":
        """Return the problem with its model and prompts on a device."""
        pairs = tuple(
            Pairs(some.clean.to(device), some.corrupted.to(device), some.weights.to(device))
            for some in self.task.pairs
        )
        model = self.task.model.to(device, print_details=False)
        return replace(self, task=replace(self.task, model=model, pairs=pairs))


def problems(
    programs: Collection[str] = PROGRAMS, forms: Collection[str] = FORMS
) -> Iterator[Problem]:
    """Yield the problems of programs, one for each form."""
    for name in programs:
        program = load(name)
        for form in forms:
            yield problem(program, form)


def load(name: str) -> TracrProgram:
    """Read one of `PROGRAMS`."""
    return load_program(name, COMPILED if (COMPILED / f"{name}.json").exists() else FIXTURES)


def problem(program: TracrProgram, form: str) -> Problem:
    """Return a program in one of the forms, with its truth."""
    true = program.true_edges()
    if form == "compiled":
        model = cut_model = program.model
        edges = candidate_edges(model)
        is_true = [edge in true for edge in edges]
    else:
        disguised = disguise(program.model, seed=zlib.crc32(program.name.encode()))
        model, cut_model = disguised.model, disguised.without_norm
        edges = candidate_edges(model)
        is_true = [disguised.edge(edge) in true for edge in edges]
    task = Task(program.name, form, model, tuple(pairs_of(program)), tuple(parts(model)), edges)
    return Problem(task, truth_of(program, cut_model, edges, is_true))


def candidate_edges(model: HookedTransformer) -> tuple[Edge, ...]:
    """Return all edges that the architecture allows."""
    return tuple(candidates({name: x.numpy(force=True) for name, x in model.named_parameters()}))


def truth_of(
    program: TracrProgram,
    model: HookedTransformer,
    edges: Sequence[Edge],
    is_true: Sequence[bool],
    least: float = LEAK,
) -> Truth:
    """Return which parts and edges are true, and which of these change a logit.

    Args:
        program: its inputs say where outputs are defined.
        model: a model without norms that computes the program.
        edges: all candidates.
        is_true: whether each of them is true.
        least: the least change of a logit that counts.
    """
    true = [edge for edge, is_edge in zip(edges, is_true, strict=True) if is_edge]
    nodes = parts(model)
    true_nodes = {edge.writer for edge in true} & set(nodes)
    batches = list(_defined(program, model))
    edge_changes = {edge: _change(model, batches, [edge]) > least for edge in true}
    node_changes = {
        name: _change(model, batches, [edge for edge in true if edge.writer == name]) > least
        for name in true_nodes
    }
    return Truth(
        pd.DataFrame(
            {
                "name": nodes,
                "true": [name in true_nodes for name in nodes],
                "changes": [node_changes.get(name, False) for name in nodes],
            }
        ),
        pd.DataFrame(edges, columns=Edge._fields).assign(
            true=list(is_true), changes=[edge_changes.get(edge, False) for edge in edges]
        ),
    )


_Batch = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def _defined(program: TracrProgram, model: HookedTransformer) -> Iterator[_Batch]:
    """Yield tokens, where an output is defined, and the logits, for each length of inputs."""
    for tokens, expected, _ in program.batches():
        defined = torch.tensor([[False, *(y is not None for y in ys)] for ys in expected])
        if defined.any():
            yield tokens, defined, model(tokens)


@torch.no_grad()
def _change(model: HookedTransformer, batches: Sequence[_Batch], cut: Sequence[Edge]) -> float:
    return max(
        float((logits_without(model, tokens, cut) - whole)[defined].abs().max())
        for tokens, defined, whole in batches
    )


def pairs_of(program: TracrProgram) -> Iterator[Pairs]:
    """Yield pairs of neighbouring inputs whose outputs differ, for each length."""
    for tokens, expected, _ in program.batches():
        rows = [*range(len(tokens)), 0]
        chosen = [
            (one, other, weights)
            for one, other in pairwise(rows)
            if (weights := _weights(program, expected[one], expected[other])).any()
        ][:PAIRS_PER_LENGTH]
        if chosen:
            ones, others, all_weights = zip(*chosen, strict=True)
            yield Pairs(tokens[list(ones)], tokens[list(others)], torch.stack(all_weights))


def _weights(
    program: TracrProgram, expected: list[Any], others: list[Any]
) -> Float[Tensor, "pos d_vocab_out"]:
    """Return the weights of the metric of a pair, given the outputs of both prompts."""
    outputs = program.outputs
    weights = torch.zeros(len(expected) + 1, 1 if outputs is None else len(outputs)).double()
    for pos, (value, other) in enumerate(zip(expected, others, strict=True), start=1):
        if value is None or other is None or value == other:
            continue
        if outputs is None:
            weights[pos, 0] = 1.0 if value > other else -1.0
        else:
            weights[pos, outputs.index(value)] = 1.0
            weights[pos, outputs.index(other)] = -1.0
    return weights
