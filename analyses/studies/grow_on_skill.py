"""Grow SmolLM2 in neurons and train it on one narrow skill: what moves, and what is forgotten?

SmolLM2-135M-Instruct (`make smollm2`) gets `neurons` new neurons in each of its 30 layers. Growth
does not change its function. Then it learns a made-up agreement rule: after "Match:", the next word
is "yes" if both nouns have the same number, and "no" if not.

    Match: The keys near the cabinets     yes
    Match: The key near the cabinets      no

The rule needs both nouns, so no single number feature solves it. Nouns of the evaluation do not
occur in training. The same sentences without "Match:" measure an old skill: is or are.

    frozen          grown; only entries that belong to new neurons are trained
    free            grown; all entries are trained
    not grown       the model as it was; all entries are trained
    frozen, slower  like frozen, at a quarter of its rate, for more steps
    free, faster    like free, at the rate of "frozen, slower"

"Grow, Don't Overwrite" (arXiv 2603.08647) compares such arms, but does not analyse circuits.
We chose neurons and not layers because growth in neurons leaves old and new parts side by side in
every layer, so that labels can be drawn at random within a layer. A step costs the same for as many
new weights in layers: one thread spends almost all of it on old weights.

All arms of a seed see the same prompts in the same order. The loss is the cross-entropy of the
next word over the whole vocabulary. AdamW without weight decay warms up and decays linearly. The
last two arms were added later: the first three cannot say whether freezing or its higher rate makes
the model forget. They have one rate, and differ only in freezing and in the number of steps. Arms
are compared at the first check at which they are right in 90 % of the prompts (at the end, if there
is none).

Measures, by model. Effects are those of `circuit_measures.py` (attribution, with exact patches of
the strongest sites); shares, joint costs and their nulls are those of `pressure_measures.py`. Texts
are paragraphs of Python's documentation (`pydoc_data.topics`); the record has their hash.

    removed    the model without its new neurons (their output weights are set to zero)
    only new   the new neurons as trained, with all old entries as they were before training
    random     as many old neurons removed in each layer, drawn at random
    leak       the probability of "yes" or "no" after a sentence without "Match:"

Predictions, written before the runs. Figures are means over seeds. The first ten are about the
first three arms; they were written before any run, and seeds 0 and 1 of these arms were run then.

1. Every arm learns: on unseen nouns, the answer is right for 90 % or more at the end.
2. With old parts frozen, learning is slower: after the first 40 steps, the loss of the skill is
   higher than with old parts free.
3. Freezing old parts halves forgetting: the rise of the loss on texts is less than half of the rise
   with old parts free.
4. If old parts are free, growth does not protect: the rise of the loss on texts in "free" is within
   25 % of the rise in "not grown".
5. If old parts are free, they learn the skill: without its new neurons, "free" is right for 90 % or
   more, and the share of new neurons in the effects of neurons stays below parity.
6. If old parts are frozen, the share of new neurons in the effects of neurons is at least three
   times parity, and patching them together costs more than patching random directions.
7. Frozen old parts keep their circuits: the overlap of heads' effects on is/are before and after,
   divided by the ceiling, is .9 or more in "frozen", and below that in "free".
8. In "free", old circuits move like those of "not grown": this ratio is within .1.
9. The same heads move in "free" and "not grown": of the 10 heads that moved most in the one, at
   least 5 are among the 10 of the other.
10. All arms leak: the probability of "yes" or "no" without "Match:" is above .5, as no training
    prompt lacks "Match:".

Predictions that were added before seeds 2 to 4, and before the last two arms. "Clear" means that
Student's 95 % interval of the difference over seeds excludes zero.

11. With five seeds, predictions 3, 6 and 7 fail, as with two, and the other seven hold.
12. Frozen forgets more than free: the difference of the rises of the loss on texts is clear.
13. In "frozen", patching new neurons together costs more than random directions, and heads' effects
    on the skill overlap with those of "free" more than by chance: both differences are clear.
14. In "frozen", the overlap of heads' effects on is/are before and after is not clearly above
    chance.
15. "Frozen, slower" learns: right for 90 % or more at the end.
16. The rate matters: at the first check with 90 % right, the loss on texts has risen in "frozen,
    slower" by less than half of the rise in "frozen".
17. A lower rate does not make up for free's: at this check, the rise in "frozen, slower" is still
    larger than in "free", clearly.
18. At one rate, freezing protects: at this check (or at the end, where 90 % is never reached), the
    rise in "frozen, slower" is smaller than in "free, faster", clearly.
19. "Frozen, slower" leaks (above .5 without "Match:"), and is/are falls below 75 % (of the
    two words).
20. In "frozen, slower", patching new neurons together costs more than .5 and more than random
    directions, and their share of neurons' effects is below parity.
21. At a higher rate, new neurons take part without freezing: in "free, faster", their share of
    neurons' effects on the skill is at least ten times as large as in "free", and below parity.

What we knew: a pilot (data seed 100, the same held-out nouns, no text, no circuits) chose the
skill, rates and steps. Free, at a rate of 1e-4: 92 % right after 45 steps. Frozen: at 1e-3, nothing
learned after 15 steps; at 4e-3, 92 % after 70 and 98 % after 80 steps. A simpler rule (the
subject's number) took 20 steps free, and 40 steps frozen. A step took 1.4 to 1.6 s of processor
time in both arms. When predictions 11 to 21 were written, we knew seeds 0 and 1 of the first three
arms, and a second pilot (frozen, seed 100, the skill only): at 1e-3, 46 % right after 45 steps,
92 % after 75 and 100 % after 90; at 5e-4, 48 % after 30 steps (a loss of 2.9, against .8 at 1e-3).

    python -m analyses.studies.grow_on_skill --smollm2 out/smollm2 --out analyses/results

With `--earlier FOLDER`, arms and seeds that the tables in this folder have are not run again.
"""

import hashlib
import io
import json
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeAlias

import numpy as np
import pandas as pd
import tokenizers
import torch
import torch.nn.functional as F
import transformers
import typer
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from analyses.studies import pressure_measures
from analyses.studies.grow_on_skill_report import figure, page
from analyses.tools import circuit_measures
from analyses.tools.benching import machine
from analyses.tools.circuit_measures import (
    Look,
    Question,
    is_neuron,
    overlap_by_chance,
    shares_in_common,
)
from analyses.tools.options import Out, Runs, Seeds, Smoke, SmolLM2
from analyses.tools.resumable import claim
from analyses.tools.study_files import as_stored, keep
from attn_only_lens import expose_neuron_heads, grow, load
from attn_only_lens import patching as p
from attn_only_lens.growth import read_provenance
from attn_only_lens.storage import write_text
from attn_only_lens.tasks.words import PEOPLE, THINGS

Tables: TypeAlias = dict[str, pd.DataFrame]

PARTS = ("", "heads", "curves", "removed")
MARKER = "Match: "
PREPOSITIONS = ("near", "behind", "beside", "above", "below")
SYMBOLS = frozenset("=[]{}<>|")  # of code
DIGITS = "%.4g"
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 14,
    "hidden_size": 28,
    "intermediate_size": 31,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Arm:
    """How a model is trained, and what is measured; a run can resume with more seeds."""

    rate: float
    steps: int = 80
    frozen: bool = False
    seeds: int = field(default=5, repr=False)
    circuit_seeds: int = field(default=5, repr=False)  # also without some neurons


@dataclass(frozen=True)
class Study:
    """What determines the result."""

    neurons: int = 128
    arms: dict[str, Arm] = field(
        default_factory=lambda: {
            "frozen": Arm(4e-3, frozen=True),
            "free": Arm(1e-4),
            "not grown": Arm(1e-4),
            "frozen, slower": Arm(1e-3, steps=160, frozen=True, circuit_seeds=0),
            "free, faster": Arm(1e-3, circuit_seeds=0),
        }
    )
    warmup: int = 10
    decay: int = 20
    check_every: int = 20
    rows: int = 16
    held_out_nouns: int = 15
    prompts: int = 16  # pairs to patch
    asked: int = 48  # prompts for accuracy
    texts: tuple[int, int] = (16, 40)  # how many, and how many tokens of each
    draws: int = 2


SMOKE = Study(
    neurons=5,
    arms={
        "frozen": Arm(1e-2, steps=4, frozen=True),
        "free": Arm(1e-2, steps=4),
        "not grown": Arm(1e-2, steps=4),
        "frozen, slower": Arm(5e-3, steps=6, frozen=True),
        "free, faster": Arm(5e-3, steps=4, circuit_seeds=0),
    },
    warmup=1,
    decay=1,
    check_every=2,
    rows=3,
    prompts=4,
    asked=8,
    texts=(3, 7),
)


@dataclass(frozen=True)
class Sentence:
    """A sentence with two nouns, and whether each is plural."""

    subject: str
    preposition: str
    attractor: str
    plural: bool
    other_plural: bool

    def text(self, *, flipped: bool = False, marked: bool = True) -> str:
        """Return the prompt; `flipped` changes the number of the subject."""
        subject = self.subject + "s" * (self.plural != flipped)
        attractor = self.attractor + "s" * self.other_plural
        return f"{MARKER * marked}The {subject} {self.preposition} the {attractor}"


def nouns(study: Study) -> tuple[list[str], list[str]]:
    """Return the nouns of training, and those of the evaluation."""
    every = [*THINGS, *PEOPLE]
    Random(0).shuffle(every)
    return every[: -study.held_out_nouns], every[-study.held_out_nouns :]


def sentences(words: list[str], n: int, random: Random) -> list[Sentence]:
    """Return distinct sentences; the four combinations of numbers are equally frequent."""
    made: dict[Sentence, None] = {}
    while len(made) < n:
        subject, attractor = random.sample(words, 2)
        numbers = divmod(len(made) % 4, 2)
        made[Sentence(subject, random.choice(PREPOSITIONS), attractor, *map(bool, numbers))] = None
    return list(made)


@dataclass(frozen=True, eq=False)
class Prompts:
    """The prompts of a tokenizer."""

    study: Study
    tokenizer: Any

    def tokens(self, texts: list[str]) -> Int[Tensor, "prompt pos"]:
        """Return tokens, equally many for each prompt; no BOS."""
        return torch.tensor(self.tokenizer(texts, add_special_tokens=False)["input_ids"])

    def answer(self, text: str) -> int:
        """Return the single token of an answer."""
        (token,) = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return int(token)

    def skill(self, some: list[Sentence]) -> Question:
        """Return the skill; the corrupted prompt has the other answer."""
        return self._question(some, (" no", " yes"), [s.plural == s.other_plural for s in some])

    def agreement(self, some: list[Sentence]) -> Question:
        """Return the old skill: is or are."""
        return self._question(some, (" is", " are"), [s.plural for s in some], marked=False)

    def _question(
        self, some: list[Sentence], words: tuple[str, str], second: list[bool], marked: bool = True
    ) -> Question:
        clean, corrupted = (
            self.tokens([s.text(flipped=flipped, marked=marked) for s in some])
            for flipped in (False, True)
        )
        answers = torch.tensor([self.answer(word) for word in words])
        right = torch.tensor(second).long()
        return Question(
            clean, corrupted, torch.ones_like(clean), answers[right], answers[1 - right]
        )

    @cached_property
    def held_out(self) -> list[list[Sentence]]:
        """Sentences with unseen nouns: to patch, to patch for the ceiling, and for accuracy."""
        study = self.study
        sizes = (study.prompts, study.prompts, study.asked)
        made = sentences(nouns(study)[1], sum(sizes), Random(1))
        stops = np.cumsum(sizes)
        return [made[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]

    @cached_property
    def texts(self) -> Int[Tensor, "text pos"]:
        """The first tokens of paragraphs of Python's documentation."""
        n, length = self.study.texts
        return torch.stack([self.tokens([text])[0, :length] for text in paragraphs(n)])


def paragraphs(n: int) -> list[str]:
    """Return n paragraphs of English, spread over all topics of Python's documentation."""
    every = [
        " ".join(paragraph.split())
        for topic in sorted(topics)
        for paragraph in topics[topic].split("\n\n")
        if paragraph[:1].isalpha() and not SYMBOLS & set(paragraph)
    ]
    long = list(dict.fromkeys(text for text in every if len(text) >= 300))
    return long[:: len(long) // n][:n]


# Training


def is_new(parameter: str, tensor: Tensor, n_old: int) -> Tensor | None:
    """Return which entries of a parameter belong to new neurons; None if none can."""
    if "mlp.gate_proj" in parameter or "mlp.up_proj" in parameter:
        return (torch.arange(tensor.shape[0]) >= n_old)[:, None].expand_as(tensor)
    if "mlp.down_proj" in parameter:
        return (torch.arange(tensor.shape[1]) >= n_old).expand_as(tensor)
    return None


def freeze_old(model: Any, n_old: int) -> None:
    """Let gradients reach only the entries of new neurons."""
    for name, parameter in model.named_parameters():
        mask = is_new(name, parameter, n_old)
        parameter.requires_grad_(mask is not None)
        if mask is not None:
            parameter.register_hook(lambda gradient, mask=mask: gradient * mask)


def rate(study: Study, arm: Arm, step: int) -> float:
    """Return the learning rate of a step."""
    rises, falls = (step + 1) / study.warmup, (arm.steps - step) / study.decay
    return arm.rate * min(1.0, rises, falls)


def last_logits(model: Any, tokens: Tensor) -> Float[Tensor, "prompt d_vocab"]:
    """Return the logits after the last token."""
    logits: Tensor = model(tokens, logits_to_keep=1, use_cache=False).logits[:, -1]
    return logits


@torch.no_grad()
def judged(model: Any, prompts: Prompts) -> dict[str, float]:
    """Return the figures of a transformers model: the skill, agreement, texts."""
    asked = prompts.held_out[2]
    skill, agreement = prompts.skill(asked), prompts.agreement(asked)
    figures: dict[str, float] = {}
    for name, question in (("skill", skill), ("agreement", agreement)):
        logits = last_logits(model, question.clean)
        rows = torch.arange(len(logits))
        margin = logits[rows, question.right] - logits[rows, question.wrong]
        figures |= {
            f"{name}_loss": F.cross_entropy(logits, question.right).item(),
            f"{name}_right": (logits.argmax(-1) == question.right).double().mean().item(),
            f"{name}_two_way": (margin > 0).double().mean().item(),
        }
    answers = [prompts.answer(word) for word in (" yes", " no")]
    figures["leak"] = logits.softmax(-1)[:, answers].sum(-1).mean().item()
    texts = prompts.texts
    logits = model(texts[:, :-1], use_cache=False).logits
    figures["text_loss"] = F.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten()).item()
    return figures


@dataclass(frozen=True, eq=False)
class SeedRuns:
    """The models of one seed; a finished model is loaded from its folder."""

    study: Study
    seed: int
    base: Path
    folder: Path
    prompts: Prompts

    @cached_property
    def grown(self) -> Path:
        """The folder of the grown model before training."""
        folder = self.folder / f"{self.seed}-grown"
        if not (folder / "provenance.json").exists():
            bridge = load(self.base)
            grown = grow(bridge, d_mlp=bridge.cfg.d_mlp + self.study.neurons, seed=self.seed)
            grown.save_pretrained(folder)
        return folder

    @cached_property
    def new(self) -> dict[str, None]:
        """The names of new neurons; a dictionary, which is ordered and fast to look up in."""
        return dict.fromkeys(read_provenance(self.grown).new_neurons)

    def path(self, what: str) -> Path:
        """Return the path of an arm, or of tables, of this seed."""
        return self.folder / f"{self.seed}-{what.replace(',', '').replace(' ', '-')}"

    def start(self, arm: str) -> Path:
        """Return the folder of an arm's model before training."""
        return self.base if arm == "not grown" else self.grown

    def trained(self, arm: str) -> Path:
        """Train an arm, unless it is trained; return its folder, with the curve."""
        folder = self.path(arm)
        if (folder / "curve.csv").exists():  # written last
            return folder
        study, about, model = self.study, self.study.arms[arm], transformer(self.start(arm))
        if about.frozen:
            freeze_old(model, transformer_config(self.base).intermediate_size)
        parameters = [x for x in model.parameters() if x.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        words, rows, cpu = nouns(study)[0], [], 0.0
        bar = tqdm(range(about.steps), desc=f"{arm}, seed {self.seed}", mininterval=10)
        for step in bar:
            if step % study.check_every == 0:
                rows.append({"step": step, "cpu_seconds": cpu} | judged(model, self.prompts))
            started = time.process_time()
            random = Random(f"{self.seed} {step}")
            question = self.prompts.skill(sentences(words, study.rows, random))
            optimizer.param_groups[0]["lr"] = rate(study, about, step)
            loss = F.cross_entropy(last_logits(model, question.clean), question.right)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            cpu += time.process_time() - started
        rows.append({"step": about.steps, "cpu_seconds": cpu} | judged(model, self.prompts))
        model.save_pretrained(folder)
        self.prompts.tokenizer.save_pretrained(folder)
        write_text(folder / "curve.csv", pd.DataFrame(rows).to_csv(index=False))
        return folder


def transformer(folder: Path) -> Any:
    """Return the transformers model of a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def transformer_config(folder: Path) -> Any:
    """Return the configuration of a folder."""
    return transformers.AutoConfig.from_pretrained(folder)


# Measures


@torch.no_grad()
def without_neurons(runs: SeedRuns, arm: str) -> Iterator[dict[str, Any]]:
    """Yield the figures of a grown arm without its new neurons, with only these, and nulls."""
    n_old = transformer_config(runs.base).intermediate_size
    model, before = transformer(runs.trained(arm)), transformer(runs.grown)
    pairs = [
        (name, parameter, dict(before.named_parameters())[name])
        for name, parameter in model.named_parameters()
    ]
    trained = {name: parameter.clone() for name, parameter, _ in pairs}
    changes = []
    for name, parameter, start in pairs:
        new = is_new(name, parameter, n_old)
        old = torch.ones_like(parameter, dtype=torch.bool) if new is None else ~new
        changes.append((parameter - start)[old].abs().max().item())
    about = {"old_change": max(changes)}

    def down() -> Iterator[tuple[str, Tensor]]:
        return ((n, x) for n, x in model.named_parameters() if "mlp.down_proj" in n)

    for _, weight in down():
        weight[:, n_old:] = 0
    yield {"what": "removed"} | about | judged(model, runs.prompts)
    for draw in range(runs.study.draws):
        generator = torch.Generator().manual_seed(draw)
        for name, weight in down():
            weight.copy_(trained[name])
            weight[:, torch.randperm(n_old, generator=generator)[: runs.study.neurons]] = 0
        yield {"what": "random"} | about | judged(model, runs.prompts)
    for name, parameter, start in pairs:
        new = is_new(name, parameter, n_old)
        value = start if new is None else torch.where(new, trained[name], start)
        parameter.copy_(value)
    yield {"what": "only new"} | about | judged(model, runs.prompts)


def looked(model: Any, questions: Mapping[str, Question], new: Collection[str] = ()) -> Look:
    """Return the effects of all heads and neurons."""
    with expose_neuron_heads(model) as exposed:
        names, parts = circuit_measures.parts_of(exposed, questions, new, p.attribution)
    return Look(names, parts, {}, {}, {})


def effects(look: Look, task: str, names: Collection[str]) -> Float[np.ndarray, "1 component"]:
    """Return the mean effects of some components, in the order of `names`."""
    index_of = {name: i for i, name in enumerate(look.names)}
    means: Float[np.ndarray, " component"] = look.parts[task].effects.mean(1)
    return means[[index_of[name] for name in names]][None]


def overlaps(before: Look, now: Look, task: str, other: str = "") -> dict[str, float]:
    """Return the overlap of effects in two models, for heads and for neurons of both.

    Args:
        before: the first model.
        now: the second model.
        task: a task of the first model.
        other: a task of the second model, by default the same.
    """
    both = set(before.names) & set(now.names)
    shares = {}
    for kind in ("heads", "neurons"):
        some = [n for n in before.names if n in both and ("N" in n) == (kind == "neurons")]
        first, second = effects(before, task, some), effects(now, other or task, some)
        shares[f"overlap_{kind}"] = float(shares_in_common(first, second)[0])
        shares[f"overlap_{kind}_chance"] = overlap_by_chance(some, first[0], second[0])
    return shares


def of_heads(look: Look, task: str, **about: Any) -> pd.DataFrame:
    """Return a row for each attention head: its effect, as a part of the fall of the metric."""
    part = look.parts[task]
    heads = [name for name, neuron in zip(look.names, is_neuron(look.names), strict=True)
             if not neuron]  # fmt: skip
    shares = effects(look, task, heads)[0] / (part.clean - part.nothing).mean()
    return pd.DataFrame({**about, "task": task, "head": heads, "effect": shares})


@cache
def before_training(base: Path, prompts: Prompts) -> Look:
    """Return the effects on is/are before training, on two sets of prompts."""
    questions = (prompts.agreement(some) for some in prompts.held_out[:2])
    return looked(load(base), dict(zip(("agreement", "other"), questions, strict=True)))


def base_tables(runs: SeedRuns) -> Tables:
    """Return the effects before training, the ceiling, and how exact growth is."""
    look = before_training(runs.base, runs.prompts)
    first, _, asked = runs.prompts.held_out
    tokens = torch.cat([runs.prompts.skill(some).clean for some in (first, asked)])
    with torch.no_grad():
        logits, grown = (load(x)(tokens, prepend_bos=False) for x in (runs.base, runs.grown))
    about = {"arm": "before", "seed": runs.seed}
    row = about | {
        "largest_difference": (grown - logits).abs().max().item(),
        "largest_logit": logits.abs().max().item(),
        **overlaps(look, look, "agreement", "other"),
    }
    heads = [of_heads(look, task, **about) for task in look.parts]
    return {"": pd.DataFrame([row]), "heads": pd.concat(heads)}


def circuit_tables(runs: SeedRuns, arm: str) -> Tables:
    """Return the effects of a trained arm's parts, and what new parts cost."""
    first, before = runs.prompts.held_out[0], before_training(runs.base, runs.prompts)
    questions = {"skill": runs.prompts.skill(first), "agreement": runs.prompts.agreement(first)}
    row: dict[str, Any] = {"arm": arm, "seed": runs.seed}
    new: Collection[str] = () if arm == "not grown" else runs.new
    model = load(runs.trained(arm))
    look = looked(model, questions, new)
    heads = [of_heads(look, task, **row) for task in look.parts]
    row |= overlaps(before, look, "agreement")
    reuse = overlaps(before, look, "agreement", "skill")
    row |= {f"reuse_{name}": value for name, value in reuse.items()}
    if new:
        costs = pressure_measures.random_costs(model, questions, look, new, runs.study.draws)
        for task in questions:
            measures = pressure_measures.new_parts(look, task, new) | costs[task]
            row |= {f"{task}_{name}": value for name, value in measures.items()}
    return {"": pd.DataFrame([row]), "heads": pd.concat(heads)}


def removed_table(runs: SeedRuns, arm: str) -> Tables:
    """Return the figures of a grown arm without some of its neurons."""
    rows = [{"arm": arm, "seed": runs.seed} | row for row in without_neurons(runs, arm)]
    return {"removed": pd.DataFrame(rows)}


def kept(path: Path, make: Callable[..., Tables], *about: Any) -> Tables:
    """Return the tables of a file; make and write them if it does not exist."""
    if not path.exists():
        texts = {name: frame.to_csv(index=False) for name, frame in make(*about).items()}
        write_text(path, json.dumps(texts))
    texts = json.loads(path.read_text("utf-8"))
    return {name: pd.read_csv(io.StringIO(text)) for name, text in texts.items()}


def measured(runs: SeedRuns, arm: str, ready: Collection[tuple[str, int]]) -> Iterator[Tables]:
    """Yield the tables of one arm and seed; train and measure what the folder lacks.

    Args:
        runs: of the seed.
        arm: an arm of the study, or "before" (training).
        ready: arms and seeds that earlier tables have.
    """
    if (arm, runs.seed) in ready:
        return
    if arm == "before":
        yield kept(runs.path("before-circuits.json"), base_tables, runs)
        return
    how = runs.study.arms[arm]
    if runs.seed >= how.seeds:
        return
    curve = pd.read_csv(runs.trained(arm) / "curve.csv").assign(arm=arm, seed=runs.seed)
    yield {"curves": curve}
    if runs.seed < how.circuit_seeds:
        yield kept(runs.path(f"{arm}-circuits.json"), circuit_tables, runs, arm)
        if arm != "not grown":
            yield kept(runs.path(f"{arm}-removed.json"), removed_table, runs, arm)


def earlier_tables(folder: Path) -> tuple[list[Tables], dict[str, Any]]:
    """Return the tables of an earlier run, and what the page says about it."""
    name = Path(__file__).stem
    tables = {part: pd.read_csv(folder / f"{name}{'_' * bool(part)}{part}.csv") for part in PARTS}
    record = json.loads((folder / f"{name}.run.json").read_text("utf-8"))
    seeds = {
        arm: sorted(map(int, some["seed"].unique()))
        for arm, some in tables["curves"].groupby("arm", sort=False)
    }
    return [tables], {"seeds": seeds, "cpu_seconds": record["settings"]["cpu_seconds"]}


def tiny(folder: Path) -> Path:
    """Save a LLaMA with random weights, and a tokenizer with the words of the prompts."""
    every = sentences([*THINGS, *PEOPLE], 2000, Random(0))
    prompts = " ".join(s.text(flipped=flipped) for s in every for flipped in (False, True))
    words = dict.fromkeys(["<unk>", "<bos>", "<eos>", *f"yes no is are {prompts}".split()])
    vocabulary = {word: i for i, word in enumerate(words)}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(vocabulary), **TINY)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    return folder


def main(
    smollm2: SmolLM2 = Path("out/smollm2"),
    out: Out = Path("out/grow-on-skill"),
    runs_dir: Runs = Path("out/grow-on-skill-runs"),
    n_seeds: Seeds = 5,
    earlier: Annotated[
        Path | None, typer.Option(help="folder with tables of an earlier run, to be joined")
    ] = None,
    smoke: Smoke = False,
) -> None:
    """Train, measure, print; write the page, tables and figure (`study_files.py`)."""
    warnings.filterwarnings("ignore", ".*deprecated", DeprecationWarning)
    started, cpu = time.perf_counter(), time.process_time()
    study, session = SMOKE if smoke else Study(), runs_dir / f"cpu-{time.time_ns()}.txt"
    parts, joined = ([], {}) if earlier is None else earlier_tables(earlier)
    tables = [x[name] for x in parts for name in ("", "curves")]
    ready = {pair for table in tables for pair in zip(table["arm"], table["seed"], strict=True)}
    with TemporaryDirectory() as scratch:
        base = tiny(Path(scratch)) if smoke or smollm2 is None else smollm2
        claim(runs_dir / "study.txt", f"{study!r}\n")
        prompts = Prompts(study, transformers.AutoTokenizer.from_pretrained(base))
        seeds = [SeedRuns(study, seed, base, runs_dir, prompts) for seed in range(n_seeds)]
        for arm, runs in product(["before", *study.arms], seeds):
            parts += measured(runs, arm, ready)
            write_text(session, f"{time.process_time() - cpu:.0f}\n")
    seconds = sum(int(path.read_text("utf-8")) for path in runs_dir.glob("cpu-*.txt"))
    made = {name: pd.concat([x[name] for x in parts if name in x]) for name in PARTS}
    frames = as_stored(made, DIGITS)
    about = {
        "study": asdict(study),
        "n_seeds": n_seeds,
        "texts_sha256": hashlib.sha256("\n".join(paragraphs(study.texts[0])).encode()).hexdigest(),
        "machine": machine("cpu"),
        "cpu_seconds": seconds,
        "earlier": joined,
    }
    text = page(frames, about, " --smoke" if smoke else "")
    typer.echo(text)
    settings = {"device": "cpu", "smoke": smoke, **about}
    keep(__file__, out, text, frames, figure(frames), started=started, digits=DIGITS, **settings)


if __name__ == "__main__":
    typer.run(main)
