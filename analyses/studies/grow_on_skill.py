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
the model forget. They have one rate, and differ only in freezing and in the number of steps.

Effects are those of `circuit_measures.py` (attribution, with exact patches of the strongest sites).
Costs are parts of the fall of the metric if all parts are patched:

    new_share    the sum of |effects| of new neurons over that of all neurons
    parity       the number of new neurons over that of all: the share that random labels would have
    single       the sum of the effects of new neurons, each patched alone
    joint        the cost of patching all new neurons together; joint_old: all old neurons
    directions   the cost of patching as many random orthogonal directions of a layer's neurons
    labels       the cost of patching as many random neurons of each layer
    removed      the model without its new neurons (their output weights are set to zero)
    only new     the new neurons as trained, with all old entries as they were before training
    random       as many old neurons removed in each layer, drawn at random
    leak         the probability of "yes" or "no" after a sentence without "Match:"
"""

import io
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from analyses import study as frame
from analyses.tools import circuit_measures as measures
from analyses.tools.circuit_measures import Look, Question, is_neuron
from analyses.tools.study_files import t_interval
from analyses.tools.training import claim
from attn_only_lens import expose_neuron_heads, grow, load
from attn_only_lens import patching as p
from attn_only_lens.heads import HeadName
from attn_only_lens.storage import write_text
from attn_only_lens.tasks.words import PEOPLE, THINGS

Tables: TypeAlias = dict[str, pd.DataFrame]
Seeds: TypeAlias = "pd.Series[float]"  # a figure of each seed

PARTS = ("", "heads", "curves", "removed")
MARKER = "Match: "
PREPOSITIONS = ("near", "behind", "beside", "above", "below")
SYMBOLS = frozenset("=[]{}<>|")  # of code
RIGHT = 0.9  # of the answers: learned
N_HEADS = 10
LINES = ("-", "-", ":", "--", "--")  # the second and third arm nearly coincide
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
    """How a model is trained, and whether its circuits are measured, also without some neurons."""

    rate: float
    steps: int = 80
    frozen: bool = False
    circuits: bool = True


@dataclass(frozen=True)
class Study:
    """What determines the result."""

    neurons: int = 128
    arms: dict[str, Arm] = field(
        default_factory=lambda: {
            "frozen": Arm(4e-3, frozen=True),
            "free": Arm(1e-4),
            "not grown": Arm(1e-4),
            "frozen, slower": Arm(1e-3, steps=160, frozen=True, circuits=False),
            "free, faster": Arm(1e-3, circuits=False),
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
        "frozen, slower": Arm(5e-3, steps=6, frozen=True, circuits=False),
        "free, faster": Arm(5e-3, steps=4, circuits=False),
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
    asked, texts = prompts.held_out[2], prompts.texts
    skill, agreement = prompts.skill(asked), prompts.agreement(asked)
    of_skill, of_agreement = (last_logits(model, question.clean) for question in (skill, agreement))
    rows = torch.arange(len(asked))
    margin = of_agreement[rows, agreement.right] - of_agreement[rows, agreement.wrong]
    answers = [prompts.answer(word) for word in (" yes", " no")]
    of_texts = model(texts[:, :-1], use_cache=False).logits.flatten(0, 1)
    figures = {
        "skill_loss": F.cross_entropy(of_skill, skill.right),
        "skill_right": (of_skill.argmax(-1) == skill.right).double().mean(),
        "agreement_loss": F.cross_entropy(of_agreement, agreement.right),
        "agreement_two_way": (margin > 0).double().mean(),
        "leak": of_agreement.softmax(-1)[:, answers].sum(-1).mean(),
        "text_loss": F.cross_entropy(of_texts, texts[:, 1:].flatten()),
    }
    return {name: figure.item() for name, figure in figures.items()}


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
        return dict.fromkeys(load(self.grown / "provenance.json").new_neurons)

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
        words, rows = nouns(study)[0], []
        bar = tqdm(range(about.steps), desc=f"{arm}, seed {self.seed}", mininterval=10)
        for step in bar:
            if step % study.check_every == 0:
                rows.append({"step": step} | judged(model, self.prompts))
            random = Random(f"{self.seed} {step}")
            question = self.prompts.skill(sentences(words, study.rows, random))
            optimizer.param_groups[0]["lr"] = rate(study, about, step)
            loss = F.cross_entropy(last_logits(model, question.clean), question.right)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rows.append({"step": about.steps} | judged(model, self.prompts))
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

    def down() -> Iterator[tuple[str, Tensor]]:
        return ((n, x) for n, x in model.named_parameters() if "mlp.down_proj" in n)

    for _, weight in down():
        weight[:, n_old:] = 0
    yield {"what": "removed"} | judged(model, runs.prompts)
    for draw in range(runs.study.draws):
        generator = torch.Generator().manual_seed(draw)
        for name, weight in down():
            weight.copy_(trained[name])
            weight[:, torch.randperm(n_old, generator=generator)[: runs.study.neurons]] = 0
        yield {"what": "random"} | judged(model, runs.prompts)
    for name, parameter, start in pairs:
        new = is_new(name, parameter, n_old)
        value = start if new is None else torch.where(new, trained[name], start)
        parameter.copy_(value)
    yield {"what": "only new"} | judged(model, runs.prompts)


def looked(model: Any, questions: Mapping[str, Question], new: Collection[str] = ()) -> Look:
    """Return the effects of all heads and neurons."""
    with expose_neuron_heads(model) as exposed:
        names, parts = measures.parts_of(exposed, questions, new, p.attribution)
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
        shares[f"overlap_{kind}"] = float(measures.shares_in_common(first, second)[0])
        shares[f"overlap_{kind}_chance"] = measures.overlap_by_chance(some, first[0], second[0])
    return shares


def of_heads(look: Look, task: str, **about: Any) -> pd.DataFrame:
    """Return a row for each attention head: its effect, as a part of the sum of |effects|."""
    part, neurons = look.parts[task], is_neuron(look.names)
    heads = [name for name, neuron in zip(look.names, neurons, strict=True) if not neuron]
    shares = effects(look, task, heads)[0] / (part.clean - part.nothing).mean()
    shares /= abs(shares).sum()
    return pd.DataFrame({**about, "task": task, "head": heads, "share": shares})


def of_new(look: Look, task: str, new: Collection[str]) -> dict[str, float]:
    """Return the share of new neurons, single and joint costs, and how often the model is right."""
    part, is_new = look.parts[task], np.isin(look.names, list(new))
    of_neurons, lost = is_neuron(look.names), part.effects.mean(1)
    fall = (part.clean - part.nothing).mean()
    return {
        "right": float((part.clean > 0).mean()),
        "new_share": abs(lost[is_new]).sum() / abs(lost[of_neurons]).sum(),
        "parity": is_new.sum() / of_neurons.sum(),
        "single": lost[is_new].sum() / fall,
        "joint": (part.clean - part.without_new).mean() / fall,
        "joint_old": (part.clean - part.without_old).mean() / fall,
    }


def random_labels(names: tuple[str, ...], new: Collection[str], seed: int) -> list[str]:
    """Return as many parts of each kind and layer as are new there, drawn at random."""
    generator, drawn = np.random.default_rng(seed), list[str]()
    groups: dict[tuple[int, bool], list[str]] = {}
    for name in names:
        groups.setdefault((HeadName.parse(name).layer, "N" in name), []).append(name)
    for group in groups.values():
        drawn += generator.permutation(group)[: sum(name in new for name in group)].tolist()
    return drawn


@torch.no_grad()
def patched_directions(
    exposed: Any, asked: Question, new: Collection[str], seed: int
) -> Float[np.ndarray, "prompt"]:
    """Return the metric with random directions patched, as many in each layer as new neurons."""
    counts: dict[str, int] = {}
    for name in new:
        point = HeadName.parse(name).hook("z", exposed)
        counts[point] = counts.get(point, 0) + 1
    _, cached = exposed.run_with_cache(asked.corrupted, names_filter=list(counts))
    generator = torch.Generator().manual_seed(seed)

    def patch(z: Tensor, hook: Any, corrupted_z: Tensor, basis: Tensor) -> Tensor:
        return z + ((corrupted_z - z).flatten(2) @ basis @ basis.T).view_as(z)

    hooks = []
    for point, count in counts.items():
        drawn = torch.randn(cached[point].flatten(2).shape[2], count, generator=generator)
        basis = torch.linalg.qr(drawn)[0].to(cached[point])
        hooks.append((point, partial(patch, corrupted_z=cached[point], basis=basis)))
    return asked.of_logits(exposed.run_with_hooks(asked.clean, fwd_hooks=hooks))


def random_costs(
    exposed: Any, asked: Question, look: Look, task: str, new: Collection[str], draws: int
) -> dict[str, float]:
    """Return `directions` and `labels`, the means over random draws."""
    part = look.parts[task]
    fall = (part.clean - part.nothing).mean()
    runs = {
        "directions": [patched_directions(exposed, asked, new, seed) for seed in range(draws)],
        "labels": [
            measures.patched(exposed, asked, random_labels(look.names, new, seed))
            for seed in range(draws)
        ],
    }
    return {
        name: float(np.mean([(part.clean - run).mean() for run in some]) / fall)
        for name, some in runs.items()
    }


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
        with expose_neuron_heads(model) as exposed:
            for task, asked in questions.items():
                costs = random_costs(exposed, asked, look, task, new, runs.study.draws)
                figures = of_new(look, task, new) | costs
                row |= {f"{task}_{name}": value for name, value in figures.items()}
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


def measured(runs: SeedRuns) -> Iterator[Tables]:
    """Yield the tables of one seed; train and measure what the folder lacks."""
    yield kept(runs.path("before-circuits.json"), base_tables, runs)
    for arm, how in runs.study.arms.items():
        curve = pd.read_csv(runs.trained(arm) / "curve.csv")
        yield {"curves": curve.assign(arm=arm, seed=runs.seed)}
        if how.circuits:
            yield kept(runs.path(f"{arm}-circuits.json"), circuit_tables, runs, arm)
            if arm != "not grown":
                yield kept(runs.path(f"{arm}-removed.json"), removed_table, runs, arm)


def with_heads(circuits: pd.DataFrame, heads: pd.DataFrame) -> Tables:
    """Return the circuits with figures of heads by seed, and heads' mean shares on is/are by arm.

    `strongest_share` is the share on is/are of the head that was strongest before training; `same`
    is the overlap of heads' effects on the skill with those in "free".
    """
    shares = heads.pivot(index="head", columns=["arm", "seed", "task"], values="share")
    shares = shares.sort_index(axis=1)
    by_arm = heads.query("task == 'agreement'").groupby(["head", "arm"], sort=False)["share"]
    means = by_arm.mean().unstack("arm").reset_index()
    strongest = means.set_index("head")["before"].abs().idxmax()
    rows = []
    for row in circuits.to_dict("records"):
        now = shares[row["arm"], row["seed"]]
        row |= {"strongest": strongest, "strongest_share": now.loc[strongest, "agreement"]}
        if "skill" in now:
            both = now["skill"].to_numpy(), shares["free", row["seed"], "skill"].to_numpy()
            row["same"] = float(measures.shares_in_common(*(x[None] for x in both))[0])
            row["same_chance"] = measures.overlap_by_chance(list(shares.index), *both)
        rows.append(row)
    return {"": pd.DataFrame(rows), "heads": means}


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


def run(setting: frame.Setting) -> Tables:
    """Train and measure; parts that the folder of runs has are not made again."""
    warnings.filterwarnings("ignore", ".*deprecated", DeprecationWarning)
    study, folder = SMOKE if setting.smoke else Study(), setting.runs
    claim(folder / "study.txt", f"{study!r}\n")
    base = tiny(folder / "tiny") if setting.smoke else setting.smollm2 or Path("out/smollm2")
    prompts = Prompts(study, transformers.AutoTokenizer.from_pretrained(base))
    parts = [
        tables
        for seed in range(setting.n_seeds)
        for tables in measured(SeedRuns(study, seed, base, folder, prompts))
    ]
    made = {part: pd.concat([x[part] for x in parts if part in x]) for part in PARTS}
    return made | with_heads(made[""], made["heads"])


# The page


@dataclass(frozen=True)
class Results:
    """Figures of the stored tables, by seed."""

    tables: frame.Tables

    @property
    def arms(self) -> list[str]:
        """The arms."""
        return list(Study().arms)

    @property
    def measured(self) -> list[str]:
        """The trained arms whose circuits were measured."""
        return [arm for arm in self.arms if arm in set(self.tables[""]["arm"])]

    def of_curve(self, arm: str, column: str, step: int | None = None) -> Seeds:
        """Return a figure at a step, or at the end of training."""
        rows = self.tables["curves"].query("arm == @arm")
        rows = rows[rows["step"] == (rows["step"].max() if step is None else step)]
        return rows.set_index("seed")[column]

    def rise(self, arm: str) -> Seeds:
        """Return the change of the loss on texts from the start to the end."""
        return self.of_curve(arm, "text_loss") - self.of_curve(arm, "text_loss", 0)

    def learned(self, arm: str) -> pd.DataFrame:
        """Return the curve's row at the first check with enough right answers (or the last).

        `rise` is the rise of the loss on texts, and `reached` whether there were enough.
        """
        curves = self.tables["curves"].query("arm == @arm")
        reached = curves["skill_right"] >= RIGHT
        rise = curves["text_loss"] - curves.groupby("seed")["text_loss"].transform("first")
        last = curves["step"] == curves["step"].max()
        return curves.assign(reached=reached, rise=rise)[reached | last].groupby("seed").first()

    def forgot_more(self, more: str, less: str) -> Seeds:
        """Return the difference of two arms' rises on texts, when the skill is learned."""
        return self.learned(more)["rise"] - self.learned(less)["rise"]

    def circuit(self, arm: str, column: str) -> Seeds:
        """Return a measure of circuits."""
        rows = self.tables[""]
        return rows[rows["arm"] == arm].set_index("seed")[column]

    def kept(self, arm: str, column: str = "overlap_heads") -> Seeds:
        """Return an overlap of effects with those before training, relative to the ceiling."""
        kind = "neurons" if "neurons" in column else "heads"
        return self.circuit(arm, column) / self.circuit("before", f"overlap_{kind}").mean()

    def without(self, arm: str, what: str, column: str) -> Seeds:
        """Return a figure of a grown arm without some neurons; the mean over draws."""
        removed = self.tables["removed"]
        rows = removed[(removed["arm"] == arm) & (removed["what"] == what)]
        return rows.groupby("seed")[column].mean()

    def most_moved(self, arm: str) -> set[str]:
        """Return the heads whose share on is/are moved most, in the mean over seeds."""
        heads = self.tables["heads"].set_index("head")
        return set((heads[arm] - heads["before"]).abs().nlargest(N_HEADS).index)


def clear(difference: Seeds) -> bool:
    """Return whether the interval of a difference is above zero."""
    return t_interval(difference.dropna())[1] > 0


def verdicts(r: Results) -> dict[int, bool]:
    """Return whether each prediction held, of those that the measures can test."""
    first, middle = r.measured, int(r.tables["curves"].query("arm == 'frozen'")["step"].max()) // 2
    rises = {arm: r.rise(arm).mean() for arm in first}
    then = {arm: r.learned(arm)["rise"] for arm in r.arms}
    half = {arm: r.of_curve(arm, "skill_loss", middle).mean() for arm in ("frozen", "free")}
    share, parity, joint, null = (
        r.circuit("frozen", f"skill_{x}") for x in ("new_share", "parity", "joint", "directions")
    )
    free_share, free_parity = (
        r.circuit("free", f"skill_{x}").mean() for x in ("new_share", "parity")
    )
    removed = r.without("free", "removed", "skill_right").mean()
    heads = {arm: r.kept(arm) for arm in first}
    same = r.circuit("frozen", "same") - r.circuit("frozen", "same_chance")
    slower = {x: r.of_curve("frozen, slower", x).mean() for x in ("leak", "agreement_two_way")}
    held = {
        1: min(r.of_curve(arm, "skill_right").mean() for arm in first) >= RIGHT,
        2: half["frozen"] > half["free"],
        3: rises["frozen"] < rises["free"] / 2,
        4: abs(rises["free"] / rises["not grown"] - 1) <= 0.25,
        5: removed >= RIGHT and free_share < free_parity,
        6: share.mean() >= 3 * parity.mean() and joint.mean() > null.mean(),
        7: heads["frozen"].mean() >= 0.9 > heads["free"].mean(),
        8: abs((heads["free"] - heads["not grown"]).mean()) <= 0.1,
        9: len(r.most_moved("free") & r.most_moved("not grown")) >= 5,
        10: min(r.of_curve(arm, "leak").mean() for arm in first) > 0.5,
    }
    return held | {
        11: {number for number, x in held.items() if not x} == {3, 6, 7},
        12: clear(r.rise("frozen") - r.rise("free")),
        13: clear(joint - null) and clear(same),
        14: not clear(heads["frozen"] - r.kept("frozen", "overlap_heads_chance")),
        15: r.of_curve("frozen, slower", "skill_right").mean() >= RIGHT,
        16: then["frozen, slower"].mean() < then["frozen"].mean() / 2,
        17: clear(then["frozen, slower"] - then["free"]),
        18: clear(then["free, faster"] - then["frozen, slower"]),
        19: slower["leak"] > 0.5 and slower["agreement_two_way"] < 0.75,
    }


def figure(r: Results) -> Figure:
    """Draw learning and forgetting by step, and forgetting when the skill is learned."""
    picture = Figure(figsize=(11, 3.4), layout="constrained")
    panels = picture.subplots(1, 3)
    for number, (arm, curves) in enumerate(r.tables["curves"].groupby("arm", sort=False)):
        color, rises = (
            f"C{number}",
            curves["text_loss"] - r.of_curve(str(arm), "text_loss", 0).mean(),
        )
        for panel, values in zip(panels, (curves["skill_right"], rises), strict=False):
            by = values.groupby(curves["step"]).agg(["min", "mean", "max"])
            panel.plot(by["mean"], ls=LINES[number], color=color, marker=".", label=arm)
            panel.fill_between(by.index, by["min"], by["max"], color=color, alpha=0.15, lw=0)
        then = r.learned(str(arm))["rise"]
        mean, low, high = t_interval(then)
        panels[2].plot([number] * len(then), then, ".", color=color, alpha=0.6)
        panels[2].errorbar(number + 0.2, mean, [[mean - low], [high - mean]], fmt="o", color=color)
    panels[2].set_xticks(range(len(r.arms)), r.arms, rotation=25, ha="right")
    panels[0].set(xlabel="step", ylabel="skill: right on unseen nouns")
    panels[1].set(xlabel="step", ylabel="rise of the loss on texts, nats")
    panels[2].set(ylabel="rise at the first check with 90 % right")
    panels[0].legend()
    return picture


def facts(tables: frame.Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    results = Results(tables)
    leaks = [results.of_curve(arm, "leak").mean() for arm in results.arms]
    return {
        **{"r": results, "held": verdicts(results), "study": Study()},
        "least_leak": min(leaks),
    }


STUDY = frame.Study(run, lambda tables: {"": figure(Results(tables))}, facts, n_seeds=5)
