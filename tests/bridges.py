"""Small bridges of every kind, on transformer-lens 3.9 and 4, built from configurations.

Sizes are distinct primes, or twice a prime where heads must divide them, so that no swapped axis
can pass. Every parameter is random. Nothing here needs HookedTransformer, which 4 lacks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from common import BATCH, D_MLP, D_VOCAB, tokens
from tiny_tokenizer import tiny_tokenizer
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from attn_only_lens import convert, expose_neuron_heads
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

NEURON = 29
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": D_MLP}
SIZES |= {"vocab_size": D_VOCAB, "hidden_size": 26, "max_position_embeddings": 17}
GROUPED = {"num_key_value_heads": 1, "head_dim": 14}
FACTORS = {"residual_multiplier": 0.31, "embedding_multiplier": 1.7, "logits_scaling": 2.3}
FACTORS |= {"attention_multiplier": 0.19}
WIDE = SIZES | {"hidden_size": 28, "num_key_value_heads": 1}  # for even head sizes
GPT = {"vocab_size": D_VOCAB, "n_positions": 17, "n_layer": 2, "n_head": 2, "n_embd": 26}
GPT |= {"n_inner": D_MLP} | {"bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PATCHES = {"image_size": 10, "patch_size": 2, "num_channels": 3}
NATIVE = {"n_layers": 2, "d_model": 26, "n_heads": 2, "d_head": 13, "d_mlp": D_MLP, "n_ctx": 17}
NATIVE |= {"d_vocab": D_VOCAB, "init_mode": "gpt2", "seed": 0, "act_fn": "gelu_new"}


@dataclass(frozen=True)
class Family:
    """A kind of model, and the paths of its MLP modules in the transformers model.

    Attributes:
        config: a function that returns the configuration.
        layers: the path of the list of layers.
        parts: the paths, within a layer, of the modules that compute q (and u) and W_out.
        act: the name of the activation.
        auto: the transformers class that builds the model.
    """

    config: Callable[[], object]
    layers: str
    parts: tuple[str, ...]
    act: str
    auto: type = transformers.AutoModelForCausalLM


FC = ("mlp.fc1", "mlp.fc2")
C_FC = ("mlp.c_fc", "mlp.c_proj")
TO_4H = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LLAMA = ("model.layers", GATED, "silu")
GEMMA = ("model.layers", GATED, "tanh")
FAMILIES = {
    "gpt2": Family(lambda: transformers.GPT2Config(**GPT), "transformer.h", C_FC, "tanh"),
    "gpt_neo": Family(
        lambda: transformers.GPTNeoConfig(
            **{"vocab_size": D_VOCAB, "hidden_size": 26, "num_layers": 2, "num_heads": 2},
            **{"attention_types": [[["global", "local"], 1]], "intermediate_size": D_MLP},
            **{"max_position_embeddings": 17, "window_size": 3, "bos_token_id": 1},
            eos_token_id=2,
        ),
        *("transformer.h", C_FC, "tanh"),
    ),
    "neox": Family(
        lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
        *("gpt_neox.layers", TO_4H, "gelu"),
    ),
    "neox_sequential": Family(
        lambda: transformers.GPTNeoXConfig(**SIZES, use_parallel_residual=False, hidden_act="relu"),
        *("gpt_neox.layers", TO_4H, "relu"),
    ),
    "gptj": Family(
        lambda: transformers.GPTJConfig(**GPT, rotary_dim=6),
        *("transformer.h", ("mlp.fc_in", "mlp.fc_out"), "tanh"),
    ),
    "llama": Family(lambda: transformers.LlamaConfig(**SIZES, **GROUPED), *LLAMA),
    "granite": Family(lambda: transformers.GraniteConfig(**SIZES, **GROUPED, **FACTORS), *LLAMA),
    "mistral": Family(lambda: transformers.MistralConfig(**SIZES, **GROUPED), *LLAMA),
    "qwen2": Family(lambda: transformers.Qwen2Config(**WIDE), *LLAMA),
    "qwen3": Family(lambda: transformers.Qwen3Config(**SIZES, **GROUPED), *LLAMA),
    "gemma": Family(lambda: transformers.GemmaConfig(**SIZES, **GROUPED), *GEMMA),
    "gemma2": Family(lambda: transformers.Gemma2Config(**SIZES, **GROUPED), *GEMMA),
    "gemma3": Family(lambda: transformers.Gemma3TextConfig(**SIZES, **GROUPED), *GEMMA),
    "phi": Family(lambda: transformers.PhiConfig(**SIZES), "model.layers", FC, "tanh"),
    "phi3": Family(
        lambda: transformers.Phi3Config(**WIDE, pad_token_id=0),
        *("model.layers", ("mlp.gate_up_proj", "mlp.down_proj"), "silu"),
    ),
    "olmo2": Family(lambda: transformers.Olmo2Config(**WIDE), *LLAMA),
    "bert": Family(
        lambda: transformers.BertConfig(**SIZES, **NO_DROPOUT),
        *("bert.encoder.layer", ("intermediate.dense", "output.dense"), "gelu"),
        transformers.AutoModelForMaskedLM,
    ),
    "vit": Family(
        lambda: transformers.ViTConfig(
            **{key: SIZES[key] for key in SIZES if "vocab" not in key and "position" not in key},
            **NO_DROPOUT | PATCHES,
            num_labels=7,
        ),
        *("vit.layers", FC, "gelu"),
        transformers.AutoModelForImageClassification,
    ),
    "native": Family(lambda: {}, "layers", FC, "tanh"),
    "native_gated": Family(lambda: {"gated_mlp": True, "act_fn": "silu"}, "layers", GATED, "silu"),
}

EVERY = tuple(FAMILIES)
CHOSEN = ("gpt2", "neox", "llama", "gemma2", "phi3", "native", "native_gated")
"""The families for tests that run every family in every state."""
if HAS_HOOKED_TRANSFORMER:  # bridges hardly differ between versions: all of them are tested with 4
    EVERY = (*CHOSEN, "granite", "bert", "vit")
    CHOSEN = ("gpt2", "llama", "native_gated")
STATES = {
    "plain": lambda bridge: None,
    "names": lambda bridge: bridge.enable_compatibility_mode(True, no_processing=True),
    "processed": lambda bridge: bridge.enable_compatibility_mode(True),
}


def original(name, dtype=torch.float64):
    """Return the transformers model of a family."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = family.auto.from_config(family.config(), attn_implementation="eager")
    return randomise(model.to(dtype).eval())


def boot(name, dtype=torch.float64, state="plain"):
    """Return a bridge around the same model, in one of STATES."""
    if name.startswith("native"):
        cfg = TransformerBridgeConfig(**NATIVE | FAMILIES[name].config())
        bridge = TransformerBridge.boot_native(cfg, dtype=dtype)
        randomise(bridge.original_model)
    else:
        bridge = bridged(original(name, dtype))
    STATES[state](bridge)
    return bridge


def hf_folder(folder, name="gpt2", dtype=torch.float32, tokenizer=True):
    """Save the same model as a transformers folder, with a tokenizer for its words."""
    original(name, dtype).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer(D_VOCAB, folder)
    return folder


def exposed(name, dtype=torch.float64, state="plain"):
    """Return the same bridge with its neuron-heads exposed."""
    return expose_neuron_heads(boot(name, dtype, state)).model


def exposed_copy(bridge, **options):
    """Return a copy of a bridge with its neuron-heads exposed as long as the copy exists."""
    return expose_neuron_heads(bridge, copy=True, **options).model


def with_heads(kind, dtype=torch.float64, **changes):
    """Return a model with neuron-heads: a family, or "converted" and one of `models.build`."""
    if kind in FAMILIES:
        return exposed_copy(boot(kind, dtype))
    from models import build  # a module-level import would skip the tests under 4

    return convert(build(kind.removeprefix("converted "), dtype, **changes))


def bridged(model):
    """Return a bridge around a transformers model."""
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config)


@torch.no_grad()
def randomise(model):
    """Set every parameter to random values in place, including ones and zeros."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def inputs(name, dtype=torch.float64):
    """Return inputs for a model of the family: tokens, or the pixels of pictures."""
    if name != "vit":
        return tokens()
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, 3, 10, 10, generator=generator, dtype=dtype)
