"""The trained models that several studies use, and pairs of prompts for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from attn_only_lens import Contrast, load, pretrained
from attn_only_lens import patching as p
from attn_only_lens.models.source_folder import load_source
from attn_only_lens.tl import HookedTransformer

REAL = {
    "char_gelu_4l": "characters of English, 4 layers, gelu",
    "sort_gelu_new_3l": "sorts six digits, 3 layers, gelu_new",
    "modular_addition_relu_1l": "(a + b) mod 113, all inputs, 1 layer, relu",
    "stories_swiglu_5l": "short stories, 5 layers, SwiGLU",
    "words_swiglu_4l": "English, 4 layers, SwiGLU",
}
LENGTH = {"sort_gelu_new_3l": 6, "modular_addition_relu_1l": 3}  # prompt lengths; of texts 16


def real(folder: Path, name: str) -> tuple[HookedTransformer, Tensor]:
    """Return a real model in float32, and tokens of its texts."""
    tokens = load_file(folder / name / "tokens.safetensors")["tokens"].long()
    return load_source(folder / name).eval(), tokens


def trained(folder: Path, device: str, *, smoke: bool) -> Iterator[tuple[str, Any, Tensor]]:
    """Yield the shipped model and the real models in a folder, in float64, with prompts for each.

    Args:
        folder: the folder of the real models.
        device: the device of models and prompts.
        smoke: whether to leave out the real models.
    """
    shipped = load("modular-addition", device=device, dtype=torch.float64)
    yield "modular_addition", shipped, pretrained.modular_addition_tokens().to(device)
    for name in () if smoke else REAL:
        if (folder / name).is_dir():
            source, tokens = real(folder, name)
            source.to(torch.float64, print_details=False).to(device, print_details=False)
            if source.cfg.n_key_value_heads is not None:
                source.set_ungroup_grouped_query_attention(True)
            yield name, source, tokens[:, : LENGTH.get(name, 16)].to(device)


@torch.no_grad()
def pairs(model: Any, tokens: Tensor, n: int, seed: int) -> Iterator[Contrast]:
    """Yield pairs of prompts in which one token from another prompt changes the top token.

    The metric is the logit difference of the two top tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    n_found = 0
    for _ in range(1000):
        row, other_row = torch.randint(len(tokens), (2,), generator=generator).tolist()
        place = int(torch.randint(tokens.shape[1], (1,), generator=generator))
        clean, corrupted = tokens[row], tokens[row].clone()
        corrupted[place] = tokens[other_row, place]
        correct, wrong = model(torch.stack([clean, corrupted]))[:, -1].argmax(-1).tolist()
        if correct != wrong:
            n_found += 1
            yield Contrast(clean, corrupted, p.logit_diff(correct, wrong))
        if n_found == n:
            return
    raise RuntimeError(f"of 1000 pairs of prompts, {n_found} have other top tokens; wanted {n}")
