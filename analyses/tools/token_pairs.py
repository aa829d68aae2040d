"""Pairs of prompts that differ in one token, drawn at random from a model's texts."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attn_only_lens import Contrast
from attn_only_lens import patching as p

LENGTH = {"sort_gelu_new_3l": 6, "modular_addition_relu_1l": 3}  # prompt lengths; of texts 16


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
