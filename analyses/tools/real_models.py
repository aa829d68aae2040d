"""The trained models that studies of exactness and attribution use: the shipped one, and others."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from attn_only_lens import pretrained
from attn_only_lens.models.source_folder import load_source
from attn_only_lens.tl import HookedTransformer

REAL = {
    "char_gelu_4l": "characters of English, 4 layers, gelu",
    "sort_gelu_new_3l": "sorts six digits, 3 layers, gelu_new",
    "modular_addition_relu_1l": "(a + b) mod 113, all inputs, 1 layer, relu",
    "stories_swiglu_5l": "short stories, 5 layers, SwiGLU",
    "words_swiglu_4l": "English, 4 layers, SwiGLU",
}


def real(folder: Path, name: str) -> tuple[HookedTransformer, Tensor]:
    """Return a real model in float32, and tokens of its texts."""
    tokens = load_file(folder / name / "tokens.safetensors")["tokens"].long()
    return load_source(folder / name).eval(), tokens


def trained(
    folder: Path, lengths: Mapping[str, int], device: str, *, smoke: bool
) -> Iterator[tuple[str, HookedTransformer, Tensor]]:
    """Yield the shipped model and the real models in a folder, in float64, with prompts for each.

    Args:
        folder: the folder of the real models.
        lengths: prompt lengths by model; other models get 16 tokens.
        device: the device of models and prompts.
        smoke: whether to leave out the real models.
    """
    shipped = pretrained.modular_addition()
    shipped.to(torch.float64, print_details=False).to(device, print_details=False)
    yield "modular_addition", shipped, pretrained.modular_addition_tokens().to(device)
    for name in () if smoke else REAL:
        if (folder / name).is_dir():
            source, tokens = real(folder, name)
            source.to(torch.float64, print_details=False).to(device, print_details=False)
            if source.cfg.n_key_value_heads is not None:
                source.set_ungroup_grouped_query_attention(True)
            yield name, source, tokens[:, : lengths.get(name, 16)].to(device)
