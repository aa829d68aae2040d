"""Measure the numbers that the README and the guide state about examples, and write them there.

`make pictures` measures the numbers, stores them in `measured.json`, and puts them into the
sentences below, where a page has such a sentence with other numbers. A test compares each sentence
with its page. Numbers of studies are not in this file: a test looks them up in the page of results
that their paragraph links to.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from analyses.tools.flops import FlopCounter
from attn_only_lens import (
    Contrast,
    Work,
    circuits,
    explain,
    expose_neuron_heads,
    load,
    tasks,
)
from attn_only_lens import patching as p

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_suffix(".json")
CABINET = Contrast(
    "The keys near the cabinet", "The key near the cabinet", p.logit_diff(" are", " is")
)
OTHER_NOUNS = Contrast(
    ["The dogs near the house", "The boys near the garden"],
    ["The dog near the house", "The boy near the garden"],
    p.logit_diff(" are", " is"),
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
REDUNDANT, LOOKS = ("agreement", "L0N870@2"), ("capital", "L23H4@8")  # sites in the text
ORDERS = "magnitude", "signed"
_NUMBER = re.compile(r"(?<![\w.-])[-−]?(?:\d{1,3}(?:,\d{3})+|\d*\.\d+|\d+)(?!\w)")

Values = dict[str, Any]


def of_small_english() -> Values:
    """Measure the numbers of the README's examples."""
    model = expose_neuron_heads(load("small-english")).model
    pairs = tasks.agreement(model.tokenizer, 16)
    many = explain(model, pairs[:8], held_out=pairs[8:])
    assert many.held_out is not None
    held_out = {"elsewhere": [many.held_out.faithfulness]}
    why = explain(model, CABINET)
    sweep, other = why.attribution, circuits.evaluate(model, why.circuit, OTHER_NOUNS)
    kept = {"value": why.graph.value, "whole": sweep.clean_value - sweep.corrupted_value}
    return {
        "pairs": _sizes(many.circuit) | held_out,
        "cabinet": _sizes(why.circuit) | kept | {"elsewhere": [other.faithfulness]},
    }


def of_smollm2(folder: str, draw: Callable[[str, Any], object] = lambda name, why: None) -> Values:
    """Measure the numbers of SmolLM2-135M, and draw its explanations."""
    model = expose_neuron_heads(load(folder)).model
    model.cfg.model_name = "SmolLM2-135M-Instruct"  # pictures show it, not the folder
    values: Values = {}
    for name, (clean, corrupted, right, wrong) in OF_SMOLLM2.items():
        contrast = Contrast(clean, corrupted, p.logit_diff(right, wrong))
        with FlopCounter() as both_runs:
            model([clean, corrupted])
        with FlopCounter() as cost:
            why = explain(model, contrast, most_nodes=40)
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
    texts = _list(clean), _list(corrupted)
    contrast = Contrast(*texts, p.logit_diff(_list(right), _list(wrong)))
    settings: Values = {"faithfulness": 0.8, "work": Work(progress=False)}
    with FlopCounter() as both_runs:
        model([*texts[0], *texts[1]])
    with FlopCounter() as cost:
        circuit = circuits.discover(model, contrast, **settings)
    orders = {
        order: circuits.discover(model, contrast, search=circuits.Search(order=order), **settings)
        for order in ORDERS
    }
    kept = [
        circuits.evaluate(model, circuit, Contrast(a, b, p.logit_diff(c, d))).faithfulness
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
    neurons = p.Sites([f"L12N{neuron}" for neuron in range(25)], positions=-1)
    quiet = Work(progress=False)
    with FlopCounter() as one_run:
        model(SENTENCE[0])
    calls: dict[str, Callable[[], Any]] = {
        "patches": lambda: p.activation_patch(model, _sentence(), sites=neurons, work=quiet),
        "attribution": lambda: p.attribution(model, _sentence(), work=quiet),
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


def _sentence() -> Contrast:
    """Return a new contrast, which has no recorded runs."""
    return Contrast(*SENTENCE, p.logit_diff(" Mary", " John"))


def sentences(values: Values) -> Iterator[tuple[str, str]]:
    """Yield pages, and sentences with the measured numbers that these pages must contain."""
    for page, lines in {
        "README.md": _of_readme(values),
        "docs/index.md": _pairs(values),
        "docs/how_do_i.md": [
            f"This circuit keeps {_percent(values['cabinet']['kept'])} of the difference on its "
            f"own pair, and {_percent(values['cabinet']['elsewhere'][0])} on the two others"
        ],
        "docs/pictures.md": _of_pictures(values),
        "docs/measured_circuits.md": _of_circuits(values),
        "docs/patching.md": _of_patching(values),
    }.items():
        yield from ((page, line) for line in lines)


def _pairs(values: Values) -> list[str]:
    pairs = values["pairs"]
    return [
        f"# {pairs['n']} of {pairs['n_sites']:,} sites (heads and neurons, each at a role) keep "
        f"{pairs['kept']:.0%} on 8 pairs,",
        f"# and {pairs['elsewhere'][0]:.0%} on 8 others",
    ]


def _of_readme(values: Values) -> list[str]:
    cabinet = values["cabinet"]
    share = cabinet["value"] / cabinet["whole"]
    kept = f"keep {cabinet['value']:.3g} of {cabinet['whole']:.3g} ({share:.0%})"
    return [
        *_pairs(values),
        f"# {cabinet['n']} of {cabinet['n_sites']:,} sites {kept}; found on one pair",
        f"this one keeps {_percent(cabinet['elsewhere'][0])} on two others",
        f"On SmolLM2-135M, `explain` costs about {values['agreement']['passes']:.0f} forward "
        "passes of the pair of prompts",
    ]


def _of_pictures(values: Values) -> list[str]:
    passes = [values[name]["passes"] for name in OF_SMOLLM2]
    kept = {
        name: f"{found['n']} of {found['n_sites']:,} sites keep {_percent(found['kept'])} of the "
        "difference"
        for name, found in values.items()
        if name in OF_SMOLLM2
    }
    neuron, head = (values[name]["sites"][site] for name, site in (REDUNDANT, LOOKS))
    sites = values["indirect_object"]["sites"]
    return [
        f"each took {min(passes):.0f} to {max(passes):.0f} forward passes of the pair",
        f"*are* against *is*: {kept['agreement']}",
        f"its share is {_dot(neuron['share'])}, but its effect is {_dot(neuron['denoise'])} when "
        f"denoised and {_dot(neuron['noise'])} when noised",
        f"*Paris* against *Rome*: {kept['capital']}",
        f"attends to *France* (share {_dot(head['share'])}; effect {_dot(head['denoise'])} when "
        f"denoised, {_dot(head['noise'])} when noised)",
        f'against "… Mary gave …": {kept["indirect_object"]}',
        f"L17H4 acts only through its pattern (share {_dot(sites['L17H4@10']['share'])}), and "
        f"L23H3 only through its value (share {_dot(sites['L23H3@14']['share'])})",
        f"*him* against *her*: {kept['gender']}; all other sites together keep "
        f"{_percent(values['gender']['others'])}",
        f"*five* against *six*: {kept['arithmetic']}, and all other sites together keep "
        f"{_percent(values['arithmetic']['others'])}",
    ]


def _of_circuits(values: Values) -> list[str]:
    neuron = values[REDUNDANT[0]]["sites"][REDUNDANT[1]]
    france, keys, nouns = values["France"], values["keys"], values["nouns"]
    rows = {"France / Germany is: Paris, Berlin": france, "old cabinet: are, is": keys}
    return [
        f"a share of {_dot(neuron['share'])}, an effect of {_dot(neuron['denoise'])} when "
        f"denoised, and an effect of {_dot(neuron['noise'])} when noised",
        *(
            f"{row} | {sizes['magnitude']:,} | {sizes['signed']:,} | {sizes['n']:,} | "
            f"{_dot(sizes['others'])} |"
            for row, sizes in rows.items()
        ),
        f"the circuit for France and Germany has a faithfulness of {_dot(france['elsewhere'][0])}",
        "has a faithfulness of {}, {} or {}; a circuit for four other nouns ({} sites) has {}, {} "
        "and {}".format(*map(_dot, keys["elsewhere"]), nouns["n"], *map(_dot, nouns["elsewhere"])),
        f"`discover` costs {keys['passes']:.0f} forward passes for one pair, and "
        f"{nouns['passes']:.0f} for four pairs",
    ]


def _of_patching(values: Values) -> list[str]:
    calls = {name: f"{passes:.0f}" for name, passes in values["calls"].items()}
    neuron = values[REDUNDANT[0]]["sites"][REDUNDANT[1]]
    return [
        f"Denoising it restores {_dot(neuron['denoise'])} times the whole difference",
        f"a sweep of 25 neurons at one position costs about {calls['patches_first']} forward "
        f"passes the first time, and {calls['patches_later']} in later calls. Attribution with "
        f"its default budget costs {calls['attribution_first']} forward passes the first time, "
        f"and {calls['attribution_later']} in later calls",
    ]


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
