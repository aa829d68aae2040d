"""Small random HookedTransformers of every kind that can be converted, in one table for all tests.

Sizes are distinct primes (d_model is 2 * 13 where heads must divide it), so that no swapped axis
can pass; every parameter is random, biases and norm weights too, so that none can be forgotten.
Under transformer-lens 4 every test of a module that imports `build` is skipped (`conftest.py`).
"""

import json

import torch
from common import D_MLP, D_VOCAB, N_LAYERS
from safetensors.torch import save_file
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

BASE = {
    "n_layers": N_LAYERS,
    "d_model": 26,
    "n_heads": 2,
    "d_head": 13,
    "d_mlp": D_MLP,
    "d_vocab": D_VOCAB,
    "d_vocab_out": 43,
    "n_ctx": 17,
    "act_fn": "gelu",
    "device": "cpu",
}
ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 6}
GATED = {"gated_mlp": True, "act_fn": "silu"}
RMS = {"normalization_type": "RMS"}

FAMILIES: dict[str, dict] = {
    # activations
    "silu": {"act_fn": "silu"},
    "gelu": {"act_fn": "gelu"},
    "gelu_new": {"act_fn": "gelu_new"},
    "gelu_fast": {"act_fn": "gelu_fast"},
    "gelu_pytorch_tanh": {"act_fn": "gelu_pytorch_tanh"},
    "relu": {"act_fn": "relu"},
    "silu_gated": GATED,
    "gelu_gated": GATED | {"act_fn": "gelu"},
    "gelu_new_gated": GATED | {"act_fn": "gelu_new"},
    "gelu_fast_gated": GATED | {"act_fn": "gelu_fast"},
    "gelu_pytorch_tanh_gated": GATED | {"act_fn": "gelu_pytorch_tanh"},
    "relu_gated": GATED | {"act_fn": "relu"},
    # norms
    "ln_pre": {"normalization_type": "LNPre"},
    "rms": RMS,
    "rms_pre": {"normalization_type": "RMSPre"},
    "no_norm": {"normalization_type": None},
    "final_rms": {"final_rms": True},
    "post_norm": RMS | {"original_architecture": "Olmo2ForCausalLM"} | GATED,
    "norms_before_and_after": RMS | GATED | {"use_normalization_before_and_after": True},
    # positions
    "rotary": ROTARY,
    "rotary_adjacent": ROTARY | {"rotary_adjacent_pairs": True},
    "alibi": {"positional_embedding_type": "alibi"},
    "shortformer": {"positional_embedding_type": "shortformer"},
    # attention
    "grouped": {"n_heads": 6, "d_head": 5, "n_key_value_heads": 2},
    "grouped_ungrouped": {
        "n_heads": 6,
        "d_head": 5,
        "n_key_value_heads": 2,
        "ungroup_grouped_query_attention": True,
    },
    "local": {
        "use_local_attn": True,
        "window_size": 3,
        "attn_types": ["global", "local", "global"],
    },
    "soft_caps": {"attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 3.0},
    "qk_norm": RMS | {"use_qk_norm": True},
    "sinks": {"use_attention_sinks": True},
    "clip_qkv": {"clip_qkv": 0.3},
    "inverse_layer": {"scale_attn_by_inverse_layer_idx": True},
    "no_attn_scale": {"use_attn_scale": False},
    "bidirectional": {"attention_dir": "bidirectional"},
    # blocks
    "parallel": {"parallel_attn_mlp": True},
    "parallel_gated": {"parallel_attn_mlp": True} | GATED | RMS | ROTARY,
    "parallel_norms": {"parallel_attn_mlp": True, "use_normalization_before_and_after": True} | RMS,
    "llama": RMS | GATED | ROTARY | {"n_heads": 6, "d_head": 8, "n_key_value_heads": 2},
    "gemma": RMS
    | GATED
    | ROTARY
    | {
        "act_fn": "gelu_pytorch_tanh",
        "use_normalization_before_and_after": True,
        "attn_scores_soft_cap": 5.0,
        "output_logits_soft_cap": 7.0,
        "use_local_attn": True,
        "window_size": 5,
        "attn_types": ["local", "global", "local"],
    },
}

CORE = ("gelu", "llama", "parallel", "no_norm", "norms_before_and_after", "post_norm")
"""A family of each structure, for tests that would be slow over all FAMILIES."""

STRUCTURES = ("gelu", "silu_gated", *list(FAMILIES)[list(FAMILIES).index("ln_pre") :])
"""The FAMILIES without those that differ from another only in their activation."""


def build(name, dtype=torch.float64, scale=0.4, **changes):
    """Return a model of the family with random parameters."""
    cfg = HookedTransformerConfig(**BASE | FAMILIES[name] | {"dtype": dtype} | changes)
    model = HookedTransformer(cfg)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            random = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(random * scale)
        for key, parameter in model.named_parameters():
            if key.endswith(".w"):
                parameter.add_(1.0)  # norm weights
    return model


def written_out(name, dtype=torch.float64, **changes):
    """Return `build`'s model with separate keys and values for each head of a group.

    The two compute the same function without hooks, but here a plain hook patches one head only.
    """
    shared = build(name, dtype, **changes)
    if shared.cfg.n_key_value_heads is None or shared.cfg.ungroup_grouped_query_attention:
        return shared
    model = build(name, dtype, **changes | {"n_key_value_heads": None})
    n_heads, n_shared = shared.cfg.n_heads, shared.cfg.n_key_value_heads
    state = dict(shared.state_dict())
    for key in [key for key in state if "._" in key]:  # _W_K, _b_K, _W_V, _b_V
        copies = [state[key][head * n_shared // n_heads] for head in range(n_heads)]
        state[key.replace("._", ".")] = torch.stack(copies)
        del state[key]
    model.load_state_dict(state)
    return model


def source_folder(folder):
    """Save a source model with a tokenizer, as commands take it."""
    folder.mkdir(exist_ok=True)
    model = build("gelu", dtype=torch.float32, d_vocab_out=D_VOCAB)
    config = {k: v for k, v in BASE.items() if k not in ("device", "d_vocab_out")}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    tiny_tokenizer(D_VOCAB, folder / "tokenizer")
    return folder
