"""Does a model whose MLP is attention heads keep its structure under training with a regularizer?

The post: "The structures used for attention-only transformers are probably not stable under
training with any form of regularization", as L2 reduces the Ω entries, and as under dropout "the
attention patterns rely on strong signals from specific entries, with no redundancy".

A one-layer model without norm (SiLU, addition modulo 23) is trained. Then training continues from
the same weights on the same batches in three forms: the MLP; one head per neuron (heads: `convert`,
whose masks and bias token are not weights); and the post's form (post, with Ω = 9 = ½ ln(2²⁴ N),
the smallest Ω that is accurate in float32, and with the author's Ω = 1000). In the post's matrices,
either the initially nonzero entries are trained, or all entries. Regularizers: none; decoupled
weight decay λ (AdamW); an L2 term λ/2 |w|² in the loss; dropout of 0.1 on attention patterns, on
sublayer outputs to the stream, or on the hidden layer. There are three seeds for the model, the
split of pairs, the batches and dropout.

Measures, on all pairs without dropout: KL and logit distance from the original function, accuracy,
and loss. For the post's form, also: the largest attention weight where the construction has none
("leak"), the Ω that the weights still hold, and the KL of the same weights with the masks restored.
The KL that remains with restored masks is drift of the function; the rest is due to broken masks.

Decay without gradients is measured separately. After t steps, all weights are multiplied by e^-s,
with s = -t ln(1 - ηλ), or only one part (`regularised_forms.py`): own weights, Ω, or the ones.

Predictions, written before the run, after trials of 60 to 100 steps with every entry trained
---------------------------------------------------------------------------------------------
1. heads = MLP up to rounding without dropout, whatever the regularizer: the parameters are the same
   tensors. Dropout of patterns acts on neuron-heads as dropout of the hidden layer acts on the MLP
   (a dropped self entry drops the neuron), so it is not the same there, but of the same size.
2. Decay alone, Ω: with W_QK in one piece a linear head leaks N e^-m / (1 + N e^-m), m = 2Ω e^-s,
   exactly. It fails between a leak of 1 % and of 1/2: s = ln(2Ω / ln(99 N)) to ln(2Ω / ln N), 1.15
   to 2.80 at Ω = 9, 5.86 to 7.51 at Ω = 1000. Factored, m = 2Ω e^(-2s), and it takes half as long.
   A hundredfold Ω buys a logarithm of time. Scores need not be compared with Ω: they shrink too.
3. Decay alone, all: Ω is not what breaks first. The ones are: SiLU is h - h σ(-h), the second term
   written by a -1, so h (1 - e^-s) is left over where the neuron is off, from the first step,
   whatever Ω. And the model's own weights shrink, as the MLP's do. Ω = 1000 outlives both.
4. Trained with decay: the gradient does not hold Ω up (nothing is to be gained until it leaks), so
   the leak follows the closed form at s = ηλt: of Ω = 9, 1 % after 384 steps at λ = 3 and 115 at
   λ = 10; of Ω = 1000 never in this run. It mends the ones. Where the MLP stays (λ = 1, with which
   it was trained), the post with either Ω stays within 10 times its KL for these 500 steps; Ω = 9
   would fail there after 1151. Where λ is larger the MLP itself is lost before the masks are.
5. L2 in the loss, under Adam: every weight moves by about η a step, whatever its size, so Ω stays
   (18 less 0.5) and the model's own weights and the ones go: no leak, and the post no further off
   than the MLP by more than a factor of 10.
6. Dropout of patterns: Ω stays, but in a SiLU head a dropped self entry leaves h where SiLU(h)
   should be, and a linear head loses all it writes at once: its KL is at least ten times that of
   heads. Dropout of the hidden layer: as the MLP. Of the stream: the SiLU heads' correction is
   dropped or scaled by itself, so further off than the MLP.
7. No regularizer: MLP, heads and the post's nonzero entries stay (KL below 0.1). With every entry
   trained, the post's form is lost within 25 steps, without any regularizer: Adam moves thousands
   of zeros by η at once, all where the gradient points. The trials showed it; the prediction is
   that a rate 20 times lower does not save Ω = 1000.

The formulas in 2 and 4 were evaluated wrongly at first (1.37 instead of 1.15, and numbers that
depend on it); this was corrected during the run.

    python -m analyses.studies.regularised --out analyses/results
"""

import itertools
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch import Tensor
from tqdm import tqdm

from analyses.studies.regularised_forms import EVERY, PARTS, Form, Post, Site, form_of
from analyses.studies.regularised_report import Settings, drift_figure, page, shrink_figure
from analyses.tools.options import Device, Out, Smoke
from analyses.tools.study_files import as_stored, keep
from analyses.tools.train_modular_addition import Recipe, loss_of, pairs, train
from attn_only_lens.storage import write_text
from attn_only_lens.tl import HookedTransformer

DIGITS = "%.6g"


@dataclass(frozen=True)
class Study:
    """The settings that determine the result."""

    modulus: int = 23
    d_model: int = 24
    n_heads: int = 2
    d_mlp: int = 48
    train_fraction: float = 0.9
    lr: float = 1e-3
    epochs: int = 1000  # of the original model's training
    steps: int = 500  # after conversion
    batch: int = 32
    warmup: int = 20
    check_every: int = 25
    omegas: tuple[float, ...] = (9.0, 1000.0)
    decays: tuple[float, ...] = (1.0, 3.0, 10.0)
    l2: tuple[float, ...] = (1e-2,)
    slower: float = 20.0
    lost_after: int = 100  # the number of steps in runs that train every entry
    dropout: float = 0.1
    shrinking: tuple[float, ...] = (
        *(0.0, 0.03, 0.1, 0.3, 0.5, 0.7, 1.0, 1.4, 1.8, 2.2, 2.6, 3.0, 3.4, 3.8, 4.4, 5.0, 5.6),
        *(6.1, 6.6, 7.1, 7.6, 8.0),
    )
    n_seeds: int = 3

    def recipe(self, seed: int) -> Recipe:
        """Return the recipe of the original model."""
        names = ("modulus", "d_model", "n_heads", "d_mlp", "train_fraction", "lr", "epochs")
        return Recipe(seed=seed, **{name: getattr(self, name) for name in names})

    @property
    def arms(self) -> "list[tuple[str, str]]":
        """The pairs of a form and a regularizer that are trained."""
        posts = [f"post Ω={omega:g}" for omega in self.omegas]
        regularizers = list(self.regularizers)
        arms = [(form, name) for form in ("MLP", "heads", *posts) for name in regularizers[:-1]]
        every = [f"{form}, {EVERY}" for form in posts]
        return arms + [
            (form, name) for form in every for name in (regularizers[0], regularizers[-1])
        ]

    @property
    def regularizers(self) -> "dict[str, Regularizer]":
        """All regularizers by name."""
        sites: tuple[Site, ...] = ("patterns", "stream", "hidden")
        return {
            "none": Regularizer(),
            **{f"decay {x:g}": Regularizer(decay=x) for x in self.decays},
            **{f"L2 {x:g}": Regularizer(l2=x) for x in self.l2},
            **{f"dropout, {site}": Regularizer(site=site) for site in sites},
            f"none, η/{self.slower:g}": Regularizer(slower=self.slower),
        }


SMOKE = Study(
    modulus=5,
    d_model=6,
    d_mlp=7,
    epochs=3,
    steps=4,
    batch=8,
    check_every=2,
    lost_after=2,
    omegas=(9.0,),
    decays=(1.0,),
    l2=(1e-2,),
    shrinking=(0.0, 1.0),
    n_seeds=1,
)


@dataclass(frozen=True)
class Regularizer:
    """A regularizer: at most one of the fields differs from its default."""

    decay: float = 0.0
    l2: float = 0.0
    site: Site | None = None
    slower: float = 1.0


@dataclass(frozen=True)
class Data:
    """All pairs, their answers, whether they are training pairs, and the original logits."""

    tokens: Tensor
    answers: Tensor
    trained: Tensor
    before: Tensor


def distances(logits: Tensor, data: Data) -> dict[str, float]:
    """Return distances from the original function, loss and accuracy, as means over all pairs."""
    was, now = (tensor.double().log_softmax(-1) for tensor in (data.before, logits))
    centred = [
        tensor.double() - tensor.double().mean(-1, keepdim=True) for tensor in (data.before, logits)
    ]
    hits = logits.argmax(-1) == data.answers
    return {
        "kl": (was.exp() * (was - now)).sum(-1).mean().item(),
        "logits": ((centred[1] - centred[0]).norm() / centred[0].norm()).item(),
        "loss": loss_of(logits, data.answers).item(),
        "accuracy": hits.double().mean().item(),
    }


@torch.no_grad()
def looked_at(form: Form, data: Data) -> dict[str, float]:
    """Return a row of a run; measures of the post's form are missing for other forms."""
    if not isinstance(form, Post):
        return distances(form.logits(data.tokens), data)
    seen, masked = (form.seen(data.tokens, masked=masked) for masked in (False, True))
    return {
        **distances(seen.logits, data),
        "kl_masked": distances(masked.logits, data)["kl"],
        "omega": form.omega_left(),
        **{f"leak_{name}": leak for name, leak in seen.leaks.items()},
    }


def batches(study: Study, data: Data, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield training batches, which are the same for every form and regularizer."""
    generator = torch.Generator().manual_seed(seed)
    fed = data.trained.nonzero()[:, 0]
    while True:
        drawn = torch.randint(len(fed), (study.batch,), generator=generator).to(fed.device)
        yield data.tokens[fed[drawn]], data.answers[fed[drawn]]


def run(study: Study, form: Form, how: Regularizer, data: Data, seed: int) -> pd.DataFrame:
    """Continue training one form with one regularizer, and return a row for each checkpoint."""
    torch.manual_seed(seed)  # the seed of dropout
    parameters, steps = form.trained(), study.steps
    if isinstance(form, Post) and form.every_entry:
        steps = study.lost_after
    settings = {"lr": study.lr, "weight_decay": how.decay}
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), **settings)
    rows, started = [], time.process_time()
    for step, (tokens, answers) in enumerate(batches(study, data, seed)):
        if step % study.check_every == 0 or step == steps:
            spent = {"step": step, "seconds": time.process_time() - started}
            rows.append(spent | looked_at(form, data))
        if step == steps:
            return pd.DataFrame(rows)
        rate = study.lr / how.slower
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / study.warmup)
        loss = loss_of(form.logits(tokens, how.site, study.dropout), answers)
        if how.l2:
            loss = loss + how.l2 / 2 * sum(parameter.square().sum() for parameter in parameters)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError("batches have no end")


@torch.no_grad()
def shrinking(study: Study, model: HookedTransformer, data: Data) -> pd.DataFrame:
    """Return the results of decay without gradients: a row for each form, part and s."""
    rows = []
    for s in study.shrinking:
        factor = math.exp(-s)
        mlp: Any = form_of(model, "MLP")
        for parameter in mlp.trained():
            parameter.mul_(factor)
        about = {"form": "MLP", "part": "all", "s": s}
        rows.append(about | distances(mlp.logits(data.tokens), data))
        for omega, kind in itertools.product(study.omegas, ("", ", factored")):
            post: Any = form_of(model, f"post Ω={omega:g}{kind}")
            for part in ("all", *PARTS):
                parts = PARTS if part == "all" else (part,)
                about = {"form": f"post Ω={omega:g}{kind}", "part": part, "s": s}
                rows.append(about | looked_at(post.shrunk(factor, parts), data))
    return pd.DataFrame(rows)


def measured(study: Study, folder: Path, device: str) -> dict[str, pd.DataFrame]:
    """Do all runs and decay without gradients; runs that are in the folder are read from it."""
    path, settings = folder / "study.json", str(asdict(study) | {"n_seeds": None}) + "\n"
    if path.exists() and path.read_text("utf-8") != settings:
        raise ValueError(f"{path} is of another study: choose another --runs")
    write_text(path, settings)
    curves, shrunk = [], []
    with tqdm(total=study.n_seeds * len(study.arms), unit="run") as bar:
        for seed in range(study.n_seeds):
            recipe = study.recipe(seed)
            model = train(recipe, folder / f"model-{seed}").to(device)
            tokens, answers, trained = (tensor.to(device) for tensor in pairs(recipe))
            with torch.no_grad():
                data = Data(tokens, answers, trained, model(tokens)[:, -1])
            kept = folder / f"shrinking-{seed}.csv"
            if not kept.exists():
                frame = shrinking(study, model, data).assign(seed=seed)
                write_text(kept, frame.to_csv(index=False))
            shrunk.append(pd.read_csv(kept))
            for form, name in study.arms:
                bar.set_description(f"{form}, {name}, seed {seed}")
                kept = folder / f"{form}-{name.replace('/', ' by ')}-{seed}.csv"
                if not kept.exists():
                    done = run(study, form_of(model, form), study.regularizers[name], data, seed)
                    done.insert(0, "seed", seed)
                    done.insert(0, "regularizer", name)
                    done.insert(0, "form", form)
                    write_text(kept, done.to_csv(index=False))
                curves.append(pd.read_csv(kept))
                bar.update()
    return {"curves": pd.concat(curves), "shrinking": pd.concat(shrunk)}


def main(
    out: Out = Path("out/regularised"),
    runs: Annotated[Path, typer.Option(help="finished runs, to go on from")] = Path(
        "out/regularised/runs"
    ),
    n_seeds: Annotated[int, typer.Option(min=1)] = Study.n_seeds,
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, tables and figures (`study_files.py`)."""
    started = time.perf_counter()
    warnings.filterwarnings("ignore", "HookedTransformer is deprecated")
    study = SMOKE if smoke else Study(n_seeds=n_seeds)
    frames = as_stored(measured(study, runs, device), DIGITS)
    decays = {name: how.decay for name, how in study.regularizers.items() if how.decay}
    about = asdict(study)
    text = page(
        frames,
        Settings(about, study.lr, list(study.regularizers), decays, " --smoke" if smoke else ""),
    )
    typer.echo(text)
    pictures = {"": drift_figure(frames["curves"]), "shrinking": shrink_figure(frames["shrinking"])}
    keep(
        __file__,
        out,
        text,
        frames,
        pictures,
        started=started,
        digits=DIGITS,
        device=device,
        smoke=smoke,
        **about,
    )


if __name__ == "__main__":
    typer.run(main)
