"""Attribution graphs: what each node contributes to a metric, directly and through other nodes.

The table lists the kinds of nodes (`kind`), with an example `id` for each kind:

    embed      embed@3        what enters the first block at position 3
    attention  L5H3@7         an attention head, at the position where it writes
    neuron     L5N1234@7      an MLP neuron, viewed as one or more attention heads
    feature    L5F1234@7      a feature of a transcoder
    skip       L5S@7          the input of a transcoder, which its W_skip maps to the output
    error      L5E@7          what a transcoder misses of the MLP's output; it has no incoming edges
    router     L5R@7          the router of a mixture, at a token that visits other experts in the
                              two runs; it has no incoming edges
    bias       bias           all biases, wherever they are added
    rest       rest           heads and neurons that are not nodes of this graph
    offset     offset         the part of a metric that is not linear in the logits
    metric     metric         the metric

The weights of the edges into a node add up to the node's attribution. The weights of the edges into
"metric" add up to the metric or its change (`engine/linear_map.py`). In a graph of one run, these
sums include only edges of kind "value"; edges of kinds "q", "k" and "gate" estimate, to first
order, how a source affects the metric through the target's pattern or gate. In a graph of a
difference, they include all edges. Pruning preserves these sums: edges from dropped nodes become
edges from "rest". In a graph of a circuit's own run (`own_run.py`), nothing comes from "rest",
unless some sites were no candidates for the circuit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

from attn_only_lens.arguments import POSITIVE, SHARE, one_of
from attn_only_lens.circuits.circuit import Circuit
from attn_only_lens.circuits.export import read_attributes, write_graph
from attn_only_lens.circuits.mib import write_mib_graph
from attn_only_lens.circuits.neuronpedia import write_neuronpedia
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import HEAD_KINDS
from attn_only_lens.heads.names import count_kinds
from attn_only_lens.storage.atomic import AnyPath

if TYPE_CHECKING:
    import networkx as nx

NODE_KINDS = ("embed", *HEAD_KINDS, "bias", "rest", "offset", "metric")
PATTERN_KINDS = ("q", "k", "gate")
EDGE_KINDS = ("value", *PATTERN_KINDS, "routing")
NODE_COLUMNS = ("id", "kind", "layer", "name", "position", "value", "gradient", "attribution")
EDGE_COLUMNS = ("source", "target", "kind", "weight")
Format: TypeAlias = Literal["attn_only_lens", "neuronpedia", "mib"]
FORMATS: tuple[Format, ...] = get_args(Format)
_PROBLEM = "this is not a valid attribution graph"
_Flags: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, repr=False)
class CircuitGraph:
    """An attribution graph. Made by `attribution_graph`.

    Attributes:
        nodes: one row per node. Columns: `id`; `kind`; `layer` (of the original; only for heads and
            neurons); `name`; `position` (missing for bias, rest, offset, metric); `value` (in the
            clean run, the mean over prompts of a neuron's output, or of the norm of a head's output
            or of the embedding); `gradient` (the derivative of the metric with respect to a
            neuron's output; missing for several prompts);
            `attribution` to the mean over prompts; by role also `error`, the standard error.
        edges: one row per nonzero edge. Columns: `source`, `target` (ids), `kind` ("value", "q",
            "k", "gate", "routing"), `weight`; by role also `error`.
        tokens: the tokens of each clean prompt, as strings; by role, the roles.
        metric: the metric's name.
        value: the metric, or its change from the corrupted to the clean run.
        model: the model's name.
        n_layers: the number of layers in the original model.
        n_heads: the number of possible nodes: heads and neurons at all positions.
        mass: the share of Σ |attribution| over all possible nodes that this graph's nodes have.
        corrupted: the tokens of each corrupted prompt; empty for a graph of one run.
        circuit: for a graph of a circuit's own run, the circuit; `value` is then the change from
            the corrupted run to the circuit's own run.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, circuits, convert, load, patching as p
        >>> model = convert(load("modular-addition"))
        >>> one_run = Contrast(torch.tensor([3, 4, 113]), None, p.logit_diff(correct=7, wrong=8))
        >>> graph = circuits.attribution_graph(model, one_run, top=20)
        >>> graph.nodes["kind"].value_counts()[["embed", "metric"]].tolist()
        [3, 1]
        >>> bool(abs(graph.inflow()["metric"] - graph.value) < 1e-4 * abs(graph.value))
        True
    """

    nodes: pd.DataFrame
    edges: pd.DataFrame
    tokens: tuple[tuple[str, ...], ...]
    metric: str
    value: float
    model: str
    n_layers: int
    n_heads: int
    mass: float
    corrupted: tuple[tuple[str, ...], ...] = ()
    circuit: Circuit | None = None

    def __post_init__(self) -> None:
        """Raise an error that lists every inconsistency in the graph."""
        reasons = []
        for what, frame, columns in (
            ("nodes", self.nodes, NODE_COLUMNS),
            ("edges", self.edges, EDGE_COLUMNS),
        ):
            if tuple(frame.columns) not in (columns, (*columns, "error")):
                reasons.append(f"got {what} with {list(frame.columns)}; expected {list(columns)}")
        InputError.raise_if(reasons, _PROBLEM)
        ids = self.nodes["id"]
        reasons += [f"got node {name} twice" for name in ids[ids.duplicated()].unique()[:5]]
        for end in ("source", "target"):
            unknown = sorted(set(self.edges[end]) - set(ids))
            reasons += [f"the {end} {name!r} of an edge is not a node" for name in unknown[:5]]
        reasons += _unknown("node", self.nodes["kind"], NODE_KINDS)
        reasons += _unknown("edge", self.edges["kind"], EDGE_KINDS)
        if self.edges.duplicated(["source", "target", "kind"]).any():
            reasons.append("got an edge twice; expected one edge of each kind between two nodes")
        numbers = [*self.nodes["attribution"], *self.nodes["value"], *self.edges["weight"]]
        if not np.isfinite([*numbers, self.value, self.mass]).all():
            reasons.append("got numbers that are not finite")
        reasons += ["got no node 'metric'"] * ("metric" not in set(ids))
        n_pos = max(map(len, self.tokens), default=0)
        away = ids[self.nodes["position"].notna() & ~self.nodes["position"].between(0, n_pos - 1)]
        reasons += [
            f"got node {name} at a position outside the prompts, which have {n_pos} tokens"
            for name in away[:5]
        ]
        if not 0 <= self.mass <= 1 + 1e-9:  # allow for rounding errors
            reasons.append(f"got mass={self.mass}; expected a share from 0 to 1")
        InputError.raise_if(reasons, _PROBLEM)

    def save(
        self,
        path: str | Path,
        *,
        format: Format = "attn_only_lens",
        labels: Mapping[str, str] = MappingProxyType({}),
        groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
        model: Any = None,
    ) -> None:
        """Write the graph to a JSON file atomically.

        Args:
            path: the file.
            format: "attn_only_lens", which `load` reads back exactly; "neuronpedia", for the
                viewers of Neuronpedia and circuit-tracer (`circuits/neuronpedia.py`); or "mib", for
                the evaluation of the MIB benchmark (`circuits/mib.py`).
            labels: for Neuronpedia, labels by node id, such as `why.labels`; labels of sites that
                are no nodes of this graph are not used, and the metric's label is its name.
            groups: for Neuronpedia, node ids by the name of a group: its supernodes.
            model: for MIB, the model of the graph; only its sizes are checked.

        Raises:
            CheckpointError: the file cannot be written.
            InputError: an option is given for another format, or is wrong; or the format has no
                place for some nodes of the graph.

        Example:
            >>> import tempfile, torch
            >>> from attn_only_lens import Contrast, circuits, convert, load, patching as p
            >>> one_run = Contrast(torch.tensor([3, 4, 113]), None, p.logit_diff(7, 8))
            >>> graph = circuits.attribution_graph(
            ...     convert(load("modular-addition")), one_run, top=20)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     graph.save(f"{folder}/graph.json")
            ...     again = load(f"{folder}/graph.json")
            >>> again.edges.equals(graph.edges)
            True
        """
        reasons = one_of(*FORMATS).reasons(format=format)
        if format != "neuronpedia" and (labels or groups):
            reasons.append(f"got labels or groups with format={format!r}; expected 'neuronpedia'")
        if format != "mib" and model is not None:
            reasons.append(f"got a model with format={format!r}; expected 'mib'")
        InputError.raise_if(reasons, "this graph cannot be written")
        if format == "neuronpedia":
            write_neuronpedia(path, self, labels, groups)
        elif format == "mib":
            write_mib_graph(path, self, model)
        else:
            write_graph(path, vars(self))

    @property
    def additive_kinds(self) -> tuple[str, ...]:
        """The kinds of edges whose weights add up to attributions."""
        return EDGE_KINDS if self.corrupted else ("value",)

    def inflow(self, kind: str | None = None, *, rest: bool = True) -> "pd.Series[float]":
        """Return the sum of the weights of the edges into each node, indexed by node id.

        Args:
            kind: a kind of edge; by default, all kinds that add up to attributions.
            rest: whether to include edges from "rest". The share of each node's inflow that comes
                from nodes of the graph is `graph.inflow(rest=False) / graph.inflow()`. The share is
                negative or above 1 if these nodes and "rest" act against each other.

        Raises:
            InputError: there is no such kind of edge.
        """
        if kind not in (None, *EDGE_KINDS):
            raise InputError([f"got kind={kind!r}; expected one of {EDGE_KINDS}"], "no such edge")
        kinds = self.additive_kinds if kind is None else (kind,)
        of_kind = self.edges[self.edges["kind"].isin(kinds)]
        weights = of_kind["weight"].where(rest | (of_kind["source"] != "rest"), 0.0)
        return weights.groupby(of_kind["target"], observed=True).sum()

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles at which the nodes are, in order; () if the nodes are at positions."""
        return self.tokens[0] if "error" in self.nodes else ()

    @property
    def heads(self) -> pd.DataFrame:
        """The rows of `nodes` for attention heads, neurons, features, and skip and error nodes."""
        return self.nodes[self.nodes["kind"].isin(HEAD_KINDS)]

    def prune(self, *, top: int | None = None, mass: float | None = None) -> "CircuitGraph":
        """Keep the heads and neurons with the largest |attribution|; merge the others into "rest".

        For each kept node, the sum of incoming edge weights does not change.

        Args:
            top: how many heads and neurons to keep.
            mass: the share of Σ |attribution| to keep, with as few heads and neurons as possible.

        Raises:
            InputError: `top` and `mass` are both given, both missing, or invalid.
        """
        heads = self.heads
        sizes = heads["attribution"].abs()
        kept = select_largest(sizes.to_numpy(), top=top, mass=mass)
        dropped = heads.drop(heads.index[kept])
        nodes = self.nodes.drop(dropped.index).reset_index(drop=True)
        nodes.loc[nodes["kind"] == "rest", "attribution"] += dropped["attribution"].sum()
        edges = self.edges[~self.edges["target"].isin(dropped["id"])]
        edges = _through_rest(edges, edges["source"].isin(dropped["id"]).to_numpy())
        left = sizes.iloc[kept].sum() / sizes.sum() if sizes.sum() else 1.0
        return replace(self, nodes=nodes, edges=edges, mass=self.mass * left)

    def prune_edges(self, mass: float | None = None, *, top: int | None = None) -> "CircuitGraph":
        """Keep the edges with the largest |weight| into each node; merge the others into "rest".

        For each node, the sum of incoming edge weights does not change. Edges from "bias" and
        "offset" are always kept.

        Args:
            mass: the share of Σ |weight| to keep, for every node and kind.
            top: how many edges to keep, for every node and kind.

        Raises:
            InputError: `mass` and `top` are both given, both missing, or invalid.
        """
        keep = np.zeros(len(self.edges), dtype=bool)
        for rows in self.edges.groupby(["target", "kind"], observed=True).indices.values():
            sizes = self.edges["weight"].to_numpy()[rows]
            keep[rows[select_largest(np.abs(sizes), top=top, mass=mass)]] = True
        keep |= self.edges["source"].isin(["bias", "offset"]).to_numpy()
        return replace(self, edges=_through_rest(self.edges, ~keep))

    def to_networkx(self) -> "nx.MultiDiGraph[str]":
        """Return a networkx multigraph with node ids as nodes, and edge kinds as edge keys.

        Example:
            >>> import torch
            >>> from attn_only_lens import Contrast, circuits, convert, load, patching as p
            >>> one_run = Contrast(torch.tensor([3, 4, 113]), None, p.logit_diff(7, 8))
            >>> graph = circuits.attribution_graph(
            ...     convert(load("modular-addition")), one_run, top=20)
            >>> graph.to_networkx().nodes["embed@1"]["name"]
            'embed'
        """
        import networkx as nx  # a fifth of the time that `load` takes to import

        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(
            metric=self.metric, value=self.value, model=self.model, tokens=self.tokens
        )
        for row in self.nodes.to_dict("records"):
            attributes = {str(k): v for k, v in row.items() if k != "id" and not pd.isna(v)}
            graph.add_node(row["id"], **attributes)
        for source, target, kind, weight in self.edges[list(EDGE_COLUMNS)].itertuples(index=False):
            graph.add_edge(source, target, key=kind, weight=weight)
        return graph

    def __repr__(self) -> str:
        counts = count_kinds(self.heads["kind"]) or "no heads"
        change = "change of " * bool(self.corrupted)
        return (
            f"CircuitGraph of {self.model}: {change}{self.metric} = {self.value:.4g} by {counts} "
            f"({len(self.heads):,} of {self.n_heads:,} sites, with {self.mass:.0%} of the sum of "
            f"|attribution|), {len(self.edges):,} edges"
        )


def select_largest(
    sizes: npt.NDArray[np.float64], *, top: int | None = None, mass: float | None = None
) -> npt.NDArray[np.int64]:
    """Return indices of the largest entries: `top`, or the smallest number with the share `mass`.

    Indices are sorted. Among equal entries, the first ones are chosen.
    """
    reasons = []
    if (top is None) == (mass is None):
        reasons.append(f"got top={top}, mass={mass}; expected exactly one of the two")
    else:
        reasons += SHARE.reasons(mass=mass) if top is None else POSITIVE.reasons(top=top)
    InputError.raise_if(reasons, "no nodes can be chosen")
    order = np.argsort(-sizes, kind="stable")
    if mass == 1:
        top = len(sizes)
    elif mass is not None:
        reached = np.cumsum(sizes[order])
        top = int(np.searchsorted(reached, mass * reached[-1])) + 1 if len(sizes) else 0
    return np.sort(order[:top])


def _through_rest(edges: pd.DataFrame, dropped: _Flags) -> pd.DataFrame:
    """Merge the dropped edges into the edges from "rest"."""
    dropped = dropped | (edges["source"] == "rest").to_numpy()
    sums = edges[dropped].groupby(["target", "kind"], observed=True)["weight"].sum().reset_index()
    into = sums.assign(source="rest")[list(EDGE_COLUMNS)]
    return pd.concat([edges[~dropped], into], ignore_index=True)


def _unknown(what: str, column: "pd.Series[str]", expected: Iterable[str]) -> list[str]:
    unknown = sorted(set(column) - set(expected))
    return [f"got {what} kind {kind!r}; expected one of {list(expected)}" for kind in unknown]


def read_graph(path: AnyPath) -> CircuitGraph:
    """Read a graph from a file; raise CheckpointError if it holds none, or is damaged."""
    return read_attributes(path, CircuitGraph)
