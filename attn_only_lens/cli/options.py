"""Groups of options that several commands share, and functions that parse option values."""

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_only_lens.arguments import NAME
from attn_only_lens.cli.common import CHOICES, MODEL, OUTPUT, PROMPTS, option, require_options
from attn_only_lens.errors import AttnOnlyLensError
from attn_only_lens.models.names import require_model

if TYPE_CHECKING:
    from attn_only_lens.engine.metrics import Metric as MetricOfLogits
    from attn_only_lens.engine.prompts import Prompts

_COLUMNS = ("clean", "corrupted", "answer", "wrong")
_SHIPPED = "small-english"

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
    Path, typer.Argument(help="output folder; a model that was saved there is replaced")
]
OutPage = Annotated[Path, option("output file (.html); it works offline", OUTPUT)]
Top = Annotated[int, option("number of rows to print", OUTPUT)]
Metric = Annotated[str, option(f"one of {', '.join(CHOICES['metric'])}", PROMPTS)]
Faithfulness = Annotated[float, option("share of the effect that the circuit must keep")]
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
    device: Annotated[str, option("cpu, cuda or mps", MODEL)] = "cpu"

    def __post_init__(self) -> None:
        require_options(dtype=self.dtype, device=self.device)
        require_model(self.model)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SourceOptions):
    """Options for a model, including --hooked, which loads MODEL as a HookedTransformer."""

    hooked: Annotated[
        bool, option("load MODEL as a HookedTransformer (transformer-lens 3.9)", MODEL, "--hooked")
    ] = False

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
            "small-english has transcoders of this name",
            MODEL,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        path = self.transcoders
        if path not in (None, _SHIPPED) and not Path(path).exists():
            raise AttnOnlyLensError(f"--transcoders: there is no file or folder {path}")

    def with_neuron_heads(self) -> Any:
        """Load the model, attach its transcoders, and make its neurons visible as heads."""
        if self.transcoders is None:
            return super().with_neuron_heads()
        from attn_only_lens import transcoders
        from attn_only_lens.heads.host import transcoder_reasons
        from attn_only_lens.pretrained import small_english_transcoders

        shipped = self.transcoders == _SHIPPED
        weights = small_english_transcoders() if shipped else transcoders.load(self.transcoders)
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
        answers = self.require_answers()
        if tokens:
            answers = [list(map(_one_token, texts)) for texts in answers]
        by_role = [texts if len(set(texts)) > 1 else texts[0] for texts in answers]
        from attn_only_lens import patching

        built: MetricOfLogits = getattr(patching, self.metric)(*by_role)
        return built

    def require_answers(self) -> list[Any]:
        """Return the answers; raise an error unless the metric takes these."""
        name = self.metric
        require_options(metric=name)
        n_answers = {"logit_diff": 2, "probability": 1, "log_probability": 1}.get(name, 0)
        answers: list[Any] = [texts for texts in (self.answer, self.wrong) if texts]
        if len(answers) != n_answers or (n_answers and not self.answer):
            wanted = ("neither --answer nor --wrong", "--answer alone", "--answer and --wrong")
            others = ", ".join(metric for metric in CHOICES["metric"] if metric != name)
            raise AttnOnlyLensError(
                f"--metric {name} takes {wanted[n_answers]}; other metrics: {others}"
            )
        return answers


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
            ".csv or .jsonl",
            PROMPTS,
        ),
    ] = None
    token_ids: TokenIds = False
    chat: Chat = False

    def run(
        self, options: ModelOptions, *, with_corrupted: bool = False
    ) -> tuple[Any, Any, Any, "MetricOfLogits"]:
        """Load the model; return it with the clean and the corrupted prompts, and the metric."""
        texts = self.require_complete(with_corrupted)
        metric = replace(self, **texts).build_metric(self.token_ids)
        both = [
            parse_prompts(texts[name], f"--{name}", self.token_ids) if name in texts else None
            for name in _COLUMNS[:2]
        ]
        model = options.with_neuron_heads()
        clean, corrupted = (as_chat(model, prompts, self.chat) for prompts in both)
        return model, clean, corrupted, metric

    def require_complete(self, with_corrupted: bool = False) -> dict[str, Any]:
        """Return the texts by their column; raise an error if one is missing or an answer wrong."""
        texts: dict[str, Any] = {x: getattr(self, x) for x in _COLUMNS if getattr(self, x)}
        if self.pairs is not None:
            if texts:
                raise AttnOnlyLensError(f"got --pairs and --{next(iter(texts))}; expected only one")
            texts = _read_pairs(self.pairs)
        if missing := [name for name in _COLUMNS[: 1 + with_corrupted] if name not in texts]:
            raise AttnOnlyLensError(f"expected --{' and --'.join(missing)}, or a file for --pairs")
        replace(self, **texts).require_answers()
        return texts


def _read_pairs(path: Path) -> dict[str, list[str]]:
    """Return the columns of a file with a pair of prompts in each row."""
    import pandas as pd

    try:
        if path.suffix == ".csv":
            frame = pd.read_csv(path, dtype=str, na_values=[""], keep_default_na=False)
        else:
            frame = pd.read_json(path, lines=True, dtype=False)
    except (OSError, ValueError) as error:
        raise AttnOnlyLensError(f"--pairs: {path} cannot be read: {error}") from error
    frame = frame[[name for name in _COLUMNS if name in frame]]
    if "clean" not in frame or frame.isna().any(axis=None):
        raise AttnOnlyLensError(
            f"--pairs: {path} has columns {', '.join(map(str, frame)) or 'with other names'}; "
            f"expected a text in each row for clean, and for some of {', '.join(_COLUMNS[1:])}"
        )
    return {str(name): frame[name].astype(str).tolist() for name in frame}


def load_model(model: str, dtype: str | None, device: str, hooked: bool = False) -> Any:
    """Load a model by name or from a folder, and print a one-line description to stderr."""
    from attn_only_lens.models.load import load

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


def parse_prompts(texts: list[str], option: str, tokens: bool) -> "Prompts":
    """Return the texts unchanged or, if `tokens` is True, parse them into a tensor of tokens."""
    if not tokens:
        return texts
    rows = [parse_numbers(text, option) for text in texts]
    if len({len(row) for row in rows}) > 1:
        raise AttnOnlyLensError(
            f"{option}: got prompts with {[len(row) for row in rows]} tokens; expected the same "
            "number in each prompt, because token prompts cannot be padded"
        )
    import torch

    return torch.tensor(rows, device="cpu")


def as_chat(model: Any, prompts: Any, chat: bool) -> Any:
    """If `chat` is True, apply the chat template and return tokens; else return the prompts."""
    if not chat or prompts is None:
        return prompts
    from attn_only_lens.engine.prompts import chat_tokens

    if not isinstance(prompts, list):
        raise AttnOnlyLensError("got --chat and token IDs; expected texts, which are messages")
    return chat_tokens(model, prompts)


def parse_names(text: str, option: str = "--names", words: str = "") -> list[str]:
    """Split names at commas; raise an error for words that are no names, before a model is loaded.

    The model itself reports all other names that it does not have.
    """
    names = [name.strip() for name in text.split(",")]
    bad = [name for name in names if not NAME.fullmatch(name.partition("@")[0])]
    if not all(name[:1] in ("L", "l") for name in bad):
        raise AttnOnlyLensError(
            f"{option}: got {', '.join(bad) or repr(text)}; expected {words}names, which are upper "
            "case: L5H3,L5N1234@13"
        )
    return names


def parse_numbers(
    text: str,
    option: str,
    expected: str = "whole numbers, separated by commas",
    least: int | None = None,
) -> list[int]:
    """Parse whole numbers, separated by commas, of at least `least`."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or (least is not None and min(numbers) < least):
        bound = "" if least is None else f" of {least} or more"
        raise AttnOnlyLensError(f"{option}: got {text!r}; expected {expected}{bound}")
    return numbers


def _one_token(text: str) -> int:
    numbers = parse_numbers(text, "an answer")
    if len(numbers) != 1:
        raise AttnOnlyLensError(f"got {text!r} for an answer; expected one token ID")
    return numbers[0]
