"""What all commands share: the application, how errors are shown, what a model is.

What commands about one task share: the model, its prompts, a metric, where to write.
"""

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import typer

from attn_only_lens import patching as p
from attn_only_lens.errors import AttnOnlyLensError
from attn_only_lens.models.checkpoint import checkpoint
from attn_only_lens.models.checkpoint.manifest import is_saved
from attn_only_lens.models.expose import expose_neuron_heads
from attn_only_lens.models.source_folder import device_named, dtype_named, load_source
from attn_only_lens.tl import HookedTransformer, no_remote_code, quiet

__all__ = [
    "METRICS",
    "MODEL",
    "app",
    "clear_errors",
    "given_prompts",
    "metric_of",
    "numbers",
    "patchable",
    "require_writable",
    "source_model",
]

app = typer.Typer(
    help="See the MLP neurons of a TransformerLens model as attention heads.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

MODEL = "a TransformerLens name, or a folder with config.json and model.safetensors"


def source_model(model: str, dtype: str, device: str) -> HookedTransformer:
    """A source model by TransformerLens name, or from a folder."""
    device_named(device)
    with redirect_stdout(sys.stderr):  # TransformerLens prints its progress
        if Path(model).exists():
            return load_source(Path(model), dtype=dtype, device=device)
        if Path(model).is_absolute() or model.startswith((".", "~")):
            raise AttnOnlyLensError(f"there is no folder {model}; expected {MODEL}")
        try:
            with no_remote_code():
                return HookedTransformer.from_pretrained(
                    model,
                    dtype=str(dtype_named(dtype)).removeprefix("torch."),
                    device=device,
                    trust_remote_code=False,
                )
        except (OSError, ValueError, RuntimeError) as error:
            # What the hub raises offline derives from these; its own text runs over many lines.
            reason = textwrap.shorten(str(error).strip().splitlines()[0], 200, placeholder=" …")
            reason = reason.partition(" Valid official model names")[0]  # hundreds
            if "trust_remote_code" in str(error):
                reason = "it needs code of its own, which is never run here."
            raise AttnOnlyLensError(
                f"could not load {model!r}: {reason} Expected {MODEL}; offline, only a folder "
                "will do"
            ) from error


@contextmanager
def clear_errors() -> Iterator[None]:
    """Errors of ours as one message and exit code 2, without a traceback."""
    with quiet():
        try:
            yield
        except (AttnOnlyLensError, OSError) as error:  # OSError: a path, a full disk, …
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


METRICS = ("logit_diff", "probability", "log_probability", "kl", "loss")


def patchable(model: str, dtype: str, device: str) -> Any:
    """A model with neuron-heads: a saved one, or a source model with its neurons exposed."""
    if is_saved(model):
        return checkpoint.load(model, device=device)
    source = source_model(model, dtype, device)
    expose_neuron_heads(source)
    return source


def require_writable(out: Path, endings: tuple[str, ...], top: int = 1) -> None:
    """Before hours of work, and not after."""
    if out.suffix not in endings:
        named = " or ".join(endings)
        raise AttnOnlyLensError(f"got --out {out}; expected a name that ends in {named}")
    if not out.absolute().parent.is_dir():
        raise AttnOnlyLensError(f"got --out {out}; there is no folder {out.parent}")
    if top < 1:
        raise AttnOnlyLensError(f"got --top {top}; expected 1 or more")


def metric_of(metric: str, answer: str | None, wrong: str | None, tokens: bool) -> p.Metric:
    """The metric of that name, about those answers."""
    needs = {"logit_diff": 2, "probability": 1, "log_probability": 1}.get(metric, 0)
    if metric not in METRICS:
        raise AttnOnlyLensError(f"got --metric {metric}; expected one of {', '.join(METRICS)}")
    given = [each for each in (answer, wrong) if each is not None]
    if len(given) != needs or (needs and answer is None):
        wanted = ("neither --answer nor --wrong", "--answer alone", "--answer and --wrong")[needs]
        raise AttnOnlyLensError(f"--metric {metric} takes {wanted}")
    answers: list[Any] = [_one(each) for each in given] if tokens else given
    made: p.Metric = getattr(p, metric)(*answers)
    return made


def _one(text: str) -> int:
    found = numbers(text, "an answer")
    if len(found) != 1:
        raise AttnOnlyLensError(f"got {text!r} for an answer; expected one token number")
    return found[0]


def given_prompts(texts: list[str], option: str, tokens: bool) -> list[str] | torch.Tensor:
    """Prompts as patching takes them."""
    if not tokens:
        return texts
    rows = [numbers(text, option) for text in texts]
    if len({len(row) for row in rows}) > 1:
        raise AttnOnlyLensError(
            f"{option}: got prompts of {[len(r) for r in rows]} tokens; expected "
            "as many in each, since tokens have no padding here"
        )
    return torch.tensor(rows, device="cpu")


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers with commas between."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise AttnOnlyLensError(
            f"{option}: got {text!r}; expected whole numbers with commas between"
        ) from None
