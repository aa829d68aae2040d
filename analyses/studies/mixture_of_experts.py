"""Train small mixtures of experts on Small English, and ask what their routing does.

A mixture has four experts in each layer, and its router chooses two of them. It is trained with the
usual loss that balances how often experts are chosen. Two dense models are trained on the same
texts: one has as many neurons as a token of the mixture visits, and one has as many as all experts.

Do experts specialise? A visit of an expert is 0 or 1 at every token of held-out texts. A variable,
such as the part of speech, explains a share of the visits: the variance between its values, divided
by the variance of the visits, both summed over the experts of a layer (R²). Two baselines are
models before training, and parts of speech that are shuffled among words.

Does agreement run through routing? Prompts differ in the subject's number (`tasks.agreement`).
"""

from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import pairwise, product
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analyses.study import Setting, Study, Tables
from analyses.tools import small_english as english
from analyses.tools import small_english_grammar as grammar
from analyses.tools.circuit_measures import QUIET, Question
from analyses.tools.english_runs import Plan, Sizes, figures, training_of, update
from analyses.tools.training import claim, train
from attn_only_lens import Contrast, circuits, expose_neuron_heads, neurons, pretrained, tasks
from attn_only_lens import patching as p
from attn_only_lens.heads import host_of
from attn_only_lens.tasks import words

MIXTURE, DENSE, LARGE = "mixture", "dense, equal flops", "dense, equal parameters"
N_NEURONS = {MIXTURE: 128, DENSE: 128, LARGE: 256}  # in a layer; those of two experts
BALANCE = 0.02  # the weight of the loss that balances the experts
STEPS, DECAY = 2500, 600
N_FIND, N_JUDGE, SEED_OF_PAIRS = 16, 48, 11
WANTED, TOP, N_SHUFFLES = 0.8, 200, 20
WITH_ROUTERS = "heads and neurons, routers"
KINDS = {"routers": "router", "neurons": "neuron", "attention heads": "attention"}


# ---- training


def balanced_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss on words, plus the loss that balances a mixture's experts."""
    seen = []

    def run(tokens: Tensor) -> Any:
        seen.append(model(tokens, output_router_logits=True))
        return seen[0]

    loss = english.loss_of(run, tokens)
    balance: Tensor = seen[0].aux_loss
    return loss + BALANCE * balance


def plan_of(setting: Setting, arm: str, seed: int) -> Plan:
    """Return the settings of a run."""
    steps, decay, n_read, asked = (3, 1, 8, 2) if setting.smoke else (STEPS, DECAY, 512, 100)
    return Plan(
        Sizes(2, 64, 4, N_NEURONS[arm]),
        *(steps, seed, seed),
        decay=decay,
        family="mixtral" if arm == MIXTURE else "llama",
        read=n_read,
        asked=asked,
    )


def trained(setting: Setting, arm: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """Train a model; return its bridge, and its row of the table of runs."""
    plan = plan_of(setting, arm, seed)
    folder = setting.runs / f"{arm} {seed}".replace(", ", " ")
    claim(folder / "run.txt", f"{plan!r}\n")
    training, loss_of = training_of(plan, setting.device, None), english.loss_of
    if arm == MIXTURE:
        loss_of = balanced_loss

    def step(training: Any, number: int) -> dict[str, int]:
        tokens = update(plan, training, number, loss_of)
        return {"tokens": tokens.shape[0] * (tokens.shape[1] - 1)}

    curve = train(
        *(training, plan.steps, folder, step),
        partial(figures, n_read=plan.read, asked=plan.asked),
        {"tokens": 0},
        check_every=500,
        save_every=500,
        tick=lambda _: None,
    )
    model = training.model.eval()
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return model, {"parameters": n_parameters, **curve.iloc[-1].to_dict()}


# ---- what visits which expert


@cache
def parts_of_speech() -> dict[str, str]:
    """Return the part of speech of every word and mark."""
    nouns = {*grammar.ALIVE, *grammar.THINGS, *words.PLACES, *words.OBJECTS, *words.FRIENDS}
    verbs = {x for forms in (*grammar.TRANSITIVE, *grammar.INTRANSITIVE) for x in forms}
    kinds = {
        "name": grammar.NAMES,
        "adjective": (*grammar.LOOKS, *grammar.FEELINGS, *words.ADJECTIVES),
        "degree": (*words.DEGREES, "not"),
        "verb": verbs | {x for forms in grammar.STATES for x in forms},
        "auxiliary": {"is", "are", "was", "were", "has", "have", "does", "do", "been"}
        | {"isn't", "aren't", "wasn't", "weren't"},
        "pronoun": {x for forms in grammar.PRONOUNS for x in forms} | {"it", "It"},
        "determiner": ("the", "The", "a", "an"),
        "plural noun": {f"{noun}s" for noun in nouns},
        "noun": nouns,
        "preposition": {x for phrase in grammar.PREPOSITIONS for x in phrase.split()},
        "mark": tuple('"([)].,?'),
    }
    parts: dict[str, str] = {}
    for kind, some in kinds.items():
        for word in some:
            parts.setdefault(word, kind)
    return {token: parts.get(token.strip(), "other") for token in grammar.tokens()}


@torch.no_grad()
def tokens_and_visits(model: Any, texts: list[str]) -> tuple[pd.DataFrame, np.ndarray]:
    """Return a row for each token after BOS, and its visits [layer, token, expert]."""
    ids = {index: token for token, index in english.vocabulary().items()}
    rows, visits = list[dict[str, Any]](), list[np.ndarray]()
    points = [host_of(model).hook_name(layer, "router", "z") for layer in range(2)]
    for text in texts:
        tokens = model.to_tokens(text)
        _, cache = model.run_with_cache(tokens, names_filter=points)
        visits.append(np.stack([(cache[x][0, 1:, 0] != 0).cpu().numpy() for x in points]))
        story = "story" if "." in text or "?" in text else "list"
        read = [ids[index] for index in tokens[0].tolist()]
        rows += [
            {"token": now, "part of speech": parts_of_speech()[now], "position": i, "text": story}
            | {"token before": before}
            for i, (before, now) in enumerate(pairwise(read))
        ]
    return pd.DataFrame(rows), np.concatenate(visits, axis=1)


def explained(visits: np.ndarray, variable: "pd.Series[Any]") -> float:
    """Return the share of the variance of visits [token, expert] that a variable explains."""
    frame = pd.DataFrame(visits.astype(float))
    means = frame.groupby(variable.to_numpy()).transform("mean")
    return float(means.var(ddof=0).sum() / frame.var(ddof=0).sum())


def specialisation(tokens: pd.DataFrame, visits: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield what each variable explains of the visits, in each layer."""
    in_stories = (tokens["text"] == "story").to_numpy()
    spoken = tokens[in_stories]
    of_nouns = spoken["part of speech"].isin(["noun", "plural noun"]).to_numpy()
    random, parts, shuffled = Random(0), parts_of_speech(), list["pd.Series[str]"]()
    for _ in range(N_SHUFFLES):
        some = list(parts.values())
        random.shuffle(some)
        shuffled.append(spoken["token"].map(dict(zip(parts, some, strict=True))))
    for layer, of_layer in enumerate(visits):
        here = of_layer[in_stories]
        shares = {"list or story": explained(of_layer, tokens["text"])}
        for variable in ("token", "part of speech", "token before", "position"):
            shares[variable] = explained(here, spoken[variable])
        by_chance = [explained(here, variable) for variable in shuffled]
        shares["part of speech, shuffled among words"] = float(np.mean(by_chance))
        number = spoken["part of speech"][of_nouns]
        shares["a noun's number"] = explained(here[of_nouns], number)
        for variable, share in shares.items():
            yield {"layer": layer, "variable": variable, "share": share}


def by_part(tokens: pd.DataFrame, visits: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield the share of the tokens of each part of speech that visit each expert, in stories."""
    parts = tokens["part of speech"].where(tokens["text"] == "story")
    for layer, of_layer in enumerate(visits):
        shares = pd.DataFrame(of_layer).groupby(parts).mean().stack()
        for (part, expert), share in shares.items():
            yield {"layer": layer, "expert": expert, "part of speech": part, "share": share}


# ---- agreement


@torch.no_grad()
def joint_patches(model: Any, question: Question) -> Iterator[dict[str, Any]]:
    """Yield the share of the difference that joint patches restore (denoise) or remove (noise).

    All routing weights, or the outputs of all neurons, are patched at once, in all layers and at
    all tokens. Then the tokens are counted that visit other experts in the two runs.
    """
    host = host_of(model)
    places = [(layer, kind) for layer in range(2) for kind in host.kinds(layer)]
    runs = {"clean": question.clean, "corrupted": question.corrupted}
    caches = {side: model.run_with_cache(tokens)[1] for side, tokens in runs.items()}
    metric = {side: question.of_logits(model(tokens)) for side, tokens in runs.items()}
    change = (metric["clean"] - metric["corrupted"]).mean()
    for name, kind in (("routers", "router"), ("neurons", "neuron")):
        points = [host.hook_name(layer, kind, "z") for layer, x in places if x == kind]
        for direction, source, target, sign in (
            ("denoise", "clean", "corrupted", 1),
            ("noise", "corrupted", "clean", -1),
        ):
            values = caches[source]
            hooks = [(point, lambda z, hook, values=values: values[hook.name]) for point in points]
            patched = question.of_logits(model.run_with_hooks(runs[target], fwd_hooks=hooks))
            moved = sign * (patched - metric[target]).mean() / change
            yield {"measure": f"all {name}, {direction}", "value": moved if points else np.nan}
    for layer, kind in places:
        if kind == "router":
            point = host.hook_name(layer, kind, "z")
            visits = [caches[side][point][..., 0, :] != 0 for side in runs]
            differ = (visits[0] != visits[1]).any(-1)
            last = question.mask.sum(1) - 1
            for role, position in {"subject": torch.full_like(last, 2), "end": last}.items():
                share = differ[torch.arange(len(last)), position].double().mean().item()
                yield {"measure": f"other experts at {role}, layer {layer}", "value": share}


def through_routing(model: Any, pairs: Contrast) -> Iterator[dict[str, Any]]:
    """Yield the parts of an attribution graph that go through routing."""
    graph = circuits.attribution_graph(model, pairs, top=TOP)
    routers = graph.nodes.loc[graph.nodes["kind"] == "router", "attribution"]
    if len(routers):
        yield {"measure": "graph: part of other choices", "value": routers.sum() / graph.value}
    heads = graph.nodes[graph.nodes["kind"].isin(["neuron", "attention"])].set_index("id")
    parts = {"routing": ["routing"], "patterns": ["q", "k", "gate"]}
    sums = {
        name: graph.edges[graph.edges["kind"].isin(kinds)].groupby("target")["weight"].sum()
        for name, kinds in parts.items()
    }
    by = pd.DataFrame(sums).reindex(heads.index).fillna(0.0)
    by["values"] = heads["attribution"] - by.sum(axis=1)
    for name, size in (by.abs().sum() / by.abs().sum().sum()).items():
        yield {"measure": f"graph: effects through {name}", "value": size}


def single_patches(model: Any, pairs: Contrast) -> Iterator[dict[str, Any]]:
    """Yield the largest effect of a patch of one site, by kind, as a share of the difference."""
    kinds = {kind for layer in range(2) for kind in host_of(model).kinds(layer)}
    for name, kind in KINDS.items():
        if kind in kinds:
            sweep = p.activation_patch(model, pairs, sites=p.Sites.of_kinds([kind]), work=QUIET)
            largest = sweep.frame["score"].abs().max()
            yield {"measure": f"one of the {name}, largest", "value": largest}


def circuits_for(model: Any, find: Contrast, judge: Contrast) -> Iterator[dict[str, Any]]:
    """Yield the circuits for agreement, and what they keep on other pairs."""
    candidates = {"heads and neurons": ["heads", "neurons"]}
    if "router" in host_of(model).kinds(0):
        candidates[WITH_ROUTERS] = ["heads", "neurons", "routers"]
    for name, sites in candidates.items():
        circuit = circuits.discover(model, find, sites=sites, faithfulness=WANTED, work=QUIET)
        kept = circuits.evaluate(model, circuit, judge, work=QUIET)
        kinds = circuit.frame["kind"].value_counts()
        yield {
            "candidates": name,
            "n_sites": circuit.n_sites,
            "size": len(circuit),
            **{word: int(kinds.get(kind, 0)) for word, kind in KINDS.items()},
            "faithfulness": circuit.faithfulness,
            "held out": kept.faithfulness,
            "error": kept.error,
        }


def agreement(n: int) -> Contrast:
    """Return n pairs of prompts of five words, such as "The keys near the cabinet"."""
    pairs = tasks.agreement(english.tokenizer(), 2 * n, SEED_OF_PAIRS)
    return pairs[[i for i, text in enumerate(pairs.clean) if len(text.split()) == 5][:n]]


# ---- the study


def run(setting: Setting) -> Tables:
    """Train all models, and measure visits, patches, graphs and circuits."""
    texts = pretrained.small_english_texts()[: 12 if setting.smoke else None]
    pairs = agreement(8 if setting.smoke else N_FIND + N_JUDGE)
    find, judge = (pairs[:4], pairs[4:]) if setting.smoke else (pairs[:N_FIND], pairs[N_FIND:])
    tables: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("", "visits", "specialisation", "parts", "agreement", "circuits")
    }

    def add(table: str, rows: Iterable[dict[str, Any]], **names: Any) -> None:
        tables[table] += [names | row for row in rows]

    for seed, arm in product(range(setting.n_seeds), N_NEURONS):
        names: dict[str, Any] = {"arm": arm, "seed": seed}
        model, row = trained(setting, arm, seed)
        add("", [row], **names)
        if arm == MIXTURE:
            before = training_of(plan_of(setting, arm, seed), setting.device, None).model.eval()
            for when, some in {"trained": model, "untrained": before}.items():
                with expose_neuron_heads(some):
                    seen = tokens_and_visits(some, texts)
                    counted = neurons.expert_visits(some, neurons.Corpus(texts), work=QUIET)
                best = [" ".join(map(str.strip, tokens)) for tokens in counted["tokens"]]
                counted = counted.drop(columns="shares").assign(tokens=best)
                add("visits", counted.to_dict("records"), model=when, **names)
                add("specialisation", specialisation(*seen), model=when, **names)
                add("parts", by_part(*seen), model=when, **names)
        with expose_neuron_heads(model):
            question = Question.of(pairs, english.tokenizer()).to(setting.device)
            add("agreement", joint_patches(model, question), **names)
            add("agreement", single_patches(model, find), **names)
            add("agreement", through_routing(model, find), **names)
            add("circuits", circuits_for(model, find, judge), **names)
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


def _spread(frame: pd.DataFrame, row: str, columns: list[str], value: str) -> pd.DataFrame:
    """Return the mean of a value over seeds, with its lowest and highest value, in a grid."""
    groups = frame.groupby([row, *columns], sort=False)[value]
    cells = groups.apply(_said).unstack(columns).fillna("–")
    cells.columns = [" ".join(map(str, x)) if isinstance(x, tuple) else x for x in cells.columns]
    return cells.loc[frame[row].unique()].reset_index()


def _said(values: "pd.Series[float]") -> str:
    if values.isna().all():
        return "–"
    numbers = values.mean(), values.min(), values.max()
    mean, low, high = (f"{x:.2f}".replace("-0.00", "0.00") for x in numbers)
    return f"{mean} ({low} to {high})"


def figure(tables: Tables) -> Figure:
    """Draw what explains visits, and what joint patches restore."""
    picture = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = picture.subplots(1, 2)
    frame = tables["specialisation"]
    variables = list(frame["variable"].unique())[::-1]
    for (when, layer), some in frame.groupby(["model", "layer"], sort=False):
        color, offset = ("C0", 0.12) if when == "trained" else ("C7", -0.12)
        rows = [variables.index(x) + offset * (1 + layer) for x in some["variable"]]
        marker, label = "os"[layer], f"{when}, layer {layer}"
        left.plot(some["share"], rows, color + marker, markersize=3, label=label)
    left.set(xlabel="share of the variance of visits", xlim=(0, 1))
    left.set_yticks(range(len(variables)), variables)
    left.legend(fontsize="x-small")
    joint = tables["agreement"].dropna()
    joint = joint[joint["measure"].str.startswith("all ")]
    measures = list(joint["measure"].unique())[::-1]
    for number, (arm, some) in enumerate(joint.groupby("arm", sort=False)):
        rows = [measures.index(x) + 0.15 * (1 - number) for x in some["measure"]]
        right.plot(some["value"], rows, f"C{number}o", markersize=3, label=arm)
    right.set(xlabel="share of the difference")
    right.set_yticks(range(len(measures)), measures)
    right.legend(fontsize="x-small")
    return picture


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses; most are means over seeds."""
    specialised, measured, found = (
        tables[name] for name in ("specialisation", "agreement", "circuits")
    )
    mixtures = measured[measured["arm"] == MIXTURE]
    by_experts = tables["visits"].query("model == 'trained'")
    kept = ["size", *KINDS, "faithfulness", "held out", "error"]
    sizes = found.groupby(["arm", "candidates"], sort=False)[kept].mean()
    parts = tables["parts"].query("model == 'trained' and seed == 0")
    place = "L" + parts["layer"].astype(str) + "E" + parts["expert"].astype(str)
    parts = parts.assign(place=place)
    return {
        "shares": specialised.groupby(["model", "layer", "variable"])["share"].mean(),
        "values": mixtures.groupby("measure")["value"].mean(),
        "single": mixtures.pivot(index="seed", columns="measure", values="value"),
        "visits": by_experts["visits"],
        "runs": tables[""].groupby("arm", sort=False).mean(numeric_only=True),
        "losses": tables[""].pivot(index="seed", columns="arm", values="loss"),
        "circuit": {arm: sizes.loc[arm, "heads and neurons"] for arm in N_NEURONS},
        "routed": sizes.loc[MIXTURE, WITH_ROUTERS],
        "MIXTURE": MIXTURE,
        "DENSE": DENSE,
        "LARGE": LARGE,
        "SPEECH": "part of speech",
        "SHUFFLED": "part of speech, shuffled among words",
        "largest_share": specialised.groupby("variable")["share"].max(),
        "n_with_routers": found[found["routers"] > 0]["seed"].nunique(),
        "specialisation": _spread(specialised, "variable", ["model", "layer"], "share"),
        "agreement": _spread(measured, "measure", ["arm"], "value"),
        "circuits": sizes.reset_index(),
        "examples": by_experts.query("seed == 0")[["layer", "expert", "visits", "tokens"]],
        "parts": parts.pivot(index="part of speech", columns="place", values="share"),
    }


STUDY = Study(run, lambda tables: {"": figure(tables)}, facts, n_seeds=5)
