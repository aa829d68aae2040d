"""When do new parts take over? Addition modulo 53: models that grow under more or less pressure.

The companion of `pressure_small_english.py`, on a task that needs neurons. *Capacity pressure* is
the loss of a small model minus the loss of a larger one, both trained from scratch for the same
number of epochs, on the pairs that they train on. It is measured before growth. (Held-out pairs
would measure when a model generalizes, and not what it can fit.)

A one-layer transformer of width 48 with 4 heads and 8, 16, 32, 64 or 128 neurons trains for
`before` epochs. Then it grows *to full* (128 neurons) or *by one rung* (twice as many neurons), and
trains for `after` more epochs. After one rung, half of the neurons are new, whatever the size.

    grown               new entries as the model draws its own, output weights zero
    grown, equal loss   the grown model at the first of `checks` where its loss on the training
                        pairs is no higher than the loss of "not grown" at the end
    grown, no decay     grown by one rung; from then on, AdamW has no weight decay
    grown, other pairs  grown with the same new entries; from then on, it trains on another random
                        choice of pairs
    not grown           the small model, trained for as many epochs
    full                128 neurons from the start, for as many epochs in all

Measures are those of `pressure_measures.py`. This model has one layer and no norm, so they have
closed forms: at '=', the effect of neuron i is Δz_i · W_out[i] · (W_U[right] - W_U[wrong]), where
Δz is the difference between the prompt a, b and a prompt a, b'. Effects are additive, so `joint` is
the sum of single effects. Ablations replace a neuron's output by its mean over all pairs; their
costs are rises of the loss on all pairs: `loss_new`, `loss_old`, `loss_all`.

Predictions, written before the runs. Figures are means over seeds; ρ is Spearman's correlation over
growths, computed for each seed. A growth is *pressed* if its pressure is above .1 nats.

1.  Over rungs, pressure ranks the share of new neurons: ρ > .8.
2.  To full, pressure ranks the share of new neurons: ρ > .8. (Random labels could give this.)
3.  Over rungs, pressure ranks the cost of new neurons in loss, `loss_new` / `loss_all`: ρ > .8.
4.  After one rung, new neurons reach parity (half of all effects) in pressed growths, and stay
    below parity in the others.
5.  Growth adds no drift: in every growth, the overlap of old neurons' effects with their effects
    before growth, divided by the ceiling, is within .1 of the same ratio for "not grown".
6.  At equal loss it is the same: within .1 of "not grown", in every growth to full.
7.  Two trainings of a grown model on different pairs agree better with each other than each of them
    agrees with the model before growth.
8.  New neurons act through values: `by_pattern` < 1/3, and within .1 of that of old neurons.
9.  In growths that are not pressed, patching new neurons together costs less than patching as many
    random directions.
10. Weight decay, and not only pressure, moves effects into new neurons: without it, the share of
    new neurons is lower by .1 or more in growths by one rung that are not pressed, and changes by
    less than .1 in those that are.

What we knew: one model of each size had been trained with seed 100 to choose the number of epochs.
After 400 epochs, models with 8, 16, 32, 64 and 128 neurons had losses of .47, .56, .007, .003 and
.008 on the training pairs. No model had grown. In `growth_modular_addition.md`, new neurons held 70
to 82 % of the margin after growth from 32 to 128 neurons (parity: 75 %), in a model that also got
wider.

    python -m analyses.studies.pressure_modular_addition --out analyses/results
"""

import copy
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer
from torch import Tensor
from tqdm import tqdm

from analyses.studies.circuit_measures import Look, Pair, Part, agreement
from analyses.studies.pressure_measures import new_parts, random_labels
from analyses.studies.pressure_report import addition_page, figure
from analyses.tools.benching import machine
from analyses.tools.growth_training import Training
from analyses.tools.options import Device, Out, Runs, Seeds, Smoke
from analyses.tools.resumable import claim, put_back, train, training_seconds
from analyses.tools.study_files import as_stored, keep
from analyses.tools.train_modular_addition import Recipe, adamw, fast_logits, loss_of, pairs, step
from attn_only_lens import expansion as ex
from attn_only_lens import grow
from attn_only_lens.tl import HookedTransformer

TASK = "addition"
OTHER_PAIRS = 100  # more than there are seeds
DIGITS = "%.4g"


@dataclass(frozen=True)
class Study:
    """What determines the result."""

    modulus: int = 53
    d_model: int = 48
    n_heads: int = 4
    ladder: tuple[int, ...] = (8, 16, 32, 64, 128)
    other_pairs: tuple[int, ...] = (8, 64)
    before: int = 400
    after: int = 400
    checks: tuple[int, ...] = (25, 50, 100, 150, 200, 300)  # epochs after growth
    train_fraction: float = 0.6
    lr: float = 2e-3
    n_seeds: int = 5
    prompts: int = 256
    draws: int = 3

    def recipe(self, d_mlp: int, seed: int) -> Recipe:
        """Return the recipe for a model of this size."""
        return Recipe(
            modulus=self.modulus,
            d_model=self.d_model,
            n_heads=self.n_heads,
            d_mlp=d_mlp,
            seed=seed,
            train_fraction=self.train_fraction,
            lr=self.lr,
        )


SMOKE = Study(
    modulus=7,
    d_model=6,
    n_heads=2,
    ladder=(3, 6, 12),
    other_pairs=(3,),
    before=5,
    after=7,
    checks=(3,),
    prompts=11,
    draws=2,
)


def cases(study: Study) -> Iterator[tuple[int, int]]:
    """Yield the sizes before and after each growth: by one rung, and to full."""
    for small, following in pairwise(study.ladder):
        for full in dict.fromkeys((following, study.ladder[-1])):
            yield small, full


@dataclass(frozen=True)
class SeedRuns:
    """The training runs of one seed, which resume from the checkpoints in a folder."""

    study: Study
    seed: int
    folder: Path
    device: str

    def data(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return all pairs, their answers, and which of them are trained on."""
        tokens, answers, trained = pairs(self.study.recipe(1, seed))
        return tokens.to(self.device), answers.to(self.device), trained.to(self.device)

    def go(
        self, name: str, training: Training, until: int, pairs_seed: int, kept: Collection[int] = ()
    ) -> Training:
        """Train, or load what is trained."""
        tokens, answers, trained = self.data(pairs_seed)

        def one(training: Training, _: int) -> dict[str, int]:
            step(training.model, training.optimizer, tokens[trained], answers[trained])
            return {"epochs": 1}

        first, training.done = training.done, 0  # `train` sets it again
        with tqdm(total=until - first, desc=f"{name}, seed {self.seed}", mininterval=10) as bar:
            train(
                *(training, until, self.folder / f"{self.seed}-{name}", one),
                lambda model: losses(model, (tokens, answers, trained)),
                {"epochs": first},
                check_every=100,
                save_every=100,
                tick=bar.update,
                first=first,
                kept=kept,
            )
        return training

    def trunk(self, d_mlp: int) -> Training:
        """Return a model of this size before growth, with its optimizer."""
        recipe = self.study.recipe(d_mlp, self.seed)
        model = recipe.model().to(self.device)
        training = Training(model, adamw(recipe, model), {}, seed=self.seed)
        return self.go(str(d_mlp), training, self.study.before, self.seed)

    def after(
        self,
        trunk: Training,
        full: int = 0,
        *,
        other_pairs: bool = False,
        no_decay: bool = False,
        kept: bool = False,
    ) -> Training:
        """Train a copy of `trunk` further, after it grows to `full` neurons if this is not 0."""
        study, small = self.study, trunk.model.cfg.d_mlp
        training = copy.deepcopy(trunk)
        if full:
            training.schedule = {study.before: ex.AddNeurons(full - small)}
        for group in training.optimizer.param_groups if no_decay else ():
            group["weight_decay"] = 0.0
        name = f"{small}-{full or 'alone'}" + "-pairs" * other_pairs + "-no-decay" * no_decay
        pairs_seed = self.seed + OTHER_PAIRS * other_pairs
        checks = [study.before + check for check in study.checks if kept]
        return self.go(name, training, study.before + study.after, pairs_seed, checks)

    def at_equal_loss(
        self, trunk: Training, grown: Training, loss: float
    ) -> tuple[int, HookedTransformer]:
        """Return the grown model at the first check with at most this loss, or at the end."""
        study, small, full = self.study, trunk.model.cfg.d_mlp, grown.model.cfg.d_mlp
        folder = self.folder / f"{self.seed}-{small}-{full}"
        for check in study.checks:
            model = grow(trunk.model, ex.AddNeurons(full - small), seed=self.seed).model
            model = put_back(model, folder / f"{study.before + check}.safetensors")
            if losses(model, self.data(self.seed))["train_loss"] <= loss:
                return check, model
        return study.after, grown.model


@torch.no_grad()
def losses(model: HookedTransformer, data: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Return the losses on pairs trained on and on others, and the accuracy on the others."""
    tokens, answers, trained = data
    logits = fast_logits(model, tokens)
    hits = logits.argmax(-1) == answers
    return {
        "train_loss": loss_of(logits[trained], answers[trained]).item(),
        "test_loss": loss_of(logits[~trained], answers[~trained]).item(),
        "test_accuracy": hits[~trained].double().mean().item(),
    }


@dataclass(frozen=True)
class Prompts:
    """Prompts a, b and a, b' with b' ≠ b."""

    clean: Tensor
    corrupted: Tensor

    @classmethod
    def of(cls, study: Study, seed: int, device: str) -> tuple["Prompts", "Prompts"]:
        """Draw two disjoint sets of prompts."""
        modulus, generator = study.modulus, torch.Generator().manual_seed(seed)
        order = torch.randperm(modulus**2, generator=generator)[: 2 * study.prompts]
        a, b = order // modulus, order % modulus
        shifted = (b + torch.randint(1, modulus, b.shape, generator=generator)) % modulus
        equals = torch.full_like(a, modulus)
        clean, corrupted = (
            torch.stack([a, second, equals], 1).to(device) for second in (b, shifted)
        )
        half = len(a) // 2
        return cls(clean[:half], corrupted[:half]), cls(clean[half:], corrupted[half:])


@torch.no_grad()
def queries(model: HookedTransformer, tokens: Tensor) -> Tensor:
    """Return the pre-activations of all neurons at '=', [prompt, neuron]."""
    kept: list[Tensor] = []

    def neurons(resid: Tensor) -> Tensor:
        kept.append(resid @ model.blocks[0].mlp.W_in)
        return torch.zeros_like(resid)

    fast_logits(model, tokens, neurons)
    return kept[0].double()


@dataclass(frozen=True)
class Measured:
    """The effects in one model, with what nulls and parts are made of.

    Attributes:
        look: the effects of its neurons.
        changes: Δz, [prompt, neuron].
        readout: from z to the metric, [prompt, neuron].
        by_pattern: the exact part of each effect that goes through the pattern, [prompt, neuron].
    """

    look: Look
    changes: Tensor
    readout: Tensor
    by_pattern: Tensor


@torch.no_grad()
def effects_of(model: HookedTransformer, prompts: Prompts, new: Collection[str] = ()) -> Measured:
    """Return the effects of all neurons, by closed forms."""
    modulus, both = model.cfg.d_vocab_out, (prompts.clean, prompts.corrupted)
    right, wrong = (tokens[:, :2].sum(1) % modulus for tokens in both)
    q, q_corrupted = (queries(model, tokens) for tokens in both)
    pattern, pattern_corrupted = q.sigmoid(), q_corrupted.sigmoid()
    changes = q * pattern - q_corrupted * pattern_corrupted
    to_logits = (model.blocks[0].mlp.W_out @ model.W_U).double()
    readout = (to_logits[:, right] - to_logits[:, wrong]).T
    through_pattern = (pattern - pattern_corrupted) * (q + q_corrupted) / 2 * readout
    clean, nothing = (
        (logits.gather(1, right[:, None]) - logits.gather(1, wrong[:, None]))[:, 0].double()
        for logits in (fast_logits(model, tokens) for tokens in both)
    )
    names = tuple(f"L0N{i}" for i in range(model.cfg.d_mlp))
    effects = changes * readout
    is_new = torch.tensor([name in new for name in names], device=effects.device)
    of_new = effects[:, is_new].sum(1)
    arrays = (effects.T, clean, nothing, clean - of_new, nothing + of_new)
    part = Part(*(array.cpu().numpy() for array in arrays))
    return Measured(Look(names, {TASK: part}, {}, {}, {}), changes, readout, through_pattern)


def nulls(measured: Measured, new: Collection[str], draws: int) -> dict[str, float]:
    """Return `directions` and `labels`: costs with random directions, and with random labels."""
    part, names = measured.look.parts[TASK], measured.look.names
    fall = (part.clean - part.nothing).mean()
    directions, labels = [], []
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        basis = torch.linalg.qr(torch.randn(len(names), len(new), generator=generator))[0]
        basis = basis.to(measured.changes)
        directions.append(
            (measured.changes @ basis @ basis.T * measured.readout).sum(1).mean().item()
        )
        labelled = np.isin(names, random_labels(names, new, seed))
        labels.append(part.effects[labelled].sum(0).mean())
    return {
        "directions": float(np.mean(directions) / fall),
        "labels": float(np.mean(labels) / fall),
    }


def patterns(measured: Measured, new: Collection[str]) -> dict[str, float]:
    """Return the share of patterns in what goes through patterns and values, new and old."""
    effects = torch.from_numpy(measured.look.parts[TASK].effects.T).to(measured.by_pattern)
    pattern, value = (x.mean(0).abs() for x in (measured.by_pattern, effects - measured.by_pattern))
    is_new = torch.tensor([name in new for name in measured.look.names], device=pattern.device)
    shares = [
        (pattern[some].sum() / (pattern[some].sum() + value[some].sum())).item()
        for some in (is_new, ~is_new)
    ]
    return {"by_pattern": shares[0], "by_pattern_old": shares[1]}


@torch.no_grad()
def loss_costs(
    model: HookedTransformer, data: tuple[Tensor, Tensor, Tensor], new: Collection[str]
) -> dict[str, float]:
    """Return `loss_new`, `loss_old` and `loss_all`: rises of the loss on all pairs, in nats."""
    tokens, answers, _ = data
    mlp = model.blocks[0].mlp
    q = queries(model, tokens)
    z = (q * q.sigmoid()).to(mlp.W_out)
    is_new = torch.tensor([f"L0N{i}" in new for i in range(model.cfg.d_mlp)], device=z.device)
    whole = loss_of(fast_logits(model, tokens), answers).item()
    costs = {}
    for name, some in {"new": is_new, "old": ~is_new, "all": is_new | True}.items():
        ablated = torch.where(some, z.mean(0), z) @ mlp.W_out
        logits = fast_logits(model, tokens, lambda _, ablated=ablated: ablated)
        costs[f"loss_{name}"] = loss_of(logits, answers).item() - whole
    return costs


def agreements(before: Look, now: Look, names: Mapping[str, str]) -> dict[str, float]:
    """Return how far the effects of old neurons agree: `overlap`, `correlation`, `kept`."""
    row = agreement(Pair(before, now, names), TASK)
    return {name: row[name] for name in ("overlap", "overlap_chance", "correlation", "kept")}


def measured_case(
    runs: SeedRuns, prompts: Prompts, before: Measured, full: int, loss: float
) -> list[dict[str, Any]]:
    """Return the rows of one growth, by arm.

    Args:
        runs: of the seed.
        prompts: on which effects are measured.
        before: the effects in the small model.
        full: the number of neurons after growth.
        loss: of "not grown" at the end, on the training pairs.
    """
    study, small = runs.study, len(before.look.names)
    data, trunk = runs.data(runs.seed), runs.trunk(small)
    to_full = full == study.ladder[-1]
    grown = runs.after(trunk, full, kept=to_full)
    provenance = grown.provenance
    assert provenance is not None
    new, old = set(provenance.new_neurons), {n: provenance[n] for n in before.look.names}
    rows: list[dict[str, Any]] = []

    def add(arm: str, model: HookedTransformer, epochs: int) -> Measured:
        measured = effects_of(model, prompts, new)
        row = {"arm": arm, "epochs": epochs, **losses(model, data)}
        row |= agreements(before.look, measured.look, old) | new_parts(measured.look, TASK, new)
        rows.append(row)
        return measured

    measured = add("grown", grown.model, study.after)
    rows[0] |= nulls(measured, new, study.draws) | patterns(measured, new)
    rows[0] |= loss_costs(grown.model, data, new)
    if full == study.ladder[study.ladder.index(small) + 1]:
        add("grown, no decay", runs.after(trunk, full, no_decay=True).model, study.after)
    if to_full:
        check, model = runs.at_equal_loss(trunk, grown, loss)
        add("grown, equal loss", model, check)
    if to_full and small in study.other_pairs:
        there = runs.after(trunk, full, other_pairs=True)
        second = add("grown, other pairs", there.model, study.after)
        same = {name: name for name in old.values()}
        rows[-1]["twins"] = agreements(measured.look, second.look, same)["overlap"]
    model = runs.after(runs.trunk(full)).model
    row = {"arm": "full", "epochs": study.after, **losses(model, data)}
    rows.append(row | {"labels": nulls(effects_of(model, prompts), new, study.draws)["labels"]})
    return rows


def of_seed(study: Study, seed: int, folder: Path, device: str) -> dict[str, pd.DataFrame]:
    """Train and measure all growths with one seed: the tables of growths and of sizes."""
    runs, (prompts, others) = SeedRuns(study, seed, folder, device), Prompts.of(study, seed, device)
    data, sizes, growths = runs.data(seed), [], []
    looks, before, after = {}, {}, {}
    for size in study.ladder:
        trunk = runs.trunk(size)
        alone = runs.after(trunk).model
        measured = looks[size] = effects_of(trunk.model, prompts)
        before[size], after[size] = losses(trunk.model, data), losses(alone, data)
        same = {name: name for name in measured.look.names}
        models = {"ceiling": (trunk.model, others), "not grown": (alone, prompts)}
        for arm, (model, asked) in models.items():
            row = {"ladder": "neurons", "seed": seed, "size": size, "arm": arm}
            row |= agreements(measured.look, effects_of(model, asked).look, same)
            row |= {f"{name}_before": value for name, value in before[size].items()}
            sizes.append(row | {f"{name}_after": value for name, value in after[size].items()})
    for small, full in cases(study):
        label = {"ladder": "neurons", "seed": seed, "small": small, "full": full}
        for name, loss in (("pressure", "train_loss"), ("pressure_test", "test_loss")):
            label[name] = before[small][loss] - before[full][loss]
        rows = measured_case(runs, prompts, looks[small], full, after[small]["train_loss"])
        growths += [label | row for row in rows]
    return {"": pd.DataFrame(growths), "sizes": pd.DataFrame(sizes)}


def main(
    out: Out = Path("out/pressure"),
    runs_dir: Runs = Path("out/pressure-addition-runs"),
    device: Device = "cpu",
    n_seeds: Seeds = 5,
    smoke: Smoke = False,
) -> None:
    """Train, measure, print; write the page, tables and figures (`study_files.py`)."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    started = time.perf_counter()
    study = replace(SMOKE if smoke else Study(), n_seeds=n_seeds)
    claim(runs_dir / "study.txt", repr(replace(study, n_seeds=0)) + "\n")
    parts = [of_seed(study, seed, runs_dir, device) for seed in range(n_seeds)]
    made = {part: pd.concat([frames[part] for frames in parts]) for part in parts[0]}
    frames = as_stored(made, DIGITS)
    about = {
        "study": asdict(study),
        "machine": machine(device),
        "training_seconds": round(training_seconds(runs_dir)),
    }
    text = addition_page(frames, about, " --smoke" if smoke else "")
    typer.echo(text)
    settings = {"device": device, "smoke": smoke, **about}
    keep(__file__, out, text, frames, figure(frames), started=started, digits=DIGITS, **settings)


if __name__ == "__main__":
    typer.run(main)
