"""Measure the numbers that the README and the guide state about examples, and write them there.

`make pictures` measures the numbers, stores them in `measured.json` next to this file, and puts them
into the sentences below, wherever a page has such a sentence with other numbers. A test compares
each sentence with its page. Numbers that come from a study are not in this file: a test looks them
up in the page of results that their paragraph links to.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from analyses.tools.flops import FlopCounter
from attn_only_lens import circuits, expose_neuron_heads, load, pretrained
from attn_only_lens import patching as p

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_suffix(".json")
CABINET = "The keys near the cabinet", "The key near the cabinet"
OTHER_NOUNS = (
    ["The dogs near the house", "The boys near the garden"],
    ["The dog near the house", "The boy near the garden"],
)
OF_SMOLLM2 = {
    "agreement": ("The keys to the old cabinet", "The key to the old cabinet", " are", " is"),
    "capital": (
        "The capital of France is the city of",
        "The capital of Italy is the city of",
        " Paris",
        " Rome",
    ),
    "indirect_object": (
        "When Mary and John went to the store, John gave a drink to",
        "When Mary and John went to the store, Mary gave a drink to",
        " Mary",
        " John",
    ),
    "gender": (
        "The king said that the crown belonged to",
        "The queen said that the crown belonged to",
        " him",
        " her",
    ),
    "arithmetic": ("Two plus three is", "Two plus four is", " five", " six"),
}
FRANCE = "The capital of France is", "The capital of Germany is", " Paris", " Berlin"
ITALY = "The capital of Italy is", "The capital of Spain is", " Rome", " Madrid"
NOUNS, OTHERS = ("key", "book", "letter", "bird"), ("car", "door", "dog")
SENTENCE = (  # 17 tokens with BOS
    "When Mary and John went to the big store, John gave a drink to",
    "When Mary and John went to the big store, Mary gave a drink to",
)
ORDERS = "magnitude", "signed"
_NUMBER = re.compile(r"(?<![\w.-])[-−]?(?:\d{1,3}(?:,\d{3})+|\d*\.\d+|\d+)(?!\w)")

Values = dict[str, Any]


def of_small_english() -> Values:
    """Measure the numbers of the README's example."""
    model = expose_neuron_heads(pretrained.small_english()).model
    metric = p.logit_diff(" are", " is")
    circuit = circuits.explain(model, *CABINET, metric).circuit
    other = circuits.evaluate(model, circuit, *OTHER_NOUNS, metric)
    return {"cabinet": _sizes(circuit) | {"other": other.faithfulness}}


def of_smollm2(folder: str, draw: Callable[[str, Any], object] = lambda name, why: None) -> Values:
    """Measure the numbers of SmolLM2-135M, and draw its explanations."""
    model = expose_neuron_heads(load(folder)).model
    values: Values = {}
    for name, (clean, corrupted, right, wrong) in OF_SMOLLM2.items():
        metric = p.logit_diff(right, wrong)
        with FlopCounter() as both_runs:
            model([clean, corrupted])
        with FlopCounter() as cost:
            why = circuits.explain(model, clean, corrupted, metric, most_nodes=40)
        draw(name, why)
        table = why.table().set_index("id")[["share", "by_pattern", "by_value", "denoise", "noise"]]
        values[name] = _sizes(why.circuit) | {
            "passes": cost.total / both_runs.total,
            "sites": table.head(10).T.to_dict(),
        }
    values["France"] = _circuits(model, *FRANCE, others=[ITALY])
    keys, *nouns = map(_agreement, NOUNS)
    values["keys"] = _circuits(model, *keys, others=map(_agreement, OTHERS))
    values["nouns"] = _circuits(
        model, *zip(keys, *nouns, strict=True), others=map(_agreement, OTHERS)
    )
    values["calls"] = _calls(model)
    return values


def _agreement(noun: str) -> tuple[str, str, str, str]:
    return f"The {noun}s to the old cabinet", f"The {noun} to the old cabinet", " are", " is"


def _circuits(
    model: Any, clean: Any, corrupted: Any, right: Any, wrong: Any, others: Iterable[Any]
) -> Values:
    """Return the sizes of circuits by method, and how much the smallest keeps on other prompts."""
    prompts = model, _list(clean), _list(corrupted), p.logit_diff(_list(right), _list(wrong))
    settings: Values = {"faithfulness": 0.8, "progress": False}
    with FlopCounter() as both_runs:
        model([*prompts[1], *prompts[2]])
    with FlopCounter() as cost:
        circuit = circuits.discover(*prompts, **settings)
    orders = {order: circuits.discover(*prompts, order=order, **settings) for order in ORDERS}
    kept = [
        circuits.evaluate(model, circuit, a, b, p.logit_diff(c, d)).faithfulness
        for a, b, c, d in others
    ]
    sizes = {order: len(found) for order, found in orders.items()}
    return sizes | _sizes(circuit) | {"elsewhere": kept, "passes": cost.total / both_runs.total}


def _list(texts: Any) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _sizes(circuit: Any) -> Values:
    return {
        "n": len(circuit),
        "n_sites": circuit.n_sites,
        "kept": circuit.faithfulness,
        "others": circuit.completeness,
    }


def _calls(model: Any) -> Values:
    """Return what a first call, on a model that changed, and a later call cost, in passes."""
    metric = p.logit_diff(" Mary", " John")
    neurons = [f"L12N{neuron}" for neuron in range(25)]
    with FlopCounter() as one_run:
        model(SENTENCE[0])
    calls: dict[str, Callable[[], Any]] = {
        "patches": lambda: p.activation_patch(
            model, *SENTENCE, metric, sites=neurons, positions=-1, progress=False
        ),
        "attribution": lambda: p.attribution(model, *SENTENCE, metric, progress=False),
    }
    costs: Values = {}
    for name, call in calls.items():
        with torch.no_grad():
            next(model.parameters()).mul_(1)  # the weights count as changed, so tests run again
        for which in ("first", "later"):
            with FlopCounter() as cost:
                call()
            costs[f"{name}_{which}"] = cost.total / one_run.total
    return costs


def sentences(values: Values) -> Iterator[tuple[str, str]]:
    """Yield pages, and sentences with the measured numbers that these pages must contain."""
    small = values["cabinet"]
    sizes = f"{small['n']} of {small['n_sites']:,} sites (heads and neurons, each at one position)"
    for page in ("README.md", "docs/index.md"):
        yield page, f"# {sizes} keep {small['kept']:.0%}"
    yield "README.md", f"this one keeps {_percent(small['other'])} on two others"
    yield (
        "docs/how_do_i.md",
        f"This circuit keeps {_percent(small['kept'])} of the difference on its own pair, and "
        f"{_percent(small['other'])} on the two others",
    )
    agreement, capital = values["agreement"], values["capital"]
    yield (
        "README.md",
        f"On SmolLM2-135M, `explain` costs about {agreement['passes']:.0f} forward passes of the "
        "pair of prompts",
    )
    passes = [values[name]["passes"] for name in OF_SMOLLM2]
    yield (
        "docs/pictures.md",
        f"each took {min(passes):.0f} to {max(passes):.0f} forward passes of the pair",
    )
    kept = "{n} of {n_sites:,} sites keep {0} of the difference"
    for name in ("agreement", "capital", "indirect_object", "gender"):
        found = values[name]
        yield "docs/pictures.md", kept.format(_percent(found["kept"]), **found)
    redundant = agreement["sites"]["L0N870@2"]
    yield (
        "docs/pictures.md",
        f"its share is {_dot(redundant['share'])}, but its effect is {_dot(redundant['denoise'])} "
        f"when denoised and {_dot(redundant['noise'])} when noised",
    )
    yield (
        "docs/circuits.md",
        f"a share of {_dot(redundant['share'])}, an effect of {_dot(redundant['denoise'])} when "
        f"denoised, and an effect of {_dot(redundant['noise'])} when noised",
    )
    yield (
        "docs/patching.md",
        f"Denoising it restores {_dot(redundant['denoise'])} times the whole difference",
    )
    head = capital["sites"]["L23H4@8"]
    yield (
        "docs/pictures.md",
        f"attends to *France* (share {_dot(head['share'])}; effect {_dot(head['denoise'])} when "
        f"denoised, {_dot(head['noise'])} when noised)",
    )
    moved = values["indirect_object"]["sites"]
    for site, sentence in (
        ("L17H4@10", "L17H4 acts only through its pattern (share {})"),
        ("L23H3@14", "L23H3 only through its value (share {})"),
    ):
        yield "docs/pictures.md", sentence.format(_dot(moved[site]["share"]))
    yield (
        "docs/pictures.md",
        f"all other sites together keep {_percent(values['gender']['others'])}",
    )
    false = values["arithmetic"]
    yield (
        "docs/pictures.md",
        f"The circuit's {false['n']} sites keep {_percent(false['kept'])} of the difference, and "
        f"all other sites together keep {_percent(false['others'])}",
    )
    rows = {
        "France": "The capital of France / Germany is: Paris, Berlin",
        "keys": "The keys / key to the old cabinet: are, is",
    }
    for name, row in rows.items():
        found = values[name]
        counts = " | ".join(f"{found[key]:,}" for key in ("magnitude", "signed", "n"))
        yield "docs/circuits.md", f"| {row} | {counts} | {_dot(found['others'])} |"
    one, four = values["keys"], values["nouns"]
    yield (
        "docs/circuits.md",
        f"the circuit for France and Germany has a faithfulness of "
        f"{_dot(values['France']['elsewhere'][0])}",
    )
    yield (
        "docs/circuits.md",
        "has a faithfulness of {}, {} or {}; a circuit for four other nouns ({} sites) has {}, {} "
        "and {}".format(*map(_dot, one["elsewhere"]), four["n"], *map(_dot, four["elsewhere"])),
    )
    yield (
        "docs/circuits.md",
        f"`discover` costs {one['passes']:.0f} forward passes for one pair, and "
        f"{four['passes']:.0f} for four pairs",
    )
    calls = values["calls"]
    yield (
        "docs/patching.md",
        f"a sweep of 25 neurons at one position costs about {calls['patches_first']:.0f} forward "
        f"passes the first time, and {calls['patches_later']:.0f} in later calls. Attribution "
        f"with its default budget costs {calls['attribution_first']:.0f} forward passes the first "
        f"time, and {calls['attribution_later']:.0f} in later calls",
    )


def _dot(value: float) -> str:
    """Write a number with two decimals and without the zero before the point."""
    return f"{value:.2f}".replace("-", "−").replace("0.", ".", 1)


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %".replace("-", "−")


def pattern(sentence: str) -> re.Pattern[str]:
    """Return a pattern for this sentence with any numbers and line breaks; groups are numbers."""
    pieces = [r"\s+".join(map(re.escape, piece.split(" "))) for piece in _NUMBER.split(sentence)]
    return re.compile(f"({_NUMBER.pattern})".join(pieces))


def update(text: str, sentence: str) -> str:
    """Put the numbers of a sentence into the places in a page's text where it has other numbers.

    Raises:
        ValueError: the page has no such sentence, or several.
    """
    places = list(pattern(sentence).finditer(text))
    if len(places) != 1:
        raise ValueError(f"{len(places)} places in the page fit {sentence!r}; expected one")
    (place,) = places
    for group, number in reversed(list(enumerate(_NUMBER.findall(sentence), start=1))):
        text = text[: place.start(group)] + number + text[place.end(group) :]
    return text


def write(values: Values) -> None:
    """Store measured numbers next to those that were not measured now, and update all pages."""
    stored = json.loads(STORED.read_text("utf-8")) if STORED.exists() else {}
    stored |= _rounded(values)
    STORED.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
    for name, sentence in sentences(stored):
        page = ROOT / name
        page.write_text(update(page.read_text("utf-8"), sentence), "utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return value if isinstance(value, int) else round(float(value), 4)
