"""Does an attention-only transformer train as well as one with MLPs? The paper's open question.

"It remains unknown whether such an architecture would be competitive with the more classical
transformer architecture in terms of practical considerations" (Attention-Only Transformers and
Implementing MLPs with Attention Heads, section 5). Here, transformers that have neuron-heads in
place of MLPs (`attention_only_models.py`) are trained from scratch, next to one with MLPs, on
Small English (a two-layer GPT-2) and on addition modulo 53 (one layer, no norm):

    mlp                  the SiLU MLP that the paper converts
    paper's heads        neuron-heads as in the paper, half as many as neurons: equal parameters
    without keys         the theorem's key, and W_V separate from W_Q; ⅔ as many: equal parameters
    persistent vectors   each head has a persistent key and value of its own, half as many
    mlp, an eighth       an eighth of the neurons: shows how much the text needs neurons
    started at the MLP   "paper's heads" with the theorem's weights at the start
    mlp, twice           twice the neurons
    all-attention        no MLP; as many persistent vectors in each ordinary head as neurons: equal
                         parameters (text only)

Equal parameters mean equal flops, because a head needs as many products as it has weights. Addition
has only arms with equal parameters. All arms have the same data in the same order, AdamW, the same
schedule, and the same initial attention and embeddings. Each arm tries learning rates on other
seeds, one for text and three for addition, and uses the rate with the lowest mean loss; both
neighbours of this rate are tried too. (Addition first had one seed as well. It chose .032 for the
MLP, which then ended below 50 % accuracy in four of five seeds; so all arms got three seeds.)

Compute is the flops of matrix products, forward and backward. The dense form, which masks scores
that it has computed, needs more flops; these are counted too, but not run or drawn. Times are in
`bench_training_step.py`.

How long to train on text: until the MLP's loss stops falling, that is, until twice as many steps
(with a schedule of their own) lower its held-out loss by less than 1 %. We measure this with
another seed, at 600 to 19200 steps. If no affordable length passes, we take the longest that we can
afford with five seeds and all arms, and the page says how far the loss still falls. (No length
passed: from 4800 to 9600 steps, the loss falls by 6.6 %. We could afford 4800 steps.)

Predictions for the run of 4800 steps, written before it. "Differ" compares arms seed by seed; an
interval is Student's 95 % interval over seeds.

1. The loss still falls: from 9600 to 19200 steps, by more than 1 %.
2. Neurons matter more: "mlp, an eighth" ends at least 5 % above the MLP (mean).
3. "mlp, twice" ends below the MLP, by 1 % or more (mean).
4. "paper's heads", "without keys", "persistent vectors" and "started at the MLP" end within 3 % of
   the MLP (means).
5. "paper's heads" end above the MLP, and the interval excludes 0; that of "without keys" includes
   0.
6. "persistent vectors" and "paper's heads" differ by less than 2 %, and the interval includes 0.
7. On text, the median |cos(W_Q, W_V)| of "paper's heads" stays below .3, and that of
   "started at the MLP" falls below .4, the value after the first run.
8. In "paper's heads", setting every key to its mean costs more than ten times as much loss as
   setting the bias token's value to 0, on text.
9. All-attention layers end at least 10 % above the MLP.
10. On addition, "started at the MLP" needs less than twice as many epochs as the MLP (medians), and
    the MLP or "without keys" solves the task first.

Predictions for the run of 2400 steps, written before it; there was no time for the arms "mlp,
twice", "persistent vectors" and "started at the MLP", nor for the predictions about them.

1. "mlp, an eighth" ends at least 5 % above the MLP, in every seed. (Failed: 3.4 %.)
2. Neuron-heads of all forms end within 3 % of the MLP (means). (Held for the two forms.)
3. "without keys" ends below the MLP (mean). (Held: by .8 %; the interval includes 0.)
4. On text, the median |cos(W_Q, W_V)| of "paper's heads" stays below .3. (Held.)
5. In "paper's heads", keys at their means cost more than ten times as much as the bias token's
   value at 0, on text. (Held.)
6. On addition, the MLP solves the task first (median), and "paper's heads" need less than twice as
   many epochs. (Failed: "without keys" were first.)
7. All-attention layers end between the MLP and "mlp, an eighth" on text. (Failed: 16 % above.)

Predictions for the first run (600 steps of text, three seeds, and an arm "paper's heads, as many"
with as many heads as neurons), written before that run:

1. The theorem's form is the MLP: trained alike, they stay the same numbers, to rounding. (A test
   shows this.)
2. At equal parameters, the loss of "paper's heads" on text is within 2 % of the MLP's: half as many
   of them hold gated linear units ("without keys"), which do as well as MLPs. (Held.)
3. With as many heads as neurons they beat the MLP in every seed, but not the MLP of twice the
   neurons in every seed. (Failed.)
4. Nothing pulls W_Q and W_V together: the median |cos| stays within 0.1 of what it was when drawn.
   Started at the theorem, they part to 0.9 or less. (Failed: on addition it rose by 0.13.)
5. The self key matters: to put it at its mean costs more than to leave out the bias token's value.
   "without keys" is within 2 % of "paper's heads" nevertheless. (Held.)
6. "persistent vectors" and "paper's heads" end within 2 % of each other on text. (Held.)
7. On addition, "paper's heads" solve the task no later than the MLP (median of seeds): it takes
   products of waves, and q k is one. (Failed; all arms used the highest rate that was tried.)

    python -m analyses.studies.train_attention_only --out analyses/results
"""

import json
import re
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from analyses.studies import attention_only_models as models
from analyses.studies.attention_only_report import FORMS, curves_figure, page
from analyses.tools import train_modular_addition as addition
from analyses.tools import train_small_english as english
from analyses.tools.benching import machine
from analyses.tools.options import Device, Out, Runs, Seeds, Smoke
from analyses.tools.resumable import claim
from analyses.tools.study_files import as_stored, keep
from attn_only_lens.storage import atomic_write, write_text

SEED_OF_SEARCH = 100
SEED_OF_LENGTHS = 101
MOST_RATES = 8
EARLIER = Path(__file__).parents[1] / "results" / "train_attention_only_earlier.csv"
SATURATED = 0.05  # weights below this, or above 1 minus this, are saturated
DEAD = 0.01  # relative to the mean strength in the head's layer
BINS = 16
DIGITS = "%.5g"
ARMS: dict[str, tuple[models.Kind, float]] = {
    "mlp": ("mlp", 1),
    "paper's heads": ("bias token", 1 / 2),
    "mlp, an eighth": ("mlp", 1 / 8),
    "without keys": ("without keys", 2 / 3),
    "persistent vectors": ("persistent", 1 / 2),
    "started at the MLP": ("set free", 1 / 2),
    "mlp, twice": ("mlp", 2),
    "all-attention": ("all-attention", 1),
}
"""The kind of each arm, and its number of heads (or N) per neuron of the MLP."""


@dataclass(frozen=True)
class Task:
    """A task, its sizes, and the length of its training.

    Attributes:
        steps: the steps of a run; a run of the search takes `search_steps`.
        checks: how often the held-out loss is measured.
        lrs: the learning rates that are tried first; see `search`.
        search_seeds: the number of seeds of the search.
    """

    d_model: int
    n_heads: int
    d_mlp: int
    steps: int
    search_steps: int
    checks: int
    lrs: tuple[float, ...]
    warmup: int

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that are trained."""
        return tuple(ARMS)

    def neurons(self, arm: str) -> tuple[models.Kind, int]:
        """Return the kind and the number of an arm's neurons in a layer."""
        kind, share = ARMS[arm]
        return kind, round(share * self.d_mlp)


@dataclass(frozen=True)
class Text(Task):
    """The task of predicting Small English texts."""

    search_seeds: int = 1
    n_layers: int = 2
    rows: int = 16
    n_held_out: int = 16  # the number of batches
    prompts: int = 200  # per task; no text has a sentence that begins with one of them
    clip: float = 1.0

    def model(self, kind: models.Kind, n_neurons: int, seed: int) -> nn.Module:
        """Return an untrained model."""
        sizes = {name: getattr(self, name) for name in ("n_layers", "d_model")}
        d_vocab = len(english.vocabulary())
        sizes |= {"heads": self.n_heads, "d_vocab": d_vocab, "seed": seed}
        model = models.text_model(kind, n_neurons, **sizes)
        model.config.use_cache = False
        return model

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.AdamW:
        """Return the optimizer that trains the shipped model's embeddings."""
        settings: dict[str, Any] = {"betas": (0.9, 0.98), "weight_decay": 0.1, "foreach": True}
        return torch.optim.AdamW(model.parameters(), lr=lr, **settings)

    def rate(self, step: int, steps: int) -> float:
        """Return the learning-rate factor, which rises and then falls to zero."""
        return min((step + 1) / self.warmup, 1 - step / steps)

    def batch(self, step: int, seed: int) -> Tensor:
        """Return the texts of a step, which are the same for every arm."""
        return self._pool(seed, step // english.POOL)[step % english.POOL]

    def _pool(self, seed: int, number: int) -> list[Tensor]:
        recipe = english.Recipe(rows=self.rows, seed=seed, prompts=self.prompts)
        return _pool(recipe, number)

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        """Return the cross-entropy of the next token."""
        return english.loss_of(model, batch)

    def flops(self, model: Any, batch: Tensor) -> int:
        """Return the flops of one training step."""
        sublayer, pos = models.sublayers_of(model)[0], batch.shape[1] - 1
        layer = 8 * self.d_model**2 + 4 * pos * self.d_model
        layer += models.flops(sublayer.kind, self.d_model, models.size_of(sublayer))
        unembed = 2 * self.d_model * len(english.vocabulary())
        return 3 * len(batch) * pos * (self.n_layers * layer + unembed)

    def held_out(self, model: Any, seed: int) -> dict[str, float]:
        """Return the loss on texts that are the same for every seed."""
        batches = self._pool(0, english.SEED_OF_HELD_OUT)[: self.n_held_out]
        losses = [self.loss(model, batch.to(model.device)) for batch in batches]
        return {"loss": torch.stack(losses).mean().item()}


@lru_cache(None)
def _pool(recipe: english.Recipe, number: int) -> list[Tensor]:
    return english.pool(recipe, number, _never(recipe.prompts))


@lru_cache(None)
def _never(prompts: int) -> frozenset[str]:
    return english.held_out(prompts)


@dataclass(frozen=True)
class Addition(Task):
    """The task of addition modulo p, as in `growth_modular_addition.py`."""

    search_seeds: int = 3
    modulus: int = 53
    train_fraction: float = 0.6
    clip: float = float("inf")

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms with equal parameters; other arms cannot show which form learns sooner.

        "all-attention" is for text: the model's attention has no place for persistent vectors.
        """
        return ("mlp", *FORMS)

    def recipe(self, seed: int, lr: float = 0.0) -> addition.Recipe:
        """Return the recipe of the model without its MLP."""
        sizes = {name: getattr(self, name) for name in ("modulus", "d_model", "n_heads")}
        fraction = self.train_fraction
        return addition.Recipe(**sizes, d_mlp=1, seed=seed, train_fraction=fraction, lr=lr)

    def model(self, kind: models.NeuronKind, n_neurons: int, seed: int) -> nn.Module:
        """Return an untrained model; all weights have TransformerLens' standard deviation."""
        model = self.recipe(seed).model()
        torch.manual_seed(seed)
        std, bias = model.cfg.initializer_range, nn.Parameter(torch.zeros(self.d_model))
        model.blocks[0].mlp = models.Neurons(kind, self.d_model, n_neurons, std, std, bias)
        return model

    def optimizer(self, model: Any, lr: float) -> torch.optim.AdamW:
        """Return the optimizer of the shipped model."""
        return addition.adamw(self.recipe(0, lr), model)

    def rate(self, step: int, steps: int) -> float:
        """Return the learning-rate factor, which rises and then stays constant."""
        return min((step + 1) / self.warmup, 1.0)

    def batch(self, step: int, seed: int) -> Tensor:
        """Return all training pairs, with their answers in the last column."""
        return _pairs(self.recipe(seed))[0]

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        """Return the cross-entropy of the answer."""
        return addition.loss_of(self.logits(model, batch), batch[:, 3])

    def logits(self, model: Any, batch: Tensor) -> Tensor:
        """Return the logits of the answer."""
        return addition.fast_logits(model, batch[:, :3], model.blocks[0].mlp)

    def flops(self, model: Any, batch: Tensor) -> int:
        """Return the flops of one training step by torch's counter, the same for all steps."""
        neurons = models.neurons_of(model)[0]
        return _flops(self, neurons.kind, neurons.W_Q.shape[1], len(batch))

    def held_out(self, model: Any, seed: int) -> dict[str, float]:
        """Return loss and accuracy on held-out pairs."""
        batch = _pairs(self.recipe(seed))[1].to(model.W_U.device)
        logits = self.logits(model, batch)
        right = (logits.argmax(-1) == batch[:, 3]).double().mean().item()
        return {"loss": addition.loss_of(logits, batch[:, 3]).item(), "accuracy": right}


@lru_cache(1)
def _pairs(recipe: addition.Recipe) -> tuple[Tensor, Tensor]:
    """Return training pairs and held-out pairs, [pair, (a, b, =, answer)]."""
    tokens, answers, trained = addition.pairs(recipe)
    rows = torch.cat([tokens, answers[:, None]], dim=1)
    return rows[trained], rows[~trained]


@lru_cache(None)
def _flops(task: Addition, kind: models.NeuronKind, n_neurons: int, n_pairs: int) -> int:
    model = task.model(kind, n_neurons, 0)
    with FlopCounterMode(display=False) as counter:
        task.loss(model, task.batch(0, 0)[:n_pairs]).backward()
    return counter.get_total_flops()


@dataclass(frozen=True)
class Study:
    """The settings that determine the result.

    Attributes:
        lengths: the numbers of steps at which the MLP is trained on text, to choose `text.steps`.
        length_lrs: the learning rates of these runs.
    """

    text: Text = field(
        default_factory=lambda: Text(48, 4, 192, 4800, 2400, 12, (4e-3, 8e-3, 1.6e-2), 50)
    )
    addition: Addition = field(
        default_factory=lambda: Addition(48, 2, 96, 1000, 600, 50, (8e-3, 1.6e-2, 3.2e-2), 10)
    )
    lengths: tuple[int, ...] = (600, 1200, 2400, 4800, 9600, 19200)
    length_lrs: tuple[float, ...] = (8e-3,)
    n_seeds: int = 5


SMOKE = Study(
    Text(8, 2, 6, 4, 2, 2, (1e-2,), 2, n_layers=1, rows=3, n_held_out=1, prompts=5),
    Addition(10, 2, 6, 6, 3, 3, (1e-2,), 2, modulus=7),
    (2, 4, 8),
    (1e-2,),
)


def slug(*parts: object) -> str:
    """Return the name of a folder."""
    return re.sub(", | ", "_", "-".join(map(str, parts))).replace("'", "")


def on(device: str, model: nn.Module) -> nn.Module:
    """Return the model on a device; a HookedTransformer's own `to` would print a message."""
    return nn.Module.to(model, device)


def train(
    task: Any, arm: str, seed: int, lr: float, steps: int, folder: Path, device: str
) -> tuple[nn.Module, pd.DataFrame]:
    """Return the model at the end of a run, and its curve; a finished run is read from its folder.

    An interrupted run starts again, because a run takes about a minute.
    """
    kind, n_neurons = task.neurons(arm)
    model = on(device, task.model(kind, n_neurons, seed))
    weights, curve = folder / "model.safetensors", folder / "curve.csv"
    if weights.exists():
        model.load_state_dict(load_file(weights, device), strict=False)
        return model, pd.read_csv(curve)
    optimizer, rows, flops = task.optimizer(model, lr), [], 0
    losses: list[Tensor] = []
    began = time.process_time()
    for step in range(steps + 1):
        if step % (steps // task.checks) == 0 or step == steps:
            with torch.no_grad():
                measured = task.held_out(model, seed)
            trained = torch.stack(losses).mean().item() if losses else float("nan")
            spent = {"flops": flops, "seconds": time.process_time() - began}
            rows.append({"step": step, **spent, "trained": trained, **measured})
            losses = []
        if step == steps:
            break
        batch = task.batch(step, seed).to(device)
        optimizer.param_groups[0]["lr"] = lr * task.rate(step, steps)
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        losses.append(loss.detach())
        flops += task.flops(model, batch)
    frame = pd.DataFrame(rows)
    write_text(curve, frame.to_csv(index=False))
    trained_weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    with atomic_write(weights) as partial_file:
        save_file(trained_weights, partial_file)
    return model, frame


def late(curve: pd.DataFrame) -> float:
    """Return the median loss in the last quarter of a run, which the search minimises."""
    return curve["loss"].iloc[-max(1, len(curve) // 4) :].median()


@torch.no_grad()
def read_by(task: Any, model: nn.Module, seed: int) -> list[Tensor]:
    """Return the inputs of each layer's neurons on held-out data, [token, d_model]."""
    seen: list[list[Tensor]] = []
    hooks = []
    for sublayer in models.neurons_of(model):
        seen.append([])
        note = partial(_note, seen[-1])
        hooks.append(sublayer.register_forward_hook(note))
    try:
        task.held_out(model, seed)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(outputs) for outputs in seen]


def _note(seen: list[Tensor], module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
    seen.append(inputs[0].flatten(0, -2))


def share_explained(z: Tensor, by: Tensor) -> Tensor:
    """Return the share of each head's variance that is a function of one of its numbers, [head].

    The function is constant on BINS bins of equal size.

    Args:
        z: the values to explain, [token, head].
        by: the number that explains them, [token, head].
    """
    n = len(z) // BINS * BINS
    order = by.argsort(dim=0)[:n]
    binned = z.gather(0, order).view(BINS, -1, z.shape[1])
    within = (binned - binned.mean(1, keepdim=True)).square().mean((0, 1))
    return 1 - within / z.var(dim=0, unbiased=False).clamp_min(1e-30)


def share_linear(z: Tensor, by: Tensor) -> Tensor:
    """Return the share of each head's variance that is linear in one of its numbers, [head]."""
    z, by = z - z.mean(0), by - by.mean(0)
    within = (z * by).mean(0).square() / by.square().mean(0).clamp_min(1e-30)
    return within / z.square().mean(0).clamp_min(1e-30)


@torch.no_grad()
def heads_of(neurons: models.Neurons, x: Tensor) -> pd.DataFrame:
    """Return a row per head with its properties.

    Columns: |cos| between its vectors; the mean weight of a token on itself (the rest is on the
    bias token), and the share of tokens where it is saturated; how much of the score is linear in
    q, as in the theorem; how much of the output is linear in v, a function of v, or a function of
    q; the strength, divided by the mean strength in the layer.

    Args:
        neurons: the neurons of one layer.
        x: the inputs of the neurons, [token, d_model].
    """
    d_model = x.shape[1]
    shape = len(x), neurons.W_Q.shape[1]
    parts = {name: part_of.expand(shape) for name, part_of in neurons.parts(x).items()}
    p = neurons.pattern(parts)
    z = parts["value_b"] + p * (parts["v"] - parts["value_b"])
    score = parts["q"] * (parts["k"] - parts["key_b"])
    reads = {"q": neurons.W_Q, "k": getattr(neurons, "W_K", None)}
    reads["v"] = getattr(neurons, "W_V", neurons.W_Q)
    cosines = {
        f"cos_{a}{b}": torch.cosine_similarity(reads[a], reads[b][:d_model], dim=0).abs()
        for a, b in ("qv", "qk")
        if reads[b] is not None
    }
    strength = z.var(dim=0) * neurons.W_O.square().sum(1)
    columns = cosines | {
        "weight": p.mean(0),
        "saturated": ((p < SATURATED) | (p > 1 - SATURATED)).double().mean(0),
        "score_linear_in_q": share_linear(score, parts["q"]),
        "linear_in_v": share_linear(z, parts["v"]),
        "of_v": share_explained(z, parts["v"]),
        "of_q": share_explained(z, parts["q"]),
        "strength": strength / strength.mean(),
    }
    return pd.DataFrame({name: column.double().cpu().numpy() for name, column in columns.items()})


def heads_frame(task: Any, model: nn.Module, seed: int) -> pd.DataFrame:
    """Return the heads of every layer."""
    layers = zip(models.neurons_of(model), read_by(task, model, seed), strict=True)
    frames = [
        heads_of(sublayer, x).assign(layer=layer) for layer, (sublayer, x) in enumerate(layers)
    ]
    return pd.concat(frames, ignore_index=True)


def become(heads: pd.DataFrame) -> dict[str, float]:
    """Return medians over heads, and the share of dead heads."""
    medians = heads.drop(columns=["layer", "strength"]).median().to_dict()
    return medians | {"dead": (heads["strength"] < DEAD).mean()}


@torch.no_grad()
def cuts_of(task: Any, model: nn.Module, seed: int) -> dict[str, float]:
    """Return the loss after each cut that the heads allow; see `Neurons.parts`."""
    losses = {}
    free = ("key", "value_b") if hasattr(models.neurons_of(model)[0], "W_K") else ()
    for cut in ("", "gate", *free):
        for sublayer in models.neurons_of(model):
            sublayer.cut = frozenset({cut}) if cut else frozenset()
        losses[cut or "whole"] = task.held_out(model, seed)["loss"]
    for sublayer in models.neurons_of(model):
        sublayer.cut = frozenset()
    return losses


@dataclass(frozen=True)
class Trainer:
    """Trains the runs of a study into a folder, and reads those that are finished."""

    study: Study
    folder: Path
    device: str
    bar: "tqdm[Any]"

    def run(
        self, name: str, arm: str, seed: int, lr: float, steps: int
    ) -> tuple[nn.Module, pd.DataFrame]:
        """Return the model and the curve of a run of a task."""
        task = replace(getattr(self.study, name), steps=steps)
        folder = slug(name, arm, seed, lr, steps)
        self.bar.set_description(folder)
        done = train(task, arm, seed, lr, steps, self.folder / folder, self.device)
        self.bar.update()
        return done

    def search(self, name: str, arm: str) -> pd.DataFrame:
        """Return the loss at each learning rate that an arm tries, the mean over seeds.

        While the best rate is the lowest or the highest that was tried, half or twice this rate is
        tried, up to MOST_RATES rates.
        """
        rows: dict[float, dict[str, Any]] = {}
        task = getattr(self.study, name)
        lrs = set(task.lrs)
        while lrs and len(rows) < MOST_RATES:
            for lr in sorted(lrs):
                curves = [
                    self.run(name, arm, SEED_OF_SEARCH + number, lr, task.search_steps)[1]
                    for number in range(task.search_seeds)
                ]
                loss = sum(map(late, curves)) / len(curves)
                seconds = sum(curve["seconds"].iloc[-1] for curve in curves)
                rows[lr] = {"lr": lr, "loss": loss, "seconds": seconds}
            best = min(rows, key=lambda lr: rows[lr]["loss"])
            lrs = {lr for lr in (best / 2, best * 2) if not min(rows) <= lr <= max(rows)}
        frame = pd.DataFrame([rows[lr] for lr in sorted(rows)])
        return frame.assign(chosen=frame["lr"] == best)

    def same_rates(self, lrs: Iterable[float]) -> pd.DataFrame:
        """Return the MLP's last losses on text at all rates that arms use."""
        rows = []
        for lr, seed in product(sorted(set(lrs)), range(self.study.n_seeds)):
            last = self.run("text", "mlp", seed, lr, self.study.text.steps)[1].iloc[-1]
            rows.append({"lr": lr, "seed": seed} | dict(last[["loss", "seconds"]]))
        return pd.DataFrame(rows)

    def lengths(self) -> pd.DataFrame:
        """Return the MLP's last loss on text after trainings of several lengths."""
        rows = []
        for steps, lr in product(self.study.lengths, self.study.length_lrs):
            last = self.run("text", "mlp", SEED_OF_LENGTHS, lr, steps)[1].iloc[-1]
            rows.append({"steps": steps, "lr": lr} | dict(last[["loss", "seconds"]]))
        return pd.DataFrame(rows)


def frames_of(task: Any, arm: str, seed: int, model: Any, device: str) -> dict[str, pd.DataFrame]:
    """Return what a trained model's heads became, and what its parts are worth."""
    start = on(device, task.model(*task.neurons(arm), seed))
    rows = [
        {"when": when} | become(heads_frame(task, at, seed))
        for when, at in (("start", start), ("end", model))
    ]
    return {"become": pd.DataFrame(rows), "cuts": pd.DataFrame([cuts_of(task, model, seed)])}


def measured(study: Study, folder: Path, device: str) -> dict[str, pd.DataFrame]:
    """Train and measure every arm; return frames by name, with columns `task`, `arm` and `seed`.

    Raises:
        ValueError: the folder holds runs of another study.
    """
    settings = json.dumps(asdict(replace(study, n_seeds=0)), indent=2) + "\n"
    claim(folder / "study.json", settings)
    collected: dict[str, list[pd.DataFrame]] = {}

    def collect(part: str, frame: pd.DataFrame, name: str, arm: str, seed: int) -> None:
        for place, (column, value) in enumerate({"task": name, "arm": arm, "seed": seed}.items()):
            frame.insert(place, column, value)
        collected.setdefault(part, []).append(frame)

    with tqdm(unit="run") as bar:
        trainer = Trainer(study, folder, device, bar)
        for name in ("text", "addition"):
            task = getattr(study, name)
            for arm in task.arms:
                search = trainer.search(name, arm)
                collect("search", search, name, arm, SEED_OF_SEARCH)
                lr = float(search["lr"][search["chosen"]].item())
                for seed in range(study.n_seeds):
                    model, curve = trainer.run(name, arm, seed, lr, task.steps)
                    collect("", curve, name, arm, seed)
                    if not models.neurons_of(model):
                        continue
                    for part, frame in frames_of(task, arm, seed, model, device).items():
                        collect(part, frame, name, arm, seed)
            if name == "text":
                chosen = pd.concat(collected["search"]).query("chosen")["lr"]
                alone = {"same_rate": trainer.same_rates(chosen), "lengths": trainer.lengths()}
    tasks = ("text", "addition")
    sizes = [size_of(study, name, arm) for name in tasks for arm in getattr(study, name).arms]
    joined = {part: pd.concat(frames, ignore_index=True) for part, frames in collected.items()}
    return joined | alone | {"sizes": pd.DataFrame(sizes), "earlier": pd.read_csv(EARLIER)}


def size_of(study: Study, name: str, arm: str) -> dict[str, Any]:
    """Return the sizes of an arm in a layer, and the cost of its dense form."""
    task = getattr(study, name)
    kind, n_neurons = task.neurons(arm)
    batch, model = task.batch(0, 0), task.model(kind, n_neurons, 0)
    rows = batch.shape[1]  # one column is not an input, and the bias token is one more row
    needed = models.flops(kind, task.d_model, n_neurons)
    dense = models.flops(kind, task.d_model, n_neurons, n_dense=rows)
    layers = models.sublayers_of(model)
    parameters = sum(
        p.numel()
        for sublayer in layers
        for key, p in sublayer.named_parameters()
        if key != "bias" and not key.startswith("c_")  # the bias token; ordinary attention
    )
    return {
        "task": name,
        "arm": arm,
        "heads": n_neurons,
        "parameters": parameters // len(layers),
        "all parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops a token": needed,
        "in dense form": dense,
    }


def main(
    out: Out = Path("out/attention-only"),
    runs_dir: Runs = Path("out/attention-only-runs"),
    device: Device = "cpu",
    n_seeds: Seeds = 5,
    smoke: Smoke = False,
) -> None:
    """Train, measure, print; write the page, tables and figures (`study_files.py`)."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    started = time.perf_counter()
    study = replace(SMOKE if smoke else Study(), n_seeds=n_seeds)
    frames = as_stored(measured(study, runs_dir, device), DIGITS)
    about = {"study": asdict(study), "machine": machine(device)}
    text = page(frames, about, " --smoke" if smoke else "")
    typer.echo(text)
    picture = curves_figure(frames[""])
    settings: dict[str, Any] = {"device": device, "smoke": smoke, **about}
    keep(__file__, out, text, frames, picture, started=started, digits=DIGITS, **settings)


if __name__ == "__main__":
    typer.run(main)
