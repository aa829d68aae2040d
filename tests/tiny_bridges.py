"""Small random TransformerBridges, built around models made here: nothing is downloaded.

For transformer-lens 3.9 and 4: no HookedTransformer is imported. Sizes are as in `models.py`.
"""

import torch
import transformers
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

D_MLP, POS, D_VOCAB, NEURON = 37, 11, 41, 29
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": D_MLP}
SIZES |= {"vocab_size": D_VOCAB, "hidden_size": 26, "max_position_embeddings": 17}
GROUPED = {"num_key_value_heads": 1, "head_dim": 14}
GPT = {"vocab_size": D_VOCAB, "n_positions": 17, "n_layer": 2, "n_head": 2, "n_inner": D_MLP}
GPT |= {"n_embd": 26, "resid_pdrop": 0.3}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**GPT),
    "neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "llama": lambda: transformers.LlamaConfig(**SIZES, **GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **GROUPED),
    "phi3": lambda: transformers.Phi3Config(
        **SIZES | {"hidden_size": 28}, num_key_value_heads=1, pad_token_id=0
    ),
}
NATIVE = {"n_layers": 2, "d_model": 26, "n_heads": 2, "d_head": 13, "d_mlp": D_MLP}
NATIVE |= {"d_vocab": D_VOCAB, "n_ctx": 17, "init_mode": "gpt2", "seed": 0}
NAMES = (*CONFIGS, "native", "native_gated")
GATED = ("llama", "gemma2", "phi3", "native_gated")
STATES = {
    "plain": lambda bridge: None,
    "names": lambda bridge: bridge.enable_compatibility_mode(True, no_processing=True),
    "processed": lambda bridge: bridge.enable_compatibility_mode(True),
}


def boot(name, dtype=torch.float64, state="plain"):
    """A bridge of the family, every parameter random, in one of STATES."""
    torch.manual_seed(0)
    if name in CONFIGS:
        config = CONFIGS[name]()
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        bridge = around(model.to(dtype))
    else:
        kind = {"gated_mlp": True, "act_fn": "silu"} if name == "native_gated" else {}
        cfg = TransformerBridgeConfig(**NATIVE | {"act_fn": "gelu_new"} | kind)
        bridge = TransformerBridge.boot_native(cfg, dtype=dtype)
        randomise(bridge.original_model)
    STATES[state](bridge)
    return bridge


def around(model):
    randomise(model.eval())
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config)


@torch.no_grad()
def randomise(model):
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, D_VOCAB, (2, POS), generator=generator)


def relative(got, expected):
    """Largest difference over the largest expected entry."""
    return ((got - expected).abs().max() / expected.abs().max()).item()


def hook(point, layer=1):
    return f"blocks.{layer}.mlp.hook_{point}"
