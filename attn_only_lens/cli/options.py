"""The options that several commands share, and the parsers of their values."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_only_lens.errors import AttnOnlyLensError

if TYPE_CHECKING:
    from attn_only_lens.engine.metrics import Metric as MetricOfLogits
    from attn_only_lens.engine.prompts import Prompts

MODEL = (
    "a Hugging Face name, a folder with a model, or small-english, which ships with this package"
)
_METRICS = ("logit_diff", "probability", "log_probability", "kl", "loss")

Model = Annotated[str, typer.Argument(help=MODEL)]
Hooked = Annotated[
    bool,
    typer.Option("--hooked", help="load MODEL as a HookedTransformer (transformer-lens 3.9)"),
]
OutFolder = Annotated[
    Path, typer.Argument(help="output folder; a model that was saved there is replaced")
]
OutPage = Annotated[Path, typer.Option(help="output file (.html); it works offline")]
Clean = Annotated[list[str], typer.Option(help="a prompt; repeat the option for more prompts")]
Answer = Annotated[str | None, typer.Option(help="the correct answer, one token")]
Wrong = Annotated[str | None, typer.Option(help="the wrong answer, one token, for logit_diff")]
Metric = Annotated[str, typer.Option(help=f"one of {', '.join(_METRICS)}")]
TokenNumbers = Annotated[
    bool, typer.Option("--tokens", help="prompts and answers are token numbers: 3,4,113")
]
Top = Annotated[int, typer.Option(help="number of rows to print")]
Chat = Annotated[
    bool, typer.Option("--chat", help="prompts are messages: apply the tokenizer's chat template")
]
_DTYPES = "float32, float64, bfloat16 or float16; default: the dtype of a saved model, else float32"
Dtype = Annotated[str | None, typer.Option(help=_DTYPES)]
Device = Annotated[str, typer.Option(help="cpu, cuda or mps")]


def parse_metric(
    metric: str, answer: str | None, wrong: str | None, tokens: bool
) -> "MetricOfLogits":
    """Return the metric with that name and those answers."""
    from attn_only_lens import patching

    needs = {"logit_diff": 2, "probability": 1, "log_probability": 1}.get(metric, 0)
    if metric not in _METRICS:
        raise AttnOnlyLensError(f"got --metric {metric}; expected one of {', '.join(_METRICS)}")
    options_given = [option for option in (answer, wrong) if option is not None]
    if len(options_given) != needs or (needs and answer is None):
        wanted = ("neither --answer nor --wrong", "--answer alone", "--answer and --wrong")[needs]
        raise AttnOnlyLensError(f"--metric {metric} takes {wanted}")
    answers: list[Any] = (
        [_parse_answer(answer) for answer in options_given] if tokens else options_given
    )
    made: MetricOfLogits = getattr(patching, metric)(*answers)
    return made


def _parse_answer(text: str) -> int:
    numbers = parse_numbers(text, "an answer")
    if len(numbers) != 1:
        raise AttnOnlyLensError(f"got {text!r} for an answer; expected one token number")
    return numbers[0]


def parse_prompts(texts: list[str], option: str, tokens: bool) -> "Prompts":
    """Return prompts as texts, or as a tensor of tokens."""
    if not tokens:
        return texts
    import torch

    rows = [parse_numbers(text, option) for text in texts]
    if len({len(row) for row in rows}) > 1:
        raise AttnOnlyLensError(
            f"{option}: got prompts of {[len(r) for r in rows]} tokens; expected "
            "as many in each, since tokens have no padding here"
        )
    return torch.tensor(rows, device="cpu")


def as_chat(model: Any, prompts: Any, chat: bool) -> "Prompts":
    """Return the prompts; with --chat, the tokens of the messages."""
    if not chat:
        return prompts
    from attn_only_lens.engine.prompts import chat_tokens

    if not isinstance(prompts, list):
        raise AttnOnlyLensError("got --chat and tokens; expected texts, which are messages")
    return chat_tokens(model, prompts)


def parse_names(text: str) -> list[str]:
    """Split names at commas."""
    return [name.strip() for name in text.split(",")]


def parse_numbers(text: str, option: str) -> list[int]:
    """Parse whole numbers, separated by commas."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise AttnOnlyLensError(
            f"{option}: got {text!r}; expected whole numbers with commas between"
        ) from None
