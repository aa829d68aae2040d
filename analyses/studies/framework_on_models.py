"""Apply the tools of *A Mathematical Framework for Transformer Circuits* to models with MLPs.

The post on attention-only transformers hopes that these tools (Elhage et al. 2021), made for models
without MLPs, work for MLPs if neurons are heads. In this package they do: OV eigenvalues, token →
neuron → token tables and path expansion are exact for heads and neuron-heads. This study asks
whether the results are useful, for Small English, and for SmolLM2-135M if its folder is given.

Our expectations, written before anything was run:

1. Heads that attend to what followed a word before (induction) have positive copying scores, the
   larger the more they do it.
2. Paths through at most two heads or neuron-heads explain most of the variance of the logits, as in
   the paper's models of two layers.
3. The tokens that drive a neuron by the direct path are of one kind of word more often than random
   tokens, in the first layer most.

While the tools were written, before this script, a first look at one prompt for each model spoke
against 2. The expectation is kept as it was.

Measures:

copying     Σ λ / Σ |λ| of every attention head's OV circuit, over the tokens that occur in texts
            (for SmolLM2: whole words), and the cosine of every neuron-head; also the attention
            from the last word to what followed it before, in prompts from `tasks.induction`
hops        Let L_h be the logits of paths through h heads, centred over the vocabulary, and L their
            sum: the share ⟨L_h, L⟩ / ⟨L, L⟩ (shares add up to 1), and the explained part up to h,
            1 - ‖L - Σ_{i ≤ h} L_i‖² / ‖L‖², over all tokens of a prompt except the first
words       the share of the five tokens at either end of a neuron's path that are in one word class
            of the grammar. Two nulls: neurons with random directions, because words in a class have
            similar embeddings and any direction prefers similar words; and five random tokens (the
            only null in the first run, which is too easy to beat)
cost        seconds, and the peak memory of the process above its memory before the call

python -m analyses.studies.framework_on_models --smollm2 out/smollm2 --out analyses/results
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import torch
import transformers
import typer
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from tqdm import tqdm
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from analyses.benchmarks.bench_peak_memory import held_and_peak, reset_peak
from analyses.tools import small_english_grammar as grammar
from analyses.tools.benching import MIB
from analyses.tools.benching import markdown as lines
from analyses.tools.options import Device, Out, Smoke, SmolLM2
from analyses.tools.study_files import keep
from attn_only_lens import circuits, expose_neuron_heads, load, pretrained, tasks, token_texts
from attn_only_lens import patching as p
from attn_only_lens.tasks import words

SMALL, LARGE, SHAPE = "Small English", "SmolLM2-135M", "GPT-2's shape"
ENDS = ("reads", "writes")
RARE = 5  # tables leave out tokens that occur less often
N_TOKENS = 5
TASKS: dict[str, Callable[..., Any]] = {
    "agreement": tasks.agreement,
    "brackets": tasks.brackets,
    "induction": tasks.induction,
    "ioi": tasks.ioi,
}
SENTENCES = (
    "The capital of France is a city of two million people, and the capital of Germany is",
    "When Mary and John went to the store, John gave a drink to Mary, and she said that",
    "The keys to the old cabinet are on the table near the window, where the children left them",
    "In the year 1969 two men walked on the moon, while a third one waited for them above",
    "Water boils at one hundred degrees, and it freezes at zero, unless there is salt in it",
    "The doctor told the nurse that the patient was better, so they let him go home that day",
)


def occurring(model: Any, least: int) -> list[int]:
    """Return tokens that occur at least `least` times in the texts of Small English."""
    texts = pretrained.small_english_texts()
    counts = Counter(token for text in texts for token in model.to_tokens(text)[0].tolist())
    return sorted(token for token, n in counts.items() if n >= least)


def whole_words(model: Any) -> list[int]:
    """Return tokens that consist of a space and letters."""
    pieces = model.tokenizer.convert_ids_to_tokens(list(range(model.cfg.d_vocab)))
    return [
        i for i, piece in enumerate(pieces) if piece and piece[0] == "Ġ" and piece[1:].isalpha()
    ]


@torch.no_grad()
def induction(model: Any, n: int, length: int) -> pd.Series:
    """Return each head's mean attention from the last word to what followed it before."""
    pairs = tasks.induction(model.tokenizer, n, length=length)
    total: Counter[str] = Counter()
    for text, place in zip(pairs.clean, pairs.roles["repeated"], strict=True):
        cache = model.run_with_cache(text)[1]
        for layer in range(model.cfg.n_layers):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, :, -1, place]
            for head, value in enumerate(pattern.tolist()):
                total[f"L{layer}H{head}"] += value / n
    return pd.Series(total)


@torch.no_grad()
def hops_of(model: Any, text: Any, hops: int) -> pd.DataFrame:
    """Return the shares of one prompt's logits by number of hops."""
    logits = circuits.path_expansion(model, text, hops).logits[:, :, 1:].double()
    logits = logits - logits.mean(-1, keepdim=True)
    whole = logits.sum(0)
    size, upto = whole.square().sum(), logits.cumsum(0)
    return pd.DataFrame(
        {
            "hops": [*map(str, range(hops + 1)), "more"],
            "share": ((logits * whole).sum((1, 2, 3)) / size).tolist(),
            "explained": (1 - (upto - whole).square().sum((1, 2, 3)) / size).tolist(),
        }
    )


def expansions(model: Any, texts: Iterable[Any], hops: int, name: str) -> pd.DataFrame:
    """Return `hops_of` several prompts."""
    frames = [
        hops_of(model, text, hops).assign(model=name, prompt=i)
        for i, text in enumerate(tqdm(texts, desc=f"{name}, prompts", leave=False))
    ]
    return pd.concat(frames, ignore_index=True)


def by_task(model: Any, n: int, hops: int) -> pd.DataFrame:
    """Return how much paths of each length add to each task's metric, as a mean over prompts."""
    frames = []
    for name, make in TASKS.items():
        pairs = make(model.tokenizer, n)
        effects = circuits.path_expansion(model, list(pairs.clean), hops).effects(pairs.metric)
        frames.append(effects.assign(task=name, value=effects.attrs["value"]))
    return pd.concat(frames, ignore_index=True)


def pairs_of_heads(model: Any, n: int, length: int, k: int, copying: pd.DataFrame) -> pd.DataFrame:
    """Return induction paths through two heads, summed over prompts and positions."""
    pairs = tasks.induction(model.tokenizer, n, length=length)
    expansion = circuits.path_expansion(model, list(pairs.clean))
    paths = expansion.paths(pairs.metric, k, progress=False)
    value, every = paths.attrs["value"], paths[paths["hops"] == 2]
    of_names = every.assign(
        first=every["first"].str.split("@").str[0], second=every["second"].str.split("@").str[0]
    )
    effect = of_names.groupby(["first", "second"])["effect"].sum().reset_index()
    scores = copying.set_index("name")["copying"]
    return effect.assign(
        share=effect["effect"] / value,
        copying_first=effect["first"].map(scores),
        copying_second=effect["second"].map(scores),
    ).nlargest(10, "effect")


def word_classes() -> dict[str, str]:
    """Return the class of every word in the grammar that has a class."""

    def plural(nouns: Iterable[str]) -> list[str]:
        return [f"{noun}s" for noun in nouns]

    verbs = [*grammar.TRANSITIVE, *grammar.INTRANSITIVE]
    classes: dict[str, Iterable[str]] = {
        "woman": words.WOMEN,
        "man": words.MEN,
        "person or animal": grammar.ALIVE,
        "people or animals": plural(grammar.ALIVE),
        "thing": [*grammar.THINGS, *words.OBJECTS],
        "things": plural(grammar.THINGS),
        "place": words.PLACES,
        "adjective": [*grammar.LOOKS, *grammar.FEELINGS, *words.ADJECTIVES],
        "preposition": grammar.PREPOSITIONS,
        "verb, third person": [verb[0] for verb in verbs],
        "verb, plural": [verb[1] for verb in verbs],
        "verb, past": [verb[2] for verb in verbs],
    }
    return {word: name for name, of in classes.items() for word in of}


def purity(texts: Iterable[str], classes: dict[str, str]) -> float:
    """Return the share of tokens in the most frequent class."""
    counts = Counter(classes[text.strip()] for text in texts if text.strip() in classes)
    return max(counts.values(), default=0) / N_TOKENS


def purities(rows: pd.DataFrame) -> pd.DataFrame:
    """Return mean purity of both ends of paths by layer, and the share of rows with purity 1."""
    classes, means = word_classes(), {}
    for end in ENDS:
        pure = pd.Series([purity(texts, classes) for texts in rows[end]])
        by_layer = pure.groupby(rows["layer"].to_numpy())
        means[end] = by_layer.mean()
        means[f"{end}: all five"] = by_layer.agg(lambda x: (x == 1).mean())
    return pd.DataFrame(means).rename_axis("layer")


def with_random_directions(model: Any, seed: int) -> Any:
    """Give all neurons weights with random directions, in place, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.original_model.model.layers:
        for matrix in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            drawn = torch.randn(matrix.weight.shape, generator=generator)
            matrix.weight.data.copy_(drawn)  # the order of tokens does not depend on the scale
    return model


def readability(
    rows: pd.DataFrame, texts: list[str], nulls: Iterable[pd.DataFrame], draws: int
) -> pd.DataFrame:
    """Return purity by layer, next to the purities of random directions and of random tokens.

    Args:
        rows: paths of the model's neurons.
        texts: texts of the tokens that paths can have at their ends.
        nulls: paths of neurons with random directions, one frame per random model.
        draws: how often five random tokens are drawn.
    """
    classes, random, shares = word_classes(), Random(0), purities(rows)
    of_nulls = pd.concat([purities(null) for null in nulls]).groupby("layer")
    for column in list(shares):
        null = of_nulls[column]
        shares[f"{column}, random directions"] = null.mean()
        shares[f"{column}, least of them"], shares[f"{column}, largest"] = null.min(), null.max()
    chance = [purity(random.sample(texts, N_TOKENS), classes) for _ in range(draws)]
    shares["random tokens"] = sum(chance) / draws
    shares["random tokens: all five"] = sum(share == 1 for share in chance) / draws
    return shares.reset_index()


def words_table(words: pd.DataFrame) -> str:
    """Return a row per layer and end: both purities, and those of random directions with ranges."""
    rows = []
    for row in words.to_dict("records"):
        for end in ENDS:
            cells = [f"{row['layer']:.0f}", end]
            for column in (end, f"{end}: all five"):
                null, low, high = (
                    row[f"{column}, {which}"]
                    for which in ("random directions", "least of them", "largest")
                )
                cells += [f"{row[column]:.3f}", f"{null:.3f} ({low:.3f} to {high:.3f})"]
            rows.append(cells)
    return lines(
        ["layer", "end", "of one class", "random directions", "all five", "random directions"], rows
    )


class Costs:
    """Seconds and peak memory of calls."""

    def __init__(self, device: str) -> None:
        self.device, self.rows = device, list[dict[str, Any]]()

    def of(self, name: str, call: str, run: Callable[[], Any]) -> Any:
        """Run a call, store its costs, and return its result."""
        reset_peak(self.device)
        before, _ = held_and_peak(self.device)
        started, busy = time.perf_counter(), time.process_time()
        result = run()
        took = {
            "processor s": time.process_time() - busy,
            "wall s": time.perf_counter() - started,
        }
        peak = (held_and_peak(self.device)[1] - before) / MIB
        self.rows.append({"model": name, "call": call} | took | {"peak MiB": peak})
        return result


def weights_only(
    model: Any, name: str, tokens: list[int] | None, layers: list[int], costs: Costs
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return copying scores of all heads, and all paths of the neurons in some layers."""
    copying = costs.of(
        name, "copying_scores", lambda: circuits.copying_scores(model, tokens=tokens)
    )
    chosen = p.neuron_heads(layers)
    rows = costs.of(
        name,
        f"token_paths, {len(layers)} layer{'s' * (len(layers) > 1)}",
        lambda: circuits.token_paths(
            model, chosen, 10**6, tokens=tokens, n_tokens=N_TOKENS, progress=False
        ),
    )
    best = copying[copying["kind"] == "attention"].nlargest(1, "copying")["name"].item()
    costs.of(name, "ov_circuit, top(20)", lambda: circuits.ov_circuit(model, best).top(20))
    costs.of(name, "qk_circuit, top(20)", lambda: circuits.qk_circuit(model, best).top(20))
    return copying.assign(model=name), rows.assign(model=name)


def one_prompt(model: Any, name: str, text: Any, metric: Any, costs: Costs) -> pd.DataFrame:
    """Return the single paths with the largest effects on one prompt."""
    expansion = costs.of(name, "path_expansion", lambda: circuits.path_expansion(model, text))
    run = lambda: expansion.paths(metric, 10, progress=False)  # noqa: E731
    return costs.of(name, "paths(10)", run).assign(model=name)


def shaped_like_gpt2(device: str) -> Any:
    """Return a model with GPT-2 small's shape and random weights."""
    torch.manual_seed(0)
    source = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    source.config._attn_implementation = "eager"
    bridge = build_bridge_from_module(
        source.eval().to(device), "GPT2LMHeadModel", hf_config=source.config
    )
    return expose_neuron_heads(bridge).model


def figure(copying: pd.DataFrame, hops: pd.DataFrame) -> Figure:
    """Draw copying scores by layer, and how much of the logits paths of each length explain."""
    names = list(copying["model"].unique())
    picture = Figure(figsize=(6 * len(names), 7.5), layout="constrained")
    panels = picture.subplots(2, len(names), squeeze=False)
    for (top, bottom), name in zip(panels.T, names, strict=True):
        of_model = copying[copying["model"] == name]
        top.axhline(0, color="grey", linewidth=0.8)
        top.scatter(
            of_model["layer"], of_model["copying"], s=18, color="C0", label="an attention head"
        )
        means = of_model.groupby("layer")["copying"].mean()
        top.plot(means.index, means, color="C3", label="mean of a layer")
        top.set_title(name, loc="left")
        top.set(xlabel="layer", ylabel="copying score Σλ / Σ|λ|", ylim=(-1.1, 1.1))
        top.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize="small")
        shown = hops[(hops["model"] == name) & (hops["hops"] != "more")]
        for _, line in shown.groupby("prompt"):
            hops_axis = line["hops"].astype(int)
            bottom.plot(hops_axis, line["share"], color="C0", alpha=0.35, linewidth=0.8)
        mean = shown.assign(hops=shown["hops"].astype(int)).groupby("hops")["share"].mean()
        bottom.plot(mean.index, mean, color="C3", marker="o", markersize=3, label="mean")
        bottom.axhline(0, color="grey", linewidth=0.8)
        bottom.set(xlabel="heads and neuron-heads on a path", ylabel="share of the logits")
        bottom.plot([], [], color="C0", alpha=0.35, label="a prompt")
        bottom.legend(fontsize="small")
    return picture


def markdown(frame: pd.DataFrame) -> str:
    """Return a Markdown table with numbers to three digits."""
    rows = frame.itertuples(index=False)
    return lines(
        list(frame.columns),
        ([f"{cell:.3g}" if isinstance(cell, float) else cell for cell in row] for row in rows),
    )


def interval(values: pd.Series) -> str:
    """Return the mean, the minimum and the maximum as text."""
    return f"{values.mean():.3g} ({values.min():.3g} to {values.max():.3g})"


def hops_table(hops: pd.DataFrame) -> str:
    """Return a row per path length: shares and explained parts, mean and range over prompts."""
    summary = hops.groupby("hops", sort=False)[["share", "explained"]].agg(interval)
    return markdown(summary.reset_index())


def texts_of(rows: pd.DataFrame, n: int) -> str:
    """Return the strongest paths as Markdown; tokens are in code style, so spaces are visible."""
    shown = rows.nlargest(n, "score")[["name", "value", "reads", "writes", "score"]].copy()
    for end in ("reads", "writes"):
        shown[end] = [" ".join(f"`{text}`" for text in row) for row in shown[end]]
        shown[end] = shown[end].str.replace("|", "\\|").str.replace("\n", "↵")
    return markdown(shown.assign(score=shown["score"].map("{:.3g}".format)))


def layers_table(copying: pd.DataFrame, every: pd.DataFrame) -> pd.DataFrame:
    """Return copying by layer: scores of heads, and cosines of neurons."""
    heads = copying.groupby("layer")["copying"]
    neurons = every[every["kind"] == "neuron"].groupby("layer")["cosine"]
    return pd.DataFrame(
        {
            "heads: mean": heads.mean(),
            "least": heads.min(),
            "largest": heads.max(),
            "neurons: mean cosine": neurons.mean(),
            "share above 0": neurons.agg(lambda x: (x > 0).mean()),
        }
    ).reset_index()


def main(
    out: Out = Path("out/framework"),
    smollm2: SmolLM2 = None,
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, tables and figures (`study_files.py`)."""
    started = time.perf_counter()
    costs, n = Costs(device), 2 if smoke else 64
    model = expose_neuron_heads(pretrained.small_english(device)).model
    tokens = occurring(model, RARE)
    layers = [0] if smoke else list(range(model.cfg.n_layers))
    copying, rows = weights_only(model, SMALL, tokens, layers, costs)
    attention = induction(model, 2 if smoke else 100, 16)
    texts = [model.to_tokens(text)[0] for text in pretrained.small_english_texts()]
    n_pos = 5 if smoke else 32
    prompts = [text[:n_pos] for text in texts if len(text) >= n_pos][:n]
    hops = expansions(model, prompts, 2 * model.cfg.n_layers, SMALL)
    of_tasks = by_task(model, n, 2 * model.cfg.n_layers)
    size = (1, 4, 100) if smoke else (32, 20, 10_000)
    joined = pairs_of_heads(model, *size, copying)
    paths = one_prompt(
        model, SMALL, "The keys near the cabinet", p.logit_diff(" are", " is"), costs
    )
    nulls = (
        circuits.token_paths(
            expose_neuron_heads(with_random_directions(pretrained.small_english(device), i)).model,
            p.neuron_heads(layers),
            10**6,
            tokens=tokens,
            n_tokens=N_TOKENS,
            progress=False,
        )
        for i in range(2 if smoke else 40)
    )
    pure = readability(
        rows, [token_texts(model, [i])[0] for i in tokens], nulls, 50 if smoke else 20_000
    )
    parts = [section(SMALL, copying, attention, hops, rows, paths)]
    kept = {"copying": [copying], "hops": [hops], "paths": [paths], "rows": [rows]}
    inductions = [attention]
    if smollm2 is not None:
        large = expose_neuron_heads(load(smollm2, device=device)).model
        chosen = [0, 15, 29]
        copying, rows = weights_only(large, LARGE, whole_words(large), chosen, costs)
        attention = induction(large, 20, 16)
        hops = expansions(large, SENTENCES, 24, LARGE)
        metric = p.logit_diff(" Paris", " Berlin")
        paths = one_prompt(large, LARGE, "The capital of France is", metric, costs)
        parts.append(section(LARGE, copying, attention, hops, rows, paths))
        for part, frame in zip(kept, (copying, hops, paths, rows), strict=True):
            kept[part].append(frame)
        inductions.append(attention)
        shape = shaped_like_gpt2(device)
        weights_only(shape, SHAPE, None, [0], costs)
        ids = torch.arange(3, 19, device=device)
        one_prompt(shape, SHAPE, ids, p.logit_diff(7, 8), costs)
    heads = [
        frame[frame["kind"] == "attention"].assign(
            induction=lambda x, a=induction: x["name"].map(a)
        )
        for frame, induction in zip(kept["copying"], inductions, strict=True)
    ]
    every_hop, cost = pd.concat(kept["hops"]), pd.DataFrame(costs.rows)
    strongest = pd.concat([frame.nlargest(40, "score") for frame in kept["rows"]])
    for end in ("reads", "writes"):
        strongest[end] = ["".join(row) for row in strongest[end]]
    frames = {
        "heads": pd.concat(heads),
        "layers": pd.concat(
            layers_table(of_heads, frame).assign(model=of_heads["model"].iloc[0])
            for of_heads, frame in zip(heads, kept["copying"], strict=True)
        ),
        "hops": every_hop,
        "tasks": of_tasks,
        "pairs": joined,
        "words": pure,
        "rows": strongest,
        "paths": pd.concat(kept["paths"]),
        "cost": cost,
    }
    flags = (" --smoke" if smoke else "") + (" --smollm2 out/smollm2" if smollm2 else "")
    page = PAGE.format(
        command=f"python -m analyses.studies.framework_on_models{flags}",
        answer=answer(frames),
        rare=RARE,
        parts="\n\n".join(parts),
        tasks=markdown(of_tasks.pivot(index="task", columns="hops", values="effect").reset_index()),
        pairs=markdown(joined),
        words=words_table(frames["words"]),
        random=f"{pure['random tokens'].iloc[0]:.3f}",
        random_five=f"{pure['random tokens: all five'].iloc[0]:.5f}",
        cost=markdown(cost),
        load=os.getloadavg()[0],
        cores=os.cpu_count(),
    )
    typer.echo(page)
    settings = {"device": device, "smoke": smoke, "smollm2": smollm2 is not None}
    picture = figure(frames["heads"], every_hop)
    keep(__file__, out, page, frames, picture, started=started, digits="%.4g", **settings)


def answer(frames: dict[str, pd.DataFrame]) -> str:
    """Return the results that the expectations are compared with."""
    hops, task = frames["hops"], frames["tasks"].set_index(["task", "hops"])
    pair, first = frames["pairs"].iloc[0], frames["words"].iloc[0]
    above = {
        f"above_{end}": standing_out(frames["words"], column)
        for end, column in zip(
            ("reads", "writes", "reads_five", "writes_five"),
            (*ENDS, *(f"{end}: all five" for end in ENDS)),
            strict=True,
        )
    }
    explained = hops.groupby(["model", "hops"])["explained"].mean()
    two = {name: task["effect"][name, "2"] / task["value"][name, "2"] for name in TASKS}
    text = ANSWER.format(
        two=explained[SMALL, "2"],
        four=explained[SMALL, "4"],
        tasks=", ".join(f"{name} {share:.0%}" for name, share in two.items()),
        pair=f"{pair['first']} and {pair['second']}",
        scores=f"{pair['copying_first']:.2f} and {pair['copying_second']:.2f}",
        reads=first["reads"],
        null=first["reads, random directions"],
        most=first["reads, largest"],
        five=first["reads: all five"],
        null_five=first["reads: all five, random directions"],
        random=first["random tokens"],
        later=", ".join(
            f"{row['reads']:.0%} against {row['reads, random directions']:.0%}"
            for row in frames["words"].iloc[1:].to_dict("records")
        ),
        **above,
    )
    if LARGE not in hops["model"].values:
        return text
    heads = frames["heads"].query(f"model == '{LARGE}'")
    most = heads.nlargest(3, "induction")
    return text + ANSWER_LARGE.format(
        two=explained[LARGE, "2"],
        worst=explained[LARGE].min(),
        most=", ".join(f"{row.name} {row.copying:.2f}" for row in most.itertuples()),
        rank=spearmanr(heads["induction"], heads["copying"]).statistic,
    )


def standing_out(words: pd.DataFrame, column: str) -> str:
    """Return the layers whose value is above all draws of random directions, as text."""
    layers = words["layer"][words[column] > words[f"{column}, largest"]].astype(int)
    if layers.empty:
        return "no layer"
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def section(
    name: str,
    copying: pd.DataFrame,
    attention: pd.Series,
    hops: pd.DataFrame,
    rows: pd.DataFrame,
    paths: pd.DataFrame,
) -> str:
    """Return the section about one model."""
    heads = copying[copying["kind"] == "attention"].set_index("name")
    heads = heads.assign(induction=attention)
    by_layer = layers_table(heads, copying)
    most = heads.nlargest(5, "induction")[["induction", "copying", "cosine"]].reset_index()
    return SECTION.format(
        name=name,
        layers=markdown(by_layer),
        rank=f"{spearmanr(heads['induction'], heads['copying']).statistic:.2f}",
        n_heads=len(heads),
        most=markdown(most),
        hops=hops_table(hops),
        n_prompts=hops["prompt"].nunique(),
        rows=texts_of(rows, 12),
        paths=markdown(paths),
    )


SECTION = """## {name}

### Which heads copy

{layers}

The heads that attend most from a word to the token that followed it earlier, in prompts of the
induction task. Over all {n_heads} heads, the rank correlation of this attention with the copying
score is {rank}.

{most}

### How long are the paths that matter

Shares of the logits by the number of heads and neuron-heads on a path ("hops"), and the share that
all paths up to this number explain: the mean over {n_prompts} prompts (the lowest and the highest).

{hops}

The single paths with the largest effects on one prompt, through one or two hops:

{paths}

### Token → neuron → token

The strongest rows: five tokens that drive the neuron by the direct path, and five that it then
raises.

{rows}"""

ANSWER = """\
We expected, before the run, that induction heads copy, that paths through at most two heads
explain most of the logits, and that neurons of the first layer read words of one kind. (When we
wrote this, we had already seen that the second did not hold for one prompt of each model.)

- Path expansion is exact with neurons as heads, but short paths explain only a part of a model. In
  Small English, paths of up to two hops explain {two:.0%} of the logits, and paths of up to four
  hops {four:.0%}. This depends on the task. Paths of exactly two hops have these shares of a
  task's logit difference: {tasks}.
- If two hops explain most of a task, they name its parts; we cut no part to test this. In
  induction, the largest pair is {pair}, with copying scores {scores}. No single head of Small
  English attends much to the answer.
- Of the five tokens that drive a neuron of layer 0 most, {reads:.0%} are of one kind (random
  weights: {null:.0%}, at most {most:.0%} in any draw). All five are of one kind in {five:.1%} of
  rows (random weights: {null_five:.1%}). In later layers, {later} of the five tokens are of one
  kind (neurons against random weights). Neurons are above every random draw in {above_reads} for
  the tokens that they read, and in {above_writes} for the tokens that they write (by little). Rows
  with five tokens of one kind are rare, but more frequent than in every draw in {above_reads_five}
  (read) and {above_writes_five} (written). (The first version of this page compared with random
  tokens, {random:.0%}; but words of one kind have similar embeddings, so any direction prefers
  words of one kind.)"""

ANSWER_LARGE = """
- In SmolLM2-135M, paths of up to two hops explain {two:.0%}. Terms with more hops are many times
  larger than the logits, and cancel. An expansion that ends there is worse than none (explained:
  {worst:.0f}).
- In SmolLM2-135M, copying scores do not identify induction heads. The three heads that attend most
  to the answer have the scores {most}; over all heads, the rank correlation is {rank:.2f}."""

PAGE = """# The tools of *A Mathematical Framework* on models with MLPs

{answer}

Made by `{command}`. We left out tokens that occur fewer than {rare} times in the texts of Small
English, and tokens of SmolLM2 that do not consist of a space and letters.

![Copying scores by layer, and shares of the logits by hops](framework_on_models.svg)

{parts}

## Small English: how long are the paths of a task

The logit difference of a task that paths of each length add: the mean over its prompts.

{tasks}

The pairs of heads whose paths of two hops add most to the induction task, over positions and
prompts, with their share of the whole logit difference, and the copying scores of the two heads.

{pairs}

## Small English: are the tables of neurons readable

The share of the five tokens at either end of a row that are of one class of the grammar's words
(women, men, things, prepositions, past verbs, …), and the share of rows in which all five tokens
are. The table has the same shares for neurons whose weights have random directions: the mean over
40 draws of a whole layer, and the lowest and the highest draw. Of five random tokens, {random} are
of one class, and all five in {random_five} of draws.

{words}

## Cost

The table has seconds of processor time on one thread, and seconds by the clock. The load average
was {load:.0f} on {cores} cores at the end, so seconds by the clock say little. It also has the peak
of the process's memory, minus its memory before the call; it is 0 if memory that an earlier call
had freed was enough. Copying scores are those of all heads and neurons.

Cautions: there are two models, and we chose the tokens. If only weights are used, norm scales and
positions are left out. If paths are expanded, attention patterns are held fixed.

{cost}
"""

if __name__ == "__main__":
    typer.run(main)
