"""Read the edges of a compiled program from its weights.

Tracr (Lindner, Kramár, Farquhar, Rahtz, McGrath and Mikulik, "Tracr: Compiled Transformers as a
Laboratory for Interpretability", 2023) gives every variable of a RASP program its own axes of the
residual stream, and writes exact zeros everywhere else. So the nonzero entries of the weights show
which part writes what another part reads. With a head's W_QK = W_Q W_Kᵀ and W_OV = W_V W_O, and
b = 0 throughout,

    part        reads axis d by                    writes axis d where
    embed                                          a column d of W_E or W_pos is not zero
    head        q: row d of W_QK is not zero       a column d of W_OV is not zero
                k: column d of W_QK is not zero
                v: row d of W_OV is not zero
    neuron n    in: W_in[d, n] is not zero         W_out[n, d] is not zero
    output      in: row d of W_U is not zero

An edge (writer, reader, side) is *true* if the writer writes some axis that the reader reads, the
writer comes first, and the edge lies on a path of such edges from `embed` to `output`. Every other
edge carries nothing or leads nowhere: cutting all other edges at once changes no logit.

Not every true edge matters. An edge may carry values that the program never takes (a count of 0,
the padding token), or values that matter only at the beginning-of-sequence token, where nothing is
decoded. So the *effect* of each true edge is measured too: the largest change of a logit, over the
stored inputs, if the reader gets everything except this writer's output. There is a gap between
effects: the softmax of a compiled head leaks about 1e-7 of its weight to tokens that it should not
attend to, and a value that occurs moves a logit by at least 0.01. Edges below this gap are
redundant, and in these programs cutting all redundant edges at once changes no output.

Weights have TransformerLens' names. The module uses only NumPy.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Weights: TypeAlias = Mapping[str, Array]


class Edge(NamedTuple):
    """An edge from `writer` to an input of `reader`: q, k or v of a head, "in" of other parts."""

    writer: str
    reader: str
    side: str


def n_layers(weights: Weights) -> int:
    """Return the number of layers in the weights."""
    return sum(name.endswith("mlp.W_in") for name in weights)


def candidates(weights: Weights) -> list[Edge]:
    """Return every edge that the architecture allows: each part reads all earlier parts."""
    edges: list[Edge] = []
    before: list[str] = ["embed"]
    for stage in _stages(weights):
        for reader in stage:
            sides = ("q", "k", "v") if "H" in reader else ("in",)
            edges += [Edge(writer, reader, side) for side in sides for writer in before]
        before += stage
    return edges + [Edge(writer, "output", "in") for writer in before]


def true_edges(weights: Weights) -> dict[Edge, list[int]]:
    """Return the candidates on a path from `embed` to `output`, each with the shared axes."""
    writes, reads = dict(_writes(weights)), dict(_reads(weights))
    axes = {
        edge: np.flatnonzero(writes[edge.writer] & reads[edge.reader, edge.side]).tolist()
        for edge in candidates(weights)
    }
    shared = [edge for edge in axes if axes[edge]]
    # Candidates are sorted by reader, in computation order: a part's inputs come before its
    # outputs, so one pass in each direction follows every path.
    fed, useful = {"embed"}, {"output"}
    for edge in shared:
        if edge.writer in fed:
            fed.add(edge.reader)
    for edge in reversed(shared):
        if edge.reader in useful:
            useful.add(edge.writer)
    return {e: axes[e] for e in shared if e.writer in fed and e.reader in useful}


def _stages(weights: Weights) -> Iterator[list[str]]:
    for layer in range(n_layers(weights)):
        yield [f"L{layer}H{h}" for h in range(len(weights[f"blocks.{layer}.attn.W_Q"]))]
        yield [f"L{layer}N{n}" for n in range(weights[f"blocks.{layer}.mlp.W_in"].shape[1])]


def _writes(weights: Weights) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    yield "embed", (np.vstack([weights["embed.W_E"], weights["pos_embed.W_pos"]]) != 0).any(0)
    for layer in range(n_layers(weights)):
        for h, OV in enumerate(_product(weights, layer, "V", "O")):
            yield f"L{layer}H{h}", (OV != 0).any(0)
        for n, row in enumerate(weights[f"blocks.{layer}.mlp.W_out"]):
            yield f"L{layer}N{n}", row != 0


def _reads(weights: Weights) -> Iterator[tuple[tuple[str, str], npt.NDArray[np.bool_]]]:
    for layer in range(n_layers(weights)):
        both = zip(
            _product(weights, layer, "Q", "K"), _product(weights, layer, "V", "O"), strict=True
        )
        for h, (QK, OV) in enumerate(both):
            yield (f"L{layer}H{h}", "q"), (QK != 0).any(1)
            yield (f"L{layer}H{h}", "k"), (QK != 0).any(0)
            yield (f"L{layer}H{h}", "v"), (OV != 0).any(1)
        for n, column in enumerate(weights[f"blocks.{layer}.mlp.W_in"].T):
            yield (f"L{layer}N{n}", "in"), column != 0
    yield ("output", "in"), (weights["unembed.W_U"] != 0).any(1)


def _product(weights: Weights, layer: int, left: str, right: str) -> Array:
    """Return W_QK or W_OV of every head, [n_heads, d_model, d_model]."""
    W, W_2 = (weights[f"blocks.{layer}.attn.W_{x}"] for x in (left, right))
    return W @ (W_2.swapaxes(1, 2) if right == "K" else W_2)
