"""Define which data a circuit's page needs, and check that they are consistent.

A page with a missing node or a misplaced edge would look correct, so inconsistent data raise an
error.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from pydantic import (
    BaseModel,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    StrictBool,
    ValidationError,
)

from attn_only_lens.arguments import a_type
from attn_only_lens.circuits.graph import EDGE_COLUMNS, EDGE_KINDS, NODE_KINDS
from attn_only_lens.neurons.statistics import Example
from attn_only_lens.viz.page import short_numbers

NODE_COLUMNS = ("id", "kind", "layer", "name", "position", "value", "attribution")
EXTRAS = ("bias", "rest", "offset")
"""Kinds of nodes without a token, which the page shows on demand."""
ALONE = ("denoise", "noise")
OPTIONAL = (
    *("status", "exact", *ALONE, "outside"),
    *("inclusion", "inclusion_low", "inclusion_high", "stability"),
)
STABILITIES = ("core", "contingent", "noise")
STATUSES = {"kept": "=", "lost": "×", "gained": "+"}


class _Meta(BaseModel):
    tokens: list[str]
    metric: str
    value: FiniteFloat
    model: str
    title: str = ""
    notes: list[str] = []
    corrupted: list[str] = []
    caption: list[str] = []
    marks: dict[str, str] = {}
    axes: tuple[str, str] | None = None
    roles: dict[str, NonNegativeInt | None] = {}


class _Group(BaseModel):
    name: str
    members: list[str] = Field(min_length=1)
    folded: StrictBool = True


class _State(BaseModel):
    """The fields of a page's saved state that Python checks."""

    pinned: list[str] = []
    names: dict[str, str] = {}
    groups: list[_Group] = []
    kinds: list[Literal["value", "q", "k", "gate", "routing"]] = []
    extras: StrictBool = False
    nodes: PositiveInt | None = None
    edges: PositiveInt | None = None


@dataclass(frozen=True)
class NodeDetails:
    """Details of a node, which the page shows when the node is clicked.

    Attributes:
        pattern: a weight in [0, 1] for each token of the prompt: for a neuron-head, the attention
            of each token to itself; for an attention head, the attention from the node's position
            to each token.
        writes: tokens that the node raises (positive) or lowers (negative) most, with the amounts
            in standard deviations over the vocabulary; the largest amount first. If the page has
            corrupted tokens, these are the tokens that the change in the node's output (clean minus
            corrupted) raises or lowers.
        reads: tokens that raise or lower a neuron's query most, with amounts as in `writes`.
        examples: top examples of a neuron in a corpus.
        z: gate × value of a neuron-head at each token of the prompt, which colours the tokens.
        corrupted_pattern: `pattern` in the corrupted run.
        corrupted_z: `z` in the corrupted run.

    Example:
        >>> from attn_only_lens.viz.circuit_data import NodeDetails
        >>> NodeDetails(pattern=[0.1, 0.9], writes=[(" the", 2.5), (" a", -1.5)]).pattern
        [0.1, 0.9]
    """

    pattern: Sequence[float] | None = None
    writes: Sequence[tuple[str, float]] = ()
    reads: Sequence[tuple[str, float]] = ()
    examples: Sequence[Example] = ()
    z: Sequence[float] | None = None
    corrupted_pattern: Sequence[float] | None = None
    corrupted_z: Sequence[float] | None = None


def circuit_reasons(
    nodes: pd.DataFrame,
    edges: pd.DataFrame,
    meta: Mapping[str, Any],
    details: Mapping[str, NodeDetails],
    state: Mapping[str, Any],
) -> list[str]:
    """Return all reasons why the circuit cannot be drawn."""
    items = (("nodes", nodes, pd.DataFrame), ("edges", edges, pd.DataFrame))
    reasons = [
        f"got {a_type(item)} as {what}; expected a {kind.__name__}"
        for what, item, kind in (*items, ("details", details, Mapping))
        if not isinstance(item, kind)
    ]
    reasons += _field_reasons("meta", meta, _Meta)
    if reasons:
        return reasons
    for what, frame, columns in (("nodes", nodes, NODE_COLUMNS), ("edges", edges, EDGE_COLUMNS)):
        missing = [column for column in columns if column not in frame]
        reasons += [f"{what} have no column {column!r}" for column in missing]
    if reasons:
        return reasons
    n_tokens = len(meta["tokens"])
    if (n_corrupted := len(meta.get("corrupted", ()))) not in (0, n_tokens):
        reasons.append(f"got {n_corrupted} corrupted tokens; expected {n_tokens}, or none")
    roles = meta.get("roles") or {}
    reasons += [
        f"got the role {role!r} at token {index}; the prompt has {n_tokens} tokens"
        for role, index in roles.items()
        if index is not None and index >= n_tokens
    ]
    return [
        *reasons,
        *_node_reasons(nodes, len(roles) or n_tokens),
        *_edge_reasons(edges, nodes),
        *_details_reasons(details, nodes, n_tokens),
        *(_field_reasons("state", state, _State) or _state_reasons(_State(**state), nodes)),
    ]


def _field_reasons(what: str, value: Any, model: type[BaseModel]) -> list[str]:
    try:
        model.model_validate(value)
    except ValidationError as error:
        fields = {".".join(map(str, (what, *item["loc"]))): item for item in error.errors()}
        return [
            f"got {reprlib.repr(item['input'])} as {field}: {item['msg']}"
            for field, item in fields.items()
        ]
    return []


def _node_reasons(nodes: pd.DataFrame, n_columns: int) -> list[str]:
    reasons = ["the circuit has no nodes"] * (not len(nodes))
    for column in ("id", "name"):
        odd = [node for node in nodes[column] if not isinstance(node, str)]
        reasons += [f"got {value!r} for a node's {column}; expected a text" for value in odd[:1]]
    twice = nodes.loc[nodes["id"].duplicated(), "id"]
    reasons += [f"{len(twice)} node ids occur twice, such as {value!r}" for value in twice[:1]]
    for column, words in {"kind": NODE_KINDS, "stability": STABILITIES, "status": STATUSES}.items():
        reasons += _word_reasons(nodes, column, words, "nodes")
    most = {"layer": np.inf, "position": n_columns - 1}
    most |= dict.fromkeys(("inclusion", "inclusion_low", "inclusion_high"), 1)
    for column in ("value", "attribution", "exact", *ALONE, "strength", *most):
        if column not in nodes:
            continue
        numbers = _numbers(nodes, column, "nodes", reasons)
        reasons += [f"nodes have an infinite {column}"] * bool(np.isinf(numbers).any())
        if column in most:
            outside = (numbers < 0) | (numbers > most[column])
            outside |= (numbers % 1 > 0) & (column in ("layer", "position"))
            reasons += [
                f"got a node with {column} {number:g}; expected 0 to {most[column]}, or none"
                for number in numbers[outside & ~np.isinf(numbers)][:1]
            ]
    return reasons


def _edge_reasons(edges: pd.DataFrame, nodes: pd.DataFrame) -> list[str]:
    reasons = _word_reasons(edges, "kind", EDGE_KINDS, "edges")
    for end in ("source", "target"):
        unknown = edges.loc[~edges[end].isin(nodes["id"]), end]
        reasons += [
            f"{len(unknown)} edges have a {end} that is not a node, such as {value!r}"
            for value in unknown[:1]
        ]
    twice = int(edges.duplicated(["source", "target", "kind"]).sum())
    reasons += [f"{twice} edges repeat a source, target and kind"] * bool(twice)
    bad = int((~np.isfinite(_numbers(edges, "weight", "edges", reasons))).sum())
    reasons += [f"{bad} edges have a weight that is not finite"] * bool(bad)
    return reasons + _word_reasons(edges, "status", STATUSES, "edges")


def _details_reasons(
    details: Mapping[str, NodeDetails], nodes: pd.DataFrame, n_tokens: int
) -> list[str]:
    known, reasons = {*nodes["id"], *nodes["name"]}, []
    for key, item in details.items():
        if key not in known:
            reasons.append(f"got details for {key!r}, which is not a node's id or name")
        if not isinstance(item, NodeDetails):
            reasons.append(f"got {a_type(item)} for {key!r}; expected NodeDetails")
            continue
        for what in ("pattern", "z", "corrupted_pattern", "corrupted_z"):
            row = getattr(item, what)
            numbers = np.asarray([0.0] * n_tokens if row is None else row, dtype=float)
            if numbers.shape != (n_tokens,) or not np.isfinite(numbers).all():
                reasons.append(
                    f"{what} of {key!r} has {numbers.size} values; expected a finite value for "
                    f"each of {n_tokens} tokens"
                )
            elif "pattern" in what and not ((numbers >= 0) & (numbers <= 1)).all():
                reasons.append(f"the {what} of {key!r} has values outside [0, 1]")
        tokens = [*item.writes, *item.reads]
        if any(not isinstance(text, str) or not np.isfinite(amount) for text, amount in tokens):
            reasons.append(
                f"got tokens that {key!r} writes or reads; expected pairs (text, finite number)"
            )
        for example in item.examples:
            sizes = {len(example.tokens), len(example.values), len(example.gates)}
            if len(sizes) > 1 or not np.isfinite([*example.values, *example.gates]).all():
                reasons.append(
                    f"an example of {key!r} has tokens, values and gates with different lengths, "
                    "or a value that is not finite"
                )
    return reasons


def _state_reasons(state: _State, nodes: pd.DataFrame) -> list[str]:
    members = [node for group in state.groups for node in group.members]
    unknown = sorted({*state.pinned, *state.names, *members} - set(nodes["id"]))
    reasons = [
        f"the state belongs to another circuit: {node!r} is not a node's id" for node in unknown[:1]
    ]
    if len(set(members)) < len(members):
        reasons.append("a node is in two groups of the state, or twice in one group")
    return reasons


def _numbers(
    frame: pd.DataFrame, column: str, what: str, reasons: list[str]
) -> Float[np.ndarray, "n_rows"]:
    try:
        return pd.to_numeric(frame[column]).to_numpy(dtype=float)
    except (TypeError, ValueError):
        reasons.append(f"the column {column!r} of {what} has an entry that is not a number")
        return np.empty(0)


def _word_reasons(
    frame: pd.DataFrame, column: str, expected: Iterable[str], what: str
) -> list[str]:
    """Return a list with one error message if a column contains an unexpected word."""
    allowed = (*expected, None) if column in OPTIONAL else tuple(expected)
    words = short_numbers(frame[column].unique()) if column in frame else []
    odd = [word for word in words if word not in allowed]
    return [
        f"{what} have the {column} {word!r}; expected one of {list(expected)}" for word in odd[:1]
    ]
