"""Explain in one call why a metric differs between two prompts.

Secant attribution ranks all sites. A search finds a small circuit that keeps most of the
difference. An attribution graph of the circuit's own run shows how it does so: how its sites affect
each other and the metric. The strongest sites are also patched one by one, which gives their exact
effects.
"""

from dataclasses import replace
from typing import Any

from attn_only_lens.arguments import POSITIVE
from attn_only_lens.circuits._attribution_graph import attribution_graph
from attn_only_lens.circuits._discover import discover
from attn_only_lens.circuits.search import Search
from attn_only_lens.engine.answers import WRONG
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.multipliers import float32_slopes, run_both
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import each_in_turn, resolve_positions
from attn_only_lens.engine.sites import Sites
from attn_only_lens.errors import InputError
from attn_only_lens.explanation.explanation import Explanation
from attn_only_lens.explanation.node_descriptions import describe_nodes
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._attribution import attribution
from attn_only_lens.patching.estimate import Estimate
from attn_only_lens.precision import full_precision
from attn_only_lens.work import Work, work_reasons

_PROBLEM = "nothing can be explained"


@one_thread_per_model
@warned_once(WRONG)
@full_precision()
def explain(
    model: Any,
    contrast: Contrast,
    *,
    faithfulness: float = 0.9,
    most_nodes: int = 60,
    n_patched: int = 20,
    resamples: int = 0,
    work: Work = Work(),
) -> Explanation:
    """Explain why a metric differs between a clean and a corrupted prompt.

    A site is a head or neuron at one position. If several pairs of prompts have roles, it is a head
    or neuron at a role, and tokens without a role stay as in the clean run. To choose positions or
    roles, use `discover` and `attribution_graph` instead. The circuit is found by `discover`, with
    its default search method.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
        contrast: the two runs and the metric; see `Contrast`. Without roles, prompts must have
            the same length.
        faithfulness: the share of the difference that the circuit must keep; see `discover`.
        most_nodes: the largest number of sites in the graph; sites with the largest shares are
            kept, and the others are summed into one node, "rest".
        n_patched: how many of the strongest sites are patched exactly, in both directions.
        resamples: as in `Search`; the page then shows how stable each node is.
        work: how the search is run; see `discover`.

    Raises:
        InputError: with every reason: invalid numbers or contrast; before anything is run,
            prompts of different lengths without roles.
        UnsupportedModelError: the model has an operation without a secant rule
            (`engine/secants.py`).

    Example:
        >>> from attn_only_lens import Contrast, explain, expose_neuron_heads
        >>> from attn_only_lens import patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.small_english(), copy=True).model
        >>> why = explain(model, Contrast("The keys near the cabinet", "The key near the cabinet",
        ...                               p.logit_diff(" are", " is")))
        >>> why.circuit.faithfulness > 0.9, why.table()["id"][0]
        (True, 'L3H3@5')
    """
    reasons = contrast_reasons(contrast) + work_reasons(work, "batch_size", "resume")
    reasons += POSITIVE.reasons(most_nodes=most_nodes, n_patched=n_patched)
    with InputError.collected(reasons):
        search = Search(resamples=resamples)
    InputError.raise_if(reasons, _PROBLEM)
    pair, metric, quiet = contrast.pair(model), contrast.metric, replace(work, progress=False)
    with InputError.collected(reasons):
        by_role = contrast.roles and len(contrast) > 1
        sites = Sites(positions="roles" if by_role else each_in_turn(pair))
        places = resolve_positions(pair, sites.positions)
    InputError.raise_if(reasons, _PROBLEM)
    with float32_slopes(model, pair, metric):
        run_both(model, pair, decomposed=True)  # kept for the steps below
        estimate = Estimate("secant", budget=0, split=True)
        whole = attribution(model, contrast, sites=sites, method=estimate, work=quiet)
        circuit = discover(
            *(model, contrast), faithfulness=faithfulness, sites=sites, search=search, work=work
        )
        graph = attribution_graph(model, contrast, sites=circuit)
        graph = graph.prune(top=most_nodes) if len(graph.heads) > most_nodes else graph
        strongest = graph.heads.sort_values("attribution", key=abs, ascending=False)
        patched = strongest.head(n_patched)
        heads = patched["name"].unique().tolist()
        positions = circuit.candidates.positions
        if not graph.roles:
            positions = sorted(patched["position"].astype(int).unique().tolist())
        patches = {
            direction: activation_patch(
                *(model, contrast), sites=Sites(heads, positions), direction=direction, work=quiet
            )
            for direction in ("denoise", "noise")
        }
        answers, does, labels, shown = describe_nodes(model, pair, metric, graph, places)
        return Explanation(
            whole, circuit, graph, patches, answers, does, labels, shown, model, contrast
        )
