"""Small English: a four-layer language model that ships with the package, and held-out texts.

The model card is `data/small_english/README.md`.
"""

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from attn_only_lens.heads.transcoder import Transcoder
from attn_only_lens.models.hf_folder import no_bars, read_hf_folder
from attn_only_lens.models.source_folder import parse_device, parse_dtype, read_tokenizer
from attn_only_lens.tl import (
    HookedTransformer,
    HookedTransformerConfig,
    convert_llama_weights,
    quiet,
    require_hooked_transformer,
)
from attn_only_lens.transcoders import load as load_transcoders

_DATA = files(__package__) / "data" / "small_english"


@torch.inference_mode(False)  # weights created in inference mode cannot be trained
def small_english(
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = torch.float32,
    *,
    hooked: bool = False,
) -> Any:
    """Return a four-layer language model that is small enough to run on any machine.

    The model is a LLaMA (gated MLPs, RMSNorm, rotary positions) with a vocabulary of 456 tokens:
    444 words, 9 marks and 3 special tokens. The model was trained on text from a grammar
    (`analyses/tools/small_english_grammar.py`), in which verbs agree with subjects, pronouns agree
    with names, brackets are closed, and lists repeat words. `tasks.agreement`, `tasks.brackets`,
    `tasks.induction` and `tasks.ioi` make prompts that test what the model has learnt.

    Args:
        device: the device of the model.
        dtype: the floating-point type of the model; it was trained in float32.
        hooked: return a HookedTransformer, for `convert` (transformer-lens 3.9).

    Returns:
        A `TransformerBridge`, or a `HookedTransformer`, with its tokenizer. Its weights are neither
        folded nor centred.

    Raises:
        UnsupportedCallError: `hooked` is True, but transformer-lens 4 has no HookedTransformer.
        CheckpointError: the installed files are damaged, or the device or dtype is unknown.

    Example:
        >>> from attn_only_lens import pretrained
        >>> model = pretrained.small_english()
        >>> model.to_str_tokens("The keys near the cabinet")
        ['<s>', 'The', ' keys', ' near', ' the', ' cabinet']
        >>> logits = model("The keys near the cabinet")[0, -1]
        >>> bool(logits[model.to_single_token(" are")] > logits[model.to_single_token(" is")])
        True
    """
    if hooked:
        require_hooked_transformer("small_english as a HookedTransformer")
    with as_file(_DATA) as folder, no_bars():
        if hooked:
            return _hooked(folder, parse_device(device), parse_dtype(dtype))
        bridge = read_hf_folder(folder, str(folder), parse_dtype(dtype), parse_device(device))
    bridge.cfg.model_name = "small-english-4l"
    return bridge


def small_english_texts() -> list[str]:
    """Return held-out texts of `small_english`, about 100,000 characters in total.

    Example:
        >>> from attn_only_lens import pretrained
        >>> texts = pretrained.small_english_texts()
        >>> texts[0][:30]
        ' David Barbara queens friend D'
    """
    return (_DATA / "texts.txt").read_text("utf-8").splitlines()


@torch.inference_mode(False)
def small_english_transcoders(
    device: str | torch.device = "cpu", dtype: str | torch.dtype = torch.float32
) -> dict[int, Transcoder]:
    """Return {layer: transcoder}: a JumpReLU transcoder for each MLP of `small_english`.

    The transcoders read the MLP's input (the output of the norm, including its gain). Their weights
    are stored in float16. The model card says how they were trained, and how well they
    imitate the MLPs.

    Args:
        device: the device of the weights.
        dtype: the floating-point type of the weights.

    Raises:
        CheckpointError: the device or dtype is unknown.

    Example:
        >>> from attn_only_lens import pretrained
        >>> pretrained.small_english_transcoders()[3]
        <Transcoder small-english-4l, layer 3: of 600 features (jumprelu), reads input>
    """
    with as_file(_DATA / "transcoders" / "weights") as folder:
        return load_transcoders(folder, device=device, dtype=dtype)


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
