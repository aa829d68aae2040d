"""Helpers for tests of growth: random weights, an oracle that evaluates them, native bridges."""

import math
from contextlib import contextmanager
from functools import partial

import torch
from bridges import NATIVE
from common import D_MLP, D_VOCAB, tokens
from torch import Tensor
from torch.nn import functional
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import growth
from attn_only_lens.growth.expansion.activations import activation_map
from attn_only_lens.growth.expansion.expansion import compose
from attn_only_lens.growth.expansion.weights import Constants, Weights, axes_of
from attn_only_lens.growth.models._grow import growable_of


def steps(n_new_layer=1, group=1):
    """Return six expansions by name; TransformerLens has one width for queries and values."""
    return {
        "neurons": growth.AddNeurons(5),
        "heads": growth.AddHeads(2 * group),
        "width": compose(growth.WidenValues(4), growth.WidenQueriesAndKeys(4)),
        "stream": growth.WidenStream(11),
        "layer": growth.InsertLayer(n_new_layer),
    }


def group_size(model):
    return model.cfg.n_heads // (model.cfg.n_key_value_heads or model.cfg.n_heads)


def all_steps(model, order=("neurons", "heads", "width", "stream", "layer")):
    by_name = steps(group=group_size(model))
    return compose(*(by_name[name] for name in order))


def cached(model, prompts=None):
    """Return logits and every activation."""
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens() if prompts is None else prompts)
    return logits, dict(cache)


def worst_activation(provenance, old, new):
    """Return the relative difference of each old activation, and the names without provenance."""
    worst, unknown = {}, []
    for hook, expected in old.items():
        try:
            moved = activation_map(provenance, hook)
        except KeyError:
            unknown.append(hook)
            continue
        got, expected = moved.old_part(new[moved.name]), moved.expected(expected)
        assert got.shape == expected.shape, hook
        masked = expected.isinf()
        assert torch.equal(masked, got.isinf()), hook
        got, expected = got.masked_fill(masked, 0.0), expected.masked_fill(masked, 0.0)
        worst[hook] = ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()
    return worst, unknown


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(first, second):
    """Return whether two models have the same names, shapes, dtypes and bytes."""
    first, second = first.state_dict(), second.state_dict()
    return list(first) == list(second) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(first.values(), second.values(), strict=True)
    )


# Native bridges

NATIVES = {
    "ln": {"act_fn": "gelu_new"},
    "ln_pre": {"normalization_type": "LNPre"},
    "rms": {"normalization_type": "RMS"},
    "rms_pre": {"normalization_type": "RMSPre"},
    "no_norm": {"normalization_type": None},
    "last_norm_only": {"normalization_type": None, "final_rms": True},
    "gated": {"gated_mlp": True, "act_fn": "silu"},
    "rotary": {"positional_embedding_type": "Rotary", "d_head": 14},
    "grouped": {"n_heads": 6, "d_head": 5, "n_key_value_heads": 2},
    "caps": {"attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 3.0},
    "own_scale": {"attn_scale": 3.0},
    "attention_only": {"attn_only": True},
}


def native(name="ln", dtype=torch.float64, **changes):
    """Return a bridge around a native model with random parameters."""
    bridge = TransformerBridge.boot_native(NATIVE | NATIVES[name] | changes, dtype=dtype)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in bridge.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * 0.4)
    return bridge


def loss(model, prompts=None):
    """Return the loss of predicting the next token."""
    prompts = tokens() if prompts is None else prompts
    scores = model(prompts)[:, :-1].log_softmax(-1)
    return -scores.gather(-1, prompts[:, 1:, None]).mean()


def training_step(model, optimizer, prompts=None):
    """Do one training step, and return the loss before it."""
    optimizer.zero_grad()
    value = loss(model, prompts)
    value.backward()
    optimizer.step()
    return value.item()


def _cast(value):
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64(monkeypatch):
    """Remove casts to float32, so that norms, angles and softmax compute in float64."""
    to, softmax, arange = Tensor.to, functional.softmax, torch.arange

    def cast(function, *args, **how):
        return function(*map(_cast, args), **{key: _cast(value) for key, value in how.items()})

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", lambda *args, **how: cast(to, *args, **how))
        patch.setattr(Tensor, "float", lambda x: to(x, torch.float64))
        patch.setattr(torch, "arange", partial(cast, arange))
        patch.setattr(functional, "softmax", partial(cast, softmax))
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # for embed_scale
        try:
            yield
        finally:
            torch.set_default_dtype(usual)


# Weights without a model, and the growth paper's transformer, which evaluates them

SIZES = {"d_model": 23, "d_mlp": D_MLP, "head": 3, "kv_head": 3, "d_query": 5, "d_value": 7}
SIZES |= {"d_vocab": D_VOCAB, "d_vocab_out": 43, "pos": 11}
_ATTENTION = [f"attn.{kind}_{part}" for part in "QKVO" for kind in "Wb"]
_MLP = ["mlp.W_in", "mlp.b_in", "mlp.W_out", "mlp.b_out"]


def random_weights(gated=False, kv_head=None, n_layers=3, **constants):
    """Return random weights of the growth paper's architecture, or with other constants."""
    constants = Constants(n_layers, **{"norm": "RMS", "final_norm": "RMS"} | constants)
    grouped = {"kv_head": kv_head or SIZES["head"]}
    of_block = [*_ATTENTION, *_MLP] + ["mlp.W_gate"] * gated
    norms = {"before": ("ln1", "ln2"), "after": ("ln1", "ln2")}
    norms["both"] = (*norms["before"], "ln1_post", "ln2_post")
    of_block += [f"{norm}.w" for norm in norms[constants.norm_place]] * _has_gain(constants.norm)
    of_block += [f"{norm}.b" for norm in norms["before"]] * (constants.norm == "LN")
    of_block += ["attn.q_norm.w", "attn.k_norm.w"] * (constants.qk_norm is not None)
    names = [f"blocks.{layer}.{name}" for layer in range(n_layers) for name in of_block]
    names += ["embed.W_E", "pos_embed.W_pos", "unembed.W_U", "unembed.b_U"]
    names += ["ln_final.w"] * _has_gain(constants.final_norm)
    names += ["ln_final.b"] * (constants.final_norm == "LN")
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name in names:
        shape = [(SIZES | grouped)[axis.label] for axis in axes_of(name, constants)]
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_gain = name.endswith(".w") and not constants.gain_offset
        tensors[name] = tensor * (0.3 if tensor.ndim == 1 else shape[-2] ** -0.5) + is_gain
    if constants.tied:
        tensors["unembed.W_U"] = tensors["embed.W_E"].T
        tensors["unembed.b_U"] = tensors["unembed.b_U"][: SIZES["d_vocab"]]
    return Weights(tensors, constants)


def _has_gain(norm):
    return norm in ("LN", "RMS")


def evaluate(weights, act=torch.relu, cap=None):
    """Compute equations 1 to 5 of the growth paper, also with other norms and constants.

    Args:
        weights: the weights of a model with standard positions.
        act: the activation function.
        cap: the bound of a soft cap of attention scores; None for no cap.
    """
    c, named, prompts = weights.constants, weights.tensors, tokens()
    width = named["embed.W_E"].shape[1]
    x = named["embed.W_E"][prompts] * (width**0.5 if c.embed_scaled else 1)
    x = x + named["pos_embed.W_pos"][: prompts.shape[1]]
    seen = torch.ones(prompts.shape[1], prompts.shape[1]).tril().bool()

    def norm(x, name, kind=c.norm):
        if kind is None:
            return x
        if kind.startswith("LN"):
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + c.eps).sqrt()
        if f"{name}.w" in named:
            x = x * (c.gain_offset + named[f"{name}.w"])
        return x + named.get(f"{name}.b", 0.0)

    for layer in range(c.n_layers):
        block = f"blocks.{layer}."
        w = {name.removeprefix(block): x for name, x in named.items() if name.startswith(block)}

        def attention(x, layer=layer, block=block, w=w):
            wrote = w["attn.b_O"]
            for head, W_O in enumerate(w["attn.W_O"]):
                shared = head * len(w["attn.W_K"]) // len(w["attn.W_O"])
                index = {"Q": head, "K": shared, "V": shared}
                q, k, v = (x @ w[f"attn.W_{a}"][i] + w[f"attn.b_{a}"][i] for a, i in index.items())
                if c.clip_qkv is not None:
                    q, k, v = (part.clamp(-c.clip_qkv, c.clip_qkv) for part in (q, k, v))
                if c.qk_norm is not None:
                    q = norm(q, f"{block}attn.q_norm", "RMS")
                    k = norm(k, f"{block}attn.k_norm", "RMS")
                scores = q @ k.mT / (c.scale or math.sqrt(q.shape[-1]))
                scores = scores / (layer + 1 if c.scale_by_layer else 1)
                scores = scores if cap is None else cap * (scores / cap).tanh()
                wrote = wrote + scores.masked_fill(~seen, -math.inf).softmax(-1) @ v @ W_O
            return wrote

        def mlp(x, w=w):
            hidden = x @ w["mlp.W_in"] + w.get("mlp.b_in", 0.0)
            gate = w.get("mlp.W_gate")
            hidden = act(hidden) if gate is None else act(x @ gate) * hidden
            return hidden @ w["mlp.W_out"] + w.get("mlp.b_out", 0.0)

        for sublayer, name in ((attention, f"{block}ln1"), (mlp, f"{block}ln2")):
            wrote = sublayer(x if c.norm_place == "after" else norm(x, name))
            if c.norm_place != "before":
                wrote = norm(wrote, name if c.norm_place == "after" else f"{name}_post")
            x = x + wrote
    x = norm(x, "ln_final", c.final_norm)
    return x @ named["unembed.W_U"] + named.get("unembed.b_U", 0.0)


def gradients(model):
    """Return the gradients of parameters, by the names and in the layout of `Weights`."""
    growable, found = growable_of(model), {}
    named = growable.named_parameters()
    for name, layout in growable.parameters().items():
        parameter = named[name]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[layout.name] = layout.to_weights(gradient)
    return found


def is_new(provenance, name, tensor):
    """Return a mask of a tensor's new entries."""
    mask, old = torch.ones_like(tensor), provenance.old_name(name)
    if old is not None:
        moved = provenance.tensor_map(old)
        mask = moved.put(torch.zeros([len(axis.new_of) for axis in moved.axes]).double(), mask)
    return mask.bool()


def largest_difference(model, grown, centred=()):
    """Return the largest difference of old tensors, in the original's units.

    Differences of the mean over d_model do not count in tensors whose names end with `centred`.
    """
    old, new = growable_of(model).tensors(), growable_of(grown.model).tensors()
    worst = 0.0
    for name, tensor in old.items():
        moved = grown.provenance.tensor_map(name)
        difference = moved.unscaled(moved.old_part(new[moved.name])) - tensor
        if name.endswith(centred):
            difference = difference - difference.mean(-1, keepdim=True)
        worst = max(worst, difference.abs().max().item())
    return worst
