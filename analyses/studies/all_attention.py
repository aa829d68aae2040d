"""All-attention layers, both ways: MLPs as persistent vectors, and persistent vectors as neurons.

Sukhbaatar et al., "Augmenting Self-attention with Persistent Memory" (2019), leave MLPs out, and
give each ordinary head N learned pairs of a key and a value: *persistent vectors*. A head's queries
attend, in one softmax, to the text and to its persistent vectors. Remark 3 of "Attention-Only
Transformers and Implementing MLPs with Attention Heads" says that neuron-heads can be written in
this architecture, with one vector for all heads. This study asks about both directions:

    MLP -> all-attention    what Remark 3 needs of the architecture, and for which gates it is exact
    all-attention -> package    load such a model, and read persistent vectors as neurons

`all_attention_models.py` has the constructions, and `attention_only_models.py` the trained layer.

Five arms are trained on Small English, each with five seeds. All arms have two layers, width 48,
four heads, and the same texts, optimizer and schedule; each arm uses the best of three rates,
chosen with another seed.

    mlp                         192 SiLU neurons a layer
    mlp, an eighth              24 neurons
    all-attention               192 persistent vectors in each head: the parameters of "mlp"
    all-attention, an eighth    24 persistent vectors in each head (not trained, for lack of time)
    neither                     ordinary attention alone

Let a_n = q·key_n / √d_head be the score of persistent vector n of a head at a token, and p_n its
weight in the pattern. *Leaving out* a vector has two meanings: `zeroed`, where its value is 0 and
the pattern stays; and `deleted`, where its key is removed, so that the other weights grow.

Predictions, written before any of these models was trained (the arm "mlp" was trained for 600 steps
in `train_attention_only.py`). Figures are means over seeds.

1.  "all-attention" ends within 2 % of the loss of "mlp".
2.  "neither" ends at least 3 % above "mlp", and "all-attention" closes at least half of this gap.
3.  Heads of "all-attention" give more than half of their weight to persistent vectors, in both
    layers; and more in the second layer than in the first.
4.  At a token, a head uses few of its vectors: the exponential of the entropy of p_n / Σ p_n is
    less than 48, a quarter of N, in both layers.
5.  Deleting all vectors of a layer costs more than 0.5 nats in each layer. Deleting one vector
    costs less than 0.001 nats in the median over vectors.
6.  Costs of zeroed and of deleted vectors have the same order (Spearman's ρ > .8 over vectors).
7.  A vector's own score a_n explains more than half of the variance over tokens of log p_n, in the
    median over vectors; the rest is the denominator, which all vectors of the head share.
8.  Vectors are no more interchangeable than neurons: the strongest tenth of the vectors (by the
    cost of zeroing, on half of the texts) has more than half of the summed positive costs on the
    other half.

Batches of held-out texts are those of `train_attention_only.py`. For measures of single vectors,
few of them were used, to save time.

    python -m analyses.studies.all_attention --out analyses/results
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer
from torch import nn
from tqdm import tqdm
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from analyses.studies import all_attention_identities as identities
from analyses.studies import all_attention_measures as measures
from analyses.studies import all_attention_models as constructions
from analyses.studies import attention_only_models as models
from analyses.studies.all_attention_report import figure, page
from analyses.studies.all_attention_tools import Reading, checks, every_vector, refusals, strongest
from analyses.studies.train_attention_only import Text, late, slug, train
from analyses.tools import train_small_english as english
from analyses.tools.benching import machine
from analyses.tools.options import Device, Out, Runs, Seeds, Smoke
from analyses.tools.resumable import claim
from analyses.tools.study_files import as_stored, keep
from attn_only_lens.storage import write_text

DIGITS = "%.4g"
SEED_OF_SEARCH = 100
ARMS: dict[str, tuple[models.Kind, float]] = {
    "mlp": ("mlp", 1),
    "mlp, an eighth": ("mlp", 1 / 8),
    "all-attention": ("all-attention", 1),
    "neither": ("all-attention", 0),
}
"""The kind of each arm, and its neurons, or persistent vectors per head, per neuron of the MLP."""


@dataclass(frozen=True)
class English(Text):
    """The task of predicting Small English texts, with this study's arms."""

    def neurons(self, arm: str) -> tuple[models.Kind, int]:
        """Return the kind of an arm, and its number of neurons, or N."""
        kind, share = ARMS[arm]
        return kind, round(share * self.d_mlp)

    def model(self, kind: models.Kind, n_neurons: int, seed: int) -> nn.Module:
        """Return an untrained model; N may be 0."""
        model: Any = super().model(kind, n_neurons or 1, seed)
        if not n_neurons:
            for sublayer in models.sublayers_of(model):
                assert isinstance(sublayer, models.AllAttention)
                sublayer.scaled_key = nn.Parameter(sublayer.scaled_key.detach()[:, :0])
                sublayer.scaled_value = nn.Parameter(sublayer.scaled_value.detach()[:, :0])
        return model  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Study:
    """What determines the result."""

    text: English = field(
        default_factory=lambda: English(48, 4, 192, 1200, 480, 12, (8e-3, 1.6e-2, 3.2e-2), 50)
    )
    n_seeds: int = 5
    few: int = 4  # held-out batches for measures of single vectors
    every: int = 24  # every 24th vector or neuron is left out alone
    per_layer: int = 6  # vectors of each layer that become heads, to be read by the tools
    task: str = "number, simple"


SMOKE = Study(
    English(8, 2, 16, 4, 2, 2, (1e-2,), 2, n_layers=2, rows=3, n_held_out=2, prompts=5),
    n_seeds=2,
    few=2,
    per_layer=2,
)


def trained(
    study: Study, folder: Path, device: str
) -> Iterator[tuple[str, int, Any, pd.DataFrame, pd.DataFrame]]:
    """Yield arm, seed, model, curve and search of every arm with every seed."""
    claim(folder / "study.txt", f"{replace(study, n_seeds=0)!r}\n")
    total = len(ARMS) * (len(study.text.lrs) + study.n_seeds)
    with tqdm(total=total, unit="run") as bar:
        for arm in ARMS:
            task = study.text
            run = partial(_run, bar, task, arm, folder, device)
            curves = [run(SEED_OF_SEARCH, lr, task.search_steps)[1] for lr in task.lrs]
            search = pd.DataFrame({"lr": task.lrs, "loss": [late(curve) for curve in curves]})
            search["seconds"] = [curve["seconds"].iloc[-1] for curve in curves]
            best = float(search["lr"][search["loss"].idxmin()])
            for seed in range(study.n_seeds):
                yield arm, seed, *run(seed, best, task.steps), search


def _run(
    bar: Any, task: English, arm: str, folder: Path, device: str, seed: int, lr: float, steps: int
) -> tuple[nn.Module, pd.DataFrame]:
    bar.set_description(f"{arm}, seed {seed}, lr {lr:g}")
    into = folder / slug("text", arm, seed, lr)
    model, curve = train(task, arm, seed, lr, steps, into, device)
    bar.update()
    return model, curve.rename(columns={"cpu_seconds": "seconds"})


def measured(study: Study, folder: Path, device: str) -> tuple[dict[str, pd.DataFrame], list[Any]]:
    """Train and measure every arm; return frames by name, and the models of seed 0 to read."""
    collected: dict[str, list[pd.DataFrame]] = {}
    kept: dict[str, Any] = {}
    held_out = study.text.pool(0, english.SEED_OF_HELD_OUT)[: study.text.n_held_out]
    batches = [batch.to(device) for batch in sorted(held_out, key=lambda batch: batch.shape[1])]
    for arm, seed, model, curve, search in trained(study, folder, device):
        frames = {
            "": curve,
            **stored(study, folder / slug("measured", arm, seed), arm, model, batches),
        }
        if seed == 0:
            kept[arm] = model
            frames["search"] = search
        for part, frame in frames.items():
            collected.setdefault(part, []).append(frame.assign(arm=arm, seed=seed))
    joined = {part: pd.concat(frames, ignore_index=True) for part, frames in collected.items()}
    with torch.no_grad():
        joined["promoted"] = measures.promoted(kept["all-attention"], batches, 8)
    return joined, [kept["mlp"], kept["all-attention"]]


@torch.no_grad()
def stored(
    study: Study, folder: Path, arm: str, model: Any, batches: list[torch.Tensor]
) -> dict[str, pd.DataFrame]:
    """Measure a model, or read what was measured from a folder."""
    kind, n_vectors = study.text.neurons(arm)
    calls: dict[str, Any] = {}
    if kind == "all-attention" and n_vectors:
        calls = {"usage": measures.usage, "layers": measures.layer_costs}
    if arm in ("mlp", "all-attention"):
        calls["single"] = partial(measures.single_costs, every=study.every, few=study.few)
    return {
        part: once(folder / f"{part}.csv", partial(call, model, batches))
        for part, call in calls.items()
    }


def read(study: Study, folder: Path, mlp: Any, model: Any) -> dict[str, pd.DataFrame]:
    """Return the frames of what is exact, and of what the tools say, for the models of seed 0."""
    weights = constructions.weights_of(model)
    asked = english.questions(study.text.prompts)[study.task]
    of = english.tokenizer()
    clean, corrupted = (
        of(texts[0], return_tensors="pt")["input_ids"][0]
        for texts in (asked.clean, asked.corrupted)
    )
    (right,), (wrong,) = asked.answers[0], asked.wrong[0]
    plain = models.in_package(mlp.double())
    bridge = build_bridge_from_module(plain, "GPT2LMHeadModel", hf_config=plain.config)
    split = strongest(weights, clean, (right, wrong), study.per_layer)
    reading = Reading(weights, split, clean, corrupted, (right, wrong))
    few = torch.tensor([3, 1, 4, 1, 5, 9])
    calls: dict[str, Callable[[], pd.DataFrame]] = {
        "remark": lambda: pd.DataFrame(identities.from_mlp(mlp, bridge, clean)),
        "gates": identities.of_gates,
        "vectors": lambda: pd.DataFrame(identities.of_vectors(weights, clean)),
        "ranks": lambda: identities.ranks(weights, mlp),
        "memory": lambda: pd.concat(
            [
                identities.by_size("trained, LayerNorm", weights, clean),
                identities.by_size("random, RMSNorm", identities.drawn("RMS"), few),
                identities.by_size("random, no norm", identities.drawn(None), few),
            ],
            ignore_index=True,
        ),
        "tools": lambda: pd.DataFrame(check.row() for check in checks(reading)),
        "every": lambda: every_vector(reading),
        "refusals": lambda: refusals(reading),
    }
    return {part: once(folder / f"{part}.csv", call) for part, call in calls.items()}


def once(path: Path, call: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """Return a frame from a file, which is made if it does not exist."""
    if not path.exists():
        write_text(path, call().to_csv(index=False))
    return pd.read_csv(path)


def main(
    out: Out = Path("out/all-attention"),
    runs_dir: Runs = Path("out/all-attention-runs"),
    device: Device = "cpu",
    n_seeds: Seeds = 5,
    smoke: Smoke = False,
) -> None:
    """Train, measure, print; write the page, tables and figure (`study_files.py`)."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    started = time.perf_counter()
    study = replace(SMOKE if smoke else Study(), n_seeds=n_seeds)
    frames, kept = measured(study, runs_dir, device)
    frames = as_stored(frames | read(study, runs_dir / "read", *kept), DIGITS)
    about = {"study": asdict(study), "machine": machine(device)}
    text = page(frames, about, " --smoke" if smoke else "")
    typer.echo(text)
    settings = {"device": device, "smoke": smoke, **about}
    keep(__file__, out, text, frames, figure(frames), started=started, digits=DIGITS, **settings)


if __name__ == "__main__":
    typer.run(main)
