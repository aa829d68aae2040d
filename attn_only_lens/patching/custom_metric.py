"""Any function of the logits as a metric: read whole, called once a site, and not trusted."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import Logits
from attn_only_lens.errors import PatchingError
from attn_only_lens.patching.answers import run_shape
from attn_only_lens.patching.bound import BoundMetric, Metric
from attn_only_lens.patching.prompts import PromptPair

__all__ = ["AnyMetric", "as_metric", "custom"]

AnyMetric: TypeAlias = Metric | Callable[[Logits], Tensor | float]
_PROBLEM = "this metric is not a function of the logits to one number"


def custom(
    fn: Callable[[Logits], Tensor | float], name: str | None = None, version: str | None = None
) -> Metric:
    """Any function of the logits of a whole run.

    It is called once a site, reads all logits, and so costs more than the metrics above. For
    attribution it must return a tensor that a gradient passes through.

    Args:
        fn: from logits [batch, pos, d_vocab] to one number.
        name: what results call it; by default the name of `fn`.
        version: identifies `fn` when a sweep is resumed, instead of its code, closure, defaults
            and the globals that it reads. Needed where these cannot be identified (`resume` says
            so); give another version whenever `fn` changes.

    Returns:
        The metric.

    Raises:
        PatchingError: `fn` cannot be called; when measured: it gives no single finite number,
            another one for the same logits, or changes them.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.custom(lambda logits: logits[:, -1].max(), name="largest logit").name
        'largest logit'
    """
    if not callable(fn):
        raise PatchingError(
            [f"got a {type(fn).__name__}; expected a metric, or a function of the logits"], _PROBLEM
        )
    label = str(name or getattr(fn, "__name__", type(fn).__name__))

    def compute(logits: Float[Tensor, "site batch pos d_vocab"]) -> Float[Tensor, "site"]:
        return torch.stack([_number(fn(each), label, logits) for each in logits])

    def bound(model: Any, pair: PromptPair, reference: Logits | None) -> BoundMetric:
        return BoundMetric(label, None, None, run_shape(model, pair), compute)

    return Metric(label, bound, version=version)


def _number(value: Any, name: str, like: Tensor) -> Tensor:
    if isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point():
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    got = (
        f"a {value.dtype} tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    )
    raise PatchingError(
        [f"{name}: got {got} from it; expected one number, such as a mean over the batch"], _PROBLEM
    )


def as_metric(metric: AnyMetric) -> Metric:
    """A metric as it is, and a plain function of the logits as `custom` makes one of it."""
    return metric if isinstance(metric, Metric) else custom(metric)
