"""Train attention-only transformers from scratch, next to transformers with MLPs.

Transformers that have neuron-heads in place of MLPs (`attention_only_models.py`) are trained on
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
    neither              ordinary attention alone (only in `all_attention.py`)

Equal parameters mean equal flops, because a head needs as many products as it has weights. Addition
has only arms with equal parameters. All arms have the same data in the same order, AdamW, the same
schedule, and the same initial attention and embeddings. Each arm tries learning rates on other
seeds, and uses the rate with the lowest mean loss; both neighbours of this rate are tried too.

Compute is the flops of matrix products, forward and backward. The dense form, which masks scores
that it has computed, needs more flops; these are counted too, but not run or drawn.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from analyses.studies import attention_only_models as models
from analyses.study import RESULTS, Setting, Study, Tables
from analyses.tools import modular_addition as addition
from analyses.tools import small_english as english
from analyses.tools import training as loop
from analyses.tools.study_files import t_interval

SEED_OF_SEARCH = 100
SEED_OF_LENGTHS = 101
SATURATED = 0.05  # weights below this, or above 1 minus this, are saturated
DEAD = 0.01  # relative to the mean strength in the head's layer
BINS = 16
SOLVED, LOST = 0.99, 0.9  # held-out accuracies
FALLING = 0.01  # twice as many steps lower the loss by more than this share
ARMS: dict[str, tuple[models.Kind, float]] = {
    "mlp": ("mlp", 1),
    "paper's heads": ("bias token", 1 / 2),
    "mlp, an eighth": ("mlp", 1 / 8),
    "without keys": ("without keys", 2 / 3),
    "persistent vectors": ("persistent", 1 / 2),
    "started at the MLP": ("set free", 1 / 2),
    "mlp, twice": ("mlp", 2),
    "all-attention": ("all-attention", 1),
    "neither": ("all-attention", 0),
}
"""The kind of each arm, and its number of heads (or N) per neuron of the MLP."""
FORMS = ("paper's heads", "without keys", "persistent vectors", "started at the MLP")
TRAINED = {"text": tuple(ARMS)[:-1], "addition": ("mlp", *FORMS)}
COLOURS = dict(zip(ARMS, ("black", "C0", "C5", "C2", "C1", "C9", "C7", "C4", "C3"), strict=True))
CUTS = ("key", "value_b", "gate")


@dataclass(frozen=True)
class Task:
    """A task, its sizes, and the length of its training."""

    d_model: int
    n_heads: int
    d_mlp: int
    steps: int
    search_steps: int
    checks: int  # how often the held-out loss is measured in a run
    lrs: tuple[float, ...]  # the learning rates that are tried first
    warmup: int
    search_seeds: int = 1
    most_rates: int = 8
    clip: float = float("inf")

    def neurons(self, arm: str) -> tuple[models.Kind, int]:
        """Return the kind and the number of an arm's neurons in a layer."""
        kind, share = ARMS[arm]
        return kind, round(share * self.d_mlp)


@dataclass(frozen=True)
class Text(Task):
    """The task of predicting Small English texts."""

    n_layers: int = 2
    rows: int = 16
    n_held_out: int = 16  # the number of batches
    prompts: int = 200  # per task; no text has a sentence that begins with one of them
    clip: float = 1.0

    def model(self, kind: models.Kind, n_neurons: int, seed: int) -> nn.Module:
        """Return an untrained model."""
        sizes = {"n_layers": self.n_layers, "d_model": self.d_model, "heads": self.n_heads}
        d_vocab = len(english.vocabulary())
        model = models.text_model(kind, n_neurons, **sizes, d_vocab=d_vocab, seed=seed)
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
        return self.pool(seed, step // english.POOL)[step % english.POOL]

    def pool(self, seed: int, number: int) -> list[Tensor]:
        """Return some batches of texts."""
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
        batches = self.pool(0, english.SEED_OF_HELD_OUT)[: self.n_held_out]
        losses = [self.loss(model, batch.to(model.device)) for batch in batches]
        return {"loss": torch.stack(losses).mean().item()}


_held_out = cache(english.held_out)


@cache
def _pool(recipe: english.Recipe, number: int) -> list[Tensor]:
    return english.pool(recipe, number, _held_out(recipe.prompts))


@dataclass(frozen=True)
class Addition(Task):
    """The task of addition modulo p."""

    search_seeds: int = 3
    modulus: int = 53
    train_fraction: float = 0.6

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


@cache
def _flops(task: Addition, kind: models.NeuronKind, n_neurons: int, n_pairs: int) -> int:
    model = task.model(kind, n_neurons, 0)
    with FlopCounterMode(display=False) as counter:
        task.loss(model, task.batch(0, 0)[:n_pairs]).backward()
    return counter.get_total_flops()


@dataclass(frozen=True)
class Tasks:
    """Both tasks, and the lengths and the rate with which an MLP is trained on text."""

    text: Text = Text(48, 4, 192, 4800, 2400, 12, (4e-3, 8e-3, 1.6e-2), 50)
    addition: Addition = Addition(48, 2, 96, 1000, 600, 50, (8e-3, 1.6e-2, 3.2e-2), 10)
    lengths: tuple[int, ...] = (600, 1200, 2400, 4800, 9600, 19200)
    length_lr: float = 8e-3


SMOKE = Tasks(
    Text(8, 2, 6, 4, 2, 2, (1e-2,), 2, most_rates=1, n_layers=1, rows=3, n_held_out=1, prompts=5),
    Addition(10, 2, 6, 6, 3, 3, (1e-2,), 2, most_rates=1, search_seeds=1, modulus=7),
    (2, 4, 8),
    1e-2,
)


def slug(*parts: object) -> str:
    """Return the name of a folder."""
    return re.sub(", | ", "_", "-".join(map(str, parts))).replace("'", "")


def train(
    task: Any, arm: str, seed: int, lr: float, steps: int, folder: Path, device: str
) -> tuple[nn.Module, pd.DataFrame]:
    """Return the model at the end of a run, and its curve; a finished run is read from a folder."""
    model = nn.Module.to(task.model(*task.neurons(arm), seed), device)

    def step(training: loop.Training, number: int) -> dict[str, int]:
        batch = task.batch(number, seed).to(device)
        training.optimizer.param_groups[0]["lr"] = lr * task.rate(number, steps)
        loss = task.loss(model, batch)
        training.optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), task.clip)
        training.optimizer.step()
        return {"flops": task.flops(model, batch)}

    @torch.no_grad()
    def figures(model: Any) -> dict[str, float]:
        return task.held_out(model, seed)

    curve = loop.train(
        loop.Training(model, task.optimizer(model, lr), {}),
        steps,
        folder,
        step,
        figures,
        {"flops": 0},
        check_every=steps // task.checks,
        save_every=steps,
        tick=lambda steps: None,
    )
    return model, curve


def late(curve: pd.DataFrame) -> float:
    """Return the median loss in the last quarter of a run, which the search minimises."""
    return curve["loss"].iloc[-max(1, len(curve) // 4) :].median()


@torch.no_grad()
def read_by(task: Any, model: nn.Module, seed: int) -> list[Tensor]:
    """Return the inputs of each layer's neurons on held-out data, [token, d_model]."""
    layers = models.neurons_of(model)
    seen: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}

    def note(module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        seen[module].append(inputs[0].flatten(0, -2))

    hooks = [layer.register_forward_hook(note) for layer in layers]
    task.held_out(model, seed)
    for hook in hooks:
        hook.remove()
    return [torch.cat(inputs) for inputs in seen.values()]


def share_explained(z: Tensor, by: Tensor) -> Tensor:
    """Return the share of each head's variance that is a function of one of its numbers, [head].

    The function is constant on BINS bins of equal size; z and by are [token, head].
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
    """Return a row per head of a layer with its properties, which the page explains.

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
        "of_v": share_explained(z, parts["v"]),
        "of_q": share_explained(z, parts["q"]),
        "dead": strength < DEAD * strength.mean(),
    }
    return pd.DataFrame({name: column.double().cpu().numpy() for name, column in columns.items()})


def become(task: Any, model: nn.Module, seed: int) -> dict[str, float]:
    """Return medians over the heads of all layers, and the share of dead heads."""
    layers = zip(models.neurons_of(model), read_by(task, model, seed), strict=True)
    heads = pd.concat([heads_of(neurons, x) for neurons, x in layers])
    return heads.median().to_dict() | {"dead": heads["dead"].mean()}


@torch.no_grad()
def cuts_of(task: Any, model: nn.Module, seed: int) -> dict[str, float]:
    """Return the loss after each cut that the heads allow; see `Neurons.parts`."""
    layers, losses = models.neurons_of(model), {}
    for cut in CUTS if hasattr(layers[0], "W_K") else ("gate",):
        for sublayer in layers:
            sublayer.cut = frozenset({cut})
        losses[cut] = task.held_out(model, seed)["loss"]
    for sublayer in layers:
        sublayer.cut = frozenset()
    return losses


@dataclass(frozen=True)
class Trainer:
    """Trains the runs of a study into a folder, and reads those that are finished."""

    tasks: Tasks
    folder: Path
    device: str
    bar: "tqdm[Any]" = field(default_factory=lambda: tqdm(unit="run"))

    def run(
        self, name: str, arm: str, seed: int, lr: float, steps: int
    ) -> tuple[nn.Module, pd.DataFrame]:
        """Return the model and the curve of a run of a task."""
        task = replace(getattr(self.tasks, name), steps=steps)
        folder = slug(name, arm, seed, lr, steps)
        self.bar.set_description(folder)
        done = train(task, arm, seed, lr, steps, self.folder / folder, self.device)
        self.bar.update()
        return done

    def last(self, arm: str, seed: int, lr: float, steps: int) -> dict[str, float]:
        """Return the loss and the seconds at the end of a run on text."""
        row = self.run("text", arm, seed, lr, steps)[1].iloc[-1]
        return {"steps": steps, "lr": lr, "loss": row["loss"], "seconds": row["cpu_seconds"]}

    def search(self, name: str, arm: str) -> pd.DataFrame:
        """Return the loss at each learning rate that an arm tries, the mean over seeds.

        While the best rate is the lowest or the highest that was tried, half or twice this rate is
        tried, up to `most_rates` rates.
        """
        rows: dict[float, dict[str, Any]] = {}
        task = getattr(self.tasks, name)
        lrs = set(task.lrs)
        while lrs and len(rows) < task.most_rates:
            for lr in sorted(lrs):
                curves = [
                    self.run(name, arm, SEED_OF_SEARCH + number, lr, task.search_steps)[1]
                    for number in range(task.search_seeds)
                ]
                loss = sum(map(late, curves)) / len(curves)
                seconds = sum(curve["cpu_seconds"].iloc[-1] for curve in curves)
                rows[lr] = {"lr": lr, "loss": loss, "seconds": seconds}
            best = min(rows, key=lambda lr: rows[lr]["loss"])
            lrs = {lr for lr in (best / 2, best * 2) if not min(rows) <= lr <= max(rows)}
        frame = pd.DataFrame([rows[lr] for lr in sorted(rows)])
        about = {"use": "search", "task": name, "arm": arm, "steps": task.search_steps}
        return frame.assign(**about, chosen=frame["lr"] == best)


def run(setting: Setting) -> Tables:
    """Train and measure every arm with every seed."""
    tasks = SMOKE if setting.smoke else Tasks()
    loop.claim(setting.runs / "study.txt", f"{tasks!r}\n")
    trainer = Trainer(tasks, setting.runs, setting.device)
    curves, rows, tried = [], [], []
    for name, arms in TRAINED.items():
        task = getattr(tasks, name)
        for arm in arms:
            tried.append(trainer.search(name, arm))
            lr = float(tried[-1].query("chosen")["lr"].item())
            for seed in range(setting.n_seeds):
                model, curve = trainer.run(name, arm, seed, lr, task.steps)
                about = {"task": name, "arm": arm, "seed": seed}
                curves.append(curve.assign(**about))
                rows.append(about | {"lr": lr} | measured(task, arm, seed, model, curve))
    lrs, text = {row["lr"] for row in rows if row["task"] == "text"}, tasks.text
    lengths = [trainer.last("mlp", SEED_OF_LENGTHS, tasks.length_lr, n) for n in tasks.lengths]
    same = [
        {"seed": seed} | trainer.last("mlp", seed, lr, text.steps)
        for lr, seed in product(sorted(lrs), range(setting.n_seeds))
    ]
    for use, of_mlp in (("length", lengths), ("same rate", same)):
        tried.append(pd.DataFrame(of_mlp).assign(use=use, task="text", arm="mlp"))
    return {
        "": pd.DataFrame(rows),
        "curves": drawn(pd.concat(curves)),
        "tried": pd.concat(tried),
        "sizes": pd.DataFrame(
            size_of(tasks, name, arm) for name, arms in TRAINED.items() for arm in arms
        ),
        "earlier": pd.read_csv(RESULTS / "train_attention_only_earlier.csv"),  # not run again
    }


def measured(
    task: Any, arm: str, seed: int, model: nn.Module, curve: pd.DataFrame
) -> dict[str, float]:
    """Return how a run ends, what its heads became, and what their parts are worth."""
    last = curve.iloc[-1]
    row = {"loss": last["loss"], "seconds": last["cpu_seconds"]}
    if "accuracy" in curve:
        solved = curve["step"][curve["accuracy"] >= SOLVED].min()  # nan if there is none
        row |= {"accuracy": last["accuracy"], "solved": solved}
    if not models.neurons_of(model):
        return row
    start = nn.Module.to(task.model(*task.neurons(arm), seed), next(model.parameters()).device)
    row |= become(task, model, seed) | cuts_of(task, model, seed)
    return row | {"cos_qv at the start": become(task, start, seed)["cos_qv"]}


def drawn(curves: pd.DataFrame) -> pd.DataFrame:
    """Return the curves of the figure: medians over seeds, and their range."""
    by = curves.assign(Tflop=curves["flops"] / 1e12).groupby(["task", "arm", "step"], sort=False)
    parts = {"Tflop": by["Tflop"].median()}
    parts |= {name: by["loss"].agg(name) for name in ("median", "min", "max")}
    return pd.DataFrame(parts).reset_index()


def size_of(tasks: Tasks, name: str, arm: str) -> dict[str, Any]:
    """Return the sizes of an arm in a layer, and the cost of its dense form."""
    task = getattr(tasks, name)
    kind, n_neurons = task.neurons(arm)
    batch, model = task.batch(0, 0), task.model(kind, n_neurons, 0)
    rows = batch.shape[1]  # one column is not an input, and the bias token is one more row
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
        "flops a token": models.flops(kind, task.d_model, n_neurons),
        "in dense form": models.flops(kind, task.d_model, n_neurons, n_dense=rows),
    }


def of(runs: pd.DataFrame, task: str, column: str) -> pd.DataFrame:
    """Return a column of the runs of a task, [seed, arm]."""
    wide = runs[runs["task"] == task].pivot(index="seed", columns="arm", values=column)
    return wide[[arm for arm in ARMS if arm in wide]]


def differences(losses: pd.DataFrame) -> pd.DataFrame:
    """Return how far losses are above the MLP's with the same seed, in percent."""
    return 100 * (losses.div(losses["mlp"], axis=0) - 1)


def epochs(values: "pd.Series[float]") -> str:
    """Return the median of the epochs at which an arm solved addition, and all of them by seed."""
    every = ["no" if x == math.inf else f"{x:.0f}" for x in (*values, values.median())]
    return f"{every.pop()} ({', '.join(every)})"


def until_flat(losses: "pd.Series[float]") -> dict[str, Any]:
    """Return the share of its loss that the MLP loses with twice as many steps, and a forecast.

    All later falls are assumed to shrink by the factor of the last two, until one is at most
    FALLING. The losses are by the number of steps.
    """
    fall = -losses.pct_change()
    factor, steps = fall.iloc[-1] / fall.iloc[-2], float("nan")
    if 0 < factor < 1:
        doublings = max(0, math.ceil(math.log(FALLING / fall.iloc[-1]) / math.log(factor)))
        steps = float(fall.index[-2] * 2**doublings)
    return {"falls": fall, "factor": factor, "steps_until_flat": steps}


def cost(runs: pd.DataFrame, task: str, cut: str) -> pd.DataFrame:
    """Return how much a cut adds to the loss, [seed, arm]."""
    return of(runs, task, cut) - of(runs, task, "loss")


def rates(tables: Tables, task: str) -> pd.DataFrame:
    """Return the losses by learning rate, with the chosen rate in bold."""
    searched = tables["tried"].query("use == 'search' and task == @task")
    form = searched["chosen"].astype(bool).map({True: "**{:.3g}**", False: "{:.3g}"})
    losses = [text.format(loss) for text, loss in zip(form, searched["loss"], strict=True)]
    wide = searched.assign(loss=losses).pivot(index="arm", columns="lr", values="loss")
    return wide.loc[list(TRAINED[task])].fillna("").reset_index()


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    runs, tried = tables[""], tables["tried"]
    losses, lr = of(runs, "text", "loss"), of(runs, "text", "lr").iloc[0]
    at_rate = tried.query("use == 'same rate'").pivot(index="seed", columns="lr", values="loss")
    same = pd.DataFrame({arm: losses[arm] / at_rate[lr[arm]] - 1 for arm in losses})
    earlier = {
        steps: differences(rows.pivot(index="seed", columns="arm", values="loss"))
        for steps, rows in tables["earlier"].groupby("steps")
    }
    lengths = tried.query("use == 'length'").set_index("steps")["loss"]
    flat = until_flat(lengths)
    again = tried[(tried["use"] == "same rate") & (tried["lr"] == lr["mlp"])].index
    spent = pd.concat([runs, tried.drop(again)]).groupby("task")["seconds"].sum()
    steps = tables["curves"].groupby("task")["step"].max()
    seconds = runs.query("task == 'text'")["seconds"].sum() / steps["text"]
    lost = runs[runs["solved"].notna() & (runs["accuracy"] < LOST)]
    return {
        "of": lambda task, column: of(runs, task, column),
        "cost": lambda task, cut: cost(runs, task, cut),
        "rates": lambda task: rates(tables, task),
        "more": differences(losses),
        "same": 100 * same,
        "earlier": earlier,
        "lr": lr,
        "lengths": lengths,
        **flat,
        "hours_until_flat": flat["steps_until_flat"] * seconds / 3600,
        "minutes": spent / 60,
        "steps": steps,
        "share": tables["sizes"].query("task == 'text'").set_index("arm"),
        "lost": [f"{x.arm}, seed {x.seed} ({100 * x.accuracy:.0f} %)" for x in lost.itertuples()],
        "solved": of(runs, "addition", "solved").fillna(math.inf),
        "interval": t_interval,
        "holds_0": lambda x: t_interval(x)[1] <= 0 <= t_interval(x)[2],
        "epochs": epochs,
        "n_seeds": runs["seed"].nunique(),
        "arms": TRAINED,
        "forms": list(FORMS),
    }


def figures(tables: Tables) -> Mapping[str, Figure]:
    """Draw loss against flops, one panel per task: medians over seeds, and their range."""
    picture = Figure(figsize=(11, 4.5), layout="constrained")
    panels, curves = picture.subplots(1, 2), tables["curves"].query("Tflop > 0")
    for panel, (task, arms) in zip(panels, TRAINED.items(), strict=True):
        for arm in arms:
            rows = curves.query("task == @task and arm == @arm")
            style: dict[str, Any] = {"color": COLOURS[arm], "ls": "--" if "," in arm else "-"}
            panel.plot(rows["Tflop"], rows["median"], label=arm, **style)
            panel.fill_between(
                rows["Tflop"], rows["min"], rows["max"], color=COLOURS[arm], alpha=0.12, lw=0
            )
        yscale = "linear" if task == "text" else "log"
        panel.set(title=task, xscale="log", yscale=yscale, xlabel="Tflop of matrix products")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss, nats")
    panels[0].legend(fontsize="small", loc="lower left", title="dashed: other flops than mlp")
    return {"": picture}


STUDY = Study(run, figures, facts, n_seeds=5)
