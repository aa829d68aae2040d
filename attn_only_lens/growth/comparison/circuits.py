"""Compare two models' circuits for the same contrast: kept, lost and gained nodes and edges.

Every model's circuit comes from `circuits.discover`, with the same settings as in `explain`. Its
edges are those of the circuit's own run (`attribution_graph`), of which those of each node and
kind with the largest |weight| count, up to a share `edge_mass` of Σ |weight|. If the prompts have
different lengths and no roles, sites are heads and neurons at all positions together, and there are
no edges.

    Jaccard            |A ∩ B| / |A ∪ B|; 1 if both are empty
    rank correlation   Spearman's, over the shares of the nodes, or the weights of the edges, in
                       both circuits

The interval of a Jaccard index contains 90 % of the indices of circuits that were searched for on
the same random halves of the prompts in both models.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from attn_only_lens.circuits._attribution_graph import attribution_graph
from attn_only_lens.circuits._discover import discover
from attn_only_lens.circuits.circuit import Circuit
from attn_only_lens.circuits.search import Search
from attn_only_lens.circuits.stability import random_halves, require_resamples
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.metrics import as_metric
from attn_only_lens.engine.positions import length_reasons
from attn_only_lens.engine.sites import Sites
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.growth.comparison.alignment import Alignment
from attn_only_lens.growth.comparison.clean_runs import MODELS
from attn_only_lens.growth.comparison.options import ComparisonSizes
from attn_only_lens.heads import HeadName
from attn_only_lens.patching.columns import site_ids
from attn_only_lens.work import Work

PAIRS = ("original and grown", "grown and null")
"""The pairs of models whose circuits are compared."""
_TAILS = 0.05, 0.95
_NODE, _EDGE = ["id", "name", "position"], ["source", "target", "kind"]
_STATUSES = {"both": "kept", "left_only": "lost", "right_only": "gained"}


@dataclass(frozen=True, eq=False)
class ModelCircuit:
    """One model's circuit. Frames have the grown model's names.

    `nodes` has `id`, `name`, `position` and `share`, the node's share of what the circuit keeps or,
    without edges, its effect in the ranking.
    `edges` has `source`, `target`, `kind` and `weight`.
    """

    circuit: Circuit
    nodes: pd.DataFrame
    edges: pd.DataFrame


def positions_of_sites(model: Any, contrast: Contrast) -> str:
    """Return where sites are: "roles", at "each" position, or at "all" positions together."""
    if contrast.roles:
        return "roles"
    return "all" if length_reasons(contrast.pair(model)) else "each"


def renamed(ids: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """Rename heads and neurons in names, or in ids such as "L3H3@5"; keep names without a new one.

    Example:
        >>> renamed(["L3H3@5", "metric"], {"L3H3": "L4H3"})
        ['L4H3@5', 'metric']
    """
    parts = [one.partition("@") for one in ids]
    return [f"{names.get(name, name)}{mark}{place}" for name, mark, place in parts]


def find_circuits(
    models: Sequence[Any],
    contrast: Contrast,
    alignment: Alignment,
    sizes: ComparisonSizes,
    progress: bool,
) -> list[ModelCircuit]:
    """Search for a circuit in every model, and compute its edges."""
    labels = [progress and f"circuit of {label}" for label in MODELS]
    circuits = _discover(models, contrast, alignment, sizes, labels)
    return [
        _with_edges(model, contrast, circuit, names, sizes)
        for model, (circuit, names) in zip(models, circuits, strict=True)
    ]


def compare_circuits(
    models: Sequence[Any],
    contrast: Contrast,
    alignment: Alignment,
    found: Sequence[ModelCircuit],
    sizes: ComparisonSizes,
    progress: bool,
) -> dict[str, pd.DataFrame]:
    """Return the frames `circuits`, `nodes` and `edges` of a `Comparison`."""
    intervals = _intervals(models, contrast, alignment, sizes, progress)
    rows, frames = list[dict[str, Any]](), list[dict[str, pd.DataFrame]]()
    for pair, first, second, interval in zip(PAIRS, found, found[1:], intervals, strict=False):
        nodes = _joined(first.nodes, second.nodes, _NODE, "share")
        edges = _joined(first.edges, second.edges, _EDGE, "weight")
        rows.append({"pair": pair, "what": "nodes", **_overlap(nodes, "share"), **interval})
        for kind, some in edges.groupby("kind", sort=False, observed=True):
            nothing = dict.fromkeys(interval, np.nan)
            rows.append(
                {"pair": pair, "what": f"{kind} edges", **_overlap(some, "weight"), **nothing}
            )
        frames.append({"nodes": nodes, "edges": edges})
    nodes = frames[0]["nodes"]
    parsed = [HeadName.parse(name) for name in nodes["name"]]
    nodes.insert(1, "kind", [name.kind for name in parsed])
    nodes.insert(2, "layer", [name.layer for name in parsed])
    nodes.insert(5, "original_name", [alignment.original_names.get(name) for name in nodes["name"]])
    return {"circuits": pd.DataFrame(rows), **frames[0]}


def _discover(
    models: Sequence[Any],
    contrast: Contrast,
    alignment: Alignment,
    sizes: ComparisonSizes,
    labels: Sequence[bool | str],
) -> list[tuple[Circuit, Mapping[str, str]]]:
    """Search for a circuit in every model; other searches start from the original's circuit.

    Return each circuit with the names that its parts have in the grown model, if they have others.
    """
    circuits, start = list[tuple[Circuit, Mapping[str, str]]](), list[str]()
    for model, label in zip(models, labels, strict=False):
        circuit = discover(
            *(model, contrast),
            faithfulness=sizes.faithfulness,
            sites=Sites(positions=positions_of_sites(model, contrast)),
            search=Search(seed=sizes.seed, start=start),
            work=Work(progress=label),
        )
        circuits.append((circuit, {} if circuits else alignment.names))
        start = start or renamed(site_ids(circuit.frame), alignment.names)
    return circuits


def _with_edges(
    model: Any,
    contrast: Contrast,
    circuit: Circuit,
    names: Mapping[str, str],
    sizes: ComparisonSizes,
) -> ModelCircuit:
    """Return a circuit with its nodes and edges, renamed by `names`."""
    ids = site_ids(circuit.frame)
    share = -circuit.frame["effect"]  # a patch with the corrupted output removes it
    edges = pd.DataFrame(columns=[*_EDGE, "weight"]).astype({"weight": float})
    if sizes.n_nodes and circuit.candidates.positions != "all":
        try:
            graph = attribution_graph(model, contrast, sites=circuit)
        except (InputError, UnsupportedModelError) as error:
            more = "n_nodes=0 compares only the nodes of circuits, without edges"
            raise type(error)([*error.reasons, more], error.problem) from error
        share = ids.map(graph.heads.set_index("id")["attribution"] / graph.value)
        graph = graph.prune(top=sizes.n_nodes) if len(circuit) > sizes.n_nodes else graph
        edges = graph.prune_edges(sizes.edge_mass).edges
        edges = edges.loc[~edges["source"].isin(["rest", "offset"]), [*_EDGE, "weight"]]

    nodes = pd.DataFrame(
        {
            "id": renamed(ids, names),
            "name": renamed(circuit.frame["name"], names),
            "position": circuit.frame["position"],
            "share": share,
        }
    )
    edges = edges.assign(**{end: renamed(edges[end], names) for end in ("source", "target")})
    return ModelCircuit(circuit, nodes, edges)


def _joined(first: pd.DataFrame, second: pd.DataFrame, keys: list[str], value: str) -> pd.DataFrame:
    """Return the rows of either frame with a status and both values, in the order of their size."""
    both = first.astype({key: object for key in keys}).merge(
        second.astype({key: object for key in keys}),
        on=keys,
        how="outer",
        suffixes=("", "_2"),
        indicator="status",
    )
    status = both["status"].map(_STATUSES).astype(object)
    both = both.rename(columns={f"{value}_2": f"grown_{value}"}).assign(status=status)
    order = both[[value, f"grown_{value}"]].abs().max(axis=1)
    both = both.loc[order.sort_values(ascending=False, kind="stable").index]
    both = both[[*keys, "status", value, f"grown_{value}"]].reset_index(drop=True)
    return both.infer_objects()


def _overlap(both: pd.DataFrame, value: str) -> dict[str, float]:
    """Count the rows of two circuits that were joined, and measure their overlap."""
    counts = both["status"].value_counts().reindex(list(_STATUSES.values()), fill_value=0)
    kept, lost, gained = (int(counts[status]) for status in ("kept", "lost", "gained"))
    of_both = both[both["status"] == "kept"]
    ranks = of_both[value].rank().corr(of_both[f"grown_{value}"].rank()) if kept > 2 else np.nan
    sizes: dict[str, float] = {"first": kept + lost, "second": kept + gained}
    sizes |= {"kept": kept, "lost": lost, "gained": gained}
    return sizes | {"jaccard": kept / len(both) if len(both) else 1.0, "rank_correlation": ranks}


def _intervals(
    models: Sequence[Any],
    contrast: Contrast,
    alignment: Alignment,
    sizes: ComparisonSizes,
    progress: bool,
) -> list[dict[str, float]]:
    """Return, for each pair of models, the interval of the Jaccard index of nodes."""
    n_pairs, columns = len(models) - 1, ("jaccard_low", "jaccard_high")
    if not sizes.resamples:
        return [dict.fromkeys(columns, np.nan)] * n_pairs
    require_resamples(len(contrast), as_metric(contrast.metric))
    indices = list[list[float]]()
    for number, (half, _) in enumerate(random_halves(len(contrast), sizes.resamples, sizes.seed)):
        labels = [progress and f"half {number + 1} of {sizes.resamples}"] * len(models)
        circuits = _discover(models, contrast[half.tolist()], alignment, sizes, labels)
        nodes = [set(renamed(site_ids(circuit.frame), names)) for circuit, names in circuits]
        indices.append([_jaccard(*both) for both in pairwise(nodes)])
    low, high = np.quantile(indices, _TAILS, axis=0)
    return [dict(zip(columns, ends, strict=True)) for ends in zip(low, high, strict=True)]


def _jaccard(first: set[str], second: set[str]) -> float:
    union = first | second
    return len(first & second) / len(union) if union else 1.0
