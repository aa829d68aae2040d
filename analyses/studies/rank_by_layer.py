"""Does the residual stream of attention-only transformers converge to rank 1?

    python -m analyses.studies.rank_by_layer --models-dir MODELS --smollm2 FOLDER

Dong et al. (2021) prove this for attention without skip connections and MLPs; Remark 5 of the paper
says why an attention-only form of an MLP does not contradict it. This study measures how far the
stream of a text is from rank 1 after each sublayer, in five forms of a model:

    skips, MLPs          the model; its MLPs are computed by neuron-heads
    skips, no MLPs       MLPs write nothing
    no skips, MLPs       each sublayer's output replaces the stream; neuron-heads keep their bias
                         token, which is outside the stream in this package
    no skips, gates 1/2  the paper's form without skips: the bias token in the stream becomes 0, so
                         all scores are 0, and every gate is 1/2
    no skips, no MLPs    attention alone, as in Dong et al.

The null has random weights: each matrix in a layer is drawn anew from a normal distribution with
the standard deviation of the trained matrix. Embeddings, gains and biases stay.

`predictions` were written before the first run.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from analyses.studies import train_attention_only as training
from analyses.tools.benching import markdown
from analyses.tools.options import Device, ModelsDir, Out, Runs, Seeds, Smoke, SmolLM2
from analyses.tools.real_models import trained
from analyses.tools.study_files import keep, verdict
from attn_only_lens import expose_neuron_heads, load, pretrained

N_TEXTS, LENGTH = 8, 64
FORMS: dict[str, tuple[bool, str]] = {
    "skips, MLPs": (True, "all"),
    "skips, no MLPs": (True, "none"),
    "no skips, MLPs": (False, "all"),
    "no skips, gates 1/2": (False, "half"),
    "no skips, no MLPs": (False, "none"),
}
"""Whether a form has skip connections, and what its MLPs are."""
MEASURES = ("rank 1", "equal rows", "Dong")
TRAINED_FORMS = {
    "mlp": "mlp",
    "bias token": "paper's heads",
    "persistent": "persistent vectors",
}
"""The arm in `train_attention_only` by its name in the tables."""
STEPS, RATE = 600, 1.6e-2
WHOLE, COLLAPSED, ROUNDING = 0.3, 0.1, 1e-6


def distances(X: Tensor) -> dict[str, float]:
    """Return how far a stream [pos, d_model] is from rank 1, as shares of its own norm.

    "rank 1" is the Frobenius distance to the nearest matrix of rank 1. "equal rows" is the
    Frobenius distance to the nearest matrix with equal rows, and "Dong" is the norm of the same
    difference in √(‖·‖₁ ‖·‖_∞), the norm of Dong et al.
    """
    X = X.double()
    singular = torch.linalg.svdvals(X)
    rest = X - X.mean(dim=0)

    def composite(M: Tensor) -> Tensor:
        return (M.abs().sum(0).max() * M.abs().sum(1).max()).sqrt()

    ratios = (
        singular[1:].norm() / singular.norm(),
        rest.norm() / X.norm(),
        composite(rest) / composite(X),
    )
    return dict(zip(MEASURES, (ratio.item() for ratio in ratios), strict=True))


@dataclass
class Sublayers:
    """Edits the sublayers' outputs of one forward pass, and records the stream after each."""

    skips: bool
    mlps: str
    streams: list[Tensor]

    def entering(self, stream: Tensor) -> None:
        """Record the stream that a sublayer reads."""
        self.streams.append(stream.detach())

    def written(self, out: Tensor, part: str) -> Tensor:
        """Return what a sublayer is to write, so that the stream has the form's value."""
        if part == "mlp" and self.mlps == "none":
            return torch.zeros_like(out)
        return out if self.skips else out - self.streams[-1]


def lens_streams(model: Any, tokens: Tensor, skips: bool, mlps: str) -> list[Tensor]:
    """Return the stream before each sublayer and at the end, of a model with neuron-heads."""
    form, hooks = Sublayers(skips, mlps, []), []

    def enter(x: Tensor, hook: Any) -> None:
        form.entering(x)

    def write(x: Tensor, hook: Any, part: str) -> Tensor:
        return form.written(x, part)

    def half(pattern: Tensor, hook: Any) -> Tensor:
        return torch.full_like(pattern, 0.5)

    n_layers = model.cfg.n_layers
    for layer in range(n_layers):
        block = f"blocks.{layer}."
        hooks += [(f"{block}hook_resid_pre", enter), (f"{block}hook_resid_mid", enter)]
        hooks += [
            (f"{block}hook_{part}_out", partial(write, part=part)) for part in ("attn", "mlp")
        ]
        hooks += [(f"{block}mlp.hook_neuron_probs", half)] if mlps == "half" else []
    hooks += [(f"blocks.{n_layers - 1}.hook_resid_post", enter)]
    with model.hooks(fwd_hooks=hooks):
        model(tokens)
    return form.streams


def gpt2_streams(model: Any, tokens: Tensor, skips: bool, mlps: str) -> list[Tensor]:
    """Return the same of a GPT-2 of transformers."""
    form = Sublayers(skips, mlps, [])

    def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        form.entering(inputs[0])

    def write(module: nn.Module, inputs: Any, out: Any, part: str) -> Any:
        if isinstance(out, tuple):
            return form.written(out[0], part), *out[1:]
        return form.written(out, part)

    with ExitStack() as stack:
        for block in model.transformer.h:
            for norm in (block.ln_1, block.ln_2):
                stack.enter_context(_removed(norm.register_forward_pre_hook(enter)))
            for part in ("attn", "mlp"):
                hook = getattr(block, part).register_forward_hook(partial(write, part=part))
                stack.enter_context(_removed(hook))
        stack.enter_context(_removed(model.transformer.ln_f.register_forward_pre_hook(enter)))
        model(tokens)
    return form.streams


def _removed(handle: Any) -> Any:
    stack = ExitStack()
    stack.callback(handle.remove)
    return stack


@torch.no_grad()
def redraw(model: nn.Module, seed: int) -> None:
    """Draw every matrix in a layer anew, with its own standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    for name, weights in model.named_parameters():
        if weights.ndim >= 2 and any(part in name for part in ("layers.", "blocks.", ".h.")):
            new = torch.randn(weights.shape, generator=generator, dtype=weights.dtype)
            weights.copy_(new.to(weights.device) * weights.std())


@torch.no_grad()
def frame_of(
    streams: Callable[..., list[Tensor]], model: Any, texts: list[Tensor], forms: list[str]
) -> pd.DataFrame:
    """Return the mean distances over texts, a row for each form and sublayer.

    The first token is left out: in trained models, its norm can be many times the others' norm.
    """
    rows = []
    for form in forms:
        by_text = [
            [distances(stream[0, 1:]) for stream in streams(model, text, *FORMS[form])]
            for text in texts
        ]
        for sublayer in range(len(by_text[0])):
            means = pd.DataFrame([of_text[sublayer] for of_text in by_text]).mean()
            rows.append({"form": form, "sublayer": sublayer, **means})
    return pd.DataFrame(rows)


def lens_models(
    models_dir: Path, smollm2: Path | None, device: str, *, smoke: bool
) -> Iterator[tuple[str, Any, list[Tensor]]]:
    """Yield models with at least three layers, and their texts [1, pos]."""
    english = pretrained.small_english(device, torch.float64)
    longest = sorted(pretrained.small_english_texts(), key=len)[-(2 if smoke else N_TEXTS) :]
    yield "Small English", english, [english.to_tokens(text)[:, :LENGTH] for text in longest]
    if smoke:
        return
    for name, model, tokens in trained(
        models_dir, dict.fromkeys(NAMED, LENGTH), device, smoke=False
    ):
        if name in NAMED:
            yield name, model, list(tokens[:N_TEXTS].split(1))
    if smollm2 is not None:
        model = load(smollm2, device=device)
        yield "SmolLM2-135M", model, [model.to_tokens(text)[:, :LENGTH] for text in TEXTS]


NAMED = ("char_gelu_4l", "sort_gelu_new_3l", "stories_swiglu_5l", "words_swiglu_4l")
TEXTS = (
    "The capital of France is a city of two million people, and the capital of Germany is larger. "
    "Both cities have many museums, and both of them lie on a river that flows to the sea.",
    "When Mary and John went to the store, John gave a drink to Mary, and she said that she would "
    "rather have something to eat, because she had been at work since six o'clock.",
    "Water boils at one hundred degrees, and it freezes at zero, unless there is salt in it. The "
    "sea therefore freezes later than a lake, and ice on the sea holds less salt than the water.",
)


def measured(
    models_dir: Path, smollm2: Path | None, runs: Path, device: str, n_seeds: int, *, smoke: bool
) -> pd.DataFrame:
    """Return a row for each model, set of weights, form and sublayer."""
    frames = []
    for name, model, texts in lens_models(models_dir, smollm2, device, smoke=smoke):
        for seed in tqdm(range(-1, n_seeds), desc=name):
            if seed >= 0:
                redraw(model, seed)
            with expose_neuron_heads(model) as exposed:
                frame = frame_of(lens_streams, exposed, texts, list(FORMS))
            weights = "trained" if seed < 0 else "random"
            frames.append(frame.assign(model=name, weights=weights, seed=max(seed, 0)))
    study = training.SMOKE if smoke else training.Study()
    forms = [form for form, (_, mlps) in FORMS.items() if mlps != "half"]
    held_out = study.text._pool(0, training.english.SEED_OF_HELD_OUT)
    longest = max(held_out, key=lambda batch: batch.shape[1])
    texts = list(longest[:N_TEXTS, :LENGTH].to(device).split(1))
    steps = study.text.steps if smoke else STEPS
    task = replace(study.text, steps=steps)
    for trained_form, arm in TRAINED_FORMS.items():
        for seed in tqdm(range(n_seeds), desc=arm):
            folder = runs / training.slug("text", arm, seed, RATE, steps)
            model, _ = training.train(task, arm, seed, RATE, steps, folder, device)
            for weights in ("trained", "random"):
                if weights == "random":
                    redraw(model, seed)
                frame = frame_of(gpt2_streams, model, texts, forms)
                name = f"trained as {trained_form}"
                frames.append(frame.assign(model=name, weights=weights, seed=seed))
    return pd.concat(frames, ignore_index=True)


def at_end(frame: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return the distance after the last sublayer, a row for each model and set of weights."""
    last = frame[frame["sublayer"] == frame.groupby("model")["sublayer"].transform("max")]
    wide = last.groupby(["model", "weights", "form"], sort=False)[measure].agg(
        ["mean", "min", "max"]
    )
    rows = []
    for (model, weights), group in wide.groupby(level=["model", "weights"], sort=False):
        of_form = group.droplevel(["model", "weights"])
        cells = [_interval(of_form.loc[form]) if form in of_form.index else "–" for form in FORMS]
        rows.append([model, weights, *cells])
    return pd.DataFrame(rows, columns=["model", "weights", *FORMS])


def _interval(row: pd.Series) -> str:
    mean, low, high = (f"{row[name]:.2g}" for name in ("mean", "min", "max"))
    return mean if low == high else f"{mean} ({low} to {high})"


def predictions(frame: pd.DataFrame) -> str:
    """Return the predictions that were made before the first run, and whether they held."""
    last = frame[frame["sublayer"] == frame.groupby("model")["sublayer"].transform("max")]
    ends = last.groupby(["model", "weights", "form"])["rank 1"].mean().unstack("form")
    of_trained, of_random = (ends.xs(w, level="weights") for w in ("trained", "random"))
    deep = of_trained.dropna()  # the models with at least three layers
    inside = frame.query("weights == 'trained' and form in ['skips, MLPs', 'skips, no MLPs']")
    lowest = inside.groupby("model")["rank 1"].min()
    alone, half = deep["no skips, no MLPs"], deep["no skips, gates 1/2"]
    kept = deep["no skips, MLPs"]
    slower = (kept > alone).sum()
    ratio = (half / alone).clip(lower=1e-9)
    close = ((ratio < 2) & (ratio > 0.5)).sum()
    faster = (of_random["no skips, no MLPs"] <= of_trained["no skips, no MLPs"]).sum()
    whole = of_trained["skips, MLPs"].filter(like="trained as")
    spread = whole.max() - whole.min()
    n, every = len(deep), len(of_trained)
    lines = [
        (
            f"With skips, every trained stream stays at least {WHOLE} from rank 1 at every "
            "sublayer, with or without MLPs.",
            lowest.min() >= WHOLE,
            f"the lowest distance is {lowest.min():.2g} ({lowest.idxmin()})",
        ),
        (
            f"Without skips and MLPs, all models with three or more layers end closer than "
            f"{COLLAPSED}.",
            bool((alone < COLLAPSED).all()),
            f"{(alone < COLLAPSED).sum()} of {n}, {alone.min():.2g} to {alone.max():.2g}",
        ),
        (
            "Without skips, MLPs with their gates keep the stream further from rank 1 than no "
            "MLPs, in all of these models.",
            slower == n,
            f"{slower} of {n}",
        ),
        (
            "Without skips, MLPs whose gates are 1/2 end within a factor of 2 of no MLPs: they "
            "are linear maps of each token.",
            close == n,
            f"{close} of {n}",
        ),
        (
            "Without skips and MLPs, random weights of the same scale end at least as close to "
            "rank 1 as trained weights, in all models.",
            faster == every,
            f"{faster} of {every}",
        ),
        (
            "Models trained with MLPs, with the bias token and with persistent vectors end within "
            ".1 of each other, with skips.",
            bool(spread < 0.1),
            ", ".join(f"{name.removeprefix('trained as ')} {x:.2f}" for name, x in whole.items()),
        ),
    ]
    return "\n".join(verdict(*line) for line in lines)


def figure(frame: pd.DataFrame) -> Figure:
    """Draw the distance from rank 1 by sublayer: a panel per model, dashed for random weights."""
    models = frame["model"].unique().tolist()
    n_rows = -(-len(models) // 3)
    picture = Figure(figsize=(12, 3 * n_rows), layout="constrained")
    panels = picture.subplots(n_rows, 3, squeeze=False).flatten()
    for panel, model in zip(panels, models, strict=False):
        of_model = frame[frame["model"] == model]
        for (form, weights), rows in of_model.groupby(["form", "weights"], sort=False):
            line = rows.groupby("sublayer")["rank 1"].mean().clip(lower=1e-8)
            style = "-" if weights == "trained" else "--"
            colour = f"C{list(FORMS).index(form)}"
            label = form if weights == "trained" else None
            panel.plot(line.index, line, style, color=colour, label=label, alpha=0.8)
        panel.set(title=model, yscale="log")
        panel.grid(alpha=0.3)
    for panel in panels[len(models) :]:
        panel.set_visible(False)
    picture.supxlabel("sublayer (0: the embedding; dashed: random weights)")
    picture.supylabel("distance from rank 1")
    panels[0].legend(fontsize="x-small")
    return picture


@torch.no_grad()
def exposed_difference(device: str) -> float:
    """Return the largest difference of a stream of Small English with and without neuron-heads."""
    model = pretrained.small_english(device, torch.float64)
    text = model.to_tokens(pretrained.small_english_texts()[0])
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    caches = [model.run_with_cache(text)[1]]
    with expose_neuron_heads(model) as exposed:
        caches.append(exposed.run_with_cache(text)[1])
    pairs = [[cache[name] for cache in caches] for name in names]
    return max(((a - b).norm() / a.norm()).item() for a, b in pairs)


def main(
    models_dir: ModelsDir = Path("models"),
    smollm2: SmolLM2 = None,
    out: Out = Path("out/rank"),
    runs: Runs = Path("out/attention-only-runs"),
    device: Device = "cpu",
    n_seeds: Seeds = 5,
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, table and figure (`study_files.py`)."""
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    n_seeds = 1 if smoke else n_seeds
    frame = measured(models_dir, smollm2, runs, device, n_seeds, smoke=smoke)
    page = page_of(frame, exposed_difference(device), n_seeds, " --smoke" if smoke else "")
    typer.echo(page)
    settings = {"n_seeds": n_seeds, "device": device, "smoke": smoke}
    keep(__file__, out, page, frame, figure(frame), started=started, digits="%.5g", **settings)


def page_of(frame: pd.DataFrame, difference: float, n_seeds: int, flag: str) -> str:
    """Return the page of a run, from its table."""
    tables = [
        f"### {TITLES[measure]}\n\n{_markdown(at_end(frame, measure))}" for measure in MEASURES
    ]
    return PAGE.format(
        predictions=predictions(frame),
        tables="\n\n".join(tables),
        difference=difference,
        n_seeds=n_seeds,
        flag=flag,
    )


def _markdown(frame: pd.DataFrame) -> str:
    return markdown(list(frame.columns), frame.itertuples(index=False))


TITLES = {
    "rank 1": "Frobenius distance to the nearest matrix of rank 1",
    "equal rows": "Frobenius distance to the nearest matrix with equal rows",
    "Dong": "The same difference in the norm of Dong et al.",
}

PAGE = """# Does the stream of attention-only transformers converge to rank 1?

Dong et al. (2021) prove that attention without skip connections and MLPs converges to a matrix with
equal rows, so to rank 1. Remark 5 of the paper says that the attention-only form of an MLP needs
skip connections, because without them the bias token becomes 0. We measure how far the stream of a
text is from rank 1 after each sublayer. All distances are divided by the stream's norm.

The forms of a model are:

- **skips, MLPs**: the model as it is. Its MLPs are computed by neuron-heads, exactly: with and
  without neuron-heads, the streams of Small English differ by {difference:.0e} of their norm. So
  original and converted models have the same rank.
- **skips, no MLPs**: MLPs write nothing.
- **no skips, MLPs**: each sublayer's output replaces the stream. Neuron-heads keep their bias
  token, because in this package it is not a row of the stream.
- **no skips, gates 1/2**: the paper's form without skips. The bias token in the stream is 0 after
  the first sublayer, so all scores of neuron-heads are 0, and all their gates are 1/2.
- **no skips, no MLPs**: attention alone, as in Dong et al.

In *random* models, each matrix in a layer is drawn anew from a normal distribution with the trained
matrix's standard deviation ({n_seeds} draws); embeddings, gains and biases stay. "trained as" are
two-layer models from `train_attention_only.py`, trained on Small English with MLPs, with
neuron-heads that share a bias token, or with persistent vectors ({n_seeds} seeds). Intervals are
from the lowest to the highest. The first token of a text is left out, because in trained models its
norm can be many times the norm of the others. Made by
`python -m analyses.studies.rank_by_layer{flag}`; the CSV has a row for each sublayer.

## Predictions, written before the first run

{predictions}

![distance from rank 1 by sublayer](rank_by_layer.svg)

## What this means

The result of Dong et al. shows in the deep model. In SmolLM2-135M (30 layers), attention alone ends
at rank 1 up to the rounding of float32, with trained and with random weights. From the tenth
sublayer on, the distance falls by a factor of 10 to 50 every ten sublayers: about exponentially
with depth, where the theorem's bound falls doubly exponentially (its attention has no norms and no
causal mask). MLPs without skip connections do not stop this, they only slow it. Skip connections
without MLPs slow it much more, and only both together keep the stream far from rank 1. In models
with two to five layers, attention alone brings the stream closer to rank 1, but not to it.

Neuron-heads are exact, so a converted model has the rank of its original. Two-layer models that
were trained with neuron-heads or persistent vectors have nearly the same rank as models trained
with MLPs.

Without skip connections, neuron-heads in the paper's form lose their bias token (Remark 5). A plain
MLP then is a linear map of each token; a gated MLP (SwiGLU) is quadratic, because the value of its
neurons is a product. Neither map fixes the rank: it can shrink or stretch what tokens have in
common, so the distance may end above or below the distance without MLPs. Our prediction did not
consider this, nor that most of these models have gated MLPs.

## After the last sublayer

{tables}

## Cautions

We removed skip connections and MLPs from models that were trained with them, so these numbers are
about the architecture's forms at trained weights, and not about models trained without them. The
models have causal masks, which Dong et al. do not have. All models normalise what a sublayer reads.
Distances of SmolLM2 below 1e-6 are rounding errors of float32.
"""

if __name__ == "__main__":
    typer.run(main)
