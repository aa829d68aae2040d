"""Tests that graphs of one run have circuit-tracer's edges, with heads and skip nodes added.

circuit-tracer (Hanna et al., 2025; Ameisen et al., "Circuit Tracing", 2025) runs a model in which
attention patterns and the denominators of norms are detached, the errors are constants, and the
features' activations are leaves. Its edge from s to t is the output of s, times the gradient of
the pre-activation of t (or of a logit) at this output:

    A[t, s] = (∂ q_t / ∂ stream) · (∂ stream / ∂ out_s) · written_s

A feature writes z_s W_dec[s], an error its vector, a token its embedding. `Tracer` below is this
method in a few lines, from the weights and a TransformerLens cache, without attn_only_lens.
(circuit-tracer 0.5.0: `attribution/context_transformerlens.py`, `_compute_score_hook` is
the product with the gradient, `compute_batch` injects the encoder's vector, not scaled by the
activation of t; `_configure_gradient_flow` detaches; W_skip passes gradients on.)

To derive its edges from ours, let c_t be the gradient of the metric at z_t, which is the column
`gradient` of our nodes. The gate of an active feature is 1, so the gradient at q_t is c_t, too.

1. In our graphs, heads and skip nodes are nodes. So our edge from s to t is c_t · D[t, s], with
   D the part of A that passes through no head and no W_skip: A with their outputs held fixed, too.
2. The paths through heads and skip nodes are in the attributions: that of every node s is
   Σ_t c_t A[t, s] + A[metric, s].
"""

import pytest
import torch
from drawn_transcoders import imitated, layers_of, three_layers

from attn_only_lens import Contrast, HeadName
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph
from attn_only_lens.transcoders import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens and transformers

CORRECT, WRONG = 7, 11
PROMPT = torch.tensor([[3, 17, 5, 29, 13]])
N_POS = PROMPT.shape[1]


ROUNDING = 1e-9
OPTIONS = {"jumprelu with skip": {"skip": True}, "topk": {"activation": "topk"}}


def normed(norm, x, scale):
    """Apply a LayerNorm whose denominator is a constant of the run."""
    inner = norm.original_component
    x = (x - x.mean(-1, keepdim=True)) / scale
    return x * inner.weight.detach() + inner.bias.detach()


class Tracer:
    """circuit-tracer's graph of a model without transcoders, computed with given transcoders."""

    def __init__(self, model, transcoders, direct):
        """Record one run. With `direct`, the outputs of heads and of W_skip are constants, too."""
        self.transcoders, self.direct = transcoders, direct
        with torch.no_grad():
            cache = model.run_with_cache(PROMPT)[1]
        self.embedding = cache["blocks.0.hook_in"][0].clone()
        self.leaves = [self.embedding.requires_grad_()]
        self.reads, self.nodes = [], {}
        x = self.embedding
        for pos in range(N_POS):
            self.nodes[f"embed@{pos}"] = 0, pos, self.embedding[pos].detach()
        for layer, block in enumerate(model.blocks):
            name = f"blocks.{layer}"
            entered = normed(block.ln1, x, cache[f"{name}.ln1.hook_scale"][0])
            x = x + self.attention(block.attn, cache[f"{name}.attn.hook_pattern"][0], entered)
            entered = normed(block.ln2, x, cache[f"{name}.ln2.hook_scale"][0])
            self.reads.append(entered)
            out = cache[f"{name}.mlp.hook_out"]
            x = x + self.transcoder(layer, entered, out[0].detach())
        logits = normed(model.ln_final, x, cache["ln_final.hook_scale"][0])[-1] @ model.W_U.detach()
        self.logit = logits[CORRECT] - logits[WRONG]
        with torch.no_grad():
            expected = model(PROMPT)[0, -1]
        difference = expected[CORRECT] - expected[WRONG]
        assert torch.allclose(self.logit, difference, atol=1e-9)  # control of this tracer

    def held(self, x):
        return x.detach() if self.direct else x

    def attention(self, attn, pattern, entered):
        W_V, W_O = attn.W_V.detach(), attn.W_O.detach()
        b_V = attn.b_V.detach().reshape(W_V.shape[0], 1, -1)
        values = torch.einsum("kd,hde->hke", entered, W_V) + b_V
        out = torch.einsum("hqk,hke,hed->qd", pattern.detach(), values, W_O)
        return self.held(out + attn.b_O.detach())

    def transcoder(self, layer, entered, out):
        """Return the MLP's output, and add the nodes that write it."""
        transcoder = self.transcoders[layer]
        x = entered.detach()
        y, z = imitated(x, transcoder)
        for pos, feature in z.nonzero().tolist():
            vector = z[pos, feature] * transcoder.W_dec[feature]
            self.nodes[f"L{layer}F{feature}@{pos}"] = layer + 1, pos, vector
        for pos in range(N_POS):
            self.nodes[f"L{layer}E@{pos}"] = layer + 1, pos, out[pos] - y[pos]
        skip = 0.0 if transcoder.W_skip is None else x @ transcoder.W_skip
        leaf = (out - skip).requires_grad_()  # features, b_dec and the error
        self.leaves.append(leaf)
        if transcoder.W_skip is None:
            return leaf
        return leaf + self.held(entered @ transcoder.W_skip)

    def row(self, target):
        """Return the edges into a feature, or into the logit difference."""
        if target == "metric":
            value = self.logit
        else:
            name, pos = target.split("@")
            head = HeadName.parse(name)
            W_enc = self.transcoders[head.layer].W_enc
            value = self.reads[head.layer][int(pos)] @ W_enc[:, head.index]
        gradients = torch.autograd.grad(value, self.leaves, retain_graph=True, allow_unused=True)
        return {
            name: 0.0 if gradients[leaf] is None else (gradients[leaf][pos] @ vector).item()
            for name, (leaf, pos, vector) in self.nodes.items()
        }

    def rows(self):
        targets = [name for name in self.nodes if "F" in name]
        return {target: self.row(target) for target in [*targets, "metric"]}


@pytest.fixture(scope="module", params=OPTIONS)
def traced(request):
    """Return our graph, and the rows of `Tracer` without and with paths through heads."""
    model = three_layers()
    transcoders = layers_of(model, **OPTIONS[request.param])
    rows = {direct: Tracer(model, transcoders, direct).rows() for direct in (True, False)}
    contrast = Contrast(PROMPT, None, p.logit_diff(CORRECT, WRONG))
    with attach(model, transcoders):
        return attribution_graph(model, contrast, mass=1, patterns=False), rows


def scales(graph):
    """Return c_t of each feature that affects the metric, and 1 for the metric."""
    gradients = graph.nodes.set_index("id")["gradient"]
    return gradients[gradients.notna()].to_dict() | {"metric": 1.0}


def effect(rows, c, source):
    """Return Σ_t c_t A[t, source] over targets and the metric, and Σ_t |c_t A[t, source]|."""
    terms = [scale * rows[target][source] for target, scale in c.items()]
    return sum(terms), sum(map(abs, terms))


def test_edges_that_pass_no_head(traced):
    """Point 1: each of our edges is circuit-tracer's without paths through heads."""
    graph, rows = traced
    edges = graph.edges[graph.edges["kind"] == "value"].set_index(["target", "source"])["weight"]
    c, n = scales(graph), 0
    for target in c:
        row = rows[True][target]
        actual = edges.loc[target].to_dict()
        largest = max(abs(c[target] * value) for value in row.values())
        for source, value in row.items():
            assert abs(actual.get(source, 0.0) - c[target] * value) <= ROUNDING * largest
            n += value != 0
        others = {name for name in actual if name not in row}
        assert all("H" in x or "S" in x or x in ("bias", "rest") for x in others)
    assert n > 400


def test_attributions(traced):
    """Point 2: attributions are sums over targets."""
    graph, rows = traced
    attributions = graph.nodes.set_index("id")["attribution"]
    for source in rows[False]["metric"]:
        total, size = effect(rows[False], scales(graph), source)
        assert abs(attributions.get(source, 0.0) - total) <= 10 * ROUNDING * size
