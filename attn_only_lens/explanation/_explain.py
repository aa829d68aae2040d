"""Explain in one call why a metric differs between two prompts.

Secant attribution ranks all sites. A search finds a small circuit that keeps most of the
difference. An attribution graph of the difference shows how the circuit's sites affect each other.
The strongest sites are also patched one by one, which gives their exact effects.
"""

from typing import Any

from attn_only_lens.arguments import POSITIVE, RESAMPLES
from attn_only_lens.circuits._attribution_graph import attribution_graph
from attn_only_lens.circuits._discover import discover
from attn_only_lens.engine.answers import WRONG
from attn_only_lens.engine.multipliers import float32_slopes
from attn_only_lens.engine.input_warnings import warned_once
from attn_only_lens.engine.metrics import AnyMetric
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import unlike_tokens
from attn_only_lens.engine.prompts import Prompts, prompt_pair
from attn_only_lens.errors import InputError
from attn_only_lens.explanation.explanation import Explanation
from attn_only_lens.explanation.node_descriptions import describe_nodes
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._attribution import attribution
from attn_only_lens.precision import full_precision


@one_thread_per_model
@warned_once(WRONG)
@full_precision()
def explain(
    model: Any,
    clean: Prompts,
    corrupted: Prompts,
    metric: AnyMetric,
    *,
    faithfulness: float = 0.9,
    most_nodes: int = 60,
    n_patched: int = 20,
    resamples: int = 0,
    progress: bool = True,
) -> Explanation:
    """Explain why a metric differs between a clean and a corrupted prompt.

    A site is a head or neuron at one position. To choose positions or roles, use `discover` and
    `attribution_graph` instead. The circuit is found by `discover`, with its default search method.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads, without user-added hooks.
        clean: a text, a list of texts of the same length, or tokens [batch, pos].
        corrupted: the corrupted prompts, with the same number of tokens.
        metric: `logit_diff(...)` or another metric, or a differentiable function of logits.
        faithfulness: the share of the difference that the circuit must keep; see `discover`.
        most_nodes: the largest number of sites in the graph; sites with the largest shares are
            kept.
        n_patched: how many of the strongest sites are patched exactly, in both directions.
        resamples: as in `discover`; the page then shows how stable each node is.
        progress: whether to show a progress bar for the search.

    Raises:
        InputError: with every reason: invalid numbers, prompts or metric.
        UnsupportedModelError: the model has an operation without a secant rule
            (`engine/secants.py`).

    Example:
        >>> from attn_only_lens import explain, expose_neuron_heads, patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.small_english(), copy=True).model
        >>> why = explain(model, "The keys near the cabinet", "The key near the cabinet",
        ...               p.logit_diff(" are", " is"))
        >>> why.circuit.faithfulness > 0.9, why.table()["id"][0]
        (True, 'L3H3@5')
    """
    reasons = POSITIVE.reasons(most_nodes=most_nodes, n_patched=n_patched)
    reasons += RESAMPLES.reasons(resamples=resamples)
    InputError.raise_if(reasons, "nothing can be explained")
    prompts, pair = (model, clean, corrupted, metric), prompt_pair(model, clean, corrupted)
    if reason := unlike_tokens(model, pair):
        reason += "; expected prompts of the same length, or discover(…, positions=task.roles)"
        raise InputError([reason], "nothing can be explained")
    with float32_slopes(model, pair, metric):
        whole = attribution(*prompts, method="secant", budget=0, split=True, progress=False)
        search: dict[str, Any] = {"faithfulness": faithfulness, "resamples": resamples}
        circuit = discover(*prompts, **search, progress=progress)
        shares = whole.to_frame().set_index(["name", "position"])["score"]
        keys = list(zip(circuit.frame["name"], circuit.frame["position"], strict=True))
        keys = sorted(keys, key=lambda key: -abs(float(shares[key])))[:most_nodes]
        sites = [f"{name}@{position}" for name, position in keys]
        graph = attribution_graph(model, clean, metric, corrupted=corrupted, sites=sites)
        some = keys[:n_patched]
        options: dict[str, Any] = {"positions": sorted({int(position) for _, position in some})}
        options |= {"sites": list(dict.fromkeys(str(name) for name, _ in some)), "progress": False}
        ways = ("denoise", "noise")
        patches = {way: activation_patch(*prompts, direction=way, **options) for way in ways}
        what = describe_nodes(model, pair, metric, graph)
        return Explanation(whole, circuit, graph, patches, *what, model, clean, corrupted)
