"""The data of a circuit's page, and the checks that they fit together.

A page with a node missing, or an edge at the wrong node, looks like any other page; so whatever
does not fit is refused, with every reason.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from attn_only_lens.arguments import is_count
from attn_only_lens.circuits.graph import EDGE_COLUMNS, EDGE_KINDS, NODE_KINDS
from attn_only_lens.neurons import Example
from attn_only_lens.viz.checks import token_reasons
from attn_only_lens.viz.page import short_numbers

NODE_COLUMNS = ("id", "kind", "layer", "name", "position", "value", "attribution")
EXTRAS = ("bias", "rest", "offset")
"""Kinds of nodes that no token has, and that are shown on demand."""
OPTIONAL = ("status", "exact", "inclusion", "inclusion_low", "inclusion_high", "stability")
STABILITIES = ("core", "contingent", "noise")
STATUSES = {"kept": "=", "lost": "×", "gained": "+"}
_STATE: Mapping[str, Any] = {"pinned": list, "names": dict, "groups": list, "kinds": list}
_META = ("tokens", "metric", "value", "model")


@dataclass(frozen=True)
class NodeDetails:
    """The details of a node that a click shows beyond its edges.

    Attributes:
        pattern: a weight in [0, 1] for each token of the prompt: of a neuron-head, what each token
            attends to itself, the rest being the bias token's; of an attention head, what the
            token at the node's position attends to.
        writes: tokens that the node raises (positive) or lowers (negative) most, each with how
            much, in standard deviations over the vocabulary; the largest first.
        reads: tokens that raise or lower a neuron's query most, with the same amounts.
        examples: where a neuron's values are largest in a corpus.
        z: of a neuron-head, gate × value at each token of the prompt, which colours them.

    Example:
        >>> from attn_only_lens.viz import NodeDetails
        >>> NodeDetails(pattern=[0.1, 0.9], writes=[(" the", 2.5), (" a", -1.5)]).pattern
        [0.1, 0.9]
    """

    pattern: Sequence[float] | None = None
    writes: Sequence[tuple[str, float]] = ()
    reads: Sequence[tuple[str, float]] = ()
    examples: Sequence[Example] = ()
    z: Sequence[float] | None = None


def circuit_reasons(
    nodes: pd.DataFrame,
    edges: pd.DataFrame,
    meta: Mapping[str, Any],
    details: Mapping[str, NodeDetails],
    state: Mapping[str, Any],
) -> list[str]:
    """Return all that does not fit together; nothing if the circuit can be drawn."""
    frames = (("nodes", nodes, pd.DataFrame), ("edges", edges, pd.DataFrame))
    reasons = [
        f"got a {type(item).__name__} as {what}; expected a {kind.__name__}"
        for what, item, kind in (*frames, ("meta", meta, Mapping), ("details", details, Mapping))
        if not isinstance(item, kind)
    ]
    if reasons:
        return reasons
    reasons = [f"meta has no {key!r}" for key in _META if key not in meta]
    for what, frame, wanted in (("nodes", nodes, NODE_COLUMNS), ("edges", edges, EDGE_COLUMNS)):
        missing = [column for column in wanted if column not in frame]
        reasons += [f"{what} have no column {column!r}" for column in missing]
    reasons = reasons or _meta_reasons(meta)
    if reasons:
        return reasons
    n_tokens = len(meta["tokens"])
    return [
        *_node_reasons(nodes, n_tokens),
        *_edge_reasons(edges, nodes),
        *_details_reasons(details, nodes, n_tokens),
        *_state_reasons(state, nodes),
    ]


def _meta_reasons(meta: Mapping[str, Any]) -> list[str]:
    reasons = token_reasons(meta["tokens"])
    odd = [key for key in ("metric", "model") if not isinstance(meta[key], str)]
    reasons += [f"got meta {key} {meta[key]!r}; expected a text" for key in odd]
    value, notes = meta["value"], meta.get("notes", ())
    if not isinstance(value, float | int) or not np.isfinite(value):
        reasons.append(f"got meta value {value!r}; expected a finite number")
    if isinstance(notes, str) or any(not isinstance(note, str) for note in notes):
        reasons.append(f"got meta notes {notes!r}; expected a list of texts")
    return reasons


def _node_reasons(nodes: pd.DataFrame, n_tokens: int) -> list[str]:
    reasons = ["the circuit has no nodes"] * (not len(nodes))
    for column in ("id", "name"):
        odd = [node for node in nodes[column] if not isinstance(node, str)]
        reasons += [f"got {value!r} for a node's {column}; expected a text" for value in odd[:1]]
    twice = nodes.loc[nodes["id"].duplicated(), "id"]
    reasons += [f"{len(twice)} ids are there twice, such as {value!r}" for value in twice[:1]]
    for column, words in {"kind": NODE_KINDS, "stability": STABILITIES, "status": STATUSES}.items():
        reasons += _word_reasons(nodes, column, words, "nodes")
    ranges = {"layer": (np.inf, "0 or more"), "position": (n_tokens - 1, f"0 to {n_tokens - 1}")}
    ranges |= {column: (1, "0 to 1") for column in OPTIONAL if column.startswith("inclusion")}
    for column in ("layer", "position", "value", "attribution", *OPTIONAL):
        if column not in nodes or column in ("stability", "status"):
            continue
        numbers = _numbers(nodes, column, "nodes", reasons)
        reasons += [f"nodes have an infinite {column}"] * bool(np.isinf(numbers).any())
        if column in ranges:
            most, expected = ranges[column]
            outside = (numbers < 0) | (numbers > most)
            if column in ("layer", "position"):
                outside |= numbers % 1 > 0
            reasons += [
                f"nodes have a {column} such as {number:g}; expected {expected}, or none"
                for number in numbers[outside & ~np.isinf(numbers)][:1]
            ]
    return reasons


def _edge_reasons(edges: pd.DataFrame, nodes: pd.DataFrame) -> list[str]:
    reasons = _word_reasons(edges, "kind", EDGE_KINDS, "edges")
    for end in ("source", "target"):
        unknown = edges.loc[~edges[end].isin(nodes["id"]), end]
        reasons += [
            f"{len(unknown)} edges have a {end} that is no node, such as {value!r}"
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
            reasons.append(f"details are given for {key!r}, which is no node's id or name")
        if not isinstance(item, NodeDetails):
            reasons.append(f"got a {type(item).__name__} for {key!r}; expected NodeDetails")
            continue
        for what, unit, row in (("pattern", "weight", item.pattern), ("z", "number", item.z)):
            numbers = np.asarray([0.0] * n_tokens if row is None else row, dtype=float)
            if numbers.shape != (n_tokens,):
                reasons.append(
                    f"{what} of {key!r} has {numbers.size} numbers; expected one {unit} for each "
                    f"of {n_tokens} tokens"
                )
            elif not np.isfinite(numbers).all():
                reasons.append(f"{what} of {key!r} has a number that is not finite")
            elif what == "pattern" and not ((numbers >= 0) & (numbers <= 1)).all():
                reasons.append(f"the pattern of {key!r} leaves [0, 1]")
        for what, tokens in (("writes", item.writes), ("reads", item.reads)):
            if any(not isinstance(t, str) or not np.isfinite(a) for t, a in tokens):
                reasons.append(f"the tokens that {key!r} {what} are not (text, finite number)")
        for example in item.examples:
            sizes = {len(example.tokens), len(example.values), len(example.gates)}
            if len(sizes) > 1 or not np.isfinite([*example.values, *example.gates]).all():
                reasons.append(
                    f"an example of {key!r} has tokens, values and gates that do not fit, or a "
                    "number that is not finite"
                )
    return reasons


def _state_reasons(state: Mapping[str, Any], nodes: pd.DataFrame) -> list[str]:
    """Return why this is not what the page saves. What it does not know, it leaves out itself."""
    if not isinstance(state, Mapping):
        return [f"got a {type(state).__name__} as state; expected what the page saves as JSON"]
    pinned, names, groups, kinds = (state.get(key, of()) for key, of in _STATE.items())
    reasons = [
        f"got {state[key]!r} as the state's {key}; expected a {of.__name__}"
        for key, of in _STATE.items()
        if not isinstance(state.get(key, of()), of)
    ]
    reasons += [
        f"got {state[key]!r} as the state's {key}; expected 1 or more"
        for key in ("nodes", "edges")
        if state.get(key) is not None and not is_count(state[key], 1)
    ]
    if reasons:
        return reasons
    reasons += [
        f"got the kind {kind!r} in the state; expected those of {list(EDGE_KINDS)}"
        for kind in kinds
        if kind not in EDGE_KINDS
    ]
    reasons += [
        f"got the group {group!r}; expected a name, and a list of members"
        for group in groups
        if not _is_group(group)
    ]
    if not all(isinstance(name, str) for name in names.values()):
        reasons.append(f"got the names {names!r}; expected a text for each id")
    if reasons:
        return reasons
    members = [str(key) for group in groups for key in group["members"]]
    known = set(nodes["id"])
    unknown = [key for key in (*pinned, *names, *members) if str(key) not in known]
    reasons += [
        f"the state is of another circuit: it has {key!r}, no node's id" for key in unknown[:1]
    ]
    twice = [key for key, count in Counter(members).items() if count > 1]
    return reasons + [f"{key!r} is in the state's groups twice" for key in twice[:1]]


def _is_group(group: Any) -> bool:
    return (
        isinstance(group, Mapping)
        and isinstance(group.get("name"), str)
        and isinstance(group.get("members"), list)
        and bool(group["members"])
        and isinstance(group.get("folded", True), bool)
    )


def _numbers(
    frame: pd.DataFrame, column: str, what: str, reasons: list[str]
) -> Float[np.ndarray, "n_rows"]:
    try:
        return pd.to_numeric(frame[column]).to_numpy(dtype=float)
    except (TypeError, ValueError):
        reasons.append(f"the column {column!r} of {what} holds what is not a number")
        return np.empty(0)


def _word_reasons(
    frame: pd.DataFrame, column: str, expected: Iterable[str], what: str
) -> list[str]:
    """Return a reason if a column holds another word; optional ones may be missing."""
    allowed = (*expected, None) if column in OPTIONAL else tuple(expected)
    words = short_numbers(frame[column].unique()) if column in frame else []
    odd = [word for word in words if word not in allowed]
    return [
        f"there are {what} of {column} {word!r}; expected one of {list(expected)}"
        for word in odd[:1]
    ]
