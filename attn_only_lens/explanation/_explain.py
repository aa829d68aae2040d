"""Explain in one call why a metric differs between two prompts.

Secant attribution ranks all sites. A search finds a small circuit that keeps most of the
difference. An attribution graph of the circuit's own run shows how it does so: how its sites affect
each other and the metric. The circuit's sites, and all others whose effect may be large by one of
several estimates, are also patched one by one, which gives their exact effects.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attn_only_lens.arguments import POSITIVE, SHARE, a_type
from attn_only_lens.circuits._attribution_graph import attribution_graph
from attn_only_lens.circuits._discover import discover
from attn_only_lens.circuits._evaluate import evaluate
from attn_only_lens.circuits.search import Search
from attn_only_lens.engine.answers import WRONG
from attn_only_lens.engine.contrast import Contrast, contrast_reasons
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import as_metric
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.model_state import unchanged
from attn_only_lens.engine.multipliers import float32_slopes, run_both
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import (
    PositionSet,
    aligned,
    column_reasons,
    missing_role_reasons,
    resolve_positions,
    token_columns,
)
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.sites import Sites
from attn_only_lens.errors import InputError
from attn_only_lens.explanation.explanation import Explanation
from attn_only_lens.explanation.node_descriptions import describe_nodes
from attn_only_lens.explanation.strong_sites import may_be_strong, single_effects
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
    held_out: Contrast | None = None,
    faithfulness: float = 0.9,
    most_nodes: int = 60,
    strong: float = 0.1,
    search: Search = Search(),
    work: Work = Work(),
) -> Explanation:
    """Explain why a metric differs between a clean and a corrupted prompt.

    A site is a head or neuron at one position. If several pairs of prompts have roles, it is a head
    or neuron at a role, and tokens without a role stay as in the clean run. To choose positions or
    roles, use `discover` and `attribution_graph` instead. The circuit is found by `discover`.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
        contrast: the two runs and the metric; see `Contrast`. Without roles, prompts must have
            the same length.
        held_out: more pairs, which are not used to find the circuit, but to say what it keeps
            there. They have the same roles or, without roles, the same length.
        faithfulness: the share of the difference that the circuit must keep; see `discover`.
        most_nodes: the largest number of sites in the graph; sites with the largest shares are
            kept, and the others are summed into one node, "rest".
        strong: all sites whose effect may be this share of the difference or more are patched one
            by one, in both directions. Those whose effect is, are in the table and on the page,
            also if they are not in the circuit. The circuit's sites are always patched.
        search: how a circuit is searched for, and compared with random circuits; see `Search`.
            With `resamples`, the page shows how stable each node is.
        work: how the search is run, and the folder from which it resumes; see `discover`.

    Raises:
        InputError: with every reason: invalid numbers or contrast; before anything is run,
            prompts of different lengths without roles.
        UnsupportedModelError: the model has an operation without a secant rule
            (`engine/secants.py`).

    Example:
        >>> from attn_only_lens import Contrast, explain, expose_neuron_heads
        >>> from attn_only_lens import load, patching as p
        >>> model = expose_neuron_heads(load("small-english"), copy=True).model
        >>> why = explain(model, Contrast("The keys near the cabinet", "The key near the cabinet",
        ...                               p.logit_diff(" are", " is")))
        >>> why.circuit.faithfulness > 0.9, why.table()["id"][0]
        (True, 'L3H3@5')
    """
    reasons = reasons_not_to_run(model) + contrast_reasons(contrast)
    reasons += work_reasons(work, "batch_size", "share")
    reasons += POSITIVE.reasons(most_nodes=most_nodes) + SHARE.reasons(strong=strong)
    if not isinstance(search, Search):
        reasons.append(f"got {a_type(search)} as search; expected circuits.Search(…)")
    InputError.raise_if(reasons, _PROBLEM)
    pair, metric = contrast.pair(model), contrast.metric
    quiet = replace(work, progress=False, resume=None)
    with InputError.collected(reasons):
        by_role = contrast.roles and len(contrast) > 1
        sites = Sites(positions="roles" if by_role else aligned(pair, "each", others=()))
        places = resolve_positions(pair, sites.positions)
        if held_out is not None:
            reasons += _reasons_against(held_out, contrast, model, pair, places)
    InputError.raise_if(reasons, _PROBLEM)
    with unchanged(model), float32_slopes(model, pair, metric):
        run_both(model, pair, decomposed=True)  # kept for the steps below
        estimate = Estimate("secant", budget=0, split=True)
        whole = attribution(model, contrast, sites=sites, method=estimate, work=quiet)
        circuit = discover(
            *(model, contrast), faithfulness=faithfulness, sites=sites, search=search, work=work
        )
        held = None if held_out is None else evaluate(model, circuit, held_out, work=quiet)
        graph = attribution_graph(model, contrast, sites=circuit)
        graph = graph.prune(top=most_nodes) if len(graph.heads) > most_nodes else graph
        candidates, unpatched = may_be_strong(model, contrast, sites, whole, strong, quiet)
        ids = list(dict.fromkeys([*graph.heads["id"].astype(str), *candidates]))
        patched = Sites(ids)
        if graph.roles:  # all roles together, because each token belongs to one of them
            heads = list(dict.fromkeys(site.partition("@")[0] for site in ids))
            patched = Sites(heads, circuit.candidates.positions)
        patches = {
            direction: activation_patch(
                *(model, contrast), sites=patched, direction=direction, work=quiet
            )
            for direction in ("denoise", "noise")
        }
        largest = single_effects(patches).abs().max(axis=1).drop(graph.heads["id"])
        outside = largest[largest >= strong] * (whole.clean_value - whole.corrupted_value)
        answers, does, labels, shown = describe_nodes(model, pair, metric, graph, outside, places)
        return Explanation(
            *(whole, circuit, graph, patches, answers, does, labels, shown, model, contrast),
            *(strong, unpatched, held),
        )


def _reasons_against(
    held_out: Contrast,
    contrast: Contrast,
    model: Any,
    pair: PromptPair,
    places: Sequence[PositionSet],
) -> list[str]:
    """Return every reason why held-out pairs cannot test a circuit with sites at these places."""
    reasons = contrast_reasons(held_out)
    if not reasons:
        with InputError.collected(reasons):
            other, names = held_out.pair(model), [place.label for place in places]
            roles = [name for name in names if isinstance(name, str)]
            if missing := missing_role_reasons(other.roles, roles, "circuit"):
                reasons += missing
            elif roles:
                resolve_positions(other, roles)
            else:
                reasons += column_reasons(other, token_columns(pair))
            if n_shared := len(_token_rows(other) & _token_rows(pair)):
                reasons.append(
                    f"got {n_shared} of the pairs that find the circuit; expected others"
                )
        kinds = [as_metric(side.metric) for side in (held_out, contrast)]
        if kinds[0].make is not kinds[1].make:
            reasons.append(f"got {kinds[0].name}; expected a metric like {kinds[1].name}")
    return [f"held_out: {reason}" for reason in reasons]


def _token_rows(pair: PromptPair) -> set[tuple[tuple[int, ...], ...]]:
    """Return the tokens of both prompts of each pair, without padding."""
    return {
        tuple(tuple(side[row][real].tolist()) for side in (pair.clean, pair.corrupted))
        for row, real in enumerate(pair.real)
    }
