"""Load compiled programs as `HookedTransformer`s: known circuits for testing methods.

Tracr compiled the programs (`analyses/tools/README.md`); reading the files does not need jax. A
compiled model has no norms and no biases, relu in its MLPs, scores divided by √d_head, and separate
axes for positions. Its first token is always BOS, where nothing is decoded. A bidirectional model
has no mask, so a batch has inputs of only one length, without padding. Where the program returns
None, the model's output is not defined.

Parts are named as in the package, by source layer: `embed` (tokens and positions together), `L0H1`,
`L0N17`, `output`. `tracr_edges.py` defines true edges, and `tracr_cuts.py` cuts them.

    program = load_program("reverse")
    for tokens, expected, _ in program.batches():
        assert program.agrees(program.model(tokens), expected)
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from analyses.benchmark.tracr_edges import Edge, candidates
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures" / "tracr"
PROGRAMS = (
    "detect_abc",
    "frac_prevs",
    "hist",
    "hist_so_far",
    "pair_balance",
    "reverse",
    "sort_unique",
)
# Between the leak of a compiled head, 1e-7, and the values that programs take, multiples of 1/20.
NUMERICAL_TOLERANCE = 1e-6


@dataclass(frozen=True)
class TracrProgram:
    """A compiled program.

    Attributes:
        name: the name of its files.
        model: the compiled model, in float64.
        edges: a row for each true edge: `writer`, `reader`, `side` ("q", "k" or "v" of a head, "in"
            of a neuron or of the output), `axes` (labels of the axes of the residual stream that
            the writer writes and the reader reads), `changes_logits` and `changes_output`: whether
            cutting only this edge does that on any input. A true edge that changes nothing is
            redundant: it carries values that are never taken, or matters only at BOS.
        inputs: sequences without BOS, of several lengths.
        expected: the RASP interpreter's output for each input; None where it is not defined.
        tracr_logits: the logits of Tracr's model for each input with BOS, [pos, d_vocab_out].
        vocab: values of the tokens, including BOS and padding.
        outputs: values that the logits stand for; None if one logit is the value itself.
        residual_labels: names of the axes of the residual stream.
        bos: the first token of every input.
    """

    name: str
    model: HookedTransformer
    edges: pd.DataFrame
    inputs: tuple[tuple[Any, ...], ...]
    expected: tuple[tuple[Any, ...], ...]
    tracr_logits: tuple[Float[Tensor, "pos d_vocab_out"], ...]
    vocab: tuple[Any, ...]
    outputs: tuple[Any, ...] | None
    residual_labels: tuple[str, ...]
    bos: str

    def true_edges(self) -> set[Edge]:
        """Return the true edges, without their properties."""
        return {Edge(*row) for row in self.edges[list(Edge._fields)].itertuples(index=False)}

    def candidates(self) -> list[Edge]:
        """Return every edge that the architecture allows, true or not."""
        weights = {name: x.detach().cpu().numpy() for name, x in self.model.named_parameters()}
        return candidates(weights)

    def batches(self) -> Iterator[tuple[Int[Tensor, "batch pos"], list[Any], Tensor]]:
        """Yield by length, the longest first: tokens with BOS, expected outputs, Tracr's logits."""
        by_length = defaultdict(list)
        for i, x in enumerate(self.inputs):
            by_length[len(x)].append(i)
        for _, indices in sorted(by_length.items(), reverse=True):
            tokens = [[self.vocab.index(t) for t in (self.bos, *self.inputs[i])] for i in indices]
            logits = torch.stack([self.tracr_logits[i] for i in indices])
            device = self.model.cfg.device
            batch = torch.tensor(tokens, device=device)
            yield batch, [list(self.expected[i]) for i in indices], logits.to(device)

    def decode(self, logits: Float[Tensor, "batch pos d_vocab_out"]) -> list[list[Any]]:
        """Return the outputs that logits stand for, without BOS."""
        if self.outputs is None:
            return logits[:, 1:, 0].tolist()
        return [[self.outputs[i] for i in row] for row in logits[:, 1:].argmax(-1).tolist()]

    def agrees(
        self, logits: Float[Tensor, "batch pos d_vocab_out"], expected: list[list[Any]]
    ) -> bool:
        """Return whether the outputs equal the expected ones wherever these are defined."""
        pairs = [
            (got, want)
            for row, wanted in zip(self.decode(logits), expected, strict=True)
            for got, want in zip(row, wanted, strict=True)
            if want is not None
        ]
        if self.outputs is None:
            return all(abs(got - want) <= NUMERICAL_TOLERANCE for got, want in pairs)
        return all(got == want for got, want in pairs)


def load_program(name: str, folder: Path = FIXTURES) -> TracrProgram:
    """Read a compiled program from NAME.json and NAME.safetensors in a folder."""
    path = folder / f"{name}.json"
    card = json.loads(path.read_text("utf-8"))
    tensors = load_file(path.with_suffix(".safetensors"))
    lengths = [len(x) + 1 for x in card["inputs"]]
    logits = tensors.pop("tracr.logits")
    return TracrProgram(
        name=name,
        model=_model(name, card, tensors),
        edges=pd.DataFrame(card["edges"]),
        inputs=tuple(map(tuple, card["inputs"])),
        expected=tuple(map(tuple, card["expected"])),
        tracr_logits=logits.split(lengths),
        vocab=tuple(card["vocab"]),
        outputs=None if card["outputs"] is None else tuple(card["outputs"]),
        residual_labels=tuple(card["residual_labels"]),
        bos=card["bos"],
    )


def _model(name: str, card: dict[str, Any], weights: dict[str, Tensor]) -> HookedTransformer:
    cfg = HookedTransformerConfig(
        **card["config"],
        act_fn="relu",
        normalization_type=None,
        attention_dir="causal" if card["causal"] else "bidirectional",
        dtype=torch.float64,
        device="cpu",
        model_name=f"tracr-{name}",
    )
    model = HookedTransformer(cfg)
    parameters = dict(model.named_parameters())
    weights = {n: torch.zeros_like(p) for n, p in parameters.items() if ".b_" in n} | weights
    with torch.no_grad():
        for n, parameter in parameters.items():
            parameter.copy_(weights[n])
    return model
