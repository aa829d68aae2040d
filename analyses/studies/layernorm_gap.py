"""Measure how far bert2BERT, Deep Fusion and Theorem 3.5 change the function of a widened model.

The growth paper says that earlier width expansions are nearly function-preserving, "but admit gaps
due to LayerNorm discrepancies" (section 4). bert2BERT and Deep Fusion copy coordinates of the
residual stream; a norm takes the mean or mean square over all coordinates, and copies count twice:

    bert2BERT       function-preserving initialization of Chen et al., 2022: each new coordinate is
                    a copy of a random old one; the weights that read it are divided by the number
                    of copies
    evenly          the same, but the numbers of copies differ by at most one
    Deep Fusion     self-fusion of Mazzawi et al., 2023: a second copy of the model (also of heads
                    and neurons) reads and writes separate coordinates. The authors fuse whole
                    models; for widths that are no whole multiple, we fuse with the part of the
                    model that has its first coordinates. Logits are read from the first copy
    3.5 as printed  the growth paper's rule for RMSNorm without ε: zeros, and gains times √(h/ĥ)
    Theorem 3.5     `expansion.WidenStream`: also scales ε, and first centres LayerNorm

Each method widens the shipped LLaMA (RMSNorm), a GPT-2 trained on Small English (LayerNorm), and a
GPT-2 with random weights. The gap is measured on held-out text: the largest logit difference
divided by the largest logit; the mean KL divergence, in nats, from the old next-token distribution
to the new one; and the loss.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from analyses.study import Setting, Study, Tables
from analyses.tools import small_english as small
from analyses.tools.benching import table
from attn_only_lens import growth, load, pretrained
from attn_only_lens.growth.expansion.expansion import apply_plan
from attn_only_lens.growth.expansion.weights import WRITERS, Axis, Weights, axes_of, tail
from attn_only_lens.growth.models._grow import growable_of
from attn_only_lens.growth.models.growable import Growable

ARMS = ("bert2BERT", "evenly", "Deep Fusion", "3.5 as printed", "Theorem 3.5")
COLOURS = dict(zip(ARMS, ("#d55e00", "#e69f00", "#0072b2", "#999999", "#009e73"), strict=True))
STREAM = Axis("d_model")
TRAINED = ("trained", "random")
POS = 32  # tokens per text
EXACT = {"logits": 1e-5, "KL": 1e-9}  # larger than float32's rounding errors after some layers


def duplicated(weights: Weights, copied: Tensor) -> Weights:
    """Copy coordinates of the stream by `copied`, and divide readers by the number of copies."""
    count = torch.bincount(copied, minlength=weights.sizes[STREAM])[copied]
    tensors = {}
    for name, tensor in weights.tensors.items():
        axes = axes_of(name, weights.constants)
        if STREAM in axes:
            dim = axes.index(STREAM)
            tensor = tensor.index_select(dim, copied)
            if ".W_" in name and tail(name) not in WRITERS:
                shape = [-1 if axis == dim else 1 for axis in range(tensor.ndim)]
                tensor = tensor / count.reshape(shape)
        tensors[name] = tensor
    return Weights(tensors, replace(weights.constants, tied=False))


def chosen(size: int, width: int, evenly: bool, seed: int) -> Tensor:
    """Return the old coordinate for each new coordinate; the first ones are unchanged."""
    random = torch.Generator("cpu").manual_seed(seed)
    missing = width - size
    if evenly:
        rounds = [torch.randperm(size, generator=random) for _ in range(-(-missing // size))]
        return torch.cat([torch.arange(size), *rounds])[:width]
    return torch.cat([torch.arange(size), torch.randint(size, (missing,), generator=random)])


def fused(weights: Weights, width: int) -> Weights:
    """Join copies of the model up to a width; the last copy has only its first coordinates."""
    size, constants = weights.sizes[STREAM], weights.constants
    parts = [min(size, width - start) for start in range(0, width, size)]
    tensors = {}
    for name, tensor in weights.tensors.items():
        axes = axes_of(name, constants)
        grows_with_width = [axis.label in ("d_model", "head", "kv_head", "d_mlp") for axis in axes]
        blocks = [
            tensor.narrow(axes.index(STREAM), 0, part) if STREAM in axes else tensor
            for part in parts
        ]
        if name == "unembed.W_U":  # logits are read from the first copy only
            blocks[1:] = [torch.zeros_like(block) for block in blocks[1:]]
        shape = [
            sum(block.shape[dim] for block in blocks) if grows else tensor.shape[dim]
            for dim, grows in enumerate(grows_with_width)
        ]
        whole, corner = tensor.new_zeros(shape), [0] * tensor.ndim
        for block in blocks:
            whole[tuple(slice(i, i + n) for i, n in zip(corner, block.shape, strict=True))] = block
            corner = [
                i + n * grows
                for i, n, grows in zip(corner, block.shape, grows_with_width, strict=True)
            ]
        tensors[name] = whole if any(grows_with_width) else tensor
    return Weights(tensors, replace(constants, tied=False))


def as_printed(weights: Weights, width: int) -> Weights:
    """Widen by the paper's rule: gains are scaled, ε is not; LayerNorm is not centred."""
    weights = replace(weights, constants=replace(weights.constants, tied=False))
    plan = growth.WidenStream(width - weights.sizes[STREAM]).plan(weights)
    grown, _ = apply_plan(weights, plan, growth.init.own(), 0)
    return replace(grown, constants=replace(grown.constants, eps=weights.constants.eps))


def widened(source: Growable, arm: str, width: int, seed: int) -> Any:
    """Return the model at another width."""
    weights = source.read()
    if arm == "Theorem 3.5":
        wider, _ = growth.WidenStream(width - weights.sizes[STREAM])(weights, seed=seed)
    elif arm == "Deep Fusion":
        wider = fused(weights, width)
    elif arm == "3.5 as printed":
        wider = as_printed(weights, width)
    else:
        wider = duplicated(weights, chosen(weights.sizes[STREAM], width, arm == "evenly", seed))
    tensors = {name: tensor.clone() for name, tensor in wider.tensors.items()}
    return source.write(replace(wider, tensors=tensors), lambda name: name)


def gap(old: Tensor, new: Tensor, tokens: Tensor) -> dict[str, float]:
    """Return how much new logits differ from old logits; 0 if the gap may be rounding."""
    first, second = (logits[:, :-1].double().log_softmax(-1) for logits in (old, new))
    losses = (F.nll_loss(x.flatten(0, 1), tokens[:, 1:].flatten()).item() for x in (first, second))
    before, after = losses
    gaps = {
        "logits": ((new - old).abs().max() / old.abs().max()).item(),
        "KL": (first.exp() * (first - second)).sum(-1).mean().item(),
    }
    gaps = {name: value if value > EXACT[name] else 0.0 for name, value in gaps.items()}
    return gaps | {"loss": after, "loss before": before}


def gpt2(recipe: small.Recipe, device: str, *, trained: bool) -> Any:
    """Return a bridge around a GPT-2 with these sizes, random or trained on Small English."""
    torch.manual_seed(recipe.seed)
    module = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(small.vocabulary()),
            n_positions=recipe.n_ctx,
            n_embd=recipe.d_model,
            n_layer=recipe.n_layers,
            n_head=recipe.n_heads,
            n_inner=recipe.d_mlp,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        )
    ).to(device)
    if trained:
        optimizer = torch.optim.AdamW(module.parameters(), lr=recipe.lr, weight_decay=0.1)
        for step in tqdm(range(recipe.steps), "GPT-2: steps"):
            if step % small.POOL == 0:
                batches = small.pool(recipe, step // small.POOL, frozenset())
            optimizer.param_groups[0]["lr"] = recipe.lr * min(
                (step + 1) / 50, 1 - step / recipe.steps
            )
            loss = small.loss_of(module, batches[step % small.POOL].to(device))
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    return small.bridged(module.eval())


def texts(model: Any, rows: int, pos: int) -> Tensor:
    """Return the beginnings of texts that none of the trained models has read."""
    ids = (model.tokenizer(text)["input_ids"] for text in pretrained.small_english_texts())
    return torch.tensor(
        [ids_of_text[:pos] for ids_of_text in ids if len(ids_of_text) >= pos][:rows]
    )


def measured(models: Mapping[str, Any], ratios: list[float], seeds: int, rows: int) -> pd.DataFrame:
    """Return a row per model, width and arm, and per seed if the arm is random."""
    rows_of_gaps = []
    for label, model in models.items():
        tokens = texts(model, rows, POS).to(next(model.parameters()).device)
        size, source = model.cfg.d_model, growable_of(model)
        with torch.no_grad():
            old = model(tokens)
        widths = [round(size * ratio) for ratio in ratios]
        for arm in tqdm(ARMS, label):
            for width in widths:
                for seed in range(seeds if arm in ("bert2BERT", "evenly") else 1):
                    with torch.no_grad():
                        new = widened(source, arm, width, seed)(tokens)
                    row = {"model": label, "h": size, "width": width, "ratio": width / size}
                    rows_of_gaps.append(row | {"arm": arm, "seed": seed} | gap(old, new, tokens))
    return pd.DataFrame(rows_of_gaps)


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the largest gaps over seeds, by model, arm and width."""
    worst = frame.groupby(["model", "arm", "ratio"], sort=False)[["logits", "KL", "loss"]].max()
    return worst.reset_index()


def by_width(frame: pd.DataFrame, measure: str, model: str) -> str:
    """Return one measure of a model: a row per width, a column per arm."""
    of = summary(frame)
    wide = of[of["model"] == model].pivot(index="ratio", columns="arm", values=measure)[list(ARMS)]
    shown = wide.map(lambda value: f"{value:.1e}" if value else "exact").reset_index()
    return table(
        shown.rename(columns={"ratio": "ĥ/h"}).assign(**{"ĥ/h": wide.index.map("{:g}".format)})
    )


def exact_at(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the widths at which each arm is exact for every seed."""
    of = summary(frame)
    rows = []
    for model, part in of.groupby("model", sort=False):
        row = {"model": model}
        for arm in ARMS:
            here = part[part["arm"] == arm]
            ratios = [f"{ratio:g}" for ratio in here["ratio"][here["logits"] == 0]]
            row[arm] = "all" if len(ratios) == len(here) else ", ".join(ratios) or "none"
        rows.append(row)
    return pd.DataFrame(rows)


def figure(frame: pd.DataFrame) -> Figure:
    """Draw the logit gap by width, one panel per model, with the range over seeds."""
    models = list(dict.fromkeys(frame["model"]))
    picture = Figure(figsize=(4.2 * len(models), 4.4), layout="constrained")
    for panel, model in zip(
        picture.subplots(1, len(models), sharey=True, squeeze=False)[0], models, strict=True
    ):
        for arm in ARMS:
            rows = frame[(frame["model"] == model) & (frame["arm"] == arm)]
            shown = rows["logits"].clip(lower=EXACT["logits"])
            by = shown.groupby(rows["ratio"]).agg(["min", "median", "max"])
            panel.plot(by.index, by["median"], "o-", ms=4, color=COLOURS[arm], label=arm)
            panel.fill_between(by.index, by["min"], by["max"], color=COLOURS[arm], alpha=0.25)
        panel.set(yscale="log", title=model, xlabel="new width / old width of the stream")
        panel.minorticks_off()
    first = picture.axes[0]
    first.set_ylabel("largest difference of a logit / largest logit")
    first.annotate("exact: rounds to this or less", (1.1, 0.7 * EXACT["logits"]), fontsize=8)
    picture.legend(
        *first.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(ARMS),
        frameon=False,
    )
    return picture


def run(setting: Setting) -> Tables:
    """Measure all models."""
    recipe = small.Recipe(n_layers=3, d_model=64, d_mlp=256, steps=600, lr=3e-3)
    ratios, device = [1.125, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0], setting.device
    if setting.smoke:
        recipe = replace(recipe, n_layers=1, d_model=8, d_mlp=11, n_heads=2, steps=2, rows=2)
        ratios = [1.5, 2.0]
        llama = small.bridged(recipe.model().to(device))
    else:
        llama = load("small-english", device=device)
    models = {
        "LLaMA, trained (RMSNorm)": llama,
        "GPT-2, trained (LayerNorm)": gpt2(recipe, device, trained=True),
        "GPT-2, random (LayerNorm)": gpt2(recipe, device, trained=False),
    }
    return {"": measured(models, ratios, setting.n_seeds, rows=3 if setting.smoke else 48)}


def verdicts(frame: pd.DataFrame) -> dict[str, bool]:
    """Return whether each prediction held."""
    exact, of = exact_at(frame).set_index("model"), summary(frame)
    whole = ", ".join(f"{ratio:g}" for ratio in sorted(set(of["ratio"])) if ratio % 1 == 0)
    wide = {name: of.pivot_table(name, ["model", "ratio"], "arm") for name in ("logits", "KL")}
    is_rms = wide["logits"].index.get_level_values("model").str.contains("RMSNorm")
    trained, random = (wide["KL"].loc[f"GPT-2, {norm} (LayerNorm)"] for norm in TRAINED)
    between = wide["KL"][wide["KL"].index.get_level_values("ratio") % 1 != 0]
    below_2 = between.loc[between.index.get_level_values("ratio") < 2, "evenly"]
    peaks = below_2.groupby(level="model").idxmax().map(lambda key: key[1])
    copying = ["bert2BERT", "evenly", "Deep Fusion"]
    inexact = trained.index[trained.index % 1 != 0]
    rms, layer_norm = wide["logits"][is_rms], wide["logits"][~is_rms]
    return {
        "ours": bool((exact["Theorem 3.5"] == "all").all()),
        "never": bool((exact["bert2BERT"] == "none").all()),
        "whole": bool((exact[["evenly", "Deep Fusion"]] == whole).all(axis=None)),
        "printed_rms": bool(rms["3.5 as printed"].between(EXACT["logits"], 1e-3).all()),
        "printed_ln": bool((layer_norm["3.5 as printed"] >= layer_norm["bert2BERT"]).all()),
        "trained": bool(
            (trained.loc[inexact, copying] > random.loc[inexact, copying]).all(axis=None)
        ),
        "peak": bool((peaks == 1.5).all()),
        "less": bool((between["evenly"] < between["bert2BERT"]).all()),
    }


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    frame = tables[""]
    return {
        "held": verdicts(frame),
        "exact": exact_at(frame),
        "widths": listed_widths(exact_at(frame).set_index("model")),
        "added": loss_table(frame).set_index("model").astype(float).max(),
        "losses": loss_table(frame),
        "models": frame.drop_duplicates("model").to_dict("records"),
        "by_width": partial(by_width, frame),
        "rounding": EXACT,
    }


def listed_widths(exact: pd.DataFrame) -> str:
    """Return the widths at which each method is exact, in words; "or" if models differ."""
    words = {"all": "every width", "none": "no width"}
    texts = [
        " or ".join(words.get(ratios, f"ĥ/h = {ratios}") for ratios in dict.fromkeys(exact[arm]))
        for arm in reversed(ARMS)
    ]
    phrases = [f"{arm} at {text}" for arm, text in zip(reversed(ARMS), texts, strict=True)]
    return f"{'; '.join(phrases[:-1])}; and {phrases[-1]}"


def loss_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the largest increase of the loss by arm, at widths that are not whole multiples."""
    between = frame[frame["ratio"] % 1 != 0]
    rows = []
    for model, part in between.groupby("model", sort=False):
        added = (part["loss"] - part["loss before"]).groupby(part["arm"]).max()
        rows.append({"model": model} | {arm: f"{round(added[arm], 3) + 0.0:+.3f}" for arm in ARMS})
    return pd.DataFrame(rows)


STUDY = Study(run, lambda tables: {"": figure(tables[""])}, facts, n_seeds=3)
