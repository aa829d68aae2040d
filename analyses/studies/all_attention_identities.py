"""What is exact in the correspondence of persistent vectors and neurons, measured in float64.

Every row compares two computations that should be equal, and the first one with a *control*, in
which the property is broken. Differences are relative to the largest number.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from analyses.studies import attention_only_models as models
from analyses.studies.all_attention_models import (
    AllAttentionModel,
    Layer,
    loaded,
    neuron_layer,
    normalised,
    with_memory,
)
from analyses.studies.all_attention_tools import direct, set_entry
from attn_only_lens import expose_neuron_heads, neuron_gate
from attn_only_lens.gates import GATES, bilinear_gate

SIZES = (1e-1, 1e0, 1e1, 1e2, 1e3, 1e4, 1e6)
"""The sizes c of memory tokens' embeddings."""
RANGE = torch.linspace(-12, 12, 4801, dtype=torch.float64)
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "quick_gelu": lambda q: q * torch.sigmoid(1.702 * q),
    "gelu": torch.nn.functional.gelu,
    "gelu_new": lambda q: torch.nn.functional.gelu(q, approximate="tanh"),
    "relu": torch.relu,
}


def row(
    claim: str, control: str, actual: Tensor, expected: Tensor, broken: Tensor
) -> dict[str, Any]:
    """Return a row: how far two computations differ, and how far the control differs."""
    size = expected.abs().max()
    return {
        "claim": claim,
        "difference": ((actual - expected).abs().max() / size).item(),
        "control": control,
        "of control": ((broken - expected).abs().max() / size).item(),
    }


@torch.no_grad()
def from_mlp(model: Any, bridge: Any, text: Tensor) -> Iterator[dict[str, Any]]:
    """Yield rows about MLPs as all-attention layers (Remark 3).

    Args:
        model: a trained GPT-2 with `Neurons` of kind "mlp".
        bridge: the same model from `in_package`, as a bridge or HookedTransformer.
        text: the tokens of a text, [pos].
    """
    model, inputs = model.double(), []
    hooks = [
        sublayer.register_forward_pre_hook(lambda module, x: inputs.append(x[0][0]))
        for sublayer in models.neurons_of(model)
    ]
    logits = model(text[None]).logits[0]
    for hook in hooks:
        hook.remove()
    exposed = expose_neuron_heads(bridge).model
    of_bridge, cache = exposed.run_with_cache(text[None])
    for layer, (sublayer, x) in enumerate(zip(models.neurons_of(model), inputs, strict=True)):
        zero = x.new_zeros(sublayer.W_Q.shape[1])
        weights = (x, sublayer.W_Q, zero, sublayer.W_O, x.new_zeros(x.shape[1]))
        out, pattern = neuron_layer(*weights)
        claim = f"MLP of layer {layer} = an all-attention layer with one persistent vector (-1, 0)"
        expected = sublayer(x)
        yield row(
            claim,
            "a token sees earlier tokens too",
            out,
            expected,
            neuron_layer(*weights, diagonal=False)[0],
        )
        yield row(
            claim,
            "the vector's value is 1, not 0",
            out,
            expected,
            neuron_layer(*weights, value=1.0)[0],
        )
        gates = torch.stack([neuron_gate(cache, f"L{layer}N{i}")[0] for i in range(len(zero))])
        yield row(
            f"its weights on persistent vectors = 1 - the package's gates, layer {layer}",
            "the gates of the next neuron",
            pattern[:, :, -1],
            1 - gates,
            1 - gates.roll(1, 0),
        )
    yield row(
        "the package's model = the trained model",
        "of the next token",
        of_bridge[0],
        logits,
        logits.roll(1, 0),
    )


@torch.no_grad()
def of_gates() -> pd.DataFrame:
    """Return how exact the persistent vector of a neuron is, by activation.

    Columns: `exact score`, the largest |α(q) - output| if the score is -logit p(q); `linear`,
    whether this score is linear in q, as scores of an all-attention layer are; `one key`, the
    certified bound for one head with a linear score; `heads`, how many heads with linear scores
    have a bound of at most 0.001, and `their bound`.
    """
    rows = []
    for name, act in ACTIVATIONS.items():
        gate, q = GATES[name], RANGE
        finest = bilinear_gate(name)
        rows.append(
            {
                "activation": name,
                "exact score": (gate.self_weight(q) * gate.scale * q - act(q)).abs().max().item(),
                "linear": gate.slope is not None,
                "one key": bilinear_gate(name, heads=1).bound,
                "heads": len(finest.w),
                "their bound": finest.bound,
            }
        )
    return pd.DataFrame(rows)


@torch.no_grad()
def of_vectors(model: AllAttentionModel, text: Tensor) -> Iterator[dict[str, Any]]:
    """Yield rows about persistent vectors as neurons, in each layer."""
    run, N = direct(model, text), model.n_vectors
    for number, layer in enumerate(model.layers):
        scores, weights = run.scores[number], run.weights[number]
        x = run.streams[number]
        u = normalised(x, model.norm, model.eps) * layer.gain + layer.shift
        values = torch.cat([layer.value, u @ layer.W_V + layer.b_V[:, None]], dim=1)
        out = (weights @ values @ layer.W_O).sum(0) + layer.b_O
        reads, writes = _reads(layer), layer.value @ layer.W_O
        a = torch.einsum("td,hnd->htn", u, reads) + _offsets(layer)[:, None]
        gates = (a - scores.logsumexp(-1, keepdim=True)).exp()
        text_part = (weights[..., N:] @ values[:, N:] @ layer.W_O).sum(0) + layer.b_O
        both = text_part + torch.einsum("htn,hnd->td", gates, writes)
        without_text = a.softmax(-1)
        yield row(
            f"layer {number}: output = text part + Σ exp(a_n - log Z) value_n W_O",
            "Z without the text's scores",
            both,
            out,
            text_part + torch.einsum("htn,hnd->td", without_text, writes),
        )
        yield row(
            f"layer {number}: p_n = σ(a_n - log Z of all other rows)",
            "σ(a_n)",
            _sigmoids(scores, N),
            weights[..., :N],
            a.sigmoid(),
        )
        head, vector = divmod(int(weights[:, -1, :N].argmax()), N)
        p = weights[head, :, vector, None]
        without = direct(
            model, text, set_entry(number, "scores", (head, slice(None), vector), -torch.inf)
        )
        of_head = weights[head] @ values[head]
        yield row(
            f"layer {number}: deleting n = zeroing n, and dividing its head's z by 1 - p_n",
            "zeroing alone",
            (of_head - p * layer.value[head, vector]) / (1 - p),
            without.weights[number][head] @ values[head],
            of_head - p * layer.value[head, vector],
        )
    yield _shift(model, text)


def _reads(layer: Layer) -> Tensor:
    """Return W_Q key_n / √d_head, the input direction of each vector, [head, vector, d_model]."""
    return layer.key @ layer.W_Q.transpose(1, 2) / layer.key.shape[-1] ** 0.5


def _offsets(layer: Layer) -> Tensor:
    """Return b_Q key_n / √d_head, [head, vector]."""
    return (layer.key @ layer.b_Q[..., None])[..., 0] / layer.key.shape[-1] ** 0.5


def _sigmoids(scores: Tensor, n_vectors: int) -> Tensor:
    """Return σ(a_n - log Σ of the exponentials of all other scores), computed one by one."""
    result = []
    for vector in range(n_vectors):
        others = torch.cat([scores[..., :vector], scores[..., vector + 1 :]], dim=-1)
        result.append((scores[..., vector] - others.logsumexp(-1)).sigmoid())
    return torch.stack(result, dim=-1)


def _shift(model: AllAttentionModel, text: Tensor) -> dict[str, Any]:
    """Return the row about directions that a head's keys share, which are not identified."""
    shift = torch.linspace(-1, 1, model.layers[0].key.shape[-1]).double()
    keys = tuple(replace(x, key=x.key + shift) for x in model.layers)
    all_keys = tuple(replace(x, b_K=x.b_K + shift) for x in keys)
    return row(
        "a shift of all keys of a head, of vectors and text, changes nothing",
        "a shift of persistent keys alone",
        direct(replace(model, layers=all_keys), text).logits,
        direct(model, text).logits,
        direct(replace(model, layers=keys), text).logits,
    )


@torch.no_grad()
def ranks(model: AllAttentionModel, mlp: Any) -> pd.DataFrame:
    """Return how many dimensions the input and output directions of vectors and neurons span."""
    rows = []
    for number, layer in enumerate(model.layers):
        reads, writes = _reads(layer), layer.value @ layer.W_O
        neurons = models.neurons_of(mlp)[number]
        rows.append(
            {
                "layer": number,
                "vectors of a head": model.n_vectors,
                "read": max(int(torch.linalg.matrix_rank(x)) for x in reads),
                "write": max(int(torch.linalg.matrix_rank(x)) for x in writes),
                "neurons": neurons.W_Q.shape[1],
                "read ": int(torch.linalg.matrix_rank(neurons.W_Q.double())),
                "write ": int(torch.linalg.matrix_rank(neurons.W_O.double())),
            }
        )
    return pd.DataFrame(rows)


@torch.no_grad()
def by_size(name: str, model: AllAttentionModel, text: Tensor) -> pd.DataFrame:
    """Return the error of the loaded model's logits by the size c of memory tokens.

    `written` is the largest share of a memory row's length, before the last layer, that heads have
    written.
    """
    N, expected, rows = model.n_vectors, direct(model, text).logits, []
    tokens = with_memory(text[None], N, len(model.W_E))
    width = model.W_E.shape[1]
    for c in SIZES:
        row: dict[str, Any] = {"model": name, "c": c}
        for corrected in (True, False):
            host = loaded(model, c, corrected=corrected)
            hook = f"blocks.{len(model.layers) - 1}.hook_resid_pre"
            logits, cache = host.run_with_cache(tokens, names_filter=[hook])
            error = (logits[0, N:] - expected).abs().max() / expected.abs().max()
            row["corrected" if corrected else "uncorrected"] = error.item()
            memory = cache[hook][0, :N]
            row["written"] = (memory[:, :width].norm(dim=1) / memory.norm(dim=1)).max().item()
        rows.append(row)
    return pd.DataFrame(rows)


def drawn(norm: Any, seed: int = 1) -> AllAttentionModel:
    """Return a small model with random weights; sizes are distinct primes."""
    generator = torch.Generator().manual_seed(seed)
    width, heads, d_head, vectors, vocabulary, positions, n_layers = 7, 2, 3, 5, 11, 13, 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * (1 if norm else 0.3)

    shapes = {
        **dict.fromkeys(("W_Q", "W_K", "W_V"), (heads, width, d_head)),
        "W_O": (heads, d_head, width),
        **dict.fromkeys(("b_Q", "b_K", "b_V"), (heads, d_head)),
        "b_O": (width,),
        **dict.fromkeys(("key", "value"), (heads, vectors, d_head)),
    }

    def gains() -> dict[str, Tensor]:
        ones, zeros = torch.ones(width).double(), torch.zeros(width).double()
        return {
            "gain": normal(width) if norm else ones,
            "shift": normal(width) if norm == "LN" else zeros,
        }

    layers = tuple(
        Layer(**{name: normal(*shape) for name, shape in shapes.items()}, **gains())
        for _ in range(n_layers)
    )
    ends = (normal(vocabulary, width), normal(positions, width), normal(width, vocabulary))
    return AllAttentionModel(layers, *ends, norm, **gains(), eps=1e-3)
