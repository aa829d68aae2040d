"""What the page of a graph says about the graph: its title, and notes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from attn_only_lens.circuits.circuit import Circuit
from attn_only_lens.circuits.graph import PATTERN_KINDS, CircuitGraph
from attn_only_lens.engine.input_warnings import shortened
from attn_only_lens.engine.tokens import joined
from attn_only_lens.heads.names import count_kinds
from attn_only_lens.patching.results import Sweep

_ABOUT_KINDS = {
    "feature": "Features (F) are the units of a transcoder, which imitates the MLP of its layer.",
    "skip": "Skip nodes (S): the input of a transcoder, which W_skip maps linearly to the output.",
    "error": "Error nodes (E): the part of the MLP's output that a transcoder misses.",
    "router": "Routers (R): the weights with which a mixture's experts are multiplied.",
}
_BARS = (
    "Bars: the part of a node's inflow that is drawn, which is the sum of the edges that the page "
    "shows now, without those from 'rest'. If the part that is not drawn has the opposite sign, "
    "this part is negative or above 100%, and the bar compares the sizes of the two."
)
_WHAT_IS_EXACT = {
    direction: f"Exact effect, from running the model: how much the metric {what}."
    for direction, what in {
        "zero": "falls when the node's output is set to zero",
        "mean": "falls when the node's output is set to its mean",
        "resample": "falls when the node's output comes from another prompt",
        "bias": "falls when the neuron attends only to the bias token",
        "noise": "falls when the node's output comes from the corrupted run",
        "denoise": "rises in the corrupted run when the node's output comes from the clean run",
    }.items()
}


def notes_about(graph: CircuitGraph, prompt: int, n_prompts: int) -> list[str]:
    """Return the page's notes about the nodes, prompts and edges of the graph."""
    kinds = set(graph.heads["kind"])
    counts = count_kinds(graph.heads["kind"]) or "none"
    sites, others = f"{len(graph.heads):,} of {graph.n_heads:,}", len(graph.nodes)
    place = "role" if graph.roles else "position"
    notes = [
        f"Nodes: {counts} ({sites} sites; a site is a head or neuron at one {place}), and "
        f"{others - len(graph.heads):,} others for tokens, sums and the metric. The sites have "
        f"{graph.mass:.0%} of the sum of |attribution| over all sites"
        + ("; the other sites are summed into one node, 'rest'." if graph.mass < 1 else ".")
    ]
    if graph.circuit is not None:
        notes.append(_about_circuit(graph, graph.circuit))
    notes += [note for kind, note in _ABOUT_KINDS.items() if kind in kinds]
    if n_prompts > 1:
        notes.append(
            f"Prompts: tokens, attention and written tokens are from prompt {prompt}; attributions "
            f"and edges add up to the mean over {n_prompts} prompts, and values are means."
        )
    if graph.roles:
        notes.append(_about_roles(graph))
    if graph.corrupted:
        notes.append(_about_ways(graph))
    if "rest" in set(graph.edges["source"]):
        notes.append(_BARS + _about_rest(graph))
    return notes


def _about_ways(graph: CircuitGraph) -> str:
    """Say how much goes through patterns, through routing weights and through values."""
    heads = graph.heads[graph.heads["kind"] != "router"]

    def through(*kinds: str) -> npt.NDArray[np.float64]:
        some = graph.edges[graph.edges["kind"].isin(kinds)].groupby("target")["weight"].sum()
        return some.reindex(heads["id"]).fillna(0.0).to_numpy(dtype=np.float64)

    by_pattern, by_routing = through(*PATTERN_KINDS), through("routing")
    by_value = heads["attribution"].to_numpy() - by_pattern - by_routing
    carried = [float(np.abs(x).sum()) for x in (by_pattern, by_routing, by_value)]
    pattern, routing, value = (x / (sum(carried) or 1.0) for x in carried)
    has_routing = "routing" in set(graph.edges["kind"])
    of_routing = f", {routing:.0%} through routing weights" * has_routing
    return (
        "Difference: edges of all kinds add up to attributions. Of these nodes' absolute "
        f"effects, {pattern:.0%} goes through patterns (edges q, k, gate){of_routing} and "
        f"{value:.0%} through values."
    )


def _about_roles(graph: CircuitGraph) -> str:
    """Say what becomes of the tokens without a role."""
    share = share_of_rest(graph)
    through = f"{share:.1%}" if share >= 0.001 else "less than 0.1%" if share else "nothing"
    return (
        "Roles: nodes are at the tokens with a role. Heads and neurons at all other tokens work as "
        "in the model and are never ablated; what passes through them comes from the node 'rest', "
        f"whose edges have {through} of the sum of all |weight|. The attribution of 'rest' itself "
        "is only that of sites at tokens with a role."
    )


def share_of_rest(graph: CircuitGraph) -> float:
    """Return the share of Σ |weight| that edges from "rest" have, of edges that add up."""
    edges = graph.edges[graph.edges["kind"].isin(graph.additive_kinds)]
    sizes = edges["weight"].abs()
    return float(sizes[edges["source"] == "rest"].sum() / (sizes.sum() or 1.0))


def caption(graph: CircuitGraph, prompt: int, n_prompts: int) -> list[str]:
    """Return what a reader of the picture alone has to know about its numbers."""
    what, number = graph.metric, f"{graph.value:.3g}"
    if graph.circuit is not None and _keeps_whole(graph.circuit):
        what = f"the change of {what} from the corrupted run to the run of the circuit alone"
    elif graph.circuit is not None:
        what = f"the change of {what} from the corrupted run to the circuit's own run"
    elif graph.corrupted:
        what = f"the change of {what} from the corrupted to the clean run"
    parts = [
        f"The attribution of a node is the part of {what} ({number}) that passes through it; the "
        "weight of an edge is the part that passes along it."
    ]
    if n_prompts > 1:
        pairs = "pairs of prompts" if graph.corrupted else "prompts"
        parts.append(f"Numbers are means over {n_prompts} {pairs}; tokens are of prompt {prompt}.")
    return parts


def _about_rest(graph: CircuitGraph) -> str:
    """Say how much of the metric the edges from "rest" bring, if the metric has such an edge."""
    whole, from_nodes = (graph.inflow(rest=x)["metric"] for x in (True, False))
    if whole == from_nodes or not whole:
        return ""
    share = round(from_nodes / whole, 2) + 0.0  # adding 0.0 turns -0% into 0%
    return (
        f" With all edges drawn, the metric's part is {share:.0%}; {1 - share:.0%} is from 'rest'."
    )


def _about_circuit(graph: CircuitGraph, circuit: Circuit) -> str:
    """Say what a graph of a circuit's own run explains."""
    every, ablation = _had_all_candidates(circuit), circuit.ablation
    start = "the corrupted run" if ablation == "resample" else "the corrupted tokens, also ablated,"
    return (
        f"Circuit: the graph is of the run of {len(circuit):,} sites"
        f"{' alone' * every}, on the clean tokens, with all other "
        f"{'sites' if every else 'candidates of its search'} ablated ({ablation}). It explains the "
        f"change of {graph.value:.4g} from {start} to this run; "
        + (
            "nothing in it comes from the rest of the model."
            if every
            else "sites that were no candidates work as in the model, and are in the node 'rest'."
        )
    )


def _keeps_whole(circuit: Circuit) -> bool:
    """Return whether what a circuit keeps is a change from the corrupted run to its own run."""
    return circuit.ablation == "resample" and _had_all_candidates(circuit)


def _had_all_candidates(circuit: Circuit) -> bool:
    """Return whether all heads and neurons at all tokens were candidates for a circuit."""
    among = circuit.candidates
    return among.heads == ("all",) and among.layers is None and among.positions in ("each", "all")


def graph_title(graph: CircuitGraph, exact: Sweep, prompt: int, model: Any) -> str:
    """Return the question that a graph of a difference answers, with what is answered."""
    circuit, n = graph.circuit, exact.n_prompts
    head = exact.clean_and_corrupted if circuit is None else what_it_keeps(graph, circuit, exact)
    if graph.roles:
        return f"{head} on {n} pair{'s' * (n > 1)} of prompts"
    bos = getattr(getattr(model, "tokenizer", None), "bos_token", None)
    sides = (
        tokens[tokens[:1] == (bos,) :] for tokens in (graph.tokens[prompt], graph.corrupted[prompt])
    )
    texts = " and ".join(shortened(joined(tokens)) for tokens in sides)
    more = f", and {len(graph.tokens) - 1} more pairs" * (len(graph.tokens) > 1)
    return f"{head}: {graph.metric} after {texts}{more}"


def what_it_keeps(graph: CircuitGraph, circuit: Circuit, exact: Sweep) -> str:
    """Return a circuit's size, and how much of the difference between two runs it keeps."""
    kept, whole, among = graph.value, exact.clean_value - exact.corrupted_value, ""
    if not _keeps_whole(circuit):
        # The circuit keeps a share of another difference: of the change when all sites are ablated.
        whole, among = circuit.whole - circuit.nothing, " that all of them carry"
        among += f" (ablation: {circuit.ablation})" * (circuit.ablation != "resample")
        kept = circuit.faithfulness * whole
    share = round(kept / whole, 2) + 0.0  # adding 0.0 turns -0% into 0%
    sites = f"{len(circuit):,} of {circuit.n_sites:,} sites"
    return f"{sites} keep {kept:.3g} of {'the ' * bool(among)}{whole:.3g}{among} ({share:.0%})"


def what_is_exact(graph: CircuitGraph, exact: Sweep) -> str:
    """Return a note for the page about how exact effects differ from attributions."""
    what = "The attribution is the node's share with unchanged patterns and norm scales."
    if graph.corrupted:
        what = (
            "The attribution divides the difference among all nodes, with slopes taken between the "
            "two runs; if nodes are redundant, patches of one of them differ by direction."
        )
    return f"{_WHAT_IS_EXACT[exact.direction]} {what}"
