"""A saturated classifier of balanced brackets, with its texts: `tests/fixtures/brackets`.

The model has the architecture of ARENA's chapter on balanced brackets: three layers, two heads,
bidirectional attention, and the answer at the first token. The model is right on nearly every text,
and its logits hardly move until a patch changes its answer, which gradients do not predict.

ARENA pads texts to one length and masks the padding. Here, all texts in a batch have the same
length, so there is no padding. `analyses/tools/README.md` says how the model was trained.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import patching as p
from attn_only_lens.tl import convert_tl_checkpoint

FIXTURE = Path(__file__).parents[2] / "tests" / "fixtures" / "brackets"
START, PAD, END, OPEN, CLOSE = range(5)
BALANCED = p.custom(lambda logits: logits[:, 0, 1] - logits[:, 0, 0], name="balanced")
"""The metric: the logit of "balanced" minus that of "not balanced", at the first token."""


def balanced_texts(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw balanced texts [rows, length], all equally likely: walks that return to their start."""
    brackets = torch.empty(rows, length, dtype=torch.long)
    height = torch.zeros(rows)
    for place, draw in enumerate(torch.rand(length, rows, generator=generator)):
        left = length - place
        up = draw < (height + 2) * (left - height) / (2 * (height + 1) * left)
        brackets[:, place] = torch.where(up, OPEN, CLOSE)
        height += torch.where(up, 1.0, -1.0)
    return brackets


def spoilt(brackets: Tensor, how: str, generator: torch.Generator) -> Tensor:
    """Return a text with one bracket flipped ("turned"), or with two brackets swapped."""
    brackets = brackets.clone()
    first, second = torch.randint(len(brackets), (2,), generator=generator).tolist()
    if how == "turned":
        brackets[first] = OPEN + CLOSE - brackets[first]
    else:
        brackets[[first, second]] = brackets[[second, first]]
    return brackets


def with_ends(brackets: Tensor) -> Tensor:
    """Return tokens: a text between the start token and the end token."""
    return F.pad(F.pad(brackets, (1, 0), value=START), (0, 1), value=END)


@torch.no_grad()
def pairs(model: Any, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens of balanced and of spoilt texts with 6 to 14 brackets, both answered rightly."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        length = 2 * int(torch.randint(3, 8, (), generator=generator))
        clean = balanced_texts(1, length, generator)[0]
        how = ("turned", "swapped")[int(torch.randint(2, (), generator=generator))]
        tokens = with_ends(torch.stack([clean, spoilt(clean, how, generator)]))
        if model(tokens)[:, 0].argmax(dim=-1).tolist() == [1, 0]:
            yield tokens[0], tokens[1]


def load() -> TransformerBridge:
    """Return the model in float64."""
    config = TransformerBridgeConfig(**json.loads((FIXTURE / "config.json").read_text("utf-8")))
    bridge = TransformerBridge.boot_native(config, dtype=torch.float64)
    weights = load_file(FIXTURE / "model.safetensors")
    weights["unembed.b_U"] = torch.zeros(weights["unembed.W_U"].shape[1])
    bridge.load_state_dict(convert_tl_checkpoint(weights, config), strict=True)
    return bridge.eval()
