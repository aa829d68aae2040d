"""Compile RASP programs to transformers whose edges are known.

Tracr turns a program into weights that compute the program (`tracr_edges.py` explains how, and
defines true edges). There are two sets of programs. `library`, seven small programs from Tracr's
library, covers what Tracr can emit: heads and MLPs in every order, two heads in a layer, empty
layers, causal and bidirectional attention, categorical and numerical outputs. `benchmark` has more
programs, for `analyses/benchmark`. Each program becomes two files. NAME.safetensors has the float64
weights under TransformerLens' names, and Tracr's own logits on the stored inputs. NAME.json has the
rest, with the RASP interpreter's outputs on these inputs. `tracr_models.py` reads the files without
jax.

The script needs a separate environment, and is run only once:

    python -m venv .venv-tracr
    .venv-tracr/bin/pip install tracr-pypi jax dm-haiku safetensors typer
    .venv-tracr/bin/python -m analyses.tools.compile_tracr library tests/fixtures/tracr
    .venv-tracr/bin/python -m analyses.tools.compile_tracr benchmark analyses/benchmark/programs
"""

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from einops import rearrange
from safetensors.numpy import save

from analyses.benchmark.tracr_edges import Array, Weights, logits, n_layers, true_edges

# Without this, all weights are rounded to float32, also thresholds such as (1/3 + 1/4) / 2.
jax.config.update("jax_enable_x64", True)

from tracr.compiler import compiling, lib, validating  # noqa: E402
from tracr.rasp import causal_eval, rasp  # noqa: E402

BOS, PAD = "BOS", "PAD"
INPUTS_PER_LENGTH = 16
# The softmax of a compiled head leaks up to 1e-7 (see `tracr_edges`).
NUMERICAL_TOLERANCE = 1e-6
LEAK, TAKEN = 1e-5, 1e-2


@dataclass(frozen=True)
class Program:
    """A program from Tracr's library, and the inputs that it is compiled for."""

    source: str
    make: Callable[[], rasp.SOp]
    vocab: str | tuple[int, ...]
    causal: bool
    distinct: bool = False
    rare: tuple[str, ...] = ()
    max_length: int = 5

    def inputs(self) -> list[list[Any]]:
        """Return inputs of every length: all inputs or a sample, and the rare ones."""
        inputs = []
        for length in range(1, self.max_length + 1):
            candidates: Iterator[tuple[Any, ...]] = (
                itertools.permutations(self.vocab, length)
                if self.distinct
                else itertools.product(self.vocab, repeat=length)
            )
            every = list(candidates)
            inputs += random.Random(length).sample(every, min(INPUTS_PER_LENGTH, len(every)))
        inputs += [tuple(x) for x in self.rare if tuple(x) not in inputs]
        return [list(x) for x in inputs]


LIBRARY = {
    "frac_prevs": Program(
        'make_frac_prevs(tokens == "x")',
        lambda: lib.make_frac_prevs(rasp.tokens == "x"),
        "abx",
        causal=True,
    ),
    "pair_balance": Program(
        'make_pair_balance(tokens, "(", ")")',
        lambda: lib.make_pair_balance(rasp.tokens, "(", ")"),
        "()a",
        causal=True,
    ),
    "detect_abc": Program(
        'detect_pattern(tokens, "abc")',
        lambda: lib.detect_pattern(rasp.tokens, "abc"),
        "abc",
        causal=True,
        rare=("abc", "aabc", "abca", "cabc", "ababc", "abcab", "babca", "abbca"),
    ),
    "hist": Program("make_hist()", lib.make_hist, "abc", causal=False),
    "hist_so_far": Program("make_hist()", lib.make_hist, "abc", causal=True),
    "reverse": Program(
        "make_reverse(tokens)", lambda: lib.make_reverse(rasp.tokens), "abc", causal=False
    ),
    "sort_unique": Program(
        "make_sort_unique(tokens, tokens)",
        lambda: lib.make_sort_unique(rasp.tokens, rasp.tokens),
        (1, 2, 3, 4, 5, 6, 7),
        causal=False,
        distinct=True,
    ),
}


def _previous(by: int = 1) -> rasp.SOp:
    return lib.shift_by(by, rasp.tokens)


def _sum_modulo(sop: rasp.SOp, other_sop: rasp.SOp, modulus: int) -> rasp.SOp:
    return rasp.SequenceMap(lambda x, y: (x + y) % modulus, sop, other_sop)


def _moved(predicate: Callable[[int, int], bool]) -> rasp.SOp:
    """The token at the key position that the predicate selects for each query position."""
    return rasp.Aggregate(rasp.Select(rasp.indices, rasp.indices, predicate), rasp.tokens)


def _fraction(token: str) -> rasp.SOp:
    return rasp.numerical(lib.make_frac_prevs(rasp.tokens == token))


def _rank() -> rasp.SOp:
    return rasp.SelectorWidth(rasp.Select(rasp.tokens, rasp.tokens, rasp.Comparison.LT))


def _follows_a() -> rasp.SOp:
    after = rasp.Select(_previous(), rasp.tokens, lambda key, query: key == "a")
    return rasp.Aggregate(after, rasp.tokens)


BENCHMARK = {
    # Maps of tokens and positions: neurons alone.
    "is_vowel": Program(
        'Map(lambda x: x in "ae", tokens)',
        lambda: rasp.Map(lambda x: x in "ae", rasp.tokens),
        "abce",
        causal=False,
        max_length=4,
    ),
    "token_plus_place": Program(
        "SequenceMap(lambda x, i: (x + i) % 3, tokens, indices)",
        lambda: _sum_modulo(rasp.tokens, rasp.indices, 3),
        (0, 1, 2),
        causal=False,
    ),
    "vowel_at_even_place": Program(
        'SequenceMap(and, tokens in "ae", indices % 2 == 0)',
        lambda: (
            rasp.Map(lambda x: x in "ae", rasp.tokens)
            & rasp.Map(lambda i: i % 2 == 0, rasp.indices)
        ),
        "abe",
        causal=False,
    ),
    # Moves: heads that copy a token from another position.
    "previous": Program("shift_by(1, tokens)", _previous, "abcd", causal=True),
    "first_token": Program(
        "Aggregate(Select(indices, indices, lambda k, q: k == 0), tokens)",
        lambda: _moved(lambda key, query: key == 0),
        "abcd",
        causal=True,
    ),
    "last_token": Program(
        "Aggregate(Select(indices, length - 1, ==), tokens)",
        lambda: rasp.Aggregate(
            rasp.Select(rasp.indices, lib.make_length() - 1, rasp.Comparison.EQ), rasp.tokens
        ),
        "abc",
        causal=False,
        max_length=4,
    ),
    "follows_a": Program(
        'Aggregate(Select(shift_by(1, tokens), tokens, lambda k, q: k == "a"), tokens)',
        _follows_a,
        "abcde",
        causal=False,
        distinct=True,
        max_length=4,
    ),
    # Comparisons of tokens at several positions: a head, then neurons.
    "repeats_previous": Program(
        "SequenceMap(==, shift_by(1, tokens), tokens)",
        lambda: rasp.SequenceMap(lambda x, y: x == y, _previous(), rasp.tokens),
        "abc",
        causal=True,
    ),
    "sum_with_previous": Program(
        "SequenceMap(lambda x, y: (x + y) % 3, shift_by(1, tokens), tokens)",
        lambda: _sum_modulo(_previous(), rasp.tokens, 3),
        (0, 1, 2),
        causal=True,
    ),
    "parity_of_three": Program(
        "(shift_by(2, tokens) + shift_by(1, tokens) + tokens) % 2",
        lambda: _sum_modulo(_sum_modulo(_previous(2), _previous(1), 2), rasp.tokens, 2),
        (0, 1),
        causal=True,
    ),
    "detect_ab": Program(
        'detect_pattern(tokens, "ab")',
        lambda: lib.detect_pattern(rasp.tokens, "ab"),
        "abc",
        causal=True,
    ),
    "equals_mirror": Program(
        "SequenceMap(==, make_reverse(tokens), tokens)",
        lambda: rasp.SequenceMap(lambda x, y: x == y, lib.make_reverse(rasp.tokens), rasp.tokens),
        "ab",
        causal=False,
        max_length=4,
    ),
    # Counts: heads that measure how much they select.
    "count_x": Program(
        'make_count(tokens, "x")',
        lambda: lib.make_count(rasp.tokens, "x"),
        "xyz",
        causal=False,
    ),
    "rank": Program(
        "SelectorWidth(Select(tokens, tokens, <))",
        _rank,
        (1, 2, 3, 4),
        causal=False,
        max_length=4,
    ),
    "occurs_once": Program(
        "Map(lambda n: n == 1, make_hist())",
        lambda: rasp.Map(lambda n: n == 1, lib.make_hist()),
        "abc",
        causal=False,
        max_length=4,
    ),
    "first_time": Program(
        "Map(lambda n: n == 1, make_hist()), causal",
        lambda: rasp.Map(lambda n: n == 1, lib.make_hist()),
        "abcd",
        causal=True,
    ),
    "count_rare": Program(
        "make_count_less_freq(1)",
        lambda: lib.make_count_less_freq(1),
        "abc",
        causal=False,
        max_length=4,
    ),
    # Fractions: heads that average a neuron.
    "weighted_fractions": Program(
        'LinearSequenceMap(make_frac_prevs(tokens == "x"), make_frac_prevs(tokens == "y"), 2, -3)',
        lambda: rasp.numerical(rasp.LinearSequenceMap(_fraction("x"), _fraction("y"), 2, -3)),
        "xyz",
        causal=True,
    ),
    "fraction_repeated": Program(
        "make_frac_prevs(make_hist() > 1)",
        lambda: lib.make_frac_prevs(rasp.Map(lambda n: n > 1, lib.make_hist())),
        "abc",
        causal=False,
        max_length=4,
    ),
    # Sorting: a count decides what a later head selects.
    "sort": Program(
        "make_sort(tokens, tokens, max_seq_len=3, min_key=1)",
        lambda: lib.make_sort(rasp.tokens, rasp.tokens, max_seq_len=3, min_key=1),
        (1, 2, 3),
        causal=False,
        max_length=3,
    ),
    "sort_by_frequency": Program(
        "make_sort_freq(3)",
        lambda: lib.make_sort_freq(3),
        "abc",
        causal=False,
        max_length=3,
    ),
}
SETS = {"library": LIBRARY, "benchmark": BENCHMARK}


def main(
    programs: Annotated[str, typer.Argument(help="library or benchmark")],
    out: Annotated[Path, typer.Argument(help="Folder for the files.")],
) -> None:
    """Compile every program of a set, compare it with the interpreter, and write it."""
    out.mkdir(parents=True, exist_ok=True)
    for name, program in SETS[programs].items():
        card, tensors = compiled(program)
        _write(out / f"{name}.safetensors", save(tensors))
        _write(out / f"{name}.json", _dump(card).encode())
        used = sum(edge["changes_logits"] for edge in card["edges"])
        print(f"{name}: {card['config']}, {len(card['edges'])} true edges, {used} of them used")


def compiled(program: Program) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the contents of the JSON file and of the safetensors file.

    Raises:
        ValueError: Tracr cannot compile the program for one of its inputs; or the compiled model
            has biases or disagrees with the interpreter; or all inputs have the same output.
    """
    sop, inputs = program.make(), program.inputs()
    evaluate = causal_eval.evaluate if program.causal else rasp.DefaultRASPEvaluator().evaluate
    for x in inputs:
        if reasons := validating.validate(sop, x):
            raise ValueError(f"{program.source} on {x}: {reasons}")
    model = compiling.compile_rasp_to_model(
        sop,
        set(program.vocab),
        program.max_length,
        causal=program.causal,
        compiler_bos=BOS,
        compiler_pad=PAD,
    )
    vocab = list(model.input_encoder.encoding_map)
    outputs = list(model.output_encoder.encoding_map) if rasp.is_categorical(sop) else None
    labels = [sop.label] if outputs is None else [f"{sop.label}:{x}" for x in outputs]
    weights = _weights(model, [model.residual_labels.index(label) for label in labels])
    expected = [list(evaluate(sop, x)) for x in inputs]
    if len({y for ys in expected for y in ys if y is not None}) < 2:
        raise ValueError(f"{program.source}: its inputs all give one output; add some to `rare`")
    tokens = [np.array([[vocab.index(t) for t in [BOS, *x]]]) for x in inputs]
    tracrs = [_tracr_logits(model, x, weights["unembed.W_U"]) for x in tokens]
    for x, output, values in zip(inputs, tracrs, expected, strict=True):
        if not _agree(output[0, 1:], values, outputs):
            raise ValueError(
                f"{program.source} on {x}: got {output}; the interpreter says {values}"
            )
    heads, _, d_head = weights["blocks.0.attn.W_Q"].shape
    card = {
        "program": program.source,
        "compiler": f"tracr-pypi {version('tracr-pypi')}",
        "config": {
            "n_layers": n_layers(weights),
            "n_heads": heads,
            "d_head": d_head,
            "d_mlp": weights["blocks.0.mlp.W_in"].shape[1],
            "d_model": len(model.residual_labels),
            "d_vocab": len(vocab),
            "d_vocab_out": len(labels),
            "n_ctx": program.max_length + 1,
        },
        "causal": program.causal,
        "bos": BOS,
        "pad": PAD,
        "vocab": vocab,
        "outputs": outputs,
        "residual_labels": model.residual_labels,
        "inputs": inputs,
        "expected": expected,
        "edges": _edges(weights, program.causal, tokens, expected, model.residual_labels),
    }
    return card, {**weights, "tracr.logits": np.concatenate([x[0] for x in tracrs])}


def _weights(model: Any, output_axes: Sequence[int]) -> dict[str, Array]:
    """Return Tracr's parameters with TransformerLens' names and shapes."""
    params = {
        name: {k: np.array(v) for k, v in part.items()} for name, part in model.params.items()
    }
    biases = [part["b"] for part in params.values() if "b" in part]
    wrong = {x.dtype.name for part in params.values() for x in part.values()} - {"float64"}
    if wrong or any(b.any() for b in biases):
        raise ValueError(
            f"expected float64 and no biases; got {wrong or 'a bias that is not zero'}"
        )
    n_heads = model.model_config.num_heads
    weights = {
        "embed.W_E": params["token_embed"]["embeddings"],
        "pos_embed.W_pos": params["pos_embed"]["embeddings"],
        "unembed.W_U": np.eye(len(model.residual_labels))[:, output_axes],
    }
    for layer in range(model.model_config.num_layers):
        ours, tracr_name = f"blocks.{layer}", f"transformer/layer_{layer}"
        for letter, part in {"Q": "query", "K": "key", "V": "value"}.items():
            W = params[f"{tracr_name}/attn/{part}"]["w"]
            weights[f"{ours}.attn.W_{letter}"] = rearrange(W, "d (h e) -> h d e", h=n_heads)
        W = params[f"{tracr_name}/attn/linear"]["w"]
        weights[f"{ours}.attn.W_O"] = rearrange(W, "(h e) d -> h e d", h=n_heads)
        weights[f"{ours}.mlp.W_in"] = params[f"{tracr_name}/mlp/linear_1"]["w"]
        weights[f"{ours}.mlp.W_out"] = params[f"{tracr_name}/mlp/linear_2"]["w"]
    return {name: np.ascontiguousarray(W) for name, W in weights.items()}


def _tracr_logits(model: Any, tokens: Any, W_U: Array) -> Array:
    """Return the logits of Tracr's model, before its argmax: [1, pos, d_vocab_out]."""
    return np.asarray(model.forward(model.params, tokens).transformer_output.output) @ W_U


def _agree(output: Array, expected: list[Any], outputs: list[Any] | None) -> bool:
    """Return whether logits [pos, d_vocab_out] agree with the interpreter where it is defined."""
    pairs = [(x, y) for x, y in zip(output, expected, strict=True) if y is not None]
    if outputs is None:
        return all(abs(x.item() - y) <= NUMERICAL_TOLERANCE for x, y in pairs)
    return all(outputs[x.argmax()] == y for x, y in pairs)


def _edges(
    weights: Weights,
    causal: bool,
    tokens: list[Any],
    expected: list[list[Any]],
    labels: list[str],
) -> list[dict[str, Any]]:
    """Return the true edges, with their axes and whether cutting one of them changes anything."""
    lengths = sorted({x.shape[1] for x in tokens})
    batches = [np.concatenate([x for x in tokens if x.shape[1] == n]) for n in lengths]
    # Nothing is decoded at BOS, or where the program returns None.
    read = [
        np.array([[False, *(y is not None for y in ys)] for ys in expected if len(ys) + 1 == n])
        for n in lengths
    ]
    whole = [
        logits(weights, x, causal)[positions] for x, positions in zip(batches, read, strict=True)
    ]
    rows = []
    for edge, axes in true_edges(weights).items():
        cut = [
            logits(weights, x, causal, {edge})[positions]
            for x, positions in zip(batches, read, strict=True)
        ]
        pairs = [(x, y) for x, y in zip(whole, cut, strict=True) if x.size]
        effect = max(float(np.abs(x - y).max()) for x, y in pairs)
        if LEAK < effect < TAKEN:
            raise ValueError(f"{edge} moves a logit by {effect}: neither a leak nor a value")
        changed = any(bool((x.argmax(-1) != y.argmax(-1)).any()) for x, y in pairs)
        moved = effect >= TAKEN
        numerical = whole[0].shape[-1] == 1
        rows.append(
            edge._asdict()
            | {
                "axes": [labels[axis] for axis in axes],
                "changes_logits": moved,
                "changes_output": moved if numerical else changed,
            }
        )
    return rows


def _dump(card: dict[str, Any]) -> str:
    """Return JSON with one line per key, and one line per row of the long lists."""
    parts = []
    for key, value in card.items():
        long = key in ("edges", "inputs", "expected")
        rows = ",\n  ".join(json.dumps(row) for row in value) if long else ""
        parts.append(f" {json.dumps(key)}: " + (f"[\n  {rows}\n ]" if long else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _write(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


if __name__ == "__main__":
    typer.run(main)
