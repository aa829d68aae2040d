"""Small English, a four-layer language model that ships with the package, and held-out texts.

The model is a LLaMA (gated MLPs, RMSNorm, rotary positions) with a vocabulary of 456 tokens: 444
words, 9 marks and 3 special tokens. It was trained on text from a grammar
(`analyses/tools/small_english_grammar.py`), in which verbs agree with subjects, pronouns agree with
names, brackets are closed, and lists repeat words. The model card is
`data/small_english/README.md`.
"""

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from attn_only_lens.models.hf_folder import no_bars, read_hf_folder
from attn_only_lens.models.source_folder import parse_device, parse_dtype, read_tokenizer
from attn_only_lens.tl import (
    HookedTransformer,
    HookedTransformerConfig,
    convert_llama_weights,
    quiet,
    require_hooked_transformer,
)

_DATA = files(__package__) / "data" / "small_english"


@torch.inference_mode(False)  # weights created in inference mode cannot be trained
def small_english(
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = torch.float32,
    *,
    hooked: bool = False,
) -> Any:
    """Return the model, a bridge or a HookedTransformer, with its tokenizer and original weights.

    Its weights are neither folded nor centred.

    Raises:
        UnsupportedCallError: `hooked` is True, but transformer-lens 4 has no HookedTransformer.
        CheckpointError: the installed files are damaged, or the device or dtype is unknown.
    """
    if hooked:
        require_hooked_transformer("small-english as a HookedTransformer")
    with as_file(_DATA) as folder, no_bars():
        if hooked:
            return _hooked(folder, parse_device(device), parse_dtype(dtype))
        bridge = read_hf_folder(folder, str(folder), parse_dtype(dtype), parse_device(device))
    bridge.cfg.model_name = "small-english-4l"
    return bridge


def small_english_texts() -> list[str]:
    """Return held-out texts of small-english, about 100,000 characters in total.

    Example:
        >>> from attn_only_lens import pretrained
        >>> texts = pretrained.small_english_texts()
        >>> texts[0][:30]
        ' David Barbara queens friend D'
    """
    return (_DATA / "texts.txt").read_text("utf-8").splitlines()


def _hooked(folder: Path, device: torch.device, dtype: torch.dtype) -> HookedTransformer:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    source, config = loaded.to(device), loaded.config
    cfg = HookedTransformerConfig(
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        d_head=config.head_dim,
        d_mlp=config.intermediate_size,
        d_vocab=config.vocab_size,
        n_ctx=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        act_fn=config.hidden_act,
        gated_mlp=True,
        normalization_type="RMS",
        final_rms=True,
        positional_embedding_type="rotary",
        rotary_dim=config.head_dim,
        rotary_base=int(config.rope_parameters["rope_theta"]),
        original_architecture="LlamaForCausalLM",
        model_name="small-english-4l",
        init_weights=False,
        device=str(device),
        dtype=dtype,
    )
    with quiet():
        model = HookedTransformer(cfg, tokenizer=read_tokenizer(folder))
    state = convert_llama_weights(source, cfg)
    model.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, strict=False)
    return model.eval()
