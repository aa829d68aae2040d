"""Shared: training runs on Small English in which models grow: transformers' models, in bridges.

Texts, loss and questions are those of `small_english.py`; a batch depends only on the data
seed and the step number. The embedding and the unembedding are separate matrices (growth in width
separates them anyway), so that a grown model and a full-size model have the same parameters.

AdamW trains all parameters. The learning rate rises over the first `warmup` steps and falls
linearly to zero over the last `decay` steps; growth does not change it. All tensors have the same
rate, even those that growth scales (`growth/optimizer.py` would scale their rates). Moments move
with their entries, and moments of new entries start at zero.

A run may continue another run, with its weights, moments, step and totals. So many runs share one
small model, and no text is read twice.

`step_flops` counts the flops of matrix products, including padding; a backward pass counts twice a
forward pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformer_lens.model_bridge import TransformerBridge
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from analyses.tools.small_english import (
    POOL,
    Recipe,
    bridged,
    differences,
    held_out,
    held_out_loss,
    held_out_texts,
    loss_of,
    pool,
    questions,
)
from analyses.tools.training import Training, claim, put_back, train
from attn_only_lens import Contrast, grow
from attn_only_lens.growth.expansion.expansion import Expansion
from attn_only_lens.growth.expansion.initialise import Initialiser
from attn_only_lens.growth.expansion.weights import Weights
from attn_only_lens.growth.models._grow import read
from attn_only_lens.models.in_place import copy_model

HELD_OUT = 200  # prompts per task that begin no sentence in the texts


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    n_layers: int
    d_model: int
    n_heads: int
    d_mlp: int


@dataclass(frozen=True)
class Plan:
    """The settings that determine a run.

    Attributes:
        sizes: the sizes of the model at the start.
        steps: the number of steps, including the steps of `start`.
        seed: the seed of the weights.
        data_seed: the seed of the texts.
        schedule: expansions by the step before which they happen.
        growth_seed: the seed of the new entries.
        init: the initialiser of new entries; by default the distribution of the initial weights.
        lr: the highest learning rate.
        warmup: the number of steps in which the learning rate rises.
        decay: the number of steps at the end in which it falls; 0 if other runs continue this run.
        rows: the number of texts in a batch.
        family: "llama" has gated MLPs and RMS norm; "gpt_neox" has plain MLPs and LayerNorm;
            "mixtral" is "llama" with four experts of d_mlp / 2 neurons, of which two are chosen.
        check_every: the number of steps between rows of the curve.
        save_every: the number of steps between checkpoints, a multiple of `check_every`.
        read: the number of held-out texts.
        asked: the number of prompts per task; 0 for no tasks.
        kept: steps whose weights are kept, for `model_at`.
    """

    sizes: Sizes
    steps: int
    seed: int = 0
    data_seed: int = 0
    schedule: Mapping[int, Expansion] = field(default_factory=dict)
    growth_seed: int = 0
    init: Initialiser | None = None
    lr: float = 4e-3
    warmup: int = 50
    decay: int = 0
    rows: int = 32
    family: Literal["llama", "gpt_neox", "mixtral"] = "llama"
    check_every: int = 100
    save_every: int = 200
    read: int = 512
    asked: int = 50
    kept: tuple[int, ...] = ()

    def model(self) -> TransformerBridge:
        """Return the untrained model."""
        sizes = self.sizes
        settings = {name: getattr(sizes, name) for name in ("n_layers", "d_model", "n_heads")}
        plain = Recipe(seed=self.seed, d_mlp=sizes.d_mlp, **settings).config()
        plain.tie_word_embeddings = False
        torch.manual_seed(self.seed)
        if self.family == "llama":
            return bridged(LlamaForCausalLM(plain))
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        names += ("num_attention_heads", "max_position_embeddings", "initializer_range")
        names += ("bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters")
        options = {name: getattr(plain, name) for name in names}
        if self.family == "gpt_neox":
            config = GPTNeoXConfig(use_parallel_residual=False, **options)
            return bridged(GPTNeoXForCausalLM(config))
        options |= {"intermediate_size": sizes.d_mlp // 2, "num_key_value_heads": sizes.n_heads}
        mixture = MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **options)
        return bridged(MixtralForCausalLM(mixture))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        rises = (step + 1) / self.warmup if self.warmup else 1.0
        falls = (self.steps - step) / self.decay if self.decay else 1.0
        return self.lr * min(1.0, rises, falls)


@dataclass(frozen=True)
class Done:
    """A run at its end.

    Attributes:
        curve: `step`, `tokens` and `flops` so far, `loss` on held-out text, and the share of right
            answers by task.
    """

    plan: Plan
    model: TransformerBridge
    curve: pd.DataFrame
    training: Training


@lru_cache(1)
def never() -> frozenset[str]:
    """Return the prompts that begin no sentence in the texts."""
    return held_out(HELD_OUT)


@lru_cache(64)
def _pool(data_seed: int, rows: int, number: int) -> list[Tensor]:
    return pool(Recipe(seed=data_seed, rows=rows), number, never())


@lru_cache(4)
def texts_once(n: int) -> list[Tensor]:
    """Return n held-out texts as batches [batch, pos], always the same."""
    return held_out_texts(n, never())


@lru_cache(2)
def questions_once(n: int) -> dict[str, Contrast]:
    """Return the questions of every task, n for each; results are cached."""
    return questions(n) if n else {}


def batch(plan: Plan, step: int) -> Tensor:
    """Return the tokens of a step, [batch, pos]."""
    return _pool(plan.data_seed, plan.rows, step // POOL)[step % POOL]


def step_flops(weights: Weights, tokens: Tensor) -> int:
    """Return the flops of a training step on tokens [batch, pos]; the last token is only a target.

    A matrix with w weights takes 2 w per token. Attention takes 4 d_head per head, query and key
    (scores and values), including masked keys. The backward pass takes twice as many.
    """
    rows, pos = tokens.shape[0], tokens.shape[1] - 1
    matrices = {name: tensor for name, tensor in weights.tensors.items() if ".W_" in name}
    queries = sum(w.shape[0] * w.shape[2] for n, w in matrices.items() if n.endswith("W_Q"))
    n_weights = sum(w.numel() for name, w in matrices.items() if name != "embed.W_E")
    return 3 * rows * pos * (2 * n_weights + 4 * queries * pos)


@torch.no_grad()
def figures(model: TransformerBridge, n_read: int, asked: int) -> dict[str, float]:
    """Return the loss on held-out text, and the share of right answers by task."""
    wrapped = model.original_model
    right = {
        task: (differences(wrapped, pairs) > 0).double().mean().item()
        for task, pairs in questions_once(asked).items()
    }
    return {"loss": held_out_loss(wrapped, texts_once(n_read)), **right}


def adamw(plan: Plan, model: TransformerBridge, start: Done | None) -> torch.optim.AdamW:
    """Return the optimizer of all parameters, with the state of `start`'s optimizer if given."""
    settings = {"lr": plan.lr, "weight_decay": 0.1, "betas": (0.9, 0.98)}
    if start is None:
        return torch.optim.AdamW(model.parameters(), **settings)
    ours, optimizer_state = dict(model.named_parameters()), start.training.optimizer
    names = {parameter: name for name, parameter in start.model.named_parameters()}
    groups = [
        group | {"params": [ours[names[parameter]] for parameter in group["params"]]}
        for group in optimizer_state.param_groups
    ]
    optimizer = torch.optim.AdamW(groups, **settings)
    optimizer.load_state_dict(optimizer_state.state_dict())
    return optimizer


def training_of(plan: Plan, device: str, start: Done | None) -> Training:
    """Return the training of a run before its first step."""
    model = plan.model().to(device) if start is None else copy_model(start.model, copy_weights=True)
    optimizer = adamw(plan, model, start)
    return Training(model, optimizer, plan.schedule, plan.init, plan.growth_seed)


def update(
    plan: Plan,
    training: Training,
    step: int,
    loss_of: Callable[[Any, Tensor], Tensor] = loss_of,
) -> Tensor:
    """Change the weights by one step of AdamW, and return the tokens of the step, [batch, pos]."""
    tokens, model = batch(plan, step), training.model.original_model
    training.optimizer.zero_grad()
    loss_of(model, tokens.to(model.device)).backward()
    clip_grad_norm_(training.model.parameters(), 1.0)
    for group in training.optimizer.param_groups:
        group["lr"] = plan.rate(step)
    training.optimizer.step()
    return tokens


def run(
    plan: Plan,
    folder: Path,
    device: str,
    tick: Callable[[int], Any] = lambda _: None,
    *,
    start: Done | None = None,
) -> Done:
    """Train to the end, resuming from the folder's checkpoint if there is one.

    Args:
        plan: the plan; if `start` is given, with its sizes, and with more steps than it has done.
        folder: a folder for this run only.
        device: the device of the model.
        tick: called with the number of steps that were done since the last call.
        start: the run that this run continues; it is not changed.
    """
    claim(folder / "run.txt", f"{plan!r}\nfrom {start and start.plan!r}\n")
    training = training_of(plan, device, start)
    totals = {"tokens": 0, "flops": 0}
    if start is not None:
        totals = {name: int(start.curve[name].iloc[-1]) for name in totals}

    weights: dict[int, Weights] = {}  # by the number of growths so far

    def one(training: Training, step: int) -> dict[str, int]:
        stage = len(training.history)
        if stage not in weights:
            weights[stage] = read(training.model)
        tokens = update(plan, training, step)
        n_tokens = tokens.shape[0] * (tokens.shape[1] - 1)
        return {"tokens": n_tokens, "flops": step_flops(weights[stage], tokens)}

    curve = train(
        training,
        plan.steps,
        folder,
        one,
        lambda model: figures(model, plan.read, plan.asked),
        totals,
        check_every=plan.check_every,
        save_every=plan.save_every,
        tick=tick,
        first=0 if start is None else start.training.done,
        kept=plan.kept,
    )
    return Done(plan, training.model, curve, training)


def model_at(done: Done, step: int, folder: Path, *, start: Done | None = None) -> Any:
    """Return the model at one of the plan's kept steps, before it grows at this step."""
    plan = done.plan
    model = training_of(plan, "cpu", start).model
    for number, growth_step in enumerate(sorted(plan.schedule)):
        if growth_step < step:
            seed = plan.growth_seed + number
            model = grow(model, plan.schedule[growth_step], init=plan.init, seed=seed).model
    return put_back(model, folder / f"{step}.safetensors")
