"""What commands about one task share: the model, its prompts, a metric, where to write."""

from pathlib import Path
from typing import Any

import torch

from attn_only_lens import checkpoint
from attn_only_lens import patching as p
from attn_only_lens.cli.common import source_model
from attn_only_lens.errors import AttnOnlyLensError
from attn_only_lens.expose import expose_neuron_heads
from attn_only_lens.manifest import is_saved

__all__ = ["METRICS", "given_prompts", "metric_of", "numbers", "patchable", "require_writable"]

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
