"""Do the tools work for images? A small transformer on handwritten digits, patched by image patch.

    pip install scikit-learn        # for its digits; the trial run (--smoke) draws images instead
    python -m analyses.studies.image_circuits --out analyses/results

The paper names computer vision and image generation (Parmar et al. 2018) among the uses of
transformers. As in Image Transformer and Image GPT, an image becomes a row of tokens: the 8 × 8
pixels are 16 patches of 2 × 2 pixels, each pixel has one of three levels of grey, so there are 81
kinds of patches. After the patches, the token "?" asks for the digit. The model is a GPT-2 with two
layers and SiLU, so every neuron is exactly an attention head (Theorem 3).

`predictions` were written before the first run.
"""

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor
from tqdm import tqdm
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

from analyses.tools.benching import table
from analyses.tools.options import Device, Out, Seeds, Smoke
from analyses.tools.study_files import keep, t_interval, verdict
from attn_only_lens import circuits, expose_neuron_heads, viz
from attn_only_lens import patching as p

SIDE, PATCH = 8, 2
ROWS = SIDE // PATCH
N_PATCHES = ROWS**2
LEVELS = (5, 12)  # a pixel from 0 to 16 is white below 5, black from 12
KINDS = 3 ** (PATCH**2)
ASK = KINDS  # the token "?"; the ten digits follow it
DIGITS = (3, 8)
OTHERS = (1, 7)
PLACES = {f"r{row}c{column}": row * ROWS + column for row in range(ROWS) for column in range(ROWS)}
ROLES = PLACES | {"?": N_PATCHES}


@dataclass(frozen=True)
class Recipe:
    """What determines a model, and how many pairs of images it is analysed with."""

    d_model: int = 64
    d_mlp: int = 128
    steps: int = 800
    rows: int = 128
    lr: float = 3e-3
    pairs: int = 16


SMOKE = Recipe(d_model=16, d_mlp=7, steps=150, rows=32, lr=1e-2, pairs=3)


def digits() -> tuple[Tensor, Tensor]:
    """Return the images [image, row, column] of scikit-learn's digits, from 0 to 16, and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise typer.BadParameter("scikit-learn is missing: pip install scikit-learn") from error
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32), torch.tensor(data.target)


def drawn(n: int) -> tuple[Tensor, Tensor]:
    """Return n images of ten random patterns with noise, and their labels."""
    generator = torch.Generator().manual_seed(0)
    patterns = 16 * (torch.rand(10, SIDE, SIDE, generator=generator) > 0.5)
    labels = torch.arange(n) % 10
    noise = 2 * torch.randn(n, SIDE, SIDE, generator=generator)
    return (patterns[labels] + noise).clamp(0, 16), labels


def tokens_of(images: Tensor) -> Tensor:
    """Return images as tokens [image, pos]: the patches, row by row, and "?"."""
    grey = torch.bucketize(images, images.new_tensor(LEVELS), right=True)
    patches = grey.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
    kinds = (patches * 3 ** torch.arange(PATCH**2, device=images.device)).sum(-1)
    return F.pad(kinds, (0, 1), value=ASK)


def train(recipe: Recipe, images: Tensor, labels: Tensor, seed: int) -> GPT2LMHeadModel:
    """Train a model to write the digit after "?"; pixels get noise in every batch."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=KINDS + 11,
        n_positions=N_PATCHES + 1,
        n_embd=recipe.d_model,
        n_layer=2,
        n_head=4,
        n_inner=recipe.d_mlp,
        activation_function="silu",
        bos_token_id=ASK,
        eos_token_id=ASK,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
    )
    model = GPT2LMHeadModel(config).to(images.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.1)
    for step in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = recipe.lr * min(step / 50, 1 - step / recipe.steps)
        chosen = torch.randint(len(images), (recipe.rows,))
        noisy = images[chosen] + torch.randn(recipe.rows, SIDE, SIDE).to(images.device)
        logits = model(tokens_of(noisy)).logits[:, -1]
        loss = F.cross_entropy(logits, ASK + 1 + labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.double().eval()


@dataclass(frozen=True)
class Split:
    """Images and labels that a model trains on, and others that it does not see."""

    images: Tensor
    labels: Tensor
    trained: Tensor

    def pairs(self, model: Any, ends: tuple[int, int], n: int) -> list[tuple[Tensor, Tensor]]:
        """Return two sets of n pairs: unseen images of both digits that the model gets right."""
        of_digit = []
        for digit in ends:
            unseen = self.images[~self.trained & (self.labels == digit)]
            right = answers(model, unseen) == digit
            of_digit.append(tokens_of(unseen[right]))
        most = min(map(len, of_digit)) // 2
        n = min(n, most)
        return [(of_digit[0][i : i + n], of_digit[1][i : i + n]) for i in (0, n)]

    def difference(self) -> Tensor:
        """Return how far the mean grey of the two digits differs, for each patch."""
        first, second = (self.images[self.labels == digit].mean(0) for digit in DIGITS)
        patches = (first - second).abs().unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH)
        return patches.mean((-1, -2)).flatten().cpu()


@torch.no_grad()
def answers(model: Any, images: Tensor) -> Tensor:
    """Return the digit that the model writes after each image."""
    logits = model(tokens_of(images))
    logits = getattr(logits, "logits", logits)
    return logits[:, -1, ASK + 1 :].argmax(-1)


def metric_of(ends: tuple[int, int]) -> Any:
    """Return the logit difference between two digits."""
    return p.logit_diff(*(ASK + 1 + digit for digit in ends))


def effects(sweep: Any) -> pd.DataFrame:
    """Return Σ |effect| by layer, kind of site and place, as shares of all."""
    frame = sweep.frame.assign(size=sweep.effect.abs().to_numpy())
    frame["place"] = frame["position"].astype(str)
    sums = frame.groupby(["layer", "kind", "place"], observed=True)["size"].sum()
    return (sums / sums.sum()).rename("share").reset_index()


def graph_of(model: Any, circuit: Any, pair: tuple[Tensor, Tensor]) -> str:
    """Return the drawing of a circuit, as SVG."""
    graph = circuits.attribution_graph(
        model, pair[0], metric_of(DIGITS), corrupted=pair[1], sites=circuit, positions=places(pair)
    )
    picture = viz.circuit_view(graph).picture
    assert picture is not None
    return picture


def places(pair: tuple[Tensor, Tensor]) -> dict[str, list[int]]:
    """Return the position of each patch and of "?", for each pair of images."""
    return {name: [position] * len(pair[0]) for name, position in ROLES.items()}


def measured(
    recipe: Recipe, split: Split, n_seeds: int
) -> Iterator[tuple[dict[str, Any], pd.DataFrame, str]]:
    """Yield, for each seed: a row of measures, the effects by place, and the circuit's drawing."""
    for seed in tqdm(range(n_seeds), desc="models"):
        source = train(recipe, split.images[split.trained], split.labels[split.trained], seed)
        unseen = split.images[~split.trained]
        right = (answers(source, unseen) == split.labels[~split.trained]).double().mean()
        plain = source(tokens_of(unseen)).logits
        bridge = build_bridge_from_module(source, "GPT2LMHeadModel", hf_config=source.config)
        model = expose_neuron_heads(bridge).model
        error = ((model(tokens_of(unseen)) - plain).abs().max() / plain.abs().max()).item()
        pairs, held_out = split.pairs(model, DIGITS, recipe.pairs)
        metric = metric_of(DIGITS)
        sweep = p.activation_patch(model, *pairs, metric, positions=places(pairs), progress=False)
        by_place = effects(sweep)
        early = by_place.query("layer == 0 and place != '?'").groupby("place")["share"].sum()
        rank = spearmanr(early.reindex(list(PLACES), fill_value=0.0), split.difference())
        circuit = circuits.discover(
            model, *pairs, metric, positions=places(pairs), n_random=10, seed=seed
        )
        again = circuits.evaluate(model, circuit, *held_out, metric, positions=places(held_out))
        other_pairs = split.pairs(model, OTHERS, recipe.pairs)[0]
        moved = circuits.evaluate(
            model, circuit, *other_pairs, metric_of(OTHERS), positions=places(other_pairs)
        )
        on_patches = by_place.query("place != '?'")["share"].sum()
        row = {
            "seed": seed,
            "accuracy": right.item(),
            "exposed": error,
            "spearman": float(rank.statistic),
            "on patches": on_patches,
            "sites": len(circuit),
            "of": circuit.n_sites,
            "fitted": circuit.faithfulness,
            "held out": again.faithfulness,
            "random": max(circuit.random),
            "others": moved.faithfulness,
            "completeness": circuit.completeness,
        }
        drawing = graph_of(model, circuit, pairs) if seed == 0 else ""
        yield row, by_place.assign(seed=seed), drawing


def interval(values: pd.Series) -> str:
    """Return the mean over seeds with its 95 % interval (Student's t)."""
    mean, low, high = t_interval(values)
    return f"{mean:.3g}" if len(values) < 2 else f"{mean:.3g} [{low:.3g}, {high:.3g}]"


def predictions(rows: pd.DataFrame) -> str:
    """Return the predictions that were made before the first run, and whether they held."""
    share = rows["sites"] / rows["of"]
    lines = [
        (
            "The models get at least 95 % of unseen images right, on average.",
            rows["accuracy"].mean() >= 0.95,
            interval(rows["accuracy"]),
        ),
        (
            "With neuron-heads, logits are the same to 1e-12 of the largest logit.",
            rows["exposed"].max() < 1e-12,
            f"{rows['exposed'].max():.1g}",
        ),
        (
            "In layer 0, the effect of a patch's heads and neurons is larger where the two digits "
            "differ more: a Spearman correlation above .5 over patches, on average.",
            rows["spearman"].mean() > 0.5,
            interval(rows["spearman"]),
        ),
        (
            'Less than half of Σ |effect| is at patches; the rest is at "?".',
            rows["on patches"].mean() < 0.5,
            interval(rows["on patches"]),
        ),
        (
            "A circuit that keeps .9 has fewer than 10 % of the sites, for each seed.",
            share.max() < 0.1,
            f"{share.min():.1%} to {share.max():.1%}",
        ),
        (
            "On other images of the same digits, it keeps at least .7, on average.",
            rows["held out"].mean() >= 0.7,
            interval(rows["held out"]),
        ),
        (
            "The best of ten random circuits of its size keeps less than .2, on average.",
            rows["random"].mean() < 0.2,
            interval(rows["random"]),
        ),
        (
            f"On images of {OTHERS[0]} and {OTHERS[1]}, it keeps less than .5, on average.",
            rows["others"].mean() < 0.5,
            interval(rows["others"]),
        ),
    ]
    return "\n".join(verdict(*line) for line in lines)


def by_layer(effects: pd.DataFrame) -> pd.DataFrame:
    """Return the mean share of Σ |effect| by layer and kind of site, at patches and at "?"."""
    place = (effects["place"] == "?").map({True: "at ?", False: "at patches"})
    sums = effects.groupby(["seed", "layer", "kind", place], observed=True)["share"].sum()
    return (
        sums.unstack(fill_value=0.0).groupby(["layer", "kind"], observed=True).mean().reset_index()
    )


def figure(split: Split, effects: pd.DataFrame) -> Figure:
    """Draw the mean images, where they differ, and the effects by patch in layer 0."""
    picture = Figure(figsize=(11, 2.8), layout="constrained")
    panels = picture.subplots(1, 5)
    for panel, digit in zip(panels, DIGITS, strict=False):
        panel.imshow(split.images[split.labels == digit].mean(0).cpu(), cmap="Greys")
        panel.set_title(f"mean {digit}")
    early = effects[(effects["layer"] == 0) & (effects["place"] != "?")]
    n_seeds = effects["seed"].nunique()
    maps = {"difference": split.difference()}
    for kind in ("attention", "neuron"):
        sums = early[early["kind"] == kind].groupby("place", observed=True)["share"].sum() / n_seeds
        maps[f"effect, {kind}"] = torch.tensor(
            sums.reindex(list(PLACES), fill_value=0.0).to_numpy()
        )
    for panel, (title, values) in zip(panels[2:], maps.items(), strict=True):
        panel.imshow(values.reshape(ROWS, ROWS), cmap="Blues", vmin=0)
        panel.set_title(title)
    for panel in panels:
        panel.set_axis_off()
    return picture


def strongest_patch(effects: pd.DataFrame) -> tuple[str, float]:
    """Return the patch with the largest Σ |effect| in layer 0, and its share of all patches."""
    early = effects[(effects["layer"] == 0) & (effects["place"] != "?")]
    sums = early.groupby("place", observed=True)["share"].sum()
    return str(sums.idxmax()), float(sums.max() / sums.sum())


def page_of(rows: pd.DataFrame, effects: pd.DataFrame, n_unseen: int, pairs: int, flag: str) -> str:
    """Return the page of a run, from its tables."""
    patch, share = strongest_patch(effects)
    return PAGE.format(
        predictions=predictions(rows),
        rows=table(rows.drop(columns="exposed")),
        layers=table(by_layer(effects)),
        patch=patch,
        share=share,
        n_unseen=n_unseen,
        pairs=pairs,
        n_seeds=len(rows),
        first=DIGITS[0],
        second=DIGITS[1],
        others=" and ".join(map(str, OTHERS)),
        flag=flag,
    )


def main(
    out: Out = Path("out/images"),
    device: Device = "cpu",
    n_seeds: Seeds = 5,
    smoke: Smoke = False,
) -> None:
    """Train, patch, draw, and write the page, tables and figures (`study_files.py`)."""
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    recipe, n_seeds = (SMOKE, 1) if smoke else (Recipe(), n_seeds)
    images, labels = drawn(600) if smoke else digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    trained = torch.zeros(len(images), dtype=torch.bool)
    trained[order[: int(0.7 * len(images))]] = True
    split = Split(images.to(device), labels.to(device), trained.to(device))
    rows, tables, drawings = zip(*measured(recipe, split, n_seeds), strict=True)
    frame, effects_frame = pd.DataFrame(rows), pd.concat(tables, ignore_index=True)
    flag = " --smoke" if smoke else ""
    page = page_of(frame, effects_frame, int((~trained).sum()), recipe.pairs, flag)
    typer.echo(page)
    pictures = {"": figure(split, effects_frame), "circuit": drawings[0]}
    frames = {"": frame, "effects": effects_frame}
    settings = {"n_seeds": n_seeds, "device": device, "smoke": smoke}
    keep(__file__, out, page, frames, pictures, started=started, **settings)


PAGE = """# Circuits of a small image transformer

A GPT-2 with two layers reads scikit-learn's handwritten digits as 16 patches of 2 × 2 pixels, and
then the token "?", after which it writes the digit. Its MLPs are SiLU, so its neurons are exactly
attention heads. We expose them, patch every head and neuron at every patch with an image of
{second} in place of an image of {first}, and search for a circuit that keeps .9 of the logit
difference. There are {n_seeds} models with different seeds, {n_unseen} images that they did not
train on, and {pairs} pairs of such images for patching (and {pairs} others, *held out*). Intervals
are 95 % intervals of the mean over seeds.

Made by `python -m analyses.studies.image_circuits{flag}`; it needs scikit-learn for its images,
which is not a dependency of the package.

## Predictions, written before the first run

{predictions}

![effects by patch](image_circuits.svg)

The mean images of the two digits, the mean difference of their pixels by patch, and Σ |effect| of
patching the heads or neurons of layer 0 at each patch (means over seeds). One patch, {patch}, has
{share:.0%} of the effect of all patches in layer 0 ("r2c1" is the second patch in the third row).
There, an 8 has a stroke that a 3 does not have, and the pixels of the two digits differ most. The
effects of the other patches do not follow the pixels closely, so the correlation over all patches
is low.

## The circuit of the first model

![the circuit](image_circuits_circuit.svg)

A node's position is its patch: "r0c3" is the patch in the first row and the last column.

## Each model

*spearman* compares effects in layer 0 with the difference of the digits, over patches. *on patches*
is the share of Σ |effect| at patches. *sites* of *of* are in the circuit. *fitted*, *held out* and
*others* are its faithfulness on the pairs it was found with, on other pairs, and on pairs of
{others}. *random* is the best of ten random circuits. *completeness* is the faithfulness of all
sites outside the circuit.

{rows}

## Where effects are

The share of Σ |effect|, by layer and kind of site, means over seeds. In the last layer, only "?"
can matter, because the answer is read there.

{layers}

## Cautions

Patches are read in a fixed order, and each patch sees only earlier patches, as in Image GPT; a
vision transformer sees all patches at once. Three levels of grey and two layers are enough for
these images, but such a model says little about large ones. Images of two digits differ in most
patches, so patching one patch changes little.
"""

if __name__ == "__main__":
    typer.run(main)
