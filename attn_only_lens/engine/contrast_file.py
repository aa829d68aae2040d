"""Contrasts as JSON. A metric of the package is stored as its name and answers; any other by name.

{"format": "attn_only_lens.Contrast", "format_version": 1, "sha256": …,
 "contrast": {"clean": "The keys", "corrupted": "The key", "metric": {"name": …, …}, …}}
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import TypedDict

from attn_only_lens.arguments import as_plain
from attn_only_lens.engine.metrics import (
    AnyMetric,
    as_metric,
    kl,
    log_probability,
    logit_diff,
    loss,
    probability,
    probability_diff,
)
from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.storage import Document
from attn_only_lens.storage.atomic import AnyPath

_METRICS: dict[str, Any] = {
    make.__name__: make
    for make in (logit_diff, probability_diff, probability, log_probability, kl, loss)
}
_Prompts: TypeAlias = str | list[str] | list[int] | list[list[int]]


class _Metric(TypedDict):
    """A metric; `kind` is None if the metric is a user's function."""

    name: str
    kind: str | None
    version: str | None
    answers: list[list[list[int | str]]]


class _Contrast(TypedDict):
    clean: _Prompts
    corrupted: _Prompts | None
    metric: _Metric
    roles: dict[str, int | list[int]]
    mask: list[list[int | float]] | None
    name: str
    dropped: dict[str, int]


class _Body(TypedDict):
    contrast: _Contrast


DOCUMENT = Document("attn_only_lens.Contrast", 1, _Body)


def as_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a contrast's fields to lists, dicts and numbers that JSON can store."""
    metric, mask = as_metric(fields["metric"]), fields["mask"]
    kind = None if metric.make is None else metric.make.__name__
    stored = {"name": metric.name, "kind": kind, "version": metric.version}
    return {
        "clean": as_plain(fields["clean"]),
        "corrupted": as_plain(fields["corrupted"]),
        "metric": stored | {"answers": as_plain(metric.answers)},
        "roles": {role: as_plain(numbers) for role, numbers in fields["roles"].items()},
        "mask": (mask * 1).tolist() if isinstance(mask, Tensor) else mask,  # True becomes 1
        "name": fields["name"],
        "dropped": dict(fields["dropped"]),
    }


def fields_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a contrast's fields, except its metric, from what `as_body` returned."""
    mask = body["mask"] if body["mask"] is None else torch.tensor(body["mask"], device="cpu")
    prompts = {side: _prompts(body[side]) for side in ("clean", "corrupted")}
    return {**body, **prompts, "mask": mask}


def metric_of(stored: Mapping[str, Any], given: AnyMetric | None, path: AnyPath) -> AnyMetric:
    """Return the metric that a file stores, or the given metric if it is the file's.

    Raises:
        InputError: the file's metric is a function and none is given, or another one is given.
        CheckpointError: no metric of the package has this name, these answers and this version.
    """
    name, kind, version = (stored[key] for key in ("name", "kind", "version"))
    if given is not None and as_metric(given).name == name:
        return given
    reason = f"{path} stores only the name of its metric, {name}, a function; expected metric="
    if given is not None:
        reason = (
            f"got the metric {as_metric(given).name}; expected {name}, as in {path}: to ask "
            "another question, use dataclasses.replace(contrast, metric=…)"
        )
    if given is not None or kind is None:
        raise InputError([reason], "this contrast cannot be loaded")
    try:
        metric = _METRICS[kind](*stored["answers"])
    except (KeyError, TypeError):
        metric = None
    is_named = metric is not None and (metric.name == name or not name.startswith(f"{kind}("))
    if metric is None or not is_named or metric.version != version:
        raise CheckpointError(
            f"{path} has the metric {name}, version {version}, which this attn-only-lens does not "
            "have: use the release that wrote the file"
        )
    return replace(metric, name=name)


def _prompts(stored: _Prompts | None) -> Any:
    """Return texts unchanged, and tokens as a tensor, or as a list of rows of unequal lengths."""
    if stored is None or isinstance(stored, str) or any(isinstance(x, str) for x in stored):
        return stored
    lengths = {len(row) for row in stored if isinstance(row, list)}
    rows: Any = stored if len(lengths) > 1 else [stored]
    tensors = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in rows]
    return tensors if len(lengths) > 1 else tensors[0]
