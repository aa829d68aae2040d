"""Tests of edge scores against plain hooks on the modules of transformers."""

from contextlib import ExitStack

import bridges
import pytest
import torch
from common import tokens

from attn_only_lens import patching as p
from attn_only_lens.circuits import score_edges
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName

pytestmark = pytest.mark.numeric

NODES = ["L0H1", "L0N3", "L1H0", "L1N7"]
N_EDGES = 3 * 1 + 2 + 3 * 3 + 4 + 5  # edges into each of the four nodes, and into the logits
ROUNDING = 1e-6  # relative; norms of transformers compute in float32 in any dtype


class Plain:
    """A Llama of transformers whose heads and neurons are slices of its projections."""

    def __init__(self):
        self.model = bridges.original("llama")
        self.layers = self.model.model.layers
        cfg = self.model.config
        self.width, self.group = cfg.head_dim, cfg.num_attention_heads // cfg.num_key_value_heads

    def out(self, name):
        """Return the output projection of a head or neuron, and its input columns."""
        layer, i = self.layers[int(name[1])], int(name[3:])
        if name[2] == "N":
            return layer.mlp.down_proj, slice(i, i + 1)
        return layer.self_attn.o_proj, slice(i * self.width, (i + 1) * self.width)

    @torch.no_grad()
    def run(self, prompt, edits=None, seen=None):
        """Return logits. `edits` maps a module to an edit of its output or (edit,) of its input."""
        with ExitStack() as stack:
            for module, edit in (edits or {}).items():
                if isinstance(edit, tuple):
                    hook = module.register_forward_pre_hook(lambda m, x, e=edit[0]: (e(x[0]),))
                else:
                    hook = module.register_forward_hook(lambda m, x, y, e=edit: e(y))
                stack.callback(hook.remove)
            for module, kept in (seen or {}).items():
                look = module.register_forward_pre_hook(lambda m, x, k=kept: k.append(x[0].clone()))
                stack.callback(look.remove)
            return self.model(prompt).logits

    def inputs(self, prompt, modules, edits=None):
        seen = {module: [] for module in modules}
        self.run(prompt, edits, seen)
        return [kept[0] for kept in seen.values()]

    def z(self, prompt, name, edits=None):
        module, columns = self.out(name)
        return self.inputs(prompt, [module], edits)[0][..., columns]

    def put(self, prompt, name, z):
        """Return the logits when a head's or neuron's z is replaced."""
        module, columns = self.out(name)

        def edit(x):
            x = x.clone()
            x[..., columns] = z
            return x

        return self.run(prompt, {module: (edit,)})

    def written(self, name, z):
        module, columns = self.out(name)
        return z @ module.weight[:, columns].T

    def through(self, norm, prompt, change):
        """Return a change of a norm's input after the norm, with a fixed scale."""
        (x,) = self.inputs(prompt, [norm])
        scale = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        return change * norm.weight / scale

    def edits(self, prompt, name, kind, change):
        """Return edits of a reader's projections, for a given change of the reader's input."""
        layer, i = self.layers[int(name[1])], int(name[3:])
        if kind == "in":
            more = self.through(layer.post_attention_layernorm, prompt, change)
            modules, columns = (layer.mlp.gate_proj, layer.mlp.up_proj), slice(i, i + 1)
        else:
            more = self.through(layer.input_layernorm, prompt, change)
            modules = (getattr(layer.self_attn, f"{kind[0]}_proj"),)
            group = i if kind == "q" else i // self.group
            columns = slice(group * self.width, (group + 1) * self.width)

        def edit(y, module):
            y = y.clone()
            y[..., columns] += (more @ module.weight.T)[..., columns]
            return y

        return {m: lambda y, m=m: edit(y, m) for m in modules}


def largest(change):
    """Return the largest absolute change at each token, summed over tokens."""
    return float(change.abs().amax(-1).sum())


@torch.no_grad()
def by_hooks(prompts, to):
    """Return `local`, `node` and the exact cut of every edge, one at a time, and output sizes."""
    plain, n_tokens = Plain(), sum(map(len, prompts))
    rows = [row[None] for row in prompts]

    def written(prompt, writer, z=None):
        if writer == "embed":
            return plain.model.model.embed_tokens(prompt) if z is None else z
        return plain.written(writer, plain.z(prompt, writer) if z is None else z)

    def z_of(prompt, name):
        return written(prompt, "embed") if name == "embed" else plain.z(prompt, name)

    parts = ["embed", *NODES]
    means = {n: torch.cat([z_of(x, n)[0] for x in rows]).mean(0) for n in parts}
    put = {n: torch.zeros_like(mean) if to == "zero" else mean for n, mean in means.items()}
    size = {n: max(float(written(x, n).norm(dim=-1).max()) for x in rows) for n in NODES}
    local, node, exact = {}, dict.fromkeys(NODES, 0.0), {}
    for prompt in rows:
        whole = plain.run(prompt)
        for reader in NODES:
            moved = (
                plain.put(prompt, reader, put[reader].expand_as(plain.z(prompt, reader))) - whole
            )
            node[reader] += largest(moved) / n_tokens
        for number, reader in enumerate([*NODES, "output"]):
            for writer in parts[: number + 1]:
                plain_write = written(prompt, writer)
                z = put[writer].expand_as(z_of(prompt, writer))
                change = written(prompt, writer, z) - plain_write
                if reader == "output":
                    moved = plain.through(plain.model.model.norm, prompt, change)
                    cut = largest(moved @ plain.model.lm_head.weight.T) / n_tokens
                    edge = writer, reader, "in"
                    local[edge] = exact[edge] = local.get(edge, 0.0) + cut
                    continue
                for kind in ("q", "k", "value") if "H" in reader else ("in",):
                    edits, edge = plain.edits(prompt, reader, kind, change), (writer, reader, kind)
                    z = plain.z(prompt, reader, edits)
                    first = written(prompt, reader, z) - written(prompt, reader)
                    share = float(first.norm(dim=-1).sum()) / n_tokens
                    local[edge] = local.get(edge, 0.0) + share
                    cut = largest(plain.put(prompt, reader, z) - whole) / n_tokens
                    exact[edge] = exact.get(edge, 0.0) + cut
    return local, node, exact, size


@pytest.fixture(scope="module")
def exposed():
    return bridges.exposed_copy(bridges.boot("llama"))


@pytest.fixture(scope="module")
def prompts():
    return [tokens(3, 1, 5)[0], tokens(5, 1, 3)[0], tokens(7, 1, 5)[0]]


def test_scores_and_cuts_are_those_of_hooks(exposed, prompts):
    """Cover both references, shared keys, gated neurons and prompts of two lengths."""
    expected = {to: by_hooks(prompts, to) for to in ("zero", "mean")}
    for to in (["zero"], ["mean"], ["zero", "mean"]):
        edges = score_edges(exposed, prompts, NODES, to=to, exact=N_EDGES, progress=False)
        assert len(edges) == N_EDGES
        assert edges["score"].is_monotonic_decreasing
        local, node, exact = (
            {key: sum(expected[target][i][key] for target in to) for key in expected[to[0]][i]}
            for i in range(3)
        )
        size = expected["zero"][3]
        for row in edges.itertuples():
            edge = row.writer, row.reader, row.kind
            assert row.local == pytest.approx(local[edge], rel=ROUNDING, abs=1e-12)
            assert row.exact == pytest.approx(exact[edge], rel=ROUNDING, abs=1e-12)
            if row.reader == "output":
                assert row.score == row.local
                continue
            assert row.node == pytest.approx(node[row.reader], rel=ROUNDING, abs=1e-12)
            score = local[edge] * node[row.reader] / size[row.reader]
            assert row.score == pytest.approx(score, rel=ROUNDING, abs=1e-12)
        assert (edges["exact"] > 1e-4).sum() > 20
        # Control: a score is not an exact cut.
        assert (edges["score"] - edges["exact"]).abs().max() > 1e-3


def test_prompts_are_cut_out_of_padding_and_as_many_cuts_are_made_as_asked(exposed, prompts):
    how = {"nodes": NODES, "progress": False}
    edges = score_edges(exposed, prompts, exact=7, **how)
    assert edges["exact"].notna().tolist() == [True] * 7 + [False] * (N_EDGES - 7)
    for left in (True, False):
        padded, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
        for i, row in enumerate(prompts):
            places = slice(7 - len(row), None) if left else slice(len(row))
            padded[i, places], mask[i, places] = row, 1
        again = score_edges(exposed, padded, mask=mask, exact=7, **how)
        assert again.equals(edges)


def test_the_nodes_are_those_of_largest_attribution(exposed, prompts):
    metric = p.custom(lambda logits: logits[:, -1, 7].mean(), name="a logit")
    chosen_prompts = torch.stack([prompts[0], prompts[2]])
    edges = score_edges(exposed, chosen_prompts, metric=metric, top=5, to=["zero"], progress=False)
    chosen = set(edges["reader"]) - {"output"}
    sizes = {}
    for layer in range(2):
        for kind, count in (("H", 2), ("N", bridges.D_MLP)):
            for i in range(count):
                name = f"L{layer}{kind}{i}"
                sizes[name] = slope(exposed, chosen_prompts, name)
    assert chosen == set(sorted(sizes, key=sizes.get)[-5:])


def slope(model, prompt, name):
    """Return Σ |gradient · z| of a logit over tokens, with the gradient in the z of all heads."""
    head, kept = HeadName.parse(name), []

    def keep(z, hook):
        z = z.detach().requires_grad_()
        kept.append(z)
        return z

    with torch.enable_grad(), model.hooks(fwd_hooks=[(head.hook("z", model), keep)]):
        value = model(prompt)[:, -1, 7].mean()
    (gradient,) = torch.autograd.grad(value, kept)
    return float((gradient * kept[0]).detach().sum(-1)[..., head.index].abs().sum())


def test_what_makes_no_sense_is_refused(exposed, prompts):
    def refused(match, *nodes, **how):
        with pytest.raises(InputError, match=match):
            score_edges(exposed, prompts, *nodes, **how)

    refused(r"(?s)to='zero'.*exact=-1.*top=0", NODES, to="zero", exact=-1, top=0)
    refused(r"to=\['zero', 'zero'\]", NODES, to=["zero", "zero"])
    refused("to=3", NODES, to=3)
    refused(r"to=\[\['zero'\]\]", NODES, to=[["zero"]])
    refused("kl compares with another run", metric=p.kl())
    with torch.inference_mode():
        refused(r"torch\.inference_mode", top=7, metric=p.loss())
    refused(r"heads and neurons; pass nodes, or a metric", top=7)
    refused("got both nodes and a metric", NODES, metric=p.loss())
