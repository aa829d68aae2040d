"""Render a circuit as an interactive page and as a static picture.

`assets/circuit.js` draws the page with parts of d3.js (`vendor/`); the page contains all scripts,
and the data as JSON. At first, the page shows only the strongest nodes, and edges of the kind
"value" between them. The static picture shows this initial view; Python draws it, without a
browser.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from unicodedata import east_asian_width

import numpy as np
import pandas as pd

from attn_only_lens.circuits.graph import EDGE_COLUMNS
from attn_only_lens.heads.host import HEAD_PLURALS
from attn_only_lens.viz.circuit_data import NODE_COLUMNS, OPTIONAL, NodeDetails, circuit_reasons
from attn_only_lens.viz.circuit_picture import FEWEST, MOST, circuit_picture, first_view
from attn_only_lens.viz.coordinates import rows_of
from attn_only_lens.viz.page import (
    Page,
    asset,
    document,
    inline_script,
    model_title,
    refuse,
    script_data,
    short_numbers,
    visible_token,
)

_D3 = (
    "color",
    "dispatch",
    "ease",
    "interpolate",
    "selection",
    "timer",
    "drag",
    "transition",
    "zoom",
)
"""The parts of d3 that `assets/circuit.js` needs; a part follows those on which it depends."""
_SCRIPTS = (*(f"vendor/d3-{part}.min.js" for part in _D3), "assets/layout.js", "assets/circuit.js")
_STYLES = ("assets/page.css", "assets/graph.css", "assets/circuit.css")
_CHARACTER, _PADDING, _SIGN = 6.7, 8.0, 13.4  # parts of a box's width in pixels
_LONGEST = 28  # characters of a label
MOST_UNFOLDED = 300
"""The maximum number of nodes that a page shows at first without grouping them."""


def circuit_page(
    nodes: pd.DataFrame,
    edges: pd.DataFrame,
    meta: Mapping[str, Any],
    details: Mapping[str, NodeDetails] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
) -> Page:
    """Render the graph of a circuit as one HTML page that works offline.

    Args:
        nodes: columns `id` (a string, such as "L5N1234@7"), `kind` (a kind of `CircuitGraph`:
            "embed", "attention", "neuron", "feature", "skip", "error", "router", "bias", "rest",
            "offset", "metric"), `layer` and `position` (missing if a node has none), `name`,
            `value`, `attribution` (if it is missing, the node is as strong as its strongest edge).
            Optional: `exact`, the node's exact effect; `status` ("kept", "lost", "gained") if two
            circuits are compared; `outside`, true for sites outside the circuit, which are grey,
            and `strength`, how strong each node is; `denoise` and `noise`, the shares of a
            difference that the site restores and removes if it is patched alone;
            `inclusion`, from 0 to 1, and `stability` ("core", "contingent", "noise") if prompts
            were resampled. A metric without a position is above the token that it reads.
        edges: columns `source` and `target` (ids), `kind` ("value", which is shown first, "q", "k"
            "gate" or "routing"), `weight`; optional: `status`.
        meta: `tokens` (texts of the prompt's tokens), `metric` and `model` (names), `value` (of the
            metric). Optional: `title`, shown after the model instead of the metric; `exact`, the
            meaning of that column; `lead`, strings that the page shows first, and `notes`, strings
            that it folds; `caption`, sentences below the picture, and `marks`, more of them by the
            mark in a name that they explain; `corrupted`, the tokens of the corrupted prompt, if
            the details have its patterns; `roles`, for columns that are roles: by name, the index
            of the role's token in `tokens`, or None (nodes' `position` then counts roles);
            `additive`, the kinds of edges that sum to attributions (by default "value"); and
            `groups`, the `members`, `effect` and `sum_of_effects` of groups that were measured. If
            some of these edges come from a node of the kind "rest", a bar in every node shows the
            part of its inflow that is drawn (see `circuit_view`).
        details: by id, or by name for all positions of a node; fields by id take precedence.
        state: what the page shows at first, as in `circuit_view`.

    Returns:
        The page, with values to five significant figures, and its initial view as `picture`.
        `write` writes either to a file.

    Raises:
        InputError: columns are missing, ids repeat, an edge's end is not a node, a value is not
            finite, a position is outside the prompt, or details or the state name an unknown node;
            the error lists every reason.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens.viz.circuit import circuit_page
        >>> from attn_only_lens.viz.circuit_data import NodeDetails
        >>> nodes = pd.DataFrame({
        ...     "id": ["embed@0", "L0N5@1", "metric"], "kind": ["embed", "neuron", "metric"],
        ...     "layer": [None, 0, None], "name": ["embed", "L0N5", "metric"],
        ...     "position": [0, 1, None], "value": [0.5, 1.5, 2.0], "attribution": [0.5, 1.5, 2.0]})
        >>> edges = pd.DataFrame({"source": ["embed@0", "L0N5@1"], "target": ["L0N5@1", "metric"],
        ...                       "kind": "value", "weight": [0.5, 1.5]})
        >>> page = circuit_page(nodes, edges, {"tokens": ["a", "b"], "metric": "logit",
        ...                                        "value": 2.0, "model": "m"},
        ...                         {"L0N5": NodeDetails(pattern=[0.0, 0.9])},
        ...                         state={"pinned": ["L0N5@1"], "names": {"L0N5@1": "a → b"}})
        >>> page[:15], "L0N5@1" in page, page.picture[:4]
        ('<!DOCTYPE html>', True, '<svg')
    """
    details, state = {} if details is None else details, {} if state is None else state
    refuse(*circuit_reasons(nodes, edges, meta, details, state))
    state = _with_groups(state, nodes)
    data = _drawing(nodes.reset_index(drop=True), edges, meta, state) | {
        "details": {key: _plain(item) for key, item in details.items()},
        "exact": meta.get("exact", ""),
        "corrupted": [visible_token(token) for token in meta.get("corrupted", ())],
        **{key: list(meta.get(key, ())) for key in ("lead", "notes", "groups")},
    }
    of_metric = meta.get("title") or f"{meta['metric']} = {float(meta['value']):.5g}"
    model = model_title(meta["model"])
    title = f"{model}: " * bool(model) + of_metric
    picture = circuit_picture(_named(data, state), title)
    body = [
        asset("assets/circuit.html").replace("TITLE", escape(title)),
        f'<script type="application/json" id="circuit">{script_data(data)}</script>',
        f'<script type="application/json" id="state">{script_data(state)}</script>',
        *map(inline_script, map(asset, _SCRIPTS)),
    ]
    return document(title, "\n".join(body), "".join(map(asset, _STYLES)), picture=picture)


def _with_groups(state: Mapping[str, Any], nodes: pd.DataFrame) -> Mapping[str, Any]:
    """If there are more than `MOST_UNFOLDED` nodes, group them by layer and kind of head.

    Nodes outside the circuit, which have no edges, do not count.
    """
    if "outside" in nodes:
        nodes = nodes[~nodes["outside"].astype(bool)]
    if len(nodes) <= MOST_UNFOLDED or state.get("groups"):
        return state
    free = nodes[
        nodes["kind"].isin(list(HEAD_PLURALS)) & ~nodes["id"].isin(state.get("pinned", []))
    ]
    rows = zip(free["layer"].astype(int), free["kind"], free["id"], strict=True)
    members: dict[str, list[str]] = {}
    for layer, kind, node in sorted(rows):
        members.setdefault(f"L{layer} {HEAD_PLURALS[kind]}", []).append(node)
    groups = [
        {"name": name, "members": ids, "folded": True}
        for name, ids in members.items()
        if len(ids) > 1
    ]
    return {**state, "groups": groups}


def _drawing(
    nodes: pd.DataFrame, edges: pd.DataFrame, meta: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the data that both the page and the picture show."""
    tokens = [visible_token(token) for token in meta["tokens"]]
    columns, places, below = _axis(meta, tokens)
    axis = [_shortened(name) for name in columns]
    cells = [max(map(_cells, texts)) for texts in zip(axis, below, strict=True)]
    row, rows = rows_of(nodes)
    row_of = {name: index for index, name in enumerate(nodes["id"])}
    ends = edges.assign(source=edges["source"].map(row_of), target=edges["target"].map(row_of))
    position = nodes["position"].astype(float)
    column = position.fillna(-1).astype(int)
    for metric in np.flatnonzero((nodes["kind"] == "metric") & position.isna()).tolist():
        column[metric] = _where_read(ends[ends["target"] == metric], position)
    labels = [_shortened(visible_token(name)) for name in nodes["name"]]
    for i, (kind, t) in enumerate(zip(nodes["kind"], position, strict=True)):
        if kind == "metric":
            labels[i] = _shortened(meta["metric"], 40)
        elif kind == "embed" and pd.notna(t):
            labels[i] = axis[int(t)]
    additive = list(meta.get("additive", ("value",)))
    from_rest = edges["source"].isin(nodes.loc[nodes["kind"] == "rest", "id"])
    drawing = {
        "nodes": {
            **_columns(nodes, NODE_COLUMNS, *OPTIONAL),
            **{"label": labels, "row": row, "column": column.tolist()},
            "width": list(map(_box, labels)),
            "strength": short_numbers(_strength(nodes, ends)),
        },
        "edges": _columns(ends, EDGE_COLUMNS, "status"),
        "rows": rows,
        "state": state,
        "additive": additive,
        "has_bars": "status" not in edges and bool(edges["kind"][from_rest].isin(additive).any()),
        "tokens": tokens,
        "columns": columns,
        "places": places,
        "by_role": bool(meta.get("roles")),
        "axes": meta.get("axes") or _axis_names(meta),
        "axis": axis,
        "below": below,
        "axis_width": [round(_CHARACTER * n, 1) for n in cells],
        "caption": list(meta.get("caption", ())),
        "marks": list(dict(meta.get("marks", {})).items()),
        "style": asset("assets/graph.css"),
        "per_character": _CHARACTER,
        "padding": _PADDING + _SIGN,
        "first_view": {"most": MOST, "fewest": FEWEST},
    }
    return drawing | {"first": first_view(drawing)}


def _axis(
    meta: Mapping[str, Any], tokens: list[str]
) -> tuple[list[str], list[int | None], list[str]]:
    """Return the columns' names, their tokens' indices in the shown prompt, and texts below."""
    roles: Mapping[str, int | None] = meta.get("roles") or {}
    if not roles:
        return tokens, [*range(len(tokens))], [str(i) for i in range(len(tokens))]
    corrupted = list(map(visible_token, meta.get("corrupted", ()))) or tokens
    pairs = [("–",) if i is None else (tokens[i], corrupted[i]) for i in roles.values()]
    below = [" / ".join(map(_shortened, dict.fromkeys(pair))) for pair in pairs]
    return [visible_token(role) for role in roles], list(roles.values()), below


def _axis_names(meta: Mapping[str, Any]) -> tuple[str, str]:
    """Return what the two lines below the columns contain."""
    are_ids = all(token.strip().isdecimal() for token in meta["tokens"])
    token = "token id" if are_ids else "token"  # of a model without a tokenizer
    return ("role", token) if meta.get("roles") else (token, "position")


def _named(data: dict[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the picture's data, with nodes named as in the saved state."""
    names, nodes = state.get("names", {}), data["nodes"]
    labels = [
        names.get(node, label) for node, label in zip(nodes["id"], nodes["label"], strict=True)
    ]
    named = data | {"nodes": nodes | {"label": labels, "width": list(map(_box, labels))}}
    return named | {"first": first_view(named)}


def _strength(nodes: pd.DataFrame, ends: pd.DataFrame) -> "pd.Series[float]":
    """Return each node's strength; by default, |attribution| or its largest edge's |weight|."""
    both = pd.concat([ends.set_index(end)["weight"].abs() for end in ("source", "target")])
    heaviest = both.groupby(level=0).max().reindex(nodes.index, fill_value=0.0)
    sizes = nodes["attribution"].astype(float).abs().fillna(heaviest)
    if "strength" in nodes:
        sizes = nodes["strength"].astype(float).fillna(sizes)
    return sizes.where(nodes["kind"] != "metric")


def _where_read(into: pd.DataFrame, position: "pd.Series[float]") -> int:
    """Return the position whose value edges into the metric have the largest Σ |weight|."""
    value = into[into["kind"] == "value"]
    columns = position.to_numpy()[value["source"]]
    here = ~np.isnan(columns)
    sizes = np.bincount(columns[here].astype(int), value["weight"].abs().to_numpy()[here])
    return int(sizes.argmax()) if len(sizes) else -1


def _shortened(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _cells(text: str) -> int:
    return sum(2 if east_asian_width(token) in "WF" else 1 for token in text)


def _box(label: str) -> float:
    return round(_CHARACTER * _cells(label) + _PADDING + _SIGN, 1)


def _columns(frame: pd.DataFrame, columns: Sequence[str], *more: str) -> dict[str, list[Any]]:
    columns = [*columns, *(row for row in more if row in frame)]
    return {column: short_numbers(frame[column]) for column in columns}


def _plain(details: NodeDetails) -> dict[str, list[Any]]:
    """Return a node's details as plain lists, without empty fields."""
    rows = {name: getattr(details, name) for name in ("pattern", "z")}
    rows |= {f"corrupted_{name}": getattr(details, f"corrupted_{name}") for name in rows}
    page_data: dict[str, list[Any]] = {
        name: short_numbers(() if numbers is None else numbers) for name, numbers in rows.items()
    }
    for name, tokens in (("writes", details.writes), ("reads", details.reads)):
        page_data[name] = [[visible_token(token), round(amount, 2)] for token, amount in tokens]
    page_data["examples"] = [
        {
            "tokens": [visible_token(token) for token in example.tokens],
            "values": short_numbers(example.values, 3),
            "gates": short_numbers(example.gates, 3),
            "position": example.position,
            "text": example.text,
        }
        for example in details.examples
    ]
    return {name: values for name, values in page_data.items() if values}
