"""Addition modulo a prime, the task of the shipped model of one layer: its sizes, data and loss.

The task and the training recipe are from Nanda, Chan, Lieberum, Smith and Steinhardt, "Progress
measures for grokking via mechanistic interpretability" (2023): tokens (a, b, =), the answer
a + b mod p at the last position, one layer, no normalisation, AdamW with weight decay 1, full
batch. Only the activation differs: SiLU, for which a neuron is exactly the theorem's attention
head. `analyses/tools/README.md` says how the shipped model was trained; `train_attention_only`
trains other models on the task.

The only query at the last position is '=', and a token has p possible values. So keys, values and
their products with W_O are computed once per token and not once per pair, which takes about eight
times fewer flops per step than a plain forward pass.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig


@dataclass(frozen=True)
class Recipe:
    """The settings that determine the result."""

    modulus: int = 113
    d_model: int = 128
    n_heads: int = 4
    d_mlp: int = 512
    seed: int = 0
    train_fraction: float = 0.3
    lr: float = 1e-3
    weight_decay: float = 1.0
    # The model generalises near epoch 9,500. Then weights that memorise training pairs decay, and
    # the neurons become clean waves.
    epochs: int = 25_000

    def config(self) -> dict[str, Any]:
        """Return keyword arguments for HookedTransformerConfig."""
        return {
            "n_layers": 1,
            "d_model": self.d_model,
            "n_heads": self.n_heads,
            "d_head": self.d_model // self.n_heads,
            "d_mlp": self.d_mlp,
            "d_vocab": self.modulus + 1,
            "d_vocab_out": self.modulus,
            "n_ctx": 3,
            "act_fn": "silu",
            "normalization_type": None,
            "device": "cpu",
            "model_name": "modular-addition-silu-1l",
        }

    def model(self) -> HookedTransformer:
        """Return the untrained model. As in the paper it has no biases: they stay at zero."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "HookedTransformer is deprecated")
            model = HookedTransformer(HookedTransformerConfig(**self.config(), seed=self.seed))
        for name, parameter in model.named_parameters():
            if ".b_" in name:
                parameter.requires_grad_(False)
        return model


def pairs(recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """Return all inputs [p * p, 3], their answers, and which of them are training pairs."""
    p = recipe.modulus
    a, b = torch.meshgrid(torch.arange(p), torch.arange(p), indexing="ij")
    tokens = torch.stack([a.flatten(), b.flatten(), torch.full((p * p,), p)], dim=1)
    order = torch.randperm(p * p, generator=torch.Generator().manual_seed(recipe.seed))
    trained = torch.zeros(p * p, dtype=torch.bool)
    trained[order[: int(recipe.train_fraction * p * p)]] = True
    return tokens, (tokens[:, 0] + tokens[:, 1]) % p, trained


def fast_logits(
    model: HookedTransformer, tokens: Tensor, neurons: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return logits at the last position, with attention computed per token instead of per pair.

    `neurons` replace the MLP if given.
    """
    attn, mlp, p = model.blocks[0].attn, model.blocks[0].mlp, model.cfg.d_vocab_out
    by_pos = [model.W_E[:p] + model.W_pos[0], model.W_E[:p] + model.W_pos[1]]
    equals = model.W_E[p:] + model.W_pos[2]
    stream = torch.cat([*by_pos, equals])  # a, then b, then '='
    query = torch.einsum("d,hde->he", equals[0], attn.W_Q)
    score = torch.einsum("td,hde,he->th", stream, attn.W_K, query) / attn.attn_scale
    value = torch.einsum("td,hde,hem->thm", stream, attn.W_V, attn.W_O)
    index = torch.stack([tokens[:, 0], tokens[:, 1] + p, torch.full_like(tokens[:, 0], 2 * p)])
    pattern = score[index].softmax(dim=0)  # [key_pos, pair, head]
    resid = equals + torch.einsum("kbh,kbhm->bm", pattern, value[index])
    resid = resid + (F.silu(resid @ mlp.W_in) @ mlp.W_out if neurons is None else neurons(resid))
    return resid @ model.W_U


def loss_of(logits: Tensor, answers: Tensor) -> Tensor:
    """Return the cross-entropy in float64; late losses are below float32's resolution."""
    return F.cross_entropy(logits.double(), answers)


def adamw(recipe: Recipe, model: HookedTransformer) -> torch.optim.AdamW:
    """Return the paper's optimizer for the trained parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    settings = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    return torch.optim.AdamW(parameters, betas=(0.9, 0.98), **settings)
