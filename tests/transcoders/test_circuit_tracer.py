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

from functools import cache

import bridges
import pytest
import torch
import transformers
from common import D_MLP, D_VOCAB
from drawn_transcoders import drawn, imitated

from attn_only_lens import Contrast, HeadName
from attn_only_lens import patching as p
from attn_only_lens.circuits import attribution_graph
from attn_only_lens.engine.linear_map import of_run
from attn_only_lens.engine.prompts import single_prompts
from attn_only_lens.transcoders import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens and transformers

CORRECT, WRONG = 7, 11
PROMPT = torch.tensor([[3, 17, 5, 29, 13]])
N_POS = PROMPT.shape[1]


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(**bridges.GPT | {"n_layer": 3})
    return bridged(transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager"))


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{"vocab_size": D_VOCAB, "hidden_size": 26, "num_hidden_layers": 3, "head_dim": 14},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": D_MLP},
        max_position_embeddings=17,
    )
    make = transformers.AutoModelForCausalLM.from_config
    return bridged(make(config, attn_implementation="eager"))


def bridged(source):
    return bridges.bridged(bridges.randomise(source.double().eval()))


# name: model, options of the transcoders, rounding; Llama's norms compute in float32
CASES = {
    "gpt2": (gpt2, {"skip": True}, 1e-9),
    "gpt2 topk": (gpt2, {"activation": "topk"}, 1e-9),
    "llama": (llama, {"skip": True}, 1e-5),
}


class Norm:
    """A norm whose denominator is a constant of the run."""

    def __init__(self, norm, scale, centres):
        inner = norm.original_component
        self.gain, bias = inner.weight.detach(), getattr(inner, "bias", None)
        self.bias = 0.0 if bias is None else bias.detach()
        self.scale, self.centres = scale, centres

    def __call__(self, x):
        x = x - x.mean(-1, keepdim=True) if self.centres else x
        return x / self.scale * self.gain + self.bias


class Tracer:
    """circuit-tracer's graph of a model without transcoders, computed with given transcoders."""

    def __init__(self, model, transcoders, direct):
        """Record one run. With `direct`, the outputs of heads and of W_skip are constants, too."""
        self.transcoders, self.direct = transcoders, direct
        with torch.no_grad():
            cache = model.run_with_cache(PROMPT)[1]
        n_layers = len(model.blocks)
        self.embedding = cache["blocks.0.hook_in"][0].clone()
        self.leaves = [self.embedding.requires_grad_()]
        self.reads, self.nodes = [], {}
        x = self.embedding
        for pos in range(N_POS):
            self.nodes[f"embed@{pos}"] = 0, pos, self.embedding[pos].detach()
        centres = "Llama" not in type(getattr(model, "original_model", model)).__name__
        for layer in range(n_layers):
            block, name = model.blocks[layer], f"blocks.{layer}"
            norms = [
                Norm(norm, cache[f"{name}.{key}.hook_scale"][0], centres)
                for key, norm in (("ln1", block.ln1), ("ln2", block.ln2))
            ]
            x = x + self.attention(block.attn, cache[f"{name}.attn.hook_pattern"][0], norms[0](x))
            entered = norms[1](x)
            self.reads.append(entered)
            out = cache[f"{name}.mlp.hook_out"]
            x = x + self.transcoder(layer, entered, out[0].detach())
        last = model.ln_final
        final = Norm(last, cache["ln_final.hook_scale"][0], centres)(x)
        unembed = model.W_U.detach()
        self.logit = (final[-1] @ (unembed[:, CORRECT] - unembed[:, WRONG])).sum()
        assert torch.allclose(
            final[-1] @ unembed + self.bias(model), cache_logits(model)[0, -1], atol=1e-4
        )

    @staticmethod
    def bias(model):
        bias = getattr(model, "b_U", None)
        return 0.0 if bias is None else bias.detach()

    def held(self, x):
        return x.detach() if self.direct else x

    def attention(self, attn, pattern, entered):
        W_V, W_O = attn.W_V.detach(), attn.W_O.detach()
        values = torch.einsum("kd,hde->hke", entered, W_V)
        b_V = getattr(attn, "b_V", None)
        if b_V is not None:
            values = values + b_V.detach().reshape(W_V.shape[0], 1, -1)
        out = torch.einsum("hqk,hke,hed->qd", pattern.detach(), values, W_O)
        b_O = getattr(attn, "b_O", None)
        return self.held(out if b_O is None else out + b_O.detach())

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


@torch.no_grad()
def cache_logits(model):
    return model(PROMPT)


@cache
def case(name):
    make, options, rounding = CASES[name]
    model = make()
    transcoders = {
        layer: drawn(26, seed=layer + 1, **options) for layer in range(len(model.blocks))
    }
    rows = {direct: Tracer(model, transcoders, direct).rows() for direct in (True, False)}
    metric = p.logit_diff(CORRECT, WRONG)
    with attach(model, transcoders):
        graph = attribution_graph(model, Contrast(PROMPT, None, metric), mass=1, patterns=False)
        linear = of_run(model, single_prompts(model, PROMPT), metric, patterns=False)
    return graph, linear, rows, rounding


@pytest.fixture(params=CASES)
def traced(request):
    return case(request.param)


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
    graph, _, rows, rounding = traced
    edges = graph.edges[graph.edges["kind"] == "value"].set_index(["target", "source"])["weight"]
    c, n = scales(graph), 0
    for target in c:
        row = rows[True][target]
        actual = edges.loc[target].to_dict()
        largest = max(abs(c[target] * value) for value in row.values())
        for source, value in row.items():
            assert abs(actual.get(source, 0.0) - c[target] * value) <= rounding * largest
            n += value != 0
        others = {name for name in actual if name not in row}
        assert all("H" in x or "S" in x or x in ("bias", "rest") for x in others)
    assert n > 400


def test_attributions(traced):
    """Point 2: attributions are sums over targets."""
    graph, _, rows, rounding = traced
    attributions = graph.nodes.set_index("id")["attribution"]
    for source in rows[False]["metric"]:
        total, size = effect(rows[False], scales(graph), source)
        assert abs(attributions.get(source, 0.0) - total) <= 10 * rounding * size
