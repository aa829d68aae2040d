"""Disguise a compiled program: change its weights, but not the function that it computes.

A compiled program is easy to read: each variable has its own axes of the residual stream, and all
other weights are zero. Each step below hides some of this. Every step preserves the function, and
`origin` says which part of the compiled program each part of the disguised program comes from.

    split     half as many new neurons, and one new head, in each layer: copies of old ones, which
              take over half of an old part's output (`expansion.init.splits`). A copy has the
              origin of the part that it copies.
    decoys    new neurons and a new head in each layer with random input weights. They have no
              origin: their output weights are zero (Theorems 3.1 and 3.2 of the growth paper).
    widen     new axes of the stream with random read weights, to which nothing writes (Theorem 3.5)
    noise     new axes of the stream with random write weights, from which nothing reads. All parts
              write there, decoys too, so that their outputs are not zero.
    scales    each neuron's pre-activation is multiplied by a positive number a, and its output
              weights by 1 / a (relu); heads get other bases for queries, keys and values
    biases    random b_O and b_out; the biases of later readers subtract what they add
    permute   another order of heads and neurons
    rotate    a random rotation of the residual stream: no weight is zero any more
    LayerNorm before each sublayer and before the unembedding. Two more axes of the stream hold the
              constants M and -M for M = 2²⁷, as massive activations do in language models, so that
              the scale of the norm is constant up to a factor of about 1 + 1e-14. The rotated
              stream lies in a subspace of mean zero, so that the norm's centring changes nothing.

No step adds an edge between parts that have an origin. So a part is true if its origin is true,
and an edge is true if the edge between the origins is true.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from analyses.benchmark.tracr_edges import Edge
from attn_only_lens import grow, growth
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

_MASSIVE = 2.0**27
_LETTERS = {"d_mlp": "N", "head": "H"}
_ENDS = {"embed": "embed", "output": "output"}


@dataclass(frozen=True)
class Disguised:
    """A disguised program.

    Attributes:
        model: the model, with LayerNorm.
        without_norm: the same before the last step: no norms, the same parts, the same function.
        origin: for each part, the part of the compiled program it comes from; decoys are missing.
    """

    model: HookedTransformer
    without_norm: HookedTransformer
    origin: Mapping[str, str]

    def edge(self, edge: Edge) -> Edge | None:
        """Return the edge between the origins of an edge's ends; None if an end has no origin."""
        ends = {**self.origin, **_ENDS}
        if edge.writer not in ends or edge.reader not in ends:
            return None
        return Edge(ends[edge.writer], ends[edge.reader], edge.side)


@torch.no_grad()
def disguise(model: HookedTransformer, seed: int) -> Disguised:
    """Apply all steps to a model without norms, with relu.

    Args:
        model: it does not change.
        seed: of all random numbers.
    """
    draw = torch.Generator().manual_seed(seed)
    origin = {name: name for name in parts(model)}
    model, origin = _split(model, origin, seed)
    model, origin = _with_decoys(model, origin, seed)
    n_axes = model.cfg.d_model // 4 + 1
    model = grow(model, growth.WidenStream(n_axes), init=growth.init.normal(0.3), seed=seed).model
    model = _with_noise(model, n_axes, draw)
    _rescale(model, draw)
    _add_biases(model, draw)
    origin = _permute(model, origin, draw)
    model = _rotated(model, _orthogonal(model.cfg.d_model, draw))
    return Disguised(_with_layer_norm(model, draw), model, origin)


def parts(model: HookedTransformer) -> list[str]:
    """Return the names of all heads and neurons, in the order of computation."""
    cfg = model.cfg
    sizes = (("H", cfg.n_heads), ("N", cfg.d_mlp))
    return [
        f"L{layer}{letter}{i}" for layer in range(cfg.n_layers) for letter, n in sizes
        for i in range(n)
    ]  # fmt: skip


def _split(
    model: HookedTransformer, origin: dict[str, str], seed: int
) -> tuple[HookedTransformer, dict[str, str]]:
    expansion = [growth.AddNeurons(model.cfg.d_mlp // 2 + 1), growth.AddHeads(1)]
    # `splits` wants noise; with so little, the weights of a copy and its source stay equal.
    grown = grow(model, expansion, init=growth.init.splits(share=0.5, noise=1e-30), seed=seed)
    now = {grown.provenance[name]: source for name, source in origin.items()}
    for shares in grown.provenance.shares:
        if shares.axis.label not in _LETTERS:  # "kv_head": the same split, listed again
            continue
        prefix = f"L{shares.axis.layer}{_LETTERS[shares.axis.label]}"
        for new, of in zip(shares.new, shares.of, strict=True):
            now[f"{prefix}{new}"] = now[f"{prefix}{of}"]
    return grown.model, now


def _with_decoys(
    model: HookedTransformer, origin: dict[str, str], seed: int
) -> tuple[HookedTransformer, dict[str, str]]:
    expansion = [growth.AddNeurons(model.cfg.d_mlp // 4 + 3), growth.AddHeads(1)]
    grown = grow(model, expansion, init=growth.init.normal(1.0), seed=seed)
    return grown.model, {grown.provenance[name]: source for name, source in origin.items()}


def _with_noise(model: HookedTransformer, n_axes: int, draw: torch.Generator) -> HookedTransformer:
    """Return a model with new axes of the stream, to which all parts write random vectors."""
    old = model.cfg.d_model
    model = grow(model, growth.WidenStream(n_axes), init=growth.init.zeros()).model
    for weights in _writers(model):
        new = weights[..., old:]
        new.copy_(torch.randn(new.shape, generator=draw, dtype=new.dtype) / 2)
    return model


def _writers(model: HookedTransformer) -> list[Tensor]:
    written = [model.embed.W_E, model.pos_embed.W_pos]
    for block in model.blocks:
        written += [block.attn.W_O, block.mlp.W_out]
    return written


def _rescale(model: HookedTransformer, draw: torch.Generator) -> None:
    """Multiply neurons' pre-activations by positive numbers; give heads other bases."""
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        a = torch.rand(mlp.W_in.shape[1], generator=draw, dtype=mlp.W_in.dtype) * 2 + 0.5
        mlp.W_in *= a
        mlp.b_in *= a
        mlp.W_out /= a[:, None]
        for head in range(len(attn.W_Q)):
            basis, other_basis = (_orthogonal(attn.W_Q.shape[2], draw) for _ in range(2))
            for name in ("Q", "K"):
                _set(attn, f"W_{name}", head, getattr(attn, f"W_{name}")[head] @ basis)
                _set(attn, f"b_{name}", head, getattr(attn, f"b_{name}")[head] @ basis)
            _set(attn, "W_V", head, attn.W_V[head] @ other_basis)
            _set(attn, "b_V", head, attn.b_V[head] @ other_basis)
            _set(attn, "W_O", head, other_basis.T @ attn.W_O[head])


def _set(module: Any, name: str, index: int, value: Tensor) -> None:
    getattr(module, name)[index] = value


def _add_biases(model: HookedTransformer, draw: torch.Generator) -> None:
    """Add random constants to the stream; the biases of what reads it subtract them."""
    constant = torch.zeros(model.cfg.d_model, dtype=model.embed.W_E.dtype)
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        for name in "QKV":
            W, b = getattr(attn, f"W_{name}"), getattr(attn, f"b_{name}")
            b -= torch.einsum("d,hde->he", constant, W)
        attn.b_O += torch.randn(constant.shape, generator=draw, dtype=constant.dtype)
        constant += attn.b_O
        mlp.b_in -= constant @ mlp.W_in
        mlp.b_out += torch.randn(constant.shape, generator=draw, dtype=constant.dtype)
        constant += mlp.b_out
    model.unembed.b_U -= constant @ model.unembed.W_U


def _permute(
    model: HookedTransformer, origin: dict[str, str], draw: torch.Generator
) -> dict[str, str]:
    """Permute heads and neurons, and return the new origins."""
    now = {}
    for layer, block in enumerate(model.blocks):
        attn, mlp = block.attn, block.mlp
        orders = {
            "H": torch.randperm(len(attn.W_Q), generator=draw),
            "N": torch.randperm(len(mlp.W_out), generator=draw),
        }
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V"):
            weights = getattr(attn, name)
            weights.copy_(weights[orders["H"]].clone())
        for name, dim in (("W_in", 1), ("b_in", 0), ("W_out", 0)):
            weights = getattr(mlp, name)
            weights.copy_(weights.index_select(dim, orders["N"]).clone())
        for letter, order in orders.items():
            for new, old in enumerate(order.tolist()):
                if (name := f"L{layer}{letter}{old}") in origin:
                    now[f"L{layer}{letter}{new}"] = origin[name]
    return now


def _orthogonal(n: int, draw: torch.Generator) -> Tensor:
    """Return a random orthogonal matrix."""
    q, r = torch.linalg.qr(torch.randn(n, n, generator=draw, dtype=torch.float64))
    return q * r.diagonal().sign()


def _rotated(model: HookedTransformer, into: Tensor, **config: Any) -> HookedTransformer:
    """Return a model whose stream is multiplied by a matrix with orthonormal rows.

    Args:
        model: a model without norms.
        into: [d_model, new d_model].
        config: further settings that change.
    """
    old = {name: x.detach() for name, x in model.named_parameters()}
    settings = copy.deepcopy(model.cfg.to_dict()) | {"d_model": into.shape[1]} | config
    new = HookedTransformer(HookedTransformerConfig(**settings))
    for name, parameter in new.named_parameters():
        last = name.rpartition(".")[2]
        if last in ("W_E", "W_pos", "W_O", "W_out", "b_O", "b_out"):
            parameter.copy_(old[name] @ into)
        elif last in ("W_Q", "W_K", "W_V", "W_in", "W_U"):
            parameter.copy_(into.T @ old[name])
        elif name in old:
            parameter.copy_(old[name])
    return new


def _with_layer_norm(model: HookedTransformer, draw: torch.Generator) -> HookedTransformer:
    """Return the model with LayerNorm, whose scale two massive constants in the stream fix."""
    n = model.cfg.d_model
    # Rows that are orthonormal, and orthogonal to a vector of ones.
    ones = torch.ones(n + 1, 1, dtype=torch.float64)
    others = torch.randn(n + 1, n, generator=draw, dtype=torch.float64)
    basis = torch.linalg.qr(torch.cat([ones, others], dim=1)).Q[:, 1:]
    into = torch.cat([basis.T, torch.zeros(n, 2, dtype=torch.float64)], dim=1)
    normed = _rotated(model, into, normalization_type="LN")
    normed.pos_embed.W_pos[:, -2:] += torch.tensor([_MASSIVE, -_MASSIVE], dtype=torch.float64)
    scale = _MASSIVE * (2 / (n + 3)) ** 0.5
    norms = [normed.ln_final]
    for block in normed.blocks:
        norms += [block.ln1, block.ln2]
    for norm in norms:
        norm.w.fill_(scale)
        norm.b.zero_()
    return normed
