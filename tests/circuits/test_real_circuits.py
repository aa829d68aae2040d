"""Tests of circuits in real models trained by others: sums, curves, and sufficient circuits."""

import pytest
import torch
from common import needs_hooked_transformer

from attn_only_lens import convert
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph, discover, faithfulness
from attn_only_lens.heads import HeadName
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = [
    needs_hooked_transformer,
    # The answers are the models' most probable tokens, however these are spelled.
    pytest.mark.filterwarnings("ignore::attn_only_lens.errors.InputWarning"),
]
POS = 9  # maximal number of tokens in a prompt


@torch.no_grad()
def task(model, tokens):
    """Return two prompts with different most probable next tokens, and these tokens."""
    prompts = tokens[:50, :POS]
    said = model(prompts)[:, -1].argmax(-1)
    index = int((said != said[0]).nonzero()[0])
    return prompts[:1], prompts[index : index + 1], (int(said[0]), int(said[index]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_graphs_add_up_to_the_metric(real, dtype):
    model, tokens, _ = real
    model.to(dtype, print_details=False)
    clean, _, answers = task(model, tokens)
    graph = attribution_graph(convert(model), clean, p.logit_diff(*answers), top=97)
    with torch.no_grad():
        logits = model(clean)[0, -1]
    # The terms of the sums cancel, so the tolerance is relative to the terms.
    size = graph.edges.query("kind == 'value' and target == 'metric'")["weight"].abs().sum()
    allowed = LOGIT_TOLERANCE[dtype] * size
    assert graph.value == pytest.approx(float(logits[answers[0]] - logits[answers[1]]), abs=allowed)
    expected = graph.nodes.set_index("id")["attribution"]
    into = graph.inflow()
    assert into["metric"] == pytest.approx(graph.value, abs=allowed)
    assert (into - expected.reindex(into.index)).abs().max() <= allowed
    # Control: without the edges from the heads and neurons left out, the sums do not hold.
    left = graph.edges.query("kind == 'value' and source != 'rest'").groupby("target")["weight"]
    assert abs(left.sum()["metric"] - graph.value) > 10 * allowed or graph.mass == 1


def test_curves_beat_random_circuits_and_what_suffices_does(real):
    model, tokens, _ = real
    model.to(torch.float64, print_details=False)
    clean, corrupted, answers = task(model, tokens)
    metric = p.logit_diff(*answers)
    converted = convert(model, copy_weights=True)
    ranking = p.attribution(converted, clean, corrupted, metric, direction="noise")
    shares = (0.01, 0.05, 0.2, 0.5, 1.0)
    curve = faithfulness(converted, clean, corrupted, metric, ranking, shares=shares, n_random=2)
    assert curve.frame["faithfulness"].iloc[-1] == pytest.approx(1, abs=1e-9)
    assert curve.cmd < 0.7 * curve.random_cmd
    circuit = discover(converted, clean, corrupted, metric, faithfulness=0.8, n_random=2)
    assert abs(1 - circuit.faithfulness) <= 0.2
    assert len(circuit) < 0.5 * circuit.n_sites
    assert all(abs(1 - value) > 0.2 for value in circuit.random)
    expected = measured(model, clean, corrupted, answers, circuit)
    assert circuit.faithfulness == pytest.approx(expected, abs=1e-8)


@torch.no_grad()
def measured(model, clean, corrupted, answers, circuit):
    """Return the faithfulness by hooks on the source model, which has no neuron-heads."""
    _, cache = model.run_with_cache(corrupted)
    kept = {}
    for name, position in circuit.frame[["name", "position"]].to_numpy():
        head = HeadName.parse(name)
        part = "attn.hook_z" if head.kind == "attention" else "mlp.hook_post"
        kept.setdefault(f"blocks.{head.layer}.{part}", []).append((position, head.index))

    def difference(keeping):
        def hook(value, hook):
            put = cache[hook.name].clone()
            for position, index in keeping.get(hook.name, ()):
                put[:, position, index] = value[:, position, index]
            return put

        names = lambda name: name.endswith(("attn.hook_z", "mlp.hook_post"))  # noqa: E731
        logits = model.run_with_hooks(clean, fwd_hooks=[(names, hook)])[0, -1]
        return float(logits[answers[0]] - logits[answers[1]])

    logits = model(clean)[0, -1]
    whole, nothing = float(logits[answers[0]] - logits[answers[1]]), difference({})
    return (difference(kept) - nothing) / (whole - nothing)
