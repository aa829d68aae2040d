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
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig, quiet

FIXTURE = Path(__file__).parents[2] / "tests" / "fixtures" / "brackets"
NORM = {"w": "weight", "b": "bias"}
START, PAD, END, OPEN, CLOSE = range(5)
LONGEST = 20  # the largest number of brackets in a text
BALANCED = p.custom(lambda logits: logits[:, 0, 1] - logits[:, 0, 0], name="balanced")
"""The metric: the logit of "balanced" minus that of "not balanced", at the first token."""

IN_BRIDGE = {
    **{"embed.W_E": "tok_embed.weight", "pos_embed.W_pos": "pos.weight"},
    **{f"ln{i}.{ours}": f"ln{i}.{name}" for i in (1, 2) for ours, name in NORM.items()},
    **{f"ln_final.{ours}": f"ln_out.{name}" for ours, name in NORM.items()},
    **{f"attn.W_{part}": f"attn.{part.lower()}.weight" for part in "QKVO"},
    **{f"attn.b_{part}": f"attn.{part.lower()}.bias" for part in "QKVO"},
    **{f"mlp.W_{part}": f"mlp.fc_{part}.weight" for part in ("in", "out")},
    **{f"mlp.b_{part}": f"mlp.fc_{part}.bias" for part in ("in", "out")},
    "unembed.W_U": "head.weight",
}
"""Names of weights in a native model, by names in a HookedTransformer, for one layer."""


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


def is_balanced(brackets: Tensor) -> Tensor:
    """Return whether each text [rows, length] is balanced."""
    height = torch.where(brackets == OPEN, 1, -1).cumsum(dim=1)
    return (height[:, -1] == 0) & (height >= 0).all(dim=1)


def spoilt(brackets: Tensor, how: str, generator: torch.Generator) -> Tensor:
    """Return a text with one bracket flipped, with two brackets swapped, or shuffled."""
    brackets, n = brackets.clone(), len(brackets)
    first, second = torch.randint(n, (2,), generator=generator).tolist()
    if how == "turned":
        brackets[first] = OPEN + CLOSE - brackets[first]
    elif how == "swapped":
        brackets[[first, second]] = brackets[[second, first]]
    else:
        brackets = brackets[torch.randperm(n, generator=generator)]
    return brackets


def with_ends(brackets: Tensor) -> Tensor:
    """Return tokens: a text between the start token and the end token."""
    return F.pad(F.pad(brackets, (1, 0), value=START), (0, 1), value=END)


def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw tokens [rows, pos] of one length, half of them spoilt, and whether each is balanced."""
    length = 2 * int(torch.randint(2, LONGEST // 2 + 1, (), generator=generator))
    brackets = balanced_texts(rows, length, generator)
    for row, how in enumerate(("turned", "swapped", "shuffled") * (rows // 6)):
        brackets[row] = spoilt(brackets[row], how, generator)
    return with_ends(brackets), is_balanced(brackets).long()


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


def load(folder: Path = FIXTURE, dtype: torch.dtype = torch.float64) -> HookedTransformer:
    """Load a model as a HookedTransformer."""
    with quiet():
        config = json.loads((folder / "config.json").read_text("utf-8"))
        model = HookedTransformer(HookedTransformerConfig(**config, dtype=dtype))
        weights = load_file(folder / "model.safetensors")
        missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert {name.split(".")[-1] for name in missing} <= {"mask", "IGNORE", "b_U"}
    return model.eval()


def load_bridge(folder: Path = FIXTURE, dtype: torch.dtype = torch.float64) -> TransformerBridge:
    """Load the same model as a bridge, which needs no HookedTransformer."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    bridge = TransformerBridge.boot_native(TransformerBridgeConfig(**config), dtype=dtype)
    state = {
        name.replace("._original_component", ""): tensor
        for name, tensor in bridge.original_model.state_dict().items()
    }
    for name, weight in load_file(folder / "model.safetensors").items():
        state[_name_in_bridge(name)].copy_(_as_linear(name, weight))
    return bridge.eval()


def _name_in_bridge(name: str) -> str:
    """Return the name in a native model for a HookedTransformer's weight."""
    if not name.startswith("blocks."):
        return IN_BRIDGE[name]
    _, layer, part, weight = name.split(".")
    return f"layers.{layer}.{IN_BRIDGE[f'{part}.{weight}']}"


def _as_linear(name: str, weight: Tensor) -> Tensor:
    """Return a HookedTransformer's weight in the shape of torch's linear modules, [out, in]."""
    match name.split(".")[-1]:
        case "W_Q" | "W_K" | "W_V":
            return weight.transpose(1, 2).flatten(0, 1)  # [head_index, d_model, d_head]
        case "W_O":
            return weight.flatten(0, 1).T
        case "b_Q" | "b_K" | "b_V":
            return weight.flatten()
        case "W_in" | "W_out" | "W_U":
            return weight.T
        case _:
            return weight
