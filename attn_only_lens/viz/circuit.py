"""A circuit as one interactive page: layers upward, tokens across.

The graph is drawn by cytoscape.js, which is part of the page (`vendor/`), as are the data. The
page's own script is `assets/circuit.js`: it hides nodes and edges under two thresholds, searches,
and shows what a node that is clicked reads, writes, attends to and promotes.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd
from transformer_lens import ActivationCache

from attn_only_lens.axes import SELF
from attn_only_lens.circuits.graph import EDGE_COLUMNS
from attn_only_lens.heads import HeadName, has_neuron_heads, host_of, neuron_pattern
from attn_only_lens.viz.attention import original_attention
from attn_only_lens.viz.checks import prompt_values, refuse
from attn_only_lens.viz.circuit_data import NODE_COLUMNS, NodeDetails, circuit_reasons
from attn_only_lens.viz.coordinates import node_coordinates
from attn_only_lens.viz.page import (
    Page,
    asset,
    document,
    inline_script,
    script_data,
    short_numbers,
    visible_token,
)


def node_patterns(
    cache: ActivationCache, nodes: pd.DataFrame, *, prompt: int = 0
) -> dict[str, NodeDetails]:
    """Return the patterns of a circuit's heads, as details for `circuit_page`.

    Args:
        cache: of the converted or exposed model on the circuit's prompt, with the patterns.
        nodes: as for `circuit_page`.
        prompt: which prompt of the cache's batch.

    Returns:
        By the name of each neuron-head, its self weight at every token; by the id of each attention
        head, what the token at its position attends to. A neuron that several heads share has
        none; its heads have (`L5N12.0` …).

    Raises:
        InputError: a node lies beyond the prompt.
        UnknownHeadError: a node of kind "neuron" or "attention" has a name that is not of a head.
        UnsupportedCallError: the cache does not hold a pattern.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import expose_neuron_heads, pretrained, viz
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> nodes = pd.DataFrame({"id": ["L0H3@2", "L0N7@2"], "kind": ["attention", "neuron"],
        ...                       "name": ["L0H3", "L0N7"], "position": [2, 2]})
        >>> sorted(viz.node_patterns(cache, nodes))
        ['L0H3@2', 'L0N7']
    """
    found: dict[str, NodeDetails] = {}
    for kind, key, name, position in nodes[["kind", "id", "name", "position"]].to_numpy():
        if kind == "neuron" and name not in found:
            head, model = HeadName.parse(name), getattr(cache, "model", None)
            shared = has_neuron_heads(model) and host_of(model).neurons[0].heads_per_neuron > 1
            if head.member is None and shared:
                continue
            pattern = prompt_values(neuron_pattern(cache, name), prompt, cache.has_batch_dim)
            found[name] = NodeDetails(pattern[:, SELF].tolist())
        elif kind == "attention":
            head = HeadName.parse(name)
            rows = original_attention(cache, head.layer, prompt)
            if head.index >= len(rows) or not 0 <= position < rows.shape[1]:
                refuse(
                    f"got {key!r}; the cache holds {len(rows)} heads over {rows.shape[1]} tokens"
                )
            found[key] = NodeDetails(rows[head.index, int(position)].tolist())
    return found


def circuit_page(
    nodes: pd.DataFrame,
    edges: pd.DataFrame,
    meta: Mapping[str, Any],
    details: Mapping[str, NodeDetails] | None = None,
) -> Page:
    """Draw the graph of a circuit as one HTML page that works offline.

    Args:
        nodes: `id` (a text, such as "L5N1234@7"), `kind` ("embed", "attention", "neuron", "bias",
            "rest", "offset", "metric": those of `CircuitGraph`), `layer` and `position` (missing
            where a node has none), `name`, `value`, `attribution` (missing where there is none:
            such a node is always shown); and `status` ("kept", "lost", "gained"), if two circuits
            are compared.
        edges: `source` and `target` (ids), `kind` ("value", or "q" and "k" of the query side, drawn
            dashed), `weight`; and `status`, if wanted.
        meta: `tokens` (the texts of the prompt's), `metric` (its name), `value` (the metric's),
            `model` (its name); and `notes`, texts that the page shows, if wanted.
        details: by id, or by name for all positions of a node; where both are there, each field of
            the id's counts that is given.

    Returns:
        The page, numbers in it to five significant figures. `write_html` writes it to a file.

    Raises:
        InputError: with every reason: columns are missing, ids repeat, an edge ends at no node, a
            number is not finite, a position is not the prompt's, details fit no node.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import viz
        >>> nodes = pd.DataFrame({
        ...     "id": ["embed@0", "L0N5@1", "metric"], "kind": ["embed", "neuron", "metric"],
        ...     "layer": [None, 0, None], "name": ["embed", "L0N5", "metric"],
        ...     "position": [0, 1, None], "value": [0.5, 1.5, 2.0], "attribution": [0.5, 1.5, 2.0]})
        >>> edges = pd.DataFrame({"source": ["embed@0", "L0N5@1"], "target": ["L0N5@1", "metric"],
        ...                       "kind": "value", "weight": [0.5, 1.5]})
        >>> page = viz.circuit_page(nodes, edges, {"tokens": ["a", "b"], "metric": "logit",
        ...                                        "value": 2.0, "model": "m"},
        ...                         {"L0N5": viz.NodeDetails(pattern=[0.0, 0.9])})
        >>> page[:15], "L0N5@1" in page
        ('<!DOCTYPE html>', True)
    """
    details = details or {}
    refuse(*circuit_reasons(nodes, edges, meta, details))
    at = node_coordinates(nodes, len(meta["tokens"]))
    rows = {name: row for row, name in enumerate(nodes["id"])}
    ends = edges.assign(source=edges["source"].map(rows), target=edges["target"].map(rows))
    data = {
        "nodes": _columns(nodes, NODE_COLUMNS)
        | {"x": at.xy[:, 0].round(1).tolist(), "y": at.xy[:, 1].round(1).tolist()},
        "edges": _columns(ends, EDGE_COLUMNS),
        "rows": at.rows,
        "columns": at.columns,
        "tokens": [visible_token(token) for token in meta["tokens"]],
        "details": {key: _plain(each) for key, each in details.items()},
        "notes": list(meta.get("notes", ())),
    }
    title = f"{meta['model']}: {meta['metric']} = {float(meta['value']):.5g}"
    body = [
        asset("assets/circuit.html").replace("TITLE", escape(title)),
        f'<script type="application/json" id="circuit">{script_data(data)}</script>',
        inline_script(asset("vendor/cytoscape.min.js")),
        inline_script(asset("assets/circuit.js")),
    ]
    return document(title, "\n".join(body), asset("assets/circuit.css"))


def _columns(frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, list[Any]]:
    columns = [*columns, *(["status"] if "status" in frame else [])]
    return {column: short_numbers(frame[column]) for column in columns}


def _plain(details: NodeDetails) -> dict[str, list[Any]]:
    """Return details as plain lists, without those that are not given."""
    told: dict[str, list[Any]] = {"pattern": short_numbers(details.pattern or ())}
    for name, tokens in (("top", details.top_tokens), ("read", details.read_tokens)):
        told[name] = [[visible_token(token), *short_numbers([amount])] for token, amount in tokens]
    return {name: values for name, values in told.items() if values}
