"""Models with persistent vectors as plain attention-only models, and MLPs as persistent vectors.

**MLP -> all-attention** (Remark 3; `neuron_layer`). A neuron with pre-activation q = x·W_in + b_in
and activation α(q) = q p(q) is a head of width 1. All heads share one persistent vector: the key -1
and the value 0. The token has the key 0 and the value q. Then

    scores    the token itself: 0       persistent vector: -q
    pattern   the token itself: σ(q)    persistent vector: σ(-q)
    output    σ(q) q W_out

**All-attention -> attention-only** (`loaded`). N *memory tokens* at the front of each text take the
place of persistent vectors. The stream of h coordinates gets N + 1 more. Memory token n is embedded
as

    c (e_{h+n} - e_{h+N})       0 in all other coordinates; no position embedding

No component writes to these coordinates. Text rows are 0 there, so they are computed as before, if
the gains of norms are multiplied by √(h/ĥ), and ε by h/ĥ, with ĥ = h + N + 1 (Theorem 3.5 of the
growth paper). A memory row has mean zero, so LayerNorm acts on it as RMSNorm if all writes to the
stream are centred, as they can be under LayerNorm without a change of the function.

Heads write to memory rows too, because a row attends at least to itself. But attention is causal
and memory tokens come first, so their rows do not depend on the text: they are constants of the
weights. Let u_n be the constant row that enters a layer's heads (after its norm), with u_n[h+n] =
a_n. Rows of W_K and W_V are then chosen as

    W_K[h+n] = (key_n - b_K - u_n[:h] W_K[:h]) / a_n        W_K[h+N] = 0

so that the memory token's key is key_n, for every head, layer, norm, and c > 0. This needs one
forward pass over the memory tokens, from layer to layer. With u_n of an unchanged memory token
instead ("uncorrected"), the error is O(1/c) under a norm, which shrinks what was written; without a
norm, the error does not depend on c. Positions in scores (rotary, relative) would change a memory
token's score with the distance: they are not supported.

**A persistent vector as a head** (`split`). A head's output is a sum over the rows that it attends
to. Let some vectors of head H leave it: its values at their memory rows become 0, and for each of
them, a new head has the queries, keys and W_O of H, and a value that is 0 in all rows except in
memory row n. Its pattern is a copy of H's pattern, and its output is p_n value_n W_O. The sum of
the outputs is the same. So one persistent vector becomes a head with a name, which every tool can
read; but each copy computes the whole softmax.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2LMHeadModel

from analyses.studies.attention_only_models import AllAttention
from attn_only_lens.tl import convert_tl_checkpoint

NormName = Literal["LN", "RMS"]
Split: TypeAlias = Sequence[tuple[int, int, int]]


def neuron_layer(
    x: Float[Tensor, "pos d_model"],
    W_in: Float[Tensor, "d_model d_mlp"],
    b_in: Float[Tensor, "d_mlp"],
    W_out: Float[Tensor, "d_mlp d_model"],
    b_out: Float[Tensor, "d_model"],
    *,
    key: float = -1.0,
    value: float = 0.0,
    diagonal: bool = True,
) -> tuple[Float[Tensor, "pos d_model"], Float[Tensor, "head pos row"]]:
    """Return the output and the pattern of an all-attention layer that computes a SiLU MLP.

    All heads share one persistent vector with `key` and `value`. If not `diagonal`, a token sees
    all earlier tokens too, and not only itself. The last column of the pattern is the vector's.
    """
    q = (x @ W_in + b_in).T
    pos = len(x)
    keys = torch.cat([x.new_zeros(pos), x.new_tensor([key])])
    values = torch.cat([q, torch.full_like(q[:, :1], value)], dim=1)
    seen = torch.ones(pos, pos + 1, dtype=torch.bool).tril()
    if diagonal:
        seen = torch.eye(pos, pos + 1, dtype=torch.bool)
    seen[:, -1] = True
    scores = q[:, :, None] * keys
    pattern = scores.masked_fill(~seen.to(x.device), -torch.inf).softmax(-1)
    z = (pattern @ values[:, :, None])[..., 0]
    return z.T @ W_out + b_out, pattern


@dataclass(frozen=True)
class Layer:
    """The weights of an all-attention layer: heads, persistent vectors, and the norm before them.

    Shapes: W_Q, W_K, W_V [head, d_model, d_head], their biases [head, d_head]; W_O [head, d_head,
    d_model], b_O [d_model]; key and value [head, vector, d_head]; gain and shift [d_model].
    """

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    b_Q: Tensor
    b_K: Tensor
    b_V: Tensor
    b_O: Tensor
    key: Tensor
    value: Tensor
    gain: Tensor
    shift: Tensor


@dataclass(frozen=True)
class AllAttentionModel:
    """The weights of a transformer of all-attention layers, with learned absolute positions.

    A norm stands before each layer and before the unembedding, or nowhere (None). Without a norm,
    gains are ones and shifts are zeros. W_E is [d_vocab, d_model], W_pos [n_ctx, d_model], W_U
    [d_model, d_vocab].
    """

    layers: tuple[Layer, ...]
    W_E: Tensor
    W_pos: Tensor
    W_U: Tensor
    norm: NormName | None
    gain: Tensor
    shift: Tensor
    eps: float

    @property
    def n_vectors(self) -> int:
        """The number N of persistent vectors per head."""
        return self.layers[0].key.shape[1]


@torch.no_grad()
def weights_of(model: GPT2LMHeadModel) -> AllAttentionModel:
    """Return the weights, in float64, of a GPT-2 from `attention_only_models.text_model`."""
    model, layers = copy.deepcopy(model).double().requires_grad_(False), []
    for block in model.transformer.h:
        attention, norm = block.attn, block.ln_1
        assert isinstance(attention, AllAttention)
        sizes = (attention.n_heads, attention.d_head)
        reads = attention.c_attn.weight.unflatten(1, (3, *sizes)).permute(1, 2, 0, 3)
        biases = attention.c_attn.bias.unflatten(0, (3, *sizes))
        W_O, b_O = attention.c_proj.weight.unflatten(0, sizes), attention.c_proj.bias
        vectors = attention.key, attention.value
        layers.append(Layer(*reads, W_O, *biases, b_O, *vectors, norm.weight, norm.bias))
    body, last, W_U = model.transformer, model.transformer.ln_f, model.lm_head.weight.T
    ends = body.wte.weight, body.wpe.weight, W_U, "LN", last.weight, last.bias
    return AllAttentionModel(tuple(layers), *ends, model.config.layer_norm_epsilon)


def normalised(x: Tensor, norm: NormName | None, eps: float) -> Tensor:
    """Return the rows of x after a norm without gain and bias."""
    if norm is None:
        return x
    x = x - x.mean(-1, keepdim=True) if norm == "LN" else x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


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


def direct(
    model: AllAttentionModel, text: Tensor, deleted: tuple[int, int, int] | None = None
) -> Direct:
    """Run a model on one text, [pos]; a persistent vector (layer, head, vector) can be deleted."""
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
        if deleted is not None and number == deleted[0]:
            scores[deleted[1], :, deleted[2]] = -torch.inf
        weights = scores.softmax(-1)
        x = x + (weights @ values @ layer.W_O).sum(0) + layer.b_O
        run.scores.append(scores.detach())
        run.weights.append(weights.detach())
        run.streams.append(x)
    last = normalised(x, model.norm, model.eps) * model.gain + model.shift
    return replace(run, logits=last @ model.W_U)


@torch.no_grad()
def as_memory_tokens(
    model: AllAttentionModel, c: float, *, corrected: bool = True, split: Split = ()
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and weights of the attention-only model with memory tokens.

    Memory token n has the index d_vocab + n; texts must begin with all N in this order. Each layer
    has an MLP of one neuron whose weights are zero, because this package asks for neurons.

    Args:
        model: the weights of the all-attention model.
        c: the size of the memory tokens' embeddings.
        corrected: whether to take into account what heads write to memory rows.
        split: the persistent vectors that become heads, as (layer, head, vector). In their layers,
            they follow the H ordinary heads, in this order; other layers get heads of zeros.
    """
    N, (d_vocab, h) = model.n_vectors, model.W_E.shape
    wide = h + N + 1
    shrink = 1.0 if model.norm is None else (h / wide) ** 0.5
    new = model.W_E.new_zeros(N, N + 1)
    new[:, :N], new[:, N] = c * torch.eye(N).to(new), -c
    most = max(Counter(number for number, _, _ in split).values(), default=0)
    written = new.new_zeros(N, h)  # what heads have written to memory rows so far
    state = {
        "embed.W_E": torch.cat(
            [_wide(_centred(model, model.W_E), N), torch.cat([written, new], 1)]
        ),
        "pos_embed.W_pos": torch.cat(
            [new.new_zeros(N, wide), _wide(_centred(model, model.W_pos), N)]
        ),
        "unembed.W_U": _wide(model.W_U.T, N).T,
        "unembed.b_U": new.new_zeros(d_vocab),
    }
    for number, layer in enumerate(model.layers):
        gain = torch.cat([layer.gain * shrink, torch.ones(N + 1).to(new)])
        shift = _wide(layer.shift, N)
        rows = normalised(torch.cat([written, new], dim=1), model.norm, model.eps * h / wide)
        rows = rows * gain + shift
        attention = _attention_state(model, layer, rows)
        chosen = [(head, vector) for layer_index, head, vector in split if layer_index == number]
        attention = _split(attention, layer, rows, chosen, most)
        if corrected:
            written = written + _written(model, layer, rows[:, :h])
        zeros = {"W_in": (wide, 1), "b_in": (1,), "W_out": (1, wide), "b_out": (wide,)}
        parts = {f"attn.{name}": tensor for name, tensor in attention.items()}
        parts |= {f"mlp.{name}": new.new_zeros(shape) for name, shape in zeros.items()}
        parts |= _norm_state(model, "ln1", gain, shift)
        parts |= _norm_state(model, "ln2", torch.ones_like(gain), torch.zeros_like(gain))
        state |= {f"blocks.{number}.{name}": tensor for name, tensor in parts.items()}
    last = torch.cat([model.gain * shrink, torch.ones(N + 1).to(new)])
    state |= _norm_state(model, "ln_final", last, _wide(model.shift, N))
    heads = model.layers[0].W_Q
    cfg = {
        "n_layers": len(model.layers),
        "d_model": wide,
        "n_heads": len(heads) + most,
        "d_head": heads.shape[2],
        "d_mlp": 1,
        "n_ctx": N + len(model.W_pos),
        "d_vocab": d_vocab + N,
        "d_vocab_out": d_vocab,
        "act_fn": "silu",
        "normalization_type": model.norm,
        "eps": model.eps * h / wide,
        "model_name": "all-attention",
    }
    return cfg, state


def _centred(model: AllAttentionModel, x: Tensor) -> Tensor:
    """Return rows of mean zero, for LayerNorm."""
    return x - x.mean(-1, keepdim=True) if model.norm == "LN" else x


def _wide(x: Tensor, n_vectors: int) -> Tensor:
    """Append zeros for the new coordinates to the last axis."""
    return F.pad(x, (0, n_vectors + 1))


def _norm_state(
    model: AllAttentionModel, name: str, gain: Tensor, shift: Tensor
) -> dict[str, Tensor]:
    """Return the weights of a norm."""
    weights = {f"{name}.w": gain, f"{name}.b": shift}
    return {
        name: x
        for name, x in weights.items()
        if model.norm and (model.norm, name[-1]) != ("RMS", "b")
    }


def _attention_state(
    model: AllAttentionModel, layer: Layer, rows: Float[Tensor, "vector wide"]
) -> dict[str, Tensor]:
    """Return the weights of a layer's heads; `rows` are the memory rows that they read."""
    N, h = model.n_vectors, layer.W_Q.shape[1]
    sizes = rows[:, h : h + N].diagonal()[:, None]
    state = {name: getattr(layer, name) for name in ("b_Q", "b_K", "b_V")}
    state["b_O"] = _wide(_centred(model, layer.b_O), N)
    state["W_O"] = _wide(_centred(model, layer.W_O), N)
    state["W_Q"] = F.pad(layer.W_Q, (0, 0, 0, N + 1))
    for of, wanted in (("K", layer.key), ("V", layer.value)):
        W, b = getattr(layer, f"W_{of}"), getattr(layer, f"b_{of}")
        new = (wanted - b[:, None] - rows[:, :h] @ W) / sizes
        state[f"W_{of}"] = torch.cat([W, F.pad(new, (0, 0, 0, 1))], dim=1)
    return state


def _split(
    state: dict[str, Tensor],
    layer: Layer,
    rows: Float[Tensor, "vector wide"],
    chosen: Sequence[tuple[int, int]],
    most: int,
) -> dict[str, Tensor]:
    """Return a layer's weights with (head, vector) pairs as heads, and `most` more heads in all."""
    h, n_heads = layer.W_Q.shape[1], len(layer.W_Q)
    per_head = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V")
    state = {name: x.clone() for name, x in state.items()}
    for name in per_head:
        zeros = state[name].new_zeros(most, *state[name].shape[1:])
        state[name] = torch.cat([state[name], zeros])
    for new, (head, vector) in enumerate(chosen, start=n_heads):
        for name in ("W_Q", "W_K", "W_O", "b_Q", "b_K"):
            state[name][new] = state[name][head]
        written = layer.value[head, vector] / rows[vector, h + vector]
        state["W_V"][new, h + vector] = written
        state["W_V"][head, h + vector] -= written
    return state


def _written(
    model: AllAttentionModel, layer: Layer, rows: Float[Tensor, "vector d_model"]
) -> Float[Tensor, "vector d_model"]:
    """Return what the heads of a layer write to memory rows, whose old coordinates are `rows`."""
    q = rows @ layer.W_Q + layer.b_Q[:, None]
    scores = q @ layer.key.transpose(1, 2) / q.shape[-1] ** 0.5
    seen = torch.ones_like(scores[0], dtype=torch.bool).tril()
    z = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ layer.value
    return _centred(model, (z @ layer.W_O).sum(0) + layer.b_O)


def loaded(
    model: AllAttentionModel, c: float = 1e3, *, corrected: bool = True, split: Split = ()
) -> TransformerBridge:
    """Return the model with memory tokens in float64, as TransformerLens loads it.

    Arguments are those of `as_memory_tokens`.
    """
    cfg, state = as_memory_tokens(model, c, corrected=corrected, split=split)
    config = TransformerBridgeConfig(**cfg, init_weights=False)
    bridge = TransformerBridge.boot_native(
        config, dtype=torch.float64, model_name=cfg["model_name"]
    )
    bridge.load_state_dict(convert_tl_checkpoint(state, config), strict=True)
    return bridge.eval()


def with_memory(tokens: Tensor, n_vectors: int, d_vocab: int) -> Tensor:
    """Return texts [batch, N + pos] with the memory tokens in front."""
    memory = torch.arange(d_vocab, d_vocab + n_vectors, device=tokens.device)
    return torch.cat([memory.expand(len(tokens), -1), tokens], dim=1)
