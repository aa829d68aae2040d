"""How few ordinary attention heads replace an MLP? And when can an MLP replace attention heads?

    python -m analyses.studies.how_few_heads --out analyses/results

The paper needs one head of width 1 for each neuron, and asks in section 5 for fewer. A wider head
that sees its own token and the bias token computes p(x) · (x W_V + b_V) W_O with one pattern
p(x) = σ(x a + b), so it can stand for many neurons with similar patterns. Here, heads have the
width of the model's own attention heads. Arms, for each MLP and number of heads:

    merged     neurons are clustered by their patterns (k-means); a head has the pattern of the
               neuron nearest to the centre of its cluster, and W_V, W_O by least squares on the
               MLP's output, cut to the width of a head
    random     the same, with the patterns of random neurons (the null for clustering)
    distilled  "merged", then all weights trained on the MLP's output
    neurons    as many neurons as have the same number of parameters: the strongest, with W_out
               fitted again

The measure is the KL divergence of the model's outputs from the original's, on held-out tokens, if
one MLP is replaced. The null for every arm is the MLP's mean output.

In the other direction, an MLP with the width of the model's MLPs is trained to write what an
attention layer writes, from the token alone. It can succeed only where heads do not move
information between tokens.

`PREDICTIONS` were written before the first run.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import typer
from matplotlib.figure import Figure
from scipy.cluster.vq import kmeans2
from scipy.stats import spearmanr
from torch import Tensor, nn
from tqdm import tqdm

from analyses.tools import train_small_english as english
from analyses.tools.benching import table
from analyses.tools.options import Device, Out, Seeds, Smoke
from analyses.tools.study_files import keep, t_interval, verdict
from attn_only_lens import expose_neuron_heads, pretrained
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

ARMS = ("merged", "random", "distilled", "neurons")
LEVELS = (0.1, 0.03, 0.01)
"""Shares of the null's KL, for the table of fewest heads."""
EXACT = 1e-9
"""The ridge for what is exactly linear, such as q in x; only rounding needs it."""
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """How many heads are tried, and how they are trained."""

    heads: tuple[int, ...] = (1, 2, 4, 8, 16)
    steps: int = 200
    rows: int = 256
    lr: float = 3e-3
    tokens: int = 4000
    held_out: int = 1500


SMOKE = Recipe(heads=(1, 2), steps=3, rows=32, tokens=600, held_out=100)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, its prompts to train on and held out, and which tokens are read.

    Attributes:
        read: from tokens [batch, pos] to a mask of the same shape.
    """

    name: str
    model: Any
    trained: list[Tensor]
    held_out: list[Tensor]
    read: Callable[[Tensor], Tensor]

    @lru_cache(None)  # noqa: B019
    def exact(self, number: int) -> Tensor:
        """Return the log probabilities at the tokens of a held-out batch that are read."""
        tokens = self.held_out[number]
        return self.model(tokens)[self.read(tokens)].double().log_softmax(-1)


def last_token(tokens: Tensor) -> Tensor:
    """Return a mask of the last token of each prompt."""
    return F.pad(torch.zeros_like(tokens[:, 1:]), (0, 1), value=1).bool()


def subjects(recipe: Recipe, device: str, *, smoke: bool) -> Iterator[Subject]:
    """Yield Small English, and addition modulo 113, whose MLP acts at one token."""
    never = frozenset[str]()

    def texts(seed: int, n: int) -> list[Tensor]:
        batches = english.pool(english.Recipe(rows=16, seed=seed), 0, never)
        sizes = np.cumsum([batch.numel() for batch in batches])
        return [batch.to(device) for batch in batches[: int((sizes < n).sum()) + 1]]

    end = english.vocabulary()[english.EOS]
    yield Subject(
        *("Small English", pretrained.small_english(device)),
        *(texts(1, recipe.tokens), texts(2, recipe.held_out)),
        lambda tokens: tokens != end,
    )
    if HAS_HOOKED_TRANSFORMER and not smoke:
        tokens = pretrained.modular_addition_tokens().to(device)
        tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]
        cut, last = recipe.tokens, recipe.tokens + recipe.held_out
        yield Subject(
            *("addition", pretrained.modular_addition().to(device)),
            *([tokens[:cut]], [tokens[cut:last]]),
            last_token,
        )


@dataclass(frozen=True)
class Layer:
    """What a sublayer reads and writes at the tokens that are read, and its neurons.

    Attributes:
        x: [token, d_model], after the norm.
        y: [token, d_model].
        q, pattern, z: of neurons, [token, neuron]; empty for an attention layer.
        to_itself: the attention to the own token and the first, a mean over heads and tokens.
    """

    x: Tensor
    y: Tensor
    q: Tensor
    pattern: Tensor
    z: Tensor
    to_itself: float


@torch.no_grad()
def layer_of(subject: Subject, layer: int, part: str, n: int) -> Layer:
    """Record a sublayer on the prompts to train on."""
    model, rows = subject.model, []
    block = f"blocks.{layer}."
    names = {"y": f"{block}hook_{part}_out", "attention": f"{block}attn.hook_pattern"}
    if part == "mlp":
        names |= {
            "q": f"{block}mlp.hook_neuron_query",
            "pattern": f"{block}mlp.hook_neuron_probs",
            "z": f"{block}mlp.hook_neuron_act",
        }
    for tokens in subject.trained:
        with reading(model, layer, part) as read:
            cache = model.run_with_cache(tokens, names_filter=list(names.values()))[1]
        seen, tensors = subject.read(tokens), {"x": read[0]}
        tensors |= {key: cache[name] for key, name in names.items()}
        attention = tensors.pop("attention").mean(1)
        local = attention.diagonal(dim1=1, dim2=2).clone()
        local[:, 1:] += attention[:, 1:, 0]
        if part == "mlp":
            tensors["pattern"] = tensors["pattern"][..., 0].transpose(1, 2)
            tensors |= {key: tensors[key][..., 0] for key in ("q", "z")}
        rows.append({key: value[seen] for key, value in tensors.items()} | {"local": local[seen]})
    joined = {key: torch.cat([row[key] for row in rows])[:n] for key in rows[0]}
    none = torch.zeros(0)
    parts = [joined.get(key, none) for key in ("x", "y", "q", "pattern", "z")]
    return Layer(*parts, joined["local"].mean().item())


class reading(ExitStack):
    """Record what a sublayer reads, in a list."""

    def __init__(self, model: Any, layer: int, part: str) -> None:
        super().__init__()
        self.read: list[Tensor] = []
        norm = model.blocks[layer].ln2 if part == "mlp" else model.blocks[layer].ln1
        hook = norm.register_forward_hook(lambda module, inputs, out: self.read.append(out))
        self.callback(hook.remove)

    def __enter__(self) -> list[Tensor]:  # type: ignore[override]
        super().__enter__()
        return self.read


@torch.no_grad()
def kl(
    subject: Subject, layer: int, part: str, replacement: Map, *, of_neurons: bool = False
) -> float:
    """Return the mean KL from the original outputs, on held-out prompts, in nats.

    Args:
        subject: the model, and its held-out prompts.
        layer: the sublayer's layer.
        part: "mlp" or "attn".
        replacement: what the sublayer writes instead, from what it reads.
        of_neurons: whether the replacement reads the MLP's neurons z instead.
    """
    z: list[Tensor] = []
    keep_z = (f"blocks.{layer}.mlp.hook_neuron_act", lambda x, hook: z.append(x[..., 0]))
    total, n = 0.0, 0
    for number, tokens in enumerate(subject.held_out):
        seen = subject.read(tokens)
        exact = subject.exact(number)
        with reading(subject.model, layer, part) as read:
            edit = _writing(replacement, z if of_neurons else read)
            write = (f"blocks.{layer}.hook_{part}_out", edit)
            hooks = [keep_z, write] if of_neurons else [write]
            got = subject.model.run_with_hooks(tokens, fwd_hooks=hooks)[seen]
        got = got.double().log_softmax(-1)
        total += (exact.exp() * (exact - got)).sum().item()
        n += int(seen.sum())
    return total / n


def _writing(replacement: Map, inputs: list[Tensor]) -> Callable[..., Tensor]:
    return lambda y, hook: replacement(inputs[-1])


class Heads(nn.Module):
    """Heads that attend to their own token with a pattern σ(x a + b), else to the bias token."""

    def __init__(self, a: Tensor, b: Tensor, W_V: Tensor, b_V: Tensor, W_O: Tensor, b_O: Tensor):
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)  # [d_model, head], [head]
        self.W_V, self.b_V = nn.Parameter(W_V), nn.Parameter(b_V)  # [head, d_model, d_head]
        self.W_O, self.b_O = nn.Parameter(W_O), nn.Parameter(b_O)  # [head, d_head, d_model]

    def forward(self, x: Tensor) -> Tensor:
        """Return what the heads write."""
        pattern = (x @ self.a + self.b).sigmoid()
        value = torch.einsum("...d,hde->...he", x, self.W_V) + self.b_V
        return torch.einsum("...h,...he,hed->...d", pattern, value, self.W_O) + self.b_O


def fitted(features: Tensor, y: Tensor, ridge: float = 1e-4) -> Tensor:
    """Return the ridge regression weights [feature, output] of y."""
    if ridge == EXACT:
        features = features.double()
    gram = (features.T @ features).double()
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    return torch.linalg.solve(gram, (features.T @ y.to(features.dtype)).double())


def with_one(x: Tensor) -> Tensor:
    """Return x with a last column of ones."""
    return torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)


def heads_by_least_squares(layer: Layer, neurons: list[int], slope: float, d_head: int) -> Heads:
    """Return one head for each of these neurons, with its pattern, fitted to the MLP's output."""
    gate = fitted(with_one(layer.x), slope * layer.q[:, neurons], EXACT)
    x, m = with_one(layer.x), len(neurons)
    pattern = (x @ gate.float()).sigmoid()
    features = with_one((pattern[:, :, None] * x[:, None, :]).flatten(1))
    *weights, b_O = fitted(features, layer.y)
    maps = torch.stack(weights).unflatten(0, (m, -1))  # [head, d_model + 1, d_model]
    values, outputs = [], []
    for head in range(m):
        written = pattern[:, head, None].double() * (x.double() @ maps[head])
        directions = torch.linalg.eigh(written.T @ written).eigenvectors[:, -d_head:]
        values.append(maps[head] @ directions)
        outputs.append(directions.T)
    W_V, W_O = torch.stack(values).float(), torch.stack(outputs).float()
    gate = gate.float()
    return Heads(gate[:-1], gate[-1], W_V[:, :-1], W_V[:, -1], W_O, b_O.float())


def clustered(pattern: Tensor, m: int, seed: int) -> list[int]:
    """Return the neurons nearest to the centres of m clusters of neurons with similar patterns."""
    points = pattern[:1000].T.double().cpu().numpy()
    centres, labels = kmeans2(points, m, minit="++", seed=seed, missing="warn")
    chosen = []
    for cluster in sorted(set(labels.tolist())):
        members = np.flatnonzero(labels == cluster)
        distance = ((points[members] - centres[cluster]) ** 2).sum(1)
        chosen.append(int(members[distance.argmin()]))
    return chosen


def trained(module: nn.Module, layer: Layer, recipe: Recipe, seed: int) -> nn.Module:
    """Train a module to write what the sublayer writes."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=recipe.lr)
    scale = layer.y.var(0).sum()
    for step in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = recipe.lr * (1 - step / recipe.steps)
        chosen = torch.randint(len(layer.x), (recipe.rows,), generator=generator)
        error = (module(layer.x[chosen]) - layer.y[chosen]).pow(2).sum(-1).mean() / scale
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    return module


def strongest(layer: Layer, n: int) -> Map:
    """Return a map from z to what the n neurons that write most write, with refitted W_out."""
    W_out = fitted(with_one(layer.z), layer.y, EXACT)[:-1]
    strength = layer.z.double().std(0) * W_out.norm(dim=1)
    chosen = strength.topk(min(n, len(strength))).indices.tolist()
    refitted = fitted(with_one(layer.z[:, chosen]), layer.y, EXACT).float()
    return lambda z: with_one(z[..., chosen]) @ refitted


def rows_of_mlp(subject: Subject, index: int, recipe: Recipe, seeds: int) -> Iterator[dict]:
    """Yield the KL of each arm, number of heads and seed, for one MLP."""
    cfg, layer = subject.model.cfg, layer_of(subject, index, "mlp", recipe.tokens)
    slope = 1.702 if "gelu" in str(cfg.act_fn) else 1.0
    d_head, n_read = cfg.d_head, 2 if subject.name == "Small English" else 1  # W_gate and W_in
    per_head = (cfg.d_model + 1) * (1 + d_head) + d_head * cfg.d_model
    per_neuron = (n_read + 1) * cfg.d_model
    row = {"model": subject.name, "layer": index}
    mean = layer.y.mean(0)
    yield row | {"arm": "mean", "heads": 0, "kl": kl(subject, index, "mlp", mean.expand_as)}
    linear = fitted(with_one(layer.x), layer.y).float()
    yield row | {
        "arm": "linear",
        "heads": 0,
        "kl": kl(subject, index, "mlp", lambda x: with_one(x) @ linear),
    }
    for m in recipe.heads:
        n_neurons = round(m * per_head / per_neuron)
        about = row | {"heads": m, "parameters": m * per_head, "as neurons": n_neurons}
        value = kl(subject, index, "mlp", strongest(layer, n_neurons), of_neurons=True)
        yield about | {"arm": "neurons", "kl": value}
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            every = torch.randperm(layer.q.shape[1], generator=generator)[:m].tolist()
            merged = heads_by_least_squares(layer, clustered(layer.pattern, m, seed), slope, d_head)
            random = heads_by_least_squares(layer, every, slope, d_head)
            for arm, heads in (("merged", merged), ("random", random)):
                yield about | {"arm": arm, "seed": seed, "kl": kl(subject, index, "mlp", heads)}
            distilled = trained(merged, layer, recipe, seed)
            value = kl(subject, index, "mlp", distilled)
            yield about | {"arm": "distilled", "seed": seed, "kl": value}


def rows_of_attention(subject: Subject, index: int, recipe: Recipe, seeds: int) -> Iterator[dict]:
    """Yield the KL of an MLP in place of an attention layer, for each seed."""
    layer = layer_of(subject, index, "attn", recipe.tokens)
    cfg, mean = subject.model.cfg, layer.y.mean(0)
    row = {"model": subject.name, "layer": index, "to itself": layer.to_itself}
    null = kl(subject, index, "attn", mean.expand_as)
    for seed in range(seeds):
        torch.manual_seed(seed)
        mlp = nn.Sequential(
            nn.Linear(cfg.d_model, cfg.d_mlp), nn.SiLU(), nn.Linear(cfg.d_mlp, cfg.d_model)
        )
        value = kl(subject, index, "attn", trained(mlp.to(layer.x.device), layer, recipe, seed))
        yield row | {"seed": seed, "mean": null, "kl": value, "recovered": 1 - value / null}


def shares(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the KL of each arm as a share of the null's: model, layer, arm, heads, seed."""
    null = frame[frame["arm"] == "mean"].set_index(["model", "layer"])["kl"]
    index = pd.MultiIndex.from_frame(frame[["model", "layer"]])
    return frame.assign(share=frame["kl"].to_numpy() / null.loc[index].to_numpy())


def curves(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the mean KL over seeds, with intervals: a row per MLP and number of heads."""
    wide = []
    for (model, layer), rows in frame.groupby(["model", "layer"], sort=False):
        of_arm = rows.groupby("arm")["kl"].mean()
        row = {"model": model, "layer": layer, "mean": f"{of_arm['mean']:.3g}"}
        row["linear"] = f"{of_arm['linear']:.3g}"
        for m, some in rows[rows["heads"] > 0].groupby("heads"):
            cells = {arm: interval(some[some["arm"] == arm]["kl"]) for arm in ARMS}
            counts = {"heads": m, "as neurons": f"{some['as neurons'].iloc[0]:.0f}"}
            wide.append(row | counts | cells)
    return pd.DataFrame(wide)


def interval(values: pd.Series) -> str:
    """Return the mean with its 95 % interval (Student's t); the value itself, if there is one."""
    mean, _, high = t_interval(values)
    if len(values) < 2:
        return f"{mean:.2g}"
    half = high - mean
    return f"{mean:.2g} ±{half:.1g}" if half > 1e-6 * abs(mean) else f"{mean:.2g} ±0"


def fewest(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the fewest heads, distilled and merged, whose mean KL is below a share of the null."""
    rows = []
    for (model, layer), of_layer in shares(frame).groupby(["model", "layer"], sort=False):
        row: dict[str, Any] = {"model": model, "layer": layer}
        for arm in ("merged", "distilled"):
            by_heads = of_layer[of_layer["arm"] == arm].groupby("heads")["share"].mean()
            for level in LEVELS:
                enough = by_heads.index[by_heads <= level]
                more = f"> {by_heads.index.max():.0f}"
                row[f"{arm}, {level:.0%}"] = f"{enough.min():.0f}" if len(enough) else more
        rows.append(row)
    return pd.DataFrame(rows)


def backwards(attention: pd.DataFrame) -> pd.DataFrame:
    """Return how much of each attention layer an MLP recovers."""
    rows = []
    for (model, layer), some in attention.groupby(["model", "layer"], sort=False):
        row = {"model": model, "layer": layer, "to itself or first": some["to itself"].iloc[0]}
        row |= {"KL, mean output": some["mean"].iloc[0], "KL, MLP": interval(some["kl"])}
        rows.append(row | {"recovered": interval(some["recovered"])})
    return pd.DataFrame(rows)


PREDICTIONS = (
    "With 16 distilled heads, the KL is at most 10 % of the null's, in every MLP.",
    "Patterns of clustered neurons give a lower KL than patterns of random neurons, in at least "
    "three quarters of all MLPs and numbers of heads (means over seeds).",
    "At equal parameters, distilled heads have a lower KL than the strongest neurons, in at least "
    "three quarters of all MLPs and numbers of heads with fewer parameters than the MLP.",
    "Addition needs more heads than Small English: with 8 distilled heads, its share of the null's "
    "KL is larger than in every layer of Small English.",
    "An MLP recovers less than half of the KL of an attention layer in all layers but the first of "
    "Small English.",
    "It recovers nothing of addition's attention (less than 5 %), which moves both numbers to '='.",
    "Over layers, what an MLP recovers rises with the attention to the own token and the first: a "
    "Spearman correlation above .5.",
)


def verdicts(frame: pd.DataFrame, attention: pd.DataFrame) -> str:
    """Return the predictions, and whether they held."""
    means = shares(frame).groupby(["model", "layer", "heads", "arm"])["share"].mean().unstack("arm")
    tried = means[means.index.get_level_values("heads") > 0]
    most = tried.index.get_level_values("heads").max()
    distilled = tried["distilled"].xs(most, level="heads")
    clustered = (tried["merged"] < tried["random"]).mean()
    smaller = tried[tried["neurons"] > 1e-9]
    better = (smaller["distilled"] < smaller["neurons"]).mean()
    recovered = attention.groupby(["model", "layer"])["recovered"].mean()
    local = attention.groupby(["model", "layer"])["to itself"].first()
    of_text = recovered.xs("Small English", level="model")
    held = [
        (bool((distilled <= 0.1).all()), f"{distilled.min():.1%} to {distilled.max():.1%}"),
        (clustered >= 0.75, f"{clustered:.0%} of {len(tried)}"),
        (better >= 0.75, f"{better:.0%} of {len(smaller)}"),
    ]
    models = tried.index.unique("model")
    if "addition" in models:
        eight = tried["distilled"].xs(8, level="heads")
        text, sums = (eight.xs(name, level="model") for name in ("Small English", "addition"))
        moved = recovered.xs("addition", level="model").max()
        held += [
            (sums.min() > text.max(), f"{sums.min():.1%} against at most {text.max():.1%}"),
            _later(of_text),
            (moved < 0.05, f"{moved:.1%}"),
        ]
    else:
        held += [(False, "not run"), _later(of_text), (False, "not run")]
    rank = spearmanr(recovered, local.reindex(recovered.index)).statistic
    held.append((bool(rank > 0.5), f"{rank:.2f} over {len(recovered)} layers"))
    return "\n".join(
        verdict(claim, bool(ok), finding)
        for claim, (ok, finding) in zip(PREDICTIONS, held, strict=True)
    )


def _later(recovered: pd.Series) -> tuple[bool, str]:
    words = ", ".join(f"{value:.0%} (layer {layer})" for layer, value in recovered.items())
    rest = recovered.drop(0)
    return bool((rest < 0.5).all() and recovered[0] >= 0.5), words


def figure(frame: pd.DataFrame) -> Figure:
    """Draw the KL against the number of heads: a panel per MLP, a line per arm."""
    layers = list(frame.groupby(["model", "layer"], sort=False))
    picture = Figure(figsize=(3 * len(layers), 3.2), layout="constrained")
    panels = picture.subplots(1, len(layers), squeeze=False)[0]
    for panel, ((model, layer), rows) in zip(panels, layers, strict=True):
        for arm in ARMS:
            by_heads = rows[(rows["arm"] == arm) & (rows["kl"] > 1e-9)].groupby("heads")["kl"]
            line = by_heads.agg(["mean", "min", "max"])
            panel.plot(line.index, line["mean"], "o-", label=arm, markersize=3)
            panel.fill_between(line.index, line["min"], line["max"], alpha=0.2)
        for arm, style in (("mean", "k:"), ("linear", "k--")):
            panel.axhline(rows[rows["arm"] == arm]["kl"].item(), ls=style[1:], color="k", label=arm)
        panel.set(title=f"{model}, layer {layer}", xscale="log", yscale="log", xlabel="heads")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("KL, nats")
    panels[0].legend(fontsize="x-small")
    return picture


def page_of(frame: pd.DataFrame, attention: pd.DataFrame, tokens: int, flag: str) -> str:
    """Return the page of a run, from its tables."""
    return PAGE.format(
        predictions=verdicts(frame, attention),
        fewest=table(fewest(frame)),
        curves=table(curves(frame)),
        backwards=table(backwards(attention)),
        n_seeds=attention["seed"].nunique(),
        tokens=tokens,
        flag=flag,
    )


def main(
    out: Out = Path("out/few-heads"),
    device: Device = "cpu",
    n_seeds: Seeds = 5,
    smoke: Smoke = False,
) -> None:
    """Fit, train, measure, and write the page, tables and figure (`study_files.py`)."""
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    recipe, n_seeds = (SMOKE, 1) if smoke else (Recipe(), n_seeds)
    rows, attention = [], []
    for subject in subjects(recipe, device, smoke=smoke):
        with expose_neuron_heads(subject.model):
            for layer in tqdm(range(2 if smoke else subject.model.cfg.n_layers), desc=subject.name):
                rows += rows_of_mlp(subject, layer, recipe, n_seeds)
                attention += rows_of_attention(subject, layer, recipe, n_seeds)
    frame, back = pd.DataFrame(rows), pd.DataFrame(attention)
    page = page_of(frame, back, recipe.tokens, " --smoke" if smoke else "")
    typer.echo(page)
    frames = {"": frame, "attention": back}
    settings = {"n_seeds": n_seeds, "device": device, "smoke": smoke}
    keep(__file__, out, page, frames, figure(frame), started=started, **settings)


PAGE = """# How few attention heads replace an MLP?

In the paper, each neuron becomes a head of width 1. A wider head that sees its own token and the
bias token has one pattern σ(x a + b), but a value and an output of many dimensions, so it can stand
for many neurons whose patterns are similar. We replace one MLP at a time by such heads, with the
width of the model's own attention heads, and measure the KL divergence of the model's outputs from
the original's on held-out tokens. The models are Small English (four layers, 344 SwiGLU neurons
each, 4 heads of width 32) and addition modulo 113 (one layer, 512 SiLU neurons). In both, 16 such
heads have about as many parameters as the MLP.

The arms are described at the top of `analyses/studies/how_few_heads.py`. Intervals are 95 %
intervals of the mean over {n_seeds} seeds (of the clusters, the random neurons and the order of
{tokens} training tokens). Made by `python -m analyses.studies.how_few_heads{flag}`.

## Predictions, written before the first run

{predictions}

![KL by number of heads](how_few_heads.svg)

## What this means

After training, 4 to 8 heads are enough for 10 % of the null's KL in three of Small English's four
MLPs and in addition; the last MLP of Small English needs more than 16. The paper's construction has
344 or 512 heads of width 1. But fewer heads do not make a smaller model: with as many parameters,
the strongest neurons have a lower KL in 16 of 20 comparisons, and in all with 8 heads. Only with
few parameters are wide heads better, in the first layer of Small English (1 to 4 heads) and in
addition (2 heads).

Training is what helps. Clusters of neurons with similar patterns give no better heads than random
neurons do. Without training, heads fitted by least squares stay far from the MLP in Small English,
and more heads do not always help, because {tokens} tokens are few for so many weights. In addition,
8 heads fitted in this way are enough.

An MLP in place of attention recovers at most a third of the KL. How much it recovers does not rise
with the attention to the own token and the first, in these five layers: what an MLP can imitate
depends on what is moved, and not only on from where.

## The fewest heads

The fewest of the tried numbers of heads whose mean KL is at most 10 %, 3 % or 1 % of the KL if the
MLP's output is replaced by its mean.

{fewest}

## KL by number of heads

In nats. *mean* is the MLP's mean output, *linear* a linear map of the token (one head masked to the
diagonal, Theorem 7). *as neurons* is the number of neurons with as many parameters as the heads;
*neurons* keeps this number of neurons.

{curves}

## An MLP in place of attention

An MLP with SiLU, as wide as the model's MLPs, reads the token that an attention layer reads, and is
trained on what the layer writes. *to itself or first* is the mean attention of its heads to their
own token and to the first token, which an MLP can imitate. *recovered* is 1 - KL / (KL of the mean
output).

{backwards}

## Cautions

Heads and MLPs were trained for a short time, on the sublayer's output and not on the KL; longer
training may need fewer heads. Only one sublayer is replaced at a time, and errors of several may
add up. "Heads" here see only their own token and the bias token. The KL is on text of the same
grammar, or on other sums.
"""

if __name__ == "__main__":
    typer.run(main)
