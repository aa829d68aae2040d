"""Groups of options that several commands share, and functions that parse option values."""

import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from attn_only_lens.arguments import DEVICE, NAME, SHARE, ending_reasons
from attn_only_lens.cli.common import (
    CHOICES,
    MODEL,
    OUTPUT,
    PROBLEM,
    PROMPTS,
    option,
    output_file,
    output_model,
)
from attn_only_lens.errors import AttnOnlyLensError, InputError
from attn_only_lens.models.names import model_reasons
from attn_only_lens.versions import hooked_transformer_reasons

if TYPE_CHECKING:
    from attn_only_lens.engine.contrast import Contrast
    from attn_only_lens.engine.metrics import Metric as MetricOfLogits
    from attn_only_lens.engine.prompts import Prompts

_COLUMNS = ("clean", "corrupted", "answer", "wrong")
_SHIPPED = "small-english", "small-english-cross-layer"  # transcoders
_NAME_AND_POSITION = re.compile(rf"{NAME.pattern}(@-?\d+)?")

Model = Annotated[
    str,
    typer.Argument(
        help="a Hugging Face name, a folder with a model, or small-english, which ships with this "
        "package"
    ),
]
Dtype = Annotated[
    str | None,
    option(
        f"one of {', '.join(CHOICES['dtype'])}; default: the dtype of a saved model, else float32",
        MODEL,
    ),
]
OutFolder = Annotated[
    Path,
    typer.Argument(help="output folder; a model that was saved there is replaced"),
    output_model,
]
OutPage = Annotated[
    Path, option("output file (.html); it works offline", OUTPUT), output_file(".html")
]
Top = Annotated[int, option("number of rows to print", OUTPUT)]
Json = Annotated[
    bool, option("print one JSON object, which docs/json.schema.json describes", OUTPUT, "--json")
]
Metric = Annotated[str, option(f"one of {', '.join(CHOICES['metric'])}", PROMPTS)]
Faithfulness = Annotated[float, option("share of the effect that the circuit must keep"), SHARE]
Chat = Annotated[
    bool, option("prompts are messages: apply the tokenizer's chat template", PROMPTS, "--chat")
]
TokenIds = Annotated[
    bool, option("prompts and answers are token IDs: 3,4,113", PROMPTS, "--token-ids")
]


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Options for a model's name, dtype and device."""

    model: Model
    dtype: Dtype = None
    device: Annotated[str, option("cpu, cuda or mps", MODEL), DEVICE] = "cpu"

    def reasons(self) -> list[str]:
        """Return every reason why no model can be loaded."""
        return model_reasons(self.model)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SourceOptions):
    """Options for a model, including --hooked, which loads MODEL as a HookedTransformer."""

    hooked: Annotated[
        bool, option("load MODEL as a HookedTransformer (transformer-lens 3.9)", MODEL, "--hooked")
    ] = False

    def reasons(self) -> list[str]:
        """Return every reason why no model can be loaded."""
        reasons = super().reasons()
        return reasons + hooked_transformer_reasons("--hooked") if self.hooked else reasons

    def load(self) -> Any:
        """Load the model, and print a one-line description."""
        return load_model(self.model, self.dtype, self.device, self.hooked)

    def with_neuron_heads(self) -> Any:
        """Load the model; make its neurons visible as attention heads unless they already are."""
        from attn_only_lens.heads import has_neuron_heads
        from attn_only_lens.models.expose import expose_neuron_heads

        loaded = self.load()
        if not has_neuron_heads(loaded):
            expose_neuron_heads(loaded)
        return loaded


@dataclass(frozen=True, kw_only=True)
class HeadOptions(ModelOptions):
    """Options for a model, including --transcoders, which attaches transcoders to it."""

    transcoders: Annotated[
        str | None,
        option(
            "a file or folder with transcoders, which replace MLPs: their features become heads; "
            "small-english has transcoders of this name, and small-english-cross-layer",
            MODEL,
        ),
    ] = None

    def reasons(self) -> list[str]:
        """Return every reason why no model with these transcoders can be loaded."""
        reasons, path = super().reasons(), self.transcoders
        if path not in (None, *_SHIPPED) and not Path(path).exists():
            reasons.append(f"--transcoders: there is no file or folder {path}")
        return reasons

    def with_neuron_heads(self) -> Any:
        """Load the model, attach its transcoders, and make its neurons visible as heads."""
        if self.transcoders is None:
            return super().with_neuron_heads()
        from attn_only_lens import transcoders
        from attn_only_lens.heads.host import transcoder_reasons

        weights = transcoders.load(self.transcoders)
        loaded = self.load()
        if transcoder_reasons(loaded):
            raise AttnOnlyLensError(
                f"got --transcoders {self.transcoders}, but {self.model} was saved with "
                "transcoders; expected no --transcoders"
            )
        transcoders.attach(loaded, weights)
        return loaded


@dataclass(frozen=True, kw_only=True)
class MetricOptions:
    """Options for a metric, and for the correct and the wrong answer."""

    answer: Annotated[
        list[str] | None,
        option("the correct answer, one token; repeat the option for one per prompt", PROMPTS),
    ] = None
    wrong: Annotated[
        list[str] | None,
        option("the wrong answer, one token, for logit_diff; may be repeated", PROMPTS),
    ] = None
    metric: Metric = "logit_diff"

    def build_metric(self, tokens: bool) -> "MetricOfLogits":
        """Build the metric; if `tokens` is True, the answers are token IDs, not strings."""
        answers: list[Any] = [texts for texts in (self.answer, self.wrong) if texts]
        if tokens:
            answers = [parse_answers(texts, "an answer") for texts in answers]
        by_role = [texts if len(set(texts)) > 1 else texts[0] for texts in answers]
        from attn_only_lens import patching

        built: MetricOfLogits = getattr(patching, self.metric)(*by_role)
        return built

    def reasons(self) -> list[str]:
        """Return a list with an error message if the metric takes other answers, otherwise []."""
        return answer_reasons(self.metric, self.answer, self.wrong)


@dataclass(frozen=True, kw_only=True)
class PromptOptions(MetricOptions):
    """Options for pairs of prompts, from the command line or from a file, and for a metric."""

    clean: Annotated[
        list[str] | None, option("a prompt; repeat the option for more prompts", PROMPTS)
    ] = None
    corrupted: Annotated[
        list[str] | None,
        option("a prompt to compare with, for each --clean; same number of tokens", PROMPTS),
    ] = None
    pairs: Annotated[
        Path | None,
        option(
            "instead of --clean, --corrupted, --answer and --wrong: a file with these columns, "
            ".csv or .jsonl; or .json, from `pairs` or Contrast.save",
            PROMPTS,
        ),
    ] = None
    token_ids: TokenIds = False
    chat: Chat = False
    needed: ClassVar[tuple[str, ...]] = ("clean",)

    @cached_property
    def saved(self) -> "Contrast | None":
        """The contrast in the file of --pairs, if the file is a contrast that was saved."""
        if self.pairs is None or self.pairs.suffix != ".json":
            return None
        from attn_only_lens.engine.contrast import read_contrast

        return read_contrast(self.pairs)

    @property
    def n_pairs(self) -> int:
        """The number of pairs of prompts."""
        return len(self.texts["clean"]) if self.saved is None else len(self.saved)

    @property
    def has_corrupted(self) -> bool:
        """Whether there are corrupted prompts."""
        if self.saved is not None:
            return self.saved.corrupted is not None
        return "corrupted" in self.texts

    @cached_property
    def texts(self) -> dict[str, Any]:
        """The texts by their column, from the command line or from the file."""
        texts = {name: getattr(self, name) for name in _COLUMNS if getattr(self, name)}
        if self.pairs is None:
            return texts
        if texts:
            raise InputError([f"got --pairs and --{next(iter(texts))}; expected only one"], PROBLEM)
        return _read_pairs(self.pairs)

    def reasons(self) -> list[str]:
        """Return every reason to refuse the prompts and answers that needs no model."""
        reasons = list[str]()
        if self.pairs is not None and self.pairs.suffix == ".json":
            return self._reasons_against_saved()
        with InputError.collected(reasons):
            texts = self.texts
        if reasons:
            return reasons
        if missing := [name for name in self.needed if name not in texts]:
            reasons.append(f"expected --{' and --'.join(missing)}, or a file for --pairs")
        reasons += answer_reasons(self.metric, texts.get("answer"), texts.get("wrong"))
        if self.token_ids and self.chat:
            reasons.append("got --chat and --token-ids; expected one: messages are texts")
        n_prompts = len(texts.get("clean", ()))
        for name, column in texts.items():
            are_prompts = name in _COLUMNS[:2]
            reasons += text_reasons(column, f"--{name}", self.token_ids, are_prompts)
            if len(column) != n_prompts and (are_prompts or len(set(column)) > 1):
                reasons.append(
                    f"got {len(column)} --{name} for {n_prompts} --clean; expected "
                    f"{'as many' if are_prompts else 'one, or as many'}"
                )
        return reasons

    def _reasons_against_saved(self) -> list[str]:
        """Return every reason to refuse a saved contrast, or options that it makes useless."""
        given = {name: getattr(self, name) for name in (*_COLUMNS, "token_ids", "chat")}
        given["metric"] = self.metric != "logit_diff"
        reasons = [
            f"got --pairs {self.pairs} and --{name.replace('_', '-')}; expected only one: the file "
            "has prompts and a metric"
            for name, value in given.items()
            if value
        ]
        try:
            if not self.has_corrupted and "corrupted" in self.needed:
                reasons.append(f"{self.pairs} has no corrupted prompts; expected pairs")
        except AttnOnlyLensError as error:
            reasons.append(f"--pairs: {error}")
        return reasons

    def run(self, options: ModelOptions) -> tuple[Any, "Contrast"]:
        """Load the model; return it with the contrast."""
        if self.saved is not None:
            return options.with_neuron_heads(), self.saved
        texts = self.texts
        metric = replace(self, **texts).build_metric(self.token_ids)
        both = [
            parse_prompts(texts[name], f"--{name}", self.token_ids) if name in texts else None
            for name in _COLUMNS[:2]
        ]
        from attn_only_lens.engine.contrast import Contrast

        model = options.with_neuron_heads()
        clean, corrupted = (as_chat(model, prompts, self.chat) for prompts in both)
        return model, Contrast(clean, corrupted, metric)


@dataclass(frozen=True, kw_only=True)
class PairOptions(PromptOptions):
    """The same, for commands that need a corrupted prompt for each clean prompt."""

    needed: ClassVar[tuple[str, ...]] = ("clean", "corrupted")


def answer_reasons(metric: str, answer: object, wrong: object) -> list[str]:
    """Return a list with an error message if a metric takes other answers, otherwise []."""
    n_answers = {"logit_diff": 2, "probability": 1, "log_probability": 1}.get(metric, 0)
    if metric not in CHOICES["metric"] or (n_answers > 0, n_answers > 1) == (
        bool(answer),
        bool(wrong),
    ):
        return []
    wanted = ("neither --answer nor --wrong", "--answer alone", "--answer and --wrong")
    others = ", ".join(name for name in CHOICES["metric"] if name != metric)
    return [f"--metric {metric} takes {wanted[n_answers]}; other metrics: {others}"]


def _read_pairs(path: Path) -> dict[str, list[str]]:
    """Return the columns of a file with a pair of prompts in each row."""
    import pandas as pd

    InputError.raise_if(
        [f"--pairs: {x}" for x in ending_reasons(path, ".csv", ".jsonl", ".json")], PROBLEM
    )
    try:
        if path.suffix == ".csv":
            frame = pd.read_csv(path, dtype=str, na_values=[""], keep_default_na=False)
            if not isinstance(frame.index, pd.RangeIndex):  # pandas made the first column its index
                raise ValueError("rows have more fields than the header")
        else:
            frame = pd.read_json(path, lines=True, dtype=False)
    except (OSError, ValueError) as error:
        raise InputError([f"--pairs: {path} cannot be read: {error}"], PROBLEM) from error
    frame = frame[[name for name in _COLUMNS if name in frame]]
    if "clean" not in frame or frame.isna().any(axis=None):
        reason = (
            f"--pairs: {path} has columns {', '.join(map(str, frame)) or 'with other names'}; "
            f"expected a text in each row for clean, and for some of {', '.join(_COLUMNS[1:])}"
        )
        raise InputError([reason], PROBLEM)
    return {str(name): frame[name].astype(str).tolist() for name in frame}


def load_model(model: str, dtype: str | None, device: str, hooked: bool = False) -> Any:
    """Load a model by name or from a folder, and print a one-line description to stderr."""
    from attn_only_lens._load_model import load_model as load

    with redirect_stdout(sys.stderr):  # TransformerLens prints its progress
        loaded = load(model, dtype=dtype, device=device, hooked=hooked)
    typer.echo(f"{model}: {_describe(loaded)}", err=True)
    return loaded


def _describe(model: Any) -> str:
    from transformer_lens.model_bridge import TransformerBridge

    from attn_only_lens.heads import has_neuron_heads, host_of
    from attn_only_lens.models.two_blocks import AttentionOnlyTransformer

    cfg, parameter = model.cfg, next(model.parameters())
    if isinstance(model, TransformerBridge):
        kind = f"TransformerBridge ({cfg.architecture})"
    elif isinstance(model, AttentionOnlyTransformer):
        kind = "attention-only HookedTransformer"
    else:
        kind = "HookedTransformer"
    n_layers = host_of(model).n_layers if has_neuron_heads(model) else cfg.n_layers
    dtype = str(parameter.dtype).removeprefix("torch.")
    tokenizer, texts = model.tokenizer, "no tokenizer"
    if tokenizer is not None:
        alone = tokenizer("a", add_special_tokens=False)["input_ids"]
        ids = model.to_tokens("a")[0].tolist()
        has_bos = len(ids) > len(alone) and ids[0] == tokenizer.bos_token_id
        texts = f"texts begin with {tokenizer.bos_token}" if has_bos else "texts without BOS"
    return f"{kind}, {n_layers} layers, {dtype}, {parameter.device}, {texts}"


def text_reasons(
    texts: list[str], option: str, tokens: bool, are_prompts: bool = True
) -> list[str]:
    """Return every reason why texts cannot be prompts, or else answers."""
    if "" in texts:
        return [f"{option}: got ''; expected {'token IDs' if tokens else 'a text'}"]
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        return [f"{option}: got a text that is not valid Unicode"]
    reasons = list[str]()
    if tokens:
        with InputError.collected(reasons):
            (_rows if are_prompts else parse_answers)(texts, option)
    return reasons


def parse_prompts(texts: list[str], option: str, tokens: bool) -> "Prompts":
    """Return the texts unchanged or, if `tokens` is True, parse them into a tensor of tokens."""
    if not tokens:
        return texts
    rows = _rows(texts, option)
    import torch

    return torch.tensor(rows, device="cpu")


def _rows(texts: list[str], option: str) -> list[list[int]]:
    rows = [parse_numbers(text, option, least=0) for text in texts]
    if len({len(row) for row in rows}) > 1:
        reason = (
            f"{option}: got prompts with {[len(row) for row in rows]} tokens; expected the same "
            "number in each prompt, because token prompts cannot be padded"
        )
        raise InputError([reason], PROBLEM)
    return rows


def as_chat(model: Any, prompts: Any, chat: bool) -> Any:
    """If `chat` is True, apply the chat template and return tokens; else return the prompts."""
    if not chat or prompts is None:
        return prompts
    from attn_only_lens.engine.prompts import chat_tokens

    if not isinstance(prompts, list):
        raise AttnOnlyLensError("got --chat and token IDs; expected texts, which are messages")
    return chat_tokens(model, prompts)


def parse_names(text: str, option: str = "--names", words: str = "") -> list[str]:
    """Split names at commas; raise an error if a word is no name."""
    names = [name.strip() for name in text.split(",")]
    if bad := [name for name in names if not _NAME_AND_POSITION.fullmatch(name)]:
        reason = (
            f"{option}: got {', '.join(bad) or repr(text)}; expected {words}names, which are upper "
            "case: L5H3,L5N1234@13"
        )
        raise InputError([reason], PROBLEM)
    return names


def parse_numbers(
    text: str,
    option: str,
    expected: str = "",
    least: int | None = None,
) -> list[int]:
    """Parse whole numbers, separated by commas, of at least `least`."""
    bound = "" if least is None else f" of {least} or more"
    expected = expected or f"whole numbers{bound}, separated by commas"
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or (least is not None and min(numbers) < least) or max(numbers) >= 2**63:
        raise InputError([f"{option}: got {text!r}; expected {expected}"], PROBLEM)
    return numbers


def parse_answers(texts: list[str], option: str) -> list[int]:
    """Parse answers that are token IDs, one token each."""
    numbers = [parse_numbers(text, option, least=0) for text in texts]
    if longer := [text for text, row in zip(texts, numbers, strict=True) if len(row) > 1]:
        raise InputError([f"{option}: got {longer[0]!r}; expected one token ID"], PROBLEM)
    return [token for row in numbers for token in row]
